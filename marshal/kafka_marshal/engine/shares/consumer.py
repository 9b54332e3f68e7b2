"""Consumers of partitions that the program names (U12), or shares by batches: where they differ from others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import inf
from random import Random
from typing import ClassVar, cast
from weakref import ref

from kafka_marshal.engine.claims.client import NamedClient
from kafka_marshal.engine.claims.keys import ShareSource
from kafka_marshal.engine.effects import Outbox, StartFetch, StopFetch
from kafka_marshal.engine.figures import MessageTotals
from kafka_marshal.engine.holding import Holding, Owner
from kafka_marshal.engine.inputs import given
from kafka_marshal.engine.plane import Loss, Settles
from kafka_marshal.engine.settings import ConsumerSettings, EngineSettings, SharingOptions
from kafka_marshal.engine.shares.desk import BatchBuffer, BatchTracker, Desk, Given, OnceDesk
from kafka_marshal.engine.shares.taking import LINGER_MS, Taking
from kafka_marshal.engine.subscription import Subscription
from kafka_marshal.engine.work.assignment import Assignment, Run, Stage
from kafka_marshal.engine.work.consumer import ConsumerEngine, Supply
from kafka_marshal.engine.work.delivery import Delivery
from kafka_marshal.engine.work.lane import LeftBehind
from kafka_marshal.engine.work.open_messages import Goal, Request
from kafka_marshal.engine.work.revocation import Schedule
from kafka_marshal.engine.work.run import Run as RunOf
from kafka_marshal.engine.work.run import offset_of
from kafka_marshal.engine.work.settlements import GIVEN_BACK
from kafka_marshal.ports import Message
from kafka_marshal.types import BatchToken, Key
from rationalizer import Progress, codes
from rationalizer.leases.shares import Share
from rationalizer.limits import NOTHING_DONE
from rationalizer.wire.records import SettlingMessages, Take


class NamedAssignment(Assignment):
    """A partition that is claimed once it is known where the group begins, for its claim says that (B3)."""

    __slots__ = ()

    consumer: NamedConsumer

    def granted(self, now: float) -> None:
        self.consumer.source.granted(self.key)
        super().granted(now)

    def refused(self, code: str, now: float) -> None:
        super().refused(code, now)
        self.consumer.source.refused(self.key, code, now)

    def located(self, low: int, high: int, start: int, now: float) -> None:
        if self.stage is Stage.CLAIMING:
            self.consumer.source.claim_from(self.lease, start or None, now)
        else:
            super().located(low, high, start, now)


class NamedConsumer(ConsumerEngine):
    """A consumer of partitions that are claimed without a policy."""

    source: NamedClient

    def _supply(self, settings: ConsumerSettings) -> Supply:
        return Supply(NamedAssignment)

    def take_on(
        self,
        key: Key,
        is_first: bool,
        want: Callable[[Owner], Holding],
        claims_before: Mapping[int, int] | None = None,
    ) -> None:
        super().take_on(key, is_first, want, claims_before)
        assignment = self.assignments[key]
        if not assignment.lease.is_claimed_with_start:
            return
        assignment.wary = None  # others may have died of its messages, and nothing is done yet (U1)
        start = self.source.start_for(key)
        if start is None:
            self.source.claim_from(assignment.lease, None, self.source.now)
        else:
            self.positions.look_up(assignment, start, claims_before)


#: A member with messages in flight reads the log in steps of this length (ms): its next take is due by time.
BUSY_STEP_MS = 100.0

#: With messages at its handlers, a thread that waits for more checks this often (ms) whether the log has given a batch.
HANDLED_MS = 10.0

#: A batch is delivered in parts if reading it takes longer than this (ms).
FILL_MS = 1_000.0


class BatchRun(RunOf[Assignment]):
    """Messages of one batch of a share."""

    __slots__ = ("attempts", "batch_first", "batch_last", "token")

    assignment: SharedAssignment

    def __init__(
        self,
        assignment: SharedAssignment,
        messages: list[Message],
        covers_from: int,
        iterating: bool,
        now: float,
        given: Given,
    ) -> None:
        super().__init__(assignment, messages, covers_from, iterating, now)
        self.token: BatchToken = BatchToken(given.token)
        self.attempts: int = given.attempts
        self.batch_first: int = given.first
        self.batch_last: int = given.last


#: Losses after which what was done is reported: nobody has ended the share yet.
_REPORTS = (Loss.POSITION, Loss.KAFKA_OFFSET, Loss.TOPIC_GONE, Loss.HANDLER_TIMEOUT)


class SharedAssignment(NamedAssignment):
    """A share of one partition: all in which it differs from a partition that is held whole."""

    __slots__ = ("desk", "is_crowded", "is_dirty", "sent_at", "took")

    buffer: BatchBuffer
    tracker: BatchTracker
    consumer: SharedConsumer

    _desk_kind: ClassVar[type[Desk]] = Desk

    def __init__(self, key: Key, consumer: SharedConsumer, moved: MessageTotals) -> None:
        super().__init__(key, consumer, moved)
        sharing = consumer.sharing
        self.buffer = BatchBuffer(self._is_ours, lambda first: self.desk.unread(first))
        self.tracker = BatchTracker(-1, (), moved)
        self.desk: Desk = self._desk_kind(self, sharing.max_deliveries)
        #: A record about the partition was applied since the desk looked.
        self.is_dirty: bool = True
        #: A message waits to be set aside, and the log has too many open ones: nothing more is taken.
        self.is_crowded: bool = False
        #: What our last settle took, if it asked for a batch.
        self.took: str = "nothing"
        #: When a record of it was last sent and is not answered (own clock, ms); None: it is.
        self.sent_at: float | None = None

    @property
    def is_idle(self) -> bool:
        """Whether it has no batch, and nothing is free."""
        desk = self.desk
        is_free = desk.crowd.again or desk.shelf.new(desk.free_from).messages
        return self.stage is Stage.ACTIVE and not (desk.given or len(desk.settling) or self.tracker.runs or is_free)

    @property
    def failing(self) -> int:
        """How many messages of its batches wait for another try."""
        in_lanes = self.consumer.delivery.in_lanes
        return in_lanes.lanes.failing(self.key) if in_lanes.is_active and self.tracker.runs else 0

    def _is_ours(self, offset: int) -> bool:
        return self.desk.at(offset) is not None

    # What the log shows (holding.Owner).

    def located(self, low: int, high: int, start: int, now: float) -> None:
        positions, position = self.consumer.positions, self.consumer.known_stable(self.key) + 1
        if self.stage is Stage.CLAIMING:
            super().located(low, high, start, now)
            return
        positions.stuck.answered(self, high)
        if self.stage is not Stage.LOCATING or not self.lease.held:
            return
        if position > high:
            positions.position_lost(self, position, low, high, now)
            return
        self.desk.shelf.low = low
        self.desk.shelf.begin(max(low, min(self.buffer.fetch_next, high)))
        positions.assign(self)
        self.is_dirty = True

    def settled(self, taken: tuple[int, int] | None, now: float) -> None:
        """Our settle was applied."""
        self.sent_at, self.is_dirty = None, True
        self.took = "nothing" if taken is None else "again" if taken[0] < self.desk.free_from else "new"
        if taken is not None:
            self.desk.took(self.consumer.source.next_offset(self.lease) - 1, *taken, now)
        self.consumer.taking.answered(self, now)
        self.look(now)
        if self.stage is Stage.REVOKING:
            self.consumer.revocation.try_finish(self, now)

    def look(self, now: float) -> None:
        """Take over what our replica shows, if that may have changed."""
        if self.lease.held and (self.is_dirty or now >= self.desk.crowd.look_at):
            self.is_dirty = False
            self.desk.look(self.consumer.source.lease_of(self.key), now)

    def report(self, now: float, taking: Take | None = None) -> bool:
        """Send what the log does not show yet; taking: the next batch. Returns whether anything was sent."""
        again_ms = self.lease.heartbeat_interval_ms / 2
        self.desk.settle()
        settling, progress = self.desk.settling, self.consumer.source.view.progress(self.key)
        held = self.consumer.settlements.held(self, settling, progress, now)
        self.is_crowded = bool(held)
        if self.stage is Stage.REVOKING:
            while held:
                settling.give_back(held.pop())
        entries = settling.entries(progress, now, again_ms, held)
        if entries is None and taking is None:
            return False
        self.consumer.positions.marks.ahead(self, now)
        self.consumer.source.settle(self.lease, entries, taking, now)
        self.sent_at = now
        return True

    def commit_ranges(self, now: float) -> None:
        if not self.consumer.source.view.closed(self.lease.cp, now) or self.stage is Stage.REVOKING:
            self.report(now)

    def done_through(self) -> int:
        return NOTHING_DONE

    @property
    def done(self) -> Progress:
        """What the log shows: it is that of all sharers (any thread)."""
        return self.consumer.source.view.progress(self.key) or Progress()

    # How it ends: what has not begun is given back.

    def may_go(self, now: float) -> bool:
        self.hand_in()
        if len(self.desk.settling):
            self.report(now)
            return False  # it is released when the log shows that
        return not self.consumer.taking.awaits(self)  # what a take gives is given back, or reported, before that

    def hand_in(self) -> None:
        self.desk.end()

    def lost(self, reason: str, now: float) -> None:
        if self.stage is not Stage.CLAIMING and not self.over:
            self.hand_in()
            if reason in _REPORTS:
                self.report(now)
        self.consumer.taking.ended(self)
        super().lost(reason, now)

    def overran(self, before: float, now: float) -> None:
        self.consumer.delivery.leave(self, before, now)

    def give_back(self, run: Run, *, counts: bool) -> bool:
        """Others may have what is not done of a run. Returns whether there is any."""
        parts = self.tracker.split(run, [x for x, mark in zip(run.messages, run.marks, strict=True) if not mark])
        for messages, covers_from in parts:
            self.desk.give_back(covers_from, offset_of(messages[-1]), counts=counts)
        return bool(parts)

    def disown(self) -> None:
        self.consumer.delivery.in_lanes.lanes.disown(self)
        for run in list(self.tracker.runs.values()):
            self.give_back(run, counts=False)

    def never_delivered(self, first: int, last: int) -> None:
        self.consumer.delivery.grants.report(self.key, first, last)

    # What the desk moves.

    def begin(self, offset: int, stable: int, ranges: Sequence[tuple[int, int]]) -> None:
        self.tracker = BatchTracker(-1, (), self.tracker.moved)
        self.buffer.clear()
        self.buffer.go_on_at(offset)
        self.desk.begin(self.epoch, stable)
        self.is_dirty = True

    def put(self, messages: list[Message]) -> None:
        self.desk.fetched(messages, self.consumer.now)

    def reached(self, end: int) -> None:
        if self.stage in (Stage.ASSIGNING, Stage.ACTIVE):
            self.desk.reached(end, self.consumer.now)

    def fetch(self, offset: int | None) -> None:
        if self.stage in (Stage.ASSIGNING, Stage.ACTIVE):
            number, outbox = self.consumer.number, self.consumer.outbox
            outbox.add(StopFetch(number, self.key) if offset is None else StartFetch(number, self.key, offset))

    def has_more(self) -> None:
        self.consumer.delivery.has_more(self)

    def lost_in_log(self, first: int, last: int) -> None:
        self.consumer.positions.gap(self, first, last)

    def aside(self, offset: int, attempts: int, reason: str) -> None:
        self.consumer.settlements.parked(self, offset, attempts, reason, self.consumer.now)

    def silent_in(self, share: Share) -> float:
        return self.consumer.source.silent_in(share, self.lease.cp, self.consumer.now)

    @property
    def room_ahead(self) -> int:
        memory = self.consumer.delivery.memory
        return max(1, memory.half // 4) if memory.message_bytes else 1_000

    # What is delivered.

    def may_take(self, now: float) -> bool:
        """Whether a batch may be taken: it is delivered as soon as it is read."""
        closed = self.consumer.source.view.closed(self.lease.cp, now)
        is_free = not (closed or self.user_paused or self.is_crowded) and now >= self.desk.rests_until
        return self.stage is Stage.ACTIVE and now < self.lease.hand_out_until and is_free

    def can_hand_out(self, now: float) -> bool:
        first = self.buffer.first
        if first is None or not self.is_open(now):
            return False
        given = self.desk.at(first)
        if given is None:
            return False
        delivery = self.consumer.delivery
        is_waiting = now < given.given_at + self.consumer.fill_ms and delivery.memory.room(delivery.buffered) > 0
        if given.unread and is_waiting and not delivery.in_lanes.is_active:
            return False
        return self.consumer.may_begin(self, given.is_alone)

    def take(self, max_messages: int, iterating: bool, now: float) -> Run:
        first = self.buffer.first
        given = None if first is None else self.desk.at(first)
        assert given is not None  # can_hand_out
        if given.begun_at is None:
            given.begun_at = now
        self.consumer.taking.pace.begun(now)
        messages, covers_from = self.buffer.take(min(max_messages, self.buffer.count_to(given.last)))
        self.tracker.moved.again += len(messages) * (given.attempts > 1)
        return BatchRun(self, messages, covers_from, iterating, now, given)


class OnceAssignment(SharedAssignment):
    """A share whose batches are done for the log before they are delivered."""

    __slots__ = ()

    is_done_early = True
    _desk_kind = OnceDesk

    def overran(self, before: float, now: float) -> None:
        Assignment.overran(self, before, now)


class SharedDelivery(Delivery):
    """The hand-out side of a consumer that shares its partitions."""

    _consumer: SharedConsumer

    def __init__(self, consumer: SharedConsumer) -> None:
        super().__init__(consumer)
        #: Batches that were given to others because they took too long, until the program reports or drops them.
        #: Replaced, never changed.
        self._left: tuple[tuple[ref[Run], LeftBehind], ...] = ()
        #: How many messages were set aside.
        self.set_aside_ever: int = 0

    @property
    def buffered(self) -> int:
        return super().buffered + sum(len(x.desk.shelf.messages) for x in self._consumer.desks())

    @given
    def fetched(self, key: Key, messages: list[Message], now: float) -> None:
        self._consumer.now = now
        assignment = self._consumer.seats.get(key)
        if assignment is not None and assignment.stage in (Stage.ASSIGNING, Stage.ACTIVE):
            assignment.tracker.moved.fetched += len(messages)
            assignment.watch.quiet = None  # what is given back is read again, from the same offset
            self._consumer.positions.marks.come(assignment)
            assignment.put(messages)

    def has_more(self, assignment: Assignment) -> None:
        """Messages of it are there."""
        self._turns.setdefault(assignment)

    @given
    def heard(self, now: float) -> None:
        super().heard(now)
        self._consumer.now = now
        self._consumer.taking.step(now)

    def is_held_up(self, now: float) -> bool:
        """Whether a thread is to wait for the log instead of for messages: a batch is asked for, or soon will be."""
        return self._consumer.taking.is_soon(now) and not any(self._open(now))

    def _came_back(self, assignment: Assignment, now: float) -> None:
        super()._came_back(assignment, now)
        self._consumer.taking.step(now)

    @given
    def done_run(self, run: Run, now: float) -> None:
        self._returned(run)
        for part in self._parts(run) or [run]:
            super().done_run(part, now)

    def _returned(self, run: Run) -> None:
        self._left = tuple(each for each in self._left if each[0]() not in (None, run))

    @staticmethod
    def _parts(run: Run) -> list[Run]:
        """What is in flight of a batch: some of its messages may have been set aside."""
        ours = set(map(id, run.messages))
        return [part for part in list(run.assignment.tracker.runs.values()) if id(part.messages[0]) in ours]

    def has(self, run: Run) -> bool:
        """Whether any of a batch is in flight, and was not given to others. Any thread may ask."""
        return bool(self._parts(run))

    @given
    def give_back_run(self, run: BatchRun, now: float) -> None:
        """The program gives a batch back: others may have it, this member after a while; it counts as no delivery."""
        self._returned(run)
        share = run.assignment
        gave = [share.give_back(part, counts=False) for part in self._parts(run)]
        if any(gave) and share.desk.gave_back(float(share.lease.heartbeat_interval_ms), now):
            self._consumer.settlements.refused(share, run.first, GIVEN_BACK, now)
        self._gave_back(share, now)

    def _gave_back(self, assignment: SharedAssignment, now: float) -> None:
        if not assignment.over:
            assignment.report(now)
        self._came_back(assignment, now)

    @property
    def left_behind(self) -> list[LeftBehind]:
        return [*super().left_behind, *(left for run, left in self._left if run() is not None)]

    def leave(self, assignment: SharedAssignment, before: float, now: float) -> None:
        """Give to others what a handler has had since before that time (U11); the share, and all else of it, stay."""
        found: list[LeftBehind] = []
        for message in self.in_lanes.lanes.leave(assignment, before):
            first = last = offset_of(message)
            found.append(LeftBehind(*assignment.key, first, last, message.key(), before))
            if (begun := assignment.tracker.run_at(first)) is not None:
                for _, covers_from in assignment.tracker.split(begun, [message]):
                    assignment.desk.give_back(covers_from, last, counts=True)
        runs = () if self.in_lanes.is_active else [x for x in assignment.tracker.runs.values() if not x.in_lanes]
        for run in runs:
            since = run.in_hand_since()
            if since is not None and since <= before and assignment.give_back(run, counts=True):
                key = run.messages[0].key() if run.size == 1 else None
                found.append(LeftBehind(*assignment.key, run.first, run.last, key, since))
                self._left = (*self._left, (ref(run), found[-1]))
                self.overdue()  # all is released if no thread of the program comes back
        for each in found:
            self._consumer.warn(each.text(now))
        self._gave_back(assignment, now)

    @given
    def park(self, run: BatchRun, offset: int, key_hash: int | None, reason: str, now: float) -> None:
        """The program sets a message of a batch aside."""
        self.settle_one(run.assignment, Goal.PARKED, offset, key_hash, reason, now)

    def set_aside(
        self, assignment: Assignment, offset: int, key_hash: int, attempts: int, reason: str, now: float
    ) -> bool:
        if assignment.tracker.run_at(offset) is None:
            self.owed.came_back(assignment.key, offset)
            return False
        self.settle_one(self._consumer.seats[assignment.key], Goal.PARKED, offset, key_hash, reason, now)
        return True

    def settle_one(
        self, share: SharedAssignment, kind: Goal, offset: int, key_hash: int | None, reason: str, now: float
    ) -> None:
        """A message of a batch is set aside, or done, by the program or an operator."""
        found = share.tracker.run_at(offset)
        index = None if found is None else found.index(offset)
        given = share.desk.at(offset)
        if found is None or index is None or given is None or found.marks[index] or share.over:
            self.ignored_done[share.key] += 1
            return
        first, _ = found.covered(index, index)
        share.tracker.split(found, [found.messages[index]])
        if first < offset:
            share.desk.settling.want(Request(first, offset - 1, Goal.DONE, None))
        share.desk.settling.want(Request(offset, offset, kind, key_hash, given.attempts, reason))
        if kind is Goal.PARKED:
            self.set_aside_ever += 1
            share.aside(offset, given.attempts, reason)
        self._came_back(share, now)


class SharedSchedule(Schedule):
    """Besides, it is looked when to take a batch."""

    _consumer: SharedConsumer

    def step(self, now: float, silent_cps: frozenset[int]) -> None:
        self._consumer.now = now
        super().step(now, silent_cps)
        self._consumer.taking.step(now)

    def deadline(self, now: float) -> float:
        return min(super().deadline(now), self._consumer.taking.due)

    @property
    def awaits_batch(self) -> bool:
        return self._consumer.taking.asked is not None

    def patience_ms(self, now: float) -> float:
        is_busy = any(share.tracker.runs for share in list(self._consumer.seats.values()))
        most = HANDLED_MS if is_busy and self._consumer.delivery.in_lanes.is_active else inf
        return min(most, max(1.0, self._consumer.taking.due - now)) if self._consumer.is_lone else most

    @property
    def harmless_step_ms(self) -> float:
        return BUSY_STEP_MS if self._consumer.in_hand_now else LINGER_MS


class SharedConsumer(NamedConsumer):
    """A consumer of shares by batches."""

    source: ShareSource
    delivery: SharedDelivery
    schedule: SharedSchedule

    def __init__(
        self,
        number: int,
        settings: ConsumerSettings,
        subscription: Subscription,
        source: ShareSource,
        about: EngineSettings,
        outbox: Outbox,
        want_ids: Callable[[], object],
        rng: Random,
    ) -> None:
        assert settings.sharing is not None
        self.sharing: SharingOptions = settings.sharing
        #: The time (own clock, ms) of the present input, as far as it is known.
        self.now: float = 0.0
        #: A batch is delivered when it is read, or what there is of it after this time (ms).
        self.fill_ms: float = FILL_MS
        super().__init__(number, settings, subscription, source, about, outbox, want_ids)
        #: The same as ``assignments``.
        self.seats: dict[Key, SharedAssignment] = cast("dict[Key, SharedAssignment]", self.assignments)
        self.taking: Taking = Taking(self, settings.sharing, about.heartbeat_interval_ms, rng)

    handles_open = False

    def _supply(self, settings: ConsumerSettings) -> Supply:
        assignment = OnceAssignment if self.sharing.at_most_once else SharedAssignment
        return Supply(assignment, SharedDelivery, SharedSchedule)

    def desks(self) -> Iterator[SharedAssignment]:
        """All shares that are held."""
        return (x for x in self.seats.values() if x.lease.held)

    def takers(self) -> Iterator[SharedAssignment]:
        """The shares whose batches are delivered."""
        return (x for x in self.desks() if x.stage in (Stage.ASSIGNING, Stage.ACTIVE))

    @property
    def handlers(self) -> int:
        """How many messages are handled at a time, each reported by itself; 0: batches are."""
        in_lanes = self.delivery.in_lanes
        return in_lanes.lanes.concurrency if in_lanes.is_active else 0

    @property
    def are_all_failing(self) -> bool:
        """Whether nothing succeeds here."""
        return self.delivery.in_lanes.is_active and self.delivery.in_lanes.are_all_failing

    @property
    def done_ever(self) -> int:
        """How many messages were done here, or set aside."""
        return sum(moved.done for moved in self.delivery.moved.values()) + self.delivery.set_aside_ever

    @property
    def in_hand_now(self) -> int:
        """How many messages are in flight."""
        return sum(x.tracker.in_hand for x in self.desks())

    @property
    def is_lone(self) -> bool:
        """Whether no other member shares a partition with it (any thread)."""
        return all(share.desk.crowd.sharers == 1 for share in list(self.seats.values()))

    def share_out(self, key: Key, now: float) -> None:
        """Give back what has not begun of a partition: another sharer may begin it."""
        share = self.seats[key]
        share.desk.is_ahead = False
        self.delivery.in_lanes.recall(share, keep=True)
        share.desk.give_back_rest()
        share.report(now)

    def may_begin(self, assignment: SharedAssignment, is_alone: bool) -> bool:
        """Whether a batch may begin: one that two members did not finish is alone, until its try has failed (U10)."""
        busy = (x.desk.given.values() for x in self.desks() if x.tracker.in_hand > x.failing)
        return not any(is_alone or any(x.is_alone and x.begun_at is not None for x in given) for given in busy)

    @given
    def wants(self, max_messages: int, fill_ms: float, now: float) -> None:
        """The program asks for batches of at most max_messages, each read for fill_ms at most."""
        self.taking.pace.max_messages, self.fill_ms = max_messages, fill_ms

    def messages_opened(self, key: Key, entries: Settles, answers: Sequence[str] | None, now: float) -> None:
        if (share := self.seats.get(key)) is None:
            return
        share.is_dirty = True
        if answers is not None and isinstance(entries, SettlingMessages):
            if entries.take is not None:
                self.taking.given[share.took] += 1
            asked = [entry[0] for part in (entries.done, entries.open, entries.parked) for entry in part]
            for offset, code in zip(asked, answers, strict=False):
                if code == codes.MAX_INDIVIDUAL_COMMIT_REACHED:
                    self.settlements.refused(share, offset, code, now)

    def settle_for(self, key: Key, record: SettlingMessages, answers: Sequence[str], now: float) -> None:
        """Settle what the log has refused to an operator, as it is in our batches. answers: its codes, entry by entry.

        A handler that has such a message may finish, without effect. What has not begun is left: the operator asks
        again.
        """
        share = self.seats.get(key)
        wanted: list[tuple[int, Goal, int | None, str]] = [(last, Goal.DONE, None, "") for _, last in record.done]
        wanted += [(last, Goal.OPEN, None, "") for _, last, _, _ in record.open]
        wanted += [(offset, Goal.PARKED, hashed, reason) for offset, hashed, _, reason in record.parked]
        for (offset, kind, hashed, reason), code in zip(wanted, answers, strict=False):
            is_ours = share is not None and not share.over and share.tracker.run_at(offset) is not None
            if share is not None and is_ours and code == codes.FENCED and kind is not Goal.OPEN:
                self.delivery.in_lanes.lanes.skip(share, offset)
                self.delivery.settle_one(share, kind, offset, hashed, reason, now)
                share.report(now)

    @given
    def reached(self, key: Key, end: int, now: float) -> None:
        self.now = now
        super().reached(key, end, now)

    @given
    def log_ends(self, key: Key, log_end: int, now: float) -> None:
        super().log_ends(key, log_end, now)
        if (share := self.seats.get(key)) is not None:
            share.desk.shelf.ends_at(log_end, now)

    def remove(self, assignment: Assignment) -> None:
        self.taking.ended(assignment)
        super().remove(assignment)
