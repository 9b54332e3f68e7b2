"""Transactions from a simulated process: requests travel, and may be lost, late or without an answer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol, TypeVar, cast

from kafka_marshal.adapters.memory import MemoryBroker
from kafka_marshal.adapters.memory.writers import MemoryTransactionalProducer
from kafka_marshal.adapters.producing import Headers
from kafka_marshal.testing.simulation.living import Living
from kafka_marshal.testing.simulation.runtime import SHORTEST_MS
from kafka_marshal.testing.simulation.scheduler import Scheduler

T = TypeVar("T")

#: Retry interval while no broker is reachable, or an answer is awaited (ms).
TRY_EVERY_MS = 20.0

#: A request without an answer is sent again after this share of its time.
AGAIN_AFTER = 0.2

#: By how much at most the brokers take up a request late (share of its time).
SLOWEST = 0.5


class Carrier(Protocol):
    """What this needs of the network."""

    scheduler: Scheduler
    broker: MemoryBroker
    #: The share of requests that the brokers take up late.
    slow_share: float


def wait_until(scheduler: Scheduler, met: Callable[[], bool], until: float) -> bool:
    """Wait for a condition, at most until this virtual time (ms); whether it is met."""
    while not met() and scheduler.now < until:
        scheduler.park(min(until, scheduler.now + TRY_EVERY_MS))
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
                scheduler.park(min(until, scheduler.now + TRY_EVERY_MS))
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
