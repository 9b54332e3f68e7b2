"""Who should have which partition: the targets of a rebalance, as a pure function (G16, G17, K1, K2).

A strategy deals the partitions of topics to members. A topic that is shared by key is one more use of the strategies,
with roles exchanged: its members are dealt to its partitions.

`sticky` is balanced, and what needs not move stays. Sets of members are ints, a bit for each, the lowest slot's the
lowest. `_Loads` keeps the set of the members that have 0, 1, 2 … things. So the member with the fewest, of those that
subscribe to a topic, takes a few `&` to find, however subscriptions differ, and nothing has to be sorted again after a
change.

Nearly every join of a starting fleet asks for one more member among equals. Everybody may have everything, all that was
dealt stays, and only one member has fewer than its share. Then (1) and (2) have nothing to do, and all that (3) moves
goes to that member: the last things of those that have most, of equals the lowest slot's first. `deal_to_newcomer`
finds them without what `sticky` keeps for all other cases.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import chain, compress, cycle, islice, repeat
from typing import Final, NamedTuple

from rationalizer.routing import key_range

#: In place of a slot: no member.
NOBODY: Final = -1


class Lot(NamedTuple):
    """The partitions of one topic, and the members that may get them; in K2, members and the partitions they go to."""

    #: Slots, ascending; at least one.
    takers: Sequence[int]
    #: How many things there are to deal.
    size: int
    #: By thing: the one slot that had it, or NOBODY; may be shorter than `size`, or longer.
    had: Sequence[int] = ()
    #: By thing: the one slot that owns it, or NOBODY; may be shorter than `size`, or longer.
    owned: Sequence[int] = ()


#: A slot, NOBODY, or (lo, hi, slot) for each part of a partition that is split by key hashes; both ends inclusive.
Target = int | tuple[tuple[int, int, int], ...]


class Before(NamedTuple):
    """What was, of one topic. Both lists may be shorter than the topic has partitions."""

    #: By partition: the one slot that was the target of every key, else NOBODY.
    targets: Sequence[int]
    #: By partition: the one slot that owns every key, else NOBODY.
    owners: Sequence[int]


_NOTHING: Final = Before((), ())


def compute_targets(
    strategy: str,
    subscribers: Mapping[str, Sequence[int]],
    counts: Mapping[str, int],
    opted_in: AbstractSet[int],
    shared: AbstractSet[str],
    before: Mapping[str, Before],
    any_target: Callable[[str], Mapping[int, int]],
) -> dict[str, list[Target]]:
    """The target of every partition.

    Args:
        strategy: one of STRATEGIES.
        subscribers: topic → slots of those that subscribe to it, ascending.
        counts: topic → number of partitions.
        opted_in: slots of those that allow to share by key.
        shared: topics that may be shared by key.
        before: topic → its targets and owners so far; a topic may be missing.
        any_target: of a topic that is shared by key: slot → the lowest partition of which any key had it as target.

    Returns:
        topic → the targets of its partitions, for every topic of `counts`, in the order of their names.
    """
    deal = STRATEGIES[strategy]
    found: dict[str, list[Target]] = {}
    lots: dict[str, Lot] = {}
    for topic, count in sorted(counts.items()):
        found[topic] = []
        members = subscribers.get(topic, ())
        was = before.get(topic, _NOTHING)
        takers = [slot for slot in members if slot in opted_in] if topic in shared else []
        if 1 <= count < len(takers):
            others = [slot for slot in members if slot not in opted_in]
            had = any_target(topic) if strategy == "sticky" else {}
            found[topic] = _share(deal, count, takers, others, was, had)
        elif members:
            lots[topic] = Lot(members, count, was.targets, was.owners)
        else:
            found[topic] = [NOBODY] * count
    for topic, targets in zip(lots, deal(list(lots.values())), strict=True):
        found[topic] = list(targets)
    return found


def _share(
    deal: _Strategy, count: int, sharers: Sequence[int], others: Sequence[int], was: Before, had: Mapping[int, int]
) -> list[Target]:
    """The targets in a topic that is shared by key (K1, K2).

    Args:
        deal: the strategy.
        count: partitions, at least one and fewer than sharers.
        sharers: those that opted in, and
        others: those that did not; slots, ascending.
        was: targets and owners so far.
        had: slot → the lowest partition of which any key had it as target.
    """
    whole = 0
    if others:
        members = len(sharers) + len(others)
        whole = min(max((2 * len(others) * count + members) // (2 * members), 1), count - 1)
    split = count - whole
    by_partition: list[list[int]] = [[] for _ in range(split)]
    partitions = deal([Lot(range(split), len(sharers), [had.get(slot, NOBODY) for slot in sharers])])[0]
    for slot, partition in zip(sharers, partitions, strict=True):
        by_partition[partition].append(slot)
    targets: list[Target] = [_cut(slots) for slots in by_partition]
    if whole:
        targets += deal([Lot(others, whole, was.targets[split:], was.owners[split:])])[0]
    return targets


def _cut(slots: Sequence[int]) -> Target:
    """The target of a partition whose keys these slots share."""
    if len(slots) == 1:
        return slots[0]
    return tuple((*key_range(part, len(slots)), slot) for part, slot in enumerate(slots))


def _deal_range(lots: Sequence[Lot]) -> list[list[int]]:
    found = []
    for takers, size, _, _ in lots:
        each, more = divmod(size, len(takers))
        if each == 0:  # of a thousand takers, those that get nothing are not even passed over
            found.append(list(takers[:more]))
            continue
        times = chain(repeat(each + 1, more), repeat(each, len(takers) - more))
        found.append(list(chain.from_iterable(map(repeat, takers, times))))
    return found


def _deal_in_a_circle(lots: Sequence[Lot]) -> list[list[int]]:
    """From a subscriber, the pointer moves on to the next higher slot that subscribes, else to the lowest."""
    found = []
    last = NOBODY
    for takers, size, _, _ in lots:
        if size == 0:
            found.append(list[int]())
            continue
        start = bisect_right(takers, last)
        circle = [*takers[start:], *takers[:start]]
        targets = (circle * (size // len(circle) + 1))[:size]
        last = targets[-1]
        found.append(targets)
    return found


# -- sticky ------------------------------------------------------------------------------------------------


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


#: What members have is looked up for this number at first, those that give first: enough for most joins.
_FIRST_GIVERS: Final = 32


def deal_sticky(lots: Sequence[Lot]) -> list[list[int]]:
    """G17's sticky. Returns, for each lot, the slot that gets each thing."""
    simple = deal_to_newcomer(lots)
    return _deal_anything(lots) if simple is None else simple


