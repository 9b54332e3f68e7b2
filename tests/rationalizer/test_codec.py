"""Values as bytes: E1-E3 and the order of E6. Values are written by hand here, in any form msgpack has."""

from __future__ import annotations

import struct
import sys
from collections import Counter
from types import FrameType
from typing import Any

import pytest
from msgpack import ExtType, Timestamp, packb

from rationalizer import (
    Heartbeat,
    MalformedError,
    RejectedValueError,
    Tick,
    UnknownTypeError,
    UnsupportedVersionError,
    World,
    decode,
)
from rationalizer.wire.wellformed import COMMIT_ENTRIES

HEAD = [1, 1, "1", "a", "g"]
TICK = [1, 32, "1", "a", "g"]
UNKNOWN = [1, 99, "1", "a", "g"]
BEAT = [*HEAD, "t", 0, 0, 5]


def outcome(value: bytes | None) -> tuple[str, str | None]:
    """(code, type) of a value, in a world without any lease; whatever it is, it moves log time (T1)."""
    world = World(0, 1)
    found = world.apply(0, 77, value)
    assert (world.log_time, world.next_offset) == (77, 1)
    many = World(0, 1)
    many.apply_many([(0, 77, value)])
    assert (many.rejected, many.accepted) == (world.rejected, world.accepted)
    return found.code, found.type


def test_no_value_is_malformed() -> None:
    assert outcome(None) == ("MALFORMED", None)


@pytest.mark.parametrize(
    "value", [b"", b"\xc1", packb({}), packb("x"), packb(1), packb(None), packb([]), b"\x95\x01\x20"]
)
def test_e2_one_complete_array(value: bytes) -> None:
    assert outcome(value) == ("MALFORMED", None)


def test_e2_nothing_after_it_and_nothing_missing() -> None:
    good = packb(BEAT)
    assert outcome(good) == ("NOT_HELD", "Heartbeat")
    assert outcome(good + b"\x00") == ("MALFORMED", None)
    assert outcome(good + b"\xc1") == ("MALFORMED", None)
    for cut in range(len(good)):
        assert outcome(good[:cut]) == ("MALFORMED", None)


def test_e2_at_most_1048576_bytes() -> None:
    room = 1_048_576 - len(packb(UNKNOWN)) - 5
    good = packb([*UNKNOWN, "x" * room])
    assert len(good) == 1_048_576
    assert outcome(good) == ("UNKNOWN_TYPE", None)
    assert outcome(packb([*UNKNOWN, "x" * (room + 1)])) == ("MALFORMED", None)


@pytest.mark.parametrize(
    "thing",
    [
        1.0,
        float("nan"),
        b"",
        b"x",
        ExtType(5, b""),
        ExtType(5, b"abc"),
        Timestamp(1, 0),
        Timestamp(2**34, 1),
        {b"k": 1},
        {"k": 1.0},
        {"k": {"l": b""}},
        [[[1.0]]],
        [None, {"k": [Timestamp(1, 0)]}],
    ],
    ids=repr,
)
@pytest.mark.parametrize("head", [BEAT, UNKNOWN, TICK], ids=["known", "unknown", "no fields"])
def test_e2_floats_bin_and_extensions_are_malformed_anywhere(thing: Any, head: list[Any]) -> None:
    assert outcome(packb([*head, thing])) == ("MALFORMED", None)
    assert outcome(packb([2, *head[1:], thing])) == ("MALFORMED", None)
    assert outcome(packb([*head[:-1], thing])) == ("MALFORMED", None)


@pytest.mark.parametrize(
    "ext", [b"\xc7\x00\xff", b"\xd4\xff\x00", b"\xd6\xfe\x00\x00\x00\x00", b"\xc9\x00\x00\x00\x01\x00\x00"]
)
def test_e2_extension_types_no_library_writes_are_malformed_too(ext: bytes) -> None:
    assert outcome(b"\x96" + packb(UNKNOWN)[1:] + ext) == ("MALFORMED", None)


