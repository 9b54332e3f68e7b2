"""The transactions of one consumer, counted for metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from kafka_marshal.engine.figures import Distribution, Histogram
from kafka_marshal.runtime import Lock

#: How a transaction ended. Unknown: the brokers have not answered; the producer that follows finds out.
COMMITTED, ABORTED, FENCED, UNKNOWN = "committed", "aborted", "fenced", "unknown"


class Transacted:
    """Any thread may add, under a lock that guards nothing else, and read without it: each figure is one value."""

    def __init__(self, lock: Lock) -> None:
        self._lock = lock
        self._counts: Counter[str] = Counter()
        self._seconds = Histogram()
        self._waiting: set[object] = set()

    @contextmanager
    def wait(self) -> Iterator[None]:
        """A transaction waits for earlier ones, or for a producer. What it raises ends it, with nothing committed."""
        one = object()
        self._waiting.add(one)
        try:
            yield
        except BaseException:
            self.ended(ABORTED)
            raise
        finally:
            self._waiting.discard(one)

    @property
    def waiting(self) -> int:
        """How many transactions wait."""
        return len(self._waiting)

    def committed(self, seconds: float) -> None:
        """A transaction was committed, this long after its begin."""
        with self._lock:
            self._counts[COMMITTED] += 1
            self._seconds.observe(seconds)

    def ended(self, outcome: str) -> None:
        """A transaction ended otherwise."""
        with self._lock:
            self._counts[outcome] += 1

    def read(self) -> tuple[Counter[str], Distribution]:
        """How many ended in each way, and how long the commits took."""
        return self._counts.copy(), self._seconds.read()