def _deal_anything(lots: Sequence[Lot]) -> list[list[int]]:
    deal = _Deal(lots)
    deal.hand_out()
    if deal.loads.spread() > 1:
        _Levelling(deal).level()
    found, start = [], 0
    for lot in lots:
        found.append(deal.holders[start : start + lot.size])
        start += lot.size
    return found


class _Loads:
    """Members by the number of things that they have."""

    __slots__ = ("heights", "members")

    def __init__(self, members: dict[int, int]) -> None:
        self.members = members  # number of things: the set of members, never empty
        self.heights = sorted(members)

    def spread(self) -> int:
        """How many more things the first member has than the last."""
        return self.heights[-1] - self.heights[0] if self.heights else 0

    def fewest(self, among: int) -> tuple[int, int]:
        """(number of things, set): those of a set, which is not empty, that have the fewest."""
        for height in self.heights:
            if found := self.members[height] & among:
                return height, found
        raise AssertionError("a member without a number of things")

    def change(self, members: int, height: int, by: int) -> None:
        """Each of these, which have `height` things, gets one (by 1) or loses one (by −1)."""
        if left := self.members[height] ^ members:
            self.members[height] = left
        else:
            del self.members[height]
            del self.heights[bisect_left(self.heights, height)]
        if there := self.members.get(height + by, 0):
            self.members[height + by] = there | members
        else:
            self.members[height + by] = members
            insort(self.heights, height + by)


