"""Messages a second from a backlog: ours in all ways, the best bare loop, and a consumer with defaults."""

from __future__ import annotations

from time import perf_counter
from typing import ClassVar

from confluent_kafka import Consumer

from benchmarks.race.contestants import Contestant, Side
from benchmarks.race.events.base import Aim, Event, Samples
from benchmarks.race.grounds import Grounds, new_name
from benchmarks.throughput import by_batches, by_iteration, marshalled, raw

__all__ = ["Throughput"]

RECORDS = 300_000

BATCHES = Contestant("kafka-marshal, batches()", Side.MARSHAL, "delay 0")
ITERATION = Contestant("kafka-marshal, iteration", Side.MARSHAL, "delay 0")
BARE = Contestant("bare assign + consume(5000), best settings", Side.GROUP, "delay 0", {"fetch.queue.backoff.ms": 1})
DEFAULT = Contestant("classic group, poll loop, all defaults", Side.GROUP, "delay 0")


class Throughput(Event):
    """One partition of 100-byte records; the clock runs from the first record to the last."""

    name = "throughput"
    title = "records a second from a backlog"
    units: ClassVar = {"throughput": "records/s"}

    def __init__(self, records: int = RECORDS) -> None:
        self._records = records
        self._topic: dict[str, tuple[str, str]] = {}
        contestants = (BATCHES, ITERATION, BARE, DEFAULT)
        aims = (
            Aim("throughput", BATCHES.name, BARE.name, 0.95, at_least=True),
            Aim("throughput", ITERATION.name, BARE.name, 0.85, at_least=True),
            Aim("throughput", ITERATION.name, DEFAULT.name, 2.0, at_least=True),
        )
        conditions = {"records": records, "bytes a record": 100}
        super().__init__(contestants, aims, conditions)

    def round(self, grounds: Grounds, contestant: Contestant) -> Samples:
        """Read it all, with a new group."""
        if grounds.bootstrap not in self._topic:
            topic = grounds.topic(1)
            grounds.fill(topic, 1, self._records)
            self._topic[grounds.bootstrap] = topic, grounds.coordination()
        topic, coordination = self._topic[grounds.bootstrap]
        if contestant is BARE:
            took = raw(grounds.bootstrap, topic, 1, self._records)
        elif contestant is DEFAULT:
            took = by_default(grounds.bootstrap, topic, self._records)
        else:
            loop = by_batches if contestant is BATCHES else by_iteration
            took = marshalled(grounds.bootstrap, coordination, topic, self._records, loop)
        return {"throughput": [self._records / took]}


def by_default(bootstrap: str, topic: str, records: int) -> float:
    """As in most programs: subscribe, poll, and only the required settings."""
    consumer = Consumer(
        {"bootstrap.servers": bootstrap, "group.id": new_name("group"), "auto.offset.reset": "earliest"}
    )
    consumer.subscribe([topic])
    seen = total = 0
    began = 0.0
    while seen < records:
        message = consumer.poll(1.0)
        if message is None or message.error() is not None:
            continue
        began = began or perf_counter()
        total += len(message.value() or b"") + (message.offset() or 0)
        seen += 1
    took = perf_counter() - began
    consumer.close()
    return took
