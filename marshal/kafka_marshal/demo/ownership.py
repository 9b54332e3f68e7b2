"""Who owned which partition when: concluded from the coordination log, by replaying it, and from nothing else.

Times are log time (the broker's stamps, ms). A tenure is one holder's time with one epoch; it ends when the holder
releases the lease (C8), or when somebody else is granted it, the holder having been silent for more than twice its
heartbeat interval (C1, C3). A watchdog's release is in the holder's name and looks like its own: only who knows that
the holder was dead can tell it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import Final

from rationalizer import HeartbeatBatch, Lease, Outcome, ReleasingPartition, World
from rationalizer.dump import DumpHeader, DumpReader, DumpRecord, header_line, record_line

__all__ = ["Change", "End", "History", "Takeover", "Tenure", "history_of", "read_dump", "write_dump"]

#: What a dead worker had sent may be stamped so much later, in another CP, than its watchdog's releases (ms).
_LATE_MS: Final = 100


class End(StrEnum):
    """How a tenure ended."""

    OPEN = "open"
    RELEASED = "released"
    REPLACED = "replaced"


@dataclass(slots=True)
class Tenure:
    """One holder's time with a partition."""

    partition: int
    client_id: str
    instance_id: str
    epoch: int
    since_ms: int
    #: Log time of its last accepted beat, or of its claim.
    last_beat_ms: int
    #: None while it lasts.
    until_ms: int | None = None
    end: End = End.OPEN
    #: Its release said nothing of offsets: a watchdog's never does, its own does only where there is something to say.
    wordless: bool = False


class Change(StrEnum):
    """How a partition came to a new holder."""

    #: The old holder released it.
    HANDED_OVER = "handed over"
    #: The old holder was dead, and its watchdog released it in its name.
    WATCHDOG = "released by its watchdog"
    #: The old holder was silent for more than twice its heartbeat interval.
    SILENT = "taken over"


@dataclass(frozen=True, slots=True)
class Takeover:
    """A partition changed hands."""

    partition: int
    old: str
    new: str
    change: Change
    #: Log time of the new holder's claim.
    at_ms: int
    #: Since the old holder's last beat.
    since_last_beat_ms: int
    #: Since the release, by the old holder or its watchdog: how long it had nobody; None where there was none.
    vacant_ms: int | None


