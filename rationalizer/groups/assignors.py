"""Who should have which partition: the targets of a rebalance, as a pure function (G16, G17, K1, K2).

    lots        what a strategy deals
    sticky      the strategy that keeps what it can; `range` and `roundrobin` are here

A topic that is shared by key is one more use of the strategies, with roles exchanged: its members are dealt to its
partitions.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import chain, repeat
from typing import Final, NamedTuple

from rationalizer.groups.lots import NOBODY, Lot
from rationalizer.groups.sticky import deal_sticky
from rationalizer.routing import key_range

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


_Strategy = Callable[[Sequence[Lot]], list[list[int]]]

#: What members may ask for, by its name in JoinGroup.
STRATEGIES: Final[Mapping[str, _Strategy]] = {
    "range": _deal_range,
    "roundrobin": _deal_in_a_circle,
    "sticky": deal_sticky,
}
