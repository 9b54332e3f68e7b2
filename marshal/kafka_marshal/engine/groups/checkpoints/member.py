"""The checkpoints of one member: passes what happens to the parts that need it (X11 to X18).

Besides: who begins a checkpoint, and when (X15); a rollback that the program asks for (X8); leaving at a barrier, so
that nothing is repeated (X16). Times: own clock, ms.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import inf
from random import Random
from typing import Any

from kafka_marshal.engine.effects import CheckpointCompleted, Outbox, SavedPiece
from kafka_marshal.engine.groups.checkpoints.answering import Answering, OneBarrier
from kafka_marshal.engine.groups.checkpoints.cuts import Cutter, Saving
from kafka_marshal.engine.groups.checkpoints.restoring import Restoring, Story
from kafka_marshal.engine.groups.checkpoints.shown import CheckpointFigures, Shown
from kafka_marshal.engine.groups.member import Membership
from kafka_marshal.engine.groups.pieces import GroupView, HeldPiece
from kafka_marshal.engine.inputs import given
from kafka_marshal.engine.plane import CheckpointState, Loss, Work
from kafka_marshal.engine.settings import CheckpointOptions
from kafka_marshal.errors import ConfigurationError
from kafka_marshal.types import Key
from rationalizer import AnswerBarrier, BeginCheckpoint, Outcome, Rollback, World, codes
from rationalizer.groups.checkpoints import Barrier
from rationalizer.wire.wellformed import PASSING, REFUSED

#: A hand-over begins this long after the last rebalance, jittered up to twice that, so that one barrier serves several;
#: but at most LONGEST_WAIT_MS after the first revocation that waits.
SETTLE_MS = 100.0
LONGEST_WAIT_MS = 1_000.0

#: Each older member that does not leave goes first by this share of the session.
TURN_SHARE = 1 / 3

#: The first wait after a barrier that was in vain; doubled each time, up to ``every``, or LONGEST_BACK_OFF_MS.
BACK_OFF_MS = 1_000.0
LONGEST_BACK_OFF_MS = 30_000.0


class Beginning:
    """Begins checkpoints for one member."""

    def __init__(
        self,
        member: Membership,
        shown: Shown,
        outbox: Outbox,
        policy: CheckpointOptions,
        rng: Random,
        has_news: Callable[[], bool],
        is_outgrown: Callable[[], bool],
    ) -> None:
        """has_news: whether a cut would say something that the newest checkpoint does not see.

        is_outgrown: whether one of our pieces waits for a cut to be begun again.
        """
        self._member = member
        self._shown = shown
        self._outbox = outbox
        self._policy = policy
        self._rng = rng
        self._has_news = has_news
        self._is_outgrown = is_outgrown
        #: Whether the program has asked for a checkpoint that is not begun, and the barrier that was open then, for
        #: which something was cut before: it is not the one that is asked for.
        self.is_asked: bool = False
        self._is_not = 0
        #: When our record was sent that the log has not answered; None: there is none.
        self._sent_at: float | None = None
        #: The newest checkpoint that is not passing, and when it was complete.
        self._periodic: tuple[int, float] = (0, 0.0)
        self._rebalanced_at: float = 0.0
        self._jitter_ms: float = 0.0
        #: Since when a revocation waits.
        self._revoked_since: float = inf
        #: How many barriers in a row were in vain, and until when we wait for that.
        self._failures: int = 0
        self._wait_until: float = -inf
        #: Before that no periodic one begins: nothing is done, or the last one has ended.
        self._look_at: float = -inf

    # What happens.

    @property
    def is_unanswered(self) -> bool:
        """Whether the program has asked, and the log has not answered (X14)."""
        return self.is_asked and self._sent_at is not None

    def ask(self, has_cut: bool) -> None:
        """The program asks for a checkpoint. has_cut: something was cut for the open barrier before."""
        barrier = self._shown.barrier
        if barrier is None or has_cut:
            self.is_asked, self._is_not = True, 0 if barrier is None else barrier.id

    def rebalanced(self, now: float) -> None:
        """The group has a new generation."""
        self._rebalanced_at, self._jitter_ms = now, SETTLE_MS * (1.0 + self._rng.random())

    def answered(self, is_accepted: bool) -> None:
        """Our BeginCheckpoint was applied: a barrier is open, or another member was faster."""
        self._sent_at = None
        barrier = self._shown.barrier
        if is_accepted or (barrier is not None and barrier.id != self._is_not):
            self.is_asked = False

    def closed(self, barrier: Barrier, is_complete: bool, is_left: bool, now: float) -> None:
        """A barrier is closed: did it do what it was begun for? is_left: not for one of our outgrown pieces."""
        found = self._shown.checkpoints
        group = self._member.group
        is_in_vain = is_left or not is_complete
        if is_complete and found is not None and group is not None:
            waiting = [part for key in found.revoked for part in group.pieces[key[0]][key[1]]]
            is_in_vain = is_left or any(0 <= part.revoked <= barrier.id for part in waiting)
        self._failures = self._failures + 1 if is_in_vain else 0
        self._revoked_since = inf
        if not is_complete and self._policy.every_ms is not None:
            self._look_at = now + self._policy.every_ms  # a periodic one waits for its next turn
        if self._failures:
            longest = self._policy.every_ms or LONGEST_BACK_OFF_MS
            wait_ms = min(longest, BACK_OFF_MS * 2.0 ** min(self._failures - 1, 20))
            self._wait_until = now + wait_ms

    def forget(self) -> None:
        """We are no longer a member."""
        self.is_asked, self._sent_at = False, None
        self._failures, self._wait_until, self._revoked_since = 0, -inf, inf

    # Time.

    def step(self, leaves: bool, now: float) -> None:
        """Begin a checkpoint if it is time. leaves: we want to leave."""
        found = self._shown.checkpoints
        if found is None:
            return
        self._note(now)
        if found.barrier is not None:
            return
        if self._sent_at is not None and now < self._sent_at + self._member.interval_ms:
            return
        if now >= self._wanted_at(leaves, now):
            self._begin(passing=True, now=now)
        elif self.is_asked or now >= self._periodic_at(leaves, now):
            self._begin(passing=False, now=now)

    def _note(self, now: float) -> None:
        found = self._shown.checkpoints
        assert found is not None
        newest = next((each for each in reversed(found.kept) if each.kind != PASSING), None)
        if newest is not None and newest.id != self._periodic[0]:
            self._periodic = (newest.id, now - max(0, self._shown.log_time - newest.log_time))
        if not (found.revoked or self._is_outgrown()):
            self._revoked_since = inf
        elif self._revoked_since == inf:
            self._revoked_since = now

    def _turn_ms(self) -> float:
        return self._shown.rank * TURN_SHARE * self._member.options.session_timeout_ms

    def _wanted_at(self, leaves: bool, now: float) -> float:
        """When a passing one begins: for our leaving, or a hand-over."""
        if self.is_asked:
            return inf  # the one that was asked for does that, too
        if leaves:
            return self._wait_until
        if self._revoked_since == inf:
            return inf
        at = min(self._rebalanced_at + self._jitter_ms, self._revoked_since + LONGEST_WAIT_MS)
        return max(at + self._turn_ms(), self._wait_until)

    def _periodic_at(self, leaves: bool, now: float) -> float:
        """When the next periodic one begins; inf: not now, as nothing is done."""
        if self._policy.every_ms is None or leaves:
            return inf
        at = self._periodic[1] + self._policy.every_ms + self._turn_ms()
        if now < max(at, self._look_at):
            return max(at, self._look_at)
        found = self._shown.checkpoints
        if (found is not None and found.kept[-1].kind == PASSING) or self._has_news():
            return now
        self._look_at = now + self._member.interval_ms
        return inf

    def _begin(self, *, passing: bool, now: float) -> None:
        found = self._shown.checkpoints
        assert found is not None
        self._sent_at = now
        keep = 0 if passing else self._policy.keep
        record = BeginCheckpoint(
            *self._member.settings.ids, found.newest, self._policy.timeout_ms, keep, self._policy.hold
        )
        self._outbox.append(self._member.home, record)

    def deadline(self, leaves: bool, now: float) -> float:
        """When something is due again (own clock, ms)."""
        found = self._shown.checkpoints
        if found is None or found.barrier is not None:
            return inf
        times = [self._wanted_at(leaves, now)]
        if self.is_asked:
            times.append(now)
        if self._policy.every_ms is not None and not leaves:
            times.append(max(self._periodic[1] + self._policy.every_ms + self._turn_ms(), self._look_at))
        again = -inf if self._sent_at is None else self._sent_at + self._member.interval_ms
        return max(min(times), again)


class GoingBack:
    """Appends a Rollback until the group has gone back, by this or by another one."""

    def __init__(self, member: Membership, outbox: Outbox, raise_error: Callable[[Exception], object]) -> None:
        self._member = member
        self._outbox = outbox
        self._raise = raise_error
        #: Where to; 0: the newest checkpoint; None: nowhere.
        self._to: int | None = None
        self._sent_at: float = -inf

    def ask(self, to: int | None, now: float) -> None:
        """All members go back to this checkpoint; None: to the newest."""
        self._to, self._sent_at = to or 0, -inf
        self.step(now)

    def step(self, now: float) -> None:
        """Send it, or send it again: a copy names a generation that is over, and undoes nothing."""
        if self._to is not None and now >= self._sent_at + self._member.interval_ms:
            self._sent_at = now
            ids = self._member.settings.ids
            self._outbox.append(self._member.home, Rollback(*ids, self._member.generation, self._to))

    def applied(self, outcome: Outcome, own: bool, now: float) -> None:
        """A Rollback was applied."""
        if self._to is None:
            return
        if outcome.accepted:
            self._to = None
        elif own and outcome.code == codes.UNKNOWN_CHECKPOINT:
            self._raise(
                ConfigurationError(
                    f"checkpoint {self._to} is not kept: it was retired, undone, or never complete. Nothing was "
                    "changed. consumer.checkpoints.kept lists those that are"
                )
            )
            self._to = None
        elif own:  # the group has moved on since
            self._sent_at = -inf

    def deadline(self) -> float:
        """When ``step`` is due (own clock, ms)."""
        return inf if self._to is None else max(0.0, self._sent_at + self._member.interval_ms)


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


class MemberCheckpoints:
    """A :class:`~kafka_marshal.engine.plane.Checkpointing`."""

    def __init__(
        self,
        member: Membership,
        view: GroupView,
        pieces: dict[Key, HeldPiece],
        worlds: Mapping[int, World],
        work: Work,
        outbox: Outbox,
        policy: CheckpointOptions,
        rng: Random,
        must_go: Callable[[float], bool],
        fail: Callable[[Exception], object],
        errors: list[Exception],
    ) -> None:
        """must_go: this member is to leave. fail: it will not be a member again, for this reason.

        errors: what the user's next calls raise.
        """
        self.figures: CheckpointFigures = CheckpointFigures()
        self._member = member
        self._pieces = pieces
        self._work = work
        self._outbox = outbox
        self.shown: Shown = Shown(member, view, pieces, worlds)
        self.story: Story = Story()
        self.leaving: Leaving = Leaving(member, self.shown, work, must_go, lambda: self.failed is not None)
        self._cutter = Cutter(member, view, work.subscription.topic_id)
        about = member, self.shown, pieces, work, outbox
        self.answering: Answering = Answering(*about, policy, self._cutter, self.figures, self.leaving.leave_by)
        shared = member, self.shown, outbox, policy, rng
        self.beginning: Beginning = Beginning(*shared, self._has_news, self._is_outgrown)
        restores = member, view, self.shown, self.story, pieces, work, outbox, self.figures
        self.restoring: Restoring = Restoring(*restores, self._failed)
        self.going_back: GoingBack = GoingBack(member, outbox, errors.append)
        self._view = view
        self._fail = fail
        #: Why this member can't continue: it leaves without a checkpoint.
        self.failed: Exception | None = None
        #: The barrier that was open after the last record.
        self._barrier: Barrier | None = None
        #: Our slot after the last record.
        self._slot = -1
        #: What we did about the barrier that the present record has closed as complete, with our answer noted.
        self._completed: OneBarrier | None = None
        #: We work with checkpoints, or did until this record.
        self.is_on: bool = False
        #: The log shows that we have left at a barrier.
        self.has_left: bool = False
        #: No barrier is open, nothing is to be restored, nothing is held up.
        self.is_idle: bool = False

    # Views, for display.

    @property
    def drain_seconds(self) -> float:
        return self.figures.drain_seconds

    @property
    def drain_seconds_max(self) -> float:
        return self.figures.drain_seconds_max

    @property
    def lacking(self) -> tuple[int, float, bool]:
        return self.answering.lacking

    @property
    def newest(self) -> int | None:
        found = self.shown.checkpoints
        return None if found is None else found.newest

    @property
    def kept(self) -> Sequence[tuple[int, int, int]]:
        found = self.shown.checkpoints
        return () if found is None else found.rows

    @property
    def is_draining(self) -> bool:
        one = self.answering.now
        return (one is not None and one.drained_at is None) or self.restoring.goes_back

    @property
    def state(self) -> CheckpointState:
        one = self.answering.now
        if self.restoring.goes_back and self._pieces:
            return CheckpointState.CR_RESET_INITIATED
        if not any(piece.is_restored for piece in list(self._pieces.values())):
            return CheckpointState.SUBSCRIBED
        if one is not None and one.drained_at is None and self.shown.answer is None:
            return CheckpointState.DRAINING
        if one is not None and one.record is None and any(cut.waits for cut in one.cuts.values()):
            return CheckpointState.SAVING
        found = self.shown.checkpoints
        if one is not None and one.record is not None and (one.leaves or (found is not None and found.hold)):
            return CheckpointState.REACHED
        return CheckpointState.RESET_COMPLETE if self.restoring.is_resting else CheckpointState.POLLING

    def oldest_cut(self) -> float | None:
        """When (own clock, ms) our piece that was cut or restored longest ago was; None: there is none."""
        return min((piece.cut_at for piece in self._pieces.values() if piece.is_restored), default=None)

    def _has_news(self) -> bool:
        return any(
            piece.is_restored and self._cutter.differs(piece, self._work.cutting.done_of(piece.key))
            for piece in self._pieces.values()
        )

    def _is_outgrown(self) -> bool:
        return any(piece.is_restored and self.shown.is_outgrown(piece) for piece in self._pieces.values())

    # The log.

    def follow(self) -> None:
        """Before we join: know who has what, and which barrier is open; our join may close it."""
        self.story.follow(self._member.group)
        self._barrier = self.shown.barrier

    def applied(self, outcome: Outcome, message: Any, own: bool, now: float) -> None:
        """Our replica applied a record of our group, at home."""
        self.is_on = self.is_on or self._member.takes_checkpoints
        before, after = self._barrier, self.shown.barrier
        self._barrier, self._completed = after, None
        closed: tuple[Barrier, bool] | None = None
        if before is not None and (after is None or after.id != before.id):
            found = self.shown.checkpoints
            closed = before, found is not None and found.find(before.id) is not None
            self._closed(*closed, now)
        self._slot = self.shown.slot
        group = self._member.group
        if self.story.is_behind(group):
            self.beginning.rebalanced(now)
        self.story.applied(group, self.shown.slot, outcome, message, closed)
        if own and outcome.is_a(BeginCheckpoint):
            self.beginning.answered(outcome.accepted)
        if own and outcome.is_a(AnswerBarrier) and outcome.code == codes.PARTIAL:
            self.answering.answered(message.barrier, message.entries, outcome.entries or (), now)
        if outcome.is_a(Rollback):
            self.going_back.applied(outcome, own, now)

    def _closed(self, barrier: Barrier, is_complete: bool, now: float) -> None:
        one = self.answering.closed(barrier.id)
        is_whole = not barrier.waiting and all(each.answer != REFUSED for each in barrier.answers.values())
        is_whole = is_whole and not (one is not None and (one.late or one.is_unsaved))
        self.figures.outcomes["ended" if not is_complete else "complete" if is_whole else "without_some"] += 1
        cuts = () if one is None else one.cuts.values()
        is_left = any(cut.is_outgrown and not cut.begins_again for cut in cuts)
        self.beginning.closed(barrier, is_complete, is_left, now)
        if one is None:
            return
        noted = barrier.answers.get(self._slot)  # what was sent too late, or refused, is in no checkpoint
        if is_complete and noted is not None and noted.answer != REFUSED:
            self._completed = one
            for cut in one.cuts.values():
                if cut.saving is Saving.SAFE:
                    cut.piece.cut_at = cut.began
            self.has_left = one.leaves
            self._outbox.add(CheckpointCompleted(self._work.number, barrier.id))

    def why_lost(self, piece: HeldPiece) -> Loss:
        """Why a piece that is no longer ours, or goes back, is over: handed over at the barrier, or not."""
        one = self._completed
        cut = None if one is None else one.cuts.get(piece.key)
        if one is not None and cut is not None and cut.piece is piece and (cut.is_revoked or one.leaves):
            return Loss.HANDED_OVER
        me, parts = self.shown.slot, self.shown.parts(piece)
        if parts and all(part.owner == me for part in parts):
            self.restoring.goes_back = True
            return Loss.RESET
        return Loss.FENCED

    def has_handed_in(self, piece: HeldPiece) -> bool:
        """We have left at a barrier: whether it has all that is done of this piece."""
        return self.answering.has_handed_in(self._completed or self.answering.now, piece)

    def expelled(self) -> None:
        """We are no longer a member."""
        self.is_on, self.has_left, self._completed = False, False, None
        for part in (self.answering, self.beginning, self.restoring):
            part.forget()

    # Time.

    def step(self, now: float) -> None:
        """Do what is due, but for leaving."""
        leaves = self.leaving.leave_by(now) is not None
        self.going_back.step(now)
        self.beginning.step(leaves, now)
        self.answering.step(now)
        if not leaves:
            self.restoring.step(now)
        self._hold_up(now)

    def _hold_up(self, now: float) -> None:
        """Stop pieces, and resume them (X14)."""
        stops = now < self._view.paused_until(now) or self.beginning.is_unanswered
        was_idle = self.is_idle
        self.is_idle = not stops and self.answering.is_idle and all(x.is_restored for x in self._pieces.values())
        if was_idle and self.is_idle:
            return
        for key, piece in self._pieces.items():
            piece.is_paused = stops
            is_held_up = stops or self.answering.holds_up(piece, now)
            if stops or not is_held_up:
                self._work.cutting.close_gaps(key, False)
            if is_held_up != piece.is_held_up:
                piece.hold_up(is_held_up)
                if is_held_up:
                    self._work.cutting.take_back(key)

    def end_outgrown(self) -> list[HeldPiece]:
        """Pieces to be begun again with all keys that we own by now: the barrier has their cut."""
        one = self._completed
        cuts = () if one is None or one.leaves else one.cuts.values()
        return [cut.piece for cut in cuts if cut.begins_again and self._pieces.get(cut.piece.key) is cut.piece]

    def deadline(self, now: float) -> float:
        """When ``step`` is due again (own clock, ms)."""
        leaves = self.leaving.leave_by(now) is not None
        parts = (self.answering.deadline(now), self.beginning.deadline(leaves, now), self.leaving.deadline(now))
        return min(*parts, self.going_back.deadline())

    # Inputs.

    def came_back(self, key: Key | None, now: float) -> None:
        if not self.is_idle:
            self._go_on(now)

    def _go_on(self, now: float) -> None:
        if not self._member.takes_checkpoints or self._member.leaving:
            return  # on_checkpoint returned after we had left, or were expelled
        self.answering.step(now)
        if self.leaving.leave_by(now) is None:
            self.restoring.step(now)
        self._hold_up(now)

    def close(self, leave_by: float) -> None:
        self.leaving.close_by = min(self.leaving.close_by, leave_by)

    @given
    def returned(self, barrier: int, pieces: Sequence[SavedPiece], error: Exception | None, now: float) -> None:
        self.answering.returned(barrier, pieces, error, now)
        self._go_on(now)

    @given
    def safe(self, barrier: int, pieces: Sequence[SavedPiece], error: Exception | None, now: float) -> None:
        self.answering.safe(barrier, pieces, error, now)
        self._go_on(now)

    @given
    def restored(self, attempt: int, error: Exception | None, is_outdated: bool, now: float) -> None:
        self.restoring.restored(attempt, error, is_outdated, now)

    def _failed(self, error: Exception, now: float) -> None:
        self.failed = error
        self._fail(error)

    @given
    def take(self, now: float) -> None:
        if self._member.takes_checkpoints:
            one = self.answering.now
            self.beginning.ask(has_cut=one is not None and bool(one.cuts))
            self.beginning.step(self.leaving.leave_by(now) is not None, now)
            self._hold_up(now)

    @given
    def go_back(self, to: int | None, now: float) -> None:
        if self._member.takes_checkpoints:
            self.going_back.ask(to, now)
