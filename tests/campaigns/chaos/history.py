"""The history by the coordination log: tenures of leases, progress, and grants.

Outcomes are the rationalizer's; this module only sorts them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from operator import itemgetter

from kafka_marshal.engine.work.topic_mark import split
from kafka_marshal.ports import LogEntry
from rationalizer import (
    ClaimingMessages,
    CommitOffsets,
    GroupHeartbeat,
    Heartbeat,
    HeartbeatBatch,
    Lease,
    LeaveGroup,
    Outcome,
    Progress,
    Record,
    World,
    codes,
    route_group,
)
from rationalizer.groups.history import Assignments
from rationalizer.history import End, LeaseKey, Owners, Span
from rationalizer.wire.wellformed import START
from tests.campaigns.chaos.lines import digest_of


@dataclass(slots=True)
class Tenure:
    """One epoch of a lease: its holder, begin and end."""

    span: Span
    #: Progress when it began.
    stable: int
    ranges: tuple[tuple[int, int], ...]
    #: Digests of the accepted heartbeats of this epoch, in the log's order.
    beats: list[str] = field(default_factory=list)

    def was_done(self, offset: int) -> bool:
        """Whether the log called this offset done when the tenure began."""
        return offset <= self.stable or any(first <= offset <= last for first, last in self.ranges)


@dataclass(frozen=True, slots=True)
class Grant:
    """At most once: an accepted ClaimingMessages."""

    key: LeaseKey
    instance_id: str
    epoch: int
    first: int
    last: int
    at: int


class LogHistory:
    """A replay of the whole log, CP by CP, record by record."""

    def __init__(self, log: Mapping[int, Iterable[LogEntry]], wanted: Iterable[tuple[int, int]] = ()) -> None:
        """wanted: (CP, next offset)s whose digests are kept, as reported by workers."""
        self._owners = Owners()
        self._groups: dict[str, Assignments] = {}
        self.tenures: dict[LeaseKey, list[Tenure]] = {}
        #: instance → its grants, in order of time.
        self.grants: dict[str, list[Grant]] = {}
        self.stable: dict[LeaseKey, int] = {}
        #: (log time, stable) of each change.
        self.moves: dict[LeaseKey, list[tuple[int, int]]] = {}
        #: Violations of any log, reported by check.py.
        self.broken: list[str] = []
        self.digests: dict[tuple[int, int], str] = {}
        self.worlds: dict[int, World] = {}
        self.records = 0
        self.outcomes: dict[str, int] = {}
        places = set(wanted)
        for cp, entries in sorted(log.items()):
            world = self.worlds[cp] = World(cp, len(log))
            for offset, stamp, value in entries:
                outcome = world.apply(offset, stamp, value)
                self.records += 1
                self.outcomes[outcome.code] = self.outcomes.get(outcome.code, 0) + 1
                if outcome.accepted and outcome.record is not None and value is not None:
                    self._observe(world, outcome, outcome.record, value)
                if (cp, world.next_offset) in places:
                    self.digests[cp, world.next_offset] = world.digest()
        for grants in self.grants.values():
            grants.sort(key=lambda grant: grant.at)

    def _observe(self, world: World, outcome: Outcome, record: Record, value: bytes) -> None:
        for key in self._owners.touched(outcome):
            lease, last = world.lease(*key), self._owners.now.get(key)
            begun = self._owners.see(key, world, outcome)
            if lease is not None:
                self._see(lease, last, begun, outcome, record, value)
        if outcome.of_group and world.partition == route_group(record.group_id, world.partitions):
            self._observe_group(world, outcome, record, value)

    def _observe_group(self, world: World, outcome: Outcome, record: Record, value: bytes) -> None:
        """A coordinated group's record: its pieces are whole partitions here, each token a tenure (G5)."""
        group = world.group(record.group_id)
        if group is None:
            return
        entries = zip(record.entries, outcome.entries or (), strict=True) if isinstance(record, CommitOffsets) else ()
        said = [entry for entry, code in entries if code in codes.ACCEPTED]
        named = {
            (entry.topic, entry.partition) for entry in said if entry.action != START and entry.through is not None
        }
        beaten = {key[1:] for key in self.tenures} if isinstance(record, GroupHeartbeat) else named
        for topic, partition in beaten:
            tenures = self.tenures.get((group.group_id, topic, partition), ())
            if tenures and tenures[-1].span.instance_id == record.instance_id and tenures[-1].span.until is None:
                tenures[-1].beats.append(digest_of(value))
        for topic, partition, kept in group.all_progress():
            key = (group.group_id, topic, partition)
            before, now = self.stable.get(key, -1), kept.progress.stable
            if now < before:
                self.broken.append(f"{key}: progress went from {before} back to {now}")
            if now != before:
                self.moves.setdefault(key, []).append((outcome.log_time, now))
                if (topic, partition) in named:
                    epoch = self.tenures[key][-1].span.epoch
                    grant = Grant(key, record.instance_id, epoch, before + 1, now, outcome.log_time)
                    self.grants.setdefault(record.instance_id, []).append(grant)
            self.stable[key] = now
        for span in self._groups.setdefault(group.group_id, Assignments(group.group_id)).see(world, outcome):
            tenures = self.tenures.setdefault(span.key, [])
            if span.until is not None:
                continue
            if tenures and (former := tenures[-1].span).until is None:
                former.until = outcome.log_time
                former.ended = End.RELEASED if isinstance(record, CommitOffsets) and said else End.REPLACED
                former.ended = End.LEFT if isinstance(record, LeaveGroup) else former.ended
                if span.held and span.epoch <= former.epoch:
                    self.broken.append(f"{span.key}: token {span.epoch} after {former.epoch}")
            if span.held:
                kept_now = group.kept(*span.key[1:])
                done = Progress() if kept_now is None else kept_now.progress
                tenures.append(Tenure(span, done.stable, tuple(split(done.ranges).ranges)))

    def _see(
        self, lease: Lease, last: Span | None, begun: Span | None, outcome: Outcome, record: Record, value: bytes
    ) -> None:
        key = (lease.group_id, lease.topic, lease.partition)
        before, now = self.stable.get(key, -1), lease.progress.stable
        tenures = self.tenures.setdefault(key, [])
        if now < before:
            self.broken.append(f"{key}: progress went from {before} back to {now}")
        if last is not None and lease.epoch < last.epoch:
            self.broken.append(f"{key}: epoch {lease.epoch} after {last.epoch}")
        if begun is not None and begun.held:
            tenures.append(Tenure(begun, before, tuple(split(lease.progress.ranges).ranges)))
        tenure = tenures[-1]
        if isinstance(record, Heartbeat | HeartbeatBatch) and record.instance_id == tenure.span.instance_id:
            tenure.beats.append(digest_of(value))
        if isinstance(record, ClaimingMessages):
            grant = Grant(
                key, record.instance_id, lease.epoch, before + 1, record.proposed_last_offset, outcome.log_time
            )
            self.grants.setdefault(record.instance_id, []).append(grant)
        if now != before:
            self.moves.setdefault(key, []).append((outcome.log_time, now))
        self.stable[key] = now

    def done_since(self, key: LeaseKey, offset: int) -> int | None:
        """Log time since which everything up to this offset is done; None: it is not."""
        moves = self.moves.get(key, ())
        place = bisect_left(moves, offset, key=itemgetter(1))
        return moves[place][0] if place < len(moves) else None

    def tenure(self, key: LeaseKey, epoch: int) -> Tenure | None:
        """The tenure of this epoch."""
        return next((x for x in self.tenures.get(key, ()) if x.span.epoch == epoch), None)
