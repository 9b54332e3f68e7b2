"""Sources of a log to audit: a dump, Parquet files, or Kafka. Each is converted to a `SourceLog` in Parquet.

A dump (section 9) is read in parallel, each line checked by D1.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from kafka_marshal.errors import AuditError, ConfigurationError
from kafka_marshal.pipeline.audit.files import (
    LogPiece,
    LogWriter,
    has_statistics,
    header_of,
    pieces_of,
    read_pieces,
    refuse_unsorted,
)
from kafka_marshal.pipeline.audit.plan import SnapshotRecords, SourceLog
from kafka_marshal.pipeline.audit.task import TaskRunner
from rationalizer.dump import DumpError, DumpHeader, DumpReader, header_line
from rationalizer.log_hash import LogHash
from rationalizer.marker import count_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


#: Smallest part of a dump that is worth a task.
_LEAST_BYTES = 16 * 1024 * 1024

#: Parts for each core.
_PARTS_PER_CORE = 2


@dataclass(frozen=True, slots=True)
class _Part:
    """Bytes of a dump that are whole lines."""

    path: str
    number: int
    start: int
    end: int
    header: DumpHeader
    folder: str


def header_of_dump(path: Path) -> DumpHeader:
    """The first line of a dump. Raises DumpError."""
    with path.open("rb") as lines:
        return DumpReader(lines).header


def records_of_dump(path: Path) -> Iterator[tuple[int, int, bytes | None]]:
    """(partition, offset, value) of each record. Raises DumpError."""
    with path.open("rb") as lines:
        for record in DumpReader(lines):
            yield record.partition, record.offset, record.value


def dump_to_parquet(path: Path, folder: Path, runner: TaskRunner) -> SourceLog:
    """Convert a dump to files in `folder`. Raises DumpError, which names the line, as a replay does."""
    header = header_of_dump(path)
    parts = _parts(path, folder, header, runner.parallelism)
    pieces: dict[int, list[LogPiece]] = {}
    hashes: dict[int, list[LogHash]] = {}
    for converted in runner.map("reading the dump", _convert, parts, folder):
        if converted is None:
            _raise_what_is_wrong(path)
            continue
        for cp, next_offset, digest in converted.hashes:
            before_it = hashes.setdefault(cp, [])
            before_it.append(LogHash(cp, before_it[-1].next_offset if before_it else 0, next_offset, digest))
        for piece in pieces_of(Path(file) for file in converted.files):
            before = pieces.setdefault(piece.partition, [])
            if before and before[-1].last >= piece.first:
                _raise_what_is_wrong(path)
            before.append(piece)
    bounds = header.bounds or ()
    return SourceLog(header.topic, header.partitions, pieces, hashes=hashes, bounds=bounds, is_dump=True)


def _parts(path: Path, folder: Path, header: DumpHeader, parallelism: int) -> list[_Part]:
    size = path.stat().st_size
    wanted = max(1, min(parallelism * _PARTS_PER_CORE, size // _LEAST_BYTES))
    cuts = [0]
    with path.open("rb") as file:
        for number in range(1, wanted):
            file.seek(max(size * number // wanted, cuts[-1]))
            file.readline()
            cuts.append(file.tell())
    cuts.append(size)
    return [
        _Part(str(path), number, start, end, header, str(folder))
        for number, (start, end) in enumerate(itertools.pairwise(cuts))
        if start < end or number == 0
    ]


@dataclass(frozen=True, slots=True)
class _Converted:
    """The files, and the hashes of the lines: CP, the offset behind it, hash."""

    files: list[str]
    hashes: list[tuple[int, int, str]]


def _convert(part: _Part) -> _Converted | None:
    """The files with the records of this part, one per CP; None if a line is invalid."""
    writers: dict[int, LogWriter] = {}
    tried = f"{part.number:05}-{os.getpid()}"
    try:
        reader = DumpReader(_lines(part))
        for partition, offset, timestamp_ms, value in reader:
            writer = writers.get(partition)
            if writer is None:
                path = Path(part.folder, f"log-{tried}-{partition}.parquet")
                writer = writers[partition] = LogWriter(path, partition, part.header)
            writer.add(offset, timestamp_ms, value)
    except DumpError:
        return None
    finally:
        for writer in writers.values():
            writer.close()
    return _Converted([str(writer.path) for writer in writers.values()], reader.hashes)


def _lines(part: _Part) -> Iterator[bytes]:
    """The lines of this part, after the dump's header."""
    with open(part.path, "rb") as file:
        file.seek(part.start)
        if part.start > 0:
            yield header_line(part.header).encode()
        at = part.start
        for line in file:
            if at >= part.end:
                return
            at += len(line)
            yield line


