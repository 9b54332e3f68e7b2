"""One consumer's logic: which leases to claim and let go, where to start, when to call the user back.

Each assignment walks the stages of :mod:`kafka_marshal.engine.assignment`; this module moves it. Handing messages
out is :mod:`kafka_marshal.engine.delivery`; whom to claim from is a policy's business.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, NoReturn

from kafka_marshal.engine.assignment import Assignment, Stage
from kafka_marshal.engine.delivery import Delivery
from kafka_marshal.engine.effects import Call, Callback, LookUp, StartFetch, StopFetch, Warn
from kafka_marshal.engine.leases import LeaseState, Loss, Outbox
from kafka_marshal.engine.past import Past
from kafka_marshal.engine.placement import Placement
from kafka_marshal.engine.policies import Policy, Wishes
from kafka_marshal.engine.ranges import RangeDelivery
from kafka_marshal.engine.stuck import LOOK_UP_AGAIN_MS, StuckPartitions, Why
from kafka_marshal.engine.subscription import Subscription
from kafka_marshal.engine.topic_mark import TopicMarks, split
from kafka_marshal.engine.tracker import beyond
from rationalizer import CommitRanges, Record
from rationalizer.limits import MAX_COMMIT_RANGES, MAX_OFFSET

if TYPE_CHECKING:
    from kafka_marshal.engine.core import Engine

__all__ = ["HUNG", "ConsumerEngine", "ConsumerSettings", "Loss"]

Key = tuple[str, int]

#: Why an assignment is let go when an admin pauses the group.
PAUSED = "the group is paused"

#: Why it is let go where we may want it back at once (Wishes.surplus), and where not.
SURPLUS = "others are waiting and this member holds more than its share"
UNWANTED = "the policy of this member lets it go"

#: All is released: the user's threads have not come back.
HUNG = "no handler of this member has come back within handler_timeout"

#: An evicted member leaves the partition to others for this many heartbeat intervals (C18).
EVICTED_INTERVALS = 3


def _raise(error: BaseException) -> NoReturn:
    raise error


@dataclass(frozen=True, slots=True)
class ConsumerSettings:
    """What a consumer was asked for."""

    at_most_once: bool
    policy: Policy
    #: "earliest", "latest" or a datetime: where the group begins on partitions it never held (P9).
    start: str | datetime
    batch_size: int
    handler_timeout_ms: float | None
    #: Which callbacks the user gave.
    callbacks: frozenset[Callback]
    #: Ranges of offsets are handed out, not messages; nothing is fetched.
    ranges: bool = False
    #: Why a partition may stand still so that the user's next call raises it, once; all else is only logged and listed.
    raises: frozenset[Why] = frozenset()
    #: Called with what the policy raised: to log it, and to pass on what a signal raised in it.
    policy_raised: Callable[[BaseException], object] = _raise


class ConsumerEngine:
    """All assignments of one subscription. Called under the shell's lock, with our own clock's now (ms)."""

    def __init__(self, number: int, engine: Engine, subscription: Subscription, settings: ConsumerSettings) -> None:
        self.number = number
        self.settings = settings
        self.subscription = subscription
        self.assignments: dict[Key, Assignment] = {}
        #: Those of them for which something may come due: all that are not merely handed out. There may be thousands.
        self._restless: dict[Key, Assignment] = {}
        #: The hand-out of ranges; None: messages are handed out.
        self.ranges = RangeDelivery(self) if settings.ranges else None
        self.delivery: Delivery = self.ranges or Delivery(self, settings.batch_size)
        self.placement = Placement(self, engine.observer, engine.settings)
        #: Errors to be raised from the user's next call, oldest first.
        self.errors: list[Exception] = []
        #: Offsets that retention took before they were handed out, as (key, first, last) (P9).
        self.gaps: list[tuple[Key, int, int]] = []
        #: Lost positions: left alone until somebody sets them (P11).
        self.blocked: set[Key] = set()
        self.stuck = StuckPartitions(self, engine.settings.group_id)
        self.marks = TopicMarks(engine.observer, subscription)
        #: Callbacks of the user that were called and have not returned, also those about what is lost by now.
        self.callbacks_running = 0
        self.closing = False
        #: Why all is released and nothing claimed, as of the last step; "": it is not. Read without a lock.
        self.let_go_why = ""
        self._close_at = 0.0
        self._engine = engine
        #: Of use only where a group does not begin at the earliest offset: there may be thousands of leases to look at.
        self._past = None if settings.start == "earliest" else Past(engine.observer)

    @property
    def at_most_once(self) -> bool:
        """Whether batches are claimed before they are handed out (C13)."""
        return self.settings.at_most_once

    # Small helpers for the other parts.

    @property
    def ids(self) -> tuple[str, str, str]:
        """What every record of ours begins with."""
        return self._engine.ids

    @property
    def outbox(self) -> Outbox:
        """Where effects go."""
        return self._engine.outbox

    def append(self, assignment: Assignment, record: Record) -> None:
        """Append a record about an assignment."""
        self._engine.outbox.append(assignment.lease.cp, record)

    def beat(self, assignment: Assignment, last_offset: int, now: float) -> None:
        """Beat one lease out of turn, with an offset."""
        self._engine.book.beat(assignment.lease, last_offset, now)

    def warn(self, message: str) -> None:
        """Tell people."""
        self._engine.outbox.add(Warn(message))

    def known_stable(self, key: Key) -> int:
        """Stable as our replica knows it."""
        lease = self._engine.observer.lease(key)
        return -1 if lease is None else lease.progress.stable

    def is_taken(self, key: Key) -> bool:
        """Does this Marshal hold or want the lease already?"""
        return self._engine.is_taken(key)

    @property
    def is_moving(self) -> bool:
        """Whether an assignment begins or ends."""
        return bool(self._restless)

    def look_after(self, assignment: Assignment) -> None:
        """Something may come due for an assignment: its stage is to be left, or its grant waits for an answer."""
        if self.assignments.get(assignment.key) is assignment:
            self._restless[assignment.key] = assignment

    def _enter(self, assignment: Assignment, stage: Stage) -> None:
        assignment.stage = stage
        if stage is not Stage.ACTIVE:
            self.look_after(assignment)

    def _call(self, callback: Callback, assignment: Assignment) -> None:
        if callback in self.settings.callbacks:
            assignment.callbacks_running += 1
            self.callbacks_running += 1
            self._engine.outbox.add(Call(self.number, callback, (assignment,)))

    # Claiming and its answers.

    def claim(self, key: Key, now: float, *, take_over: bool = False) -> None:
        """Reach for a lease."""
        assignment = Assignment(key, self)
        assignment.first_claim = key not in self._engine.observer.claimed
        assignment.lease = self._engine.book.want(key, self._engine.observer.cp_of(key), assignment)
        self.assignments[key] = assignment
        self.look_after(assignment)
        self.placement.touched(key)
        self._engine.book.claim(assignment.lease, now, take_over=take_over)

    def on_refused(self, assignment: Assignment, code: str, now: float) -> None:
        """Somebody else was faster, or holds it still."""
        self._engine.book.drop(assignment.lease)
        self._remove(assignment)

    def on_granted(self, assignment: Assignment, now: float) -> None:
        """The lease is ours: find out where to start (P9)."""
        self.placement.changed(assignment.key)
        assignment.first_claim = assignment.first_claim and assignment.key not in self._engine.observer.claimed
        self._begin(assignment)
        assignment.is_new = assignment.first_claim and assignment.key not in self.subscription.grown
        self.marks.begun(assignment)
        self._locate(assignment, now)

    def _begin(self, assignment: Assignment) -> None:
        """Start anew with what the log says is done."""
        lease = self._engine.observer.lease(assignment.key)
        if lease is None:
            raise AssertionError("a granted lease is in the state of the world")
        stable, ranges = lease.progress.stable, split(lease.progress.ranges).ranges
        assignment.begin(stable + 1, stable, ranges)

    def _locate(self, assignment: Assignment, now: float) -> None:
        """Find out where to start, in the topic that is there (P9, P12)."""
        is_made_anew = self.marks.is_made_anew(assignment.key)
        if is_made_anew is not False:
            self._enter(assignment, Stage.IDENTIFYING)
            if is_made_anew:
                self._position_lost(assignment, assignment.fetch_next, None, None, now)
                return
            self._engine.want_ids()
        elif assignment.is_new and self._past is not None:
            self._enter(assignment, Stage.LOCATING)
            claims_before = self._past.claims_before(assignment.key)
            self._engine.outbox.add(LookUp(assignment, self.settings.start, claims_before))
        elif not self.closing:
            self._assign(assignment)
        if self.closing:
            self.revoke(assignment, "the consumer closes", now)

    def topics_told(self, now: float) -> None:
        """The ids of topics may be known now (P12)."""
        for assignment in [x for x in self._restless.values() if x.stage is Stage.IDENTIFYING and x.lease.held]:
            if self.marks.is_made_anew(assignment.key) is not None:
                self._locate(assignment, now)

    def located(self, assignment: Assignment, low: int, high: int, start: int, now: float) -> None:
        """The leader told the partition's log start and end, and the start offset asked for."""
        self.stuck.answered(assignment, high)
        if assignment.over or assignment.stage is not Stage.LOCATING or not assignment.lease.held:
            return
        position = assignment.fetch_next
        if assignment.first_claim:
            position = max(position, start)
        elif position > high:
            self._position_lost(assignment, position, low, high, now)
            return
        if position < low:
            if position > 0 or not assignment.is_new:
                self._gap(assignment, position, low - 1)
            position = low
        assignment.is_new = False
        if assignment.releasing:  # only its start was waited for
            assignment.start_beat = position - 1
            self._enter(assignment, Stage.POSITIONING)
            self.revoke(assignment, assignment.releasing, now)
        elif position == assignment.fetch_next:
            self._assign(assignment)
        elif assignment.tracker.runs or assignment.buffered:  # what was fetched before the gap is handed out first
            assignment.tracker.done.commit([(assignment.fetch_next, position - 1)])
            assignment.go_on_at(position)
            self._assign(assignment)
        else:
            self._enter(assignment, Stage.POSITIONING)
            assignment.start_beat = position - 1
            self._beat_start(assignment, now)

    def _beat_start(self, assignment: Assignment, now: float) -> None:
        if assignment.start_beat is not None:
            assignment.start_beat_sent = now
            self.beat(assignment, assignment.start_beat, now)

    def on_beaten(self, assignment: Assignment, last_offset: int | None, accepted: bool, now: float) -> None:
        """A beat was applied; P9's lets us start."""
        if assignment.stage is Stage.POSITIONING and accepted and last_offset == assignment.start_beat:
            assignment.start_beat = None
            self._begin(assignment)
            self._assign(assignment)

    def _assign(self, assignment: Assignment) -> None:
        self.placement.changed(assignment.key)
        if assignment.fetch_next <= MAX_OFFSET:
            self._engine.outbox.add(StartFetch(self.number, assignment.key, assignment.fetch_next))
        if not assignment.shown:
            assignment.shown = True
            self._call(Callback.ASSIGN, assignment)
        self._enter(assignment, Stage.ASSIGNING if assignment.callbacks_running else Stage.ACTIVE)

    def called(self, assignment: Assignment, callback: Callback, now: float) -> None:
        """A callback of the user has returned (or raised)."""
        assignment.callbacks_running -= 1
        self.callbacks_running -= 1
        if assignment.stage is Stage.ASSIGNING and not assignment.callbacks_running:
            assignment.stage = Stage.ACTIVE
        elif assignment.stage is Stage.REVOKING:
            self.try_finish(assignment, now)

    # Faults while reading.

    def out_of_range(self, key: Key, now: float) -> None:
        """The reader's position is not in the log: ask the leader what is (P9, P11)."""
        assignment = self.assignments.get(key)
        if assignment is not None and assignment.stage in (Stage.ASSIGNING, Stage.ACTIVE):
            self._enter(assignment, Stage.LOCATING)
            assignment.first_claim = False
            position, asked_at = assignment.looked_up
            # A reader that comes back at once, though the leader says that we stand in its log, is not asked for more.
            is_again = position == assignment.fetch_next and now < asked_at + LOOK_UP_AGAIN_MS
            assignment.look_up_at = asked_at + LOOK_UP_AGAIN_MS if is_again else now
            self._look_up_if_due(assignment, now)

    def _look_up_if_due(self, assignment: Assignment, now: float) -> None:
        if assignment.look_up_at is not None and now >= assignment.look_up_at:
            assignment.looked_up, assignment.look_up_at = (assignment.fetch_next, now), None
            self._engine.outbox.add(LookUp(assignment, "earliest"))

    def topic_recreated(self, topic: str, now: float) -> None:
        """A topic of ours has another id: positions in it mean nothing, whoever holds them now (P11)."""
        for key in [key for key in self.subscription.partitions if key[0] == topic]:
            assignment, lease = self.assignments.get(key), self._engine.observer.lease(key)
            if assignment is not None and assignment.lease.held:
                self._position_lost(assignment, assignment.fetch_next, None, None, now)
            elif lease is not None and (lease.held or lease.progress.stable >= 0):
                if assignment is not None:
                    self.revoke(assignment, "the topic was made anew", now)
                if not lease.held:
                    self._report_position(key, lease.progress.stable + 1, None, None, now)
                self.blocked.add(key)
                self.placement.changed(key)

    def unblock(self, keys: Collection[Key]) -> None:
        """Somebody has set the positions of these."""
        self.blocked.difference_update(keys)
        self.stuck.forget(keys)

    def _gap(self, assignment: Assignment, first: int, last: int) -> None:
        self.gaps.append((assignment.key, first, last))
        self.warn(
            f"{assignment.key[0]} [{assignment.key[1]}]: offsets {first} to {last} are gone from the log (retention or "
            "deletion) before this group handled them; going on at the log start"
        )

    def _position_lost(
        self, assignment: Assignment, position: int, low: int | None, high: int | None, now: float
    ) -> None:
        self._report_position(assignment.key, position, low, high, now)
        self.blocked.add(assignment.key)
        self._engine.book.lose(assignment.lease, Loss.POSITION, now)

    def _report_position(self, key: Key, position: int, low: int | None, high: int | None, now: float) -> None:
        where = "the topic was made anew" if high is None else f"the log holds offsets {low} to {high}"
        topic, partition = key
        text = (
            f"{topic} [{partition}]: position lost: this group goes on at offset {position}, but {where}. Nothing of "
            "this partition is handed out to any member until its position is set; other partitions go on. Set it: "
            f"kafka-marshal release-group {self._engine.settings.group_id} --partition {topic}:{partition}=OFFSET "
            "(or =earliest)"
        )
        self.stuck.position_lost(key, position, text, now)

    # Letting go.

    def revoke(self, assignment: Assignment, why: str, now: float) -> None:
        """Let an assignment go: finish what is in hand, then release with the offset."""
        if assignment.over or assignment.stage is Stage.REVOKING:
            return
        if not assignment.lease.held:
            self._engine.book.drop(assignment.lease)
            self._remove(assignment)
            return
        assignment.releasing = why
        assignment.lease.stopped = True
        assignment.lease.refresh()
        if (
            assignment.stage is Stage.LOCATING
            and assignment.first_claim
            and not (self.closing and now >= self._close_at)
        ):
            return  # released before its start is known, the next holder would begin at the earliest offset (P9)
        self._enter(assignment, Stage.REVOKING)
        if not self.at_most_once:
            self.delivery.recall(assignment, keep=False)
        assignment.drop_buffer()
        if assignment.shown:
            self._engine.outbox.add(StopFetch(self.number, assignment.key))
            self._call(Callback.REVOKE, assignment)
        self.try_finish(assignment, now)

    def try_finish(self, assignment: Assignment, now: float) -> None:
        """Release a revoked assignment once its callback has returned and nothing is in hand any more."""
        if assignment.stage is not Stage.REVOKING or assignment.callbacks_running or not assignment.lease.held:
            return
        assignment.tracker.follow()
        if assignment.tracker.runs and not self.closing:
            return
        self._release(assignment, now)

    def reread(self, assignment: Assignment) -> None:
        """Fetch again from what the log says is done."""
        if assignment.stage is Stage.ACTIVE:
            self._begin(assignment)
            self._assign(assignment)

    def _release(self, assignment: Assignment, now: float) -> None:
        assignment.ranges_due = now
        self.commit_ranges(assignment, now)
        self._enter(assignment, Stage.RELEASED)
        last_offset = self._unreported(assignment)
        if last_offset is not None or self.known_stable(assignment.key) >= 0:
            self.marks.released(assignment, now)
        self._engine.book.release(assignment.lease, last_offset, now)
        if assignment.releasing not in (PAUSED, SURPLUS):  # what a pause takes goes to whoever is first after it
            self.placement.leave_alone(assignment.key, now)

    def _unreported(self, assignment: Assignment) -> int | None:
        """The last_offset for a release: what is done without a gap, or the start (P9), unless the log knows it."""
        done = assignment.done_through()
        if assignment.start_beat is not None:
            done = max(done, assignment.start_beat)
        return done if done > self.known_stable(assignment.key) else None

    def on_released(self, assignment: Assignment, now: float) -> None:
        """The log shows the release."""
        self._remove(assignment)

    def on_lost(self, assignment: Assignment, reason: str, now: float) -> None:
        """The lease is over, not by our will: purge, tell the user, keep what was done if nobody else holds it."""
        if assignment.over:
            self._remove(assignment)
            return
        was_claiming = assignment.stage is Stage.CLAIMING
        assignment.tracker.follow()
        if assignment.tracker.runs:
            self.delivery.overdue()  # whoever had it in hand may hang: until a thread is back, it works on nothing else
        self._enter(assignment, Stage.LOST)
        if reason == Loss.EVICTED:
            self.delivery.taken_away(assignment, now)
            self.placement.leave_alone(assignment.key, now, EVICTED_INTERVALS)
        assignment.drop_buffer()
        self._remove(assignment)
        self.delivery.give_up(assignment, now)
        if was_claiming:
            return
        self._engine.outbox.add(StopFetch(self.number, assignment.key))
        if assignment.shown or reason == Loss.POSITION:
            self._call(Callback.LOST, assignment)
        if reason in (Loss.UNPROVEN, Loss.HANDLER_TIMEOUT, Loss.POSITION, Loss.TOPIC_GONE):
            last_offset = self._unreported(assignment)
            self._engine.book.release_epoch(assignment.key, assignment.lease.cp, assignment.epoch, last_offset)

    def _remove(self, assignment: Assignment) -> None:
        if self.assignments.get(assignment.key) is assignment:
            del self.assignments[assignment.key]
            self._restless.pop(assignment.key, None)
            self.stuck.let_go(assignment.key)
        self.placement.changed(assignment.key)

    # Progress.

    def commit_ranges(self, assignment: Assignment, now: float) -> None:
        """Commit what is done beyond a gap and the log does not know (P6); again after HI if it still does not."""
        assignment.tracker.follow()
        if self.at_most_once or not assignment.tracker.has_islands:
            return
        lease = self._engine.observer.lease(assignment.key)
        if lease is None:
            return
        new = beyond(assignment.tracker.done.ranges, lease.progress.ranges)
        if not new or (new == assignment.reported_ranges and now < assignment.ranges_due):
            return
        assignment.reported_ranges = new
        assignment.ranges_due = now + lease.heartbeat_interval_ms
        for place in range(0, len(new), MAX_COMMIT_RANGES):
            chunk = tuple(new[place : place + MAX_COMMIT_RANGES])
            self.append(assignment, CommitRanges(*self.ids, *assignment.key, assignment.epoch, chunk))

    def seek(self, key: Key, offset: int) -> bool:
        """Go forward: everything below offset is done elsewhere. False: not assigned, or backwards."""
        assignment = self.assignments.get(key)
        if assignment is not None and not self.at_most_once:
            self.delivery.recall(assignment)
        if assignment is None or not assignment.shown or assignment.releasing or offset < assignment.position:
            return False
        assignment.tracker.done.through(offset - 1)
        ahead = offset > assignment.fetch_next
        assignment.skip_to(offset)
        if ahead and assignment.stage in (Stage.ASSIGNING, Stage.ACTIVE):
            self._engine.outbox.add(StartFetch(self.number, key, offset))
        return True

    # Time.

    def step(self, now: float, silent_cps: frozenset[int]) -> None:
        """Do what is due: pauses, slow handlers, answers that did not come, the policy's wishes.

        silent_cps: paused, or not to be followed any further; elsewhere nothing is due for most assignments.
        """
        timeout = self.settings.handler_timeout_ms
        every = timeout is not None or bool(silent_cps)
        for assignment in list((self.assignments if every else self._restless).values()):
            if assignment.stage is not Stage.ACTIVE or assignment.grant is not None:
                self._step_one(assignment, now)
            else:
                self._restless.pop(assignment.key, None)
                if timeout is not None or assignment.lease.cp in silent_cps:
                    self._step_one(assignment, now)
        if self.closing:
            return
        self.let_go_why = why = self._lets_all_go(now)
        if why:
            for assignment in list(self.assignments.values()):
                self.revoke(assignment, why, now)
            return
        if self.delivery.evicted and self.delivery.has_returned():
            self.placement.dirty = True
        wishes = self.placement.wishes(now)
        if wishes is not None:
            self._act(wishes, now)

    def _lets_all_go(self, now: float) -> str:
        """Why all is released and nothing claimed; "": it is not."""
        timeout = self.settings.handler_timeout_ms
        if self._engine.draining:
            return "an operator asked this member to hand over (kafka-marshal drain)"
        if timeout is not None and self.delivery.is_hung(now, timeout):  # until a thread of the user's comes back
            return HUNG
        return ""

    def _step_one(self, assignment: Assignment, now: float) -> None:
        hi = self._engine.settings.heartbeat_interval_ms
        lease = assignment.lease
        stopped = self._engine.observer.is_stopped(lease.cp)
        if assignment.stage is Stage.CLAIMING:
            if lease.state is LeaseState.WANTED and (stopped or now >= (lease.claim_sent_at or 0.0) + hi):
                self._engine.book.drop(lease)
                self._remove(assignment)
            return
        if assignment.stage is Stage.POSITIONING and now >= assignment.start_beat_sent + hi:
            self._beat_start(assignment, now)
        if (
            assignment.grant is not None
            and assignment.grant.accepted is None
            and now >= assignment.grant.sent_at + hi / 2
        ):
            self.delivery.send_grant(assignment, now)
        if assignment.over:
            return
        if assignment.stage is Stage.LOCATING:
            self._look_up_if_due(assignment, now)
        if assignment.stage is Stage.LOCATING and self.closing and now >= self._close_at:
            self.revoke(assignment, assignment.releasing, now)
        if stopped:
            self.revoke(assignment, "its part of the coordination topic needs a newer release", now)
        elif self._engine.observer.paused_until(lease.cp, now) is not None:
            self.revoke(assignment, PAUSED, now)
        timeout = self.settings.handler_timeout_ms
        if timeout is not None and lease.held:
            oldest = assignment.tracker.oldest_in_hand(now)
            if oldest is not None and now >= oldest + timeout:
                self._engine.book.lose(lease, Loss.HANDLER_TIMEOUT, now)
                return
        if assignment.stage is Stage.REVOKING:
            self.try_finish(assignment, now)

    def _act(self, wishes: Wishes, now: float) -> None:
        for key in wishes.release:
            if (assignment := self.assignments.get(key)) is not None:
                self.revoke(assignment, SURPLUS if key in wishes.surplus else UNWANTED, now)
        for key in wishes.claim:
            if not self._engine.is_taken(key):
                self.claim(key, now)

    def deadline(self, now: float) -> float:
        """When ``step`` has something to do again."""
        hi = self._engine.settings.heartbeat_interval_ms
        timeout = self.settings.handler_timeout_ms
        times = [] if self.closing or self._lets_all_go(now) else [self.placement.deadline]
        for assignment in (self._restless if timeout is None else self.assignments).values():
            if (grant := assignment.grant) is not None and grant.accepted is None:
                times.append(grant.sent_at + hi / 2)
            if assignment.stage is Stage.CLAIMING:
                times.append((assignment.lease.claim_sent_at or now) + hi)
            elif assignment.stage is Stage.LOCATING:
                times += [self._close_at] if self.closing else []
                times += [assignment.look_up_at] if assignment.look_up_at is not None else []
            elif assignment.stage is Stage.POSITIONING:
                times.append(assignment.start_beat_sent + hi)
            elif timeout is not None and (oldest := assignment.tracker.oldest_in_hand(now)) is not None:
                times.append(oldest + timeout)
        return min(times, default=float("inf"))

    def close(self, now: float) -> None:
        """Let everything go at once: what is in hand and not done stays not done."""
        self.closing = True
        self._close_at = now + self._engine.settings.heartbeat_interval_ms
        for assignment in list(self.assignments.values()):
            self.delivery.give_up(assignment, now)
            self.revoke(assignment, "the consumer closes", now)

    @property
    def closed(self) -> bool:
        """Everything is released as far as the log has told."""
        return self.closing and not self.assignments
