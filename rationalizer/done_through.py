"""`done_through` of a partition that is shared by key: a piecewise constant map from key hashes to offsets (P1, P8).

A partition may be cut into thousands of pieces, and a record may touch each of ten thousand. So a change costs what it
changes and a logarithm: pieces are found by bisection on where they begin, the lowest and those that a range touches by
bisection on their offsets.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable, Sequence
from itertools import compress, islice
from operator import ne
from typing import Final

from rationalizer.limits import MAX_KEY_HASH, NOTHING_DONE

#: (lo, hi, offset): what is done for the key hashes lo … hi, both included; offset −1: nothing.
KeyPiece = tuple[int, int, int]

#: (left, right, los, dones): these pieces take the place of the pieces left … right − 1.
Edit = tuple[int, int, list[int], list[int]]

#: Above this number of pieces concerned at once, C code checks all of them, and their order is computed when asked for.
_MANY: Final = 32


class DoneThrough:
    """At least two pieces that cover all key hashes; neighbours differ."""

    __slots__ = ("_dones", "_los", "_steps")

    def __init__(self, pieces: Iterable[KeyPiece]) -> None:
        self._los: list[int] = []
        self._dones: list[int] = []
        for lo, _, done in pieces:
            if not self._dones or self._dones[-1] != done:
                self._los.append(lo)
                self._dones.append(done)
        #: See `_ladder`; None: not made yet.
        self._steps: list[tuple[int, int]] | None = None

    def __len__(self) -> int:
        return len(self._los)

    @property
    def lowest(self) -> int:
        """The smallest offset of all pieces."""
        return min(self._dones) if self._steps is None else self._steps[0][0]

    @property
    def highest(self) -> int:
        """The largest offset of all pieces."""
        return max(self._dones) if self._steps is None else self._steps[-1][0]

    def lowest_of(self, lo: int, hi: int) -> int:
        """The smallest offset of the key hashes lo … hi."""
        left = bisect_right(self._los, lo) - 1
        return min(self._dones[left : bisect_right(self._los, hi, left)])

    @property
    def _ladder(self) -> list[tuple[int, int]]:
        """(offset, lo) of every piece, ascending: made when it is asked for, after an edit of many pieces."""
        if self._steps is None:
            self._steps = sorted(zip(self._dones, self._los, strict=True))
        return self._steps

    def pieces(self) -> list[KeyPiece]:
        """All pieces, ascending."""
        his = [lo - 1 for lo in self._los[1:]]
        return list(zip(self._los, [*his, MAX_KEY_HASH], self._dones, strict=True))

    def at(self, key_hash: int) -> int:
        """The offset through which all is done for this key hash."""
        return self._dones[bisect_right(self._los, key_hash) - 1]

    def is_all(self, lo: int, hi: int, offset: int) -> bool:
        """Whether this is the offset of each key hash of lo … hi."""
        place = bisect_right(self._los, lo) - 1
        return self._dones[place] == offset and (place + 1 == len(self._los) or hi < self._los[place + 1])

    def copy(self) -> DoneThrough:
        """The same, to be changed by itself."""
        copy = DoneThrough(())
        copy._los = self._los.copy()
        copy._dones = self._dones.copy()
        copy._steps = None if self._steps is None else self._steps.copy()
        return copy

    def plan(self, lo: int, hi: int, offset: int) -> Edit | None:
        """The edit that raises lo … hi to `offset`, where they are not there yet; None: they all are.

        Changes nothing, so that the caller can still say no.
        """
        los, dones = self._los, self._dones
        left = bisect_right(los, lo) - 1
        right = bisect_right(los, hi, left)
        if right - left > _MANY:
            return self._plan_wide(left, right, lo, hi, offset)
        new_los: list[int] = []
        new_dones: list[int] = []

        def put(start: int, done: int) -> None:
            if not new_dones or new_dones[-1] != done:
                new_los.append(start)
                new_dones.append(done)

        for place in range(left, right):
            start, done = los[place], dones[place]
            last = los[place + 1] - 1 if place + 1 < len(los) else MAX_KEY_HASH
            if start < lo:
                put(start, done)
            put(max(start, lo), max(done, offset))
            if hi < last:
                put(hi + 1, done)
        if right < len(los) and dones[right] == new_dones[-1]:
            right += 1
        if left > 0 and dones[left - 1] == new_dones[0]:
            left -= 1
            new_los[0] = los[left]
        if new_los == los[left:right] and new_dones == dones[left:right]:
            return None
        return left, right, new_los, new_dones

    def _plan_wide(self, left: int, right: int, lo: int, hi: int, offset: int) -> Edit | None:
        """The same, where many pieces are concerned: by C, over all of them at once."""
        if self._steps is not None:
            below = self._steps[: min(_MANY + 1, bisect_left(self._steps, (offset,)))]
            first, last = self._los[left], self._los[right - 1]
            if len(below) <= _MANY and not any(first <= start <= last for _, start in below):
                return None
        old_los, old_dones = self._los[left:right], self._dones[left:right]
        if min(old_dones) >= offset:
            return None
        los, dones = old_los.copy(), [done if done > offset else offset for done in old_dones]
        end = self._los[right] - 1 if right < len(self._los) else MAX_KEY_HASH
        if old_los[0] < lo and old_dones[0] < offset:
            los[:1], dones[:1] = [old_los[0], lo], [old_dones[0], offset]
        if hi < end and old_dones[-1] < offset:
            los.append(hi + 1)
            dones.append(old_dones[-1])
        if left > 0:
            left -= 1
            los.insert(0, self._los[left])
            dones.insert(0, self._dones[left])
        if right < len(self._los):
            los.append(self._los[right])
            dones.append(self._dones[right])
            right += 1
        differs = [True, *map(ne, dones, islice(dones, 1, None))]
        if all(differs):
            return left, right, los, dones
        return left, right, list(compress(los, differs)), list(compress(dones, differs))

    def has_room(self, edit: Edit, max_pieces: int) -> bool:
        """Whether an edit leaves no more pieces than this, or no more than there are."""
        left, right, new_los, _ = edit
        growth = len(new_los) - (right - left)
        return growth <= 0 or len(self._los) + growth <= max_pieces

    def carry_out(self, edit: Edit) -> None:
        """Make the edit that `plan` found."""
        left, right, new_los, new_dones = edit
        if right - left + len(new_los) > 2 * _MANY:
            self._steps = None
        else:
            ladder = self._ladder
            for step in zip(self._dones[left:right], self._los[left:right], strict=True):
                del ladder[bisect_left(ladder, step)]
            for step in zip(new_dones, new_los, strict=True):
                insort(ladder, step)
        self._los[left:right] = new_los
        self._dones[left:right] = new_dones

    def move_on(self, firsts: Sequence[int], lasts: Sequence[int], end_of_run: Callable[[int], int]) -> None:
        """Move every piece on that these new ranges of done offsets touch from above (P10)."""
        ladder, place, touched = self._ladder, 0, []
        for first, last in zip(firsts, lasts, strict=True):
            place = bisect_left(ladder, (first - 1, NOTHING_DONE), place)
            while place < len(ladder) and ladder[place][0] <= last:
                touched.append(ladder[place])
                place += 1
        if len(touched) > _MANY:
            moved = {lo: end_of_run(done) for done, lo in touched}
            pieces = [(lo, hi, moved.get(lo, done)) for lo, hi, done in self.pieces()]
            self.__init__(pieces)  # type: ignore[misc]
            return
        for done, lo in touched:
            left = bisect_left(self._los, lo)
            if left == len(self._los) or self._los[left] != lo:
                continue  # its neighbour, moved on before it, has taken it in
            last = self._los[left + 1] - 1 if left + 1 < len(self._los) else MAX_KEY_HASH
            edit = self.plan(lo, last, end_of_run(done))
            if edit is not None:
                self.carry_out(edit)
