"""Produces to users' topics from a simulated process: dead letters may be lost, late or duplicated.

Requests of its transactions travel, too, and may be lost, late or without an answer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any, Protocol, cast

from kafka_marshal.adapters import producing
from kafka_marshal.adapters.memory import MemoryBroker
from kafka_marshal.adapters.memory.writers import MemoryTransactionalProducer, Partitioner
from kafka_marshal.adapters.producing import Headers
from kafka_marshal.errors import ClosedError
from kafka_marshal.testing.simulation.living import Living
from kafka_marshal.testing.simulation.runtime import SHORTEST_MS
from kafka_marshal.testing.simulation.scheduler import Scheduler, Task
from kafka_marshal.types import T

#: Retry interval while no broker is reachable: of a producer, and of a transaction, which awaits answers, too (ms).
TRY_EVERY_MS = 5.0
ASK_EVERY_MS = 20.0

#: A request without an answer is sent again after this share of its time.
AGAIN_AFTER = 0.2

#: By how much at most the brokers take up a request late (share of its time).
SLOWEST = 0.5


OnAck = Callable[[Exception | None], None] | None


class Carrier(Protocol):
    """What a producer needs of the network."""

    scheduler: Scheduler
    broker: MemoryBroker
    #: The share of requests that the brokers take up late.
    slow_share: float

    def broker_clock(self) -> float: ...

    def publish(
        self,
        topic: str,
        partition: int,
        value: bytes | None,
        key: bytes | None = None,
        headers: Headers = (),
        timestamp_ms: int | None = None,
    ) -> int: ...


def wait_until(scheduler: Scheduler, met: Callable[[], bool], until: float) -> bool:
    """Wait for a condition, at most until this virtual time (ms); whether it is met."""
    while not met() and scheduler.now < until:
        scheduler.park(min(until, scheduler.now + ASK_EVERY_MS))
    return met()


class SimulatedTransactionalProducer(MemoryTransactionalProducer):
    """One transactional id. What was sent arrives, whatever happens to its process meanwhile."""

    def __init__(self, network: Carrier, process: Living, transactional_id: str, transaction_timeout_ms: int) -> None:
        super().__init__(network.broker, process.name, transactional_id, transaction_timeout_ms)
        self._network = network
        self._scheduler = network.scheduler
        self._process = process
        #: When the broker will next be asked to end what is open for too long.
        self._expires_at = 0.0

    def _now_s(self) -> float:
        return self._scheduler.now / 1000

    def _is_reached(self) -> bool:
        return False  # records travel

    def send(
        self,
        topic: str,
        value: bytes | None,
        key: bytes | None = None,
        headers: Headers = (),
        partition: int | None = None,
    ) -> None:
        super().send(topic, value, key, headers, partition)
        self._scheduler.call_at(self._process.reaches_at(), self._arrive)

    def _arrive(self) -> None:
        if self._is_open and not self._in_doubt and not self._process.host.trouble.is_cut_off:
            self._write_all()
            self._watch()

    def _watch(self) -> None:
        """Have the broker end it in time: readers wait for that."""
        if self._expires_at <= self._scheduler.now:
            self._expires_at = self._scheduler.now + self._timeout_ms + SHORTEST_MS
            self._scheduler.call_at(self._expires_at, self._broker.transactions.expire)

    def _ask(self, request: str, timeout_s: float, late: Callable[[str], Exception], act: Callable[[], T]) -> T:
        """As librdkafka does, ask again until there is an answer: the broker then takes a request more than once."""
        scheduler, process, trouble = self._scheduler, self._process, self._process.host.trouble
        chance = process.rng.random
        until = scheduler.now + timeout_s * 1000
        while scheduler.now < until:
            self._check_usable()
            if trouble.is_cut_off:
                scheduler.park(min(until, scheduler.now + ASK_EVERY_MS))
                continue
            answers: list[tuple[T | None, Exception | None]] = []
            if not (trouble.loss and chance() < trouble.loss):
                is_heard = not (trouble.ack_loss and chance() < trouble.ack_loss)
                scheduler.call_at(self._arrival(timeout_s), partial(self._deliver, act, answers if is_heard else []))
            wait_until(scheduler, partial(bool, answers), min(until, scheduler.now + AGAIN_AFTER * timeout_s * 1000))
            if answers:
                scheduler.park(scheduler.now + process.travel_ms())
                self._check_usable()
                found, refused = answers[0]
                if refused is not None:
                    raise refused
                return cast("T", found)
        raise late("no answer came")

    def _arrival(self, timeout_s: float) -> float:
        """When a request that is sent now reaches the broker, and is taken up."""
        trouble, chance, now = self._process.host.trouble, self._process.rng.random, self._scheduler.now
        if trouble.late and chance() < trouble.late:
            return now + timeout_s * 1000 * (0.8 + 3 * chance())
        slow = SLOWEST * chance() * timeout_s * 1000 if chance() < self._network.slow_share else 0.0
        return now + self._process.travel_ms() + slow

    def _deliver(self, act: Callable[[], T], answers: list[tuple[T | None, Exception | None]]) -> None:
        """The request reaches the broker."""
        try:
            answers.append((act(), None))
            self._watch()
        except Exception as error:  # noqa: BLE001 - it is the answer
            answers.append((None, error))


class SimulatedSending:
    """Sends records, in order within a partition; those it gave up may arrive nevertheless (C17)."""

    def __init__(self, network: Carrier, process: Living, delivery_timeout_ms: int) -> None:
        self._network = network
        self._process = process
        self._timeout_ms = delivery_timeout_ms
        #: Records that wait for a reachable broker; each has a `deadline` and an `on_ack`.
        self._waiting: deque[Any] = deque()
        #: Answers in transit: when they arrive, and for which `on_ack`.
        self._due: list[tuple[float, Callable[[Any], None] | None, Any]] = []
        #: Number of records neither acknowledged nor given up.
        self._open = 0
        self._last_arrival: dict[object, float] = {}
        self._closed = False

    def _unreached(self, record: Any) -> object:
        """The answer for a record that no broker could be given in time."""
        raise NotImplementedError

    def _dispatch(self, record: Any, now: float) -> None:
        """A record leaves."""
        raise NotImplementedError

    def _send(self) -> None:
        now = self._network.scheduler.now
        while self._waiting and self._waiting[0].deadline <= now:
            record = self._waiting.popleft()
            self._answer(now, record.on_ack, self._unreached(record))
        while self._waiting and not self._process.host.trouble.is_cut_off:
            self._dispatch(self._waiting.popleft(), now)

    def _is_lost(self, record: Any, lost: object) -> bool:
        """Whether a record does not arrive. lost: the answer then."""
        trouble = self._process.host.trouble
        if not trouble.loss or self._process.rng.random() >= trouble.loss:
            return False
        self._answer(record.deadline, record.on_ack, lost)
        return True

    def _journey(self, at: object, record: Any, lost: object) -> tuple[float, bool, bool]:
        """When a record arrives at this partition, whether that is answered, and whether it is written twice."""
        trouble, chance = self._process.host.trouble, self._process.rng.random
        now = self._network.scheduler.now
        arrival, answers = now + self._process.travel_ms(), True
        if trouble.late and chance() < trouble.late:
            self._answer(record.deadline, record.on_ack, lost)
            answers = False
            arrival = now + self._timeout_ms * (0.8 + 3 * chance())
        else:
            arrival = self._last_arrival[at] = max(arrival, self._last_arrival.get(at, 0.0))
        twice = trouble.duplicates > 0 and chance() < trouble.duplicates
        if answers and trouble.ack_loss and chance() < trouble.ack_loss:
            self._answer(record.deadline, record.on_ack, lost)
            answers = False
        return arrival, answers, twice

    def _answer(self, at: float, on_ack: Callable[[Any], None] | None, answer: object) -> None:
        self._due.append((at, on_ack, answer))

    def _call(self) -> bool:
        """Pass on the answers that have arrived; whether there were any."""
        now = self._network.scheduler.now
        ripe = [due for due in self._due if due[0] <= now]
        if ripe:
            self._due = [due for due in self._due if due[0] > now]
            self._open -= len(ripe)
            for _, on_ack, answer in ripe:
                if on_ack is not None:
                    on_ack(answer)
        return bool(ripe)

    def _call_all(self) -> None:
        """Pass on all answers now: it is closed."""
        self._due = [(self._network.scheduler.now, on_ack, answer) for _, on_ack, answer in self._due]
        self._call()


@dataclass(slots=True)
class _Waiting:
    """A record that waits for a reachable broker."""

    topic: str
    value: bytes | None
    key: bytes | None
    headers: Headers
    timestamp_ms: int
    deadline: float
    on_ack: OnAck


class SimulatedProducer(SimulatedSending):
    """Dead letters, and what else a program produces."""

    def __init__(self, network: Carrier, process: Living, delivery_timeout_ms: int) -> None:
        super().__init__(network, process, delivery_timeout_ms)
        self._partitioner = Partitioner()
        #: The topics of records in transit.
        self._travelling: dict[int, tuple[str, OnAck]] = {}
        self._sent = 0
        self._parked: list[Task] = []

    def send(
        self,
        topic: str,
        value: bytes | None,
        key: bytes | None = None,
        headers: Headers = (),
        on_ack: OnAck = None,
    ) -> None:
        self._check_open()
        now = self._network.scheduler.now
        stamp = int(self._network.broker_clock())
        self._open += 1
        self._waiting.append(_Waiting(topic, value, key, tuple(headers), stamp, now + self._timeout_ms, on_ack))
        self._send()

    def _unreached(self, record: _Waiting) -> Exception:
        return producing.unacknowledged(record.topic, "no broker could be reached")

    def _dispatch(self, record: _Waiting, now: float) -> None:
        network, process, on_ack = self._network, self._process, record.on_ack
        problem = network.broker.data_refusal(record.topic, record.value, record.key, record.headers)
        if problem is not None:
            self._answer(process.reaches_at(), on_ack, problem)
            return
        lost = producing.unacknowledged(record.topic, "no answer")
        if self._is_lost(record, lost):
            return
        partition = self._partitioner.partition(record.key, network.broker.existing[record.topic].info.partitions)
        at = (record.topic, partition)
        arrival, answers, twice = self._journey(at, record, lost)
        self._sent += 1
        number = self._sent
        if answers:
            self._travelling[number] = (record.topic, on_ack)

        def arrive() -> None:
            gone = network.broker.log(*at) is None
            if not gone:
                network.publish(*at, record.value, record.key, record.headers, record.timestamp_ms)
            if self._travelling.pop(number, None) is not None:
                self._answer(process.reaches_at(), on_ack, producing.missing(record.topic) if gone else None)

        network.scheduler.call_at(arrival, arrive)
        if twice:
            network.scheduler.call_at(arrival + self._timeout_ms * process.rng.random(), arrive)

    def _answer(self, at: float, on_ack: Callable[[Any], None] | None, answer: object) -> None:
        super()._answer(at, on_ack, answer)
        for task in self._parked:
            self._network.scheduler.wake(task, max(at, self._network.scheduler.now))

    def _next_due(self) -> float:
        tries = self._network.scheduler.now + TRY_EVERY_MS if self._waiting else inf
        return min([tries, *(due[0] for due in self._due)])

    def poll(self, timeout_s: float = 0.0) -> None:
        self._check_open()
        until = self._network.scheduler.now + timeout_s * 1000
        self._send()
        while not self._call() and self._network.scheduler.now < until:
            self._park(until)
            self._send()

    def _park(self, until: float) -> None:
        """Wait for the next ack."""
        scheduler = self._network.scheduler
        task = scheduler.current
        if task is not None:
            self._parked.append(task)
        try:
            scheduler.park(min(until, max(scheduler.now + SHORTEST_MS, self._next_due())))
        finally:
            if task is not None:
                self._parked.remove(task)

    def flush(self, timeout_s: float) -> int:
        self._check_open()
        return self._flush(timeout_s)

    def _flush(self, timeout_s: float) -> int:
        until = self._network.scheduler.now + timeout_s * 1000
        while True:
            self._send()
            self._call()
            if not self._open or self._network.scheduler.now >= until:
                return self._open
            self._park(until)

    def close(self, timeout_s: float = 0.0) -> None:
        if self._closed:
            return
        self._closed = True
        self._flush(timeout_s)
        now = self._network.scheduler.now
        unanswered = [(record.topic, record.on_ack) for record in self._waiting]
        for topic, on_ack in [*unanswered, *self._travelling.values()]:
            self._answer(now, on_ack, producing.closed(topic))
        self._waiting.clear()
        self._travelling.clear()
        self._call_all()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("The producer was closed; nothing was sent. Open a new one.")
