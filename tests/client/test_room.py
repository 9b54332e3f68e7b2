"""G15: at the limit of intervals beyond gaps nothing more is delivered, in all ways of reading, and it is said."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kafka_marshal import Group, GroupConsumer, aio
from kafka_marshal.adapters.memory import MemoryCluster
from kafka_marshal.engine.work.topic_mark import split
from rationalizer import ConfigureGroup, encode
from tests.client.conftest import wait_until
from tests.faults.stories import GROUP, HI, TOPIC, member, memory_cluster

MOST = 6
MESSAGES = 100
#: One interval is the topic's mark.
GAPS = MOST - 1

#: Delivers messages or ranges one after the other, as (first offset, done).
Way = Callable[[Any], Iterator[tuple[int, Callable[[], object]]]]


def configured(cluster: MemoryCluster, most: int) -> None:
    setting = ("max_individual_commits", most)
    cluster.broker.produce("__marshal", 0, encode(ConfigureGroup("i", "o", GROUP, (setting,))))


@pytest.fixture
def cluster() -> MemoryCluster:
    made = memory_cluster(1, MESSAGES)
    configured(made, MOST)
    return made


def polled(consumer: GroupConsumer) -> Iterator[tuple[int, Callable[[], object]]]:
    while not consumer.stopping:
        if (message := consumer.poll(0.05)) is not None:
            yield message.offset(), lambda message=message: consumer.done(message)  # type: ignore[misc]


def consumed(consumer: GroupConsumer) -> Iterator[tuple[int, Callable[[], object]]]:
    while not consumer.stopping:
        for message in consumer.consume(3, 0.05):
            yield message.offset(), lambda message=message: consumer.done(message)  # type: ignore[misc]


def looped(consumer: GroupConsumer) -> Iterator[tuple[int, Callable[[], object]]]:
    for message in consumer:
        yield message.offset(), lambda message=message: consumer.done(message)  # type: ignore[misc]


def batched(consumer: GroupConsumer) -> Iterator[tuple[int, Callable[[], object]]]:
    for batch in consumer.batches(2, 0.05):
        yield batch.first_offset, batch.done


def ranged(consumer: Any) -> Iterator[tuple[int, Callable[[], object]]]:
    while not consumer.stopping:
        for given in consumer.take(2, timeout=0.05):
            yield given.first, lambda given=given: consumer.done([given])  # type: ignore[misc]


@pytest.mark.parametrize("way", [polled, consumed, looped, batched, ranged])
def test_at_the_limit_it_stops_says_so_and_goes_on(
    cluster: MemoryCluster, caplog: pytest.LogCaptureFixture, way: Way
) -> None:
    caplog.set_level(logging.WARNING, "kafka_marshal")
    with member(cluster) as marshal:
        options: Any = {} if way is ranged else {"auto_done": False}
        make: Any = marshal.ranges if way is ranged else marshal.consumer
        with make([TOPIC], mode=Group(), **options) as consumer:
            kept: list[tuple[int, Callable[[], object]]] = []
            offsets: list[int] = []

            def work() -> None:  # every second one is kept
                for number, (first, done) in enumerate(way(consumer)):
                    offsets.append(first)
                    if number % 2:
                        done()
                    else:
                        kept.append((first, done))

            thread = threading.Thread(target=work)
            thread.start()
            try:
                wait_until(lambda: marshal.health().stuck)
                [stuck] = marshal.health().stuck
                assert (stuck.why, stuck.offset) == ("no room", 0)
                assert not marshal.health().ok
                assert "max_individual_commits=N" in stuck.text
                view = consumer._engine.source.view
                wait_until(lambda: (seen := view.progress((TOPIC, 0))) and len(split(seen.ranges).ranges) == GAPS)
                at_limit = len(offsets)
                assert at_limit <= 4 * MOST  # and not all
                for _, done in kept[:]:
                    done()
                wait_until(lambda: len(offsets) > at_limit)
                configured(cluster, 1_000)  # an operator raises it
                wait_until(lambda: offsets[-1] >= MESSAGES - 2)
                wait_until(lambda: not marshal.health().stuck)
                wait_until(lambda: any("goes on" in record.getMessage() for record in caplog.records))
            finally:
                consumer.stop()
                thread.join()
            kept.clear()


def test_it_stops_for_asyncio_too(cluster: MemoryCluster) -> None:
    async def main() -> int:
        async with (
            aio.Marshal.on_cluster(cluster.connect("a"), group_id=GROUP, heartbeat_interval=HI / 1000) as marshal,
            marshal.consumer([TOPIC], mode=Group()) as consumer,
        ):
            kept = []
            while not marshal.health().stuck:
                if (message := await consumer.poll(0.05)) is not None:
                    kept.append(message)
                    if len(kept) % 2 == 0:
                        consumer.done(message)
            return len(kept)

    assert MOST < asyncio.run(asyncio.wait_for(main(), 20)) <= 4 * MOST


def test_run_waits_for_what_is_in_flight(cluster: MemoryCluster) -> None:
    """Each message in flight may become a gap; so it never has more of them than the log keeps."""
    goes_on = threading.Event()
    begun: list[int] = []

    def handle(message: Any) -> None:
        begun.append(message.offset())
        if message.offset() == 0:
            goes_on.wait(20)

    with member(cluster) as marshal, marshal.consumer([TOPIC], mode=Group()) as consumer:
        thread = threading.Thread(target=consumer.run, args=(handle,), kwargs={"order": "none", "concurrency": 3})
        thread.start()
        wait_until(lambda: len(begun) > MOST)
        goes_on.set()
        wait_until(lambda: len(begun) == MESSAGES)
        consumer.stop()
        thread.join()
