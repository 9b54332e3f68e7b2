"""The fast path for commits of many pieces has the same result as piece by piece."""

from __future__ import annotations

import random

import pytest

from rationalizer import done_through
from rationalizer.done_through import DoneThrough
from rationalizer.groups import commits
from rationalizer.limits import MAX_KEY_HASH
from tests.mutants.progress import progress_differs
from tests.rationalizer.group_sides import record_by_record
from tests.rationalizer.log import COMPILED

pytestmark = pytest.mark.skipif(COMPILED, reason="its insides can't be replaced")


@pytest.mark.parametrize("seed", range(8))
def test_a_senders_pieces_sorted_out_once_are_those_checked_one_by_one(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commits, "_FEW", 1)
    record_by_record(5_000_000 + seed, 100, every=5)


def test_progress_by_key_is_the_same_by_many_pieces_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(done_through, "_MANY", 0)
    assert [wrong for seed in range(60) if (wrong := progress_differs(seed))] == []


@pytest.mark.parametrize("seed", range(20))
def test_wide_and_narrow_raise_the_same(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(seed)
    made = [(place * 1_000, place * 1_000 + 999, chance.choice((3, 7, 11, 50))) for place in range(99)]
    pieces = [*made, (99_000, MAX_KEY_HASH, 5)]
    wide, narrow = DoneThrough(pieces), DoneThrough(pieces)
    for _ in range(60):
        lo, hi = sorted(chance.choices((*range(0, 99_000, 500), 0, 98_999, 99_001, MAX_KEY_HASH), k=2))
        offset = chance.choice((1, 3, 7, 8, 11, 12, 50, 51))
        for many, each in ((0, wide), (1_000, narrow)):
            monkeypatch.setattr(done_through, "_MANY", many)
            edit = each.plan(lo, hi, offset)
            if edit is not None:
                each.carry_out(edit)
        assert wide.pieces() == narrow.pieces()
        assert wide.lowest == narrow.lowest == min(done for _, _, done in narrow.pieces())
        if len(narrow) == 1:
            break
