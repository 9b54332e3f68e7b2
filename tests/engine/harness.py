"""Drives engines without Kafka: logs as lists, a virtual clock, one member per engine, everything deterministic.

A member does only what an engine's caller must do (core.py): it steps after new records and at deadlines, never just
because time has passed. So each test here also shows that no deadline is forgotten.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import datetime
from math import inf
from random import Random
from typing import Any

from kafka_marshal.engine.claims.leases import HeldLease
from kafka_marshal.engine.effects import (
    Append,
    Call,
    Callback,
    CheckpointCompleted,
    CloseProducer,
    Effect,
    LookUp,
    Note,
    RestoreState,
    SaveState,
    StartFetch,
    StopFetch,
    TakeOver,
    TakeOverStep,
    Warn,
)
from kafka_marshal.engine.engine import Engine
from kafka_marshal.engine.plane import Checkpointing
from kafka_marshal.engine.policies import Balanced, Policy
from kafka_marshal.engine.recording import EngineRecorder
from kafka_marshal.engine.settings import ConsumerSettings, EngineSettings, Why
from kafka_marshal.engine.subscription import Subscription
from kafka_marshal.engine.work.assignment import Assignment, Run, Stage
from kafka_marshal.engine.work.consumer import ConsumerEngine
from kafka_marshal.engine.work.delivery import Delivery
from kafka_marshal.engine.work.pull import AwaitGrant, Fetch, Take, Wanted
from kafka_marshal.engine.work.stuck import UNREADABLE
from kafka_marshal.engine.work.taking_over import metadata_of
from kafka_marshal.engine.work.topic_mark import NO_ID
from kafka_marshal.ports import Message, TopicInfo
from rationalizer import Lease, Record, ReleaseGroup, World, decode, encode, route_lease
from rationalizer.levels import SUPPORTED_LEVEL

HI = 1_000
MARGIN = 100.0
Key = tuple[str, int]


@dataclass(slots=True)
class FakeMessage:
    """A data message."""

    of: Key
    at: int

    def topic(self) -> str:
        return self.of[0]

    def partition(self) -> int:
        return self.of[1]

    def offset(self) -> int:
        return self.at

    def key(self) -> None:
        return None

    def value(self) -> bytes:
        return b""

    def __repr__(self) -> str:
        return f"{self.of[0]}[{self.of[1]}]@{self.at}"


@dataclass
class DataLog:
    """One data partition: offsets start … end − 1, except missing ones (compaction, markers)."""

    start: int = 0
    end: int = 0
    missing: frozenset[int] = frozenset()
    #: Result of offsets_for_time for any datetime.
    at_datetime: int = 0

    def offsets(self, first: int, limit: int) -> list[int]:
        found = []
        for offset in range(first, self.end):
            if offset not in self.missing:
                found.append(offset)
                if len(found) == limit:
                    break
        return found


@dataclass
class Net:
    """The coordination log, the data logs, and the broker's clock."""

    cps: int = 2
    now: float = 1_000_000.0
    logs: dict[int, list[tuple[int, bytes]]] = field(default_factory=dict)
    data: dict[Key, DataLog] = field(default_factory=dict)
    topic_ids: dict[str, str] = field(default_factory=dict)
    members: list[Member] = field(default_factory=list)
    #: Added to the broker's timestamps (T5: its clock was set).
    stamp_shift: float = 0.0
    #: Kafka's committed offsets of the group, and the producer (member, attempt) that may commit transactions.
    offsets: dict[Key, tuple[int, str]] = field(default_factory=dict)
    producers: dict[Key, tuple[Member, int]] = field(default_factory=dict)
    #: Step of time, and how often all members run at one moment.
    step_ms: float = 10.0
    rounds: int = 4

    def __post_init__(self) -> None:
        self.logs = {cp: [] for cp in range(self.cps)}

    def topic(
        self, name: str, partitions: int = 1, end: int = 0, start: int = 0, missing: Iterable[int] = (), tid: str = ""
    ) -> None:
        """Create a topic or add partitions. tid: its id; without ids no positions are marked."""
        for partition in range(partitions):
            if (name, partition) not in self.data or tid:
                self.data[name, partition] = DataLog(start, end, frozenset(missing))
        self.topic_ids[name] = tid or self.topic_ids.get(name, NO_ID)

    def topics(self) -> dict[str, TopicInfo]:
        counts: dict[str, int] = {}
        for name, _ in self.data:
            counts[name] = counts.get(name, 0) + 1
        return {n: TopicInfo(n, count, self.topic_ids[n]) for n, count in sorted(counts.items())}

    def tell_topics(self) -> None:
        for member in self.members:
            member.look_at_topics()

    def member(self, client_id: str, **options: object) -> Member:
        made = Member(self, client_id, **options)  # type: ignore[arg-type]
        self.members.append(made)
        return made

    def tick(self, ms: float | None = None) -> None:
        """Let time pass; every live member reads the log and does what is due."""
        self.now += ms or self.step_ms
        for _ in range(self.rounds):
            for member in list(self.members):
                member.turn()

    def run(self, ms: float, step: float | None = None) -> None:
        until = self.now + ms
        while self.now < until:
            self.tick(step)

    def run_until(self, condition: Callable[[], object], ms: float = 60_000.0) -> float:
        """Let time pass until condition() holds; fails after ms. Returns how long it took."""
        began, until = self.now, self.now + ms
        while not condition():
            assert self.now < until, f"not reached within {ms} ms of virtual time"
            self.tick()
        return self.now - began

    def append(self, cp: int, value: bytes) -> int:
        self.logs[cp].append((int(self.now + self.stamp_shift), value))
        return len(self.logs[cp]) - 1

    def write(self, record: Record, cp: int) -> int:
        """Write a record of another process."""
        return self.append(cp, encode(record))

    def pause(self, ms: float, group: str = "g", admin: str = "admin") -> None:
        """ReleaseGroup in every CP (C10); 0 ends it."""
        for cp in self.logs:
            self.write(ReleaseGroup("admin-1", admin, group, int(self.now + ms)), cp)

    def records(self, kind: type[Record] | None = None, client_id: str | None = None, since: int = 0) -> list[Record]:
        """Records of the log, by CP and offset."""
        found = [decode(value, SUPPORTED_LEVEL) for log in self.logs.values() for ts, value in log if ts >= since]
        return [
            r for r in found if (kind is None or type(r) is kind) and (client_id is None or r.client_id == client_id)
        ]

    def count(self) -> int:
        return sum(len(log) for log in self.logs.values())

    def world(self, key: Key, group: str = "g") -> Lease:
        """The lease as a fresh replica of the whole log sees it."""
        cp = route_lease(*key, self.cps)
        world = World(cp, self.cps)
        world.apply_many((offset, ts, value) for offset, (ts, value) in enumerate(self.logs[cp]))
        lease = world.lease(group, *key)
        assert lease is not None, f"{key} was never claimed"
        return lease

    def owners(self) -> dict[Key, list[str]]:
        """Partition → members that could deliver a message now."""
        found: dict[Key, list[str]] = {key: [] for key in self.data}
        for member in self.members:
            if member.paused:
                continue
            now = member.clock()
            for key, lease in member.engine.book.leases.items():
                if now < lease.hand_out_until:
                    found.setdefault(key, []).append(member.client_id)
        return found


