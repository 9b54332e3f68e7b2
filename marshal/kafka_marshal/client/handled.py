"""The results of the tries of ``consumer.run``, counted for metrics."""

from __future__ import annotations

from collections import Counter, deque
from contextlib import suppress

from kafka_marshal.client.dead_letters import class_name
from kafka_marshal.engine.figures import Distribution, Histogram
from kafka_marshal.runtime import Lock

#: How many durations wait to be sorted into histograms, unless they are read before.
MOST_NOTED = 1_000

#: How many error classes metrics distinguish: a program may create classes without end, each a time series.
MOST_ERRORS = 32
OTHER = "other"


class ErrorTypes:
    """The first MOST_ERRORS names of classes; any other is OTHER. Not thread-safe by itself."""

    def __init__(self) -> None:
        self._known: set[str] = {""}

    def bounded(self, name: str) -> str:
        """The name, or OTHER. "" (no error) is a separate one."""
        if name in self._known:
            return name
        if len(self._known) > MOST_ERRORS:
            return OTHER
        self._known.add(name)
        return name


class Handled:
    """Failures, retries and dead letters of one consumer, over all its runs. Any thread may call."""

    def __init__(self, lock: Lock) -> None:
        self._lock = lock
        self._errors = ErrorTypes()
        self._failures: Counter[tuple[str, str]] = Counter()
        self._retries: Counter[str] = Counter()
        self._dead_letters: Counter[str] = Counter()

    def failed(self, topic: str, error: BaseException) -> None:
        """A try has failed."""
        with self._lock:
            self._failures[topic, self._errors.bounded(class_name(error))] += 1

    def retried(self, topic: str) -> None:
        """A message is tried again."""
        with self._lock:
            self._retries[topic] += 1

    def put_aside(self, topic: str) -> None:
        """A message has become a dead letter."""
        with self._lock:
            self._dead_letters[topic] += 1

    def read(self) -> tuple[Counter[tuple[str, str]], Counter[str], Counter[str]]:
        """Failures by topic and error, retries by topic, dead letters by topic."""
        with self._lock:
            return self._failures.copy(), self._retries.copy(), self._dead_letters.copy()


class ProcessTimes:
    """How long handlers take, by topic and error ("": none). Any thread may call."""

    def __init__(self, lock: Lock) -> None:
        self._lock = lock
        #: What is not in a histogram yet: an append is atomic, and cheaper for a handler's thread than a lock.
        self._noted: deque[tuple[str, str, float]] = deque()
        self._found: dict[tuple[str, str], Histogram] = {}
        self._is_sorting = False
        self._errors = ErrorTypes()

    def note(self, topic: str, error: str, seconds: float) -> None:
        """A handler has ended."""
        noted = self._noted
        noted.append((topic, error, seconds))
        if len(noted) >= MOST_NOTED and not self._is_sorting:  # one thread sorts, and the others need not wait for it
            self._sort()

    def _sort(self) -> None:
        with self._lock, suppress(IndexError):
            self._is_sorting = True
            try:
                for _ in range(len(self._noted)):
                    topic, error, seconds = self._noted.popleft()
                    error = self._errors.bounded(error)
                    found = self._found.get((topic, error))
                    if found is None:
                        found = self._found[topic, error] = Histogram()
                    found.observe(seconds)
            finally:
                self._is_sorting = False

    def read(self) -> list[tuple[tuple[str, str], Distribution]]:
        """((topic, error), durations), sorted."""
        self._sort()
        with self._lock:
            return [(what, found.read()) for what, found in sorted(self._found.items())]
