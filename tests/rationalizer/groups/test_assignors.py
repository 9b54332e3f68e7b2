"""The targets of a rebalance: examples of K3, and everything compared with a naive reading of G17, K1 and K2."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import pytest

from rationalizer.groups.assignors import NOBODY, STRATEGIES, Before, Target, compute_targets
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


@pytest.mark.parametrize("strategy", ["roundrobin", "sticky"])
def test_five_members_on_three_partitions(strategy: str) -> None:
    assert share(strategy, 5, 3) == [[1, 4], [2, 5], [3]]


def test_five_members_in_ranges() -> None:
    assert share("range", 5, 3) == [[1, 2], [3, 4], [5]]
    assert share("range", 5, 2) == [[1, 2, 3], [4, 5]]


@pytest.mark.parametrize("strategy", ALL_STRATEGIES)
def test_where_sharing_is_not_allowed_members_are_idle(strategy: str) -> None:
    assert share(strategy, 5, 3, allowed=False) == [[1], [2], [3]]


def test_some_did_not_opt_in() -> None:
    assert share("roundrobin", 7, 4, without=[2, 6]) == [[1, 5], [3, 7], [4], [2]]


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        ("roundrobin", {"t0": [1], "t1": [2, 3], "t2": [3, 3, 3]}),
        ("sticky", {"t0": [1], "t1": [2, 2], "t2": [3, 3, 3]}),
    ],
)
def test_unequal_subscriptions(strategy: str, expected: dict[str, list[int]]) -> None:
    subscribers = {"t0": [1, 2, 3], "t1": [2, 3], "t2": [3]}
    counts = {"t0": 1, "t1": 2, "t2": 3}
    assert compute_targets(strategy, subscribers, counts, set(), set(), {}, nothing) == expected


def test_one_more_member_moves_81_of_900_partitions() -> None:
    first = compute_targets("sticky", {"t": range(10)}, {"t": 900}, set(), set(), {}, nothing)
    was = first["t"]
    before = {"t": Before([*slots(was)], [*slots(was)])}
    now = compute_targets("sticky", {"t": range(11)}, {"t": 900}, set(), set(), before, nothing)["t"]
    assert sum(old != new for old, new in zip(was, now, strict=True)) == 81
    assert sorted(Counter(slots(now)).values()) == [81] * 2 + [82] * 9


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
