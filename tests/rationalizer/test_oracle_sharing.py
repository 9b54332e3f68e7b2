"""The oracle's reading of section 7b, alone: what it must keep to, and reach, before it judges."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import combinations

import pytest

from tests.rationalizer.group_author import GroupAuthor
from tests.rationalizer.oracle import OracleOutcome, OracleWorld, is_state, judge
from tests.rationalizer.oracle.holes import Hole, done_for
from tests.rationalizer.oracle.keyed import KeyedProgress
from tests.rationalizer.oracle.shares import SharedLease
from tests.rationalizer.sharers import HASHES, SharingAuthor, write_sharing_log
from tests.rationalizer.strategies import TEST_TIMEOUT_S, by_seed, many

pytestmark = pytest.mark.timeout(TEST_TIMEOUT_S)

PLACES = ((0, 1), (0, 1), (1, 2), (2, 4))
LENGTH = 200
#: Offsets that logs reach, those near 2^62 aside.
OFFSETS = range(80)
SETTLE = ("SettlingMessages", "SettleOffsets")


def open_in(holes: Iterable[Hole]) -> dict[int, Hole]:
    """The hole of each offset that has one."""
    return {offset: hole for hole in holes for offset in OFFSETS if hole.first <= offset <= hole.last}


def done_in(progress: KeyedProgress) -> set[tuple[int, int]]:
    """(offset, key hash) that are done, as H1 says it."""
    holes = open_in(progress.holes)
    return {
        (offset, key)
        for offset in OFFSETS
        for key in HASHES
        if done_for(progress, (key, key), offset) and (offset not in holes or holes[offset].key_hash not in (None, key))
    }


def holds_together(lease: SharedLease, now: int) -> None:
    """B1, H1, B3."""
    assert lease.holder is None or not lease.shares
    for one, other in combinations(lease.shares, 2):
        assert (one.keys is None) == (other.keys is None)
        if one.keys is not None and other.keys is not None:
            assert one.keys[1] < other.keys[0] or other.keys[1] < one.keys[0]
    owners = {share.epoch for share in lease.shares if share.keys is None}
    for hole in lease.progress.holes:
        assert hole.owner is None or (hole.owner in owners and hole.reason is None)
        assert hole.reason is None or hole.key_hash is not None
    assert all(share.last_beat <= now for share in lease.shares)


def closed_as_the_rules_say(before: SharedLease, after: SharedLease, outcome: OracleOutcome) -> None:
    """Nothing is lost: what was open is open or done; and what is passed is done, or open."""
    was, now = open_in(before.progress.holes), open_in(after.progress.holes)
    gone = set(was) - set(now)
    if outcome.code == "REPOSITIONED" or "REPOSITIONED" in (outcome.entries or ()):
        return
    if gone:
        assert outcome.type in SETTLE
        keys = {offset: HASHES if was[offset].key_hash is None else [was[offset].key_hash] for offset in gone}
        progress = after.progress
        assert all(done_for(progress, (key, key), offset) for offset in gone for key in keys[offset] if key is not None)
    if not done_in(before.progress) <= done_in(after.progress):
        assert outcome.type in SETTLE  # a batch that is open again; what was done before by R2 alone
        undone = {offset for offset, _ in done_in(before.progress) - done_in(after.progress)}
        is_redo = before.progress.again < after.progress.again and undone <= now.keys()
        assert is_redo or all(offset in was for offset in undone)
    if outcome.taken is not None:
        first, last = outcome.taken
        for offset in set(range(first, last + 1)) & set(OFFSETS):
            opened = "OK" in (outcome.entries or ())  # given back in the same record
            ended = offset in was and was[offset].owner not in {share.epoch for share in after.shares}
            assert offset not in was or was[offset].is_free or opened or ended
            assert offset not in now or now[offset].since > max((hole.since for hole in was.values()), default=-1)


@pytest.mark.parametrize("seed", range(many(24)))
def test_what_every_lease_keeps_to(seed: int) -> None:
    world = OracleWorld(*PLACES[seed % 4])
    author = SharingAuthor(by_seed(seed), world)
    for _ in range(LENGTH):
        before = {key: author.shared(key) for key in author.keys}
        outcome = world.apply(*author.entry())
        for key, was in before.items():
            now = author.shared(key)
            holds_together(now, world.log_time)
            if was != now and outcome.type != "ForgetGroup":
                assert outcome.accepted
                closed_as_the_rules_say(was, now, outcome)
    assert is_state(world.snapshot(), world.partitions)


@pytest.mark.parametrize("seed", range(many(8)))
def test_what_holes_of_groups_keep_to(seed: int) -> None:
    world = OracleWorld(*PLACES[seed % 4])
    author = GroupAuthor(by_seed(seed), world, takes=False)
    for _ in range(LENGTH):
        before = dict(world.groups)
        outcome = world.apply(*author.entry())
        for name, now in world.groups.items():
            for place, progress in now.progress.items():
                assert all(hole.key_hash is not None and hole.owner is None for hole in progress.holes)
                was = before[name].progress.get(place) if name in before else None
                if was is None or was.holes == progress.holes:
                    continue
                assert outcome.accepted
                closed_as_the_rules_say(SharedLease(progress=was), SharedLease(progress=progress), outcome)
    assert is_state(world.snapshot(), world.partitions)


def test_logs_reach_every_code() -> None:
    """But for limits, which logs with small ones meet (test_sharing_side_by_side)."""
    met: Counter[tuple[str | None, str]] = Counter()
    for seed in range(40):
        for outcome in write_sharing_log(by_seed(seed), LENGTH)[1].outcomes:
            met[outcome.type, outcome.code] += 1
            met.update(((f"{outcome.type}, entry"), code) for code in outcome.entries or ())
    share = ("OK", "ALREADY_HELD", "HELD", "WRONG_MODE", "PAUSED")
    settle = ("OK", "PARTIAL", "NOTHING_TO_TAKE", "NOT_HELD", "FENCED", "WRONG_MODE", "PAUSED")
    entry = ("OK", "DUPLICATE_COMMIT", "FENCED", "INDIVIDUAL_COMMIT_TOO_OLD")
    wanted = {("ClaimingShare", code) for code in share} | {("SettlingMessages", code) for code in settle}
    wanted |= {("SettlingMessages, entry", code) for code in entry} | {("ClaimingMessages", "WRONG_MODE")}
    assert not {each for each in wanted if met[each] < 3}


def test_the_bytes_of_the_contract() -> None:
    """Section 7b, "The same in bytes"."""
    claim = bytes.fromhex("9b0416a26931a27731a167a66f726465727300cd0bb8c0c0c0")
    settle = bytes.fromhex(
        "9d041ca26931a27731a167a66f7264657273004658929264cc9392cc95ccc7909194cc94cf000000012a05f20005aa56616c75654572726f"
        "7293ccc8cd1267c2"
    )
    tries = bytes.fromhex("9d041da26931a27731a167a4672d30310c58a66f7264657273009091947878cf000000012a05f2000290")
    assert judge(claim, 4, 0, 1).fields == ("orders", 0, 3000, None, None, None)
    wanted: tuple[object, ...] = (
        "orders",
        0,
        70,
        88,
        [[100, 147], [149, 199]],
        [],
        [[148, 5_000_000_000, 5, "ValueError"]],
    )
    assert judge(settle, 4, 0, 1).fields == (*wanted, [200, 4711, False])
    wanted_tries: tuple[object, ...] = ("g-01", 12, 88, "orders", 0, [], [[120, 120, 5_000_000_000, 2]], [])
    assert judge(tries, 4, 0, 1).fields == wanted_tries
    assert judge(claim, 3, 0, 1).code == "UNSUPPORTED_VERSION"
