"""One piece at its cut: what is done of it, and the entries that say so (X13)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import Enum, auto
from typing import Final

from kafka_marshal.engine.effects import SavedPiece
from kafka_marshal.engine.groups.member import Membership
from kafka_marshal.engine.groups.pieces import GroupView, HeldPiece
from kafka_marshal.engine.work.topic_mark import FIRST_MARK, mark_of, split
from kafka_marshal.engine.work.tracker import beyond
from kafka_marshal.types import Key
from rationalizer import CommitEntry, Progress
from rationalizer.limits import MAX_COMMIT_RANGES

#: How many partitions one text names.
_MOST_NAMED: Final = 10


class Saving(Enum):
    """How far the state of a cut piece is saved."""

    CALLED = auto()
    RETURNED = auto()
    SAFE = auto()
    #: Not at all: the piece is left for the next checkpoint.
    LEFT = auto()


class Cut:
    """A piece that was cut for a barrier."""

    __slots__ = ("began", "entries", "is_outgrown", "is_revoked", "piece", "saved", "saving")

    def __init__(self, piece: HeldPiece, entries: list[CommitEntry], is_revoked: bool, is_outgrown: bool, now: float):
        self.piece: HeldPiece = piece
        self.saved: SavedPiece = SavedPiece(piece.key, piece.epoch, *piece.span)
        #: What the answer says of it; []: nothing, as nothing has changed.
        self.entries: list[CommitEntry] = entries
        #: Whether it is to go to another member, by the generation of the answer; or to be begun again.
        self.is_revoked: bool = is_revoked
        self.is_outgrown: bool = is_outgrown
        self.saving: Saving = Saving.SAFE
        self.began: float = now

    @property
    def waits(self) -> bool:
        """Whether the answer waits for its state."""
        return self.saving in (Saving.CALLED, Saving.RETURNED)

    @property
    def begins_again(self) -> bool:
        """Whether its piece is begun again with all keys that we own by now: the answer names its cut."""
        return self.is_outgrown and self.saving is Saving.SAFE

    def without_mark(self) -> bool:
        """Leave out its topic's mark. Returns whether something is left to say."""
        self.entries = [entry for entry in self.entries if not is_mark(entry)]
        return bool(self.entries)


def is_mark(entry: CommitEntry | Sequence[object]) -> bool:
    """Whether an entry is the mark of a topic (P12)."""
    ranges = entry[6]
    return isinstance(ranges, tuple) and bool(ranges) and ranges[0][0] >= FIRST_MARK


class Cutter:
    """Compares what is done of a piece with what the newest checkpoint sees."""

    def __init__(self, member: Membership, view: GroupView, topic_id: Callable[[str], str | None]) -> None:
        """topic_id: as the cluster reported it."""
        self._member = member
        self._view = view
        self._topic_id = topic_id
        #: Partitions whose mark the group refused.
        self.unmarkable: set[Key] = set()

    def _new_ranges(self, piece: HeldPiece, done: Progress) -> list[tuple[int, int]]:
        known = self._view.progress(piece.key)
        return beyond(done.ranges, () if known is None else known.ranges)

    def can_be_named(self, piece: HeldPiece, done: Progress) -> bool:
        """Whether entries can say what is done: some keys have no ranges, nor has a group that does not allow them."""
        group = self._member.group
        allows = group is not None and group.settings.accept_individual_commit
        is_part = piece.keys is not None and piece.keys.is_part
        return (allows and not is_part) or not self._new_ranges(piece, done)

    def entries(self, piece: HeldPiece, done: Progress) -> list[CommitEntry]:
        """What is done of it, and its topic's mark, as far as the newest checkpoint does not see it."""
        place, known = (*piece.key, *piece.span), self._view.progress(piece.key)
        entries: list[CommitEntry] = []
        if known is None or done.stable > known.stable:
            entries.append(CommitEntry(*place, through=done.stable))
        if piece.keys is None or not piece.keys.is_part:
            new = self._new_ranges(piece, done)
            chunks = [new[first : first + MAX_COMMIT_RANGES] for first in range(0, len(new), MAX_COMMIT_RANGES)]
            entries += [CommitEntry(*place, ranges=tuple(chunk)) for chunk in chunks]
        if (mark := self._missing_mark(piece.key, done)) is not None:
            entries.append(CommitEntry(*place, ranges=((mark, mark),)))
        return entries

    def _missing_mark(self, key: Key, done: Progress) -> int | None:
        if (done.stable < 0 and not done.ranges) or key in self.unmarkable:
            return None
        mark, known = mark_of(self._topic_id(key[0]) or ""), self._view.whole_progress(key)
        return None if known is None or mark in split(known.ranges).marks else mark

    def differs(self, piece: HeldPiece, done: Progress) -> bool:
        """Whether a cut would say something new."""
        return bool(self.entries(piece, done))


def places(keys: Iterable[Key]) -> str:
    """``flights [3], flights [4]``; of many, the first ones and the number of others."""
    names = [f"{topic} [{partition}]" for topic, partition in sorted(keys)]
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(names[:_MOST_NAMED]) + more


def left_means(*, leaves: bool, is_hold: bool) -> str:
    """What follows if pieces could not be handed in."""
    if is_hold:
        return "the checkpoint ends, for all members (hold), and is tried again. Nothing is lost"
    if leaves:
        return (
            "this member leaves, so others continue from the last cut, and what was done since is done again, on the "
            "state of that cut. Nothing is lost"
        )
    return "left for the next checkpoint, with the cut as old as it is. Nothing is lost"
