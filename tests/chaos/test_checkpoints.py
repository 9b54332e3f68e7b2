"""A short form of the checkpoints campaign, on the session's broker."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kafka_marshal.testing import RunningKafka
from tests.campaigns.checkpoints.campaign import KINDS, Options, run_campaign

# A violation counts even if a second try has none.
pytestmark = pytest.mark.flaky(reruns=0)

SHORT = Options(
    kills=4, seed=5, workers=("loop", "run", "batches"), partitions=4, life_s=3.0, most_s=12.0, stop_every_s=3.0,
    operator_every_s=1.5, deploy_every_s=5.0,
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "kind", [x if x == "pieces" else pytest.param(x, marks=pytest.mark.campaign) for x in sorted(KINDS)]
)
def test_states_are_those_of_a_plain_count(kafka_broker: RunningKafka, kind: str) -> None:
    options = replace(SHORT, **KINDS[kind])
    result = run_campaign(options, kafka_broker)
    assert result.violations == [], result.folder
    assert result.counts["kills"] + result.counts["leaves"] >= 4
    assert result.account.cuts >= 10
