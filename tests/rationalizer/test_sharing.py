"""Shares and holes (chapter 7b): what holds after every record of any log, and what the contract has in bytes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest
from msgpack import packb

from rationalizer import (
    ClaimingShare,
    InvalidRecordError,
    Lease,
    MalformedError,
    Outcome,
    Progress,
    Record,
    SettleOffsets,
    SettlingMessages,
    SnapshotError,
    Upgrade,
    World,
    codes,
    decode,
    encode,
)
from rationalizer.holes import NO_KEY, NO_OWNER, Hole, Holes
from rationalizer.plane import Entry
from tests.rationalizer.sharing_author import sharing_log

SEEDS = range(14)
LENGTH = 160
#: Made so small that logs meet them.
LIMITS = {"MAX_HOLES": 4, "MAX_KEY_PIECES": 7}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, module in list(sys.modules.items()):
        for limit, value in LIMITS.items():
            if name.startswith("rationalizer.") and hasattr(module, limit):
                monkeypatch.setattr(module, limit, value)


# -- the bytes of the contract -----------------------------------------------------------------------------

BYTES = {
    "9b0416a26931a27731a167a66f726465727300cd0bb8c0c0c0": ClaimingShare("i1", "w1", "g", "orders", 0, 3000),
    "9d041ca26931a27731a167a66f7264657273004658929264cc9392cc95ccc7909194cc94cf000000012a05f20005aa56616c75654572726f72"
    "93ccc8cd1267c2": SettlingMessages(
        *("i1", "w1", "g", "orders", 0, 70, 88),
        ((100, 147), (149, 199)),
        (),
        ((148, 5_000_000_000, 5, "ValueError"),),
        (200, 4711, False),
    ),
    "9d041da26931a27731a167a4672d30310c58a66f7264657273009091947878cf000000012a05f2000290": SettleOffsets(
        *("i1", "w1", "g", "g-01", 12, 88, "orders", 0), (), ((120, 120, 5_000_000_000, 2),)
    ),
}


@pytest.mark.parametrize("written", BYTES, ids=lambda text: text[:6])
def test_the_bytes_of_the_contract(written: str) -> None:
    value = bytes.fromhex(written)
    assert encode(BYTES[written]) == value
    assert decode(value, 4) == BYTES[written]
    assert decode(value[:1] + b"\x01" + value[2:], 4) == BYTES[written]  # versions 1 to 3 mean the same


LEASE = ("1", "a", "g", "t", 0)
GROUP = ("1", "a", "g", "g-1", 0, 9, "t", 0)
MOST = 2**62 - 1
BAD: list[Callable[[], Record]] = [
    lambda: ClaimingShare(*LEASE, 1000, 5, None),
    lambda: ClaimingShare(*LEASE, 1000, None, 5),
    lambda: ClaimingShare(*LEASE, 1000, 6, 5),
    lambda: ClaimingShare(*LEASE, 99),
    lambda: ClaimingShare(*LEASE, 1000, start=MOST + 1),
    lambda: ClaimingShare(*LEASE, 1000, 0, 2**63),
    lambda: SettlingMessages(*LEASE, None, 9),
    lambda: SettlingMessages(*LEASE, None, 9, ((1, 1),), take=(1, 1, False)),
    lambda: SettlingMessages(*LEASE, 1, 9, ((2, 1),)),
    lambda: SettlingMessages(*LEASE, 1, 9, ((0, 1_000_000),)),
    lambda: SettlingMessages(*LEASE, 1, 9, ((MOST, MOST + 1),)),
    lambda: SettlingMessages(*LEASE, 1, 9, open=((1, 2, 5, 0),)),
    lambda: SettlingMessages(*LEASE, 1, 9, open=((1, 1, 5, 1_000_001),)),
    lambda: SettlingMessages(*LEASE, 1, 9, parked=((1, 5, 0, ""),)),
    lambda: SettlingMessages(*LEASE, 1, 9, parked=((1, 5, 0, "x" * 65),)),
    lambda: SettlingMessages(*LEASE, 1, 9, parked=((1, 5, 0, "a\nb"),)),
    lambda: SettlingMessages(*LEASE, 1, 9, take=(0, 1, False)),
    lambda: SettlingMessages(*LEASE, 1, 9, take=(1_000_001, 1, False)),
    lambda: SettlingMessages(*LEASE, 1, 9, take=(1, MOST + 1, False)),
    lambda: SettlingMessages(*LEASE, 1, 9, take=(1, 1, 1)),  # type: ignore[arg-type]
    lambda: SettlingMessages(*LEASE, 1, 9, ((0, 0),) * 5_000, ((1, 1, None, 0),) * 5_000, ((1, 5, 0, "x"),)),
    lambda: SettlingMessages(*LEASE, 1, 9, ((0, 999_999),) * 10, parked=((1, 5, 0, "x"),)),
    lambda: SettleOffsets("1", "a", "g", "", 0, 9, "t", 0),
    lambda: SettleOffsets(*GROUP, ((2, 1),)),
]
GOOD: list[Callable[[], Record]] = [
    lambda: ClaimingShare(*LEASE, 1000, 5, 5, MOST),
    lambda: SettlingMessages(*LEASE, 1, 2**63 - 1, ((0, 999_999), (MOST, MOST)), take=(1_000_000, MOST, True)),
    lambda: SettlingMessages(*LEASE, 1, 9, ((0, 999_999),) * 10),
    lambda: SettlingMessages(*LEASE, 1, 9, ((0, 0),) * 5_000, ((1, 1, None, 0),) * 5_000),
    lambda: SettlingMessages(*LEASE, 1, 9, open=((1, 1, 2**63 - 1, 1_000_000),), parked=((1, 5, 0, "x" * 64),)),
    lambda: SettleOffsets(*GROUP),
]


@pytest.mark.parametrize("number", range(len(BAD)))
def test_e2_what_is_malformed(number: int) -> None:
    with pytest.raises(InvalidRecordError):
        BAD[number]()


@pytest.mark.parametrize("number", range(len(GOOD)))
def test_e2_what_is_at_the_limits(number: int) -> None:
    record = GOOD[number]()
    assert decode(encode(record), 4) == record
    with pytest.raises(MalformedError):
        decode(encode(record) + b"\x00", 4)


# -- what holds after every record --------------------------------------------------------------------------


def played(seed: int) -> Iterator[tuple[World, Entry, Outcome]]:
    world = World(0, 1)
    for entry in sharing_log(seed, LENGTH):
        yield world, entry, world.apply(*entry)


def progresses(world: World) -> Iterator[tuple[Progress, Lease | None]]:
    for lease in world.leases():
        yield lease.progress, lease
    for group in world.groups():
        for _, _, kept in group.all_progress():
            yield kept.progress, None


def check_holes(progress: Progress, next_offset: int) -> None:
    holes = progress.open
    assert progress.holes is None or holes
    for hole in holes:
        assert 0 <= hole.first <= hole.last
        assert hole.since < next_offset
        assert hole.key_hash == NO_KEY or hole.first == hole.last
        assert not hole.is_parked or (hole.owner == NO_OWNER and hole.key_hash != NO_KEY)
        assert not progress.is_done(hole.first, None) and not progress.is_done(hole.last, hole.key_hash)
    for one, other in pairwise(holes):
        assert one.last < other.first, "they are disjoint"
        assert one.last + 1 < other.first or one.key_hash != NO_KEY or one[2:] != other[2:], "equal neighbours are one"
    if progress.holes is not None:
        again = Holes(holes)
        assert all(getattr(again, name) == getattr(progress.holes, name) for name in Holes.__slots__)


def check_shares(lease: Lease) -> None:
    shares = list(lease.shares or ())
    assert lease.shares is None or shares
    assert not (lease.held and shares), "a holder, or shares, or neither"
    assert len({share.by_batches for share in shares}) <= 1
    assert [share.epoch for share in shares] == sorted({share.epoch for share in shares})
    by_keys = sorted((share.lo, share.hi) for share in shares if not share.by_batches)
    assert all(hi < lo for (_, hi), (lo, _) in pairwise(by_keys)), "shares by keys are disjoint"
    owners = {share.epoch for share in shares if share.by_batches}
    assert {hole.owner for hole in lease.progress.open} <= {NO_OWNER, *owners}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.usefixtures("small")
def test_h1_b1_holes_and_shares_are_what_they_are_after_every_record(seed: int) -> None:
    for world, _, _ in played(seed):
        for progress, lease in progresses(world):
            check_holes(progress, world.next_offset)
            if lease is not None:
                check_shares(lease)


@pytest.mark.parametrize("seed", SEEDS)
def test_h1_what_was_open_is_settled_by_who_may_or_open_still(seed: int) -> None:
    """A hole goes only by a record that settles, a position, or a take at most once; a batch only by its owner's."""
    before: dict[str, list[Hole]] = {}
    for world, _, outcome in played(seed):
        after = {lease.group_id: lease.progress.open for lease in world.leases()}
        record = outcome.record
        for group, holes in before.items():
            there = {offset for hole in after.get(group, ()) for offset in range(hole.first, hole.last + 1)}
            gone = {offset for hole in holes for offset in range(hole.first, hole.last + 1)} - there
            if not gone:
                continue
            assert outcome.accepted
            if outcome.is_a(SettlingMessages):
                assert isinstance(record, SettlingMessages)
                named = {offset for first, last in record.done for offset in range(first, last + 1)}
                taken = range(outcome.taken[0], outcome.taken[1] + 1) if outcome.taken is not None else ()
                assert gone <= named | set(taken)
                owners = {hole.owner for hole in holes if set(range(hole.first, hole.last + 1)) & gone & named}
                assert owners <= {NO_OWNER, record.epoch}
            else:
                assert outcome.type == "ForgetGroup" or outcome.code == codes.REPOSITIONED
        before = after


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.usefixtures("small")
def test_d2_a_take_gives_what_nobody_had(seed: int) -> None:
    """What a take of the ordinary kind gives is its sender's hole, `since` here; a rejected record changes nothing."""
    world = World(0, 1)
    for entry in sharing_log(seed, LENGTH):
        before, log_time = world.rows(), world.log_time
        outcome = world.apply(*entry)
        if not outcome.accepted and world.log_time == log_time:
            assert list(map(str, world.rows().items())) == list(map(str, before.items()))
        record = outcome.record
        if outcome.taken is None or not isinstance(record, SettlingMessages) or record.take is None:
            continue
        count, up_to, at_most_once = record.take
        first, last = outcome.taken
        assert 1 <= last - first + 1 <= count
        lease = world.lease("g", "t", 0)
        assert lease is not None
        hole = None if lease.progress.holes is None else lease.progress.holes.at(first)
        if at_most_once:
            assert all(lease.progress.is_done(offset, -1) for offset in range(first, last + 1))
        else:
            assert hole is not None and hole[:4] == (first, last, record.epoch, entry[0])
            assert hole.attempts <= 2 or first == last
            assert hole.attempts > 1 or last <= up_to or hole.since == entry[0]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.usefixtures("small")
