"""Who has what of a topic's partitions, and who should (G4).

Most partitions are whole: one piece that covers all key hashes. A topic of ten thousand of them is four lists of ints,
by partition, so that what did not change is passed over by C; a partition that is cut into pieces stands in `cut`.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Final, NamedTuple

from rationalizer.groups.assignors import NOBODY, Before
from rationalizer.limits import MAX_KEY_HASH

#: In place of a generation: none.
NEVER: Final = -1


class Piece(NamedTuple):
    """Key hashes lo … hi of a partition (G4). `owner`, `target`: slots; `since`, `revoked`: generations.

    `target` NOBODY: none should have it. `revoked` NEVER: the owner is the target.
    """

    lo: int
    hi: int
    owner: int
    since: int
    target: int
    revoked: int

    @property
    def whole(self) -> bool:
        """Whether it covers all key hashes."""
        return self.lo == 0 and self.hi == MAX_KEY_HASH


class TopicPieces:
    """The pieces of one topic's partitions.

    The lists are by partition, and equally long; of one that is in `cut` they say NOBODY and NEVER.
    """

    __slots__ = ("cut", "owners", "revoked", "since", "targets")

    def __init__(self) -> None:
        self.owners: list[int] = []
        self.since: list[int] = []
        self.targets: list[int] = []
        self.revoked: list[int] = []
        self.cut: dict[int, list[Piece]] = {}

    def grow(self, count: int) -> None:
        """Make room for this number of partitions; never less than before (G12)."""
        more = count - len(self.owners)
        if more > 0:
            self.owners += [NOBODY] * more
            self.since += [NEVER] * more
            self.targets += [NOBODY] * more
            self.revoked += [NEVER] * more

    def __getitem__(self, partition: int) -> Sequence[Piece]:
        """The pieces of a partition, ascending; none if no member has it, or if there is no such partition."""
        if self.cut and (cut := self.cut.get(partition)) is not None:
            return cut
        if partition >= len(self.owners) or self.owners[partition] == NOBODY:
            return ()
        return (self._whole(partition),)

    def put(self, partition: int, pieces: list[Piece]) -> None:
        """Set the pieces of a partition, ascending; equal neighbours become one."""
        merged = _merged(pieces)
        self.cut.pop(partition, None)
        whole = len(merged) == 1 and merged[0].whole
        _, _, owner, since, target, revoked = merged[0] if whole else (0, 0, NOBODY, NEVER, NOBODY, NEVER)
        self.owners[partition] = owner
        self.since[partition] = since
        self.targets[partition] = target
        self.revoked[partition] = revoked
        if merged and not whole:
            self.cut[partition] = merged

    def touched(self, partition: int, lo: int, hi: int) -> tuple[int, int]:
        """Which of the pieces of a cut partition have keys of lo … hi: (left, right), right excluded."""
        pieces = self.cut[partition]
        left = bisect_left(pieces, lo, key=_HI)
        return left, bisect_right(pieces, hi, left, key=_LO)

    def replace(self, partition: int, left: int, right: int, new: list[Piece]) -> None:
        """The pieces left … right − 1 of a cut partition become `new`; equal neighbours become one."""
        pieces = self.cut[partition]
        before, after = pieces[max(0, left - 1) : left], pieces[right : right + 1]
        pieces[left - len(before) : right + len(after)] = _merged([*before, *new, *after])
        if not pieces or pieces[0].whole:
            self.put(partition, pieces)

    def before(self) -> Before:
        """Who should have, and who has, every key of each partition: what the next targets go by (G17)."""
        if not self.cut:
            return Before(self.targets, self.owners)
        targets, owners = self.targets.copy(), self.owners.copy()
        for partition, pieces in self.cut.items():
            targets[partition] = _slot_of_all(pieces, {piece.target for piece in pieces})
            owners[partition] = _slot_of_all(pieces, {piece.owner for piece in pieces})
        return Before(targets, owners)

    def partitions(self) -> list[int]:
        """Those that have pieces, ascending."""
        whole = [p for p, owner in enumerate(self.owners) if owner != NOBODY]
        return sorted({*whole, *self.cut}) if self.cut else whole

    def owned_by(self, slot: int) -> Iterator[tuple[int, Piece]]:
        """(partition, piece) of all that this slot owns, ascending."""
        numbers = [p for p, owner in enumerate(self.owners) if owner == slot]
        if self.cut:
            numbers = sorted({*numbers, *self.cut})
        for partition in numbers:
            for piece in self[partition]:
                if piece.owner == slot:
                    yield partition, piece

    def owned(self) -> set[int]:
        """The slots that own something."""
        found = set(self.owners)
        found.update([piece.owner for pieces in self.cut.values() for piece in pieces])
        found.discard(NOBODY)
        return found

    def with_revoked(self) -> list[int]:
        """The partitions of which a piece is revoked."""
        whole = [p for p, revoked in enumerate(self.revoked) if revoked != NEVER]
        cut = [p for p, pieces in self.cut.items() if any(piece.revoked != NEVER for piece in pieces)]
        return whole + cut

    def moving_to(self, slot: int) -> list[int]:
        """The partitions of which another slot has yet to release a piece for this one."""
        if not self.any_revoked():
            return []
        return [p for p in self.with_revoked() if any(x.target == slot != x.owner for x in self[p])]

    def any_revoked(self) -> bool:
        """Whether some piece is revoked."""
        return max(self.revoked, default=NEVER) != NEVER or any(
            piece.revoked != NEVER for pieces in self.cut.values() for piece in pieces
        )

    def lowest_targets(self) -> dict[int, int]:
        """For each slot, the lowest partition of which any key has it as target (K2)."""
        found: dict[int, int] = {}
        for partition, target in enumerate(self.targets):
            for piece in self.cut.get(partition, ()):
                found.setdefault(piece.target, partition)
            found.setdefault(target, partition)
        found.pop(NOBODY, None)
        return found

    def _whole(self, partition: int) -> Piece:
        return Piece(
            0,
            MAX_KEY_HASH,
            self.owners[partition],
            self.since[partition],
            self.targets[partition],
            self.revoked[partition],
        )


def key_spans(pieces: Iterable[Piece]) -> list[tuple[int, int]]:
    """The key hashes of these pieces, which ascend: spans that never touch."""
    spans: list[tuple[int, int]] = []
    for piece in pieces:
        if spans and spans[-1][1] + 1 == piece.lo:
            spans[-1] = (spans[-1][0], piece.hi)
        else:
            spans.append((piece.lo, piece.hi))
    return spans


def _merged(pieces: Iterable[Piece]) -> list[Piece]:
    merged: list[Piece] = []
    for piece in pieces:
        if merged and merged[-1].hi + 1 == piece.lo and merged[-1][2:] == piece[2:]:
            piece = merged.pop()._replace(hi=piece.hi)
        merged.append(piece)
    return merged


def _slot_of_all(pieces: Sequence[Piece], slots: set[int]) -> int:
    """The slot that has every key, else NOBODY."""
    if len(slots) != 1 or pieces[0].lo != 0 or pieces[-1].hi != MAX_KEY_HASH:
        return NOBODY
    covered = all(before.hi + 1 == piece.lo for before, piece in itertools.pairwise(pieces))
    return next(iter(slots)) if covered else NOBODY


_LO: Final = attrgetter("lo")
_HI: Final = attrgetter("hi")
