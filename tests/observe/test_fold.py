"""The state of workers by the log's records, in single situations."""

from __future__ import annotations

import pytest

from kafka_marshal.observe import fold
from kafka_marshal.observe.fold import Fold, Worker
from kafka_marshal.observe.rows import Verdict, WorkerRow, verdict
from rationalizer import (
    BeatEntry,
    ClaimingPartition,
    ClaimingShare,
    ConfigureGroup,
    ForgetGroup,
    GroupHeartbeat,
    Heartbeat,
    HeartbeatBatch,
    JoinGroup,
    LeaveGroup,
    Record,
    ReleaseGroup,
    ReleasingPartition,
    Upgrade,
    World,
    codes,
    encode,
    route_lease,
)
from rationalizer.history import End
from rationalizer.wire.records import KINDS
from tests.fleet import Fleet

A = ("host/17/1.0/x", "a", "g")
B = ("host/18/1.0/x", "b", "g")
OPERATOR = ("op/1", "operator", "g")


class Log:
    """Two partitions of the log; unread records are read partition by partition."""

    def __init__(self) -> None:
        self.worlds = {cp: World(cp, 2) for cp in (0, 1)}
        self._waiting: dict[int, list[tuple[Record, int]]] = {0: [], 1: []}
        self.fold = Fold()
        for world in self.worlds.values():
            self.fold.begin(world)

    def add(self, record: Record, at: int, cp: int = 0) -> None:
        self._waiting[cp].append((record, at))

    def read(self) -> None:
        for cp, records in self._waiting.items():
            world = self.worlds[cp]
            for record, at in records:
                self.fold.see(cp, world.apply(world.next_offset, at, encode(record)))
            records.clear()

    def run(self, client: str = "a") -> Worker:
        self.read()
        return next(run for run in self.fold.workers() if run.client == client)


#: A partition of topic t in each CP.
T0, T1 = (("t", next(number for number in range(50) if route_lease("t", number, 2) == cp)) for cp in (0, 1))


def test_a_batch_of_beats_is_a_sign_of_life() -> None:
    log = Log()
    log.add(ClaimingPartition(*A, *T0, 1_000), 0)
    log.add(HeartbeatBatch(*A, (BeatEntry(*T0, 0, 5),)), 700)
    assert log.run().last_at == 700
    assert log.fold.workers(701) == []
    assert log.fold.owners[0].now["g", *T0].last_beat == 700


def test_one_that_waits_and_one_that_released_all() -> None:
    log = Log()
    log.add(ClaimingPartition(*A, *T0, 1_000), 0)
    log.add(ClaimingPartition(*B, *T0, 1_000), 100)
    assert (log.run("b").waits, log.run("b").released) == (True, False)
    log.add(ReleasingPartition(*A, *T0, 0, 5), 200)
    assert (log.run().released, log.run().last_at) == (True, 200)


def test_one_that_gave_up_a_part_and_was_stopped_released_nothing_by_that() -> None:
    """Whichever CP is read first: its last loss is what others took over."""
    for released, taken in ((T0, T1), (T1, T0)):
        log, cp = Log(), (0, 1) if released is T0 else (1, 0)
        for place, part in ((released, cp[0]), (taken, cp[1])):
            log.add(ClaimingPartition(*A, *place, 1_000), 0, part)
        log.add(ReleasingPartition(*A, *released, 0, 5), 100, cp[0])
        log.add(ClaimingPartition(*A, *released, 1_000), 150, cp[0])
        log.add(ReleasingPartition(*A, *released, 2, 5), 200, cp[0])
        log.add(HeartbeatBatch(*A, (BeatEntry(*taken, 0, 5),)), 900, cp[1])
        log.add(ClaimingPartition(*B, *taken, 1_000), 5_000, cp[1])
        run = log.run()
        assert (run.last_at, run.lost[0], run.ended, run.released) == (900, 5_000, End.REPLACED, False)


