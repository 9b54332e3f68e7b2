"""Progress alone (section 4), key ranges included, against plain sets of offsets; and its limits, in a world."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rationalizer import Progress, World
from tests.rationalizer.oracle import OracleWorld, SetProgress, progress_from
from tests.rationalizer.oracle.compare import same_outcome, same_state
from tests.rationalizer.oracle.progress import LARGEST_HASH, Step
from tests.rationalizer.progress_steps import CEILING, EDGES, SAMPLES, same_progress, take
from tests.rationalizer.strategies import LARGEST, TEST_TIMEOUT_S, effort, record

pytestmark = pytest.mark.timeout(TEST_TIMEOUT_S)

offsets = st.integers(0, CEILING - 1)
spans = st.tuples(offsets, st.integers(0, 5)).map(lambda pair: (pair[0], min(pair[0] + pair[1], CEILING - 1)))
steps = st.one_of(
    st.tuples(st.just("through"), offsets),
    st.tuples(st.just("grant"), offsets),
    st.tuples(st.just("reposition"), st.integers(-1, CEILING - 1)),
    st.tuples(st.just("commit"), st.lists(spans, min_size=1, max_size=4)),
    st.tuples(st.just("commit"), st.lists(spans, min_size=1, max_size=4)),
    st.tuples(st.just("key range"), st.tuples(st.sampled_from(EDGES), st.sampled_from(EDGES), offsets)),
    st.tuples(st.just("key range"), st.tuples(st.sampled_from(EDGES), st.sampled_from(EDGES), offsets)),
)


@given(taken=st.lists(steps, max_size=12))
@effort(200)
def test_progress_with_key_ranges(taken: list[tuple[str, Any]]) -> None:
    real, naive = Progress(), SetProgress(SAMPLES, CEILING)
    for step in taken:
        take(step, real, naive)
        same_progress(real, naive)


@given(taken=st.lists(steps.filter(lambda step: step[0] != "key range"), max_size=15))
@effort(200)
def test_both_naive_versions_agree(taken: list[tuple[str, Any]]) -> None:
    """The oracle's intervals against sets: two readings of section 4 that share nothing."""
    names = {"through": "raised", "grant": "granted", "reposition": "repositioned", "commit": "committed"}
    naive = SetProgress([], CEILING)
    for kind, what in taken:
        take((kind, what), None, naive)
    by_intervals = progress_from(_let_through(taken, names))
    assert (by_intervals.stable, by_intervals.granted) == (naive.stable, naive.granted)
    assert list(by_intervals.ranges) == naive.ranges
    for offset in range(CEILING + 2):
        assert by_intervals.is_done(offset) == naive.is_done(offset, 0)


def _let_through(taken: list[tuple[str, Any]], names: dict[str, str]) -> list[Step]:
    """The steps that a world would accept, by the intervals' own account."""
    kept: list[Step] = []
    for kind, what in taken:
        stable = progress_from(kept).stable
        too_low = (kind == "through" and what < stable) or (kind == "grant" and what <= stable)
        if not too_low and not (kind == "commit" and all(last <= stable for _, last in what)):
            kept.append((names[kind], what))
    return kept


def test_the_largest_offset() -> None:
    """E5: 2^63−1 may be done, granted and committed; nothing overflows beside it."""
    for steps_to_the_end in (
        [("commit", [(LARGEST, LARGEST)]), ("through", LARGEST - 1)],
        [("commit", [(0, LARGEST)])],
        [("through", LARGEST)],
        [("grant", LARGEST)],
        [("commit", [(LARGEST - 1, LARGEST)]), ("commit", [(0, LARGEST - 2)])],
    ):
        progress = Progress()
        for name, what in steps_to_the_end:
            getattr(progress, name)(what)
        assert progress.stable == LARGEST
        assert list(progress.ranges) == []
        assert progress.is_done(LARGEST)
        assert [tuple(piece) for piece in progress.done_through] == [(0, LARGEST_HASH, LARGEST)]


def some_spans(source: random.Random, count: int, room: int, longest: int) -> list[list[int]]:
    """`count` intervals of 1 … `longest` offsets below `room`, in no order."""
    firsts = [source.randrange(room) for _ in range(count)]
    return [[first, first + source.randrange(longest)] for first in firsts]


@given(seed=st.integers(0, 2**32), stored=st.sampled_from((3, 30, 300, 1500)), rounds=st.integers(1, 8))
@effort(40)
def test_commits_into_many_intervals(seed: int, stored: int, rounds: int) -> None:
    """P3, P4: few into many and many into many, short and long, at the edges and across them."""
    source = random.Random(seed)
    who, key, room = ("a", "1"), ("g", "t", 0), stored * 4
    real, wanted = World(0, 1), OracleWorld(0, 1)
    values = [record(2, who, *key, 1000)]
    values.append(record(7, who, *key, 0, [[at + 5, at + 5] for at in range(0, room, source.choice((2, 3, 4)))]))
    for _ in range(rounds):
        count = source.choice((1, 1, 2, 3, 10, 20, 60))
        spans = some_spans(source, count, room + 20, source.choice((1, 2, 3, 9, room // 3 + 1)))
        values.append(record(7, who, *key, 0, [[at + 4 * (count < 10), last + 4] for at, last in spans]))
    values.append(record(1, who, *key, 0, source.randrange(room)))
    values.append(record(4, who, *key, 0, source.randrange(room)))
    for offset, value in enumerate(values):
        same_outcome(real.apply(offset, 1000, value), wanted.apply(offset, 1000, value))
        assert real.digest() == wanted.digest()
    same_state(real, wanted)


def test_sixty_thousand_intervals_and_no_more() -> None:
    """P5: what counts is the number of intervals left after the whole record."""
    who, key = ("a", "1"), ("g", "t", 0)
    most = [[[2 * index, 2 * index] for index in range(start, start + 10_000)] for start in range(10, 60_010, 10_000)]
    filler = [[odd, odd] for odd in range(21, 21 + 2 * 9_999, 2)]
    commits = [
        *most,
        [[200_000, 200_000]],  # one too many
        [[200_000, 200_000], [21, 21]],  # one more, and two merged: 60,000 again
        [[300_000, 300_000], [400_000, 400_000], [23, 23]],  # one too many, and none of it counts
        [[23, 23]],
        [[200_000, 200_000]],  # a duplicate is checked before "too many"
        [[300_000, 300_000]],
        [[0, 0]],  # one more that stable swallows
        [[300_002, 300_002]],
        [[25, 25], [27, 27], [500_000, 500_000], [500_002, 500_002]],  # three become one, two are new
        [[29, 29], [31, 31], [500_004, 500_004], [500_006, 500_006], [500_008, 500_008]],
        [[0, 30], [300_002, 300_002]],  # stable moves over some of them
        filler,
    ]
    real, wanted = World(0, 1), OracleWorld(0, 1)
    values = [record(2, who, *key, 1000), *(record(7, who, *key, 0, spans) for spans in commits)]
    for offset, value in enumerate(values):
        same_outcome(real.apply(offset, 1000, value), wanted.apply(offset, 1000, value))
    codes = [outcome.code for outcome in wanted.outcomes[7:]]
    too_many = "MAX_INDIVIDUAL_COMMIT_REACHED"
    wanted_codes = [too_many, "OK", too_many, "OK", "DUPLICATE_COMMIT", "OK", "OK", too_many]
    wanted_codes += ["OK", too_many, "OK", "OK"]
    assert codes == wanted_codes
    same_state(real, wanted)
