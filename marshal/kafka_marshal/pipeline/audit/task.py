"""Tasks of an audit, and who runs them: on Spark, a share for each core, or one by one in this process.

A task replays a segment of one CP from a proven state or a snapshot. It runs in an executor or in the calling process,
and knows neither Spark nor the rest of the log. It reads and writes files, and holds one batch of records and of rows
at a time.
"""

from __future__ import annotations

import gc
import pickle
import re
import resource
import sys
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import pyarrow as pa

from kafka_marshal.errors import AuditError, MarshalError
from kafka_marshal.pipeline.audit.files import LogPiece, TableFiles, read_pieces
from kafka_marshal.pipeline.audit.observer import Loose, Observer
from rationalizer import World
from rationalizer.log_hash import HashChecks, LogHash

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@dataclass(frozen=True, slots=True)
class SnapshotDigest:
    """A snapshot's digest of a CP's state after all records below next_offset (S2)."""

    next_offset: int
    digest: str
    #: Offset in the snapshots topic of the record that completed it.
    place: int


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A snapshot that differs from the replay."""

    checkpoint: SnapshotDigest
    #: Digest of the replayed state.
    digest: str
    log_time: int


@dataclass(frozen=True, slots=True)
class Segment:
    """Records of one CP with first <= offset < end, and the state before them."""

    partition: int
    pieces: tuple[LogPiece, ...]
    #: None: the beginning, with the empty world.
    start: SnapshotDigest | None
    #: None: to the end.
    end: int | None
    #: Snapshots at first < next_offset <= end, to be compared.
    checkpoints: tuple[SnapshotDigest, ...]
    #: Hashes of ranges of these records, to be compared (S4, D5).
    hashes: tuple[LogHash, ...] = ()

    @property
    def first(self) -> int | None:
        """The first offset that `start` does not include."""
        return None if self.start is None else self.start.next_offset

    @property
    def records(self) -> int:
        """The approximate number of records."""
        return sum(piece.rows for piece in self.pieces)


@dataclass(frozen=True, slots=True)
class ReplayTask:
    """A segment to replay."""

    #: Task number in this audit; below, the segment's number in its CP.
    number: int
    place: int
    segment: Segment
    partitions: int
    #: A file with the state before the segment (S1); None: the empty world.
    start: str | None
    #: Folder for tables; None: only replay and compare.
    out: str | None
    #: Folder for the state at its end, if the snapshot there is wrong.
    work: str
    world_type: type[World] = World

    @property
    def records(self) -> int:
        """The approximate number of records."""
        return self.segment.records


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
    differences: list[Mismatch] = field(default_factory=list)
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


def run_task(task: ReplayTask) -> TaskResult:
    """Replay the segment. Raises AuditError if a file has changed since the audit was planned."""
    world = _world(task)
    tables = None if task.out is None else TableFiles(Path(task.out), f"task-{task.number:05}", task.segment.partition)
    observer = None if tables is None else Observer(world, tables.write)
    result = TaskResult(task.number, task.segment.partition, 0, 0, 0, "")
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
    if any(each.checkpoint.next_offset == task.segment.end for each in result.differences):
        path = Path(task.work, f"state-{task.number:05}.msgpack")
        path.write_bytes(world.snapshot())
        result.end_state = str(path)
    return result


def _world(task: ReplayTask) -> World:
    if task.start is None:
        return task.world_type(task.segment.partition, task.partitions)
    return task.world_type.restore(Path(task.start).read_bytes(), task.partitions)


def _replay(task: ReplayTask, world: World, observer: Observer | None, result: TaskResult) -> None:
    segment = task.segment
    replay = world.apply_many if observer is None else observer.replay
    waiting = list(reversed(segment.checkpoints))
    checks = HashChecks(segment.hashes, segment.first or 0)
    expected = segment.first
    try:
        for offsets, stamps, values in read_pieces(segment.pieces, segment.first or 0, segment.end):
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
    checks.ended(world.next_offset if segment.end is None else segment.end)
    while waiting and (segment.end is not None or waiting[-1].next_offset <= world.next_offset):
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


def _compare(world: World, checkpoint: SnapshotDigest, result: TaskResult) -> None:
    digest = world.digest()
    result.compared += 1
    if digest != checkpoint.digest:
        result.differences.append(Mismatch(checkpoint, digest, world.log_time))


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


A = TypeVar("A")
R = TypeVar("R")


class TaskRunner(Protocol):
    """Carries functions out."""

    #: Number of calls at the same time.
    parallelism: int

    def map(self, doing: str, function: Callable[[A], R], arguments: Sequence[A], work: Path) -> list[R]:
        """function of each argument, in order. `doing`: a description; `work`: a folder shared with the executors.

        Raises AuditError if Spark failed; MarshalErrors as they are.
        """


def is_spark_running() -> bool:
    """Whether this process already has a session, which we must not stop."""
    from pyspark.sql import SparkSession

    return SparkSession.getActiveSession() is not None


class InProcess:
    """Runs in this process: for small logs, and as a baseline for measurements."""

    parallelism = 1

    def map(self, doing: str, function: Callable[[A], R], arguments: Sequence[A], work: Path) -> list[R]:
        return [function(argument) for argument in arguments]


class OnSpark:
    """Runs in Spark's executors, through mapInArrow.

    Only task numbers and results pass through Spark. Arguments are files in `work`.
    """

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark
        self.parallelism: int = max(1, spark.sparkContext.defaultParallelism)

    def map(self, doing: str, function: Callable[[A], R], arguments: Sequence[A], work: Path) -> list[R]:
        from pyspark import cloudpickle

        from kafka_marshal.pipeline.session import is_of_spark

        if not arguments:
            return []
        for number, argument in enumerate(arguments):
            (work / f"task-{number:05}.pickle").write_bytes(cloudpickle.dumps((function, argument)))  # type: ignore[no-untyped-call]
        shares = _shares(arguments, self.parallelism)
        one_each = self._spark.range(0, len(shares), 1, len(shares))
        self._spark.sparkContext.setJobDescription(f"kafka-marshal audit: {doing}")
        try:
            rows = one_each.mapInArrow(_Calls(str(work), shares), "number long, result binary").collect()
        except Exception as error:
            if is_of_spark(error):
                raise AuditError(
                    f"{doing} failed in Spark: {_cause(error)} Nothing was concluded about the log. Where an "
                    "executor was lost (memory, a machine gone), run it again; on a cluster, see that all of its "
                    f"machines reach {work} and the files of the log."
                ) from error
            raise
        finally:
            self._spark.sparkContext.setJobDescription(None)  # type: ignore[arg-type]
        found: dict[int, Any] = {row["number"]: pickle.loads(row["result"]) for row in rows}  # noqa: S301 (our own)
        for result in found.values():
            if isinstance(result, MarshalError):
                raise result
        return [found[number] for number in range(len(arguments))]


def _shares(arguments: Sequence[object], cores: int) -> list[list[int]]:
    """Argument numbers in a share for each core, balanced by records: the largest goes to the smallest share.

    Each task costs Spark's Python worker a tenth of a second, as much as 100,000 records.
    """
    weights = [getattr(argument, "records", 1) for argument in arguments]
    shares: list[list[int]] = [[] for _ in range(min(cores, len(arguments)))]
    loads = [0] * len(shares)
    for number in sorted(range(len(arguments)), key=lambda each: -weights[each]):
        least = loads.index(min(loads))
        shares[least].append(number)
        loads[least] += weights[number]
    return shares


class _Calls:
    """Runs in an executor: maps numbers of shares to the results of their arguments."""

    def __init__(self, work: str, shares: list[list[int]]) -> None:
        self._work = work
        self._shares = shares

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in (each for share in batch.column(0).to_pylist() for each in self._shares[share]):
                file = Path(self._work, f"task-{number:05}.pickle")
                function, argument = pickle.loads(file.read_bytes())  # noqa: S301 (our own)
                result: object
                try:
                    result = function(argument)
                except MarshalError as error:  # a retry by Spark would not help: the message says what is wrong
                    result = error
                yield pa.RecordBatch.from_pydict(
                    {"number": pa.array([number], pa.int64()), "result": pa.array([pickle.dumps(result)], pa.binary())}
                )


def _cause(error: Exception) -> str:
    """The line with the cause, out of a Python and Java traceback."""
    if lacking := re.search(r"No module named '([\w.]+)'", str(error)):
        return (
            f"an executor lacks the package {lacking[1]!r}: install kafka-marshal[spark] on all machines of the "
            "cluster, or send an environment (docs/spark.md)."
        )
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    named = [line for line in lines if ": " in line and line.partition(":")[0].endswith(("Error", "Exception"))]
    told = (named or lines or [type(error).__name__])[-1]
    return told if told.endswith(".") else f"{told}."
