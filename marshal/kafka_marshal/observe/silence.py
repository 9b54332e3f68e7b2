"""Whether all members of a group fell silent together, as they do if Kafka hangs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from kafka_marshal.observe.rows import AllSilent, LeaseRow
from kafka_marshal.observe.text import span, time_text
from rationalizer.limits import MIN_HEARTBEAT_INTERVAL_MS, STALE_AFTER_INTERVALS
from rationalizer.routing import route_group

#: The longest interval of those at work is looked up again after this many records.
_EVERY = 1_000

#: After an outage a member's client may need this long (ms), and two intervals, to connect and write again: it gives up
#: a connection that a hanging broker accepted after five seconds, and its requests after as many.
_BACK_MS = 10_000


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

    def alive_ms(self, cp: int, interval_ms: int, now_ms: int) -> int:
        """The longest silence (ms) that makes no member with this interval gone just after an outage; 0: none was."""
        for each in reversed(self._found.get(cp, ())):
            if now_ms - each.end > _BACK_MS + STALE_AFTER_INTERVALS * interval_ms:
                break
            if each.members > 1:
                return now_ms - each.begin + interval_ms
        return 0

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


#: What is judged is said to be of a moment before if that is longer ago (ms).
_LATE_MS = 2_000

if TYPE_CHECKING:
    from kafka_marshal.observe.fold import Worker
    from kafka_marshal.observe.meter import BrokerClock
    from kafka_marshal.ports import LogEntry
    from rationalizer import Group, World


@dataclass(frozen=True, slots=True)
class Heard:
    """The members of a group: instance → last record (log time, ms) and interval; and the CPs where holders write."""

    members: dict[str, tuple[int, int]] = field(default_factory=dict)
    cps: set[int] = field(default_factory=set)

    @staticmethod
    def of(rows: Iterable[LeaseRow], coordinated: Iterable[Group], workers: Iterable[Worker]) -> dict[str, Heard]:
        """Of each group with a holder: holders, members without a partition, and workers that wait for one."""
        found: dict[str, Heard] = {}
        for row in rows:
            if row.cp is not None and row.client is not None:
                of_group = found.setdefault(row.group, Heard())
                of_group.cps.add(row.cp)
                of_group.note(row.instance, row.last_beat, row.heartbeat_interval_ms)
                for each in row.sharers:
                    of_group.note(each.instance_id, each.last_beat, each.heartbeat_interval_ms)
        for group in coordinated:
            for member in group.members.values() if group.group_id in found else ():
                half = (member.session_timeout_ms + 1) // 2
                found[group.group_id].note(member.instance_id, member.last_beat, half)
        for run in workers:
            if run.group in found and (run.waits or run.instance in found[run.group].members):
                found[run.group].note(run.instance, run.last_at, run.interval_ms)
        return found

    def note(self, instance: str | None, last: int | None, interval_ms: int | None) -> None:
        """Take in one of its records."""
        before = self.members.get(instance or "", (0, 0))
        self.members[instance or ""] = max(before[0], last or 0), before[1] or interval_ms or 0


def all_silent(heard: Heard, log_times: Mapping[int, int], now_ms: int, kafka_ms: float | None) -> AllSilent | None:
    """Whether all members of a group fell silent together with their part of the log; None: not so.

    log_times: of all CPs (ms).
    """
    since = max(last for last, _ in heard.members.values())
    together = [interval for last, interval in heard.members.values() if since - last <= interval]
    longest = max(together)
    if now_ms - since <= STALE_AFTER_INTERVALS * longest:
        return None
    others = heard.cps if len(together) > 1 else log_times
    if any(log_times[cp] > since + longest for cp in others):
        return None
    return AllSilent(since, now_ms - since, len(together), now_ms - since + longest, kafka_ms)


@dataclass(slots=True)
class Silence:
    """What is known of a log's silence, and when it is judged."""

    clock: BrokerClock
    standstills: Standstills = field(default_factory=Standstills)
    #: CP → timestamp of its last record.
    stamps: dict[int, int] = field(default_factory=dict)
    #: The broker's time (ms) up to which the log was read: silence is judged then, however long look-ups take.
    judged_at: int | None = None
    #: How long (ms) Kafka took to answer the last look-ups; None: none yet.
    kafka_ms: float | None = None
    #: Those whose members are all silent.
    groups: dict[str, AllSilent] = field(default_factory=dict)

    def now_ms(self) -> int:
        """The broker's time (ms) at which silence is judged."""
        return self.clock.now_ms() if self.judged_at is None else self.judged_at

    def stood_ms(self, world: World, since: int) -> int:
        """How long (ms) a partition of the log has been silent since that log time: it counts for no member."""
        return self.standstills.lasting(world, since, self.now_ms())

    def worked_ms(self, world: World, since: int, as_of_ms: int) -> int:
        """How long (ms) ago that was, less the time in which the log was silent, or is not known."""
        return max(0, self.now_ms() - since - self.stood_ms(world, since) - as_of_ms)

    def judge(
        self,
        rows: list[LeaseRow],
        coordinated: Iterable[Group],
        workers: Iterable[Worker],
        log_times: Mapping[int, int],
    ) -> list[LeaseRow]:
        """Find the groups whose members fell silent together; the rows, with the silence that makes no member gone."""
        heard = Heard.of(rows, coordinated, workers).items()
        found = {name: all_silent(each, log_times, self.now_ms(), self.kafka_ms) for name, each in heard}
        self.groups = {name: each for name, each in found.items() if each is not None}
        most = {name: each.most_ms for name, each in self.groups.items() if each.may_live}
        return [replace(row, with_all_ms=most.get(row.group) or self._alive_ms(row)) for row in rows]

    def _alive_ms(self, row: LeaseRow) -> int:
        held = row.client is not None and row.cp is not None
        return self.standstills.alive_ms(row.cp or 0, row.heartbeat_interval_ms or 0, self.now_ms()) if held else 0

    def notes(self) -> list[str]:
        """At which moment of the log all is judged, if that is a while ago."""
        late_ms = self.clock.now_ms() - self.now_ms()
        note = (
            f"judged as of {time_text(self.now_ms())}, {span(late_ms)} ago: Kafka took that long to be asked the rest"
        )
        return [note] if late_ms > _LATE_MS else []
