"""One partition that a consumer works on, from the granted lease to its end.

::

    (lease granted) ─▶ IDENTIFYING ─▶ LOCATING ─▶ POSITIONING ─▶ ASSIGNING ─▶ ACTIVE ─▶ REVOKING ─▶ RELEASED
                       compare the    ask the     beat           on_assign    hand     finish what
                       topic's id     leader      start−1        returns      out      is in flight
                                                                    ▲                     │
                                                                    └─────────────────────┘
                                                            the reason for its release has ended
    any of them ─▶ LOST (fenced, not proven in time, handler too slow, position lost)

Between POSITIONING and ASSIGNING, a partition that is processed in transactions is taken over: TAKING_OVER
(:mod:`.taking_over`). It returns there whenever it needs a new producer and may no longer be where it was. In a group
that takes checkpoints, its state is restored there: RESTORING (:class:`.consumer.Cutting`).

REVOKING has a limit: what is in flight after ``revoke_timeout`` (or a message's ``handler_timeout``) is left behind.

IDENTIFYING is skipped if the id is known or there is nothing to compare it with; LOCATING if the log knows a position;
POSITIONING if that position is stable + 1; ASSIGNING if there is no callback. Messages are handed out only in ACTIVE,
and only while the lease is proven.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from itertools import groupby
from math import inf
from typing import Protocol

from kafka_marshal.engine.effects import Callback, Outbox, Piece, StartFetch
from kafka_marshal.engine.figures import MessageTotals
from kafka_marshal.engine.holding import HandIn, Holding
from kafka_marshal.engine.plane import Loss, PartitionSource, Settles
from kafka_marshal.engine.redone import RedoneMessages
from kafka_marshal.engine.settings import MAX_IN_HAND_MESSAGES, ConsumerSettings
from kafka_marshal.engine.work import tracker
from kafka_marshal.engine.work.open_messages import MOST_AHEAD, OpenOffsets, last_fetched
from kafka_marshal.engine.work.run import Run as RunOf
from kafka_marshal.engine.work.run import offset_of
from kafka_marshal.engine.work.tracker import Buffer
from kafka_marshal.ports import Message
from kafka_marshal.types import Key
from rationalizer import Progress
from rationalizer.limits import MAX_COMMIT_RANGES


class Told:
    """What was reported to the log of an assignment, and when to resend it."""

    __slots__ = (
        "has_come",
        "mark_sent_at",
        "ranges",
        "ranges_due",
        "revoked_at",
        "start_beat",
        "start_beat_sent",
        "topic_id",
    )

    def __init__(self) -> None:
        #: The last_offset of the start beat (P9) under way; None: there is none.
        self.start_beat: int | None = None
        self.start_beat_sent: float = 0.0
        #: The ranges of the last CommitRanges, and when to resend them.
        self.ranges: list[tuple[int, int]] = []
        self.ranges_due: float = 0.0
        #: When the mark of its topic was sent (P12); None: not yet, or the log had it already.
        self.mark_sent_at: float | None = None
        #: The id of the topic in which it began; None: not known yet. The name may be that of another topic by now.
        self.topic_id: str | None = None
        #: Whether messages of it have come: the mark goes ahead of what will be done of them.
        self.has_come: bool = False
        #: Since when (own clock, ms) its release waits for messages in flight.
        self.revoked_at: float = 0.0


class Watch:
    """The known end of an assignment's log, and since when nothing has arrived; for StuckPartitions."""

    __slots__ = ("asked_at", "asked_end", "log_end", "look_up_at", "looked_up", "quiet")

    def __init__(self) -> None:
        #: The next offset at the last check, and since when it has been the next one.
        self.quiet: tuple[int, float] | None = None
        #: The position and time of the last look-up at the leader; when the next one is due (None: not at all).
        self.looked_up: tuple[int, float] = (-1, 0.0)
        self.look_up_at: float | None = None
        self.log_end: int | None = None
        #: The log end that the leader reported, and when it was last asked (or the position last moved).
        self.asked_end: int = 0
        self.asked_at: float = 0.0


