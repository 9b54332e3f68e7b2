"""Small scope with real engines: every order of a few moves, and a broken engine is found."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from kafka_marshal.engine.claims import leases
from kafka_marshal.engine.claims.leases import HeldLease, LeaseBook
from kafka_marshal.engine.engine import Engine
from kafka_marshal.engine.policies import Balanced, Wishes
from kafka_marshal.engine.work.assignment import Assignment, Run, Stage
from kafka_marshal.engine.work.grants import Grants
from kafka_marshal.engine.work.tracker import Tracker
from rationalizer import Lease, Outcome
from rationalizer.leases import machine
from tests.campaigns.small_scope import records as exhaustive
from tests.campaigns.small_scope.engine import SCENARIOS, explore_engines, search, searching
from tests.campaigns.small_scope.records import BrokenError

BY_NAME = {scenario.name: scenario for scenario in SCENARIOS}


def test_every_order_of_three_moves_in_every_scenario() -> None:
    found = list(explore_engines(3))
    assert [x.scenario.name for x in found] == list(BY_NAME)
    assert all(x.depth == 3 and x.states > 200 for x in found)
    assert {kind for x in found for kind in x.moves} > {
        "LAND",
        "LOSE",
        "TURN",
        "READ",
        "TAKE",
        "DONE",
        "RESTART",
        "STALE",
    }


def test_processes_find_the_same() -> None:
    names = ["held", "once"]
    alone, together = list(explore_engines(2, names=names)), list(explore_engines(2, jobs=2, names=names))
    assert alone == together


def test_the_command_reports_what_was_searched_and_what_was_not_met(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "found.json"
    assert exhaustive.main(["--engine", "--depth", "1", "--jobs", "1", "--json", str(path)]) == 1
    assert json.loads(path.read_text())["engine"]["not_met"]
    told = capsys.readouterr().out
    assert "held       two members hold one partition each" in told
    assert "not met: " in told.splitlines()[-1]


class Broken:
    """Engines that are each broken in one place."""

    @staticmethod
    def trusts_for_three_hi(patch: Callable[..., None]) -> None:
        prove = LeaseBook._prove

        def for_longer(self: LeaseBook, lease: HeldLease, sent_at: float, log_time: int) -> None:
            prove(self, lease, sent_at, log_time)
            lease.valid_until += lease.heartbeat_interval_ms
            lease.refresh()

        patch(LeaseBook, "_prove", for_longer)

    @staticmethod
    def has_no_margin(patch: Callable[..., None]) -> None:
        patch(leases, "proof_margin_ms", lambda hi: 0.0)

    @staticmethod
    def hands_out_whatever_the_clock_says(patch: Callable[..., None]) -> None:
        patch(Assignment, "is_open", lambda self, now: self.stage is Stage.ACTIVE)

    @staticmethod
    def trusts_what_it_has_released(patch: Callable[..., None]) -> None:
        def refresh(self: HeldLease) -> None:
            self.proven_until = self.hand_out_until = self.valid_until

        patch(HeldLease, "refresh", refresh)

    @staticmethod
    def commits_what_is_in_hand(patch: Callable[..., None]) -> None:
        hand_out = Tracker.hand_out

        def at_once(self: Tracker[Assignment], run: Run) -> None:
            hand_out(self, run)
            self.done.commit([(run.first, run.last)])

        patch(Tracker, "hand_out", at_once)

    @staticmethod
    def hands_out_what_it_has_handed_out(patch: Callable[..., None]) -> None:
        take = Assignment.take

        def keeps(self: Assignment, max_messages: int, iterating: bool, now: float) -> Run:
            run = take(self, max_messages, iterating, now)
            self.buffer.put_back(run.messages, run.covers_from)
            return run

        patch(Assignment, "take", keeps)

    @staticmethod
    def begins_where_it_likes(patch: Callable[..., None]) -> None:
        begin = Assignment.begin
        patch(Assignment, "begin", lambda self, offset, stable, ranges: begin(self, 0, -1, []))

    @staticmethod
    def does_not_wait_for_the_grant(patch: Callable[..., None]) -> None:
        propose = Grants.propose

        def granted(self: Grants, now: float) -> Assignment | None:
            found = propose(self, now)
            if found is not None and found.grant is not None:
                found.grant.accepted = True
            return found

        patch(Grants, "propose", granted)

    @staticmethod
    def does_not_listen_to_a_refusal(patch: Callable[..., None]) -> None:
        Broken.hands_out_what_it_has_handed_out(patch)
        applied = Grants.applied

        def accepts(self: Grants, assignment: Assignment, last: int, accepted: bool, code: str, now: float) -> None:
            applied(self, assignment, last, True, code, now)

        patch(Grants, "applied", accepts)

    @staticmethod
    def reports_what_it_has_handed_out(patch: Callable[..., None]) -> None:
        finish = Grants.finish_granted

        def from_the_first(self: Grants, now: float) -> None:
            assert self.granted is not None
            self.granted.taken.clear()
            self.granted.recalled = list(self.granted.messages)
            finish(self, now)

        patch(Grants, "finish_granted", from_the_first)

    @staticmethod
    def does_not_report_what_it_gives_up(patch: Callable[..., None]) -> None:
        patch(searching, "FINISHED_ONE_IN", 5)
        patch(Grants, "report", lambda self, key, first, last: None)

    @staticmethod
    def writes_into_its_replica(patch: Callable[..., None]) -> None:
        applied = Engine.applied

        def writes(self: Engine, cp: int, offset: int, outcome: Outcome, now: float) -> None:
            applied(self, cp, offset, outcome, now)
            for lease in self.worlds[cp].leases():
                lease.last_beat -= 1

        patch(Engine, "applied", writes)

    @staticmethod
    def takes_progress_back(patch: Callable[..., None]) -> None:
        def record_offset(lease: Lease, last_offset: int | None, context: object) -> str:
            if last_offset is not None:
                lease.progress.stable = -1 if lease.progress.stable >= 0 else last_offset
            return "OK"

        patch(machine, "_record_offset", record_offset)

    @staticmethod
    def wants_nothing(patch: Callable[..., None]) -> None:
        patch(searching, "FINISHED_ONE_IN", 2)
        patch(Balanced, "wishes", lambda self, view, own, now: Wishes())


@pytest.mark.parametrize(
    ("how", "scenario", "rule"),
    [
        (Broken.trusts_for_three_hi, "held", "for too long"),
        (Broken.has_no_margin, "held", "for too long"),
        (Broken.hands_out_whatever_the_clock_says, "held", "does not hold it"),
        (Broken.trusts_what_it_has_released, "handover", "trusts what it does not hold"),
        (Broken.commits_what_is_in_hand, "held", "C14"),
        (Broken.hands_out_what_it_has_handed_out, "held", "twice under one epoch"),
        (Broken.begins_where_it_likes, "held", "P6"),
        (Broken.begins_where_it_likes, "once", "no end of it"),
        (Broken.does_not_listen_to_a_refusal, "once", "C12"),
        (Broken.does_not_wait_for_the_grant, "once start", "C13"),
        (Broken.reports_what_it_has_handed_out, "once", "reported as not handed out"),
        (Broken.does_not_report_what_it_gives_up, "once", "neither handed out nor reported"),
        (Broken.writes_into_its_replica, "start", "S1"),
        (Broken.takes_progress_back, "held", "C5"),
        (Broken.wants_nothing, "start", "after the last fault"),
    ],
)
def test_what_is_broken_is_seen(
    how: Callable[[Callable[..., None]], None], scenario: str, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    how(monkeypatch.setattr)
    with pytest.raises(BrokenError, match=rule):
        search(BY_NAME[scenario], depth=9, most=20_000)
