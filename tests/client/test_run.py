"""``consumer.run`` on a real broker: parallel handlers, order by key, and failing handlers."""

from __future__ import annotations

import asyncio
import logging
import random
import sqlite3
import threading
from collections import deque
from itertools import islice
from pathlib import Path
from typing import Any, cast

import pytest
from confluent_kafka import Producer

from kafka_marshal import Attempt, ConfigurationError, Hooks, Retry
from kafka_marshal.client.workers import MOST_IN_TURN, Ready
from kafka_marshal.engine.work.lane import Lane
from kafka_marshal.observe import problems
from tests.cli.conftest import command, environment
from tests.cli.harness import Command
from tests.client.conftest import HI, take, wait_until
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
from tests.client.test_group import SESSION

__all__ = ["command", "environment"]

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


# -- The next lane: half of the workers take the longest lane, the others the one that has waited longest ---------


class Waiting:
    """A minimal lane."""

    def __init__(self, name: str, messages: int, number: int = 1) -> None:
        self.name = name
        self.number = number
        self.rest: deque[Any] | None = deque(range(messages - 1)) if messages > 1 else None


def ready_of(**lengths: int) -> Ready:
    ready = Ready()
    for name, messages in lengths.items():
        ready.put(cast("Lane", Waiting(name, messages)))
    return ready


def taken(ready: Ready, *longest: bool) -> str:
    names = [cast("Any", lane).name if (lane := ready.take(x)) is not None else "-" for x in longest]
    return "".join(names)


def test_the_longest_comes_first_and_of_those_as_long_the_first() -> None:
    ready = ready_of(a=1, b=2, c=500, d=9000, e=300, f=70_000)
    assert taken(ready, *[True] * 7) == "dfceba-"


def test_the_others_come_in_turn() -> None:
    assert taken(ready_of(a=1, b=2, c=500, d=9000), *[False] * 5) == "abcd-"


def test_no_lane_is_taken_twice() -> None:
    ready = ready_of(a=1, b=2, c=500, d=9000)
    assert taken(ready, True, False, True, False, True) == "dacb-"
    assert len(ready) == 0


def test_a_lane_that_comes_back_is_last_in_turn() -> None:
    ready = ready_of(a=1, b=1)
    again = ready.take(longest=False)
    assert again is not None
    ready.put(again)
    assert taken(ready, False, False) == "ba"


def test_many_that_are_tried_again_leave_half_of_the_tries_to_what_is_new() -> None:
    ready = Ready()
    for _ in range(1_000):
        ready.put(cast("Lane", Waiting("r", 1, number=2)))
    for name in "abc":
        ready.put(cast("Lane", Waiting(name, 1)))
    assert taken(ready, *[False, True] * 4) == "rarbrcrr"
    assert len(taken(ready, *[True] * 995)) == 995
    assert taken(ready, True) == "-"
    assert [len(cells) for cells in (ready._in_turn, ready._again, ready._new)] == [0, 0, 0]


