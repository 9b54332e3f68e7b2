"""Beside Kafka's own assignors, the consumer's and the server's, on thousands of random groups.

`range` and `roundrobin` are the same as Kafka's. `sticky` is as balanced, and moves as few partitions, where all
members subscribe to the same topics. Where they don't, all of these rules are greedy, and none is the best in every
case: ours may be worse in a few, and moves less in all.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, NamedTuple, Self

import pytest

from kafka_marshal.testing.errors import JavaMissingError
from kafka_marshal.testing.jars import broker_jars, find_java
from kafka_marshal.testing.layout import JVM_OPTIONS
from rationalizer.groups.assignors import NOBODY, Before, compute_targets

# -- Kafka's own assignors, asked in a JVM that lives as long as a `with` -----------------------------------------


PROGRAM = Path(__file__).with_name("KafkaAssignors.java")

#: Topic: slots.
Subscribers = Mapping[str, Sequence[int]]
#: Topic: the slot of each partition.
Assigned = Mapping[str, Sequence[int]]


class KafkaAssignors:
    """range, roundrobin and sticky as consumers have them, and the server's uniform. Members' names order as slots do.

    Raises:
        JavaMissingError: there is no Java with a compiler.
    """

    def __init__(self) -> None:
        java = find_java(module="jdk.compiler").path
        class_path = os.pathsep.join(map(str, broker_jars()))
        self._command = [str(java), *JVM_OPTIONS, "-cp", class_path, str(PROGRAM)]

    def __enter__(self) -> Self:
        self._said: IO[bytes] = tempfile.TemporaryFile()
        self._jvm = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._said, text=True, bufsize=1
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._jvm.kill()
        self._jvm.communicate()
        self._said.close()

    def assign(self, assignor: str, subscribers: Subscribers, counts: Mapping[str, int], was: Assigned) -> Assigned:
        """The assignment; `was` is what members had and still subscribe to."""
        members: dict[str, dict[str, object]] = {}
        for slot in sorted({slot for slots in subscribers.values() for slot in slots}):
            topics = [topic for topic, slots in subscribers.items() if slot in slots]
            had = {topic: [n for n, other in enumerate(was.get(topic, ())) if other == slot] for topic in topics}
            members[f"m{slot:06}"] = {"topics": topics, "had": {topic: those for topic, those in had.items() if those}}
        assert self._jvm.stdin is not None
        assert self._jvm.stdout is not None
        self._jvm.stdin.write(json.dumps({"assignor": assignor, "counts": counts, "members": members}) + "\n")
        answer = self._jvm.stdout.readline()
        if not answer:
            self._said.seek(0)
            raise AssertionError(f"the JVM ended: {self._said.read().decode(errors='replace')}")
        found: dict[str, list[str | None]] = json.loads(answer)
        return {topic: [NOBODY if name is None else int(name[1:]) for name in names] for topic, names in found.items()}


pytestmark = pytest.mark.slow

STICKY = ("sticky", "uniform")


class Group(NamedTuple):
    """Who subscribes to which topic, and how many partitions it has. Every topic has a subscriber and a partition."""

    subscribers: dict[str, list[int]]
    counts: dict[str, int]

    @property
    def members(self) -> list[int]:
        return sorted({slot for slots in self.subscribers.values() for slot in slots})

    def cleaned(self) -> Group:
        subscribers = {topic: sorted(slots) for topic, slots in self.subscribers.items() if slots}
        return Group(subscribers, {topic: self.counts[topic] for topic in subscribers})


@pytest.fixture(scope="module")
def kafka() -> Iterator[KafkaAssignors]:
    try:
        kafka = KafkaAssignors()
    except JavaMissingError as error:
        pytest.skip(f"Kafka's assignors can't be asked without a Java compiler: {error}")
    with kafka:
        yield kafka


def draw(chance: random.Random, equal: bool) -> Group:
    """A small group, mostly."""
    scale = 5 if chance.random() < 0.03 else 1
    members = chance.sample(range(100), chance.randint(1, 9 * scale))
    breadth = 1.0 if equal else chance.choice([0.8, 0.6, 0.4])
    topics = [f"t{n}" for n in range(chance.randint(1, 6 * scale))]
    counts = {topic: chance.choice([1, 2, 3, 5, 8, 13]) * scale for topic in topics}
    return Group({topic: [slot for slot in members if chance.random() < breadth] for topic in topics}, counts).cleaned()


def change(chance: random.Random, group: Group, equal: bool, newcomer: int) -> Group:
    """One of the things that bring a rebalance."""
    subscribers = {topic: set(slots) for topic, slots in group.subscribers.items()}
    counts = dict(group.counts)
    members = group.members
    breadth = 1.0 if equal else 0.6
    match chance.choice(["join", "leave", "grow", "topic"] + ([] if equal else ["other topics"])):
        case "join":
            for slots in subscribers.values():
                slots |= {newcomer} if chance.random() < breadth else set()
        case "leave" if len(members) > 1:
            gone = {chance.choice(members)}
            for slots in subscribers.values():
                slots -= gone
        case "grow":
            counts[chance.choice(list(counts))] += chance.randint(1, 6)
        case "topic":
            counts[f"new{newcomer}"] = chance.choice([1, 3, 8])
            subscribers[f"new{newcomer}"] = {slot for slot in members if chance.random() < breadth}
        case "other topics":
            one = {chance.choice(members)}
            for slots in subscribers.values():
                slots ^= one if chance.random() < 0.5 else set()
    return Group({topic: sorted(slots) for topic, slots in subscribers.items()}, counts).cleaned()


def ours(strategy: str, group: Group, was: Assigned) -> Assigned:
    before = {topic: Before(slots, slots) for topic, slots in was.items()}
    found = compute_targets(strategy, group.subscribers, group.counts, set(), set(), before, lambda topic: {})
    return {topic: [target for target in targets if isinstance(target, int)] for topic, targets in found.items()}


@pytest.mark.parametrize("strategy", ["range", "roundrobin"])
def test_it_is_the_very_assignment_of_kafka(kafka: KafkaAssignors, strategy: str) -> None:
    chance = random.Random(strategy)
    for number in range(2000):
        group = draw(chance, equal=number % 2 == 0)
        if group.counts:
            assert ours(strategy, group, {}) == kafka.assign(strategy, *group, {}), group


# -- sticky -------------------------------------------------------------------------------------------------------


class Step(NamedTuple):
    """A rebalance by ours and by one of Kafka's, from the same assignment: how even the loads are, how much moved."""

    loads: Sequence[int]
    kafkas_loads: Sequence[int]
    moved: int
    kafkas_moved: int

    @property
    def uneven(self) -> int:
        """How much less even our loads are: the difference of the sums of their squares."""
        return sum(n * n for n in self.loads) - sum(n * n for n in self.kafkas_loads)


