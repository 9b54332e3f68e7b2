"""The infrastructure of the race: brokers (one of which runs), topics, a feed of records, a log with a history."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from time import monotonic, sleep

from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient

from benchmarks.race.contestants import ALL_BROKERS, BROKERS
from kafka_marshal.adapters.kafka import KafkaCluster
from kafka_marshal.node.coordination_topic import create_topic
from kafka_marshal.testing import LocalBroker
from rationalizer import ClaimingPartition, Heartbeat, World, encode, route_lease

__all__ = ["CPS", "Brokers", "Grounds", "new_name"]

CPS = 8

TIMEOUT_S = 30.0

#: The whole heap from the start: growing it takes full collections of a tenth of a second, which would distort a
#: measurement.
HEAP = ("-Xms512m",)

_numbers = count(1)


def new_name(kind: str) -> str:
    """A unique name."""
    return f"{kind}-{next(_numbers)}-{uuid.uuid4().hex[:6]}"


@dataclass(frozen=True, slots=True)
class Grounds:
    """One broker."""

    bootstrap: str

    def topic(self, partitions: int) -> str:
        """A new data topic."""
        name = new_name("race")
        self._create(name, partitions)
        return name

    def remove(self, topic: str) -> None:
        """Delete a topic and wait until it is gone.

        A broker maps the indexes of every partition into memory, and Linux lets a process have 65,530 such maps: ten
        rounds with 900 partitions for each of seven would end it.
        """
        admin = AdminClient({"bootstrap.servers": self.bootstrap})
        admin.delete_topics([topic], operation_timeout=TIMEOUT_S)[topic].result(2 * TIMEOUT_S)

    def _create(self, name: str, partitions: int) -> None:
        cluster = KafkaCluster(self.bootstrap)
        try:
            cluster.create_topic(name, partitions, 1, {}, TIMEOUT_S)
        finally:
            cluster.close()

    def coordination(self, history: int = 0) -> str:
        """A new coordination topic with ``history`` records: ten leases of another group, and their heartbeats."""
        name = new_name("__marshal")
        cluster = KafkaCluster(self.bootstrap)
        try:
            create_topic(cluster, name, CPS, TIMEOUT_S)
        finally:
            cluster.close()
        if history:
            write_history(self.bootstrap, name, history)
        return name

    def fill(self, topic: str, partitions: int, records: int) -> None:
        """Records of 100 bytes, spread evenly."""
        producer = Producer({"bootstrap.servers": self.bootstrap, "linger.ms": 20})
        for number in range(records):
            produce(producer, topic, b"x" * 100, number % partitions)
        producer.flush()

    @contextmanager
    def feed(self, targets: Sequence[tuple[str, int]], every_s: float) -> Iterator[None]:
        """Within the block, each (topic, partition) gets a record at each interval."""
        stop = threading.Event()
        thread = threading.Thread(target=self._feed, args=(list(targets), every_s, stop), daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    def _feed(self, targets: list[tuple[str, int]], every_s: float, stop: threading.Event) -> None:
        producer = Producer({"bootstrap.servers": self.bootstrap, "linger.ms": 1, "acks": 1})
        due = monotonic()
        while not stop.wait(max(0.0, due - monotonic())):
            due = max(due + every_s, monotonic())
            for topic, partition in targets:
                produce(producer, topic, b"x" * 100, partition)
            producer.poll(0)
        producer.purge()
        producer.flush(5)


def produce(producer: Producer, topic: str, value: bytes, partition: int) -> None:
    """Produce, waiting if the producer's queue is full."""
    while True:
        try:
            producer.produce(topic, value, partition=partition)
            return
        except BufferError:
            producer.poll(0.1)


def write_history(bootstrap: str, topic: str, records: int) -> None:
    """Write a typical coordination log: few claims, many heartbeats."""
    producer = Producer({"bootstrap.servers": bootstrap, "linger.ms": 20, "queue.buffering.max.messages": 1_000_000})
    leases = max(1, min(100, records // 10))
    who = ("instance-of-the-past", "worker-of-the-past", "group-of-the-past")
    epochs: dict[int, int] = {}
    worlds = {cp: World(cp, CPS) for cp in range(CPS)}
    offsets = dict.fromkeys(range(CPS), 1)  # after the marker
    for number in range(records):
        partition = number % leases
        cp = route_lease("flights", partition, CPS)
        if partition not in epochs:
            value = encode(ClaimingPartition(*who, "flights", partition, 600_000))
            epochs[partition] = offsets[cp]
        else:
            value = encode(Heartbeat(*who, "flights", partition, epochs[partition], number))
        outcome = worlds[cp].apply(offsets[cp], 1, value)
        if not outcome.accepted:
            raise AssertionError(f"the history would not be accepted: {outcome.code}")
        produce(producer, topic, value, cp)
        offsets[cp] += 1
    producer.flush()


class Brokers:
    """One broker per set of static settings, started on first use; all but the one in use are stopped."""

    def __init__(self) -> None:
        self._running: dict[str, LocalBroker] = {}
        self._current: str | None = None

    def only(self, name: str) -> Grounds:
        """The grounds of that broker; the others are stopped from now on."""
        if name != self._current:
            if self._current is not None:
                self._running[self._current].pause()
            if name in self._running:
                self._running[name].resume()
            else:
                properties = {**ALL_BROKERS, **BROKERS[name]}
                self._running[name] = LocalBroker(properties=properties, jvm_options=HEAP).start()
            self._current = name
            self._await(name)
        return Grounds(self._running[name].bootstrap_servers)

    def _await(self, name: str) -> None:
        """Wait until a record is acknowledged: a continued broker must catch up with its timers."""
        grounds = Grounds(self._running[name].bootstrap_servers)
        topic = grounds.topic(1)
        grounds.fill(topic, 1, 1)
        sleep(0.2)

    def close(self) -> None:
        """End all."""
        for broker in self._running.values():
            broker.stop()
        self._running.clear()
