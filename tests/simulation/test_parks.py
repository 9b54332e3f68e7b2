"""Stories of workers that set messages aside: what the log calls done was handled, or it is open; no other is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kafka_marshal import Group, Retry
from kafka_marshal.adapters.message import Message
from kafka_marshal.engine.work.in_lanes import InLanes
from kafka_marshal.engine.work.lane import Lane, LaneRun
from kafka_marshal.engine.work.lanes import Lanes
from kafka_marshal.engine.work.open_messages import Goal, OpenOffsets, SettledRequest
from kafka_marshal.errors import ConfigurationError
from kafka_marshal.testing.simulation import Client, Fault, Job, Scenario, simulate, simulate_one
from kafka_marshal.testing.simulation.campaign import Report
from rationalizer.holes import Hole

pytestmark = pytest.mark.flaky(reruns=0)


class NeverWorksError(Exception):
    """What a bad message raises."""


def sets_aside(job: Job) -> None:
    """Every seventh message always fails."""

    def handle(message: Message) -> None:
        if (message.offset() or 0) % 7 == 3:
            job.fail(message)
            raise NeverWorksError
        job.handle(message)

    with job.marshal() as marshal:
        consumer = (
            marshal.consumer([job.topic])
            if job.strategy is None
            else marshal.consumer(
                [job.topic],
                mode=Group(strategy=job.strategy, session_timeout=job.session_timeout, allow_key_share=True),
            )
        )
        consumer.run(handle, concurrency=4, order="none", retry=Retry(2, (0.01, 0.02)), park=True)


@pytest.mark.slow
@pytest.mark.parametrize("groups", [False, True])
@pytest.mark.parametrize("seeds", [1, pytest.param(200, marks=pytest.mark.campaign)])
def test_what_is_passed_was_handled_or_is_open(seeds: int, groups: bool) -> None:
    report, intervals = Report(), 24 if seeds == 1 else 88
    for seed in range(seeds):
        story = Scenario.from_seed(seed, worker=True, intervals=intervals, coordinated=groups, parks=True)
        report.add(simulate_one(story, sets_aside))
    report.raise_for_violation()


def drawn(seed: int, *, groups: bool = False, intervals: int = 40) -> Scenario:
    """The first part of a seed's story of the built-in workers."""
    return Scenario.from_seed(seed, intervals=intervals, coordinated=groups, parks=True)


def restarted(seed: int) -> Scenario:
    """Two workers that are asked to end in turn; everything that they send arrives."""
    faults = tuple(Fault(3.0 + 2.3 * n, "term", f"c{n % 2}", 0.5) for n in range(10))
    clients = (Client("c0", worker="parks"), Client("c1", worker="parks"))
    return Scenario(seed=seed, clients=clients, faults=faults, intervals=30, order="key", parks=True)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_tries_survive_workers_that_end(seed: int) -> None:
    result = simulate_one(restarted(seed))
    assert result.violation is None, result.tell()


@pytest.mark.parametrize("groups", [False, True])
def test_what_is_set_aside_at_the_end_is_what_a_plain_account_says(groups: bool) -> None:
    report = Report()
    for seed in range(2):
        report.add(simulate_one(drawn(seed, groups=groups, intervals=24)))
    report.raise_for_violation()
    assert report.counts["messages"] > 500


@pytest.mark.parametrize("groups", [False, True])
def test_handlers_that_get_lists(groups: bool) -> None:
    """What fails in a list is tried alone or set aside, each key in order, whatever process is killed."""
    report = Report()
    for seed in (0, 9):
        report.add(simulate_one(replace(drawn(seed, groups=groups, intervals=24), lists=True)))
    report.raise_for_violation()


def test_a_seed_is_one_history() -> None:
    assert simulate_one(drawn(1, intervals=10)).history_digest == simulate_one(drawn(1, intervals=10)).history_digest


def test_what_can_not_be_combined() -> None:
    for options in ({"transactions": True}, {"checkpoints": True}, {"delivery": "at-most-once"}):
        with pytest.raises(ConfigurationError, match="stories of parks"):
            simulate(seeds=1, parks=True, **options)


# Planted bugs of the client.


def _passes_a_park_before_it_is_accepted(patch: pytest.MonkeyPatch) -> None:
    park = OpenOffsets.park

    def planted(self: OpenOffsets, offset: int, covers_from: int, *rest: Any) -> None:
        park(self, offset, covers_from, *rest)
        self._holder.open_in_log(covers_from, offset)

    patch.setattr(OpenOffsets, "park", planted)


def _settles_a_park_twice(patch: pytest.MonkeyPatch) -> None:
    """What the log shows as set aside is reported as done, too."""
    settled = OpenOffsets._settled

    def planted(self: OpenOffsets, of: SettledRequest) -> None:
        settled(self, of)
        if of.request.kind is Goal.PARKED:
            self.settling.want(of.request._replace(kind=Goal.DONE))

    patch.setattr(OpenOffsets, "_settled", planted)


def _forgets_what_is_redriven(patch: pytest.MonkeyPatch) -> None:
    """An owner does not fetch what an operator frees while it has the partition."""
    meet = OpenOffsets._meet

    def planted(self: OpenOffsets, hole: Hole, first: int, last: int) -> None:
        if hole.is_parked or hole.attempts:
            meet(self, hole, first, last)

    patch.setattr(OpenOffsets, "_meet", planted)


def _forgets_tries_at_a_handover(patch: pytest.MonkeyPatch) -> None:
    """The next owner counts from one."""
    put = OpenOffsets.put

    def planted(self: OpenOffsets, messages: list[Message]) -> None:
        put(self, messages)
        self.tried.clear()

    patch.setattr(OpenOffsets, "put", planted)


def _does_not_log_tries_at_a_handover(patch: pytest.MonkeyPatch) -> None:
    """Tries that waited are not in the log when the partition is released."""
    patch.setattr(InLanes, "tries", lambda *_: [])


def _begins_the_next_before_the_log_has_the_last(patch: pytest.MonkeyPatch) -> None:
    """What was tried alone counts as tried again when the next message kills the process."""
    done = Lanes.done

    def planted(self: Lanes, lane: Lane, owner: LaneRun) -> bool:
        is_ready = done(self, lane, owner)
        self._alone = {place: has_ended for place, has_ended in self._alone.items() if not has_ended}
        return is_ready

    patch.setattr(Lanes, "done", planted)


#: Each planted bug, and the story that shows it.
PLANTED: list[tuple[Callable[[pytest.MonkeyPatch], None], Scenario]] = [
    (_passes_a_park_before_it_is_accepted, drawn(0)),
    (_settles_a_park_twice, drawn(0)),
    (_forgets_what_is_redriven, drawn(0)),
    (_forgets_tries_at_a_handover, restarted(11)),
    (_does_not_log_tries_at_a_handover, restarted(0)),
    (_begins_the_next_before_the_log_has_the_last, drawn(15, groups=True)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("plant", "story"), PLANTED, ids=lambda each: getattr(each, "__name__", "").strip("_"))
def test_planted_bugs_of_parks_are_found(
    plant: Callable[[pytest.MonkeyPatch], None], story: Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    assert simulate_one(story).violation is not None


@pytest.mark.slow
def test_a_park_that_is_passed_too_early_is_found_in_your_own_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    _passes_a_park_before_it_is_accepted(monkeypatch)
    assert simulate(sets_aside, seeds=6, small=False, parks=True).broken
