"""Which lists of S1 are a progress (P10)."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from tests.rationalizer.oracle.layout import a_hash, a_last_offset, an_offset, fits
from tests.rationalizer.oracle.progress import LARGEST_HASH, merged

#: Ranges of one lease (P5), and the most that a group's setting allows (G19).
MOST_RANGES = 60_000


def is_progress(pieces: list[Any], ranges: list[Any], granted: int) -> bool:
    """P10. The lowest piece is stable."""
    if not pieces or not all(fits(piece, [a_hash, a_hash, a_last_offset]) for piece in pieces):
        return False
    if not all(fits(span, [an_offset, an_offset]) and span[0] <= span[1] for span in ranges):
        return False
    edges = [-1, *(piece[1] for piece in pieces)]
    offsets = [piece[2] for piece in pieces]
    stable = min(offsets)
    return (
        edges[-1] == LARGEST_HASH
        and all(piece[0] == edge + 1 <= piece[1] for piece, edge in zip(pieces, edges, strict=False))
        and all(one != other for one, other in pairwise(offsets))
        and [tuple(span) for span in ranges] == merged(tuple(span) for span in ranges)
        and all(first > stable + 1 for first, _ in ranges)
        and not any(first <= offset + 1 <= last for first, last in ranges for offset in offsets)
        and granted <= stable
        and len(ranges) <= MOST_RANGES
    )