def test_threads_find_each_lane_once() -> None:
    """As many calls as there are lanes, in any interleaving."""
    ready, found, names = Ready(), deque[str](), [f"{number}" for number in range(20_000)]

    def work(longest: bool, mine: list[str]) -> None:
        for name in mine:
            ready.put(cast("Lane", Waiting(name, 1 + int(name) % 50, 1 + int(name) % 3 // 2)))
            found.append(taken(ready, longest))

    threads = [threading.Thread(target=work, args=(part % 2 == 1, names[part::8])) for part in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found, key=int) == names


def test_what_was_taken_is_not_kept() -> None:
    """If all take the longest, and if all take them in turn."""
    for longest in (True, False):
        ready = ready_of(first=1) if longest else ready_of()
        for _ in range(MOST_IN_TURN * 2):
            ready.put(cast("Lane", Waiting("again", 100)))
            ready.take(longest)
        assert len(ready._in_turn) <= MOST_IN_TURN
        assert sum(map(len, ready._by_length)) <= 2


# A process stopped in its handlers until another has its partition: it has no effect when it continues.


@pytest.mark.parametrize("act", ["fail", "write"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_a_stopped_process_makes_of_its_messages_has_no_effect(
    crew: Crew, tmp_path: Path, kind: str, act: str
) -> None:
    crew.kind = kind
    topic, dead, database = crew.topic(1), crew.topic(1), tmp_path / "rows.db"
    with sqlite3.connect(database) as rows:
        rows.execute("CREATE TABLE lines (offset)")
    count = 4 if act == "fail" else 1
    publish(crew, topic, [f"k{x}" for x in range(count)])
    options = {"act": act, "dead": dead, "database": str(database), "concurrency": count, "attempts": 1}
    session = SESSION if kind == "group" else 0
    zombie = crew.worker("zombie", topic, tmp_path, program="zombie.py", session=session, **options)
    wait_until(lambda: len(zombie.offsets("begin")) == count, 180)
    zombie.stop()
    _, consumer = crew.consumer("other", topic)
    for _ in range(count):
        message = consumer.poll(30.0)
        assert message is not None
        consumer.done(message)
    zombie.out.with_suffix(".go").touch()
    zombie.go_on()
    wait_until(lambda: len([line for line in zombie.lines() if line["what"] != "begin"]) == count, 60)
    assert {line["what"] for line in zombie.lines()} == {"begin", "lost False"}
    assert crew.cluster.watermarks([(dead, 0)], 10)[dead, 0] == (0, 0)
    with sqlite3.connect(database) as rows:
        assert rows.execute("SELECT * FROM lines").fetchall() == []
    assert zombie.process.poll() is None, "its run goes on"


# What health() says of a handler that hangs while most tries fail; it and `check` of one that can't be cancelled.


def check(command: Command, crew: Crew) -> str:
    ran = command("--bootstrap", crew.bootstrap, "--topic", crew.coordination, "check")
    assert ran.status in (0, 1), ran.err
    return ran.out


def test_a_handler_that_hangs_while_most_tries_fail_is_named_and_after_ten_seconds_others_continue(crew: Crew) -> None:
    topic = crew.topic(1)
    publish(crew, topic, [f"k{number}" for number in range(80)])
    member, consumer = crew.consumer("a", topic)
    end, later = threading.Event(), threading.Event()

    def handle(message: Any) -> None:
        if message.offset() == 3:
            if any("tries of run(…) in a row failed" in problem for problem in member.health().problems):
                end.wait(60)
                return
        elif end.is_set():
            return
        elif any("has not returned" in problem for problem in member.health().problems):
            later.set()
        raise TimeoutError("the database is away")

    running = Running(consumer, handle, concurrency=4, retry=Retry(attempts=500, backoff=(0.01, 0.02)), park=True)
    try:
        wait_until(lambda: "offset 3 has not returned for" in str(member.health()), 90)
        assert "the others wait for it for 10 s, and then continue without it" in str(member.health())
        assert not later.is_set()
        wait_until(later.is_set, 90, what="others are tried")
    finally:
        end.set()
        running.stop(member)


def test_a_coroutine_that_swallows_its_cancellation_is_named_and_so_is_what_waits_for_it(
    crew: Crew, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its partition is taken up again, its key waits, and all others are done."""
    topic = crew.topic(1)
    publish(crew, topic, ["a", "bad", "b", "bad", "c"])
    member, consumer = crew.consumer("a", topic, handler_timeout=1.0)
    monkeypatch.setattr(problems, "STUCK_BATCH_MS", 500)
    done: set[int] = set()
    may_end = threading.Event()

    async def handle(message: Any) -> None:
        while message.offset() == 1 and not may_end.is_set():
            try:
                await asyncio.sleep(0.05)
            except asyncio.CancelledError:
                continue
        done.add(message.offset())

    running = Running(consumer, handle, concurrency=4, retry=QUICK, park=True)
    try:
        wait_until(lambda: {0, 2, 4} <= done)
        wait_until(
            lambda: "a handler has had this message since before the partition was taken" in str(member.health())
        )
        assert 3 not in done
        (held,) = member.health().held_back
        assert (held.topic, held.offset, held.key) == (topic, 1, b"bad")
        wait_until(lambda: "for the next try, for up to" in check(command, crew))
    finally:
        may_end.set()
        wait_until(lambda: {1, 3} <= done)
        running.stop(member)


# A partition to be released while a handler hangs: it stays if the reason ends, or is released in time.


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", HOW)
def test_a_pause_that_ends_leaves_a_partition_with_a_stuck_key_at_work(crew: Crew, how: str, kind: str) -> None:
    crew.kind = kind
    topic = crew.topic(1)
    publish(crew, topic, ["a", "stuck", "a", "stuck"])
    handlers = Handlers(how)
    gate = handlers.gate("stuck")
    calls: list[str] = []
    about: dict[str, Any] = {name: lambda *_, name=name: calls.append(name) for name in ("on_assign", "on_revoke")}
    a, consumer = crew.consumer("a", topic, **about)
    running = Running(consumer, handlers)
    handlers.await_ended({(0, 0), (0, 2)})
    crew.pause(60_000)
    wait_until(lambda: "on_revoke" in calls)
    if kind == "group":  # claims get no heartbeat during a pause, so this would take too long
        (held,) = wait_until(lambda: [x for x in a.health().held_back if x.releasing])
        assert (held.offset, held.key, held.releasing) == (1, b"stuck", "the group is paused")
    crew.pause(0)
    publish(crew, topic, ["a", "b"])
    handlers.await_ended({(0, 4), (0, 5)})
    assert calls == ["on_assign", "on_revoke", "on_assign"]
    wait_until(lambda: [x.releasing for x in a.health().held_back] == [""])
    gate.set()
    handlers.await_ended(places(6))
    running.stop(a)
    handlers.check_order()
    assert set(handlers.ended.values()) == {1}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", HOW)
def test_a_stuck_key_keeps_a_partition_from_others_no_longer_than_revoke_timeout(
    crew: Crew, how: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    crew.kind = kind
    topic = crew.topic(2)
    for partition in (0, 1):
        publish(crew, topic, ["a", "stuck", "a"], partition)
    hung, well = Handlers(how), Handlers(how)
    gate = hung.gate("stuck")
    a, consumer = crew.consumer("a", topic, revoke_timeout=1.0)
    first = Running(consumer, hung, drain_timeout=0.1)
    hung.await_ended({(partition, offset) for partition in (0, 1) for offset in (0, 2)})
    b, other = crew.consumer("b", topic)
    second = Running(other, well)
    wait_until(lambda: well.of("end", "stuck"), 2 * HI / 1000 + 15)
    ((moved, _),) = well.of("end", "stuck")
    publish(crew, topic, ["a"], moved)
    well.await_ended({(moved, 1), (moved, 3)})
    errors = [x.getMessage() for x in caplog.records if x.levelno == logging.ERROR]
    (error,) = [text for text in errors if "revoke_timeout" in text]
    assert f"{topic} [{moved}] is released" in error
    assert "offset 1 (key b'stuck')" in error
    gate.set()
    wait_until(lambda: consumer.ignored_done == 1)
    a.stop()
    b.stop()
    assert (first.ended(), second.ended()) == (None, None)
