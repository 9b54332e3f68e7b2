"""The state of a coordinated group by the outcomes of the log alone, to compare the audited state with.

As `WatchedLease` does for leases, it follows accepted records: joins, leaves, heartbeats, expired sessions (G8),
released keys (G14). It computes no targets: a wrong target does no harm to data. A wrong owner does, so changes of
owner are checked.

A *span* is the time of one owner with key hashes lo … hi of a partition under one fencing token (G5), or the time
without an owner. Pieces are split and merged without a change of owner; spans follow the keys.

Of checkpoints (section 7) it follows who began a barrier, what was answered, and what each has of each partition.
Which are kept is the state's to say: one that goes harms nothing that is done.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Final, NamedTuple

from kafka_marshal.pipeline.audit.files import Row
from kafka_marshal.pipeline.audit.invariants import WatchedLease
from rationalizer import Group, Piece, codes
from rationalizer.done_through import KeyPiece
from rationalizer.groups.assignors import NOBODY
from rationalizer.groups.group import pieces_of
from rationalizer.groups.pieces import NEVER
from rationalizer.history import BEFORE
from rationalizer.limits import MAX_KEY_HASH
from rationalizer.wire.wellformed import LET_GO, REACHED_AND_LEAVES, REFUSED

#: (group, topic, partition)
Place = tuple[str, str, int]


class PieceSpan(NamedTuple):
    """Key hashes lo … hi, their owner, and since when. Times are log time (ms), offsets are of the CP."""

    lo: int
    hi: int
    #: Slot of the owner, or ``NOBODY``; the token is then the last owner's.
    slot: int
    client: str
    instance: str
    token: int
    #: BEFORE: it began before the replay. Without an owner: when the last owner was known to have them.
    since: int
    since_offset: int
    #: Time without an owner before (ms); None: no previous owner, or unknown.
    unowned: int | None
    #: Its predecessor may be in an earlier part of the log.
    looks_back: bool = False

    @property
    def owned(self) -> bool:
        """Whether they have an owner."""
        return self.slot != NOBODY


class EndedPiece(NamedTuple):
    """A span that is over."""

    place: Place
    span: PieceSpan
    until_offset: int
    until: int
    ended: str


#: How an ended span ended, and the last moment at which its owner was known to have the keys.
How = Callable[[PieceSpan], tuple[str, int]]


def assignment_row(place: Place, span: PieceSpan, end: EndedPiece | None) -> Row:
    """A row of `assignments`; the writer adds its CP. end: None while it lasts."""
    since = None if span.since == BEFORE else span.since
    begun = None if span.since == BEFORE else span.since_offset
    last = (None, None, "open") if end is None else (end.until_offset, end.until, end.ended)
    names = (*place, span.lo, span.hi, span.client, span.instance, span.token)
    return (*names, begun, since, *last, span.unowned)


def overlay(
    before: Sequence[PieceSpan], after: Sequence[Piece]
) -> Iterator[tuple[int, int, PieceSpan | None, Piece | None]]:
    """The common refinement of both, ascending: (lo, hi, old, new)."""
    keys = [*((span.lo, span.hi) for span in before), *((piece.lo, piece.hi) for piece in after)]
    edges = sorted({edge for lo, hi in keys for edge in (lo, hi + 1)})
    was, now = iter(before), iter(after)
    span, piece = next(was, None), next(now, None)
    for lo, end in itertools.pairwise(edges):
        while span is not None and span.hi < lo:
            span = next(was, None)
        while piece is not None and piece.hi < lo:
            piece = next(now, None)
        old = span if span is not None and span.lo <= lo else None
        new = piece if piece is not None and piece.lo <= lo else None
        if old is not None or new is not None:
            yield lo, end - 1, old, new


def joined(spans: Iterable[PieceSpan]) -> list[PieceSpan]:
    """Merge neighbours that are equal except for their keys."""
    found: list[PieceSpan] = []
    for span in spans:
        if found and found[-1].hi + 1 == span.lo and found[-1][2:] == span[2:]:
            span = span._replace(lo=found.pop().lo)
        found.append(span)
    return found


class PieceSpans:
    """The present span of each key of each partition."""

    def __init__(self) -> None:
        self.now: dict[Place, list[PieceSpan]] = {}
        #: Groups that may have spans in an earlier part of the log.
        self._older: set[str] = set()
        #: Groups that were forgotten, so that spans there have ended.
        self.forgotten: set[str] = set()

    def begin(self, group_id: str) -> None:
        """The group existed before this replay began."""
        self._older.add(group_id)

    def adopt(self, place: Place, pieces: Sequence[Piece], names: Callable[[int], tuple[str, str]]) -> None:
        """These pieces already have owners where the replay begins."""
        spans = [
            PieceSpan(piece.lo, piece.hi, piece.owner, *names(piece.owner), piece.since, BEFORE, BEFORE, None)
            for piece in pieces
        ]
        if spans:
            self.now[place] = joined(spans)

    def change(
        self,
        place: Place,
        pieces: Sequence[Piece],
        at: tuple[int, int],
        names: Callable[[int], tuple[str, str]],
        how: How,
    ) -> tuple[list[EndedPiece], list[tuple[PieceSpan | None, PieceSpan]]]:
        """Set the partition's pieces from (offset, log time) on.

        Returns the spans that ended, and those that began: each with its predecessor.
        """
        offset, log_time = at
        ended: list[EndedPiece] = []
        begun: list[tuple[PieceSpan | None, PieceSpan]] = []
        found: list[PieceSpan] = []
        for lo, hi, old, piece in overlay(self.now.get(place, ()), pieces):
            was = None if old is None else old._replace(lo=lo, hi=hi)
            if was is not None and _is_so_still(was, piece):
                found.append(was)
                continue
            known = None
            if was is not None and was.owned:
                word, known = how(was)
                ended.append(EndedPiece(place, was, offset, log_time, word))
            elif was is not None and was.since != BEFORE:
                known = was.since
            if piece is None:
                assert was is not None
                assert known is not None
                found.append(PieceSpan(lo, hi, NOBODY, "", "", was.token, known, offset, None))
                continue
            gap = None if known is None else log_time - known
            looks_back = was is None and place[0] in self._older
            owner = (piece.owner, *names(piece.owner), piece.since)
            found.append(PieceSpan(lo, hi, *owner, log_time, offset, gap, looks_back))
            begun.append((was, found[-1]))
        self.now[place] = joined(found)
        return _joined_ends(ended), begun

    def forget(self, group_id: str, at: tuple[int, int]) -> list[EndedPiece]:
        """The group was forgotten (C16); returns the spans that ended."""
        places = [place for place in self.now if place[0] == group_id]
        ended = [
            EndedPiece(place, span, *at, "forgotten") for place in places for span in self.now.pop(place) if span.owned
        ]
        self._older.discard(group_id)
        self.forgotten.add(group_id)
        return ended


def _is_so_still(span: PieceSpan, piece: Piece | None) -> bool:
    if piece is None:
        return not span.owned
    return (span.slot, span.token) == (piece.owner, piece.since)


def _joined_ends(ended: list[EndedPiece]) -> list[EndedPiece]:
    """Merge parts of one span that ended alike into one row."""
    if len(ended) < 2:
        return ended
    ends: dict[str, list[PieceSpan]] = {}
    for each in ended:
        ends.setdefault(each.ended, []).append(each.span)
    first = ended[0]
    return [first._replace(span=span, ended=word) for word, spans in ends.items() for span in joined(spans)]


def parts_of(span: PieceSpan, before: Sequence[PieceSpan]) -> Iterator[PieceSpan]:
    """The span, completed with how it began in an earlier part of the log.

    before: the spans of its partition at the end of that part.
    """
    if span.since != BEFORE and not span.looks_back:
        yield span
        return
    at = span.lo
    for old in before:
        lo, hi = max(at, old.lo), min(span.hi, old.hi)
        if lo > hi:
            continue
        if at < lo:
            yield span._replace(lo=at, hi=lo - 1)
        part = span._replace(lo=lo, hi=hi)
        if span.looks_back:
            gap = span.since - old.since if not old.owned and old.since != BEFORE else None
            part = part._replace(unowned=gap, looks_back=old.looks_back)
        elif (old.slot, old.token) == (span.slot, span.token):
            part = old._replace(lo=lo, hi=hi)
        yield part
        at = hi + 1
    if at <= span.hi:
        yield span._replace(lo=at)


BEGIN: Final = 23
ANSWER: Final = 24
ROLLBACK: Final = 25
KEEP: Final = 27

#: (topic, partition)
Key = tuple[str, int]


class Done(NamedTuple):
    """What is done of a partition: by key, and the ranges above."""

    done_through: tuple[KeyPiece, ...]
    ranges: tuple[tuple[int, int], ...]

    @classmethod
    def in_state(cls, group: Group, key: Key) -> Done | None:
        """As the state has it now; None: it has no progress."""
        kept = group.kept(*key)
        return None if kept is None else cls(tuple(kept.progress.done_through), tuple(kept.progress.ranges))

    @classmethod
    def through(cls, offset: int) -> Done:
        """All up to this offset."""
        return cls(((0, MAX_KEY_HASH, offset),), ())


@dataclass(frozen=True, slots=True)
class Answered:
    """A member's answer that was noted."""

    generation: int
    answer: int
    #: Its record, for the names and the entries; None: it was noted before this replay.
    message: Any = None
    #: Its sender: (client_id, instance_id).
    sender: tuple[str, str] = ("", "")
    #: Keys that it handed in: (topic, partition) → (lo, hi).
    keys: Mapping[Key, Sequence[tuple[int, int]]] = field(default_factory=dict)