class _Deal:
    """Steps (1) and (2). Things are numbered in order, over all lots."""

    def __init__(self, lots: Sequence[Lot]) -> None:
        self.lots = lots
        self.slots: list[int] = []
        self.bits: dict[int, int] = {}  # slot: the set of this member alone
        self.holders: list[int] = []  # by thing: the slot that has it by now
        self.stayed: list[int] = []  # by thing: the slot that it stayed with in (1), or NOBODY
        self.could: list[int] = []  # by thing: the set of members that could take it
        self.open: list[tuple[Lot, int, list[int]]] = []  # lot, its first thing's number, things counted from there
        self._keep()
        counts = Counter(self.holders)
        members: defaultdict[int, int] = defaultdict(int)
        for slot, bit in self.bits.items():
            members[counts[slot]] |= bit
        self.loads = _Loads(dict(members))

    def _keep(self) -> None:
        """(1)"""
        keys: list[tuple[int, ...]] = []
        for lot in self.lots:
            keys.append(keys[-1] if keys and lot.takers == self.lots[len(keys) - 1].takers else tuple(lot.takers))
        sets = dict.fromkeys(keys, 0)
        self.slots = sorted(set(chain.from_iterable(sets)))
        self.bits = {slot: 1 << place for place, slot in enumerate(self.slots)}
        key: tuple[int, ...] = ()
        for lot, each in zip(self.lots, keys, strict=True):
            if each is not key:
                key, takers = each, frozenset(each)
                could = sets[key] = sets[key] or sum(map(self.bits.__getitem__, key))
            had = fill(lot.had, lot.size)
            if not takers.issuperset(had):
                things = [thing for thing, slot in enumerate(had) if slot not in takers]
                self.open.append((lot, len(self.holders), things))
                for thing in things:
                    had[thing] = NOBODY
            self.holders += had
            self.could += [could] * lot.size
        self.stayed = self.holders.copy()

    def hand_out(self) -> None:
        """(2)"""
        bits, holders, slots = self.bits, self.holders, self.slots
        for lot, start, things in self.open:
            could = self.could[start]
            owned = fill(lot.owned, lot.size)
            height = before = takers = 0
            for thing in things:
                if not takers:
                    if before:
                        self.loads.change(before, height, 1)
                    height, before = self.loads.fewest(could)
                    takers = before
                taker = bits.get(owned[thing], 0) & takers or takers & -takers
                takers ^= taker
                holders[start + thing] = slots[taker.bit_length() - 1]
            self.loads.change(before ^ takers, height, 1)


