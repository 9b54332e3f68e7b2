"""The whole history of a log, folded once: owners, rebalances, pauses, and every record that is more than a heartbeat.

Owners come from `rationalizer.history` and `rationalizer.groups.history`, as for `who` and the audit; the words are
those of `kafka-marshal log`. `index` stores the result.
"""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any, Final, NamedTuple

from kafka_marshal.observe.checkpoint_history import CheckpointHistory, CompleteCheckpoint, Ended, happened_text
from kafka_marshal.observe.checkpoints import owners_of, seen_by
from kafka_marshal.observe.rows import place_text
from kafka_marshal.observe.words import is_beat, is_routine, reason, what, why_rebalanced
from kafka_marshal.ports import LogEntry
from kafka_marshal.secret import visible
from kafka_marshal.ui.index import EventTable, KeySpans, Moments, Names, Series, Silences, SpanStore
from rationalizer import (
    CommitOffsets,
    ConfigureGroup,
    Group,
    Lease,
    Outcome,
    Record,
    SettleOffsets,
    World,
    codes,
    route_group,
)
from rationalizer.groups.group import Member
from rationalizer.groups.history import Assignments, Rebalance, owner_names
from rationalizer.history import LeaseKey, Owners, Span
from rationalizer.limits import NOTHING_DONE
from rationalizer.log_hash import RunningHash
from rationalizer.plane import Beaten

#: Records applied per lock acquisition: some milliseconds, then waiting questions are answered.
SLICE: Final = 128

#: Offsets between two stored log times.
MARK_EVERY: Final = 64

#: The last records of each CP whose hashes are kept. One would do; several may be left if the log was cut there.
JOINTS: Final = 4

#: The most cuts of a partition, and the most marks of a group, that are kept: the last ones.
MOST_CUTS: Final = 256
MOST_MARKS: Final = 20_000

#: The most changes of the sharers of one partition that are kept: the last ones. Their batches are not.
MOST_SHARES: Final = 128

#: (client_id, instance_id, lo, hi) of each sharer; lo NO_KEY: by batches.
Sharing = tuple[tuple[str, str, int, int], ...]

#: Accepted without remarks, these only report progress.
_PROGRESS: Final = frozenset({"GroupHeartbeat", "Tick", "CommitRanges", "ClaimingMessages"})

_SERIES: Final = ("done", "changed", "rejected")


@dataclass(frozen=True, slots=True)
class Waiting:
    """A piece that is planned for another member, while its owner finishes its messages in flight."""

    topic: str
    partition: int
    lo: int
    owner: str
    target: str


@dataclass(slots=True)
class Rebalanced:
    """A rebalance of a coordinated group. Times are log time (ms)."""

    generation: int
    time: int
    why: str
    members: int
    strategy: str
    #: Set while it is the last one: it may still change.
    live: Rebalance | None
    waiting: list[Waiting]
    _moved: int = 0
    _vacant_ms: int | None = None

    def settle(self) -> None:
        """The next rebalance has begun: keep the figures, drop the spans."""
        self._moved, self._vacant_ms = self.moved, self.vacant_ms
        self.live = None

    @property
    def moved(self) -> int:
        """Pieces that got another owner, or none."""
        return self._moved if self.live is None else len(self.live.moved)

    @property
    def vacant_ms(self) -> int | None:
        """The longest time (ms) that one of them had no owner; None: not known."""
        if self.live is None:
            return self._vacant_ms
        return max((each.vacant_ms for each in self.live.moved if each.vacant_ms is not None), default=None)


@dataclass(slots=True)
class Pausing:
    """A pause of a group in the log."""

    client: str
    since: int
    until: int


class CutPiece(NamedTuple):
    """A range of keys in a checkpoint. cut 0: nothing was handed in so far. next: the offset to read next."""

    lo: int
    hi: int
    cut: int
    next: int


