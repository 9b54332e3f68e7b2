"""Drives engines without Kafka: logs as lists, a virtual clock, one member per engine, everything deterministic."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from random import Random

from kafka_marshal.adapters.interface import TopicInfo
from kafka_marshal.engine.consumer import ConsumerEngine, ConsumerSettings
from kafka_marshal.engine.core import Engine
from kafka_marshal.engine.effects import Append, Call, Callback, Effect, LookUp, StartFetch, StopFetch, Warn
from kafka_marshal.engine.policies import Balanced, Policy
from kafka_marshal.engine.settings import EngineSettings
from kafka_marshal.engine.subscription import Subscription
from kafka_marshal.engine.tracker import Run
from rationalizer import World, encode

HI = 1_000
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
class Net:
    """The coordination log and the data logs, with one clock."""

    cps: int = 2
    now: float = 1_000_000.0
    logs: dict[int, list[tuple[int, bytes]]] = field(default_factory=dict)
    #: Data partitions: (log start, log end, offsets that are missing).
    data: dict[Key, tuple[int, int, frozenset[int]]] = field(default_factory=dict)
    members: list[Member] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.logs = {cp: [] for cp in range(self.cps)}

    def topic(self, name: str, partitions: int, end: int = 0, start: int = 0, missing: Iterable[int] = ()) -> None:
        for partition in range(partitions):
            self.data[name, partition] = (start, end, frozenset(missing))

    def topics(self) -> dict[str, TopicInfo]:
        names = sorted({name for name, _ in self.data})
        return {n: TopicInfo(n, sum(1 for topic, _ in self.data if topic == n), f"id-{n}") for n in names}

    def member(self, client_id: str, **options: object) -> Member:
        made = Member(self, client_id, **options)  # type: ignore[arg-type]
        self.members.append(made)
        return made

    def tick(self, ms: float = 10.0) -> None:
        """Time passes; every live member hears the log and does what is due."""
        self.now += ms
        for _ in range(4):
            for member in self.members:
                member.turn()

    def run(self, ms: float, step: float = 10.0) -> None:
        until = self.now + ms
        while self.now < until:
            self.tick(step)

    def run_until(self, condition: Callable[[], object], ms: float = 60_000.0) -> None:
        """Let time pass until condition() holds; fails after ms."""
        until = self.now + ms
        while not condition():
            assert self.now < until, f"not reached within {ms} ms of virtual time"
            self.tick()

    def append(self, cp: int, value: bytes) -> int:
        self.logs[cp].append((int(self.now), value))
        return len(self.logs[cp]) - 1

    def owners(self) -> dict[Key, list[str]]:
        """Who could be handed a message now, by partition."""
        found: dict[Key, list[str]] = {key: [] for key in self.data}
        for member in self.members:
            for key, lease in member.engine.book.leases.items():
                if not member.paused and self.now < lease.hand_out_until:
                    found.setdefault(key, []).append(member.client_id)
        return found


class Member:
    """One process: a replica, an engine, and a user that handles what it gets."""

    def __init__(self, net: Net, client_id: str, instance_id: str | None = None, hi: int = HI, group: str = "g") -> None:
        self.net = net
        self.client_id = client_id
        self.worlds = {cp: World(cp, net.cps) for cp in net.logs}
        ids = (group, client_id, instance_id or f"{client_id}-{len(net.members)}")
        self.engine = Engine(EngineSettings(*ids, net.cps, hi), self.worlds, Random(client_id))
        self.paused = False
        self.started = False
        self.drop_appends = False
        self.callbacks: list[tuple[Callback, Key]] = []
        self.hold_callbacks = False
        self.held_calls: list[Call] = []
        self.fetching: dict[Key, int] = {}
        self.handled: list[FakeMessage] = []
        self.warnings: list[str] = []
        self.consumers: list[ConsumerEngine] = []
        self.catch_up()

    def catch_up(self) -> None:
        for cp, world in self.worlds.items():
            world.apply_many((offset, ts, value) for offset, (ts, value) in enumerate(self.net.logs[cp]))
        self.engine.caught_up(self.net.now)
        self.started = True

    def consumer(self, *topics: str, policy: Policy | None = None, **options: object) -> ConsumerEngine:
        settings: dict[str, object] = {
            "at_most_once": False,
            "policy": policy or Balanced(),
            "start": "earliest",
            "batch_size": 10,
            "handler_timeout_ms": None,
            "callbacks": frozenset(Callback),
        }
        settings.update(options)
        subscription = Subscription(topics, "__marshal")
        made = self.engine.add_consumer(subscription, ConsumerSettings(**settings))  # type: ignore[arg-type]
        self.consumers.append(made)
        self.engine.metadata(self.net.topics(), self.net.now)
        self.settle()
        return made

    def turn(self) -> None:
        if self.paused:
            return
        for cp, world in self.worlds.items():
            log = self.net.logs[cp]
            while world.next_offset < len(log):
                offset = world.next_offset
                outcome = world.apply(offset, *log[offset])
                self.engine.applied(cp, offset, outcome, self.net.now)
        self.settle()

    def settle(self) -> None:
        self.engine.step(self.net.now)
        while effects := self.engine.take_effects():
            for effect in effects:
                self.carry_out(effect)

    def carry_out(self, effect: Effect) -> None:
        match effect:
            case Append(cp=cp, record=record, token=token):
                if not self.drop_appends:
                    self.engine.acked(token, self.net.append(cp, encode(record)))
                else:
                    self.engine.acked(token, None)
            case StartFetch(key=key, offset=offset):
                self.fetching[key] = offset
            case StopFetch(key=key):
                self.fetching.pop(key, None)
            case LookUp(assignment=assignment, start=start):
                low, high, _ = self.net.data[assignment.key]
                first = high if start == "latest" else low
                assignment.consumer.located(assignment, low, high, first, self.net.now)
            case Call():
                self.callbacks.extend((effect.callback, x.key) for x in effect.assignments)
                self.held_calls.append(effect)
                if not self.hold_callbacks:
                    self.return_callbacks()
            case Warn(message=message):
                self.warnings.append(message)

    def return_callbacks(self) -> None:
        calls, self.held_calls = self.held_calls, []
        for call in calls:
            for assignment in call.assignments:
                assignment.consumer.called(assignment, call.callback, self.net.now)

    def fetch(self, limit: int = 5) -> None:
        """Deliver up to limit messages of each fetched partition to the engine."""
        for key, position in list(self.fetching.items()):
            low, high, missing = self.net.data[key]
            consumer = next(c for c in self.consumers if key in c.assignments or key[0] in c.subscription.topics)
            if position < low or position > high:
                consumer.out_of_range(key, self.net.now)
                self.settle()
                continue
            offsets = [o for o in range(position, high) if o not in missing][:limit]
            if offsets:
                self.fetching[key] = offsets[-1] + 1
                consumer.delivery.fetched(key, [FakeMessage(key, offset) for offset in offsets])

    def take(self, max_messages: int = 5) -> Run | None:
        """At least once: take the next messages in hand."""
        for consumer in self.consumers:
            run = consumer.delivery.next_run(max_messages, False, self.net.now)
            if run is not None:
                return run
        return None

    def work(self, max_messages: int = 5) -> list[FakeMessage]:
        """Fetch, take, handle and mark done everything there is for now."""
        got: list[FakeMessage] = []
        if self.paused:
            return got
        self.fetch()
        while (run := self.take(max_messages)) is not None:
            got.extend(run.messages)  # type: ignore[arg-type]
            run.assignment.consumer.delivery.done_run(run, self.net.now)
            self.settle()
        self.handled.extend(got)
        return got

    def kill(self) -> None:
        self.net.members.remove(self)

    def held(self) -> list[Key]:
        return sorted(key for key, lease in self.engine.book.leases.items() if lease.held)
