"""Progress alone, key ranges included: one step of it and of its oracle, and whether they agree."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

from rationalizer import Progress
from tests.rationalizer.oracle import SetProgress
from tests.rationalizer.oracle.progress import LARGEST_HASH

CEILING = 30
EDGES = (0, 1, 2**61, 2**62 - 1, 2**62, 2**62 + 1, LARGEST_HASH - 1, LARGEST_HASH)
# Pieces begin and end at these hashes only, so these samples see every piece.
SAMPLES = sorted({near for edge in EDGES for near in (edge - 1, edge, edge + 1) if 0 <= near <= LARGEST_HASH})


def take(step: tuple[str, Any], real: Progress | None, naive: SetProgress) -> None:
    """One change to both, as far as a world would let it through."""
    kind, what = step
    refused: dict[str, Callable[[], bool]] = {
        "through": lambda: what < naive.stable,  # OFFSET_REGRESSION: accepted, but no change
        "grant": lambda: what <= naive.stable,  # PROPOSAL_TOO_LOW
        "commit": lambda: all(last <= naive.stable for _, last in what),  # INDIVIDUAL_COMMIT_TOO_OLD
    }
    if kind in refused and refused[kind]():
        return
    if kind == "key range":
        what = (min(what[:2]), max(what[:2]), what[2])
        naive.raise_range(*what)
        if real is not None:
            real.commit_key_range(*what)
        return
    naive_name = {"through": "raise_all"}.get(kind, kind)
    getattr(naive, naive_name)(what)
    if real is not None:
        getattr(real, kind)(what)


def same_progress(real: Progress, naive: SetProgress) -> None:
    """P1, P2 and P10."""
    assert real.stable == naive.stable
    assert real.granted == naive.granted
    assert [tuple(span) for span in real.ranges] == naive.ranges
    pieces = [tuple(piece) for piece in real.done_through]
    assert pieces[0][0] == 0
    assert pieces[-1][1] == LARGEST_HASH
    for left, right in pairwise(pieces):
        assert left[1] + 1 == right[0]
        assert left[2] != right[2]  # equal neighbours merge
    for sample in naive.samples:
        through = [offset for low, high, offset in pieces if low <= sample <= high]
        assert through == [naive.done_through(sample)]
        for offset in range(CEILING + 2):
            assert real.is_done(offset, sample) == naive.is_done(offset, sample)
    for offset in range(CEILING + 2):
        assert real.is_done(offset) == all(naive.is_done(offset, sample) for sample in naive.samples)
