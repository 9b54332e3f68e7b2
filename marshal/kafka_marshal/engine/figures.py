"""Counters for metrics. One thread at a time adds; any thread may read without a lock."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from operator import add

#: Upper ends of buckets (s), from OpenTelemetry's messaging conventions.
BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)


class MessageTotals:
    """Messages of one partition fetched and done, over all assignments of one consumer. They never decrease."""

    __slots__ = ("again", "done", "fetched")

    def __init__(self, fetched: int = 0, done: int = 0) -> None:
        self.fetched: int = fetched
        self.done: int = done
        #: Delivered here, and to a member before, as the log shows it.
        self.again: int = 0


@dataclass(frozen=True, slots=True)
class Distribution:
    """A histogram at one moment."""

    #: Upper ends of the buckets (s), ascending; one more bucket has no end.
    bounds: tuple[float, ...]
    #: Values in each bucket: above the end of the one before it, up to its own end.
    counts: tuple[int, ...]
    #: The sum of all values (s).
    total: float

    @property
    def count(self) -> int:
        """The number of values."""
        return sum(self.counts)

    def __add__(self, other: Distribution) -> Distribution:
        """The values of both, which have the same buckets."""
        counts = tuple(map(add, self.counts, other.counts))
        return Distribution(self.bounds, counts, self.total + other.total)


class Histogram:
    """Durations, counted in buckets."""

    __slots__ = ("_bounds", "_counts", "_total")

    def __init__(self, bounds: Sequence[float] = BUCKETS_S) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._total = 0.0

    def observe(self, seconds: float) -> None:
        """Add a value."""
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self._total += seconds

    def read(self) -> Distribution:
        """The values so far."""
        return Distribution(self._bounds, tuple(self._counts), self._total)
