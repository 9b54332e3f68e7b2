"""The state of the log now: leases with their silence, lag and speed, as a replica knows them.

A lease's freshness is judged at log time (C1), which moves only when a record is appended to the CP. If all writers are
dead, log time stops, and their leases look fresh for ever. So rows also have the *silence*: the broker's time now less
the last heartbeat. Brokers do not report their time, they only stamp records. :class:`BrokerClock` learns it from a
record that is appended meanwhile (members beat every HI/3), else it uses this machine's clock and says so. Only the
option ``--tick`` writes.
"""

from __future__ import annotations

import time
import uuid
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from math import inf
from operator import itemgetter
from typing import TYPE_CHECKING

from kafka_marshal.client.view import holdings
from kafka_marshal.engine.work.topic_mark import POSITION_LOST, kafka_counts, why_lost
from kafka_marshal.errors import AuthorizationError, KafkaUnavailableError, MarshalError, grant
from kafka_marshal.instance import Instance
from kafka_marshal.node.coordination_topic import SET_BACK_MS, clock_set_back, log_name
from kafka_marshal.node.replica import Begin, Replica
from kafka_marshal.observe.checkpoints import checkpoints_row, cut_in
from kafka_marshal.observe.fold import Fold
from kafka_marshal.observe.log import LOOK_STEP_S
from kafka_marshal.observe.meter import BrokerClock, RateMeter, Silence, listening_s
from kafka_marshal.observe.rows import DAY_MS, FOREIGN_COMMIT, NO_TOPIC, GroupRow, LeaseRow, PauseRow, WorkerRow
from kafka_marshal.observe.stuck import mark_held_back, mark_stuck, mark_verdicts, with_checkpoints
from kafka_marshal.observe.text import local_ms, names_of
from kafka_marshal.ports import TailBatch
from kafka_marshal.topic_names import is_lock, snapshots_topic
from rationalizer import Tick, encode, route_group
from rationalizer.limits import STALE_AFTER_INTERVALS

if TYPE_CHECKING:
    from kafka_marshal.observe.checkpoints import CheckpointsRow
    from kafka_marshal.observe.fold import WorkerInstance
    from kafka_marshal.ports import Ack, Cluster, TopicInfo
    from kafka_marshal.types import Key, LeaseInfo
    from rationalizer import Group, Outcome, Progress, World

    _Taking = tuple[Group, CheckpointsRow]


def why_no_share(group: Group | None, client: str) -> str:
    """Why a member gets no share of keys (K1), though its topics, or itself, are meant for it; "": neither is."""
    member = None if group is None else group.clients.get(client)
    if group is None or member is None:
        return ""
    shared = sorted(member.topics & set(group.settings.accept_range_fetch))
    if member.allow_key_share:
        return "" if shared else "the group's setting accept_range_fetch names none of its topics"
    return f"only members with allow_key_share=True share {', '.join(shared)}" if shared else ""


_STAMP = itemgetter(1)

#: Members write this often in each of their heartbeat intervals.
_BEATS = 3

#: After the log was read, what came meanwhile is read until nothing comes for this long (s), or it is this new (ms).
_ON_S, _NEW_MS = 0.02, 1_000

#: Waits for records check this often for Ctrl-C.
_SLICE_S = 0.2

#: How far back moves of positions are followed, the two intervals of samples (ms), and up to how many leases.
_HISTORY_MS, _COARSE_MS, _FINE_MS, _MANY = 600_000, 10_000, 1_000, 20_000


def _read_on(view: LiveView) -> None:
    """Read what came while the log was read: a long one takes a while, and silence is judged at its end."""
    stamps, until = view.silence.stamps, time.monotonic() + view.patience_s
    while time.monotonic() < until:
        before = dict(stamps)
        view.follow(_ON_S, until=lambda before=before: stamps != before)  # type: ignore[misc]
        news = [stamp for cp, stamp in stamps.items() if stamp != before.get(cp)]
        if not news or max(news) >= view.clock.now_ms() - _NEW_MS:
            return


