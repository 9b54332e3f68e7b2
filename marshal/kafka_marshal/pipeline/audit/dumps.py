"""Dumps (section 9) as input: read in parallel, each line checked by D1, converted to Parquet."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kafka_marshal.errors import AuditError
from kafka_marshal.pipeline.audit.files import LogWriter, Piece, pieces_of
from kafka_marshal.pipeline.audit.job import Runner
from kafka_marshal.pipeline.audit.plan import SourceLog
from rationalizer.dump import DumpError, DumpHeader, DumpReader, header_line
from rationalizer.log_hash import LogHash

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


def dump_to_parquet(path: Path, folder: Path, runner: Runner) -> SourceLog:
    """Convert a dump to files in `folder`. Raises DumpError, which names the line, as a replay does."""
    header = header_of_dump(path)
    parts = _parts(path, folder, header, runner.parallelism)
    pieces: dict[int, list[Piece]] = {}
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