class Stage(StrEnum):
    """The stage of an assignment."""

    CLAIMING = "claiming"
    IDENTIFYING = "identifying"
    LOCATING = "locating"
    POSITIONING = "positioning"
    TAKING_OVER = "taking over"
    RESTORING = "restoring"
    ASSIGNING = "assigning"
    ACTIVE = "active"
    REVOKING = "revoking"
    RELEASED = "released"
    LOST = "lost"


_WORK = (Stage.ASSIGNING, Stage.ACTIVE)
_BEGIN = (Stage.TAKING_OVER, Stage.RESTORING, *_WORK)

#: The stages that may follow each stage; LOST may follow all but the last two.
MOVES: Mapping[Stage, tuple[Stage, ...]] = {
    Stage.CLAIMING: (Stage.IDENTIFYING, Stage.LOCATING, *_BEGIN, Stage.REVOKING),
    Stage.IDENTIFYING: (Stage.IDENTIFYING, Stage.LOCATING, *_BEGIN, Stage.REVOKING),
    Stage.LOCATING: (Stage.POSITIONING, *_BEGIN, Stage.REVOKING),
    Stage.POSITIONING: (*_BEGIN, Stage.REVOKING),
    Stage.TAKING_OVER: (Stage.POSITIONING, *_WORK, Stage.REVOKING),
    Stage.RESTORING: (*_WORK, Stage.REVOKING),
    Stage.ASSIGNING: (Stage.TAKING_OVER, Stage.ACTIVE, Stage.LOCATING, Stage.REVOKING),  # LOCATING: out of range
    Stage.ACTIVE: (*_BEGIN, Stage.LOCATING, Stage.REVOKING),
    Stage.REVOKING: (Stage.RELEASED, *_BEGIN),  # back to work: the reason for the release has ended
    Stage.RELEASED: (),
    Stage.LOST: (),
}

#: Stages that report progress to the log. (LOCATING: it went out of range during work; otherwise nothing is new.)
REPORTING = (Stage.LOCATING, Stage.TAKING_OVER, Stage.ACTIVE, Stage.REVOKING)

#: Stages that count as ours for the source: it is not being released.
_KEPT = (Stage.CLAIMING, Stage.LOCATING, Stage.POSITIONING, *_BEGIN)


class Revoking(Protocol):
    """Ends assignments."""

    def revoke(self, assignment: Assignment, why: str, now: float) -> None:
        """Revoke an assignment: finish what is in flight, then release it with its offset."""

    def try_finish(self, assignment: Assignment, now: float) -> None:
        """Release a revoked assignment once its callback has returned and nothing is in flight."""

    def lost(self, assignment: Assignment, reason: str, now: float) -> None:
        """The lease has ended without our release."""


class Scheduling(Protocol):
    """Knows what is due for assignments, and when."""

    pending: dict[Key, Assignment]

    def look_after(self, assignment: Assignment) -> None:
        """Check it at each step: its stage is temporary, or its grant waits for an answer."""


class Marking(Protocol):
    """Has the log say of which topic a position is (P12)."""

    def come(self, assignment: Assignment) -> None: ...

    def ahead(self, assignment: Assignment, now: float, *, again: bool = False) -> None: ...


class Reporting(Protocol):
    """Reports partitions that are stuck."""

    def no_transaction(self, assignment: Assignment, text: str, now: float) -> None:
        """It can't be processed in transactions at present."""

    def has_transactions(self, key: Key, now: float) -> None:
        """It can again."""


