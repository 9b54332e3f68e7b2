"""The broker's side of an in-memory Kafka: topics, partitions, entries."""

from __future__ import annotations

import re
import threading
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from kafka_marshal.adapters import producing
from kafka_marshal.adapters.memory.faults import Faults
from kafka_marshal.adapters.memory.transactions import Transactions
from kafka_marshal.errors import CoordinationTopicError, ProduceError
from kafka_marshal.ports import TopicInfo, TopicPartition

#: Kafka's defaults of topic settings; those that the library reads.
TOPIC_DEFAULTS: Mapping[str, str] = {
    "cleanup.policy": "delete",
    "compression.type": "producer",
    "max.compaction.lag.ms": "9223372036854775807",
    "max.message.bytes": "1048588",
    "message.timestamp.type": "CreateTime",
    "min.compaction.lag.ms": "0",
    "min.insync.replicas": "1",
    "retention.bytes": "-1",
    "retention.ms": "604800000",
    "unclean.leader.election.enable": "false",
}

#: Bytes around a value in a batch of one record: the broker's limit counts them too.
BATCH_OVERHEAD = 70

#: The client's own bound, as the Kafka appender has it.
MAX_VALUE_BYTES = 1_000_000

_NAME = re.compile(r"[A-Za-z0-9._-]{1,249}")

#: Kinds of timestamps, as confluent_kafka numbers them.
CREATE_TIME, LOG_APPEND_TIME = 1, 2


class MemoryMessage:
    """A message with the methods of confluent_kafka.Message that people use."""

    __slots__ = ("_headers", "_key", "_offset", "_partition", "_timestamp", "_topic", "_value")

    def __init__(
        self,
        topic: str,
        partition: int,
        offset: int,
        key: bytes | None,
        value: bytes | None,
        timestamp: tuple[int, int],
        headers: Sequence[tuple[str, bytes | None]] | None = None,
    ) -> None:
        self._topic = topic
        self._partition = partition
        self._offset = offset
        self._key = key
        self._value = value
        self._timestamp = timestamp
        self._headers = headers

    def topic(self) -> str:
        """The topic's name."""
        return self._topic

    def partition(self) -> int:
        """The partition's number."""
        return self._partition

    def offset(self) -> int:
        """The offset in the partition."""
        return self._offset

    def key(self) -> bytes | None:
        """The key, None for none."""
        return self._key

    def value(self) -> bytes | None:
        """The value, None for none."""
        return self._value

    def timestamp(self) -> tuple[int, int]:
        """(1 for CreateTime or 2 for LogAppendTime, ms)."""
        return self._timestamp

    def headers(self) -> list[tuple[str, bytes | None]] | None:
        """The headers, None for none."""
        return list(self._headers) if self._headers is not None else None

    def set_key(self, key: bytes | None) -> None:
        """Replace the key, as people do who deserialize in place."""
        self._key = key

    def set_value(self, value: bytes | None) -> None:
        """Replace the value."""
        self._value = value

    def set_headers(self, headers: Sequence[tuple[str, bytes | None]] | None) -> None:
        """Replace the headers."""
        self._headers = headers

    def error(self) -> None:
        """None: this is a message; errors have another class here."""
        return

    def __len__(self) -> int:
        return len(self._value or b"")


@dataclass(slots=True)
class Partition:
    """One log."""

    #: The log's first offset (what is below was deleted).
    start: int = 0
    #: The next offset to be given.
    end: int = 0
    #: Ascending; the messages and, beside them, their offsets and when they arrived (ms).
    messages: list[MemoryMessage] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)
    #: Transactional id → the first offset of its open transaction here.
    open: dict[str, int] = field(default_factory=dict)

    @property
    def stable_end(self) -> int:
        """The last stable offset: where readers of committed records end."""
        return min(self.open.values(), default=self.end)

    def index(self, offset: int) -> int:
        """The place of the first message at or after an offset."""
        return bisect_left(self.offsets, offset)

    def cut_below(self, offset: int) -> None:
        """Retention: what lies below offset goes."""
        index = self.index(offset)
        self.start = max(self.start, min(offset, self.end))
        del self.messages[:index], self.offsets[:index], self.arrivals[:index]

    def drop(self, offsets: Sequence[int]) -> None:
        """Records of an aborted transaction: no reader gets them."""
        for offset in offsets:
            index = self.index(offset)
            if index < len(self.offsets) and self.offsets[index] == offset:
                del self.messages[index], self.offsets[index], self.arrivals[index]