def _raise_what_is_wrong(path: Path) -> None:
    """Read the dump from the beginning to find the number of the bad line, which a part does not know."""
    for _ in records_of_dump(path):
        pass
    raise AuditError(f"{path} changed while it was read. Nothing was concluded; audit it when no process writes to it.")


_COLUMNS = ("partition", "offset", "timestamp", "value")


@dataclass(frozen=True, slots=True)
class OpenedLog:
    """A log, ready to be cut, and its stored snapshots (None: the source has none)."""

    log: SourceLog
    snapshots: SnapshotRecords | None = None


class AuditSource(Protocol):
    """A log to audit."""

    def open(self, runner: TaskRunner, spark: SparkSession | None, work: Path) -> OpenedLog:
        """Convert the log into pieces, in `work` if needed. Raises what the source may raise."""

    @property
    def name(self) -> str:
        """What it is, for people."""


@dataclass(frozen=True, slots=True)
class DumpSource:
    """A dump (section 9), and optionally the dump of its snapshots topic."""

    path: Path
    snapshots: Path | None = None

    @property
    def name(self) -> str:
        return str(self.path)

    def open(self, runner: TaskRunner, spark: SparkSession | None, work: Path) -> OpenedLog:
        """Raises DumpError for a bad line, ConfigurationError if the two dumps are not of the same log."""
        log = dump_to_parquet(self.path, work, runner)
        return OpenedLog(log, _snapshots_of_dump(self.snapshots, log))


@dataclass(frozen=True, slots=True)
class ParquetSource:
    """Parquet files with the columns of a dump's lines: partition, offset, timestamp, value.

    `paths`: files or folders of files. `partitions`: number of the log's CPs; by default it is read from the files
    (those that `to_parquet` wrote have it) or from the log's first records (L2). Records should ascend within each row
    group, and a row group should be of one CP; other files are sorted by Spark first.
    """

    paths: Sequence[Path]
    partitions: int | None = None
    snapshots: Path | None = None

    @property
    def name(self) -> str:
        return ", ".join(map(str, self.paths))

    def open(self, runner: TaskRunner, spark: SparkSession | None, work: Path) -> OpenedLog:
        """Raises ConfigurationError for files that hold no log, AuditError for duplicate records."""
        files = [file for path in self.paths for file in parquet_files(path)]
        if not files:
            raise ConfigurationError(f"{self.name}: no Parquet files. Nothing was read; name the files of a log.")
        for file in files:
            _check_columns(file)
        headers = [header_of(file) for file in files]
        ordered = all(headers) or all(_is_ordered(file) for file in files)
        if not ordered:
            files = _sorted_by_spark(spark, files, work / "sorted")
        pieces = by_partition(pieces_of(files))
        named = {(header.topic, header.partitions) for header in headers if header is not None}
        if len(named) > 1:
            raise ConfigurationError(f"{self.name}: files of several logs ({sorted(named)}). Nothing was read.")
        topic, said = next(iter(named), ("__marshal", None))
        partitions = self.partitions or said or count_by_marker(pieces)
        if partitions is None:
            raise ConfigurationError(
                f"{self.name}: the files don't say how many partitions the log has, and records are judged by it. "
                "Nothing was concluded. Say how many (--partitions)."
            )
        if pieces and max(pieces) >= partitions:
            raise ConfigurationError(
                f"{self.name}: holds records of partition {max(pieces)}, but the log is said to have {partitions} "
                "partitions. Nothing was concluded. Say how many it has."
            )
        log = SourceLog(topic, partitions, pieces)
        return OpenedLog(log, _snapshots_of_dump(self.snapshots, log))


