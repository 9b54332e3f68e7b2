"""The snapshots topic, forged near every edge: what counts as a part, and what parts complete.

S2, and its answers Q24 to Q27.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

import xxhash

from rationalizer import SnapshotError
from rationalizer.levels import SUPPORTED_LEVEL
from rationalizer.snapshot_log import SnapshotParts, StoredSnapshot, decode_part, due, encode_state, interval, next_due
from tests.rationalizer.oracle import is_state, shortest
from tests.rationalizer.oracle.layout import a_partition, fits, int_between
from tests.rationalizer.oracle.progress import LARGEST_HASH
from tests.rationalizer.oracle.spelling import EVERYTHING_ODD, Raw, spell

#: Records of one snapshots topic.
LENGTH = 40
#: Of snapshots that miss a part, this number of the youngest are remembered.
UNFINISHED = 8
#: Most parts of one snapshot.
MOST_PARTS = 4_096
CP, CPS = 0, 1

a_next_offset = int_between(0, LARGEST_HASH + 1)


@dataclass(frozen=True)
class _Bytes(Raw):
    """A binary, and what is in it."""

    inside: bytes = b""


def _binary(inside: bytes) -> _Bytes:
    size = len(inside)
    head = bytes((0xC4, size)) if size < 256 else b"\xc5" + size.to_bytes(2, "big")
    return _Bytes(head + inside, inside)


def _is_digest(item: Any) -> bool:
    return isinstance(item, str) and len(item) == 32 and not item.strip("0123456789abcdef")


def _is_part(fields: Any) -> bool:
    checks = [int_between(1, 1), a_partition, a_next_offset, int_between(0, MOST_PARTS), int_between(1, MOST_PARTS)]
    if not fits(fields, [*checks, _is_digest, lambda item: isinstance(item, _Bytes) and len(item.inside) > 0]):
        return False
    return bool(fields[3] < fields[4])


class _Shelf:
    """Complete snapshots, computed from all records."""

    def __init__(self) -> None:
        #: (next_offset, digest, parts) and its parts since it was last complete; the latest one last.
        self.open: list[tuple[Any, dict[int, bytes]]] = []

    def add(self, fields: list[Any]) -> bytes | None:
        """The bytes of the snapshot that this part completes."""
        _, _, next_offset, part, parts, digest, data = fields
        key = (next_offset, digest, parts)
        known = next((came for other, came in self.open if other == key), {})
        self.open = [pair for pair in self.open if pair[0] != key]
        came = {**known, part: data.inside}
        if len(came) == parts:
            return b"".join(came[number] for number in sorted(came))
        self.open = [*self.open, (key, came)][-UNFINISHED:]
        return None


def parts_differ(seed: int) -> str:
    """A difference between the two; "" if they agree."""
    source = Random(seed)
    if wrong := _places_differ(source):
        return f"places {seed}: {wrong}"
    parts = [part for number in range(source.choice((2, 3, 12))) for part in _snapshot(number, source)]
    shelf, real = _Shelf(), SnapshotParts(CP)
    for number in range(LENGTH):
        fields: Any = source.choice(parts)
        if source.random() < 0.3:
            fields = _tampered(fields, source)
        own = _is_part(fields) and fields[1] == CP
        wanted, junk = shelf.add(fields) if own else None, real.junk
        found = real.add(spell(fields, source.choice))
        if (real.junk == junk) != own or real.unfinished != len(shelf.open):
            return f"part {seed}, {number}: {'own, and passed over' if own else 'no part, and taken'}, or forgotten"
        if (found.data if found else None) != wanted:
            return f"part {seed}, {number}: the snapshots that are whole differ"
        if found and (wrong := _snapshot_differs(found, fields)):
            return f"part {seed}, {number}: {wrong}"
    return ""


def _snapshot(number: int, source: Random) -> list[list[Any]]:
    """A state, or nearly one, in one to three parts; stored at its place or another one."""
    next_offset = source.choice((number, number, LARGEST_HASH + 1))
    state = shortest([1, source.choice((CP,) * 5 + (1,)), next_offset, source.randrange(3), 1, [], [], []])
    digest = f"{xxhash.xxh3_128_intdigest(state, 0):032x}"
    if source.random() < 0.2:
        digest = source.choice((digest[::-1], digest[:-1] + "f", "0" * 32))
    place = source.choice((next_offset,) * 5 + (5,))
    count = source.choice((1, 2, 3))
    cuts = [0, *sorted(source.sample(range(1, len(state)), count - 1)), len(state)]
    return [[1, CP, place, part, count, digest, _binary(state[cuts[part] : cuts[part + 1]])] for part in range(count)]


def _tampered(fields: list[Any], source: Random) -> Any:
    """One field more or less, or one replaced."""
    where, item = source.randrange(len(fields)), source.choice(EVERYTHING_ODD)
    if isinstance(item, Raw) and item.value[0] in (0xC4, 0xC5, 0xC6):
        item = None  # those are the bytes that a part may hold
    manner = source.choice(("near", "near", "odd", "longer", "shorter", "other"))
    if manner == "near":
        where = source.randrange(5)
        item = source.choice((fields[where] - 1, fields[where] + 1, MOST_PARTS, MOST_PARTS + 1))
    elif manner == "other":
        where, digest = source.choice((5, 6)), fields[5]
        odd = (
            digest.upper(),
            digest[1:],
            digest + "0",
            "g" + digest[1:],
            _binary(b""),
            _binary(b"x"),
            _binary(b"x" * 300),
        )
        item = source.choice(odd)
    elif manner == "longer":
        return [*fields, item]
    elif manner == "shorter":
        return fields[:where] + fields[where + 1 :]
    return [*fields[:where], item, *fields[where + 1 :]]


def _snapshot_differs(found: StoredSnapshot, fields: list[Any]) -> str:
    """Whether it equals its parts, is valid, and can be started from."""
    _, cp, place, _, _, digest, _ = fields
    if (found.partition, found.next_offset, found.digest) != (cp, place, digest):
        return "it says something else than its parts"
    holds = f"{xxhash.xxh3_128_intdigest(found.data, 0):032x}" == digest
    fitting = is_state(found.data, CPS, SUPPORTED_LEVEL) and found.data.startswith(
        shortest([1, cp, place, 0, 1, [], [], []])[:3]
    )
    right = holds and fitting and _next_offset(found.data) == place
    try:
        found.restore(CPS)
    except SnapshotError:
        return "refused, and right" if right else ""
    return "" if right and found.holds() else "taken, and wrong"


def _next_offset(state: bytes) -> int:
    head = state[3:]  # format and CP are a byte each
    return int.from_bytes(head[1:9], "big") if head[0] == 0xCF else head[0]


def _places_differ(source: Random) -> str:
    """Q24, Q25: places of snapshots, by counting; and the cuts of states (Q26)."""
    leases = source.choice((0, 1, 9_999, 10_000, 10_001, 20_000, 20_001, 65_000))
    every = next(size for size in range(10_000, 100_000, 10_000) if size >= leases)
    if interval(leases) != every:
        return f"every {interval(leases)} with {leases} leases, and {every} is right"
    before = source.choice((0, 1, 9_999, 10_000, 10_001, 19_999, 20_000, 29_999))
    after = before + source.choice((0, 1, 2, 10_000, 20_001))
    reached = any(offset % every == 0 for offset in range(before + 1, after + 1))
    if due(before, after, every) != reached:
        return f"due between {before} and {after} with {every}: {not reached}, and {reached} is right"
    following = next(offset for offset in range(before + 1, before + 10_001) if offset % 10_000 == 0)
    if next_due(before) != following:
        return f"next after {before} at {next_due(before)}, and {following} is right"
    if source.random() < 0.05:
        state = source.randbytes(source.choice((899_999, 900_000, 900_001, 1_800_000)))
        cut = [state[at : at + 900_000] for at in range(0, len(state), 900_000)]
        shelf = SnapshotParts(CP)
        records = encode_state(CP, 7, state)
        whole = [found for record in records if (found := shelf.add(record)) is not None]
        if [decode_part(record).data for record in records] != cut:
            return "states are cut elsewhere"
        if [x.data for x in whole] != [state] or not whole[0].holds():
            return "what is cut is not whole again"
    return ""
