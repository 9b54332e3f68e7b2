"""Which lane is begun next: half of the workers take the longest, the others the one that has waited longest."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any, cast

from kafka_marshal.client.ready import Ready
from kafka_marshal.engine.work.lanes import Lane


class Waiting:
    """A lane, as far as it matters here."""

    def __init__(self, name: str, messages: int) -> None:
        self.name = name
        self.rest: deque[Any] | None = deque(range(messages - 1)) if messages > 1 else None


def ready_of(**lengths: int) -> Ready:
    ready = Ready(threading.Lock())
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