def test_s1_a_snapshot_at_any_place_leads_to_the_same_digests(seed: int) -> None:
    world = World(0, 1)
    for entry in sharing_log(seed, LENGTH):
        restarted = World.restore(world.snapshot(), 1)
        assert restarted.apply(*entry) == world.apply(*entry)
        assert restarted.digest() == world.digest()
        assert restarted.listed == world.listed
    many = World(0, 1)
    many.apply_many(list(sharing_log(seed, LENGTH)))
    assert many.digest() == world.digest()


@pytest.mark.usefixtures("small")
def test_the_logs_meet_what_they_are_for() -> None:
    met: set[tuple[str | None, str]] = set()
    for seed in SEEDS:
        for _, _, outcome in played(seed):
            met.add((outcome.type, outcome.code))
            met |= {(f"entry of {outcome.type}", code) for code in outcome.entries or ()}
    wanted = {
        "SettlingMessages": {"OK", "PARTIAL", "NOTHING_TO_TAKE", "FENCED", "NOT_HELD", "WRONG_MODE", "PAUSED"},
        "entry of SettlingMessages": {
            *("OK", "FENCED", "DUPLICATE_COMMIT", "INDIVIDUAL_COMMIT_TOO_OLD", "MAX_INDIVIDUAL_COMMIT_REACHED"),
        },
        "ClaimingShare": {"OK", "HELD", "ALREADY_HELD", "WRONG_MODE", "PAUSED"},
        "SettleOffsets": {"OK", "PARTIAL", "FENCED"},
        "entry of SettleOffsets": {"OK", "FENCED", "NOT_ASSIGNED", "ILLEGAL_GENERATION"},
        "Heartbeat": {"OK", "OFFSET_REGRESSION", "REPOSITIONED"},
    }
    assert {(name, code) for name, found in wanted.items() for code in found} - met == set()


