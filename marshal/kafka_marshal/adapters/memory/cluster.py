"""One client of an in-memory Kafka."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager

from kafka_marshal.adapters import transactions
from kafka_marshal.adapters.memory.broker import MemoryBroker, PartitionLog
from kafka_marshal.adapters.memory.readers import MemoryDataReader, MemoryTail
from kafka_marshal.adapters.memory.writers import MemoryAppender, MemoryProducer, MemoryTransactionalProducer
from kafka_marshal.errors import ClosedError, KafkaUnavailableError, MarshalError, TopicMissingError
from kafka_marshal.ports import DELIVERY_TIMEOUT_MS, KafkaGroup, TopicConfig, TopicInfo, TopicPartition
from kafka_marshal.runtime import THREADS, Runtime


class MemoryCluster:
    """A client's view of a :class:`~kafka_marshal.adapters.memory.broker.MemoryBroker`."""

    def __init__(
        self, clock: Callable[[], float] | None = None, *, broker: MemoryBroker | None = None, client: str = "client"
    ) -> None:
        """A new cluster, or (broker) another client of one.

        Args:
            clock: now in ms, for a new broker; with one nothing ever waits. None: the time of day.
            broker: the one to be a client of.
            client: this client's name, by which faults pick it.
        """
        if broker is not None and clock is not None:
            raise ValueError("the clock is the broker's: give a clock or a broker, not both")
        self.broker: MemoryBroker = broker if broker is not None else MemoryBroker(clock)
        self.client = client
        self.runtime: Runtime = THREADS
        self._closed = False

    def connect(self, client: str) -> MemoryCluster:
        """Another client of the same cluster."""
        return MemoryCluster(broker=self.broker, client=client)

    @contextmanager
    def _asking(self, doing: str, timeout_s: float) -> Iterator[MemoryBroker]:
        """Hold the lock once the broker can be reached; wait for that as a real client would."""
        broker = self.broker
        with broker.changed:
            self._check_open()
            if broker.waits:
                broker.changed.wait_for(lambda: broker.reachable(self.client) or self._closed, timeout_s)
            self._check_open()
            if not broker.reachable(self.client):
                raise unanswered(doing)
            yield broker

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("The cluster was closed; nothing was asked. Open a new one.")

    def cluster_ids(self, wait_s: float) -> dict[str, str]:
        return {}

    def topics(self, timeout_s: float, max_age_s: float = 0.0) -> dict[str, TopicInfo]:
        with self._asking("listing the topics", timeout_s) as broker:
            return {name: topic.info for name, topic in sorted(broker.existing.items())}

    def topic_info(self, names: Iterable[str], timeout_s: float, max_age_s: float = 0.0) -> dict[str, TopicInfo]:
        with self._asking("looking up topics", timeout_s) as broker:
            return {name: broker.existing[name].info for name in sorted(set(names)) if name in broker.existing}

    def topic_config(self, name: str, timeout_s: float) -> TopicConfig | None:
        with self._asking(f"looking up {name}", timeout_s) as broker:
            topic = broker.existing.get(name)
            return None if topic is None else TopicConfig(topic.info, topic.replication_factor, dict(topic.settings))

    def operations(self, topic: str, timeout_s: float) -> frozenset[str] | None:
        return None

    def broker_count(self, timeout_s: float) -> int:
        with self._asking("counting the brokers", timeout_s) as broker:
            return broker.brokers

    def create_topic(
        self, name: str, partitions: int, replication_factor: int, settings: Mapping[str, str], timeout_s: float
    ) -> None:
        with self._asking(f"creating topic {name}", timeout_s) as broker:
            broker.create_topic(name, partitions, replication_factor, settings)

    def alter_topic(self, name: str, settings: Mapping[str, str | None], timeout_s: float) -> None:
        with self._asking(f"changing settings of {name}", timeout_s) as broker:
            if name not in broker.existing:
                raise TopicMissingError(f"Topic {name!r} does not exist on this cluster. Nothing was changed.")
            broker.alter_topic(name, settings)

    def watermarks(
        self, partitions: Iterable[TopicPartition], timeout_s: float
    ) -> dict[TopicPartition, tuple[int, int]]:
        with self._asking("asking for log ends", timeout_s) as broker:
            return {key: (log.start, log.end) for key, log in _logs(broker, partitions)}

    def committed_watermarks(
        self, partitions: Iterable[TopicPartition], timeout_s: float
    ) -> dict[TopicPartition, tuple[int, int]]:
        with self._asking("asking for log ends", timeout_s) as broker:
            broker.transactions.expire()
            return {key: (log.start, log.stable_end) for key, log in _logs(broker, partitions)}

    def offsets_for_time(
        self, partitions: Iterable[TopicPartition], timestamp_ms: int, timeout_s: float
    ) -> dict[TopicPartition, int]:
        with self._asking("asking for offsets by time", timeout_s) as broker:
            return {
                key: next(
                    (message.offset() for message in log.messages if message.timestamp()[1] >= timestamp_ms), log.end
                )
                for key, log in _logs(broker, partitions)
            }

    def delete_records(self, before: Mapping[TopicPartition, int], timeout_s: float) -> dict[TopicPartition, int]:
        with self._asking("deleting records", timeout_s) as broker:
            logs = dict(_logs(broker, before))
            beyond = sorted(key for key, log in logs.items() if before[key] > log.end)
            if beyond:
                raise MarshalError(
                    f"While deleting records of {beyond[0][0]} [{beyond[0][1]}]: offset {before[beyond[0]]} lies "
                    "beyond the end of the log. Nothing was deleted."
                )
            for key in logs:
                broker.delete_records(*key, before[key])
            return {key: log.start for key, log in logs.items()}

    def kafka_group(self, group_id: str, timeout_s: float) -> KafkaGroup:
        with self._asking("asking for a consumer group", timeout_s) as broker:
            return KafkaGroup((), dict(broker.committed.get(group_id, {})))

    def commit_for_group(
        self, group_id: str, offsets: Mapping[TopicPartition, tuple[int, str]], timeout_s: float
    ) -> None:
        with self._asking("committing offsets for a consumer group", timeout_s) as broker:
            broker.transactions.commit_plainly(group_id, offsets)

    def committed_offset(self, group_id: str, key: TopicPartition, timeout_s: float) -> tuple[int, str] | None:
        with self._asking("asking for a committed offset", timeout_s) as broker:
            if not self._is_settled(lambda: not broker.transactions.is_pending(group_id, key), timeout_s):
                raise transactions.pending(group_id, key, "an offset is pending")
            return broker.committed.get(group_id, {}).get(key)

    def _is_settled(self, settled: Callable[[], bool], timeout_s: float) -> bool:
        """Wait for it, if there is anything to wait for; the lock is held."""
        return self.broker.changed.wait_for(settled, timeout_s) if self.broker.waits else settled()

    def expect(self, topic: str, *, delivery_timeout_ms: int | None = None) -> None:
        pass

    def tail(self, topic: str, positions: Mapping[int, int]) -> MemoryTail:
        self._check_open()
        return MemoryTail(self.broker, self.client, topic, positions)

    def appender(self, topic: str, *, delivery_timeout_ms: int) -> MemoryAppender:
        self._check_open()
        return MemoryAppender(self.broker, self.client, topic, delivery_timeout_ms)

    def data_reader(self, group_id: str, config: Mapping[str, object]) -> MemoryDataReader:
        self._check_open()
        return MemoryDataReader(self.broker, self.client)

    def way_of_reading(self, config: Mapping[str, object]) -> Hashable | None:
        return self.broker, self.client

    def producer(
        self, config: Mapping[str, object], *, delivery_timeout_ms: int = DELIVERY_TIMEOUT_MS
    ) -> MemoryProducer:
        self._check_open()
        return MemoryProducer(self.broker, self.client, delivery_timeout_ms)

    def transactional_producer(
        self, transactional_id: str, config: Mapping[str, object], *, transaction_timeout_ms: int
    ) -> MemoryTransactionalProducer:
        self._check_open()
        return MemoryTransactionalProducer(self.broker, self.client, transactional_id, transaction_timeout_ms)

    def close(self) -> None:
        with self.broker.changed:
            self._closed = True
            self.broker.changed.notify_all()


def unanswered(doing: str) -> KafkaUnavailableError:
    """No broker was reached in time."""
    return KafkaUnavailableError(
        f"While {doing}: no answer from the broker in time. Nothing was changed; leases that can't be confirmed end by "
        "themselves. Let the client reach the broker again."
    )


def _logs(broker: MemoryBroker, partitions: Iterable[TopicPartition]) -> Iterator[tuple[TopicPartition, PartitionLog]]:
    for key in sorted(set(partitions)):
        log = broker.log(*key)
        if log is not None:
            yield key, log
