"""A short form of the campaign that changes the mode of a live group, on the session's broker."""

from __future__ import annotations

import pytest

from kafka_marshal.testing import RunningKafka
from tests.campaigns.modes.campaign import Options, run_campaign

# A violation counts even if a second try has none.
pytestmark = pytest.mark.flaky(reruns=0)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_nothing_is_lost_twice_at_work_or_out_of_order_when_the_mode_of_a_group_changes(
    kafka_broker: RunningKafka,
) -> None:
    options = Options(
        seed=11,
        modes=("batches", "keys", "coordinated"),
        workers=2,
        stay_s=0.5,
        gentle=False,
        poisons=0,
        tools=False,
    )
    result = run_campaign(options, kafka_broker)
    assert result.violations == [], result.folder
    assert result.counts["conversions"] == 1
    assert result.counts["kills"] + result.counts["stops"] >= 1
    assert result.counts["handled"] >= result.counts["messages"] - result.counts["discarded"] > 500
