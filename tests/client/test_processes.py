"""Workers in separate processes: kill -9, SIGSTOP, SIGTERM, restart. Their output is checked afterwards."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from kafka_marshal import Admin, Marshal, Retry
from kafka_marshal.engine.work.copies import Copy
from kafka_marshal.node.coordination_topic import create_topic
from tests.client.conftest import HI, Scene, Worker, wait_until
from tests.client.running import KINDS, QUICK, Crew, Handlers, Running, places, publish

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
    # A worker that lives reports what it loses, as when a slow machine ends a lease; the dead one had a grant, or two.
    assert b.terminate() == 0
    reported = {*a.offsets("unprocessed"), *b.offsets("unprocessed")}
    assert not reported & set(found)
    assert len(EVERYTHING - set(found) - reported) <= 2 * 20


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


# -- A log that was given a retention, and the way to a new one that the error names, on a real broker ------------


#: No second try while the test runs; it is in the log that the message waits for one.
LATER = Retry(5, (60.0, 60.0), durable=True)


def fails_once(message: Any) -> None:
    if message.key().startswith(b"bad"):
        raise ValueError("not today")


def copy(crew: Crew, topic: str) -> Copy:
    """What Kafka's group of the name holds."""
    return Copy.read(*crew.cluster.kafka_group(crew.group, 10).committed.get((topic, 0), (-1, "")))


def test_a_mirror_names_what_it_passes(crew: Crew) -> None:
    """Its offset is the lag that Kafka's tools show; an import reads the metadata."""
    crew.kind = "group"
    topic = crew.topic(1)
    publish(crew, topic, ["a", "bad", "b"])
    member, consumer = crew.consumer("a", topic, mirror_offsets=True)
    running = Running(consumer, Handlers("threads", fails_once), retry=QUICK, park=True)
    wait_until(lambda: [each.first for each in copy(crew, topic).open] == [1], 90, "the mirrored offset")
    assert (copy(crew, topic).offset, copy(crew, topic).position) == (3, 3)
    member.stop()
    running.ended()


@pytest.mark.parametrize("kind", KINDS)
def test_open_and_parked_messages_reach_the_new_log(crew: Crew, kind: str, tmp_path: Path) -> None:
    crew.kind = kind
    topic = crew.topic(1)
    publish(crew, topic, ["a", "bad", "b", "bad too", "c", "d"])  # 1 waits for its next try, 3 is set aside
    old, consumer = crew.consumer("a", topic)
    running = Running(consumer, handlers := Handlers("threads", fails_once), retry=LATER, park=True)
    handlers.await_ended(places(6) - {(0, 1), (0, 3)})
    admin = Admin(crew.bootstrap, topic=crew.coordination)
    wait_until(lambda: len(admin.open_messages(crew.group)) == 2)
    admin.park(crew.group, [(topic, 0, 3)], reason="later")
    crew.cluster.alter_topic(crew.coordination, {"retention.ms": "86400000"}, 20)
    wait_until(lambda: len(copy(crew, topic).open) == 2 and copy(crew, topic).position == 6, 90, "the emergency copy")
    assert copy(crew, topic).offset == 1, "consumers of Kafka's own miss nothing either"
    assert [(each.first, each.reason) for each in copy(crew, topic).open] == [(1, None), (3, "later")]
    [harm] = [each for each in old.health().problems if "harmed" in each]
    assert "with its open messages in the metadata" in harm
    old.stop()
    running.ended()
    old.close()

    crew.coordination = f"{crew.coordination}-new"
    create_topic(crew.cluster, crew.coordination, 3, 10)
    admin = Admin(crew.bootstrap, topic=crew.coordination)
    [move] = admin.import_group(crew.group)
    assert (move.after, move.restored, move.done_ahead) == (6, (1, 3), 0)
    assert [(x.offset, x.reason) for x in admin.open_messages(crew.group)] == [(1, None), (3, "later")]
    again = set[tuple[int, int]]()
    if kind == "claims":
        admin.convert_group(crew.group, "claimed", open_messages="repeat", file=tmp_path / "kept.json")
        again = {(0, 2), (0, 4), (0, 5)}  # what is done behind the first open message
    publish(crew, topic, ["e"])
    _, consumer = crew.consumer("b", topic)
    running = Running(consumer, handlers := Handlers("threads"), retry=LATER, park=True)
    handlers.await_ended({(0, 1), (0, 6)} | again)
    admin.redrive(crew.group, [(topic, 0, 3)])
    handlers.await_ended({(0, 3)})
    assert set(handlers.ended) == {(0, 1), (0, 3), (0, 6)} | again
