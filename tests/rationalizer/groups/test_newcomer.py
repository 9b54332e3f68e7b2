"""A member joins equals: the short way of `sticky` gives what the long way gives, and a starting fleet takes it."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest

from benchmarks.groups import Fleet, join
from rationalizer.groups import assignors
from rationalizer.groups.assignors import NOBODY, Lot, deal_to_newcomer

ROUNDS = 3_000


def some_lots(chance: random.Random) -> list[Lot]:
    """Mostly those of a level group that a member joins; some are not, in one way or another."""
    slots = sorted(chance.sample(range(30), chance.randint(1, 9)))
    fresh = set(chance.sample(slots, chance.choice([0, 1, 1, 1, 2]) % len(slots)))
    old = [slot for slot in slots if slot not in fresh]
    sizes = [chance.randint(0, 12) for _ in range(chance.randint(1, 4))]
    had = [old[place % len(old)] for place in range(sum(sizes))]
    chance.shuffle(had)
    for _ in range(chance.choice([0, 0, 0, 1, 3]) if had else 0):
        had[chance.randrange(len(had))] = chance.choice([*slots, NOBODY, 99])
    lots, rest = [], iter(had)
    for size in sizes:
        had = [next(rest) for _ in range(size)]
        owned = [slot if chance.random() < 0.7 else chance.choice([*old, NOBODY]) for slot in had]
        if chance.random() < 0.1:
            owned = [chance.choice(slots) for _ in had]
        takers = slots if chance.random() < 0.95 else slots[: max(1, len(slots) - 1)]
        longer = [slots[0]] if chance.random() < 0.05 else []
        lots.append(Lot(takers, size, had[: size - (chance.random() < 0.05)] + longer, owned))
    return lots


def test_the_short_way_gives_what_the_long_way_gives() -> None:
    chance = random.Random(50)
    moved = stayed = 0
    for _ in range(ROUNDS):
        lots = some_lots(chance)
        found = deal_to_newcomer(lots)
        if found is None:
            continue
        assert found == assignors._deal_anything(lots)
        are_moved = found != [list(lot.had[: lot.size]) for lot in lots]
        moved, stayed = moved + are_moved, stayed + (not are_moved)
    assert moved > ROUNDS / 10
    assert stayed > ROUNDS / 10


@pytest.mark.parametrize("topics", [(("t", 60),), (("t", 7),), (("a", 31), ("b", 1), ("c", 100))])
def test_a_fleet_that_starts_takes_the_short_way(
    topics: tuple[tuple[str, int], ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    long_way: list[int] = []
    deal = assignors._deal_anything

    def counted(lots: Iterable[Lot]) -> list[list[int]]:
        long_way.append(1)
        return deal([*lots])

    monkeypatch.setattr(assignors, "_deal_anything", counted)
    fleet = Fleet()
    for number in range(100):
        fleet.append(join(number, topics))
    assert len(long_way) == 1  # the first member gets all
    assert set(fleet.world.accepted) == {"OK"}
