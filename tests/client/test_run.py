"""``consumer.run`` on a real broker: parallel handlers, order by key, and failing handlers."""

from __future__ import annotations

import logging
import random
from itertools import islice
from typing import Any

import pytest
from confluent_kafka import Producer

from kafka_marshal import Attempt, ConfigurationError, Hooks, Retry
from tests.client.conftest import take, wait_until
from tests.client.running import (
    HOW,
    KINDS,
    QUICK,
    Crew,
    Event,
    Handlers,
    Running,
    consumer_again,
    done_of,
    places,
    publish,
)

# Order, and all of it.


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", HOW)
def test_all_is_handled_once_each_key_in_order_and_retries_keep_it(crew: Crew, how: str, kind: str) -> None:
    crew.kind = kind
    topic, rng = crew.topic(3), random.Random(1)
    for partition in range(3):
        publish(crew, topic, [f"k{rng.randrange(20)}" for _ in range(300)], partition)

    def act(_message: Any) -> None:
        if rng.random() < 0.1:
            raise ValueError("now and then")

    handlers = Handlers(how, act)
    a, consumer = crew.consumer("a", topic)
    running = Running(consumer, handlers, retry=Retry(20, (0.001, 0.005)))
    everything = places(300) | places(300, 1) | places(300, 2)
    handlers.await_ended(everything)
    running.stop(a)
    handlers.check_order()
    assert set(handlers.ended.values()) == {1}
    assert handlers.of("failed")
    consumer.close()
    assert next(consumer_again(crew, topic), None) is None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", HOW)
def test_a_stuck_key_stalls_no_other_and_a_restart_repeats_only_what_was_not_done(
    crew: Crew, how: str, kind: str
) -> None:
    crew.kind = kind
    topic = crew.topic(2)
    publish(crew, topic, ["a", "b", "stuck", "a", "stuck", *(f"k{x % 50}" for x in range(3_000))])
    publish(crew, topic, ["stuck too", "a"], 1)
    handlers = Handlers(how)
    gate = handlers.gate("stuck")
    a, consumer = crew.consumer("a", topic)
    running = Running(consumer, handlers, concurrency=4, drain_timeout=0.1)
    left = {(0, 2), (0, 4)}
    handlers.await_ended((places(3_005) | places(2, 1)) - left)
    (held,) = wait_until(lambda: [one for one in a.health().held_back if one.in_hand == 2])
    assert (held.topic, held.partition, held.offset, held.key) == (topic, 0, 2, b"stuck")
    assert "held back at offset 2" in str(a.health())
    tracker = consumer._engine.assignments[topic, 0].tracker
    assert sum(len(run.messages) for run in tracker.runs.values()) <= 4, "what is done is kept in memory"
    if kind == "claims":
        wait_until(lambda: done_of(a, topic) == (1, ((3, 3), (5, 3_004))))
    running.stop(a)
    assert a.health().held_back == ()
    consumer.close()
    again = [(message.partition(), message.offset()) for message in islice(consumer_again(crew, topic), 3)]
    assert again == sorted(left)
    gate.set()


def test_an_empty_topic_ends_with_stop(crew: Crew) -> None:
    a, consumer = crew.consumer("a", crew.topic(2))
    running = Running(consumer, Handlers())
    wait_until(lambda: consumer.assignment())
    running.stop(a)


@pytest.mark.parametrize("how", HOW)
def test_offsets_that_are_never_delivered_hold_nothing_back(crew: Crew, how: str) -> None:
    """Offsets of transaction markers and of aborted messages."""
    topic = crew.topic(1)
    producer = Producer({"bootstrap.servers": crew.bootstrap, "transactional.id": f"t-{topic}", "linger.ms": 0})
    producer.init_transactions(20)
    for number in range(6):
        producer.begin_transaction()
        for _ in range(3):
            producer.produce(topic, b"x", f"k{number}", partition=0)
        producer.flush(20)
        (producer.abort_transaction if number % 2 else producer.commit_transaction)(20)
    handlers = Handlers(how)
    gate = handlers.gate("k0")
    a, consumer = crew.consumer("a", topic)
    running = Running(consumer, handlers)
    wanted = {(0, first + x) for first in (0, 8, 16) for x in range(3)}
    handlers.await_ended({place for place in wanted if place[1] >= 8})
    gate.set()
    handlers.await_ended(wanted)
    wait_until(lambda: (done_of(a, topic)[0] or 0) >= 18)
    running.stop(a)
    assert set(handlers.ended) == wanted