@dataclass(frozen=True, slots=True)
class Mark:
    """A checkpoint that was complete, or that the group went back to."""

    checkpoint: int
    #: The log time (ms) and the offset of the record.
    time: int
    offset: int
    went_back: bool
    text: str


@dataclass(slots=True)
class Marks:
    """Those of one group."""

    history: CheckpointHistory
    marks: Moments = field(default_factory=lambda: Moments(MOST_MARKS))
    #: (topic, partition) → its pieces.
    cuts: dict[tuple[str, int], Moments] = field(default_factory=dict)
    _last_told: tuple[int, tuple[str, ...]] = (-1, ())

    @classmethod
    def of(cls, group: Group, world: World) -> Marks:
        """The history begins with this state."""
        found = cls(CheckpointHistory(group.group_id))
        found.history.begin(world)
        if group.checkpoints is not None:
            for kept in group.checkpoints.kept:
                found._mark(Mark(kept.id, kept.log_time, kept.id, False, f"checkpoint {kept.id} was complete"))
            for key in group.partitions():
                found._cut(group, key, world.log_time, world.next_offset - 1)
        return found

    def see(self, group: Group, world: World, outcome: Outcome) -> list[tuple[str, int]]:
        """Take in a record that was just applied; the partitions whose progress it changed."""
        found = self.history.see(world, outcome)
        changed: list[tuple[str, int]] = []
        offset = world.next_offset - 1
        for each in found:
            if isinstance(each, Ended) or group.checkpoints is None:
                continue
            newest = group.checkpoints.newest
            if isinstance(each, CompleteCheckpoint):
                changed += group.checkpoints.kept[-1].versions
                self._mark(Mark(each.checkpoint, world.log_time, offset, False, happened_text(each)))
            elif each.why == "rollback":
                changed += [key for key in group.partitions() if self._pieces(group, key) != self._last(key)]
                self._mark(Mark(newest, world.log_time, offset, True, happened_text(each)))
        for key in changed:
            self._cut(group, key, world.log_time, offset)
        self._last_told = offset, tuple(map(happened_text, found))
        return changed

    def told_at(self, offset: int) -> tuple[str, ...]:
        """What the record at this offset did, if it was the last one, in words."""
        return self._last_told[1] if self._last_told[0] == offset else ()

    def _mark(self, mark: Mark) -> None:
        self.marks.add(mark.time, mark.offset, mark)

    def _cut(self, group: Group, key: tuple[str, int], at: int, offset: int) -> None:
        self.cuts.setdefault(key, Moments(MOST_CUTS)).add(at, offset, self._pieces(group, key))

    def _last(self, key: tuple[str, int]) -> tuple[CutPiece, ...]:
        values = self.cuts[key].values if key in self.cuts else ()
        return values[-1] if values else ()

    @staticmethod
    def _pieces(group: Group, key: tuple[str, int]) -> tuple[CutPiece, ...]:
        assert group.checkpoints is not None
        seen = seen_by(group, key, group.checkpoints.newest)
        return tuple(
            CutPiece(lo, hi, cut, min((d for a, b, d in seen.done_through if a <= hi and lo <= b), default=-1) + 1)
            for lo, hi, cut in seen.states
        )

    # -- answers -----------------------------------------------------------------------------------------------

    def listed(self, home: int, at: int, offset: int, limit: int) -> list[dict[str, Any]]:
        """The last ones up to a moment, the newest first."""
        end = self.marks.before(at, offset)
        return [self._json(home, each) for each in islice(reversed(self.marks.values[:end]), limit)]

    def pieces(self, at: int, offset: int) -> Iterator[dict[str, Any]]:
        """What the newest checkpoint at that moment had of each piece."""
        for topic, partition in sorted(self.cuts):
            found = self.cuts[topic, partition]
            index = found.before(at, offset) - 1
            for piece in found.values[index] if index >= 0 else ():
                yield {
                    "topic": topic,
                    "partition": partition,
                    "place": place_text(partition, piece.lo, piece.hi),
                    "cut": piece.cut or None,
                    "next": piece.next,
                }

    def ticks(self, most: int) -> list[list[object]]:
        """(log time, offset of the record, id) of the last ones, for the slider."""
        return [[each.time, each.offset, each.checkpoint] for each in self.marks.values[-most:]]

    @staticmethod
    def _json(home: int, each: Mark) -> dict[str, Any]:
        return {
            "checkpoint": each.checkpoint,
            "time": each.time,
            "at": f"{home}:{each.offset}",
            "went_back": each.went_back,
            "text": visible(each.text),
        }


