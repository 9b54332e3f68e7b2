"""What the log shows of a group that takes checkpoints, as one of its members reads it (X1 to X3)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from kafka_marshal.engine.figures import Distribution, Histogram
from kafka_marshal.engine.groups.checkpoints.forks import of_whom, within
from kafka_marshal.engine.groups.member import Membership
from kafka_marshal.engine.groups.pieces import GroupView, HeldPiece, owned_by, span_of
from kafka_marshal.engine.work.topic_mark import split
from kafka_marshal.types import Key
from rationalizer import Piece, World
from rationalizer.groups.checkpoints import Answer, Barrier, Checkpoints
from rationalizer.limits import MAX_KEY_HASH
from rationalizer.wire.wellformed import REACHED_AND_LEAVES


class Shown:
    """Reads the log; it changes nothing."""

    def __init__(
        self,
        member: Membership,
        view: GroupView,
        pieces: Mapping[Key, HeldPiece],
        worlds: Mapping[int, World],
    ) -> None:
        self._member = member
        self._view = view
        self._pieces = pieces
        self._worlds = worlds

    @property
    def checkpoints(self) -> Checkpoints | None:
        """The group's; None: it takes none."""
        group = self._member.group
        return None if group is None else group.checkpoints

    @property
    def barrier(self) -> Barrier | None:
        """The open barrier; None: none is open."""
        found = self.checkpoints
        return None if found is None else found.barrier

    @property
    def log_time(self) -> int:
        """Log time of the group's home."""
        return self._worlds[self._member.home].log_time

    @property
    def slot(self) -> int:
        """Our slot; −1: the log does not show us as a member."""
        me = self._member.me
        return -1 if me is None else me.slot

    @property
    def answer(self) -> Answer | None:
        """Our answer to the open barrier, if the log shows one."""
        barrier = self.barrier
        return None if barrier is None else barrier.answers.get(self.slot)

    @property
    def is_leaving(self) -> bool:
        """Whether the log shows that we leave at the open barrier."""
        found = self.answer
        return found is not None and found.answer == REACHED_AND_LEAVES

    @property
    def owns(self) -> bool:
        """Whether we own any piece."""
        found, me = self.checkpoints, self._member.me
        return found is not None and me is not None and me.slot in found.owners

    @property
    def is_target(self) -> bool:
        """Whether any piece is assigned to us, also if another member owns it."""
        group, me = self._member.group, self._member.me
        if group is None or me is None:
            return False
        return any(
            me.slot in topic.targets or any(part.target == me.slot for parts in topic.cut.values() for part in parts)
            for topic in group.pieces.values()
        )

    @property
    def rank(self) -> int:
        """How many members are older than we are, and do not leave at the open barrier."""
        group, me, barrier = self._member.group, self._member.me, self.barrier
        if group is None or me is None:
            return 0
        answers = {} if barrier is None else barrier.answers
        leaving = {slot for slot, each in answers.items() if each.answer == REACHED_AND_LEAVES}
        return sum(slot < me.slot and slot not in leaving for slot in group.members)

    # One piece.

    def parts(self, piece: HeldPiece) -> list[Piece]:
        """The parts that its keys have in the log."""
        lo, hi = piece.span
        return [part for part in self._view.parts(piece.key) if part.lo <= hi and lo <= part.hi]

    def is_revoked(self, piece: HeldPiece, generation: int) -> bool:
        """Whether some of it was revoked by this generation."""
        return any(0 <= part.revoked <= generation for part in self.parts(piece))

    def is_outgrown(self, piece: HeldPiece) -> bool:
        """Whether we own more of its partition by now, beside its keys: it is begun again as a whole, after a cut."""
        owned = owned_by(self.slot, self._view.parts(piece.key), share=self._member.options.allow_key_share)
        return span_of(owned) != piece.span

    def states(self, piece: HeldPiece) -> tuple[tuple[int, int, int], ...]:
        """(lo, hi, id) of each part of it: where its state is saved; 0: nowhere."""
        group = self._member.group
        return within(() if group is None else tuple(group.states(piece.key)), piece.span)

    def is_forked(self, piece: HeldPiece) -> bool:
        """Whether some of its state is another group's, from which this one was forked (X18)."""
        text = self._view.metadata(piece.key)
        return text is not None and bool(of_whom(text, self.states(piece))[1])

    def went_back(self, piece: HeldPiece) -> bool:
        """Whether nothing was done of it since the group was put back while it had no members (X17)."""
        found, group = self.checkpoints, self._member.group
        if group is None or found is None or not found.went_back_to or found.find(found.went_back_to) is None:
            return False
        kept = group.kept(*piece.key)
        unset = [(0, MAX_KEY_HASH, -1 if kept is None else kept.initial)]
        seen = [
            (within(tuple(version.done_through), piece.span), tuple(split(version.ranges).ranges))
            if version is not None
            else (within(tuple(unset), piece.span), ())
            for each, version in found.views(piece.key)
            if each.id >= found.went_back_to
        ]
        return seen[0] == seen[-1]

    def needed(self, key: Key) -> frozenset[int]:
        """Ids under which states of a partition are still needed (X18)."""
        group = self._member.group
        versions = () if group is None else group.versions(key)
        return frozenset(state for version in versions for _, _, state in version.states if state)


#: Upper ends of buckets (s): saving and restoring may take minutes.
BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class CheckpointFigures:
    """Counters of one consumer."""

    def __init__(self) -> None:
        #: Barriers by their end: "complete", "without_some" (complete, though an owner handed nothing in, or we not all
        #: of our pieces), "ended".
        self.outcomes: Counter[str] = Counter()
        #: Restored pieces by the reason.
        self.restores: Counter[str] = Counter()
        self._saving = Histogram(BUCKETS_S)
        self._restoring = Histogram(BUCKETS_S)
        #: How long (s) the last drain took, and the longest one.
        self.drain_seconds: float = 0.0
        self.drain_seconds_max: float = 0.0

    @property
    def saving(self) -> Distribution:
        """How long (s) states took to be safe, from the cut."""
        return self._saving.read()

    @property
    def restoring(self) -> Distribution:
        """How long (s) on_restore took."""
        return self._restoring.read()

    def drained(self, ms: float) -> None:
        """The last piece was cut, or drain had gone by, this long after the barrier was seen."""
        self.drain_seconds = ms / 1000
        self.drain_seconds_max = max(self.drain_seconds_max, self.drain_seconds)

    def saved(self, ms: float) -> None:
        """A state was saved in this time."""
        self._saving.observe(ms / 1000)

    def restored(self, why: str, count: int, ms: float) -> None:
        """on_restore has returned for this number of pieces."""
        self.restores[why] += count
        self._restoring.observe(ms / 1000)
