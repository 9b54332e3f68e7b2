"""The queue of ``run(rate=…, priority=…)`` by itself: what begins, and when."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from kafka_marshal import ConfigurationError, Rate
from kafka_marshal.client import pacing
from kafka_marshal.client.pacing import AGING, Paced
from kafka_marshal.client.rates import LEVELS, checked_rates
from kafka_marshal.engine.work.lane import Lane, Partition


class Message:
    def __init__(self, topic: str, key: str = "", priority: Any = 0, offset: int = 0) -> None:
        self.place, self.name, self.priority_ = (topic, 0, offset), key, priority

    def partition(self) -> int:
        return 0

    def offset(self) -> int:
        return self.place[2]


class Waiting(nullcontext[None]):
    """In place of a condition: nothing waits here."""

    def notify_all(self) -> None: ...


class Queue:
    """A ``Paced`` by itself, on a clock that the test moves."""

    def __init__(self, rate: Any = None, priority: Callable[[Any], int] | None = None) -> None:
        self.now, self.woken, self._count = 1_000_000.0, 0, 0
        runtime: Any = SimpleNamespace(now_ms=lambda: self.now, condition=Waiting)
        options = SimpleNamespace(rates={} if rate is None else checked_rates(rate), priority=priority)
        self._partitions: dict[str, Partition] = {}
        self.paced = Paced(SimpleNamespace(options=options, runtime=runtime, workers=self))  # type: ignore[arg-type]

    def wake(self, count: int) -> None:
        self.woken += count

    def put(self, topic: str = "orders", key: str = "", priority: Any = 0) -> Lane:
        assignment: Any = SimpleNamespace(key=(topic, 0))
        partition = self._partitions.setdefault(topic, Partition(assignment))
        self._count += 1
        lane = Lane(partition, self._count, Message(topic, key, priority, self._count))  # type: ignore[arg-type]
        self.paced.put(lane)
        return lane

    def take(self) -> Any:
        """The message that begins now; None: none may."""
        lane = self.paced.take(longest=False)
        return None if lane is None else lane.message

    def take_all(self) -> list[Any]:
        return list(iter(self.take, None))


def key_of(message: Any) -> str:
    return str(message.name)


def priority_of(message: Any) -> Any:
    return message.priority_


# The rate.


@pytest.mark.parametrize(("per_second", "burst"), [(100.0, 1), (100.0, 20), (7.0, 3), (2_000.0, 50), (0.5, 2)])
def test_in_any_time_no_more_begin_than_the_burst_and_the_rate_allow_and_not_much_less(
    per_second: float, burst: int
) -> None:
    queue, chance, begun = Queue(Rate(per_second, burst)), Random(1), list[float]()
    for _ in range(3_000):
        queue.put()
    while len(begun) < 1_000:
        queue.now += chance.expovariate(per_second / 700) if chance.random() < 0.9 else 5_000 / per_second
        begun += [queue.now] * len(queue.take_all())
    for first in range(0, 1_000, 7):
        for last in range(first, 1_000, 11):
            assert last - first + 1 <= burst + per_second * (begun[last] - begun[first]) / 1000 + 1e-6
    began, count = queue.now, len(begun)
    for _ in range(1_000):
        queue.now += 200 / per_second
        count -= len(queue.take_all())
    assert len(begun) - count >= 0.9 * per_second * (queue.now - began) / 1000


def test_the_default_burst_is_a_tenth_of_a_second_and_at_least_one() -> None:
    for per_second, burst in [(100, 10), (5, 1), (0.01, 1)]:
        queue = Queue(per_second)
        for _ in range(20):
            queue.put()
        assert len(queue.take_all()) == burst


def test_what_waits_for_a_token_holds_up_no_other_topic_and_no_other_key() -> None:
    queue = Queue({"orders": Rate(1, 1, key=key_of)})
    for name in ("a", "a", "b"):
        queue.put(key=name)
    queue.put("other")
    assert [x.name for x in queue.take_all()] == ["a", "b", ""]
    queue.put("other")
    assert [x.place[0] for x in queue.take_all()] == ["other"]
    queue.now += 1_000
    assert [x.name for x in queue.take_all()] == ["a"]


def test_of_many_values_those_that_have_their_burst_again_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pacing, "MOST_BUCKETS", 10)
    queue = Queue(Rate(1, 1, key=key_of))
    for number in range(25):
        queue.put(key=str(number))
    assert len(queue.take_all()) == 11  # the others share one
    for _ in range(14):
        queue.now += 1_000
        assert len(queue.take_all()) == 1
    queue.now += 1_000
    for number in range(30, 39):
        queue.put(key=str(number))
    assert len(queue.take_all()) == 9
    assert len(queue.paced._buckets.all) <= 11


def test_what_was_recalled_takes_no_token() -> None:
    queue = Queue(Rate(1, 1))
    for _ in range(10):
        queue.put().message = None
    queue.put(key="kept")
    assert [x.name for x in queue.take_all()] == ["kept"]


def test_a_lane_that_is_put_again_elsewhere_takes_the_token_of_its_message() -> None:
    queue = Queue(Rate(1, 1, key=key_of))
    queue.put(key="a")
    assert len(queue.take_all()) == 1
    lane = queue.put(key="a")
    assert queue.take_all() == []
    lane.message = Message("orders", "b")  # type: ignore[assignment]
    queue.paced.put(lane)  # an operator has set its message aside
    assert [x.name for x in queue.take_all()] == ["b"]
    queue.now += 1_000
    assert queue.take_all() == []


def test_workers_that_asked_in_vain_are_called_when_there_are_tokens() -> None:
    queue = Queue(Rate(10, 4))
    for _ in range(10):
        queue.put()
    assert len(queue.take_all()) == 4
    for _ in range(5):
        assert queue.take() is None
    queue.now += 200
    assert queue.take() is not None
    assert queue.woken == 1  # there is another token, and this worker is busy
    assert queue.take() is not None
    assert queue.take() is None
    assert len(queue.paced) == 0


def test_a_rate_of_the_group_is_divided_and_what_waits_is_kept() -> None:
    queue = Queue(Rate(100, 20, of_group=True))
    for _ in range(100):
        queue.put()
    assert len(queue.take_all()) == 20
    queue.paced.share("", 4)
    queue.now += 1_000
    assert len(queue.take_all()) == 5
    [found] = queue.paced.limits
    assert (found.per_second, found.members, found.waiting) == (25, 4, 75)
    assert "4 members share" in str(found)
    queue.paced.share("", 1)
    queue.now += 200
    assert len(queue.take_all()) == 20


def test_the_rates_that_limit_are_named_with_the_value_that_waits_most() -> None:
    queue = Queue({"orders": Rate(1, 1, key=key_of), "other": 1_000})
    assert not any(queue.paced.limits)
    for name in ("a", "a", "a", "b", "b", "c"):
        queue.put(key=name)
    queue.put("other")
    queue.take_all()
    [found] = queue.paced.limits
    assert tuple(found) == ("orders", 1, 1, 3, 2, "'a'")
    assert str(found).startswith("orders: limited by rate= of run(…), 1 a second for each value; 2 value(s) reach it")
    queue.now += 1_000
    queue.take_all()
    queue.now += 1_000
    queue.take_all()
    assert not any(queue.paced.limits)


# Priorities.


def test_the_highest_priority_comes_first_and_each_in_turn() -> None:
    queue = Queue(priority=priority_of)
    for number in range(6):
        queue.put(key=str(number), priority=number % 3)
    assert [x.name for x in queue.take_all()] == ["2", "5", "1", "4", "0", "3"]


@pytest.mark.parametrize("levels", [[0, 9], [0, 1, 9], list(range(LEVELS))])
def test_under_a_constant_flood_each_lower_priority_begins_within_its_bound(levels: list[int]) -> None:
    queue, bound, since = Queue(priority=priority_of), AGING * (len(levels) - 1), dict.fromkeys(levels, 0)
    for level in levels:
        queue.put(priority=level)
    for count in range(1, 2_000):
        level = queue.take().priority_
        assert count - since[level] <= bound
        since[level] = count
        queue.put(priority=level)
        assert all(count - since[x] < bound for x in levels)


def test_most_of_what_begins_is_of_the_highest_priority_meanwhile() -> None:
    queue, begun = Queue(priority=priority_of), Counter[int]()
    for level in (0, 9):
        queue.put(priority=level)
    for _ in range(1_000):
        level = queue.take().priority_
        begun[level] += 1
        queue.put(priority=level)
    assert begun == {9: 900, 0: 100}


def test_a_priority_whose_rate_has_no_token_takes_no_turn() -> None:
    queue = Queue({"orders": Rate(1, 1)}, priority=priority_of)
    for _ in range(3):
        queue.put(priority=9)
    for _ in range(3):
        queue.put("other", priority=1)
    assert [x.priority_ for x in queue.take_all()] == [9, 1, 1, 1]


# What is refused.


def test_a_value_that_makes_no_sense_is_refused() -> None:
    for wrong in (0, -1, float("nan"), float("inf"), True, "100"):
        with pytest.raises(ConfigurationError, match="a number above 0"):
            Rate(wrong)  # type: ignore[arg-type]
        with pytest.raises(ConfigurationError, match="a number above 0"):
            checked_rates({"orders": wrong})  # type: ignore[dict-item]
    for burst in (0, -1, 1.5, True):
        with pytest.raises(ConfigurationError, match="burst"):
            Rate(1, burst)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="key"):
        Rate(1, key=lambda: 1)  # type: ignore[arg-type,misc]
    with pytest.raises(ConfigurationError, match="of_group"):
        Rate(1, of_group=1)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="rates by topic"):
        checked_rates({})