@dataclass(slots=True)
class GroupHistory:
    """The history of one group."""

    name: str
    home: int
    keys: dict[tuple[str, int], KeySpans] = field(default_factory=dict)
    #: Of a coordinated group: the assignments in its home's log.
    assignments: Assignments | None = None
    rebalances: list[Rebalanced] = field(default_factory=list)
    #: (client_id, instance_id) → its heartbeats; members of coordinated groups only.
    pulses: dict[tuple[str, str], Silences] = field(default_factory=dict)
    #: CP → the pauses in its log.
    paused: dict[int, list[Pausing]] = field(default_factory=dict)
    series: Series = field(default_factory=lambda: Series(_SERIES))
    #: topic → the most partitions that its members reported, in a coordinated group.
    counts: dict[str, int] = field(default_factory=dict)
    #: Of a group that has taken some.
    checkpoints: Marks | None = None

    _ordered: list[KeySpans] = field(default_factory=list)

    def count_rejected(self, events: EventTable) -> None:
        """Add what was rejected before the group was known: CPs are read in any order."""
        for numbers in events.lists["rejected"].get(self.name, {}).values():
            for number in numbers:
                self.series.add("rejected", events.time[number], 1)

    def ordered(self) -> list[KeySpans]:
        """All partitions that ever had an owner, by topic and number."""
        if len(self._ordered) != len(self.keys):
            self._ordered = [self.keys[place] for place in sorted(self.keys)]
        return self._ordered

    @property
    def pauses(self) -> list[Pausing]:
        """All pauses, by time: one is in force while one CP has it."""
        found: list[Pausing] = []
        last: dict[str, Pausing] = {}
        each_cp = ((each.since, each.until, each.client) for of_cp in self.paused.values() for each in of_cp)
        for since, until, client in sorted(each_cp):
            if client in last and since <= last[client].until:
                last[client].until = max(until, last[client].until)
            else:
                last[client] = Pausing(client, since, until)
                found.append(last[client])
        return found

    @property
    def is_coordinated(self) -> bool:
        """Whether it was coordinated when last known."""
        return self.assignments is not None


