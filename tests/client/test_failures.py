"""Log lines about failing handlers: each kind once with its traceback, then its count; secrets are hidden."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kafka_marshal import Admin
from kafka_marshal.adapters.memory import MemoryMessage
from kafka_marshal.client.attempt import Attempt, Handling
from kafka_marshal.client.dead_letters import MOST_TRACE, place_of, reason_of, trace_of
from kafka_marshal.client.failures import EVERY_MS, LETTERS, MOST_KINDS, RunFailures
from kafka_marshal.client.handled import MOST_ERRORS, OTHER, Handled, ProcessTimes
from kafka_marshal.client.tries import cancelled
from kafka_marshal.engine.effects import Note
from kafka_marshal.engine.plane import Loss
from kafka_marshal.engine.settings import EngineSettings
from kafka_marshal.logs import SAID_EVERY_MS, Event, RateLimitedLog
from kafka_marshal.node.effects import AppendFailures
from kafka_marshal.node.events import GATHER_MS, QUIET_MS, Events, spans
from kafka_marshal.testing import LocalBroker
from tests.client.conftest import Scene, wait_until


class Said:
    """Failures on a manual clock."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self.now = 5.0
        self.failures = RunFailures(lambda: self.now, threading.Lock(), ("s3cr3t-of-config",))
        self._caplog = caplog
        caplog.set_level(logging.INFO, "kafka_marshal")

    def lines(self) -> list[str]:
        found = [f"{record.levelname}: {record.getMessage()}" for record in self._caplog.records]
        self._caplog.clear()
        return found

    def fail(self, error: Exception, offset: int = 17) -> Exception:
        try:
            raise error
        except Exception as raised:  # noqa: BLE001 - any exception
            self.failures.failed(attempt(offset), raised)
            return raised


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Said:
    return Said(caplog)


def attempt(offset: int = 17, key: bytes | None = b"LH400") -> Attempt:
    message: Any = MemoryMessage("orders", 3, offset, key, b"v", (1, 0))
    return Attempt(Handling(3, "billing", "claimed", "key"), message, 2, 7)


def test_the_first_of_each_kind_has_its_traceback_and_then_they_are_counted(
    said: Said, caplog: pytest.LogCaptureFixture
) -> None:
    said.fail(KeyError("no such key"))
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "KeyError: 'no such key' (orders [3] offset 17, key b'LH400', try 2 of 3)" in record.getMessage()
    assert record.exc_info is not None
    assert "in fail" in logging.Formatter().format(record)
    caplog.clear()
    for number in range(500):
        said.fail(KeyError(number))
    said.failures.look(said.now + EVERY_MS - 1)
    assert said.lines() == []
    said.now += EVERY_MS
    said.failures.look(said.now)
    (line,) = said.lines()
    assert line.startswith("WARNING: 500 more failure(s) of handlers in 60 s: KeyError at ")
    said.failures.look(said.now + 10 * EVERY_MS)
    assert said.lines() == []
    said.now += 10 * EVERY_MS
    said.fail(KeyError("again"))
    (line,) = said.lines()
    assert "the handler failed: KeyError: 'again'" in line, "after quiet minutes it is said in full"
    said.fail(KeyError("again"))
    said.failures.end()
    (line,) = said.lines()
    assert "1 more failure(s)" in line, "what was counted is said at the end of the run"


def test_another_place_is_another_kind(said: Said) -> None:
    said.fail(ValueError("here"))
    try:
        int("x")
    except ValueError as error:
        said.failures.failed(attempt(), error)
    assert len(said.lines()) == 2


def test_classes_without_end_are_few_kinds(said: Said) -> None:
    for number in range(1_000):
        said.fail(type(f"Error{number}", (ValueError,), {})("made for this one"))
    assert len(said.lines()) == MOST_KINDS + 1
    said.failures.end()
    (line,) = said.lines()
    assert f"{1_000 - MOST_KINDS - 1} more failure(s) of handlers in 0 s: other failures" in line


