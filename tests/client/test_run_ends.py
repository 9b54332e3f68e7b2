"""``consumer.run`` on a real broker: slow handlers, ends of all kinds, and calls at awkward moments."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

from kafka_marshal import ClosedError, ConfigurationError, Consumer, Group, Hooks, Marshal, Retry, aio
from kafka_marshal.adapters.memory import MemoryCluster
from kafka_marshal.engine.work import delivery
from rationalizer import ReleasingPartition, encode
from tests.client.conftest import take, wait_until
from tests.client.running import (
    HOW,
    KINDS,
    Crew,
    Handlers,
    Running,
    done_of,
    places,
    publish,
)
from tests.faults.stories import GROUP, HI, TOPIC, member, memory_cluster

# Handlers that take too long.


@pytest.mark.parametrize("kind", KINDS)
def test_a_thread_that_hangs_costs_the_lease_and_when_that_is_back_its_key_waits(crew: Crew, kind: str) -> None:
    crew.kind = kind
    topic = crew.topic(1)
    publish(crew, topic, ["stuck", "stuck", "a", "b"])
    handlers = Handlers()
    gate = handlers.gate("stuck")
    lost = threading.Event()
    a, consumer = crew.consumer("a", topic, handler_timeout=0.5, on_lost=lambda *_: lost.set())
    running = Running(consumer, handlers, concurrency=1)
    handlers.await_begun("stuck")
    assert lost.wait(20)
    handlers.await_ended([(0, 2), (0, 3)])  # by the replacement of the hanging thread
    publish(crew, topic, ["c"] * 5)
    handlers.await_ended([(0, offset) for offset in range(2, 9)])
    epoch = consumer.assignment()[0].epoch
    for number in range(4):  # two more timeouts: the old handler must not end the new lease
        time.sleep(0.3)
        publish(crew, topic, ["d"])
        handlers.await_ended([(0, 9 + number)])
    assert consumer.assignment()[0].epoch == epoch
    assert handlers.of("begin", "stuck") == [(0, 0)]
    gate.set()
    handlers.await_ended(places(13))
    running.stop(a)
    handlers.check_order()
    assert handlers.of("begin", "stuck") == [(0, 0), (0, 0), (0, 1)]


def test_a_coroutine_that_takes_too_long_is_cancelled_as_a_failure(crew: Crew) -> None:
    topic = crew.topic(1)
    publish(crew, topic, ["slow", "slow", "a"])
    errors: list[BaseException] = []
    handlers = Handlers("coroutines")
    handlers.gate("slow")
    lost: list[object] = []
    a, consumer = crew.consumer("a", topic, handler_timeout=0.3, on_lost=lambda *_: lost.append(1))
    hooks = Hooks(failed=lambda attempt, seconds, error: errors.append(error))
    running = Running(consumer, handlers, retry=Retry(2, (0.01, 0.01)), hooks=[hooks])
    error = running.ended()
    assert isinstance(error, TimeoutError)
    assert "within handler_timeout (0.3 s)" in str(error)
    assert len(errors) == 2
    assert not lost
    assert handlers.of("begin", "slow") == [(0, 0)] * 2
    handlers.gate("slow").set()
    running = Running(consumer, handlers)
    handlers.await_ended(places(3))
    running.stop(a)


def test_a_coroutine_that_swallows_its_cancellation_harms_no_later_one(crew: Crew) -> None:
    topic = crew.topic(1)
    publish(crew, topic, ["a", "b"])
    ended: list[bytes] = []

    async def fails() -> None:
        raise ValueError("of a task")

    async def handle(message: Any) -> None:
        if message.key() == b"a":
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(20)
        else:
            task = asyncio.current_task()
            assert task is not None
            assert task.cancelling() == 0
            with suppress(ExceptionGroup):
                async with asyncio.TaskGroup() as group:
                    group.create_task(fails())
                    await asyncio.sleep(20)
        ended.append(message.key())

    a, consumer = crew.consumer("a", topic, handler_timeout=0.3)
    running = Running(consumer, handle, concurrency=1, retry=None)
    wait_until(lambda: len(ended) == 2 or running.is_over)
    running.stop(a)
    assert ended == [b"a", b"b"]


# The end.


@pytest.mark.parametrize("how", HOW)
def test_stop_waits_for_what_is_in_flight(crew: Crew, how: str) -> None:
    topic = crew.topic(1)
    publish(crew, topic, ["a", "a", "b", "c"])
    handlers = Handlers(how)
    gates = [handlers.gate(key) for key in "abc"]
    a, consumer = crew.consumer("a", topic)
    running = Running(consumer, handlers, concurrency=2)
    wait_until(lambda: len(handlers.of("begin")) == 2)
    a.stop()
    wait_until(lambda: not consumer._delivery.in_lanes.is_active)
    assert not running.is_over
    for gate in gates:
        gate.set()
    assert running.ended() is None
    assert handlers.ended == {(0, 0): 1, (0, 2): 1}
    a.close()
    b, _ = crew.consumer("b", topic)
    wait_until(lambda: done_of(b, topic) == (0, ((2, 2),)))


@pytest.mark.parametrize("how", HOW)
def test_after_drain_timeout_the_rest_comes_again(crew: Crew, how: str, caplog: pytest.LogCaptureFixture) -> None:
    topic = crew.topic(1)
    publish(crew, topic, ["stuck", "stuck", "bad", "c"])

    def act(message: Any) -> None:
        if message.key() == b"bad":
            raise ZeroDivisionError

    handlers = Handlers(how, act)
    gate = handlers.gate("stuck")
    a, consumer = crew.consumer("a", topic)
    began = time.monotonic()
    error = Running(consumer, handlers, retry=None, drain_timeout=0.3).ended()
    assert isinstance(error, ZeroDivisionError)
    assert time.monotonic() < began + 10
    handlers.act = lambda message: None
    again = Running(consumer, handlers)
    if how == "threads":  # a thread can't be ended: the rest of its key waits for it
        assert "run() ends while 1 handler(s) have not returned" in caplog.text
        handlers.await_ended([(0, 2), (0, 3)])
        assert handlers.of("begin", "stuck") == [(0, 0)]
    gate.set()
    handlers.await_ended(places(4))
    publish(crew, topic, ["stuck", "d"])
    handlers.await_ended(places(6))
    again.stop(a)
    handlers.check_order()
    assert set(handlers.ended.values()) == {1}


def test_another_order_is_refused_while_an_old_handler_runs(crew: Crew) -> None:
    topic = crew.topic(1)
    publish(crew, topic, ["stuck", "bad"])

    def act(message: Any) -> None:
        if message.key() == b"bad":
            raise ZeroDivisionError

    handlers = Handlers("threads", act)
    gate = handlers.gate("stuck")
    _, consumer = crew.consumer("a", topic)
    assert isinstance(Running(consumer, handlers, retry=None, drain_timeout=0.0).ended(), ZeroDivisionError)
    with pytest.raises(ConfigurationError, match="have not returned"):
        consumer.run(handlers.handle, order="partition")
    gate.set()
    wait_until(lambda: len(handlers.ended) == 1)
    assert isinstance(Running(consumer, handlers, retry=None, order="partition").ended(), ZeroDivisionError)


@pytest.mark.parametrize("how", HOW)
def test_ctrl_c_ends_the_run_in_order_and_the_consumer_continues(crew: Crew, how: str) -> None:
    topic = crew.topic(1)
    publish(crew, topic, ["a", "a", "b", *["c"] * 20])
    handlers = Handlers(how)
    gate = handlers.gate("a")

    def press() -> None:
        handlers.await_begun("a")
        os.kill(os.getpid(), signal.SIGINT)
        wait_until(lambda: not consumer._delivery.in_lanes.is_active)
        gate.set()

    _, consumer = crew.consumer("a", topic)
    pressing = threading.Thread(target=press)
    pressing.start()
    with pytest.raises(KeyboardInterrupt):
        consumer.run(handlers.handle)
    pressing.join()
    assert (0, 0) in handlers.ended
    left = places(23) - set(handlers.ended)
    assert (0, 1) in left
    assert sorted(take(consumer, len(left))) == sorted(left)


@pytest.mark.parametrize("how", HOW)
def test_a_second_ctrl_c_waits_no_longer(crew: Crew, how: str) -> None:
    topic = crew.topic(1)
    publish(crew, topic, ["a", "a"])
    handlers = Handlers(how)
    gate = handlers.gate("a")

    def press() -> None:
        handlers.await_begun("a")
        os.kill(os.getpid(), signal.SIGINT)
        wait_until(lambda: not consumer._delivery.in_lanes.is_active)
        os.kill(os.getpid(), signal.SIGINT)

    a, consumer = crew.consumer("a", topic)
    pressing = threading.Thread(target=press)
    pressing.start()
    with pytest.raises(KeyboardInterrupt):
        consumer.run(handlers.handle)
    pressing.join()
    assert (0, 0) not in handlers.ended
    running = Running(consumer, handlers)
    gate.set()
    handlers.await_ended(places(2))
    running.stop(a)
    handlers.check_order()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", HOW)
def test_at_a_rebalance_what_waits_is_given_back_and_what_is_in_flight_finishes_first(
    crew: Crew, how: str, kind: str
) -> None:
    crew.kind = kind
    topic = crew.topic(2)
    for partition in (0, 1):
        publish(crew, topic, ["a", "a", "b"], partition)
    handlers = Handlers(how)
    gate = handlers.gate("a")
    revoked: list[int] = []
    a, consumer = crew.consumer("a", topic, on_revoke=lambda _, found: revoked.extend(x.partition for x in found))
    first = Running(consumer, handlers)
    handlers.await_begun("a", 2)
    b, other = crew.consumer("b", topic)
    second = Running(other, handlers)
    wait_until(lambda: revoked)
    (partition,) = revoked
    assert partition in {x.partition for x in consumer.assignment()} or kind == "group"
    for _ in range(10):
        time.sleep(0.03)
        assert other.assignment() == []
        assert sorted(handlers.of("begin", "a")) == [(0, 0), (1, 0)]
    gate.set()
    handlers.await_ended(places(3) | places(3, 1))
    a.stop()
    b.stop()
    assert first.ended() is None
    assert second.ended() is None
    handlers.check_order()
    assert set(handlers.ended.values()) == {1}


# Calls at awkward moments.


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("what", ["marshal.stop", "consumer.close", "marshal.close"])
def test_a_handler_that_ends_it_all(crew: Crew, how: str, what: str) -> None:
    topic = crew.topic(1)
    publish(crew, topic, ["a"] * 3)
    a, consumer = crew.consumer("a", topic)
    end = {"marshal.stop": a.stop, "consumer.close": consumer.close, "marshal.close": a.close}[what]
    handlers = Handlers(how, lambda message: end())
    began = time.monotonic()
    assert Running(consumer, handlers).ended() is None
    assert time.monotonic() < began + 10
    assert handlers.of("begin") == [(0, 0)]
    with pytest.raises(ClosedError):
        a.close()
        consumer.run(handlers.handle)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("whole", [True, False])
def test_close_by_another_thread_lets_handlers_finish(crew: Crew, how: str, whole: bool) -> None:
    topic = crew.topic(1)
    publish(crew, topic, ["a", "a", "b"])
    handlers = Handlers(how)
    gate = handlers.gate("a")
    a, consumer = crew.consumer("a", topic)
    running = Running(consumer, handlers)
    handlers.await_begun("a")
    b, other = crew.consumer("b", topic)
    elsewhere = Running(other, handlers)
    closing = threading.Thread(target=a.close if whole else consumer.close)
    closing.start()
    wait_until(lambda: not consumer._delivery.in_lanes.is_active)
    for _ in range(10):
        time.sleep(0.03)
        assert handlers.of("begin", "a") == [(0, 0)]
    gate.set()
    closing.join(15)
    assert running.ended() is None
    handlers.await_ended(places(3))
    elsewhere.stop(b)
    handlers.check_order()
    assert set(handlers.ended.values()) == {1}


def test_close_waits_for_handlers_no_longer_than_it_may(crew: Crew) -> None:
    topic = crew.topic(1)
    publish(crew, topic, ["a"])
    handlers = Handlers()
    gate = handlers.gate("a")
    a, consumer = crew.consumer("a", topic)
    running = Running(consumer, handlers)
    handlers.await_begun("a")
    began = time.monotonic()
    a.close(timeout=0.3)
    assert 0.3 <= time.monotonic() - began < 5
    assert running.ended() is None
    gate.set()


def test_one_run_at_a_time(crew: Crew) -> None:
    topic = crew.topic(1)
    publish(crew, topic, ["a", "b"])
    handlers = Handlers()
    gate = handlers.gate("a")
    a, consumer = crew.consumer("a", topic)
    running = Running(consumer, handlers)
    handlers.await_begun("a")
    for _ in range(2):
        with pytest.raises(ConfigurationError, match="under way already"):
            consumer.run(handlers.handle)
    gate.set()
    handlers.await_ended(places(2))
    running.stop(a)


@pytest.mark.parametrize("how", HOW)
def test_a_handler_may_call_its_consumer(crew: Crew, how: str) -> None:
    topic = crew.topic(1)
    publish(crew, topic, [f"k{x}" for x in range(60)])
    refused: list[str] = []

    def act(message: Any) -> None:
        if message.offset() == 5:
            consumer.pause()
            consumer.resume()
        if message.offset() == 6:
            consumer.done(message)
        if message.offset() == 7:
            try:
                consumer.run(handlers.handle)
            except ConfigurationError as error:
                refused.append(str(error))
        if message.offset() == 8:
            consumer.seek(topic, 0, 60)
            assert consumer.assignment()[0].offset >= 60

    handlers = Handlers(how, act)
    a, consumer = crew.consumer("a", topic)
    running = Running(consumer, handlers, concurrency=2)
    handlers.await_ended(places(9))
    publish(crew, topic, ["last"])
    handlers.await_ended([(0, 60)])
    wait_until(lambda: done_of(a, topic)[0] == 60)
    running.stop(a)
    assert len(refused) == 1
    assert set(handlers.ended.values()) == {1}
    assert consumer.ignored_done >= 1


def test_a_loop_beside_a_run_shares_the_messages(crew: Crew) -> None:
    topic = crew.topic(2)
    handlers = Handlers()
    a, consumer = crew.consumer("a", topic)
    running = Running(consumer, handlers)
    polled: list[tuple[int, int]] = []
    for partition in (0, 1):
        publish(crew, topic, [f"k{x % 7}" for x in range(500)], partition)
    while len(set(polled) | set(handlers.ended)) < 1_000:
        if (message := consumer.poll(0.05)) is not None:
            polled.append((message.partition() or 0, message.offset() or 0))
            consumer.done(message)
    running.stop(a)
    assert not set(polled) & set(handlers.ended)


@pytest.mark.parametrize("kind", KINDS)
def test_at_most_once_is_refused(crew: Crew, kind: str) -> None:
    crew.kind = kind
    _, consumer = crew.consumer("a", crew.topic(1), delivery="at-most-once")
    with pytest.raises(ConfigurationError, match="at-least-once"):
        consumer.run(Handlers().handle)


# ``consumer.stop()`` ends a consumer's loops; an exception that leaves a loop names the message in flight.


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
