"""Partitions that were taken away while the program had messages of them, and what waits for those.

A batch that a loop skips without ``done()`` looks like one that a thread still works on: the loop's variable refers to
it until the next batch comes, which may be never. So it is reported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from kafka_marshal.engine.effects import Warn
from kafka_marshal.engine.work.assignment import Assignment, Mover
from kafka_marshal.engine.work.lanes import HeldBack, lasting
from kafka_marshal.engine.work.run import first_in_hand
from kafka_marshal.engine.work.stuck import SAID_EVERY_MS

__all__ = ["OWED_AFTER_MS", "Owed"]

#: Reported if messages have not come back after this long (ms). Most handlers that work at the moment of a loss return
#: before; ``kafka-marshal check`` calls a partition stuck after as long.
OWED_AFTER_MS = 10_000.0


class _Reported(NamedTuple):
    #: When it was taken away, and when that was last reported (own clock, ms).
    since: float
    said_at: float


class Owed:
    """The messages of one consumer that were taken away and have not come back (C18, G20, X17)."""

    def __init__(self, consumer: Mover, heard_at: Callable[[], float]) -> None:
        """heard_at: when a user's thread last called (own clock, ms)."""
        self._consumer = consumer
        self._heard_at = heard_at
        #: Assignments that were taken away with messages in flight, and when. Replaced, or added to.
        self.found: list[tuple[Assignment, float]] = []
        self._reported: dict[Assignment, _Reported] = {}

    def __bool__(self) -> bool:
        return bool(self.found)

    def __iter__(self) -> Iterator[Assignment]:
        """The assignments."""
        return iter([assignment for assignment, _ in self.found])

    def has_returned(self) -> bool:
        """Whether no message that was taken away is in flight; if that can't be known, whether a thread has called."""
        self.found = [(assignment, since) for assignment, since in self.found if self._is_out(assignment, since)]
        return not self.found

    def _is_out(self, assignment: Assignment, since: float) -> bool:
        is_known = not self._consumer.at_most_once and not self._consumer.settings.ranges
        return bool(assignment.tracker.runs) if is_known else self._heard_at() <= since

    def look(self, now: float) -> None:
        """Report what is overdue, and what has come back since: every heartbeat interval."""
        overdue = dict(self._overdue(now))
        for assignment in [each for each in self._reported if each not in overdue]:
            topic, partition = assignment.key
            waited = lasting(now - self._reported.pop(assignment).since)
            self._consumer.outbox.add(Warn(f"{topic} [{partition}]: what was taken away has come back, after {waited}"))
        for assignment, since in overdue.items():
            reported = self._reported.get(assignment)
            if reported is None or now >= reported.said_at + SAID_EVERY_MS:
                self._reported[assignment] = _Reported(since, now)
                self._consumer.outbox.add(Warn(self._text(assignment, now - since)))

    def held_back(self, now: float) -> list[HeldBack]:
        """What is overdue, for display (any thread; no lock)."""
        found = []
        for assignment, since in self._overdue(now):
            if (first := first_in_hand(assignment.tracker.runs)) is not None:
                why, count = "what the program still has of before it was taken away", assignment.tracker.in_hand
                found.append(HeldBack(*assignment.key, first[0], None, now - since, count, why=why))
        return found

    def _overdue(self, now: float) -> Iterator[tuple[Assignment, float]]:
        for assignment, since in list(self.found):
            if now >= since + OWED_AFTER_MS and self._is_out(assignment, since):
                yield assignment, since

    def _text(self, assignment: Assignment, for_ms: float) -> str:
        """What happened, what waits for it, and what to do."""
        (topic, partition), first = assignment.key, first_in_hand(assignment.tracker.runs)
        what = "messages" if first is None else f"offsets {first[0]} to {assignment.tracker.in_hand_to}"
        return (
            f"{topic} [{partition}]: was taken away {lasting(for_ms)} ago, and the program still has {what} of it. "
            f"Before they have come back, {self._waits}. Nothing is lost: they are delivered again, here or elsewhere. "
            f"{self._remedy(assignment)}"
        )

    @property
    def _waits(self) -> str:
        source = self._consumer.source
        if self._consumer.settings.group is None:
            return "this consumer claims nothing"
        if source.takes_checkpoints and not source.has_left:
            return "the state of this piece is not restored here, and nothing of it is delivered"
        return "this member takes up nothing, and does not join its group again"

    def _remedy(self, assignment: Assignment) -> str:
        if self._consumer.at_most_once or self._consumer.settings.ranges:
            return "Find out what the thread that has them waits for: its next call ends this"
        if any(run.in_lanes for run in assignment.tracker.runs.values()):
            return "Find out what their handler waits for, or restart the process"
        return (
            "Call done() for them, which commits nothing any more, or drop them: the variable of a loop, as in "
            "`for batch in consumer.batches():`, keeps a batch that was skipped until the next one comes. If a handler "
            "hangs, find out what it waits for, or restart the process"
        )
