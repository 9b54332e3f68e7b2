"""The engine: events and the time go in, effects come out. No I/O, no clock, no threads.

Only :meth:`Engine.take` changes an engine, with a function of :mod:`.inputs`; everything else only reads. The caller
must, in this order:

1. Apply log records to the worlds. When the replica has caught up (C15), pass ``caught_up``. A member of a coordinated
   group needs only its home, once it has joined: other CPs may be removed from the worlds. When they are back and
   caught up, pass it again.
2. From then on, pass ``applied`` with the outcome after *each* applied record.
3. Pass acknowledgements, look-ups, metadata, returned callbacks and what readers find as they come, in any order.
4. After any of these, and no later than ``deadline`` says, pass ``step``; then carry out :meth:`take_effects` in order.
5. Before it delivers a message to a user: compare now with ``hand_out_until`` of its lease.

All calls are made under one lock. ``now`` is our own monotonic clock in milliseconds, one that counts suspend (T4); it
never reaches a record or the shared state.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from random import Random
from typing import TYPE_CHECKING, Protocol, cast, overload

from kafka_marshal.engine.claims.applied import LeaseRecords
from kafka_marshal.engine.claims.keys import KeySource, ShareSource
from kafka_marshal.engine.claims.leases import LeaseBook, LeaseState
from kafka_marshal.engine.claims.peers import Peers
from kafka_marshal.engine.effects import Call, Effect, LookUp, Outbox, TakeOver, Warn
from kafka_marshal.engine.inputs import Ts, given
from kafka_marshal.engine.plane import Loss, PartitionSource, Settles
from kafka_marshal.engine.redone import RedoneMessages
from kafka_marshal.engine.settings import BEATS_PER_INTERVAL, FIRST_TICK_SHARE, ConsumerSettings, EngineSettings
from kafka_marshal.engine.subscription import Subscription
from kafka_marshal.engine.work.assignment import REPORTING
from kafka_marshal.engine.work.consumer import ConsumerEngine
from kafka_marshal.engine.work.ranges import OffsetRange
from kafka_marshal.engine.work.topic_mark import TopicIds
from kafka_marshal.errors import coordinated_group
from kafka_marshal.ports import TopicInfo
from kafka_marshal.types import Key, T
from rationalizer import Outcome, SettleOffsets, SettlingMessages, Tick, World, codes

if TYPE_CHECKING:
    from kafka_marshal.engine.groups.client import GroupClient
    from kafka_marshal.engine.shares.consumer import SharedConsumer


class RangeCommits:
    """Commits of all consumers of a member. They are sent with the beats, so that both need only one wake."""

    def __init__(self, heartbeat_interval_ms: int) -> None:
        self._interval_ms = heartbeat_interval_ms / BEATS_PER_INTERVAL
        #: When (own clock, ms) they are sent at the latest.
        self.due: float = 0.0

    def soon(self, now: float) -> None:
        """Send them at the next step."""
        self.due = now

    def step(self, consumers: Iterable[ConsumerEngine], now: float, *, beaten: bool) -> None:
        """Send them if they are due, or if beats were sent."""
        if beaten or now >= self.due:
            self.due = now + self._interval_ms
            self.send(consumers, now)

    def send(self, consumers: Iterable[ConsumerEngine], now: float) -> None:
        """Send them now, with the marks of topics (P12)."""
        for consumer in consumers:
            consumer.positions.marks.send(now)
            is_durable = consumer.delivery.in_lanes.is_durable
            for assignment in consumer.assignments.values():
                if not (assignment.tracker.has_news or is_durable or assignment.open is not None):
                    continue
                if assignment.stage in REPORTING and assignment.lease.held:
                    consumer.settlements.send(assignment, now)
                    assignment.commit_ranges(now)


#: topic, partition, how many messages, the first and the last offset, the operator.
REDONE = (
    "{} [{}]: {:,} done messages, from offset {} to {}, were opened again by an operator ({!r}, kafka-marshal redo): "
    "they are handled again, each after what is in flight of its key"
)


class Recorder(Protocol):
    """Records the run of an engine; see :mod:`.recording`."""

    def take(self, consumer: int | None, function: Callable[[*Ts], T], of: tuple[*Ts]) -> T:
        """Carry out one ``take``, and record it."""

    def effects(self, effects: list[Effect]) -> None:
        """Record effects, in order."""


class Engine:
    """The whole client logic of one Marshal."""

    def __init__(self, settings: EngineSettings, worlds: Mapping[int, World], rng: Random) -> None:
        self.settings = settings
        self.outbox: Outbox = Outbox()
        self.leases: LeaseRecords = LeaseRecords(settings, worlds, self.outbox, rng, self)
        self.peers: Peers = self.leases.peers
        self.book: LeaseBook = self.leases.book
        self.consumers: dict[int, ConsumerEngine] = {}
        #: Consumer number → its membership, for consumers of coordinated groups.
        self.groups: dict[int, GroupClient] = {}
        #: Why this engine has ended; None: it has not.
        self.failure: Exception | None = None
        #: The state of the CPs that are read; the caller applies the log to them.
        self.worlds: Mapping[int, World] = worlds
        #: CP whose log time is unknown since we caught up → when (own clock, ms) we ask for it (T3).
        self._unknown_time: dict[int, float] = {}
        self._rng = rng
        self.topic_ids: TopicIds = TopicIds()
        self.commits: RangeCommits = RangeCommits(settings.heartbeat_interval_ms)
        #: Consumers by number, from 1; None: ended, without a running callback.
        self._numbered: list[ConsumerEngine | None] = []
        #: What an operator has opened again.
        self.redone: RedoneMessages = RedoneMessages(settings.group_id)
        #: Records its run; None: it is not recorded.
        self.recorder: Recorder | None = None

    @property
    def ids(self) -> tuple[str, str, str]:
        """The first three fields of each record of this member."""
        return self.settings.ids

    # Setting up.

    @given
    def add_consumer(self, subscription: Subscription, settings: ConsumerSettings) -> ConsumerEngine:
        """Add a consumer; it starts to claim once it has metadata."""
        number = len(self._numbered) + 1
        if settings.group is None:
            claims = self.leases.source(number, settings, subscription)
            consumer = self._consumer(number, subscription, settings, claims)
            claims.attach(consumer)
        else:  # imported by the mode's consumer before it takes the lock, as below; not for a member without
            from kafka_marshal.engine.groups.client import GroupClient, MemberEngine

            member = GroupClient(
                self.settings,
                settings.group,
                subscription,
                self.worlds,
                self.outbox,
                self._rng,
                MemberEngine(
                    self.leases.lets_all_go, self.leases.drain, self.unblock, self.answered_late, self.messages_opened
                ),
                settings.start != "earliest",
            )
            consumer = self._consumer(number, subscription, settings, member)
            member.attach(consumer, consumer.errors)
            self.groups[number] = member
        consumer.redone = self.redone
        self.consumers[number] = consumer
        self._numbered.append(consumer)
        return consumer

    def _consumer(
        self, number: int, subscription: Subscription, settings: ConsumerSettings, source: PartitionSource
    ) -> ConsumerEngine:
        about, ids = self.settings, self.topic_ids.want
        if not isinstance(source, KeySource | ShareSource):
            return ConsumerEngine(number, settings, subscription, source, about, self.outbox, ids)
        from kafka_marshal.engine.shares.consumer import NamedConsumer, SharedConsumer

        if isinstance(source, ShareSource):
            return SharedConsumer(number, settings, subscription, source, about, self.outbox, ids, self._rng)
        return NamedConsumer(number, settings, subscription, source, about, self.outbox, ids)

    @given
    def remove_consumer(self, number: int) -> None:
        """A consumer has ended; partitions of a running callback are released when it returns."""
        if (consumer := self.consumers.pop(number, None)) is not None:
            self.leases.sources.pop(number, None)
            self.groups.pop(number, None)
            if not consumer.callbacks_running:
                self._numbered[number - 1] = None

    def messages_opened(self, key: Key, entries: Settles, answers: Sequence[str] | None, now: float) -> None:
        """A record has opened, parked or settled messages of a partition (H3, H4). answers: if it is our own."""
        for consumer in self.consumers.values():
            consumer.messages_opened(key, entries, answers, now)

    def wanted_by_an_operator(self, key: Key, record: SettlingMessages, answers: Sequence[str], now: float) -> None:
        """An operator wants to settle messages of a partition: what the log refuses, its owner does (H2)."""
        for consumer in self.consumers.values():
            if isinstance(consumer.source, ShareSource):
                cast("SharedConsumer", consumer).settle_for(key, record, answers, now)

    def _redone(self, outcome: Outcome) -> None:
        """Say once what an operator has done again of a partition that we have."""
        if (begun := self.redone.applied(outcome)) is None:
            return
        key, ranges = begun
        if any(key in consumer.assignments for consumer in self.consumers.values()):
            messages = sum(last - first + 1 for first, last in ranges)
            self.outbox.add(Warn(REDONE.format(*key, messages, ranges[0][0], ranges[-1][1], outcome.message.client_id)))

    def unblock(self, keys: Collection[Key]) -> None:
        """These positions were set (C11), or the group was recreated: their partitions may be worked on again (P11)."""
        for consumer in self.consumers.values():
            consumer.positions.unblock(keys)

    def answered_late(self, key: Key, epoch: int | None, last_offset: int, accepted: bool) -> None:
        """The log answered a ClaimingMessages for a lease that is over (C13)."""
        for consumer in self.consumers.values():
            consumer.delivery.grants.answered_late(key, epoch, last_offset, accepted)

    def wrong_kind(self) -> None:
        """The log rejected a claim because the group is coordinated (G1)."""
        for number, source in self.leases.sources.items():
            if source.failure is None:
                source.failure = coordinated_group(self.settings.group_id)
                self.consumers[number].errors.append(source.failure)

    # Events.

    @overload
    def take(self, consumer: None, function: Callable[[*Ts], T], *of: *Ts) -> T: ...
    @overload
    def take(self, consumer: int, function: Callable[[*Ts], T], *of: *Ts) -> T | None: ...
    def take(self, consumer: int | None, function: Callable[[*Ts], T], *of: *Ts) -> T | None:
        """Carry out an input, one of the functions that are ``given``, and return its result.

        consumer: the number of the consumer that it is for; None: it is for the member. If it has ended, nothing is
        done, and the result is None.
        """
        if consumer is not None and consumer not in self.consumers:
            return None
        if self.recorder is not None:
            return self.recorder.take(consumer, function, of)
        return function(*of)

    @given
    def caught_up(self, now: float) -> None:
        """The replica has caught up.

        How old others' heartbeats are is known with the next record of their CP, at the latest our own Tick (T3).
        """
        self.peers.caught_up(now)
        self.leases.queues.seen_since = min(self.leases.queues.seen_since, now)
        self._unknown_time = {cp: at for cp, at in self._unknown_time.items() if cp in self.worlds}
        ask_at = now + self._rng.random() * FIRST_TICK_SHARE * self.settings.heartbeat_interval_ms
        for cp, world in self.worlds.items():
            if any(lease.held and lease.group_id == self.settings.group_id for lease in world.leases()):
                self._unknown_time[cp] = ask_at

    @given
    def acked(self, token: int, offset: int | None, now: float) -> None:
        """The broker answered an append: its offset, or None if it failed or returned no offset."""
        for lease in self.book.acked(token, offset):
            self.book.compare_clocks(lease, self.worlds[lease.cp].log_time, now)
        for member in self.groups.values():
            member.acked(token, offset, now)

    def is_asked(self, asked: LookUp | TakeOver) -> bool:
        """Whether the answer is still wanted. Any thread may call it, without the lock."""
        consumer = self.consumers.get(asked.consumer)
        assignment = None if consumer is None else consumer.of(asked.key, asked.token)
        if assignment is None or isinstance(asked, LookUp):
            return assignment is not None
        return assignment.taking.attempt == asked.attempt

    @given
    def located(self, asked: LookUp, low: int, high: int, start: int, now: float) -> None:
        """The leader returned a log's start and end, and the start offset asked for."""
        consumer = self.consumers.get(asked.consumer)
        assignment = None if consumer is None else consumer.of(asked.key, asked.token)
        if assignment is not None:
            assignment.located(low, high, start, now)

    @given
    def called(self, call: Call, now: float) -> None:
        """A callback of the user has returned (or raised)."""
        if (consumer := self._numbered[call.consumer - 1]) is not None:
            for piece in call.pieces:
                consumer.called(piece, now)
            if not consumer.callbacks_running and call.consumer not in self.consumers:
                self._numbered[call.consumer - 1] = None

    @given
    def metadata(self, topics: Mapping[str, TopicInfo], now: float) -> None:
        """The topics that the cluster has now."""
        for consumer in self.consumers.values():
            before = consumer.subscription.partitions
            gone, recreated = consumer.subscription.update(topics)
            for topic in sorted(recreated):
                consumer.positions.topic_recreated(topic, now)
            for topic in sorted(gone):
                consumer.warn(f"topic {topic} was deleted; its partitions are let go")
            there = set(consumer.subscription.partitions) if gone or recreated else set[Key]()
            for assignment in [x for x in consumer.assignments.values() if x.key[0] in gone | recreated]:
                if assignment.key not in there:  # or recreated with fewer partitions; the next holder compares (P12)
                    consumer.source.lose(assignment.lease, Loss.TOPIC_GONE, now)
            consumer.positions.topics_told(now)
            consumer.positions.stuck.leaders(topics, now)
            if consumer.subscription.partitions != before:
                consumer.source.look_again()

    @given
    def applied(self, cp: int, offset: int, outcome: Outcome, now: float) -> None:
        """Our replica applied one record."""
        self.peers.log_time_moved(cp, now)
        if outcome.is_a(SettlingMessages, SettleOffsets):
            self._redone(outcome)
        elif outcome.code == codes.REPOSITIONED and outcome.lease is not None:
            self.redone.forget(outcome.lease[1:])
        if self._unknown_time.pop(cp, None) is not None or outcome.is_a(Tick):
            for source in self.leases.sources.values():
                source.log_time_moved(cp, now)
        self.leases.applied(cp, offset, outcome, now, has_ended=self.failure is not None)
        if self.failure is None and outcome.message is not None:
            for member in self.groups.values():
                member.applied(cp, offset, outcome, now)

    @given
    def fail(self, error: Exception, now: float) -> None:
        """End for good: every lease is over, nothing more is sent."""
        self.failure = error
        for lease in list(self.book.leases.values()):
            self.book.lose(lease, Loss.ENDED, now)
        for member in self.groups.values():
            member.end(now)

    # Time.

    @given
    def step(self, now: float) -> None:
        """Do everything that is due."""
        if self.failure is not None:
            return
        self.leases.compare_clocks(now)
        for cp in [cp for cp, ask_at in self._unknown_time.items() if now >= ask_at]:
            del self._unknown_time[cp]
            self.outbox.append(cp, Tick(*self.ids))
        for consumer in self.consumers.values():
            consumer.positions.marks.step(now)  # ahead of the first beats that say what is done (P12)
        silent_cps = self._silent_cps(now)
        beaten = self.book.wake(now, silent_cps)
        self.leases.step(now)
        for member in self.groups.values():
            member.compare_clocks(now)
            member.wake(now)
        for consumer in self.consumers.values():
            consumer.schedule.step(now, silent_cps)
        if silent_cps and any(map(self.peers.is_stopped, silent_cps)):
            for lease in list(self.book.leases.values()):
                if lease.state is LeaseState.RELEASING and self.peers.is_stopped(lease.cp):
                    self.leases.released(lease, now)  # we no longer read this part of the log (E4)
        self.commits.step(self.consumers.values(), now, beaten=bool(beaten))
        for member in self.groups.values():
            member.reports.flush(now)

    def _silent_cps(self, now: float) -> frozenset[int]:
        """CPs in which beats have no effect: the group is paused there (C10), or we cannot follow the log (E4)."""
        peers = self.peers
        return frozenset([cp for cp in self.worlds if peers.is_stopped(cp) or peers.paused_until(cp, now) is not None])

    @given
    def deadline(self, now: float) -> float:
        """The latest time (own clock, ms) of the next ``step``."""
        if self.failure is not None:
            return float("inf")
        due = min((self.book.deadline(), *self._unknown_time.values()))
        for manual in self.leases.manual.values():
            due = min(due, manual.deadline(now))
        for consumer in self.consumers.values():
            due = min(due, consumer.schedule.deadline(now))
            if consumer.assignments:
                due = min(due, self.commits.due)
        return due

    @given
    def release_unseen(self, now: float) -> bool:
        """Before the end: release and leave what the log may grant after it. Returns whether anything was sent."""
        left = [member.member.leave_unseen() for member in self.groups.values()]
        return self.book.unseen.release_all() or any(left)

    @given
    def last_words(self, now: float) -> None:
        """Before ending without a release (for a fast restart, C7): send heartbeats once more, with what is done."""
        self.commits.send(self.consumers.values(), now)
        self.book.beat_all(now)
        for member in self.groups.values():
            member.last_words(now)

    @given
    def forked(self, now: float) -> None:
        """In a forked child: hold no lease; all belong to the parent."""
        for lease in self.book.leases.values():
            lease.valid_until = 0.0
            lease.refresh()
        for member in self.groups.values():
            for piece in member.pieces.values():
                piece.prove(0.0)

    # Users and admins.

    @given
    def raise_error(self, error: Exception, number: int | None, now: float) -> None:
        """The next call of a user of this consumer (None: of each) raises this, once."""
        for consumer in self.consumers.values():
            if number in (None, consumer.number):
                consumer.errors.append(error)

    @given
    def describe(self, number: int, texts: Mapping[Key, str], now: float) -> list[Key]:
        """``commit`` will say this beside the progress. Returns partitions for which it can't: of none then."""
        return self.groups[number].reports.describe(texts)

    @given
    def commit(self, number: int, now: float) -> None:
        """Commit at once what is done, in a coordinated group."""
        self.groups[number].reports.commit_all()
        self.commits.soon(now)

    @given
    def done_ranges(
        self, number: int, ranges: Sequence[OffsetRange], flush: bool, together: bool, now: float
    ) -> list[OffsetRange]:
        """These ranges are done. flush: commit at once; together: all or none. Returns those that counted."""
        consumer = self.consumers.get(number)
        if consumer is None or consumer.ranges is None or (together and not all(map(consumer.ranges.find, ranges))):
            return []
        counted = [found for found in ranges if consumer.ranges.done_range(found, now)]
        if flush and not consumer.at_most_once:
            for found in counted:
                if (lease := self.book.leases.get((found.topic, found.partition))) is not None:
                    self.book.beat_soon(lease.cp, now)
            self.commits.soon(now)
        return counted

    def take_effects(self) -> list[Effect]:
        """The effects since the last call, to be carried out in order."""
        effects = self.outbox.take()
        if effects and self.recorder is not None:
            self.recorder.effects(effects)
        return effects


@given
def check_stuck(consumer: ConsumerEngine, drained_at: float, now: float) -> None:
    """Find stuck partitions. drained_at: when (own clock, ms) a read last took all messages that had arrived."""
    consumer.positions.stuck.look(now, drained_at)
    consumer.delivery.owed.look(now)
    consumer.settlements.look(now)
