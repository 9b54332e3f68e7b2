"""Each kind of violation is found when planted, and no other."""

from __future__ import annotations

from pathlib import Path

import pytest

from kafka_marshal.errors import LogCutError
from kafka_marshal.pipeline.audit.audit import Audit
from kafka_marshal.pipeline.audit.findings import Findings
from kafka_marshal.pipeline.audit.invariants import Breach
from kafka_marshal.pipeline.audit.plan import SourceLog, cut
from kafka_marshal.pipeline.audit.sources import DumpSource
from rationalizer import (
    ClaimingMessages,
    ClaimingPartition,
    Heartbeat,
    Record,
    ReleaseGroup,
    ReleasingPartition,
    Tick,
    Upgrade,
    World,
    encode,
)
from rationalizer.snapshot_log import encode_state
from tests.audit import broken
from tests.audit.logs import WholeLog, forged, random_log
from tests.audit.test_tables import audited, rows

A, B, ADMIN = ("1", "a"), ("2", "b"), ("9", "admin")
HI = 1000


def log_of(*records: tuple[Record | bytes | None, int]) -> WholeLog:
    """One CP with these records, each with its timestamp."""
    entries = [
        (offset, stamp, encode(record) if isinstance(record, Record) else record)
        for offset, (record, stamp) in enumerate(records)
    ]
    return WholeLog(1, {0: entries})


def claim(who: tuple[str, str]) -> Record:
    return ClaimingPartition(*who, "g", "t", 0, HI)


def beat(who: tuple[str, str], epoch: int | None, done: int | None) -> Record:
    return Heartbeat(*who, "g", "t", 0, epoch, done)


PLANTED = {
    "granted while held": (
        broken.Generous,
        log_of((claim(A), 0), (claim(B), 100)),
        {Breach.TWO_OWNERS: [1]},
        "b/2 was granted the lease 100 ms after",
    ),
    "the state gives it away": (
        broken.Split,
        log_of((claim(A), 0), (claim(B), 100)),
        {Breach.TWO_OWNERS: [1]},
        "the state names b/2, epoch 0",
    ),
    "progress moved back": (
        broken.Forgetful,
        log_of((claim(A), 0), (beat(A, 0, 10), 1), (beat(A, 0, 5), 2), (beat(A, 0, 7), 3)),
        {Breach.PROGRESS_BACK: [2]},
        "stable is 5, and was 10",
    ),
    "grants overlap": (
        broken.Spendthrift,
        log_of(
            (claim(A), 0),
            (ClaimingMessages(*A, "g", "t", 0, 0, 10), 1),
            (ClaimingMessages(*A, "g", "t", 0, 0, 8), 2),
            (ClaimingMessages(*A, "g", "t", 0, 0, 20), 3),
        ),
        {Breach.OVERLAPPING_GRANTS: [2]},
        "granted offsets up to 8; up to 10 they had been granted",
    ),
    "a stale epoch": (
        broken.Trusting,
        log_of((claim(A), 0), (claim(B), 5000), (beat(A, 0, None), 5001), (beat(B, 1, 3), 5002)),
        {Breach.STALE_EPOCH: [2]},
        "a record of a/1 with epoch 0 took effect",
    ),
}


@pytest.mark.parametrize("planted", PLANTED)
def test_a_broken_rationalizer_is_found(planted: str, tmp_path: Path) -> None:
    world_type, log, wanted, words = PLANTED[planted]
    with audited(log, tmp_path, world_type=world_type) as findings:
        found = rows(findings, "violations")
        assert {(row["kind"], row["offset"]) for row in found} == {
            (str(kind), offset) for kind, offsets in wanted.items() for offset in offsets
        }
        assert words in found[0]["detail"]
        assert (found[0]["group"], found[0]["topic"], found[0]["topic_partition"]) == ("g", "t", 0)
        assert not findings.is_clean
        assert findings.verdict.startswith("1 violation in")
    with audited(log, tmp_path) as findings:
        assert findings.is_clean  # the real World reports no violation for the same log


@pytest.mark.parametrize("world_type", [broken.Generous, broken.Split, broken.Forgetful, broken.Trusting])
def test_a_broken_rationalizer_is_found_in_random_logs(world_type: type[World], tmp_path: Path) -> None:
    with audited(random_log(4, 500), tmp_path, world_type=world_type) as findings:
        assert findings.violations


