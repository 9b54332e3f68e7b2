"""Transactions from a simulated process: requests travel, and may be lost, late or without an answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn, Protocol, TypeVar

from kafka_marshal.adapters.memory import MemoryBroker
from kafka_marshal.adapters.memory.transactional import MemoryTransactionalProducer
from kafka_marshal.adapters.producing import Headers
from kafka_marshal.testing.simulation.living import Living
from kafka_marshal.testing.simulation.runtime import SHORTEST_MS
from kafka_marshal.testing.simulation.scheduler import Scheduler

__all__ = ["SimulatedTransactionalProducer", "wait_until"]

T = TypeVar("T")

#: Retry interval while no broker is reachable, or an answer is awaited (ms).
TRY_EVERY_MS = 20.0


class Carrier(Protocol):
    """What this needs of the network."""

    scheduler: Scheduler
    broker: MemoryBroker


def wait_until(scheduler: Scheduler, met: Callable[[], bool], until: float) -> bool:
    """Wait for a condition, at most until this virtual time (ms); whether it is met."""
    while not met() and scheduler.now < until:
        scheduler.park(min(until, scheduler.now + TRY_EVERY_MS))
    return met()


class SimulatedTransactionalProducer(MemoryTransactionalProducer):
    """One transactional id. What was sent arrives, whatever happens to its process meanwhile."""

    def __init__(self, network: Carrier, process: Living, transactional_id: str, transaction_timeout_ms: int) -> None:
        super().__init__(network.broker, process.name, transactional_id, transaction_timeout_ms)
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
        scheduler, process, trouble = self._scheduler, self._process, self._process.host.trouble
        chance = process.rng.random
        self._check_usable()
        until = scheduler.now + timeout_s * 1000
        if not wait_until(scheduler, lambda: not trouble.is_cut_off, until):
            raise late("no broker could be reached")
        self._check_usable()
        if trouble.loss and chance() < trouble.loss:
            self._give_up(until, late)
        arrival = scheduler.now + process.travel_ms()
        answers = not (trouble.ack_loss and chance() < trouble.ack_loss)
        if trouble.late and chance() < trouble.late:
            arrival, answers = scheduler.now + timeout_s * 1000 * (0.8 + 3 * chance()), False
        found: list[T] = []
        refused: list[Exception] = []

        def deliver() -> None:
            try:
                found.append(act())
                self._watch()
            except Exception as error:  # noqa: BLE001 - it is the answer
                refused.append(error)

        scheduler.call_at(arrival, deliver)
        answer_at = arrival + process.travel_ms()
        if not answers or answer_at > until:
            self._give_up(until, late)
        scheduler.park(answer_at)
        self._check_usable()
        if refused:
            raise refused[0]
        return found[0]

    def _give_up(self, until: float, late: Callable[[str], Exception]) -> NoReturn:
        self._scheduler.park(max(until, self._scheduler.now + SHORTEST_MS))
        raise late("no answer came")
