"""What the log shows of one partition, as one member reads it (G4, G18)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from rationalizer import Piece
from rationalizer.limits import MAX_KEY_HASH

__all__ = ["covers", "meant_for", "owned_since", "span_of"]


def meant_for(slot: int, parts: Sequence[Piece], *, share: bool) -> list[Piece] | None:
    """Neighbouring parts that this slot owns and should own: all keys or, where it shares by key, some."""
    run: list[Piece] = []
    for part in parts:
        ours = part.owner == part.target == slot
        if run and (not ours or run[-1].hi + 1 != part.lo):
            break
        if ours:
            run.append(part)
    if not run or not (share or covers(run, 0, MAX_KEY_HASH)):
        return None
    return run


def owned_since(slot: int, parts: Sequence[Piece], lo: int, hi: int) -> int | None:
    """The newest generation since which this slot owns keys of lo … hi; None: it does not own all of them."""
    within = [part for part in parts if part.lo <= hi and lo <= part.hi]
    if not within or any(part.owner != slot for part in within) or not covers(within, lo, hi):
        return None
    return max(part.since for part in within)


def span_of(parts: Sequence[Piece] | None) -> tuple[int, int] | None:
    """From the first to the last key hash of neighbouring parts."""
    return (parts[0].lo, parts[-1].hi) if parts else None


def covers(parts: Sequence[Piece], lo: int, hi: int) -> bool:
    """Whether these parts, ascending, hold all key hashes lo … hi."""
    return parts[0].lo <= lo and hi <= parts[-1].hi and all(x.hi + 1 == y.lo for x, y in pairwise(parts))
