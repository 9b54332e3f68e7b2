"""The engine: events and now in, effects out. No I/O, no clock, no threads.

The caller's duties, in this order:

Everything is told by :meth:`Engine.take`, as an event of :mod:`.inputs`.

1. Apply log records to the worlds. When the replica has caught up (C15), tell ``CaughtUp`` once.
2. From then on, after *each* record applied, tell ``Applied`` with its outcome.
3. Pass on acknowledgements, look-ups, metadata, returned callbacks and what readers tell as they come, in any order.
4. After any of these, and not later than :meth:`deadline`, tell ``Step``, then carry out :meth:`take_effects` in order.
5. Before a message goes to a user: compare now with its lease's ``hand_out_until``.

All calls under one lock. ``now`` is our own monotonic clock in milliseconds, one that counts suspend (T4); it never
reaches a record or the state of the world.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from random import Random
from typing import Any

from kafka_marshal.engine import inputs
from kafka_marshal.engine.claims.client import ClaimsClient
from kafka_marshal.engine.claims.leases import LeaseBook, LeaseState
from kafka_marshal.engine.claims.manual import ManualLease
from kafka_marshal.engine.claims.peers import Observer
from kafka_marshal.engine.effects import Call, Effect, Key, LookUp, Outbox, Warn
from kafka_marshal.engine.inputs import Input
from kafka_marshal.engine.plane import HandIn, Loss
from kafka_marshal.engine.settings import BEATS_PER_INTERVAL, FIRST_TICK_SHARE, ConsumerSettings, EngineSettings
from kafka_marshal.engine.subscription import Subscription
from kafka_marshal.engine.work.assignment import REPORTING
from kafka_marshal.engine.work.consumer import ConsumerEngine
from kafka_marshal.engine.work.topic_mark import split
from kafka_marshal.errors import ClientReplacedError
from kafka_marshal.ports import TopicInfo
from rationalizer import (
    ClaimingMessages,
    ClaimingPartition,
    ForgetGroup,
    Heartbeat,
    HeartbeatBatch,
    Outcome,
    Record,
    ReleaseGroup,
    ReleasingPartition,
    Tick,
    World,
    codes,
)
from rationalizer.limits import HEAD_FIELDS
from rationalizer.wire.unpacking import Message

__all__ = ["Engine"]


class Engine:
    """The whole client logic of one Marshal."""

    def __init__(self, settings: EngineSettings, worlds: Mapping[int, World], rng: Random) -> None:
        self.settings = settings
        self.outbox = Outbox()
        self.observer = Observer(settings, worlds)
        self.book = LeaseBook(settings, self.outbox, rng)
        self.consumers: dict[int, ConsumerEngine] = {}
        #: What says which partitions each of them works on.
        self.claims: dict[int, ClaimsClient] = {}
        self.manual: dict[Key, ManualLease] = {}
        #: Why this engine has ended; None: it has not.
        self.failure: Exception | None = None
        #: An operator has asked us to hand over (C19).
        self.draining = False
        self._worlds = worlds
        self._moved: set[int] = set()
        #: CPs of which no record has told how late it is since we caught up, and when we ask (T3).
        self._timeless: dict[int, float] = {}
        self._ids_wanted = False
        self._rng = rng
        self._next_ranges = 0.0
        self._consumer_count = 0
        #: Called with each input and its time, before it is taken: see ``InputLog``.
        self.recorder: Callable[[Input, float], object] | None = None

    @property
    def ids(self) -> tuple[str, str, str]:
        """What every record of ours begins with."""
        return self.settings.ids

    # Setting up.

    def add_consumer(self, subscription: Subscription, settings: ConsumerSettings) -> ConsumerEngine:
        """A new consumer; it begins to claim once metadata was given."""
        self._consumer_count += 1
        number = self._consumer_count
        source = ClaimsClient(self.settings, settings, self.book, self.observer, self.outbox, self._lets_all_go)
        consumer = ConsumerEngine(number, settings, subscription, source, self.settings, self.outbox, self.want_ids)
        source.attach(consumer)
        self.consumers[number], self.claims[number] = consumer, source
        return consumer

    def _lets_all_go(self) -> str:
        return "an operator asked this member to hand over (kafka-marshal drain)" if self.draining else ""

    def remove_consumer(self, consumer: ConsumerEngine) -> None:
        """A consumer has ended."""
        self.consumers.pop(consumer.number, None)
        self.claims.pop(consumer.number, None)

    def claim(self, key: Key) -> ManualLease:
        """Want a lease by hand; ``step`` sends the claim."""
        self.manual[key] = ManualLease(key, self.book, self.observer, self.outbox, self.ids)
        return self.manual[key]

    def want_ids(self) -> None:
        """Something can't begin before the ids of topics are known (P12)."""
        self._ids_wanted = True

    def take_ids_wanted(self) -> bool:
        """Whether :meth:`metadata` with ids is to come soon; asked once, it is taken for promised."""
        wanted, self._ids_wanted = self._ids_wanted, False
        return wanted

    def has_marks(self, topics: Iterable[str]) -> bool:
        """Whether the log knows in which topic of one of these names positions count (P12); the first partition tells.

        (Where it does not, and others are marked, those wait for the ids by themselves.)
        """
        leases = (self.observer.lease((topic, 0)) for topic in topics)
        return any(lease is not None and split(lease.progress.ranges).marks for lease in leases)

    def is_taken(self, key: Key) -> bool:
        """Does this Marshal hold or want the lease already?"""
        return key in self.book.leases

    # Events.

    def take(self, event: Input, now: float) -> object:
        """The one way in: something happened, or time has gone by. ``HandOut`` is answered with a run, or None."""
        if self.recorder is not None:
            self.recorder(event, now)
        if (name := _OWN.get(type(event))) is not None:
            return getattr(self, name)(*event, now)
        told: tuple[Any, ...] = event
        consumer = self.consumers.get(told[0])
        return None if consumer is None else _OF_A_CONSUMER[type(event)](consumer, *told[1:], now)

    def caught_up(self, now: float) -> None:
        """The replica knows the world.

        How old the last beats of others really are shows with the next record of their CP: somebody's or our Tick (T3).
        """
        self.observer.caught_up(now)
        ask_at = now + self._rng.random() * FIRST_TICK_SHARE * self.settings.heartbeat_interval_ms
        for cp, world in self._worlds.items():
            if any(lease.held and lease.group_id == self.settings.group_id for lease in world.leases()):
                self._timeless[cp] = ask_at

    def acked(self, token: int, offset: int | None, now: float) -> None:
        """The broker answered an append: its offset, or None where it failed or did not tell."""
        for lease in self.book.acked(token, offset):
            self.book.compare_clocks(lease, self._worlds[lease.cp].log_time, now)

    def is_asked(self, asked: LookUp) -> bool:
        """Whether the answer to a look-up is wanted still; any thread may ask, without the lock."""
        consumer = self.consumers.get(asked.consumer)
        return consumer is not None and consumer.is_asked(asked.key, asked.token)

    def located(self, asked: LookUp, low: int, high: int, start: int, now: float) -> None:
        """The leader told a log's start and end, and the start offset asked for."""
        if (consumer := self.consumers.get(asked.consumer)) is not None:
            consumer.located(asked.key, asked.token, low, high, start, now)

    def called(self, call: Call, now: float) -> None:
        """A callback of the user has returned (or raised)."""
        if (consumer := self.consumers.get(call.consumer)) is not None:
            for piece in call.pieces:
                consumer.called(piece, now)

    def metadata(self, topics: Mapping[str, TopicInfo], now: float) -> None:
        """What topics the cluster has now."""
        for consumer in self.consumers.values():
            before = consumer.subscription.partitions
            gone, recreated = consumer.subscription.update(topics)
            for topic in sorted(recreated):
                consumer.positions.topic_recreated(topic, now)
            for topic in sorted(gone):
                consumer.warn(f"topic {topic} was deleted; its partitions are let go")
            there = set(consumer.subscription.partitions) if gone or recreated else set[Key]()
            for assignment in [x for x in consumer.assignments.values() if x.key[0] in gone | recreated]:
                if assignment.key not in there:  # recreated with fewer partitions, too; the next holder compares (P12)
                    consumer.source.lose(assignment.lease, Loss.TOPIC_GONE, now)
            consumer.topics_told(now)
            consumer.positions.stuck.leaders(topics, now)
            if consumer.subscription.partitions != before:
                consumer.source.look_again()

    def applied(self, cp: int, offset: int, outcome: Outcome, now: float) -> None:
        """Our replica applied one record."""
        self.observer.log_time_moved(cp, now)
        self._moved.add(cp)
        if self._timeless.pop(cp, None) is not None or outcome.type == Tick.__name__:
            for source in self.claims.values():
                source.placement.log_time_moved(cp, now)
        message = outcome.message
        if message is None or message[4] != self.settings.group_id:
            return
        own = message[2] == self.settings.instance_id and message[3] == self.settings.client_id
        if self.failure is not None:
            if own and isinstance(record := outcome.record, ClaimingMessages):  # sent before: nobody will get these
                self._grant_applied(record, outcome, now)
            return
        if outcome.type == HeartbeatBatch.__name__:  # most of the log, and large: no objects for what is known good
            self._beats_applied(cp, offset, message[HEAD_FIELDS], outcome.entries or (), outcome, own, now)
            return
        if outcome.type == ClaimingPartition.__name__:  # most of it while a group starts
            self._claim_applied(cp, offset, message, outcome, own, now)
            return
        record = outcome.record
        match record:
            case Heartbeat(epoch=None):
                self._takeover_applied(cp, offset, record, outcome, own, now)
            case Heartbeat(topic=topic, partition=partition, epoch=epoch, last_offset=last_offset):
                entry = (topic, partition, epoch, last_offset)
                self._beats_applied(cp, offset, [entry], (outcome.code,), outcome, own, now)
            case ReleasingPartition():
                self._release_applied(record, outcome, own, now)
            case ClaimingMessages() if own:
                self._grant_applied(record, outcome, now)
            case ReleaseGroup():
                self._look_again()
            case ForgetGroup() if outcome.accepted:
                self._forgotten(cp, now)
            case _:
                pass
        if record is not None and (key := _key_of(record)) is not None:
            self._verify(key, now)
        if outcome.accepted and isinstance(record, Heartbeat | ReleasingPartition) and record.last_offset is not None:
            pause = self._worlds[cp].pause(self.settings.group_id)
            if pause is not None and pause.client_id == record.client_id:
                self._unblock([(record.topic, record.partition)])

    def _unblock(self, keys: Collection[Key]) -> None:
        """Somebody set these positions (C11), or the group begins anew: they may be worked on again (P11)."""
        for consumer in self.consumers.values():
            consumer.positions.unblock(keys)
        self._look_again()

    def _look_again(self, key: Key | None = None) -> None:
        """Somebody else did something to a lease (None: to any), or wants something."""
        for source in self.claims.values():
            if key is None:
                source.look_again()
            else:
                source.changed(key)

    def _verify(self, key: Key, now: float) -> None:
        """Whatever happened: a lease of ours stands in the world under our ids and epoch, or it is lost (C5)."""
        lease = self.book.leases.get(key)
        if lease is None or lease.state not in (LeaseState.HELD, LeaseState.RELEASING):
            return
        world = self.observer.lease(key)
        ours = (self.settings.client_id, self.settings.instance_id, lease.epoch)
        if world is None or (world.client_id, world.instance_id, world.epoch) != ours:
            if lease.state is LeaseState.RELEASING:
                self._released(key, now)
            else:
                self.book.lose(lease, Loss.FENCED, now)

    def _claim_applied(self, cp: int, offset: int, message: Message, outcome: Outcome, own: bool, now: float) -> None:
        _, _, instance_id, client_id, _, topic, partition, heartbeat_interval_ms = message
        key = (topic, partition)
        if own:
            self._own_claim_applied(cp, offset, key, heartbeat_interval_ms, outcome, now)
        if outcome.code == codes.OK:
            self.observer.granted(client_id, instance_id, key, now)
            self._look_again(key)
        elif outcome.code == codes.HELD:
            self.observer.wished(client_id, key, now)
            self._look_again(key)
        self._verify(key, now)

    def _own_claim_applied(
        self, cp: int, offset: int, key: Key, heartbeat_interval_ms: int, outcome: Outcome, now: float
    ) -> None:
        lease = self.book.leases.get(key)
        wanted = lease is not None and lease.state is LeaseState.WANTED
        if not outcome.accepted:
            if outcome.code == codes.HELD:
                self.observer.refused(key, now)
            if lease is not None and wanted:
                lease.claim_sent_at = None
                lease.owner.refused(outcome.code, now)
            return
        epoch = outcome.epoch if outcome.epoch is not None else offset
        if lease is not None and wanted and outcome.code == codes.OK:
            self.book.grant(lease, epoch, offset, outcome.log_time, heartbeat_interval_ms, now)
        elif lease is None or wanted or lease.epoch != epoch:
            # Granted what we no longer want, or what ends an epoch that we hold or are letting go: let it go (C17).
            self.book.release_epoch(key, cp, epoch, None)
            if lease is not None and wanted:
                lease.claim_sent_at = None
                lease.owner.refused(outcome.code, now)

    def _takeover_applied(
        self, cp: int, offset: int, record: Heartbeat, outcome: Outcome, own: bool, now: float
    ) -> None:
        key = (record.topic, record.partition)
        lease = self.book.leases.get(key)
        if not own:
            if outcome.accepted:
                self.observer.granted(record.client_id, record.instance_id, key, now)
                self._look_again(key)
                ours = lease is not None and lease.state in (LeaseState.HELD, LeaseState.RELEASING)
                if record.client_id == self.settings.client_id and ours:
                    self._replaced(record, now)
            return
        if not outcome.accepted:
            if outcome.code == codes.NOT_FRESH:
                self.observer.refused(key, now)
            if lease is not None and lease.state is LeaseState.WANTED:
                lease.claim_sent_at = None
                lease.owner.refused(outcome.code, now)
            return
        self.observer.granted(record.client_id, record.instance_id, key, now)
        world = self.observer.lease(key)
        if lease is not None and lease.state is LeaseState.WANTED and world is not None:
            self.book.grant(lease, offset, offset, outcome.log_time, world.heartbeat_interval_ms, now)
        else:
            self.book.release_epoch(key, cp, offset, None)

    def _replaced(self, record: Heartbeat, now: float) -> None:
        self.fail(
            ClientReplacedError(
                f"a newer instance ({record.instance_id}) of client_id {self.settings.client_id!r} took over "
                f"{record.topic} [{record.partition}]: this Marshal has ended and commits nothing more. Give "
                "every worker "
                "of a group its own client_id; a restarted one keeps its old one"
            ),
            now,
        )

    def fail(self, error: Exception, now: float) -> None:
        """End for good: every lease is over, nothing more is sent."""
        self.failure = error
        for lease in list(self.book.leases.values()):
            self.book.lose(lease, Loss.ENDED, now)

    def _beats_applied(
        self,
        cp: int,
        offset: int,
        entries: Sequence[tuple[str, int, int | None, int | None]],
        entry_codes: tuple[str, ...],
        outcome: Outcome,
        own: bool,
        now: float,
    ) -> None:
        beaten: list[tuple[Key, int]] = []
        for (topic, partition, epoch, last_offset), code in zip(entries, entry_codes, strict=False):
            key = (topic, partition)
            accepted = code in codes.ACCEPTED
            if accepted and self.observer.heard(key, now):
                self._look_again(key)
            if not own:
                continue
            if accepted and epoch is not None:
                beaten.append((key, epoch))
            lease = self.book.leases.get(key)
            if lease is not None and lease.epoch == epoch:
                lease.owner.beaten(last_offset, accepted, now)
                if not accepted:  # else it is ours: no beat of anybody but the holder is accepted (C5)
                    self._verify(key, now)
        if beaten:
            self.book.beat_applied(cp, offset, outcome.log_time, beaten, now)

    def _release_applied(self, record: ReleasingPartition, outcome: Outcome, own: bool, now: float) -> None:
        key = (record.topic, record.partition)
        lease = self.book.leases.get(key)
        is_held = lease is not None and lease.held and lease.epoch == record.epoch
        if not outcome.accepted:
            if is_held and not own and record.client_id == self.settings.client_id:
                self._drain(record, now)
            return
        self.observer.freed(record.client_id, key, now)
        self._look_again(key)
        if own and is_held and lease is not None:  # ours was not sent: an operator took it away (C18)
            self.book.lose(lease, Loss.EVICTED, now)
            return
        if own and lease is not None and lease.epoch == record.epoch:
            pause = self._worlds[lease.cp].pause(self.settings.group_id)
            pausing = pause is not None and pause.client_id == self.settings.client_id
            lease.owner.handed_in(HandIn(record.last_offset, outcome.code, pausing))

    def _drain(self, record: ReleasingPartition, now: float) -> None:
        """An operator asks us to hand over everything, and to claim nothing more (C19)."""
        if not self.draining:
            self.draining = True
            self.outbox.add(
                Warn(
                    f"an operator (instance {record.instance_id}) asks {self.settings.client_id!r} to hand over: its "
                    "partitions are released when what is in hand of them is done, and it claims none for as long as "
                    "this Marshal lives. Nothing is lost. End the process when it holds nothing"
                )
            )

    def _released(self, key: Key, now: float) -> None:
        lease = self.book.leases.pop(key)
        lease.state = LeaseState.LOST
        lease.owner.released(now)

    def _grant_applied(self, record: ClaimingMessages, outcome: Outcome, now: float) -> None:
        key = (record.topic, record.partition)
        lease = self.book.leases.get(key)
        if lease is None or lease.epoch != record.epoch:
            for consumer in self.consumers.values():
                consumer.delivery.grants.answered_late(key, record.epoch, record.proposed_last_offset, outcome.accepted)
            return
        lease.owner.answered(record.proposed_last_offset, outcome.accepted, outcome.code, now)

    def _forgotten(self, cp: int, now: float) -> None:
        self._unblock(self.observer.forgotten(cp))
        for lease in [lease for lease in self.book.leases.values() if lease.cp == cp]:
            self._verify(lease.key, now)
        self._look_again()

    # Time.

    def compare_clocks(self, now: float) -> None:
        """T5, after records were applied: due before anybody else has the lock, even where ``step`` can wait."""
        if self._moved:
            self.book.log_times_moved({cp: self._worlds[cp].log_time for cp in self._moved}, now)
            self._moved.clear()

    def step(self, now: float) -> None:
        """Do everything that is due."""
        if self.failure is not None:
            return
        self.compare_clocks(now)
        for cp in [cp for cp, ask_at in self._timeless.items() if now >= ask_at]:
            del self._timeless[cp]
            self.outbox.append(cp, Tick(*self.ids))
        silent_cps = self._silent_cps(now)
        beaten = self.book.wake(now, silent_cps)
        if self.manual:
            for manual in [x for x in self.manual.values() if x.loss or x.is_released]:
                del self.manual[manual.key]
            for manual in self.manual.values():
                manual.step(now)
        for consumer in self.consumers.values():
            consumer.step(now, silent_cps)
        if silent_cps and any(map(self.observer.is_stopped, silent_cps)):
            for lease in list(self.book.leases.values()):
                if lease.state is LeaseState.RELEASING and self.observer.is_stopped(lease.cp):
                    self._released(lease.key, now)  # the log will not show it to us any more (E4)
        if beaten or now >= self._next_ranges:  # with the beats, so that both take one wake
            self._next_ranges = now + self.settings.heartbeat_interval_ms / BEATS_PER_INTERVAL
            self._commit_ranges(now)

    def _silent_cps(self, now: float) -> frozenset[int]:
        """CPs in which beats are no use: an admin has paused the group there (C10), or we can't follow the log (E4)."""
        observer = self.observer
        return frozenset(
            [cp for cp in self._worlds if observer.is_stopped(cp) or observer.paused_until(cp, now) is not None]
        )

    def _commit_ranges(self, now: float) -> None:
        for consumer in self.consumers.values():
            consumer.positions.marks.send(now)
            for assignment in consumer.assignments.values():
                if not assignment.tracker.has_news:
                    continue
                if assignment.stage in REPORTING and assignment.lease.held:
                    consumer.commit_ranges(assignment, now)

    def commit_ranges_soon(self, now: float) -> None:
        """Commit what is done beyond gaps at the next step."""
        self._next_ranges = now

    def deadline(self, now: float) -> float:
        """When ``step`` has something to do again, at the latest."""
        if self.failure is not None:
            return float("inf")
        due = min((self.book.deadline(), *self._timeless.values()))
        for manual in self.manual.values():
            due = min(due, manual.deadline(now))
        for consumer in self.consumers.values():
            due = min(due, consumer.deadline(now))
            if consumer.assignments:
                due = min(due, self._next_ranges)
        return due

    def last_words(self, now: float) -> None:
        """Before ending without a release (for a fast restart, C7): beat once more with what is done."""
        self._commit_ranges(now)
        self.book.beat_all(now)

    def take_effects(self) -> list[Effect]:
        """The effects since the last call, to be carried out in order."""
        return self.outbox.take()