def loads(group: Group, assigned: Assigned) -> list[int]:
    counts = Counter(slot for slots in assigned.values() for slot in slots)
    return sorted(counts[slot] for slot in group.members)


def moved(group: Group, was: Assigned, now: Assigned) -> int:
    """Partitions that were taken from a member that could have kept them."""
    pairs = [(topic, pair) for topic in was for pair in zip(was[topic], now[topic], strict=False)]
    return sum(old != new and old in group.subscribers[topic] for topic, (old, new) in pairs)


def rebalances(kafka: KafkaAssignors, equal: bool, groups: int) -> Iterator[Step]:
    """Groups live through some changes, with ours as their assignor, or one of Kafka's; at each both are asked."""
    chance = random.Random(f"sticky, equal: {equal}")
    for number in range(groups):
        group = draw(chance, equal)
        assignor = ("ours", *STICKY)[number % 3]
        was: Assigned = {}
        for newcomer in range(100, 104):
            if not group.counts:
                break
            found: Mapping[str, Assigned] = {each: kafka.assign(each, *group, was) for each in STICKY}
            found = {"ours": ours("sticky", group, was), **found}
            of_each = {each: (loads(group, now), moved(group, was, now)) for each, now in found.items()}
            for each in STICKY:
                yield Step(of_each["ours"][0], of_each[each][0], of_each["ours"][1], of_each[each][1])
            group = change(chance, group, equal, newcomer)
            was = {topic: slots for topic, slots in found[assignor].items() if topic in group.counts}


def test_with_equal_subscriptions_it_is_as_balanced_and_moves_as_few(kafka: KafkaAssignors) -> None:
    steps = list(rebalances(kafka, equal=True, groups=600))
    assert len(steps) > 4000
    for step in steps:
        assert step.loads == step.kafkas_loads
        assert step.loads[-1] - step.loads[0] <= 1
        assert step.moved == step.kafkas_moved
    assert sum(step.moved for step in steps) > 2000


def test_with_unequal_subscriptions_it_is_seldom_worse(kafka: KafkaAssignors) -> None:
    """Seldom less even, and only a little; seldom more moves where as even, often fewer, and fewer in all."""
    steps = list(rebalances(kafka, equal=False, groups=900))
    assert len(steps) > 6000
    less_even = [step for step in steps if step.uneven > 0]
    assert len(less_even) < len(steps) * 0.02
    assert max(step.uneven for step in less_even) <= 6
    as_even = [step for step in steps if step.uneven == 0]
    more, fewer = [[step for step in as_even if (step.moved - step.kafkas_moved) * sign > 0] for sign in (1, -1)]
    assert len(more) < len(steps) * 0.004
    assert max(step.moved - step.kafkas_moved for step in more) <= 2
    assert len(fewer) > 10 * len(more)
    assert sum(step.moved for step in steps) < sum(step.kafkas_moved for step in steps)
