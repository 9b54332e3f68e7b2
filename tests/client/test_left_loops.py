"""``consumer.stop()`` ends a consumer's loops; an exception that leaves a loop names the message in flight."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kafka_marshal import Consumer, Group, Marshal, aio
from kafka_marshal.adapters.memory import MemoryCluster
from kafka_marshal.engine.work import delivery
from rationalizer import ReleasingPartition, encode
from tests.client.conftest import wait_until
from tests.faults.stories import GROUP, HI, TOPIC, member, memory_cluster


@pytest.fixture
def cluster() -> MemoryCluster:
    made = memory_cluster(1, 30)
    made.broker.create_topic("other", 1)
    made.broker.produce("other", 0, b"v", b"k" * 100)
    return made


@pytest.fixture
def marshal(cluster: MemoryCluster) -> Iterator[Marshal]:
    with member(cluster) as made:
        yield made


def by_loop(consumer: Consumer) -> Iterator[int]:
    for message in consumer:
        yield message.offset()


def by_poll(consumer: Consumer) -> Iterator[int]:
    while not consumer.stopping:
        if (message := consumer.poll(0.05)) is not None:
            yield message.offset()
            consumer.done(message)


def by_batches(consumer: Consumer) -> Iterator[int]:
    for batch in consumer.batches(5, 0.05):
        yield batch.last_offset
        batch.done()


WAYS = [by_loop, by_poll, by_batches]
Way = Callable[[Consumer], Iterator[int]]


def test_health_says_that_nothing_is_claimed_before_an_evicted_batch_is_back(
    cluster: MemoryCluster, marshal: Marshal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delivery, "OWED_AFTER_MS", 0.0)
    with marshal.consumer([TOPIC]) as consumer:
        batch = next(consumer.batches(5))
        engine = marshal._driver.engine
        lease = engine.book.leases[TOPIC, 0]
        evicted = ReleasingPartition(*engine.ids, TOPIC, 0, lease.epoch, None)
        cluster.broker.produce("__marshal", lease.cp, encode(evicted))
        wait_until(lambda: not marshal.health().ok)
        [problem] = marshal.health().problems
        assert "t [0] was taken away" in problem
        assert "from offset 0 on: nothing is taken up here" in problem
        batch.done()
        wait_until(lambda: marshal.health().ok)


@pytest.mark.parametrize("way", WAYS)
def test_stop_ends_the_loops_of_one_consumer(marshal: Marshal, way: Way) -> None:
    with marshal.consumer([TOPIC]) as consumer, marshal.consumer(["other"]) as other:
        for offset in way(consumer):
            if offset >= 4:
                consumer.stop()
        assert (consumer.stopping, other.stopping, marshal.stopping) == (True, False, False)
        assert other.poll(10) is not None
        marshal.stop()
        assert other.stopping


def test_stop_ends_run_of_one_consumer(marshal: Marshal) -> None:
    with marshal.consumer([TOPIC]) as consumer:
        consumer.run(lambda message: consumer.stop(), concurrency=1)
        assert not marshal.stopping
    marshal.stop()
    with marshal.consumer([TOPIC]) as late:
        assert list(late) == [], "made after the Marshal was stopped"


def test_stop_ends_ranges(marshal: Marshal) -> None:
    with marshal.ranges([TOPIC]) as ranges:
        ranges.stop()
        assert list(ranges.take(10, timeout=0.05)) == []


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("with_consumer", [True, False])
def test_what_was_in_flight_is_said(
    marshal: Marshal, caplog: pytest.LogCaptureFixture, way: Way, with_consumer: bool
) -> None:
    """As a note of the exception and as a log line, whichever block it leaves first."""
    caplog.set_level(logging.WARNING, "kafka_marshal")
    first = 5 if way is by_batches else 7

    def work(consumer: Consumer) -> None:
        for offset in way(consumer):
            if offset >= 7:
                raise ValueError("no")

    def work_inside() -> None:
        with marshal:
            consumer = marshal.consumer([TOPIC])
            if with_consumer:
                with consumer:
                    work(consumer)
            work(consumer)

    with pytest.raises(ValueError, match="no") as raised:
        work_inside()
    (note,) = raised.value.__notes__
    assert note.startswith(f"{TOPIC} [0] offset {first} was in flight")
    (line,) = [x for x in caplog.records if getattr(x, "event", "") == "loop_failed"]
    assert (line.getMessage(), line.offset) == (  # type: ignore[attr-defined]
        f"{TOPIC} [0] offset {first} was in flight when ValueError ended the loop: no",
        first,
    )


def test_nothing_is_said_where_nothing_was_in_flight(marshal: Marshal, caplog: pytest.LogCaptureFixture) -> None:
    def work() -> None:
        with marshal.consumer([TOPIC]) as consumer:
            for offset in by_poll(consumer):
                if offset == 29:
                    consumer.stop()
            raise ValueError("later")

    with pytest.raises(ValueError, match="later") as raised:
        work()
    assert not hasattr(raised.value, "__notes__")
    assert [x for x in caplog.records if getattr(x, "event", "") == "loop_failed"] == []


def test_a_message_that_a_loop_has_dropped_comes_again_though_no_other_comes() -> None:
    with member(memory_cluster(1, 2)) as marshal, marshal.consumer([TOPIC], auto_done=False) as consumer:
        seen: list[int | None] = []
        too_late = threading.Timer(20, consumer.stop)
        too_late.start()
        for message in consumer:
            seen.append(message.offset())
            if len(seen) != 2:
                consumer.done(message)
            if len(seen) == 3:
                break
            del message
        too_late.cancel()
        assert seen == [0, 1, 1]


def test_for_asyncio_it_comes_again_too() -> None:
    async def main() -> list[int | None]:
        seen, cluster = list[int | None](), memory_cluster(1, 2).connect("a")
        async with (
            aio.Marshal.on_cluster(cluster, group_id=GROUP, heartbeat_interval=HI / 1000) as marshal,
            marshal.consumer([TOPIC], auto_done=False) as consumer,
        ):
            async for message in consumer:
                seen.append(message.offset())
                if len(seen) != 2:
                    consumer.done(message)
                if len(seen) == 3:
                    break
                del message
        return seen

    assert asyncio.run(asyncio.wait_for(main(), 20)) == [0, 1, 1]


# -- a program that never reports what is done -------------------------------------------------------------------

MESSAGES = 20


def polled(consumer: Consumer) -> Iterator[int | None]:
    while not consumer.stopping:
        if (message := consumer.poll(0.1)) is not None:
            yield message.offset()
            del message


def consumed(consumer: Consumer) -> Iterator[int | None]:
    while not consumer.stopping:
        yield from [message.offset() for message in consumer.consume(3, 0.1)]


def looped(consumer: Consumer) -> Iterator[int | None]:
    for message in consumer:
        offset = message.offset()
        del message
        yield offset


def batched(consumer: Consumer) -> Iterator[int | None]:
    for batch in consumer.batches(3, 0.1):
        offsets = [message.offset() for message in batch]
        del batch
        yield from offsets


@pytest.mark.parametrize("way", [polled, consumed, looped, batched])
def test_without_done_it_goes_on_and_says_so_once(
    caplog: pytest.LogCaptureFixture, way: Callable[[Consumer], Iterator[int | None]]
) -> None:
    """As with confluent-kafka: each message once; all of them come again after a restart."""
    cluster = memory_cluster(1, MESSAGES)
    for _ in range(2):
        caplog.clear()
        with member(cluster) as marshal, marshal.consumer([TOPIC], auto_done=False) as consumer:
            seen: list[int | None] = []
            too_late = threading.Timer(20, consumer.stop)
            too_late.start()
            beats_until = None
            for offset in way(consumer):
                seen.append(offset)
                if len(seen) == MESSAGES:
                    beats_until = threading.Timer(10 * HI / 1000, consumer.stop)
                    beats_until.start()
            too_late.cancel()
        assert seen == list(range(MESSAGES))
        (line,) = [x.getMessage() for x in caplog.records if "none was ever reported as done" in x.getMessage()]
        assert f"delivered {MESSAGES} message(s)" in line and "consumer.done(message)" in line


def test_what_a_cancelled_call_took_comes_again_though_nothing_is_done() -> None:
    async def main() -> list[int]:
        cluster = memory_cluster(1, 0)
        async with (
            aio.Marshal.on_cluster(cluster.connect("a"), group_id=GROUP, heartbeat_interval=HI / 1000) as marshal,
            marshal.consumer([TOPIC], auto_done=False) as consumer,
        ):
            lost = asyncio.ensure_future(consumer.poll(None))
            while not await consumer.assignment():
                await asyncio.sleep(0.01)
            lost.cancel()
            for _ in range(2):
                cluster.broker.produce(TOPIC, 0, None, b"v")
            found = [await consumer.poll(10), await consumer.poll(10)]
            return sorted(message.offset() for message in found if message is not None)

    assert asyncio.run(asyncio.wait_for(main(), 30)) == [0, 1]


def test_for_asyncio(cluster: MemoryCluster) -> None:
    async def work() -> Any:
        options: dict[str, Any] = {"group_id": GROUP, "client_id": "b", "heartbeat_interval": HI / 1000}
        async with aio.Marshal.on_cluster(cluster.connect("b"), **options) as marshal:
            async with marshal.consumer(["other"]) as other:
                async for _ in other:
                    other.stop()
                assert other.stopping
                assert not marshal.stopping
            async with marshal.consumer([TOPIC]) as consumer:
                async for message in consumer:
                    if message.offset() == 7:
                        raise ValueError("no")

    with pytest.raises(ValueError, match="no") as raised:
        asyncio.run(work())
    (note,) = raised.value.__notes__
    assert f"{TOPIC} [0] offset 7 was in flight" in note


def test_sharing_by_key_that_has_no_effect_is_warned_of_once(
    marshal: Marshal, caplog: pytest.LogCaptureFixture
) -> None:
    with marshal.consumer([TOPIC], mode=Group(allow_key_share=True)) as consumer:
        assert consumer.poll(10) is not None
    (line,) = [x.getMessage() for x in caplog.records if getattr(x, "event", "") == "key_share_refused"]
    assert f"kafka-marshal group {GROUP} --set accept_range_fetch={TOPIC}" in line
