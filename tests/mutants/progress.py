"""Progress alone against its oracle: key ranges without a record type yet, and many ranges at their limit."""

from __future__ import annotations

from random import Random

from rationalizer import Progress, codes
from tests.rationalizer.oracle.progress import SetProgress, merged
from tests.rationalizer.progress_steps import CEILING, EDGES, SAMPLES, same_progress, take

STEPS = 30
COMMITS = 12

Span = tuple[int, int]


def progress_differs(seed: int) -> str:
    """A difference between the two; "" if they agree."""
    source = Random(seed)
    try:
        _few_offsets(source)
        _many_ranges(source)
    except AssertionError as error:
        return f"progress {seed}: {str(error).splitlines()[0] if str(error) else 'differs from its oracle'}"
    return ""


def _few_offsets(source: Random) -> None:
    """P1, P2, P8 and P10, offset by offset and key by key."""
    real, naive = Progress(), SetProgress(SAMPLES, CEILING)
    for _ in range(STEPS):
        kind = source.choice(
            ("through", "grant", "commit", "commit", "key range", "key range", "key range", "reposition")
        )
        offset = source.randrange(CEILING)
        if kind == "commit":
            firsts = [source.randrange(CEILING) for _ in range(source.randint(1, 4))]
            what: object = [(first, min(first + source.randrange(6), CEILING - 1)) for first in firsts]
        elif kind == "key range":
            what = (source.choice(EDGES), source.choice(EDGES), offset)
        elif kind == "reposition":
            if source.random() < 0.7:  # it leaves nothing to compare
                continue
            what = source.choice((naive.stable, offset - 1))
        else:
            what = offset if source.random() < 0.3 else min(CEILING - 1, max(0, naive.stable + source.randrange(-1, 3)))
        take((kind, what), real, naive)
        same_progress(real, naive)


def _many_ranges(source: Random) -> None:
    """P3, P4 and P5: few into many and many into many, and one more than allowed."""
    real, stable = Progress(), -1
    step = source.choice((2, 3, 5))
    stored: list[Span] = [
        (at, at + source.randrange(max(1, step - 2))) for at in range(5, source.choice((40, 3000)), step)
    ]
    wanted = codes.OK
    assert real.commit(stored) == wanted, "the first commit"
    known = merged(stored)
    reach = known[-1][1] + 10
    for _ in range(COMMITS):
        longest = source.choice((1, 2, 10, 100))
        firsts = [source.randrange(reach) for _ in range(source.choice((1, 1, 2, 5, 20, 40)))]
        spans = [(first, first + source.randrange(longest)) for first in firsts]
        if source.random() < 0.2:
            spans = [source.choice(known)] if known else spans
        above = [(max(first, stable + 1), last) for first, last in spans if last > stable]
        after = merged([*known, *above])
        touches = after[0][0] == stable + 1 if after else False
        limit = max(1, len(after) - touches + source.choice((-1, 0, 0, 1)))
        if not above:
            wanted = codes.INDIVIDUAL_COMMIT_TOO_OLD
        elif after == known:
            wanted = codes.DUPLICATE_COMMIT
        elif len(after) - touches > max(limit, len(known)):  # as many as before are always allowed (G15)
            wanted = codes.MAX_INDIVIDUAL_COMMIT_REACHED
        else:
            wanted, known = codes.OK, after
            if touches:
                stable = known.pop(0)[1]
        got = real.commit(spans, limit)
        assert got == wanted, f"{got}, and {wanted} is right"
        assert (real.stable, real.ranges) == (stable, known), f"stable {real.stable} and {stable}, or ranges differ"
