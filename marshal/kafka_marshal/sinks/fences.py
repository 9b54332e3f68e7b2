"""Which epoch may write which keys of a partition.

A *fence* is (lo, hi, epoch): of the key hashes lo … hi, this is the newest epoch that has written, or tried to. Fences
of a partition are ascending, disjoint and cover all keys. A writer's *tokens* have the same form, for its own keys.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import pairwise
from operator import itemgetter
from typing import Final

from rationalizer.limits import MAX_KEY_HASH

#: (lo, hi, epoch), both hashes inclusive; the epoch as it is stored.
Fence = tuple[int, int, int]

#: In place of the partition's one epoch: its keys have different ones. Releases that know no fences refuse it as newer.
SPLIT: Final = 2**63 - 1

_LO: Final = itemgetter(0)


def all_keys(epoch: int) -> tuple[Fence, ...]:
    """One fence, or token, for all keys."""
    return ((0, MAX_KEY_HASH, epoch),)


def covers_all(fences: Sequence[Fence]) -> bool:
    """Whether these are ascending, disjoint, and cover all keys."""
    return (
        bool(fences)
        and (fences[0][0], fences[-1][1]) == (0, MAX_KEY_HASH)
        and all(lo <= hi for lo, hi, _ in fences)
        and all(left[1] + 1 == right[0] for left, right in pairwise(fences))
    )


def overlapping(fences: Iterable[Fence], lo: int, hi: int) -> list[Fence]:
    """Those with some of these keys."""
    return [each for each in fences if each[0] <= hi and lo <= each[1]]


def has_key(fences: Sequence[Fence], key_hash: int) -> bool:
    """Whether one of these is for this key."""
    place = bisect_right(fences, key_hash, key=_LO) - 1
    return place >= 0 and key_hash <= fences[place][1]


def epoch_at(fences: Sequence[Fence], key_hash: int) -> int:
    """The epoch of a key, which one of these is for."""
    return fences[bisect_right(fences, key_hash, key=_LO) - 1][2]


def entered(fences: Iterable[Fence], tokens: Iterable[Fence]) -> tuple[Fence, ...]:
    """The fences after a writer with these tokens has entered: older ones give way, newer ones stay."""
    now = list(fences)
    for lo, hi, epoch in tokens:
        cut: list[Fence] = []
        for first, last, before in now:
            if before >= epoch or last < lo or hi < first:
                cut.append((first, last, before))
                continue
            cut += [(first, lo - 1, before), (max(first, lo), min(last, hi), epoch), (hi + 1, last, before)]
        now = [each for each in cut if each[0] <= each[1]]
    merged: list[Fence] = []
    for lo, hi, epoch in now:
        if merged and merged[-1][2] == epoch:
            lo = merged.pop()[0]
        merged.append((lo, hi, epoch))
    return tuple(merged)
