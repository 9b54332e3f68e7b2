"""Who owned a partition, since when, until when: a replay of one coordination partition, and the answer in words.

A claimed group's leases are in the coordination partition of the data partition, a coordinated group in its home.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from kafka_marshal.client.view import holdings
from kafka_marshal.observe.meter import Standstills, silence_text
from kafka_marshal.observe.rows import place_text
from kafka_marshal.observe.text import count, span, time_text
from rationalizer import CommitOffsets, ReleasingPartition, Rollback, SettlingMessages, World, codes
from rationalizer.groups.history import Assignments
from rationalizer.history import End, LeaseKey, Owners, Span
from rationalizer.holes import NO_KEY, Hole
from rationalizer.limits import MAX_KEY_HASH, STALE_AFTER_INTERVALS

if TYPE_CHECKING:
    from kafka_marshal.ports import LogEntry
    from rationalizer import Lease, Outcome
    from rationalizer.leases.shares import Share


class ShareSpans:
    """Who shared one lease, from when to when: a span for each share; by batches, its lo and hi are NO_KEY."""

    def __init__(self, key: LeaseKey) -> None:
        self.key = key
        self.all: list[Span] = []
        #: By epoch, those that have not ended.
        self._now: dict[int, tuple[Share, Span]] = {}

    def begin(self, lease: Lease | None, since: int) -> None:
        """The log begins at this log time, with this state."""
        for share in (lease and lease.shares) or ():
            self._add(share, since)

    def see(self, world: World, outcome: Outcome) -> None:
        """Take in the effect of a record that this world has just applied."""
        lease = world.lease(*self.key)
        shares = (lease and lease.shares) or ()
        if outcome.is_a(ReleasingPartition) and outcome.message.epoch in self._now and not outcome.accepted:
            share, span = self._now[outcome.message.epoch]
            if share.client_id != outcome.message.client_id:
                span.evictor = outcome.message.client_id  # C20
        if outcome.share is None and len(shares) == len(self._now):
            return  # a share begins by its claim alone
        there = {share.epoch: share for share in shares}
        for epoch in [each for each in self._now if each not in there]:
            self._end(*self._now.pop(epoch), lease, world, outcome)
        for share in there.values():
            if share.epoch not in self._now:
                self._add(share, world.log_time)

    def now(self) -> list[tuple[Share, Span]]:
        """Those that have not ended, by keys."""
        return sorted(self._now.values(), key=lambda each: (each[1].lo, each[1].client_id))

    def without(self, free: Span) -> list[Span]:
        """The parts of a time without an owner in which no member shared it either."""
        found = []
        for share in self.all:
            if share.until_offset is not None and share.until_offset <= free.since_offset:
                continue
            if free.until_offset is not None and share.since_offset >= free.until_offset:
                break
            if share.since_offset > free.since_offset:
                at = share.since, share.since_offset, End.CLAIMED, share.client_id
                found.append(replace(free, until=at[0], until_offset=at[1], ended=at[2], ended_by=at[3]))
            if share.until_offset is None or share.until is None or share.until_offset == free.until_offset:
                return found
            free = replace(free, since=share.until, since_offset=share.until_offset)
        return [*found, free]

    def _add(self, share: Share, since: int) -> None:
        names = share.client_id, share.instance_id, share.epoch
        span = Span(self.key, True, *names, since, share.epoch, share.last_beat, lo=share.lo, hi=share.hi)
        self._now[share.epoch] = share, span
        self.all.append(span)

    def _end(self, share: Share, span: Span, lease: Lease | None, world: World, outcome: Outcome) -> None:
        span.until, span.until_offset, span.last_beat = world.log_time, world.next_offset - 1, share.last_beat
        message = outcome.message
        if lease is None or message is None:
            span.ended = End.FORGOTTEN
            return
        span.stable = done_by(lease, span)
        span.ended, span.ended_by = End.REPLACED, "" if outcome.is_a(SettlingMessages) else message.client_id
        if outcome.is_a(ReleasingPartition):
            is_evicted = span.evictor != "" and message.last_offset is None
            span.ended, span.ended_by = (End.EVICTED, span.evictor) if is_evicted else (End.RELEASED, "")


def done_by(lease: Lease, span: Span) -> int:
    """The last offset up to which all of the keys of a share are done; by batches: all keys."""
    return lease.progress.stable if span.lo == NO_KEY else lease.progress.floor([(span.lo, span.hi)])


class OpenedAgain(NamedTuple):
    """Done messages that an operator opened again (R2)."""

    #: Log time (ms) and offset of the record, and its sender.
    time: int
    offset: int
    client: str
    #: The first and the last offset of each range.
    ranges: list[tuple[int, int]]


@dataclass(slots=True)
class OwnershipAt:
    """The lease or piece at the requested moment."""

    span: Span
    last_beat: int
    heartbeat_interval_ms: int
    freshness: str
    #: The offset to read next at that moment; None: not requested.
    next: int | None = None
    #: How many messages are open (H1), wherever they lie, and how many of them are parked.
    open: int = 0
    parked: int = 0
    #: Log time (ms) of the holder's own last record, where it is before `last_beat` (G8); and for how much of the time
    #: since then the log was silent (ms).
    heard: int | None = None
    stood_ms: int = 0


@dataclass(slots=True)
class Ownership:
    """The history of one lease and one moment in it, from a replay of its CP."""

    key: LeaseKey
    cp: int
    partitions: int
    #: The moment is after the records up to this log time (ms), or this offset; neither: the end of the log.
    at: int | None = None
    at_offset: int | None = None
    spans: list[Span] = field(default_factory=list)
    #: One; in a coordinated group one for each range of key hashes; of a shared lease one for each share, and for keys
    #: that no member had.
    moments: list[OwnershipAt] = field(default_factory=list)
    world: World = field(init=False)
    owners: Owners = field(default_factory=Owners)
    redone: list[OpenedAgain] = field(default_factory=list)
    shares: ShareSpans = field(init=False)
    #: Spans in which the log was silent.
    standstills: Standstills = field(default_factory=Standstills)
    _passed: bool = False
    #: The last offset before the moment, and what was open then.
    _last: int = -1
    _holes: list[Hole] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.world = World(self.cp, self.partitions)
        self.shares = ShareSpans(self.key)

    @property
    def in_parts(self) -> bool:
        """Whether members ever had parts of it."""
        return bool(self.shares.all)

    def begin(self, world: World) -> None:
        """The log begins with this state: its holder may have held the lease before."""
        self.world = world
        self.owners.begin(world)
        span = self.owners.now.get(self.key)
        if span is not None:
            span.since = world.log_time
            self.spans.append(span)
        self.shares.begin(world.lease(*self.key), world.log_time)

    def take(self, entries: Iterable[LogEntry]) -> None:
        """Replay records of the CP, ascending."""
        for offset, stamp, value in entries:
            if not self._passed and self._is_beyond(offset, stamp):
                self._passed = True
                self._capture()
            self.standstills.see(self.world, stamp)
            outcome = self.world.apply(offset, stamp, value)
            self._see(outcome)
            if ranges := outcome.redone:
                message = outcome.message
                if (message.group_id, message.topic, message.partition) == self.key:
                    self.redone.append(OpenedAgain(self.world.log_time, offset, message.client_id, ranges))

    def _see(self, outcome: Outcome) -> None:
        if (begun := self.owners.see(self.key, self.world, outcome)) is not None:
            self.spans.append(begun)
        self.shares.see(self.world, outcome)

    def end(self) -> None:
        """The log ends here."""
        if not self._passed:
            self._passed = True
            self._capture()
        if self.shares.all:
            owned = [part for each in self.spans for part in ([each] if each.held else self.shares.without(each))]
            self.spans = sorted([*owned, *self.shares.all], key=lambda each: each.since_offset)
            for moment in self.moments:
                if not moment.span.held and moment.span.since_offset < 0:
                    self._date(moment.span)
        self._count_open()
        self._name_outages()

    def _name_outages(self) -> None:
        """Say of each silence how much of it was an outage of the log: one member alone makes none."""
        for each in self.spans:
            if each.held and each.until is not None:
                each.stood_ms = self.standstills.within(self.cp, each.last_beat, each.until, least=2)
        for moment in self.moments:
            since = moment.last_beat if moment.heard is None else moment.heard
            moment.stood_ms = self.standstills.within(self.cp, since, self.judged_at, least=2)

    def _date(self, free: Span) -> None:
        """Since when no member had these keys, and until when."""
        spans = [each for each in self.spans if each.held and (each.lo == NO_KEY or _overlap(each, free))]
        before = [each for each in spans if (each.until_offset or self._last + 1) <= self._last]
        last = max(before, key=lambda each: each.until_offset or 0, default=self.spans[0])
        free.since, free.since_offset = (last.until or 0, last.until_offset or 0) if before else (last.since, 0)
        for each in spans:
            if each.since_offset > self._last:
                free.until, free.until_offset, free.ended, free.ended_by = (
                    each.since,
                    each.since_offset,
                    End.CLAIMED,
                    each.client_id,
                )
                return

    @property
    def judged_at(self) -> int:
        """The log time (ms) at which silence is judged at that moment."""
        return self.world.log_time if self.at is None else max(self.at, self.world.log_time)

    def _is_beyond(self, offset: int, stamp: int) -> bool:
        if self.at_offset is not None:
            return offset > self.at_offset
        return self.at is not None and stamp > self.at

    def _capture(self) -> None:
        lease = self.world.lease(*self.key)
        self._last = self.world.next_offset - 1
        if lease is not None and lease.shares is not None:
            for share, span in self.shares.now():
                freshness, beats = share.freshness(self.judged_at), (share.last_beat, share.heartbeat_interval_ms)
                self.moments.append(OwnershipAt(span, *beats, freshness, done_by(lease, span) + 1))
            gaps = [] if lease.shares.by_batches else [part[:2] for part in lease.shares.parts() if part[2] is None]
            for lo, hi in gaps:
                free = Span(self.key, False, "", "", 0, 0, -1, 0, lo=lo, hi=hi)
                self.moments.append(OwnershipAt(free, 0, 0, "free", lease.progress.floor([(lo, hi)]) + 1))
            self.moments.sort(key=lambda each: each.span.lo)
        elif lease is not None and self.spans:
            freshness = lease.freshness(self.judged_at)
            beats = lease.last_beat, lease.heartbeat_interval_ms
            self.moments = [OwnershipAt(self.spans[-1], *beats, freshness, lease.progress.stable + 1)]
        self._holes = [] if lease is None else list(lease.progress.open)

    def _count_open(self) -> None:
        for moment in self.moments:
            is_keyed = moment.span.lo != NO_KEY
            lo, hi = (moment.span.lo, moment.span.hi) if is_keyed else (0, MAX_KEY_HASH)
            holes = [hole for hole in self._holes if hole.key_hash == NO_KEY or lo <= hole.key_hash <= hi]
            moment.open, moment.parked = _messages(holes), _messages(hole for hole in holes if hole.is_parked)


@dataclass(slots=True)
class PieceOwnership(Ownership):
    """The history of one partition of a coordinated group, from a replay of the group's home CP."""

    assignments: Assignments = field(default_factory=lambda: Assignments(""))
    #: client_id → (last beat, half its session, freshness, own last record) at that moment.
    _members: dict[str, tuple[int, int, str, int | None]] = field(default_factory=dict)
    #: (first key hash, last key hash, next offset) at that moment.
    _done: list[tuple[int, int, int]] = field(default_factory=list)
    #: (offset, what a client did to its position).
    _set: list[tuple[int, str]] = field(default_factory=list)

    @property
    def in_parts(self) -> bool:
        """See above."""
        return True

    def begin(self, world: World) -> None:
        self.world = world
        self.assignments.begin(world)
        self.spans: list[Span] = list(self.assignments.now.get(self.key[1:], []))
        for each in self.spans:
            each.since = world.log_time

    def _see(self, outcome: Outcome) -> None:
        begun = self.assignments.see(self.world, outcome)
        self.spans += [each for each in begun if each.key == self.key]
        if outcome.accepted and (what := self._what_was_set(outcome)):
            self._set.append((self.world.next_offset - 1, what))

    def _what_was_set(self, outcome: Outcome) -> str:
        """What a client that is no member did to the position of this partition; "": nothing."""
        message = outcome.message
        if outcome.group_id != self.key[0]:
            return ""
        if outcome.is_a(Rollback):
            return f"{message.client_id} put the group back to checkpoint {message.checkpoint or '(the newest)'}"
        if outcome.is_a(CommitOffsets) and outcome.by_operator:
            for entry, code in zip(message.entries, outcome.entries or (), strict=True):
                if (entry[0], entry[1]) == self.key[1:] and entry[5] is not None and code in codes.ACCEPTED:
                    return f"{message.client_id} set its position to {entry[5] + 1}"
        return ""

    def _capture(self) -> None:
        self._last = self.world.next_offset - 1
        group = self.world.group(self.key[0])
        self._done = [
            (info.lo, info.hi, 0 if info.stable is None else info.stable + 1)
            for info, _ in holdings(self.world, self.key[0])
            if (info.topic, info.partition) == self.key[1:]
        ]
        kept = None if group is None else group.kept(*self.key[1:])
        self._holes = [] if kept is None else list(kept.progress.open)
        for member in () if group is None else group.members.values():
            beats, freshness = (member.last_beat, member.heartbeat_interval_ms), member.freshness(self.judged_at)
            self._members[member.client_id] = *beats, freshness, self.assignments.heard(member.client_id)

    def end(self) -> None:
        Ownership.end(self)
        self.assignments.spans(self.world.group(self.key[0]), self.key[1:])
        self.spans.sort(key=lambda each: (each.since_offset, each.lo))
        for each in self.spans:
            found = [what for offset, what in self._set if each.since_offset <= offset < (each.until_offset or offset)]
            if found and not each.held:
                each.ended_by += f", after {'; '.join(found)}"
        for each in sorted(self.spans, key=lambda each: each.lo):
            if each.since_offset <= self._last and (each.until_offset is None or self._last < each.until_offset):
                beat, half, freshness, heard = self._members.get(each.client_id, (each.last_beat, 0, "free", None))
                done = min((done for lo, hi, done in self._done if lo <= each.hi and each.lo <= hi), default=0)
                self.moments.append(
                    OwnershipAt(each, beat, half, freshness if each.held else "free", done, heard=heard)
                )
        self._count_open()
        self._name_outages()


