"""How an assignment ends: let go with its offset once nothing of it is in hand, or lost."""

from __future__ import annotations

from typing import Protocol

from kafka_marshal.engine.effects import Callback, StopFetch
from kafka_marshal.engine.plane import Loss
from kafka_marshal.engine.work.assignment import Assignment, Mover, Stage
from kafka_marshal.engine.work.delivery import Delivery
from kafka_marshal.engine.work.positions import Positions
from kafka_marshal.engine.work.schedule import Schedule
from kafka_marshal.engine.work.tracker import beyond
from rationalizer.limits import MAX_COMMIT_RANGES

__all__ = ["Revocation"]


class Ending(Mover, Protocol):
    """A consumer, as what ends its assignments sees it."""

    @property
    def delivery(self) -> Delivery: ...

    @property
    def positions(self) -> Positions: ...

    @property
    def schedule(self) -> Schedule: ...

    def remove(self, assignment: Assignment) -> None:
        """It is over."""


class Revocation:
    """Ends the assignments of one consumer. Called under the shell's lock."""

    def __init__(self, consumer: Ending) -> None:
        self._consumer = consumer

    def revoke(self, assignment: Assignment, why: str, now: float) -> None:
        """Let an assignment go: finish what is in hand, then release with the offset."""
        if assignment.over or assignment.stage is Stage.REVOKING:
            return
        if not assignment.lease.held:
            self._consumer.source.drop(assignment.lease)
            self._consumer.remove(assignment)
            return
        assignment.releasing = why
        assignment.lease.stop()
        if (
            assignment.stage is Stage.LOCATING
            and assignment.first_claim
            and not (self._consumer.closing and now >= self._consumer.schedule.close_at)
        ):
            return  # released before its start is known, the next holder would begin at the earliest offset (P9)
        self._consumer.enter(assignment, Stage.REVOKING)
        if not self._consumer.at_most_once:
            self._consumer.delivery.recall(assignment, keep=False)
        assignment.buffer.clear()
        if assignment.shown:
            self._consumer.outbox.add(StopFetch(self._consumer.number, assignment.key))
            self._consumer.call(Callback.REVOKE, assignment)
        self.try_finish(assignment, now)

    def lost(self, assignment: Assignment, reason: str, now: float) -> None:
        """The lease is over, not by our will: purge, tell the user, keep what was done if nobody else holds it."""
        if assignment.over:
            self._consumer.remove(assignment)
            return
        was_claiming = assignment.stage is Stage.CLAIMING
        assignment.tracker.follow()
        if assignment.tracker.runs:
            # Whoever had it in hand may hang: until a thread is back, it works on nothing else.
            self._consumer.delivery.overdue()
        self._consumer.enter(assignment, Stage.LOST)
        self._consumer.delivery.in_lanes.recall(assignment, keep=False)
        is_left_behind = reason == Loss.HANDLER_TIMEOUT and self._consumer.delivery.in_lanes.is_active
        if self._consumer.source.taken_away(assignment.key, reason, now) and not is_left_behind:
            self._consumer.delivery.taken_away(assignment, now)
        assignment.buffer.clear()
        self._consumer.remove(assignment)
        self._consumer.delivery.grants.give_up(assignment, now)
        if was_claiming:
            return
        self._consumer.outbox.add(StopFetch(self._consumer.number, assignment.key))
        if assignment.shown or reason == Loss.POSITION:
            self._consumer.call(Callback.LOST, assignment)
        if reason in (Loss.UNPROVEN, Loss.HANDLER_TIMEOUT, Loss.POSITION, Loss.TOPIC_GONE):
            last_offset = self._unreported(assignment)
            self._consumer.source.give_back(assignment.lease, last_offset)

    def try_finish(self, assignment: Assignment, now: float) -> None:
        """Release a revoked assignment once its callback has returned and nothing is in hand any more."""
        if assignment.stage is not Stage.REVOKING or assignment.callbacks_running or not assignment.lease.held:
            return
        assignment.tracker.follow()
        if assignment.tracker.runs and not self._consumer.closing:
            return
        self._release(assignment, now)

    def _release(self, assignment: Assignment, now: float) -> None:
        assignment.told.ranges_due = now
        self.commit_ranges(assignment, now)
        self._consumer.enter(assignment, Stage.RELEASED)
        last_offset = self._unreported(assignment)
        if last_offset is not None or self._consumer.known_stable(assignment.key) >= 0:
            self._consumer.positions.marks.released(assignment, now)
        self._consumer.source.let_go(assignment.lease, last_offset, assignment.releasing, now)

    def _unreported(self, assignment: Assignment) -> int | None:
        """The last_offset for a release: what is done without a gap, or the start (P9), unless the log knows it."""
        done = assignment.done_through()
        if assignment.told.start_beat is not None:
            done = max(done, assignment.told.start_beat)
        return done if done > self._consumer.known_stable(assignment.key) else None

    def commit_ranges(self, assignment: Assignment, now: float) -> None:
        """Commit what is done beyond a gap and the log does not know (P6); again after HI if it still does not."""
        assignment.tracker.follow()
        if self._consumer.at_most_once or not assignment.tracker.has_islands:
            return
        if (keys := assignment.lease.keys) is not None and keys.is_part:
            return  # ranges count for every key, and there are other keys' messages between ours
        progress = self._consumer.source.progress(assignment.key)
        if progress is None:
            return
        new, told = beyond(assignment.tracker.done.ranges, progress.ranges), assignment.told
        if not new or (new == told.ranges and now < told.ranges_due):
            return
        told.ranges = new
        told.ranges_due = now + assignment.lease.heartbeat_interval_ms
        for place in range(0, len(new), MAX_COMMIT_RANGES):
            self._consumer.source.commit(assignment.lease, new[place : place + MAX_COMMIT_RANGES])
