"""Holes of a snapshot: what their rows (S1) must be, besides each field's own rule, to be believed."""

from __future__ import annotations

from collections.abc import Collection
from itertools import pairwise
from typing import Any

from rationalizer.holes import NO_KEY, NO_OWNER, Hole, Holes
from rationalizer.plane import Bounds
from rationalizer.state import HOLE, want


def load_holes(named: str, rows: tuple[Any, ...] | None, owners: Collection[int], bounds: Bounds) -> Holes | None:
    """The holes that these rows of a snapshot describe. owners: epochs of shares by batches. Raises SnapshotError."""
    if not rows:
        return None
    holes = [_hole(named, row, owners, bounds) for row in rows]
    apart = all(before.last < after.first for before, after in pairwise(holes))
    want(apart, f"the holes of {named} are not sorted, or overlap")
    alike = any(
        before.last + 1 == after.first and after.key_hash == NO_KEY and before[2:] == after[2:]
        for before, after in pairwise(holes)
    )
    want(not alike, f"two holes of {named} would be one")
    return Holes(holes)


def _hole(named: str, row: object, owners: Collection[int], bounds: Bounds) -> Hole:
    said = HOLE.read(row, bounds.level, f"hole of {named}")
    hole = Hole(said.first, said.last, said.owner, said.since, said.attempts, said.key_hash, said.reason)
    want(hole.first <= hole.last, f"a hole of {named} ends before it begins")
    want(hole.key_hash == NO_KEY or hole.first == hole.last, f"a hole of {named} has one key, and several messages")
    want(hole.since < bounds.next_offset, f"a hole of {named} is to come")
    if hole.is_parked:
        want(hole.owner == NO_OWNER and hole.key_hash != NO_KEY, f"a parked hole of {named} is no single message")
    if hole.owner != NO_OWNER:
        want(hole.owner in owners, f"a hole of {named} has an owner that shares no batches")
        want(hole.owner < hole.since and hole.attempts > 0, f"a hole of {named} was taken before it could be")
    return hole
