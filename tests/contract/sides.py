"""All implementations of the adapters' interface, and direct access for tests."""

from __future__ import annotations

import itertools
import os
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, cast

from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource
from confluent_kafka.cimpl import NewPartitions

from kafka_marshal.adapters.kafka import KafkaCluster
from kafka_marshal.adapters.memory import MemoryBroker, MemoryCluster
from kafka_marshal.ports import Ack, Cluster, DataFault, DataReader, LogEntry, Message, Tail, TailFault
from kafka_marshal.testing.simulation.checks import Checks
from kafka_marshal.testing.simulation.living import Host
from kafka_marshal.testing.simulation.network import BROKER_EPOCH_MS, Network
from kafka_marshal.testing.simulation.process import Process
from kafka_marshal.testing.simulation.scheduler import Scheduler, Task
from kafka_marshal.types import Key

# -- A contract test on virtual time: its body and the threads that it starts are tasks of the simulation ---------


#: Virtual time that no test reaches (ms).
LIMIT_MS = 600_000.0

#: Poll interval of a wait (ms).
LOOK_MS = 1.0


def play(process: Process, body: Callable[[], object]) -> None:
    """Run body as a task of this process until it ends, with everything it starts; raises what it raised."""
    raised: list[BaseException] = []
    scheduler = process.scheduler

    def run() -> None:
        try:
            body()
        except BaseException as error:  # noqa: BLE001 - pytest's exceptions are among them
            raised.append(error)
        scheduler.halt()

    task = scheduler.spawn(process, "test", run)
    scheduler.run_until(LIMIT_MS)
    assert task.done, f"not over after {LIMIT_MS / 1000:g} s of virtual time"
    if raised:
        raise raised[0]


class VirtualTime:
    """The functions of the module time that tests use."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def monotonic(self) -> float:
        return self._scheduler.now / 1000

    def time(self) -> float:
        return (BROKER_EPOCH_MS + self._scheduler.now) / 1000

    def sleep(self, seconds: float) -> None:
        self._scheduler.park(self._scheduler.now + max(LOOK_MS, seconds * 1000))


class VirtualThreading:
    """The classes of the module threading that tests use."""

    def __init__(self, process: Process) -> None:
        self._process = process

    def get_ident(self) -> int:
        return id(self._process.scheduler.current)

    def Event(self) -> _Event:
        return _Event(self._process.scheduler)

    def Thread(
        self,
        target: Callable[..., object],
        args: Iterable[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        daemon: bool = False,
    ) -> _Thread:
        return _Thread(self._process, lambda: target(*args, **(kwargs or {})))


def _wait(scheduler: Scheduler, met: Callable[[], bool], timeout: float | None) -> bool:
    until = LIMIT_MS if timeout is None else scheduler.now + timeout * 1000
    while not met() and scheduler.now < until:
        scheduler.park(min(until, scheduler.now + LOOK_MS))
    return met()


class _Event:
    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._is_set = False

    def set(self) -> None:
        self._is_set = True

    def is_set(self) -> bool:
        return self._is_set

    def wait(self, timeout: float | None = None) -> bool:
        return _wait(self._scheduler, self.is_set, timeout)


class _Thread:
    def __init__(self, process: Process, target: Callable[[], object]) -> None:
        self._process = process
        self._target = target
        self._task: Task | None = None

    def start(self) -> None:
        self._task = self._process.scheduler.spawn(self._process, "test's thread", self._target)

    def is_alive(self) -> bool:
        return self._task is not None and not self._task.done

    def join(self, timeout: float | None = None) -> None:
        _wait(self._process.scheduler, lambda: not self.is_alive(), timeout)


LOG_TIME = {"message.timestamp.type": "LogAppendTime"}
TIMEOUT_S = 15.0

#: Metadata of a committed offset.
FOUND = "kafka-marshal 7"


def eventually(met: Callable[[], Any], what: str, timeout_s: float = TIMEOUT_S) -> Any:
    """Wait for a condition instead of a fixed time; returns its value."""
    until = time.monotonic() + timeout_s
    while not (value := met()):
        assert time.monotonic() < until, f"{what}: not within {timeout_s} s"
        time.sleep(0.01)
    return value


def closed_port() -> int:
    """A port on which no process listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Side(Protocol):
    """One implementation under test."""

    name: str
    cluster: Cluster

    def produce(
        self, topic: str, partition: int, values: Sequence[bytes | None], timestamps: Sequence[int] | None = None
    ) -> None: ...

    def produce_transaction(self, topic: str, partition: int, values: Sequence[bytes]) -> None:
        """Write values, then one offset that no reader gets."""

    def pending(self, transactional_id: str, group_id: str, key: Key, offset: int) -> Callable[[], object]:
        """Send an offset in a transaction, and nothing more; returns what commits it."""

    def delete_topic(self, topic: str) -> None: ...

    def grow_topic(self, topic: str, partitions: int) -> None: ...

    def alter_topic(self, topic: str, settings: Mapping[str, str]) -> None: ...

    def delete_records(self, topic: str, partition: int, before: int) -> None: ...

    def unreachable(self) -> Cluster:
        """A client without a reachable broker."""

    def close(self) -> None: ...

    def topic(self, partitions: int = 1, settings: Mapping[str, str] | None = None) -> str:
        """A new topic."""


