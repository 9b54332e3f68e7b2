"""Cuts a log into segments that can be replayed in parallel, by what the snapshots topic says (S2).

A CP can be cut at any stored snapshot: the next segment starts from its state, and the one before it must end in that
state. All other snapshots are compared on the way. A segment of 10,000 records is replayed faster than a Spark task
starts, so neighbours are merged until they are worth a task.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kafka_marshal.errors import LogCutError
from kafka_marshal.pipeline.audit.files import LogPiece
from kafka_marshal.pipeline.audit.task import Segment, SnapshotDigest
from rationalizer import SnapshotError
from rationalizer.log_hash import LogHash
from rationalizer.snapshot_log import SnapshotParts, StoredSnapshot

#: (partition, offset, value) of each record of the snapshots topic, in order within a partition.
SnapshotRecord = tuple[int, int, bytes | None]

#: Reads the snapshots topic from its beginning at each call: it is read twice, never held in memory.
SnapshotRecords = Callable[[], Iterable[SnapshotRecord]]


@dataclass(slots=True)
class Evidence:
    """What the snapshots topic says about one CP."""

    #: By next_offset. If two at one place differ, both are here.
    checkpoints: list[SnapshotDigest] = field(default_factory=list)
    #: Snapshots whose bytes don't have their digest.
    broken: list[SnapshotDigest] = field(default_factory=list)
    #: Hashes of the CP's log (S4).
    hashes: Collection[LogHash] = ()
    #: Number of records that are no part of a snapshot, and of snapshots with missing parts.
    junk: int = 0
    unfinished: int = 0


def claims_of(records: SnapshotRecords, partitions: int) -> dict[int, Evidence]:
    """The claims about each CP. Holds one snapshot at a time."""
    found: dict[int, Evidence] = {}
    known: set[tuple[int, int, str]] = set()
    for offset, stored, collector in _snapshots(records, partitions):
        claims = found.setdefault(collector.partition, Evidence())
        claims.junk, claims.unfinished, claims.hashes = collector.junk, collector.unfinished, collector.hashes
        if stored is None:
            continue
        checkpoint = SnapshotDigest(stored.next_offset, stored.digest, offset)
        if not stored.holds():
            claims.broken.append(checkpoint)
        elif (stored.partition, stored.next_offset, stored.digest) not in known:
            known.add((stored.partition, stored.next_offset, stored.digest))
            claims.checkpoints.append(checkpoint)
    for claims in found.values():
        claims.checkpoints.sort(key=lambda each: (each.next_offset, each.place))
    return found


def extract(
    records: SnapshotRecords, partitions: int, wanted: Mapping[int, Sequence[SnapshotDigest]], folder: Path
) -> dict[tuple[int, SnapshotDigest], str]:
    """Write the wanted states to files; omits snapshots that hold no state (no replay leads to them)."""
    places = {(cp, each.place): each for cp, checkpoints in wanted.items() for each in checkpoints}
    found: dict[tuple[int, SnapshotDigest], str] = {}
    if not places:
        return found
    for offset, stored, collector in _snapshots(records, partitions):
        checkpoint = places.get((collector.partition, offset))
        if stored is None or checkpoint is None:
            continue
        try:
            stored.restore(partitions)
        except SnapshotError:
            continue
        path = folder / f"snapshot-{stored.partition}-{offset}.msgpack"
        path.write_bytes(stored.data)
        found[stored.partition, checkpoint] = str(path)
    return found


def _snapshots(records: SnapshotRecords, partitions: int) -> Iterator[tuple[int, StoredSnapshot | None, SnapshotParts]]:
    """(offset, the snapshot that it completed, its partition's collector) of each record."""
    collectors: dict[int, SnapshotParts] = {}
    for partition, offset, value in records():
        if partition >= partitions:
            continue
        collector = collectors.get(partition)
        if collector is None:
            collector = collectors[partition] = SnapshotParts(partition)
        yield offset, collector.add(value), collector


#: Fewer records than this are not worth a task.
LEAST_RECORDS = 50_000

#: Tasks per core, so that a slow one does not keep the others waiting at the end.
TASKS_PER_CORE = 3


@dataclass(frozen=True, slots=True)
class SourceLog:
    """A log to audit, in pieces."""

    topic: str
    partitions: int
    #: Pieces by CP, ascending; CPs without records may be missing.
    pieces: Mapping[int, Sequence[LogPiece]]
    #: Log start of each CP, if known: everything below is gone. A dump that begins above 0 may have a gap there or lack
    #: its beginning.
    starts: Mapping[int, int] = field(default_factory=dict)
    #: By CP: hashes of its records in a dump (D5).
    hashes: Mapping[int, Sequence[LogHash]] = field(default_factory=dict)
    #: For each CP the first offset when it was dumped, and the one behind the last, if known.
    bounds: Sequence[tuple[int, int]] = ()
    #: Whether it should carry its hashes, and bounds (D5).
    is_dump: bool = False

    @property
    def records(self) -> int:
        """How many there are."""
        return sum(piece.rows for pieces in self.pieces.values() for piece in pieces)


@dataclass(slots=True)
class CutLog:
    """The segments of each CP, in order, notices, and what no hash vouches for."""

    segments: dict[int, list[Segment]] = field(default_factory=dict)
    notices: list[str] = field(default_factory=list)
    unvouched: list[str] = field(default_factory=list)


def cut(
    log: SourceLog,
    claims: Mapping[int, Evidence],
    parallelism: int,
    unusable: frozenset[tuple[int, SnapshotDigest]] = frozenset(),
    records_per_task: int | None = None,
) -> CutLog:
    """Cut every CP into segments that are worth a task each.

    `unusable`: snapshots without a state, from which no segment can start. Raises LogCutError if the beginning of a log
    is gone and no snapshot replaces it.
    """
    found = CutLog()
    least = max(LEAST_RECORDS, log.records // (parallelism * TASKS_PER_CORE))
    for partition in range(log.partitions):
        pieces = log.pieces.get(partition, ())
        if not pieces:
            continue
        checkpoints = claims[partition].checkpoints if partition in claims else []
        usable = [each for each in checkpoints if (partition, each) not in unusable]
        start = _start(log, partition, pieces, usable, found)
        end = pieces[-1].last + 1
        beyond = sum(each.next_offset > end for each in checkpoints)
        if beyond:
            found.notices.append(
                f"partition {partition}: {beyond} snapshot(s) beyond the log's end, {end}, were not compared"
            )
        hashes = [*(claims[partition].hashes if partition in claims else ()), *log.hashes.get(partition, ())]
        later = sum(each.next_offset > end for each in hashes)
        if later:
            found.unvouched.append(
                f"partition {partition}: {later} stored hash(es) reach beyond the log's end, {end}: its last records "
                "were removed, or it was copied before they were written"
            )
        hashes = [each for each in hashes if _after(start) <= each.since and each.next_offset <= end]
        inside = [each for each in checkpoints if _after(start) < each.next_offset <= end]
        whole = _between_hashes(hashes, [each for each in inside if each in usable])
        cuts = _cuts(_after(start), end, whole, records_per_task or least)
        found.segments[partition] = _segments(partition, pieces, start, cuts, inside, hashes)
    return found


def _between_hashes(hashes: Sequence[LogHash], checkpoints: Sequence[SnapshotDigest]) -> list[SnapshotDigest]:
    """Checkpoints that split no hashed range. Members make both at the same places."""
    ranges = sorted((each.since, each.next_offset) for each in hashes)
    found, place, end = [], 0, 0
    for checkpoint in checkpoints:  # ascending
        while place < len(ranges) and ranges[place][0] < checkpoint.next_offset:
            end = max(end, ranges[place][1])
            place += 1
        if end <= checkpoint.next_offset:
            found.append(checkpoint)
    return found


def _after(start: SnapshotDigest | None) -> int:
    return 0 if start is None else start.next_offset


def _start(
    log: SourceLog, partition: int, pieces: Sequence[LogPiece], usable: Sequence[SnapshotDigest], found: CutLog
) -> SnapshotDigest | None:
    """The start of the first segment: the beginning, or the oldest snapshot that the log reaches back to."""
    known = log.starts.get(partition)
    begin = pieces[0].first if known is None else known
    if begin == 0:
        return None
    for checkpoint in usable:
        if begin <= checkpoint.next_offset <= pieces[-1].last + 1:
            found.notices.append(
                f"partition {partition}: the log begins at offset {begin}. The audit starts from the snapshot at "
                f"{checkpoint.next_offset}, which nothing that is left can prove"
            )
            return checkpoint
    if known is not None:
        raise LogCutError(
            f"partition {partition} of {log.topic!r} begins at offset {begin}, and no snapshot that can be used stands "
            "for what is gone: who held what can't be known. Nothing was concluded. Audit a dump that was "
            "made before."
        )
    found.unvouched.append(
        f"partition {partition}: begins at offset {begin}; it was replayed as if nothing had been before that"
    )
    return None


def _cuts(first: int, end: int, usable: Sequence[SnapshotDigest], records: int) -> list[SnapshotDigest]:
    """Snapshots to cut at, each at least `records` offsets behind the last and not too close to the end."""
    found: list[SnapshotDigest] = []
    for checkpoint in usable:
        if checkpoint.next_offset - first >= records and end - checkpoint.next_offset >= records // 2:
            found.append(checkpoint)
            first = checkpoint.next_offset
    return found


def _segments(
    partition: int,
    pieces: Sequence[LogPiece],
    start: SnapshotDigest | None,
    cuts: Sequence[SnapshotDigest],
    inside: Sequence[SnapshotDigest],
    hashes: Sequence[LogHash],
) -> list[Segment]:
    found = []
    for begin, stop in zip([start, *cuts], [*cuts, None], strict=True):
        first, end = _after(begin), None if stop is None else stop.next_offset
        found.append(
            Segment(
                partition,
                tuple(each for each in pieces if each.last >= first and (end is None or each.first < end)),
                begin,
                end,
                tuple(each for each in inside if first < each.next_offset and (end is None or each.next_offset <= end)),
                tuple(each for each in hashes if first <= each.since and (end is None or each.since < end)),
            )
        )
    return found
