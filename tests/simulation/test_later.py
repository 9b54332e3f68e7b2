"""Stories of messages that wait for a time: in the process or the log, across handovers, with operators beside."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from kafka_marshal.client import waiting
from kafka_marshal.engine.work.in_lanes import InLanes
from kafka_marshal.engine.work.open_messages import Mine, OpenOffsets
from kafka_marshal.engine.work.tracker import Buffer
from kafka_marshal.errors import ConfigurationError
from kafka_marshal.testing.simulation import Result, Scenario, simulate, simulate_one
from kafka_marshal.testing.simulation.campaign import Report
from kafka_marshal.testing.simulation.waits import IN_MEMORY_INTERVALS
from tests.mutants.wait_stories import QUIET, QUIET_IN_ORDER, WAIT_STORIES

pytestmark = pytest.mark.flaky(reruns=0)


def drawn(seed: int, *, groups: bool = False, intervals: int = 24) -> Scenario:
    """The first part of a seed's story."""
    return Scenario.from_seed(seed, intervals=intervals, coordinated=groups, parks=True, later=True)


#: One run of each, for all tests.
played = cache(simulate_one)


@pytest.mark.parametrize("groups", [False, True])
@pytest.mark.parametrize("seeds", [1, pytest.param(200, marks=pytest.mark.campaign)])
def test_nothing_begins_too_early_or_waits_for_ever(groups: bool, seeds: int) -> None:
    report = Report()
    for seed in range(seeds):
        report.add(simulate_one(drawn(seed, groups=groups)))
    report.raise_for_violation()
    assert report.counts["waits"] > 5 * seeds
    assert report.counts["waits in the log"] > 2 * seeds


@pytest.mark.parametrize("number", range(len(WAIT_STORIES)))
def test_a_story_that_is_written_down(number: int) -> None:
    result = played(WAIT_STORIES[number])
    assert result.violation is None, result.tell()
    assert result.counts["waits in the log"] > 1


@pytest.mark.slow
def test_lists_wait_too() -> None:
    result = simulate_one(replace(drawn(2), lists=True))
    assert result.violation is None, result.tell()


@pytest.mark.slow
def test_after_a_takeover_what_waits_comes_before_later_messages_of_its_partition() -> None:
    """Found so: messages whose tries an owner had logged before it was cut off began before the one that waits."""
    result = simulate_one(drawn(1, intervals=40))
    assert result.violation is None, result.tell()


def begun_meanwhile(result: Result) -> list[int]:
    """For each message that waited for long, how many others of its partition began meanwhile."""
    hi, found = result.scenario.heartbeat_interval_ms, []
    failed: dict[tuple[object, ...], float] = {}
    begun: list[tuple[float, tuple[object, ...]]] = []
    for name, at, *rest in result.events:
        if name == "failed":
            failed[tuple(rest[1:])] = float(str(at))
        elif name == "begins":
            place = tuple(rest[1:])
            since = failed.pop(place, float("inf"))
            if float(str(at)) - since > IN_MEMORY_INTERVALS * hi:
                found.append(sum(other[:2] == place[:2] and began > since for began, other in begun))
            begun.append((float(str(at)), place))
    return found


def test_others_pass_a_message_that_waits() -> None:
    passed = begun_meanwhile(played(QUIET))
    assert len(passed) > 3
    assert min(passed) > 5


def test_in_the_order_of_the_partition_nothing_passes() -> None:
    passed = begun_meanwhile(played(QUIET_IN_ORDER))
    assert len(passed) > 1
    assert set(passed) == {0}


def test_it_is_an_option_of_parks_and_changes_no_other_story() -> None:
    plain = Scenario.from_seed(3, parks=True)
    assert not plain.later
    assert Scenario.from_seed(3, parks=True, later=True) == replace(plain, later=True)
    with pytest.raises(ConfigurationError, match="stories of parks only"):
        simulate(seeds=1, later=True)


def test_a_seed_is_one_history_and_a_minute_is_a_minute_afterwards() -> None:
    first, again = (simulate_one(drawn(5, intervals=6)) for _ in range(2))
    assert first.history_digest == again.history_digest
    assert waiting.IN_MEMORY_S == 60


# Planted bugs of the client; more are in tests/mutants.


def _begins_at_once_at_the_next_owner(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(InLanes, "_due_times", lambda *_: None)


def _forgets_it_at_a_handover(patch: pytest.MonkeyPatch) -> None:
    """The tries before it are logged again as if it waited for nothing."""
    log_tries = OpenOffsets.log_tries

    def planted(self: OpenOffsets, tries: Any, **options: bool) -> None:
        for mine in [each for each in self._mine.values() if each.until is not None]:
            self._mine[mine.last] = Mine(mine.first, mine.last, mine.key_hash, mine.attempts - 1)
        log_tries(self, tries, **options)

    patch.setattr(OpenOffsets, "log_tries", planted)


def _waits_for_ever_at_the_next_owner(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Buffer, "release", lambda *_: None)


PLANTED: list[tuple[Callable[[pytest.MonkeyPatch], None], Scenario]] = [
    (_begins_at_once_at_the_next_owner, WAIT_STORIES[3]),
    (_forgets_it_at_a_handover, WAIT_STORIES[1]),
    (_waits_for_ever_at_the_next_owner, WAIT_STORIES[3]),
]


@pytest.mark.parametrize(("plant", "story"), PLANTED, ids=lambda each: getattr(each, "__name__", "").strip("_"))
def test_planted_bugs_of_waits_are_found(
    plant: Callable[[pytest.MonkeyPatch], None], story: Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    assert simulate_one(story).violation is not None