class _Named:
    """Gives topics unique names."""

    cluster: Cluster
    _numbers = itertools.count(1)

    def topic(self, partitions: int = 1, settings: Mapping[str, str] | None = None) -> str:
        name = f"contract-{next(self._numbers)}-{os.urandom(4).hex()}"
        self.cluster.create_topic(name, partitions, 1, settings or {}, TIMEOUT_S)
        return name


class MemorySide(_Named):
    """The log in memory, in real time."""

    name = "memory"

    def __init__(self) -> None:
        self.memory = MemoryCluster()
        self.cluster: Cluster = self.memory
        self._broker = self.memory.broker

    def produce(
        self, topic: str, partition: int, values: Sequence[bytes | None], timestamps: Sequence[int] | None = None
    ) -> None:
        for index, value in enumerate(values):
            stamp = None if timestamps is None else timestamps[index]
            self._broker.produce(topic, partition, value, b"k", timestamp_ms=stamp)

    def produce_transaction(self, topic: str, partition: int, values: Sequence[bytes]) -> None:
        self.produce(topic, partition, values)
        self._broker.skip(topic, partition)

    def pending(self, transactional_id: str, group_id: str, key: Key, offset: int) -> Callable[[], object]:
        with self._broker.changed:
            transactions = self._broker.transactions
            epoch = transactions.init(transactional_id, 60_000)
            transactions.send_offset(transactional_id, (epoch, 1), group_id, key, offset, FOUND)
        return lambda: self._commit(transactional_id, epoch)

    def _commit(self, transactional_id: str, epoch: int) -> None:
        with self._broker.changed:
            self._broker.transactions.end(transactional_id, (epoch, 1), commit=True)
            self._broker.changed.notify_all()

    def delete_topic(self, topic: str) -> None:
        self._broker.delete_topic(topic)

    def grow_topic(self, topic: str, partitions: int) -> None:
        self._broker.grow_topic(topic, partitions)

    def alter_topic(self, topic: str, settings: Mapping[str, str]) -> None:
        self._broker.alter_topic(topic, settings)

    def delete_records(self, topic: str, partition: int, before: int) -> None:
        self._broker.delete_records(topic, partition, before)

    def unreachable(self) -> Cluster:
        client = self.memory.connect("cut off")
        self._broker.set_reachable("cut off", False)
        return client

    def close(self) -> None:
        self.cluster.close()