def source_of_file(path: Path, snapshots: Path | None = None, partitions: int | None = None) -> AuditSource:
    """The source for a file or folder, by its contents. Raises DumpError if it is neither Parquet nor a dump."""
    if path.is_dir() or path.suffix == ".parquet":
        return ParquetSource([path], partitions, snapshots)
    with path.open("rb") as file:
        parquet = file.read(4) == b"PAR1"
    if parquet:
        return ParquetSource([path], partitions, snapshots)
    header_of_dump(path)  # reports a file that is not a dump at once
    return DumpSource(path, snapshots)


def records_of_parquet(pieces: Mapping[int, Sequence[LogPiece]]) -> Iterator[tuple[int, int, bytes | None]]:
    """(partition, offset, value) of each record, CP by CP."""
    for cp in sorted(pieces):
        for offsets, _, values in read_pieces(pieces[cp], 0, None):
            for offset, value in zip(offsets, values, strict=True):
                yield cp, offset, value


def _snapshots_of_dump(path: Path | None, log: SourceLog) -> SnapshotRecords | None:
    if path is None:
        return None
    header = header_of_dump(path)
    if header.partitions != log.partitions:
        raise ConfigurationError(
            f"{path} is of a topic with {header.partitions} partitions, the log has {log.partitions}: these are not "
            "its snapshots. Nothing was concluded."
        )
    return partial(records_of_dump, path)


def parquet_files(path: Path) -> list[Path]:
    """The file, or the Parquet files below the folder except those that Spark would skip."""
    if not path.is_dir():
        return [path]
    return sorted(
        file
        for file in path.rglob("*.parquet")
        if not any(part.startswith(("_", ".")) for part in file.relative_to(path).parts)
    )


def by_partition(pieces: Iterable[LogPiece]) -> dict[int, list[LogPiece]]:
    """The pieces of each CP, in order. Raises AuditError if some overlap."""
    found: dict[int, list[LogPiece]] = {}
    for piece in sorted(pieces, key=lambda each: (each.partition, each.first)):
        found.setdefault(piece.partition, []).append(piece)
    for each in found.values():
        refuse_unsorted(each)
    return found


def _check_columns(path: Path) -> None:
    try:
        schema = pq.read_schema(path)
    except ValueError as error:  # pyarrow's ArrowInvalid
        raise ConfigurationError(f"{path} is no Parquet file ({error}). Nothing was read.") from None
    missing = [name for name in _COLUMNS if name not in schema.names]
    missing += [
        name for name in _COLUMNS[:3] if name not in missing and not pa.types.is_integer(schema.field(name).type)
    ]
    if missing:
        raise ConfigurationError(
            f"{path} has no column {', '.join(missing)} of the type wanted; a log has "
            f"{', '.join(_COLUMNS)} (as in the lines of a dump: ints, times in ms, the value as bytes). Nothing was "
            "read."
        )


def _is_ordered(path: Path) -> bool:
    """Whether each row group is of one CP and its offsets ascend."""
    with pq.ParquetFile(path) as file:
        for number in range(file.num_row_groups):
            table = file.read_row_group(number, columns=["partition", "offset"])
            partitions, offsets = table["partition"].to_numpy(), table["offset"].to_numpy()
            if len(offsets) and ((partitions != partitions[0]).any() or (offsets[1:] <= offsets[:-1]).any()):
                return False
    return has_statistics(path)


def _sorted_by_spark(spark: SparkSession | None, files: Sequence[Path], folder: Path) -> list[Path]:
    """Rewrite the records to files of one CP each, in order."""
    if spark is None:
        raise AuditError("the Parquet files are not in the log's order, and only Spark can sort them.")
    (
        spark.read.parquet(*map(str, files))
        .selectExpr(
            "int(partition) partition", "bigint(offset) offset", "bigint(timestamp) timestamp", "value", "partition cp"
        )
        .repartition("cp")
        .sortWithinPartitions("cp", "offset")
        .write.partitionBy("cp")
        .option("parquet.block.size", 8 * 1024 * 1024)
        .parquet(str(folder))
    )
    return parquet_files(folder)


def count_by_marker(pieces: Mapping[int, Sequence[LogPiece]]) -> int | None:
    """The number of CPs by the first record of one (L2); None if no record has it."""
    for cp in sorted(pieces):
        first = next(read_pieces(pieces[cp][:1], 0, None), None)
        if first is not None and first[0][0] == 0:
            count = count_of(first[2][0])
            if count is not None:
                return count
    return None
