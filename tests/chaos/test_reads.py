"""A short form of the campaign of members that read partitions together, on the session's broker."""

from __future__ import annotations

import pytest

from kafka_marshal.testing import RunningKafka
from tests.campaigns.reads.campaign import Options, run_campaign

# A violation counts even if a second try has none.
pytestmark = pytest.mark.flaky(reruns=0)


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("gentle", [True, False], ids=["opened-and-closed", "killed-and-stopped"])
def test_no_message_is_lost_and_each_comes_in_order_to_the_member_with_its_key(
    kafka_broker: RunningKafka, gentle: bool
) -> None:
    options = Options(seconds=10.0, backlog=5_000, seed=3, kill_every_s=3.0, stop_every_s=3.0, gentle=gentle)
    result = run_campaign(options, kafka_broker)
    assert result.violations == [], result.folder
    assert result.counts["handled"] >= result.counts["messages"] > options.backlog
    assert result.counts["read by another"] > 0
