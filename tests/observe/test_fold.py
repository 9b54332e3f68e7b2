"""The state of workers by the log's records, in single situations."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from kafka_marshal.adapters.memory import MemoryCluster
from kafka_marshal.cli.log import Filter, LogLines
from kafka_marshal.node.coordination_topic import create_snapshots_topic, required_settings
from kafka_marshal.observe import fold
from kafka_marshal.observe.fold import Fold, WorkerInstance
from kafka_marshal.observe.ownership import Ownership, PieceOwnership
from kafka_marshal.observe.rows import GroupRow, PartitionVerdict, WorkerRow, verdict
from kafka_marshal.observe.text import span
from kafka_marshal.observe.view import LiveView
from kafka_marshal.ui import moments
from kafka_marshal.ui.fold import History
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
    SettlingMessages,
    Tick,
    Upgrade,
    World,
    codes,
    encode,
    route_group,
    route_lease,
)
from rationalizer.groups.history import Assignments
from rationalizer.history import End, Span
from rationalizer.holes import NO_KEY
from rationalizer.levels import SUPPORTED_LEVEL
from rationalizer.plane import Heard
from rationalizer.wire.records import KINDS
from tests.fleet import Fleet
from tests.observe.lives import CPS, Account, Life, Lives, accounts, holders
from tests.rationalizer.oracle import OracleWorld
from tests.rationalizer.sharers import write_sharing_log
from tests.rationalizer.strategies import by_seed
from tests.stored_snapshot import encode_snapshot

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

    def run(self, client: str = "a") -> WorkerInstance:
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


def test_one_that_only_settles_is_named_and_an_operator_that_settles_is_not() -> None:
    log = Log()
    log.add(Tick("i", "init", "partitions=2"), 0)
    log.add(Upgrade("i", "init", "i", SUPPORTED_LEVEL), 0)
    log.add(ClaimingPartition(*A, *T0, 60_000), 100)
    log.read()
    epoch = log.worlds[0].lease("g", *T0).epoch  # type: ignore[union-attr]
    log.fold = Fold()
    for world in log.worlds.values():
        log.fold.begin(world)
    log.add(SettlingMessages(*A, *T0, epoch, 2**40, (), (), ((1, 1, 5, "ValueError"),)), 900)
    log.add(SettlingMessages(*OPERATOR, *T0, None, 2**40, ((1, 1),), (), ()), 1_000)
    log.read()
    assert [(run.client, run.last_at) for run in log.fold.workers()] == [("a", 900)]


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

    def run(self, client: str = "a") -> WorkerInstance:
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
        (0, {"held": False, "still_ms": 90_000}, PartitionVerdict.OK),
        (10, {"held": False}, PartitionVerdict.STOPPED),
        (10, {"is_held_back": True}, PartitionVerdict.HELD_BACK),
        (10, {"still_ms": 60_000}, PartitionVerdict.STALLED),
        (10, {"still_ms": 59_999}, PartitionVerdict.OK),
        (10, {"positions": [100, 150, 120]}, PartitionVerdict.REWOUND),
        (59, {}, PartitionVerdict.OK),
        (60, {}, PartitionVerdict.BEHIND),
        (60, {"end_before": 100}, PartitionVerdict.OK),
        (60, {"end_before": None}, PartitionVerdict.OK),
        (60, {"positions": []}, PartitionVerdict.OK),
    ],
)
def test_a_partitions_verdict(lag: int | None, changed: dict[str, object], expected: PartitionVerdict | None) -> None:
    """59 of 60 waited at the start of the window: fewer is better."""
    assert verdict(lag, **{**FINE, **changed}) == expected  # type: ignore[arg-type]


#: Records that operators and watchdogs write, too, or only they (but for what ``by_operator`` tells apart).
NOT_OF_WORKERS = {
    "BeginCheckpoint",
    "ConfigureGroup",
    "ForgetGroup",
    "KeepCheckpoint",
    "LeaveGroup",
    "ReleaseGroup",
    "ReleasingPartition",
    "Rollback",
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


# -- The command and the page agree with a naive account of a log, in whatever order its CPs are read -------------


SEEDS = range(6)
BEGIN = 1_700_000_000_000

MADE: dict[int, Lives] = {}


def lives(seed: int) -> Lives:
    if seed not in MADE:
        MADE[seed] = Lives(seed, BEGIN, 450)
    return MADE[seed]


def whole(found: Lives) -> Account:
    *_, (_, account) = accounts(found)
    return account


def told(life: Life) -> tuple[object, ...]:
    """The account's answers about a run."""
    claimed, lost = life.claimed or (-1, 0, 0), life.lost or (-1, 0, 0)
    evicted = life.evicted is not None and life.evicted > claimed
    is_last = claimed > lost
    is_asked = life.asked is not None and life.asked > (life.evicted or (-1, 0, 0))
    return (
        life.instance,
        life.heard[0],
        is_last and life.refused in (codes.HELD, codes.PAUSED),
        lost > claimed and life.how in ("released", "left"),
        life.evictor if evicted else "",
        life.asked[0] if life.asked is not None and is_asked else None,
    )


