"""Values as bytes: E1-E3 and the order of E6. Values are written by hand here, in any form msgpack has."""

from __future__ import annotations

import dataclasses
import struct
import sys
from collections import Counter
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgpack import packb, unpackb

from rationalizer import (
    BeatEntry,
    ClaimingMessages,
    ClaimingPartition,
    CommitRanges,
    ForgetGroup,
    Heartbeat,
    HeartbeatBatch,
    InvalidRecordError,
    MalformedError,
    Record,
    RejectedValueError,
    ReleaseGroup,
    ReleasingPartition,
    Tick,
    UnknownTypeError,
    UnsupportedVersionError,
    Upgrade,
    World,
    decode,
    encode,
)
from rationalizer.limits import MAX_VALUE_BYTES
from rationalizer.wire.unpacking import only_allowed
from rationalizer.wire.wellformed import COMMIT_ENTRIES

TICK = [1, 32, "1", "a", "g"]
UNKNOWN = [1, 99, "1", "a", "g"]


def outcome(value: bytes | None) -> tuple[str, str | None]:
    """(code, type) of a value, in a world without any lease; whatever it is, it moves log time (T1)."""
    world = World(0, 1)
    found = world.apply(0, 77, value)
    assert (world.log_time, world.next_offset) == (77, 1)
    many = World(0, 1)
    many.apply_many([(0, 77, value)])
    assert (many.rejected, many.accepted) == (world.rejected, world.accepted)
    return found.code, found.type


@pytest.mark.parametrize("key", [b"\x01", b"\xc0", b"\xc2", b"\x90", b"\x80", b"\xca\x00\x00\x00\x00", b"\xc4\x01k"])
def test_e2_the_keys_of_maps_are_strings(key: bytes) -> None:
    record = b"\x96" + packb(UNKNOWN)[1:] + b"\x81" + key + b"\x01"
    assert outcome(record) == ("MALFORMED", None)
    assert outcome(record.replace(key + b"\x01", b"\xa1k\x01")) == ("UNKNOWN_TYPE", None)


@pytest.mark.parametrize(
    "bomb",
    [
        b"\x91" * 100_000,
        b"\x81\xa1k" * 100_000,
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",
        b"\x96\x01\x20\xa11\xa1a\xa1g\xdd\xff\xff\xff\xff",
        (b"\xdd\x00\x0f\xff\xff" * 600).ljust(1_048_576, b"\x01"),
        (b"\xdf\x00\x07\xff\xff\xa1k" * 600).ljust(1_048_576, b"\x01"),
        b"\xdc\x03\xe8" * 340,
    ],
    ids=["deep arrays", "deep maps", "array32", "map32", "str32", "field", "wide", "wide maps", "small"],
)
def test_e2_bombs_are_malformed_and_cost_no_memory(bomb: bytes) -> None:
    import tracemalloc

    tracemalloc.start()
    try:
        assert outcome(bomb) == ("MALFORMED", None)
        assert tracemalloc.get_traced_memory()[1] < 20_000_000
    finally:
        tracemalloc.stop()


TOP = 2**63 - 1


def test_a_plain_entry_of_a_commit_is_judged_without_a_call() -> None:
    calls: Counter[str] = Counter()

    def seen(_frame: FrameType, event: str, _of: object) -> None:
        calls[event] += 1

    def calls_for(entries: int) -> int:
        value = tuple([("t", number, 0, TOP, 0, 7, (), None) for number in range(entries)])
        calls.clear()
        sys.setprofile(seen)
        try:
            assert COMMIT_ENTRIES.holds(value)
        finally:
            sys.setprofile(None)
        return calls["call"]

    assert calls_for(100) == calls_for(1) > 0


def test_decode_raises_what_the_outcome_says() -> None:
    with pytest.raises(MalformedError, match="fields wanted"):
        decode(packb([*TICK, 1]))
    with pytest.raises(UnsupportedVersionError):
        decode(packb([2, *TICK[1:]]))
    with pytest.raises(UnknownTypeError):
        decode(packb(UNKNOWN))
    with pytest.raises(RejectedValueError):
        decode(None)
    assert decode(packb(TICK)) == Tick("1", "a", "g")


# What begins as a float, binary or extension is found among the bytes, and nothing else is taken for one (E2).


#: A byte with which every forbidden thing can begin, where it stands for something else.
LEADS = [*range(0xC4, 0xCC), *range(0xD4, 0xD9)]

FORBIDDEN = {
    "binary": b"\xc4\x00",
    "binary, length of two": b"\xc5\x00\x01a",
    "binary, length of four": b"\xc6\x00\x00\x00\x01a",
    "extension": b"\xc7\x01\x05a",
    "extension, length of two": b"\xc8\x00\x01\x05a",
    "extension, length of four": b"\xc9\x00\x00\x00\x01\x05a",
    "float": b"\xca" + bytes(4),
    "double": b"\xcb" + bytes(8),
    **{f"extension of {1 << n}": bytes([0xD4 + n, 5]) + bytes(1 << n) for n in range(5)},
}