class LiveView:
    """A replica for display: caught up, the broker's time learned, its leases as rows."""

    def __init__(
        self,
        cluster: Cluster,
        topic: str,
        timeout_s: float,
        window_ms: int = 30_000,
        now: Callable[[], float] = local_ms,
    ) -> None:
        self._cluster = cluster
        self.patience_s = timeout_s
        #: Kafka does not answer: silence is not known, and brokers are not asked.
        self.outage = False
        #: The last rows.
        self._rows: list[LeaseRow] = []
        #: Shown again and again on a terminal: problems come first.
        self.watched = False
        self._window_start = now() - window_ms
        cluster.expect(topic)
        cluster.expect(snapshots_topic(topic))
        self.replica: Replica = Replica(cluster, topic, timeout_s, Begin.SNAPSHOT)
        self.clock: BrokerClock = BrokerClock(now)
        self.meter: RateMeter = RateMeter(window_ms)
        #: The workers of the log's last minutes; after `follow_all` of all that is read.
        self.fold: Fold = Fold(beats=False)
        #: CP → log time (ms) since which its workers are followed.
        self._followed_since: dict[int, int] = {}
        #: The first offset of the last day, for CPs in which it was looked up.
        self._day_marks: dict[tuple[str, int], int] = {}
        #: Called for each applied record.
        self.observers: list[Callable[[int, int, Outcome], object]] = []
        #: When the log was silent, and since when groups are.
        self.silence: Silence = Silence(self.clock)
        #: The topics that groups read.
        self.data: DataTopics = DataTopics(cluster, log_name(topic))

    @property
    def worlds(self) -> dict[int, World]:
        """The world of each CP."""
        return self.replica.worlds

    def catch_up(self, progress: Callable[[int, int], None]) -> None:
        """Read up to the high watermark of the start (*blocking*)."""
        replica = self.replica
        until = time.monotonic() + self.patience_s
        while not replica.caught_up:
            batch = replica.read(_SLICE_S)
            self._apply_in_slices(batch)
            for cp, entries in batch.records.items():
                if entries[-1][0] >= replica.starts[cp].log_end:  # appended since we began
                    self.clock.heard(entries[-1][1])
            if batch.records or batch.ends:
                until = time.monotonic() + self.patience_s
            elif time.monotonic() > until:
                raise KafkaUnavailableError(
                    f"{replica.topic!r}: nothing read for {self.patience_s:g} s, and partition(s) "
                    f"{sorted(replica.behind)} are not read to their end. Is the broker that leads them reachable?"
                )
            progress(replica.records_read, replica.target_records)
        replica.report_differences()
        self.follow_all()
        for world in self.worlds.values():
            self.clock.at_least(world.log_time)
        _read_on(self)

    def _apply_in_slices(self, batch: TailBatch) -> None:
        """Old records at once; those of the last minutes in slices, with a sample of the meter after each."""
        for cp, entries in batch.records.items():
            begin = 0
            while begin < len(entries):
                end = bisect_left(entries, _slice_ends(entries[begin][1], self._window_start), begin + 1, key=_STAMP)
                self._apply(cp, entries[begin:end])
                begin = end
        self.replica.apply(TailBatch({}, batch.ends, batch.faults))

    def _apply(self, cp: int, entries: list[tuple[int, int, bytes | None]]) -> None:
        step_ms = _step_ms(entries[-1][1], self._window_start)
        self.silence.standstills.see(self.worlds[cp], entries[0][1])
        is_followed = step_ms > 0 or bool(self.observers) or self.fold.follows(self.worlds[cp])
        if is_followed:
            self._follow(self.worlds[cp])
        self.replica.on_beats = None if self.observers else self.fold.hear
        self.replica.apply(TailBatch({cp: entries}), self._note if is_followed else None, history=is_followed)
        world, stamp = self.worlds[cp], entries[-1][1]
        self.silence.stamps[cp] = stamp
        if stamp >= self._window_start or (
            _step_ms(stamp, self._window_start) and world.listed * len(self.worlds) <= _MANY
        ):
            self.meter.sample(world)

    def follow_all(self) -> None:
        """Follow what each CP shows of workers, rebalances and checkpoints from here on."""
        for world in self.worlds.values():
            self._follow(world)

    def _follow(self, world: World) -> None:
        if not self.fold.follows(world):
            self._followed_since[world.partition] = world.log_time
            self.fold.begin(world)

    def _note(self, cp: int, offset: int, outcome: Outcome) -> None:
        self.fold.see(cp, outcome)
        for observe in self.observers:
            observe(cp, offset, outcome)

    def follow(self, seconds: float, until: Callable[[], bool] = lambda: False, step_s: float = 0.0) -> None:
        """Apply records that come within this time, or until the condition holds; learn the broker's time from them.

        step_s: how long after records the next ones are read.
        """
        deadline = time.monotonic() + seconds
        while not until() and (left := deadline - time.monotonic()) > 0:
            batch = self.replica.read(min(left, _SLICE_S))
            for cp, entries in batch.records.items():
                self.silence.stamps[cp] = entries[-1][1]
                self.clock.heard(entries[-1][1])
                self.clock.at_least(entries[-1][1])
            self.replica.on_beats = None if self.observers else self.fold.hear
            for cp, entries in batch.records.items():
                for run in self.silence.standstills.runs(self.worlds[cp], entries):
                    self.replica.apply(TailBatch({cp: run}), self._note)
            self.replica.apply(TailBatch({}, batch.ends, batch.faults))
            for cp in batch.records:
                self.meter.sample(self.worlds[cp])
            if batch.records and step_s > 0 and self.replica.tail.rest():
                time.sleep(max(0.0, min(step_s, deadline - time.monotonic())))
        self.silence.judged_at = self.clock.now_ms()

    def watch(self, seconds: float, until: Callable[[], bool] = lambda: False) -> None:
        """The same, read in steps: for what is shown again and again."""
        self.follow(seconds, until, LOOK_STEP_S)

    def learn_time(self) -> None:
        """Wait shortly for a new record, if there are holders whose silence is shown (*blocking*)."""
        held = [
            (info, world.log_time)
            for world in self.worlds.values()
            for info, _ in holdings(world)
            if info.client_id is not None
        ]
        if held:
            until = self.clock.listens_since + listening_s(_intervals(held))
            self.follow(until - time.monotonic(), until=lambda: self.clock.source != "local")

    def tick(self) -> None:
        """Append a Tick to every CP and wait until it is applied: log time is then the broker's time (*blocking*)."""
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
            kind = AuthorizationError if forbidden else MarshalError
            needs = f" {grant('WRITE', 'topic', [self.replica.topic])}." if forbidden else ""
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
        """Look up where the logs of all topics that groups read begin and end (*blocking*)."""
        if self.outage:
            return
        began = time.monotonic()
        wanted = None if groups is None else set(groups)
        topics = {
            info.topic
            for world in self.worlds.values()
            for info, _ in holdings(world)
            if (wanted is None or info.group_id in wanted) and not is_lock(info.topic)
        }
        for group in self.coordinated():
            if wanted is None or group.group_id in wanted:
                topics.update(group.counts)
        self.data.look(topics, self.patience_s)
        self.data.look_at_offsets(
            {
                info.group_id
                for world in self.worlds.values()
                for info, progress in holdings(world)
                if (wanted is None or info.group_id in wanted) and kafka_counts(progress)
            },
            self.patience_s,
        )
        self.silence.kafka_ms = 1000 * (time.monotonic() - began)

    def rows(self, group: str | None = None) -> list[LeaseRow]:
        """All known leases and pieces (of one group), sorted by group, topic, partition and keys (*blocking*).

        Those that make no progress say why, as far as reading their next message shows it.
        """
        if self.outage:  # known positions may lie beyond the last known log ends
            return [replace(row, outage=True) for row in self._rows]
        now_ms = self.silence.now_ms()
        groups = {each.group_id: each for each in self.coordinated()}
        taking = {
            name: (x, row) for name, x in groups.items() if (row := checkpoints_row(x, now_ms, self.fold.unsaved(name)))
        }
        rows = [
            self._row(cp, info, progress, now_ms, taking.get(info.group_id))
            for cp, world in self.worlds.items()
            for info, progress in holdings(world, group, by_keys=True)
        ]
        rows.sort(key=lambda row: (row.group, row.topic, row.partition, row.lo))
        log_times = {cp: world.log_time for cp, world in self.worlds.items()}
        rows = self.silence.judge(rows, groups.values(), self.fold.workers(now_ms - _HISTORY_MS), log_times)
        most = {name: each.settings.max_individual_commits for name, each in groups.items()}
        rows = mark_held_back(self._cluster, mark_stuck(self._cluster, rows, now_ms), most)
        rows = [with_checkpoints(row, taking[row.group][1]) if row.group in taking else row for row in rows]
        self._rows = mark_verdicts(self._cluster, rows, self.meter, now_ms, self.patience_s)
        return self._rows

    def groups(self, group: str | None = None) -> list[GroupRow]:
        """All groups (or one, if the log knows it) with all their partitions and pauses (*blocking*)."""
        by_group: dict[str, list[LeaseRow]] = {}
        homes = {each.group_id: each for each in self.coordinated() if group in (None, each.group_id)}
        for name in homes:
            by_group[name] = []
        pauses = self.pauses(group)
        claimed = self.rows(group)
        for row in [*claimed, *self.unclaimed(claimed, group)]:
            by_group.setdefault(row.group, []).append(row)
        for pause in pauses:
            by_group.setdefault(pause.group, [])
        now_ms = self.silence.now_ms()
        runs = self.fold.workers(now_ms - _HISTORY_MS)
        heard = [self._heard(run, homes.get(run.group), now_ms) for run in runs]
        last_heard: dict[str, int] = {}
        for run in runs:
            last_heard[run.group] = max(run.last_at, last_heard.get(run.group, 0))
        silent = {
            name: self._silence(rows, homes.get(name), last_heard.get(name, 0), now_ms)
            for name, rows in by_group.items()
        }
        found = [
            GroupRow(
                name,
                sorted(rows, key=lambda row: (row.topic, row.partition, row.lo)),
                [pause for pause in pauses if pause.group == name],
                silent[name][0],
                [run for run in heard if run.group == name],
                "claimed" if any(row.cp is not None for row in rows) else "",
                silent_at_least=silent[name][1],
                all_silent=None if self.outage else self.silence.groups.get(name),
            )
            for name, rows in sorted(by_group.items())
        ]
        of = {name: (group, checkpoints_row(group, now_ms, self.fold.unsaved(name))) for name, group in homes.items()}
        return [_coordinated(each, *of[each.group], now_ms) if each.group in of else each for each in found]

    def _silence(self, rows: list[LeaseRow], group: Group | None, last: int, now_ms: int) -> tuple[int, bool]:
        """How long (ms) no worker of the group was heard, and whether it may be longer. last: of the last minutes.

        A coordinated group without members keeps no time: whether its last rebalance is a day old Kafka is asked.
        """
        last = max([last, *(row.last_beat or 0 for row in rows if row.cp is not None)])
        if last or group is None:
            return now_ms - (last or now_ms), False
        home = route_group(group.group_id, len(self.worlds))
        key = (self.replica.topic, home)
        day_ago = now_ms - DAY_MS
        if key not in self._day_marks:
            self._day_marks.update(self._cluster.offsets_for_time([key], day_ago, self.patience_s))
        is_old = group.generation < self._day_marks.get(key, 0)
        # The view may begin at a young snapshot; earlier records are not known.
        return (DAY_MS + 1 if is_old else min(_HISTORY_MS, max(0, now_ms - self._followed_since[home]))), True

    def coordinated(self) -> list[Group]:
        """All coordinated groups, as in their home CP; else as marked in another CP."""
        found: dict[str, Group] = {}
        for cp, world in self.worlds.items():
            for group in world.groups():
                if cp == route_group(group.group_id, len(self.worlds)) or group.group_id not in found:
                    found[group.group_id] = group
        return [found[name] for name in sorted(found)]

    def _heard(self, run: WorkerInstance, group: Group | None, now_ms: int) -> WorkerRow:
        def ago(at: int | None) -> int | None:
            return None if at is None else max(0, now_ms - at)

        is_evicted = run.is_evicted
        return WorkerRow(
            run.group,
            run.client,
            run.instance,
            max(0, now_ms - run.last_at),
            waits=run.waits,
            waits_for=run.waits_for,
            released_ms=ago(run.lost[0]) if run.released else None,
            asked_ms=ago(run.asked_at),
            refused=run.rejected,
            is_member=self._is_member(group, run.client, run.instance, now_ms),
            no_share=why_no_share(group, run.client),
            evictor=run.evictor if is_evicted else "",
            evicted_ms=ago(run.evicted[0]) if is_evicted else None,
            was_alive=run.was_alive,
            interval_ms=run.interval_ms,
            is_coordinated=group is not None,
        )

    @staticmethod
    def _is_member(group: Group | None, client: str, instance: str, now_ms: int) -> bool:
        member = None if group is None else group.clients.get(client)
        return member is not None and member.instance_id == instance and not member.is_overdue(now_ms)

    def names(self) -> list[str]:
        """All groups that the log knows."""
        return sorted(names_of(self.worlds.values()))

    def pauses(self, group: str | None = None) -> list[PauseRow]:
        """Pauses in force at log time, one for each group and client."""
        where: dict[tuple[str, str], dict[int, int]] = {}
        for cp, world in self.worlds.items():
            for pause in world.pauses():
                if group is None or pause.group_id == group:
                    where.setdefault((pause.group_id, pause.client_id), {})[cp] = pause.expires
        now_ms = self.silence.now_ms()
        return [
            PauseRow(
                *(name, client, max(found.values()), max(found.values()) - now_ms, found),
                max(0, now_ms - self.fold.paused[name][1]) if name in self.fold.paused else 0,
            )
            for (name, client), found in sorted(where.items())
        ]

    def unclaimed(self, rows: list[LeaseRow], group: str | None = None) -> list[LeaseRow]:
        """Partitions of the topics of these rows' groups that were never claimed."""
        claimed = {(row.group, row.topic, row.partition) for row in rows}
        pairs = {(row.group, row.topic): row.kind for row in rows}
        for known in self.coordinated():
            if group in (None, known.group_id):
                pairs.update({(known.group_id, topic): "coordinated" for topic in known.counts})
        return [
            LeaseRow(of, topic, partition, log_start=low, log_end=high, kind=kind)
            for (of, name), kind in sorted(pairs.items())
            for (topic, partition), (low, high) in sorted(self.data.marks.items())
            if topic == name and (of, topic, partition) not in claimed
        ]

    def _row(self, cp: int, info: LeaseInfo, progress: Progress, now_ms: int, taking: _Taking | None) -> LeaseRow:
        low, high = self.data.marks.get((info.topic, info.partition), (None, None))
        if is_lock(info.topic):
            low = high = 0  # nothing is to be read
        key = (info.group_id, info.topic, info.partition, info.lo)
        # A record that moves a position or grants a lease is a heartbeat, too: neither happened after the last one.
        last_beat = info.last_beat or now_ms
        track = self.meter.track(key)
        moved_at = min(track.moved_at or last_beat, last_beat)
        granted_at = min(track.granted_at or last_beat, last_beat)
        is_held, is_lease = info.client_id is not None, info.kind == "claimed"
        as_of_ms = 0 if taking is None else taking[1].as_of_ms
        row = LeaseRow(
            group=info.group_id,
            topic=info.topic,
            partition=info.partition,
            cp=cp,
            client=info.client_id,
            instance=info.instance_id,
            epoch=info.epoch if is_held or is_lease else None,
            heartbeat_interval_ms=info.heartbeat_interval_ms if is_held or is_lease else None,
            last_beat=info.last_beat if is_held or is_lease else None,
            silence_ms=max(0, now_ms - info.last_beat) if is_held else None,
            stood_ms=self.silence.standstills.within(cp, info.last_beat, now_ms, least=2) if is_held else 0,
            stable=info.stable,
            ranges=info.ranges,
            granted=info.granted,
            log_start=low,
            log_end=high,
            stuck=self.data.why_stuck(info, progress),
            idle_ms=self.silence.worked_ms(self.worlds[cp], moved_at, as_of_ms),
            idle_at_least=not track.has_moved and moved_at != last_beat,
            stable_ms=self.silence.worked_ms(self.worlds[cp], min(track.stable_at or last_beat, last_beat), as_of_ms),
            stable_at_least=not track.stable_moved,
            held_ms=self.silence.worked_ms(self.worlds[cp], granted_at, as_of_ms),
            kind=info.kind,
            lo=info.lo,
            hi=info.hi,
            goes_to=info.goes_to,
            cut=None if taking is None else cut_in(taking[0].states((info.topic, info.partition)), info.lo, info.hi),
            as_of_ms=as_of_ms,
            open=info.open,
            sharers=info.sharers,
        )
        return replace(row, speed=track.per_second) if row.held and not row.lost else row

    def notes_on_clocks(self) -> list[str]:
        """Whether a broker's clock was set back, according to the last record of each CP."""
        steps = {cp: self.worlds[cp].log_time - stamp for cp, stamp in self.silence.stamps.items() if stamp >= 0}
        note = clock_set_back(self.replica.topic, {cp: step for cp, step in steps.items() if step >= SET_BACK_MS})
        return [note] if note else []

    def notes_on_upgrades(self) -> list[str]:
        """CPs that this release can't follow any further."""
        return [
            f"partition {cp} of the log was raised to level {level}, which this release does not know: what is shown "
            "of it is of before that. Install a newer release."
            for cp, level in sorted(self.replica.stopped())
        ]


