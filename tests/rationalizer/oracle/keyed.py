"""Progress of a partition of a coordinated group: section 4 with key ranges (P8), in the one form of P10.

A progress is a plain value; every change gives another one, which P10 puts in order from scratch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from tests.rationalizer.oracle.holes import Holes
from tests.rationalizer.oracle.progress import LARGEST_HASH, Span, merged

Through: TypeAlias = tuple[int, int, int]  # lo, hi, offset or −1

#: G15.
MOST_PIECES = 2_000


@dataclass(frozen=True)
class KeyedProgress:
    """P1 without `granted`, which a group does not know; the two that G14 adds; and H1's open messages."""

    initial: int = -1
    through: tuple[Through, ...] = ((0, LARGEST_HASH, -1),)
    ranges: tuple[Span, ...] = ()
    metadata: str | None = None
    holes: Holes = ()
    #: R1; −1: none.
    again: int = -1

    @property
    def stable(self) -> int:
        """P2. In the form of P10 the lowest piece of done_through is stable."""
        return min(offset for _, _, offset in self.through)

    def raised(self, low: int, high: int, offset: int) -> KeyedProgress:
        """P8: done through `offset` for hashes low … high."""
        pieces = []
        for piece_low, piece_high, known in self.through:
            # What of the piece lies below the range, within it, and above it.
            for part_low, part_high, inside in (
                (piece_low, min(piece_high, low - 1), False),
                (max(piece_low, low), min(piece_high, high), True),
                (max(piece_low, high + 1), piece_high, False),
            ):
                if part_low <= part_high:
                    pieces.append((part_low, part_high, max(known, offset) if inside else known))
        return self._in_order(pieces, self.ranges)

    def committed(self, spans: Iterable[Sequence[int]]) -> KeyedProgress:
        """P3: the offsets of `spans` are done for every key."""
        return self._in_order(self.through, [*self.ranges, *((first, last) for first, last in spans)])

    def started(self, offset: int) -> KeyedProgress:
        """G14, action 2: done_through for every key, and `initial`."""
        return replace(self._in_order([(0, LARGEST_HASH, offset)], self.ranges), initial=offset)

    def repositioned(self, offset: int) -> KeyedProgress:
        """G21, as C11: done_through for every key, ranges empty; `initial`, metadata and parked holes stay."""
        stay = tuple(hole for hole in self.holes if hole.reason is not None and hole.last <= offset)
        return replace(self, through=((0, LARGEST_HASH, offset),), ranges=(), holes=stay)

    def noted(self, metadata: str | None) -> KeyedProgress:
        """G14: metadata, if not nil, replaces the partition's."""
        return self if metadata is None else replace(self, metadata=metadata)

    def _in_order(self, pieces: Iterable[Through], spans: Iterable[Span]) -> KeyedProgress:
        """P10, sentence by sentence."""
        pieces, spans = list(pieces), merged(spans)
        # stable = the largest s ≥ min done_through reached by way of ranges that touch it
        stable = along(min(offset for _, _, offset in pieces), spans)
        # what ranges hold at or below stable is dropped
        spans = [(max(first, stable + 1), last) for first, last in spans if last > stable]
        # every piece is at least stable and is moved on through every range that touches it
        pieces = [(low, high, along(max(offset, stable), spans)) for low, high, offset in pieces]
        # equal neighbouring pieces merge
        kept: list[Through] = []
        for low, high, offset in pieces:
            if kept and kept[-1][2] == offset:
                kept[-1] = (kept[-1][0], high, offset)
            else:
                kept.append((low, high, offset))
        return replace(self, through=tuple(kept), ranges=tuple(spans))

    def canonical(self, level: int) -> list[Any]:
        """S1."""
        holes = [hole.row() for hole in self.holes]
        return [
            self.initial,
            [list(piece) for piece in self.through],
            [list(span) for span in self.ranges],
            self.metadata,
            *([holes] if holes or level >= 5 else []),
            *([self.again] if level >= 5 else []),
        ]


def along(offset: int, spans: Iterable[Span]) -> int:
    """`offset`, moved on through each range that touches it; `spans` in order."""
    for first, last in spans:
        if first <= offset + 1:
            offset = max(offset, last)
    return offset


def commit_ranges(
    before: KeyedProgress, ranges: list[list[int]], allowed: bool, in_order: bool, most_intervals: int
) -> tuple[str, KeyedProgress]:
    """G14, *ranges*: the code, and the progress after it; order: not allowed, K8, P4, P5 with G15."""
    if not allowed:
        return "INDIVIDUAL_COMMIT_NOT_ALLOWED", before
    after = before.committed(ranges)
    if in_order and after.stable < max(last for _, last in ranges):  # K8
        return "OUT_OF_ORDER", before
    above = merged((max(first, before.stable + 1), last) for first, last in ranges if last > before.stable)
    if not above:  # P4
        return "INDIVIDUAL_COMMIT_TOO_OLD", before
    if all(any(low <= first and last <= high for low, high in before.ranges) for first, last in above):  # P4
        return "DUPLICATE_COMMIT", before
    if leaves_too_many(before, after, most_intervals):
        return "MAX_INDIVIDUAL_COMMIT_REACHED", before
    return "OK", after


def commit_through(
    before: KeyedProgress, low: int, high: int, through: int, most_intervals: int
) -> tuple[str, KeyedProgress]:
    """G14, *through*: the code, and the progress after it."""
    if through < before.stable:
        return "OFFSET_REGRESSION", before
    after = before.raised(low, high, through)
    if leaves_too_many(before, after, most_intervals):
        return "MAX_INDIVIDUAL_COMMIT_REACHED", before
    return "OK", after


def leaves_too_many(before: KeyedProgress, after: KeyedProgress, most_intervals: int) -> bool:
    """G15: more than the maximum of intervals or of pieces, *and more of them than before it*."""
    intervals, pieces = len(after.ranges), len(after.through)
    if intervals > most_intervals and intervals > len(before.ranges):
        return True
    return pieces > MOST_PIECES and pieces > len(before.through)
