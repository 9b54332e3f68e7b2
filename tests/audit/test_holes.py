"""The table of open messages against a plain account; what is settled out of reach, and what is lost, is found."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from kafka_marshal.pipeline.audit.invariants import Breach
from rationalizer import (
    ClaimingPartition,
    ClaimingShare,
    ConfigureGroup,
    ForgetGroup,
    Heartbeat,
    JoinGroup,
    Record,
    ReleaseGroup,
    SettleOffsets,
    SettlingMessages,
    Upgrade,
    World,
    codes,
)
from rationalizer.limits import MAX_KEY_HASH
from rationalizer.plane import Entry
from tests.audit import broken_holes as broken
from tests.audit.logs import WholeLog
from tests.audit.sharing_logs import is_found, log_of, tables_of
from tests.audit.test_shares import HI, A, B, claim, release
from tests.audit.test_tables import audited, rows
from tests.rationalizer.sharing_author import sharing_log

ADMIN = ("9", "admin")
KEY = 5


def take(who: tuple[str, str], epoch: int, count: int = 10, *, seen: int = 100, once: bool = False) -> Record:
    return SettlingMessages(*who, "g", "t", 0, epoch, seen, take=(count, 99, once))


def settle(who: tuple[str, str], epoch: int | None, seen: int = 100, **entries: Any) -> Record:
    return SettlingMessages(*who, "g", "t", 0, epoch, seen, **entries)


def whole(who: tuple[str, str]) -> Record:
    return ClaimingPartition(*who, "g", "t", 0, HI)


PARKED = ((3, KEY, 5, "ValueError"),)
#: A whole lease with message 3 parked, at offset 2.
WITH_PARKED = ((whole(A), 0), (settle(A, 1, parked=PARKED), 1))
#: a and b share by batches, and a has 0 … 9.
WITH_BATCH = ((claim(A), 0), (claim(B), 0), (take(A, 1), 1))

#: World, log, kind of violation, its offset, what it says.
PLANTED: dict[str, tuple[type[World], list[Entry], Breach, int, str]] = {
    "a batch lost with its share": (
        broken.Careless,
        log_of(*WITH_BATCH, (release(A, 1), 2)),
        Breach.LOST,
        4,
        "the offsets 0 … 9 were open since offset 3; no record closed them",
    ),
    "half of a batch lost at once": (
        broken.Blind,
        log_of((claim(A), 0), (take(A, 1), 1)),
        Breach.LOST,
        2,
        "the offsets 0 … 9 were open since offset 2",
    ),
    "one lost at a record about something else": (
        broken.Distracted,
        log_of(*WITH_PARKED, *((Heartbeat(*A, "g", "t", 0, 1, None), at) for at in (2, 3))),
        Breach.LOST,
        3,
        "the offsets 3 … 3 were open since offset 2",
    ),
    "a parked one lost with the position": (
        broken.Amnesic,
        log_of(
            *WITH_PARKED,
            (ReleaseGroup(*ADMIN, "g", 10**6), 4 * HI),
            (whole(ADMIN), 4 * HI),
            (Heartbeat(*ADMIN, "g", "t", 0, 4, 9), 4 * HI),
        ),
        Breach.LOST,
        5,
        "the offsets 3 … 3 were open since offset 2",
    ),
    "a batch that stays with a share that ended": (
        broken.Clinging,
        log_of(*WITH_BATCH, (release(A, 1), 2)),
        Breach.OUT_OF_REACH,
        4,
        "the state has Hole(first=0, last=9, owner=1",
    ),
    "another's batch settled": (
        broken.Lax,
        log_of(*WITH_BATCH, (settle(B, 2, done=((0, 9),)), 2)),
        Breach.OUT_OF_REACH,
        4,
        "b/2 settled what it does not reach: the offsets 0 … 9, of the share 1",
    ),
    "a batch settled by an operator": (
        broken.Lax,
        log_of(*WITH_BATCH, (settle(ADMIN, None, done=((0, 9),)), 2)),
        Breach.OUT_OF_REACH,
        4,
        "admin/9 as an operator settled what it does not reach",
    ),
    "a redrive that comes twice": (
        broken.Lax,
        log_of(
            *WITH_PARKED,
            (settle(ADMIN, None, 3, open=((3, 3, None, 0),)), 2),
            (settle(ADMIN, None, 3, open=((3, 3, None, 0),)), 3),
        ),
        Breach.OUT_OF_REACH,
        4,
        "admin/9 as an operator opened what it does not reach: the offsets 3 … 3, free, key hash 5, changed at 3",
    ),
    "another's batch taken": (
        broken.Snatching,
        log_of(
            *WITH_BATCH,
            (SettlingMessages(*B, "g", "t", 0, 2, 100, take=(10, 9, False)), 2),
        ),
        Breach.OUT_OF_REACH,
        4,
        "b/2 took what it does not reach",
    ),
    "a redo that comes twice": (
        broken.Forgetful,
        log_of(
            *((Upgrade("9", "admin", "g", 5), 0), (whole(A), 0), (Heartbeat(*A, "g", "t", 0, 2, 9), 1)),
            (settle(ADMIN, None, 4, open=((3, 3, None, 0),), redo=True), 2),
            (settle(A, 2, done=((3, 3),)), 3),
            (settle(ADMIN, None, 4, open=((3, 3, None, 0),), redo=True), 4),
        ),
        Breach.OUT_OF_REACH,
        6,
        "admin/9 as an operator opened the offsets 3 … 3, which are done",
    ),
    "what is done opened": (
        broken.Reviving,
        log_of((whole(A), 0), (Heartbeat(*A, "g", "t", 0, 1, 9), 1), (settle(A, 1, open=((3, 3, KEY, 1),)), 2)),
        Breach.OUT_OF_REACH,
        3,
        "a/1 opened the offsets 3 … 3, which are done",
    ),
}


@pytest.mark.parametrize("planted", PLANTED)
def test_a_broken_rationalizer_is_found(planted: str) -> None:
    is_found(*PLANTED[planted])


def test_what_is_lost_is_a_row() -> None:
    log = log_of(*WITH_BATCH, (release(A, 1), 2))
    found = tables_of(log, world_type=broken.Careless)["holes"]
    assert [(row["first"], row["last"], row["client"], row["to_offset"], row["ended"]) for row in found] == [
        (0, 9, "a", 4, "lost")
    ]


# -- the table -------------------------------------------------------------------------------------------------------

#: A batch that is done, parked and given back in parts; its taker dies; a redrive, a discard, at most once, a position.
STORY = log_of(
    (claim(A), 0),  # 1
    (claim(B), 0),  # 2
    (take(A, 1), 10),  # 3: 0 … 9
    (settle(A, 1, done=((0, 4),), parked=((6, KEY, 1, "ValueError"),), open=((9, 9, None, 0),)), 20),  # 4
    (settle(B, 2), 2 * HI),  # 5
    (take(B, 2, seen=6), 3 * HI),  # 6: a's share ends, and 5 … 5 is b's
    (take(B, 2, seen=7), 3 * HI),  # 7: 7 … 8
    (settle(B, 2, done=((5, 5), (7, 7))), 3 * HI + 1),  # 8
    (settle(ADMIN, None, open=((6, 6, None, 0),)), 3 * HI + 2),  # 9: redriven
    (settle(B, 2, seen=10, take=(1, 99, False)), 3 * HI + 3),  # 10: 6
    (settle(B, 2, parked=((6, KEY, 1, "KeyError"),)), 3 * HI + 4),  # 11
    (settle(ADMIN, None, done=((6, 6),)), 3 * HI + 5),  # 12: discarded
    (settle(B, 2, take=(1, 99, True)), 3 * HI + 6),  # 13: 9 at most once, which had no attempts
    (release(B, 2), 3 * HI + 7),  # 14
    (ReleaseGroup(*ADMIN, "g", 10**6), 3 * HI + 8),  # 15
    (whole(ADMIN), 3 * HI + 8),  # 16
    (Heartbeat(*ADMIN, "g", "t", 0, 16, 20), 3 * HI + 9),  # 17: 8 goes
    (settle(ADMIN, 16, open=((30, 31, None, 1),)), 3 * HI + 10),  # 18
    (ForgetGroup(*ADMIN, "g"), 10 * HI),  # 19
    (claim(A), 10 * HI),  # 20
    (take(A, 20), 10 * HI),  # 21
)

#: first, last, client, epoch, from_offset, from_time, to_offset, tries, parks, redrives, reason, ended
HOLES = [
    (0, 4, "a", 1, 3, 10, 4, 1, 0, 0, None, "done"),
    (5, 5, "b", 2, 3, 10, 8, 2, 0, 0, None, "done"),
    (7, 7, "b", 2, 3, 10, 8, 2, 0, 0, None, "done"),
    (6, 6, "b", 2, 3, 10, 12, 2, 2, 1, "KeyError", "discarded"),
    (9, 9, "b", 2, 3, 10, 13, 1, 0, 0, None, "granted"),
    (8, 8, "b", 2, 3, 10, 17, 2, 0, 0, None, "repositioned"),
    (30, 31, "admin", 16, 18, 3 * HI + 10, 19, 1, 0, 0, None, "forgotten"),
    (0, 9, "a", 20, 21, 10 * HI, None, 1, 0, 0, None, "open"),
]


def shortened(row: dict[str, Any]) -> tuple[Any, ...]:
    names = ("first", "last", "client", "epoch", "from_offset", "from_time", "to_offset")
    return tuple(row[name] for name in (*names, "tries", "parks", "redrives", "reason", "ended"))


def in_order(row: tuple[Any, ...]) -> tuple[int, int]:
    return (99 if row[6] is None else row[6]), row[0]


#: client, offset, what, first, last
PROGRESS = [
    ("a", 4, "settled", 0, 4),
    ("b", 8, "settled", 5, 5),
    ("b", 8, "settled", 7, 7),
    ("admin", 12, "discarded", 6, 6),
    ("b", 13, "granted", 9, 9),
    ("admin", 17, "repositioned", None, None),
]


@pytest.mark.parametrize("cuts", [(), (5,), (4, 7, 10, 12, 18), range(1, len(STORY))], ids=str)
def test_each_message_is_a_row_however_the_log_is_cut(cuts: Any) -> None:
    found = tables_of(STORY, cuts)
    assert found["violations"] == []
    assert sorted(map(shortened, found["holes"]), key=in_order) == HOLES
    names = ("client", "offset", "what", "first", "last")
    assert [tuple(row[name] for name in names) for row in found["progress"]] == PROGRESS


#: What is done is opened by an operator, tried once in vain, and done.
REDONE = log_of(
    *((Upgrade("9", "admin", "g", 5), 0), (whole(A), 0), (Heartbeat(*A, "g", "t", 0, 2, 9), 1)),
    (settle(ADMIN, None, 4, open=((3, 5, None, 0),), redo=True), 2),
    (settle(A, 2, 5, open=((4, 4, KEY, 1),)), 3),
    (settle(A, 2, 6, done=((3, 5),)), 4),
)


@pytest.mark.parametrize("cuts", [(), range(1, len(REDONE))], ids=str)
def test_what_was_done_and_is_opened_names_its_operator(cuts: Any) -> None:
    found = tables_of(REDONE, cuts)
    assert found["violations"] == []
    rows = sorted((row["first"], row["last"], row["redone_by"], row["tries"], row["ended"]) for row in found["holes"])
    assert rows == [(3, 3, "admin", 0, "done"), (4, 4, "admin", 1, "done"), (5, 5, "admin", 0, "done")]


def test_the_audit_writes_them(tmp_path: Path) -> None:
    """Through a dump, with snapshots at which the log is cut."""
    log = WholeLog(1, {0: STORY})
    log.store_snapshots(4)
    with audited(log, tmp_path, records_per_task=1) as findings:
        assert findings.is_clean, findings.examples
        assert findings.partitions[0].segments > 2
        assert sorted(map(shortened, rows(findings, "holes")), key=in_order) == HOLES


# -- coordinated groups ----------------------------------------------------------------------------------------------

HALF = MAX_KEY_HASH // 2


def join(who: tuple[str, str], after: int) -> Record:
    return JoinGroup(*who, "h", "", after, 10_000, "sticky", True, "", (("t", 1),))


def of_group(who: tuple[str, str], member: str, generation: int, seen: int = 50, **entries: Any) -> Record:
    return SettleOffsets(*who, "h", member, generation, seen, "t", 0, **entries)


def group_log(*more: tuple[Record, int]) -> list[Entry]:
    """a is the only member of h, in generation 1, and has parked 3."""
    first = of_group(A, MEMBER, 1, parked=PARKED)
    accept = ConfigureGroup(*A, "h", (("accept_individual_commit", True),))
    return log_of((join(A, 1), 0), (accept, 0), (first, 5), *more)


def member_id() -> str:
    world = World(0, 1)
    world.apply_many(log_of((join(A, 1), 0)))
    group = world.group("h")
    assert group is not None
    return next(iter(group.members.values())).member_id


MEMBER = member_id()


def test_a_coordinated_group_has_rows_too() -> None:
    log = group_log(
        (of_group(ADMIN, "", 0, open=((3, 3, None, 0),)), 6),
        (of_group(A, MEMBER, 1, done=((3, 3),)), 7),
    )
    for cuts in ((), (4, 5)):
        found = tables_of(log, cuts)
        assert found["violations"] == []
        assert list(map(shortened, found["holes"])) == [
            (3, 3, "a", None, 3, 5, 5, 5, 1, 1, "ValueError", "done"),
        ]


def test_a_message_of_a_group_that_is_lost_is_found() -> None:
    log = group_log((of_group(A, MEMBER, 1, seen=77, open=((8, 8, KEY, 1),)), 6))
    found = tables_of(log, world_type=broken.OfGroups)["violations"]
    assert [(row["kind"], row["offset"]) for row in found] == [(str(Breach.LOST), 4)]
    assert tables_of(log)["violations"] == []


# -- a plain account -------------------------------------------------------------------------------------------------

Key = tuple[str, str, int, int]


def by_hand(log: list[Entry]) -> set[tuple[Any, ...]]:
    """(group, topic, partition, offset, from, to, parks), offset by offset, from the states of the world."""
    world, found = World(0, 1), set()
    since: dict[Key, int] = {}
    parks: dict[Key, int] = defaultdict(int)
    for entry in log:
        outcome = world.apply(*entry)
        there: set[Key] = set()
        for lease in world.leases():
            place = (lease.group_id, lease.topic, lease.partition)
            there |= {(*place, at) for hole in lease.progress.open for at in range(hole.first, hole.last + 1)}
        for group in world.groups():
            for topic, number in group.partitions():
                kept = group.kept(topic, number)
                holes = [] if kept is None else kept.progress.open
                there |= {(group.group_id, topic, number, at) for h in holes for at in range(h.first, h.last + 1)}
        record: Any = outcome.record
        answers = (outcome.entries or ())[-len(getattr(record, "parked", ())) or len(outcome.entries or ()) :]
        for (offset, *_), code in zip(getattr(record, "parked", ()), answers, strict=False):
            parks[record.group_id, record.topic, record.partition, offset] += outcome.accepted and code == codes.OK
        for key in since.keys() - there:
            found.add((*key, since.pop(key), entry[0], parks.pop(key, 0)))
        since |= dict.fromkeys(there - since.keys(), entry[0])
    return found | {(*key, begun, None, parks.get(key, 0)) for key, begun in since.items()}


@pytest.mark.parametrize("cuts", [(), (50, 120, 121, 240)], ids=["whole", "cut"])
@pytest.mark.parametrize("seed", range(12))
def test_each_message_is_in_a_row_while_it_is_open(seed: int, cuts: tuple[int, ...]) -> None:
    log = list(sharing_log(seed, 300))
    tables = tables_of(log, cuts)
    assert tables["violations"] == []
    found = [
        (
            *(row["group"], row["topic"], row["topic_partition"], offset),
            *(row["from_offset"], row["to_offset"], row["parks"]),
        )
        for row in tables["holes"]
        for offset in range(row["first"], row["last"] + 1)
    ]
    assert set(found) == by_hand(log)
    assert len(found) == len(set(found))


def test_a_cut_log_gives_the_rows_of_a_whole_one() -> None:
    for seed in range(6):
        log = list(sharing_log(seed, 200))
        for table in ("holes", "progress"):
            found = [sorted(map(repr, tables_of(log, cuts)[table])) for cuts in ((), (30, 90, 150), range(1, 200, 31))]
            assert found[0] == found[1] == found[2]


def done_by_hand(log: list[Entry]) -> dict[int, set[tuple[Any, ...]]]:
    """Offset of a record → (group, topic, partition, offset) of what it made done for all keys; no reposition's."""
    world = World(0, 1)
    found: dict[int, set[tuple[Any, ...]]] = {}
    before: set[tuple[Any, ...]] = set()
    for entry in log:
        outcome = world.apply(*entry)
        progress = {(each.group_id, each.topic, each.partition): each.progress for each in world.leases()}
        for group in world.groups():
            for place in group.partitions():
                if (kept := group.kept(*place)) is not None:
                    progress[group.group_id, *place] = kept.progress
        now = {(*key, at) for key, each in progress.items() for at in range(40) if each.is_done(at)}
        moved = codes.REPOSITIONED in (outcome.code, *(outcome.entries or ())) or outcome.is_a(ClaimingShare)
        found[entry[0]] = set() if moved else now - before
        before = now
    return found


@pytest.mark.parametrize("cuts", [(), (50, 120, 121, 240)], ids=["whole", "cut"])
@pytest.mark.parametrize("seed", range(12))
def test_each_message_is_in_the_row_of_the_record_that_made_it_done(seed: int, cuts: tuple[int, ...]) -> None:
    """Of sharers by keys and by batches, of holders with open messages, of coordinated groups: once."""
    log = list(sharing_log(seed, 300))
    rows = [row for row in tables_of(log, cuts)["progress"] if row["what"] not in ("repositioned", "topic")]
    listed = [
        (row["offset"], row["group"], row["topic"], row["topic_partition"], at)
        for row in rows
        for at in range(row["first"], min(row["last"], 39) + 1)
    ]
    assert len(listed) == len(set(listed))
    found = {(at, *each) for at, made in done_by_hand(log).items() for each in made}
    assert set(listed) == found