def _raise(error: Exception) -> None:
    raise error


class Member:
    """One process: a replica, an engine, and a user that handles messages."""

    def __init__(
        self,
        net: Net,
        client_id: str,
        instance_id: str | None = None,
        hi: int = HI,
        group: str = "g",
        rate: float = 1.0,
        rng: Random | None = None,
        write: Callable[[str], object] | None = None,
    ) -> None:
        """write: takes the lines of a recording."""
        self.net = net
        self.client_id = client_id
        #: Rate of its clock relative to the broker's.
        self.rate = rate
        self.worlds = {cp: World(cp, net.cps) for cp in net.logs}
        ids = (group, client_id, instance_id or f"{client_id}-{len(net.members)}-{net.count()}")
        rng = rng or Random(client_id)
        self.engine = Engine(EngineSettings(*ids, net.cps, hi), self.worlds, rng)
        self.recorder = None if write is None else EngineRecorder(self.engine, rng, write, _raise, "0")
        #: SIGSTOP: nothing of this process runs; its clock continues.
        self.paused = False
        #: The replica receives nothing (appends are still sent).
        self.stalled = False
        #: Appends fail.
        self.drop_appends = False
        #: Appends for which this holds are lost.
        self.drop_if: Callable[[Record], bool] = lambda record: False
        #: "now", "late" (see ``deliver_acks``), "lost", or "blank" (without offset).
        self.acks = "now"
        self.late_acks: list[tuple[int, int]] = []
        #: A retry writes every record twice.
        self.duplicate = False
        self.callbacks: list[tuple[Callback, Key]] = []
        self.hold_callbacks = False
        self.held_calls: list[Call] = []
        self.hold_lookups = False
        self.held_lookups: list[LookUp] = []
        self.hold_take_overs = False
        self.held_take_overs: list[TakeOver] = []
        #: on_checkpoint and on_restore do not return.
        self.hold_saves = self.hold_restores = False
        self.held_saves: list[SaveState] = []
        self.held_restores: list[RestoreState] = []
        #: What on_checkpoint and on_restore raise; whether that says that a state is not in the store.
        self.save_error: Exception | None = None
        self.restore_error: Exception | None = None
        self.is_state_missing = False
        #: What is saved and not safe yet; checkpoints that were reported as complete.
        self.unsafe: list[SaveState] = []
        self.completed: list[int] = []
        #: Key → (consumer number, next offset).
        self.fetching: dict[Key, tuple[int, int]] = {}
        self.handled: list[FakeMessage] = []
        self.warnings: list[str] = []
        self.consumers: list[ConsumerEngine] = []
        self.due = 0.0
        for cp in self.worlds:
            self.apply(cp, live=False)
        self.engine.take(None, self.engine.caught_up, self.clock())
        self.settle()

    def clock(self) -> float:
        return self.net.now * self.rate

    def consumer(self, *topics: str, policy: Policy | None = None, **options: object) -> ConsumerEngine:
        settings: dict[str, object] = {
            "at_most_once": False,
            "policy": policy or Balanced(),
            "start": "earliest",
            "batch_size": 10,
            "handler_timeout_ms": None,
            "callbacks": frozenset(Callback),
            "raises": UNREADABLE | {Why.POSITION},  # errors are easier to compare than lines of a log
        }
        settings.update(options)
        subscription = Subscription(topics, "__marshal")
        wanted = ConsumerSettings(**settings)  # type: ignore[arg-type]
        made = self.engine.take(None, self.engine.add_consumer, subscription, wanted)
        self.consumers.append(made)
        self.look_at_topics()
        return made

    def look_at_topics(self) -> None:
        if not self.paused:
            self.engine.take(None, self.engine.metadata, self.net.topics(), self.clock())
            self.settle()

    # The caller's duties.

    def turn(self) -> None:
        if self.paused:
            return
        news = False
        if not self.stalled:
            for cp in self.worlds:
                news = self.apply(cp) or news
        if news or self.clock() >= self.due:
            self.settle()

    def visible(self, cp: int) -> int:
        """How much of a CP's log has reached this member."""
        return len(self.net.logs[cp])

    def apply(self, cp: int, *, live: bool = True) -> bool:
        world, log = self.worlds[cp], self.net.logs[cp]
        news = False
        while world.next_offset < self.visible(cp) and world.required_level is None:
            news = True
            offset = world.next_offset
            if self.recorder is not None:
                self.recorder.record(*log[offset])
            outcome = world.apply(offset, *log[offset])
            if live:
                self.engine.take(None, self.engine.applied, cp, offset, outcome, self.clock())
        return news

    def settle(self) -> None:
        now = self.clock()
        self.engine.take(None, self.engine.step, now)
        self.carry_out_all()
        self.due = self.engine.take(None, self.engine.deadline, now)
        assert self.due > now, f"nothing is left to do, yet {self.due} is no later than {now}: a shell would spin"

    def carry_out_all(self) -> None:
        while effects := self.engine.take_effects():
            for effect in effects:
                self.carry_out(effect)

    def carry_out(self, effect: Effect) -> None:
        match effect:
            case Append():
                self.send(effect)
            case StartFetch(consumer=number, key=key, offset=offset):
                self.fetching[key] = (number, offset)
            case StopFetch(key=key):
                self.fetching.pop(key, None)
            case LookUp():
                self.held_lookups.append(effect)
                if not self.hold_lookups:
                    self.answer_lookups()
            case TakeOver():
                self.held_take_overs.append(effect)
                if not self.hold_take_overs:
                    self.answer_take_overs()
            case CloseProducer(key=key):
                if self.net.producers.get(key, (None, 0))[0] is self:
                    del self.net.producers[key]
            case SaveState():
                self.held_saves.append(effect)
                if not self.hold_saves:
                    self.answer_saves()
                    self.engine.take(None, self.engine.step, self.clock())
            case RestoreState():
                self.held_restores.append(effect)
                if not self.hold_restores:
                    self.answer_restores()
                    self.engine.take(None, self.engine.step, self.clock())
            case CheckpointCompleted(checkpoint=checkpoint):
                self.completed.append(checkpoint)
            case Call():
                self.callbacks.extend((effect.callback, x.key) for x in effect.pieces)
                self.held_calls.append(effect)
                if not self.hold_callbacks:
                    self.return_callbacks(settle=False)
            case Note(event="lost", reason=message) | Warn(message=message):
                self.warnings.append(message)

    def send(self, append: Append) -> None:
        """Send a record to the broker."""
        if self.drop_appends or self.drop_if(append.record):
            self.engine.take(None, self.engine.acked, append.token, None, self.clock())
            return
        offset = self.net.append(append.cp, encode(append.record))
        if self.duplicate:
            self.net.append(append.cp, encode(append.record))
        match self.acks:
            case "now":
                self.engine.take(None, self.engine.acked, append.token, offset, self.clock())
            case "late":
                self.late_acks.append((append.token, offset))
            case "blank":
                self.engine.take(None, self.engine.acked, append.token, None, self.clock())

    def deliver_acks(self) -> None:
        """The broker's late answers arrive."""
        acks, self.late_acks = self.late_acks, []
        for token, offset in acks:
            self.engine.take(None, self.engine.acked, token, offset, self.clock())
        self.settle()

    def answer_lookups(self) -> None:
        lookups, self.held_lookups = self.held_lookups, []
        for lookup in lookups:
            log = self.net.data[lookup.key]
            start = log.start
            if lookup.start == "latest":
                start = log.end
            elif isinstance(lookup.start, datetime):
                start = log.at_datetime
            of = lookup, log.start, log.end, start, self.clock()
            self.engine.take(None, self.engine.located, *of)

    def answer_take_overs(self) -> None:
        """Kafka's answers."""
        asked, self.held_take_overs = self.held_take_overs, []
        for each in asked:
            found = self.took_over(each)
            if (consumer := self.engine.consumers.get(each.consumer)) is None:
                continue
            take_overs = consumer.positions.take_overs
            if found is None:
                self.engine.take(each.consumer, take_overs.failed, each, "fenced", None, self.clock())
            else:
                self.engine.take(each.consumer, take_overs.answered, each, *found, self.clock())

    def took_over(self, asked: TakeOver) -> tuple[int | None, str] | None:
        """Carry out a step as Kafka would; None: the producer is fenced."""
        match asked.step:
            case TakeOverStep.OPEN:
                self.net.producers[asked.key] = (self, asked.attempt)
            case TakeOverStep.READ:
                return self.net.offsets.get(asked.key, (None, ""))
            case TakeOverStep.SET:
                if self.net.producers.get(asked.key) != (self, asked.attempt):
                    return None
                found = self.net.offsets.get(asked.key, (None, ""))
                self.net.offsets[asked.key] = (asked.offset, self._metadata(asked.token))
                return found
        return None, ""

    def _metadata(self, epoch: int) -> str:
        return metadata_of(epoch, self.engine.settings.log_name)

    def commit(self, run: Run) -> str:
        """Commit a run's transaction; returns the result for the user: "committed", or why not."""
        assignment, number = run.assignment, run.assignment.consumer.number
        consumer = self.engine.consumers[number]
        turn = self.engine.take(number, consumer.positions.take_overs.turn, run, self.clock())
        if not turn:
            return "dropped" if turn is None else "not its turn"
        if self.clock() >= assignment.lease.proven_until:
            return "lease lost"
        if not assignment.taking.is_done:
            return "no producer"
        if self.net.producers.get(assignment.key) != (self, assignment.taking.attempt):
            of = assignment.key, assignment.epoch, False, self.clock()
            self.engine.take(number, consumer.untake, *of)
            self.settle()
            return "fenced"
        self.net.offsets[assignment.key] = (run.last + 1, self._metadata(assignment.epoch))
        self.done_run(run)
        return "committed"

    def answer_saves(self, *, are_safe: bool = True) -> None:
        """on_checkpoint returns; are_safe: so does what it returned."""
        asked, self.held_saves = self.held_saves, []
        for each in asked:
            of = each.barrier, each.pieces
            if (checkpoints := self.checkpoints_of(each.consumer)) is None:
                continue
            self.engine.take(each.consumer, checkpoints.returned, *of, self.save_error, self.clock())
            if self.save_error is None and are_safe:
                self.engine.take(each.consumer, checkpoints.safe, *of, None, self.clock())
            elif self.save_error is None:
                self.unsafe.append(each)

    def answer_restores(self) -> None:
        """on_restore returns, or raises."""
        asked, self.held_restores = self.held_restores, []
        for each in asked:
            if (checkpoints := self.checkpoints_of(each.consumer)) is not None:
                of = each.attempt, self.restore_error, self.is_state_missing, self.clock()
                self.engine.take(each.consumer, checkpoints.restored, *of)

    def checkpoints_of(self, number: int) -> Checkpointing | None:
        consumer = self.engine.consumers.get(number)
        return None if consumer is None else consumer.source.checkpoints

    def return_callbacks(self, *, settle: bool = True, only: int | None = None) -> None:
        calls, self.held_calls = self.held_calls[:only], [] if only is None else self.held_calls[only:]
        for call in calls:
            self.engine.take(None, self.engine.called, call, self.clock())
        if settle:
            self.settle()

    # A user.

    def fetch(self, limit: int = 5) -> int:
        """Pass up to limit messages of each fetched partition to the engine; returns their number."""
        came = 0
        for key, (number, position) in list(self.fetching.items()):
            log = self.net.data[key]
            if position < log.start or position > log.end:
                del self.fetching[key]
                positions = self.engine.consumers[number].positions
                self.engine.take(number, positions.out_of_range, key, self.clock())
                self.settle()
            elif offsets := log.offsets(position, limit):
                self.fetching[key] = (number, offsets[-1] + 1)
                messages: list[Message] = [FakeMessage(key, offset) for offset in offsets]
                self.engine.take(number, self.engine.consumers[number].delivery.fetched, key, messages, self.clock())
                self.carry_out_all()
                came += len(messages)
        return came

    def take(self, max_messages: int = 5, iterating: bool = False) -> Run | None:
        """At least once: take the next messages."""
        for consumer in self.consumers:
            for came in (None, 0):  # after a turn that ended early, existing messages are read first
                wanted = Wanted(max_messages, iterating, came=came)
                match self.engine.take(consumer.number, consumer.pull.next, wanted, self.clock()):
                    case Take(run):
                        return run
        return None

    def done(self, message: object) -> None:
        """The user's done(message)."""
        for consumer in self.consumers:
            if consumer.subscription.matches(TopicInfo(message.topic(), 1, "")):  # type: ignore[attr-defined]
                of: Any = [message]
                self.engine.take(consumer.number, consumer.delivery.done, of, self.clock())
        self.settle()

    def delivery_of(self, run: Run) -> Delivery:
        return self.engine.consumers[run.assignment.consumer.number].delivery

    def done_run(self, run: Run) -> None:
        self.engine.take(run.assignment.consumer.number, self.delivery_of(run).done_run, run, self.clock())
        self.settle()

    def leave_run(self, run: Run) -> None:
        self.delivery_of(run).leave_run(run, self.clock())
        self.settle()

    def work(self, max_messages: int = 5) -> list[FakeMessage]:
        """At least once: fetch, take, handle and mark as done everything available."""
        got: list[FakeMessage] = []
        if self.paused:
            return got
        self.fetch()
        while (run := self.take(max_messages)) is not None:
            got.extend(run.messages)  # type: ignore[arg-type]
            self.done_run(run)
        self.handled.extend(got)
        return got

    def work_granted(self, limit: int = 10) -> list[FakeMessage]:
        """At most once: up to limit messages that a user gets within a turn of the loop (C13)."""
        got: list[FakeMessage] = []
        for consumer in self.consumers:
            if (run := self.granted(consumer)) is not None:
                run.since = self.clock()
                got.extend(run.take(limit))  # type: ignore[arg-type]
        self.handled.extend(got)
        return got

    def granted(self, consumer: ConsumerEngine, fetch: int = 5) -> Run | None:
        """At most once: granted messages; else request the next batch and wait for the answer."""
        came: int | None = None
        run: Run | None = None
        turns = 0
        while run is None:
            turns += 1
            assert turns < 1_000, "busy waiting: no time passes between these turns"
            match self.engine.take(consumer.number, consumer.pull.next, Wanted(0, came=came), self.clock()):
                case Take(found):
                    run = found
                case Fetch(room, _):
                    came = self.fetch(fetch) if room > 0 and not consumer.closing else 0
                case AwaitGrant(grant) if grant.is_answered:
                    self.engine.take(consumer.number, consumer.pull.answered, grant, self.clock())
                    came = None
                case _:
                    break
        self.settle()
        return run

    # Looking.

    def kill(self) -> None:
        self.net.members.remove(self)

    def close(self) -> None:
        for consumer in self.consumers:
            self.engine.take(consumer.number, consumer.close, self.clock(), inf)
        self.settle()

    def held(self) -> list[Key]:
        return sorted(key for key, lease in self.engine.book.leases.items() if lease.held)

    def lease(self, key: Key) -> HeldLease:
        return self.engine.book.leases[key]

    def assignment(self, key: Key) -> Assignment:
        return next(c.assignments[key] for c in self.consumers if key in c.assignments)

    def stage(self, key: Key) -> Stage | None:
        return next((c.assignments[key].stage for c in self.consumers if key in c.assignments), None)

    def can_hand_out(self, key: Key) -> bool:
        """Whether a user's thread could get a message of this partition now."""
        lease = self.engine.book.leases.get(key)
        return lease is not None and self.clock() < lease.hand_out_until
