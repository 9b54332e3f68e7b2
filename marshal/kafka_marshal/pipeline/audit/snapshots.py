"""The snapshots topic as an audit uses it: each snapshot's digest, and the states that segments start from (S2)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kafka_marshal.pipeline.audit.task import Checkpoint
from rationalizer import SnapshotError
from rationalizer.log_hash import LogHash
from rationalizer.snapshot_log import SnapshotParts, StoredSnapshot

#: (partition, offset, value) of each record of the snapshots topic, in order within a partition.
SnapshotRecord = tuple[int, int, bytes | None]

#: Reads the snapshots topic from its beginning at each call: it is read twice, never held in memory.
SnapshotRecords = Callable[[], Iterable[SnapshotRecord]]


@dataclass(slots=True)
class Claims:
    """What the snapshots topic says about one CP."""

    #: By next_offset. If two at one place differ, both are here.
    checkpoints: list[Checkpoint] = field(default_factory=list)
    #: Snapshots whose bytes don't have their digest.
    broken: list[Checkpoint] = field(default_factory=list)
    #: Hashes of the CP's log (S4).
    hashes: Collection[LogHash] = ()
    #: Number of records that are no part of a snapshot, and of snapshots with missing parts.
    junk: int = 0
    unfinished: int = 0


def claims_of(records: SnapshotRecords, partitions: int) -> dict[int, Claims]:
    """The claims about each CP. Holds one snapshot at a time."""
    found: dict[int, Claims] = {}
    known: set[tuple[int, int, str]] = set()
    for offset, stored, collector in _snapshots(records, partitions):
        claims = found.setdefault(collector.partition, Claims())
        claims.junk, claims.unfinished, claims.hashes = collector.junk, collector.unfinished, collector.hashes
        if stored is None:
            continue
        checkpoint = Checkpoint(stored.next_offset, stored.digest, offset)
        if not stored.holds():
            claims.broken.append(checkpoint)
        elif (stored.partition, stored.next_offset, stored.digest) not in known:
            known.add((stored.partition, stored.next_offset, stored.digest))
            claims.checkpoints.append(checkpoint)
    for claims in found.values():
        claims.checkpoints.sort(key=lambda each: (each.next_offset, each.place))
    return found


def extract(
    records: SnapshotRecords, partitions: int, wanted: Mapping[int, Sequence[Checkpoint]], folder: Path
) -> dict[tuple[int, Checkpoint], str]:
    """Write the wanted states to files; omits snapshots that hold no state (no replay leads to them)."""
    places = {(cp, each.place): each for cp, checkpoints in wanted.items() for each in checkpoints}
    found: dict[tuple[int, Checkpoint], str] = {}
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
