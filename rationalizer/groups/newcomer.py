"""One more member among equals: what nearly every join of a starting fleet asks of the strategy `sticky` (G17).

Everybody may have everything, all that was dealt stays, and only one member has fewer than its share. Then (1) and (2)
have nothing to do, and all that (3) moves goes to that member: the last things of those that have most, of equals the
lowest slot's first. `deal_to_newcomer` finds them without what `sticky` keeps for all other cases.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import chain, compress, cycle, islice

from rationalizer.groups.lots import Lot


def deal_to_newcomer(lots: Sequence[Lot]) -> list[list[int]] | None:
    """As `sticky` deals, where it is as simple as that; None: it is not."""
    takers = lots[0].takers if lots else ()
    if any(len(lot.had) < lot.size or (lot.takers is not takers and lot.takers != takers) for lot in lots):
        return None
    found = [list(lot.had[: lot.size]) for lot in lots]
    holders = found[0] if len(found) == 1 else list(chain.from_iterable(found))
    had = Counter(holders)
    without = set(takers)
    there = len(without)
    without.difference_update(had)
    if not takers or len(without) + len(had) != there:
        return None  # some thing was with no member, or with one that may not have it any more
    if len(without) > 1:
        return found if max(had.values(), default=0) < 2 else None
    by_height: defaultdict[int, list[int]] = defaultdict(list)
    for slot, height in had.items():
        by_height[height].append(slot)
    if not by_height:
        return found
    most = max(by_height)
    fewest = 0 if without else min(by_height)
    if most - fewest < 2:
        return found
    poor = [*without] or by_height[fewest]
    if len(poor) > 1 or any(height not in (fewest, most - 1, most) for height in by_height):
        return None
    if any(poor[0] in lot.owned for lot in lots):
        return None  # what it owns comes first
    _take(found, poor[0], _givers(sorted(by_height[most]), sorted(had.keys() - poor), most, fewest))
    return found


def _givers(richest: Sequence[int], others: Sequence[int], most: int, fewest: int) -> dict[int, int]:
    """How many things each gives. `others`: all but the one that takes; they have `most` or one less."""
    moves = 0
    # It takes while a member has two more: first from the richest, then from all in turn, each round one less.
    while True:
        rounds = 0 if moves < len(richest) else 1 + (moves - len(richest)) // len(others)
        if most - rounds - (fewest + moves) < 2:
            break
        moves += 1
    return Counter([*richest[:moves], *islice(cycle(others), max(0, moves - len(richest)))])


def _take(found: Sequence[list[int]], taker: int, giving: dict[int, int]) -> None:
    """The last things of each of these go to the taker."""
    left = sum(giving.values())
    for holders in reversed(found):
        theirs = [*compress(range(len(holders)), map(giving.__contains__, holders))]
        for thing in reversed(theirs):
            if not left:
                return
            slot = holders[thing]
            if giving[slot]:
                giving[slot] -= 1
                left -= 1
                holders[thing] = taker