# Back-pressure.


@pytest.mark.parametrize("kind", KINDS)
def test_back_pressure_is_of_the_stuck_partition_alone_and_warned_of_once(
    crew: Crew, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    crew.kind = kind
    topic = crew.topic(3)
    publish(crew, topic, ["stuck"] * 3_000)
    for partition in (1, 2):
        publish(crew, topic, [f"k{x % 30}" for x in range(2_000)], partition)
    handlers = Handlers()
    gate = handlers.gate("stuck")
    a, consumer = crew.consumer("a", topic, max_bytes_in_flight=400_000)
    running = Running(consumer, handlers, concurrency=4)
    handlers.await_ended(places(2_000, 1) | places(2_000, 2))
    held = wait_until(lambda: [one for one in a.health().held_back if one.in_hand > 100])
    assert [(one.partition, one.offset, one.key) for one in held] == [(0, 0, b"stuck")]
    assert held[0].in_hand < 1_000
    publish(crew, topic, ["late"], 1)
    handlers.await_ended([(1, 2_000)])
    wait_until(lambda: "nothing more of this partition is handed out" in caplog.text)
    gate.set()
    handlers.await_ended(places(3_000))
    running.stop(a)
    handlers.check_order()
    assert set(handlers.ended.values()) == {1}
    assert caplog.text.count("nothing more of this partition is handed out") == 1


# Failures.


@pytest.mark.parametrize("how", HOW)
def test_a_failing_message_is_tried_again_in_its_place(crew: Crew, how: str) -> None:
    topic = crew.topic(1)
    publish(crew, topic, ["bad", "bad", *["good"] * 20])
    attempts: list[tuple[int, int, int | None, bool]] = []

    def act(message: Any) -> None:
        attempt = Attempt.current()
        assert attempt.message is message
        if message.key() == b"bad":
            attempts.append((message.offset(), attempt.number, attempt.attempts, attempt.is_last))
            if message.offset() == 0 and attempt.number < 4:
                raise ValueError("again")

    handlers = Handlers(how, act)
    a, consumer = crew.consumer("a", topic)
    running = Running(consumer, handlers, concurrency=2, retry=Retry(4, (0.1, 0.2)))
    handlers.await_ended(places(22))
    running.stop(a)
    assert attempts == [(0, 1, 4, False), (0, 2, 4, False), (0, 3, 4, False), (0, 4, 4, True), (1, 1, 4, False)]
    handlers.check_order()
    began = [each.at for each in handlers.events if each.what == "begin" and each.place == (0, 0)]
    failed = [each.at for each in handlers.events if each.what == "failed"]
    waited = [begin - fail for begin, fail in zip(began[1:], failed, strict=True)]
    assert all(wait >= least for wait, least in zip(waited, (0.05, 0.1, 0.1), strict=True)), waited
    first_bad = next(each.at for each in handlers.events if each.what == "end" and each.key == "bad")
    assert sum(each.what == "end" and each.at < first_bad for each in handlers.events) == 20, "the others go on"
    with pytest.raises(ConfigurationError, match="no attempt here"):
        Attempt.current()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", HOW)
def test_the_last_error_ends_the_run_and_the_consumer_continues(crew: Crew, how: str, kind: str) -> None:
    crew.kind = kind
    topic = crew.topic(1)
    publish(crew, topic, ["a", "bad", "b", "bad", "c"])
    is_bad = [True]

    def act(message: Any) -> None:
        if message.offset() == 1 and is_bad:
            raise ZeroDivisionError

    handlers = Handlers(how, act)
    a, consumer = crew.consumer("a", topic)
    error = Running(consumer, handlers, retry=Retry(2, (0.01, 0.01))).ended()
    assert isinstance(error, ZeroDivisionError)
    assert f"{topic} [0] offset 1, try 2 of 2" in error.__notes__[0]
    assert len(handlers.of("failed")) == 2
    assert (0, 3) not in handlers.of("begin")
    is_bad.clear()
    running = Running(consumer, handlers)
    handlers.await_ended(places(5))
    publish(crew, topic, ["d"] * 3)
    handlers.await_ended(places(8))
    handlers.check_order()
    is_bad.append(True)
    publish(crew, topic, ["e"])
    handlers.await_ended(places(9))
    running.stop(a)
    assert set(handlers.ended.values()) == {1}


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, GeneratorExit])
def test_what_is_no_exception_ends_the_run_in_order(crew: Crew, how: str, error: type[BaseException]) -> None:
    topic = crew.topic(1)
    publish(crew, topic, ["slow", "bad", *["good"] * 10])

    def act(message: Any) -> None:
        if message.key() == b"bad" and len(handlers.of("failed")) < 1:
            raise error

    handlers = Handlers(how, act)
    gate = handlers.gate("slow")
    _, consumer = crew.consumer("a", topic)
    running = Running(consumer, handlers)
    wait_until(lambda: handlers.of("failed"))
    handlers.await_begun("slow")
    assert not running.is_over
    gate.set()
    assert isinstance(running.ended(), error)
    assert (0, 0) in handlers.ended, "what was in hand has ended first"
    left = places(12) - set(handlers.ended)
    assert sorted(take(consumer, len(left))) == sorted(left)


