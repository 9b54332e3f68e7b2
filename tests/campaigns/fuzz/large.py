"""Values above 1 kB, up to above the limit of E2: what costs most for its length, what claims more than there is."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from typing import Final

from msgpack import packb

from rationalizer.limits import MAX_COMMIT_RANGES, MAX_VALUE_BYTES

__all__ = ["SHAPES", "large_value"]

#: A little above what is allowed, so that some are too long.
LARGEST: Final = MAX_VALUE_BYTES + 4_096
SMALLEST: Final = 1_025

#: Whose lease the record is about: (instance, client, group, topic, partition, epoch).
Aim = tuple[str, str, str, str, int, int]
Shape = Callable[[random.Random, int, Aim], bytes]


def _head(number: int) -> bytes:
    """The front of a record of six fields with this type, up to its own field."""
    front: bytes = b"\x96\x01" + packb(number) + b"\xa11\xa1a\xa1g"
    return front


def _array(number: int, thing: bytes, size: int) -> bytes:
    count = max(1, (size - 20) // len(thing))
    return _head(number) + b"\xdd" + struct.pack(">I", count) + thing * count


def _of(thing: bytes, number: int = 99) -> Shape:
    return lambda _, size, aim: _array(number, thing, size)


def _mixed(rng: random.Random, size: int, aim: Aim) -> bytes:
    things = (b"\x91\x01", b"\x81\xa1a\x01", b"\xa1a", b"\x01", b"\xc0", b"\x90", b"\x80", b"\x92\x90\x91\xc3")
    pattern = b"".join(rng.choice(things) for _ in range(64))
    count = max(1, (size - 20) // len(pattern))
    return _head(99) + b"\xdd" + struct.pack(">I", 64 * count) + pattern * count


def _text(character: bytes) -> Shape:
    def make(_: random.Random, size: int, aim: Aim) -> bytes:
        count = size // len(character)
        return _head(99) + b"\xdb" + struct.pack(">I", count * len(character)) + character * count

    return make


def _ends_badly(_: random.Random, size: int, aim: Aim) -> bytes:
    """Good up to its last byte, which makes all of it malformed."""
    return _array(99, b"\x01", size - 3)[:-1] + b"\xc1"


def _deep(_: random.Random, size: int, aim: Aim) -> bytes:
    return b"\x91" * size


def _claims_more(_: random.Random, size: int, aim: Aim) -> bytes:
    return (b"\xdd\x00\x0f\xff\xff" * 500)[:size].ljust(size, b"\x01")


def _commit(ranges: Callable[[random.Random, int], list[tuple[int, int]]]) -> Shape:
    def make(rng: random.Random, size: int, aim: Aim) -> bytes:
        count = max(1, min(MAX_COMMIT_RANGES + (rng.random() < 0.1), size // 11))
        instance, client, group, topic, partition, epoch = aim
        value: bytes = packb((1, 7, instance, client, group, topic, partition, epoch, ranges(rng, count)))
        return value

    return make


def _scattered(rng: random.Random, count: int) -> list[tuple[int, int]]:
    found = [(at, at + rng.randrange(3)) for at in rng.sample(range(40 * count), count)]
    return found if rng.random() < 0.5 else sorted(found)


def _far_apart(rng: random.Random, count: int) -> list[tuple[int, int]]:
    found = [(at, at) for at in range(2**40, 2**40 + 2 * count, 2)]
    rng.shuffle(found)
    return found


def _beats(rng: random.Random, size: int, aim: Aim) -> bytes:
    instance, client, group, topic, partition, epoch = aim
    entries = [(topic, partition, epoch, rng.randrange(2**20)) for _ in range(max(1, size // (10 + len(topic))))]
    value: bytes = packb((1, 6, instance, client, group, entries))
    return value


def _beats_of_many(rng: random.Random, size: int, aim: Aim) -> bytes:
    """Each entry names another lease, of any CP."""
    count = max(1, size // 10)
    entries = [("t", number, 0, None) for number in range(count)]
    value: bytes = packb((1, 6, *aim[:3], entries))
    return value


SHAPES: Final[dict[str, Shape]] = {
    "ints": _of(b"\x01"),
    "empty arrays": _of(b"\x90"),
    "empty maps": _of(b"\x80"),
    "arrays in arrays": _of(b"\x91\x91\x91\x01"),
    "maps": _of(b"\x81\xa1a\x01"),
    "maps in maps": _of(b"\x81\xa1a\x81\xa1a\x81\xa1a\x01"),
    "a map of many": lambda _, size, aim: (
        _head(99) + b"\xdf" + struct.pack(">I", size // 3) + b"\xa1a\x01" * (size // 3)
    ),
    "mixed": _mixed,
    "short strings": _of(b"\xa1a"),
    "short strings that are none": _of(b"\xa1\xff"),
    "floats": _of(b"\xca\x00\x00\x00\x00"),
    "extensions": _of(b"\xd4\x01\x01"),
    "timestamps": _of(b"\xd6\xff\x00\x00\x00\x01"),
    "text": _text(b"x"),
    "text beyond ASCII": _text("\N{DUCK}".encode()),
    "text that is none": _text(b"\xff"),
    "bad at the end": _ends_badly,
    "deep": _deep,
    "claims more": _claims_more,
    "beats": _beats,
    "beats of many": _beats_of_many,
    "beats that are none": _of(b"\x94\xa1t\x00\xc3\x0b", 6),
    "beats of the same": _of(b"\x94\xa1t\x00\x00\x0b", 6),
    "ranges": _commit(_scattered),
    "ranges far apart": _commit(_far_apart),
}
#: What takes effect, where the lease is held, comes more often.
NAMES: Final = (*SHAPES, *("ranges", "ranges far apart", "beats") * 3)


def large_value(rng: random.Random, aim: Aim, of_group: Callable[[int], bytes]) -> bytes:
    """A value of one of SHAPES, of about 1 kB … 1 MB, small ones more often; some are about that lease.

    Or what `of_group` makes of a size, about a coordinated group.
    """
    size = int(SMALLEST * (LARGEST / SMALLEST) ** rng.random())
    if rng.random() < 0.2:
        return of_group(size)
    return SHAPES[rng.choice(NAMES)](rng, size, aim)
