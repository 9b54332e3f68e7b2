"""Our partitions of a coordinated group, and what the log shows of it, as one member reads it (G4, G18)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf

from kafka_marshal.engine.groups.member import Membership
from kafka_marshal.engine.holding import Holding, Owner
from kafka_marshal.engine.key_share import KeyShare
from kafka_marshal.engine.plane import PAUSED
from kafka_marshal.types import Key
from rationalizer import Group, Piece, Progress, World
from rationalizer.holes import Hole
from rationalizer.limits import MAX_INTERVALS, MAX_KEY_HASH

#: Why a partition is released when it is assigned to another member.
REVOKED = "it is assigned to another member"

#: For people: why a partition is lost when the log no longer shows it as ours.
NOT_OURS = "the log shows it as another member's, or this process as no member"


@dataclass(slots=True)
class LettingGo:
    """A release in flight; ``why`` decides what to do next."""

    last_offset: int | None
    why: str
    sent_at: float


def part_of(piece: HeldPiece) -> tuple[int, int] | None:
    """The key hashes (lo, hi) of a piece; None: all."""
    return None if piece.keys is None or not piece.keys.is_part else piece.span


class HeldPiece(Holding):
    """One partition, or some of its keys, that the log shows as ours. One heartbeat of the member proves all (T4)."""

    __slots__ = (
        "epoch",
        "followed",
        "cut_at",
        "held",
        "is_cut_whole",
        "is_held_up",
        "is_paused",
        "is_restored",
        "keys",
        "letting_go",
        "most_intervals",
        "proven_by",
        "valid_until",
    )

    def __init__(
        self,
        key: Key,
        cp: int,
        epoch: int,
        session_timeout_ms: int,
        owner: Owner,
        keys: KeyShare | None = None,
        group: Group | None = None,
    ) -> None:
        super().__init__(key, cp, session_timeout_ms // 2, owner)  # as for a lease: it is over after two of them
        self.keys: KeyShare | None = keys
        #: The generation since which its newest part is ours (G5).
        self.epoch: int = epoch
        self.most_intervals: int = MAX_INTERVALS if group is None else group.settings.max_individual_commits
        allows = group is None or group.settings.accept_individual_commit
        # A checkpoint can't name ranges of some keys, nor in a group without them.
        self.is_cut_whole: bool = (
            group is not None and group.checkpoints is not None and (not allows or (keys is not None and keys.is_part))
        )
        self.held: bool = True
        #: Our own clock (ms) until which the member is proven (T4); 0: not proven, or in doubt.
        self.valid_until: float = 0.0
        self.proven_by: int = 0
        self.letting_go: LettingGo | None = None
        self.is_restored: bool = True
        self.is_held_up: bool = False
        self.is_paused: bool = False
        #: When (own clock, ms) it was restored, or cut last for a checkpoint that has it.
        self.cut_at: float = 0.0
        #: What the log showed of its partition, all keys in one, when that was followed last.
        self.followed: Piece | None = None

    @property
    def span(self) -> tuple[int, int]:
        """The key hashes (lo, hi), both included."""
        return (0, MAX_KEY_HASH) if self.keys is None else (self.keys.lo, self.keys.hi)

    def may_hand_over(self, now: float) -> bool:
        return now < self.valid_until

    def hold_up(self, is_held_up: bool) -> None:
        """Deliver no more messages until it is called again."""
        self.is_held_up = is_held_up
        self.refresh()

    def end(self) -> None:
        """End the piece."""
        self.held = False
        self.prove(0.0)

    def prove(self, until: float) -> None:
        """Set until when (own clock, ms) the member is proven; 0: it is not."""
        self.valid_until = until
        self.refresh()

    def is_proven_until(self) -> float:
        return self.valid_until if self.held and self.letting_go is None else 0.0


class GroupView:
    """A :class:`~kafka_marshal.engine.plane.ReplicaView` of a coordinated group; it changes nothing."""

    def __init__(self, member: Membership, worlds: Mapping[int, World], pieces: Mapping[Key, HeldPiece]) -> None:
        self._member = member
        self._worlds = worlds
        #: What this member works on.
        self._pieces = pieces
        #: When (own clock, ms) log time last moved in the group's coordination partition.
        self._moved: float | None = None
        #: The members at the last rebalance, by slot, and the last generation that followed a silent one's end.
        self._members: tuple[int, dict[int, str]] = (-1, {})
        self._silent_until = -1

    def parts(self, key: Key) -> Sequence[Piece]:
        """The pieces of a partition, of all members."""
        group = self._member.group
        topic = None if group is None else group.pieces.get(key[0])
        return () if topic is None else topic[key[1]]

    def progress(self, key: Key) -> Progress | None:
        progress, piece = self.whole_progress(key), self._pieces.get(key)
        if progress is None or piece is None or piece.keys is None:
            return progress
        return piece.keys.progress()

    def whole_progress(self, key: Key) -> Progress | None:
        """The progress of all keys of a partition, not only of this member's."""
        group = self._member.group
        kept = None if group is None else group.kept(*key)
        return None if kept is None else kept.progress

    def metadata(self, key: Key) -> str | None:
        """What was committed beside the progress of a partition."""
        group = self._member.group
        kept = None if group is None else group.kept(*key)
        return None if kept is None else kept.metadata

    def open(self, key: Key) -> Sequence[Hole]:
        progress, piece = self.whole_progress(key), self._pieces.get(key)
        if piece is not None and piece.keys is not None:
            return piece.keys.open()
        return () if progress is None else progress.open

    def is_held(self, key: Key) -> bool:
        me = self._member.me  # this member reports what it owns, whether or not it works on it
        return any(me is None or part.owner != me.slot for part in self.parts(key))

    def is_first(self, key: Key) -> bool:
        return self.whole_progress(key) is None

    def is_left(self, key: Key) -> bool:
        return any(part.since == self._silent_until for part in self.parts(key))

    def applied(self, leaver: str) -> None:
        """A record of the group was applied. leaver: the member that left with it, or ""."""
        group = self._member.group
        if group is None or group.generation == self._members[0]:
            return
        now = {slot: member.member_id for slot, member in group.members.items()}
        gone = {each for slot, each in self._members[1].items() if now.get(slot) != each}
        self._members = group.generation, now
        if gone - {leaver}:
            self._silent_until = group.generation

    def came_later(self, key: Key) -> bool:
        group = self._member.group
        return group is not None and bool(group.progress.get(key[0]))

    def hole_count(self, cp: int) -> int:
        return self._worlds[cp].hole_count()

    def log_time(self, cp: int, now: float) -> float:
        return self._worlds[cp].log_time + (0.0 if self._moved is None else now - self._moved)

    def is_stopped(self, cp: int) -> bool:
        return self._worlds[cp].required_level is not None

    def closed(self, cp: int, now: float) -> str:
        if self.is_stopped(cp):
            return "its part of the coordination topic needs a newer release"
        return PAUSED if now < self.paused_until(now) else ""

    def log_time_moved(self, cp: int, now: float) -> None:
        """A record of a coordination partition was applied."""
        if cp == self._member.home:
            self._moved = now

    def paused_until(self, now: float) -> float:
        """When (own clock, ms) an admin's pause ends; −inf: not paused. Without members no record shows its end."""
        world = self._worlds[self._member.home]
        pause = world.pause(self._member.settings.group_id)
        if self._moved is None:
            self._moved = now
        return -inf if pause is None else self._moved + pause.expires - world.log_time


