"""Leaving at a barrier, so that nothing is repeated (X16). Times: own clock, ms."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

from kafka_marshal.engine.groups.checkpoints.shown import Shown
from kafka_marshal.engine.groups.member import Membership
from kafka_marshal.engine.plane import Work


class Leaving:
    """When one member leaves, and how."""

    def __init__(
        self,
        member: Membership,
        shown: Shown,
        work: Work,
        must_go: Callable[[float], bool],
        is_over: Callable[[], bool],
    ) -> None:
        """must_go: it closes, is asked to hand over, or sees a pause. is_over: it ends, as its state is not known."""
        self._member = member
        self._shown = shown
        self._work = work
        self._must_go = must_go
        self._is_over = is_over
        #: Until when a closing consumer may take.
        self.close_by: float = inf

    def leave_by(self, now: float) -> float | None:
        """Until when this member may take to leave; None: it does not want to."""
        if not self._must_go(now):
            return None
        return self.close_by if self._work.closing else inf

    def is_due(self, now: float) -> bool:
        """Whether to append LeaveGroup now: there is nothing to hand over, or no time left, or no state to save."""
        if self._is_over() or self._work.is_hung:
            return True
        by = self.leave_by(now)
        if by is None or self._shown.is_leaving:
            return False
        return now >= by or not (self._shown.owns or self._shown.is_target)

    def has_left(self, now: float) -> bool:
        """Whether the log shows enough: the next record of another member completes the barrier at which we leave."""
        by, barrier, found = self.leave_by(now), self._shown.barrier, self._shown.checkpoints
        if by is None or barrier is None or found is None or not self._shown.is_leaving:
            return False
        return now >= by or (not found.hold and barrier.is_over(self._shown.log_time))

    def deadline(self, now: float) -> float:
        """When something is due (own clock, ms)."""
        by = self.leave_by(now)
        return inf if by is None else by
