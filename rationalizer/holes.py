"""Holes: offsets that progress has passed, or will, and that are open all the same (H1).

A message that waits for its next try, a parked one, a batch that a sharer works on, a batch that it gave back: one list
for each partition. Holes are disjoint. Of 10,000 a record changes few: what it meets is found by bisection, and so are
the lowest free hole (B5) and the holes of a sharer.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple, Protocol

from rationalizer.limits import is_later

#: In place of the epoch of a share by batches: the hole has no owner.
NO_OWNER: Final = -1

#: In place of a key hash: the hole has none.
NO_KEY: Final = -1


class Hole(NamedTuple):
    """Offsets first … last, as S1 has them.

    `owner`: the epoch of a share by batches, or NO_OWNER. `since`: the offset of the record that last made it, gave it
    to a sharer, freed it by an entry, or parked it. `attempts`: deliveries. `reason`: None unless it is parked.
    """

    first: int
    last: int
    owner: int
    since: int
    attempts: int
    key_hash: int
    reason: str | None

    @property
    def is_free(self) -> bool:
        """Whether the next take, or the owner of its key, may have it."""
        return self.owner == NO_OWNER and self.reason is None

    @property
    def is_parked(self) -> bool:
        """Whether it is set aside until an operator decides. (What waits for its time is not.)"""
        return self.reason is not None and not is_later(self.reason)

    @property
    def is_later(self) -> bool:
        """Whether it waits for a time, and is tried then (U2)."""
        return self.reason is not None and is_later(self.reason)


#: (left, right, holes): these take the place of the holes left … right − 1.
Edit = tuple[int, int, list[Hole]]


class Holes:
    """The holes of one partition, ascending. Live state: read it, don't write it."""

    __slots__ = ("_firsts", "_free", "_items", "_owned", "_unkeyed", "_untried")

    def __init__(self, holes: Iterable[Hole] = ()) -> None:
        self._items: list[Hole] = list(holes)
        self._firsts = [hole.first for hole in self._items]
        #: `first` of each hole that is free, and of those without attempts.
        self._free = [hole.first for hole in self._items if hole.is_free]
        self._untried = [hole.first for hole in self._items if hole.is_free and not hole.attempts]
        #: (since, first) of the holes of each owner, ascending.
        self._owned: dict[int, list[tuple[int, int]]] = {}
        for hole in self._items:
            if hole.owner != NO_OWNER:
                self._owned.setdefault(hole.owner, []).append((hole.since, hole.first))
        for owned in self._owned.values():
            owned.sort()
        #: How many have no key hash.
        self._unkeyed = sum([hole.key_hash == NO_KEY for hole in self._items])

    # -- reading ---------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """The number of holes."""
        return len(self._items)

    def __iter__(self) -> Iterator[Hole]:
        return iter(self._items)

    def at(self, offset: int) -> Hole | None:
        """The hole that an offset lies in."""
        place = bisect_right(self._firsts, offset) - 1
        if place < 0 or self._items[place].last < offset:
            return None
        return self._items[place]

    def following(self, offset: int) -> Hole | None:
        """The lowest hole above an offset."""
        place = bisect_right(self._firsts, offset)
        return self._items[place] if place < len(self._items) else None

    def parts(self, first: int, last: int) -> Iterator[tuple[int, int, Hole | None]]:
        """The offsets first … last, cut into parts that lie in one hole each, or in none; ascending."""
        place, at = max(0, bisect_right(self._firsts, first) - 1), first
        while at <= last:
            hole = self._items[place] if place < len(self._items) else None
            if hole is not None and hole.last < at:
                place += 1
            elif hole is None or hole.first > last:
                yield at, last, None
                return
            elif at < hole.first:
                yield at, hole.first - 1, None
                at = hole.first
            else:
                end = min(hole.last, last)
                yield at, end, hole
                at, place = end + 1, place + 1

    def lowest_free(self, untried: bool = False) -> Hole | None:
        """The lowest free hole; untried: of those without attempts."""
        firsts = self._untried if untried else self._free
        return self._items[bisect_left(self._firsts, firsts[0])] if firsts else None

    def free(self) -> Iterator[Hole]:
        """The free holes, ascending."""
        for first in self._free:
            yield self._items[bisect_left(self._firsts, first)]

    def of(self, owner: int) -> list[Hole]:
        """The holes of an owner, in the order in which it got them."""
        return [self._items[bisect_left(self._firsts, first)] for _, first in self._owned.get(owner, ())]

    def owners(self) -> list[int]:
        """The epochs of the sharers that have holes."""
        return list(self._owned)

    def latest_of(self, owner: int) -> int:
        """The largest `since` of an owner's holes; −1: it has none."""
        owned = self._owned.get(owner)
        return owned[-1][0] if owned else -1

    def has_unkeyed(self) -> bool:
        """Whether some hole has no key hash."""
        return self._unkeyed > 0

    # -- changing --------------------------------------------------------------------------------------

    def plan(self, first: int, last: int, middle: Sequence[Hole]) -> tuple[Edit, int]:
        """The edit that puts these holes in place of all within first … last, and how many more there will be.

        What holes at the ends have beyond stays as it is, and equal neighbours are one. Changes nothing.
        """
        items = self._items
        left = bisect_left(self._firsts, first) - 1
        if left < 0 or items[left].last < first - 1:
            left += 1
        right = bisect_right(self._firsts, last + 1, left)
        new: list[Hole] = []
        if left < right and items[left].first < first:
            new.append(items[left]._replace(last=min(items[left].last, first - 1)))
        new += middle
        if left < right and items[right - 1].last > last:
            new.append(items[right - 1]._replace(first=max(items[right - 1].first, last + 1)))
        new = _merged(new)
        return (left, right, new), len(new) - (right - left)

    def carry_out(self, edit: Edit) -> None:
        """Make the edit that `plan` found."""
        left, right, new = edit
        for hole in self._items[left:right]:
            self._unkeyed -= hole.key_hash == NO_KEY
            if hole.owner != NO_OWNER:
                owned = self._owned[hole.owner]
                del owned[bisect_left(owned, (hole.since, hole.first))]
                if not owned:
                    del self._owned[hole.owner]
            elif hole.reason is None:
                del self._free[bisect_left(self._free, hole.first)]
                if not hole.attempts:
                    del self._untried[bisect_left(self._untried, hole.first)]
        for hole in new:
            self._unkeyed += hole.key_hash == NO_KEY
            if hole.owner != NO_OWNER:
                insort(self._owned.setdefault(hole.owner, []), (hole.since, hole.first))
            elif hole.reason is None:
                insort(self._free, hole.first)
                if not hole.attempts:
                    insort(self._untried, hole.first)
        self._items[left:right] = new
        self._firsts[left:right] = [hole.first for hole in new]

    def disown(self, owner: int) -> None:
        """The holes of this owner have none from now on, else they stay as they were (B4)."""
        for _, first in list(self._owned.get(owner, ())):
            hole = self._items[bisect_left(self._firsts, first)]
            edit, _ = self.plan(hole.first, hole.last, [hole._replace(owner=NO_OWNER)])
            self.carry_out(edit)

    def parked_through(self, offset: int) -> list[Hole]:
        """Those that are parked, at or below an offset: what a position that replaces progress leaves (C11)."""
        return [hole for hole in self._items[: bisect_right(self._firsts, offset)] if hole.reason is not None]


