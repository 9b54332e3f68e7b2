"""How an assignment ends: released with its offset once nothing of it is in flight, or lost.

The reason for its release may end before the release: then it stays (``take_back``). A message in flight may hang: then
it is left behind after a timeout (``time_out``), and the next owner gets it again.
"""

from __future__ import annotations

from math import inf
from typing import Final, Protocol

from kafka_marshal.engine.effects import Callback, StopFetch, Warn
from kafka_marshal.engine.plane import HUNG, OVERDUE, Loss
from kafka_marshal.engine.work.assignment import Assignment, Mover, Stage, TakingStep, drop_buffered
from kafka_marshal.engine.work.delivery import Delivery
from kafka_marshal.engine.work.lane import lasting
from kafka_marshal.engine.work.positions import Positions
from kafka_marshal.engine.work.run import first_in_hand
from kafka_marshal.types import Key


class Ending(Mover, Protocol):
    """A consumer, as its schedule and its revocation see it."""

    @property
    def delivery(self) -> Delivery: ...

    @property
    def positions(self) -> Positions: ...

    @property
    def schedule(self) -> Schedule: ...

    @property
    def revocation(self) -> Revocation: ...


class Schedule:
    """The assignments of one consumer for which something may be due. Called under the shell's lock."""

    def __init__(self, consumer: Ending, heartbeat_interval_ms: int) -> None:
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
                assignment.overran(now - timeout, now)

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

    def patience_ms(self, now: float) -> float:
        """How long (ms) a thread waits for messages, or for the log, at most (any thread)."""
        return inf

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
                times += [assignment.settles_until] if now < assignment.settles_until else []
            elif timeout is not None and not assignment.over:  # a released partition can't be lost to a slow handler
                oldest = self._consumer.delivery.in_lanes.oldest(assignment, now)
                times += [] if oldest is None else [oldest + timeout]
        return min(times)


#: Losses after which what was done is reported, with the release.
_GIVES_BACK: Final = (
    *(Loss.UNPROVEN, Loss.HANDLER_TIMEOUT, Loss.POSITION, Loss.KAFKA_OFFSET, Loss.OPEN, Loss.TOPIC_GONE),
)