def moment_text(when: str, moment: OwnershipAt, is_piece: bool) -> str:
    """The owner at that moment, in a sentence."""
    held = moment.span
    when += f", {keys}" if (keys := keys_text(held)) else ""
    if not held.held:
        return f"{when}: nobody, free since {time_text(held.since)} ({_later(held)})."
    text = f"{when}: {held.client_id}, epoch {held.epoch}, since {time_text(held.since)} ({_later(held)})."
    lapse, before = ("session had ended", "half a session") if is_piece else ("lease had lapsed", "one interval")
    if moment.freshness == "stale":
        lapsed = moment.last_beat + STALE_AFTER_INTERVALS * moment.heartbeat_interval_ms
        since = moment.last_beat if moment.heard is None else moment.heard
        outage = f", with an outage of the whole log of {span(moment.stood_ms)}" if moment.stood_ms else ""
        text += f"\nBut silent since {time_text(since)}{outage}: its {lapse} at {time_text(lapsed)}."
    elif moment.freshness == "unknown":
        text += f"\nIts last beat was at {time_text(moment.last_beat)}, more than {before} before."
    return text


def next_text(moment: OwnershipAt) -> str:
    """The offset to read next, and what is open besides."""
    if not moment.open:
        return f"Next offset: {moment.next}."
    parked = f", {moment.parked} of them parked" if moment.parked else ""
    return f"Next offset: {moment.next}. Open: {count(moment.open, 'message')}{parked}."


