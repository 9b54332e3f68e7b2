"""The state of a coordinated group by the outcomes of the log alone, to compare the audited state with.

As `Watched` does for leases, it follows accepted records: joins, leaves, heartbeats, expired sessions (G8), released
keys (G14). It computes no targets: a wrong target does no harm to data. A wrong owner does, so changes of owner are
checked.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Final

from kafka_marshal.pipeline.audit.invariants import Watched
from kafka_marshal.pipeline.audit.piece_spans import PieceSpan, Place
from kafka_marshal.pipeline.audit.watched_checkpoints import ANSWER, BEGIN, ROLLBACK, WatchedCheckpoints
from rationalizer import Group, Piece, codes
from rationalizer.done_through import KeyPiece
from rationalizer.groups.pieces import NEVER
from rationalizer.wire.wellformed import LET_GO

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
class Event:
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
        self.done: dict[tuple[str, int], Watched] = {}
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
            if pieces := pieces_in(group, topic, partition):
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

    def adopt_progress(self, group: Group, topic: str, partition: int) -> None:
        """Continue from the state's progress of this partition."""
        at = (topic, partition)
        kept = group.kept(topic, partition)
        self.keyed.pop(at, None)
        if kept is None:
            self.done.pop(at, None)
            return
        done = self.done[at] = Watched((self.group_id, topic, partition))
        done.stable = kept.progress.stable
        if kept.progress.ranges:
            done.commit(tuple(kept.progress.ranges))
        if kept.progress.pieces is not None:
            self.keyed[at] = kept.progress.done_through

    # -- members ---------------------------------------------------------------------------------------

    def take(self, kind: int, message: Any, offset: int, log_time: int, member_id: str | None) -> Event:
        """Apply an accepted record; member_id: of a JoinGroup's member."""
        event = Event(_REASONS.get(kind, ""))
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
        """X6: the open barrier is complete, and those that answered so leave; as `Event.gone`."""
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

    def _remove_expired(self, event: Event, log_time: int) -> None:
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

    def _join(self, event: Event, message: Any, offset: int, log_time: int, member_id: str) -> None:
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

    def handed_over(self, event: Event, place: Place, span: PieceSpan) -> bool:
        """Whether the owner handed these keys in at the checkpoint that this record completed (X6)."""
        pieces = self.touched(*place[1:], span.lo, span.hi)
        return event.completed is not None and event.completed.handed_over(
            span.slot, place[1:], span.lo, span.hi, pieces
        )

    def released(self, event: Event, place: Place, span: PieceSpan) -> bool:
        """Whether the sender of this record released these keys, by a revocation that it knew."""
        if span.slot != event.slot:
            return False
        at = span.lo
        for lo, hi in sorted(event.released.get(place[1:], ())):
            if lo <= at:
                at = max(at, hi + 1)
        orders = [piece.revoked for piece in self.touched(*place[1:], span.lo, span.hi)]
        return at > span.hi and all(NEVER < revoked <= event.generation for revoked in orders)


_LO: Final = attrgetter("lo")
_HI: Final = attrgetter("hi")


def pieces_in(group: Group, topic: str, partition: int) -> tuple[Piece, ...]:
    """The state's pieces of a partition."""
    of_topic = group.pieces.get(topic)
    return () if of_topic is None else tuple(of_topic[partition])


def is_release(entry: tuple[object, ...], code: str) -> bool:
    """Whether an entry of a CommitOffsets releases its keys."""
    return entry[4] == LET_GO and code in codes.ACCEPTED
