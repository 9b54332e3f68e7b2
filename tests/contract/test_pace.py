"""A reader's poll interval: short while messages arrive, growing while none do."""

from __future__ import annotations

from kafka_marshal.adapters.kafka.reading import LONGEST_WAIT_S, STEERED, Pace


def test_a_wait_is_as_long_as_the_silence_before_allows() -> None:
    pace = Pace(0.005, ((1.0, 0.025), (5.0, 0.1)))
    assert [pace.wait_s(quiet) for quiet in (0.0, 1.0, 1.1, 5.0, 5.1, 1e6)] == [0.005, 0.005, 0.025, 0.025, 0.1, 0.1]
    assert Pace(0.05).wait_s(1e6) == 0.05


def test_who_steers_a_busy_reader_waits_for_milliseconds_only() -> None:
    assert STEERED.wait_s(0.0) <= 0.005
    assert max(STEERED.wait_s(quiet) for quiet in range(100)) <= LONGEST_WAIT_S
