"""Holes (H1): every edit of a few offsets, and long runs of random ones, against a dictionary of offsets."""

from __future__ import annotations

from itertools import product
from random import Random

import pytest

from rationalizer.holes import NO_KEY, NO_OWNER, Hole, Holes
from tests.rationalizer.strategies import many

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
