"""The cost of a record of coordinated groups depends on its length and its changes, not on the group's size.

As in tests/rationalizer/test_costs.py the unit of costs is what msgpack takes for as many bytes, or costs are a ratio
between a large state and a small one. The figures themselves are those of benchmarks/groups.py.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from benchmarks.groups import (
    GROUP,
    TEN_TOPICS,
    Fleet,
    cut,
    grown,
    hostile_joins,
    in_key_pieces,
    join,
    over_cut,
    over_keys,
)
from rationalizer import Record, World, encode
from rationalizer.groups.assignors import compute_targets
from rationalizer.wire.records import CommitEntry, GroupHeartbeat, Topics
from tests.rationalizer.test_costs import BOUND, best, relative

#: A commit of many entries may cost this many times what msgpack takes for it: 10,000 of them take some 60 ms.
COMMIT_BOUND = 3 * BOUND
#: Limit on the cost of a record in a group of 1,000, relative to one of ten, with the same changes.
RATIO = 6


def _cost(state: bytes, value: bytes, enough: float) -> float:
    found = float("inf")
    for _ in range(3):
        fleet = Fleet(World.restore(state, 1))
        found = min(found, relative(lambda fleet=fleet: fleet.append(value), len(value)))  # type: ignore[misc]
        if found < enough:
            break
    return found


def _commit(state: bytes, entries: list[CommitEntry]) -> bytes:
    return encode(Fleet(World.restore(state, 1)).commit(0, entries))


#: Here as well: each process that collects the tests would pay for making the commits and the joins.
OVER_KEYS = (
    "one piece each",
    "one piece each, at random",
    "three pieces each, at random",
    "all that are below",
    "as far as the last",
)
JOINS = ("another strategy", "no strategy", "too many partitions, of a member", "too many partitions, short")


def test_all_of_them_are_tried() -> None:
    assert (tuple(over_keys()), tuple(hostile_joins())) == (OVER_KEYS, JOINS)


@pytest.mark.parametrize("name", OVER_KEYS)
def test_a_commit_over_thousands_of_key_pieces_costs_its_entries(name: str) -> None:
    state = in_key_pieces()
    assert _cost(state, _commit(state, over_keys()[name]), COMMIT_BOUND) < COMMIT_BOUND


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lets all go", "lets each go", "spans all"])
def test_a_commit_over_a_partition_in_many_pieces_costs_its_entries(name: str) -> None:
    state = cut()
    assert _cost(state, _commit(state, over_cut(state)[name]), COMMIT_BOUND) < COMMIT_BOUND


@pytest.mark.slow
@pytest.mark.parametrize("name", JOINS)
def test_a_join_that_is_rejected_costs_its_length(name: str) -> None:
    state, _ = grown()
    assert _cost(state, encode(hostile_joins()[name]), BOUND) < BOUND


def _of(members: int, topics: Callable[[int], Topics]) -> Fleet:
    fleet = Fleet()
    for number in range(members):
        fleet.append(join(number, topics(number), strategy="range"))
    assert not fleet.world.rejected
    return fleet


def _own(number: int) -> Topics:
    return tuple((f"topic-{number}-{place}", 10) for place in range(10))


@pytest.mark.slow
def test_beats_and_rejections_cost_the_same_in_a_group_of_a_thousand() -> None:
    large, small = _of(1_000, lambda number: (("t", 1),)), _of(10, lambda number: (("t", 1),))
    writers: list[Callable[[Fleet], Record]] = [
        lambda fleet: GroupHeartbeat(*fleet.ids(7), fleet.generation),
        lambda fleet: join(7, (("huge", 100_000), ("t", 1)), strategy="range"),
        lambda fleet: join(5_000, (("t", 1),), strategy="sticky"),
    ]
    for write in writers:
        taken = []
        for fleet in (large, small):
            value = encode(write(fleet))
            taken.append(best(lambda fleet=fleet, value=value: [fleet.append(value) for _ in range(100)]))  # type: ignore[misc]
        assert taken[0] < RATIO * taken[1]


@pytest.mark.slow
def test_a_rejection_looks_only_at_the_topics_of_those_that_would_go() -> None:
    large, small = _of(200, _own), _of(5, _own)
    value = encode(join(3, (("huge", 100_000),), strategy="range"))
    taken = [best(lambda fleet=fleet: [fleet.append(value) for _ in range(100)]) for fleet in (large, small)]  # type: ignore[misc]
    assert large.world.rejected.keys() == {"TOO_MANY_PARTITIONS"}
    assert taken[0] < RATIO * taken[1]


@pytest.mark.slow
def test_a_rebalance_costs_little_more_than_its_targets() -> None:
    """At 1,000 members and 10,000 partitions: who subscribes to what, who has it and who should have it."""
    state, _ = grown()
    fleet = Fleet(World.restore(state, 1))
    group = fleet.world.group(GROUP)
    assert group is not None
    before = {name: pieces.before() for name, pieces in group.pieces.items()}
    fewer = {topic: slots[:-1] for topic, slots in group.subscriptions().items()}
    targets = best(lambda: compute_targets("sticky", fewer, group.counts, set(), set(), before, lambda topic: {}))
    whole = min(
        fleet.append(join(7, TEN_TOPICS, f"run {number}", fleet.world.next_offset)) / 1_000 for number in range(7)
    )
    assert whole < 5 * targets
