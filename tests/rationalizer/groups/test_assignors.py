"""The targets of a rebalance: examples of K3, and everything compared with a naive reading of G17, K1 and K2."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import pytest

from benchmarks.groups import GROUP, Fleet, join
from rationalizer import ConfigureGroup
from rationalizer.groups import assignors
from rationalizer.groups.assignors import NOBODY, STRATEGIES, Before, Lot, Target, compute_targets, deal_to_newcomer
from tests.rationalizer.groups import naive

LAST = 2**63 - 1
ALL_STRATEGIES = sorted(STRATEGIES)


def nothing(topic: str) -> Mapping[int, int]:
    return {}


def holders(targets: Iterable[Target]) -> list[list[int]]:
    """By partition, the members that are to have some of it, by their ranges."""
    return [[target] if isinstance(target, int) else [slot for _, _, slot in target] for target in targets]


def share(
    strategy: str, members: int, partitions: int, without: Sequence[int] = (), allowed: bool = True
) -> list[list[int]]:
    """The targets of one topic, from nothing: members 1 … n, all opted in except some."""
    slots = range(1, members + 1)
    shared = {"tp"} if allowed else set[str]()
    opted_in = set(slots) - set(without)
    found = compute_targets(strategy, {"tp": slots}, {"tp": partitions}, opted_in, shared, {}, nothing)
    return holders(found["tp"])


# -- K3 -----------------------------------------------------------------------------------------------------------


def slots(targets: Iterable[Target]) -> list[int]:
    """Targets of which none is split."""
    return [target for target in targets if isinstance(target, int)]


# -- edges --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ALL_STRATEGIES)
def test_every_topic_of_counts_has_its_targets(strategy: str) -> None:
    counts = {"b": 2, "a": 0, "nobody's": 3, "c": 1}
    subscribers = {"a": [5], "b": [5], "c": [5], "unknown": [5, 9]}
    found = compute_targets(strategy, subscribers, counts, {5}, {"a", "nobody's", "unknown"}, {}, nothing)
    assert found == {"a": [], "b": [5, 5], "c": [5], "nobody's": [NOBODY] * 3}
    assert list(found) == sorted(counts)
    assert compute_targets(strategy, {}, {}, set(), set(), {}, nothing) == {}


@pytest.mark.parametrize("strategy", ALL_STRATEGIES)
def test_ranges_are_cut_as_p7_says(strategy: str) -> None:
    found = compute_targets(strategy, {"t": [3, 7, 9]}, {"t": 1}, {3, 7, 9}, {"t"}, {}, nothing)
    third, two = 2**63 // 3, 2 * 2**63 // 3
    assert found == {"t": [((0, third - 1, 3), (third, two - 1, 7), (two, LAST, 9))]}


@pytest.mark.parametrize("strategy", ALL_STRATEGIES)
def test_a_topic_is_shared_only_if_more_opted_in_than_it_has_partitions(strategy: str) -> None:
    assert share(strategy, 3, 3) == [[1], [2], [3]]
    assert share(strategy, 4, 3, without=[4]) == [[1], [2], [3]]
    assert sum(map(len, share(strategy, 4, 3))) == 4


@pytest.mark.parametrize(
    ("members", "without", "partitions", "whole"),
    [(3, 1, 1, 0), (4, 1, 2, 1), (8, 2, 2, 1), (8, 2, 6, 0), (9, 2, 6, 1), (10, 4, 5, 2), (8, 3, 4, 2), (40, 36, 3, 2)],
)
def test_whole_partitions_go_to_those_that_did_not_opt_in(
    members: int, without: int, partitions: int, whole: int
) -> None:
    """u·n/m, rounded half up (8, 3, 4: 1.5), at least 1 (4, 1, 2: 0.5), at most n − 1 (40, 36, 3: 2.7)."""
    slots = range(members)
    reluctant = set(slots[:without])
    found = compute_targets("range", {"t": slots}, {"t": partitions}, set(slots) - reluctant, {"t"}, {}, nothing)["t"]
    theirs = [partition for partition, target in enumerate(found) if isinstance(target, int) and target in reluctant]
    if members - without > partitions:
        assert theirs == list(range(partitions - whole, partitions))
    else:
        assert whole == 0 or len(theirs) >= whole


# -- beside the naive reading -------------------------------------------------------------------------------------


class Case(NamedTuple):
    """The arguments of compute_targets."""

    strategy: str
    subscribers: dict[str, list[int]]
    counts: dict[str, int]
    opted_in: set[int]
    shared: set[str]
    before: dict[str, Before]
    had: dict[str, dict[int, int]]


def draw(chance: random.Random) -> Case:
    """Any case: few members or many, equal subscriptions or not, pieces of dead members, topics that grew."""
    members = sorted(chance.sample(range(20), chance.randint(1, 8)))
    topics = [f"t{n}" for n in range(chance.randint(1, 5))]
    counts = {topic: chance.choice([0, 1, 1, 2, 3, 5, 9, 15]) for topic in chance.sample(topics, len(topics))}
    breadth = chance.choice([1.0, 1.0, 0.7, 0.4])
    subscribers = {topic: [slot for slot in members if chance.random() < breadth] for topic in topics}
    sharing = chance.random() < 0.5
    opted_in = {slot for slot in members if chance.random() < 0.8} if sharing else set[int]()
    shared = {topic for topic in topics if chance.random() < 0.7} if sharing else set[str]()
    slots = [*members, *chance.sample(range(20), 2), NOBODY]
    if chance.random() < 0.5:  # one of them has much
        slots += [chance.choice(members)] * 5
    before = {}
    for topic in topics:
        if chance.random() < 0.8:
            targets = [chance.choice(slots) for _ in range(chance.randint(0, counts[topic] + 1))]
            keep = chance.choice([1.0, 0.8, 0.3])
            owners = [slot if chance.random() < keep else chance.choice(slots) for slot in targets]
            before[topic] = Before(targets, owners[: chance.choice([len(owners), len(owners) // 2])])
    had = {topic: {slot: chance.randrange(5) for slot in members if chance.random() < 0.6} for topic in topics}
    return Case(chance.choice(ALL_STRATEGIES), subscribers, counts, opted_in, shared, before, had)


def run(case: Case) -> dict[str, list[Target]]:
    asked: list[str] = []

    def any_target(topic: str) -> Mapping[int, int]:
        asked.append(topic)
        return case.had[topic]

    found = compute_targets(*case[:-1], any_target)
    for topic in asked:
        assert case.strategy == "sticky"
        assert topic in case.shared
    return found


@pytest.mark.parametrize("seed", range(8))
def test_it_is_what_a_naive_reading_says(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(700):
        case = draw(chance)
        assert run(case) == naive.compute_targets(*case[:-1], case.had.__getitem__), case
        check_promises(case, run(case))


def check_promises(case: Case, found: Mapping[str, Sequence[Target]]) -> None:
    """K4, and no member gets what it did not subscribe to or a range that it did not opt in to."""
    for topic, targets in found.items():
        assert len(targets) == case.counts[topic]
        for target in targets:
            if isinstance(target, int):
                assert target in case.subscribers[topic] or (target == NOBODY and not case.subscribers[topic])
                continue
            ends = [0, *(hi + 1 for _, hi, _ in target)]
            assert [lo for lo, _, _ in target] == ends[:-1]
            assert ends[-1] == 2**63
            sharers = [slot for _, _, slot in target]
            assert len(sharers) > 1
            assert sharers == sorted(set(sharers) & case.opted_in & set(case.subscribers[topic]))


def test_the_order_in_which_topics_are_given_is_nothing_to_it() -> None:
    chance = random.Random(75)
    for _ in range(300):
        case = draw(chance)
        names = chance.sample(list(case.counts), len(case.counts))
        other = case._replace(
            counts={name: case.counts[name] for name in names},
            subscribers={name: case.subscribers[name] for name in names},
            before={name: case.before[name] for name in names if name in case.before},
        )
        assert list(run(case).items()) == list(run(other).items())


@pytest.mark.parametrize("seed", range(4))
def test_what_is_far_from_balance_goes_through_many_hands(seed: int) -> None:
    """Few can take each topic, and others own it: partitions move from a member to the next and the next."""
    chance = random.Random(seed)
    for _ in range(200):
        members = list(range(chance.randint(4, 10)))
        topics = [f"t{n:02}" for n in range(chance.randint(4, 12))]
        counts = {topic: chance.choice([1, 2, 5, 9]) for topic in topics}
        subscribers = {topic: sorted(chance.sample(members, chance.choice([1, 2, 2, 2, 3]))) for topic in topics}
        order = chance.sample(members, len(members))
        before = {}
        for topic in topics:
            able = sorted(subscribers[topic], key=order.index)
            able = able[: chance.choice([1, 1, 3])]
            targets = [chance.choice([NOBODY, *able, *able]) for _ in range(counts[topic])]
            before[topic] = Before(targets, [chance.choice(subscribers[topic]) for _ in targets])
        case = Case("sticky", subscribers, counts, set(), set(), before, {})
        assert run(case) == naive.compute_targets(*case[:-1], case.had.__getitem__), case


def test_many_members_with_much_to_give() -> None:
    """More than are looked up at first."""
    chance = random.Random(9)
    members = list(range(40))
    for breadth in (1.0, 0.5, 0.1):
        counts = {f"t{n}": 12 for n in range(10)}
        subscribers = {topic: [slot for slot in members if chance.random() < breadth] for topic in counts}
        rich = chance.sample(members, 35 if breadth == 1 else 20)
        before = {
            topic: Before([chance.choice(rich) for _ in range(12)], [chance.choice(members) for _ in range(12)])
            for topic in counts
        }
        case = Case("sticky", subscribers, counts, set(), set(), before, {})
        assert run(case) == naive.compute_targets(*case[:-1], case.had.__getitem__)


def test_what_is_balanced_stays_as_it_is() -> None:
    """The same members and topics again: sticky moves nothing, whatever came before."""
    chance = random.Random(4)
    for _ in range(300):
        case = draw(chance)._replace(strategy="sticky", shared=set())
        first = run(case)
        again = case._replace(before={topic: Before(slots(was), slots(was)) for topic, was in first.items()})
        assert run(again) == first


# -- costs --------------------------------------------------------------------------------------------------------


def best_of(work: Callable[[], object], tries: int = 7) -> float:
    spent = []
    for _ in range(tries):
        start = time.thread_time()
        work()
        spent.append(time.thread_time() - start)
    return min(spent)


@pytest.mark.parametrize("strategy", ALL_STRATEGIES)
@pytest.mark.parametrize("owned", ["by their targets", "by the first member"])
def test_a_join_costs_little_more_than_a_look_at_each_partition(strategy: str, owned: str) -> None:
    """benchmarks/groups.py has it in ms. Here the unit is what it takes to count the partitions of each member."""
    counts = {f"t{n}": 1000 for n in range(10)}
    members = list(range(5000, 6001))
    first = compute_targets(strategy, dict.fromkeys(counts, members[:-1]), counts, set(), set(), {}, nothing)
    was = {topic: slots(targets) for topic, targets in first.items()}
    before = {
        topic: Before(targets, targets if owned == "by their targets" else [members[0]] * 1000)
        for topic, targets in was.items()
    }
    everything = sum(map(tuple, was.values()), ())
    subscribers = dict.fromkeys(counts, members)
    cost = best_of(lambda: compute_targets(strategy, subscribers, counts, set(), set(), before, nothing))
    assert cost < 15 * best_of(lambda: Counter(everything))  # it is about 7


def test_many_moves_cost_in_proportion() -> None:
    """One member has all; the one with the fewest can only take what comes first, after what others could take."""
    counts = {"a": 10_000, "b": 10_000}
    before = {topic: Before([0] * 10_000, [1] * 10_000) for topic in counts}
    cost = best_of(
        lambda: compute_targets("sticky", {"a": [0, 1, 2], "b": [0, 1]}, counts, set(), set(), before, nothing), 3
    )
    assert cost < 300 * best_of(lambda: Counter([0, 1] * 10_000))  # it is about 110


# A member joins equals: the short way of `sticky` gives what the long way gives, and a starting fleet takes it.


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


# -- Rows of the canonical state are copies: those kept do not change with the world ------------------------------


def test_the_pieces_of_a_partition_that_is_shared_by_key_are_copied_too() -> None:
    fleet = Fleet()
    fleet.append(ConfigureGroup("1", "admin", GROUP, (("accept_range_fetch", ("t",)),)))
    for number in range(2):
        fleet.append(join(number, (("t", 1),)))
    group = fleet.world.group(GROUP)
    assert group is not None
    rows, before = fleet.world.rows(), repr(fleet.world.rows())
    group.pieces["t"].cut[0].reverse()
    assert repr(rows) == before
