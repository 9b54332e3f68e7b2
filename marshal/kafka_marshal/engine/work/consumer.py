"""One consumer's logic: where its assignments stand, and when to call the user back.

Each assignment walks the stages of :mod:`.assignment`; this module moves it, :mod:`.positions` as far as its start.
Handing messages out is :mod:`.delivery`; what it works on, a :class:`~kafka_marshal.engine.plane.PartitionSource` says.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from kafka_marshal.engine.effects import Call, Callback, Key, Outbox, Piece, StartFetch, StopFetch, Warn
from kafka_marshal.engine.plane import Loss, Owner, Ownership, PartitionSource
from kafka_marshal.engine.settings import ConsumerSettings, EngineSettings
from kafka_marshal.engine.subscription import Subscription
from kafka_marshal.engine.work.assignment import Assignment, Stage
from kafka_marshal.engine.work.delivery import Delivery
from kafka_marshal.engine.work.positions import Positions
from kafka_marshal.engine.work.pull import GrantedPull, Pull
from kafka_marshal.engine.work.ranges import RangeDelivery
from kafka_marshal.engine.work.tracker import beyond
from rationalizer.limits import MAX_COMMIT_RANGES

__all__ = ["HUNG", "ConsumerEngine"]

#: All is released: the user's threads have not come back.
HUNG = "no handler of this member has come back within handler_timeout"


class ConsumerEngine:
    """All assignments of one subscription. Called under the shell's lock, with our own clock's now (ms)."""

    def __init__(
        self,
        number: int,
        settings: ConsumerSettings,
        subscription: Subscription,
        source: PartitionSource,
        about: EngineSettings,
        outbox: Outbox,
        want_ids: Callable[[], object],
    ) -> None:
        self.number = number
        self.settings = settings
        self.subscription = subscription
        self.source = source
        self.outbox = outbox
        self.assignments: dict[Key, Assignment] = {}
        #: Those of them for which something may come due: all that are not merely handed out. There may be thousands.
        self._pending: dict[Key, Assignment] = {}
        #: The hand-out of ranges; None: messages are handed out.
        self.ranges = RangeDelivery(self) if settings.ranges else None
        self.delivery: Delivery = self.ranges or Delivery(self)
        #: For who asks from one place, and waits for nothing; threads, tasks and lanes have one for each call.
        self.pull = GrantedPull(self) if settings.at_most_once else Pull(self)
        #: Errors to be raised from the user's next call, oldest first.
        self.errors: list[Exception] = []
        self.positions = Positions(self, subscription, about.group_id, want_ids)
        #: Callbacks of the user that were called and have not returned, also those about what is lost by now.
        self.callbacks_running = 0
        self.closing = False
        #: Why all is released and nothing claimed, as of the last step; "": it is not. Read without a lock.
        self.let_go_why = ""
        self._close_at = 0.0
        self._heartbeat_interval_ms = about.heartbeat_interval_ms

    @property
    def at_most_once(self) -> bool:
        """Whether batches are claimed before they are handed out (C13)."""
        return self.settings.at_most_once

    def warn(self, message: str) -> None:
        """Tell people."""
        self.outbox.add(Warn(message))

    def known_stable(self, key: Key) -> int:
        """Stable as our replica knows it."""
        progress = self.source.progress(key)
        return -1 if progress is None else progress.stable

    @property
    def is_moving(self) -> bool:
        """Whether an assignment begins or ends."""
        return bool(self._pending)

    @property
    def parts(self) -> Mapping[Key, Assignment]:
        """The assignments, as the source sees them."""
        return self.assignments

    @property
    def blocked(self) -> Collection[Key]:
        """Left alone until somebody sets their positions (P11)."""
        return self.positions.blocked

    @property
    def owes(self) -> bool:
        """Whether something that was taken away is in hand still (C18)."""
        return bool(self.delivery.evicted)

    def look_after(self, assignment: Assignment) -> None:
        """Something may come due for an assignment: its stage is to be left, or its grant waits for an answer."""
        if self.assignments.get(assignment.key) is assignment:
            self._pending[assignment.key] = assignment

    def enter(self, assignment: Assignment, stage: Stage) -> None:
        assignment.enter(stage)
        if stage is not Stage.ACTIVE:
            self.look_after(assignment)

    def call(self, callback: Callback, assignment: Assignment) -> None:
        if callback in self.settings.callbacks:
            assignment.callbacks_running += 1
            self.callbacks_running += 1
            self.outbox.add(Call(self.number, callback, (assignment.piece,)))

    def take_on(self, key: Key, is_first: bool, want: Callable[[Owner], Ownership]) -> None:
        """A partition is reached for; want: called once with its owner."""
        assignment = Assignment(key, self)
        assignment.first_claim = is_first
        assignment.lease = want(assignment)
        self.assignments[key] = assignment
        self.look_after(assignment)

    def on_refused(self, assignment: Assignment, code: str, now: float) -> None:
        """Somebody else was faster, or holds it still."""
        self.source.drop(assignment.lease)
        self._remove(assignment)

    def on_granted(self, assignment: Assignment, now: float) -> None:
        """The lease is ours: find out where to start (P9)."""
        self.source.changed(assignment.key)
        assignment.first_claim = assignment.first_claim and self.source.is_first(assignment.key)
        self.positions.begin(assignment)
        assignment.is_new = assignment.first_claim and assignment.key not in self.subscription.grown
        self.positions.marks.begun(assignment)
        self.positions.locate(assignment, now)

    def is_asked(self, key: Key, token: int) -> bool:
        """Whether the answer to a look-up is wanted still."""
        return self._of(key, token) is not None

    def _of(self, key: Key, token: int) -> Assignment | None:
        assignment = self.assignments.get(key)
        return assignment if assignment is not None and assignment.epoch == token and not assignment.over else None

    def called(self, piece: Piece, now: float) -> None:
        """A callback of the user has returned (or raised)."""
        self.callbacks_running -= 1
        assignment = self._of(piece.key, piece.token)
        if assignment is None:
            return
        assignment.callbacks_running -= 1
        if assignment.stage is Stage.ASSIGNING and not assignment.callbacks_running:
            assignment.enter(Stage.ACTIVE)
        elif assignment.stage is Stage.REVOKING:
            self.try_finish(assignment, now)

    def revoke(self, assignment: Assignment, why: str, now: float) -> None:
        """Let an assignment go: finish what is in hand, then release with the offset."""
        if assignment.over or assignment.stage is Stage.REVOKING:
            return
        if not assignment.lease.held:
            self.source.drop(assignment.lease)
            self._remove(assignment)
            return
        assignment.releasing = why
        assignment.lease.stop()
        if (
            assignment.stage is Stage.LOCATING
            and assignment.first_claim
            and not (self.closing and now >= self._close_at)
        ):
            return  # released before its start is known, the next holder would begin at the earliest offset (P9)
        self.enter(assignment, Stage.REVOKING)
        if not self.at_most_once:
            self.delivery.recall(assignment, keep=False)
        assignment.buffer.clear()
        if assignment.shown:
            self.outbox.add(StopFetch(self.number, assignment.key))
            self.call(Callback.REVOKE, assignment)
        self.try_finish(assignment, now)

    def let_go(self, key: Key, why: str, now: float) -> None:
        """The source wants a partition back."""
        if (assignment := self.assignments.get(key)) is not None:
            self.revoke(assignment, why, now)

    def reread(self, assignment: Assignment) -> None:
        """Fetch again from what the log says is done."""
        self.positions.reread(assignment)

    def out_of_range(self, key: Key, now: float) -> None:
        """The reader's position is not in the log."""
        self.positions.out_of_range(key, now)

    def look_up(self, assignment: Assignment) -> None:
        """Ask the leader where the partition's log starts and ends."""
        self.positions.look_up(assignment)

    def on_beaten(self, assignment: Assignment, last_offset: int | None, accepted: bool, now: float) -> None:
        """A beat was applied."""
        self.positions.on_beaten(assignment, last_offset, accepted, now)

    def on_answered(self, assignment: Assignment, last_offset: int, accepted: bool, code: str, now: float) -> None:
        """A ClaimingMessages was applied (C12)."""
        self.delivery.grants.applied(assignment, last_offset, accepted, code, now)

    def located(self, key: Key, token: int, low: int, high: int, start: int, now: float) -> None:
        """The leader told the partition's log start and end, and the start offset asked for."""
        if (assignment := self._of(key, token)) is not None:
            self.positions.located(assignment, low, high, start, now)

    def topics_told(self, now: float) -> None:
        """The ids of topics may be known now (P12)."""
        self.positions.topics_told(list(self._pending.values()), now)

    def reached(self, key: Key, end: int, now: float) -> None:
        """The reader has passed everything below end (P6)."""
        if (assignment := self.assignments.get(key)) is not None:
            assignment.reached(end)

    def done_run(self, key: Key, first: int, now: float) -> None:
        """The run that begins at first is done."""
        if (assignment := self.assignments.get(key)) is not None and first in assignment.tracker.runs:
            self.delivery.done_run(assignment.tracker.runs[first], now)

    def log_ends(self, key: Key, log_end: int, now: float) -> None:
        """The reader has heard where a partition's log ends."""
        if (assignment := self.assignments.get(key)) is not None:
            assignment.watch.log_end = log_end
            self.source.measured(assignment.lease, assignment.tracker.done.stable, log_end, now)

    def try_finish(self, assignment: Assignment, now: float) -> None:
        """Release a revoked assignment once its callback has returned and nothing is in hand any more."""
        if assignment.stage is not Stage.REVOKING or assignment.callbacks_running or not assignment.lease.held:
            return
        assignment.tracker.follow()
        if assignment.tracker.runs and not self.closing:
            return
        self._release(assignment, now)

    def _release(self, assignment: Assignment, now: float) -> None:
        assignment.told.ranges_due = now
        self.commit_ranges(assignment, now)
        self.enter(assignment, Stage.RELEASED)
        last_offset = self._unreported(assignment)
        if last_offset is not None or self.known_stable(assignment.key) >= 0:
            self.positions.marks.released(assignment, now)
        self.source.let_go(assignment.lease, last_offset, assignment.releasing, now)

    def _unreported(self, assignment: Assignment) -> int | None:
        """The last_offset for a release: what is done without a gap, or the start (P9), unless the log knows it."""
        done = assignment.done_through()
        if assignment.told.start_beat is not None:
            done = max(done, assignment.told.start_beat)
        return done if done > self.known_stable(assignment.key) else None

    def on_released(self, assignment: Assignment, now: float) -> None:
        """The log shows the release."""
        self._remove(assignment)

    def on_lost(self, assignment: Assignment, reason: str, now: float) -> None:
        """The lease is over, not by our will: purge, tell the user, keep what was done if nobody else holds it."""
        if assignment.over:
            self._remove(assignment)
            return
        was_claiming = assignment.stage is Stage.CLAIMING
        assignment.tracker.follow()
        if assignment.tracker.runs:
            self.delivery.overdue()  # whoever had it in hand may hang: until a thread is back, it works on nothing else
        self.enter(assignment, Stage.LOST)
        if reason == Loss.EVICTED:
            self.delivery.taken_away(assignment, now)
            self.source.evicted(assignment.key, now)
        assignment.buffer.clear()
        self._remove(assignment)
        self.delivery.grants.give_up(assignment, now)
        if was_claiming:
            return
        self.outbox.add(StopFetch(self.number, assignment.key))
        if assignment.shown or reason == Loss.POSITION:
            self.call(Callback.LOST, assignment)
        if reason in (Loss.UNPROVEN, Loss.HANDLER_TIMEOUT, Loss.POSITION, Loss.TOPIC_GONE):
            last_offset = self._unreported(assignment)
            self.source.give_back(assignment.lease, last_offset)

    def _remove(self, assignment: Assignment) -> None:
        if self.assignments.get(assignment.key) is assignment:
            del self.assignments[assignment.key]
            self._pending.pop(assignment.key, None)
            self.positions.stuck.let_go(assignment.key)
        self.source.changed(assignment.key)

    def commit_ranges(self, assignment: Assignment, now: float) -> None:
        """Commit what is done beyond a gap and the log does not know (P6); again after HI if it still does not."""
        assignment.tracker.follow()
        if self.at_most_once or not assignment.tracker.has_islands:
            return
        progress = self.source.progress(assignment.key)
        if progress is None:
            return
        new, told = beyond(assignment.tracker.done.ranges, progress.ranges), assignment.told
        if not new or (new == told.ranges and now < told.ranges_due):
            return
        told.ranges = new
        told.ranges_due = now + assignment.lease.heartbeat_interval_ms
        for place in range(0, len(new), MAX_COMMIT_RANGES):
            self.source.commit(assignment.lease, new[place : place + MAX_COMMIT_RANGES])

    def seek(self, key: Key, offset: int) -> bool:
        """Go forward: everything below offset is done elsewhere. False: not assigned, or backwards."""
        assignment = self.assignments.get(key)
        if assignment is not None and not self.at_most_once:
            self.delivery.recall(assignment)
        if assignment is None or not assignment.shown or assignment.releasing or offset < assignment.position:
            return False
        assignment.tracker.done.through(offset - 1)
        ahead = offset > assignment.buffer.fetch_next
        assignment.buffer.skip_to(offset)
        if ahead and assignment.stage in (Stage.ASSIGNING, Stage.ACTIVE):
            self.outbox.add(StartFetch(self.number, key, offset))
        return True

    def step(self, now: float, silent_cps: frozenset[int]) -> None:
        """Do what is due: pauses, slow handlers, answers that did not come, the policy's wishes.

        silent_cps: paused, or not to be followed any further; elsewhere nothing is due for most assignments.
        """
        timeout = self.settings.handler_timeout_ms
        every = timeout is not None or bool(silent_cps)
        for assignment in list((self.assignments if every else self._pending).values()):
            if assignment.stage is not Stage.ACTIVE or assignment.grant is not None:
                self._step_one(assignment, now)
            else:
                self._pending.pop(assignment.key, None)
                if timeout is not None or assignment.lease.cp in silent_cps:
                    self._step_one(assignment, now)
        if self.closing:
            return
        self.let_go_why = why = self._lets_all_go(now)
        if why:
            for assignment in list(self.assignments.values()):
                self.revoke(assignment, why, now)
            return
        if self.delivery.evicted and self.delivery.has_returned():
            self.source.look_again()
        self.source.step(now)

    def _lets_all_go(self, now: float) -> str:
        """Why all is released and nothing claimed; "": it is not."""
        timeout = self.settings.handler_timeout_ms
        if why := self.source.lets_all_go():
            return why
        if timeout is not None and self.delivery.is_hung(now, timeout):  # until a thread of the user's comes back
            return HUNG
        return ""

    def _step_one(self, assignment: Assignment, now: float) -> None:
        hi, lease = self._heartbeat_interval_ms, assignment.lease
        if assignment.stage is Stage.CLAIMING:
            if self.source.is_claim_over(lease, now):
                self.source.drop(lease)
                self._remove(assignment)
            return
        if assignment.stage is Stage.POSITIONING and now >= assignment.told.start_beat_sent + hi:
            self.positions.beat_start(assignment, now)
        if (
            assignment.grant is not None
            and assignment.grant.accepted is None
            and now >= assignment.grant.sent_at + hi / 2
        ):
            self.delivery.grants.send(assignment, now)
        if assignment.over:
            return
        if assignment.stage is Stage.LOCATING:
            self.positions.look_up_if_due(assignment, now)
        if assignment.stage is Stage.LOCATING and self.closing and now >= self._close_at:
            self.revoke(assignment, assignment.releasing, now)
        if why := self.source.closed(lease.cp, now):
            self.revoke(assignment, why, now)
        timeout = self.settings.handler_timeout_ms
        if timeout is not None and lease.held:
            oldest = assignment.tracker.oldest_in_hand(now)
            if oldest is not None and now >= oldest + timeout:
                self.source.lose(lease, Loss.HANDLER_TIMEOUT, now)
                return
        if assignment.stage is Stage.REVOKING:
            self.try_finish(assignment, now)

    def deadline(self, now: float) -> float:
        """When ``step`` has something to do again."""
        hi = self._heartbeat_interval_ms
        timeout = self.settings.handler_timeout_ms
        times = [] if self.closing or self._lets_all_go(now) else [self.source.deadline]
        for assignment in (self._pending if timeout is None else self.assignments).values():
            if (grant := assignment.grant) is not None and grant.accepted is None:
                times.append(grant.sent_at + hi / 2)
            if assignment.stage is Stage.CLAIMING:
                times.append(self.source.claim_due(assignment.lease, now))
            elif assignment.stage is Stage.LOCATING:
                times += [self._close_at] if self.closing else []
                times += [assignment.watch.look_up_at] if assignment.watch.look_up_at is not None else []
            elif assignment.stage is Stage.POSITIONING:
                times.append(assignment.told.start_beat_sent + hi)
            elif timeout is not None and (oldest := assignment.tracker.oldest_in_hand(now)) is not None:
                times.append(oldest + timeout)
        return min(times, default=float("inf"))

    def close(self, now: float) -> None:
        """Let everything go at once: what is in hand and not done stays not done."""
        self.closing = True
        self._close_at = now + self._heartbeat_interval_ms
        for assignment in list(self.assignments.values()):
            self.delivery.grants.give_up(assignment, now)
            self.revoke(assignment, "the consumer closes", now)

    @property
    def closed(self) -> bool:
        """Everything is released as far as the log has told."""
        return self.closing and not self.assignments
