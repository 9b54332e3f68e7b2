"""What a member counts about checkpoints; it never decreases."""

from __future__ import annotations

from collections import Counter

from kafka_marshal.engine.figures import Distribution, Histogram

#: Upper ends of buckets (s): saving and restoring may take minutes.
BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class CheckpointFigures:
    """Counters of one consumer."""

    def __init__(self) -> None:
        #: Barriers by their end: "complete", "without_some" (complete, though an owner handed nothing in, or we not all
        #: of our pieces), "ended".
        self.outcomes: Counter[str] = Counter()
        #: Restored pieces by the reason.
        self.restores: Counter[str] = Counter()
        self._saving = Histogram(BUCKETS_S)
        self._restoring = Histogram(BUCKETS_S)
        #: How long (s) the last drain took, and the longest one.
        self.drain_seconds: float = 0.0
        self.drain_seconds_max: float = 0.0

    @property
    def saving(self) -> Distribution:
        """How long (s) states took to be safe, from the cut."""
        return self._saving.read()

    @property
    def restoring(self) -> Distribution:
        """How long (s) on_restore took."""
        return self._restoring.read()

    def drained(self, ms: float) -> None:
        """The last piece was cut, or drain had gone by, this long after the barrier was seen."""
        self.drain_seconds = ms / 1000
        self.drain_seconds_max = max(self.drain_seconds_max, self.drain_seconds)

    def saved(self, ms: float) -> None:
        """A state was saved in this time."""
        self._saving.observe(ms / 1000)

    def restored(self, why: str, count: int, ms: float) -> None:
        """on_restore has returned for this number of pieces."""
        self.restores[why] += count
        self._restoring.observe(ms / 1000)