def _messages(holes: Iterable[Hole]) -> int:
    return sum(hole.last - hole.first + 1 for hole in holes)


def _overlap(a: Span, b: Span) -> bool:
    return a.lo <= b.hi and b.lo <= a.hi


def keys_text(span: Span) -> str:
    """The range of keys, in hundredths, or "by batches"; "" for all keys."""
    if span.lo == NO_KEY:
        return "by batches"
    if span.lo == 0 and span.hi == MAX_KEY_HASH:
        return ""
    return "keys " + place_text(0, span.lo, span.hi)[3:-1]


def _later(found: Span) -> str:
    if found.until is None:
        return "as far as the log goes"
    return f"until {time_text(found.until)}: {ended_text(found)}"


def ended_text(found: Span) -> str:
    """How a span ended, in words; "": it has not ended."""
    match found.ended:
        case End.OPEN:
            return ""
        case End.RELEASED:
            return f"released{_done(found)}" + (f"; then {found.ended_by}" if found.ended_by else "")
        case End.EVICTED if found.is_lease:
            return f"evicted by {found.ended_by}{_done(found)}"
        case End.EVICTED:
            return f"evicted by {found.evictor}{_done(found)}" + (f"; then {found.ended_by}" if found.ended_by else "")
        case End.REPLACED:
            silence = silence_text((found.until or 0) - found.last_beat, found.stood_ms)
            verb = "then claimed by" if found.is_lease else "then it went to"
            return f"silent for {silence}" + (f", {verb} {found.ended_by}" if found.ended_by else "")
        case End.LEFT:
            return f"it left{_done(found)}" + (f"; then {found.ended_by}" if found.ended_by else "")
        case End.RESTARTED:
            return "its own newer instance took over"
        case End.RESET:
            return "its group went back to a checkpoint"
        case End.FORGOTTEN:
            return "the group was forgotten"
        case End.CLAIMED:
            return f"claimed by {found.ended_by}" if found.is_lease else f"given to {found.ended_by}"


def _done(found: Span) -> str:
    return f", next offset {found.stable + 1}" if found.stable >= 0 else ", nothing done"


def span_json(each: Span) -> dict[str, object]:
    """A span as in `who --json`."""
    return {
        "holder": {"client": each.client_id, "instance": each.instance_id} if each.held else None,
        "keys": None if each.lo == NO_KEY else [each.lo, each.hi],
        "epoch": each.epoch if each.held else None,
        "since": each.since,
        "since_offset": each.since_offset,
        "until": each.until,
        "until_offset": each.until_offset,
        "ended": ended_text(each) or None,
    }
