"""Keys that take more than half of what one handler can do (U14): their messages are handled one after another.

Each partition counts the time of its handlers by key with Space-Saving: a new key takes the place of the smallest of 32
counters, and counts on from there. What a counter has beyond that is certain.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from operator import length_hint
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from kafka_marshal.engine.work.run import Run
from kafka_marshal.ports import Message
from kafka_marshal.runtime import Lock

#: Counters of a partition.
COUNTERS = 32

#: A key that one handler has for more than this part of the time is hot.
HOT = 0.5

#: Times are counted over this long (ms); what was found holds for three times that, unless it is counted again.
WINDOW_MS = 10_000.0

#: One message counts for at most this part of a window: a slow one, or one of before a stop, makes no key hot.
MOST_OF_ONE = 0.2

#: How many handled messages wait to be counted.
MOST_NOTED = 1_000


#: Messages of one run of a loop that are counted: neighbours, at a place that moves from run to run.
SAMPLE = 32
_SPREAD = 2_654_435_761


#: How often what a loop has taken is counted (ms), beside the ends of its runs.
COUNTED_EVERY_MS = 500.0


class HotKey(NamedTuple):
    """A key whose messages take more than half of what one handler can do."""

    topic: str
    partition: int
    key: bytes | str
    #: For which part of the last seconds a handler had a message of it: 0.5 … 1.
    load: float
    #: Its part of the time that handlers had messages of the partition, of the keys that this member has: 0 … 1.
    share: float

    def __str__(self) -> str:
        return (
            f"{self.topic} [{self.partition}]: key {self.key!r} keeps a handler busy for {self.load:.0%} of the time, "
            f"and is {self.share:.0%} of the partition's work here. Messages of one key are handled one after another: "
            "more handlers or members do not speed it up. Make its handler faster, or divide the key"
        )


class SpaceSaving:
    """The largest of many amounts by key, in a fixed number of counters."""

    def __init__(self, counters: int = COUNTERS) -> None:
        self._counters = counters
        #: Key → amount, and how much of that may be of other keys.
        self._amounts: dict[bytes | str, list[float]] = {}
        #: All that was counted.
        self.total: float = 0.0

    def add(self, key: bytes | str, amount: float) -> None:
        """Count an amount for a key."""
        self.total += amount
        found = self._amounts.get(key)
        if found is not None:
            found[0] += amount
        elif len(self._amounts) < self._counters:
            self._amounts[key] = [amount, 0.0]
        else:
            smallest = min(self._amounts, key=lambda each: self._amounts[each][0])
            least = self._amounts.pop(smallest)[0]
            self._amounts[key] = [least + amount, least]

    def largest(self) -> tuple[bytes | str, float] | None:
        """The key of which most is certain, and how much; None: nothing was counted."""
        if not self._amounts:
            return None
        amount, key = max((amount - error, key) for key, (amount, error) in self._amounts.items())
        return key, amount


class HotKeys:
    """The hot keys of one run. Any thread calls it; reading ``found`` takes no lock."""

    def __init__(self, lock: Lock | AbstractContextManager[None]) -> None:
        self._lock = lock
        #: (topic, partition), key, ms: not counted yet. An append is atomic.
        self._noted: deque[tuple[tuple[str, int], bytes | str, float]] = deque()
        self._counts: dict[tuple[str, int], SpaceSaving] = {}
        #: When the present window began (ms, own clock); None: nothing was noted.
        self._since: float | None = None
        self._is_counting = False
        #: The hottest key of each partition that has one, at the end of the last window, and when that was.
        self.found: tuple[HotKey, ...] = ()
        self._found_at = 0.0

    def note(self, where: tuple[str, int], key: bytes | str | None, ms: float, now: float) -> None:
        """A handler has had a message of this key for so many ms."""
        if key is None:
            return  # messages without a key wait for no other
        if self._since is None:
            self._since = now - ms
        self._noted.append((where, key, min(ms, MOST_OF_ONE * WINDOW_MS)))
        self._count_if_due(now)

    def note_run(self, where: tuple[str, int], messages: Sequence[Message], ms: float, now: float) -> None:
        """A loop has had these messages, one after another, for so many ms: some neighbours stand for all of them."""
        if not messages or ms <= 0:
            return
        chosen = messages
        if len(messages) > SAMPLE:
            place = (messages[0].offset() or 0) * _SPREAD % (len(messages) - SAMPLE)
            chosen = messages[place : place + SAMPLE]
        each = min(ms / len(messages), MOST_OF_ONE * WINDOW_MS) * len(messages) / len(chosen)
        if self._since is None:
            self._since = now - ms
        self._noted.extend((where, key, each) for message in chosen if (key := message.key()) is not None)
        self._count_if_due(now)

    def _count_if_due(self, now: float) -> None:
        is_due = len(self._noted) >= MOST_NOTED or (self._since is not None and now >= self._since + WINDOW_MS)
        if is_due and not self._is_counting:  # one thread counts, and the others need not wait for it
            self._count(now)

    def _count(self, now: float) -> None:
        with self._lock:
            self._is_counting = True
            try:
                with suppress(IndexError):
                    for _ in range(len(self._noted)):
                        where, key, ms = self._noted.popleft()
                        self._counts.setdefault(where, SpaceSaving()).add(key, ms)
                if self._since is not None and (window := now - self._since) >= WINDOW_MS:
                    self.found, self._found_at = tuple(self._hot(window)), now
                    self._counts, self._since = {}, now
            finally:
                self._is_counting = False

    def _hot(self, window: float) -> list[HotKey]:
        found = []
        for (topic, partition), counts in sorted(self._counts.items()):
            largest = counts.largest()
            if largest is not None and largest[1] > HOT * window:
                key, ms = largest
                found.append(HotKey(topic, partition, key, min(1.0, ms / window), ms / counts.total))
        return found

    def at(self, now: float) -> tuple[HotKey, ...]:
        """The hot keys, if they were counted lately (any thread; no lock)."""
        return self.found if now < self._found_at + 3 * WINDOW_MS else ()


class LoopKeys:
    """The hot keys of loops, ``poll`` and batches of one consumer: of each run, what was taken of it, and its time."""

    def __init__(self) -> None:
        self.hot: HotKeys = HotKeys(nullcontext())
        #: Run → how many of its messages were counted, and since when (own clock, ms) a loop has had it.
        self._runs: WeakKeyDictionary[Run[Any], tuple[int, float]] = WeakKeyDictionary()
        self._counted_at = 0.0

    def began(self, run: Run[Any], now: float) -> None:
        """A run was handed out."""
        self._runs[run] = (0, now)

    def ended(self, run: Run[Any], now: float) -> None:
        """A loop has left a run, or a batch is done. What others counted meanwhile takes none of its time twice."""
        if run not in self._runs:
            return
        counted, since = self._runs[run]
        # Not ``Run.ahead``: that decides, and so a recording writes it down.
        gone = len(run.messages) - len(run.recalled) - length_hint(run._ahead)
        if gone > counted:
            self.hot.note_run(run.assignment.key, run.messages[counted:gone], now - max(since, self._counted_at), now)
            self._runs[run], self._counted_at = (gone, since), now

    def look(self, now: float) -> None:
        """Count what was taken of runs that have not ended."""
        if now >= self._counted_at + COUNTED_EVERY_MS:
            for run in [run for run in self._runs if length_hint(run._ahead)]:
                self.ended(run, now)
