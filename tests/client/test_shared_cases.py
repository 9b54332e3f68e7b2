"""Members that share a partition by batches, on a real broker: retention, outages, pauses, handlers that hang."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kafka_marshal import Batches, Marshal, SharedBatch
from kafka_marshal.testing import RunningKafka
from tests.client.conftest import Scene, wait_until


class Loop:
    """A member that handles batches; ``gate``: what it waits for in the middle of each batch."""

    def __init__(self, scene: Scene, name: str, topic: str, each_s: float = 0.0, **options: Any) -> None:
        self.marshal: Marshal = scene.member(name)
        self.consumer = self.marshal.consumer([topic], mode=Batches(), **options)
        self.gate = threading.Event()
        self.gate.set()
        self.each_s = each_s
        self.batches: list[SharedBatch] = []
        #: (offset, delivery count) of what was handled while it was proven to be this member's.
        self.handled: list[tuple[int, int]] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        for batch in self.consumer.batches(max_messages=20):
            self.batches.append(batch)
            self.gate.wait(30)
            for _ in batch if self.each_s else ():
                time.sleep(self.each_s)
            if batch.is_held:
                self.handled += [(message.offset() or 0, batch.delivery_count) for message in batch]
                batch.done()

    @property
    def offsets(self) -> set[int]:
        return {offset for offset, _ in self.handled}

    def close(self) -> None:
        self.gate.set()
        self.marshal.stop()
        self._thread.join(20)


Make = Callable[..., Loop]


@pytest.fixture
def loop(scene: Scene) -> Iterator[Make]:
    made: list[Loop] = []

    def make(name: str, topic: str, **options: Any) -> Loop:
        made.append(Loop(scene, name, topic, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


def holes(marshal: Marshal) -> list[tuple[int, int]]:
    with marshal._driver.condition:
        worlds = marshal._driver.replica.worlds.values()
        return [(x.first, x.last) for world in worlds for lease in world.leases() for x in lease.progress.open]


def two_with_a_batch(scene: Scene, loop: Make) -> tuple[list[Loop], int]:
    """Two members that each have a batch in flight and wait, and how many messages there are."""
    topic, end = scene.topic(1), 0
    members = [loop(name, topic) for name in "ab"]
    for member in members:
        wait_until(member.consumer.assignment)
        member.gate.clear()
    while not all(member.batches for member in members):
        scene.publish(topic, 1, 10)
        end += 10
        time.sleep(0.1)
    return members, end


def test_an_outage_longer_than_two_heartbeat_intervals_with_batches_in_flight(
    scene: Scene, loop: Make, kafka_broker: RunningKafka
) -> None:
    members, end = two_with_a_batch(scene, loop)
    kafka_broker.pause()
    try:
        wait_until(lambda: not any(member.batches[-1].is_held for member in members), 30)
        for member in members:
            assert not member.marshal.health().ok
    finally:
        kafka_broker.resume()
    wait_until(lambda: all(member.marshal.health().ok for member in members), 90)
    wait_until(lambda: all(member.batches[-1].is_held for member in members), 90)
    for member in members:
        member.gate.set()
    wait_until(lambda: set.union(*(member.offsets for member in members)) == set(range(end)), 90)
    wait_until(lambda: holes(members[0].marshal) == [])
    assert Counter(offset for member in members for offset, _ in member.handled) == Counter(range(end))


def test_members_at_a_backlog_hardly_wait_for_the_log(scene: Scene, loop: Make) -> None:
    """Their readers of three coordination partitions bring what is there: else they wait up to a second for a batch."""
    each_s, end = 0.005, 2_400
    topic = scene.topic(1)
    members = [loop(name, topic, each_s=each_s) for name in "abcd"]
    for member in members:
        wait_until(member.consumer.assignment)
    scene.publish(topic, 1, end)
    wait_until(lambda: any(member.handled for member in members))
    began = time.monotonic()
    wait_until(lambda: sum(len(member.handled) for member in members) == end, 90)
    assert time.monotonic() - began < 2 * end * each_s / len(members)
