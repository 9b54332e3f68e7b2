"""Planted bugs in checkpoints: who closes a barrier and how, versions, hand-over, losses, going back, positions."""

from __future__ import annotations

from tests.mutants.mutation import Mutation

_TAKES_NONE = "if group is None or after != (0 if checkpoints is None else checkpoints.newest):"
_CLOSES = "if not checkpoints.barrier.is_over(log_time) and checkpoints.owners.isdisjoint(gone | leaving):"
_BURIES = "buries = len(late) == len(group.members) and not checkpoints.owners.isdisjoint(late)"
_DUE = "return barrier.waiting == 0 or (checkpoints.hold and barrier.reached < answered)"
_WANTED = "wanted = len(checkpoints.owners) if checkpoints.hold else 1"
_LEFT = "left = [slot for slot, each in barrier.answers.items() if each.answer == REACHED_AND_LEAVES]"
_KIND = "kind = PASSING if barrier.passing else PERIODIC"
_PASSING = "for each in [each for each in self.kept[:-1] if each is passing or each.id in undone]:"
_PERIODIC = "periodic = [each.id for each in self.kept if each.kind == PERIODIC]"
_TRIMMED = "for checkpoint in periodic[: max(0, len(periodic) - self.keep)]:"
_OLDEST = "self.drop(next((each.id for each in older if each.kind == PERIODIC), older[0].id))"
_PINNABLE = "if action == PIN and kept.kind != PINNED and not checkpoints.can_pin():"
_LOST = "if checkpoints is not None and checkpoints.hold and lost:"
_ENTRY = "if action != COMMIT or self._group.kept(topic, partition) is None:"
_REPLACED = "if sender is None or sender.instance_id == instance_id or sender.joined >= seen:"

