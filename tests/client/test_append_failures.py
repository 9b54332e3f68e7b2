"""What people are told of records that could not be appended."""

from __future__ import annotations

import pytest

from kafka_marshal.append_failures import SAID_EVERY_MS, AppendFailures


def test_the_same_failure_again_and_again_is_one_line_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    failures = AppendFailures("__marshal")
    for now in range(100):
        failures.say("no broker", float(now))
    assert [record.getMessage() for record in caplog.records] == ["an append to __marshal failed: no broker"]
    failures.say("no broker", SAID_EVERY_MS)
    assert caplog.records[-1].getMessage().endswith("(99 more since this was said last)")


def test_another_reason_is_told_at_once_and_one_that_comes_again_is_held_back(caplog: pytest.LogCaptureFixture) -> None:
    failures = AppendFailures("__marshal")
    for reason in ("no broker", "forbidden", "no broker"):
        failures.say(reason, 0.0)
    assert len(caplog.records) == 2


def test_a_reason_that_differs_in_how_long_it_took_is_the_same(caplog: pytest.LogCaptureFixture) -> None:
    failures = AppendFailures("__marshal")
    for took in range(10):
        failures.say(f"timed out (Connection refused (after {took}ms in state CONNECT))", 0.0)
    assert len(caplog.records) == 1
