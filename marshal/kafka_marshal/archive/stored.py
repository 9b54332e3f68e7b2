"""The files of an archive: each a dump (section 9) of one coordination partition and a range of its offsets, in gzip.

    <partition>/<first>-<end>-<since>-<until>-<SHA-256 of the file>.jsonl.gz

The names are the index: first and end (exclusive) are offsets, since and until log times (ms). A header says more: the
topic's id, the state before and its digest after the records, and their hash. So each file can be checked and replayed
by itself, none is ever changed, and a writer may be killed at any time.

`ArchivedLog` is a log and its archive as one history: the archive below the log's beginning, and the live log from
there on. What both have is compared: the live log is read, and must have the hashes (S4) of the archive's files. Where
files are missing, history begins behind the gap, in the state that the next file has.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import logging
import re
import zlib
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from heapq import merge
from io import BytesIO
from itertools import chain
from typing import Any, Final, NamedTuple

from kafka_marshal.errors import ArchiveError
from kafka_marshal.files import Files, FilesError, files_at
from kafka_marshal.logs import log
from kafka_marshal.observe.log import Log
from kafka_marshal.observe.text import time_text
from kafka_marshal.ports import Cluster, LogEntry
from rationalizer import SnapshotError, World
from rationalizer.dump import DumpHeader, DumpLines, DumpReader, header_line
from rationalizer.log_hash import HashChecks, LogHash, RunningHash
from rationalizer.snapshot import digest_of

_NAME: Final = re.compile(r"(\d{19})-(\d{19})-(\d+)-(\d+)-([0-9a-f]{64})\.jsonl\.gz")

#: The field of a dump's header that holds what an archive adds.
_FIELD: Final = "archive"

#: Records that are passed on together.
_RUN: Final = 2_000


class FileName(NamedTuple):
    """What the name of a file says."""

    partition: int
    first: int
    end: int
    since: int
    until: int
    digest: str

    @property
    def path(self) -> str:
        """Where it is in the archive."""
        return f"{self.partition}/{self.first:019}-{self.end:019}-{self.since}-{self.until}-{self.digest}.jsonl.gz"

    def __str__(self) -> str:
        times = f"{time_text(self.since)} to {time_text(self.until)}"
        return f"offsets {self.first} to {self.end - 1} of partition {self.partition} ({times})"


class FilePart(NamedTuple):
    """A file, and from which offset it is read: what is below is in the one before."""

    name: FileName
    begin: int


@dataclass(slots=True)
class JoinedFiles:
    """Files that join without a gap; at least one."""

    parts: list[FilePart]

    @property
    def first(self) -> int:
        """Its first offset."""
        return self.parts[0].begin

    @property
    def end(self) -> int:
        """The offset behind its last."""
        return self.parts[-1].name.end

    @property
    def since(self) -> int:
        """Log time (ms) at its beginning."""
        return self.parts[0].name.since

    @property
    def until(self) -> int:
        """Log time (ms) at its end."""
        return self.parts[-1].name.until


def join(names: Iterable[FileName]) -> list[JoinedFiles]:
    """The files of one partition, ascending, as runs with gaps between them."""
    found: list[JoinedFiles] = []
    for name in sorted(names):
        if found and name.first <= found[-1].end:
            if name.end > found[-1].end:  # else two writers at once wrote it
                found[-1].parts.append(FilePart(name, found[-1].end))
        else:
            found.append(JoinedFiles([FilePart(name, name.first)]))
    return found


class StoredFile:
    """One file that was read, and is as it was written."""

    def __init__(self, name: FileName, data: bytes) -> None:
        """Raises ArchiveError if it is not of this format."""
        self.name = name
        self._data = data
        try:
            with gzip.open(BytesIO(data)) as lines:
                header = json.loads(lines.readline())
            said = header[_FIELD]
            self.topic: str = header["topic"]
            self.partitions: int = header["partitions"]
            self.topic_id: str = said["topic_id"]
            self.records: int = said["records"]
            #: Of the state after its records (S1).
            self.digest: str = said["digest"]
            self._state: str | None = said["state"]
            self._hash: str = said["hash"]
        except (ValueError, KeyError, TypeError, EOFError, OSError, zlib.error) as error:
            raise _unreadable(name, error) from error

    @property
    def log_hash(self) -> LogHash:
        """Of its records (S4)."""
        return LogHash(self.name.partition, self.name.first, self.name.end, self._hash)

    @property
    def state(self) -> bytes | None:
        """The canonical state before its records; None: there was nothing before."""
        return None if self._state is None else b64decode(self._state)

    def world(self) -> World:
        """The state before its records, to replay them. Raises ArchiveError."""
        if (state := self.state) is None:
            return World(self.name.partition, self.partitions)
        try:
            return World.restore(state, self.partitions)
        except SnapshotError as error:
            raise _unreadable(self.name, error) from error

    def begins_with(self, digest: str) -> bool:
        """Whether the state before its records has this digest."""
        state = self.state
        return (self.world().digest() if state is None else digest_of(state)) == digest

    def entries(self, begin: int, end: int) -> Iterator[list[LogEntry]]:
        """Its records with begin <= offset < end, in runs. Raises ArchiveError."""
        found: list[LogEntry] = []
        try:
            with gzip.open(BytesIO(self._data)) as lines:
                for record in DumpReader(lines):
                    if begin <= record.offset < end:
                        found.append((record.offset, record.timestamp_ms, record.value))
                    if len(found) == _RUN:
                        yield found
                        found = []
        except (ValueError, EOFError, OSError, zlib.error) as error:  # DumpError is a ValueError
            raise _unreadable(self.name, error) from error
        if found:
            yield found


def _unreadable(name: FileName, error: Exception) -> ArchiveError:
    return ArchiveError(
        f"{name.path} is not a file of an archive that this release reads ({error}). It holds {name}. Read it with the "
        "release that wrote it",
        partition=name.partition,
    )


class Archive:
    """The archive of one log, in a folder or a bucket (*blocking*)."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self.name: str = files.name
        self._last: StoredFile | None = None

    @classmethod
    def at(cls, place: str, *, make: bool = False, storage_options: Mapping[str, Any] | None = None) -> Archive:
        """The archive in a folder, or at a URL that fsspec reaches. make: the folder, unless it is there.

        Raises ConfigurationError, ExtraMissingError, and ArchiveError if nothing is to be made and nothing is there.
        """
        archive = cls(files_at(place, make=make, storage_options=storage_options))
        if not make and not archive.partitions():
            raise ArchiveError(
                f"{archive.name} holds no archive of a coordination log. Nothing was read. Name the place that "
                "kafka-marshal archive --to was given"
            )
        return archive

    def partitions(self) -> list[int]:
        """The coordination partitions of which something is there."""
        try:
            names = self._files.names("")
            if not names:
                self._files.check()
            return sorted(int(name) for name in names if name.isascii() and name.isdigit())
        except FilesError as error:
            raise ArchiveError(f"{self.name}: the archive can't be listed: {error}. Nothing was read") from error

    def runs(self, partition: int) -> list[JoinedFiles]:
        """Its files, ascending, as runs with gaps between them."""
        try:
            listed = self._files.names(str(partition))
        except FilesError as error:
            raise ArchiveError(f"{self.name}/{partition}: can't be listed: {error}. Nothing was read") from error
        names = []
        for match in filter(None, map(_NAME.fullmatch, listed)):
            first, end, since, until = map(int, match.groups()[:4])
            names.append(FileName(partition, first, end, since, until, match[5]))
        return join(names)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Waits until no other process writes to this archive in a folder. Raises ArchiveError."""
        try:
            with self._files.alone():
                yield
        except FilesError as error:
            raise ArchiveError(f"{self.name} can't be locked: {error}. Nothing was written") from error

    def read(self, name: FileName) -> StoredFile:
        """One of its files. Raises ArchiveError if it is gone, was changed, or is not of this format."""
        last = self._last  # of another thread by now, perhaps
        if last is not None and last.name == name:
            return last
        try:
            data = self._files.read(name.path)
        except FilesError as error:
            raise ArchiveError(f"{self.name}/{name.path} can't be read: {error}") from error
        if data is None or hashlib.sha256(data).hexdigest() != name.digest:
            what = "was changed after it was written" if data is not None else "is gone"
            raise ArchiveError(
                f"{self.name}/{name.path} {what}. It held {name}, of which nothing can be said now. Bring the file "
                "back from a copy. Or move it away: then kafka-marshal archive writes it again if the log still has "
                "these records, and what reads the archive begins behind it",
                partition=name.partition,
            )
        self._last = found = StoredFile(name, data)
        return found

    def write(self, draft: Draft, end: int) -> FileName:
        """Add a file, with the records below the offset `end`."""
        partition = draft.world.partition
        running = RunningHash(draft.first)
        running.take(draft.entries)
        said = {
            "topic_id": draft.topic_id,
            "records": len(draft.entries),
            "hash": running.digest(),
            "state": None if draft.state is None else b64encode(draft.state).decode(),
            "digest": draft.world.digest(),
        }
        lines = DumpLines(partition)
        header = DumpHeader(draft.topic, draft.world.partitions)
        top = json.dumps({**json.loads(header_line(header)), _FIELD: said})
        text = "".join(f"{line}\n" for line in chain([top], lines.take(draft.entries), lines.end()))
        data = gzip.compress(text.encode(), mtime=0)
        digest = hashlib.sha256(data).hexdigest()
        name = FileName(partition, draft.first, end, draft.since, draft.world.log_time, digest)
        try:
            self._files.write(name.path, data)
        except FilesError as error:
            raise ArchiveError(
                f"{self.name}/{name.path} was not written: {error}. What was written before it counts. Run "
                "kafka-marshal archive again: it continues there"
            ) from error
        return name


class Draft:
    """A file to be: records of a coordination partition from `first` on, which `world` replays."""

    def __init__(self, topic: str, topic_id: str, world: World, first: int) -> None:
        self.topic = topic
        self.topic_id = topic_id
        self.world = world
        self.first = first
        self.state: bytes | None = world.snapshot() if first else None
        self.since: int = world.log_time
        self.entries: list[LogEntry] = []

    def take(self, entries: Sequence[LogEntry]) -> None:
        """Records, ascending. Raises ArchiveError before an Upgrade that this release can't follow."""
        if not self.entries:
            self.since = max(self.since, entries[0][1])
        self.world.apply_many(entries)
        self.entries += entries
        if (level := self.world.required_level) is not None:
            raise ArchiveError(
                f"partition {self.world.partition} of {self.topic!r} was raised to level {level}, which this release "
                f"does not know. Its records from offset {self.first} on are not archived yet. Archive it with a newer "
                "release, before they are pruned",
                partition=self.world.partition,
            )


