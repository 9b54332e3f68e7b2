"""The checkpoints of a group as its state shows them: which are kept, and what each has of each partition (X1, X2)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kafka_marshal.engine.work.topic_mark import split
from rationalizer.limits import MAX_KEY_HASH

if TYPE_CHECKING:
    from kafka_marshal.ports import TopicPartition
    from rationalizer import Group, Piece
    from rationalizer.done_through import KeyPiece

#: The kind of a checkpoint (X1) in words.
KIND_WORDS: Final = ("passing", "periodic", "pinned")

#: In `states`: no state was saved.
_NONE_SAVED: Final = 0


@dataclass(frozen=True, slots=True)
class Cut:
    """What a checkpoint has of a range of keys: the state that was handed in for the checkpoint ``cut``."""

    topic: str
    partition: int
    lo: int
    hi: int
    #: None: nothing was handed in since the group takes checkpoints.
    cut: int | None
    #: Its owner; None: it has none, or that is not known.
    client: str | None = None
    #: Why it is older than the checkpoint, in words; "": it is not, or that is not known.
    why: str = ""

    @property
    def key(self) -> TopicPartition:
        """(topic, partition)"""
        return self.topic, self.partition


@dataclass(frozen=True, slots=True)
class Seen:
    """The progress of a partition as a checkpoint sees it (X2)."""

    done_through: tuple[KeyPiece, ...]
    ranges: tuple[tuple[int, int], ...]
    #: (lo, hi, id of the checkpoint under which the state was saved; 0: none was).
    states: tuple[KeyPiece, ...]

    @property
    def position(self) -> int:
        """The first offset that is not done."""
        return min(done for _, _, done in self.done_through) + 1


def seen_by(group: Group, key: TopicPartition, checkpoint: int) -> Seen:
    """What this checkpoint sees of a partition: its last version that is not above, else where the group began."""
    found = [version for version in group.versions(key) if version.checkpoint <= checkpoint]
    if found:
        version = found[-1]
        ranges = tuple((first, last) for first, last in split(version.ranges).ranges)
        return Seen(tuple(version.done_through), ranges, tuple(version.states))
    kept = group.kept(*key)
    initial = -1 if kept is None else kept.initial
    return Seen(((0, MAX_KEY_HASH, initial),), (), ((0, MAX_KEY_HASH, _NONE_SAVED),))


def owners_of(group: Group) -> Iterator[tuple[TopicPartition, Piece]]:
    """Every piece of the group that has an owner."""
    for topic, pieces in sorted(group.pieces.items()):
        for partition in pieces.partitions():
            for piece in pieces[partition]:
                if piece.owner in group.members:
                    yield (topic, partition), piece


def cut_in(states: Sequence[KeyPiece], lo: int, hi: int) -> int:
    """The oldest cut of these keys; 0: of some of them nothing was handed in."""
    return min((id_ for low, high, id_ in states if low <= hi and lo <= high), default=_NONE_SAVED)


def cuts_now(group: Group) -> Iterator[Cut]:
    """The last cut of each piece that has an owner, as the newest checkpoint has it."""
    states: dict[TopicPartition, Sequence[KeyPiece]] = {}
    for key, piece in owners_of(group):
        if key not in states:
            states[key] = group.states(key)
        cut = cut_in(states[key], piece.lo, piece.hi)
        yield Cut(*key, piece.lo, piece.hi, cut or None, group.members[piece.owner].client_id)


def oldest_cut(group: Group, checkpoint: int) -> Cut | None:
    """The oldest cut of this checkpoint; of the newest with its owner. None: nothing was handed in for it so far.

    A piece that was never handed in is older than any other; its ``cut`` is None.
    """
    checkpoints = group.checkpoints
    is_newest = checkpoints is not None and checkpoint == checkpoints.newest
    found = list(cuts_now(group)) if is_newest else []
    found = found or [
        Cut(*key, lo, hi, id_ or None)
        for key in group.partitions()
        for lo, hi, id_ in seen_by(group, key, checkpoint).states
    ]
    if all(each.cut is None for each in found):
        return None
    return min(found, key=lambda each: each.cut or 0)


def is_initial(group: Group, checkpoint: int) -> bool:
    """Whether no state was saved for anything that this checkpoint sees: there was nothing to restore yet."""
    return all(id_ == _NONE_SAVED for key in group.partitions() for _, _, id_ in seen_by(group, key, checkpoint).states)


def waits_for(group: Group) -> list[str]:
    """The members that own a piece and have not answered the open barrier, sorted."""
    barrier = None if group.checkpoints is None else group.checkpoints.barrier
    if barrier is None:
        return []
    slots = {piece.owner for _, piece in owners_of(group)}
    return sorted(group.members[slot].client_id for slot in slots if slot not in barrier.answers)
