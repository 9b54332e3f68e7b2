"""Planted bugs in members that take checkpoints (X13 to X18): the states of counting workers show them."""

from __future__ import annotations

from tests.mutants.mutation import Mutation

_STOPPED = "return one.leaves or self._is_hold or cut.is_revoked or cut.is_outgrown"
_STATES = "attempt.states = {piece.key: self._shown.states(piece) for piece in pieces}"

CHECKPOINT_MEMBERS: tuple[Mutation, ...] = (
    # Cuts.
    Mutation(
        "a piece is cut with messages in flight",
        "Answering._cut",
        "if self._work.cutting.is_in_hand(key) or not can_be_named:",
        "if not can_be_named:",
        "X13",
    ),
    Mutation(
        "a piece is cut that was not restored",
        "Answering._to_cut",
        "if piece.key in one.cuts or piece.key in one.late or not (piece.held and piece.is_restored):",
        "if piece.key in one.cuts or piece.key in one.late or not piece.held:",
        "X13",
    ),
    Mutation(
        "a piece goes on after the cut with which it moves",
        "Answering.holds_up",
        _STOPPED,
        "return one.leaves or self._is_hold",
        "X14",
    ),
    Mutation(
        "pieces of a group that holds go on after their cuts",
        "Answering.holds_up",
        _STOPPED,
        _STOPPED.replace("self._is_hold or ", ""),
        "X14",
    ),
    Mutation(
        "a share that closes its gaps begins other messages, too",
        "Partition.may_begin",
        "until = lease.proven_until if is_to_finish else lease.hand_out_until",
        "until = lease.proven_until",
        "X14",
    ),
    # Answers.
    Mutation(
        "the answer goes before the states are safe",
        "Answering._is_due",
        "return now >= one.answer_by or self._is_nearly_over(one) or not any(cut.waits for cut in one.cuts.values())",
        "return True",
        "X13",
    ),
    Mutation(
        "a cut is named whose state was not saved",
        "Answering._answer",
        "named = [cut for cut in cuts if cut.saving is Saving.SAFE and cut.entries]",
        "named = [cut for cut in cuts if cut.entries]",
        "X13",
    ),
    Mutation(
        "a member that has left answers",
        "MemberCheckpoints._go_on",
        "if not self._member.takes_checkpoints or self._member.leaving:",
        "if not self._member:",
        "X16",
    ),
    Mutation(
        "what is done beyond a gap is not named",
        "Cutter.entries",
        "entries += [CommitEntry(*place, ranges=tuple(chunk)) for chunk in chunks]",
        "entries += []",
        "X13",
    ),
    Mutation(
        "the answer has the generation in which it is sent",
        "Answering._record",
        "ids = (*self._member.settings.ids, self._member.member_id, one.generation or 0, one.id)",
        "ids = (*self._member.settings.ids, self._member.member_id, self._member.generation, one.id)",
        "X13",
    ),
    Mutation(
        "a leaver's answer does not say so",
        "Answering._fix",
        "one.generation, one.leaves = self._member.generation, self._leave_by(now) is not None",
        "one.generation, one.leaves = self._member.generation, False",
        "X16",
    ),
    Mutation(
        "a share is not begun again when the member owns more",
        "MemberCheckpoints.end_outgrown",
        "return [cut.piece for cut in cuts if cut.begins_again and self._pieces.get(cut.piece.key) is cut.piece]",
        "return []",
        "X13",
    ),
    Mutation(
        "no hand-over is begun",
        "Beginning._wanted_at",
        "if self._revoked_since == inf:",
        "if self._revoked_since:",
        "X15",
    ),
    Mutation(
        "on_completed is called also without an answer",
        "MemberCheckpoints._closed",
        "if is_complete and noted is not None and noted.answer != REFUSED:",
        "if is_complete:",
        "X13",
    ),
    # Restoring.
    Mutation(
        "a loss is called a hand-over",
        "Story._why",
        'return "lost" if "lost" in found else "handed_over"',
        'return "handed_over"',
        "X17",
    ),
    Mutation(
        "on_restore gets the next position but one",
        "Restoring._asked",
        "position = self._work.cutting.begin(piece.key)",
        "position = self._work.cutting.begin(piece.key) + 1",
        "X17",
    ),
    Mutation(
        "a piece is delivered before it is restored",
        "Holdings._take_up",
        "piece.is_restored = not self._member.takes_checkpoints",
        "piece.is_restored = True",
        "X17",
    ),
    Mutation(
        "a piece is restored with messages of before in flight",
        "Cutting.awaits_restore",
        "return assignment is not None and assignment.stage is Stage.RESTORING and not self._is_before(key)",
        "return assignment is not None and assignment.stage is Stage.RESTORING",
        "X17",
    ),
    Mutation(
        "the state of the version before is restored",
        "Restoring._call",
        _STATES,
        "attempt.states = {x.key: within(tuple([*group.versions(x.key)[-2:], *[None]][0].states"
        " if group.versions(x.key) else ()), x.span) for x in pieces}",
        "X17",
    ),
    Mutation(
        "states that older checkpoints name are not needed",
        "Shown.needed",
        "return frozenset(state for version in versions for _, _, state in version.states if state)",
        "return frozenset(state for version in versions[-1:] for _, _, state in version.states if state)",
        "X18",
    ),
)
