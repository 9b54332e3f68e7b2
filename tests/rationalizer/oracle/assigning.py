"""Targets: G17's strategies and K1, K2, as loops over plain data.

A *thing* is dealt out to a *bin*. In G17 things are partitions and bins are members (slots); in K2's sticky the
roles are exchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

from tests.rationalizer.oracle.progress import LARGEST_HASH

TopicPartition: TypeAlias = tuple[str, int]
Part: TypeAlias = tuple[int, int, int]  # lo, hi, slot
Thing = TypeVar("Thing")

STRATEGIES = ("range", "roundrobin", "sticky")


@dataclass(frozen=True)
class Question:
    """Everything that the targets depend on (G16): members, topics, settings, and pieces as they were."""

    strategy: str
    #: Topic to the slots that subscribe to it, ascending; topics without one are not there.
    subscribers: Mapping[str, Sequence[int]]
    counts: Mapping[str, int]
    opted_in: Collection[int] = ()
    #: Topics that `accept_range_fetch` names, where the group accepts individual commits.
    shared: Collection[str] = ()
    #: The one slot that was the target of every key; missing where there was none.
    targets: Mapping[TopicPartition, int] = field(default_factory=dict)
    #: The one slot that owns every key.
    owners: Mapping[TopicPartition, int] = field(default_factory=dict)
    #: All slots of which any key was the target.
    any_targets: Mapping[TopicPartition, Collection[int]] = field(default_factory=dict)


def targets_of(question: Question) -> dict[TopicPartition, list[Part]]:
    """The target of every key of every partition that has one."""
    found: dict[TopicPartition, list[Part]] = {}
    topics = sorted(question.subscribers, key=lambda topic: topic.encode())
    by_key = [topic for topic in topics if is_shared_by_key(question, topic)]
    whole = [(topic, number) for topic in topics if topic not in by_key for number in range(question.counts[topic])]
    for place, slot in assign(question, whole, question.subscribers).items():
        found[place] = [(0, LARGEST_HASH, slot)]
    for topic in by_key:
        found.update(share(question, topic))
    return found


def assign(
    question: Question, places: Sequence[TopicPartition], subscribers: Mapping[str, Sequence[int]]
) -> dict[TopicPartition, int]:
    """G17: whole partitions, which come in order, to whole members."""
    if question.strategy == "range":
        return by_range(places, subscribers)
    if question.strategy == "roundrobin":
        return by_roundrobin(places, subscribers)
    assert question.strategy == "sticky"
    return by_sticky(
        places,
        could_go_to=lambda place: subscribers[place[0]],
        was_with=question.targets.get,
        owner_of=question.owners.get,
    )


def by_range(places: Sequence[TopicPartition], subscribers: Mapping[str, Sequence[int]]) -> dict[TopicPartition, int]:
    """G17, `range`: member i gets the next n // m, one more if i < n mod m."""
    found = {}
    for topic, members in subscribers.items():
        mine = [place for place in places if place[0] == topic]
        n, m = len(mine), len(members)
        following = 0
        for i, member in enumerate(members):
            for _ in range(n // m + (1 if i < n % m else 0)):
                found[mine[following]] = member
                following += 1
    return found


def by_roundrobin(
    places: Sequence[TopicPartition], subscribers: Mapping[str, Sequence[int]]
) -> dict[TopicPartition, int]:
    """G17, `roundrobin`: a circle of all members, with a pointer."""
    circle = sorted({slot for members in subscribers.values() for slot in members})
    found = {}
    pointer = 0
    for place in places:
        while circle[pointer] not in subscribers[place[0]]:
            pointer = (pointer + 1) % len(circle)
        found[place] = circle[pointer]
        pointer = (pointer + 1) % len(circle)
    return found


def by_sticky(
    things: Sequence[Thing],
    could_go_to: Callable[[Thing], Sequence[int]],
    was_with: Callable[[Thing], int | None],
    owner_of: Callable[[Thing], int | None],
) -> dict[Thing, int]:
    """G17, `sticky`; `things` in order, bins ascending."""
    bins = sorted({bin_ for thing in things for bin_ in could_go_to(thing)})
    # (1) each stays with what it was with, if that still may have it
    stayed: dict[Thing, int] = {}
    for thing in things:
        before = was_with(thing)
        if before is not None and before in could_go_to(thing):
            stayed[thing] = before
    found = dict(stayed)
    held = {bin_: [thing for thing in things if found.get(thing) == bin_] for bin_ in bins}
    # (2) the others, in order: to the one with the fewest; among equals its owner, else the lowest
    for thing in things:
        if thing in found:
            continue
        fewest = min(len(held[bin_]) for bin_ in could_go_to(thing))
        equals = [bin_ for bin_ in could_go_to(thing) if len(held[bin_]) == fewest]
        owner = owner_of(thing)
        chosen = owner if owner is not None and owner in equals else min(equals)
        found[thing] = chosen
        held[chosen].append(thing)
    # (3) one at a time, while there is a member with at least two fewer that could take one
    while True:
        move = next_move(things, held, stayed, could_go_to, owner_of)
        if move is None:
            return found
        thing, to = move
        held[found[thing]].remove(thing)
        held[to].append(thing)
        found[thing] = to


def next_move(
    things: Sequence[Thing],
    held: Mapping[int, Sequence[Thing]],
    stayed: Mapping[Thing, int],
    could_go_to: Callable[[Thing], Sequence[int]],
    owner_of: Callable[[Thing], int | None],
) -> tuple[Thing, int] | None:
    """G17, `sticky`, (3): which thing moves, and to which bin; None if nothing has to move any more."""
    # a: the one with the most (the lowest among equals) that has one which another could take
    for a in sorted(held, key=lambda bin_: (-len(held[bin_]), bin_)):
        takers = {b for thing in held[a] for b in could_go_to(thing) if len(held[b]) <= len(held[a]) - 2}
        if not takers:
            continue
        # b: of those that could take one from it the one with the fewest (the lowest among equals)
        b = min(takers, key=lambda bin_: (len(held[bin_]), bin_))
        # of what b could take: one that b owns, then one that did not stay with a in (1), then the last in order
        best: tuple[tuple[bool, bool], Thing] | None = None
        for thing in things:
            if thing not in held[a] or b not in could_go_to(thing):
                continue
            rank = (owner_of(thing) == b, stayed.get(thing) != a)
            if best is None or rank >= best[0]:  # of equals, the last
                best = (rank, thing)
        assert best is not None
        return best[1], b
    return None


# K1, K2: sharing by key.


def is_shared_by_key(question: Question, topic: str) -> bool:
    """K1: more members opted in than there are partitions, and the group's settings allow it."""
    opted_in = [slot for slot in question.subscribers[topic] if slot in question.opted_in]
    return len(opted_in) > question.counts[topic] and topic in question.shared


def share(question: Question, topic: str) -> dict[TopicPartition, list[Part]]:
    """K1: the last w partitions go whole to those that did not opt in, the first k are split among the others."""
    n = question.counts[topic]
    if n == 0:
        return {}
    members = question.subscribers[topic]
    opted_in = [slot for slot in members if slot in question.opted_in]
    others = [slot for slot in members if slot not in question.opted_in]
    w = whole_partitions(n, len(members), len(others))
    k = n - w
    found: dict[TopicPartition, list[Part]] = {}
    if w > 0:
        last = [(topic, number) for number in range(k, n)]
        for place, slot in assign(question, last, {topic: others}).items():
            found[place] = [(0, LARGEST_HASH, slot)]
    for number, sharers in enumerate(split(question, topic, k, opted_in)):
        found[(topic, number)] = parts_of_the_space(sorted(sharers))
    return found


def whole_partitions(n: int, m: int, u: int) -> int:
    """K1's w: 0 if u = 0, else u·n/m, rounded half up, at least 1, but at most n − 1."""
    if u == 0:
        return 0
    half_up = (2 * u * n + m) // (2 * m)
    return min(max(half_up, 1), n - 1)


def split(question: Question, topic: str, k: int, opted_in: Sequence[int]) -> list[list[int]]:
    """K2: for each of the first k partitions, who shares it; `opted_in` by slot."""
    sharers: list[list[int]] = [[] for _ in range(k)]
    if question.strategy == "roundrobin":
        for i, slot in enumerate(opted_in):
            sharers[i % k].append(slot)
    elif question.strategy == "range":
        m = len(opted_in)
        following = 0
        for p in range(k):
            for _ in range(m // k + (1 if p < m % k else 0)):
                sharers[p].append(opted_in[following])
                following += 1
    else:
        dealt = by_sticky(
            opted_in,
            could_go_to=lambda slot: range(k),
            was_with=lambda slot: lowest_target(question, topic, k, slot),
            owner_of=lambda slot: None,  # "no member owns anything in (2) and (3)"
        )
        for slot, p in dealt.items():
            sharers[p].append(slot)
    return sharers


def lowest_target(question: Question, topic: str, k: int, slot: int) -> int | None:
    """K2: the lowest of the k partitions of which any key had the member as target."""
    for number in range(k):
        if slot in question.any_targets.get((topic, number), ()):
            return number
    return None


def parts_of_the_space(sharers: Sequence[int]) -> list[Part]:
    """P7: part i of n is [i·2^63 // n, (i+1)·2^63 // n − 1]."""
    n = len(sharers)
    return [(i * 2**63 // n, (i + 1) * 2**63 // n - 1, slot) for i, slot in enumerate(sharers)]
