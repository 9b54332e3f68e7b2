"""Who begins a checkpoint, and when (X15). Times: own clock, ms."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from random import Random

from kafka_marshal.engine.effects import Outbox
from kafka_marshal.engine.groups.checkpoints.shown import Shown
from kafka_marshal.engine.groups.member import Membership
from kafka_marshal.engine.settings import CheckpointOptions
from rationalizer import BeginCheckpoint
from rationalizer.groups.checkpoints import Barrier
from rationalizer.wire.wellformed import PASSING

#: A hand-over begins this long after the last rebalance, jittered up to twice that, so that one barrier serves several;
#: but at most LONGEST_WAIT_MS after the first revocation that waits.
SETTLE_MS = 100.0
LONGEST_WAIT_MS = 1_000.0

#: Each older member that does not leave goes first by this share of the session.
TURN_SHARE = 1 / 3

#: The first wait after a barrier that was in vain; doubled each time, up to ``every``, or LONGEST_BACK_OFF_MS.
BACK_OFF_MS = 1_000.0
LONGEST_BACK_OFF_MS = 30_000.0


class Beginning:
    """Begins checkpoints for one member."""

    def __init__(
        self,
        member: Membership,
        shown: Shown,
        outbox: Outbox,
        policy: CheckpointOptions,
        rng: Random,
        has_news: Callable[[], bool],
        is_outgrown: Callable[[], bool],
    ) -> None:
        """has_news: whether a cut would say something that the newest checkpoint does not see.

        is_outgrown: whether one of our pieces waits for a cut to be begun again.
        """
        self._member = member
        self._shown = shown
        self._outbox = outbox
        self._policy = policy
        self._rng = rng
        self._has_news = has_news
        self._is_outgrown = is_outgrown
        #: Whether the program has asked for a checkpoint that is not begun, and the barrier that was open then, for
        #: which something was cut before: it is not the one that is asked for.
        self.is_asked: bool = False
        self._is_not = 0
        #: When our record was sent that the log has not answered; None: there is none.
        self._sent_at: float | None = None
        #: The newest checkpoint that is not passing, and when it was complete.
        self._periodic: tuple[int, float] = (0, 0.0)
        self._rebalanced_at: float = 0.0
        self._jitter_ms: float = 0.0
        #: Since when a revocation waits.
        self._revoked_since: float = inf
        #: How many barriers in a row were in vain, and until when we wait for that.
        self._failures: int = 0
        self._wait_until: float = -inf
        #: Before that no periodic one begins: nothing is done, or the last one has ended.
        self._look_at: float = -inf

    # What happens.

    @property
    def is_unanswered(self) -> bool:
        """Whether the program has asked, and the log has not answered (X14)."""
        return self.is_asked and self._sent_at is not None

    def ask(self, has_cut: bool) -> None:
        """The program asks for a checkpoint. has_cut: something was cut for the open barrier before."""
        barrier = self._shown.barrier
        if barrier is None or has_cut:
            self.is_asked, self._is_not = True, 0 if barrier is None else barrier.id

    def rebalanced(self, now: float) -> None:
        """The group has a new generation."""
        self._rebalanced_at, self._jitter_ms = now, SETTLE_MS * (1.0 + self._rng.random())

    def answered(self, is_accepted: bool) -> None:
        """Our BeginCheckpoint was applied: a barrier is open, or another member was faster."""
        self._sent_at = None
        barrier = self._shown.barrier
        if is_accepted or (barrier is not None and barrier.id != self._is_not):
            self.is_asked = False

    def closed(self, barrier: Barrier, is_complete: bool, is_left: bool, now: float) -> None:
        """A barrier is closed: did it do what it was begun for? is_left: not for one of our outgrown pieces."""
        found = self._shown.checkpoints
        group = self._member.group
        is_in_vain = is_left or not is_complete
        if is_complete and found is not None and group is not None:
            waiting = [part for key in found.revoked for part in group.pieces[key[0]][key[1]]]
            is_in_vain = is_left or any(0 <= part.revoked <= barrier.id for part in waiting)
        self._failures = self._failures + 1 if is_in_vain else 0
        self._revoked_since = inf
        if not is_complete and self._policy.every_ms is not None:
            self._look_at = now + self._policy.every_ms  # a periodic one waits for its next turn
        if self._failures:
            longest = self._policy.every_ms or LONGEST_BACK_OFF_MS
            wait_ms = min(longest, BACK_OFF_MS * 2.0 ** min(self._failures - 1, 20))
            self._wait_until = now + wait_ms

    def forget(self) -> None:
        """We are no longer a member."""
        self.is_asked, self._sent_at = False, None
        self._failures, self._wait_until, self._revoked_since = 0, -inf, inf

    # Time.

    def step(self, leaves: bool, now: float) -> None:
        """Begin a checkpoint if it is time. leaves: we want to leave."""
        found = self._shown.checkpoints
        if found is None:
            return
        self._note(now)
        if found.barrier is not None:
            return
        if self._sent_at is not None and now < self._sent_at + self._member.interval_ms:
            return
        if now >= self._wanted_at(leaves, now):
            self._begin(passing=True, now=now)
        elif self.is_asked or now >= self._periodic_at(leaves, now):
            self._begin(passing=False, now=now)

    def _note(self, now: float) -> None:
        found = self._shown.checkpoints
        assert found is not None
        newest = next((each for each in reversed(found.kept) if each.kind != PASSING), None)
        if newest is not None and newest.id != self._periodic[0]:
            self._periodic = (newest.id, now - max(0, self._shown.log_time - newest.log_time))
        if not (found.revoked or self._is_outgrown()):
            self._revoked_since = inf
        elif self._revoked_since == inf:
            self._revoked_since = now

    def _turn_ms(self) -> float:
        return self._shown.rank * TURN_SHARE * self._member.options.session_timeout_ms

    def _wanted_at(self, leaves: bool, now: float) -> float:
        """When a passing one begins: for our leaving, or a hand-over."""
        if self.is_asked:
            return inf  # the one that was asked for does that, too
        if leaves:
            return self._wait_until
        if self._revoked_since == inf:
            return inf
        at = min(self._rebalanced_at + self._jitter_ms, self._revoked_since + LONGEST_WAIT_MS)
        return max(at + self._turn_ms(), self._wait_until)

    def _periodic_at(self, leaves: bool, now: float) -> float:
        """When the next periodic one begins; inf: not now, as nothing is done."""
        if self._policy.every_ms is None or leaves:
            return inf
        at = self._periodic[1] + self._policy.every_ms + self._turn_ms()
        if now < max(at, self._look_at):
            return max(at, self._look_at)
        found = self._shown.checkpoints
        if (found is not None and found.kept[-1].kind == PASSING) or self._has_news():
            return now
        self._look_at = now + self._member.interval_ms
        return inf

    def _begin(self, *, passing: bool, now: float) -> None:
        found = self._shown.checkpoints
        assert found is not None
        self._sent_at = now
        keep = 0 if passing else self._policy.keep
        record = BeginCheckpoint(
            *self._member.settings.ids, found.newest, self._policy.timeout_ms, keep, self._policy.hold
        )
        self._outbox.append(self._member.home, record)

    def deadline(self, leaves: bool, now: float) -> float:
        """When something is due again (own clock, ms)."""
        found = self._shown.checkpoints
        if found is None or found.barrier is not None:
            return inf
        times = [self._wanted_at(leaves, now)]
        if self.is_asked:
            times.append(now)
        if self._policy.every_ms is not None and not leaves:
            times.append(max(self._periodic[1] + self._policy.every_ms + self._turn_ms(), self._look_at))
        again = -inf if self._sent_at is None else self._sent_at + self._member.interval_ms
        return max(min(times), again)
