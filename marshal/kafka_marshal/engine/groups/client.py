"""A member of a coordinated group, as the source of one consumer's partitions.

:mod:`.view` reads the log, :mod:`.reports` writes to it, :mod:`.holdings` starts and ends partitions, and
:mod:`.applied` reacts to each record.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from random import Random
from typing import cast

from kafka_marshal.engine.effects import Outbox
from kafka_marshal.engine.groups.applied import AppliedRecords, Host
from kafka_marshal.engine.groups.checkpoints.joining import JoinGate
from kafka_marshal.engine.groups.checkpoints.member import MemberCheckpoints
from kafka_marshal.engine.groups.holdings import Holdings
from kafka_marshal.engine.groups.member import Membership, MemberState
from kafka_marshal.engine.groups.pieces import HeldPiece
from kafka_marshal.engine.groups.refusals import below_level, replaced
from kafka_marshal.engine.groups.reports import GroupReports
from kafka_marshal.engine.groups.view import GroupView
from kafka_marshal.engine.holding import Holding
from kafka_marshal.engine.kinds import claimed_group
from kafka_marshal.engine.plane import Loss, Work
from kafka_marshal.engine.settings import EngineSettings, GroupOptions
from kafka_marshal.engine.subscription import Subscription
from kafka_marshal.types import Key
from rationalizer import Outcome, World
from rationalizer.levels import GROUPS_LEVEL


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
        host: Host,
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