def test_each_dead_letter_has_a_line_and_many_are_counted(said: Said) -> None:
    error = ValueError("bad date")
    for offset in range(LETTERS + 30):
        said.failures.put_aside(attempt(offset), error, "orders.dead")
    lines = said.lines()
    assert len(lines) == LETTERS
    assert lines[0] == (
        "INFO: orders [3] offset 0, key b'LH400' was put aside in orders.dead after 2 of 3 tries: ValueError: bad date"
    )
    said.now += EVERY_MS
    said.failures.look(said.now)
    assert said.lines() == ["INFO: 30 more message(s) were put aside in orders.dead"]
    said.failures.put_aside(attempt(99), error, "orders.dead")
    assert len(said.lines()) == 1


def test_secrets_are_in_no_line_and_no_traceback(said: Said, caplog: pytest.LogCaptureFixture) -> None:
    error = said.fail(ValueError("connecting to postgres://me:pa55word@db/x with s3cr3t-of-config failed"))
    shown = logging.Formatter().format(caplog.records[0])
    for text in (shown, trace_of(error, ("s3cr3t-of-config",)), reason_of(error, ("s3cr3t-of-config",))):
        assert "pa55word" not in text
        assert "s3cr3t-of-config" not in text
        assert "postgres://[hidden]@db/x" in text


def deep(depth: int) -> None:
    if depth:
        deep(depth - 1)
    raise ValueError("at the bottom")


def caught(call: Any) -> BaseException:
    with pytest.raises(BaseException) as found:
        call()
    return found.value


def test_a_traceback_has_the_last_frames_and_what_it_came_from() -> None:
    error = caught(lambda: deep(30))
    assert "[Previous line repeated 4 more times]" in trace_of(error), "eight frames in all"
    assert trace_of(error).endswith("ValueError: at the bottom")

    def chained() -> None:
        try:
            deep(0)
        except ValueError as before:
            raise KeyError("k") from before

    text = trace_of(caught(chained))
    python = "".join(traceback.format_exception(caught(chained)))
    assert text.index("ValueError: at the bottom") < text.index("direct cause") < text.index("KeyError: 'k'")
    assert python.rstrip().endswith(text.rstrip()[-40:])
    assert "in deep" in trace_of(BaseExceptionGroup("several", [caught(lambda: deep(1))]))


@pytest.mark.parametrize("error", [ValueError("€" * 100_000), RecursionError(), ValueError("lone \ud800"), KeyError()])
def test_a_traceback_is_small_and_always_text(error: Exception) -> None:
    error.__cause__ = error.__context__ = ValueError("x" * 50_000)
    error.__cause__.__cause__ = error
    assert len(trace_of(error).encode()) <= MOST_TRACE
    assert place_of(error) == ("", 0)


def test_an_error_that_was_made_and_not_raised_has_the_place_of_its_cause() -> None:
    try:
        raise asyncio.CancelledError
    except asyncio.CancelledError as error:
        assert place_of(cancelled(error)) == place_of(error) != ("", 0)


def test_what_cannot_say_what_it_is_is_said_all_the_same(said: Said) -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError

        __repr__ = __str__

    said.fail(Mute())
    assert "Mute: Mute" in said.lines()[0]


def test_metrics_know_a_limited_number_of_classes() -> None:
    counted, timed = Handled(threading.Lock()), ProcessTimes(threading.Lock())
    for number in range(500):
        error = type(f"Error{number}", (ValueError,), {})()
        counted.failed("orders", error)
        timed.note("orders", f"Error{number}", 0.1)
    timed.note("orders", "", 0.1)
    failures, _, _ = counted.read()
    assert len(failures) == MOST_ERRORS + 1
    assert failures["orders", OTHER] == 500 - MOST_ERRORS
    times = dict(timed.read())
    assert len(times) == MOST_ERRORS + 2
    assert times["orders", ""].count == 1


# -- Long-lasting conditions are logged repeatedly, at growing intervals ------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.now = 0.0
        self.told = RateLimitedLog(lambda: self.now)


