"""Stories of groups that take checkpoints: what their states hold."""

from __future__ import annotations

import pytest

from kafka_marshal.errors import ConfigurationError
from kafka_marshal.testing.simulation import Scenario, simulate, simulate_one
from kafka_marshal.testing.simulation.campaign import Report

# A violation counts even if a second try has none: CI's --reruns is not for these.
pytestmark = pytest.mark.flaky(reruns=0)


@pytest.mark.timeout(300)  # on a busy machine
def test_each_state_holds_what_is_done_once() -> None:
    report = Report()
    for seed in range(12):
        report.add(simulate_one(Scenario.from_seed(seed, intervals=16, checkpoints=True)))
    report.raise_for_violation()
    assert report.counts["checkpoints"] > 50
    assert report.counts["repeats"] > 50


def test_a_seed_is_one_history() -> None:
    story = Scenario.from_seed(5, intervals=10, checkpoints=True)
    assert simulate_one(story).history_digest == simulate_one(story).history_digest


def test_a_story_is_a_script() -> None:
    story = Scenario.from_seed(3, intervals=10, checkpoints=True)
    names: dict[str, object] = {}
    exec(story.script(), names)
    assert names["scenario"] == story


def test_what_can_not_be_combined() -> None:
    for options in ({"lanes": True}, {"transactions": True}, {"delivery": "at-most-once"}, {"worker": print}):
        with pytest.raises(ConfigurationError, match="stories of checkpoints"):
            simulate(seeds=1, checkpoints=True, **options)
