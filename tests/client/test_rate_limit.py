"""Long-lasting conditions are logged repeatedly, at growing intervals."""

from __future__ import annotations

import logging

import pytest

from kafka_marshal.logs import SAID_EVERY_MS, RateLimitedLog


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
