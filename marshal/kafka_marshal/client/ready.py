"""Lanes that a worker may begin, and which of them is the next (:mod:`.parallel`).

In turn alone, the lane of a frequent key would wait for all others after each of its messages, and go on alone when
they have ended. The longest first, a rare key would wait as long as there is a backlog of frequent ones. So half of the
workers do each.
"""

from __future__ import annotations

from collections import OrderedDict

from kafka_marshal.engine.work.lanes import Lane
from kafka_marshal.runtime import Lock

__all__ = ["Ready"]

#: Lanes are as long as others with as many binary digits in their numbers of waiting messages; these are as long, too.
MOST_DIGITS = 12


class Ready:
    """What waits for a worker; any thread calls it."""

    def __init__(self, lock: Lock) -> None:
        self._lock = lock
        #: How long each lane is, those first that have waited longest.
        self._in_turn: OrderedDict[Lane, int] = OrderedDict()
        self._by_length: list[OrderedDict[Lane, None]] = [OrderedDict() for _ in range(MOST_DIGITS + 1)]

    def __len__(self) -> int:
        return len(self._in_turn)

    def put(self, lane: Lane) -> None:
        """It may begin."""
        length = min(len(lane.rest or ()).bit_length(), MOST_DIGITS)
        with self._lock:
            self._in_turn[lane] = length
            self._by_length[length][lane] = None

    def take(self, longest: bool) -> Lane | None:
        """The longest of all, or the one that has waited longest; None: there is none."""
        with self._lock:
            if not self._in_turn:
                return None
            if longest:
                lane, _ = next(lanes for lanes in reversed(self._by_length) if lanes).popitem(last=False)
                del self._in_turn[lane]
            else:
                lane, length = self._in_turn.popitem(last=False)
                del self._by_length[length][lane]
            return lane