class SimulatedSide(MemorySide):
    """The log of the simulation, in one of its processes, on virtual time."""

    name = "simulation"

    def __init__(self) -> None:
        scheduler = Scheduler()
        broker = MemoryBroker(lambda: self.network.broker_clock())
        self.network = Network(scheduler, broker, "none of a contract's")
        self.process = self._new_process("client")
        self._broker = broker
        self.cluster = self.process.cluster()
        self.time = VirtualTime(scheduler)
        self.threading = VirtualThreading(self.process)

    def _new_process(self, name: str) -> Process:
        # Nothing checks what it does.
        return Process(name, Host(name), self.network, cast("Checks", None), seed=0)

    def produce(
        self, topic: str, partition: int, values: Sequence[bytes | None], timestamps: Sequence[int] | None = None
    ) -> None:
        super().produce(topic, partition, values, timestamps)
        self.network.changed(topic)

    def delete_records(self, topic: str, partition: int, before: int) -> None:
        super().delete_records(topic, partition, before)
        self.network.changed(topic)

    def delete_topic(self, topic: str) -> None:
        super().delete_topic(topic)
        self.network.changed(topic)

    def unreachable(self) -> Cluster:
        process = self._new_process("cut off")
        process.host.trouble.is_cut_off = True
        return process.cluster()

    def play(self, body: Callable[[], object]) -> None:
        """Run a test's body on virtual time."""
        play(self.process, body)

    def close(self) -> None:
        self.network.scheduler.close()


class KafkaSide(_Named):
    """A real broker."""

    name = "kafka"

    def __init__(self, bootstrap: str, config: Mapping[str, object]) -> None:
        self.cluster: Cluster = KafkaCluster(bootstrap, config)
        self._settings: dict[str, Any] = {**config, "bootstrap.servers": bootstrap}
        self._admin = AdminClient(self._settings)
        self._unreachable: list[Cluster] = []

    def produce(
        self, topic: str, partition: int, values: Sequence[bytes | None], timestamps: Sequence[int] | None = None
    ) -> None:
        producer = Producer({**self._settings, "enable.idempotence": True, "queue.buffering.max.messages": 200_000})
        for index, value in enumerate(values):
            stamp = 0 if timestamps is None else timestamps[index]
            producer.produce(topic, value, b"k", partition, timestamp=stamp)
        assert producer.flush(TIMEOUT_S) == 0

    def produce_transaction(self, topic: str, partition: int, values: Sequence[bytes]) -> None:
        def end() -> int:
            return self.cluster.watermarks([(topic, partition)], TIMEOUT_S)[topic, partition][1]

        due = end() + len(values) + 1
        producer = Producer({**self._settings, "transactional.id": f"contract-{os.urandom(4).hex()}"})
        producer.init_transactions(TIMEOUT_S)
        producer.begin_transaction()
        for value in values:
            producer.produce(topic, value, b"k", partition)
        producer.commit_transaction(TIMEOUT_S)
        eventually(lambda: end() == due, "the marker is in the log")  # the broker writes it after its answer

    def pending(self, transactional_id: str, group_id: str, key: Key, offset: int) -> Callable[[], object]:
        producer = Producer({**self._settings, "transactional.id": transactional_id})
        producer.init_transactions(TIMEOUT_S)
        producer.begin_transaction()
        consumer = Consumer({**self._settings, "group.id": group_id})
        where, group = [TopicPartition(*key, offset, FOUND)], consumer.consumer_group_metadata()
        producer.send_offsets_to_transaction(where, group, TIMEOUT_S)
        consumer.close()
        return lambda: producer.commit_transaction(TIMEOUT_S)

    def delete_topic(self, topic: str) -> None:
        self._admin.delete_topics([topic])[topic].result(TIMEOUT_S)
        eventually(lambda: topic not in self.cluster.topic_info([topic], TIMEOUT_S), "the topic is gone")

    def grow_topic(self, topic: str, partitions: int) -> None:
        self._admin.create_partitions([NewPartitions(topic, partitions)])[topic].result(TIMEOUT_S)

        def grown() -> bool:
            return len(self.cluster.watermarks([(topic, p) for p in range(partitions)], TIMEOUT_S)) == partitions

        eventually(grown, "the new partitions have leaders")

    def alter_topic(self, topic: str, settings: Mapping[str, str]) -> None:
        entries = [
            ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET) for name, value in settings.items()
        ]
        resource = ConfigResource(ConfigResource.Type.TOPIC, topic, incremental_configs=entries)
        self._admin.incremental_alter_configs([resource])[resource].result(TIMEOUT_S)

    def delete_records(self, topic: str, partition: int, before: int) -> None:
        at = TopicPartition(topic, partition, before)
        self._admin.delete_records([at])[at].result(TIMEOUT_S)

    def unreachable(self) -> Cluster:
        self._unreachable.append(KafkaCluster(f"127.0.0.1:{closed_port()}"))
        return self._unreachable[-1]

    def close(self) -> None:
        for cluster in [*self._unreachable, self.cluster]:
            cluster.close()


