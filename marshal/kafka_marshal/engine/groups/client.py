"""A member of a coordinated group, as the source of one consumer's partitions.

:mod:`.pieces` reads the log, :mod:`.holdings` starts and ends partitions, and writes to it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from math import inf
from random import Random
from typing import Any, NamedTuple, cast

from kafka_marshal.engine.effects import Outbox, Warn
from kafka_marshal.engine.groups.checkpoints.joining import JoinGate
from kafka_marshal.engine.groups.checkpoints.member import MemberCheckpoints
from kafka_marshal.engine.groups.holdings import GroupReports, Holdings
from kafka_marshal.engine.groups.member import Membership, MemberState
from kafka_marshal.engine.groups.pieces import GroupView, HeldPiece
from kafka_marshal.engine.groups.refusals import TAKEN_FOR_DEAD, below_level, forgotten, refusal_of, replaced
from kafka_marshal.engine.holding import Holding
from kafka_marshal.engine.plane import Loss, Settles, Work
from kafka_marshal.engine.settings import EngineSettings, GroupOptions
from kafka_marshal.engine.subscription import Subscription
from kafka_marshal.errors import MarshalError, claimed_group
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
    World,
    codes,
)
from rationalizer.levels import GROUPS_LEVEL
from rationalizer.wire.wellformed import COMMIT, LET_GO, START

#: Records about a group that no member's session depends on (G8).
SENDERLESS = (BeginCheckpoint, Rollback, KeepCheckpoint)

#: An evicted member leaves the group alone for this many sessions (G20).
EVICTED_SESSIONS = 3

REMOVED = (
    "an operator removed this member from its group (kafka-marshal evict); it joins again after {:g} s, once its "
    "messages in flight have come back"
)


class MemberEngine(NamedTuple):
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
        host: MemberEngine,
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
            if outcome.code != codes.UNKNOWN_PARTITIONING_STRATEGY:  # it says nothing of our own strategy
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
        if (outcome.is_a(ConfigureGroup) or (own and outcome.is_a(JoinGroup))) and self._member.other_strategy:
            self._outbox.add(Warn(self._member.other_strategy))
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


class GroupClient:
    """The source of a consumer's partitions: a :class:`~kafka_marshal.engine.plane.PartitionSource`."""

    def __init__(
        self,
        settings: EngineSettings,
        options: GroupOptions,
        subscription: Subscription,
        worlds: Mapping[int, World],
        outbox: Outbox,
        rng: Random,
        host: MemberEngine,
        starts_late: bool = False,
    ) -> None:
        self._host = host
        self.member: Membership = Membership(settings, options, subscription, worlds, outbox, rng)
        #: What this member works on.
        self.pieces: dict[Key, HeldPiece] = {}
        self.view: GroupView = GroupView(self.member, worlds, self.pieces)
        self.reports: GroupReports = GroupReports(self.member, self.view, self.pieces, outbox, self.member.interval_ms)
        #: Why this process is not a member and will not become one; None: it is a member, or tries to join.
        self.failure: Exception | None = None
        #: None: it has no policy for checkpoints.
        self.checkpoints: MemberCheckpoints | None = None
        self._rng = rng
        self.gate: JoinGate = JoinGate(self.member, options.checkpoints, worlds, outbox, self.fail)
        #: It was evicted, or a handler took too long: it joins once nothing of before is in flight.
        self._waits = False
        self._settings = settings
        self._starts_late = starts_late
        self._subscription = subscription
        self._worlds = worlds
        self._outbox = outbox
        self._errors: list[Exception] = []

    def attach(self, work: Work, errors: list[Exception]) -> None:
        """Set the consumer; called once, before anything else. errors: raised from the user's next call."""
        self._work = work
        self._errors = errors
        shared = self.member, self.view, self.reports, self.pieces, self._outbox
        self.holdings: Holdings = Holdings(*shared, work, self._must_go, self._starts_late)
        self.holdings.fail = self.fail
        if (policy := self.member.options.checkpoints) is not None:
            about = self.member, self.view, self.pieces, self._worlds, work, self._outbox, policy, self._rng
            self.checkpoints = MemberCheckpoints(*about, self._must_go, self.fail, errors)
            self.holdings.why_lost = self.checkpoints.why_lost
        parts = self.member, self.view, self.reports, self.holdings
        self._records = AppliedRecords(*parts, self._outbox, work, self._host, self.fail, self.gate, self.checkpoints)

    @property
    def takes_checkpoints(self) -> bool:
        return self.member.takes_checkpoints

    @property
    def session_timeout_ms(self) -> int:
        """The session timeout with which it joins."""
        return self.member.options.session_timeout_ms

    @property
    def other_strategy(self) -> str:
        """That a setting gives the group another strategy than this program names (R6); "": it does not."""
        return self.member.other_strategy

    def state(self, now: float) -> MemberState:
        """The state, for display only (G7). DOWN: it is not a member, and does not join again."""
        is_over = self.failure is not None or (not self.member.joined and bool(self.lets_all_go()))
        return MemberState.DOWN if is_over else self.member.state(now)

    # Called by its consumer.

    def lets_all_go(self) -> str:
        return self._host.lets_all_go()

    def still_lets_go(self, own: Holding, why: str, now: float) -> bool:
        return self.holdings.still_lets_go(cast("HeldPiece", own), now)

    def look_again(self, key: Key | None = None) -> None:
        if key is None:
            self.holdings.changed()

    def taken_away(self, key: Key, reason: str, now: float) -> bool:
        waits = reason in (Loss.EVICTED, Loss.HANDLER_TIMEOUT)
        self._waits = self._waits or waits
        # With checkpoints, its state is restored once nothing of it is in flight any more.
        return waits or (self.checkpoints is not None and self.checkpoints.is_on)

    def measured(self, own: Holding, done: int, log_end: int, now: float) -> None:
        pass  # members of a coordinated group do not choose partitions by lag

    def lose(self, own: Holding, reason: Loss, now: float) -> None:
        self.holdings.lose(cast("HeldPiece", own), reason, now)
        if reason is Loss.HANDLER_TIMEOUT and self.member.joined and not self.member.leaving:
            self.reports.commit_all()
            self.holdings.lose_all(reason, now)
            self._leave(now)

    def drop(self, own: Holding) -> None:
        cast("HeldPiece", own).end()
        self.pieces.pop(own.key, None)

    def end(self, now: float) -> None:
        """This Marshal has ended: all pieces are lost."""
        self.holdings.lose_all(Loss.ENDED, now)

    def fail(self, error: Exception) -> None:
        """Keep this process from being a member; the error is raised once."""
        if self.failure is None:
            self.failure = error
            self._errors.append(error)

    # Events.

    def acked(self, token: int, offset: int | None, now: float) -> None:
        """The broker answered an append."""
        self.member.proof.acked(token, offset)
        self.member.acked(token, offset)
        self.holdings.prove()

    def compare_clocks(self, now: float) -> None:
        """Compare log time with our clock (T5)."""
        if self.member.proof.compare_clocks(self._worlds[self.member.home].log_time, now):
            self.member.beat_soon(now)
            self.holdings.prove()

    def applied(self, cp: int, offset: int, outcome: Outcome, now: float) -> None:
        """Our replica applied one record, of any group."""
        self.view.log_time_moved(cp, now)
        message = outcome.message
        is_over = self.failure is not None and not self.member.joined
        if not is_over and message is not None and message.group_id == self._settings.group_id:
            self._records.applied(cp, offset, message, outcome, now)

    @property
    def wants_in(self) -> bool:
        """Whether the log does not show it as a member, and it is to be one."""
        return not self.member.joined and not self._goes()

    # Time.

    def _must_go(self, now: float) -> bool:
        return self._goes() or now < self.view.paused_until(now)

    def _goes(self) -> bool:
        return not self._work.takes_on or bool(self.lets_all_go()) or self.failure is not None

    def step(self, now: float) -> None:
        """Join, and start the partitions that are ours; but not while the consumer closes or releases everything."""
        if self._must_go(now):
            return
        if not self.member.joined:
            self._try_to_join(now)
            return
        self.member.report(now)
        opens = -inf < self.member.open_at <= now
        if opens:
            self.member.open_at = -inf
        if opens or not self.holdings.is_current or now >= self.holdings.check_at:
            self.holdings.follow_all(now)

    def _try_to_join(self, now: float) -> None:
        self._waits = self._waits and self._work.owes
        if self._waits or not self._subscription.looked:
            return
        if self.member.look_for_successor():
            self.fail(replaced(self._settings))
        elif any(world.level < GROUPS_LEVEL for world in self._worlds.values()):
            self.fail(below_level(self._settings))
        elif self.member.generation == 0 and self.member.is_claimed():
            self.fail(claimed_group(self._settings.group_id))
        else:
            if self.checkpoints is not None:
                self.checkpoints.follow()
            self.member.join(now, self.gate.may_join)

    def wake(self, now: float) -> None:
        """Send beats and repeat unanswered releases; also while the consumer closes."""
        if not self.member.joined:
            return
        if self.member.takes_checkpoints and not self.member.leaving:
            self._wake_to_a_cut(now)
            return
        if self.member.leaving or (self._must_go(now) and not self._work.parts):
            self._leave(now)
            return
        self.member.wake(now, self.reports.commit_all)
        self.reports.let_go_again(now)

    def _wake_to_a_cut(self, now: float) -> None:
        """With checkpoints: leave at a barrier, if there is one in time (X16)."""
        checkpoints = self.checkpoints
        if checkpoints is None:
            return  # a misfit: it leaves
        if checkpoints.leaving.has_left(now):
            self._records.leave_quietly(now)
            return
        if not checkpoints.leaving.is_due(now):
            checkpoints.step(now)
        if checkpoints.leaving.is_due(now):
            self.holdings.lose_all(Loss.LEFT, now)
            self._leave(now)
        else:
            self.member.wake(now, self.reports.commit_all)

    def _leave(self, now: float) -> None:
        self.reports.flush(now)
        self.member.leave(now)

    def last_words(self, now: float) -> None:
        """Commit what is done, before ending without a release."""
        self.reports.commit_all()
        self.reports.flush(now)

    @property
    def has_left(self) -> bool:
        """Whether the log does not show us as a member, and will not."""
        return self.failure is not None or not (self.member.joined or self.member.joining is not None)

    def deadline(self, now: float) -> float:
        """When (own clock, ms) ``wake`` or ``step`` is due again."""
        if self.failure is not None and not self.member.joined:
            return inf
        times = [self.reports.deadline]
        if self.member.takes_checkpoints and not self.member.leaving and self.checkpoints is not None:
            times.append(self.checkpoints.deadline(now))
        if self.member.joined or not (
            self._goes() or (self._waits and self._work.owes) or not self._subscription.looked
        ):
            due = self.member.deadline(now, not self._must_go(now))
            times.append(due if self.member.joined else max(due, self.view.paused_until(now)))
        if self.member.joined and not self._must_go(now):
            times.append(self.holdings.check_at)
        return min(times)
