"""Records as values: what can be built (E2), and what the wire makes of it (E1)."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from msgpack import unpackb

from rationalizer import (
    BeatEntry,
    ClaimingMessages,
    ClaimingPartition,
    CommitRanges,
    ForgetGroup,
    Heartbeat,
    HeartbeatBatch,
    InvalidRecordError,
    Record,
    ReleaseGroup,
    ReleasingPartition,
    Tick,
    Upgrade,
    World,
    decode,
    encode,
)
from rationalizer.limits import MAX_VALUE_BYTES

IDS = ("1", "a", "g")
TOP = 2**63 - 1

#: (record, value as plain data) of each type: the order of the fields is that of the tables (E1).
EXAMPLES: list[tuple[Record, list[Any]]] = [
    (Heartbeat(*IDS, "t", 3, 7, 11), [1, 1, "1", "a", "g", "t", 3, 7, 11]),
    (Heartbeat(*IDS, "t", 3, None, None), [1, 1, "1", "a", "g", "t", 3, None, None]),
    (ClaimingPartition(*IDS, "t", 3, 3000), [1, 2, "1", "a", "g", "t", 3, 3000]),
    (ReleasingPartition(*IDS, "t", 3, 7, -1), [1, 3, "1", "a", "g", "t", 3, 7, -1]),
    (ClaimingMessages(*IDS, "t", 3, 7, 12), [1, 4, "1", "a", "g", "t", 3, 7, 12]),
    (ReleaseGroup(*IDS, 5000), [1, 5, "1", "a", "g", 5000]),
    (
        HeartbeatBatch(*IDS, (BeatEntry("t", 3, 7, None), BeatEntry("u", 0, 0, 2))),
        [1, 6, "1", "a", "g", [["t", 3, 7, None], ["u", 0, 0, 2]]],
    ),
    (CommitRanges(*IDS, "t", 3, 7, ((5, 9), (1, 1))), [1, 7, "1", "a", "g", "t", 3, 7, [[5, 9], [1, 1]]]),
    (ForgetGroup(*IDS), [1, 8, "1", "a", "g"]),
    (Tick(*IDS), [1, 32, "1", "a", "g"]),
    (Upgrade(*IDS, 2), [1, 33, "1", "a", "g", 2]),
]


@pytest.mark.parametrize(("record", "plain"), EXAMPLES, ids=lambda part: type(part).__name__)
def test_e1_a_record_is_one_array_in_the_order_of_the_tables(record: Record, plain: list[Any]) -> None:
    assert unpackb(encode(record)) == plain
    assert decode(encode(record)) == record


@pytest.mark.parametrize("record", [record for record, _ in EXAMPLES], ids=lambda record: type(record).__name__)
def test_outcomes_carry_the_record_that_was_read(record: Record) -> None:
    assert World(0, 1).apply(0, 0, encode(record)).record == record


def test_records_are_frozen_slotted_and_hashable() -> None:
    for record, _ in EXAMPLES:
        assert not hasattr(record, "__dict__")
        assert hash(record) == hash(dataclasses.replace(record))
        with pytest.raises(dataclasses.FrozenInstanceError):
            record.group_id = "other"  # type: ignore[misc]


def _with(record: Record, **changes: Any) -> Record:
    return dataclasses.replace(record, **changes)


LEASE = Heartbeat(*IDS, "t", 0, 0, 0)
CLAIM = ClaimingPartition(*IDS, "t", 0, 1000)
RELEASE = ReleasingPartition(*IDS, "t", 0, 0, 0)
GRANT = ClaimingMessages(*IDS, "t", 0, 0, 0)
COMMIT = CommitRanges(*IDS, "t", 0, 0, ((0, 0),))
BATCH = HeartbeatBatch(*IDS, (BeatEntry("t", 0, 0, 0),))
NO_INT: list[Any] = [True, 1.0, "1", b"1", (1,)]
NO_TEXT: list[Any] = ["", "a\n", "\x00", "\x1f", "\x7f", "\x80", "\x9f", "\ud800", b"a", 1, None]

GOOD: list[tuple[Record, str, list[Any]]] = [
    (LEASE, "instance_id", ["a", "é" * 127, "x" * 255, " ", "\u200b", "\xa0", "a/b"]),
    (LEASE, "topic", ["x" * 249, "é" * 124, "日" * 83]),
    (LEASE, "partition", [0, 2**31 - 1]),
    (LEASE, "epoch", [None, 0, TOP]),
    (LEASE, "last_offset", [None, -1, TOP]),
    (RELEASE, "epoch", [0, TOP]),
    (RELEASE, "last_offset", [None, -1, TOP]),
    (GRANT, "proposed_last_offset", [0, TOP]),
    (CLAIM, "heartbeat_interval_ms", [100, 600_000]),
    (ReleaseGroup(*IDS, 0), "msg_expire_time", [0, TOP]),
    (Upgrade(*IDS, 1), "level", [1, 2**31 - 1]),
    (COMMIT, "ranges", [((0, TOP),), ((5, 5),) * 10_000]),
]

BAD: list[tuple[Record, str, list[Any]]] = [
    (LEASE, "instance_id", [*NO_TEXT, "x" * 256, "é" * 128]),
    (LEASE, "client_id", [*NO_TEXT, "x" * 256]),
    (LEASE, "group_id", [*NO_TEXT, "x" * 256]),
    (LEASE, "topic", [*NO_TEXT, "x" * 250, "é" * 125]),
    (LEASE, "partition", [*NO_INT, -1, 2**31, None]),
    (LEASE, "epoch", [*NO_INT, -1, TOP + 1]),
    (LEASE, "last_offset", [*NO_INT, -2, TOP + 1]),
    (RELEASE, "epoch", [*NO_INT, -1, TOP + 1, None]),
    (RELEASE, "last_offset", [*NO_INT, -2, TOP + 1]),
    (GRANT, "epoch", [*NO_INT, None]),
    (GRANT, "proposed_last_offset", [*NO_INT, -1, TOP + 1, None]),
    (CLAIM, "heartbeat_interval_ms", [*NO_INT, 99, 600_001, None]),
    (ReleaseGroup(*IDS, 0), "msg_expire_time", [*NO_INT, -1, TOP + 1, None]),
    (Upgrade(*IDS, 1), "level", [*NO_INT, 0, -1, 2**31, None]),
    (COMMIT, "epoch", [*NO_INT, None]),
    (
        COMMIT,
        "ranges",
        [
            (),
            ((5, 5),) * 10_001,
            ((2, 1),),
            ((-1, 1),),
            ((0, TOP + 1),),
            ((0, True),),
            ((False, 1),),
            ((0.0, 1),),
            ((0,),),
            ((0, 1, 2),),
            ([0, 1],),
            [(0, 1)],
            (0, 1),
            None,
            "ab",
        ],
    ),
    (BATCH, "entries", [(), None, [BeatEntry("t", 0, 0, 0)], (("t", 0, 0, 0),), "abcd"]),
]


@pytest.mark.parametrize(("record", "name", "values"), GOOD, ids=lambda part: part if isinstance(part, str) else "")
def test_e2_the_ends_of_every_range_can_be_built_and_read(record: Record, name: str, values: list[Any]) -> None:
    for value in values:
        built = _with(record, **{name: value})
        assert decode(encode(built)) == built


@pytest.mark.parametrize(("record", "name", "values"), BAD, ids=lambda part: part if isinstance(part, str) else "")
def test_e2_what_no_reader_would_accept_cannot_be_built(record: Record, name: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(InvalidRecordError, match=name):
            _with(record, **{name: value})


@pytest.mark.parametrize(
    "entry",
    [
        ("", 0, 0, 0),
        ("t", -1, 0, 0),
        ("t", True, 0, 0),
        ("t", 0, None, 0),
        ("t", 0, -1, 0),
        ("t", 0, 0, -2),
        (b"t", 0, 0, 0),
    ],
)
def test_e2_batch_entries_are_checked_and_their_epoch_is_never_nil(entry: Any) -> None:
    with pytest.raises(InvalidRecordError, match="BeatEntry"):
        BeatEntry(*entry)


def test_a_value_as_long_as_readers_accept_is_encoded() -> None:
    many = [BeatEntry("x" * 240, 0, 0, 0)] * (MAX_VALUE_BYTES // 246 - 2)  # an entry has six bytes besides its topic
    room = MAX_VALUE_BYTES - len(encode(HeartbeatBatch(*IDS, tuple(many))))
    thirds = (room // 3, room // 3, room - room // 3 * 2)
    full = HeartbeatBatch(*IDS, (*many, *(BeatEntry("x" * (size - 6), 0, 0, 0) for size in thirds)))
    assert len(encode(full)) == MAX_VALUE_BYTES
    assert decode(encode(full)) == full
    with pytest.raises(InvalidRecordError, match="split the record"):
        encode(dataclasses.replace(full, instance_id="11"))


def test_a_value_longer_than_readers_accept_is_not_encoded() -> None:
    entries = tuple(BeatEntry("x" * 249, 2**31 - 1, TOP, TOP) for _ in range(MAX_VALUE_BYTES // 260))
    with pytest.raises(InvalidRecordError, match="split the record"):
        encode(HeartbeatBatch(*IDS, entries))
