"""Coordinated groups in the audit: each kind of violation, planted and found, and the tables against the oracle."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kafka_marshal.pipeline.audit.invariants import Breach
from rationalizer import ClaimingPartition, CommitEntry, ForgetGroup, ReleaseGroup, World
from rationalizer.limits import MAX_KEY_HASH
from rationalizer.wire.wellformed import LET_GO, START
from tests.audit import broken_groups as broken
from tests.audit.group_logs import SESSION, GroupLog, random_group_log
from tests.audit.logs import WholeLog
from tests.audit.test_tables import audited, rows
from tests.rationalizer.oracle import OracleWorld

SEEDS = range(6)


def joined(*clients: str, partitions: int = 1) -> GroupLog:
    log = GroupLog()
    for client in clients:
        log.join(client, topics=[("t", partitions)])
    return log


def two_join() -> GroupLog:
    """Two members; the second partition is revoked from the first and not yet released."""
    return joined("a", "b", partitions=2)


def one_leaves() -> GroupLog:
    log = joined("a", "b")
    log.leave("a")
    return log


def commits(*entries: CommitEntry) -> Callable[[], GroupLog]:
    def log() -> GroupLog:
        found = joined("a")
        for entry in entries:
            found.commit("a", entry)
        return found

    return log


def through(offset: int, lo: int = 0, hi: int = MAX_KEY_HASH) -> CommitEntry:
    return CommitEntry("t", 0, lo, hi, through=offset)


def of_another() -> GroupLog:
    log = joined("a", "b")
    log.commit("b", through(5))
    return log


def of_nobody() -> GroupLog:
    log = joined("a")
    log.commit("x", through(5), member_id="g-x")
    return log


def beats() -> GroupLog:
    log = joined("a", "b")
    log.beat("a")
    return log


def dies() -> GroupLog:
    log = joined("a", "b")
    log.beat("b", after=SESSION - 15)
    log.beat("b")
    return log


def claims() -> GroupLog:
    log = joined("a")
    log.add(ClaimingPartition("1", "c", "g", "t", 0, 1000))
    return log


PLANTED: dict[str, tuple[type[World], Callable[[], GroupLog], Breach, int, str]] = {
    "taken from an owner that has not released": (
        broken.Hasty,
        two_join,
        Breach.TWO_OWNERS_OF_A_KEY,
        2,
        "had not released",
    ),
    "pieces overlap": (
        broken.Overlapping,
        lambda: joined("a", "b"),
        Breach.TWO_OWNERS_OF_A_KEY,
        2,
        "pieces overlap",
    ),
    "the old token": (broken.Unfencing, one_leaves, Breach.FENCE, 3, "not above"),
    "progress moved back": (
        broken.Backwards,
        commits(through(9), through(4)),
        Breach.PROGRESS_BACK,
        3,
        "stable is 4",
    ),
    "progress of one key": (
        broken.Leaky,
        commits(through(7), through(9, 0, 99), through(5)),
        Breach.PROGRESS_BACK,
        4,
        "by key: 8 for 0 … 99",
    ),
    "out of order, lost": (
        broken.OutOfOrderLost,
        commits(through(3), CommitEntry("t", 0, ranges=((6, 8),)), CommitEntry("t", 0, ranges=((7, 7),))),
        Breach.PROGRESS_BACK,
        4,
        "done out of order",
    ),
    "an owner that is gone": (broken.Haunted, one_leaves, Breach.NO_MEMBER, 3, "slot 0"),
    "a generation below": (broken.Timeless, one_leaves, Breach.GENERATION, 3, "after generation 2 came 1"),
    "a generation of nothing": (broken.Restless, of_nobody, Breach.GENERATION, 2, "was rejected"),
    "a commit of no owner": (broken.Credulous, of_another, Breach.STALE_GENERATION, 3, "did not own"),
    "a commit of nobody": (broken.Deaf, of_nobody, Breach.STALE_GENERATION, 2, "which is no member"),
    "a member that lives is removed": (broken.Ruthless, beats, Breach.MEMBERS, 3, "knows b no more"),
    "a dead member stays": (broken.Faithful, dies, Breach.MEMBERS, 4, "has the member a"),
    "claimed and coordinated": (
        broken.Amphibious,
        claims,
        Breach.TWO_KINDS,
        2,
        "a lease of a coordinated group",
    ),
}


@pytest.mark.parametrize("planted", PLANTED)
def test_a_broken_plane_is_found(planted: str, tmp_path: Path) -> None:
    world_type, make, kind, offset, words = PLANTED[planted]
    log = make().whole
    with audited(log, tmp_path, world_type=world_type) as findings:
        found = [row for row in rows(findings, "violations") if row["kind"] == str(kind)]
        assert found, rows(findings, "violations")
        assert found[0]["offset"] == offset
        assert words in found[0]["detail"]
        assert found[0]["group"] == "g"
        assert not findings.is_clean
    with audited(log, tmp_path) as findings:
        assert findings.is_clean, findings.examples


def test_every_kind_of_violation_is_planted_somewhere() -> None:
    of_groups = list(Breach)[list(Breach).index(Breach.TWO_OWNERS_OF_A_KEY) :]
    planted = {kind for _, _, kind, _, _ in PLANTED.values()} | {Breach.CHECKPOINT}  # in test_audited_checkpoints
    assert planted == {*of_groups, Breach.PROGRESS_BACK}


@pytest.mark.parametrize("world_type", [broken.Hasty, broken.Backwards, broken.Credulous, broken.Ruthless])
def test_a_broken_plane_is_found_in_random_logs(world_type: type[World], tmp_path: Path) -> None:
    def found(seed: int) -> int:
        with audited(random_group_log(seed, 300), tmp_path, world_type=world_type) as findings:
            return findings.violation_count

    assert any(found(seed) for seed in range(40))


def test_what_looks_like_a_violation_and_is_none(tmp_path: Path) -> None:
    """A restart, a silent log, a withdrawn revocation, positions moved under a pause, a recreated group."""
    log = two_join()
    log.commit("a", through(9))
    log.commit("a", CommitEntry("t", 1, action=LET_GO, through=4))
    log.join("a", "2", topics=[("t", 2)])
    log.beat("b", after=5 * SESSION)  # no member was heard: none expires
    log.beat("a", "2", after=SESSION - 1)
    log.beat("a", "2", after=SESSION - 1)  # b was silent
    log.leave("a", "2")
    log.add(ReleaseGroup("9", "admin", "g", 10**9))
    log.commit("admin", through(2), instance="9", member_id="")
    log.add(ForgetGroup("9", "admin", "g"))
    log.join("c", topics=[("t", 2)])
    log.commit("c", CommitEntry("t", 0, action=START, through=0))
    with audited(log.whole, tmp_path) as findings:
        assert findings.is_clean, findings.examples
        reasons = [(row["reason"], row["client"], row["died"]) for row in rows(findings, "generations")]
        ended = [
            (row["topic_partition"], row["client"], row["ended"], row["unowned_ms"])
            for row in sorted(
                rows(findings, "assignments"), key=lambda row: (row["topic_partition"], row["from_offset"])
            )
        ]
    assert reasons == [
        ("joined", "a", []),
        ("joined", "b", []),
        ("restarted", "a", []),
        ("died", "a", ["b"]),
        ("left", "a", []),
        ("joined", "c", []),
    ]
    assert ended == [
        (0, "a", "restarted", None),
        (0, "a", "left", 10),
        (0, "c", "open", None),
        (1, "a", "let go", None),
        (1, "b", "died", 0),
        (1, "a", "left", 2 * (SESSION - 1)),
        (1, "c", "open", None),
    ]


def test_moves_are_counted(tmp_path: Path) -> None:
    log = joined("a", partitions=4)
    log.join("b", topics=[("t", 4)])
    log.beat("b", after=SESSION - 15)
    log.beat("b")
    with audited(log.whole, tmp_path) as findings:
        found = [(row["members"], row["moved"], row["revoked"]) for row in rows(findings, "generations")]
    assert found == [(1, 0, 0), (2, 0, 2), (1, 4, 0)]


def test_records_have_generation_and_member(tmp_path: Path) -> None:
    log = joined("a")
    log.beat("a")
    with audited(log.whole, tmp_path) as findings:
        found = [(row["generation"], row["member"]) for row in rows(findings, "records")]
    assert found == [(None, None), (1, log.ids["a"]), (1, None)]


# -- against the oracle ------------------------------------------------------------------------------------------------


def owners(log: WholeLog) -> dict[tuple[Any, ...], dict[int, tuple[Any, ...]]]:
    """(group, topic, partition) → offset → owners of keys after that record, by the oracle's states."""
    found: dict[tuple[Any, ...], dict[int, tuple[Any, ...]]] = defaultdict(dict)
    for cp, entries in log.entries.items():
        world = OracleWorld(cp, log.partitions)
        places: set[tuple[Any, ...]] = set()
        for entry in entries:
            world.apply(*entry)
            now: dict[tuple[Any, ...], list[tuple[Any, ...]]] = {}
            for group in world.groups.values():
                for place, pieces in group.pieces.items():
                    for piece in pieces:
                        owner = group.member(piece.owner)
                        assert owner is not None
                        keys = now.setdefault((group.name, *place), [])
                        row = (piece.low, piece.high, owner.client, owner.instance, piece.since)
                        if keys and keys[-1][1] + 1 == row[0] and keys[-1][2:] == row[2:]:
                            row = (keys.pop()[0], *row[1:])
                        keys.append(row)
            places |= now.keys()
            for place in places:
                found[place][entry[0]] = tuple(now.get(place, ()))
    return found


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("every", [None, 40], ids=["whole", "cut at snapshots"])
def test_assignments_are_what_the_oracle_sees(seed: int, every: int | None, tmp_path: Path) -> None:
    log = random_group_log(seed, 300)
    if every is not None:
        log.store_snapshots(every)
    with audited(log, tmp_path, records_per_task=1) as findings:
        assert findings.is_clean, findings.examples
        assert sum(each.segments for each in findings.partitions) > (2 if every else 0)
        found: dict[tuple[Any, ...], list[dict[str, Any]]] = defaultdict(list)
        for row in rows(findings, "assignments"):
            assert (row["ended"] == "open") == (row["to_offset"] is None)
            assert row["ended"] in {
                "let go",
                "handed over",
                "put back",
                "left",
                "died",
                "restarted",
                "forgotten",
                "open",
            }
            found[row["group"], row["topic"], row["topic_partition"]].append(row)
    wanted = owners(log)
    assert found.keys() <= wanted.keys()
    for place, by_offset in wanted.items():
        for offset, keys in by_offset.items():
            there = sorted(
                (row["lo"], row["hi"], row["client"], row["instance"], row["token"])
                for row in found[place]
                if row["from_offset"] <= offset and (row["to_offset"] is None or offset < row["to_offset"])
            )
            assert merged(there) == merged(keys), (place, offset)


