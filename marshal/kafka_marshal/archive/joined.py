"""A log and its archive as one history: the archive below the log's beginning, and the live log from there on.

What both have is compared: the live log is read, and must have the hashes (S4) of the archive's files. Where files
are missing, history begins behind the gap, in the state that the next file has.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from heapq import merge

from kafka_marshal.archive.stored import Archive, FileName, Run, StoredFile
from kafka_marshal.errors import ArchiveError
from kafka_marshal.logs import log
from kafka_marshal.observe.log import Log
from kafka_marshal.observe.text import time_text
from kafka_marshal.ports import Cluster, LogEntry
from rationalizer import World
from rationalizer.log_hash import HashChecks, LogHash


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
        self.runs: dict[int, list[Run]] = {cp: archive.runs(cp) for cp in archive.partitions()}
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
        self.chosen: dict[int, Run] = {}
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

    def archived(self, cp: int, run: Run, first: int, end: int) -> Iterator[tuple[int, list[LogEntry]]]:
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


def _covers(run: Run, at_ms: int | None, at_offset: int | None) -> bool:
    return (at_ms is not None and at_ms <= run.until) or (at_offset is not None and at_offset < run.end)
