"""Produces to users' topics from a simulated process: dead letters may be lost, late or duplicated."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Protocol

from kafka_marshal.adapters import producing
from kafka_marshal.adapters.memory import MemoryBroker
from kafka_marshal.adapters.memory.writers import Partitioner
from kafka_marshal.adapters.producing import Headers
from kafka_marshal.errors import ClosedError
from kafka_marshal.testing.simulation.living import Living
from kafka_marshal.testing.simulation.runtime import SHORTEST_MS
from kafka_marshal.testing.simulation.scheduler import Scheduler, Task

#: Retry interval while no broker is reachable (ms).
TRY_EVERY_MS = 5.0

OnAck = Callable[[Exception | None], None] | None


class Carrier(Protocol):
    """What a producer needs of the network."""

    scheduler: Scheduler
    broker: MemoryBroker

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


class SimulatedProducer:
    """Sends records, in order within a partition; those it gave up may arrive nevertheless."""

    def __init__(self, network: Carrier, process: Living, delivery_timeout_ms: int) -> None:
        self._network = network
        self._process = process
        self._timeout_ms = delivery_timeout_ms
        self._partitioner = Partitioner()
        self._waiting: deque[_Waiting] = deque()
        self._due: list[tuple[float, OnAck, Exception | None]] = []
        #: Number of records neither acknowledged nor given up, and the topics of those in transit.
        self._open = 0
        self._travelling: dict[int, tuple[str, OnAck]] = {}
        self._sent = 0
        self._last_arrival: dict[tuple[str, int], float] = {}
        self._parked: list[Task] = []
        self._closed = False

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

    def _send(self) -> None:
        now = self._network.scheduler.now
        while self._waiting and self._waiting[0].deadline <= now:
            record = self._waiting.popleft()
            self._answer(now, record.on_ack, producing.unacknowledged(record.topic, "no broker could be reached"))
        while self._waiting and not self._process.host.trouble.is_cut_off:
            self._dispatch(self._waiting.popleft(), now)

    def _dispatch(self, record: _Waiting, now: float) -> None:
        process, trouble, chance = self._process, self._process.host.trouble, self._process.rng.random
        network, on_ack = self._network, record.on_ack
        problem = network.broker.data_refusal(record.topic, record.value, record.key, record.headers)
        if problem is not None:
            self._answer(process.reaches_at(), on_ack, problem)
            return
        lost = producing.unacknowledged(record.topic, "no answer")
        if trouble.loss and chance() < trouble.loss:
            self._answer(record.deadline, on_ack, lost)
            return
        partition = self._partitioner.partition(record.key, network.broker.existing[record.topic].info.partitions)
        at, answers = (record.topic, partition), True
        arrival = now + process.travel_ms()
        if trouble.late and chance() < trouble.late:
            self._answer(record.deadline, on_ack, lost)
            answers = False
            arrival = now + self._timeout_ms * (0.8 + 3 * chance())
        else:
            arrival = self._last_arrival[at] = max(arrival, self._last_arrival.get(at, 0.0))
        twice = trouble.duplicates and chance() < trouble.duplicates
        if answers and trouble.ack_loss and chance() < trouble.ack_loss:
            self._answer(record.deadline, on_ack, lost)
            answers = False
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
            network.scheduler.call_at(arrival + self._timeout_ms * chance(), arrive)

    def _answer(self, at: float, on_ack: OnAck, error: Exception | None) -> None:
        self._due.append((at, on_ack, error))
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

    def _call(self) -> bool:
        """Whether any ack was due."""
        now = self._network.scheduler.now
        ripe = [due for due in self._due if due[0] <= now]
        self._due = [due for due in self._due if due[0] > now]
        self._open -= len(ripe)
        for _, on_ack, error in ripe:
            if on_ack is not None:
                on_ack(error)
        return bool(ripe)

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
        self._due = [(now, on_ack, error) for _, on_ack, error in self._due]
        self._call()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("The producer was closed; nothing was sent. Open a new one.")
