"""Lanes that a worker may begin, and which of them is the next (:mod:`.parallel`).

If all workers took lanes in turn, the lane of a frequent key would wait for all others after each of its messages, and
be left alone at the end. If all took the longest first, a rare key would wait for the whole backlog of frequent ones.
So half of the workers do each. And one try in two is a message's first, if any waits: many that fail, and are tried
again and again, hold no others up.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from kafka_marshal import arguments
from kafka_marshal.adapters.message import Message
from kafka_marshal.engine.work.lane import Lane
from kafka_marshal.errors import ConfigurationError


def check_result(result: object) -> None:
    """Raises ConfigurationError for a result whose work has not run: its message is not done."""
    if what := arguments.unfinished(result):
        arguments.drop(result)
        raise ConfigurationError(
            f"the handler has returned {what}: its work has not run, or not to its end, so its message is not done and "
            "comes again. Give run(…) a function that does the work, or the coroutine function itself instead of a "
            "function that calls it; wait for the result of a future"
        )


def deserialized(deserialize: Callable[[Message], Any], message: Message) -> Any:
    """What the handler gets. Raises ConfigurationError if it would have to be awaited first."""
    value = deserialize(message)
    if arguments.is_awaited(value):
        arguments.drop(value)
        raise ConfigurationError(
            "deserialize has returned something that must be awaited, and run(…) awaits it nowhere. Its message is not "
            "done. Give a function that returns the value, or deserialize in the handler"
        )
    return value


#: Lanes are sorted by the number of binary digits of their waiting messages; longer ones than this count the same.
MOST_DIGITS = 12

#: With this number of lanes waiting, all workers take them in turn: the workers for that may all be stuck.
MOST_IN_TURN = 10_000


class Ready:
    """The lanes that wait for a worker. Any thread calls it, without a lock: each step is atomic in the interpreter.

    Workers that take no more lanes than were put find one each.
    """

    def __init__(self) -> None:
        #: Each lane is in a cell that is in several queues; the worker that takes the lane empties the cell.
        self._in_turn: deque[list[Lane]] = deque()
        self._by_length: list[deque[list[Lane]]] = [deque() for _ in range(MOST_DIGITS + 1)]
        #: Those whose first message was not tried before; those whose was, and whether one of them is the next.
        self._new: deque[list[Lane]] = deque()
        self._again: deque[list[Lane]] = deque()
        self._is_again = False

    def __len__(self) -> int:
        """How many there are, or more."""
        return len(self._in_turn)

    def put(self, lane: Lane) -> None:
        """This lane may begin."""
        cell = [lane]
        as_long = self._by_length[min(len(lane.rest or ()).bit_length(), MOST_DIGITS)]
        for cells in (self._again,) if lane.number > 1 else (self._new, as_long):
            _forget_empty(cells)
            cells.append(cell)
        _forget_empty(self._in_turn)
        self._in_turn.append(cell)

    def take(self, longest: bool) -> Lane | None:
        """The lane with the most messages (longest), or the one that has waited longest; None: there is none."""
        if self._again:
            self._is_again = not self._is_again
            if (lane := _first(self._again if self._is_again else self._new)) is not None:
                return lane
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
    """Drop empty cells at the front: there are all whose lanes were taken in turn."""
    try:
        while cells and not cells[0]:
            if cell := cells.popleft():
                cells.appendleft(cell)
    except IndexError:
        pass  # another thread has forgotten them
