"""Progress and intervals: key ranges (P8), and P1-P10 against a set of offsets. (What records do: tests/scripts.)"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rationalizer import Progress, intervals
from rationalizer.intervals import Intervals, lag, union
from rationalizer.limits import MAX_KEY_HASH

TOP = 2**63 - 1
ranges_below_80 = st.lists(
    st.tuples(st.integers(0, 80), st.integers(0, 6)).map(lambda pair: (pair[0], pair[0] + pair[1])),
    min_size=1,
    max_size=8,
)


def progress(stable: int = -1, *ranges: tuple[int, int]) -> Progress:
    made = Progress()
    if stable >= 0:
        made.through(stable)
    if ranges:
        assert made.commit(ranges) == "OK"
    return made


def test_what_one_lease_has_done_is_no_other_ones() -> None:
    """What has no ranges shares one empty set: whatever is done to a progress, the next one has none."""
    for made in (progress(), progress(4), progress(4, (7, 8))):
        made.commit([(10, 12), (20, 22)])
        assert progress().ranges == []
        made.through(15)
        made.reposition(3)
        made.commit([(5, 5), (9, 9)])
        made.through(30)
        made.commit([(40, 41)])
        assert made.ranges == [(40, 41)]
        assert progress().ranges == progress(8).ranges == []


def test_p2_done_is_granted_or_done_through_or_in_ranges() -> None:
    made = progress(10, (20, 22))
    assert [offset for offset in range(30) if made.is_done(offset)] == [*range(11), 20, 21, 22]
    made.grant(15)
    assert [offset for offset in range(30) if made.is_done(offset)] == [*range(16), 20, 21, 22]
    assert made.granted == 15


def test_p6_the_rules_example_of_filling_gaps() -> None:
    made = progress(40, (43, 45), (48, 49))
    gaps = [offset for offset in range(41, 51) if not made.is_done(offset)]
    assert gaps == [41, 42, 46, 47, 50]
    made.commit([(41, 42), (46, 47), (50, 50)])
    assert (made.stable, made.ranges) == (50, [])


# -- key ranges (P8) --------------------------------------------------------------------------------------


def test_p8_a_key_range_raises_its_own_piece_only() -> None:
    made = progress(10)
    assert made.commit_key_range(0, 99, 30) == "OK"
    assert made.done_through == [(0, 99, 30), (100, MAX_KEY_HASH, 10)]
    assert made.stable == 10
    assert made.is_done(30, 99)
    assert not made.is_done(30, 100)
    assert not made.is_done(30)
    before = made.done_through
    assert made.commit_key_range(0, 50, 30) == made.commit_key_range(0, 50, 29) == "OK"
    assert made.commit_key_range(0, 50, 9) == "OFFSET_REGRESSION"
    assert made.done_through == before


def test_p8_pieces_cut_again_keep_what_was_done_and_equal_neighbours_merge() -> None:
    made = progress(10)
    made.commit_key_range(0, 99, 30)
    made.commit_key_range(50, 199, 40)
    assert made.done_through == [(0, 49, 30), (50, 199, 40), (200, MAX_KEY_HASH, 10)]
    made.commit_key_range(0, 49, 40)
    assert made.done_through == [(0, 199, 40), (200, MAX_KEY_HASH, 10)]
    made.commit_key_range(0, MAX_KEY_HASH, 40)
    assert made.done_through == [(0, MAX_KEY_HASH, 40)]
    assert made.stable == 40


def test_p10_a_last_offset_raises_every_piece() -> None:
    made = progress(10)
    made.commit_key_range(0, 99, 30)
    assert made.through(20) == "OK"
    assert made.done_through == [(0, 99, 30), (100, MAX_KEY_HASH, 20)]
    assert made.through(30) == "OK"
    assert made.done_through == [(0, MAX_KEY_HASH, 30)]


def test_p10_pieces_and_stable_move_on_through_ranges_that_touch_them() -> None:
    made = progress(10, (20, 25), (31, 35))
    made.commit_key_range(0, 99, 30)
    assert made.done_through == [(0, 99, 35), (100, MAX_KEY_HASH, 10)]
    assert made.ranges == [(20, 25), (31, 35)]
    made.commit_key_range(100, MAX_KEY_HASH, 19)
    assert (made.stable, made.ranges) == (25, [(31, 35)])
    assert made.done_through == [(0, 99, 35), (100, MAX_KEY_HASH, 25)]
    made.commit([(26, 30)])
    assert (made.done_through, made.ranges) == ([(0, MAX_KEY_HASH, 35)], [])


def test_p8_ranges_that_share_one_hash_share_it() -> None:
    made = progress()
    made.commit_key_range(10, 20, 5)
    made.commit_key_range(20, 30, 7)
    made.commit_key_range(0, 10, 9)
    assert made.done_through == [(0, 10, 9), (11, 19, 5), (20, 30, 7), (31, MAX_KEY_HASH, -1)]


def test_c11_reposition_makes_one_piece_of_many() -> None:
    made = progress(10)
    made.commit_key_range(0, 99, 30)
    assert made.reposition(10) == "REPOSITIONED"
    assert made.done_through == [(0, MAX_KEY_HASH, 10)]
    assert made.reposition(10) == "OK"


def test_p10_a_commit_moves_the_pieces_that_it_touches_though_stable_stays() -> None:
    made = progress(10)
    made.commit_key_range(0, 99, 30)
    made.commit([(31, 35)])
    assert (made.stable, made.ranges) == (10, [(31, 35)])
    assert made.done_through == [(0, 99, 35), (100, MAX_KEY_HASH, 10)]


def test_p10_a_grant_raises_stable_over_the_pieces() -> None:
    made = progress(10)
    made.commit_key_range(0, 99, 30)
    made.grant(20)
    assert (made.stable, made.done_through) == (20, [(0, 99, 30), (100, MAX_KEY_HASH, 20)])


# -- against a set of offsets --------------------------------------------------------------------------------


class Naive:
    """The rules on sets: per key hash what is done through, plus offsets done for every key."""

    HASHES = (0, 49, 50, 99, 100, MAX_KEY_HASH)

    def __init__(self) -> None:
        self.through = dict.fromkeys(self.HASHES, -1)
        self.everywhere: set[int] = set()
        self.granted = -1

    def done(self, offset: int, key_hash: int) -> bool:
        return offset <= max(self.granted, self.through[key_hash]) or offset in self.everywhere

    @property
    def stable(self) -> int:
        at = -1
        while all(self.done(at + 1, key_hash) for key_hash in self.HASHES):
            at += 1
        return at


KEY_RANGES = [(0, 49), (50, 99), (0, 99), (100, MAX_KEY_HASH)]

steps = st.lists(
    st.one_of(
        st.tuples(st.just("commit"), ranges_below_80),
        st.tuples(st.just("through"), st.integers(-1, 90)),
        st.tuples(st.just("grant"), st.integers(0, 90)),
        st.tuples(
            st.just("keys"), st.sampled_from([(0, 49), (50, 99), (0, 99), (100, MAX_KEY_HASH)]), st.integers(0, 90)
        ),
        st.tuples(st.just("reposition"), st.integers(-1, 90)),
    ),
    max_size=14,
)


@given(steps=steps)
def test_p10_any_course_agrees_with_a_set_of_offsets_and_has_one_form(steps: list[tuple[object, ...]]) -> None:
    made, naive = Progress(), Naive()
    for step in steps:
        stable = naive.stable
        match step:
            case ("commit", list() as ranges):
                new = {offset for first, last in ranges for offset in range(first, last + 1) if offset > stable}
                want = (
                    "INDIVIDUAL_COMMIT_TOO_OLD" if not new else "DUPLICATE_COMMIT" if new <= naive.everywhere else "OK"
                )
                got = made.commit(ranges)
                # Offsets that a grant or every key's own commits have covered lie at or below stable.
                assert got == want
                naive.everywhere |= new
            case ("through", int() as offset):
                assert made.through(offset) == ("OFFSET_REGRESSION" if offset < stable else "OK")
                if offset >= stable:
                    naive.through = {key: max(done, offset) for key, done in naive.through.items()}
            case ("grant", int() as offset):
                assert made.grant(offset) == ("PROPOSAL_TOO_LOW" if offset <= stable else "OK")
                if offset > stable:
                    naive.granted = offset
            case ("keys", (int() as lo, int() as hi), int() as offset):
                made.commit_key_range(lo, hi, offset)
                for key in naive.through:
                    if lo <= key <= hi:
                        naive.through[key] = max(naive.through[key], offset)
            case ("reposition", int() as offset):
                before = made.done_through, made.ranges, made.granted
                code = made.reposition(offset)
                changed = before != (made.done_through, made.ranges, made.granted)
                assert code == ("REPOSITIONED" if changed else "OK")
                naive = Naive()
                naive.through = dict.fromkeys(naive.HASHES, offset)
        _same(made, naive)


def _same(made: Progress, naive: Naive) -> None:
    assert (made.stable, made.granted) == (naive.stable, naive.granted)
    for key in naive.HASHES:
        for offset in range(100):
            assert made.is_done(offset, key) == naive.done(offset, key)
    # The one form: disjoint ranges that never touch, wholly above stable; pieces that no range touches.
    edges = [made.stable, *(edge for pair in made.ranges for edge in pair)]
    assert all(edges[n] + 1 < edges[n + 1] for n in range(0, len(edges) - 1, 2))
    pieces = made.done_through
    assert (pieces[0][0], pieces[-1][1]) == (0, MAX_KEY_HASH)
    assert all(left[1] + 1 == right[0] and left[2] != right[2] for left, right in pairwise(pieces))
    assert min(done for _, _, done in pieces) == made.stable
    assert not any(first <= done + 1 <= last for _, _, done in pieces for first, last in made.ranges)


# -- intervals: each way of adding ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("offset", "left"), [(4, [(5, 9), (20, 20)]), (5, [(6, 9), (20, 20)]), (9, [(20, 20)]), (30, [])]
)
def test_dropping_through_an_offset_cuts_the_interval_that_holds_it(offset: int, left: list[tuple[int, int]]) -> None:
    made = Intervals.of([(5, 9), (20, 20)])
    made.drop_through(offset)
    assert made.pairs() == left


@given(ranges=ranges_below_80)
def test_union_is_the_set_of_offsets_in_its_one_form(ranges: list[tuple[int, int]]) -> None:
    firsts, lasts = union(ranges)
    assert _offsets(zip(firsts, lasts, strict=True)) == _offsets(ranges)
    assert all(last + 1 < first for last, first in zip(lasts, firsts[1:], strict=False))


def _offsets(ranges: Iterable[tuple[int, int]]) -> set[int]:
    return {offset for first, last in ranges for offset in range(first, last + 1)}


@pytest.fixture(params=["merged anew", "one by one, in place", "one by one, in one copy"])
def _way_of_adding(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Small sets would always be merged whole: make each way of adding happen."""
    monkeypatch.setattr(intervals, "_SPARSE", 10**9 if request.param == "merged anew" else 0)
    monkeypatch.setattr(intervals, "_FEW", 0 if "copy" in request.param else 10**9)
    yield


