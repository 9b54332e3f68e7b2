"""The table of shares, row by row, against the oracle's; and what is no share that the log gave is found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kafka_marshal.pipeline.audit.invariants import Breach
from kafka_marshal.pipeline.audit.observer import Observer
from rationalizer import (
    BeatEntry,
    ClaimingMessages,
    ClaimingPartition,
    ClaimingShare,
    ForgetGroup,
    Heartbeat,
    HeartbeatBatch,
    Record,
    ReleasingPartition,
    SettlingMessages,
    World,
)
from rationalizer.limits import MAX_KEY_HASH
from rationalizer.plane import Entry
from tests.audit import broken_sharing as broken
from tests.audit.logs import WholeLog
from tests.audit.sharing_logs import is_found, log_of, tables_of
from tests.audit.test_tables import audited, rows
from tests.rationalizer.oracle import OracleWorld
from tests.rationalizer.sharers import write_sharing_log
from tests.rationalizer.strategies import by_seed

A, B, C = ("1", "a"), ("2", "b"), ("3", "c")
HI = 1000
HALF = MAX_KEY_HASH // 2


def claim(who: tuple[str, str], keys: tuple[int, int] | None = None) -> Record:
    return ClaimingShare(*who, "g", "t", 0, HI, *(keys or (None, None)))


def beat(who: tuple[str, str], epoch: int, done: int | None = None) -> Record:
    return Heartbeat(*who, "g", "t", 0, epoch, done)


def release(who: tuple[str, str], epoch: int) -> Record:
    return ReleasingPartition(*who, "g", "t", 0, epoch, None)


def take(who: tuple[str, str], epoch: int) -> Record:
    return SettlingMessages(*who, "g", "t", 0, epoch, 100, take=(10, 99, False))


#: World, log, kind of violation, its offset, what it says.
PLANTED: dict[str, tuple[type[World], list[Entry], Breach, int, str]] = {
    "a key with two shares": (
        broken.Crowded,
        log_of((claim(A, (0, HALF)), 0), (claim(B, (HALF, HALF)), 100)),
        Breach.TWO_OWNERS_OF_A_KEY,
        2,
        f"b/2 with its share of the keys {HALF} … {HALF}, epoch 2, was granted 100 ms after the last beat of a/1",
    ),
    "batches beside keys": (
        broken.Crowded,
        log_of((claim(A, (0, 5)), 0), (claim(B), 100)),
        Breach.TWO_OWNERS_OF_A_KEY,
        2,
        "b/2 with its share by batches, epoch 2, was granted 100 ms after",
    ),
    "a key with two shares, though it was refused": (
        broken.Doubled,
        log_of((claim(A, (0, HALF)), 0), (claim(B, (HALF, HALF)), 100)),
        Breach.TWO_OWNERS_OF_A_KEY,
        2,
        "the state has Share(2, b/2",
    ),
    "another's share confirmed": (
        broken.Flattering,
        log_of((claim(A, (0, HALF)), 0), (claim(B, (0, HALF)), 100)),
        Breach.TWO_OWNERS_OF_A_KEY,
        2,
        "b/2 was confirmed as a sharer",
    ),
    "the whole beside a share": (
        broken.Exclusive,
        log_of((claim(A), 0), (ClaimingPartition(*B, "g", "t", 0, HI), 2 * HI)),
        Breach.TWO_OWNERS_OF_A_KEY,
        2,
        "b/2 was granted the whole lease 2000 ms after the last beat of a/1",
    ),
    "a share that ended too early": (
        broken.Impatient,
        log_of((claim(A), 0), (claim(B), 0), (beat(A, 1), 2 * HI)),
        Breach.TWO_OWNERS_OF_A_KEY,
        3,
        "the state knows b/2 with its share by batches, epoch 2, last beat 0, no more",
    ),
    "a share that never ends": (
        broken.Immortal,
        log_of((claim(A), 0), (claim(B), 0), (release(A, 1), 5)),
        Breach.TWO_OWNERS_OF_A_KEY,
        3,
        "the state has Share(1, a/1",
    ),
    "a beat after its end": (
        broken.Loose,
        log_of((claim(A), 0), (claim(B), 0), (release(A, 1), 5), (beat(A, 1), 6)),
        Breach.STALE_EPOCH,
        4,
        "a record of a/1 with epoch 1 took effect",
    ),
    "a beat that was lost": (
        broken.Sleepy,
        log_of((claim(A), 0), (beat(A, 1), 700)),
        Breach.TWO_OWNERS_OF_A_KEY,
        2,
        "last beat 700, as Share(1, a/1",
    ),
    "messages granted for good": (
        broken.Generous,
        log_of((claim(A), 0), (ClaimingMessages(*A, "g", "t", 0, 1, 10), 1)),
        Breach.OVERLAPPING_GRANTS,
        2,
        "messages were granted for good to a/1 with its share by batches",
    ),
    "forgotten while it is shared": (
        broken.Oblivious,
        log_of((claim(A), 0), (ForgetGroup("9", "admin", "g"), 5)),
        Breach.TWO_OWNERS_OF_A_KEY,
        2,
        "the group was forgotten 5 ms after the last beat of a/1",
    ),
}


@pytest.mark.parametrize("planted", PLANTED)
def test_a_broken_rationalizer_is_found(planted: str) -> None:
    is_found(*PLANTED[planted])


#: How shares end, and how they do not: a batch of beats, a silence of all, a late beat.
STORY = log_of(
    (claim(A), 0),  # 1
    (claim(B), 100),  # 2
    (claim(C), 200),  # 3
    (HeartbeatBatch(*A, "g", (BeatEntry("t", 0, 1, None),)), 4 * HI),  # 4: the log was silent for all
    (beat(B, 2), 5 * HI),
    (take(A, 1), 6 * HI + 1),  # 6: c's ends, which was silent since
    (release(B, 2), 6 * HI + 2),
    (ClaimingPartition(*C, "g", "t", 0, HI), 9 * HI),  # 8: a's ends
    (SettlingMessages(*C, "g", "t", 0, 8, 100, ((0, 9),)), 9 * HI),
    (claim(B, (0, HALF)), 12 * HI),  # 10
    (claim(A, (HALF + 1, HALF + 9)), 12 * HI),  # 11
    (claim(C, (HALF, HALF + 9)), 15 * HI),  # 12: both end
    (ForgetGroup("9", "admin", "g"), 18 * HI),  # 13
    (claim(A), 19 * HI),  # 14
)

#: client, epoch, keys, from_time, to_offset, to_time, ended, silent_ms
SHARES = [
    ("a", 1, None, 0, 8, 9 * HI, "replaced", 3 * HI - 1),
    ("b", 2, None, 100, 7, 6 * HI + 2, "released", HI + 2),
    ("c", 3, None, 200, 6, 6 * HI + 1, "expired", 2 * HI + 1),
    ("b", 10, (0, HALF), 12 * HI, 12, 15 * HI, "replaced", 3 * HI),
    ("a", 11, (HALF + 1, HALF + 9), 12 * HI, 12, 15 * HI, "replaced", 3 * HI),
    ("c", 12, (HALF, HALF + 9), 15 * HI, 13, 18 * HI, "forgotten", 3 * HI),
    ("a", 14, None, 19 * HI, None, None, "open", None),
]


def shortened(row: dict[str, Any]) -> tuple[Any, ...]:
    assert row["from_offset"] == row["epoch"]
    keys = None if row["lo"] is None else (row["lo"], row["hi"])
    rest = [row[name] for name in ("from_time", "to_offset", "to_time", "ended", "silent_ms")]
    return row["client"], row["epoch"], keys, *rest


@pytest.mark.parametrize("cuts", [(), (5,), (2, 4, 6, 8, 11, 13), range(1, len(STORY))], ids=str)
def test_each_share_is_a_row_however_the_log_is_cut(cuts: Any) -> None:
    found = tables_of(STORY, cuts)
    assert found["violations"] == []
    assert sorted(map(shortened, found["shares"]), key=lambda row: row[1]) == SHARES


def test_a_share_that_began_before_the_log_has_no_beginning() -> None:
    """Its epoch says at which offset it began, nothing when."""
    log = log_of((claim(A), 7), (claim(B), 8), (release(B, 2), 9))
    world = World(0, 1)
    world.apply_many(log[:3])
    observer = Observer(world, lambda table, rows: None)
    observer.replay(log[3:])
    observer.finish()
    assert [(each.epoch, each.since) for each in observer.loose.shares_ended] == [(2, -1)]
    assert [(each.epoch, each.since) for each in observer.loose.shares_now] == [(1, -1)]


def by_the_oracle(log: list[Entry]) -> set[tuple[Any, ...]]:
    """(group, topic, partition, client, instance, epoch, keys, from, from_time, to, to_time)."""
    found: set[tuple[Any, ...]] = set()
    now: dict[tuple[Any, ...], tuple[int, int]] = {}
    world = OracleWorld(0, 1)
    for entry in log:
        world.apply(*entry)
        there = {
            (*key, share.client, share.instance, share.epoch, share.keys)
            for key, lease in world.shared.items()
            for share in lease.shares
        }
        found |= {(*each, *now.pop(each), entry[0], world.log_time) for each in now.keys() - there}
        now |= dict.fromkeys(there - now.keys(), (entry[0], world.log_time))
    return found | {(*each, *since, None, None) for each, since in now.items()}


@pytest.mark.parametrize("cuts", [(), (40, 80, 81)], ids=["whole", "cut"])
@pytest.mark.parametrize("seed", range(12))
def test_shares_are_what_the_oracle_sees(seed: int, cuts: tuple[int, ...]) -> None:
    log, _ = write_sharing_log(by_seed(seed), 160)
    tables = tables_of(log, cuts)
    assert tables["violations"] == []
    names = ("group", "topic", "topic_partition", "client", "instance", "epoch")
    ends = ("from_offset", "from_time", "to_offset", "to_time")
    found = [
        (
            *(row[name] for name in names),
            None if row["lo"] is None else (row["lo"], row["hi"]),
            *(row[name] for name in ends),
        )
        for row in tables["shares"]
    ]
    assert set(found) == by_the_oracle(log)
    assert len(found) == len(set(found))


def test_the_audit_writes_them(tmp_path: Path) -> None:
    """Through a dump, with snapshots at which the log is cut."""
    log = WholeLog(1, {0: STORY})
    log.store_snapshots(3)
    with audited(log, tmp_path, records_per_task=1) as findings:
        assert findings.is_clean, findings.examples
        assert findings.partitions[0].segments > 2
        assert sorted(map(shortened, rows(findings, "shares")), key=lambda row: row[1]) == SHARES
