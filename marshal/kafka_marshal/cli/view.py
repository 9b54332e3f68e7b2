"""The state of the log for `status` and `lag`: leases with their silence, lag and speed, as a replica knows them.

A lease's freshness is judged at log time (C1), and log time moves only when somebody writes into the CP. Where all
who wrote are dead it stands still, and their leases look fresh for ever. So beside freshness stands the *silence*:
the broker's time now less the last beat. Kafka tells nobody its time, it only stamps records, so
:class:`BrokerClock` learns it, without writing anything, from a record that somebody appends while we look (members
beat every HI/3); failing that it takes this machine's clock, and says so. Only the option ``--tick`` writes.
"""

from __future__ import annotations

import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kafka_marshal.adapters.interface import Ack, Cluster, TailBatch, TopicInfo
from kafka_marshal.cli.failures import CommandError
from kafka_marshal.cli.stuck import mark_stuck, position_lost
from kafka_marshal.engine.topic_mark import split
from kafka_marshal.errors import AuthorizationError, KafkaUnavailableError
from kafka_marshal.replica import Begin, Replica
from rationalizer import Lease, Tick, World, encode
from rationalizer.limits import NOTHING_DONE, STALE_AFTER_INTERVALS

__all__ = ["BrokerClock", "LeaseRow", "SpeedMeter", "View"]

#: What the reasons begin with under which a position means nothing, and so the lag neither.
POSITION_LOST = "position lost"

#: (group, topic, partition)
LeaseKey = tuple[str, str, int]

#: The longest wait for somebody else's record to learn the broker's time from: a beat at the default HI of 3 s.
LISTEN_S = 1.2

#: A wait for records looks up this often, for Ctrl-C.
_SLICE_S = 0.2


def local_ms() -> float:
    """This machine's idea of the time, milliseconds since 1970."""
    return time.time() * 1000


class BrokerClock:
    """The broker's time, as well as it is known. `source`: "traffic", "tick", or "local" where it was not learned."""

    def __init__(self, now: Callable[[], float] = local_ms) -> None:
        self._now = now
        self._ahead: float | None = None
        self._floor = 0
        self.source = "local"

    def heard(self, stamp_ms: int, source: str = "traffic") -> None:
        """A record appended a moment ago bears this stamp: the broker's time is at least that."""
        ahead = stamp_ms - self._now()
        if self._ahead is None or ahead > self._ahead:
            self._ahead = ahead
        if self.source != "tick":
            self.source = source

    def at_least(self, stamp_ms: int) -> None:
        """An old stamp: the broker's time can't be before it."""
        self._floor = max(self._floor, stamp_ms)

    def now_ms(self) -> int:
        """The broker's time now, milliseconds since 1970."""
        return max(int(self._now() + (self._ahead or 0)), self._floor)

    @property
    def local_is_behind_ms(self) -> int:
        """How much this machine's clock lags behind stamps already seen, at least; 0 where it does not."""
        return max(0, int(self._floor - self._now()), int(self._ahead or 0))


class SpeedMeter:
    """Messages a second of each lease, from how far it was at which log time within a window."""

    def __init__(self, window_ms: int) -> None:
        self._window_ms = window_ms
        self._samples: dict[LeaseKey, deque[tuple[int, int]]] = {}

    def sample(self, world: World) -> None:
        """Note how far the leases of this CP are now."""
        for lease in world.leases():
            key = (lease.group_id, lease.topic, lease.partition)
            samples = self._samples.setdefault(key, deque())
            done = lease.progress.stable + beyond(lease)
            if samples and done < samples[-1][1]:  # repositioned: what was before says nothing about speed
                samples.clear()
            if not samples or world.log_time > samples[-1][0]:
                samples.append((world.log_time, done))
            else:
                samples[-1] = (world.log_time, done)
            while samples[0][0] < world.log_time - self._window_ms and len(samples) > 1:
                samples.popleft()

    def still_ms(self, key: LeaseKey) -> int:
        """For how long of log time nothing was done, as far as the window shows; 0: something was, or nothing shows."""
        samples = self._samples.get(key)
        if not samples:
            return 0
        until, done = samples[-1]
        return until - next((at for at, before in samples if before == done), until)

    def per_second(self, key: LeaseKey) -> float | None:
        """None where the log says too little: fewer than two moments within the window."""
        samples = self._samples.get(key)
        if samples is None or len(samples) < 2:
            return None
        (since, before), (until, after) = samples[0], samples[-1]
        return (after - before) * 1000 / (until - since)