@pytest.mark.parametrize("how", HOW)
def test_what_cannot_be_deserialized_is_a_failure_of_its_handler(crew: Crew, how: str) -> None:
    topic = crew.topic(1)
    crew.publish(topic, 1, 3)
    got: list[int] = []

    async def awaited(value: int) -> None:
        got.append(value)

    def deserialize(message: Any) -> int:
        if message.offset() == 1 and Attempt.current().number < 3:
            raise UnicodeError("bad bytes")
        return int(message.value()) * 10

    a, consumer = crew.consumer("a", topic)
    running = Running(
        consumer, got.append if how == "threads" else awaited, deserialize=deserialize, order="partition", retry=QUICK
    )
    wait_until(lambda: len(got) == 3)
    running.stop(a)
    assert got == [0, 10, 20]


@pytest.mark.parametrize("how", HOW)
def test_hooks_are_called_around_each_try_and_cannot_harm_it(
    crew: Crew, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    topic = crew.topic(1)
    publish(crew, topic, ["a", "b"])
    called: list[tuple[object, ...]] = []

    def act(message: Any) -> None:
        if message.key() == b"a" and Attempt.current().number == 1:
            raise ZeroDivisionError

    def before(attempt: Attempt) -> None:
        called.append(("before", attempt.message.offset(), attempt.number))
        raise RuntimeError("of the hook")

    hooks = Hooks(
        before=before,
        after=lambda attempt, seconds: called.append(("after", attempt.message.offset(), attempt.number)),
        failed=lambda attempt, seconds, error: called.append(("failed", attempt.message.offset(), type(error))),
    )
    handlers = Handlers(how, act)
    a, consumer = crew.consumer("a", topic)
    running = Running(consumer, handlers, concurrency=1, order="partition", retry=QUICK, hooks=[hooks])
    handlers.await_ended(places(2))
    running.stop(a)
    assert called == [
        ("before", 0, 1),
        ("failed", 0, ZeroDivisionError),
        ("before", 0, 2),
        ("after", 0, 2),
        ("before", 1, 1),
        ("after", 1, 1),
    ]
    assert "of the hook" in caplog.text or how == "coroutines"  # logged once in ten seconds


def test_a_function_that_returns_a_coroutine_is_refused(crew: Crew) -> None:
    topic = crew.topic(1)
    publish(crew, topic, ["a"])

    async def handle(_message: Any) -> None: ...

    _, consumer = crew.consumer("a", topic)
    error = Running(consumer, lambda message: handle(message), retry=None).ended()
    assert isinstance(error, ConfigurationError)
    assert "the coroutine function itself" in str(error)


def test_events_are_in_the_order_of_time() -> None:
    """The checks above rely on it and detect violations."""
    handlers = Handlers()
    handlers.events = [Event("begin", "a", 0, 0, 1.0), Event("begin", "a", 0, 1, 2.0)]
    with pytest.raises(AssertionError, match="begins while"):
        handlers.check_order()
    handlers.events = [Event("begin", "a", 0, 1, 1.0), Event("end", "a", 0, 1, 2.0), Event("begin", "a", 0, 0, 3.0)]
    with pytest.raises(AssertionError, match="is late"):
        handlers.check_order()
    logging.getLogger("kafka_marshal").debug("checked")
