"""Which lists of S1 are shares and holes (section 7b): every condition by itself, as far as one state shows it."""

from __future__ import annotations

from itertools import combinations, pairwise
from typing import Any

from tests.rationalizer.oracle.layout import (
    LARGEST_OFFSET,
    a_hash,
    a_reason,
    an_id,
    an_interval,
    an_open_offset,
    fits,
    int_between,
    or_nil,
)


def a_list(item: Any) -> bool:
    """Any list."""
    return isinstance(item, list)


def or_minus_one(item: Any) -> bool:
    """A number of the state, or -1 for none."""
    return item == -1 or a_hash(item)


def are_shares_and_holes(row: list[Any], added: list[Any], next_offset: int, log_time: int) -> bool:
    """Of a lease: its row of level 1, and what comes after it."""
    if not fits(added, [a_list, a_list]) or added == [[], []]:
        return False
    shares, holes = added
    if not all(is_share(share, next_offset, log_time) for share in shares):
        return False
    if shares and row[3] is not None:  # "holder and shares exclude each other"
        return False
    # a holder's epoch is of before the shares, which end with its claim
    epochs = [share[0] for share in shares]
    if epochs != sorted(set(epochs)) or (row[6] and any(epoch <= row[5] for epoch in epochs)):
        return False
    if any(overlap(one, other) for one, other in combinations(shares, 2)):
        return False
    by_batches = {share[0] for share in shares if share[5] == -1}
    if not are_holes(holes, by_batches, next_offset):
        return False
    if by_batches and len(row[8]) > 1:  # B3, and nothing cuts done_through meanwhile
        return False
    by_keys = len(shares) > len(by_batches)
    return not (by_keys and any(hole[5] == -1 for hole in holes))


def is_share(row: Any, next_offset: int, log_time: int) -> bool:
    """[epoch, client_id, instance_id, HI, last_beat, lo or -1, hi or -1]."""
    epoch = int_between(0, min(next_offset - 1, LARGEST_OFFSET))
    if not fits(row, [epoch, an_id, an_id, an_interval, int_between(0, log_time), or_minus_one, or_minus_one]):
        return False
    return bool((row[5] == -1) == (row[6] == -1) and row[5] <= row[6])


def overlap(one: list[Any], other: list[Any]) -> bool:
    """B3."""
    if one[5] == -1 and other[5] == -1:
        return one[1:3] == other[1:3]
    if one[5] == -1 or other[5] == -1:
        return True
    return bool(one[5] <= other[6] and other[5] <= one[6])


def are_holes(rows: list[Any], owners: set[int], next_offset: int) -> bool:
    """H1: disjoint, and in the one form; owners: the epochs of shares by batches."""
    if not all(is_hole(row, owners, next_offset) for row in rows):
        return False
    if any(one[1] >= other[0] for one, other in pairwise(rows)):
        return False
    touching = [(one, other) for one, other in pairwise(rows) if one[1] + 1 == other[0] and one[5] == other[5] == -1]
    return not any(one[2:] == other[2:] for one, other in touching)


def is_hole(row: Any, owners: set[int], next_offset: int) -> bool:
    """[first, last, owner or -1, since, attempts, key_hash or -1, reason or nil]."""
    since = int_between(0, min(next_offset - 1, LARGEST_OFFSET))
    attempts = int_between(0, LARGEST_OFFSET)  # each take adds one to what entries may say
    checks = [an_open_offset, an_open_offset, or_minus_one, since, attempts, or_minus_one, or_nil(a_reason)]
    if not fits(row, checks):
        return False
    first, last, owner, since_, tries, key_hash, reason = row
    if first > last or (key_hash != -1 and first != last):
        return False
    if owner == -1:
        return reason is None or key_hash != -1
    return owner in owners and owner < since_ and tries >= 1 and reason is None
