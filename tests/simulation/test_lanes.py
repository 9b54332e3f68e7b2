"""Stories of workers with lanes (``consumer.run``), with claims and in coordinated groups."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kafka_marshal import Rate
from kafka_marshal.errors import ConfigurationError
from kafka_marshal.testing.simulation import Job, Scenario, simulate, simulate_one
from kafka_marshal.testing.simulation.campaign import Report
from tests.mutants.lane_stories import LANE_STORIES

# A violation counts even if a second try has none: CI's --reruns is not for these.
pytestmark = pytest.mark.flaky(reruns=0)


@pytest.mark.slow
@pytest.mark.timeout(300)  # on a busy machine
@pytest.mark.parametrize("coordinated", [False, True])
def test_two_seeds(coordinated: bool) -> None:
    report = Report()
    for seed in range(2):
        report.add(simulate_one(Scenario.from_seed(seed, intervals=40, coordinated=coordinated, lanes=True)))
    report.raise_for_violation()
    assert report.counts["messages"] > 1_000
    assert report.counts["repeats"] > 3


@pytest.mark.parametrize("number", range(len(LANE_STORIES)))
def test_a_story_that_is_written_down(number: int) -> None:
    """Each exposes a planted bug that seeds meet too rarely."""
    result = simulate_one(LANE_STORIES[number])
    assert result.violation is None, result.tell()


def test_a_member_that_joins_first_when_its_successor_has_left_may_join_again() -> None:
    # It was stopped before it had joined; a hanging handler made it leave and join again.
    result = simulate_one(Scenario.from_seed(35, intervals=40, coordinated=True, lanes=True))
    assert result.violation is None, result.tell()


def test_each_order_is_drawn_and_none_is_at_most_once() -> None:
    drawn = [Scenario.from_seed(seed, lanes=True) for seed in range(40)]
    assert {story.order for story in drawn} == {"key", "partition", "none"}
    assert {story.delivery for story in drawn} == {"at-least-once"}
    assert {client.worker for story in drawn for client in story.clients} == {"lanes", "iterate", "poll", "by-hand"}
    assert {Scenario.from_seed(seed).order for seed in range(40)} == {None}
    with pytest.raises(ConfigurationError, match="at-least-once"):
        simulate(seeds=1, lanes=True, delivery="at-most-once")


def test_a_seed_is_one_history_in_groups_with_an_operator_too() -> None:
    first, again = (simulate_one(Scenario.from_seed(3, coordinated=True)) for _ in range(2))
    assert "evict" in {fault.kind for fault in first.scenario.faults}
    assert first.history_digest == again.history_digest


def with_lanes(job: Job) -> None:
    """A user's worker."""
    with job.marshal() as marshal, marshal.consumer([job.topic]) as consumer:
        consumer.run(job.handle, concurrency=4, order=job.order)


def test_an_own_worker_has_lanes() -> None:
    simulate(with_lanes, seeds=2, lanes=True).raise_for_violation()


def with_rates(job: Job) -> None:
    """A user's worker whose messages wait for tokens, and have priorities."""
    rate = Rate(200, burst=5, key=lambda message: (message.offset() or 0) % 3, of_group=True)
    with job.marshal() as marshal, marshal.consumer([job.topic]) as consumer:
        consumer.run(
            job.handle, concurrency=4, order=job.order, rate=rate, priority=lambda message: (message.offset() or 0) % 10
        )


def test_an_own_worker_has_rates_and_priorities() -> None:
    simulate(with_rates, seeds=2, lanes=True).raise_for_violation()


def forgets(job: Job) -> None:
    """Wrong: assumes that its handlers are faster than they are."""
    with job.marshal() as marshal, marshal.consumer([job.topic]) as consumer:
        consumer.run(lambda message: job.start(lambda: job.handle(message)), order=job.order)


def test_an_own_worker_whose_handlers_return_too_soon_is_found() -> None:
    [broken] = simulate(forgets, seeds=3, lanes=True, small=False).broken
    assert broken.violation is not None
    assert broken.violation.promise == "lost"


@pytest.mark.parametrize("seed", [1, 4])
def test_handlers_that_get_lists(seed: int) -> None:
    report = Report()
    for coordinated in (False, True):
        story = Scenario.from_seed(seed, intervals=24, coordinated=coordinated, lanes=True, lists=True)
        report.add(simulate_one(story))
    report.raise_for_violation()
    assert report.counts["messages"] > 500


def test_lists_are_of_lanes_or_parks() -> None:
    assert Scenario.from_seed(3, lanes=True, lists=True) == replace(Scenario.from_seed(3, lanes=True), lists=True)
    with pytest.raises(ConfigurationError, match="stories of lanes or of parks"):
        simulate(seeds=1, lists=True)