def test_the_same_thing_again_and_again_is_one_line_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    for now in range(100):
        clock.now = float(now)
        clock.told.warn("append_failed", "no broker", f"an append failed: no broker (after {now} ms)")
    assert [record.getMessage() for record in caplog.records] == ["an append failed: no broker (after 0 ms)"]
    clock.now = SAID_EVERY_MS
    clock.told.warn("append_failed", "no broker", "an append failed")
    assert caplog.records[-1].getMessage() == "an append failed (99 more since this was said last)"


def test_another_thing_is_reported_at_once_and_one_that_comes_again_is_held_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    told = Clock().told
    for reason in ("no broker", "forbidden", "no broker"):
        told.warn("append_failed", ("append", reason), reason)
    told.say(logging.ERROR, "stuck", "stuck", "stuck")
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("WARNING", "no broker"),
        ("WARNING", "forbidden"),
        ("ERROR", "stuck"),
    ]


# -- Messages about records that could not be appended ------------------------------------------------------------


def failures() -> AppendFailures:
    return AppendFailures("__marshal", RateLimitedLog(lambda: 0.0))


def test_a_reason_that_differs_in_how_long_it_took_is_the_same(caplog: pytest.LogCaptureFixture) -> None:
    heard = failures()
    for took in range(10):
        heard.hear(f"timed out (Connection refused (after {took}ms in state CONNECT))", 0.0)
    heard.hear("forbidden", 0.0)
    assert len(caplog.records) == 2


def test_since_when_appends_fail_is_known_until_one_succeeds() -> None:
    heard = failures()
    seen = []
    for reason, now in ((None, 3.0), ("no broker", 5.0), ("forbidden", 7.0), (None, 8.0)):
        heard.hear(reason, now)
        seen.append(heard.failing)
    assert seen == [None, ("no broker", 5.0), ("forbidden", 5.0), None]


# Log lines for operators: events with fields, one line for simultaneous events, an outage from end to end.


HI = 3_000


@pytest.fixture
def events(caplog: pytest.LogCaptureFixture) -> Events:
    caplog.set_level(logging.INFO, "kafka_marshal")
    return Events(EngineSettings("delays", "worker-1", "i", 8, HI), 0.0)