class History:
    """Folds records into histories. One thread feeds it; readers use `asking()`."""

    def __init__(self, partitions: int, worlds: Mapping[int, World] | None = None) -> None:
        """worlds: initial state of the CPs, changed in place; None: the beginning of the log."""
        if worlds is None:
            worlds = {cp: World(cp, partitions) for cp in range(partitions)}
        self.worlds: dict[int, World] = dict(worlds)
        self.partitions = partitions
        self.names: Names = Names()
        #: (client_id, instance_id) by number.
        self.owners: Names = Names()
        self.spans: SpanStore = SpanStore(self.names, self.owners)
        self.events: EventTable = EventTable()
        self.groups: dict[str, GroupHistory] = {}
        #: CP → (offset, log time) of its first record, and of every 64th or so from there on.
        self.marks: dict[int, tuple[array[int], array[int]]] = {cp: (array("q"), array("q")) for cp in self.worlds}
        #: CP → (offset, log time) at which the history begins.
        self.starts: dict[int, tuple[int, int]] = {
            cp: (world.next_offset, world.log_time) for cp, world in self.worlds.items()
        }
        #: CP → the last records: (offset, hash). By these a log is recognized again.
        self.joints: dict[int, list[tuple[int, str]]] = {cp: [] for cp in self.worlds}
        self.folds: dict[int, Owners] = {cp: Owners() for cp in self.worlds}
        self._lock = threading.Lock()
        #: A token for each waiting or active question: adding to a set is atomic.
        self._asked: set[object] = set()
        for cp, world in self.worlds.items():
            self._begin(cp, world)

    def __getstate__(self) -> dict[str, Any]:
        """What other processes get: the state of CPs as snapshots."""
        found = {name: value for name, value in vars(self).items() if name not in ("_lock", "_asked")}
        return {**found, "worlds": {cp: world.snapshot() for cp, world in self.worlds.items()}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.worlds = {cp: World.restore(snapshot, self.partitions) for cp, snapshot in state["worlds"].items()}
        self._lock, self._asked = threading.Lock(), set()

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Hold the history unchanged."""
        token = object()
        self._asked.add(token)
        try:
            with self._lock:
                yield
        finally:
            self._asked.discard(token)

    def take(self, cp: int, entries: list[LogEntry]) -> None:
        """Replay records of one CP, ascending (*blocking*: questions have priority)."""
        world, beats = self.worlds[cp], partial(self._beats, cp)
        for begin in range(0, len(entries), SLICE):
            while self._asked:
                time.sleep(0.001)
            with self._lock:
                remaining = iter(entries[begin : begin + SLICE])
                while (record := world.apply_beats(remaining, see=beats)) is not None:
                    outcome = world.apply(*record)
                    if outcome.code == codes.UPGRADE_REQUIRED:
                        return
                    self._see(cp, record[0], outcome, record[2])
                last = entries[max(begin, min(begin + SLICE, len(entries)) - JOINTS) : begin + SLICE]
                self.joints[cp] = [*self.joints[cp], *((each[0], hash_of(each)) for each in last)][-JOINTS:]

    def see(self, cp: int, offset: int, outcome: Outcome) -> None:
        """Take a record that the caller has just applied to the initial worlds."""
        with self._lock:
            self._see(cp, offset, outcome, None)

    # -- inside ----------------------------------------------------------------------------------------------

    def _begin(self, cp: int, world: World) -> None:
        """Start from the initial state of a CP."""
        owners = self.folds[cp]
        owners.begin(world)
        for key, span in owners.now.items():
            found = self._key(self._group(key[0]), key[1:], cp)
            found.begin([span], self.owners)
            lease = world.lease(*key)
            if lease is not None:
                found.pulse = Silences(lease.last_beat, lease.heartbeat_interval_ms, 0)
                _follow_shares(found, lease, None, world)
                self._note_stable(found, None, lease.progress.stable, world.log_time, world)
        for group in world.groups():
            if cp == route_group(group.group_id, self.partitions):
                self._follow_assignments(group.group_id, world, fresh=True)

    def _group(self, name: str) -> GroupHistory:
        found = self.groups.get(name)
        if found is None:
            found = self.groups[name] = GroupHistory(name, route_group(name, self.partitions))
            found.count_rejected(self.events)
        return found

    def _key(self, group: GroupHistory, place: tuple[str, int], cp: int) -> KeySpans:
        found = group.keys.get(place)
        if found is None:
            found = group.keys[place] = KeySpans((group.name, *place), cp)
        found.cp = cp
        return found

    def _see(self, cp: int, offset: int, outcome: Outcome, value: bytes | None) -> None:
        message = outcome.message
        if message is not None and outcome.code == codes.OK and not outcome.silent:
            world = self.worlds[cp]
            if outcome.type == "HeartbeatBatch" or (outcome.type == "Heartbeat" and message.epoch is not None):
                leases = [world.lease(*key) for key, _ in outcome.leases]
                self._beats(cp, offset, outcome.log_time, [(each, None) for each in leases if each is not None])
                return
        offsets, times = self.marks[cp]
        if not offsets or offset - offsets[-1] >= MARK_EVERY:
            offsets.append(offset)
            times.append(outcome.log_time)
        if message is not None and outcome.code == codes.OK and not outcome.silent and outcome.type in _PROGRESS:
            self._take_effect(cp, outcome)
            if _told(self.groups.get(message.group_id), cp, offset):  # a heartbeat may close a barrier
                self._note(cp, offset, outcome, outcome.record, value, None, 0)
            return
        record = outcome.record
        before = self._before(outcome)
        changed = self._take_effect(cp, outcome) if outcome.accepted else self._overhear(cp, outcome)
        if outcome.type == "ReleaseGroup" and outcome.accepted and message is not None:
            self._pause(cp, message.group_id, message.client_id, outcome.log_time, message.msg_expire_time)
        if changed or not (is_beat(outcome, record) or is_routine(outcome) or self._only_says_so(cp, outcome, record)):
            self._note(cp, offset, outcome, record, value, before, changed)

    def _only_says_so(self, cp: int, outcome: Outcome, record: Record | None) -> bool:
        """Whether it repeats a coordinated group's settings outside of its home: they are in every CP (G1)."""
        return (
            outcome.accepted
            and isinstance(record, ConfigureGroup)
            and cp != route_group(record.group_id, self.partitions)
        )

    def _beats(self, cp: int, offset: int, at: int, beaten: Beaten) -> None:
        """Accepted heartbeats of holders, nearly all of a log: they change no owner."""
        offsets, times = self.marks[cp]
        if not offsets or offset - offsets[-1] >= MARK_EVERY:
            offsets.append(offset)
            times.append(at)
        group = self.groups[beaten[0][0].group_id]
        keys, done, since = group.keys, 0, at
        for lease, _ in beaten:
            found = keys[lease.topic, lease.partition]
            pulse, stable, before = found.pulse, lease.progress.stable, found.stable
            assert pulse is not None
            if stable != before:
                # The first position of a partition is its consumer's start, not work.
                if NOTHING_DONE != before < stable:
                    done += stable - before
                    since = min(since, pulse.last)
                found.stable = stable
                found.samples.add(at, offset, stable)
            if at - pulse.last >= pulse.interval_ms:
                pulse.beat(at, offset)
            else:
                pulse.last, pulse.last_offset = at, offset
        if done:
            group.series.spread("done", since, at, done)

    def _before(self, outcome: Outcome) -> Span | None:
        """The span of the lease that a record names, before the record."""
        key = outcome.lease
        group = None if key is None else self.groups.get(key[0])
        found = None if group is None or key is None else group.keys.get(key[1:])
        if found is None or not found.open or found.pulse is None:
            return None
        return replace(found.open[0], last_beat=found.pulse.last)

    def _take_effect(self, cp: int, outcome: Outcome) -> int:
        """Apply an accepted record; returns the number of spans that it began."""
        world, message = self.worlds[cp], outcome.message
        if message is None:
            return 0
        changed = 0
        owners = self.folds[cp]
        for key in owners.touched(outcome):
            changed += self._lease(owners, world, key, outcome)
        if outcome.of_group or outcome.type == "ForgetGroup":
            name = message.group_id
            if cp == route_group(name, self.partitions) and (outcome.of_group or self._group(name).is_coordinated):
                changed += self._pieces(self._group(name), world, outcome)
        return changed

    def _overhear(self, cp: int, outcome: Outcome) -> int:
        """A rejected record changes nothing, but may name the client behind an eviction (C20)."""
        self.folds[cp].overhear(outcome)
        for group in self.groups.values() if outcome.type == "LeaveGroup" else ():
            if group.assignments is not None and group.home == cp:
                group.assignments.overhear(outcome)
        return 0

    # -- leases ----------------------------------------------------------------------------------------------

    def _lease(self, owners: Owners, world: World, key: LeaseKey, outcome: Outcome) -> int:
        group = self._group(key[0])
        found, lease = group.keys.get(key[1:]), world.lease(*key)
        if found is None:
            found = self._key(group, key[1:], world.partition)
        others = _follow_shares(found, lease, outcome, world)
        if others:
            group.series.add("changed", world.log_time, 1)
        if found.open and lease is not None and found.pulse is not None:
            span = found.open[0]
            if span.epoch == lease.epoch and span.held == (lease.client_id is not None):
                since = found.pulse.last
                if lease.last_beat > since:
                    found.pulse.beat(lease.last_beat, world.next_offset - 1)
                stable = lease.progress.stable
                if stable != found.stable:
                    is_work = outcome.code == codes.OK
                    self._note_stable(found, group if is_work else None, stable, since, world)
                return int(others)
        if group.is_coordinated and lease is not None:  # it was converted: it has leases now (G1)
            group.assignments = None
        before = list(found.open)
        since = world.log_time if found.pulse is None else found.pulse.last
        for each in before:
            each.stable = found.stable
            each.last_beat = each.last_beat if found.pulse is None else max(each.last_beat, found.pulse.last)
        begun = owners.see(key, world, outcome)
        self._close(found, before, 0 if found.pulse is None else found.pulse.interval_ms)
        found.cp = world.partition
        found.begin([] if begun is None else [begun], self.owners)
        if lease is None:
            self._note_stable(found, None, NOTHING_DONE, since, world)
            return 1
        if found.pulse is None:
            found.pulse = Silences(lease.last_beat, lease.heartbeat_interval_ms, world.next_offset - 1)
        elif begun is not None and begun.held:
            found.pulse.beat(lease.last_beat, world.next_offset - 1)
        found.pulse.interval_ms = lease.heartbeat_interval_ms
        self._note_stable(found, group, lease.progress.stable, since, world)
        if begun is not None:
            group.series.add("changed", world.log_time, 1)
        return 1

    def _note_stable(self, found: KeySpans, group: GroupHistory | None, stable: int, since: int, world: World) -> None:
        """Store a partition's position; group: messages done since that log time count as its work."""
        if stable == found.stable and found.samples.times:
            return
        # The first position of a partition is its consumer's start, not work.
        if group is not None and NOTHING_DONE != found.stable < stable:
            group.series.spread("done", since, world.log_time, stable - found.stable)
        found.stable = stable
        found.samples.add(world.log_time, world.next_offset - 1, stable)

    def _close(self, found: KeySpans, spans: Iterable[Span], interval_ms: int) -> None:
        for span in spans:
            if span.until is not None:
                self.spans.close(found, span, interval_ms)

    # -- pieces of coordinated groups ------------------------------------------------------------------------

    def _follow_assignments(self, name: str, world: World, *, fresh: bool = False) -> Assignments:
        """Begin to follow a coordinated group."""
        group = self._group(name)
        group.assignments = found = Assignments(name, keep=2)
        if fresh:
            found.begin(world)
        for place in [place for place, known in group.keys.items() if known.open and known.open[0].is_lease]:
            group.keys[place].begin([], self.owners)
        for place, spans in found.now.items():
            self._key(group, place, world.partition).begin(list(spans), self.owners)
        if (known := world.group(name)) is not None:
            _beat_members(group, known, world.next_offset - 1)
            if fresh and known.checkpoints is not None:
                group.checkpoints = Marks.of(known, world)
        return found

    def _pieces(self, group: GroupHistory, world: World, outcome: Outcome) -> int:
        known = world.group(group.name)
        fold = group.assignments or self._follow_assignments(group.name, world)
        generation = fold.rebalances[-1].generation if fold.rebalances else -1
        begun = fold.see(world, outcome)
        if known is None:
            for found in group.keys.values():
                self._close(found, found.open, 0)
                found.begin([], self.owners)
            return len(begun)
        changed = self._refit(group, fold, known, begun) if begun else 0
        for place in _follow_checkpoints(group, known, world, outcome):
            if (kept := known.kept(*place)) is not None:
                found = self._key(group, place, world.partition)
                since, found.reported = max(found.reported, self.starts[world.partition][1]), world.log_time
                self._note_stable(found, group, kept.progress.stable, since, world)
        _beat_sender(group, known, outcome, world.next_offset - 1)
        message = outcome.message
        if outcome.accepted and outcome.is_a(CommitOffsets, SettleOffsets):
            is_work, member = not outcome.by_operator, known.clients.get(message.client_id)
            entries = message.entries if outcome.is_a(CommitOffsets) else [(message.topic, message.partition)]
            beats_ms = 0 if member is None else member.heartbeat_interval_ms
            for place in {(entry[0], entry[1]) for entry in entries}:
                kept = known.kept(*place)
                if kept is not None:
                    found = self._key(group, place, world.partition)
                    # After a quiet time, messages have come since the owner's last heartbeat.
                    since, found.reported = max(found.reported, world.log_time - beats_ms), world.log_time
                    self._note_stable(found, group if is_work else None, kept.progress.stable, since, world)
        if fold.rebalances and fold.rebalances[-1].generation != generation:
            self._rebalanced(group, known, fold.rebalances[-1])
        if changed:
            group.series.add("changed", world.log_time, changed)
        return changed

    def _refit(self, group: GroupHistory, fold: Assignments, known: Group, begun: list[Span]) -> int:
        places = sorted({span.key[1:] for span in begun})
        fallen: dict[tuple[str, int], list[Span]] = {}
        for span in begun:
            if span.until is not None:
                fallen.setdefault(span.key[1:], []).append(span)
        for place in places:
            found = self._key(group, place, group.home)
            ended = [span for span in found.open if span.until is not None] + fallen.get(place, [])
            for span in sorted(ended, key=lambda span: span.lo):
                pulse = group.pulses.get((span.client_id, span.instance_id))
                self._close(found, [span], 0 if pulse is None else pulse.interval_ms)
            found.begin(list(fold.now.get(place, ())), self.owners)
        return sum(span.until is None for span in begun)

    def _rebalanced(self, group: GroupHistory, known: Group, found: Rebalance) -> None:
        if group.rebalances:
            group.rebalances[-1].settle()
        for topic, count in sorted(known.counts.items()):  # a state read from a snapshot has another order
            group.counts[topic] = max(count, group.counts.get(topic, 0))
        waiting = [
            Waiting(topic, partition, piece.lo, owner, target)
            for (topic, partition), piece in owners_of(known)
            for owner, target in [(owner_names(known, piece.owner)[0], owner_names(known, piece.target)[0])]
            if target not in ("", owner)
        ]
        why = "; ".join(why_rebalanced(found))
        group.rebalances.append(
            Rebalanced(found.generation, found.log_time, why, found.members, known.strategy or "", found, waiting)
        )

    # -- pauses and events -----------------------------------------------------------------------------------

    def _pause(self, cp: int, name: str, client: str, at: int, expires: int) -> None:
        pauses = self._group(name).paused.setdefault(cp, [])
        if pauses and pauses[-1].client == client and pauses[-1].until >= at:
            pauses[-1].until = max(at, expires)
        elif expires > at:
            pauses.append(Pausing(client, at, expires))

    def _note(
        self,
        cp: int,
        offset: int,
        outcome: Outcome,
        record: Record | None,
        value: bytes | None,
        before: Span | None,
        changed: int,
    ) -> None:
        names, at = self.names, outcome.log_time
        name = outcome.group_id
        topic, number = getattr(record, "topic", None), getattr(record, "partition", None)
        is_placed = isinstance(topic, str) and isinstance(number, int)
        place = self.events.place(topic, number) if is_placed else -1  # type: ignore[arg-type]
        if not outcome.accepted and name in self.groups:
            self.groups[name].series.add("rejected", at, 1)
        if record is None and value is None:
            words = ("what is not a record", "")
        else:
            told = [*_told(self.groups.get(name), cp, offset), reason(outcome, record, value, self.worlds[cp], before)]
            words = what(record, value, at), "; ".join(filter(None, told))
        client = "" if record is None else record.client_id
        row = (at, cp, offset, names(name), names(client), names(outcome.type or ""), names(outcome.code))
        self.events.add(name, (*row, int(outcome.accepted), changed, place), *words)


def _follow_shares(found: KeySpans, lease: Lease | None, outcome: Outcome | None, world: World) -> bool:
    """Take in the state after a record (None: the initial one); whether other members share the partition now."""
    shares = () if lease is None else lease.shares or ()
    if found.shares is None:
        if not shares:
            return False
        found.shares, found.is_shared = Moments(MOST_SHARES), True
    values = found.shares.values
    before: Sharing = values[-1] if values else ()
    if len(before) == len(shares) and outcome is not None and outcome.share is None:
        return False  # a share begins by its claim alone
    known = {each: each for each in before}  # the same objects: they may be many
    names = [(each.client_id, each.instance_id, each.lo, each.hi) for each in shares]
    now: Sharing = tuple(known.get(each, each) for each in names)
    if now == before:
        return False
    found.shares.add(world.log_time, world.next_offset - 1, now)
    return True


def _follow_checkpoints(group: GroupHistory, known: Group, world: World, outcome: Outcome) -> Sequence[tuple[str, int]]:
    """Take in a record; the partitions whose progress it moved, as a checkpoint was complete, or it went back."""
    if group.checkpoints is None:
        if known.checkpoints is None:
            return ()
        group.checkpoints = Marks(CheckpointHistory(group.name))
    return group.checkpoints.see(known, world, outcome)


def _told(group: GroupHistory | None, cp: int, offset: int) -> Sequence[str]:
    """What this record did to checkpoints, in words."""
    if group is None or group.checkpoints is None or cp != group.home:
        return ()
    return group.checkpoints.told_at(offset)


def _beat_sender(group: GroupHistory, known: Group, outcome: Outcome, offset: int) -> None:
    if outcome.message is None:
        return
    member = known.clients.get(outcome.message.client_id)
    wanted = outcome.member or getattr(outcome.message, "member_id", "")  # ConfigureGroup has none
    if member is None or member.member_id != wanted:  # members are known by their member id
        member = next((each for each in known.members.values() if each.member_id == wanted), None)
    pulse = None if member is None else group.pulses.get((member.client_id, member.instance_id))
    if member is None or pulse is None or member.last_beat - pulse.last > pulse.interval_ms:
        _beat_members(group, known, offset)  # the log may have been silent: all sessions begin again (G8)
    else:
        _beat(group, member, offset)


def _beat_members(group: GroupHistory, known: Group, offset: int) -> None:
    for member in known.members.values():
        _beat(group, member, offset)


def _beat(group: GroupHistory, member: Member, offset: int) -> None:
    half = member.heartbeat_interval_ms
    pulse = group.pulses.get((member.client_id, member.instance_id))
    if pulse is None:
        group.pulses[member.client_id, member.instance_id] = Silences(member.last_beat, half, offset)
    else:
        if member.last_beat > pulse.last:
            pulse.beat(member.last_beat, offset)
        pulse.change(half, member.last_beat, offset)


def begins(history: History) -> int:
    """The log time (ms) from which on it has every CP."""
    return max(at for _, at in history.starts.values())


def has(history: History, cp: int, offset: int) -> bool:
    """Whether it has this record."""
    return history.starts[cp][0] <= offset < history.worlds[cp].next_offset


def hash_of(entry: LogEntry) -> str:
    """The hash of one record, as in the hash of a log (S4)."""
    running = RunningHash(entry[0])
    running.take((entry,))
    return running.digest()