def _step_ms(stamp: int, window_start: float) -> int:
    """The interval of samples at that time (ms); 0: none."""
    if stamp >= window_start:
        return _FINE_MS
    return _COARSE_MS if stamp >= window_start - _HISTORY_MS else 0


def _slice_ends(stamp: int, window_start: float) -> float:
    """The time before which the slice ends that begins with this stamp (ms)."""
    step_ms = _step_ms(stamp, window_start)
    if not step_ms:
        return window_start - _HISTORY_MS
    end = (stamp // step_ms + 1) * step_ms
    return end if step_ms == _FINE_MS else min(end, window_start)


def _intervals(held: Iterable[tuple[LeaseInfo, int]]) -> list[float]:
    """How often (s) each process writes, of those that were at work at the log time of their partition."""
    found: dict[object, float] = {}
    for info, log_time in held:
        if log_time - info.last_beat <= STALE_AFTER_INTERVALS * info.heartbeat_interval_ms:
            runs_at = Instance.parse(info.instance_id)
            process = info.instance_id if runs_at is None else (runs_at.host, runs_at.pid)
            found[process] = min(found.get(process, inf), info.heartbeat_interval_ms / _BEATS / 1000)
    return list(found.values())


def _coordinated(found: GroupRow, group: Group, checkpoints: CheckpointsRow | None, now_ms: int) -> GroupRow:
    """The row of a coordinated group: its state is judged by the broker's clock, like silence."""
    is_moving = found.moving or any(member.is_overdue(now_ms) for member in group.members.values())
    return replace(
        found,
        kind="coordinated",
        state="READY" if not group.members else "PREPARE_FOR_REBALANCE" if is_moving else "STEADY",
        generation=group.generation,
        strategy=group.strategy,
        strategy_set=group.settings.strategy,
        checkpoints=checkpoints,
    )


class DataTopics:
    """The topics, as the cluster described them when last asked."""

    def __init__(self, cluster: Cluster, log_name: str) -> None:
        self._cluster = cluster
        self._log_name = log_name
        #: Where each partition's log begins and ends.
        self.marks: dict[Key, tuple[int, int]] = {}
        self._topics: dict[str, TopicInfo] = {}
        #: Topics that this user may not see.
        self._hidden: frozenset[str] = frozenset()
        #: By group that processes in transactions: the offsets in Kafka that count, and the metadata beside them (M7).
        self._offsets: dict[str, Mapping[Key, tuple[int, str]]] = {}

    def look_at_offsets(self, groups: set[str], timeout_s: float) -> None:
        """Ask for the committed offsets of these groups (*blocking*); those that this user may not see are left out."""
        self._offsets = {}
        for group in groups:
            with suppress(MarshalError):
                self._offsets[group] = self._cluster.kafka_group(group, timeout_s).committed

    def look(self, topics: set[str], timeout_s: float) -> None:
        """Ask for these topics, and where their logs begin and end (*blocking*)."""
        self._topics = self._visible(topics, timeout_s) if topics else {}
        partitions = [
            (name, number)
            for name, info in self._topics.items()
            for number in range(info.partitions)
            if number not in info.leaderless
        ]
        self.marks = self._cluster.watermarks(partitions, timeout_s) if partitions else {}

    def _visible(self, topics: set[str], timeout_s: float) -> dict[str, TopicInfo]:
        """Those that this user may see: a claim can name any topic, and a forbidden one hides no other (*blocking*)."""
        self._hidden = frozenset()
        try:
            return self._cluster.topic_info(topics, timeout_s)
        except AuthorizationError:
            seen = topics & self._cluster.topics(timeout_s).keys()
            self._hidden = frozenset(topics - seen)
            return self._cluster.topic_info(seen, timeout_s) if seen else {}

    def why_stuck(self, info: LeaseInfo, progress: Progress) -> str:
        """Why no worker can read this partition; "": the topic shows no reason."""
        topic = self._topics.get(info.topic)
        if is_lock(info.topic):
            return ""
        if info.topic in self._hidden:
            return f"not to be seen by this user, if it is there. {grant('DESCRIBE', 'topic', [info.topic])}"
        if topic is None:
            return f"{NO_TOPIC} on this cluster any more"
        if info.partition >= topic.partitions:
            return f"{NO_TOPIC} with that many partitions any more: it has {topic.partitions}"
        if info.partition in topic.leaderless:
            return "no leader: nobody can read or write it"
        _, log_end = self.marks.get((info.topic, info.partition), (None, None))
        return why_lost(topic, progress, log_end) or self._foreign(info, progress)

    def _foreign(self, info: LeaseInfo, progress: Progress) -> str:
        """Why no member works on it: another program has committed for the group in Kafka (M7); "": none has."""
        from kafka_marshal.engine.work.taking_over import is_ours

        found = self._offsets.get(info.group_id, {}).get((info.topic, info.partition))
        if info.client_id is not None or found is None or not kafka_counts(progress):
            return ""
        offset, metadata = found
        if is_ours(metadata, info.epoch, self._log_name):
            return ""
        return (
            f"{POSITION_LOST}: {FOREIGN_COMMIT} offset {offset} for this group in Kafka, which processes "
            "in transactions"
        )
