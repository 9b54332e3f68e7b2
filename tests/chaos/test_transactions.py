"""A short form of the transactions campaign, on the session's broker."""

from __future__ import annotations

import pytest

from kafka_marshal.testing import RunningKafka
from tests.campaigns.transactions.campaign import Options, run_campaign

# A violation counts even if a second try has none.
pytestmark = pytest.mark.flaky(reruns=0)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "coordinated", [pytest.param(False, marks=pytest.mark.campaign), True], ids=["claimed", "coordinated"]
)
def test_each_output_is_read_once_and_in_order(kafka_broker: RunningKafka, coordinated: bool) -> None:
    options = Options(kills=8, seed=5, coordinated=coordinated, stop_every_s=1.5, operator_every_s=1.0, most_s=60.0)
    result = run_campaign(options, kafka_broker)
    assert result.violations == [], result.folder
    assert result.kills >= 8
    assert result.outputs >= 100
