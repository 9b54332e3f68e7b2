"""How messages are settled, entry by entry (H2, H3, H5), and the next batch for a sharer (B5).

Both kinds of group settle in one way. They differ in who may settle what: a `Reach`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Final, NamedTuple

from rationalizer import codes
from rationalizer.holes import NO_KEY, NO_OWNER, Hole, Holes
from rationalizer.limits import MAX_HOLES, MAX_KEY_HASH, MAX_OFFSET
from rationalizer.progress import Progress
from rationalizer.wire.records import Done, Opened, Parked

#: From this number of attempts on a sharer gets one message at a time (B5).
ONE_BY_ONE: Final = 2


class Reach(NamedTuple):
    """What of a partition the sender of a record may settle (H2), and where it may make holes (H3)."""

    #: Ranges of key hashes (lo, hi), ascending, whose holes it has; None: all holes without an owner.
    keys: Sequence[tuple[int, int]] | None
    #: The epoch of its share by batches, whose holes it has.
    owner: int = NO_OWNER
    #: Whether it may open messages that lie in no hole, if it has their key hash.
    makes: bool = False
    #: Whether it may open those without one, too.
    makes_unkeyed: bool = False
    #: Whether it may open what is done (R2), and without a key hash, too.
    redoes: bool = False
    redoes_unkeyed: bool = False

    def has_key(self, key_hash: int) -> bool:
        """Whether this key hash is one of its keys."""
        if self.keys is None:
            return True
        place = bisect_right(self.keys, (key_hash, MAX_KEY_HASH)) - 1
        return place >= 0 and key_hash <= self.keys[place][1]

    def has(self, hole: Hole, seen: int) -> bool:
        """Whether it may settle this hole, its sender having seen the log up to `seen`."""
        if hole.since >= seen:
            return False
        return hole.owner == self.owner if hole.owner != NO_OWNER else self.has_key(hole.key_hash)

    def may_make(self, key_hash: int) -> bool:
        """Whether it may make a hole with this key hash where there is none."""
        return self.makes and (self.makes_unkeyed if key_hash == NO_KEY else self.has_key(key_hash))


class Settling:
    """One record's entries, against what is done of a partition. `offset`: the record's, `seen`: as it says."""

    __slots__ = ("_again", "_floor", "_offset", "_progress", "_reach", "_seen")

    def __init__(self, progress: Progress, reach: Reach, offset: int, seen: int) -> None:
        self._progress = progress
        self._reach = reach
        self._offset = offset
        self._seen = min(seen, offset)
        self._again = progress.again
        #: What `_are_done` asks for; None: not known.
        self._floor: int | None = None

    def settle(self, done: Done, opened: Opened, parked: Parked) -> tuple[str, ...]:
        """The codes of the entries; each is judged against what those before it left."""
        answers = [self.done(first, last) for first, last in done]
        answers += [self.open(*entry) for entry in opened]
        answers += [self.park(*entry) for entry in parked]
        return tuple(answers)

    def done(self, first: int, last: int) -> str:
        """These offsets are done: the code. A rejected entry changes nothing."""
        progress = self._progress
        holes = progress.holes
        if holes is None:
            return codes.DUPLICATE_COMMIT if self._are_done(first, last) else codes.FENCED
        met: list[tuple[int, int, int]] = []
        for low, high, hole in holes.parts(first, last):
            if hole is None:
                if not self._are_done(low, high):
                    return codes.FENCED
            elif not self._reach.has(hole, self._seen):
                return codes.FENCED
            else:
                met.append((low, high, hole.key_hash))
        if not met:
            return codes.DUPLICATE_COMMIT
        if close(progress, first, last, met):
            self._floor = None
        return codes.OK

    def open(self, first: int, last: int, key_hash: int | None, attempts: int) -> str:
        """These offsets wait for their next try: the code."""
        code = self._make(first, last, NO_KEY if key_hash is None else key_hash, attempts, None)
        if self._reach.redoes and code == codes.OK:
            self._progress.again = self._offset
        return code

    def park(self, offset: int, key_hash: int, attempts: int, reason: str) -> str:
        """This offset is set aside: the code."""
        return self._make(offset, offset, key_hash, attempts, reason)

    def _make(self, first: int, last: int, key_hash: int, attempts: int, reason: str | None) -> str:
        progress, reach = self._progress, self._reach
        holes = Holes() if progress.holes is None else progress.holes
        made: list[Hole] = []
        for low, high, hole in holes.parts(first, last):
            kept = key_hash
            if hole is None:
                if reach.redoes and reason is None and self._is_done(low, high, key_hash):
                    if not self._may_redo(key_hash):
                        return codes.FENCED
                elif not reach.may_make(key_hash):
                    return codes.FENCED
                elif progress.has_passed_some(low, high, key_hash):
                    return codes.INDIVIDUAL_COMMIT_TOO_OLD
            elif not reach.has(hole, self._seen):
                return codes.FENCED
            elif key_hash == NO_KEY:
                kept = hole.key_hash
            made.append(Hole(low, high, NO_OWNER, self._offset, attempts, kept, reason))
        edit, growth = holes.plan(first, last, made)
        if growth > 0 and len(holes) + growth > MAX_HOLES:
            return codes.MAX_INDIVIDUAL_COMMIT_REACHED
        holes.carry_out(edit)
        progress.holes = holes
        return codes.OK

    def _is_done(self, first: int, last: int, key_hash: int) -> bool:
        """Whether P2 says so of these offsets, for this key hash; without one: for every key."""
        return self._are_done(first, last) if key_hash == NO_KEY else self._progress.has_passed(first, key_hash)

    def _may_redo(self, key_hash: int) -> bool:
        """Whether what is done, and lies in no hole, opens (R2)."""
        if self._seen <= self._again:
            return False
        return key_hash != NO_KEY or (self._reach.redoes_unkeyed and self._progress.piece_count == 1)

    def _are_done(self, first: int, last: int) -> bool:
        """Whether these offsets, which lie in no hole, are done for all keys of the sender; for every key without."""
        progress = self._progress
        if last <= progress.stable:
            return True
        if self._floor is None:
            self._floor = progress.floor(self._reach.keys or ())
        floor = self._floor
        return last <= floor or progress.intervals.holds(max(first, floor + 1), last)


def close(progress: Progress, first: int, last: int, met: Sequence[tuple[int, int, int]]) -> bool:
    """The holes leave first … last: (first, last, key hash) of each part of one. Whether something was committed."""
    holes = progress.holes
    assert holes is not None
    edit, _ = holes.plan(first, last, ())
    holes.carry_out(edit)
    if not len(holes):
        progress.holes = None
    ranges = [
        (low, high)
        for low, high, key_hash in met
        if not (high <= progress.stable if key_hash == NO_KEY else progress.has_passed(low, key_hash))
    ]
    if ranges:
        progress.commit(ranges, MAX_OFFSET)
    return bool(ranges)


def take(
    progress: Progress, owner: int, offset: int, count: int, up_to: int, at_most_once: bool
) -> tuple[int, int] | None:
    """The next batch (first, last) for the share of this epoch (B5); None: there is nothing to take."""
    hole = None if progress.holes is None else progress.holes.lowest_free(at_most_once)
    if hole is not None:
        return _take_free(progress, hole, owner, offset, count, at_most_once)
    found = _untaken(progress, count, up_to)
    if found is None or at_most_once:
        if found is not None:
            progress.through(found[1])
        return found
    holes = Holes() if progress.holes is None else progress.holes
    if len(holes) >= MAX_HOLES:
        return None
    progress.through(found[1])
    edit, _ = holes.plan(*found, [Hole(*found, owner, offset, 1, NO_KEY, None)])
    holes.carry_out(edit)
    progress.holes = holes
    return found


def _take_free(
    progress: Progress, hole: Hole, owner: int, offset: int, count: int, at_most_once: bool
) -> tuple[int, int] | None:
    """The first offsets of a free hole; at the limit, the lowest hole that is given as a whole."""
    holes = progress.holes
    assert holes is not None
    last = _end_of(hole, count)
    if at_most_once:
        close(progress, hole.first, last, [(hole.first, last, hole.key_hash)])
        return hole.first, last
    if last < hole.last and len(holes) >= MAX_HOLES:
        whole = next((each for each in holes.free() if _end_of(each, count) == each.last), None)
        if whole is None:
            return None
        hole, last = whole, whole.last
    given = hole._replace(last=last, owner=owner, since=offset, attempts=hole.attempts + 1)
    edit, _ = holes.plan(hole.first, last, [given])
    holes.carry_out(edit)
    return hole.first, last


def _end_of(hole: Hole, count: int) -> int:
    return min(hole.last, hole.first + (1 if hole.attempts >= ONE_BY_ONE else count) - 1)


def _untaken(progress: Progress, count: int, up_to: int) -> tuple[int, int] | None:
    """The lowest offsets above stable that are in no range and no hole."""
    holes, intervals, at = progress.holes, progress.intervals, progress.stable + 1
    while at <= up_to:
        hole = None if holes is None else holes.at(at)
        end = intervals.end_of_run(at) if hole is None else hole.last
        if hole is None and at not in intervals:
            last = min(at + count - 1, up_to)
            following = None if holes is None else holes.following(at)
            if following is not None:
                last = min(last, following.first - 1)
            return at, min(last, intervals.next_first(at) - 1)
        at = end + 1
    return None
