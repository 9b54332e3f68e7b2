"""The checkpoints of a coordinated group by the outcomes of the log alone, to compare the state with (section 7).

It follows who began a barrier, what was answered, and what each checkpoint has of each partition. Which checkpoints are
kept is the state's to say: one that goes harms nothing that is done.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from rationalizer import Group, Piece
from rationalizer.done_through import KeyPiece
from rationalizer.groups.pieces import NEVER
from rationalizer.limits import MAX_KEY_HASH
from rationalizer.wire.wellformed import REACHED_AND_LEAVES, REFUSED

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
        at = lo
        for first, last in sorted(answered.keys.get(key, ())):
            if first <= at:
                at = max(at, last + 1)
        orders = [piece.revoked for piece in pieces]
        return at > hi and all(NEVER < revoked <= answered.generation for revoked in orders)

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


def _owns(group: Group, slot: int, key: Key, lo: int) -> bool:
    pieces = group.pieces.get(key[0])
    return pieces is not None and any(piece.owner == slot and piece.lo <= lo <= piece.hi for piece in pieces[key[1]])


def _saved(group: Group, barrier: int) -> dict[Key, list[tuple[int, int]]]:
    """What was handed in for a barrier before this replay: the state says so."""
    found: dict[Key, list[tuple[int, int]]] = {}
    for key in group.partitions():
        for version in group.versions(key):
            if version.checkpoint == barrier:
                found[key] = [(lo, hi) for lo, hi, id_ in version.states if id_ == barrier]
    return found
