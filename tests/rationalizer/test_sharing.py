"""Shares and holes (chapter 7b): the contract in bytes, and rows of snapshots. (What records do: tests/scripts.)"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgpack import packb

from rationalizer import (
    ClaimingShare,
    InvalidRecordError,
    MalformedError,
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

LENGTH = 160


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