def recreate(side: Side, topic: str, partitions: int, settings: Mapping[str, str]) -> None:
    """Delete a topic and create it again under the same name."""
    side.delete_topic(topic)
    side.cluster.create_topic(topic, partitions, 1, settings, TIMEOUT_S)


def append(side: Side, topic: str, partition: int, values: Sequence[bytes]) -> None:
    """Append values to the log and wait until they are written."""
    appender = side.cluster.appender(topic, delivery_timeout_ms=int(TIMEOUT_S * 1000))
    acks: list[Ack] = []
    for value in values:
        appender.append(partition, value, acks.append)
    assert appender.flush(TIMEOUT_S) == 0
    appender.close()
    assert [ack.error for ack in acks] == [None] * len(values)


class TailLog:
    """Everything read from a tail so far."""

    def __init__(self, tail: Tail) -> None:
        self.tail = tail
        self.records: dict[int, list[LogEntry]] = {}
        self.ends: dict[int, int] = {}
        self.faults: list[TailFault] = []
        self.reads = 0
        self.rests = False

    def read(self, timeout_s: float = 0.2) -> None:
        if self.rests:
            self.tail.rest()
        batch = self.tail.read(timeout_s)
        self.reads += 1
        for partition, entries in batch.records.items():
            assert entries, "a partition without news is left out"
            self.records.setdefault(partition, []).extend(entries)
        self.ends.update(batch.ends)
        self.faults.extend(batch.faults)

    def until(self, met: Callable[[], Any], what: str) -> None:
        until = time.monotonic() + TIMEOUT_S
        while not met():
            assert time.monotonic() < until, f"{what}: not within {TIMEOUT_S} s; have {self.records} {self.faults}"
            self.read()

    def values(self, partition: int) -> list[bytes | None]:
        return [value for _, _, value in self.records.get(partition, [])]

    def offsets(self, partition: int) -> list[int]:
        return [offset for offset, _, _ in self.records.get(partition, [])]


class DataLog:
    """Everything read from a data reader so far."""

    def __init__(self, reader: DataReader) -> None:
        self.reader = reader
        self.messages: list[Message] = []
        self.faults: list[DataFault] = []
        self.reads = 0

    def read(self, max_messages: int = 10_000, timeout_s: float = 0.2) -> int:
        messages, faults = self.reader.read(max_messages, timeout_s)
        assert len(messages) <= max_messages
        self.reads += 1
        self.messages.extend(messages)
        self.faults.extend(faults)
        return len(messages)

    def until(self, met: Callable[[], Any], what: str) -> None:
        until = time.monotonic() + TIMEOUT_S
        while not met():
            assert time.monotonic() < until, (
                f"{what}: not within {TIMEOUT_S} s; have {len(self.messages)} {self.faults}"
            )
            self.read()

    def offsets(self, topic: str, partition: int) -> list[int | None]:
        return [each.offset() for each in self.messages if (each.topic(), each.partition()) == (topic, partition)]