class Positioning(Protocol):
    """Knows where assignments start."""

    def granted(self, assignment: Assignment, now: float) -> None:
        """The log granted the lease."""

    def beaten(self, assignment: Assignment, last_offset: int | None, accepted: bool, now: float) -> None:
        """A beat was applied."""

    def look_up(self, assignment: Assignment) -> None:
        """Ask the leader where the partition's log starts and ends."""

    def located(self, assignment: Assignment, low: int, high: int, start: int, now: float) -> None:
        """The leader reported the partition's log start and end, and the requested start offset."""

    def out_of_range(self, key: Key, now: float) -> None:
        """The reader's position is not in the log."""

    def begin(self, assignment: Assignment) -> None:
        """Start again from the progress in the log."""

    def assign(self, assignment: Assignment) -> None:
        """Fetch from its position, and call on_assign; if transactions need it, take it over before."""

    def start_at(self, assignment: Assignment, start: int, now: float) -> None:
        """Report to the log that it starts there, and begin once that is accepted (M2)."""

    def foreign_offset(self, assignment: Assignment, offset: int, metadata: str, other_log: str, now: float) -> None:
        """Another program committed in Kafka for this group (M7): deliver nothing until the position is set."""

    @property
    def stuck(self) -> Reporting: ...

    @property
    def marks(self) -> Marking: ...

    def reread(self, assignment: Assignment) -> None:
        """Fetch again from the progress in the log."""


class Opening(Protocol):
    """What an assignment's open messages are reported with."""

    def applied(self, assignment: Assignment, entries: Settles, answers: Sequence[str] | None, now: float) -> None:
        """A record with these entries was applied. answers: of our own record, what the log says of each."""

    def log_alone(self, now: float) -> None:
        """Log the try of the next message that is tried alone, right before it begins."""

    def note(self, assignment: Assignment, *, ends: bool = False) -> None:
        """Have tries in the log. ends: its lease ends in order, so that those that have not ended count for nothing."""

    def send(self, assignment: Assignment, now: float, *, ends: bool = False) -> None:
        """Send what the log does not show, with a heartbeat or before a release."""

    def parked(self, assignment: Assignment, offset: int, attempts: int, reason: str, now: float) -> None:
        """A message is set aside, which is always reported."""

    def report(self, assignment: Assignment) -> None:
        """Report open messages that are gone from the log."""


class Deliveries(Protocol):
    """Has what was delivered of assignments."""

    def drop(self, assignment: Assignment, first: int) -> None:
        """Take back what is in flight from this offset on: it comes again, and a later done of it has no effect."""

    def skip(self, assignment: Assignment, offset: int) -> None:
        """An operator has set this message aside: no handler gets it again; one that has it may finish."""

    def admit(self, assignment: Assignment, offset: int, redriven: int | None = None) -> None:
        """The log has the try of this message that is about to begin. redriven: the tries that count, if it waits."""


class Mover(Protocol):
    """The consumer engine, as assignments and its parts see it: it moves assignments from stage to stage."""

    number: int
    settings: ConsumerSettings
    outbox: Outbox
    assignments: dict[Key, Assignment]
    redone: RedoneMessages
    #: Errors that the user's next calls raise, oldest first.
    errors: list[Exception]
    closing: bool

    @property
    def source(self) -> PartitionSource: ...

    @property
    def at_most_once(self) -> bool: ...

    @property
    def positions(self) -> Positioning: ...

    @property
    def delivery(self) -> Deliveries: ...

    @property
    def revocation(self) -> Revoking: ...

    @property
    def schedule(self) -> Scheduling: ...

    @property
    def settlements(self) -> Opening: ...

    @property
    def handles_open(self) -> bool:
        """Whether it handles open messages: not in transactions, nor as ranges (U3, U6)."""

    # What the engine's parts call.

    def on_answered(self, assignment: Assignment, last_offset: int, accepted: bool, code: str, now: float) -> None: ...

    def knows(self, assignment: Assignment) -> bool:
        """Whether it is worked on, or was taken away while something of it was in flight."""

    def known_stable(self, key: Key) -> int:
        """The last offset done without a gap, as our replica knows it; -1: none."""

    def warn(self, message: str) -> None:
        """Warn the user."""

    def enter(self, assignment: Assignment, stage: Stage) -> None:
        """Move an assignment to another stage."""

    def remove(self, assignment: Assignment) -> None:
        """Forget an assignment that is over."""

    def call(self, callback: Callback, assignment: Assignment) -> None:
        """Have the user's callback called."""


