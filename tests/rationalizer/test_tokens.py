"""What begins as a float, binary or extension is found among the bytes, and nothing else is taken for one (E2)."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgpack import unpackb

from rationalizer.wire.unpacking import only_allowed

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
