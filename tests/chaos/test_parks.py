"""A short form of the campaign of groups that set messages aside, on the session's broker."""

from __future__ import annotations

import pytest

from kafka_marshal.testing import RunningKafka
from tests.campaigns.parks.campaign import Options, run_campaign

# A violation counts even if a second try has none.
pytestmark = pytest.mark.flaky(reruns=0)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_each_message_is_handled_in_order_or_set_aside_and_redriven(kafka_broker: RunningKafka) -> None:
    options = Options(
        seconds=6.0,
        rate=150.0,
        workers=2,
        seed=3,
        killers=1,
        kill_every_s=1.5,
        stop_every_s=3.0,
        leave_every_s=4.0,
        operator_every_s=1.0,
    )
    result = run_campaign(options, kafka_broker)
    assert result.violations == [], result.folder
    assert result.counts["kills"] >= options.kills
    assert result.counts["killed by a message"] >= 5
    for kind in options.kinds:
        assert result.counts[f"{kind}: set aside"] >= 1
        assert result.counts[f"{kind}: handled"] >= 500
