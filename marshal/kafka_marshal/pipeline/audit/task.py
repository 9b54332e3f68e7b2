"""One task of an audit: replays a segment of one CP from a proven state or a snapshot.

It runs in an executor or in the calling process, and knows neither Spark nor the rest of the log. It reads and writes
files, and holds one batch of records and of rows at a time.
"""

from __future__ import annotations

import gc
import resource
import sys
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from kafka_marshal.errors import AuditError
from kafka_marshal.pipeline.audit.files import Piece, TableFiles, read_pieces
from kafka_marshal.pipeline.audit.observer import Loose, Observer
from rationalizer import World
from rationalizer.log_hash import HashChecks, LogHash


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A snapshot's digest of a CP's state after all records below next_offset (S2)."""

    next_offset: int
    digest: str
    #: Offset in the snapshots topic of the record that completed it.
    place: int


@dataclass(frozen=True, slots=True)
class Difference:
    """A snapshot that differs from the replay."""

    checkpoint: Checkpoint
    #: Digest of the replayed state.
    digest: str
    log_time: int


@dataclass(frozen=True, slots=True)
class Task:
    """A segment to replay: the records of one CP with first <= offset < end."""

    #: Task number in this audit; below, the segment's number in its CP.
    number: int
    place: int
    partition: int
    partitions: int
    pieces: tuple[Piece, ...]
    #: None: the beginning of the log.
    first: int | None
    #: None: to the end.
    end: int | None
    #: A file with the state before `first` (S1); None: the empty world.
    start: str | None
    #: Snapshots at first < next_offset <= end, to be compared.
    checkpoints: tuple[Checkpoint, ...]
    #: Folder for tables; None: only replay and compare.
    out: str | None
    #: Folder for the state at `end`, if the snapshot there is wrong.
    work: str
    #: Hashes of ranges of these records, to be compared (S4, D5).
    hashes: tuple[LogHash, ...] = ()
    world_type: type[World] = World

    @property
    def records(self) -> int:
        """The approximate number of records."""
        return sum(piece.rows for piece in self.pieces)


@dataclass(slots=True)
class TaskResult:
    """What a task found."""

    number: int
    partition: int
    next_offset: int
    log_time: int
    level: int
    digest: str
    records: int = 0
    accepted: dict[str, int] = field(default_factory=dict)
    rejected: dict[str, int] = field(default_factory=dict)
    #: The level required by the Upgrade at which it stopped (E4).
    required_level: int | None = None
    compared: int = 0
    differences: list[Difference] = field(default_factory=list)
    #: Hashes that match the records; below, those that don't, each with the records' hash.
    hashes_held: list[LogHash] = field(default_factory=list)
    hashes_wrong: list[tuple[LogHash, str]] = field(default_factory=list)
    #: Missing offsets between the first and the last record: their number, and the first run of them.
    missing: int = 0
    first_missing: tuple[int, int] | None = None
    #: A file with the state at the end, if a snapshot there differs from it.
    end_state: str | None = None
    #: Violations by kind, except differences.
    violations: dict[str, int] = field(default_factory=dict)
    loose: Loose = field(default_factory=Loose)
    files: list[str] = field(default_factory=list)
    #: Peak memory of its process, which may have run other tasks before, in bytes.
    peak_memory: int = 0


def run_task(task: Task) -> TaskResult:
    """Replay the segment. Raises AuditError if a file has changed since the audit was planned."""
    world = _world(task)
    tables = None if task.out is None else TableFiles(Path(task.out), f"task-{task.number:05}", task.partition)
    observer = None if tables is None else Observer(world, tables.write)
    result = TaskResult(task.number, task.partition, 0, 0, 0, "")
    try:
        with _collector_at_rest():
            _replay(task, world, observer, result)
        if observer is not None and tables is not None:
            observer.finish()
            result.violations, result.loose = observer.violations, observer.loose
            result.files = tables.close()
    except BaseException:
        if tables is not None:
            tables.drop()
        raise
    result.next_offset, result.log_time, result.level = world.next_offset, world.log_time, world.level
    result.digest = world.digest()
    result.accepted, result.rejected = world.accepted, world.rejected
    result.records = sum(world.accepted.values()) + sum(world.rejected.values())
    result.required_level = world.required_level
    result.peak_memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    if any(each.checkpoint.next_offset == task.end for each in result.differences):
        path = Path(task.work, f"state-{task.number:05}.msgpack")
        path.write_bytes(world.snapshot())
        result.end_state = str(path)
    return result


def _world(task: Task) -> World:
    if task.start is None:
        return task.world_type(task.partition, task.partitions)
    return task.world_type.restore(Path(task.start).read_bytes(), task.partitions)


def _replay(task: Task, world: World, observer: Observer | None, result: TaskResult) -> None:
    replay = world.apply_many if observer is None else observer.replay
    waiting = list(reversed(task.checkpoints))
    checks = HashChecks(task.hashes, task.first or 0)
    expected = task.first
    try:
        for offsets, stamps, values in read_pieces(task.pieces, task.first or 0, task.end):
            _note_missing(result, expected, offsets)
            expected = offsets[-1] + 1
            entries = list(zip(offsets, stamps, values, strict=True))
            checks.take(entries)
            at = 0
            while waiting and waiting[-1].next_offset <= offsets[-1]:
                until = bisect_left(offsets, waiting[-1].next_offset, at)
                replay(entries[at:until])
                if world.required_level is not None:
                    return
                _compare(world, waiting.pop(), result)
                at = until
            replay(entries[at:] if at else entries)
            if world.required_level is not None:
                return
    except ValueError as error:  # of the world: a record out of order
        raise AuditError(f"the log as it was read can't be replayed: {error} Nothing was concluded.") from error
    finally:
        result.hashes_held, result.hashes_wrong = checks.held, checks.wrong
    checks.ended(world.next_offset if task.end is None else task.end)
    while waiting and (task.end is not None or waiting[-1].next_offset <= world.next_offset):
        _compare(world, waiting.pop(), result)


def _note_missing(result: TaskResult, expected: int | None, offsets: list[int]) -> None:
    """Record missing offsets before or among these. expected: None if the log may begin anywhere."""
    first = offsets[0] if expected is None else expected
    missing = offsets[-1] + 1 - first - len(offsets)
    if missing and result.first_missing is None:
        before = first - 1
        for offset in offsets:
            if offset != before + 1:
                result.first_missing = (before + 1, offset - 1)
                break
            before = offset
    result.missing += missing


def _compare(world: World, checkpoint: Checkpoint, result: TaskResult) -> None:
    digest = world.digest()
    result.compared += 1
    if digest != checkpoint.digest:
        result.differences.append(Difference(checkpoint, digest, world.log_time))


@contextmanager
def _collector_at_rest() -> Iterator[None]:
    """Disable garbage collection: rows contain no cycles, and searching for them would cost a tenth of the time."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
