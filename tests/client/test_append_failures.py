"""Messages about records that could not be appended."""

from __future__ import annotations

import pytest

from kafka_marshal.logs import RateLimitedLog
from kafka_marshal.node.effects import AppendFailures


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