class Grant:
    """A ClaimingMessages record under way, and the messages it claims."""

    __slots__ = ("accepted", "last_offset", "run", "sent_at")

    def __init__(self, run: Run, last_offset: int, sent_at: float) -> None:
        self.run: Run = run
        self.last_offset: int = last_offset
        self.sent_at: float = sent_at
        #: None: the log has not answered yet.
        self.accepted: bool | None = None

    @property
    def is_answered(self) -> bool:
        """Whether the log has answered, or the answer no longer matters."""
        assignment = self.run.assignment
        return assignment.over or assignment.grant is not self or self.accepted is not None


class TakingOver:
    """How far a partition that is processed in transactions is taken over (M2)."""

    __slots__ = ("attempt", "beat", "due", "failures", "is_done", "step")

    def __init__(self) -> None:
        #: Its producer has begun, and its position is the one that counts: transactions may be committed.
        self.is_done: bool = False
        #: What it waits for; None: for nothing, as it is done or not begun.
        self.step: TakingStep | None = None
        #: The number of its producer; an answer for an earlier one is ignored.
        self.attempt: int = 0
        #: The number of the heartbeat that was sent after the producer had begun.
        self.beat: int = 0
        #: When (own clock, ms) to do something about the step again; inf: its answer comes.
        self.due: float = inf
        #: How often it has failed in a row.
        self.failures: int = 0


class TakingStep(StrEnum):
    """What a taking over waits for."""

    PAUSING = "the next try"
    OPENING = "its producer"
    PROVING = "a heartbeat sent after that"
    READING = "Kafka's committed offset"
    SETTING = "the transaction that sets it"
    MARKING = "the mark in the log"


class Origin:
    """Whether the group begins on its partition with this assignment."""

    __slots__ = ("after_death", "claims_before", "is_first", "is_new", "log_start")

    def __init__(self, is_first: bool = False, claims_before: Mapping[int, int] | None = None) -> None:
        #: No member of the group ever held it: ``start=`` decides where to begin.
        self.is_first: bool = is_first
        #: Its last owner did not release it, so it may have died of a message.
        self.after_death: bool = False
        #: By CP, an offset that shows how old the group is; None: it begins at the earliest offset anyway.
        self.claims_before: Mapping[int, int] | None = claims_before
        #: If nothing is done, it begins at the log's start: what was removed before is older than the group, no gap.
        self.is_new: bool = False
        #: Where the partition's log starts, as the leader said before its state is restored.
        self.log_start: int = 0


