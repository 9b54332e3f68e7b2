"""``consumer.run`` on a real broker: slow handlers, ends of all kinds, and calls at awkward moments."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from contextlib import suppress
from typing import Any

import pytest

from kafka_marshal import ClosedError, ConfigurationError, Hooks, Retry
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