# -- rows of snapshots --------------------------------------------------------------------------------------


def forged(row: list[object], level: int = 4) -> bytes:
    written: bytes = packb([1, 0, 100, 5_000, level, [row], [], []])
    return written


ALL = [0, 2**63 - 1, 9]
HELD_ROW = ["g", "t", 0, "a", "1", 3, 1000, 4_000, [ALL], [], -1]
FREE_ROW = ["g", "t", 0, None, None, 0, 0, 0, [ALL], [], -1]
BATCHES = [5, "a", "1", 1000, 4_000, -1, -1]
LOW, HIGH = [5, "a", "1", 1000, 4_000, 0, 99], [6, "b", "1", 1000, 4_000, 100, 200]


def test_s1_rows_that_a_replay_leads_to_are_taken() -> None:
    for row in (
        FREE_ROW,
        [*FREE_ROW, [BATCHES], []],
        [*FREE_ROW, [LOW, HIGH], [[5, 5, -1, 7, 0, 3, None], [6, 6, -1, 7, 0, 3, "Bad"]]],
        [*FREE_ROW, [BATCHES], [[0, 4, 5, 7, 1, -1, None], [5, 6, -1, 7, 1, -1, None]]],
        [*HELD_ROW, [], [[0, 4, -1, 7, 1, -1, None]]],
    ):
        assert World.restore(forged(row), 1).snapshot() == forged(row)


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ([*HELD_ROW, [], []], "canonical form"),
        ([*HELD_ROW, [BATCHES], []], "a holder and shares"),
        ([*FREE_ROW, [BATCHES]], "canonical form"),
        ([*FREE_ROW, [BATCHES, [*BATCHES[:1], "b", *BATCHES[2:]]], []], "not sorted"),
        ([*FREE_ROW, [BATCHES, [6, *BATCHES[1:]]], []], "two shares by batches"),
        ([*FREE_ROW, [BATCHES, HIGH], []], "by keys and by batches"),
        ([*FREE_ROW, [LOW, [6, "b", "1", 1000, 4_000, 99, 200]], []], "overlap"),
        ([*FREE_ROW, [[5, "a", "1", 1000, 4_000, 9, 8]], []], "no range"),
        ([*FREE_ROW, [[100, *BATCHES[1:]]], []], "began when it could not"),
        ([*FREE_ROW, [[5, "a", "1", 1000, 6_000, -1, -1]], []], "after the log time"),
        ([*FREE_ROW[:8], [[0, 9, 4], [10, 2**63 - 1, 9]], [], -1, [BATCHES], []], "at different places"),
        ([*FREE_ROW, [LOW], [[5, 6, -1, 7, 0, -1, None]]], "holes without keys"),
        ([*FREE_ROW, [BATCHES], [[0, 4, 6, 7, 1, -1, None]]], "shares no batches"),
        ([*FREE_ROW, [BATCHES], [[0, 4, 5, 5, 1, -1, None]]], "before it could be"),
        ([*FREE_ROW, [BATCHES], [[0, 4, 5, 7, 0, -1, None]]], "before it could be"),
        ([*HELD_ROW, [], [[0, 4, -1, 7, 1, -1, None], [4, 5, -1, 8, 1, -1, None]]], "overlap"),
        ([*HELD_ROW, [], [[0, 4, -1, 7, 1, -1, None], [5, 5, -1, 7, 1, -1, None]]], "would be one"),
        ([*HELD_ROW, [], [[4, 3, -1, 7, 1, -1, None]]], "ends before it begins"),
        ([*HELD_ROW, [], [[3, 4, -1, 7, 1, 9, None]]], "one key, and several"),
        ([*HELD_ROW, [], [[3, 3, -1, 100, 1, 9, None]]], "is to come"),
        ([*HELD_ROW, [], [[3, 3, -1, 7, 1, -1, "Bad"]]], "no single message"),
        ([*HELD_ROW[:5], 3, 0, 4_000, [ALL], [], -1], "something of one"),
        ([*FREE_ROW[:5], 1, 0, 0, [ALL], [], -1], "something of one"),
        ([*FREE_ROW[:8], [ALL], [], 5], "something of one"),
    ],
)
def test_s1_rows_that_no_replay_leads_to_are_refused(row: list[object], why: str) -> None:
    with pytest.raises(SnapshotError, match=why):
        World.restore(forged(row), 1)


def test_s1_below_level_4_there_are_no_such_rows() -> None:
    for row in (FREE_ROW, [*FREE_ROW, [BATCHES], []]):
        with pytest.raises(SnapshotError):
            World.restore(forged(row, 3), 1)


def test_b3_at_most_999_shares_that_are_not_stale() -> None:
    world = World(0, 1)
    world.apply(0, 0, encode(Upgrade("1", "admin", "g", 4)))
    for number in range(1_000):
        outcome = world.apply(number + 1, 10, encode(ClaimingShare("1", f"c{number}", "g", "t", 0, 1000)))
    assert outcome.code == codes.GROUP_FULL
    assert world.listed == 1 + 999
