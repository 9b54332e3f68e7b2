"""The race with a share group, our side of it."""

from __future__ import annotations

import pytest

from benchmarks import share_race
from kafka_marshal.testing.select_broker import RunningKafka


@pytest.mark.slow
def test_waits_and_redelivery_are_measured(kafka_broker: RunningKafka, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(share_race, "WORKERS", 2)
    ground = share_race.Ground(kafka_broker.bootstrap_servers, 0.5)
    middle, late = share_race.at_light_load(ground, "ours")
    assert 0 < middle <= late
    assert share_race.after_a_kill(ground, "ours", watchdog=True) > 0