class Assignment:
    """State of one assigned partition. Only its consumer engine and the engine's parts change it."""

    __slots__ = (
        "buffer",
        "callbacks_running",
        "consumer",
        "grant",
        "key",
        "lease",
        "open",
        "origin",
        "releasing",
        "shown",
        "stage",
        "taking",
        "told",
        "tracker",
        "user_paused",
        "wary",
        "watch",
    )

    #: Whether batches are claimed before they are handed out.
    at_most_once: bool = False
    #: Whether the log calls done what is yet to be handled.
    is_done_early: bool = False
    #: What becomes of a message in flight when its lease ends, for people.
    comes_again: str = "it comes again at the next owner"

    def __init__(self, key: Key, consumer: Mover, moved: MessageTotals | None = None) -> None:
        """moved: the partition's counters, which all assignments of it to this consumer share."""
        self.key: Key = key
        self.consumer: Mover = consumer
        self.stage: Stage = Stage.CLAIMING
        self.lease: Holding = None  # type: ignore[assignment]  # set by the consumer engine right after
        self.tracker: Tracker = tracker.Tracker(-1, (), moved)
        self.buffer: Buffer = Buffer()
        #: Its open messages; None: there are none, and there were none.
        self.open: OpenOffsets | None = None
        self.told: Told = Told()
        self.taking: TakingOver = TakingOver()
        self.watch: Watch = Watch()
        self.origin: Origin = Origin()
        self.grant: Grant | None = None
        #: Callbacks of the user that were called and have not returned.
        self.callbacks_running: int = 0
        #: Why it is being released, for people; "": it is not.
        self.releasing: str = ""
        #: on_assign was called, or would have been.
        self.shown: bool = False
        self.user_paused: bool = False
        #: How many messages are still to be logged before their first try: an earlier owner may have died of one (U1).
        #: None: as many as there are handlers.
        self.wary: int | None = None

    def enter(self, stage: Stage) -> None:
        """Move to another stage; see ``MOVES``."""
        if stage not in MOVES[self.stage] and (stage is not Stage.LOST or self.over):
            raise AssertionError(f"{self.key}: an assignment does not go from {self.stage} to {stage}")
        self.stage = stage
        if self.over:
            self.tracker.moved = MessageTotals(done=self.tracker.moved.done)  # a later done is not counted

    # Reports from the lease (plane.Owner) go to the part that acts on them.

    def granted(self, now: float) -> None:
        self.consumer.positions.granted(self, now)

    def refused(self, code: str, now: float) -> None:
        self.consumer.source.drop(self.lease)  # another member was faster, or still holds it
        self.consumer.remove(self)

    def lost(self, reason: str, now: float) -> None:
        self.consumer.revocation.lost(self, reason, now)

    def released(self, now: float) -> None:
        self.consumer.remove(self)

    def handed_in(self, hand_in: HandIn) -> None:
        pass

    def beaten(self, last_offset: int | None, accepted: bool, now: float) -> None:
        self.consumer.positions.beaten(self, last_offset, accepted, now)

    def answered(self, last_offset: int, accepted: bool, code: str, now: float) -> None:
        self.consumer.on_answered(self, last_offset, accepted, code, now)

    def settled(self, taken: tuple[int, int] | None, now: float) -> None:
        pass

    def located(self, low: int, high: int, start: int, now: float) -> None:
        """The leader reported the partition's log start and end, and the requested start offset."""
        self.consumer.positions.located(self, low, high, start, now)

    def overran(self, before: float, now: float) -> None:
        """A handler has had a message since before that time (own clock, ms), longer than handler_timeout."""
        self.consumer.source.lose(self.lease, Loss.HANDLER_TIMEOUT, now)

    # What is reported of it.

    def progress_to_report(self) -> int | None:
        """The last_offset for a beat: what is done without a gap; None: nothing that is new to the log."""
        if self.stage not in REPORTING:
            return None
        done = self.done_through()
        return done if done > self.consumer.known_stable(self.key) else None

    def done_through(self) -> int:
        """What is done without a gap, if the log does not know it from grants."""
        self.tracker.follow()
        return self.tracker.done.stable

    @property
    def done(self) -> Progress:
        """What is done, as people see it (any thread)."""
        return self.tracker.done

    def commit_ranges(self, now: float) -> None:
        """Commit what is done beyond a gap, if the log lacks it; again after a heartbeat interval if it still does."""
        self.tracker.follow()
        if not self.tracker.has_islands:
            return
        if (keys := self.lease.keys) is not None and keys.is_part:
            return  # a range covers all keys, and messages of other keys lie between ours
        progress = self.consumer.source.view.progress(self.key)
        if progress is None:
            return
        known, most = progress.ranges, self.lease.most_intervals
        new = tracker.that_fit(tracker.beyond(self.tracker.done.ranges, known), known, most)
        if not new or (new == self.told.ranges and now < self.told.ranges_due):
            return
        self.told.ranges = new
        self.told.ranges_due = now + self.lease.heartbeat_interval_ms
        self.consumer.positions.marks.ahead(self, now)
        for place in range(0, len(new), MAX_COMMIT_RANGES):
            self.consumer.source.reports.commit(self.lease, new[place : place + MAX_COMMIT_RANGES])

    @property
    def settles_until(self) -> float:
        """How long its release waits for the log to show a record about its open messages (own clock, ms)."""
        return -inf if self.open is None else self.open.settling.behind_since + self.lease.heartbeat_interval_ms

    def may_go(self, now: float) -> bool:
        """Whether the log shows what it has to say of open messages, or has taken too long: it may be released."""
        return now >= self.settles_until

    def hand_in(self) -> None:
        """Its release follows: give back what has not begun."""

    def reopen(self) -> None:
        """It is not released after all."""
        self.buffer.is_given_up = False

    def begin(self, offset: int, stable: int, ranges: Sequence[tuple[int, int]]) -> None:
        """Start again at offset, with the progress in the log."""
        self.tracker = tracker.Tracker(stable, ranges, self.tracker.moved)
        self.buffer.clear()
        self.buffer.go_on_at(offset)
        if self.open is not None:
            self.tracker.watch = self.open.done

    def put(self, messages: list[Message]) -> None:
        """Take in what was fetched."""
        if self.open is not None:
            if self.open.reading:
                self.open.put(messages)
                return
            if aside := self.open.aside:
                for is_aside, some in groupby(messages, lambda each: offset_of(each) in aside):
                    self._put(list(some), is_aside)
                return
        self._put(messages, False)

    def _put(self, messages: list[Message], is_aside: bool) -> None:
        if is_aside:
            self.buffer.go_on_at(offset_of(messages[-1]) + 1)
            return
        keys = self.lease.keys
        self.buffer.put(messages, self.tracker, None if keys is None else keys.wants)

    def reached(self, end: int) -> None:
        """The reader has passed all offsets below end; those it did not receive do not exist for any reader."""
        if self.stage in _WORK:
            if self.open is not None and self.open.reading:
                self.open.reached(end)
            else:
                self.buffer.reached(end, self.tracker)

    # Its open messages (open_messages.Holder).

    @property
    def opened(self) -> OpenOffsets:
        """Its open messages, from now on followed."""
        if self.open is None:
            self.open = OpenOffsets(self)
            self.tracker.watch = self.open.done
        return self.open

    @property
    def is_read(self) -> bool:
        """Whether the reader fetches it."""
        return self.shown and self.stage in (Stage.ASSIGNING, Stage.ACTIVE)

    @property
    def fetch_from(self) -> int:
        """Where the reader continues: at the lowest open message that was not fetched, or in order."""
        reading = None if self.open is None else self.open.reading
        return reading[0].first if reading else self.buffer.fetch_next

    def open_in_log(self, first: int, last: int) -> None:
        """The log shows these offsets as open: progress passes them."""
        self.tracker.open_in_log(first, last)

    def skip(self, offset: int) -> None:
        """An operator has set this message aside: no handler gets it again."""
        self.consumer.delivery.skip(self, offset)

    def admit(self, offset: int, redriven: int | None = None) -> None:
        """The log has the try of this message that is about to begin. redriven: the tries that count, if it waits."""
        self.consumer.delivery.admit(self, offset, redriven)

    def refetch(self) -> None:
        """Have the reader continue at ``fetch_from``."""
        self.consumer.outbox.add(StartFetch(self.consumer.number, self.key, self.fetch_from))

    def can_hand_out(self, now: float) -> bool:
        """Whether a message is buffered and may be handed out now."""
        return self.buffer.size > 0 and self.is_open(now)

    def is_open(self, now: float) -> bool:
        """Whether messages of this partition may be handed out now: active, not paused, lease proven, room left."""
        return (
            self.stage is Stage.ACTIVE
            and not self.user_paused
            and now < self.lease.hand_out_until
            and self.tracker.in_hand < MAX_IN_HAND_MESSAGES
            and not is_out_of_room(self)
            and (self.open is None or not self.open.is_full or self.buffer.has_open)
            and (self.open is None or len(self.open.waiting) < MOST_AHEAD)
        )

    def take(self, max_messages: int, iterating: bool, now: float) -> Run:
        """The next messages, as one run that is not in flight yet; can_hand_out() must hold."""
        is_open = self.buffer.has_open
        messages, covers_from = self.buffer.take(max_messages)
        run = RunOf(self, messages, covers_from, iterating, now)
        run.is_open = is_open
        if is_open and self.open is not None:
            self.tracker.moved.again += sum(self.open.tried.get(offset_of(message), 0) > 0 for message in messages)
        return run

    @property
    def epoch(self) -> int:
        """The lease's epoch."""
        return self.lease.epoch

    @property
    def piece(self) -> Piece:
        """This assignment, as effects name it."""
        keys = self.lease.keys
        span = () if keys is None else (keys.lo, keys.hi)
        return Piece(self.key, self.epoch, self.position, *span)

    @property
    def position(self) -> int:
        """The offset of the next message to be handed out."""
        ahead = [offset_of(run.messages[run.handed_out]) for run in self.tracker.runs.values() if run.has_more]
        buffered = self.buffer.first
        return min(ahead, default=self.buffer.fetch_next if buffered is None else buffered)

    @property
    def is_at_work(self) -> bool:
        """Whether it is active under a held lease; ``is_open`` says whether messages may be handed out now."""
        return self.stage is Stage.ACTIVE and self.lease.held

    @property
    def is_claiming(self) -> bool:
        """Whether its claim is under way."""
        return self.stage is Stage.CLAIMING

    @property
    def is_kept(self) -> bool:
        """Whether it is claimed or held, and not being released."""
        return self.stage in _KEPT and not self.releasing

    @property
    def over(self) -> bool:
        """Whether the assignment has ended: released, or lost."""
        return self.stage in (Stage.RELEASED, Stage.LOST)