CHECKPOINTS: tuple[Mutation, ...] = (
    # Beginning (X4).
    Mutation("whoever begins need not know the newest", "_begin_checkpoint", _TAKES_NONE, "if group is None:", "X4"),
    Mutation("members are there at the first checkpoint", "_begin_checkpoint", "if group.members:", "if False:", "X4"),
    Mutation(
        "two barriers are open", "_begin_checkpoint", "if checkpoints.barrier is not None:", "if after == 0:", "X4"
    ),
    Mutation(
        "the first checkpoint is periodic",
        "start",
        "checkpoints.complete(Kept(offset, log_time, PINNED, versions))",
        "checkpoints.complete(Kept(offset, log_time, PERIODIC, versions))",
        "X4",
    ),
    Mutation(
        "keep may be none",
        "start",
        "checkpoints = group.checkpoints = Checkpoints(max(1, keep), hold)",
        "checkpoints = group.checkpoints = Checkpoints(keep, hold)",
        "X4",
    ),
    Mutation("a passing barrier sets keep", "begin", "if keep:", "if keep is not None:", "X4"),
    Mutation(
        "nobody owns anything, and the barrier waits",
        "_begin_checkpoint",
        "if barriers.is_due(checkpoints):",
        "if keep > 64:",
        "X6",
    ),
    # The end of a barrier (X3, X6).
    Mutation(
        "a barrier is over a millisecond early",
        "is_over",
        "return log_time - self.opened > self.timeout_ms",
        "return log_time - self.opened >= self.timeout_ms",
        "X3",
    ),
    Mutation(
        "a barrier is never over",
        "witness_of",
        _CLOSES,
        "if checkpoints.owners.isdisjoint(gone | leaving):",
        "X3",
    ),
    Mutation(
        "who dies leaves the barrier open",
        "witness_of",
        _CLOSES,
        _CLOSES.replace("gone | leaving", "leaving"),
        "X3",
    ),
    Mutation(
        "who leaves or is replaced leaves the barrier open",
        "witness_of",
        _CLOSES,
        _CLOSES.replace("gone | leaving", "gone"),
        "X3",
    ),
    Mutation(
        "a member without pieces closes the barrier",
        "witness_of",
        _CLOSES,
        "if not checkpoints.barrier.is_over(log_time) and not gone | leaving:",
        "X3",
    ),
    Mutation(
        "a late join closes the barrier",
        "_replaced",
        _REPLACED,
        _REPLACED.replace(" or sender.joined >= seen", ""),
        "X3",
    ),
    Mutation("positions find the barrier open", "witness_of_positions", _BURIES, "buries = False", "X3"),
    Mutation(
        "who left with the barrier is still heard",
        "removes",
        "return self.closing is not None and member.slot in self.closing.left",
        "return False",
        "X3",
    ),
    Mutation(
        "a barrier waits for members without pieces",
        "note",
        "if slot in self.owners:",
        "if slot >= 0:",
        "X6",
    ),
    Mutation("a refusal in a hold group waits for the others", "is_due", _DUE, "return barrier.waiting == 0", "X6"),
    Mutation(
        "a refusal ends any barrier", "is_due", _DUE, "return barrier.waiting == 0 or barrier.reached < answered", "X6"
    ),
    Mutation("a hold group is complete without some", "closing_of", _WANTED, "wanted = 1", "X6"),
    Mutation(
        "a barrier that all refused is complete",
        "closing_of",
        _WANTED,
        "wanted = len(checkpoints.owners) * checkpoints.hold",
        "X6",
    ),
    Mutation("every group is one of hold", "closing_of", _WANTED, "wanted = len(checkpoints.owners)", "X6"),
    Mutation(
        "whoever answered leaves", "closing_of", _LEFT, _LEFT.replace("== REACHED_AND_LEAVES", "!= REFUSED"), "X6"
    ),
    Mutation(
        "an answer outlives its member",
        "forget_answer",
        "self.barrier.answers.pop(slot, None)",
        "self.barrier.answers.get(slot)",
        "X3",
    ),
    Mutation(
        "owners are those at the opening",
        "rebalanced",
        "self.barrier.count(owners)",
        "self.barrier.count(frozenset(self.barrier.answers))",
        "X6",
    ),
    # What is kept (X1, X2, X6).
    Mutation("a passing checkpoint is kept", "complete", _PASSING, _PASSING.replace("each is passing or ", ""), "X6"),
    Mutation("a hand-over makes a periodic checkpoint", "close", _KIND, "kind = PERIODIC", "X6"),
    Mutation(
        "pinned ones are among the newest that are kept",
        "complete",
        _PERIODIC,
        _PERIODIC.replace("== PERIODIC", "!= PASSING"),
        "X6",
    ),
    Mutation(
        "one more is kept",
        "complete",
        _TRIMMED,
        "for checkpoint in periodic[: max(0, len(periodic) - self.keep - 1)]:",
        "X6",
    ),
    Mutation(
        "old versions may weigh anything",
        "complete",
        "while self.old_weight > MAX_OLD_WEIGHT and len(self.kept) > 1:",
        "while self.old_weight < 0:",
        "X6",
    ),
    Mutation("the oldest goes, pinned or not", "complete", _OLDEST, "self.drop(older[0].id)", "X6"),
    Mutation(
        "a version weighs nothing itself",
        "weight",
        "return _BASE_WEIGHT + pieces + len(self.progress.intervals)",
        "return pieces + len(self.progress.intervals)",
        "X6",
    ),
    Mutation(
        "what goes takes its weight with it twice",
        "drop",
        "self.old_weight -= older.pop(key).weight",
        "self.old_weight -= 2 * older.pop(key).weight",
        "X6",
    ),
    Mutation(
        "a dropped version stays for the next checkpoint",
        "drop",
        "for key in older.keys() & newer.keys():",
        "for key in ():",
        "X2",
    ),
    Mutation(
        "completion is dated by the opening",
        "close",
        "checkpoints.complete(Kept(barrier.id, log_time, kind, dict(barrier.versions)))",
        "checkpoints.complete(Kept(barrier.id, barrier.opened, kind, dict(barrier.versions)))",
        "X1",
    ),
    # Answers (X5).
    Mutation(
        "an answer counts for any barrier",
        "_answered",
        "if checkpoints is None or barrier is None or barrier.id != number:",
        "if checkpoints is None or barrier is None or barrier.id < number:",
        "X5",
    ),
    Mutation("the last answer stands", "_answered", "if sender.slot in barrier.answers:", "if sender.slot < 0:", "X5"),
    Mutation(
        "a partial answer is noted",
        "_answered",
        "if verdict.code == codes.OK:",
        "if verdict.accepted:",
        "X5",
    ),
    Mutation(
        "an answer lets go as a commit does",
        "Cuts.commit",
        _ENTRY,
        _ENTRY.replace("action != COMMIT", "action > 1"),
        "X5",
    ),
    Mutation("an answer starts a partition", "Cuts.commit", _ENTRY, "if action != COMMIT:", "X5"),
    Mutation(
        "an answer's entries are those of anybody",
        "Cuts.commit",
        "refusal = self._refusal(entry)",
        "refusal = None",
        "X5",
    ),
    Mutation(
        "an entry that says nothing saves nothing",
        "Cuts.commit",
        "version.saved.commit_key_range(lo, hi, number)",
        "version.saved.commit_key_range(lo, hi, number) if ranges or through is not None else None",
        "X5",
    ),
    Mutation(
        "a state is that of the whole partition",
        "Cuts.commit",
        "version.saved.commit_key_range(lo, hi, number)",
        "version.saved.commit_key_range(0, MAX_KEY_HASH, number)",
        "X5",
    ),
    Mutation(
        "a cut has no metadata", "Cuts.commit", "if metadata is not None:", "if metadata is not None and ranges:", "X5"
    ),
    Mutation(
        "who answers goes with the overdue",
        "_answer_barrier",
        "if sender.slot not in others:",
        "if False:",
        "X5",
    ),
    Mutation(
        "the dead that answer after others go twice",
        "_answer_barrier",
        "if gone or others:",
        "if others:",
        "X5",
    ),
    # Hand-over (X6).
    Mutation(
        "a piece is let go by an older order",
        "_let_go",
        "and answer.generation >= piece.revoked",
        "and answer.generation >= 0",
        "X6",
    ),
    Mutation(
        "an order of the same generation is too old",
        "_let_go",
        "and answer.generation >= piece.revoked",
        "and answer.generation > piece.revoked",
        "X6",
    ),
    Mutation(
        "a piece is let go in part",
        "_let_go",
        "and saved.has_all(piece.lo, piece.hi, barrier.id)",
        "and saved.has_all(piece.lo, piece.lo, barrier.id)",
        "X6",
    ),
    Mutation(
        "what is let go has its last owner as one of equals",
        "_let_go",
        "pieces.append(piece._replace(owner=NOBODY))",
        "pieces.append(piece._replace(owner=piece.owner))",
        "X6",
    ),
    # Losses (X7).
    Mutation(
        "a loss in a hold group is one by piece",
        "_rebalance",
        _LOST,
        "if checkpoints is not None and lost and False:",
        "X7",
    ),
    Mutation("a loss by piece takes all back", "_rebalance", _LOST, "if checkpoints is not None and lost:", "X7"),
    Mutation("who owned nothing is lost, too", "_rebalance", "if not owners.isdisjoint(lost):", "if lost:", "X7"),
    # Going back (X8).
    Mutation(
        "a rollback counts twice",
        "_rollback",
        "if generation != group.generation:",
        "if generation > group.generation:",
        "X8",
    ),
    Mutation(
        "nobody goes back in a rollback",
        "_rollback",
        "self._rebalance(group, context, frozenset(group.members))",
        "self._rebalance(group, context, NOBODY_GOES)",
        "X8",
    ),
    Mutation(
        "0 goes back to the oldest",
        "_rollback",
        "target = checkpoint or group.checkpoints.newest",
        "target = checkpoint or group.checkpoints.kept[0].id",
        "X8",
    ),
    Mutation("a barrier outlives a rollback", "go_back", "checkpoints.barrier = None", "pass", "X8"),
    Mutation("what was undone is still seen", "go_back", "show(group, key)", "group.keep(*key)", "X8"),
    # Keeping (X9).
    Mutation(
        "the newest can be retired",
        "_keep_refusal",
        "if action == RETIRE and is_newest:",
        "if action == RETIRE and is_newest and len(checkpoints.kept) == 1:",
        "X9",
    ),
    Mutation(
        "a pin of a pinned one is one too many",
        "_keep_refusal",
        _PINNABLE,
        _PINNABLE.replace("kept.kind != PINNED and ", ""),
        "X9",
    ),
    Mutation(
        "any number may be pinned",
        "_keep_refusal",
        _PINNABLE,
        "if action == PIN and kept.kind == PINNED and not checkpoints.kept:",
        "X9",
    ),
    Mutation("an end need not name the newest", "_keep_refusal", "if not is_newest:", "if False:", "X9"),
    Mutation("checkpoints end under members", "_keep_refusal", "if group.members:", "if False:", "X9"),
    # Other types (X10).
    Mutation(
        "a commit counts between checkpoints",
        "_commit_offsets",
        "judge = Commits if group.checkpoints is None else Starts",
        "judge = Commits",
        "X10",
    ),
    Mutation(
        "positions are below what is kept",
        "set_positions",
        "checkpoints.complete(Kept(offset, log_time, PERIODIC, written), undone)",
        "checkpoints.complete(Kept(offset, log_time, PERIODIC, written))",
        "X10",
    ),
)
