"""The log of snapshots: its records, and where in a CP's log a snapshot is due (S2).

    [1, CP, next_offset, part, parts, digest, bytes]

One record holds one part, of at most 900 kB, of the canonical state (S1) of one CP; `part` counts from 0. Cut the
same way by everybody, the parts of one state are the same bytes from every writer, so parts of several writers,
one of which may have been killed half way, make one snapshot together.

A snapshot is a claim by its writer. What is read here is only what it says: `holds` checks the digest it
brings along, `restore` that it is a state that could have been reached (S1), and nothing but a replay from a
proven place shows whether it is true.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from msgpack import packb, unpackb
from msgpack.exceptions import UnpackException

from rationalizer.limits import MAX_OFFSET, MAX_PART_BYTES, MAX_PARTITION, MAX_SNAPSHOT_PARTS, SNAPSHOT_INTERVAL
from rationalizer.log_hash import DIGEST_DIGITS, LogHash, decode_hash, is_digest
from rationalizer.snapshot import digest_of
from rationalizer.state import SnapshotError
from rationalizer.travel import Travels
from rationalizer.world import World

FORMAT: Final = 1

#: The bytes of a part's record: the other fields need fewer than 80.
MAX_RECORD_BYTES: Final = MAX_PART_BYTES + 80

#: Snapshots of which some parts are missing that one collector keeps: what is older was never finished.
MAX_UNFINISHED: Final = 8


class MalformedPartError(Travels, ValueError):
    """A record that is no part of a snapshot. Pass it over: nothing was taken from it."""

    def __init__(self, why: str) -> None:
        super().__init__(f"not a part of a snapshot: {why}. Nothing was taken from it.")


@dataclass(frozen=True, slots=True)
class SnapshotPart:
    """What one record of the log of snapshots says (S2)."""

    #: The CP.
    partition: int
    #: The state is that after all records below this offset.
    next_offset: int
    #: 0 … parts − 1.
    part: int
    parts: int
    #: Of the whole: 32 hex digits (S1).
    digest: str
    #: This part of the canonical state.
    data: bytes


@dataclass(frozen=True, slots=True)
class StoredSnapshot:
    """One whole snapshot as it was written. Not yet checked in any way."""

    #: The CP.
    partition: int
    #: The state is that after all records below this offset.
    next_offset: int
    #: What its writer says that the digest is (S1).
    digest: str
    #: The canonical state.
    data: bytes

    def holds(self) -> bool:
        """Whether the digest is that of the bytes."""
        return digest_of(self.data) == self.digest

    def restore(self, partitions: int) -> World:
        """The world it describes, in a log of `partitions` CPs. Raises SnapshotError where it holds none."""
        if not self.holds():
            raise SnapshotError("its digest is not that of its bytes")
        world = World.restore(self.data, partitions)
        if (world.partition, world.next_offset) != (self.partition, self.next_offset):
            raise SnapshotError(
                f"it is stored as CP {self.partition} at {self.next_offset}, but holds CP {world.partition} at "
                f"{world.next_offset}"
            )
        return world


def interval(listed: int) -> int:
    """Offsets between two snapshots of a coordination partition that lists this much (S2).

    10,000, or its multiple that is no less.
    """
    return SNAPSHOT_INTERVAL * max(1, -(-listed // SNAPSHOT_INTERVAL))


def due(next_offset_before: int, next_offset_after: int, every: int) -> bool:
    """Whether the next offset, on its way between these two, reached a multiple of `every` (S2)."""
    return next_offset_after // every > next_offset_before // every


def next_due(next_offset: int) -> int:
    """The first place above next_offset where a snapshot may be due: look there whether it is, by `interval`."""
    return (next_offset // SNAPSHOT_INTERVAL + 1) * SNAPSHOT_INTERVAL


def encode_state(partition: int, next_offset: int, state: bytes, digest: str | None = None) -> list[bytes]:
    """The records that store these canonical bytes (S1), in order; the digest is computed where it is not given."""
    digest = digest_of(state) if digest is None else digest
    cuts = range(0, len(state), MAX_PART_BYTES)
    if not 1 <= len(cuts) <= MAX_SNAPSHOT_PARTS:
        raise SnapshotError(f"{len(state):,} bytes; 1 … {MAX_SNAPSHOT_PARTS * MAX_PART_BYTES:,} can be stored")
    view = memoryview(state)
    return [
        packb((FORMAT, partition, next_offset, part, len(cuts), digest, view[at : at + MAX_PART_BYTES]))
        for part, at in enumerate(cuts)
    ]


def decode_part(value: bytes | None) -> SnapshotPart:
    """What a record of the log of snapshots says. Raises only MalformedPartError, for anything else."""
    if type(value) is not bytes:
        raise MalformedPartError("it has no value")
    if len(value) > MAX_RECORD_BYTES:
        raise MalformedPartError(f"{len(value):,} bytes, at most {MAX_RECORD_BYTES:,} are allowed")
    try:
        # Nothing is set aside for what is claimed and not there: every container and string is bounded.
        fields: Any = unpackb(
            value,
            use_list=False,
            max_array_len=7,
            max_map_len=0,
            max_str_len=DIGEST_DIGITS,
            max_bin_len=MAX_PART_BYTES,
            max_ext_len=0,
        )
    except (ValueError, UnpackException) as error:
        # ValueError holds msgpack's FormatError, StackError and ExtraData, and invalid UTF-8.
        raise MalformedPartError(f"no msgpack value that is allowed here ({type(error).__name__})") from None
    if type(fields) is not tuple or len(fields) != 7:
        raise MalformedPartError("a part has seven fields")
    form, partition, next_offset, part, parts, digest, data = fields
    _want(type(form) is int and form == FORMAT, f"its format is not {FORMAT}, which this release reads")
    _want(type(partition) is int and 0 <= partition <= MAX_PARTITION, "its CP is out of range")
    _want(type(next_offset) is int and 0 <= next_offset <= MAX_OFFSET + 1, "its next offset is out of range")
    _want(type(parts) is int and 1 <= parts <= MAX_SNAPSHOT_PARTS, "its number of parts is out of range")
    _want(type(part) is int and 0 <= part < parts, "its number is not below that of the parts")
    _want(is_digest(digest), "it has no digest")
    _want(type(data) is bytes and len(data) > 0, "it holds no bytes")
    return SnapshotPart(partition, next_offset, part, parts, digest, data)


def _want(holds: bool, why: str) -> None:
    if not holds:
        raise MalformedPartError(why)


#: What the parts of one snapshot have in common: (next_offset, digest, parts).
_Whole = tuple[int, str, int]


class SnapshotParts:
    """Puts snapshots of one CP together from the values of its partition of the log of snapshots, in any order.

    `junk`: values passed over, since they are no parts of this CP's snapshots. A snapshot of which a part comes
    again is returned once for each time that all its parts have come. `hashes`: of this CP's log, each once, in the
    order in which they came (S4).
    """

    __slots__ = ("_unfinished", "hashes", "junk", "partition")

    def __init__(self, partition: int) -> None:
        self.partition = partition
        self.junk = 0
        self.hashes: dict[LogHash, None] = {}
        self._unfinished: dict[_Whole, dict[int, bytes]] = {}

    @property
    def unfinished(self) -> int:
        """Snapshots of which some parts are missing, so far."""
        return len(self._unfinished)

    def add(self, value: bytes | None) -> StoredSnapshot | None:
        """Take one record's value in; the snapshot that it makes whole, if it does. Never raises on any value."""
        stored = decode_hash(value)
        if stored is not None and stored.partition == self.partition:
            self.hashes[stored] = None
            return None
        try:
            found = decode_part(value)
        except MalformedPartError:
            self.junk += 1
            return None
        if found.partition != self.partition:
            self.junk += 1
            return None
        key = (found.next_offset, found.digest, found.parts)
        parts = self._unfinished.pop(key, {})
        parts[found.part] = found.data
        if len(parts) == found.parts:
            data = b"".join(parts[part] for part in range(found.parts))
            return StoredSnapshot(found.partition, found.next_offset, found.digest, data)
        self._unfinished[key] = parts  # the youngest now
        if len(self._unfinished) > MAX_UNFINISHED:
            del self._unfinished[next(iter(self._unfinished))]
        return None