class Revocation:
    """Ends the assignments of one consumer. Called under the shell's lock."""

    def __init__(self, consumer: Ending) -> None:
        self._consumer = consumer

    def revoke(self, assignment: Assignment, why: str, now: float) -> None:
        """Revoke an assignment: finish what is in flight, then release it with its offset."""
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
            and assignment.origin.is_first
            and not (self._consumer.closing and now >= self._consumer.schedule.close_at)
        ):
            return  # released before its start is known, the next holder would begin at the earliest offset (P9)
        self._consumer.enter(assignment, Stage.REVOKING)
        assignment.told.revoked_at = now
        self._consumer.delivery.recall(assignment)
        drop_buffered(assignment)
        if assignment.shown:
            self._consumer.outbox.add(StopFetch(self._consumer.number, assignment.key))
            self._consumer.call(Callback.REVOKE, assignment)
        self.try_finish(assignment, now)

    def is_moot(self, assignment: Assignment, now: float) -> bool:
        """Whether the reason for its release (a pause, an order, a plan) has ended before the release."""
        consumer, lease = self._consumer, assignment.lease
        if not lease.held or consumer.closing or consumer.schedule.lets_all_go(now):
            return False
        if consumer.source.view.closed(lease.cp, now) or assignment.key in consumer.positions.blocked:
            return False
        return not consumer.source.still_lets_go(lease, assignment.releasing, now)

    def take_back(self, assignment: Assignment, now: float) -> None:
        """Keep it after all: it continues at its position, and on_assign is called again."""
        assignment.releasing = ""
        assignment.lease.resume()
        if assignment.stage is not Stage.REVOKING:
            return  # its start is still being looked up
        assignment.shown, assignment.watch.quiet = False, None
        assignment.reopen()
        self._consumer.positions.assign(assignment)

    def expires_at(self, assignment: Assignment, now: float) -> float:
        """When its release stops waiting for messages in flight (own clock, ms)."""
        settings = self._consumer.settings
        until = assignment.told.revoked_at + settings.revoke_timeout_ms
        if settings.handler_timeout_ms is None:
            return until
        oldest = self._consumer.delivery.in_lanes.oldest(assignment, now)
        return until if oldest is None else min(until, oldest + settings.handler_timeout_ms)

    def time_out(self, assignment: Assignment, now: float) -> None:
        """If its time is up, release it with what is done. What is in flight is left behind; its done has no effect."""
        if assignment.over or now < self.expires_at(assignment, now):
            return
        waited = lasting(now - assignment.told.revoked_at)
        topic, partition = assignment.key
        text = f"{topic} [{partition}] is released ({assignment.releasing}) after {waited}, though "
        assignment.tracker.follow()
        found = first_in_hand(assignment.tracker.runs)
        if found is None and assignment.taking.step is TakingStep.OPENING:
            text += (
                "its transactional producer has not begun. Nothing is lost: if it still begins, it fences the next "
                "owner's once, and that takes over again. Check that the brokers run"
            )
        elif found is None:
            text += "on_revoke has not returned. Nothing is lost. Let it return within revoke_timeout"
        else:
            (offset, key), in_hand, again = found, assignment.tracker.in_hand, assignment.comes_again
            text += f"offset {offset} (key {key!r}) is "
            if self._consumer.delivery.in_lanes.purgatory.has(assignment, offset):
                text += (
                    f"handled and its transaction is not committed; in flight: {in_hand}. Unless Kafka commits it "
                    f"before, {again}. Check that the brokers run"
                )
            else:
                text += (
                    f"not done; in hand: {in_hand}. What is done of it from now on counts for nothing: {again}. Find "
                    "out what its handler waits for; if it needs longer, raise revoke_timeout (or handler_timeout)"
                )
        self._consumer.outbox.add(Warn(text, is_error=True))
        if self._consumer.settings.handler_timeout_ms is not None:
            self._consumer.delivery.overdue()
        assignment.releasing = OVERDUE
        self._consumer.delivery.grants.give_up(assignment, now)
        if not assignment.over:
            self._release(assignment, now)
        if assignment.shown:
            self._consumer.call(Callback.LOST, assignment)

    def lost(self, assignment: Assignment, reason: str, now: float) -> None:
        """The lease ended without our release: purge, call on_lost, commit what is done if no other member holds it."""
        if assignment.over:
            self._consumer.remove(assignment)
            return
        was_claiming = assignment.stage is Stage.CLAIMING
        assignment.tracker.follow()
        if assignment.tracker.runs:
            # The handler of messages in flight may hang: ``is_hung`` then releases all until a thread comes back.
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
        if assignment.shown or reason in (Loss.POSITION, Loss.KAFKA_OFFSET, Loss.OPEN):
            self._consumer.call(Callback.REVOKE if reason == Loss.HANDED_OVER else Callback.LOST, assignment)
        if reason in _GIVES_BACK:
            if reason == Loss.POSITION or assignment.told.has_come:
                self._consumer.positions.marks.ahead(assignment, now, again=True)
            # It counts, too, unless another has the partition.
            self._consumer.settlements.send(assignment, now, ends=reason != Loss.HANDLER_TIMEOUT)
            last_offset = self._unreported(assignment)
            self._consumer.source.reports.give_back(assignment.lease, last_offset)

    def try_finish(self, assignment: Assignment, now: float) -> None:
        """Release a revoked assignment once its callback has returned and nothing is in flight."""
        if assignment.stage is not Stage.REVOKING or assignment.callbacks_running or not assignment.lease.held:
            return
        assignment.tracker.follow()
        if assignment.tracker.runs and not self._consumer.closing:
            return
        if assignment.taking.step is TakingStep.OPENING:
            return  # a producer that begins after the release would fence the next owner's
        if assignment.tracker.runs:
            self._consumer.settlements.note(assignment, ends=True)
        if assignment.may_go(now):
            self._release(assignment, now)

    def _release(self, assignment: Assignment, now: float) -> None:
        assignment.hand_in()
        assignment.told.ranges_due = now
        if self._unreported(assignment) is not None or self._consumer.known_stable(assignment.key) >= 0:
            self._consumer.positions.marks.ahead(assignment, now)
        self._consumer.settlements.send(assignment, now, ends=True)
        assignment.commit_ranges(now)
        self._consumer.enter(assignment, Stage.RELEASED)
        assignment.buffer.clear()
        last_offset = self._unreported(assignment)
        self._consumer.source.reports.let_go(assignment.lease, last_offset, assignment.releasing, now)

    def _unreported(self, assignment: Assignment) -> int | None:
        """The last_offset for a release: what is done without a gap, or the start (P9); None: the log knows it."""
        done = assignment.done_through()
        if assignment.told.start_beat is not None:
            done = max(done, assignment.told.start_beat)
        return done if done > self._consumer.known_stable(assignment.key) else None
