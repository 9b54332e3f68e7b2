"""Outages of the log: spans without any record, though members were at work there. They are no member's silence.

Each member at work writes several times in its heartbeat interval. If none does for longer than the longest interval
of them, the log was silent: Kafka, the network, or the machine that they all run on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from kafka_marshal.observe.text import span
from rationalizer import route_group
from rationalizer.limits import MIN_HEARTBEAT_INTERVAL_MS

if TYPE_CHECKING:
    from kafka_marshal.ports import LogEntry
    from rationalizer import World

#: A lasting silence of all members counts as an outage for this long (ms); then they are gone, whatever the cause.
LONGEST_MS = 600_000

#: The longest interval of those at work is looked up again after this many records.
_EVERY = 1_000


class Standstill(NamedTuple):
    """A span of log time (ms) without a record, and how many members were at work before it."""

    begin: int
    end: int
    members: int


class Standstills:
    """The standstills of each coordination partition, from its records."""

    def __init__(self) -> None:
        self._found: dict[int, list[Standstill]] = {}
        #: CP → the longest interval (ms) of those at work, and up to which offset it is taken for that.
        self._longest: dict[int, tuple[int, int]] = {}

    def patience_ms(self, world: World) -> float:
        """The longest interval (ms) of those at work at its log time; infinite: none is."""
        longest, until = self._longest.get(world.partition, (0, -1))
        if world.next_offset > until:
            longest = max((interval for _, interval in _at_work(world)), default=0)
            self._longest[world.partition] = longest, world.next_offset + _EVERY
        return longest or inf

    def see(self, world: World, stamp_ms: int) -> Standstill | None:
        """A record with this timestamp is about to be applied; how long the log was silent before it (None: no)."""
        gap = stamp_ms - world.log_time
        if gap <= MIN_HEARTBEAT_INTERVAL_MS or not world.next_offset or gap <= self.patience_ms(world):
            return None
        found = _standstill(world, stamp_ms)
        if found is not None:
            self._found.setdefault(world.partition, []).append(found)
        return found

    def runs(self, world: World, entries: list[LogEntry]) -> Iterator[list[LogEntry]]:
        """The records of a partition, cut where it was silent; each run is applied before the next."""
        begin, patience_ms = 0, self.patience_ms(world)
        for end, (_, stamp, _) in enumerate(entries[1:], 1):
            if stamp - entries[end - 1][1] > patience_ms:
                self.see(world, entries[begin][1])
                yield entries[begin:end]
                begin = end
        self.see(world, entries[begin][1])
        yield entries[begin:] if begin else entries

    def within(self, cp: int, since: int, until: int, least: int = 1) -> int:
        """How long (ms) the partition was silent between these log times, where at least that many were at work."""
        total = 0
        for each in reversed(self._found.get(cp, ())):
            if each.end <= since:
                break
            if each.members >= least and each.begin < until:
                total += min(until, each.end) - max(since, each.begin)
        return total

    def lasting(self, world: World, since: int, now_ms: int) -> int:
        """How much (ms) of the time since this log time it has been silent, with the standstill that lasts."""
        found = _standstill(world, now_ms)
        lasts = 0 if found is None else found.end - max(found.begin, since)
        return self.within(world.partition, since, now_ms) + max(0, lasts)


def _standstill(world: World, until: int) -> Standstill | None:
    """The span from the world's last record, if it is longer than the interval of each that was at work."""
    writers = list(_at_work(world))
    if not writers or until - world.log_time <= max(interval for _, interval in writers):
        return None
    return Standstill(world.log_time, until, len({name for name, _ in writers}))


def _at_work(world: World) -> Iterator[tuple[str, int]]:
    """(instance, interval in ms) of those that were heard within their interval, at the log time of this world."""
    log_time = world.log_time
    for lease in world.leases():
        for each in (lease, *(lease.shares or ())):
            if each.instance_id is not None and log_time - each.last_beat <= each.heartbeat_interval_ms:
                yield each.instance_id, each.heartbeat_interval_ms
    for group in world.groups():
        if world.partition == route_group(group.group_id, world.partitions):
            for member in group.members.values():
                if log_time - member.last_beat <= (half := (member.session_timeout_ms + 1) // 2):
                    yield member.instance_id, half


def outage_text(found: Standstill | None) -> str:
    """An outage of the log in words; "": none, or one member alone was silent."""
    if found is None or found.members < 2:
        return ""
    return f"after an outage: nothing came to this partition of the log for {span(found.end - found.begin)}"


def silence_text(silence_ms: float, stood_ms: int) -> str:
    """How long a member was silent, in words, and how much of that the whole log was silent."""
    if not stood_ms:
        return span(silence_ms)
    return f"{span(silence_ms)} (an outage: nothing came to the log for {span(stood_ms)} of that)"


@dataclass(frozen=True, slots=True)
class AllSilent:
    """All members of a group have been silent since the same moment, and so has their log."""

    #: The last record of any of them, log time (ms), and how long ago that is.
    since: int
    ms: int
    members: int
    #: Those with a longer silence (ms) were gone before.
    most_ms: int
    #: How long (ms) Kafka took to answer this command's look-ups; None: it asked nothing.
    kafka_ms: float | None

    @property
    def may_live(self) -> bool:
        """Whether they may all be at work: of one alone, or after long, the log says what it says of a dead one."""
        return self.members > 1 and self.ms < LONGEST_MS