def meant_for(slot: int, parts: Sequence[Piece], *, share: bool) -> list[Piece] | None:
    """Adjacent parts that this slot owns and should own: all keys or, with ``share``, some. None: there are none."""
    return _first_run(parts, [part.owner == part.target == slot for part in parts], share=share)


def owned_by(slot: int, parts: Sequence[Piece], *, share: bool) -> list[Piece] | None:
    """Adjacent parts that this slot owns, wherever they are to go: all keys or, with ``share``, some. None: none.

    Of several, those that are to move: they can go only with a cut, and a member works on adjacent keys alone.
    """
    first = _first_run(parts, [part.owner == slot for part in parts], share=share)
    while first is not None and all(part.revoked < 0 for part in first):
        later = [part for part in parts if part.lo > first[-1].hi]
        following = _first_run(later, [part.owner == slot for part in later], share=share)
        if following is None:
            break
        if any(part.revoked >= 0 for part in following):
            return following
        parts = [part for part in parts if part.hi < following[0].lo or following[-1].hi < part.lo]
    return first


def _first_run(parts: Sequence[Piece], are_ours: Sequence[bool], *, share: bool) -> list[Piece] | None:
    run: list[Piece] = []
    for part, ours in zip(parts, are_ours, strict=True):
        if run and (not ours or run[-1].hi + 1 != part.lo):
            break
        if ours:
            run.append(part)
    if not run or not (share or covers(run, 0, MAX_KEY_HASH)):
        return None
    return run


def owned_since(slot: int, parts: Sequence[Piece], lo: int, hi: int) -> int | None:
    """The newest generation since which this slot owns the keys lo … hi; None: it does not own all of them."""
    within = [part for part in parts if part.lo <= hi and lo <= part.hi]
    if not within or any(part.owner != slot for part in within) or not covers(within, lo, hi):
        return None
    return max(part.since for part in within)


def span_of(parts: Sequence[Piece] | None) -> tuple[int, int] | None:
    """The first and last key hash of adjacent parts; None: there are no parts."""
    return (parts[0].lo, parts[-1].hi) if parts else None


def tokens_of(parts: Sequence[Piece]) -> list[tuple[int, int, int]]:
    """(lo, hi, since) of adjacent parts, ascending; neighbours of one generation become one."""
    found: list[tuple[int, int, int]] = []
    for part in parts:
        lo = found.pop()[0] if found and found[-1][2] == part.since else part.lo
        found.append((lo, part.hi, part.since))
    return found


def covers(parts: Sequence[Piece], lo: int, hi: int) -> bool:
    """Whether these parts, ascending, cover all key hashes lo … hi."""
    return parts[0].lo <= lo and hi <= parts[-1].hi and all(x.hi + 1 == y.lo for x, y in pairwise(parts))