def _key_of(record: Record) -> Key | None:
    topic, partition = getattr(record, "topic", None), getattr(record, "partition", None)
    return (topic, partition) if isinstance(topic, str) and isinstance(partition, int) else None


#: Who takes which input: the engine itself, or one of its consumers (nobody, where that has ended).
_OWN: dict[type[Input], str] = {
    inputs.CaughtUp: "caught_up",
    inputs.Applied: "applied",
    inputs.Acked: "acked",
    inputs.Topics: "metadata",
    inputs.Located: "located",
    inputs.Called: "called",
    inputs.Step: "step",
}
_OF_A_CONSUMER: dict[type[Input], Callable[..., object]] = {
    inputs.Fetched: lambda consumer, key, messages, _: consumer.delivery.fetched(key, messages),
    inputs.Reached: ConsumerEngine.reached,
    inputs.LogEnds: ConsumerEngine.log_ends,
    inputs.OutOfRange: ConsumerEngine.out_of_range,
    inputs.ReadFailed: lambda consumer, *told: consumer.positions.stuck.failed(*told),
    inputs.TooLarge: lambda consumer, *told: consumer.positions.stuck.too_large(*told),
    inputs.HandOut: lambda consumer, *wanted: consumer.delivery.next_run(*wanted),
    inputs.DoneRun: ConsumerEngine.done_run,
    inputs.Done: lambda consumer, *told: consumer.delivery.done(*told),
}