def test_sharers_that_wait_that_left_that_died_and_that_were_evicted() -> None:
    log = Log()
    log.add(Upgrade("x", "admin", "any", 4), 0)
    log.add(ClaimingShare(*A, *T0, 1_000, None, None, None), 10)
    log.add(ClaimingShare(*A, *T1, 1_000, None, None, None), 10, 1)
    log.worlds[1].apply(0, 0, encode(Upgrade("x", "admin", "any", 4)))
    log.add(ClaimingShare(*B, *T0, 1_000, 0, 9, None), 20)
    assert (log.run("b").waits, log.run("b").released) == (True, False)
    log.add(ReleasingPartition(*A, *T0, 1, None), 200)
    log.add(Heartbeat(*A, *T1, 1, None), 300, 1)
    assert not log.run("a").released  # it may have died since, with its other share
    log.add(ReleasingPartition(*A, *T1, 1, None), 400, 1)
    assert log.run("a").released

    log.add(ClaimingShare(*B, *T0, 1_000, 0, 9, None), 500)
    assert log.run("b").refused == ""
    log.add(ReleasingPartition("op/1", "b", "g", *T0, 4, None), 600)
    assert log.run("b").asked_at == 600
    log.add(ReleasingPartition(*OPERATOR[:2], "g", *T0, 4, None), 700)
    log.add(ReleasingPartition(*B, *T0, 4, None), 700)
    assert (log.run("b").is_evicted, log.run("b").evictor, log.run("b").released) == (True, "operator", False)


def test_one_whose_share_was_refused_in_this_mode_says_so() -> None:
    row = WorkerRow("g", "a", "i", 100, refused=codes.WRONG_MODE, interval_ms=1_000)
    assert row.doing.startswith("waits: another mode has left messages open")
    assert not row.is_silent


def test_one_that_wanted_more_and_was_stopped_does_not_wait() -> None:
    log = Log()
    log.add(ClaimingPartition(*B, *T0, 1_000), 0)
    log.add(ClaimingPartition(*A, *T1, 1_000), 0, 1)
    log.add(ClaimingPartition(*A, *T0, 1_000), 500)
    log.add(ClaimingPartition(*B, *T1, 1_000), 5_000, 1)
    assert (log.run().waits, log.run().ended) == (False, End.REPLACED)


def test_one_that_was_evicted_until_it_claims_again() -> None:
    log = Log()
    log.add(ClaimingPartition(*A, *T0, 1_000), 0)
    log.add(Heartbeat(*A, *T0, 0, 5), 900)
    log.add(ReleasingPartition(*OPERATOR, *T0, 0, None), 1_000)
    log.add(ReleasingPartition(*A, *T0, 0, None), 1_010)
    run = log.run()
    assert (run.is_evicted, run.evictor, run.evicted[0], run.last_at) == (True, "operator", 1_010, 900)
    assert (run.was_alive, run.asked_at, run.released) == (True, None, False)
    assert [each.client for each in log.fold.workers()] == ["a"], "who evicts is no worker"
    log.add(ClaimingPartition(*A, *T0, 1_000), 9_000)
    assert (log.run().is_evicted, log.run().last_at) == (False, 9_000)


def test_one_that_was_dead_when_it_was_evicted() -> None:
    log = Log()
    log.add(ClaimingPartition(*A, *T0, 1_000), 0)
    log.add(ReleasingPartition(*OPERATOR, *T0, 0, None), 5_000)
    log.add(ReleasingPartition(*A, *T0, 0, None), 5_010)
    assert (log.run().is_evicted, log.run().was_alive) == (True, False)


def test_one_that_was_asked_to_hand_over_until_it_is_started_again() -> None:
    log = Log()
    log.add(ClaimingPartition(*A, *T0, 1_000), 0)
    log.add(ReleasingPartition("operator", "a", "g", *T0, 0, None), 500)
    assert log.run().asked_at == 500
    log.add(ReleasingPartition(*A, *T0, 0, 5), 600)
    assert (log.run().asked_at, log.run().released) == (500, True)
    log.add(ClaimingPartition("host/19/1.0/y", "a", "g", *T0, 1_000), 700)
    assert (log.run().instance, log.run().asked_at) == ("host/19/1.0/y", None)


def test_a_late_record_of_an_epoch_before_asks_for_nothing() -> None:
    log = Log()
    log.add(ClaimingPartition(*A, *T0, 1_000), 0)
    log.add(ReleasingPartition(*A, *T0, 0, 5), 100)
    log.add(ClaimingPartition(*A, *T0, 1_000), 200)
    log.add(ReleasingPartition("before", "a", "g", *T0, 0, 5), 300)
    assert log.run().asked_at is None


def test_an_admin_is_no_worker() -> None:
    log = Log()
    log.add(ReleaseGroup("x", "admin", "g", 50_000), 0)
    log.add(ClaimingPartition("x", "admin", "g", *T0, 1_000), 100)
    log.read()
    assert log.fold.workers() == []


def test_it_may_begin_in_the_middle() -> None:
    log = Log()
    log.add(ClaimingPartition(*A, *T0, 1_000), 0)
    log.read()
    log.fold = Fold()
    assert not log.fold.follows(log.worlds[0])
    for world in log.worlds.values():
        log.fold.begin(world)
    assert (log.run().last_at, log.run().interval_ms) == (0, 1_000)
    log.add(ClaimingPartition(*B, *T0, 1_000), 5_000)
    assert log.run().ended is End.REPLACED


