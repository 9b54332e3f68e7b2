"""Sets of offsets, kept as disjoint inclusive intervals.

The form is the same for equal sets: intervals ascend, and neighbours that overlap or touch are one interval
(P3). They are held as two lists of ints, `firsts` and `lasts`, since both ascend: a place is found by
bisection, and a change replaces slices of both lists. So adding to a set costs what is added, and little more
however much is stored: 60,000 intervals (P5) must not make a record of 30 bytes expensive.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import compress, islice
from operator import itemgetter
from typing import Final

from rationalizer.limits import MAX_OFFSET

_FIRST: Final = itemgetter(0)
_LAST: Final = itemgetter(1)

#: If more than one in this number of the stored intervals concerned is added, all of them are merged again; else
#: the places are looked for one by one. (Finding one place costs about as much as merging twelve intervals.)
_SPARSE: Final = 12

#: Up to this number of edits are made in place, each moving what lies behind it; more are made in one copy.
_FEW: Final = 16

#: (left, right, firsts, lasts): these intervals take the place of the stored intervals left … right − 1.
Edit = tuple[int, int, list[int], list[int]]


def lag(begin: int, end: int, ranges: Iterable[tuple[int, int]] = ()) -> int:
    """The offsets of a log that are not done: those from `begin` to below `end`, less those of the ranges.

    begin: the first offset that is not done, or where the log begins, if that is later.
    """
    done = sum(max(0, min(last, end - 1) - max(first, begin) + 1) for first, last in ranges)
    return max(0, end - begin - done)


def union(ranges: Sequence[tuple[int, int]]) -> tuple[list[int], list[int]]:
    """The set that a list of ranges stands for, whatever their order and overlap (P4): (firsts, lasts)."""
    return _merge(list(map(_FIRST, ranges)), list(map(_LAST, ranges)))


def _merge(starts: list[int], ends: list[int]) -> tuple[list[int], list[int]]:
    """The intervals (firsts, lasts) of a set of ranges, of which it takes all starts and all ends; sorts both.

    They may be sorted apart from each other: where the n-th end lies below the next start by more than one,
    exactly n ranges begin before this gap, and all n have ended. Sorting ints and looking for gaps is several
    times faster than merging pairs.
    """
    starts.sort()
    ends.sort()
    gap_behind = [start - end > 1 for start, end in zip(islice(starts, 1, None), ends, strict=False)]
    firsts = [starts[0], *compress(islice(starts, 1, None), gap_behind)]
    lasts = [*compress(ends, gap_behind), ends[-1]]
    return firsts, lasts


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
        if ranges:
            intervals.firsts, intervals.lasts = union(ranges)
        return intervals

    def __len__(self) -> int:
        """The number of intervals."""
        return len(self.firsts)

    def __contains__(self, offset: int) -> bool:
        place = bisect_left(self.lasts, offset)
        return place < len(self.firsts) and self.firsts[place] <= offset

    def holds(self, first: int, last: int) -> bool:
        """Whether all of first … last is in the set."""
        place = bisect_left(self.lasts, first)
        return place < len(self.firsts) and self.firsts[place] <= first and last <= self.lasts[place]

    def meets(self, first: int, last: int) -> bool:
        """Whether an offset of first … last is in the set."""
        place = bisect_left(self.lasts, first)
        return place < len(self.firsts) and self.firsts[place] <= last

    def copy(self) -> Intervals:
        """The same set, to be changed by itself."""
        copy = Intervals()
        copy.firsts = self.firsts.copy()
        copy.lasts = self.lasts.copy()
        return copy

    def pairs(self) -> list[tuple[int, int]]:
        """The intervals as (first, last), ascending."""
        return list(zip(self.firsts, self.lasts, strict=True))

    def clear(self) -> None:
        """Empty the set."""
        self.firsts = []
        self.lasts = []

    def end_of_run(self, offset: int) -> int:
        """The largest offset reached from `offset` by way of the interval that holds or touches it."""
        place = bisect_left(self.lasts, offset)
        if place < len(self.firsts) and self.firsts[place] <= offset + 1:
            return self.lasts[place]
        return offset

    def next_first(self, offset: int) -> int:
        """Where the lowest interval above an offset begins; above all offsets if there is none."""
        place = bisect_right(self.firsts, offset)
        return self.firsts[place] if place < len(self.firsts) else MAX_OFFSET + 1

    def drop_through(self, offset: int) -> None:
        """Take out everything at or below `offset`."""
        gone = bisect_right(self.lasts, offset)
        del self.firsts[:gone]
        del self.lasts[:gone]
        if self.firsts and self.firsts[0] <= offset:
            self.firsts[0] = offset + 1

    def plan(self, firsts: list[int], lasts: list[int]) -> tuple[list[Edit], int]:
        """The edits that add these intervals, given as `union` gives them, and how many more there will be.

        No edits: all of it was there. Changes nothing, so that the caller can still say no.
        """
        start = bisect_left(self.lasts, firsts[0] - 1)
        end = bisect_right(self.firsts, lasts[-1] + 1, start)
        if len(firsts) * _SPARSE < end - start:
            return self._plan_one_by_one(firsts, lasts, start)
        old_firsts, old_lasts = self.firsts[start:end], self.lasts[start:end]
        new_firsts, new_lasts = _merge(old_firsts + firsts, old_lasts + lasts)
        if new_firsts == old_firsts and new_lasts == old_lasts:
            return [], 0
        return [(start, end, new_firsts, new_lasts)], len(new_firsts) - len(old_firsts)

    def _plan_one_by_one(self, firsts: list[int], lasts: list[int], left: int) -> tuple[list[Edit], int]:
        stored_firsts, stored_lasts, count = self.firsts, self.lasts, len(self.firsts)
        edits: list[Edit] = []
        growth = 0
        for first, last in zip(firsts, lasts, strict=True):
            left = right = bisect_left(stored_lasts, first - 1, left)
            if left < count and stored_firsts[left] <= last + 1:  # it touches what is stored
                # Stored intervals begin at least two apart, so no more than this can begin within the new one.
                most = min(count, left + 2 + (last - first) // 2)
                right = bisect_right(stored_firsts, last + 1, left + 1, most)
                if stored_firsts[left] <= first and last <= stored_lasts[left]:
                    continue
                first = min(first, stored_firsts[left])
                last = max(last, stored_lasts[right - 1])
                if edits and left < edits[-1][1]:  # what is stored between the two joins them
                    left, joined, [first], _ = edits.pop()
                    growth -= 1 + left - joined
            edits.append((left, right, [first], [last]))
            growth += 1 + left - right
            left = max(left, right - 1)
        return edits, growth

    def carry_out(self, edits: list[Edit]) -> None:
        """Make the edits that `plan` found."""
        if len(edits) <= _FEW:
            for left, right, new_firsts, new_lasts in reversed(edits):
                self.firsts[left:right] = new_firsts
                self.lasts[left:right] = new_lasts
            return
        firsts: list[int] = []
        lasts: list[int] = []
        at = 0
        for left, right, new_firsts, new_lasts in edits:
            firsts += self.firsts[at:left]
            firsts += new_firsts
            lasts += self.lasts[at:left]
            lasts += new_lasts
            at = right
        firsts += self.firsts[at:]
        lasts += self.lasts[at:]
        self.firsts = firsts
        self.lasts = lasts