def _string(text: bytes) -> st.SearchStrategy[bytes]:
    """A string in every way that has room for its length."""
    size = len(text)
    ways = [b"\xdb" + struct.pack(">I", size)]
    ways += [bytes([0xA0 + size])] if size < 32 else []
    ways += [b"\xd9" + bytes([size])] if size < 256 else []
    ways += [b"\xda" + struct.pack(">H", size)] if size < 65_536 else []
    return st.sampled_from(ways).map(lambda head: head + text)


def _array(inner: list[bytes]) -> st.SearchStrategy[bytes]:
    size = len(inner)
    ways = [b"\xdc" + struct.pack(">H", size), b"\xdd" + struct.pack(">I", size)]
    ways += [bytes([0x90 + size])] if size < 16 else []
    return st.sampled_from(ways).map(lambda head: head + b"".join(inner))


def _map(inner: list[bytes]) -> st.SearchStrategy[bytes]:
    size = len(inner)
    ways = [b"\xde" + struct.pack(">H", size), b"\xdf" + struct.pack(">I", size)]
    ways += [bytes([0x80 + size])] if size < 16 else []
    keyed = b"".join(b"\xa1k" + thing for thing in inner)
    return st.sampled_from(ways).map(lambda head: head + keyed)


TEXTS = st.sampled_from([0, 1, 3, 31, 32, 196, 203, 212, 216, 255, 256, 1_000]).flatmap(
    lambda size: _string(b"\xc4\x8a" * (size // 2) + b"a" * (size % 2))
)
INTS = st.sampled_from([b"\x00", b"\x7f", b"\xe0", b"\xff"]) | st.sampled_from(
    [(b"\xcc", 1), (b"\xcd", 2), (b"\xce", 4), (b"\xcf", 8), (b"\xd0", 1), (b"\xd1", 2), (b"\xd2", 4), (b"\xd3", 8)]
).flatmap(lambda kind: st.binary(min_size=kind[1], max_size=kind[1]).map(lambda rest: kind[0] + rest))
ALLOWED = st.recursive(
    INTS | TEXTS | st.sampled_from([b"\xc0", b"\xc2", b"\xc3"]),
    lambda inner: st.lists(inner, max_size=20).flatmap(lambda things: _array(things) | _map(things)),
    max_leaves=25,
)


@given(st.lists(ALLOWED, max_size=8))
def test_all_that_is_allowed_is_let_through(things: list[bytes]) -> None:
    value = b"\xdc" + struct.pack(">H", len(things)) + b"".join(things)
    unpackb(value, raw=True)
    assert only_allowed(value)


@given(st.sampled_from(list(FORBIDDEN.values())), st.lists(ALLOWED, max_size=3), st.lists(ALLOWED, max_size=3))
def test_what_is_forbidden_is_found_wherever_it_stands(bad: bytes, before: list[bytes], after: list[bytes]) -> None:
    value = bytes([0x91 + len(before) + len(after)]) + b"".join([*before, bad, *after])
    unpackb(value, raw=True, strict_map_key=False)
    assert not only_allowed(value)


def _shortest(lead: int) -> bytes | None:
    """A thing that begins like that, with as many zeros behind it as it takes."""
    for zeros in range(33):
        value = bytes([lead]) + bytes(zeros)
        try:
            unpackb(value, strict_map_key=False)
        except ValueError:
            continue
        return value
    return None


def test_every_first_byte() -> None:
    things = {lead: _shortest(lead) for lead in range(256)}
    assert [lead for lead, thing in things.items() if thing is None] == [0xC1]
    refused = [lead for lead, thing in things.items() if thing is not None and not only_allowed(b"\xcc\xca" + thing)]
    assert refused == LEADS


@pytest.mark.parametrize("bad", FORBIDDEN.values(), ids=FORBIDDEN)
def test_each_of_them(bad: bytes) -> None:
    for before in (b"", b"\x01", b"\xcc\xca", b"\xa1a", b"\xda\x01\x00" + b"\xca" * 256, b"\x91", b"\x81\xa1k"):
        assert not only_allowed(before + bad)
        assert not only_allowed(before + bad + b"\x01" * 40)


@pytest.mark.parametrize("count", [1_023, 1_024, 1_025, 5_000])
@pytest.mark.parametrize("thing", [b"\x01", b"\xcc\xca", b"\xd9\x01a", b"\xda\x01\x00" + b"\xca" * 256])
def test_any_number_of_things(thing: bytes, count: int) -> None:
    assert only_allowed(thing * count)
    assert not only_allowed(thing * count + FORBIDDEN["float"])
    assert not only_allowed(thing * count + FORBIDDEN["float"] + thing * count)


def test_strings_of_any_length() -> None:
    for size in range(300):
        text = b"\xca" * size
        heads = [b"\xda" + struct.pack(">H", size), b"\xdb" + struct.pack(">I", size)]
        heads += [bytes([0xA0 + size])] if size < 32 else []
        heads += [bytes([0xD9, size])] if size < 256 else []
        for head in heads:
            assert only_allowed(head + text + b"\x01"), (head, size)
            assert not only_allowed(head + text + b"\xca" + bytes(4)), (head, size)


# -- Records as values: what can be built (E2), and what the wire makes of it (E1) --------------------------------


IDS = ("1", "a", "g")

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