def told(events: Events, caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    """(event, partitions) of the lines logged since the last call."""
    events.write()
    lines = [(getattr(line, "event", ""), spans(getattr(line, "partitions", []))) for line in caplog.records]
    caplog.clear()
    return lines


def test_many_partitions_claimed_at_once_are_one_line(events: Events, caplog: pytest.LogCaptureFixture) -> None:
    for partition in range(200):
        events.note(Note("claimed", ("flights", partition)), float(partition))
        events.check(float(partition))
    assert told(events, caplog) == []
    events.check(199 + QUIET_MS)
    events.write()
    [line] = caplog.records
    assert line.getMessage() == "worker-1 of group delays: claimed flights [0-199]"
    found = [getattr(line, name) for name in ("event", "group", "client", "topic", "partitions")]
    assert found == ["claimed", "delays", "worker-1", "flights", list(range(200))]


def test_one_partition_is_named_as_one(events: Events, caplog: pytest.LogCaptureFixture) -> None:
    events.note(Note("claimed", ("flights", 7)), 0.0)
    events.gather()
    events.write()
    assert getattr(caplog.records[0], "partition", None) == 7


def test_some_keys_of_a_partition_are_named(events: Events, caplog: pytest.LogCaptureFixture) -> None:
    for partition in range(2):
        events.note(Note("claimed", ("flights", partition), keys=(0, 9)), 0.0)
    events.note(Note("claimed", ("flights", 0), keys=(20, 29)), 0.0)
    events.gather()
    events.write()
    text = "worker-1 of group delays: claimed keys "
    assert [line.getMessage() for line in caplog.records] == [
        f"{text}0 to 9 of flights [0-1]",
        f"{text}20 to 29 of flights [0]",
    ]
    assert [getattr(line, "keys", None) for line in caplog.records] == [[0, 9], [20, 29]]


def test_claims_that_never_rest_are_logged_nevertheless(events: Events, caplog: pytest.LogCaptureFixture) -> None:
    for now in range(0, int(GATHER_MS) + 1, 100):
        events.note(Note("claimed", ("flights", now // 100)), float(now))
        events.check(float(now))
    assert told(events, caplog) == [("claimed", "0-10")]


def test_a_loss_is_reported_at_once_with_its_reason(events: Events, caplog: pytest.LogCaptureFixture) -> None:
    for partition in (3, 1, 2):
        events.note(Note("lost", ("flights", partition), "the topic was deleted"), 5.0)
    events.check(5.0)
    events.write()
    [line] = caplog.records
    assert line.levelname == "WARNING"
    assert "lost flights [1-3]: the topic was deleted. Messages in flight are not committed" in line.getMessage()
    assert getattr(line, "reason", None) == "the topic was deleted"


@pytest.mark.parametrize("why", Loss)
def test_a_loss_promises_no_next_holder_where_there_is_none(
    events: Events, caplog: pytest.LogCaptureFixture, why: Loss
) -> None:
    events.note(Note("lost", ("flights", 1), why), 5.0)
    events.check(5.0)
    events.write()
    assert ("next holder" in caplog.text) is (
        why not in (Loss.POSITION, Loss.KAFKA_OFFSET, Loss.TOPIC_GONE, Loss.RESET, Loss.OPEN)
    )


def test_what_came_and_went_is_reported_in_that_order(events: Events, caplog: pytest.LogCaptureFixture) -> None:
    for event, partition in (("claimed", 1), ("claimed", 2), ("released", 1), ("claimed", 3), ("claimed", 1)):
        events.note(Note(event, ("flights", partition)), 0.0)
    events.gather()
    assert told(events, caplog) == [("claimed", "1-3"), ("released", "1"), ("claimed", "1")]


def test_an_outage_is_reported_from_end_to_end(events: Events, caplog: pytest.LogCaptureFixture) -> None:
    events.heard(1_000.0)
    events.trouble("1/3 brokers are down", 2_000.0)
    events.heard(2_100.0)
    events.check(9_000.0)
    assert told(events, caplog) == [], "others answered"
    events.trouble("no broker", 10_000.0)
    events.check(10_100.0)
    assert told(events, caplog) == []
    for now in (11_500.0, 12_000.0):
        events.trouble("no broker", now)
        events.check(now)
    events.write()
    [line] = caplog.records
    assert (line.levelname, line.event, line.reason, line.seconds) == ("WARNING", "kafka_away", "no broker", 9.4)  # type: ignore[attr-defined]
    caplog.clear()
    events.heard(14_100.0)
    events.heard(14_200.0)
    events.write()
    [line] = caplog.records
    assert (line.levelname, line.event, line.seconds) == ("WARNING", "kafka_back", 12.0)  # type: ignore[attr-defined]


def test_a_handler_that_raises_stops_nothing(events: Events, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if getattr(record, "event", "") == "claimed":
                raise RuntimeError("disk full")

    logger, handler = logging.getLogger("kafka_marshal"), Broken()
    logger.addHandler(handler)
    try:
        events.note(Note("claimed", ("flights", 1)), 0.0)
        events.say(Event.LEFT, "left")
        events.write()
    finally:
        logger.removeHandler(handler)
    assert [line.event for line in caplog.records] == ["callback_failed", "left"]  # type: ignore[attr-defined]


@pytest.mark.broker
def test_a_members_life_is_reported(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kafka_marshal")
    topic = scene.topic(24)

    def seen(event: str) -> list[Any]:
        return [line for line in caplog.records if getattr(line, "event", "") == event and line.client == "worker-1"]  # type: ignore[attr-defined]

    def partitions(event: str) -> set[int]:
        return {partition for line in seen(event) for partition in line.partitions}

    marshal = scene.member("worker-1")
    with marshal.consumer([topic]):
        wait_until(lambda: partitions("claimed") == set(range(24)), what="24 partitions claimed, and told")
        assert len(seen("claimed")) <= 3
        with Admin(scene.bootstrap, topic=scene.coordination).pause(scene.group) as pause:
            wait_until(lambda: seen("paused"), what="the pause told")
            pause.wait_released(20)
            wait_until(lambda: partitions("released") == set(range(24)), what="24 partitions released, and told")
        wait_until(lambda: seen("resumed"), what="the end of the pause told")
        assert seen("paused")[0].by == seen("resumed")[0].by
    marshal.close()
    for event in ("joined", "left"):
        [line] = seen(event)
        assert line.group == scene.group
    told_events = [getattr(line, "event", "") for line in caplog.records if line.name == "kafka_marshal"]
    assert "" not in told_events, "each line has its event"


# -- outages ------------------------------------------------------------------------------------------------------

PROGRAM = """
import json, logging, signal, sys
from kafka_marshal import Marshal

class Lines(logging.Handler):
    def emit(self, record):
        fields = {key: getattr(record, key, None) for key in ("event", "partitions", "seconds")}
        print(json.dumps({**fields, "text": record.getMessage()}), flush=True)

logging.getLogger("kafka_marshal").addHandler(Lines())
logging.getLogger("kafka_marshal").setLevel("INFO")
with Marshal(sys.argv[1], group_id="g", client_id="w", heartbeat_interval=int(sys.argv[3]) / 1000) as marshal:
    signal.signal(signal.SIGTERM, lambda *_: marshal.stop())
    with marshal.consumer([sys.argv[2]]) as consumer:
        for message in consumer:
            pass
"""


class LoggedWorker:
    """A worker process and its log."""

    def __init__(self, broker: LocalBroker, topic: str, out: Path) -> None:
        self._out = out
        with out.open("w") as lines:
            command = [sys.executable, "-c", PROGRAM, broker.bootstrap_servers, topic, str(HI)]
            self.process = subprocess.Popen(command, stdout=lines)

    def events(self) -> list[Any]:
        return [json.loads(line)["event"] for line in self._out.read_text().split("\n")[:-1]]

    def ends_within(self, seconds: float) -> float:
        began = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(seconds) == 0
        return time.monotonic() - began


@pytest.fixture
def broker() -> Iterator[LocalBroker]:
    with LocalBroker() as running:
        yield running


@pytest.fixture
def work(broker: LocalBroker, tmp_path: Path) -> Iterator[Callable[[], LoggedWorker]]:
    from kafka_marshal.adapters.probe import Probe

    Admin(broker.bootstrap_servers).init(2)
    Probe(broker.bootstrap_servers).create_topic("t", 6, 1, {})
    started: list[LoggedWorker] = []

    def start() -> LoggedWorker:
        started.append(LoggedWorker(broker, "t", tmp_path / f"{len(started)}.jsonl"))
        return started[-1]

    yield start
    for worker in started:
        worker.process.kill()
        worker.process.wait()


@pytest.mark.broker
def test_in_an_outage_a_worker_says_so_and_ends_in_time(broker: LocalBroker, work: Callable[[], LoggedWorker]) -> None:
    """SIGTERM within 8 s: with leases held, after they are lost, and when the broker never returns."""
    worker = work()
    wait_until(lambda: "claimed" in worker.events(), what="claims")
    broker.pause()
    worker.ends_within(8.0)
    broker.resume()

    worker = work()
    wait_until(lambda: "claimed" in worker.events(), what="claims")
    broker.pause()
    wait_until(lambda: {"kafka_away", "lost"} <= set(worker.events()), what="the outage told")
    broker.resume()
    wait_until(lambda: worker.events()[-1] == "claimed", what="claims after the outage")
    assert "kafka_back" in worker.events()
    told = worker.events().count("lost")  # in one line or several: parts of the log end at different times
    broker.pause()
    wait_until(lambda: worker.events().count("lost") > told, what="the second outage told")
    worker.ends_within(8.0)
    broker.resume()

    worker = work()
    wait_until(lambda: "claimed" in worker.events(), what="claims")
    broker.kill()
    worker.ends_within(8.0)
