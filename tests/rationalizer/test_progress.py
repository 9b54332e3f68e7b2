"""Progress and intervals: key ranges (P8), and P1-P10 against a set of offsets. (What records do: tests/scripts.)"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from itertools import pairwise, product
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rationalizer import Progress, intervals
from rationalizer.holes import NO_KEY, NO_OWNER, Hole, Holes
from rationalizer.intervals import Intervals, lag, union
from rationalizer.limits import MAX_KEY_HASH
from tests.rationalizer.strategies import many

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


# -- key ranges (P8) --------------------------------------------------------------------------------------


def test_p8_ranges_that_share_one_hash_share_it() -> None:
    made = progress()
    made.commit_key_range(10, 20, 5)
    made.commit_key_range(20, 30, 7)
    made.commit_key_range(0, 10, 9)
    assert made.done_through == [(0, 10, 9), (11, 19, 5), (20, 30, 7), (31, MAX_KEY_HASH, -1)]


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


# Holes (H1): every edit of a few offsets, and long runs of random ones, against a dictionary of offsets.


#: What an offset's hole has besides its bounds: owner, since, attempts, key hash, reason. None: it lies in no hole.
Kind = tuple[int, int, int, int, str | None]
FREE: Kind = (NO_OWNER, 7, 0, NO_KEY, None)
OWNED: Kind = (3, 7, 1, NO_KEY, None)
WITH_KEY: Kind = (NO_OWNER, 7, 0, 5, None)
KINDS: tuple[Kind, ...] = (
    *(FREE, OWNED, WITH_KEY, (NO_OWNER, 7, 1, NO_KEY, None), (NO_OWNER, 8, 0, NO_KEY, None)),
    *((4, 7, 1, NO_KEY, None), (3, 8, 2, 5, None), (NO_OWNER, 7, 0, 5, "E")),
)
Model = dict[int, Kind]


def in_one_form(model: Model) -> list[Hole]:
    """H1: neighbours without a key hash that are equal in all else are one."""
    holes: list[Hole] = []
    for offset, kind in sorted(model.items()):
        if holes and kind[3] == NO_KEY and holes[-1][1:] == (offset - 1, *kind):
            holes[-1] = holes[-1]._replace(last=offset)
        else:
            holes.append(Hole(offset, offset, *kind))
    return holes


def cut(kinds: list[Kind | None], first: int, source: Random | None = None) -> list[Hole]:
    """Holes of these kinds, one or several offsets each, as the parts of entries are."""
    made: list[Hole] = []
    for offset, kind in enumerate(kinds, first):
        longer = source is not None and source.random() < 0.5
        if kind is not None and longer and made and made[-1][1:] == (offset - 1, *kind) and kind[3] == NO_KEY:
            made[-1] = made[-1]._replace(last=offset)
        elif kind is not None:
            made.append(Hole(offset, offset, *kind))
    return made


def check(holes: Holes, wanted: list[Hole]) -> None:
    """All that can be asked of holes."""
    assert list(holes) == wanted
    free = [hole for hole in wanted if hole.is_free]
    assert list(holes.free()) == free
    assert holes.lowest_free() == next(iter(free), None)
    assert holes.lowest_free(untried=True) == next((hole for hole in free if not hole.attempts), None)
    owners = {hole.owner for hole in wanted} - {NO_OWNER}
    assert set(holes.owners()) == owners
    for owner in owners:
        owned = sorted((hole for hole in wanted if hole.owner == owner), key=lambda hole: (hole.since, hole.first))
        assert holes.of(owner) == owned
        assert holes.latest_of(owner) == owned[-1].since
    assert holes.has_unkeyed() == any(hole.key_hash == NO_KEY for hole in wanted)


def edit(holes: Holes, model: Model, first: int, kinds: list[Kind | None], middle: list[Hole]) -> None:
    """The same edit to both."""
    found, growth = holes.plan(first, first + len(kinds) - 1, middle)
    for offset, kind in enumerate(kinds, first):
        model.pop(offset, None)
        if kind is not None:
            model[offset] = kind
    wanted = in_one_form(model)
    assert growth == len(wanted) - len(holes)
    holes.carry_out(found)
    assert list(holes) == wanted


def test_h1_every_edit_of_four_offsets() -> None:
    some = (None, FREE, OWNED, WITH_KEY)
    for before in product(some, repeat=4):
        given = {offset: kind for offset, kind in enumerate(before) if kind is not None}
        for first in range(4):
            for length in range(1, 5 - first):
                for kinds in product(some, repeat=length):
                    edit(Holes(in_one_form(given)), dict(given), first, list(kinds), cut(list(kinds), first))


@pytest.mark.parametrize("seed", range(many(40)))
def test_h1_random_edits(seed: int) -> None:
    source = Random(seed)
    holes, model, size = Holes(), Model(), source.randint(6, 30)
    kinds = source.sample(KINDS, source.randint(2, len(KINDS)))
    for _ in range(200):
        if source.random() < 0.1:
            owner = source.choice((3, 4))
            holes.disown(owner)
            model = {at: (NO_OWNER, *kind[1:]) if kind[0] == owner else kind for at, kind in model.items()}
        else:
            first = source.randrange(size)
            even = source.choice((None, *kinds))
            drawn = [
                even if source.random() < 0.6 else source.choice((None, *kinds))
                for _ in range(source.randint(1, size - first))
            ]
            edit(holes, model, first, drawn, cut(drawn, first, source))
        check(holes, in_one_form(model))