@pytest.mark.parametrize("in_bulk", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_who_was_heard_and_what_became_of_what_it_held(seed: int, in_bulk: bool) -> None:
    found = lives(seed)
    rng = random.Random(seed)
    fold, worlds = Fold(beats=not in_bulk), {cp: World(cp, CPS) for cp in range(CPS)}
    for world in worlds.values():
        fold.begin(world)
    order = list(range(CPS))
    rng.shuffle(order)
    for cp in order:  # one CP after the other, as they are read
        remaining, heard = iter(found.entries(cp)), Heard()
        while (entry := worlds[cp].apply_beats(remaining, heard) if in_bulk else next(remaining, None)) is not None:
            fold.hear(cp, heard)
            heard.clear()
            fold.see(cp, worlds[cp].apply(*entry))
        fold.hear(cp, heard)
    asked = {
        (run.group, run.client): (
            run.instance,
            run.last_at,
            run.waits and not run.joins,
            run.released,
            run.evictor if run.is_evicted else "",
            run.asked_at,
        )
        for run in fold.workers()
        if run.client not in ("operator", "admin")
    }
    expected = {key: told(life) for key, life in whole(found).newest().items() if key[1] != "operator"}
    assert asked == expected


def viewed(found: Lives, now_ms: int) -> LiveView:
    """`status` of this log, on a Kafka in memory."""
    clock = [float(BEGIN)]
    cluster = MemoryCluster(lambda: clock[0])
    cluster.create_topic("__marshal", CPS, 1, required_settings(1), 5.0)
    appender = cluster.appender("__marshal", delivery_timeout_ms=1_000)
    for step in found.steps:
        clock[0] = float(step.stamp)
        appender.append(step.place[1], step.value)
    assert appender.flush(1.0) == 0
    view = LiveView(cluster, "__marshal", 5.0, now=lambda: float(now_ms))
    view.catch_up(lambda done, of_all: None)
    return view


def test_silence_is_no_longer_than_what_was_read() -> None:
    """The view begins at a snapshot of two minutes ago: what was before, it can't know."""
    clock = [float(BEGIN)]
    cluster = MemoryCluster(lambda: clock[0])
    cluster.create_topic("__marshal", CPS, 1, required_settings(1), 5.0)
    create_snapshots_topic(cluster, "__marshal", CPS, 1, 5.0)
    worlds = {cp: World(cp, CPS) for cp in range(CPS)}
    log, snapshots = (
        cluster.appender(name, delivery_timeout_ms=1_000) for name in ("__marshal", "__marshal_snapshots")
    )

    def add(record: Record, cp: int) -> int:
        log.append(cp, encode(record))
        worlds[cp].apply(worlds[cp].next_offset, int(clock[0]), encode(record))
        return worlds[cp].next_offset - 1

    for cp in worlds:
        add(Tick("i", "init", f"partitions={CPS}"), cp)
    fleet = Fleet("h", CPS, add)
    fleet.upgrade()
    fleet.leave("x", fleet.join("x", {"u": 3}))
    for _ in range(2):  # a replica starts from the last but one
        for cp, world in worlds.items():
            for part in encode_snapshot(world):
                snapshots.append(cp, part)
            add(Tick("i", "other", "h"), cp)
    view = LiveView(cluster, "__marshal", 5.0, now=lambda: float(BEGIN + 120_000))
    view.catch_up(lambda done, of_all: None)
    (group,) = view.groups()
    assert (group.silent_ms, group.silent_at_least) == (120_000, True)


@pytest.mark.parametrize("seed", SEEDS)
def test_status_and_check_say_it_of_those_that_hold_nothing(seed: int) -> None:
    found = lives(seed)
    now_ms = found.now + 500
    groups = {each.group: each for each in viewed(found, now_ms).groups()}
    newest = whole(found).newest()
    for group in "gh":
        row: GroupRow = groups[group]
        held = {each.client for each in row.leases if each.client}
        idle = {run.client: run for run in row.idle if run.client not in ("operator", "admin")}
        expected = {client: life for (of, client), life in newest.items() if of == group and client not in held}
        assert idle.keys() == {client for client in expected if client not in ("operator", "admin")}
        for client, run in idle.items():
            life = expected[client]
            instance, heard, waits, released, evictor, asked = told(life)
            assert (run.instance, now_ms - run.silence_ms) == (instance, heard)
            assert (run.waits, run.evictor) == (waits, evictor), run.doing
            assert run.asked_ms == (None if asked is None else now_ms - int(str(asked)))
            assert (run.released_ms is not None) is released
            if evictor:
                assert life.evicted is not None and life.heard_before is not None
                assert run.doing.startswith(f"evicted by operator {span(now_ms - life.evicted[0])} ago")
                alive = life.heard > life.evicted or life.evicted[0] - life.heard_before[0] <= run.interval_ms
                assert run.was_alive == alive


@pytest.mark.parametrize("seed", SEEDS)
def test_log_says_how_long_a_former_holder_was_silent_wherever_it_begins(seed: int) -> None:
    found = lives(seed)
    expected = {}
    for step in found.steps:
        record = step.record
        if isinstance(record, ClaimingPartition) and step.outcome.accepted:
            client, _, epoch, last_beat, _ = step.before.get(("g", "t", record.partition, 0), ("", "", 0, 0, 0))
            if client and step.after["g", "t", record.partition, 0][2] != epoch:
                silence = span(step.place[0] - last_beat)
                expected[step.place] = f"granted, epoch {step.outcome.epoch}; {client} was silent for {silence}"
    assert len(expected) > 3
    middle = sorted(expected)[len(expected) // 2]
    for since in (None, middle[0]):
        lines = LogLines(CPS, Filter(None, since, no_beats=False), {})
        whys = {
            (told.outcome.log_time, cp, told.offset): told.why.partition("; after an outage")[0]
            for cp in range(CPS)
            for told in lines.read(cp, found.entries(cp))
            if "was silent for" in told.why and told.record is not None and told.record.group_id == "g"
        }
        assert whys == {place: why for place, why in expected.items() if since is None or place[0] >= since}


def moments_of(found: Lives, seed: int) -> Iterator[tuple[int, dict[tuple[str, str, int, int], tuple[str, int]]]]:
    """Log times, with the holders then and their next offsets."""
    rng = random.Random(seed)
    for at in sorted(rng.sample(sorted({step.place[0] for step in found.steps}), 12)):
        known: dict[tuple[str, str, int, int], tuple[str, int]] = {}
        for cp in range(CPS):
            world = World(cp, CPS)
            for entry in found.entries(cp):
                if max(world.log_time, entry[1]) > at:
                    break
                world.apply(*entry)
            for key, (client, *_, done) in holders(world).items():
                known[key] = client, done
        yield at, known


@pytest.mark.parametrize("seed", SEEDS)
def test_the_page_and_who_agree_on_any_moment(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Including the next offset: exact for `who`, a range that contains it on the page."""
    from kafka_marshal.ui import index

    monkeypatch.setattr(index, "MOST_SAMPLES", 8)
    found = lives(seed)
    history = History(CPS)
    for cp in range(CPS):
        history.take(cp, found.entries(cp))
    ranges = 0
    for at, known in moments_of(found, seed):
        moment = moments.Moment(at)
        for (group, topic, number, lo), (client, done) in known.items():
            if lo:
                continue
            detail = moments.detail(history, history.groups[group], (topic, number), moment)
            now = [answer["holder"]["client"] if answer["holder"] else "" for answer in detail["answers"]]
            assert now == [client]
            shown = detail["next"]
            if shown is None:  # its start is unknown
                assert done == 0
                continue
            assert shown["low"] <= done <= shown["high"], (group, topic, number, at)
            assert (shown["offset"] is None) == (shown["low"] != shown["high"]) == (shown["exact"] is not None)
            ranges += shown["offset"] is None
            owned = _who(found, (group, topic, number), at)
            assert [(each.span.client_id if each.span.held else "", each.next) for each in owned.moments] == [
                (client, done)
            ]
    assert ranges


def _who(found: Lives, key: tuple[str, str, int], at: int) -> Ownership:
    if key[0] == "g":
        owned = Ownership(key, route_lease(key[1], key[2], CPS), CPS, at)
    else:
        owned = PieceOwnership(key, route_group(key[0], CPS), CPS, at)
        owned.assignments = Assignments(key[0])
    owned.take(found.entries(owned.cp))
    owned.end()
    return owned


def test_the_logs_hold_what_they_are_for() -> None:
    """They contain every kind of loss, and workers with either answer to each question."""
    ways, answers = set(), set()
    for seed in SEEDS:
        for step, account in accounts(lives(seed)):
            ways |= {life.how for life in account.lives.values()}
            if step.place[2] % 7 == 0:
                for life in account.newest().values():
                    answers |= {(at, bool(answer)) for at, answer in enumerate(told(life))}
    assert {"released", "replaced", "restarted", "evicted", "left"} <= ways
    assert {(at, answer) for at in (2, 3, 4, 5) for answer in (True, False)} <= answers


def test_who_shared_it_is_what_the_oracle_sees() -> None:
    """After every seventh record of logs with shares of every kind, for every lease."""
    modes = set()
    for seed in range(4):
        log, _ = write_sharing_log(by_seed(seed), 120)
        world = OracleWorld(0, 1)
        for entry in log:
            world.apply(*entry)
            if entry[0] % 7:
                continue
            for key, lease in world.shared.items():
                owned = Ownership(key, 0, 1, at_offset=entry[0])
                owned.take(log)
                owned.end()
                sharers = {(share.client, share.epoch, share.keys) for share in lease.shares}
                modes |= {keys is None for _, _, keys in sharers}
                found = {
                    (span.client_id, span.epoch, None if span.lo == NO_KEY else (span.lo, span.hi))
                    for span in (moment.span for moment in owned.moments)
                    if span.held
                }
                if sharers:
                    assert found == sharers, (seed, entry[0], key)
                else:
                    assert len(owned.moments) == 1
                held = [each for each in owned.spans if each.held]
                for free in (each for each in owned.spans if not each.held):
                    end = free.until_offset or len(log)
                    assert not [each for each in held if each.since_offset < end and free.since_offset < _end(each)]
    assert modes == {True, False}


def _end(span: Span) -> int:
    return 2**62 if span.until_offset is None else span.until_offset