class Members:
    """A coordinated group's log, record by record."""

    def __init__(self) -> None:
        self.world, self.fold, self.now = World(0, 1), Fold(), 0
        self.fold.begin(self.world)
        self.fleet = Fleet("g", 1, self.append)
        self.fleet.upgrade()

    def append(self, record: Record, cp: int) -> int:
        self.now += 100
        self.fold.see(0, self.world.apply(self.world.next_offset, self.now, encode(record)))
        return self.world.next_offset - 1

    def run(self, client: str = "a") -> Worker:
        return next(run for run in self.fold.workers() if run.client == client)


def test_members_of_a_coordinated_group() -> None:
    log = Members()
    generation = log.fleet.join("a", {"t": 1})
    assert (log.run().last_at, log.run().asked_at, log.run().interval_ms) == (200, None, 5_000)
    log.append(LeaveGroup("operator", *log.fleet.ids("a")[1:], generation), 0)
    assert log.run().asked_at == 300
    log.fleet.leave("a", generation)
    assert (log.run().asked_at, log.run().released) == (300, True)
    log.append(JoinGroup("b1", "b", "g", "", 0, 1_000, "worst", False, "", (("t", 1),)), 0)
    assert (log.run("b").rejected, log.run("b").waits) == ("UNKNOWN_PARTITIONING_STRATEGY", False)


def test_a_member_that_is_evicted_says_by_whom() -> None:
    log = Members()
    log.fleet.join("a", {"t": 1})
    generation = log.fleet.join("b", {"t": 1})
    log.append(GroupHeartbeat(*log.fleet.ids("a"), generation), 0)
    instance, client, group, member_id = log.fleet.ids("a")
    for names in (("op/1", "operator"), (instance, client)):
        log.append(LeaveGroup(*names, group, member_id, generation), 0)
    run = log.run()
    assert (run.is_evicted, run.evictor, run.was_alive, run.released, run.asked_at) == (
        True,
        "operator",
        True,
        False,
        None,
    )
    (span,) = [each for each in log.fold.assignments["g"].now["t", 0] if each.held]
    assert span.client_id == "b"


# -- a verdict of each partition -----------------------------------------------------------------------------------

FINE: dict[str, object] = {
    "held": True,
    "is_held_back": False,
    "still_ms": 0,
    "positions": [100, 150],
    "end_before": 160,
}


@pytest.mark.parametrize(
    ("lag", "changed", "expected"),
    [
        (None, {}, None),
        (0, {"held": False, "still_ms": 90_000}, Verdict.OK),
        (10, {"held": False}, Verdict.STOPPED),
        (10, {"is_held_back": True}, Verdict.HELD_BACK),
        (10, {"still_ms": 60_000}, Verdict.STALLED),
        (10, {"still_ms": 59_999}, Verdict.OK),
        (10, {"positions": [100, 150, 120]}, Verdict.REWOUND),
        (59, {}, Verdict.OK),
        (60, {}, Verdict.BEHIND),
        (60, {"end_before": 100}, Verdict.OK),
        (60, {"end_before": None}, Verdict.OK),
        (60, {"positions": []}, Verdict.OK),
    ],
)
def test_a_partitions_verdict(lag: int | None, changed: dict[str, object], expected: Verdict | None) -> None:
    """59 of 60 waited at the start of the window: fewer is better."""
    assert verdict(lag, **{**FINE, **changed}) == expected  # type: ignore[arg-type]


#: Records that operators and watchdogs write, too, or only they.
NOT_OF_WORKERS = {
    "BeginCheckpoint",
    "ConfigureGroup",
    "ForgetGroup",
    "KeepCheckpoint",
    "LeaveGroup",
    "ReleaseGroup",
    "ReleasingPartition",
    "Rollback",
    "SettleOffsets",
    "SettlingMessages",
    "Tick",
    "Upgrade",
}


def test_each_record_type_is_a_workers_or_not() -> None:
    assert {kind.name for kind in KINDS.values()} - fold._OF_WORKERS == NOT_OF_WORKERS


def test_an_operator_that_changes_settings_is_no_worker() -> None:
    log = Log()
    log.add(ClaimingPartition(*A, *T0, 1_000), 0)
    settings = ConfigureGroup("op/1", "operator", "h", (("max_session_timeout_ms", 60_000),))
    for cp in log.worlds:
        log.add(settings, 100, cp)
        log.add(ForgetGroup("op/2", "cleaner", "k"), 100, cp)
    log.read()
    assert [run.client for run in log.fold.workers()] == ["a"]
