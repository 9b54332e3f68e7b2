"""What the members of a log's groups meant to do, so that it can be replayed under other settings; and what came of it.

An *intent* is the life of one member: it begins with its first record and ends with its last. Did it give back what it
held, it ended in order; else it died, half a heartbeat after its last one. A gap of two heartbeats while it held
something is a time in which it was frozen. `figures` compares logs of the same lives: the one that was, and replays.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import inf
from typing import NamedTuple

from kafka_marshal.engine.settings import BEATS_PER_INTERVAL
from kafka_marshal.observe.fold import shows_life
from kafka_marshal.topic_names import is_lock
from rationalizer import ClaimingPartition, JoinGroup, Outcome, ReleaseGroup, World, route_group
from rationalizer.groups.history import Assignments
from rationalizer.history import End, LeaseKey, Owners, Span
from rationalizer.limits import MAX_KEY_HASH
from rationalizer.log_hash import Entry

#: A member that holds something and is silent for longer than as many heartbeats take is frozen.
MISSED_BEATS = 2
#: A partition's speed is that of this time before (ms).
SPEED_OVER_MS = 60_000

#: (topic, partition) → its figures.
Compared = dict[tuple[str, int], "Figures"]

_BY_ANOTHER = (End.RELEASED, End.LEFT, End.EVICTED, End.RESET)
_IN_ORDER = (End.RELEASED, End.LEFT)


@dataclass(frozen=True, slots=True)
class MemberLife:
    """One run of a member's process. Times in ms of the log's clock."""

    client: str
    begin: float
    #: None: it lives to the end.
    end: float | None
    #: It ends as asked, else without a word.
    is_orderly: bool
    #: Its heartbeat interval; of a member of a coordinated group half its session.
    interval_ms: int
    topics: tuple[str, ...]
    #: (begin, end) of each time in which it is frozen.
    frozen: tuple[tuple[float, float], ...] = ()

    def works(self, since: float, until: float) -> float:
        """For how long (ms) it was at work between these times."""
        last = inf if self.end is None else self.end
        found = max(0.0, min(until, last) - max(since, self.begin))
        return found - sum(max(0.0, min(until, last, end) - max(since, begin)) for begin, end in self.frozen)


@dataclass(slots=True)
class Signs:
    """What one instance of a member wrote."""

    client: str
    interval_ms: int = 0
    topics: set[str] = field(default_factory=set)
    #: Log times (ms), by coordination partition.
    signs: array[int] = field(default_factory=lambda: array("q"))


@dataclass(slots=True)
class GroupIntents:
    """One group of a log."""

    name: str
    #: Set while it is a coordinated group.
    assignments: Assignments | None = None
    strategy: str = ""
    topics: dict[str, int] = field(default_factory=dict)
    members: dict[str, Signs] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)
    #: (log time, coordination partition, value) of each pause and its end.
    pauses: list[tuple[int, int, bytes]] = field(default_factory=list)
    #: Partition → log times (ms), and what was done by then.
    done: dict[LeaseKey, tuple[array[int], array[int]]] = field(default_factory=dict)
    #: What can't be replayed; "": all can.
    problem: str = ""
    #: By operators; these are not replayed.
    evictions: int = 0
    #: Log times (ms) of the first and the last record of a member; set by `lives`.
    begin: int = 0
    end: int = 0
    _operators: set[str] = field(default_factory=set)

    def lives(self) -> list[MemberLife]:
        """The lives of its members, by time; two of one client do not overlap."""
        signs = [sign for each in self._workers().values() for sign in each.signs]
        self.begin, self.end = min(signs, default=0), max(signs, default=0)
        held: dict[str, list[Span]] = {}
        for span in self.spans:
            if span.held:
                held.setdefault(span.instance_id, []).append(span)
        found = [self._life(each, held.get(name, [])) for name, each in self._workers().items()]
        found.sort(key=lambda life: (life.client, life.begin))
        for at, (life, following) in enumerate(pairwise(found)):
            if life.client == following.client and (life.end is None or life.end > following.begin):
                found[at] = replace(life, end=following.begin, is_orderly=False)
        return sorted(found, key=lambda life: (life.begin, life.client))

    def _workers(self) -> dict[str, Signs]:
        return {name: each for name, each in self.members.items() if name not in self._operators and each.interval_ms}

    def _life(self, written: Signs, spans: Sequence[Span]) -> MemberLife:
        signs = sorted(written.signs)
        beat_ms = self.beat_ms(written.interval_ms)
        gap_ms, half_ms = MISSED_BEATS * beat_ms, beat_ms / 2
        last, end, is_orderly = signs[-1], None, True
        ends = [span for span in spans if span.until is None or span.until >= last]
        if ends and all(span.ended in _IN_ORDER for span in ends):
            end = max(float(span.until or last) for span in ends)
        elif last + 2 * written.interval_ms < self.end:
            end, is_orderly = (last + half_ms, False) if ends else (float(last), True)
        frozen = tuple(
            (before + half_ms, float(after))
            for before, after in pairwise(signs)
            if after - before > gap_ms and any(x.since <= before < (x.until or inf) for x in spans)
        )
        topics = tuple(sorted(written.topics))
        return MemberLife(written.client, float(signs[0]), end, is_orderly, written.interval_ms, topics, frozen)

    def beat_ms(self, interval_ms: int) -> float:
        """The time between two heartbeats of a member with this interval."""
        return interval_ms * (2 if self.assignments is not None else 1) / BEATS_PER_INTERVAL

    def speed(self, key: LeaseKey, at: float) -> float:
        """Messages per ms that were done of a partition in the minute before this log time."""
        times, done = self.done.get(key, ((), ()))
        last, first = bisect_right(times, at) - 1, bisect_right(times, at - SPEED_OVER_MS) - 1
        if last < 0 or last == first:
            return 0.0
        first = max(0, first)
        return max(0, done[last] - done[first]) / max(1.0, at - max(times[first], at - SPEED_OVER_MS))


class Intents:
    """Folds a log into the intents of its groups: pass each record of each coordination partition, ascending."""

    def __init__(self, partitions: int) -> None:
        self.worlds: dict[int, World] = {cp: World(cp, partitions) for cp in range(partitions)}
        self.groups: dict[str, GroupIntents] = {}
        self._owners: dict[int, Owners] = {cp: Owners() for cp in self.worlds}

    def take(self, cp: int, entry: Entry) -> Outcome:
        """Apply a record."""
        world, owners = self.worlds[cp], self._owners[cp]
        outcome = world.apply(*entry)
        message, name = outcome.message, outcome.group_id
        if message is None or not name:
            return outcome
        group = self.groups.setdefault(name, GroupIntents(name))
        if not outcome.accepted:
            owners.overhear(outcome)
        for key in owners.touched(outcome):
            self._lease(group, key, world, outcome)
        if world.partition == route_group(name, len(self.worlds)):
            self._pieces(group, world, outcome)
        if outcome.is_a(ReleaseGroup) and outcome.accepted and entry[2] is not None:
            group.pauses.append((outcome.log_time, cp, entry[2]))
            group._operators.add(message.instance_id)
        if shows_life(outcome):
            self._hear(group, world, outcome)
        return outcome

    @staticmethod
    def _hear(group: GroupIntents, world: World, outcome: Outcome) -> None:
        message = outcome.message
        if (lease := outcome.lease) is not None and is_lock(lease[1]):
            return
        written = group.members.setdefault(message.instance_id, Signs(message.client_id))
        written.signs.append(outcome.log_time)
        if outcome.is_a(JoinGroup):
            written.interval_ms = (message.session_timeout_ms + 1) // 2
            written.topics.update(topic for topic, _ in message.topics)
            for topic, count in message.topics:
                group.topics[topic] = max(count, group.topics.get(topic, 0))
        elif outcome.is_a(ClaimingPartition):
            written.interval_ms = message.heartbeat_interval_ms
            written.topics.add(message.topic)
            group.topics[message.topic] = max(message.partition + 1, group.topics.get(message.topic, 0))
        elif outcome.type in ("ClaimingShare", "SettlingMessages"):
            group.problem = "its members share partitions by batches or by key"
        elif not written.interval_ms:  # it took over from its earlier instance, and claimed nothing (C7)
            for key, _ in outcome.leases:
                taken = world.lease(*key)
                written.interval_ms = 0 if taken is None else taken.heartbeat_interval_ms
                written.topics.add(key[1])

    def _lease(self, group: GroupIntents, key: LeaseKey, world: World, outcome: Outcome) -> None:
        owners = self._owners[world.partition]
        before = owners.now.get(key)
        begun = owners.see(key, world, outcome)
        if is_lock(key[1]):
            return
        if begun is not None:
            group.spans.append(begun)
        if before is not None and before.until is not None and before.ended is End.EVICTED:
            group.evictions += 1
        if (lease := world.lease(*key)) is not None:
            _note(group, key, outcome.log_time, lease.progress.stable)

    @staticmethod
    def _pieces(group: GroupIntents, world: World, outcome: Outcome) -> None:
        known = world.group(group.name)
        if group.assignments is None:
            if known is None:
                return
            group.assignments = Assignments(group.name)
            if group.spans:
                group.problem = "it was converted to the other kind of group"
        begun = group.assignments.see(world, outcome)
        group.spans += begun
        if known is None or not outcome.accepted:
            return
        group.strategy = known.strategy or group.strategy
        if any(span.held and (span.lo, span.hi) != (0, MAX_KEY_HASH) for span in begun):
            group.problem = "its members share partitions by key"
        if known.checkpoints is not None:
            group.problem = "it takes checkpoints"
        newest = group.assignments.rebalances[-1] if group.assignments.rebalances else None
        if newest is not None and newest.generation == world.next_offset - 1:
            group.evictions += len(newest.evicted)
        for topic, partition, progress in known.all_progress() if outcome.type in ("CommitOffsets",) else ():
            _note(group, (group.name, topic, partition), outcome.log_time, progress.progress.stable)


def _note(group: GroupIntents, key: LeaseKey, log_time: int, stable: int) -> None:
    times, done = group.done.setdefault(key, (array("q"), array("q")))
    if not done or done[-1] != stable:
        times.append(log_time)
        done.append(stable)


class Figures(NamedTuple):
    """What a log shows of one partition, or of all."""

    #: Its owner was silent, and another one, or its next run, took it over.
    takeovers: int
    #: A living owner gave it to another member.
    moves: int
    #: For how long no member was at work on it.
    standstill_ms: int
    #: About how many messages were handled again after takeovers: those of half a heartbeat.
    repeats: float


def total(found: Iterable[Figures]) -> Figures:
    """Of these partitions together."""
    return Figures(*map(sum, zip(*found, strict=True)))


def figures(was: GroupIntents, lives: Iterable[MemberLife], spans: Iterable[Span], since: int, until: int) -> Compared:
    """What came of these lives between two log times (ms). was: the log as it was, spans: of the one that is asked."""
    of_client: dict[str, list[MemberLife]] = {}
    for life in sorted(lives, key=lambda life: -life.begin):
        of_client.setdefault(life.client, []).append(life)
    topics = sorted(was.topics.items())
    of_key: dict[LeaseKey, list[Span]] = {
        (was.name, topic, part): [] for topic, count in topics for part in range(count)
    }
    for span in spans:  # an operator may own some in a pause
        if span.held and span.key in of_key and span.client_id in of_client:
            of_key[span.key].append(span)
    return {key[1:]: _figures(was, of_client, found, since, until) for key, found in of_key.items()}


def _figures(
    was: GroupIntents, lives: dict[str, list[MemberLife]], spans: list[Span], since: int, until: int
) -> Figures:
    takeovers = moves = 0
    repeats, standstill = 0.0, float(until - since)
    spans.sort(key=lambda span: (span.since, span.since_offset))
    for span, following in pairwise([*spans, None]):
        assert span is not None
        end = until if span.until is None else span.until
        of_client = lives[span.client_id]
        life = next((each for each in of_client if each.begin <= span.since), of_client[-1])
        if end > since and span.since < until:
            standstill -= life.works(max(since, span.since), min(until, end))
        if span.until is None or not since <= end <= until:
            continue
        if span.ended in (End.REPLACED, End.RESTARTED):
            takeovers += 1
            repeats += was.speed(span.key, span.last_beat) * was.beat_ms(life.interval_ms) / 2
        elif following is not None and span.ended in _BY_ANOTHER:
            moves += following.client_id != span.client_id
    return Figures(takeovers, moves, round(standstill), round(repeats, 1))
