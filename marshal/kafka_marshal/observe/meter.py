"""What is learned while a log is read: the broker's time, the speed of positions, and when all fell silent together.

That happens if Kafka hangs: then no member is gone.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf, prod
from typing import TYPE_CHECKING, NamedTuple

from kafka_marshal.engine.work.topic_mark import split
from kafka_marshal.observe.rows import WINDOW_MS, AllSilent, LeaseRow
from kafka_marshal.observe.text import local_ms, span, time_text
from rationalizer.groups.group import done_in, pieces_of
from rationalizer.groups.history import owner_names
from rationalizer.limits import MIN_HEARTBEAT_INTERVAL_MS, NOTHING_DONE, STALE_AFTER_INTERVALS
from rationalizer.routing import route_group

if TYPE_CHECKING:
    from kafka_marshal.observe.fold import WorkerInstance
    from kafka_marshal.ports import LogEntry
    from rationalizer import Group, World

#: The longest wait for a record that shows the broker's time (s): a heartbeat at the default interval of 3 s.
LISTEN_S = 1.2

#: Members at work are silent for long enough if chance alone would do that once in this many times.
UNLIKELY = 10_000

#: Waits are chosen in these steps (s).
STEP_S = 0.05

#: (group, topic, partition, the first of its key hashes)
LeaseKey = tuple[str, str, int, int]


def beyond(ranges: Sequence[tuple[int, int]]) -> int:
    """The number of messages done beyond a gap."""
    return sum(last - first + 1 for first, last in split(ranges).ranges)


def _standings(world: World) -> Iterator[tuple[LeaseKey, int, int, int, str | None]]:
    """(key, epoch, stable, messages done, owner) of each lease, and of each piece of a coordinated group."""
    for lease in world.leases():
        key, progress = (lease.group_id, lease.topic, lease.partition), lease.progress
        more = beyond(progress.ranges)
        if lease.shares is None or lease.shares.by_batches:
            yield (*key, 0), lease.epoch, progress.stable, progress.stable + more, lease.client_id
            continue
        for lo, hi, share in lease.shares.parts():
            stable, part = progress.floor([(lo, hi)]), share or lease
            yield (*key, lo), part.epoch, stable, stable + more, part.client_id
    for group in world.groups():
        for topic, partition in group.partitions():
            kept = group.kept(topic, partition)
            more = 0 if kept is None else beyond(kept.progress.ranges)
            for piece in pieces_of(group, topic, partition):
                stable = done_in(group, topic, partition, piece.lo, piece.hi)
                owner = owner_names(group, piece.owner)[0]
                yield (group.group_id, topic, partition, piece.lo), piece.since, stable, stable + more, owner


def listening_s(intervals: Sequence[float]) -> float:
    """How long (s) to listen: if processes are at work that write at these intervals (s), a record will have come.

    They write at different moments, so of many one is heard soon.
    """
    for step in range(1, int(LISTEN_S / STEP_S)):
        waited = step * STEP_S
        if prod(max(0.0, 1 - waited / each) for each in intervals) < 1 / UNLIKELY:
            return waited
    return LISTEN_S


class BrokerClock:
    """The broker's time as far as known. `source`: "traffic", "tick", or "local" if no record has shown it."""

    def __init__(self, now: Callable[[], float] = local_ms) -> None:
        self._now = now
        self._ahead: float | None = None
        self._floor = 0
        self.source: str = "local"
        #: Since when new records are read (monotonic, s).
        self.listens_since: float = time.monotonic()

    def heard(self, stamp_ms: int, source: str = "traffic") -> None:
        """A record appended just now has this timestamp (ms): the broker's time is at least that."""
        ahead = stamp_ms - self._now()
        if self._ahead is None or ahead > self._ahead:
            self._ahead = ahead
        if self.source != "tick":
            self.source = source

    def at_least(self, stamp_ms: int) -> None:
        """An older record has this timestamp (ms): the broker's time is not before it."""
        self._floor = max(self._floor, stamp_ms)

    def now_ms(self) -> int:
        """The broker's time now (ms since 1970)."""
        return max(int(self._now() + (self._ahead or 0)), self._floor)

    @property
    def local_is_behind_ms(self) -> int:
        """At least this much (ms) this machine's clock is behind timestamps already seen; 0: it is not."""
        return max(0, int(self._floor - self._now()), int(self._ahead or 0))