@pytest.mark.parametrize("key", [b"\x01", b"\xc0", b"\xc2", b"\x90", b"\x80", b"\xca\x00\x00\x00\x00", b"\xc4\x01k"])
def test_e2_the_keys_of_maps_are_strings(key: bytes) -> None:
    record = b"\x96" + packb(UNKNOWN)[1:] + b"\x81" + key + b"\x01"
    assert outcome(record) == ("MALFORMED", None)
    assert outcome(record.replace(key + b"\x01", b"\xa1k\x01")) == ("UNKNOWN_TYPE", None)


@pytest.mark.parametrize("text", [b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xc0\x80", b"\xf4\x90\x80\x80"])
def test_e2_invalid_utf8_is_malformed_anywhere(text: bytes) -> None:
    raw = bytes([0xA0 + len(text)]) + text
    assert outcome(packb(BEAT).replace(b"\xa1t", raw)) == ("MALFORMED", None)
    assert outcome(b"\x96" + packb(UNKNOWN)[1:] + raw) == ("MALFORMED", None)
    assert outcome(b"\x96" + packb(UNKNOWN)[1:] + b"\x81" + raw + b"\x01") == ("MALFORMED", None)


def _nested(depth: int, innermost: Any, wrap: Any) -> Any:
    for _ in range(depth - 1):
        innermost = wrap(innermost)
    return innermost


@pytest.mark.parametrize(
    "wrap", [lambda x: [x], lambda x: {"k": x}, lambda x: [0, "", x]], ids=["array", "map", "mixed"]
)
@pytest.mark.parametrize("empty", [[], {}], ids=["array", "map"])
def test_e2_nested_at_most_8_deep_the_record_being_the_first(wrap: Any, empty: Any) -> None:
    assert outcome(packb([*UNKNOWN, _nested(7, empty, wrap)])) == ("UNKNOWN_TYPE", None)
    assert outcome(packb([*UNKNOWN, _nested(8, empty, wrap)])) == ("MALFORMED", None)
    assert outcome(packb([*UNKNOWN, _nested(7, [1], wrap)])) == ("UNKNOWN_TYPE", None)
    assert outcome(packb([*UNKNOWN, _nested(8, [1], wrap)])) == ("MALFORMED", None)


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


def test_e2_any_msgpack_form_of_strings_ints_and_arrays() -> None:
    def text(value: bytes) -> list[bytes]:
        size = len(value)
        return [
            bytes([0xA0 + size]) + value,
            b"\xd9" + bytes([size]) + value,
            b"\xda" + struct.pack(">H", size) + value,
            b"\xdb" + struct.pack(">I", size) + value,
        ]

    def small(value: int) -> list[bytes]:
        return [
            bytes([value]),
            b"\xcc" + bytes([value]),
            b"\xcd" + struct.pack(">H", value),
            b"\xce" + struct.pack(">I", value),
            b"\xcf" + struct.pack(">Q", value),
            b"\xd0" + bytes([value]),
            b"\xd1" + struct.pack(">h", value),
            b"\xd2" + struct.pack(">i", value),
            b"\xd3" + struct.pack(">q", value),
        ]

    heads = [b"\x99", b"\xdc\x00\x09", b"\xdd\x00\x00\x00\x09"]
    want = Heartbeat("1", "a", "g", "t", 3, 7, 5)
    for n in range(9):
        value = heads[n % 3] + small(1)[n] + small(1)[-n] + text(b"1")[n % 4] + text(b"a")[n // 3] + text(b"g")[n % 4]
        value += text(b"t")[n % 4] + small(3)[n] + small(7)[-n] + small(5)[n]
        assert decode(value) == want
        assert outcome(value) == ("NOT_HELD", "Heartbeat")


@pytest.mark.parametrize(
    ("value", "code"),
    [
        ([0, *TICK[1:]], "MALFORMED"),
        ([-1, *TICK[1:]], "MALFORMED"),
        ([True, *TICK[1:]], "MALFORMED"),
        (["1", *TICK[1:]], "MALFORMED"),
        ([None, *TICK[1:]], "MALFORMED"),
        ([2, *TICK[1:]], "UNSUPPORTED_VERSION"),
        ([2**64 - 1, *TICK[1:]], "UNSUPPORTED_VERSION"),
        ([2, 99, *TICK[2:]], "UNSUPPORTED_VERSION"),
        ([2, True, *TICK[2:]], "MALFORMED"),
        ([2, 32, "", "a", "g"], "MALFORMED"),
        ([1, 99, "1", "a", "\n"], "MALFORMED"),
        ([1, "32", *TICK[2:]], "MALFORMED"),
        ([1, 0, *TICK[2:]], "UNKNOWN_TYPE"),
        ([1, -5, *TICK[2:]], "UNKNOWN_TYPE"),
        ([1, 2**64 - 1, *TICK[2:]], "UNKNOWN_TYPE"),
        ([1, -(2**63), *TICK[2:]], "UNKNOWN_TYPE"),
        ([1, 16, *TICK[2:]], "UNKNOWN_TYPE"),
        ([1, 27, *TICK[2:], "x", {}], "UNKNOWN_TYPE"),
        ([1, 9, *TICK[2:]], "UNKNOWN_TYPE"),
        ([1, 31, *TICK[2:]], "UNKNOWN_TYPE"),
        ([1, 34, *TICK[2:]], "UNKNOWN_TYPE"),
        ([1, 32, "1", "a"], "MALFORMED"),
        ([1, 32, "1", "a", None], "MALFORMED"),
        ([1, 32, "1", "a", 7], "MALFORMED"),
        ([1, 32, "1", ["a"], "g"], "MALFORMED"),
        ([1, [32], "1", "a", "g"], "MALFORMED"),
    ],
    ids=repr,
)
def test_e6_the_first_five_fields_then_version_then_type(value: list[Any], code: str) -> None:
    assert outcome(packb(value)) == (code, None)


@pytest.mark.parametrize(
    ("value", "name"),
    [
        ([*TICK, 1], "Tick"),
        ([*TICK, {}], "Tick"),
        (BEAT[:-1], "Heartbeat"),
        ([*BEAT, None], "Heartbeat"),
        ([*HEAD, "t", True, 0, 5], "Heartbeat"),
        ([*HEAD, "t", 0, False, 5], "Heartbeat"),
        ([*HEAD, "t", 0, 0, True], "Heartbeat"),
        ([*HEAD, "t", 0, 0, 2**63], "Heartbeat"),
        ([*HEAD, "t", 0, 2**64 - 1, 5], "Heartbeat"),
        ([*HEAD, "t", 2**31, 0, 5], "Heartbeat"),
        ([*HEAD, "t\n", 0, 0, 5], "Heartbeat"),
        ([*HEAD, ["t"], 0, 0, 5], "Heartbeat"),
        ([*HEAD, {"t": 1}, 0, 0, 5], "Heartbeat"),
        ([1, 6, "1", "a", "g", []], "HeartbeatBatch"),
        ([1, 6, "1", "a", "g", [["t", 0, None, 5]]], "HeartbeatBatch"),
        ([1, 6, "1", "a", "g", [["t", 0, 0, 5], ["t", 0, 0]]], "HeartbeatBatch"),
        ([1, 6, "1", "a", "g", [["t", 0, 0, 5], 7]], "HeartbeatBatch"),
        ([1, 6, "1", "a", "g", {"t": 1}], "HeartbeatBatch"),
        ([1, 7, "1", "a", "g", "t", 0, 0, []], "CommitRanges"),
        ([1, 7, "1", "a", "g", "t", 0, 0, [[1, 2], {"a": 1, "b": 2}]], "CommitRanges"),
        ([1, 7, "1", "a", "g", "t", 0, 0, [[1, 2], "ab"]], "CommitRanges"),
        ([1, 7, "1", "a", "g", "t", 0, 0, [[0, 0]] * 10_001], "CommitRanges"),
        ([1, 7, "1", "a", "g", "t", 0, 0, [[2**63 - 1, 2**63]]], "CommitRanges"),
        ([1, 33, "1", "a", "g", 0], "Upgrade"),
        ([1, 33, "1", "a", "g", 2**31], "Upgrade"),
    ],
    ids=lambda part: part if isinstance(part, str) else "",
)
def test_e6_the_types_own_fields_as_many_as_listed_and_well_formed(value: list[Any], name: str) -> None:
    assert outcome(packb(value)) == ("MALFORMED", name)


TOP = 2**63 - 1
#: Well formed in no field of a batch entry or a range; the second name: where E2 forbids it anywhere.
ODD: list[tuple[Any, str | None]] = [
    (True, "type"), (False, "type"), (TOP + 1, "type"), (2**64 - 1, "type"), (-2, "type"), ([], "type"),
    ([1], "type"), ({}, "type"), ({"a": 1}, "type"), (1.0, None), (b"t", None), ([1.0], None), ({"a": 0.5}, None),
]  # fmt: skip


@pytest.mark.parametrize(("odd", "named"), ODD, ids=repr)
@pytest.mark.parametrize("place", range(4))
def test_e6_nothing_odd_in_any_field_of_a_batch_entry(place: int, odd: Any, named: str | None) -> None:
    entry: list[Any] = ["t", 0, 0, 5]
    entry[place] = odd
    for entries in ([entry], [["t", 0, 0, 5], entry, ["t", 0, 0, 5]]):
        assert outcome(packb([1, 6, "1", "a", "g", entries])) == ("MALFORMED", named and "HeartbeatBatch")


@pytest.mark.parametrize(("odd", "named"), ODD, ids=repr)
@pytest.mark.parametrize("place", range(2))
def test_e6_nothing_odd_in_any_range(place: int, odd: Any, named: str | None) -> None:
    pair: list[Any] = [0, TOP]
    pair[place] = odd
    for ranges in ([pair], [[0, 5], pair, [7, 9]]):
        assert outcome(packb([1, 7, "1", "a", "g", "t", 0, 0, ranges])) == ("MALFORMED", named and "CommitRanges")


def test_e2_all_that_is_allowed_may_stand_side_by_side_at_any_depth() -> None:
    things: Any = [None, True, 1, "x", [], {}]
    for _ in range(6):
        assert outcome(packb([*UNKNOWN, *things])) == ("UNKNOWN_TYPE", None)
        things = [None, True, 1, "x", things, {"k": 1}]


@pytest.mark.parametrize("thing", [None, 7, True, "ab", [], {}, {"a": 1}, [7], ["ab"], [None], [{}], [[]]])
def test_e6_entries_and_ranges_are_arrays_of_arrays(thing: Any) -> None:
    assert outcome(packb([1, 6, "1", "a", "g", thing])) == ("MALFORMED", "HeartbeatBatch")
    assert outcome(packb([1, 7, "1", "a", "g", "t", 0, 0, thing])) == ("MALFORMED", "CommitRanges")


@pytest.mark.parametrize(
    "entry", [["t", 0, 0, -1], ["t", 0, 0, None], ["t", 2**31 - 1, TOP, TOP], ["x" * 249, 0, 0, 0]]
)
def test_e2_the_ends_of_a_batch_entry_are_good(entry: list[Any]) -> None:
    assert outcome(packb([1, 6, "1", "a", "g", [entry, entry]])) == ("PARTIAL", "HeartbeatBatch")


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


def test_e3_a_rejected_record_is_counted_and_leaves_the_state_as_it_was() -> None:
    world = World(0, 1)
    world.apply(0, 5, packb([1, 2, "1", "a", "g", "t", 0, 1000]))
    leases = [repr(lease) for lease in world.leases()]
    for offset, value in enumerate([None, b"\xc1", packb(UNKNOWN), packb([2, *TICK[1:]])], start=1):
        assert not world.apply(offset, 5, value).accepted
    assert world.rejected == {"MALFORMED": 2, "UNKNOWN_TYPE": 1, "UNSUPPORTED_VERSION": 1}
    assert [repr(lease) for lease in world.leases()] == leases
