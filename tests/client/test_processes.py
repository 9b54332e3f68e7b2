"""Workers in separate processes: kill -9, SIGSTOP, SIGTERM, restart. Their output is checked afterwards."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from kafka_marshal import Marshal
from tests.client.conftest import HI, Scene, Worker, wait_until

PARTITIONS, MESSAGES = 4, 400
EVERYTHING = {(partition, offset) for partition in range(PARTITIONS) for offset in range(MESSAGES)}


def handled(*workers: Worker) -> Counter[tuple[int, int]]:
    return Counter(place for worker in workers for place in worker.offsets())


def holders(watcher: Marshal) -> list[str]:
    return sorted(str(lease.client_id) for lease in watcher.world.leases())


def two_at_work(scene: Scene, tmp_path: Path, **options: object) -> tuple[Worker, Worker, Marshal]:
    """Two workers with half of the partitions each; then all messages are published."""
    topic = scene.topic(PARTITIONS)
    watcher = scene.member("watcher")
    a = scene.worker("a", topic, tmp_path, pause_s=0.001, **options)
    b = scene.worker("b", topic, tmp_path, pause_s=0.001, **options)
    wait_until(lambda: holders(watcher) == ["a", "a", "b", "b"], 180)
    scene.publish(topic, PARTITIONS, MESSAGES)
    return a, b, watcher


def test_alo_nothing_is_lost_at_kill_9(scene: Scene, tmp_path: Path) -> None:
    a, b, _ = two_at_work(scene, tmp_path)
    wait_until(lambda: len(a.offsets()) > 100 and len(b.offsets()) > 100)
    a.kill()
    wait_until(lambda: set(handled(a, b)) == EVERYTHING, 180)


def test_alo_a_stopped_worker_is_replaced_and_notices_it(scene: Scene, tmp_path: Path) -> None:
    a, b, watcher = two_at_work(scene, tmp_path)
    wait_until(lambda: len(a.offsets()) > 100 and len(b.offsets()) > 100)
    a.stop()
    before = len(a.lines())
    wait_until(lambda: set(handled(a, b)) == EVERYTHING, 180)
    wait_until(lambda: holders(watcher) == ["b"] * PARTITIONS, 180)
    a.go_on()
    wait_until(lambda: a.offsets("lost"), 60)
    after = [line for line in a.lines()[before:] if line["what"] == "handled"]
    # Messages in flight may be finished; others must not be delivered, as other members have them now.
    assert len(after) <= 8


@pytest.mark.parametrize(("how", "claim_ahead"), [("iteration", False), ("batches", False), ("batches", True)])
def test_amo_nothing_is_repeated_at_kill_9(scene: Scene, tmp_path: Path, how: str, claim_ahead: bool) -> None:
    options = {"delivery": "at-most-once", "batch_size": 20, "claim_ahead": claim_ahead}
    a, b, _ = two_at_work(scene, tmp_path, how=how, **options)
    wait_until(lambda: len(a.offsets()) > 60 and len(b.offsets()) > 60)
    a.kill()
    lasts = {(partition, MESSAGES - 1) for partition in range(PARTITIONS)}
    wait_until(lambda: lasts <= set(handled(a, b)), 180)
    found = handled(a, b)
    assert max(found.values()) == 1
    assert len(EVERYTHING - set(found)) <= 2 * 20


def test_c7_a_restarted_worker_continues_at_once(scene: Scene, tmp_path: Path) -> None:
    topic = scene.topic(PARTITIONS, MESSAGES)
    watcher = scene.member("watcher")
    a = scene.worker("a", topic, tmp_path, pause_s=0.001)
    wait_until(lambda: len(a.offsets()) > 50)
    a.kill()
    again = scene.worker("a", topic, tmp_path)
    wait_until(lambda: set(handled(a, again)) == EVERYTHING, 180)
    instances = {lease.instance_id for lease in watcher.world.leases()}
    assert len(instances) == 1


def test_sigterm_releases_with_offsets(scene: Scene, tmp_path: Path) -> None:
    topic = scene.topic(PARTITIONS, MESSAGES)
    a = scene.worker("a", topic, tmp_path)
    wait_until(lambda: set(handled(a)) == EVERYTHING)
    assert a.terminate() == 0
    leases = scene.member("watcher").world.leases()
    assert [(lease.client_id, lease.stable) for lease in leases] == [(None, MESSAGES - 1)] * PARTITIONS


def test_takeover_after_kill_9_within_two_intervals_and_a_second(scene: Scene, tmp_path: Path) -> None:
    topic = scene.topic(1, MESSAGES)
    a = scene.worker("a", topic, tmp_path, pause_s=0.005)
    wait_until(lambda: len(a.offsets()) > 20)
    b = scene.member("b")
    consumer = b.consumer([topic])
    a.kill()
    died_at = a.lines()[-1]["at"] * 1000
    assert consumer.poll(20) is not None
    lease = b.world.lease(topic, 0)
    assert lease is not None
    assert lease.client_id == "b"
    # Both times are of this machine's clock: log time of the claim, and the dead worker's time.
    assert b.world.log_time - died_at < 2 * HI + 1_000 + HI