@dataclass(slots=True)
class Track:
    """One lease at the last sample. Times are log time (ms)."""

    epoch: int
    done: int
    #: When its position moved last, or the first sample; and the first sample with this epoch.
    moved_at: int
    granted_at: int
    #: Whether the holder was a worker: what an admin writes during its pause is no handled message.
    works: bool = False
    #: Whether the position moved between two samples; if not, `moved_at` is the first sample.
    has_moved: bool = False
    #: The last offset up to which all is done; since when; whether it moved between two samples.
    stable: int = NOTHING_DONE
    stable_at: int = 0
    stable_moved: bool = False
    #: Messages handled, counted since the first sample.
    handled: int = 0
    #: (log time, handled) of this epoch, within the window.
    samples: deque[tuple[int, int]] = field(default_factory=deque)
    #: (log time, next offset) at each change: the last one before the window of verdicts, and those within it.
    positions: deque[tuple[int, int]] = field(default_factory=deque)

    def positions_since(self, since: int) -> list[int]:
        """The next offsets since that log time (ms), the first one as of then; []: not known."""
        if not self.positions or self.positions[0][0] > since:
            return []
        first = max(index for index, (at, _) in enumerate(self.positions) if at <= since)
        return [position for _, position in list(self.positions)[first:]]

    @property
    def per_second(self) -> float | None:
        """Speed of the present holder; None: fewer than two samples within the window."""
        if len(self.samples) < 2:
            return None
        (since, before), (until, after) = self.samples[0], self.samples[-1]
        return (after - before) * 1000 / (until - since)


#: Of a lease without a sample.
_UNKNOWN = Track(0, 0, 0, 0)


class RateMeter:
    """Messages per second of each lease, and since when it makes no progress, from samples of the worlds."""

    def __init__(self, window_ms: int) -> None:
        self._window_ms = window_ms
        self._tracks: dict[LeaseKey, Track] = {}

    def sample(self, world: World) -> None:
        """Record the positions of all groups in this coordination partition."""
        for key, epoch, stable, done, owner in _standings(world):
            track = self._tracks.get(key)
            if track is None:
                track = Track(epoch, done, world.log_time, world.log_time, stable=stable, stable_at=world.log_time)
                self._tracks[key] = track
            else:
                self._follow(track, epoch, stable, done, world.log_time)
            pause = world.pause(key[0])
            pauser = None if pause is None else pause.client_id
            track.works = owner is not None and owner != pauser
            positions = track.positions
            if not positions or positions[-1][1] != stable + 1:
                positions.append((world.log_time, stable + 1))
            while len(positions) > 1 and positions[1][0] <= world.log_time - WINDOW_MS:
                positions.popleft()
            samples = track.samples
            if not samples or world.log_time > samples[-1][0]:
                samples.append((world.log_time, track.handled))
            else:
                samples[-1] = (world.log_time, track.handled)
            while samples[0][0] < world.log_time - self._window_ms and len(samples) > 1:
                samples.popleft()

    @staticmethod
    def _follow(track: Track, epoch: int, stable: int, done: int, log_time: int) -> None:
        # The first position of a partition is its consumer's start, not work.
        began = track.done == NOTHING_DONE != stable
        if epoch != track.epoch:  # another holder has another speed
            track.epoch, track.granted_at = epoch, log_time
            track.samples.clear()
        elif done < track.done or began:
            track.samples.clear()
        elif track.works:
            track.handled += done - track.done
        if stable != track.stable:
            track.stable, track.stable_at, track.stable_moved = stable, log_time, True
        if done != track.done:
            track.done, track.moved_at, track.has_moved = done, log_time, True

    def track(self, key: LeaseKey) -> Track:
        """What is known of a lease."""
        return self._tracks.get(key, _UNKNOWN)


# -- whether all members of a group fell silent together -----------------------------------------------------

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
                if log_time - member.last_beat <= member.heartbeat_interval_ms:
                    yield member.instance_id, member.heartbeat_interval_ms


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


@dataclass(frozen=True, slots=True)
class Heard:
    """The members of a group: instance → last record (log time, ms) and interval; and the CPs where holders write."""

    members: dict[str, tuple[int, int]] = field(default_factory=dict)
    cps: set[int] = field(default_factory=set)

    @staticmethod
    def of(
        rows: Iterable[LeaseRow], coordinated: Iterable[Group], workers: Iterable[WorkerInstance]
    ) -> dict[str, Heard]:
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
                found[group.group_id].note(member.instance_id, member.last_beat, member.heartbeat_interval_ms)
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
        workers: Iterable[WorkerInstance],
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