@pytest.mark.usefixtures("_way_of_adding")
def test_adding_gives_the_set_of_both_and_its_plan_says_by_how_much_it_grows() -> None:
    for seed in range(500):
        rng = random.Random(seed)
        stored, new = _some(rng, 25), _some(rng, 9)
        whole = Intervals.of(stored)
        before = whole.pairs()
        edits, growth = whole.plan(*union(new))
        assert whole.pairs() == before
        assert (not edits) == (_offsets(new) <= _offsets(stored))
        whole.carry_out(edits)
        assert whole.pairs() == Intervals.of(stored + new).pairs()
        assert len(whole) == len(before) + growth


def _some(rng: random.Random, most: int) -> list[tuple[int, int]]:
    starts = [rng.randrange(120) for _ in range(rng.randint(1, most))]
    return [(start, start + rng.choice((0, 0, 1, 4))) for start in starts]


@given(begin=st.integers(0, 90), length=st.integers(0, 40), ranges=ranges_below_80)
def test_lag_is_the_number_of_offsets_that_are_not_done(begin: int, length: int, ranges: list[tuple[int, int]]) -> None:
    """Ranges below the log's beginning, beyond its end, and across both: nothing but what lies in the log counts."""
    found = Intervals.of([*ranges, (TOP, TOP)])
    expected = [offset for offset in range(begin, begin + length) if offset not in found]
    assert lag(begin, begin + length, found.pairs()) == len(expected)
