"""What a member of a coordinated group concludes from the records that our replica has applied."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

from kafka_marshal.engine.effects import Outbox, Warn
from kafka_marshal.engine.groups.checkpoints.joining import JoinGate
from kafka_marshal.engine.groups.checkpoints.member import MemberCheckpoints
from kafka_marshal.engine.groups.holdings import Holdings
from kafka_marshal.engine.groups.member import Membership
from kafka_marshal.engine.groups.refusals import TAKEN_FOR_DEAD, forgotten, refusal_of, replaced
from kafka_marshal.engine.groups.reports import GroupReports
from kafka_marshal.engine.groups.view import GroupView
from kafka_marshal.engine.plane import Loss, Settles, Work
from kafka_marshal.errors import MarshalError
from kafka_marshal.types import Key
from rationalizer import (
    BeginCheckpoint,
    CommitOffsets,
    ConfigureGroup,
    ForgetGroup,
    JoinGroup,
    KeepCheckpoint,
    LeaveGroup,
    Outcome,
    ReleaseGroup,
    Rollback,
    SettleOffsets,
    Tick,
    codes,
)
from rationalizer.wire.wellformed import COMMIT, LET_GO, START

#: Records about a group that no member's session depends on (G8).
SENDERLESS = (BeginCheckpoint, Rollback, KeepCheckpoint)

#: An evicted member leaves the group alone for this many sessions (G20).
EVICTED_SESSIONS = 3

REMOVED = (
    "an operator removed this member from its group (kafka-marshal evict); it joins again after {:g} s, once its "
    "messages in flight have come back"
)


class Host(NamedTuple):
    """What a member asks of its engine, and reports to it."""

    #: Why all partitions are to be released; "": they are not.
    lets_all_go: Callable[[], str]
    #: An operator (its instance_id) asks this process to hand over (C19).
    drain: Callable[[str], object]
    #: An offset was set for these partitions (P11).
    unblock: Callable[[Collection[Key]], object]
    #: The log answered a grant of a partition that is no longer ours: key, None, last offset, accepted (C13).
    answered_late: Callable[[Key, None, int, bool], object]
    #: A record has opened, parked or settled messages of a partition (H4).
    messages_opened: Callable[[Key, Settles, Sequence[str] | None, float], object]


class AppliedRecords:
    """Passes each record to the parts that need it: membership, pieces and reports."""

    def __init__(
        self,
        member: Membership,
        view: GroupView,
        reports: GroupReports,
        holdings: Holdings,
        outbox: Outbox,
        work: Work,
        host: Host,
        fail: Callable[[MarshalError], object],
        gate: JoinGate,
        checkpoints: MemberCheckpoints | None,
    ) -> None:
        self._member = member
        self._settings = member.settings
        self._view = view
        self._reports = reports
        self._holdings = holdings
        self._outbox = outbox
        self._work = work
        self._host = host
        #: Called with the reason why this process will not be a member.
        self._fail = fail
        self._gate = gate
        self._checkpoints = checkpoints

    def applied(self, cp: int, offset: int, message: Any, outcome: Outcome, now: float) -> None:
        """Our replica applied a record of our group."""
        if outcome.is_a(ConfigureGroup):
            self._refused(outcome)
            self._member.marked(now)
        if cp != self._member.home:
            return
        own = message.instance_id == self._settings.instance_id and message.client_id == self._settings.client_id
        group = self._member.group
        self._view.applied(message.member_id if outcome.is_a(LeaveGroup) else "")
        if outcome.accepted and group is not None and not outcome.is_a(*SENDERLESS):
            self._member.witness.heard(group, message.client_id, now)
        if own and outcome.is_a(JoinGroup):
            self._member.join_answered()
            self._join_applied(outcome, now)
        self._member.look_for_successor()  # it may have left again when we would join
        if own and outcome.accepted and outcome.of_group and not outcome.is_a(LeaveGroup, *SENDERLESS):
            self._member.proof.applied(cp, offset, outcome.log_time, now)
            self._holdings.prove()
        if outcome.is_a(ConfigureGroup) and group is not None:
            for piece in self._holdings.pieces.values():
                piece.most_intervals = group.settings.max_individual_commits
        if outcome.is_a(ForgetGroup, ReleaseGroup):
            self._holdings.changed()
        if outcome.is_a(BeginCheckpoint, Tick):
            self._member.try_again(now)
        self._checkpoints_applied(outcome, message, own, now)
        if outcome.is_a(LeaveGroup) and not own and not outcome.accepted:
            self._ask_to_leave(message)
        if outcome.is_a(ForgetGroup) and outcome.accepted:
            self._host.unblock(list(self._work.blocked))
        self._verify(outcome, own, now)
        if outcome.is_a(SettleOffsets) and outcome.accepted:
            was_blocked = set(self._work.blocked)
            answers = outcome.entries if own else None
            self._host.messages_opened((message.topic, message.partition), message, answers, now)
            if was_blocked - set(self._work.blocked):
                self._holdings.changed()  # nothing is in the way any more
        if outcome.is_a(CommitOffsets) and outcome.entries is not None:
            if not message.member_id:
                self._positions_set(message.entries, outcome)
            elif self._member.joined:
                self._commits_applied(message.entries, outcome, own, now)
        if self._member.joined and not self._holdings.is_current:
            self._member.witness.look(self._member.group, now)
            self._holdings.follow_all(now)

    def _checkpoints_applied(self, outcome: Outcome, message: Any, own: bool, now: float) -> None:
        if self._checkpoints is None:
            return
        self._checkpoints.applied(outcome, message, own, now)
        for piece in self._checkpoints.end_outgrown():
            self._holdings.lose(piece, Loss.HANDED_OVER, now)
            self._holdings.changed()

    def _join_applied(self, outcome: Outcome, now: float) -> None:
        if outcome.accepted and outcome.member is not None:
            self._member.has_joined(outcome.member, now)
            self._holdings.changed()
            if self._gate.is_misfit() or self._member.look_for_successor():
                self._member.leave(now)
        elif outcome.code == codes.UNKNOWN_CONSUMER:
            self._expelled(Loss.FENCED, now)
        else:
            self._refused(outcome)

    def _refused(self, outcome: Outcome) -> None:
        error = refusal_of(outcome.code, self._settings, self._member.options)
        if error is not None and not outcome.accepted:
            self._fail(error)

    def _ask_to_leave(self, message: Any) -> None:
        """If a LeaveGroup names us under another instance_id, an operator asks us to hand over (C19).

        A late watchdog of an older instance names the member_id of that instance instead.
        """
        if message.client_id == self._settings.client_id and message.member_id == self._member.member_id:
            self._host.drain(message.instance_id)

    def _verify(self, outcome: Outcome, own: bool, now: float) -> None:
        """Check that the log still shows us as a member; otherwise we are expelled (G20)."""
        if not self._member.joined or self._member.me is not None:
            return
        group = self._member.group
        if self._checkpoints is not None and self._checkpoints.has_left:
            self.leave_quietly(now)
            return
        if self._member.leaving:
            self._expelled(Loss.FENCED, now)
            return
        if own and outcome.is_a(LeaveGroup) and outcome.accepted:  # we sent none
            away_ms = EVICTED_SESSIONS * self._member.options.session_timeout_ms
            self._outbox.add(Warn(REMOVED.format(away_ms / 1000)))
            self._expelled(Loss.EVICTED, now, away_ms)
            return
        if group is None:
            self._fail(forgotten(self._settings))
        elif self._settings.client_id in group.clients:
            self._fail(replaced(self._settings))
        else:
            self._outbox.add(Warn(TAKEN_FOR_DEAD))
        self._expelled(Loss.FENCED, now)

    def _expelled(self, reason: Loss, now: float, again_after_ms: float = 0.0) -> None:
        self._member.expelled(now, again_after_ms)
        self._reports.clear()
        self._gate.forget()
        self._holdings.expelled(reason, now)
        if self._checkpoints is not None:
            self._checkpoints.expelled()

    def leave_quietly(self, now: float) -> None:
        """The log shows that we have left at a barrier, or that the next record of another member completes it."""
        for piece in list(self._holdings.pieces.values()):
            if self._checkpoints is not None and not self._checkpoints.has_handed_in(piece):
                self._holdings.lose(piece, Loss.NOT_SAVED, now)
        self._expelled(Loss.HANDED_OVER, now)

    def _positions_set(self, entries: Sequence[Any], outcome: Outcome) -> None:
        """An admin set positions while the group had no member (G21), maybe to the same offsets."""
        answers = zip(entries, outcome.entries or (), strict=True)
        self._host.unblock([entry[:2] for entry, code in answers if code in codes.ACCEPTED and entry[5] is not None])

    def _commits_applied(self, entries: Sequence[Any], outcome: Outcome, own: bool, now: float) -> None:
        answers = zip(entries, outcome.entries or (), strict=True)
        for (topic, partition, lo, hi, action, through, _, _), code in answers:
            key = (topic, partition)
            accepted, piece = code in codes.ACCEPTED, self._holdings.pieces.get(key)
            # Late, and for keys of before, it says nothing of those of now.
            if own and piece is not None and (action == START or (lo, hi) == piece.span):
                if self._reports.answered(piece, action, through, code, now):
                    self._holdings.released(piece, now)
            elif own and action == COMMIT and through is not None:
                self._host.answered_late(key, None, through, accepted)
            if (action == LET_GO and accepted) or (own and not accepted):
                self._holdings.follow(key, now)