def merged(keys: Any) -> list[tuple[Any, ...]]:
    found: list[tuple[Any, ...]] = []
    for row in keys:
        if found and found[-1][1] + 1 == row[0] and found[-1][2:] == row[2:]:
            row = (found.pop()[0], *row[1:])
        found.append(row)
    return found


@pytest.mark.parametrize("seed", SEEDS)
def test_generations_are_those_of_the_oracle(seed: int, tmp_path: Path) -> None:
    log = random_group_log(seed, 300)
    wanted = []
    world = OracleWorld(0, 1)
    for entry in log.entries[0]:
        before = {name: group.generation for name, group in world.groups.items()}
        world.apply(*entry)
        for name, group in world.groups.items():
            if group.generation != before.get(name, 0):
                revoked = [x for pieces in group.pieces.values() for x in pieces if x.revoked == group.generation]
                wanted.append((name, entry[0], world.log_time, len(group.members), len(revoked)))
    with audited(log, tmp_path) as findings:
        found = [
            (row["group"], row["generation"], row["time"], row["members"], row["revoked"])
            for row in sorted(rows(findings, "generations"), key=lambda row: row["generation"])
        ]
    assert found == wanted


@pytest.mark.parametrize("seed", SEEDS)
def test_a_cut_log_gives_the_rows_of_a_whole_one(seed: int, tmp_path: Path) -> None:
    log = random_group_log(seed + 50, 400)
    # Not `progress`: where a snapshot lies within an open checkpoint, the rows of what was handed in before it differ.
    tables = ("records", "ownership", "generations", "assignments")
    found = []
    for name in ("whole", "cut"):
        folder = tmp_path / name
        folder.mkdir()
        with audited(log, folder, records_per_task=1) as findings:
            assert findings.is_clean, findings.examples
            found.append({table: sorted(map(repr, rows(findings, table))) for table in tables})
        log.store_snapshots(30)
    assert found[0] == found[1]


@pytest.mark.parametrize("seed", range(20))
def test_an_honest_log_has_no_violation(seed: int, tmp_path: Path) -> None:
    with audited(random_group_log(seed + 100, 400, partitions=2), tmp_path) as findings:
        assert findings.is_clean, findings.examples


def test_who_made_which_offset_done(tmp_path: Path) -> None:
    """Rows of `progress`, with the token of the piece in place of an epoch."""
    log = joined("a")
    log.commit("a", CommitEntry("t", 0, action=START, through=4))
    log.commit("a", through(9))
    log.commit("a", CommitEntry("t", 0, ranges=((12, 13),)))
    log.commit("a", through(12))
    log.commit("a", through(20, 0, 99))
    log.commit("a", through(17, 100, MAX_KEY_HASH))
    with audited(log.whole, tmp_path) as findings:
        found = [(row["what"], row["first"], row["last"], row["epoch"]) for row in rows(findings, "progress")]
    assert found == [
        ("done", 0, 4, 1),
        ("done", 5, 9, 1),
        ("range", 12, 13, 1),
        ("done", 10, 11, 1),
        ("shared", 14, 17, None),
    ]
