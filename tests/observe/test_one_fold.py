"""The command and the page agree with a naive account of a log, in whatever order its CPs are read."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from kafka_marshal.adapters.memory import MemoryCluster
from kafka_marshal.cli.log import Filter, LogLines
from kafka_marshal.node.coordination_topic import create_snapshots_topic, required_settings
from kafka_marshal.observe.fold import Fold
from kafka_marshal.observe.ownership import Ownership, PieceOwnership
from kafka_marshal.observe.rows import GroupRow
from kafka_marshal.observe.text import span
from kafka_marshal.observe.view import View
from kafka_marshal.ui import moments
from kafka_marshal.ui.fold import History
from rationalizer import ClaimingPartition, Record, Tick, World, codes, encode, route_group, route_lease
from rationalizer.groups.history import Assignments
from rationalizer.history import Span
from rationalizer.holes import NO_KEY
from rationalizer.plane import Heard
from rationalizer.snapshot_log import encode_snapshot
from tests.fleet import Fleet
from tests.observe.lives import CPS, Account, Life, Lives, accounts, holders
from tests.rationalizer.oracle import OracleWorld
from tests.rationalizer.sharers import write_sharing_log
from tests.rationalizer.strategies import by_seed

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


def viewed(found: Lives, now_ms: int) -> View:
    """`status` of this log, on a Kafka in memory."""
    clock = [float(BEGIN)]
    cluster = MemoryCluster(lambda: clock[0])
    cluster.create_topic("__marshal", CPS, 1, required_settings(1), 5.0)
    appender = cluster.appender("__marshal", delivery_timeout_ms=1_000)
    for step in found.steps:
        clock[0] = float(step.stamp)
        appender.append(step.place[1], step.value)
    assert appender.flush(1.0) == 0
    view = View(cluster, "__marshal", 5.0, now=lambda: float(now_ms))
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
    view = View(cluster, "__marshal", 5.0, now=lambda: float(BEGIN + 120_000))
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
