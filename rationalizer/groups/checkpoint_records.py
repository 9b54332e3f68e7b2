"""The records about checkpoints (section 7): what each is judged by, and what it does (X4, X5, X8, X9)."""

from __future__ import annotations

from rationalizer import codes
from rationalizer.groups import barriers
from rationalizer.groups.checkpoints import Answer, Checkpoints
from rationalizer.groups.commits import Entry
from rationalizer.groups.group import Group, Member
from rationalizer.groups.judging import Judging, close, of_entries
from rationalizer.groups.witness import NOBODY_GOES, bury
from rationalizer.plane import ApplyContext, Verdict
from rationalizer.wire.unpacking import Message
from rationalizer.wire.wellformed import END, PIN, PINNED, RETIRE


class CheckpointRecords(Judging):
    """Judges types 23, 24, 25 and 27."""

    __slots__ = ()

    def _begin_checkpoint(self, message: Message, context: ApplyContext) -> Verdict:
        """X4: the first checkpoint, or a barrier."""
        *_, after, timeout_ms, keep, hold = message
        group = self.groups.get(message[4])
        checkpoints = None if group is None else group.checkpoints
        if group is None or after != (0 if checkpoints is None else checkpoints.newest):
            return Verdict(codes.UNKNOWN_CHECKPOINT, False)
        if checkpoints is None:
            if group.members:
                return Verdict(codes.GROUP_ACTIVE, False)
            if group.hole_count():
                return Verdict(codes.WRONG_MODE, False)
            barriers.start(group, context.offset, context.log_time, keep, hold)
            return Verdict(codes.OK, True)
        if checkpoints.barrier is not None:
            return Verdict(codes.BARRIER_OPEN, False)
        barriers.begin(checkpoints, context.offset, context.log_time, timeout_ms, keep)
        if barriers.is_due(checkpoints):
            close(group, barriers.closing_of(checkpoints), context)
        return Verdict(codes.OK, True)

    def _answer_barrier(self, message: Message, context: ApplyContext) -> Verdict:
        """X5: what it says comes before the overdue go."""
        *_, member_id, generation, barrier, answer, entries = message
        found = self._sender(message, member_id, context)
        if found is None:
            return Verdict(codes.UNKNOWN_CONSUMER, False)
        group, sender, witness = found
        if generation > group.generation:
            return Verdict(codes.ILLEGAL_GENERATION, False)
        others = NOBODY_GOES if witness.closing is None else close(group, witness.closing, context)
        verdict = _answered(group, sender, barrier, Answer(generation, answer), entries)
        checkpoints = group.checkpoints
        if verdict.code == codes.OK and checkpoints is not None and barriers.is_due(checkpoints):
            others |= close(group, barriers.closing_of(checkpoints), context)
        gone = witness.gone - others
        bury(group, gone, witness.silent, context)
        if sender.slot not in others:
            group.beat(sender, context.log_time)
        if gone or others:
            self._rebalance(group, context, gone, others)
        return verdict

    def _rollback(self, message: Message, context: ApplyContext) -> Verdict:
        """X8: all go back."""
        *_, generation, checkpoint = message
        group = self.groups.get(message[4])
        if group is None or group.checkpoints is None:
            return Verdict(codes.UNKNOWN_CHECKPOINT, False)
        if generation != group.generation:
            return Verdict(codes.ILLEGAL_GENERATION, False)
        target = checkpoint or group.checkpoints.newest
        if group.checkpoints.find(target) is None:
            return Verdict(codes.UNKNOWN_CHECKPOINT, False)
        barriers.go_back(group, target)
        group.checkpoints.went_back_to = 0 if group.members else target
        self._rebalance(group, context, frozenset(group.members))
        return Verdict(codes.OK, True)

    def _keep_checkpoint(self, message: Message, context: ApplyContext) -> Verdict:
        """X9: retire or pin one, or take none any more."""
        *_, checkpoint, action = message
        group = self.groups.get(message[4])
        checkpoints = None if group is None else group.checkpoints
        if group is None or checkpoints is None:
            return Verdict(codes.UNKNOWN_CHECKPOINT, False)
        refusal = _keep_refusal(group, checkpoints, checkpoint, action)
        if refusal is not None:
            return Verdict(refusal, False)
        if action == RETIRE:
            checkpoints.drop(checkpoint)
        elif action == PIN:
            checkpoints.pin(checkpoint)
        else:
            barriers.end(group)
        return Verdict(codes.OK, True)


def _answered(group: Group, sender: Member, number: int, answer: Answer, entries: tuple[Entry, ...]) -> Verdict:
    """X5, after the checks of G10: it is noted, or nothing changes."""
    checkpoints = group.checkpoints
    barrier = None if checkpoints is None else checkpoints.barrier
    if checkpoints is None or barrier is None or barrier.id != number:
        return Verdict(codes.NO_SUCH_BARRIER, True)
    if sender.slot in barrier.answers:
        return Verdict(codes.ALREADY_ANSWERED, True)
    cuts = barriers.Cuts(group, sender.slot, answer.generation, barrier)
    verdict = of_entries(tuple(map(cuts.commit, entries)))
    if verdict.code == codes.OK:
        checkpoints.note(sender.slot, answer, cuts.versions)
    return verdict


def _keep_refusal(group: Group, checkpoints: Checkpoints, checkpoint: int, action: int) -> str | None:
    """X9's checks."""
    kept = checkpoints.find(checkpoint)
    if kept is None:
        return codes.UNKNOWN_CHECKPOINT
    is_newest = checkpoint == checkpoints.newest
    if action == RETIRE and is_newest:
        return codes.NEWEST_CHECKPOINT
    if action == PIN and kept.kind != PINNED and not checkpoints.can_pin():
        return codes.TOO_MANY_CHECKPOINTS
    if action == END:
        if not is_newest:
            return codes.UNKNOWN_CHECKPOINT
        if group.members:
            return codes.GROUP_ACTIVE
    return None