def is_out_of_room(assignment: Assignment) -> bool:
    """Whether only what lies in a gap may be handed out: the log keeps nothing more of what is done above (G15)."""
    tracked, keys = assignment.tracker, assignment.lease.keys
    if not tracked.has_islands or tracker.room(tracked, assignment.lease.most_intervals) > 0 or (keys and keys.is_part):
        return False
    first = assignment.buffer.first
    return (assignment.buffer.fetch_next if first is None else first) > tracked.done.intervals.lasts[-1]


def live_stable(consumer: Mover, key: Key) -> int | None:
    """Everything of a partition up to here is done: of this member's keys now, of others' as the log shows.

    None: this member does not work on it.
    """
    assignment = consumer.assignments.get(key)
    if assignment is None or not assignment.lease.held or assignment.stage not in (*_WORK, Stage.REVOKING):
        return None
    done, keys = assignment.done.stable, assignment.lease.keys
    return done if keys is None or not keys.is_part else min(done, keys.stable_of_others)


def stable_of(assignment: Assignment) -> int:
    """Everything of the partition up to here is done, also by other members that share it by key (any thread)."""
    keys = assignment.lease.keys
    return assignment.done.stable if keys is None or not keys.is_part else keys.stable_of_all


Run = RunOf[Assignment]
Tracker = tracker.Tracker[Assignment]


def drop_buffered(assignment: Assignment) -> None:
    """Drop its buffered messages, which are fetched again; not what is open in the log: that would not be."""
    last = -1 if assignment.open is None else last_fetched(assignment.open)
    assignment.buffer.give_up(max(assignment.tracker.in_hand_to, last))
