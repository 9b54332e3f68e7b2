"""Section 7b, H1 to H3: the open messages of a partition, and what an entry of types 28 and 29 does to them.

Holes are a list; an entry cuts its span wherever anything begins or ends, and judges each part by its first offset.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from tests.rationalizer.oracle.progress import LARGEST_HASH, Span

if TYPE_CHECKING:
    from tests.rationalizer.oracle.keyed import KeyedProgress

#: H5.
MOST_HOLES = 10_000


@dataclass(frozen=True, order=True)
class Hole:
    """H1. None: no owner, no key hash, not parked."""

    first: int
    last: int
    owner: int | None
    since: int
    attempts: int
    key_hash: int | None
    reason: str | None

    @property
    def is_free(self) -> bool:
        """Without owner, and not parked."""
        return self.owner is None and self.reason is None

    def row(self) -> list[Any]:
        """S1."""
        owner, key_hash = (-1 if each is None else each for each in (self.owner, self.key_hash))
        return [self.first, self.last, owner, self.since, self.attempts, key_hash, self.reason]

    def shown(self) -> dict[str, Any]:
        """D3."""
        return {
            "first": self.first,
            "last": self.last,
            "owner": self.owner,
            "since": self.since,
            "attempts": self.attempts,
            "key_hash": self.key_hash,
            "parked": self.reason,
        }


Holes: TypeAlias = tuple[Hole, ...]


def in_one_form(holes: Iterable[Hole]) -> Holes:
    """H1: "neighbours without a key hash that are equal in all else are one"."""
    kept: list[Hole] = []
    for hole in sorted(holes, key=lambda hole: hole.first):
        alike = kept and kept[-1].last + 1 == hole.first and kept[-1].key_hash is None
        if alike and replace(kept[-1], first=0, last=0) == replace(hole, first=0, last=0):
            kept[-1] = replace(kept[-1], last=hole.last)
        else:
            kept.append(hole)
    return tuple(kept)


def without(holes: Iterable[Hole], first: int, last: int) -> list[Hole]:
    """What is left outside of a span: "what is left of a hole keeps all else"."""
    left = []
    for hole in holes:
        for low, high in ((hole.first, min(hole.last, first - 1)), (max(hole.first, last + 1), hole.last)):
            if low <= high:
                left.append(replace(hole, first=low, last=high))
    return left


def parts(first: int, last: int, progress: KeyedProgress) -> list[tuple[int, int, Hole | None]]:
    """The span, cut so that all offsets of a part lie in the same hole or in none, and are done for the same keys."""
    edges = {first, last + 1}
    for low, high in [(hole.first, hole.last) for hole in progress.holes] + list(progress.ranges):
        edges |= {low, high + 1}
    edges |= {offset + 1 for _, _, offset in progress.through}
    starts = sorted(edge for edge in edges if first <= edge <= last)
    found = []
    for number, low in enumerate(starts):
        high = starts[number + 1] - 1 if number + 1 < len(starts) else last
        hole = next((hole for hole in progress.holes if hole.first <= low <= hole.last), None)
        found.append((low, high, hole))
    return found


def done_for(progress: KeyedProgress, keys: Span, offset: int) -> bool:
    """Whether P2 says that it is done for each of these keys."""
    if any(first <= offset <= last for first, last in progress.ranges):
        return True
    return all(offset <= through for low, high, through in progress.through if low <= keys[1] and keys[0] <= high)


def done_for_some(progress: KeyedProgress, offset: int) -> bool:
    """Whether P2 says that it is done for some key."""
    if any(first <= offset <= last for first, last in progress.ranges):
        return True
    return any(offset <= through for _, _, through in progress.through)


EVERY_KEY: Span = (0, LARGEST_HASH)


@dataclass(frozen=True)
class Settler:
    """Who settles: what the rules ask of the sender of a record."""

    #: H2, but for `seen`.
    reaches: Callable[[Hole], bool]
    #: Whether it may open what lies in no hole, with this key hash (nil: None).
    makes: Callable[[int | None], bool]
    #: Of the record, at most its own offset.
    seen: int
    #: The record's offset.
    now: int
    #: "for all of its keys"; else for every key.
    keys: Sequence[Span] = (EVERY_KEY,)
    #: H4, "of a member before that": by the key hashes that an entry has to do with, and whether it makes holes.
    refuses: Callable[[Sequence[int], bool], str | None] = lambda _hashes, _makes: None
    #: R2: an operator's record of version 5; whether it opens what is done with this key hash (nil: None).
    redoes: Callable[[KeyedProgress, int | None], bool] | None = None

    def may(self, hole: Hole) -> bool:
        """H2."""
        return self.seen > hole.since and self.reaches(hole)


def settle(
    progress: KeyedProgress, done: list[Any], open_: list[Any], parked: list[Any], by: Settler
) -> tuple[tuple[str, ...], KeyedProgress]:
    """H3: the entries in order, each against what those before it left."""
    codes, again = [], progress.again
    for first, last in done:
        code, progress = _done(progress, first, last, by)
        codes.append(code)
    entries = [(first, last, key_hash, attempts, None) for first, last, key_hash, attempts in open_]
    entries += [(offset, offset, key_hash, attempts, reason) for offset, key_hash, attempts, reason in parked]
    for number, entry in enumerate(entries):
        code, progress = _opened(progress, *entry, by, again)
        codes.append(code)
        if by.redoes is not None and number < len(open_) and code == "OK":  # R2
            progress = replace(progress, again=by.now)
    return tuple(codes), progress


def _hashes(met: Iterable[tuple[int, int, Hole | None]]) -> list[int]:
    return [hole.key_hash for _, _, hole in met if hole is not None and hole.key_hash is not None]


def _done(progress: KeyedProgress, first: int, last: int, by: Settler) -> tuple[str, KeyedProgress]:
    cut = parts(first, last, progress)
    refused = by.refuses(_hashes(cut), False)
    if refused is not None:
        return refused, progress
    for low, _, hole in cut:
        if hole is None and not all(done_for(progress, keys, low) for keys in by.keys):
            return "FENCED", progress
        if hole is not None and not by.may(hole):
            return "FENCED", progress
    if all(hole is None for _, _, hole in cut):
        return "DUPLICATE_COMMIT", progress
    left = replace(progress, holes=in_one_form(without(progress.holes, first, last)))
    spans = []
    for low, high, hole in cut:
        if hole is not None:
            keys = EVERY_KEY if hole.key_hash is None else (hole.key_hash, hole.key_hash)
            if not done_for(left, keys, low):
                spans.append((low, high))
    return "OK", left.committed(spans)


def _opened(
    progress: KeyedProgress,
    first: int,
    last: int,
    key_hash: int | None,
    attempts: int,
    reason: str | None,
    by: Settler,
    again: int,
) -> tuple[str, KeyedProgress]:
    cut = parts(first, last, progress)
    refused = by.refuses(_hashes(cut) + ([] if key_hash is None else [key_hash]), True)
    if refused is not None:
        return refused, progress
    for low, _, hole in cut:
        if hole is not None and not by.may(hole):
            return "FENCED", progress
        if hole is None and by.redoes is not None and reason is None:
            keys = EVERY_KEY if key_hash is None else (key_hash, key_hash)
            if done_for(progress, keys, low):  # "it is done, as P2 says, for the entry's key hash (nil: for every key)"
                if by.seen > again and by.redoes(progress, key_hash):
                    continue
                return "FENCED", progress
        if hole is None and not by.makes(key_hash):
            return "FENCED", progress
        if hole is None:
            known = done_for_some(progress, low) if key_hash is None else done_for(progress, (key_hash, key_hash), low)
            if known:
                return "INDIVIDUAL_COMMIT_TOO_OLD", progress
    made = []
    for low, high, hole in cut:
        kept = key_hash if key_hash is not None or hole is None else hole.key_hash
        made.append(Hole(low, high, None, by.now, attempts, kept, reason))
    holes = in_one_form([*without(progress.holes, first, last), *made])
    if len(holes) > MOST_HOLES and len(holes) > len(progress.holes):  # H5
        return "MAX_INDIVIDUAL_COMMIT_REACHED", progress
    return "OK", replace(progress, holes=holes)