def beyond(lease: Lease) -> int:
    """How many messages are done beyond a gap."""
    return sum(last - first + 1 for first, last in split(lease.progress.ranges).ranges)


@dataclass(frozen=True, slots=True)
class LeaseRow:
    """One lease, or one partition of a group's topic that nobody ever claimed (cp None)."""

    group: str
    topic: str
    partition: int
    cp: int | None = None
    client: str | None = None
    instance: str | None = None
    epoch: int | None = None
    heartbeat_interval_ms: int | None = None
    #: Log time.
    last_beat: int | None = None
    #: At log time (C1).
    freshness: str | None = None
    #: By the broker's clock; None where nobody holds it.
    silence_ms: int | None = None
    stable: int | None = None
    #: Done beyond a gap.
    beyond: int = 0
    #: Not done, but something beyond it is: handed out, or given up.
    in_flight: int = 0
    granted: int | None = None
    #: The data partition's; None: there is no such partition (any more).
    log_start: int | None = None
    log_end: int | None = None
    #: Messages a second; None: not known.
    speed: float | None = None
    #: Why nothing of it is handed out though there is something to read; "": nothing is known against it.
    stuck: str = ""

    @property
    def position(self) -> int:
        """The first offset that is not done."""
        return 0 if self.stable is None else self.stable + 1

    @property
    def lag(self) -> int | None:
        """Offsets in the partition's log that are not done."""
        if self.log_end is None or self.log_start is None or self.stuck.startswith(POSITION_LOST):
            return None
        return max(0, self.log_end - max(self.position, self.log_start) - self.beyond)

    @property
    def overdue(self) -> bool:
        """Held, and silent for longer than its holder may be: at the next record in its CP it counts as stale."""
        limit = STALE_AFTER_INTERVALS * (self.heartbeat_interval_ms or 0)
        return self.silence_ms is not None and self.silence_ms > limit