def _merged(holes: Iterable[Hole]) -> list[Hole]:
    merged: list[Hole] = []
    for hole in holes:
        if merged and hole.key_hash == NO_KEY:
            before = merged[-1]
            if before.last + 1 == hole.first and before[2:] == hole[2:]:
                merged[-1] = before._replace(last=hole.last)
                continue
        merged.append(hole)
    return merged


# -- what a group has before it ----------------------------------------------------------------------------


class Open(Protocol):
    """A hole, or a copy of it."""

    @property
    def first(self) -> int:
        """The first offset."""

    @property
    def last(self) -> int:
        """The last one."""

    @property
    def is_parked(self) -> bool:
        """Whether it is set aside until an operator decides."""


def first_open(position: int, holes: Iterable[Open]) -> int:
    """What a group reads next: its position, or the lowest hole that is not parked, if that lies below it (H1)."""
    return min([hole.first for hole in holes if not hole.is_parked and hole.first < position], default=position)


def lag_of(holes: Iterable[Open], begin: int, end: int, stable: int, ranges: Sequence[tuple[int, int]]) -> int:
    """What holes add to a lag (`intervals.lag`), which knows none; below 0 if more is parked than is open.

    Messages that are open below stable, or in a range, count; parked ones do not, wherever they lie. begin, end: of
    the partition's log. ranges: ascending.
    """
    found = 0
    for hole in holes:
        first, last = max(hole.first, begin), min(hole.last, end - 1)
        at = max(first, stable + 1)
        passed = max(0, min(last, stable) - first + 1)
        place = max(0, bisect_right(ranges, (at, at)) - 1)
        while place < len(ranges) and ranges[place][0] <= last:
            passed += max(0, min(last, ranges[place][1]) - max(at, ranges[place][0]) + 1)
            place += 1
        found += passed - max(0, last - first + 1) if hole.is_parked else passed
    return found
