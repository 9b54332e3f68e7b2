"""A reader's poll interval: short while messages arrive, growing while none do; and its end, if librdkafka hangs."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from kafka_marshal.adapters.kafka import readers as module
from kafka_marshal.adapters.kafka.errors import Troubles
from kafka_marshal.adapters.kafka.readers import LONGEST_WAIT_S, STEERED, Pace, Reading


def test_a_wait_is_as_long_as_the_silence_before_allows() -> None:
    pace = Pace(0.005, ((1.0, 0.025), (5.0, 0.1)))
    assert [pace.wait_s(quiet) for quiet in (0.0, 1.0, 1.1, 5.0, 5.1, 1e6)] == [0.005, 0.005, 0.025, 0.025, 0.1, 0.1]
    assert Pace(0.05).wait_s(1e6) == 0.05


def test_who_steers_a_busy_reader_waits_for_milliseconds_only() -> None:
    assert STEERED.wait_s(0.0) <= 0.005
    assert max(STEERED.wait_s(quiet) for quiet in range(100)) <= LONGEST_WAIT_S


def a_reading() -> Any:
    return Reading("data reader", {"bootstrap.servers": "127.0.0.1:1", "group.id": "g"}, Troubles())


def test_a_client_that_never_ends_is_left_behind_with_a_word(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """librdkafka's issue 4514, which needs a refused fetch and a close within the same millisecond."""
    monkeypatch.setattr(module, "END_TIMEOUT_S", 0.05)
    reading, hangs = a_reading(), threading.Event()
    consumer, reading.consumer = reading.consumer, SimpleNamespace(close=hangs.wait)
    try:
        reading.close()
        reading.close()
        [line] = [record.getMessage() for record in caplog.records if "has not ended" in record.getMessage()]
        assert "the data reader has not ended 0.05 s after its close" in line and "Nothing is lost" in line
    finally:
        hangs.set()
        consumer.close()


def test_it_is_closed_where_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    reading = a_reading()
    monkeypatch.setattr(threading.Thread, "start", refuse)
    reading.close()
    with pytest.raises(RuntimeError, match="closed"):
        reading.consumer.poll(0)
