"""Stories of operators who open what is done: just that is handled again, however often a record comes."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from typing import Any

import pytest

from kafka_marshal.engine.work.grants import Grants
from kafka_marshal.engine.work.open_messages import Mine, OpenOffsets
from kafka_marshal.engine.work.run import Run
from kafka_marshal.engine.work.tracker import Tracker
from kafka_marshal.testing.simulation import Scenario, simulate, simulate_one
from kafka_marshal.testing.simulation.campaign import Report
from rationalizer import codes
from rationalizer.holes import Hole
from rationalizer.progress import Progress
from rationalizer.settling import Settling
from tests.mutants.oracle import OracleJudge
from tests.mutants.redo_stories import answers_come_late, handlers_are_slow, positions_are_set, written

pytestmark = pytest.mark.flaky(reruns=0)

#: How members hold partitions and handle messages: whole, shared by key or by batches, in lanes, at most once.
FORMS: dict[str, dict[str, Any]] = {
    "claims": {},
    "groups": {"coordinated": True},
    "claims at most once": {"delivery": "at-most-once"},
    "groups at most once": {"delivery": "at-most-once", "coordinated": True},
    "lanes": {"lanes": True},
    "groups with lanes": {"lanes": True, "coordinated": True},
    "parks": {"parks": True},
    "groups with parks": {"parks": True, "coordinated": True},
    "lists": {"parks": True, "lists": True},
    "groups with lists": {"parks": True, "lists": True, "coordinated": True},
    "batches": {"sharing": True},
    "batches with a message that kills": {"sharing": True, "parks": True},
    "checkpoints": {"checkpoints": True},
    "transactions": {"transactions": True},
}
#: These open nothing (R4, U6).
NONE_OPENS = ("checkpoints", "transactions")
#: How long faults happen (HI).
SHORT = 16


def drawn(seed: int, form: str, intervals: int = SHORT) -> Scenario:
    """The first part of a seed's story."""
    return Scenario.from_seed(seed, intervals=intervals, redoes=True, **FORMS[form])


def opened(report: Report) -> int:
    """How many messages operators have opened."""
    return report.counts["opened"]


@pytest.mark.parametrize("form", FORMS)
def test_what_is_opened_is_handled_again_and_nothing_else(form: str) -> None:
    report = Report()
    report.add(simulate_one(drawn(1, form)))
    report.raise_for_violation()
    assert (opened(report) > 0) == (form not in NONE_OPENS)


@pytest.mark.campaign
def test_two_thousand_seeds() -> None:
    report, forms = Report(), list(FORMS)
    for seed in range(2_000):
        report.add(simulate_one(drawn(seed, forms[seed % len(forms)])))
    report.raise_for_violation()


@pytest.mark.slow
@pytest.mark.parametrize("form", ["claims", "groups", "batches"])
def test_another_reading_of_the_rules_agrees(form: str) -> None:
    story = drawn(5, form, intervals=10)
    result = simulate_one(story, judge=OracleJudge(story))
    assert result.violation is None, result.tell()


def test_a_seed_is_one_history() -> None:
    story = drawn(1, "claims", intervals=10)
    assert simulate_one(story).history_digest == simulate_one(story).history_digest


@pytest.mark.slow
def test_operators_redo_in_stories_that_you_ask_for() -> None:
    report = simulate(seeds=[3], redoes=True)
    report.raise_for_violation()
    assert opened(report) > 0


# Planted bugs.


def _a_copy_opens_again(patch: pytest.MonkeyPatch) -> None:
    """R2 without its comparison."""
    may = Settling._may_redo

    def planted(self: Settling, key_hash: int) -> bool:
        self._again = -1
        return may(self, key_hash)

    patch.setattr(Settling, "_may_redo", planted)


def _what_lies_in_holes_is_not_noted(patch: pytest.MonkeyPatch) -> None:
    """R2's last paragraph: a record of which all lies in holes counts, too."""
    open_ = Settling.open

    def planted(self: Settling, first: int, last: int, *rest: Any) -> str:
        holes, before = self._progress.holes, self._progress.again
        in_holes = holes is not None and all(hole is not None for _, _, hole in holes.parts(first, last))
        code = open_(self, first, last, *rest)
        if in_holes:
            self._progress.again = before
        return code

    patch.setattr(Settling, "open", planted)


def _a_position_is_not_noted(patch: pytest.MonkeyPatch) -> None:
    """R1: what was set back is opened on top of that."""
    reposition = Progress.reposition

    def planted(self: Progress, offset: int, again: int = -1) -> str:
        return reposition(self, offset)

    patch.setattr(Progress, "reposition", planted)


def _is_refused_what_was_granted(patch: pytest.MonkeyPatch) -> None:
    """R2: what is done opens, if it was not opened before."""
    patch.setattr(Settling, "_may_redo", lambda self, _: self._again < 0)


def _owners_leave_out_what_is_opened(patch: pytest.MonkeyPatch) -> None:
    """U3: an owner does not fetch what becomes open while it has the partition."""
    meet = OpenOffsets._meet

    def planted(self: OpenOffsets, hole: Hole, first: int, last: int) -> None:
        if hole.is_parked or hole.attempts:
            meet(self, hole, first, last)

    patch.setattr(OpenOffsets, "_meet", planted)


def _owners_fetch_one_more(patch: pytest.MonkeyPatch) -> None:
    """A message that is done and was not named comes again."""
    read = OpenOffsets._read

    def planted(self: OpenOffsets, wanted: Mine) -> None:
        read(self, wanted._replace(last=wanted.last + 1))

    patch.setattr(OpenOffsets, "_read", planted)


def _it_takes_the_place_of_a_run(patch: pytest.MonkeyPatch) -> None:
    """What is opened is the first message of a run in flight."""

    def planted(self: Tracker[Any], piece: Run[Any]) -> None:
        self.runs[piece.first] = piece
        if not piece.is_open:
            insort(self._firsts, piece.first)

    patch.setattr(Tracker, "_add", planted)


def _hands_out_what_was_refused(patch: pytest.MonkeyPatch) -> None:
    """At most once: any answer of the log grants an open message."""
    settled = Grants.settled

    def planted(self: Grants, assignment: Any, entries: Any, answers: Any) -> None:
        settled(self, assignment, entries, [codes.OK for _ in answers])

    patch.setattr(Grants, "settled", planted)


#: Each planted bug, the story that shows it, and the promise that it breaks.
PLANTED: list[tuple[Callable[[pytest.MonkeyPatch], None], Scenario, str]] = [
    (_a_copy_opens_again, drawn(0, "claims"), "redo"),
    (_a_position_is_not_noted, positions_are_set(1), "redo"),
    (_what_lies_in_holes_is_not_noted, handlers_are_slow(12), "redo"),
    (_is_refused_what_was_granted, written(0), "redo"),
    (_owners_leave_out_what_is_opened, drawn(0, "claims"), "liveness"),
    (_owners_fetch_one_more, drawn(0, "claims"), "repeated"),
    (_it_takes_the_place_of_a_run, drawn(1, "groups with lanes", intervals=20), "raised"),
    (_hands_out_what_was_refused, answers_come_late(1), "not granted"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("plant", "story", "promise"), PLANTED, ids=lambda each: getattr(each, "__name__", ""))
def test_planted_bugs_of_redo_are_found(
    plant: Callable[[pytest.MonkeyPatch], None], story: Scenario, promise: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    violation = simulate_one(story).violation
    assert violation is not None
    assert violation.promise == promise
