"""Writes a log's archive: each time only what it does not have yet, in files that appear whole.

Of each coordination partition it replays the last file that is there, beside the log where that still has these
records, and continues. So what joins is proven: the state before a file is the one after the file before it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from operator import itemgetter
from typing import Final

from kafka_marshal.archive.stored import Archive, ArchivedLog, Draft, FileName, FilePart, JoinedFiles, join
from kafka_marshal.errors import ArchiveError, LogCutError
from kafka_marshal.observe.log import Log
from kafka_marshal.ports import Cluster, LogEntry
from rationalizer import World
from rationalizer.limits import SNAPSHOT_INTERVAL

#: Files end at multiples of this many offsets: where snapshots are due, so where prune cuts.
FILE_OFFSETS: Final = 5 * SNAPSHOT_INTERVAL

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Gap:
    """Offsets that an archive does not have, behind others: they were pruned first, or a file is missing."""

    first: int
    end: int
    #: Log time (ms) before it and after it.
    since: int
    until: int


@dataclass(frozen=True, slots=True)
class ArchivedPartition:
    """What was done for one coordination partition."""

    partition: int
    #: The offsets that the archive has of it, less gaps; the last is exclusive.
    first: int
    end: int
    #: What was written: files, their records, log times (ms) of the first and the last; None: nothing.
    files: int
    records: int
    since: int | None
    until: int | None
    #: All of the archive, and those of them that were not there before.
    gaps: tuple[Gap, ...]
    new_gaps: tuple[Gap, ...]
    #: Why not all was written; "": it was.
    problem: str


@dataclass(frozen=True, slots=True)
class Archived:
    """What was added to an archive."""

    topic: str
    topic_id: str
    place: str
    partitions: tuple[ArchivedPartition, ...]

    @property
    def records(self) -> int:
        """Records written."""
        return sum(each.records for each in self.partitions)

    @property
    def files(self) -> int:
        """Files written."""
        return sum(each.files for each in self.partitions)

    @property
    def since(self) -> int | None:
        """Log time (ms) of the first record written; None: none was."""
        return min((each.since for each in self.partitions if each.since is not None), default=None)

    @property
    def until(self) -> int | None:
        """Log time (ms) of the last record written; None: none was."""
        return max((each.until for each in self.partitions if each.until is not None), default=None)

    @property
    def is_whole(self) -> bool:
        """Whether all was written, and nothing was found to be gone that was not known to be."""
        return not any(each.problem or each.new_gaps for each in self.partitions)


def write_archive(
    cluster: Cluster,
    topic: str,
    archive: Archive,
    timeout_s: float,
    *,
    verify: bool = False,
    progress: Progress | None = None,
) -> Archived:
    """Add to the archive what the log has and it has not (*blocking*).

    verify: also replay all that is there, and compare. progress: called with (offsets done, offsets in all). Raises
    ArchiveError if the archive is of another log, or its place can't be used. A partition of which not all can be
    written is reported, and others are archived all the same. Two at once into one folder take turns.
    """
    with archive.alone():
        return _write(cluster, topic, archive, timeout_s, verify, progress)


def _write(
    cluster: Cluster, topic: str, archive: Archive, timeout_s: float, verify: bool, progress: Progress | None
) -> Archived:
    log = ArchivedLog(cluster, topic, timeout_s, archive)
    work = [_Partition(log, archive, cp, verify) for cp in range(log.partitions)]
    total = sum(each.offsets for each in work)
    done = 0

    def further(offsets: int) -> None:
        nonlocal done
        done += offsets
        if progress is not None:
            progress(done, total)

    return Archived(topic, log.topic_id, archive.name, tuple(each.run(further) for each in work))


@dataclass(slots=True)
class _Partition:
    """The archive of one CP, as it is extended."""

    log: ArchivedLog
    archive: Archive
    cp: int
    verify: bool
    written: list[FileName] = field(default_factory=list)
    records: int = 0

    @property
    def offsets(self) -> int:
        """How many are to be read."""
        apart = sum(run.end - run.first for run in self._apart()) if self.verify else 0
        return apart + sum(_end(piece) - _first(piece) for piece in self._pieces())

    def run(self, further: Callable[[int], None]) -> ArchivedPartition:
        """Do it. further: called with the offsets that were passed."""
        problem = ""
        try:
            for run in self._apart() if self.verify else ():
                stored = self.archive.read(run.parts[0].name)
                entries = self.log.archived(self.cp, run, stored.name.first, run.end)
                self._replay(run.parts, stored.world(), entries, further)
            self._extend(further)
        except ArchiveError as error:
            if error.partition is None:
                raise
            problem = str(error)
        except LogCutError as error:
            problem = str(error)
        before = self.log.runs.get(self.cp, [])
        known = list(map(_gap, pairwise(before)))
        runs = join([*(part.name for run in before for part in run.parts), *self.written])
        gaps = list(map(_gap, pairwise(runs)))
        if runs and runs[-1].end < (start := self.log.starts[self.cp]):
            gaps.append(Gap(runs[-1].end, start, runs[-1].until, runs[-1].until))
        return ArchivedPartition(
            self.cp,
            runs[0].first if runs else 0,
            runs[-1].end if runs else 0,
            len(self.written),
            self.records,
            self.written[0].since if self.written else None,
            self.written[-1].until if self.written else None,
            tuple(gaps),
            tuple(gap for gap in gaps if gap not in known),
            problem,
        )

    def _apart(self) -> list[JoinedFiles]:
        """The runs that the live log is not joined to."""
        return [run for run in self.log.runs.get(self.cp, ()) if run.end < self.log.starts[self.cp]]

    def _pieces(self) -> list[FilePart | range]:
        """What is to be read, in order: files that are there, and offsets of which none is."""
        start, end = self.log.starts[self.cp], self.log.ends[self.cp]
        runs = [run for run in self.log.runs.get(self.cp, ()) if run.end >= start]
        found: list[FilePart | range] = []
        at = start
        for part in (part for run in runs for part in run.parts):
            found += [*_cut(at, part.begin), part]
            at = max(at, part.name.end)
        found += _cut(at, end)
        new = next((number for number, piece in enumerate(found) if isinstance(piece, range)), len(found))
        return found if self.verify else found[max(0, new - 1) :]

    def _extend(self, further: Callable[[int], None]) -> None:
        self.log.refuse_longer(self.cp)
        pieces = self._pieces()
        if not pieces:
            return
        if isinstance(pieces[0], FilePart):
            stored = self.archive.read(pieces[0].name)
            self.log.refuse_file(stored)
            world, begin = stored.world(), stored.name.first
        else:
            world = Log.first_worlds(self.log, [self.cp])[self.cp]
            begin = max(_first(pieces[0]), world.next_offset)
            pieces = [_from(begin, piece) for piece in pieces if _end(piece) > begin]
        if not pieces:
            return
        entries = self.log.read({self.cp: begin}, {self.cp: _end(pieces[-1])})
        self._replay(pieces, world, entries, further)

    def _replay(
        self,
        pieces: Sequence[FilePart | range],
        world: World,
        runs: Iterable[tuple[int, list[LogEntry]]],
        further: Callable[[int], None],
    ) -> None:
        """Compare the files that are there, and write the others."""
        stream = _Stream(entries for _, entries in runs)
        for piece in pieces:
            first, end = _first(piece), _end(piece)
            stored = self.archive.read(piece.name) if isinstance(piece, FilePart) else None
            if stored is not None and stored.name.first == first and not stored.begins_with(world.digest()):
                raise self._contradicted(stored.name, "before")
            draft = Draft(self.log.topic, self.log.topic_id, world, first)
            for entries in stream.below(end):
                draft.take(entries)
            if stored is None:
                self.written.append(self.archive.write(draft, end))
                self.records += len(draft.entries)
            elif stored.digest != world.digest():
                raise self._contradicted(stored.name, "after")
            further(end - first)

    def _contradicted(self, name: FileName, when: str) -> ArchiveError:
        return ArchiveError(
            f"{self.archive.name}/{name.path} says another state {when} its records than a replay leads to: what the "
            f"archive shows of {name} and of later ones may be wrong. Nothing was written behind it. Check the log: "
            "kafka-marshal audit --from-kafka; and archive it to another place",
            partition=self.cp,
        )


def _first(piece: FilePart | range) -> int:
    return piece.begin if isinstance(piece, FilePart) else piece.start


def _end(piece: FilePart | range) -> int:
    return piece.name.end if isinstance(piece, FilePart) else piece.stop


def _from(begin: int, piece: FilePart | range) -> FilePart | range:
    return range(max(begin, piece.start), piece.stop) if isinstance(piece, range) else piece


def _cut(first: int, end: int) -> list[range]:
    """These offsets, cut where files end."""
    found = []
    while first < end:
        stop = min(end, (first // FILE_OFFSETS + 1) * FILE_OFFSETS)
        found.append(range(first, stop))
        first = stop
    return found


def _gap(runs: tuple[JoinedFiles, JoinedFiles]) -> Gap:
    before, after = runs
    return Gap(before.end, after.first, before.until, after.since)


class _Stream:
    """Runs of records, cut where they are asked to be."""

    def __init__(self, runs: Iterator[list[LogEntry]]) -> None:
        self._runs = runs
        self._rest: list[LogEntry] = []

    def below(self, end: int) -> Iterator[list[LogEntry]]:
        """The next ones below this offset. Iterate to the end."""
        while entries := self._rest or next(self._runs, []):
            cut = bisect_left(entries, end, key=itemgetter(0))
            self._rest = entries[cut:]
            if cut:
                yield entries[:cut]
            if self._rest:
                return