class ArchivedLog(Log):
    """A coordination topic with its archive (*blocking*)."""

    def __init__(
        self,
        cluster: Cluster | None,
        topic: str,
        timeout_s: float,
        archive: Archive,
        *,
        at_ms: int | None = None,
        at_offset: int | None = None,
    ) -> None:
        """cluster: None: the archive alone, as far as it goes. at_ms, at_offset: where files are missing, read what is
        joined to this log time or offset.

        Raises ArchiveError if the archive is of another log, and what Log raises.
        """
        # Listed before the log's ends are asked for: nobody can have archived more than they say.
        self.runs: dict[int, list[JoinedFiles]] = {cp: archive.runs(cp) for cp in archive.partitions()}
        self._archive = archive
        if cluster is not None:
            super().__init__(cluster, topic, timeout_s)
            self.topic_id: str = cluster.topic_info([topic], timeout_s)[topic].topic_id
        else:
            self._be_alone(topic)
        self._refuse_another()
        #: From where on the live log is read.
        self._live_from = dict(self.starts)
        #: CP → its run that is read before that.
        self.chosen: dict[int, JoinedFiles] = {}
        for cp, runs in self.runs.items():
            early = (run for run in runs if run.end < self.starts[cp] and _covers(run, at_ms, at_offset))
            chosen = next(early, None)
            if chosen is not None:
                self._live_from[cp] = self.ends[cp] = chosen.end
            else:
                chosen = next((run for run in runs if run.end >= self.starts[cp]), None)
            if chosen is not None and chosen.first <= self.starts[cp]:
                self.chosen[cp] = chosen

    def _be_alone(self, topic: str) -> None:
        said = next(self._archive.read(run.parts[-1].name) for runs in self.runs.values() for run in runs)
        self.topic: str = topic
        self.topic_id = said.topic_id
        self.partitions: int = said.partitions
        ends = {cp: runs[-1].end for cp, runs in self.runs.items() if runs}
        self.starts: dict[int, int] = {cp: ends.get(cp, 0) for cp in range(said.partitions)}
        self.ends: dict[int, int] = dict(self.starts)

    def _refuse_another(self) -> None:
        for runs in self.runs.values():
            try:
                found = self._archive.read(runs[-1].parts[-1].name) if runs else None
            except ArchiveError as error:
                if error.partition is None:
                    raise
                continue  # it is said when this partition is read
            if found is not None:
                self.refuse_file(found)
                return

    def refuse_file(self, file: StoredFile) -> None:
        """Raise ArchiveError if this file is of another log."""
        if (file.topic, file.partitions) == (self.topic, self.partitions) and file.topic_id == self.topic_id:
            return
        raise ArchiveError(
            f"{self._archive.name} is the archive of another log: of topic {file.topic!r} with id {file.topic_id} and "
            f"{file.partitions} partitions. {self.topic!r} has id {self.topic_id} and {self.partitions} partitions: it "
            "was recreated, or the archive belongs to another cluster. Nothing was read or written. Keep that archive, "
            "and name another place for this log"
        )

    def first_worlds(self, cps: Iterable[int]) -> dict[int, World]:
        """The initial state of each of these CPs (*blocking*), in its archive or as without one.

        Logs a warning if history is gone. Raises ArchiveError, LogCutError.
        """
        cps = list(cps)
        worlds: dict[int, World] = {}
        gone = []
        for cp in cps:
            self.refuse_longer(cp)
            run = self.chosen.get(cp)
            if run is not None:
                file = self._archive.read(run.parts[0].name)
                self.refuse_file(file)
                worlds[cp] = file.world()
                if run.first:
                    gone.append(f"partition {cp} before offset {run.first} ({time_text(run.since)})")
            elif runs := self.runs.get(cp):
                gone.append(f"partition {cp} after offset {runs[-1].end - 1} ({time_text(runs[-1].until)})")
        if gone:
            log(
                logging.WARNING,
                "archive_gap",
                f"{self._archive.name} does not have all of the log: {', '.join(gone)}. The history begins behind "
                "that; a member that holds a lease at that moment may have held it for longer.",
            )
        return worlds | super().first_worlds([cp for cp in cps if cp not in worlds])

    def worlds_before(self, cps: Iterable[int], time_ms: int) -> dict[int, World]:
        """The state before the last file that begins by this time, so that little is replayed."""
        found: dict[int, World] = {}
        for cp in cps:
            run = self.chosen.get(cp)
            names = [part.name for part in run.parts if part.name.since <= time_ms] if run is not None else []
            if names:
                found[cp] = self._archive.read(names[-1]).world()
        return found | self.first_worlds([cp for cp in cps if cp not in found])

    def offsets_for_time(self, cps: Iterable[int], time_ms: int) -> dict[int, int]:
        """Where the time is archived, the end of the file that has it."""
        found = super().offsets_for_time(cps, time_ms)
        for cp in found.keys() & self.chosen.keys():
            ends = (part.name.end for part in self.chosen[cp].parts if time_ms <= part.name.until)
            found[cp] = min(found[cp], next(ends, found[cp]))
        return found

    def refuse_longer(self, cp: int) -> None:
        """Raise ArchiveError if the log ends before its archive."""
        runs = self.runs.get(cp)
        if runs and runs[-1].end > self.ends[cp] and self._live_from[cp] == self.starts[cp]:
            raise ArchiveError(
                f"partition {cp} of {self.topic!r} ends at offset {self.ends[cp]}, and {self._archive.name} has its "
                f"offsets up to {runs[-1].end - 1} ({time_text(runs[-1].until)}): the log lost records that it had "
                "(an unclean leader election?), so the two can't be joined. Read each by itself, and archive this log "
                "to another place",
                partition=cp,
            )

    def read(
        self,
        partitions: Mapping[int, int] | None = None,
        ends: Mapping[int, int] | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> Iterator[tuple[int, list[LogEntry]]]:
        """As of a Log: runs of one CP each, ascending; first what is archived, by time.

        Raises ArchiveError if a file is damaged, or if the log differs from the archive.
        """
        ends = self.ends if ends is None else ends
        first = self._live_from if partitions is None else partitions
        total = sum(max(0, ends[cp] - at) for cp, at in first.items())
        below = {cp: min(self._live_from[cp], ends[cp]) for cp in first}
        checks = {cp: HashChecks(self.hashes(cp, at, below[cp], ends[cp]), at) for cp, at in first.items()}
        done = 0
        older = [self.archived(cp, self.chosen[cp], at, below[cp]) for cp, at in first.items() if cp in self.chosen]
        for cp, entries in merge(*older, key=lambda run: run[1][0][1]):
            self._compare(cp, checks[cp], entries)
            yield cp, entries
            done += len(entries)
            if progress is not None:
                progress(done, total)
        live = {cp: max(at, self._live_from[cp]) for cp, at in first.items()}
        before = sum(max(0, below[cp] - at) for cp, at in first.items())
        further = None if progress is None else lambda passed, _: progress(before + passed, total)
        has_newer = any(at < ends[cp] for cp, at in live.items())
        for cp, entries in super().read(live, ends, further) if has_newer else ():
            self._compare(cp, checks[cp], entries)
            yield cp, entries
        for cp, each in checks.items():
            each.ended(ends[cp])
            self._compare(cp, each, [])

    def archived(self, cp: int, run: JoinedFiles, first: int, end: int) -> Iterator[tuple[int, list[LogEntry]]]:
        """The records of a run from `first` to below `end`."""
        for name, begin in run.parts:
            if name.end > first and begin < end:
                file = self._archive.read(name)
                self.refuse_file(file)
                for entries in file.entries(max(begin, first), min(name.end, end)):
                    yield cp, entries

    def hashes(self, cp: int, first: int, live_from: int, end: int) -> Iterator[LogHash]:
        """Of the files from `first` on with records that the live log is read for."""
        for name in self._names(cp):
            if first <= name.first and live_from < name.end <= end:
                yield self._archive.read(name).log_hash

    def _names(self, cp: int) -> Iterator[FileName]:
        return (part.name for run in self.runs.get(cp, ()) for part in run.parts)

    def _compare(self, cp: int, checks: HashChecks, entries: list[LogEntry]) -> None:
        checks.take(entries)
        if checks.wrong:
            place = (checks.wrong[0][0].since, checks.wrong[0][0].next_offset)
            name = next(each for each in self._names(cp) if (each.first, each.end) == place)
            raise ArchiveError(
                f"{name} are not the same in {self.topic!r} and in {self._archive.name}/{name.path}: one of them was "
                "changed after it was archived, and what is concluded from that time on may be wrong. See what members "
                f"have read: kafka-marshal audit --from-kafka. Read the log without its archive until it is clear",
                partition=cp,
            )


def _covers(run: JoinedFiles, at_ms: int | None, at_offset: int | None) -> bool:
    return (at_ms is not None and at_ms <= run.until) or (at_offset is not None and at_offset < run.end)