@dataclass(slots=True)
class WatchedCheckpoints:
    """Those of one group; live."""

    hold: bool
    newest: int
    #: The open barrier; −1: none is open.
    barrier: int = -1
    #: By slot.
    answers: dict[int, Answered] = field(default_factory=dict)
    #: Checkpoint → what it has of the partitions that changed since the one before; the oldest has all that is known.
    deltas: dict[int, dict[Key, Done | None]] = field(default_factory=dict)
    #: Where a partition began (G14); partitions without a start are not in it.
    initial: dict[Key, int] = field(default_factory=dict)

    @classmethod
    def of(cls, group: Group) -> WatchedCheckpoints:
        """Those of a group where the watch begins."""
        checkpoints = group.checkpoints
        assert checkpoints is not None
        found = cls(checkpoints.hold, checkpoints.newest)
        found.deltas = {kept.id: {} for kept in checkpoints.kept}
        for key in group.partitions():
            kept_progress = group.kept(*key)
            if kept_progress is not None and key not in checkpoints.unset:
                found.initial[key] = kept_progress.initial
            for version in group.versions(key):
                first = min((each for each in found.deltas if each >= version.checkpoint), default=None)
                if first is not None:  # the first that sees it; its own may be gone
                    found.deltas[first][key] = Done(tuple(version.done_through), tuple(version.ranges))
        barrier = checkpoints.barrier
        if barrier is not None:
            found.barrier = barrier.id
            saved = _saved(group, barrier.id)
            for slot, answer in barrier.answers.items():
                member = group.members.get(slot)
                names = ("", "") if member is None else (member.client_id, member.instance_id)
                mine = {key: keys for key, keys in saved.items() if _owns(group, slot, key, keys[0][0])}
                found.answers[slot] = Answered(answer.generation, answer.answer, None, names, mine)
        return found

    def note(self, slot: int, message: Any) -> None:
        """An answer was noted."""
        keys: dict[Key, list[tuple[int, int]]] = {}
        for entry in message.entries:
            keys.setdefault((entry[0], entry[1]), []).append((entry[2], entry[3]))
        names = (message.client_id, message.instance_id)
        self.answers[slot] = Answered(message.generation, message.answer, message, names, keys)

    def leavers(self) -> list[int]:
        """Slots that answered that they leave."""
        return [slot for slot, each in self.answers.items() if each.answer == REACHED_AND_LEAVES]

    def why_not_complete(self, owners: Iterable[int]) -> str:
        """Why the open barrier must not be complete; "": it may."""
        answers = [self.answers.get(slot) for slot in set(owners)]
        reached = [each for each in answers if each is not None and each.answer != REFUSED]
        if answers and not reached:
            return "no owner handed in"
        return "an owner is missing in it" if self.hold and len(reached) < len(answers) else ""

    def handed_over(self, slot: int, key: Key, lo: int, hi: int, pieces: Sequence[Piece]) -> bool:
        """Whether the owner handed all of these keys in for the open barrier, by a revocation that it knew."""
        answered = self.answers.get(slot)
        if answered is None or answered.answer == REFUSED:
            return False
        return _are_released(lo, hi, answered.keys.get(key, ()), pieces, answered.generation)

    def close(self) -> None:
        """No barrier is open any more."""
        self.barrier = -1
        self.answers = {}

    def complete(self, checkpoint: int, changed: Mapping[Key, Done | None], kept: Sequence[int]) -> None:
        """This one is the newest; those that are not kept go."""
        self.newest = checkpoint
        self.deltas[checkpoint] = dict(changed)
        gone = sorted(self.deltas.keys() - set(kept))
        for each in gone:
            self.drop(each)

    def drop(self, checkpoint: int) -> None:
        """It is not kept any more: the next one has what it had."""
        older = self.deltas.pop(checkpoint, None)
        heir = min((each for each in self.deltas if each > checkpoint), default=None)
        if older is not None and heir is not None:
            self.deltas[heir] = {**older, **self.deltas[heir]}

    def go_back(self, checkpoint: int) -> dict[Key, Done | None]:
        """Drop all above this one; what is done then, of the partitions that this changes."""
        above = [each for each in self.deltas if each > checkpoint]
        changed = {key for each in above for key in self.deltas.pop(each)}
        self.newest = checkpoint
        self.close()
        return {key: self._seen(key) for key in changed}

    def _seen(self, key: Key) -> Done | None:
        for checkpoint in sorted(self.deltas, reverse=True):
            if key in self.deltas[checkpoint]:
                return self.deltas[checkpoint][key]
        return Done.through(self.initial[key]) if key in self.initial else None


