"""A short campaign on a separate broker, and a short soak."""

from __future__ import annotations

from typing import Any

import pytest

from tests.campaigns.chaos import Options, run_campaign
from tests.campaigns.soak import STEADY, soak

# A violation counts even if a second try has none, so CI's --reruns is not for these. But a broker that did not start
# on a busy machine breaks no promise.
pytestmark = pytest.mark.flaky(reruns=1, only_rerun=["BrokerDiedError"])

#: On a busy machine many workers are killed before they reach their point, and with the heartbeats of the long
#: campaigns leases would be taken from workers that only wait for a processor.
SHORT: Any = {
    "minutes": 0.2,
    "heartbeat_interval_ms": 1000,
    "network_every_s": 3.0,
    "broker_every_s": 7.0,
}


@pytest.mark.broker
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("groups", [False, True], ids=["claimed", "coordinated"])
def test_twelve_seconds_of_faults(groups: bool) -> None:
    least = {"kills": 8, "points": 1, "stops": 2} | ({} if groups else {"broker": 1})
    result = run_campaign(Options(seed=20 + groups, groups=groups, least=least, **SHORT))
    assert result.findings.violations == []
    assert result.counts["kills"] >= 8
    assert sum(result.points.values()) >= 1
    assert result.counts["stops"] >= 2
    assert groups or result.faults["broker"] >= 1
    assert result.findings.counts["messages"] >= 250
    assert result.findings.counts["digests"] >= 3


@pytest.mark.cluster3
@pytest.mark.campaign
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_leaders_change() -> None:
    result = run_campaign(Options(minutes=1.0, seed=30, brokers=3, broker_every_s=15.0))
    assert result.findings.violations == []
    assert result.counts["kills"] >= 15
    assert result.faults.get("broker", 0) >= 2


@pytest.mark.broker
@pytest.mark.campaign
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_minutes_of_soak() -> None:
    result = soak(Options(minutes=2.0, seed=40, steady=STEADY))
    assert result.findings.violations == []
    assert set(result.series.samples) == set(STEADY)
    assert result.counts["stops"] + sum(result.faults.values()) >= 4
