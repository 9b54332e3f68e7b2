"""Partitions of one consumer whose group takes checkpoints: what of them is in flight, and how they begin again.

The decisions are the group's (:mod:`kafka_marshal.engine.groups.checkpoints`).
"""

from __future__ import annotations

from typing import Protocol

from kafka_marshal.engine.work.assignment import Assignment, Mover, Stage
from kafka_marshal.engine.work.delivery import Delivery
from kafka_marshal.types import Key
from rationalizer import Progress


class Cut(Mover, Protocol):
    """A consumer, as Cutting sees it."""

    @property
    def delivery(self) -> Delivery: ...


class Cutting:
    """A :class:`~kafka_marshal.engine.plane.Cuttable`. Called under the shell's lock."""

    def __init__(self, consumer: Cut) -> None:
        self._consumer = consumer

    def _of(self, key: Key) -> Assignment | None:
        assignment = self._consumer.assignments.get(key)
        return None if assignment is None or assignment.over else assignment

    def take_back(self, key: Key) -> None:
        """Take back what was handed out and no thread has; messages in lanes wait there, with their tries."""
        if (assignment := self._of(key)) is not None:
            self._consumer.delivery.recall(assignment, lanes=False)

    def close_gaps(self, key: Key, is_on: bool) -> None:
        """Handle what waits in lanes below something that is done, or with a handler, though nothing else begins."""
        if self._of(key) is not None:
            self._consumer.delivery.in_lanes.finish(key, is_on)

    def is_in_hand(self, key: Key) -> bool:
        """Whether something of it was handed out and is not done; what waits in a lane for its try is not."""
        if (assignment := self._of(key)) is None:
            return False
        # First: what a handler ends meanwhile is missing in the second number, until it is known here as done.
        waiting = self._consumer.delivery.in_lanes.waiting(assignment)
        assignment.tracker.follow()
        return assignment.tracker.in_hand > waiting

    def is_in_doubt(self, key: Key) -> bool:
        """Whether a loop was left with a message of it, or one was dropped, and it has not come again."""
        assignment = self._of(key)
        return assignment is not None and assignment.tracker.doubt > assignment.tracker.done.stable

    def done_of(self, key: Key) -> Progress:
        """What is done of it."""
        assignment = self._consumer.assignments[key]
        assignment.tracker.follow()
        return assignment.tracker.done

    def awaits_restore(self, key: Key) -> bool:
        """Whether it is where its state is to be restored, and nothing of before is in flight."""
        assignment = self._of(key)
        return assignment is not None and assignment.stage is Stage.RESTORING and not self._is_before(key)

    def _is_before(self, key: Key) -> bool:
        """Whether something that was handed out under an earlier holding is still in flight."""
        delivery = self._consumer.delivery
        delivery.owed.has_returned()
        return any(x.key == key for x in delivery.owed) or delivery.in_lanes.is_with_handler(key)

    def begin(self, key: Key) -> int:
        """Begin with the progress in the log, at least at the log start. Returns the next offset."""
        assignment = self._consumer.assignments[key]
        self._consumer.positions.begin(assignment)
        start = assignment.origin.log_start
        if start > assignment.buffer.fetch_next:
            assignment.tracker.done.through(start - 1)
            assignment.buffer.go_on_at(start)
        return assignment.buffer.fetch_next

    def restored(self, key: Key) -> None:
        """Its state is restored: deliver."""
        assignment = self._of(key)
        if assignment is not None and assignment.stage is Stage.RESTORING:
            self._consumer.positions.assign(assignment)

    def has_handed_out(self, key: Key, stable: int) -> bool:
        """Whether something of it was handed out since it was at this offset."""
        assignment = self._of(key)
        return assignment is not None and (bool(assignment.tracker.runs) or assignment.tracker.done.stable > stable)
