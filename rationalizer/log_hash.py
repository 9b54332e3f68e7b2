"""Hashes of the log itself: what members have read, so that a record changed afterwards is noticed (S4).

    [2, CP, since, next_offset, hash]

A snapshot proves a state, and many changes of a log lead to the same state. So a member also hashes the records
that it reads between two places where a snapshot is due, and stores the hash behind the snapshot, in the same log.
Readers of earlier releases pass such a record over: it is no part of a snapshot (Q27).

The hash is XXH3-128 of the records' msgpack arrays [offset, timestamp, value or nil], in shortest forms, one behind
the other. It has no key: a client that may write snapshots can write it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Final

from msgpack import packb, unpackb
from msgpack.exceptions import UnpackException
from xxhash import xxh3_128

from rationalizer.limits import MAX_OFFSET, MAX_PARTITION

#: The first field: 1 is that of parts of snapshots.
FORMAT: Final = 2

#: No well-formed record of this kind is longer.
_MAX_BYTES: Final = 70

#: Overlapping ranges that are checked at a time: those of members do not overlap.
MAX_AT_ONCE: Final = 4

_DIGITS: Final = frozenset("0123456789abcdef")
#: Digits of a digest (S1), and of a hash.
DIGEST_DIGITS: Final = 32
_OFFSET: Final = itemgetter(0)

#: (offset, timestamp in ms, value)
Entry = tuple[int, int, bytes | None]

_pack: Final[Callable[[Any], bytes]] = packb


@dataclass(frozen=True, slots=True)
class LogHash:
    """The hash of all records of one CP with since <= offset < next_offset, as a member or a dump has it."""

    partition: int
    since: int
    next_offset: int
    #: 32 hex digits.
    digest: str


class RunningHash:
    """The hash of the records of one CP from `since` on."""

    __slots__ = ("_hash", "since")

    def __init__(self, since: int) -> None:
        self.since = since
        self._hash = xxh3_128()

    def take(self, entries: Sequence[Entry]) -> None:
        """Records, in the log's order, in runs of any length."""
        count = len(entries)
        # An array of arrays is packed at once; its own header is no part of the hash.
        header = 1 if count < 16 else 3 if count < 65_536 else 5
        self._hash.update(memoryview(_pack(entries))[header:])

    def digest(self) -> str:
        """Of all that was taken: 32 lower-case hex digits, high half first."""
        return self._hash.hexdigest()

    def at(self, partition: int, next_offset: int) -> LogHash:
        """What can be stored where the next offset is this one."""
        return LogHash(partition, self.since, next_offset, self.digest())


def encode_hash(found: LogHash) -> bytes:
    """The record that stores it (S4)."""
    return _pack((FORMAT, found.partition, found.since, found.next_offset, found.digest))


def decode_hash(value: bytes | None) -> LogHash | None:
    """What a record of the log of snapshots stores, if it is a hash; None for everything else, whatever it is."""
    if type(value) is not bytes or len(value) > _MAX_BYTES or value[:2] != b"\x95\x02":
        return None
    try:
        # Every container and string is bounded: nothing is set aside for what is claimed and not there.
        fields: Any = unpackb(
            value, use_list=False, max_array_len=5, max_map_len=0, max_str_len=DIGEST_DIGITS, max_ext_len=0
        )
    except (ValueError, UnpackException):
        return None
    if type(fields) is not tuple or len(fields) != 5:
        return None
    _, partition, since, next_offset, digest = fields
    if not (type(partition) is type(since) is type(next_offset) is int and is_digest(digest)):
        return None
    if not (0 <= partition <= MAX_PARTITION and 0 <= since < next_offset <= MAX_OFFSET + 1):
        return None
    return LogHash(partition, since, next_offset, digest)


def is_digest(value: object) -> bool:
    """Whether it is one, as it is written."""
    return type(value) is str and len(value) == DIGEST_DIGITS and _DIGITS.issuperset(value)


class HashChecks:
    """Compares the records of one CP, as they are replayed, with hashes of them.

    `held`: hashes that agree with the log. `wrong`: others, each with what the log hashes to. Hashes of ranges that
    were not read as a whole are in neither.
    """

    def __init__(self, stored: Iterable[LogHash], begin: int = 0) -> None:
        """begin: the first offset that is going to be read."""
        ranges: dict[tuple[int, int], list[LogHash]] = {}
        for each in stored:
            if each.since >= begin:
                ranges.setdefault((each.since, each.next_offset), []).append(each)
        #: The next one last.
        self._waiting = sorted(ranges.items(), reverse=True)
        self._running: list[tuple[int, RunningHash, list[LogHash]]] = []
        self.held: list[LogHash] = []
        self.wrong: list[tuple[LogHash, str]] = []

    def take(self, entries: Sequence[Entry]) -> None:
        """Records, in the log's order, without gaps but those of the log."""
        while entries:
            first = entries[0][0]
            self._reached(first)
            until = min([end for end, _, _ in self._running], default=MAX_OFFSET + 1)
            if self._waiting:
                until = min(until, self._waiting[-1][0][0])
            cut = len(entries) if until > entries[-1][0] else bisect_left(entries, until, key=_OFFSET)
            run = entries if cut == len(entries) else entries[:cut]
            for _, running, _ in self._running:
                running.take(run)
            entries = entries[cut:]
            self._judge(run[-1][0] + 1)

    @property
    def unjudged_since(self) -> int | None:
        """The first offset of the ranges that have begun and not ended; None: all that have begun are judged."""
        return min((running.since for _, running, _ in self._running), default=None)

    def ended(self, next_offset: int) -> None:
        """The log ends here: nothing is going to come below this offset."""
        self._reached(next_offset)

    def _reached(self, offset: int) -> None:
        """No record below this offset is still to come: ranges end, and others begin."""
        self._judge(offset)
        while self._waiting and self._waiting[-1][0][0] <= offset:
            (since, end), stored = self._waiting.pop()
            if len(self._running) < MAX_AT_ONCE:
                self._running.append((end, RunningHash(since), stored))
        self._judge(offset)

    def _judge(self, next_offset: int) -> None:
        for ended in [each for each in self._running if each[0] <= next_offset]:
            self._running.remove(ended)
            digest = ended[1].digest()
            for stored in ended[2]:
                if stored.digest == digest:
                    self.held.append(stored)
                else:
                    self.wrong.append((stored, digest))
