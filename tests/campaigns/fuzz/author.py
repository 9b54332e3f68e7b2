"""Writes hostile records: well formed ones that no client would write, and bytes that are hardly records at all.

Two ways, mixed. By grammar: records of every type, with fields that are near what the log says, wild, of another type,
or too many; unknown types and newer versions; claims on others' leases. By mutation: recent values with bits flipped,
cut off, doubled, spliced into another, or with wrong lengths. The seed and the log's outcomes (`hear`) decide the next
record, so one seed is one log.
"""

from __future__ import annotations

import random
import struct
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

from msgpack import ExtType, Packer, Timestamp, packb

from rationalizer import Outcome, Upgrade
from rationalizer.levels import SUPPORTED_LEVEL
from rationalizer.limits import MAX_COMMIT_RANGES, MAX_VALUE_BYTES
from rationalizer.routing import route_lease
from rationalizer.wire.records import KINDS
from tests.campaigns.fuzz.groups import GROUP_TYPES, GroupHand

# Values above 1 kB, up to above the limit of E2: what costs most for its length, what claims more than there is.


#: A little above what is allowed, so that some are too long.
MOST_BYTES: Final = MAX_VALUE_BYTES + 4_096
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
    size = int(SMALLEST * (MOST_BYTES / SMALLEST) ** rng.random())
    if rng.random() < 0.2:
        return of_group(size)
    return SHAPES[rng.choice(NAMES)](rng, size, aim)


T = TypeVar("T")

LARGEST: Final = 2**63 - 1

GROUPS: Final = ("g", "gé", "h")
CLIENTS: Final = ("a", "b", "admin")
INSTANCES: Final = ("1", "2")
TOPICS: Final = ("t", "u", "тема")
INTERVALS: Final = (100, 101, 1_000, 600_000)

#: Types by frequency: mostly heartbeats, as in real logs.
TYPES: Final = (1,) * 30 + (2,) * 14 + (3,) * 6 + (4,) * 8 + (5,) * 2 + (6,) * 10 + (7,) * 16 + (8,) + (32,) * 4 + (33,)

_ODD_TYPES = (0, -1, 9, 15, 22, 27, 31, 34, 127, 128, 255, 2**31, LARGEST, 2**64 - 1, -(2**63))
UNKNOWN_TYPES: Final = tuple(number for number in _ODD_TYPES if number not in KINDS)
VERSIONS: Final = (0, -1, 2, 3, 127, 2**31, LARGEST, 2**64 - 1, True, None, 1.0)

#: Wrong values of a field.
WILD: Final[tuple[Any, ...]] = (
    *(None, True, False, 0, -1, -2, 1, 127, 128, 255, 256, -128, -129, 2**31 - 1, 2**31, 2**32, 2**53 + 1),
    *(LARGEST, 2**63, 2**64 - 1, -(2**63), 0.0, -0.0, 1.0, 1e300, float("nan"), float("inf"), float("-inf")),
    *(b"", b"g", b"\xff" * 40, "", "g", "t", " ", "\x00", "a\x1fb", "\x7f", "\x85", "é" * 127, "é" * 128),
    *("x" * 249, "x" * 250, "x" * 255, "x" * 256, "x" * 999, "\ud800", "g\udfff", "🦆", "g/t", "partitions=3"),
    *((), [], {}, {"a": 1}, {"a": {"a": {"a": 1}}}, {1: 2}, {None: 1}, {b"k": 1}, {1.5: 1}, [None], [[]]),
    *([[[[[[[]]]]]]], [[[[[[[[]]]]]]]], [[[[[[[1.5]]]]]]], [0, 0, 0, 0], [[0, 0]], [["t", 0, 0, 0]]),
    *([["t", 0, 0]], [["t", 0, None, None]], [["t", True, 0, 0]], [["t", 0, 0, -2]], [["t", 0, 0, 0, 0]]),
    *([[5, 3]], [[-1, 0]], [[0, LARGEST], [0, 2**63]], ExtType(1, b"x"), ExtType(127, b""), ExtType(5, bytes(16))),
    *(Timestamp(0, 0), Timestamp(2**40, 1)),
)

