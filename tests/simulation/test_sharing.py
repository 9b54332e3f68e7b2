"""Stories of members that share partitions by batches, with operators and with members that hold them whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kafka_marshal.engine.claims.applied import LeaseRecords
from kafka_marshal.engine.claims.keys import ShareLease
from kafka_marshal.engine.shares.consumer import SharedAssignment
from kafka_marshal.engine.shares.desk import Desk
from kafka_marshal.errors import ConfigurationError
from kafka_marshal.testing.simulation import Client, Fault, Scenario, simulate, simulate_one
from kafka_marshal.testing.simulation.campaign import Report
from tests.engine.sharers import begins_what_it_gave_back, passes_a_settle_before_it_is_accepted

# A violation counts even if a second try has none: CI's --reruns is not for these.
pytestmark = pytest.mark.flaky(reruns=0)


def test_three_seeds() -> None:
    report = Report()
    for seed in range(3):
        report.add(simulate_one(drawn(seed)))
    report.raise_for_violation()
    assert report.counts["messages"] > 1_000


def test_without_faults_no_message_comes_again() -> None:
    story = replace(Scenario.from_seed(5, intervals=20, sharing=True), faults=())
    result = simulate_one(story)
    assert result.violation is None, result.tell()
    assert result.counts["repeats"] == 0


def test_a_seed_is_one_history() -> None:
    story = Scenario.from_seed(4, intervals=10, sharing=True)
    assert simulate_one(story).history_digest == simulate_one(story).history_digest


def test_what_can_not_be_combined() -> None:
    for options in ({"lanes": True}, {"groups": True}, {"delivery": "at-most-once"}):
        with pytest.raises(ConfigurationError, match="stories of sharing"):
            simulate(seeds=1, sharing=True, **options)


def drawn(seed: int) -> Scenario:
    """The first part of a seed's story."""
    return Scenario.from_seed(seed, intervals=40, sharing=True)


def with_poison(seed: int) -> Scenario:
    """The same, of sharers of whom one message kills each that begins it."""
    return Scenario.from_seed(seed, intervals=40, sharing=True, parks=True)


def test_a_message_that_kills_sharers_is_set_aside_and_no_other() -> None:
    report = Report()
    for seed in (1, 2):
        report.add(simulate_one(with_poison(seed)))
    report.raise_for_violation()


def in_turns(seed: int) -> Scenario:
    """Two sharers: one is stopped until the other has what it had, which dies then, so that it gets it back."""
    strikes = [
        (Fault(at, "stop", "c0", 4.0), Fault(at + 3.2, "crash", "c1", 4.0)) for at in (5.0 + 14.0 * n for n in range(5))
    ]
    return Scenario(
        seed=seed,
        clients=(Client("c0", worker="shares"), Client("c1", worker="shares")),
        faults=tuple(fault for pair in strikes for fault in pair),
        data_partitions=1,
        messages=7.0,
        handling_ms=70.0,
        sharing=True,
    )


def test_what_a_sharer_lost_and_is_given_again_is_handled() -> None:
    result = simulate_one(in_turns(0))
    assert result.violation is None, result.tell()
    assert result.counts["repeats"] > 0


def paused(seed: int) -> Scenario:
    """Admins pause the group often and briefly, while handlers are slow: what is in flight then continues."""
    faults = [Fault(4.0 + 4.0 * n, "brief pause", "", 0.6 + 0.4 * (n % 4)) for n in range(12)]
    workers = ("shares", "shares", "shares-lanes")
    return Scenario(
        seed=seed,
        clients=tuple(Client(f"c{n}", worker=worker) for n, worker in enumerate(workers)),
        faults=tuple(faults),
        data_partitions=2,
        messages=20.0,
        handling_ms=15.0,
        intervals=56,
        sharing=True,
    )


@pytest.mark.slow
def test_what_was_done_between_messages_that_are_given_back_blocks_nothing() -> None:
    """A handler failed in a pause; what it was given back with had been done."""
    result = simulate_one(paused(1))
    assert result.violation is None, result.tell()


# Planted bugs of the client.


def _trusts_its_share_for_ever(patch: pytest.MonkeyPatch) -> None:
    """No T4: what was proven once is trusted as long as the replica shows it."""
    refresh = ShareLease.refresh

    def planted(self: ShareLease) -> None:
        refresh(self)
        if self.hand_out_until:
            self.hand_out_until, self.hand_out_until_s = 1e15, 1e12

    patch.setattr(ShareLease, "refresh", planted)


