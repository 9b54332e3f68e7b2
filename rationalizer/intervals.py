"""Sets of offsets, kept as disjoint inclusive intervals.

The form is the same for equal sets: intervals ascend, and neighbours that overlap or touch are one interval
(P3). They are held as two lists of ints, `firsts` and `lasts`, since both ascend: a place is found by
bisection, and a change replaces one slice of each list. So a commit costs its own length, not that of what
is stored.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import islice
from operator import itemgetter
from typing import Final

#: Up to so many edits are made in place, each moving what lies behind it; more are made in one copy.
_FEW: Final = 16

_FIRST: Final = itemgetter(0)
_LAST: Final = itemgetter(1)


def union(ranges: Sequence[tuple[int, int]]) -> tuple[list[int], list[int]]:
    """The set that a list of ranges stands for, whatever their order and overlap (P4): (firsts, lasts).

    Starts and ends may be sorted apart from each other: where the n-th end lies below the next start by more
    than one, exactly n ranges begin before the gap, and the same n have ended. Sorting ints and looking for
    gaps is several times faster than merging pairs.
    """
    starts = sorted(map(_FIRST, ranges))
    ends = sorted(map(_LAST, ranges))
    gaps = [n for n, (end, start) in enumerate(zip(ends, islice(starts, 1, None), strict=False)) if start - end > 1]
    if not gaps:
        return [starts[0]], [ends[-1]]
    return [starts[0], *[starts[n + 1] for n in gaps]], [*[ends[n] for n in gaps], ends[-1]]


#: (left, right, first, last): the interval first … last takes the place of the stored intervals left … right − 1
#: (of none, where right = left).
Edit = tuple[int, int, int, int]


class Intervals:
    """A set of offsets. `firsts` and `lasts` are parallel and ascend; neighbours never touch."""

    __slots__ = ("firsts", "lasts")

    def __init__(self) -> None:
        self.firsts: list[int] = []
        self.lasts: list[int] = []

    @classmethod
    def of(cls, ranges: Sequence[tuple[int, int]]) -> Intervals:
        """The set of the offsets in these ranges."""
        intervals = cls()
        intervals.firsts, intervals.lasts = union(ranges)
        return intervals

    def __len__(self) -> int:
        """The number of intervals."""
        return len(self.firsts)

    def __contains__(self, offset: int) -> bool:
        place = bisect_left(self.lasts, offset)
        return place < len(self.firsts) and self.firsts[place] <= offset

    def pairs(self) -> list[tuple[int, int]]:
        """The intervals as (first, last), ascending."""
        return list(zip(self.firsts, self.lasts, strict=True))

    def clear(self) -> None:
        """Empty the set."""
        self.firsts.clear()
        self.lasts.clear()

    def end_of_run(self, offset: int) -> int:
        """The largest offset reached from `offset` by way of the interval that holds or touches it."""
        place = bisect_left(self.lasts, offset)
        if place < len(self.firsts) and self.firsts[place] <= offset + 1:
            return self.lasts[place]
        return offset

    def drop_through(self, offset: int) -> None:
        """Take out everything at or below `offset`."""
        gone = bisect_right(self.lasts, offset)
        del self.firsts[:gone]
        del self.lasts[:gone]
        if self.firsts and self.firsts[0] <= offset:
            self.firsts[0] = offset + 1

    def plan(self, firsts: Sequence[int], lasts: Sequence[int]) -> tuple[list[Edit], int]:
        """The edits that add these intervals, given as `union` gives them, and how many more there will be.

        No edits: all of it was there. Changes nothing, so that the caller can still say no.
        """
        stored_firsts, stored_lasts, count = self.firsts, self.lasts, len(self.firsts)
        edits: list[Edit] = []
        growth = 0
        left = 0
        for first, last in zip(firsts, lasts, strict=True):
            if left < count and stored_lasts[left] < first - 1:
                left = bisect_left(stored_lasts, first - 1, left + 1)
            right = left
            if left < count and stored_firsts[left] <= last + 1:  # it touches what is stored
                right = left + 1
                if right < count and stored_firsts[right] <= last + 1:
                    # Stored intervals lie at least two apart: no more than this can begin within the new one.
                    most = min(count, left + 2 + (last - first) // 2)
                    right = bisect_right(stored_firsts, last + 1, right + 1, most)
                elif stored_firsts[left] <= first and last <= stored_lasts[left]:
                    continue
                first = min(first, stored_firsts[left])
                last = max(last, stored_lasts[right - 1])
                if edits and left < edits[-1][1]:  # what is stored between the two joins them
                    left, joined, first, _ = edits.pop()
                    growth -= 1 + left - joined
            edits.append((left, right, first, last))
            growth += 1 + left - right
            left = max(left, right - 1)
        return edits, growth

    def carry_out(self, edits: Sequence[Edit]) -> None:
        """Make the edits that `plan` found."""
        if len(edits) <= _FEW:
            for left, right, first, last in reversed(edits):
                self.firsts[left:right] = [first]
                self.lasts[left:right] = [last]
            return
        firsts: list[int] = []
        lasts: list[int] = []
        at = 0
        for left, right, first, last in edits:
            if at < left:
                firsts += self.firsts[at:left]
                lasts += self.lasts[at:left]
            firsts.append(first)
            lasts.append(last)
            at = right
        firsts += self.firsts[at:]
        lasts += self.lasts[at:]
        self.firsts = firsts
        self.lasts = lasts