@dataclass(slots=True)
class History:
    """The tenures of one topic in one group, fed with what a replay concludes, record by record."""

    group_id: str
    topic: str
    #: Partition → tenures, in order.
    tenures: dict[int, list[Tenure]] = field(default_factory=dict)
    #: (log time, holder, rows newly reported as done): how the work went, as the log tells it.
    progress: list[tuple[int, str, int]] = field(default_factory=list)
    _stable: dict[int, int] = field(default_factory=dict)
    #: instance_id → log time of the last that it said and that took effect, but for releases.
    _alive_ms: dict[str, int] = field(default_factory=dict)

    def observe(self, world: World, outcome: Outcome) -> None:
        """Take in one record, which this world has just applied."""
        if not outcome.accepted:
            return
        record = outcome.record
        wordless = False
        if isinstance(record, ReleasingPartition):
            wordless = record.last_offset is None
        else:
            instance_id = getattr(record, "instance_id", "")
            # CPs may come one after the other: a log is not read in the order of its times.
            self._alive_ms[instance_id] = max(outcome.log_time, self._alive_ms.get(instance_id, 0))
        if isinstance(record, HeartbeatBatch):
            named = {(entry.topic, entry.partition) for entry in record.entries}
        else:
            named = {(getattr(record, "topic", ""), getattr(record, "partition", -1))}
        for topic, partition in sorted(named):
            lease = world.lease(self.group_id, topic, partition) if topic == self.topic else None
            if lease is not None:
                self._see(lease, outcome.log_time, wordless)

    def _see(self, lease: Lease, log_time: int, wordless: bool) -> None:
        tenures = self.tenures.setdefault(lease.partition, [])
        current = tenures[-1] if tenures and tenures[-1].end is End.OPEN else None
        if current is not None:
            self._count(current.client_id, lease, log_time)
        if current is not None and (lease.epoch != current.epoch or not lease.held):
            current.until_ms = log_time
            current.end = End.REPLACED if lease.held else End.RELEASED
            current.wordless = wordless
            current = None
        if current is not None:
            current.last_beat_ms = lease.last_beat
        elif lease.client_id is not None and lease.instance_id is not None:
            tenures.append(
                Tenure(lease.partition, lease.client_id, lease.instance_id, lease.epoch, log_time, lease.last_beat)
            )

    def _count(self, client_id: str, lease: Lease, log_time: int) -> None:
        before, now = self._stable.get(lease.partition, -1), lease.progress.stable
        if now > before:
            self.progress.append((log_time, client_id, now - before))
            self._stable[lease.partition] = now

    def holders(self) -> dict[int, str]:
        """Partition → who holds it now."""
        return {p: t[-1].client_id for p, t in sorted(self.tenures.items()) if t and t[-1].end is End.OPEN}

    def all_tenures(self) -> list[Tenure]:
        """All of them, by partition and time."""
        return [tenure for _, tenures in sorted(self.tenures.items()) for tenure in tenures]

    def takeovers(self, watched: Collection[str] = ()) -> list[Takeover]:
        """Every change from one holder to another, in order of time.

        watched: client_ids of those that died and had a watchdog.
        """
        found = []
        for tenures in self.tenures.values():
            for old, new in pairwise(tenures):
                released = old.until_ms if old.end is End.RELEASED else None
                change = Change.SILENT if released is None else Change.HANDED_OVER
                if old.client_id in watched and self._is_last_word(old):
                    change = Change.WATCHDOG
                found.append(
                    Takeover(
                        partition=new.partition,
                        old=old.client_id,
                        new=new.client_id,
                        change=change,
                        at_ms=new.since_ms,
                        since_last_beat_ms=new.since_ms - old.last_beat_ms,
                        vacant_ms=None if released is None else new.since_ms - released,
                    )
                )
        return sorted(found, key=lambda each: (each.at_ms, each.partition))

    def _is_last_word(self, tenure: Tenure) -> bool:
        """Whether it was released without a word on offsets, and nothing was heard of its holder after that.

        Not by comparing with the moment of death: that is by another clock than the broker's.
        """
        if tenure.until_ms is None or not tenure.wordless:
            return False
        return tenure.until_ms >= self._alive_ms.get(tenure.instance_id, 0) - _LATE_MS

    def overlaps(self) -> list[tuple[Tenure, Tenure]]:
        """Pairs of tenures of one partition that overlap in log time: must be none, by construction of the protocol."""
        return [
            (old, new)
            for tenures in self.tenures.values()
            for old, new in pairwise(tenures)
            if old.until_ms is None or old.until_ms > new.since_ms
        ]


def write_dump(path: Path, header: DumpHeader, records: Iterable[DumpRecord]) -> None:
    """Write a dump (D1), which ``kafka-marshal replay`` reads, too."""
    with path.open("w", encoding="utf-8") as file:
        file.write(header_line(header) + "\n")
        file.writelines(record_line(record) + "\n" for record in records)


def read_dump(path: Path) -> tuple[DumpHeader, list[DumpRecord]]:
    """Header and records of a dump. Raises rationalizer.dump.DumpError."""
    with path.open("rb") as lines:
        reader = DumpReader(lines)
        return reader.header, list(reader)


def history_of(header: DumpHeader, records: Iterable[DumpRecord], group_id: str, topic: str) -> History:
    """Replay a whole log from its beginning."""
    worlds = {cp: World(cp, header.partitions) for cp in range(header.partitions)}
    history = History(group_id, topic)
    for cp, offset, timestamp_ms, value in records:
        history.observe(worlds[cp], worlds[cp].apply(offset, timestamp_ms, value))
    return history
