"""Planted bugs in a coordinated group's members (G2, G5, G8, G11, G12, G14, G18, G20, G22, P9)."""

from __future__ import annotations

from tests.mutants.mutation import Mutation

_VALID = "self.valid_until = proof.sent_at + self._session_ms - proof_margin_ms(self._session_ms)"

GROUP_MEMBERS: tuple[Mutation, ...] = (
    # Whose it is.
    Mutation(
        "a piece that is revoked is taken up",
        "Holdings._follow",
        "if piece is None and meant:",
        "if piece is None and (meant := ours):",
        "G18",
    ),
    Mutation(
        "a piece that another has is taken up",
        "Holdings._follow",
        "ours = [part for part in parts if part.owner == slot]",
        "ours = [part for part in parts if part.target == slot]",
        "G4",
    ),
    Mutation(
        "a revoked piece is kept",
        "Holdings._follow",
        "elif piece is not None and piece.letting_go is None and piece.span != span_of(meant):",
        "elif piece is not None and piece.letting_go is None and not ours:",
        "G18",
    ),
    Mutation(
        "the token is the newest generation",
        "Holdings._take_up",
        "lo, hi, since = parts[0].lo, parts[-1].hi, max(part.since for part in parts)",
        "lo, hi, since = parts[0].lo, parts[-1].hi, self._member.generation",
        "G5",
    ),
    Mutation(
        "what was revoked before it was begun is never let go",
        "Holdings._let_go_unworked",
        "if parts and not self._member.leaving:",
        "if parts and self._member.leaving:",
        "G18",
    ),
    # Releases.
    Mutation(
        "a piece is let go before what is in hand is finished",
        "Revocation.try_finish",
        "if assignment.tracker.runs and not self._consumer.closing:",
        "if assignment.callbacks_running and not self._consumer.closing:",
        "G18",
    ),
    Mutation(
        "what was done is not said when a piece is let go",
        "GroupReports.let_go",
        "self._entries.append(CommitEntry(*piece.key, *piece.span, LET_GO, last_offset))",
        "self._entries.append(CommitEntry(*piece.key, *piece.span, LET_GO))",
        "G18",
    ),
    Mutation(
        "a letting-go that got lost is not sent again",
        "GroupReports.let_go_again",
        "if going is not None and now >= going.sent_at + self._again_ms:",
        "if going is not None and now < going.sent_at:",
        "G18",
    ),
    # Commits.
    Mutation(
        "commits are of an older generation",
        "GroupReports.flush",
        "member.send(CommitOffsets(*ids, member.generation, False, tuple(entries)), now)  # in_order: nobody asks",
        "member.send(CommitOffsets(*ids, max(0, member.generation - 1), False, tuple(entries)), now)",
        "G14",
    ),
    Mutation(
        "it starts without an action 2",
        "_has_no_start",
        "return source.reports.needs_start and source.view.is_first(assignment.key)",
        "return False",
        "P9",
    ),
    Mutation(
        "the start is a commit",
        "GroupReports.beat",
        "self._entries.append(CommitEntry(*own.key, action=START, through=last_offset))",
        "self._entries.append(CommitEntry(*own.key, through=last_offset))",
        "P9",
    ),
    Mutation(
        "what is revoked already is let go without its start",
        "Holdings._owes_start",
        "if not self._starts_late or not self._view.is_first(key) or self._view.came_later(key):",
        "if self._starts_late or not self._view.is_first(key) or self._view.came_later(key):",
        "P9",
    ),
    # Being a member.
    Mutation(
        "it does not stop when it is not proven",
        "MemberProof._take",
        _VALID,
        "self.valid_until = proof.sent_at + 2 * self._session_ms",
        "G20",
    ),
    Mutation(
        "there is no margin",
        "MemberProof._take",
        _VALID,
        "self.valid_until = proof.sent_at + self._session_ms",
        "G20",
    ),
    Mutation(
        "a heartbeat proves from when it was applied",
        "MemberProof.applied",
        "self._take(self._proofs.applied(cp, offset, log_time, (), now))",
        "self._take(Proof(now, log_time, ()))",
        "T4",
    ),
    Mutation(
        "log time ahead of our clock raises no doubt in a member",
        "MemberProof.compare_clocks",
        "if not self.last.is_ahead(log_time, now, self._session_ms):",
        "if not self.last.is_ahead(log_time, now, 100 * self._session_ms):",
        "T5",
    ),
    Mutation(
        "it keeps on after UNKNOWN_CONSUMER",
        "AppliedRecords._verify",
        "if not self._member.joined or self._member.me is not None:",
        "if not self._member.joined or own:",
        "G20",
    ),
    Mutation(
        "who was removed works on",
        "Holdings.expelled",
        "if piece.letting_go is None:",
        "if piece.letting_go is None and reason is Loss.EVICTED:",
        "G20",
    ),
    Mutation(
        "evicted, it joins again at once",
        "EVICTED_SESSIONS",
        "EVICTED_SESSIONS = 3",
        "EVICTED_SESSIONS = 0",
        "G20",
    ),
    Mutation(
        "the older instance comes back",
        "Membership.look_for_successor",
        "if self._was_member and found is not None and found.instance_id != self.settings.instance_id:",
        "if not self:",
        "G20",
    ),
    Mutation(
        "the witness beats for who was heard meanwhile",
        "Membership.wake",
        "if not is_needed and now < self._next_beat:",
        "if not is_needed and now < 0.0:",
        "G20",
    ),
    Mutation(
        "it beats once in its session",
        "Membership._beat_later",
        "self._next_beat = now + self.interval_ms * self._rng.uniform(EARLIEST_BEAT, 1.0)",
        "self._next_beat = now + 3 * self.interval_ms * self._rng.uniform(EARLIEST_BEAT, 1.0)",
        "G20",
    ),
    Mutation(
        "a beat says nothing of what is done",
        "GroupReports.uncommitted",
        "if piece.letting_go is None and (last_offset := piece.owner.progress_to_report()) is not None:",
        "if piece.stopped and (last_offset := piece.owner.progress_to_report()) is not None:",
        "G22",
    ),
    Mutation(
        "a pattern of its own is not reported",
        "TopicReports._lacks",
        "topic not in subscribed or count > group.counts.get(topic, -1)",
        "count > group.counts.get(topic, -1)",
        "G12",
    ),
    Mutation(
        "where all have left a dead admin's pause never ends",
        "GroupView.paused_until",
        "return -inf if pause is None else self._moved + pause.expires - world.log_time",
        "return -inf if pause is None else inf",
        "C10",
    ),
    Mutation(
        "a pause is not seen",
        "GroupClient._must_go",
        "return self._goes() or now < self.view.paused_until(now)",
        "return self._goes()",
        "G21",
    ),
    Mutation(
        "it leaves at the first lost piece",
        "GroupClient.wake",
        "if self.member.leaving or (self._must_go(now) and not self._work.parts):",
        "if self.member.leaving or self._must_go(now):",
        "G20",
    ),
)
