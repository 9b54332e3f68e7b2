"""The checkpoints of one member: passes what happens to the parts that need it (X11 to X18)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any

from kafka_marshal.engine.effects import CheckpointCompleted, Outbox, SavedPiece
from kafka_marshal.engine.groups.checkpoints.answering import Answering, OneBarrier
from kafka_marshal.engine.groups.checkpoints.beginning import Beginning
from kafka_marshal.engine.groups.checkpoints.cuts import Cutter, Saving
from kafka_marshal.engine.groups.checkpoints.figures import CheckpointFigures
from kafka_marshal.engine.groups.checkpoints.going_back import GoingBack
from kafka_marshal.engine.groups.checkpoints.leaving import Leaving
from kafka_marshal.engine.groups.checkpoints.restoring import Restoring
from kafka_marshal.engine.groups.checkpoints.shown import Shown
from kafka_marshal.engine.groups.checkpoints.story import Story
from kafka_marshal.engine.groups.member import Membership
from kafka_marshal.engine.groups.pieces import HeldPiece
from kafka_marshal.engine.groups.view import GroupView
from kafka_marshal.engine.inputs import given
from kafka_marshal.engine.plane import CheckpointState, Loss, Work
from kafka_marshal.engine.settings import CheckpointOptions
from kafka_marshal.types import Key
from rationalizer import AnswerBarrier, BeginCheckpoint, Outcome, Rollback, World, codes
from rationalizer.groups.checkpoints import Barrier
from rationalizer.wire.wellformed import REFUSED


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
