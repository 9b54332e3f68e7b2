"""Sets of offsets, kept as disjoint inclusive intervals.

The form is the same for equal sets: intervals ascend, and neighbours that overlap or touch are one interval
(P3). They are held as two lists of ints, `firsts` and `lasts`, since both ascend: a place is found by
bisection, and a change replaces one slice of each list. So a commit costs its own length, not that of what
is stored.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable


def union(ranges: Iterable[tuple[int, int]]) -> tuple[list[int], list[int]]:
    """The set that a list of ranges stands for, whatever their order and overlap (P4): (firsts, lasts)."""
    firsts: list[int] = []
    lasts: list[int] = []
    for first, last in sorted(ranges):
        if lasts and first <= lasts[-1] + 1:
            if last > lasts[-1]:
                lasts[-1] = last
        else:
            firsts.append(first)
            lasts.append(last)
    return firsts, lasts


class Splice:
    """What an `add` would do: `firsts` and `lasts` take the place of the stored intervals start … end − 1."""

    __slots__ = ("changes", "end", "firsts", "lasts", "start")

    def __init__(self, start: int, end: int, firsts: list[int], lasts: list[int], changes: bool) -> None:
        self.start = start
        self.end = end
        self.firsts = firsts
        self.lasts = lasts
        self.changes = changes


class Intervals:
    """A set of offsets. `firsts` and `lasts` are parallel and ascend; neighbours never touch."""

    __slots__ = ("firsts", "lasts")

    def __init__(self) -> None:
        self.firsts: list[int] = []
        self.lasts: list[int] = []

    @classmethod
    def of(cls, ranges: Iterable[tuple[int, int]]) -> Intervals:
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

    def plan(self, firsts: list[int], lasts: list[int]) -> Splice:
        """What adding these intervals (at least one, as `union` gives them) would change. Changes nothing.

        Only the stored intervals between the first and the last new one are looked at, and what lies between
        two new ones is copied as a slice.
        """
        stored_firsts, stored_lasts = self.firsts, self.lasts
        start = bisect_left(stored_lasts, firsts[0] - 1)
        end = bisect_right(stored_firsts, lasts[-1] + 1, start)
        out_firsts: list[int] = []
        out_lasts: list[int] = []
        at = start
        for first, last in zip(firsts, lasts, strict=True):
            left = bisect_left(stored_lasts, first - 1, at, end)
            right = bisect_right(stored_firsts, last + 1, left, end)
            if left > at:
                out_firsts += stored_firsts[at:left]
                out_lasts += stored_lasts[at:left]
            if right > left:  # stored intervals left … right − 1 touch this one: they become part of it
                first = min(first, stored_firsts[left])
                last = max(last, stored_lasts[right - 1])
                at = right
            else:
                at = left
            if out_lasts and out_lasts[-1] + 1 >= first:  # the one before has swallowed what joins the two
                out_lasts[-1] = max(out_lasts[-1], last)
            else:
                out_firsts.append(first)
                out_lasts.append(last)
        out_firsts += stored_firsts[at:end]
        out_lasts += stored_lasts[at:end]
        changes = out_firsts != stored_firsts[start:end] or out_lasts != stored_lasts[start:end]
        return Splice(start, end, out_firsts, out_lasts, changes)

    def carry_out(self, splice: Splice) -> None:
        """Do what `plan` found."""
        self.firsts[splice.start : splice.end] = splice.firsts
        self.lasts[splice.start : splice.end] = splice.lasts