def _settles_after_it_was_fenced(patch: pytest.MonkeyPatch) -> None:
    """What was in flight when its share was ended is settled by its next one, if the log gives it again."""
    lost, look = SharedAssignment.lost, Desk.look
    left: dict[Any, list[tuple[int, int]]] = {}

    def planted_lost(self: SharedAssignment, reason: str, now: float) -> None:
        place = id(self.consumer), self.key
        left.setdefault(place, []).extend((run.first, run.last) for run in self.tracker.runs.values())
        lost(self, reason, now)

    def planted_look(self: Desk, lease: Any, now: float) -> None:
        look(self, lease, now)
        seat: Any = self._seat
        for first, last in left.get((id(seat.consumer), seat.key), ()):
            for each in self.given.values():
                if first <= each.first <= last:
                    self._done(each.first, min(each.last, last))

    patch.setattr(SharedAssignment, "lost", planted_lost)
    patch.setattr(Desk, "look", planted_look)


def _forgets_holes_at_close(patch: pytest.MonkeyPatch) -> None:
    """At its end a sharer reports all that it has as done."""

    def planted(self: Desk) -> None:
        for messages, covers_from in self._seat.buffer.take_all():
            self._done(covers_from, messages[-1].offset() or 0)
        for given in self.given.values():
            if given.covered_to <= given.last:
                self._done(given.covered_to, given.last)
                given.next = given.covered_to = given.last + 1

    patch.setattr(Desk, "give_back_rest", planted)


def _a_take_that_is_repeated_gives_twice(patch: pytest.MonkeyPatch) -> None:
    """What a take gave is delivered once for each copy of its record that is applied."""
    settled = SharedAssignment.settled

    def planted(self: SharedAssignment, taken: tuple[int, int] | None, now: float) -> None:
        last = self.desk.given.get(max(self.desk.given, default=-1))
        settled(self, taken, now)
        if taken is None and last is not None and last.covered_to > last.last:
            last.next = last.covered_to = last.first

    patch.setattr(SharedAssignment, "settled", planted)


def _a_settle_in_a_pause_is_a_beat(patch: pytest.MonkeyPatch) -> None:
    """H3: what is settled while the group is paused proves the share."""
    applied = LeaseRecords._settle_applied

    def planted(self: LeaseRecords, cp: int, offset: int, record: Any, outcome: Any, own: bool, now: float) -> None:
        if own and record.epoch is not None:
            about = [((record.topic, record.partition), record.epoch)]
            self.book.beat_applied(cp, offset, outcome.log_time, about, now)
        applied(self, cp, offset, record, outcome, own, now)

    patch.setattr(LeaseRecords, "_settle_applied", planted)


def _gives_a_message_to_any_number_of_members(patch: pytest.MonkeyPatch) -> None:
    """U10: what kills each process that begins it is never set aside."""
    begin = Desk.begin

    def planted(self: Desk, epoch: int, stable: int) -> None:
        self._max_deliveries = 1_000
        begin(self, epoch, stable)

    patch.setattr(Desk, "begin", planted)


#: Each planted bug, and the first story that shows it.
PLANTED: list[tuple[Callable[[pytest.MonkeyPatch], None], Callable[[int], Scenario], int]] = [
    (begins_what_it_gave_back, in_turns, 0),
    (_trusts_its_share_for_ever, in_turns, 0),
    (_settles_after_it_was_fenced, in_turns, 11),
    (_forgets_holes_at_close, drawn, 2),
    (_a_take_that_is_repeated_gives_twice, in_turns, 0),
    (passes_a_settle_before_it_is_accepted, drawn, 3),
    (_a_settle_in_a_pause_is_a_beat, drawn, 60),
    (_gives_a_message_to_any_number_of_members, with_poison, 0),
]


@pytest.mark.slow
@pytest.mark.parametrize(("plant", "story", "seed"), PLANTED, ids=lambda each: getattr(each, "__name__", "").strip("_"))
def test_planted_bugs_are_found(
    plant: Callable[[pytest.MonkeyPatch], None],
    story: Callable[[int], Scenario],
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plant(monkeypatch)
    found = (simulate_one(story(each)).violation for each in range(seed, seed + 4))
    assert next((each for each in found if each is not None), None) is not None