class View:
    """A replica that is read for people: caught up, its clock learned, its leases as rows."""

    def __init__(self, cluster: Cluster, topic: str, timeout_s: float, window_ms: int = 30_000) -> None:
        self._cluster = cluster
        self.patience_s = timeout_s
        self._window_start = local_ms() - window_ms
        self.replica = Replica(cluster, topic, timeout_s, Begin.SNAPSHOT)
        self.clock = BrokerClock()
        self.meter = SpeedMeter(window_ms)
        #: What each data partition's log reached from and to when last asked.
        self.marks: dict[tuple[str, int], tuple[int, int]] = {}
        #: The topics as the cluster described them then.
        self.topics: dict[str, TopicInfo] = {}

    @property
    def worlds(self) -> dict[int, World]:
        """The world of each CP."""
        return self.replica.worlds

    def catch_up(self, progress: Callable[[int, int], None]) -> None:
        """Read up to the high watermark found at start (*blocking*)."""
        replica = self.replica
        until = time.monotonic() + self.patience_s
        while not replica.caught_up:
            batch = replica.read(_SLICE_S)
            self._apply_in_slices(batch)
            if batch.records or batch.ends:
                until = time.monotonic() + self.patience_s
            elif time.monotonic() > until:
                raise KafkaUnavailableError(
                    f"{replica.topic!r}: nothing read for {self.patience_s:g} s, and partition(s) "
                    f"{sorted(replica.behind)} are not read to their end. Is the broker that leads them reachable?"
                )
            progress(replica.records_read, replica.target_records)
        replica.tell_differences()
        for world in self.worlds.values():
            self.clock.at_least(world.log_time)

    def _apply_in_slices(self, batch: TailBatch) -> None:
        """Old records at once; those of the speed meter's window second by second, with a sample after each."""
        for cp, entries in batch.records.items():
            begin = 0
            for index in range(1, len(entries)):
                stamp, before = entries[index][1], entries[index - 1][1]
                if stamp >= self._window_start and stamp // 1000 != before // 1000:
                    self._apply(cp, entries[begin:index])
                    begin = index
            self._apply(cp, entries[begin:])
        self.replica.apply(TailBatch({}, batch.ends, batch.faults))

    def _apply(self, cp: int, entries: list[tuple[int, int, bytes | None]]) -> None:
        self.replica.apply(TailBatch({cp: entries}))
        if entries[-1][1] >= self._window_start:
            self.meter.sample(self.worlds[cp])

    def follow(self, seconds: float, until: Callable[[], bool] = lambda: False) -> None:
        """Take in what comes for so long, or until something is so; learn the broker's time from it."""
        deadline = time.monotonic() + seconds
        while not until() and (left := deadline - time.monotonic()) > 0:
            batch = self.replica.read(min(left, _SLICE_S))
            for entries in batch.records.values():
                self.clock.heard(entries[-1][1])
                self.clock.at_least(entries[-1][1])
            self.replica.apply(batch)
            for cp in batch.records:
                self.meter.sample(self.worlds[cp])

    def learn_time(self) -> None:
        """Wait a moment for a record that somebody appends now, if anybody's silence is to be told."""
        if any(lease.held for world in self.worlds.values() for lease in world.leases()):
            self.follow(LISTEN_S, until=lambda: self.clock.source != "local")

    def tick(self) -> None:
        """Append a Tick to every CP and wait until it is applied: log time is the broker's time then (T3)."""
        record = Tick(f"status-{uuid.uuid4().hex[:12]}", "kafka-marshal-status", "status")
        appender = self._cluster.appender(self.replica.topic, delivery_timeout_ms=int(self.patience_s * 1000))
        failures: list[str] = []
        forbidden: list[int] = []
        offsets: dict[int, int] = {}

        def answered(cp: int, ack: Ack) -> None:
            if ack.error is not None:
                failures.append(ack.error)
            if ack.forbidden:
                forbidden.append(cp)
            offsets[cp] = -1 if ack.offset is None else ack.offset

        ends = {cp: world.next_offset for cp, world in self.worlds.items() if world.required_level is None}
        try:
            for cp in ends:
                appender.append(cp, encode(record), lambda ack, cp=cp: answered(cp, ack))  # type: ignore[misc]
            left = appender.flush(self.patience_s)
        finally:
            appender.close()
        if failures or left:
            kind = AuthorizationError if forbidden else CommandError
            needs = " It takes an ACL that allows WRITE on the topic." if forbidden else ""
            raise kind(
                f"no Tick could be appended ({'; '.join(sorted(set(failures))) or 'no answer in time'}). Nothing else "
                f"was changed. Without --tick, status only reads.{needs}"
            )
        wanted = {cp: max(offset + 1, ends[cp] + 1) for cp, offset in offsets.items()}

        def seen() -> bool:
            return all(self.worlds[cp].next_offset >= at for cp, at in wanted.items())

        self.follow(self.patience_s, seen)
        if not seen():
            raise KafkaUnavailableError(
                f"the Ticks were appended to {self.replica.topic!r}, but could not be read within {self.patience_s:g} s"
                ": try again."
            )
        for world in self.worlds.values():
            self.clock.heard(world.log_time, "tick")

    def look_at_data(self, groups: Iterable[str] | None = None) -> None:
        """Ask where the logs of all claimed topics begin and end (*blocking*)."""
        wanted = None if groups is None else set(groups)
        topics = {
            lease.topic
            for world in self.worlds.values()
            for lease in world.leases()
            if wanted is None or lease.group_id in wanted
        }
        infos = self._cluster.topic_info(topics, self.patience_s) if topics else {}
        self.topics = infos
        partitions = [
            (name, number)
            for name, info in infos.items()
            for number in range(info.partitions)
            if number not in info.leaderless
        ]
        self.marks = self._cluster.watermarks(partitions, self.patience_s) if partitions else {}

    def rows(self, group: str | None = None) -> list[LeaseRow]:
        """All leases ever granted and not forgotten (of one group), sorted by group, topic, partition."""
        now_ms = self.clock.now_ms()
        rows = [
            self._row(world, lease, now_ms)
            for world in self.worlds.values()
            for lease in world.leases()
            if group is None or lease.group_id == group
        ]
        return sorted(rows, key=lambda row: (row.group, row.topic, row.partition))

    def unclaimed(self, rows: list[LeaseRow]) -> list[LeaseRow]:
        """Partitions of the topics of these leases that their group never claimed."""
        claimed = {(row.group, row.topic, row.partition) for row in rows}
        pairs = {(row.group, row.topic) for row in rows}
        return [
            LeaseRow(group, topic, partition, log_start=low, log_end=high)
            for group, name in sorted(pairs)
            for (topic, partition), (low, high) in sorted(self.marks.items())
            if topic == name and (group, topic, partition) not in claimed
        ]

    def _row(self, world: World, lease: Lease, now_ms: int) -> LeaseRow:
        progress = lease.progress
        done_beyond = beyond(lease)
        ranges, topic_marks = split(progress.ranges)
        low, high = self.marks.get((lease.topic, lease.partition), (None, None))
        return LeaseRow(
            group=lease.group_id,
            topic=lease.topic,
            partition=lease.partition,
            cp=world.partition,
            client=lease.client_id,
            instance=lease.instance_id,
            epoch=lease.epoch,
            heartbeat_interval_ms=lease.heartbeat_interval_ms,
            last_beat=lease.last_beat,
            freshness=lease.freshness(world.log_time),
            silence_ms=max(0, now_ms - lease.last_beat) if lease.held else None,
            stable=None if progress.stable == NOTHING_DONE else progress.stable,
            beyond=done_beyond,
            in_flight=ranges[-1][1] - progress.stable - done_beyond if ranges else 0,
            granted=None if progress.granted == NOTHING_DONE else progress.granted,
            log_start=low,
            log_end=high,
            speed=self.meter.per_second((lease.group_id, lease.topic, lease.partition)),
            stuck=self._why_stuck(lease, topic_marks, high),
        )

    def _why_stuck(self, lease: Lease, topic_marks: frozenset[int], log_end: int | None) -> str:
        topic = self.topics.get(lease.topic)
        if topic is None or lease.partition >= topic.partitions:
            return ""
        if lease.partition in topic.leaderless:
            return "no leader: nobody can read or write it"
        return position_lost(topic, topic_marks, lease.progress.stable + 1, log_end)

    def with_stuck(self, rows: list[LeaseRow]) -> list[LeaseRow]:
        """The same rows; those that stand still say why, as far as reading their next message shows (*blocking*)."""
        return mark_stuck(self._cluster, rows, self.meter)

    def notes_on_upgrades(self) -> list[str]:
        """Which CPs this release can't follow any further (E4)."""
        return [
            f"partition {cp} of the log was raised to level {level}, which this release does not know: what is shown "
            "of it is of before that. Install a newer release."
            for cp, level in sorted(self.replica.stopped())
        ]

    def standing_still(self) -> dict[int, tuple[int, int]]:
        """CPs whose log time lags behind the broker's by more than a holder's HI: (ms behind, leases held there)."""
        now_ms = self.clock.now_ms()
        still: dict[int, tuple[int, int]] = {}
        for cp, world in self.worlds.items():
            held = [lease.heartbeat_interval_ms for lease in world.leases() if lease.held]
            if held and now_ms - world.log_time > max(held):
                still[cp] = (now_ms - world.log_time, len(held))
        return still
