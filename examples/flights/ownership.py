"""Who owned which partition when: concluded from the coordination log, by replaying it, and from nothing else.

Times are log time (the broker's stamps, ms). A tenure is one holder's time with one epoch; it ends when the holder
releases the lease (C8), or when another worker is granted it, the holder having been silent for more than twice its
heartbeat interval (C1, C3). A watchdog's release is in the holder's name and looks like its own: only who knows that
the holder was dead can know it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import Final

from rationalizer import Outcome, ReleasingPartition, World
from rationalizer.dump import DumpHeader, DumpReader, DumpRecord
from rationalizer.history import End, LeaseKey, Owners, Span

__all__ = ["Change", "History", "Takeover", "history_of", "read_dump"]

#: What a dead worker had sent may be stamped this much later, in another CP, than its watchdog's releases (ms).
_LATE_MS: Final = 100


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
    #: Since the release, by the old holder or its watchdog: how long it had no owner; None where there was none.
    vacant_ms: int | None


@dataclass(slots=True)
class History:
    """The tenures of one topic in one group, fed with what a replay concludes, record by record."""

    group_id: str
    topic: str
    #: Partition → tenures, in order.
    tenures: dict[int, list[Span]] = field(default_factory=dict)
    #: (log time, holder, rows newly reported as done): how the work went, as the log shows it.
    progress: list[tuple[int, str, int]] = field(default_factory=list)
    _owners: Owners = field(default_factory=Owners)
    _stable: dict[int, int] = field(default_factory=dict)
    #: instance_id → log time of the last that it said and that took effect, but for releases.
    _alive_ms: dict[str, int] = field(default_factory=dict)

    def observe(self, world: World, outcome: Outcome) -> None:
        """Take in one record, which this world has just applied."""
        if not outcome.accepted:
            return
        record = outcome.record
        if not isinstance(record, ReleasingPartition):
            instance_id = getattr(record, "instance_id", "")
            # CPs may come one after the other: a log is not read in the order of its times.
            self._alive_ms[instance_id] = max(outcome.log_time, self._alive_ms.get(instance_id, 0))
        for key in sorted(set(self._owners.touched(outcome))):
            if key[:2] == (self.group_id, self.topic):
                self._see(key, world, outcome)

    def _see(self, key: LeaseKey, world: World, outcome: Outcome) -> None:
        current, lease = self._owners.now.get(key), world.lease(*key)
        if current is not None and current.held and lease is not None:
            before, now = self._stable.get(lease.partition, -1), lease.progress.stable
            if now > before:
                self.progress.append((outcome.log_time, current.client_id, now - before))
                self._stable[lease.partition] = now
        begun = self._owners.see(key, world, outcome)
        if begun is not None and begun.held:
            self.tenures.setdefault(begun.partition, []).append(begun)

    def holders(self) -> dict[int, str]:
        """Partition → who holds it now."""
        return {p: t[-1].client_id for p, t in sorted(self.tenures.items()) if t and t[-1].ended is End.OPEN}

    def all_tenures(self) -> list[Span]:
        """All of them, by partition and time."""
        return [tenure for _, tenures in sorted(self.tenures.items()) for tenure in tenures]

    def takeovers(self, watched: Collection[str] = ()) -> list[Takeover]:
        """Every change from one holder to another, in order of time.

        watched: client_ids of those that died and had a watchdog.
        """
        found = []
        for tenures in self.tenures.values():
            for old, new in pairwise(tenures):
                released = old.until if old.ended is End.RELEASED else None
                change = Change.SILENT if released is None else Change.HANDED_OVER
                if old.client_id in watched and self._is_last_word(old):
                    change = Change.WATCHDOG
                found.append(
                    Takeover(
                        partition=new.partition,
                        old=old.client_id,
                        new=new.client_id,
                        change=change,
                        at_ms=new.since,
                        since_last_beat_ms=new.since - old.last_beat,
                        vacant_ms=None if released is None else new.since - released,
                    )
                )
        return sorted(found, key=lambda each: (each.at_ms, each.partition))

    def _is_last_word(self, tenure: Span) -> bool:
        """Whether it was released without a word on offsets, and nothing was heard of its holder after that.

        Not by comparing with the moment of death: that is by another clock than the broker's.
        """
        if tenure.until is None or not tenure.wordless:
            return False
        return tenure.until >= self._alive_ms.get(tenure.instance_id, 0) - _LATE_MS

    def overlaps(self) -> list[tuple[Span, Span]]:
        """Pairs of tenures of one partition that overlap in log time: must be none, by construction of the protocol."""
        return [
            (old, new)
            for tenures in self.tenures.values()
            for old, new in pairwise(tenures)
            if old.until is None or old.until > new.since
        ]


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
