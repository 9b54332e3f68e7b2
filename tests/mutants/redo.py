"""Planted bugs in level 5: what an operator opens of what is done, and the strategy that a group has set."""

from __future__ import annotations

from tests.mutants.mutation import Mutation

_NOTED = "return self.offset if self.level >= REDO_LEVEL else NO_RECORD"
_DONE = "if reach.redoes and reason is None and self._is_done(low, high, key_hash):"
_WHOSE = "return self._are_done(first, last) if key_hash == NO_KEY else self._progress.has_passed(first, key_hash)"
_UNKEYED = "return key_hash != NO_KEY or (self._reach.redoes_unkeyed and self._progress.piece_count == 1)"
_BY_KEYS = "by_keys = lease is not None and lease.shares is not None and not lease.shares.by_batches"
_OPENED = "if self._reach.redoes and code == codes.OK:"
_LATER = "later = [name for name, _ in own[0] if ok.SETTING_VERSIONS.get(name, 0) > version]"
_NAMED = 'if found.get("strategy") is not None and found["strategy"] not in STRATEGIES:'
_OTHERS = "if others and group.settings.strategy is None and group.strategy != strategy:"
_CHANGED = "if group.members and (changed or wanted not in {None, group.strategy}):"
_NAME = '"strategy": lambda value: value is None or is_id(value),'
_REPOSITIONS = "code = group.keep(topic, partition).progress.reposition(through, again)"

REDO: tuple[Mutation, ...] = (
    Mutation("a position below level 5 is noted", "ApplyContext.again", _NOTED, "return self.offset", "R1"),
    Mutation("a position is not noted", "Progress.reposition", "self.again = max(self.again, again)", "pass", "R1"),
    Mutation(
        "a position that changes nothing is noted",
        "Progress.reposition",
        "return codes.OK",
        "self.again = max(self.again, again); return codes.OK",
        "R1",
    ),
    Mutation(
        "a group's position is not noted", "reposition_entry", _REPOSITIONS, _REPOSITIONS.replace(", again", ""), "R1"
    ),
    Mutation("a redrive opens what is done", "_reach_of_operator", "if version < REDO_LEVEL:", "if False:", "R2"),
    Mutation(
        "a group's redrive opens what is done",
        "GroupPlane._settle_offsets",
        "if message[0] >= REDO_LEVEL:",
        "if True:",
        "R2",
    ),
    Mutation(
        "a copy of a redo opens again",
        "Settling._may_redo",
        "if self._seen <= self._again:",
        "if self._seen < self._again:",
        "R2",
    ),
    Mutation(
        "a redo need not have seen the last one",
        "Settling._may_redo",
        "if self._seen <= self._again:",
        "if False:",
        "R2",
    ),
    Mutation(
        "a redo meets what it has opened itself",
        "Settling.open",
        "self._progress.again = self._offset",
        "self._progress.again = self._again = self._offset",
        "R2",
    ),
    Mutation("a redo parks what is done", "Settling._make", _DONE, _DONE.replace(" and reason is None", ""), "R2"),
    Mutation("a redo without keys opens where keys are apart", "Settling._may_redo", _UNKEYED, "return True", "R2"),
    Mutation(
        "a redo without keys opens though there are two pieces",
        "Settling._may_redo",
        _UNKEYED,
        "return key_hash != NO_KEY or self._reach.redoes_unkeyed",
        "R2",
    ),
    Mutation("shares by keys do not matter to a redo", "_reach_of_operator", _BY_KEYS, "by_keys = False", "R2"),
    Mutation(
        "shares by batches keep a redo out",
        "_reach_of_operator",
        _BY_KEYS,
        "by_keys = lease is not None and lease.shares is not None",
        "R2",
    ),
    Mutation(
        "a redo opens what is done in part",
        "Settling._is_done",
        _WHOSE,
        "return self._progress.has_passed(first, None if key_hash == NO_KEY else key_hash)",
        "R2",
    ),
    Mutation(
        "a redo wants it done for all keys", "Settling._is_done", _WHOSE, "return self._are_done(first, last)", "R2"
    ),
    Mutation("a refused redo is noted", "Settling.open", _OPENED, "if self._reach.redoes:", "R2"),
    Mutation("a redo is not noted", "Settling.open", _OPENED, "if False:", "R2"),
    Mutation("a group that takes checkpoints keeps again", "start", "kept.progress.again = NO_RECORD", "pass", "R4"),
    Mutation(
        "an owner leaves out what is opened again",
        "OpenOffsets._meet",
        "elif hole.owner == NO_OWNER:",
        "elif hole.owner == NO_OWNER and hole.attempts:",
        "U3",
    ),
    Mutation(
        "an owner fetches one message more than is opened",
        "OpenOffsets._meet",
        "self._read(Mine(at, last, hashed, hole.attempts, due_of(hole.reason)))",
        "self._read(Mine(at, last + 1, hashed, hole.attempts, due_of(hole.reason)))",
        "R2",
    ),
    Mutation(
        "what is opened again takes the place of a run in flight",
        "Tracker._add",
        "self.runs[piece.first + BESIDE if piece.first in self.runs else piece.first] = piece",
        "self.runs[piece.first] = piece",
        "R2",
    ),
    Mutation(
        "at most once an open message is handed out whatever the log answers",
        "Grants.settled",
        "grant.accepted = grant.accepted or code == codes.OK",
        "grant.accepted = True",
        "U3",
    ),
    Mutation("an old record knows the strategy", "_kind_of", _LATER, "later = list[str]()", "R5"),
    Mutation("a strategy may be of any name", "GroupPlane._configure_group", _NAMED, "if False:", "R5"),
    Mutation(
        "a strategy may be any text",
        "SETTING_RULES",
        _NAME,
        '"strategy": lambda value: value is None or type(value) is str,',
        "R5",
    ),
    Mutation(
        "joins are compared though one is set",
        "GroupPlane._join_refusal",
        _OTHERS,
        _OTHERS.replace(" and group.settings.strategy is None", ""),
        "R6",
    ),
    Mutation(
        "a join changes the strategy that is set",
        "GroupPlane._join_group",
        "strategy = group.settings.strategy or strategy",
        "pass",
        "R6",
    ),
    Mutation(
        "another strategy brings no rebalance",
        "GroupPlane._configure_group",
        _CHANGED,
        "if group.members and changed:",
        "R7",
    ),
    Mutation(
        "a strategy that is set anew brings a rebalance",
        "GroupPlane._configure_group",
        _CHANGED,
        "if group.members and (changed or wanted != before.strategy):",
        "R7",
    ),
    Mutation(
        "a rebalance forgets the strategy",
        "GroupPlane._configure_group",
        "group.strategy = wanted or group.strategy",
        "group.strategy = wanted",
        "R7",
    ),
    Mutation(
        "a row of level 5 leaves out what has its default",
        "Part.row",
        "kept = len(row) if used or self._is_whole(level) else kept",
        "kept = len(row) if used else kept",
        "S1",
    ),
)
