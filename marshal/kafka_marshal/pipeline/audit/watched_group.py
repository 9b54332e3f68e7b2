"""A coordinated group as the outcomes of the log tell of it, beside which the state of the group plane is held.

As `Watched` does for leases, it follows what was accepted, and no state: who joined, left, beat, was silent for too
long (G8), let go of what (G14). It computes no targets: which member should have what is nothing that could be wrong
for the data. Who has it is: that is judged where keys change hands.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Final

from kafka_marshal.pipeline.audit.invariants import Watched
from kafka_marshal.pipeline.audit.piece_spans import PieceSpan, Place
from rationalizer import Group, Piece, codes
from rationalizer.done_through import KeyPiece
from rationalizer.groups.pieces import NEVER
from rationalizer.limits import HEAD_FIELDS
from rationalizer.wire.unpacking import Message
from rationalizer.wire.wellformed import LET_GO

__all__ = ["Event", "WatchedGroup", "WatchedMember"]

JOIN, BEAT, LEAVE, COMMIT, TOPICS, CONFIGURE = range(16, 22)

#: What made the group rebalance, by the type of the record.
_REASONS = {BEAT: "died", LEAVE: "left", COMMIT: "died", TOPICS: "topics changed", CONFIGURE: "configured"}


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
    """What an accepted record did to a group, by what went before it."""

    #: In the words of the table `generations`.
    reason: str
    #: Whose pieces are free: slot → how it ended, and when it was last known to have them.
    gone: dict[int, tuple[str, int]] = field(default_factory=dict)
    #: client_ids that were silent for too long.
    died: list[str] = field(default_factory=list)
    #: What its sender let go of: (topic, partition) → (lo, hi).
    released: dict[tuple[str, int], list[tuple[int, int]]] = field(default_factory=dict)
    #: The sender's slot, and the generation it wrote; None: nobody's.
    slot: int | None = None
    generation: int = 0
    #: Why the record must not have been accepted; "": it may.
    stale: str = ""


class WatchedGroup:
    """One group; live."""

    def __init__(self, group_id: str, made: int) -> None:
        self.group_id = group_id
        #: No fencing token of the group may be below the offset at which it was made (G5).
        self.made = made
        self.generation = 0
        self.members: dict[int, WatchedMember] = {}
        self._slots: dict[str, int] = {}
        self.pieces: dict[tuple[str, int], tuple[Piece, ...]] = {}
        #: What is done, for every key.
        self.done: dict[tuple[str, int], Watched] = {}
        #: What is done by key, of partitions that are shared.
        self.keyed: dict[tuple[str, int], list[KeyPiece]] = {}
        #: Nobody is overdue up to this log time.
        self._nobody_until = -1

    @classmethod
    def of(cls, group: Group) -> WatchedGroup:
        """A group as it stands where the watch begins."""
        watched = cls(group.group_id, -1)
        watched.adopt_members(group)
        watched.generation = group.generation
        for topic, partition in group.partitions():
            if pieces := pieces_in(group, topic, partition):
                watched.pieces[topic, partition] = pieces
            if group.kept(topic, partition) is not None:
                watched.adopt_progress(group, topic, partition)
        return watched

    def adopt_members(self, group: Group) -> None:
        """Go on from the members that the state has."""
        self.members = {
            slot: WatchedMember(
                each.client_id, each.instance_id, each.member_id, each.session_timeout_ms, each.last_beat
            )
            for slot, each in group.members.items()
        }
        self._slots = {member.client: slot for slot, member in self.members.items()}
        self._nobody_until = -1

    def adopt_progress(self, group: Group, topic: str, partition: int) -> None:
        """Go on from the progress that the state has of this partition."""
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

    # -- who is a member -------------------------------------------------------------------------------

    def take(self, kind: int, message: Message, offset: int, log_time: int, member_id: str | None) -> Event:
        """Take in an accepted record; member_id: of the member that a JoinGroup is about."""
        event = Event(_REASONS.get(kind, ""))
        if kind == CONFIGURE:
            return event
        named = message[HEAD_FIELDS]
        event.slot = self._sender(kind, message)
        if event.slot is None and named:
            event.stale = f"a record of {message[3]}/{message[2]} took effect, which is no member under the id {named}"
            return event
        if kind in (BEAT, LEAVE, COMMIT):
            event.generation = message[HEAD_FIELDS + 1]
            if event.slot is not None and event.generation > self.generation:
                event.stale = f"a record of {message[3]}/{message[2]} with generation {event.generation} took effect"
        self._bury(event, log_time)
        if kind == JOIN:
            self._join(event, message, offset, log_time, member_id or "")
        elif kind == LEAVE and event.slot is not None:
            self._remove(event.slot)
            event.gone[event.slot] = ("left", log_time)
        elif event.slot is not None:
            self.members[event.slot].last_beat = log_time
        return event

    def _sender(self, kind: int, message: Message) -> int | None:
        """G6."""
        _, _, instance, client, _, member_id, *_ = message
        slot = self._slots.get(client)
        if slot is None or (kind == JOIN and not member_id):
            return slot
        return slot if self.members[slot].ids == (client, instance, member_id) else None

    def _remove(self, slot: int) -> WatchedMember:
        member = self.members.pop(slot)
        del self._slots[member.client]
        return member

    def _bury(self, event: Event, log_time: int) -> None:
        """Those that were silent for too long go, unless all were, the sender too (G8)."""
        if log_time <= self._nobody_until:
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
        self._nobody_until = min([*others, *mine], default=-1)

    def _join(self, event: Event, message: Message, offset: int, log_time: int, member_id: str) -> None:
        """G11."""
        _, _, instance, client, *_ = message
        session = message[HEAD_FIELDS + 2]
        self._nobody_until = min(self._nobody_until, log_time + session)
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
        """How the members of the state differ from ours; "": they don't."""
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

    # -- who may commit, and who has let go ------------------------------------------------------------

    def touched(self, topic: str, partition: int, lo: int, hi: int) -> tuple[Piece, ...]:
        """The pieces that had some of these keys before this record, ascending."""
        pieces = self.pieces.get((topic, partition), ())
        left = bisect_left(pieces, lo, key=_HI)
        return pieces[left : bisect_right(pieces, hi, left, key=_LO)]

    def owns(self, slot: int, topic: str, partition: int, lo: int, hi: int, generation: int) -> bool:
        """Whether the member owned all of these keys before this record, in a generation that it knew (G14)."""
        at = lo
        for piece in self.touched(topic, partition, lo, hi):
            if piece.lo > at or piece.owner != slot or piece.since > generation:
                return False
            at = piece.hi + 1
        return at > hi

    def owns_any(self, slot: int, topic: str, partition: int, generation: int) -> bool:
        """Whether it owned any of the partition's keys so: what a start asks for."""
        pieces = self.pieces.get((topic, partition), ())
        return any(piece.owner == slot and piece.since <= generation for piece in pieces)

    def released(self, event: Event, place: Place, span: PieceSpan) -> bool:
        """Whether the sender of this record let go of these keys, by an order that it knew."""
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
    """The pieces that the state has of a partition."""
    of_topic = group.pieces.get(topic)
    return () if of_topic is None else tuple(of_topic[partition])


def lets_go(entry: tuple[object, ...], code: str) -> bool:
    """Whether an entry of a CommitOffsets lets go of its keys."""
    return entry[4] == LET_GO and code in codes.ACCEPTED
