"""When what is done beyond gaps goes to the log."""

from __future__ import annotations

from collections.abc import Iterable

from kafka_marshal.engine.settings import BEATS_PER_INTERVAL
from kafka_marshal.engine.work.assignment import REPORTING
from kafka_marshal.engine.work.consumer import ConsumerEngine

__all__ = ["RangeCommits"]


class RangeCommits:
    """Commits of all consumers of a member. They go with the beats, so that both take one wake."""

    def __init__(self, heartbeat_interval_ms: int) -> None:
        self._interval_ms = heartbeat_interval_ms / BEATS_PER_INTERVAL
        #: When they are sent at the latest.
        self.due: float = 0.0

    def soon(self, now: float) -> None:
        """At the next step."""
        self.due = now

    def step(self, consumers: Iterable[ConsumerEngine], now: float, *, beaten: bool) -> None:
        """Send them if it is time, or beats go out."""
        if beaten or now >= self.due:
            self.due = now + self._interval_ms
            self.send(consumers, now)

    def send(self, consumers: Iterable[ConsumerEngine], now: float) -> None:
        """Send them, and the marks of topics (P12)."""
        for consumer in consumers:
            consumer.positions.marks.send(now)
            for assignment in consumer.assignments.values():
                if not assignment.tracker.has_news:
                    continue
                if assignment.stage in REPORTING and assignment.lease.held:
                    consumer.revocation.commit_ranges(assignment, now)