class _Levelling:
    """Step (3).

    A thing's rank at the member that has it says what goes first, the largest does: those that did not stay with it in
    (1) rank above those that did, and the last in order above others.
    """

    def __init__(self, deal: _Deal) -> None:
        self.loads, self.slots, self.bits = deal.loads, deal.slots, deal.bits
        self.holders, self.stayed, self.could = deal.holders, deal.stayed, deal.could
        self.ranks: dict[int, list[int]] = {}  # slot: the ranks of its things, ascending
        self.reach: dict[int, int] = {}  # slot: the set of members that could take one of its things, or more
        # giver: taker: from this place on there is no rank that the taker could take.
        self.searched: defaultdict[int, dict[int, int]] = defaultdict(dict)
        self.lots = deal.lots
        self.owning: set[int] = set().union(*[lot.owned for lot in deal.lots])
        self.owners: list[int] = []  # by thing: who owns it; empty as long as no taker owns anything
        # (slot, owner): the ranks of those things of the slot that the owner could take, ascending.
        self.wanted: defaultdict[tuple[int, int], list[int]] = defaultdict(list)

    def level(self) -> None:
        """Move things until no member has one that a member with at least two fewer could take."""
        loads = self.loads
        idle = 0  # the set of those that were found to have no such thing
        while True:
            height, givers = self._most(idle)
            if not givers:
                return
            giver = givers & -givers
            slot = self.slots[giver.bit_length() - 1]
            if slot not in self.ranks:
                self._look_up(givers)
            found = self._choose(slot, height)
            if found is None:
                idle |= giver
                continue
            taker, taker_height, place = found
            self._move(slot, self.slots[taker.bit_length() - 1], place)
            loads.change(giver, height, -1)
            loads.change(taker, taker_height, 1)
            # The taker has something new; and those that have two more than the giver has now may give to it.
            idle &= ~taker
            for each in _bits(loads.members.get(height + 1, 0) & idle):
                if self.reach[self.slots[each.bit_length() - 1]] & giver:
                    idle ^= each

    def _most(self, idle: int) -> tuple[int, int]:
        """(number of things, set): of those that are not idle, the ones that have the most; or an empty set."""
        least = self.loads.heights[0] + 2
        for height in reversed(self.loads.heights):
            if height < least:
                break
            if found := self.loads.members[height] & ~idle:
                return height, found
        return 0, 0

    def _look_up(self, givers: int) -> None:
        """What the first of these have; the second time, what all have that are not known yet."""
        if not self.ranks:
            slots = [self.slots[each.bit_length() - 1] for each in islice(_bits(givers), _FIRST_GIVERS)]
        else:
            slots = [slot for slot in self.slots if slot not in self.ranks]
        things: dict[int, list[int]] = {slot: [] for slot in slots}
        for thing, slot in [pair for pair in enumerate(self.holders) if pair[1] in things]:
            things[slot].append(thing)
        size, stayed, could = len(self.holders), self.stayed, self.could
        for slot, those in things.items():
            self.ranks[slot] = sorted([thing if stayed[thing] == slot else thing + size for thing in those])
            reach = last = 0
            for thing in those:
                if could[thing] is not last:
                    last = could[thing]
                    reach |= last
            self.reach[slot] = reach

    def _look_up_owners(self) -> None:
        self.owners = list(chain.from_iterable(fill(lot.owned, lot.size) for lot in self.lots))
        for thing, (slot, owner) in enumerate(zip(self.holders, self.owners, strict=True)):
            if slot != owner and self.bits.get(owner, 0) & self.could[thing]:
                self.wanted[slot, owner].append(self._rank(thing, slot))
        for ranks in self.wanted.values():
            ranks.sort()

    def _rank(self, thing: int, slot: int) -> int:
        return thing if self.stayed[thing] == slot else thing + len(self.holders)

    def _choose(self, slot: int, height: int) -> tuple[int, int, int] | None:
        """The taker, how many it has, and the place of what it gets among the giver's ranks."""
        while True:
            taker_height, takers = self.loads.fewest(self.reach[slot])
            if taker_height > height - 2:
                return None
            taker = takers & -takers
            place = self._place(slot, taker)
            if place is not None:
                return taker, taker_height, place
            self.reach[slot] ^= taker

    def _place(self, slot: int, taker: int) -> int | None:
        ranks = self.ranks[slot]
        to = self.slots[taker.bit_length() - 1]
        if to in self.owning:
            if not self.owners:
                self._look_up_owners()
            if wanted := self.wanted.get((slot, to)):
                return bisect_left(ranks, wanted[-1])
        searched, size, could = self.searched[slot], len(self.holders), self.could
        for place in range(min(searched.get(to, len(ranks)), len(ranks)) - 1, -1, -1):
            if could[ranks[place] % size] & taker:
                searched[to] = place  # the thing found there moves
                return place
        return None

    def _move(self, slot: int, to: int, place: int) -> None:
        rank = self.ranks[slot].pop(place)
        thing = rank % len(self.holders)
        self.holders[thing] = to
        new = self._rank(thing, to)
        if to in self.ranks:
            insort(self.ranks[to], new)
            self.reach[to] |= self.could[thing]
            self.searched.pop(to, None)
        if not self.owners:
            return
        owner = self.owners[thing]
        if self.bits.get(owner, 0) & self.could[thing]:
            if owner != slot:
                wanted = self.wanted[slot, owner]
                del wanted[bisect_left(wanted, rank)]
            if owner != to:
                insort(self.wanted[to, owner], new)


def _bits(members: int) -> Iterator[int]:
    """The members of a set, each as a separate set, the lowest slot first."""
    while members:
        each = members & -members
        yield each
        members ^= each


def fill(slots: Sequence[int], size: int) -> list[int]:
    """These slots as a list of this length: cut, or filled up with NOBODY."""
    filled = list(slots[:size])
    filled += [NOBODY] * (size - len(filled))
    return filled


_Strategy = Callable[[Sequence[Lot]], list[list[int]]]

#: What members may ask for, by its name in JoinGroup.
STRATEGIES: Final[Mapping[str, _Strategy]] = {
    "range": _deal_range,
    "roundrobin": _deal_in_a_circle,
    "sticky": deal_sticky,
}
