"""Planted bugs in the fenced sinks: fences, gates, and which offsets are stored."""

from __future__ import annotations

from tests.mutants.mutation import Mutation

_CUT = "cut += [(first, lo - 1, before), (max(first, lo), min(last, hi), epoch), (hi + 1, last, before)]"
_INSERTED = "inserted, intervals, redone, row = self._run_all("
#: What is stored is read before the insert, and again in vain.
_EARLY = (
    "early = [self._run(_COVERING, (*self._of, -1, *self._of, -1, 2**62)).fetchall(), "
    "self._run(ROW, self._of).fetchall()]; "
    "inserted, intervals, redone, row = "
    "(lambda *four: ((found := self._run_all(*four))[0], early[0], found[2], early[1]))("
)
_STABLE = "known = besides if is_free and of.is_newest(fences) else ()"

SINKS: tuple[Mutation, ...] = (
    # Fences.
    Mutation(
        "a fence is one hash too long",
        "entered",
        _CUT,
        "cut += [(first, lo - 1, before), (max(first, lo), min(last, hi + 1), epoch), (hi + 2, last, before)]",
        "F2",
    ),
    Mutation(
        "a fence begins one hash late",
        "entered",
        _CUT,
        "cut += [(first, lo, before), (max(first, lo + 1), min(last, hi), epoch), (hi + 1, last, before)]",
        "F2",
    ),
    Mutation(
        "newer fences are overwritten",
        "entered",
        "if before >= epoch or last < lo or hi < first:",
        "if last < lo or hi < first:",
        "F2",
    ),
    Mutation(
        "neighbours of one epoch stay apart",
        "entered",
        "if merged and merged[-1][2] == epoch:",
        "if merged and merged[-1][2] > epoch:",
        "F2",
    ),
    Mutation(
        "a member with several pieces has one token",
        "tokens_of",
        "given = epoch.parts if isinstance(epoch, SharedEpoch) else all_keys(epoch)  # type: ignore[arg-type]",
        "given = ((epoch.lo, epoch.hi, int(epoch)),) if isinstance(epoch, SharedEpoch) else all_keys(epoch)",
        "F2",
    ),
    Mutation(
        "an older token is not refused",
        "Records.may_write",
        "refuse_others(self.group_id, self.key, ours, stored)",
        "pass",
        "F3",
    ),
    Mutation(
        "a rewind enters nothing",
        "rewind",
        "self._set_fences(work.connection, group_id, key, stored.epoch, after)",
        "pass",
        "F8",
    ),
    Mutation(
        "going back enters nothing",
        "FencedSink.restore",
        "self._set_fences(work.connection, group_id, key, stored.epoch, after)",
        "pass",
        "F8",
    ),
    Mutation(
        "going back a second time takes what was written since",
        "FencedSink.restore",
        "if after == before:",
        "if False:",
        "F8",
    ),
    Mutation(
        "going back leaves last offsets above the position",
        "DoneRecords.go_back",
        "self._put([(0, min(last_offset, to)), *sorted(kept)])",
        "self._put([(0, last_offset), *sorted(kept)])",
        "F8",
    ),
    Mutation(
        "going back forgets what is done beyond the position",
        "DoneRecords.go_back",
        "kept += [each for each in within if each[0] <= each[1]]",
        "kept += []",
        "F8",
    ),
    Mutation(
        "going back keeps intervals that reach over the position",
        "DoneRecords.go_back",
        "kept = [(first, min(end, to)) for first, end in stored if first <= to]",
        "kept = [(first, end) for first, end in stored if first <= to]",
        "F8",
    ),
    Mutation(
        "a sink's name does not count",
        "rows_of",
        'return group_id if name is None else f"{group_id}{NAMED}{name}"',
        "return group_id",
        "F8",
    ),
    # Gates.
    Mutation(
        "who enters shares the gate",
        "PostgresSink._lock_rows",
        'connection.execute("SELECT pg_advisory_xact_lock(%s)", (_gate(group_id, key),))',
        'connection.execute("SELECT pg_advisory_xact_lock_shared(%s)", (_gate(group_id, key),))',
        "F2",
    ),
    Mutation(
        "writers of records take no gate",
        "_LOCKS",
        '"shared": ("SELECT pg_advisory_xact_lock_shared(%s)", ""),',
        '"shared": ("", ""),',
        "F3",
    ),
    Mutation(
        "the isolation level is the database's",
        "PostgresSink._begin",
        'return "; ".join(["BEGIN ISOLATION LEVEL READ COMMITTED", *local])',
        'return "; ".join(["BEGIN", *local])',
        "F3",
    ),
    Mutation(
        "what is stable does not wait for running records",
        "merged_in",
        _STABLE,
        "known = besides if of.is_newest(fences) else ()",
        "F4",
    ),
    # Offsets.
    Mutation("what is stored is read before the insert", "DoneRecords.add", _INSERTED, _EARLY, "F3"),
    Mutation(
        "what lies in an interval is new",
        "DoneRecords.add",
        "done = {x for x in new if x <= below or any(begin < x <= end for begin, end in intervals)}",
        "done = {x for x in new if x <= below}",
        "F3",
    ),
    Mutation(
        "the end of an interval is new",
        "DoneRecords.add",
        "done = {x for x in new if x <= below or any(begin < x <= end for begin, end in intervals)}",
        "done = {x for x in new if x <= below or any(begin < x < end for begin, end in intervals)}",
        "F3",
    ),
    Mutation(
        "an offset that another writer has stored is taken for new again and again",
        "_admitted",
        "are_new = False",
        "pass",
        "F3",
    ),
    Mutation(
        "what lies in an interval is new where one writes at a time",
        "SerialDoneRecords.add",
        "new = [x for x in offsets if x > last and not ((at := bisect_right(firsts, x)) and x <= done[at - 1][1])]",
        "new = [x for x in offsets if x > last and not (bisect_right(firsts, x) and x in firsts)]",
        "F3",
    ),
    Mutation(
        "what was set aside stays stored where one writes at a time",
        "SerialDoneRecords.take_out",
        "self._add(sorted(added - offsets))",
        "self._add(sorted(added))",
        "U15",
    ),
    Mutation(
        "intervals overlap",
        "DoneRecords.add",
        "self._run(_DROP_SOME, (*self._of, json.dumps(sorted(done))))",
        "pass",
        "F3",
    ),
    Mutation(
        "a stale writer says what is stable",
        "merged_in",
        _STABLE,
        "known = besides if is_free else ()",
        "F4",
    ),
    Mutation(
        "who enters keys that others have says what is stable",
        "_enter",
        "known = besides if of.is_newest(after) else ()",
        "known = besides",
        "F4",
    ),
    Mutation(
        "a reposition keeps what was stable",
        "_tidy",
        "written.tokens, written.stable = of.tokens, -1",
        "written.tokens = of.tokens",
        "F4",
    ),
    # Batches, and messages that are open.
    Mutation(
        "what is open counts as done",
        "done_of",
        "for hole in progress.open:",
        "for hole in progress.open[:0]:",
        "U15",
    ),
    Mutation(
        "at most once, what is taken counts as written",
        "done_of",
        "is_unknown = assignment.is_done_early or assignment.over",
        "is_unknown = assignment.over",
        "U15",
    ),
    Mutation(
        "the token of a batch is stored",
        "_enter",
        "after = entered(before, of.tokens) if of.enters else before",
        "after = entered(before, of.tokens)",
        "U15",
    ),
    Mutation(
        "a parked message that stays counts as written after a rewind",
        "DoneRecords.rewind",
        "self._put(left_out([(0, to)], aside))",
        "self._put([(0, to)])",
        "U15",
    ),
    Mutation(
        "what is to be written again counts as stored once it is done in the log",
        "DoneRecords.merge",
        "besides = left_out(besides, self._redone())",
        "pass",
        "F10",
    ),
    Mutation(
        "what was written again stays open",
        "DoneRecords.strike_out",
        "self._run(_DROP_SOME, (*self._redone_of, json.dumps(sorted(offsets))))",
        "pass",
        "F10",
    ),
    Mutation(
        "a redone offset that was not stored may be stored by an owner that lags",
        "DoneRecords.reopen",
        "self._run(_ADD, (*self._redone_of, json.dumps([(each, each) for each in offsets])))",
        "pass",
        "F10",
    ),
    Mutation(
        "a last offset hides what is to be written again",
        "_refuse_records",
        "if (redone_of(group_id), *each.key) in found:",
        "if False:",
        "F10",
    ),
    Mutation(
        "a block may write what is stored",
        "FencedMessages._check",
        "if self._left_out and not self._is_asked and not is_single:",
        "if False:",
        "F3",
    ),
    # On the program's own connection.
    Mutation(
        "a connection in autocommit mode is taken",
        "ConnectionSink._begin",
        "if is_off:",
        "if False:",
        "F9",
    ),
    Mutation(
        "a writer on the program's connection takes no gate",
        "ConnectionSink._begin",
        'self._take_gate(link, rows, key, "shared")',
        "pass",
        "F9",
    ),
    Mutation(
        "a newer epoch does not wait for writers on the program's connections",
        "ConnectionSink._lock_rows",
        'self._take_gate(connection, group_id, key, "exclusive")',
        'self._take_gate(connection, group_id, key, "shared")',
        "F9",
    ),
    Mutation(
        "a newer epoch is entered in the block",
        "ConnectionSink._begin",
        "self._set_fences(link, rows, key, stored.epoch, entered(before, of.tokens))",
        "pass",
        "F9",
    ),
    Mutation(
        "a stricter level of PostgreSQL is taken",
        "ConnectionSink._take_gate",
        'if isolation not in ("read committed", "read uncommitted"):',
        "if False:",
        "F9",
    ),
    Mutation(
        "a snapshot of MySQL decides",
        "_in_mysql",
        'return sql.replace("LIMIT 1)", "LIMIT 1 FOR UPDATE)") + " FOR UPDATE" if locks else sql',
        "return sql",
        "F9",
    ),
    Mutation(
        "what a block of fence did stays after an error",
        "FenceBlock._within",
        "with whole_blocks(), self._kept_open(), suppress(RollBackError), link.nested():",
        "with whole_blocks(), self._kept_open(), suppress(RollBackError):",
        "F9",
    ),
    Mutation(
        "a block of fence need not ask what is new",
        "FenceBlock._within",
        "tx._check(of.is_single)",
        "pass",
        "F9",
    ),
)
