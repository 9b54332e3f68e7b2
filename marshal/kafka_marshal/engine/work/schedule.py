"""What is due for one consumer, and when."""

from __future__ import annotations

from typing import Protocol

from kafka_marshal.engine.plane import HUNG, Loss
from kafka_marshal.engine.work.assignment import Assignment, Mover, Stage
from kafka_marshal.engine.work.delivery import Delivery
from kafka_marshal.engine.work.positions import Positions
from kafka_marshal.types import Key


class Timed(Mover, Protocol):
    """A consumer, as its schedule sees it."""

    @property
    def delivery(self) -> Delivery: ...

    @property
    def positions(self) -> Positions: ...

    def remove(self, assignment: Assignment) -> None:
        """Forget an assignment that is over."""


class Schedule:
    """The assignments of one consumer for which something may be due. Called under the shell's lock."""

    def __init__(self, consumer: Timed, heartbeat_interval_ms: int) -> None:
        self._consumer = consumer
        self._heartbeat_interval_ms = heartbeat_interval_ms
        #: Assignments with more to do than handing messages out; a consumer may have thousands of others.
        self.pending: dict[Key, Assignment] = {}
        #: Why everything is released and nothing claimed, at the last step; "": it is not. Read without a lock.
        self.let_go_why: str = ""
        #: When a closing consumer stops waiting for the starts of its assignments.
        self.close_at: float = 0.0

    def look_after(self, assignment: Assignment) -> None:
        """Check an assignment at each step: its stage is temporary, or its grant waits for an answer."""
        if self._consumer.assignments.get(assignment.key) is assignment:
            self.pending[assignment.key] = assignment

    @property
    def is_moving(self) -> bool:
        """Whether an assignment begins or ends, or is to be cut."""
        checkpoints = self._consumer.source.checkpoints
        return bool(self.pending) or (checkpoints is not None and checkpoints.is_draining)

    def closes(self, now: float) -> None:
        """The consumer begins to close."""
        self.close_at = now + self._heartbeat_interval_ms

    def step(self, now: float, silent_cps: frozenset[int]) -> None:
        """Do what is due: pauses, slow handlers, missing answers, and what the policy claims or releases.

        silent_cps: coordination partitions that are paused or can't be followed any further. In all others, most
        assignments have nothing due.
        """
        self._consumer.delivery.end_turns(now)
        timeout = self._consumer.settings.handler_timeout_ms
        every = timeout is not None or bool(silent_cps)
        for assignment in list((self._consumer.assignments if every else self.pending).values()):
            if assignment.stage is not Stage.ACTIVE or assignment.grant is not None or assignment.taking.step:
                self._step_one(assignment, now)
            else:
                self.pending.pop(assignment.key, None)
                if timeout is not None or assignment.lease.cp in silent_cps:
                    self._step_one(assignment, now)
        if self._consumer.closing:
            return
        self.let_go_why = why = self.lets_all_go(now)
        if why and self._consumer.source.takes_checkpoints:
            return  # it leaves as a whole, at a barrier
        if why:
            for assignment in list(self._consumer.assignments.values()):
                self._consumer.revocation.revoke(assignment, why, now)
            return
        if self._consumer.delivery.owed and self._consumer.delivery.owed.has_returned():
            self._consumer.source.look_again()
        self._consumer.source.step(now)

    def lets_all_go(self, now: float) -> str:
        """Why everything is released and nothing claimed; "": it is not."""
        timeout = self._consumer.settings.handler_timeout_ms
        if why := self._consumer.source.lets_all_go():
            return why
        is_hung = timeout is not None and self._consumer.delivery.is_hung(now, timeout)
        return HUNG if is_hung else ""  # until one of the user's threads comes back

    def _step_one(self, assignment: Assignment, now: float) -> None:
        hi, lease = self._heartbeat_interval_ms, assignment.lease
        if assignment.stage is Stage.CLAIMING:
            if now >= lease.claim_expires or self._consumer.source.view.is_stopped(lease.cp):
                self._consumer.source.drop(lease)
                self._consumer.remove(assignment)
            return
        if assignment.stage is Stage.POSITIONING and now >= assignment.told.start_beat_sent + hi:
            self._consumer.positions.beat_start(assignment, now)
        if (
            assignment.grant is not None
            and assignment.grant.accepted is None
            and now >= assignment.grant.sent_at + hi / 2
        ):
            self._consumer.delivery.grants.send(assignment, now)
        if assignment.taking.step is not None:
            self._consumer.positions.take_overs.step(assignment, now)
        if assignment.over:
            return
        if assignment.stage is Stage.LOCATING:
            self._consumer.positions.look_up_if_due(assignment, now)
        if not self._consumer.source.takes_checkpoints and self._ends(assignment, now):
            return
        timeout = self._consumer.settings.handler_timeout_ms
        if timeout is not None and lease.held:
            oldest = self._consumer.delivery.in_lanes.oldest(assignment, now)
            if oldest is not None and now >= oldest + timeout:
                self._overran(assignment, now - timeout, now)

    def _overran(self, assignment: Assignment, before: float, now: float) -> None:
        """A handler has had a message since before that time (own clock, ms), longer than handler_timeout."""
        self._consumer.source.lose(assignment.lease, Loss.HANDLER_TIMEOUT, now)

    def _ends(self, assignment: Assignment, now: float) -> bool:
        """Release it, if it is to be. Returns whether it is being released."""
        if assignment.stage is Stage.LOCATING and self._consumer.closing and now >= self.close_at:
            self._consumer.revocation.revoke(assignment, assignment.releasing, now)
        if why := self._consumer.source.view.closed(assignment.lease.cp, now):
            self._consumer.revocation.revoke(assignment, why, now)
        elif assignment.releasing and self._consumer.revocation.is_moot(assignment, now):
            self._consumer.revocation.take_back(assignment, now)
        if assignment.stage is not Stage.REVOKING:
            return False
        self._consumer.revocation.try_finish(assignment, now)
        self._consumer.revocation.time_out(assignment, now)
        return True

    @property
    def awaits_batch(self) -> bool:
        """Whether the log is to show a batch that was asked for."""
        return False

    @property
    def harmless_step_ms(self) -> float:
        """To read the log in steps of this length delays nothing now."""
        return 0.0

    def deadline(self, now: float) -> float:
        """When ``step`` must run next (own clock, ms)."""
        hi = self._heartbeat_interval_ms
        timeout = self._consumer.settings.handler_timeout_ms
        times = [self._consumer.source.deadline(now)]
        for assignment in (self.pending if timeout is None else self._consumer.assignments).values():
            if (grant := assignment.grant) is not None and grant.accepted is None:
                times.append(grant.sent_at + hi / 2)
            if assignment.taking.step is not None and assignment.lease.held:
                times.append(assignment.taking.due)
            if assignment.stage is Stage.CLAIMING:
                times.append(assignment.lease.claim_expires)
            elif assignment.stage is Stage.LOCATING:
                waits = self._consumer.closing and not self._consumer.source.takes_checkpoints
                times += [self.close_at] if waits else []
                times += [assignment.watch.look_up_at] if assignment.watch.look_up_at is not None else []
            elif assignment.stage is Stage.POSITIONING:
                times.append(assignment.told.start_beat_sent + hi)
            elif assignment.stage is Stage.REVOKING:
                revocation = self._consumer.revocation
                times += [revocation.expires_at(assignment, now)] if assignment.lease.held else []
                if now < (until := revocation.settles_until(assignment)):
                    times.append(until)
            elif timeout is not None and not assignment.over:  # a released partition can't be lost to a slow handler
                oldest = self._consumer.delivery.in_lanes.oldest(assignment, now)
                times += [] if oldest is None else [oldest + timeout]
        return min(times)