def _are_released(
    lo: int, hi: int, released: Iterable[tuple[int, int]], pieces: Iterable[Piece], generation: int
) -> bool:
    """Whether all keys lo … hi are among those released, by revocations of their pieces known in that generation."""
    for first, last in sorted(released):
        if first <= lo:
            lo = max(lo, last + 1)
    return lo > hi and all(NEVER < piece.revoked <= generation for piece in pieces)


def _owns(group: Group, slot: int, key: Key, lo: int) -> bool:
    return any(piece.owner == slot and piece.lo <= lo <= piece.hi for piece in pieces_of(group, *key))


def _saved(group: Group, barrier: int) -> dict[Key, list[tuple[int, int]]]:
    """What was handed in for a barrier before this replay: the state says so."""
    found: dict[Key, list[tuple[int, int]]] = {}
    for key in group.partitions():
        for version in group.versions(key):
            if version.checkpoint == barrier:
                found[key] = [(lo, hi) for lo, hi, id_ in version.states if id_ == barrier]
    return found


JOIN, BEAT, LEAVE, COMMIT, TOPICS, CONFIGURE = range(16, 22)
SETTLE = 29

#: Cause of a rebalance by record type.
_REASONS = {
    BEAT: "died",
    LEAVE: "left",
    COMMIT: "died",
    SETTLE: "died",
    TOPICS: "topics changed",
    CONFIGURE: "configured",
    ANSWER: "died",
    BEGIN: "handed over",
    ROLLBACK: "rolled back",
}