def test_what_looks_like_a_violation_and_is_none(tmp_path: Path) -> None:
    """A reposition under a pause, a takeover by a restarted client, a stale holder revived, a stale release."""
    log = log_of(
        (claim(A), 0),
        (beat(A, 0, 100), 10),
        (beat(("7", "a"), None, 100), 20),  # C7
        (beat(("7", "a"), 2, 110), 20 + 5 * HI),  # C6
        (ReleasingPartition("7", "a", "g", "t", 0, 2, 120), 20 + 10 * HI),
        (ReleaseGroup(*ADMIN, "g", 10**6), 20 + 11 * HI),
        (claim(ADMIN), 20 + 11 * HI),
        (ReleasingPartition(*ADMIN, "g", "t", 0, 6, 5), 20 + 11 * HI),  # C11: back to 5
        (ReleaseGroup(*ADMIN, "g", 0), 20 + 12 * HI),
        (claim(B), 20 + 12 * HI),
    )
    with audited(log, tmp_path) as findings:
        assert findings.is_clean, findings.examples
        ended = [(row["instance"], row["ended"]) for row in rows(findings, "ownership")]
        how = [(row["how"], row["silent_ms"], row["unowned_ms"]) for row in rows(findings, "takeovers")]
    assert sorted(ended) == [("1", "restarted"), ("2", "open"), ("7", "released"), ("9", "released")]
    assert how == [
        ("restarted", 10, None),
        ("handed over", 6 * HI, HI),
        ("handed over", HI, HI),
    ]


# -- snapshots ---------------------------------------------------------------------------------------------------------


def lies(findings: Findings) -> list[tuple[str, int, int]]:
    return [(each.kind, each.partition, each.offset) for each in findings.examples]


@pytest.mark.parametrize("records_per_task", [1, 10**6], ids=["all side by side", "one task"])
@pytest.mark.parametrize("place", [0, 3, 9])
def test_a_forged_snapshot_is_named(place: int, records_per_task: int, tmp_path: Path) -> None:
    """It is valid by itself, so only a replay finds it; and nothing concluded from it remains."""
    log = random_log(3, 500)
    log.store_snapshots(50)
    world = log.world(1, 50 * (place + 1))
    log.snapshots[1][place : place + 1] = forged(world)
    with audited(log, tmp_path, records_per_task=records_per_task) as findings:
        assert lies(findings) == [(Breach.SNAPSHOT_DIFFERS, 1, world.next_offset)]
        assert world.digest() in findings.examples[0].detail
        assert findings.digests == log.digests()
        assert not findings.is_clean
        with_lie = {name: sorted(map(repr, rows(findings, name))) for name in ("records", "ownership", "progress")}
    log.snapshots = {}
    with audited(log, tmp_path) as findings:
        assert with_lie == {name: sorted(map(repr, rows(findings, name))) for name in with_lie}


def test_every_one_of_several_lies_is_named(tmp_path: Path) -> None:
    log = random_log(5, 500)
    log.store_snapshots(50)
    for place in (1, 2, 3, 7):
        log.snapshots[0][place : place + 1] = forged(log.world(0, 50 * (place + 1)))
    wanted = [(Breach.SNAPSHOT_DIFFERS, 0, log.world(0, 50 * (place + 1)).next_offset) for place in (1, 2, 3, 7)]
    for records_per_task in (1, 10**6):
        with audited(log, tmp_path, records_per_task=records_per_task) as findings:
            assert lies(findings) == wanted
            assert findings.digests == log.digests()


def test_a_doctored_log_is_found_by_its_snapshots(tmp_path: Path) -> None:
    """An accepted record was removed from the log; all remaining records are valid."""
    log = random_log(6, 400)
    log.store_snapshots(50)
    world = World(0, log.partitions)
    taken = next(
        place
        for place, entry in enumerate(log.entries[0])
        if world.apply(*entry).code == "OK" and place > 120 and entry[2] is not None and entry[2][1:2] == b"\x01"
    )
    del log.entries[0][taken]
    with audited(log, tmp_path, records_per_task=1) as findings:
        assert findings.violations
        assert {each.partition for each in findings.examples} == {0}
        first = next(each for each in findings.examples if each.kind == Breach.SNAPSHOT_DIFFERS)
        assert first.offset > log.entries[0][taken - 1][0]


