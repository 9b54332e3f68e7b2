"""A short form of the campaign of members that share by batches, on the session's broker."""

from __future__ import annotations

import pytest

from kafka_marshal.testing import RunningKafka
from tests.campaigns.sharing.campaign import Options, run_campaign

# A violation counts even if a second try has none.
pytestmark = pytest.mark.flaky(reruns=0)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_no_message_is_lost_and_each_is_in_one_hand_at_a_time(kafka_broker: RunningKafka) -> None:
    options = Options(
        messages=4_000,
        kills=3,
        workers=4,
        partitions=2,
        seed=3,
        work_ms=1.0,
        kill_every_s=1.5,
        stop_every_s=3.0,
        operator_every_s=2.0,
        poisons=1,
        most_s=120.0,
    )
    result = run_campaign(options, kafka_broker)
    assert result.violations == [], result.folder
    assert result.counts["kills"] >= 3
    assert result.counts["handled"] >= options.messages