@dataclass(slots=True)
class WatchedMember:
    """One member (G3)."""

    client: str
    instance: str
    member_id: str
    session: int
    last_beat: int

    @property
    def ids(self) -> tuple[str, str, str]:
        """What names it."""
        return self.client, self.instance, self.member_id

    def is_overdue(self, log_time: int) -> bool:
        """G8."""
        return log_time - self.last_beat > self.session


@dataclass(slots=True)
class GroupChange:
    """The effect of an accepted record on a group."""

    #: As in the table `generations`.
    reason: str
    #: Slots whose pieces became free → how they ended, and when their owner was last known to have them.
    gone: dict[int, tuple[str, int]] = field(default_factory=dict)
    #: client_ids whose session expired.
    died: list[str] = field(default_factory=list)
    #: Keys that its sender released: (topic, partition) → (lo, hi).
    released: dict[tuple[str, int], list[tuple[int, int]]] = field(default_factory=dict)
    #: The sender's slot, and the generation it wrote; None: not a member.
    slot: int | None = None
    generation: int = 0
    #: Why the record must not be accepted; "": it may.
    stale: str = ""
    #: The barrier that it completed; its owners' answers; None: it completed none.
    completed: WatchedCheckpoints | None = None
    #: All go back to a checkpoint, and keep what they own under new tokens (X7, X8).
    reset: bool = False


