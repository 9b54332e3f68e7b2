"""Log lines about failing handlers: each kind once with its traceback, then its count; secrets are hidden."""

from __future__ import annotations

import asyncio
import logging
import threading
import traceback
from typing import Any

import pytest

from kafka_marshal.adapters.memory import MemoryMessage
from kafka_marshal.client.attempt import Attempt, Handling
from kafka_marshal.client.dead_letters import MOST_TRACE, place_of, reason_of, trace_of
from kafka_marshal.client.failures import EVERY_MS, LETTERS, MOST_KINDS, Failures
from kafka_marshal.client.handled import MOST_ERRORS, OTHER, Handled, ProcessTimes
from kafka_marshal.client.tries import cancelled


class Said:
    """Failures on a manual clock."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self.now = 5.0
        self.failures = Failures(lambda: self.now, threading.Lock(), ("s3cr3t-of-config",))
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