@dataclass(slots=True)
class Topic:
    """One topic."""

    info: TopicInfo
    replication_factor: int
    settings: dict[str, str]
    partitions: list[Partition]

    @property
    def stamps_by_log(self) -> bool:
        """The broker stamps records, not their senders."""
        return self.settings["message.timestamp.type"] == "LogAppendTime"


class MemoryBroker:
    """All topics of an in-memory cluster. Thread-safe; wakes the readers that wait after each change."""

    def __init__(self, clock: Callable[[], float] | None = None, *, brokers: int = 1) -> None:
        """clock: now in ms; with one nothing ever waits. brokers: how many there seem to be."""
        #: The broker's time in ms.
        self.clock: Callable[[], float] = clock if clock is not None else _time_of_day_ms
        #: Whether readers wait for records: only with the time of day, as no thread could move another clock meanwhile.
        self.waits: bool = clock is None
        self.brokers = brokers
        self.faults: Faults = Faults()
        #: How many tails of a topic each client has opened, and (topic "") readers of messages.
        self.tails_opened: Counter[tuple[str, str]] = Counter()
        #: Guards everything; notified upon every change.
        self.changed: threading.Condition = threading.Condition(threading.RLock())
        self.existing: dict[str, Topic] = {}
        #: Of Kafka's own consumer groups, which have no members here.
        self.committed: dict[str, dict[TopicPartition, tuple[int, str]]] = {}
        self.transactions: Transactions = Transactions(self)
        self._made = 0

    # Topics.

    def create_topic(
        self, name: str, partitions: int = 1, replication_factor: int = 1, settings: Mapping[str, str] | None = None
    ) -> None:
        """Create a topic; raises CoordinationTopicError if a broker would refuse."""
        with self.changed:
            problem = self._problem(name, partitions, replication_factor)
            if problem is not None:
                raise CoordinationTopicError(
                    f"The cluster did not create topic {name!r}: {problem}. Nothing was changed."
                )
            self._made += 1
            info = TopicInfo(name, partitions, f"memory-{self._made}", name.startswith("__consumer_"))
            logs = [Partition() for _ in range(partitions)]
            self.existing[name] = Topic(info, replication_factor, {**TOPIC_DEFAULTS, **(settings or {})}, logs)
            self.changed.notify_all()

    def _problem(self, name: str, partitions: int, replication_factor: int) -> str | None:
        if name in self.existing:
            return "it is there already"
        if not _NAME.fullmatch(name) or name in (".", ".."):
            return "no topic can have this name"
        if partitions < 1:
            return f"{partitions} is no number of partitions"
        if not 1 <= replication_factor <= self.brokers:
            return f"{replication_factor} replicas do not fit on {self.brokers} broker(s)"
        return None

    def delete_topic(self, name: str) -> None:
        """Delete a topic; recreated, it gets another id."""
        with self._changing():
            del self.existing[name]

    def grow_topic(self, name: str, partitions: int) -> None:
        """Give a topic more partitions."""
        with self._changing():
            topic = self.existing[name]
            if partitions < len(topic.partitions):
                raise ValueError(f"{name!r} has {len(topic.partitions)} partitions, they never shrink to {partitions}")
            topic.partitions += [Partition() for _ in range(partitions - len(topic.partitions))]
            topic.info = TopicInfo(name, partitions, topic.info.topic_id, topic.info.internal)

    def alter_topic(self, name: str, settings: Mapping[str, str | None]) -> None:
        """Change settings; records that are there stay as they are. None: back to the default."""
        with self._changing():
            found = self.existing[name].settings
            for setting, value in settings.items():
                found[setting] = TOPIC_DEFAULTS[setting] if value is None else value

    # Logs.

    def produce(
        self,
        topic: str,
        partition: int,
        value: bytes | None,
        key: bytes | None = None,
        *,
        timestamp_ms: int | None = None,
        headers: Sequence[tuple[str, bytes | None]] | None = None,
    ) -> int:
        """Append a message; returns its offset. timestamp_ms: the sender's, for topics with CreateTime (else now)."""
        with self._changing():
            now = self.clock()
            made = self.existing[topic]
            log = made.partitions[partition]
            sent = int(now) if timestamp_ms is None else timestamp_ms
            timestamp = (LOG_APPEND_TIME, max(0, int(now))) if made.stamps_by_log else (CREATE_TIME, sent)
            offset = log.end
            log.messages.append(MemoryMessage(topic, partition, offset, key, value, timestamp, headers))
            log.offsets.append(offset)
            log.arrivals.append(now)
            log.end += 1
            return offset

    def skip(self, topic: str, partition: int, offsets: int = 1) -> None:
        """Use up offsets that no reader is ever given, as transaction markers and compaction do."""
        with self._changing():
            self.existing[topic].partitions[partition].end += offsets

    def delete_records(self, topic: str, partition: int, before: int) -> None:
        """Move the log start up, as retention does."""
        with self._changing():
            self.existing[topic].partitions[partition].cut_below(before)

    # Faults.

    def set_reachable(self, client: str, reachable: bool) -> None:
        """Cut a client off, or let it through again."""
        with self._changing():
            if reachable:
                self.faults.unreachable.discard(client)
            else:
                self.faults.unreachable.add(client)

    def wake(self) -> None:
        """Have waiting readers look again, after a change of ``faults``."""
        with self._changing():
            pass

    # For the clients' side.

    def log(self, topic: str, partition: int) -> Partition | None:
        """A partition's log, None if there is none; the lock is held."""
        made = self.existing.get(topic)
        return made.partitions[partition] if made is not None and 0 <= partition < len(made.partitions) else None

    def refusal(self, topic: str, partition: int, value: bytes) -> str | None:
        """Why a record is not written, None if it is; the lock is held."""
        if len(value) > MAX_VALUE_BYTES:
            return f"{len(value)} bytes are too many for one record"
        made = self.existing.get(topic)
        if made is None or not 0 <= partition < len(made.partitions):
            return f"unknown partition {topic} [{partition}]"
        if len(value) + BATCH_OVERHEAD > int(made.settings["max.message.bytes"]):
            return f"{len(value)} bytes are more than the topic's max.message.bytes allow"
        return None

    def data_refusal(
        self, topic: str, value: bytes | None, key: bytes | None, headers: producing.Headers
    ) -> ProduceError | None:
        """Why a user's record is not written, None if it is; the lock is held."""
        made = self.existing.get(topic)
        if made is None:
            return producing.missing(topic)
        size = producing.size_of(value, key, headers)
        if size + BATCH_OVERHEAD > int(made.settings["max.message.bytes"]):
            return producing.too_large(topic, size)
        return None

    def reachable(self, client: str) -> bool:
        """Whether a client gets through; the lock is held."""
        return client not in self.faults.unreachable

    def _changing(self) -> AbstractContextManager[object]:
        return _Changing(self.changed)


class _Changing:
    """Holds the lock, and wakes all waiting readers on leaving."""

    def __init__(self, condition: threading.Condition) -> None:
        self._condition = condition

    def __enter__(self) -> None:
        self._condition.acquire()

    def __exit__(self, *_: object) -> None:
        self._condition.notify_all()
        self._condition.release()


def _time_of_day_ms() -> float:
    return time.time() * 1000
