"""The files of an archive: each a dump (section 9) of one coordination partition and a range of its offsets, in gzip.

    <partition>/<first>-<end>-<since>-<until>-<SHA-256 of the file>.jsonl.gz

The names are the index: first and end (exclusive) are offsets, since and until log times (ms). A header says more: the
topic's id, the state before and its digest after the records, and their hash. So each file can be checked and replayed
by itself, none is ever changed, and a writer may be killed at any time.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import zlib
from base64 import b64decode, b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from itertools import chain
from typing import Any, Final, NamedTuple

from kafka_marshal.errors import ArchiveError
from kafka_marshal.files import Files, FilesError, files_at
from kafka_marshal.observe.text import time_text
from kafka_marshal.ports import LogEntry
from rationalizer import SnapshotError, World
from rationalizer.dump import DumpHeader, DumpLines, DumpReader, header_line
from rationalizer.log_hash import LogHash, RunningHash
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


class Part(NamedTuple):
    """A file, and from which offset it is read: what is below is in the one before."""

    name: FileName
    begin: int


@dataclass(slots=True)
class Run:
    """Files that join without a gap; at least one."""

    parts: list[Part]

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


def join(names: Iterable[FileName]) -> list[Run]:
    """The files of one partition, ascending, as runs with gaps between them."""
    found: list[Run] = []
    for name in sorted(names):
        if found and name.first <= found[-1].end:
            if name.end > found[-1].end:  # else two writers at once wrote it
                found[-1].parts.append(Part(name, found[-1].end))
        else:
            found.append(Run([Part(name, name.first)]))
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

    def runs(self, partition: int) -> list[Run]:
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