class WatchedGroup:
    """One group; live."""

    def __init__(self, group_id: str, made: int) -> None:
        self.group_id = group_id
        #: Offset at which the group was created: no fencing token may be lower (G5).
        self.made = made
        self.generation = 0
        self.members: dict[int, WatchedMember] = {}
        self._slots: dict[str, int] = {}
        self.pieces: dict[tuple[str, int], tuple[Piece, ...]] = {}
        #: Offsets done for all keys.
        self.done: dict[tuple[str, int], WatchedLease] = {}
        #: Offsets done by key, of shared partitions.
        self.keyed: dict[tuple[str, int], list[KeyPiece]] = {}
        #: None: it takes none.
        self.checkpoints: WatchedCheckpoints | None = None
        #: No member's session expires before this log time.
        self._none_expires_until = -1

    @classmethod
    def of(cls, group: Group) -> WatchedGroup:
        """A group at the place where the watch begins."""
        watched = cls(group.group_id, -1)
        watched.adopt_members(group)
        watched.generation = group.generation
        if group.checkpoints is not None:
            watched.checkpoints = WatchedCheckpoints.of(group)
        for topic, partition in group.partitions():
            if pieces := tuple(pieces_of(group, topic, partition)):
                watched.pieces[topic, partition] = pieces
            if group.kept(topic, partition) is not None:
                watched.adopt_progress(group, topic, partition)
        return watched

    def adopt_members(self, group: Group) -> None:
        """Continue from the state's members."""
        self.members = {
            slot: WatchedMember(
                each.client_id, each.instance_id, each.member_id, each.session_timeout_ms, each.last_beat
            )
            for slot, each in group.members.items()
        }
        self._slots = {member.client: slot for slot, member in self.members.items()}
        self._none_expires_until = -1

    def done_of(self, at: tuple[str, int]) -> WatchedLease:
        """What is done of this partition, for all keys."""
        return self.done.setdefault(at, WatchedLease((self.group_id, *at)))

    def adopt_progress(self, group: Group, topic: str, partition: int) -> None:
        """Continue from the state's progress of this partition."""
        at = (topic, partition)
        kept = group.kept(topic, partition)
        self.keyed.pop(at, None)
        if kept is None:
            self.done.pop(at, None)
            return
        done = self.done[at] = WatchedLease((self.group_id, topic, partition))
        done.stable = kept.progress.stable
        if kept.progress.ranges:
            done.commit(tuple(kept.progress.ranges))
        if kept.progress.pieces is not None:
            self.keyed[at] = kept.progress.done_through

    # -- members ---------------------------------------------------------------------------------------

    def take(self, kind: int, message: Any, offset: int, log_time: int, member_id: str | None) -> GroupChange:
        """Apply an accepted record; member_id: of a JoinGroup's member."""
        event = GroupChange(_REASONS.get(kind, ""))
        if "member_id" not in message._fields:  # it has no sender, and removes no member
            return event
        named = message.member_id
        if kind == SETTLE and not named:  # an operator's (H4)
            return event
        event.slot = self._sender(kind, message)
        sender = f"{message.client_id}/{message.instance_id}"
        if event.slot is None and named:
            event.stale = f"a record of {sender} took effect, which is no member under the id {named}"
            return event
        if kind in (BEAT, LEAVE, COMMIT, ANSWER, SETTLE):
            event.generation = message.generation
            if event.slot is not None and event.generation > self.generation:
                event.stale = f"a record of {sender} with generation {event.generation} took effect"
        self._remove_expired(event, log_time)
        if kind == JOIN:
            self._join(event, message, offset, log_time, member_id or "")
        elif kind == LEAVE and event.slot is not None:
            self._remove(event.slot)
            event.gone[event.slot] = ("left", log_time)
        elif event.slot is not None:
            self.members[event.slot].last_beat = log_time
        return event

    def leave_at_checkpoint(self, log_time: int) -> dict[int, tuple[str, int]]:
        """X6: the open barrier is complete, and those that answered so leave; as `GroupChange.gone`."""
        assert self.checkpoints is not None
        leavers = [slot for slot in self.checkpoints.leavers() if slot in self.members]
        for slot in leavers:
            self._remove(slot)
        return dict.fromkeys(leavers, ("left", log_time))

    def _sender(self, kind: int, message: Any) -> int | None:
        """G6."""
        instance, client, member_id = message.instance_id, message.client_id, message.member_id
        slot = self._slots.get(client)
        if slot is None or (kind == JOIN and not member_id):
            return slot
        return slot if self.members[slot].ids == (client, instance, member_id) else None

    def _remove(self, slot: int) -> WatchedMember:
        member = self.members.pop(slot)
        del self._slots[member.client]
        return member

    def _remove_expired(self, event: GroupChange, log_time: int) -> None:
        """Remove members whose session expired, unless all sessions did, the sender's too (G8)."""
        if log_time <= self._none_expires_until:
            return
        late = [slot for slot, member in self.members.items() if member.is_overdue(log_time)]
        if event.slot in late and len(late) == len(self.members):
            for member in self.members.values():
                member.last_beat = log_time
            late = []
        for slot in late:
            if slot != event.slot:
                member = self._remove(slot)
                event.gone[slot] = ("died", member.last_beat)
                event.died.append(member.client)
        others = [m.last_beat + m.session for slot, m in self.members.items() if slot != event.slot]
        mine = [log_time + self.members[event.slot].session] if event.slot is not None else []
        self._none_expires_until = min([*others, *mine], default=-1)

    def _join(self, event: GroupChange, message: Any, offset: int, log_time: int, member_id: str) -> None:
        """G11."""
        instance, client, session = message.instance_id, message.client_id, message.session_timeout_ms
        self._none_expires_until = min(self._none_expires_until, log_time + session)
        if event.slot is None:
            event.reason, event.slot = "joined", offset
            self._slots[client] = offset
            self.members[offset] = WatchedMember(client, instance, member_id, session, log_time)
            return
        member = self.members[event.slot]
        event.reason = "joined again"
        if member.instance != instance:
            event.reason = "restarted"
            event.gone[event.slot] = ("restarted", member.last_beat)
            member.instance, member.member_id = instance, member_id
        member.session, member.last_beat = session, log_time

    def differing(self, group: Group) -> str:
        """How the state's members differ from ours; "": they don't."""
        there = {slot: (each.client_id, each.instance_id, each.member_id) for slot, each in group.members.items()}
        if len(there) == len(self.members) and all(there.get(slot) == each.ids for slot, each in self.members.items()):
            return ""
        lost = [each.client for slot, each in self.members.items() if slot not in there]
        if lost:
            return (
                f"the state knows {', '.join(lost)} no more; no record removed it, and it was not silent for too long"
            )
        extra = [ids[0] for slot, ids in there.items() if slot not in self.members]
        if extra:
            return f"the state has the member {', '.join(extra)}, which left, was silent for too long, or never joined"
        return "the state has members with other ids than those under which they joined"

    # -- commits and releases --------------------------------------------------------------------------

    def touched(self, topic: str, partition: int, lo: int, hi: int) -> tuple[Piece, ...]:
        """The pieces with some of these keys before this record, ascending."""
        pieces = self.pieces.get((topic, partition), ())
        left = bisect_left(pieces, lo, key=_HI)
        return pieces[left : bisect_right(pieces, hi, left, key=_LO)]

    def owns(self, slot: int, topic: str, partition: int, lo: int, hi: int, generation: int) -> bool:
        """Whether the member owned all these keys before this record, in a generation that it knew (G14)."""
        at = lo
        for piece in self.touched(topic, partition, lo, hi):
            if piece.lo > at or piece.owner != slot or piece.since > generation:
                return False
            at = piece.hi + 1
        return at > hi

    def owns_any(self, slot: int, topic: str, partition: int, generation: int) -> bool:
        """Whether it owned any of the partition's keys so, as a start requires."""
        pieces = self.pieces.get((topic, partition), ())
        return any(piece.owner == slot and piece.since <= generation for piece in pieces)

    def handed_over(self, event: GroupChange, place: Place, span: PieceSpan) -> bool:
        """Whether the owner handed these keys in at the checkpoint that this record completed (X6)."""
        pieces = self.touched(*place[1:], span.lo, span.hi)
        return event.completed is not None and event.completed.handed_over(
            span.slot, place[1:], span.lo, span.hi, pieces
        )

    def released(self, event: GroupChange, place: Place, span: PieceSpan) -> bool:
        """Whether the sender of this record released these keys, by a revocation that it knew."""
        if span.slot != event.slot:
            return False
        pieces = self.touched(*place[1:], span.lo, span.hi)
        return _are_released(span.lo, span.hi, event.released.get(place[1:], ()), pieces, event.generation)


_LO: Final = attrgetter("lo")
_HI: Final = attrgetter("hi")


def is_release(entry: tuple[object, ...], code: str) -> bool:
    """Whether an entry of a CommitOffsets releases its keys."""
    return entry[4] == LET_GO and code in codes.ACCEPTED