#: The same, in forms that our encoder never writes.
RAW: Final = (
    b"\xc1",  # never used
    b"\x82\xa1a\x01\xa1a\x02",  # the same key twice
    b"\x82\xa1a\xcb\x7f\xf8\x00\x00\x00\x00\x00\x00\xa1a\x02",  # … and a NaN that the second hides
    b"\x82\xa1a\xa1\xff\xa1a\x02",  # … and invalid text
    b"\x81\xa1\xff\x01",  # a key that is no text
    *(b"\xa2\xc3\x28", b"\xa1\xff", b"\xa3\xed\xa0\x80", b"\xa4\xf8\x88\x80\x80", b"\xa1\x80"),  # no UTF-8
    b"\xa2\xc0\x80",  # overlong NUL
    *(b"\xd9\x01g", b"\xda\x00\x01g", b"\xdb\x00\x00\x00\x01g"),  # long forms of "g"
    *(b"\xcc\x01", b"\xcd\x00\x01", b"\xce\x00\x00\x00\x01", b"\xcf" + bytes(7) + b"\x01"),  # … and of 1
    *(b"\xd0\x01", b"\xd1\x00\x01", b"\xd2\x00\x00\x00\x01", b"\xd3" + bytes(7) + b"\x01", b"\xd0\xff"),
    *(b"\xdc\x00\x00", b"\xdd\x00\x00\x00\x00", b"\xde\x00\x00", b"\xdf\x00\x00\x00\x00"),  # empty ones
    *(b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff"),  # more than there is
    *(b"\xc6\xff\xff\xff\xff", b"\xc9\xff\xff\xff\xff\x01", b"\xdd\x00\x10\x00\x00\x01"),
    *(b"\xdf\x00\x10\x00\x00\xa1a\x01", b"\x91" * 7 + b"\x01", b"\x91" * 8 + b"\x01"),  # deep, and too deep
    *(b"\x81\xa1a" * 7 + b"\xc0", b"\x91" * 1_020, b"\x81\xa1a" * 300),
    *(b"\xd6\xff\x00\x00\x00\x00", b"\xc7\x0c\xff" + bytes(12), b"\xc4\x00", b"\xc5\x00\x01x"),
    *(b"\xca\x7f\xc0\x00\x00", b"\xcb\xff\xf0" + bytes(6), b""),
)

#: Bytes with a meaning in msgpack, which change lengths and kinds.
TELLING: Final = bytes.fromhex(
    "00017f8081 8f90919fa0a1bfc0c1c2c3c4c5c6c7c8c9cacbcccdcecfd0d1d2d3d4d5d6d7d8d9dadbdcdddedfe0ff"
)

#: Faults of a record by frequency: none, one field, a field that no encoder writes, the number of fields.
SOUND, FIELD, RAW_FIELD, COUNT, VERSION, TYPE = range(6)
WRONG: Final = (SOUND,) * 24 + (FIELD,) * 5 + (RAW_FIELD,) * 2 + (COUNT,) + (VERSION,) + (TYPE,)

#: One value in this number is above 1 kB; in this number a story may ask for a level that no release supports.
LARGE_EVERY: Final = 1_500
UPGRADE_EVERY: Final = 6
#: One log in this number stays at level 1, without coordinated groups.
LEVEL_1_EVERY: Final = 4
#: Most mutations of one value.
MOST_MUTATIONS: Final = 4
#: Values kept for mutation.
CORPUS: Final = 64


class Author:
    """One hostile writer of one CP's log. `next` makes a value, `hear` gives it the record's outcome."""

    def __init__(
        self, seed: int, cp: int, partitions: int, *, large_every: int = LARGE_EVERY, upgrades: bool = True
    ) -> None:
        """cp, partitions: whose log it writes; large_every: one value in this number is above 1 kB (0: none).

        upgrades: whether, in some logs, it may raise the level above what is supported (E4).
        """
        self.random = random.Random(seed)
        self._next = self.random.random
        self._packer = Packer(unicode_errors="surrogatepass")
        self._large_every = large_every
        homes = [
            (topic, partition)
            for topic in TOPICS
            for partition in (*range(40), 2**31 - 1)
            if route_lease(topic, partition, partitions) == cp
        ]
        self.random.shuffle(homes)
        #: Contested leases, and one of another CP.
        self.homes = [*homes[:6], ("t", 41)]
        self.upgrades = upgrades and self._below(UPGRADE_EVERY) == 0
        #: In most logs it first raises the level to the supported one.
        self._raises = self._below(LEVEL_1_EVERY) > 0
        self._types = TYPES + (GROUP_TYPES * 2 if self._raises else GROUP_TYPES[::9])
        self._groups = GroupHand(self.random, cp, partitions, GROUPS[:2])
        #: Its view of leases: holder and epoch, and progress.
        self._held: dict[tuple[str, str, int], tuple[str, str, int]] = {}
        self._far: dict[tuple[str, str, int], int] = {}
        self._corpus: deque[bytes] = deque(maxlen=CORPUS)
        self.log_time = 1_700_000_000_000
        self._makers: dict[int, Callable[[], tuple[str, str, str, list[Any]]]] = {
            1: self._beat, 2: self._claim, 3: self._release, 4: self._grant, 5: self._pause,
            6: self._batch, 7: self._commit, 8: self._forget, 32: self._tick, 33: self._upgrade,
        }  # fmt: skip

    # -- chance ------------------------------------------------------------------------------------------------

    def _below(self, count: int) -> int:
        return int(self._next() * count)

    def _one_of(self, options: Sequence[T]) -> T:
        return options[int(self._next() * len(options))]

    # -- what it hears -----------------------------------------------------------------------------------------

    def hear(self, offset: int, outcome: Outcome) -> None:
        """The outcome of the record at this offset."""
        self._groups.hear(offset, outcome)
        message = outcome.message
        if not outcome.accepted or message is None:
            return
        kind = message.type
        if kind in (1, 2, 3, 4, 7):
            key = message.group_id, message.topic, message.partition
            if kind == 2 or (kind == 1 and message.epoch is None):
                if outcome.code == "OK":
                    self._held[key] = (message.instance_id, message.client_id, offset)
            elif kind == 3:
                self._held.pop(key, None)
            if kind in (1, 3, 4) and type(message[-1]) is int:
                self._far[key] = message[-1]

    # -- what it writes ----------------------------------------------------------------------------------------

    def stamp(self) -> int:
        """The next record's timestamp: mostly a little later; sometimes back, far ahead or absent."""
        rng = self._next()
        if rng < 0.97:
            self.log_time += self._below(40)
            return self.log_time
        if rng < 0.98:
            self.log_time = min(LARGEST, self.log_time + self._one_of((99, 100, 200, 201, 2_001, 1_200_001)))
            return self.log_time
        if rng < 0.9999:
            return self._one_of((-1, 0, self.log_time - self._below(100_000), -5))
        return self._one_of((LARGEST, self.log_time + 2**40, -(2**63)))

    def step(self) -> int:
        """Distance of the next record's offset from the last one's: compaction and markers leave gaps."""
        return 1 if self._next() < 0.98 else 1 + self._below(1_000)

    def next(self) -> bytes | None:
        """The next value."""
        if self._raises:
            self._raises = False
            raised: bytes = self._packer.pack([1, Upgrade.TYPE, "1", "admin", GROUPS[0], SUPPORTED_LEVEL])
            return raised
        rng = self._next()
        if self._large_every and rng < 1 / self._large_every:
            key = self._one_of(list(self._held)) if self._held else self._key()
            instance, client, epoch = self._who(key)
            value = large_value(self.random, (instance, client, *key, epoch), self._groups.large)
            return self._mutated(value) if self._next() < 0.2 else value
        if rng > 0.999:
            return self._one_of((None, b"", b"\x90", b"\xc0", b"\x99\x01\x01"))
        if rng < 0.30 and len(self._corpus) > 3:
            return self._mutated(self._one_of(self._corpus))
        value = self._record()
        self._corpus.append(value)
        return value

    def _record(self) -> bytes:
        number = self._one_of(self._types)
        make = self._makers.get(number)
        if make is not None:
            instance, client, group, own = make()
        else:
            number, (instance, client, group, own) = self._groups.write(number)
        wrong = SOUND if number == Upgrade.TYPE and not self.upgrades else self._one_of(WRONG)
        version = 1 if make is not None or self._next() < 0.2 else 2 if number < 22 else 3
        fields: list[Any] = [version, number, instance, client, group, *own]
        if wrong == FIELD:
            fields[self._below(len(fields))] = self._one_of(WILD)
        elif wrong == COUNT:
            if self._next() < 0.5:
                fields.pop(self._below(len(fields)))
            else:
                fields.insert(self._below(len(fields) + 1), self._one_of(WILD))
        elif wrong == VERSION:
            fields[0] = self._one_of(VERSIONS)
        elif wrong == TYPE:
            fields[1] = self._one_of(UNKNOWN_TYPES)
        elif wrong == RAW_FIELD:
            place = self._below(len(fields))
            pack = self._packer.pack
            pieces = [pack(field) for field in fields]
            pieces[place] = self._one_of(RAW)
            return struct.pack("B", 0x90 + len(fields)) + b"".join(pieces)
        value: bytes = self._packer.pack(fields)
        return value

    def _who(self, key: tuple[str, str, int]) -> tuple[str, str, int]:
        """(instance, client, epoch): the holder's mostly, else another client's."""
        held = self._held.get(key)
        if held is not None and self._next() < 0.8:
            return held
        epoch = held[2] if held is not None and self._next() < 0.5 else self._one_of((0, 1, 5, LARGEST))
        return self._one_of(INSTANCES), self._one_of(CLIENTS), epoch

    def _key(self) -> tuple[str, str, int]:
        topic, partition = self._one_of(self.homes)
        return GROUPS[0] if self._next() < 0.7 else self._one_of(GROUPS), topic, partition

    def _offset(self, key: tuple[str, str, int]) -> int:
        """An offset near the lease's progress; seldom far away."""
        far = self._far.get(key, 0)
        if self._next() < 0.98:
            return min(LARGEST, max(0, far + self._below(24) - 4))
        return self._one_of((0, far, LARGEST, LARGEST - 1, far // 2))

    def _beat(self) -> tuple[str, str, str, list[Any]]:
        key = self._key()
        instance, client, epoch = self._who(key)
        rng = self._next()
        done = self._offset(key) if rng < 0.8 else None if rng < 0.97 else -1
        return instance, client, key[0], [*key[1:], None if self._next() < 0.05 else epoch, done]

    def _claim(self) -> tuple[str, str, str, list[Any]]:
        key = self._key()
        return self._one_of(INSTANCES), self._one_of(CLIENTS), key[0], [*key[1:], self._one_of(INTERVALS)]

    def _release(self) -> tuple[str, str, str, list[Any]]:
        key = self._key()
        instance, client, epoch = self._who(key)
        return instance, client, key[0], [*key[1:], epoch, None if self._next() < 0.3 else self._offset(key)]

    def _grant(self) -> tuple[str, str, str, list[Any]]:
        key = self._key()
        instance, client, epoch = self._who(key)
        return instance, client, key[0], [*key[1:], epoch, self._offset(key)]

    def _pause(self) -> tuple[str, str, str, list[Any]]:
        expires = self.log_time + self._one_of((-1, 0, 1, 50, 2_000)) if self._next() < 0.98 else LARGEST
        return self._one_of(INSTANCES), self._one_of(CLIENTS), self._group(), [min(expires, LARGEST)]

    def _batch(self) -> tuple[str, str, str, list[Any]]:
        key = self._key()
        instance, client, _ = self._who(key)
        entries = []
        for _ in range(1 + self._below(6)):
            topic, partition = self._one_of(self.homes[:-1]) if self._next() < 0.98 and self.homes[:-1] else ("t", 41)
            each = (key[0], topic, partition)
            entries.append((topic, partition, self._who(each)[2], None if self._next() < 0.3 else self._offset(each)))
        return instance, client, key[0], [entries]

    def _commit(self) -> tuple[str, str, str, list[Any]]:
        key = self._key()
        instance, client, epoch = self._who(key)
        at = self._offset(key)
        ranges = []
        for _ in range(1 + self._below(5 if self._next() < 0.95 else 60)):
            at = max(0, at + self._below(12) - 3)
            ranges.append((at, at + self._below(4)))
        return instance, client, key[0], [*key[1:], epoch, ranges]

    def _forget(self) -> tuple[str, str, str, list[Any]]:
        return self._one_of(INSTANCES), self._one_of(CLIENTS), self._group(), []

    def _group(self) -> str:
        return self._one_of((*GROUPS, *self._groups.names))

    def _tick(self) -> tuple[str, str, str, list[Any]]:
        return self._one_of(INSTANCES), self._one_of(CLIENTS), self._one_of((*GROUPS, "partitions=3")), []

    def _upgrade(self) -> tuple[str, str, str, list[Any]]:
        level = (
            self._one_of((SUPPORTED_LEVEL + 1, SUPPORTED_LEVEL + 2, 2**31 - 1))
            if self.upgrades and self._next() < 0.1
            else self._one_of((1, 1, 0, 2**31, -1))
        )
        return self._one_of(INSTANCES), self._one_of(CLIENTS), self._one_of(GROUPS), [level]

    # -- mutation ----------------------------------------------------------------------------------------------

    def _mutated(self, value: bytes) -> bytes:
        changed = bytearray(value)
        for _ in range(1 + self._below(MOST_MUTATIONS)):
            if not changed:
                break
            at = self._below(len(changed))
            match self._below(8):
                case 0:
                    changed[at] ^= 1 << self._below(8)
                case 1:
                    changed[at] = self._one_of(TELLING)
                case 2:
                    del changed[at:]
                case 3:
                    del changed[at : at + 1 + self._below(8)]
                case 4:
                    changed[at:at] = changed[at : at + 1 + self._below(16)]
                case 5:
                    other = self._one_of(self._corpus) if self._corpus else b"\xff"
                    changed[at:] = other[self._below(len(other) + 1) :]
                case 6:
                    changed[at:at] = self._one_of(RAW)
                case _:
                    changed += self._one_of(RAW)
        mutated = bytes(changed)
        # A bit or two can turn a number into a level; an Upgrade that stops a world for good belongs into few logs.
        return mutated if self.upgrades or not _may_upgrade(mutated) else b"\xc1" + mutated


def _may_upgrade(value: bytes) -> bool:
    """Whether this may be an Upgrade: type 33 near the front, in whichever of its forms."""
    return b"\x21" in value[:24]
