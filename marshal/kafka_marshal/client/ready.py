"""Lanes that a worker may begin, and which of them is the next (:mod:`.parallel`).

In turn alone, the lane of a frequent key would wait for all others after each of its messages, and continue alone when
they have ended. The longest first, a rare key would wait as long as there is a backlog of frequent ones. So half of the
workers do each.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from kafka_marshal import arguments
from kafka_marshal.adapters.message import Message
from kafka_marshal.engine.work.lanes import Lane
from kafka_marshal.errors import ConfigurationError

__all__ = ["Ready", "check_result", "deserialized"]


def check_result(result: object) -> None:
    """Refuse a result whose work has not run: its message is not done."""
    if what := arguments.unfinished(result):
        arguments.drop(result)
        raise ConfigurationError(
            f"the handler has returned {what}: its work has not run, or not to its end, so its message is not done and "
            "comes again. Give run(…) a function that does the work, or the coroutine function itself instead of a "
            "function that calls it; wait for the result of a future"
        )


def deserialized(deserialize: Callable[[Message], Any], message: Message) -> Any:
    """What the handler gets; refuses what would have to be awaited first."""
    value = deserialize(message)
    if arguments.is_awaited(value):
        arguments.drop(value)
        raise ConfigurationError(
            "deserialize has returned something that must be awaited, and run(…) awaits it nowhere. Its message is not "
            "done. Give a function that returns the value, or deserialize in the handler"
        )
    return value


#: Lanes are as long as others with as many binary digits in their numbers of waiting messages; these are as long, too.
MOST_DIGITS = 12

#: With this number in turn, all workers take them in turn: those that should may all be stuck.
MOST_IN_TURN = 10_000


class Ready:
    """What waits for a worker. Any thread calls it, and no lock is taken: each step is one of the interpreter.

    A worker takes no more lanes than were put; then it finds one, unless another has asked for more than that.
    """

    def __init__(self) -> None:
        #: Each lane in a cell, which the worker that takes the lane empties: it is in the other queue, too.
        self._in_turn: deque[list[Lane]] = deque()
        self._by_length: list[deque[list[Lane]]] = [deque() for _ in range(MOST_DIGITS + 1)]

    def __len__(self) -> int:
        """How many there are, or more."""
        return len(self._in_turn)

    def put(self, lane: Lane) -> None:
        """It may begin."""
        cell = [lane]
        as_long = self._by_length[min(len(lane.rest or ()).bit_length(), MOST_DIGITS)]
        _forget_empty(as_long)
        as_long.append(cell)
        self._in_turn.append(cell)

    def take(self, longest: bool) -> Lane | None:
        """The longest of all, or the one that has waited longest; None: there is none."""
        if longest and len(self._in_turn) < MOST_IN_TURN:
            for cells in reversed(self._by_length):
                if cells and (lane := _first(cells)) is not None:
                    return lane
        return _first(self._in_turn)


def _first(cells: deque[list[Lane]]) -> Lane | None:
    while cells:
        try:
            return cells.popleft().pop()
        except IndexError:
            pass  # another thread was faster
    return None


def _forget_empty(cells: deque[list[Lane]]) -> None:
    """Those in front, where all are that were taken in turn."""
    try:
        while cells and not cells[0]:
            if cell := cells.popleft():
                cells.appendleft(cell)
    except IndexError:
        pass  # another thread has forgotten them
