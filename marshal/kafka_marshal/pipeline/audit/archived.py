"""The archive below a log in Kafka, as input of an audit: each file becomes Parquet, in a task.

The hash of each file is compared with its records, archived or live; the state before it is one more snapshot to be
compared with the replay, and to begin a segment at.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kafka_marshal.archive import Archive, ArchivedLog
from kafka_marshal.pipeline.audit.files import LogWriter, Piece, pieces_of
from kafka_marshal.pipeline.audit.plan import SourceLog
from kafka_marshal.pipeline.audit.sources import Opened
from rationalizer.dump import DumpHeader
from rationalizer.log_hash import LogHash
from rationalizer.snapshot_log import encode_state

if TYPE_CHECKING:
    from kafka_marshal.archive.stored import FileName
    from kafka_marshal.pipeline.audit.job import Runner
    from kafka_marshal.pipeline.audit.snapshots import SnapshotRecord


@dataclass(frozen=True, slots=True)
class _File:
    """A file of the archive, and which of its offsets are wanted."""

    place: str
    name: FileName
    begin: int
    end: int
    folder: str

    @property
    def records(self) -> int:
        """How much work it is."""
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class _Converted:
    """The Parquet file, the hash of all its records, and the file of the state before them with its next offset."""

    path: Path
    hash: LogHash
    state: Path
    next_offset: int


@dataclass(frozen=True, slots=True)
class Below:
    """What an archive has below a log, by CP."""

    starts: Mapping[int, int]
    pieces: Mapping[int, list[Piece]]
    hashes: Mapping[int, list[LogHash]]
    #: (CP, next offset, canonical bytes in this file)
    states: tuple[tuple[int, int, Path], ...]

    def under(self, live: Opened) -> Opened:
        """One log of both; the states of the archive are snapshots, too."""
        log = live.log
        pieces = {cp: [*self.pieces.get(cp, ()), *log.pieces.get(cp, ())] for cp in range(log.partitions)}
        pieces = {cp: each for cp, each in pieces.items() if each}
        starts = {**log.starts, **self.starts}
        return Opened(SourceLog(log.topic, log.partitions, pieces, starts, self.hashes), lambda: self._snapshots(live))

    def _snapshots(self, live: Opened) -> Iterator[SnapshotRecord]:
        place = -1
        for cp, next_offset, path in self.states:
            for value in encode_state(cp, next_offset, path.read_bytes()):
                yield cp, place, value
                place -= 1
        yield from () if live.snapshots is None else live.snapshots()


def read_archive(log: ArchivedLog, place: str, runner: Runner, work: Path) -> Below:
    """Convert what is below the live log into files in `work`. Raises ArchiveError."""
    wanted = []
    hashes: dict[int, list[LogHash]] = {}
    for cp in range(log.partitions):
        log.refuse_longer(cp)
        run, live_from = log.chosen.get(cp), log.starts[cp]
        first = live_from if run is None else run.first
        hashes[cp] = list(log.hashes(cp, first, live_from, log.ends[cp]))
        for name, begin in () if run is None else run.parts:
            if begin < live_from:
                wanted.append(_File(place, name, begin, min(name.end, live_from), str(work)))
    pieces: dict[int, list[Piece]] = {}
    states = []
    for file, found in zip(wanted, runner.map("reading the archive", _convert, wanted, work), strict=True):
        cp = file.name.partition
        pieces.setdefault(cp, []).extend(pieces_of([found.path]))
        if file.name.end <= log.starts[cp]:
            hashes[cp].append(found.hash)
        if found.next_offset:
            states.append((cp, found.next_offset, found.state))
    starts = {cp: run.first for cp, run in log.chosen.items()}
    return Below(starts, pieces, hashes, tuple(states))


def _convert(file: _File) -> _Converted:
    stored = Archive.at(file.place).read(file.name)
    stem = f"archived-{file.name.partition}-{file.name.first:019}-{os.getpid()}"
    path, state = (Path(file.folder, f"{stem}.{kind}") for kind in ("parquet", "state"))
    writer = LogWriter(path, file.name.partition, DumpHeader(stored.topic, stored.partitions))
    for entries in stored.entries(file.begin, file.end):
        for entry in entries:
            writer.add(*entry)
    writer.close()
    state.write_bytes(stored.state or b"")
    return _Converted(path, stored.log_hash, state, stored.world().next_offset)
