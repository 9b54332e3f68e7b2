"""The next lane: half of the workers take the longest lane, the others the one that has waited longest."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any, cast

from kafka_marshal.client.workers import MOST_IN_TURN, Ready
from kafka_marshal.engine.work.lane import Lane


class Waiting:
    """A minimal lane."""

    def __init__(self, name: str, messages: int, number: int = 1) -> None:
        self.name = name
        self.number = number
        self.rest: deque[Any] | None = deque(range(messages - 1)) if messages > 1 else None


def ready_of(**lengths: int) -> Ready:
    ready = Ready()
    for name, messages in lengths.items():
        ready.put(cast("Lane", Waiting(name, messages)))
    return ready


def taken(ready: Ready, *longest: bool) -> str:
    names = [cast("Any", lane).name if (lane := ready.take(x)) is not None else "-" for x in longest]
    return "".join(names)


def test_the_longest_comes_first_and_of_those_as_long_the_first() -> None:
    ready = ready_of(a=1, b=2, c=500, d=9000, e=300, f=70_000)
    assert taken(ready, *[True] * 7) == "dfceba-"


def test_the_others_come_in_turn() -> None:
    assert taken(ready_of(a=1, b=2, c=500, d=9000), *[False] * 5) == "abcd-"


def test_no_lane_is_taken_twice() -> None:
    ready = ready_of(a=1, b=2, c=500, d=9000)
    assert taken(ready, True, False, True, False, True) == "dacb-"
    assert len(ready) == 0


def test_a_lane_that_comes_back_is_last_in_turn() -> None:
    ready = ready_of(a=1, b=1)
    again = ready.take(longest=False)
    assert again is not None
    ready.put(again)
    assert taken(ready, False, False) == "ba"


def test_many_that_are_tried_again_leave_half_of_the_tries_to_what_is_new() -> None:
    ready = Ready()
    for _ in range(1_000):
        ready.put(cast("Lane", Waiting("r", 1, number=2)))
    for name in "abc":
        ready.put(cast("Lane", Waiting(name, 1)))
    assert taken(ready, *[False, True] * 4) == "rarbrcrr"
    assert len(taken(ready, *[True] * 995)) == 995
    assert taken(ready, True) == "-"
    assert [len(cells) for cells in (ready._in_turn, ready._again, ready._new)] == [0, 0, 0]


def test_threads_find_each_lane_once() -> None:
    """As many calls as there are lanes, in any interleaving."""
    ready, found, names = Ready(), deque[str](), [f"{number}" for number in range(20_000)]

    def work(longest: bool, mine: list[str]) -> None:
        for name in mine:
            ready.put(cast("Lane", Waiting(name, 1 + int(name) % 50, 1 + int(name) % 3 // 2)))
            found.append(taken(ready, longest))

    threads = [threading.Thread(target=work, args=(part % 2 == 1, names[part::8])) for part in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found, key=int) == names


def test_what_was_taken_is_not_kept() -> None:
    """If all take the longest, and if all take them in turn."""
    for longest in (True, False):
        ready = ready_of(first=1) if longest else ready_of()
        for _ in range(MOST_IN_TURN * 2):
            ready.put(cast("Lane", Waiting("again", 100)))
            ready.take(longest)
        assert len(ready._in_turn) <= MOST_IN_TURN
        assert sum(map(len, ready._by_length)) <= 2