def test_a_snapshot_whose_bytes_are_not_of_its_digest(tmp_path: Path) -> None:
    log = random_log(7, 300)
    log.store_snapshots(50)
    world = log.world(0, 150)
    log.snapshots[0][2:3] = encode_state(0, world.next_offset, b"\x00" + world.snapshot()[1:], world.digest())
    with audited(log, tmp_path, records_per_task=1) as findings:
        assert lies(findings) == [(Breach.SNAPSHOT_DIFFERS, 0, world.next_offset)]
        assert "its bytes don't match its digest" in findings.examples[0].detail
        assert findings.digests == log.digests()


def test_a_snapshot_that_holds_no_state(tmp_path: Path) -> None:
    log = random_log(7, 300)
    log.store_snapshots(50)
    world = log.world(0, 150)
    log.snapshots[0][2:3] = encode_state(0, world.next_offset, b"nothing at all")
    with audited(log, tmp_path, records_per_task=1) as findings:
        assert lies(findings) == [(Breach.SNAPSHOT_DIFFERS, 0, world.next_offset)]
        assert findings.digests == log.digests()


def test_junk_among_the_snapshots_is_reported(tmp_path: Path) -> None:
    log = random_log(7, 300)
    log.store_snapshots(50)
    log.snapshots[0][2:2] = [None, b"junk"]
    with audited(log, tmp_path, records_per_task=1) as findings:
        assert findings.is_clean
        assert "partition 0 of the log of snapshots: 2 record(s) are no part of a snapshot" in findings.notices


# -- where a log begins and ends ---------------------------------------------------------------------------------------


def test_a_log_without_its_beginning_starts_from_a_snapshot(tmp_path: Path) -> None:
    log = random_log(9, 600)
    digests = log.digests()
    log.store_snapshots(50)
    first = log.world(1, 200).next_offset
    log.entries[1] = [entry for entry in log.entries[1] if entry[0] >= first - 10]
    with audited(log, tmp_path, records_per_task=1) as findings:
        assert findings.digests == digests
        assert findings.is_clean
        assert any(f"starts from the snapshot at {first}, which nothing" in notice for notice in findings.notices)
        assert any(row["from_time"] is None for row in rows(findings, "ownership"))


def test_a_topic_without_its_beginning_and_without_a_snapshot_is_refused() -> None:
    from kafka_marshal.pipeline.audit.files import LogPiece

    log = SourceLog("__marshal", 1, {0: [LogPiece("x", 0, 0, 500, 600, 101, 1000)]}, {0: 500})
    with pytest.raises(LogCutError, match="begins at offset 500"):
        cut(log, {}, 2)


def test_an_upgrade_beyond_this_release_ends_the_replay(tmp_path: Path) -> None:
    """E4: conclusions stop before it, and the log is not called clean."""
    log = log_of((claim(A), 0), (Upgrade(*A, "g", 107), 1), (beat(A, 0, 4), 2), (Tick(*A, "g"), 3))
    with audited(log, tmp_path) as findings:
        assert findings.stopped == {0: 107}
        assert not findings.is_clean
        assert "stopped before an Upgrade" in findings.verdict
        assert len(rows(findings, "records")) == 1
        assert findings.digests == {0: log.world(0, 1).digest()}


def test_an_empty_log(tmp_path: Path) -> None:
    log = WholeLog(3, {0: []})
    with audited(log, tmp_path) as findings:
        assert findings.verdict.startswith("0 violations in 0 records")
        assert findings.digests == {cp: World(cp, 3).digest() for cp in range(3)}


def test_replay_only_comes_to_the_same(tmp_path: Path) -> None:
    log = random_log(3, 500)
    log.store_snapshots(50)
    log.snapshots[1][3:4] = forged(log.world(1, 200))
    source = DumpSource(log.write_dump(tmp_path / "log.jsonl"), log.write_snapshots(tmp_path / "snapshots.jsonl"))
    with Audit(source, tables=False, records_per_task=1) as audit:
        findings = audit.run()
    assert findings.digests == log.digests()
    assert lies(findings) == [(Breach.SNAPSHOT_DIFFERS, 1, log.world(1, 200).next_offset)]
    assert findings.tables == {}
