"""The broker's side of an in-memory Kafka: topics, partitions, entries, transactions, and what can go wrong."""

from __future__ import annotations

import itertools
import re
import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial

from kafka_marshal.adapters import producing, transactions
from kafka_marshal.adapters.producing import Headers
from kafka_marshal.errors import CoordinationTopicError, ProduceError
from kafka_marshal.ports import TopicInfo, TopicPartition
from kafka_marshal.runtime import time_of_day_ms


class AppendFate(StrEnum):
    """The result of one record that a client appends."""

    #: In the log, and acknowledged.
    WRITTEN = "written"
    #: In the log, but the acknowledgement is lost: the client gets a timeout.
    UNACKNOWLEDGED = "unacknowledged"
    #: In the log twice, and acknowledged without an offset: a retry of what had been written (C17).
    DUPLICATED = "duplicated"
    #: Not in the log; the client gets a timeout.
    LOST = "lost"
    #: Not in the log; the appender is in a fatal state from now on and must be replaced (C17).
    FATAL = "fatal"


def _written(client: str, topic: str, partition: int, value: bytes) -> AppendFate:
    return AppendFate.WRITTEN


def _done(client: str, transactional_id: str, request: str) -> AppendFate:
    return AppendFate.WRITTEN


def _at_once(client: str, topic: str, partition: int, offset: int) -> int:
    return 0


def _hears(client: str, topic: str, partition: int, tails: int, restarts: int) -> bool:
    return False


@dataclass(slots=True)
class Faults:
    """Hooks, called under the broker's lock: they decide, and call nothing back. Change them through MemoryBroker.

    Clients are named by ``MemoryCluster.connect(name)``.
    """

    #: (client, topic, partition, value) → the result of the record.
    append: Callable[[str, str, int, bytes], AppendFate] = _written
    #: (client, transactional id, "init", "send_offsets", "commit" or "abort") → the result of the request: WRITTEN,
    #: UNACKNOWLEDGED, LOST or FATAL.
    request: Callable[[str, str, str], AppendFate] = _done
    #: (client, topic, partition, offset) → ms that pass until this client's readers can see the record. Order within
    #: a partition is kept: a record that is held back holds back those after it.
    delay_ms: Callable[[str, str, int, int], int] = _at_once
    #: (client, topic, partition, readers of that kind that the client has opened, restarts of the partition in the last
    #: one) → whether that one gets nothing of it, and no error: as librdkafka's when a fetch is stuck.
    stalled: Callable[[str, str, int, int, int], bool] = _hears
    #: Clients that can't reach the broker now.
    unreachable: set[str] = field(default_factory=set)


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
class PartitionLog:
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
    partitions: list[PartitionLog]

    @property
    def stamps_by_log(self) -> bool:
        """The broker stamps records, not their senders."""
        return self.settings["message.timestamp.type"] == "LogAppendTime"


class MemoryBroker:
    """All topics of an in-memory cluster. Thread-safe; wakes the readers that wait after each change."""

    def __init__(self, clock: Callable[[], float] | None = None, *, brokers: int = 1) -> None:
        """clock: now in ms; with one nothing ever waits. brokers: how many there seem to be."""
        #: The broker's time in ms.
        self.clock: Callable[[], float] = clock if clock is not None else time_of_day_ms
        #: Whether readers wait for records: only with the time of day, as no thread could move another clock meanwhile.
        self.waits: bool = clock is None
        #: How often ``wake`` was called.
        self.wakes: int = 0
        self.brokers = brokers
        self.faults: Faults = Faults()
        #: How many tails of a topic each client has opened, and (topic "") readers of messages.
        self.tails_opened: Counter[tuple[str, str]] = Counter()
        #: Guards everything; notified upon every change.
        self.changed: threading.Condition = threading.Condition(threading.RLock())
        self.existing: dict[str, Topic] = {}
        #: Of Kafka's own consumer groups, which have no members here.
        self.committed: dict[str, dict[TopicPartition, tuple[int, str]]] = {}
        self.transactions: TransactionalIds = TransactionalIds(self)
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
            logs = [PartitionLog() for _ in range(partitions)]
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
            topic.partitions += [PartitionLog() for _ in range(partitions - len(topic.partitions))]
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
        """Have waiting readers look again and return, after a change of ``faults`` or of the time."""
        with self._changing():
            self.wakes += 1

    # For the clients' side.

    def log(self, topic: str, partition: int) -> PartitionLog | None:
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

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Hold the lock, and wake all waiting readers on leaving."""
        with self.changed:
            try:
                yield
            finally:
                self.changed.notify_all()


#: The brokers' transaction.max.timeout.ms.
MAX_TIMEOUT_MS = 900_000

#: The epoch of a producer, and the number of its transaction.
At = tuple[int, int]

#: Of a group.
_Where = tuple[str, TopicPartition]


@dataclass(slots=True, eq=False)
class _Transaction:
    """One that is open: from its first record or offset on."""

    #: When the broker ends it (ms).
    deadline: float
    #: The offsets of its records.
    records: dict[TopicPartition, list[int]] = field(default_factory=dict)
    #: Number of the commit, offset and metadata.
    offsets: dict[_Where, tuple[int, int, str]] = field(default_factory=dict)


class TransactionalIds:
    """All transactional ids of a broker. The broker's lock is held by callers.

    As Kafka does it, as far as the rules of transactions lean on it: init() fences and aborts; readers (all are
    read_committed) see nothing of what is open or aborted, and end at the last stable offset; each partition gets a
    marker, which takes an offset; a plain commit that comes while a transaction's offset is pending wins over it.
    """

    def __init__(self, broker: MemoryBroker) -> None:
        self._broker = broker
        #: transactional id → epoch of the producer that may use it, and its timeout (ms).
        self._epochs: dict[str, int] = {}
        self._timeouts: dict[str, int] = {}
        self._open: dict[str, _Transaction] = {}
        #: The last one that was ended by its producer, and whether it was committed.
        self._ended: dict[str, tuple[At, bool]] = {}
        #: Commits by the order of their arrival: the latest wins, whenever its transaction ends.
        self._numbers = itertools.count(1)
        self._latest: dict[_Where, int] = {}
        #: Committed, and not shown yet: brokers do that a little after their answer. Until then it counts as pending.
        self._unsettled: list[_Transaction] = []
        #: Calls the function when that is.
        self.settle: Callable[[Callable[[], None]], None] = lambda apply: apply()
        #: Called with each partition whose end for readers may have changed.
        self.on_end: Callable[[TopicPartition], None] = lambda _: None

    def init(self, transactional_id: str, timeout_ms: int) -> int:
        """Fence the producer before, and abort its transaction; returns the new one's epoch."""
        if timeout_ms > MAX_TIMEOUT_MS:
            raise transactions.timeout_too_high(timeout_ms)
        self._end(transactional_id, commit=False)
        self._timeouts[transactional_id] = timeout_ms
        epoch = self._epochs[transactional_id] = self._epochs.get(transactional_id, -1) + 1
        return epoch

    def produce(
        self,
        transactional_id: str,
        at: At,
        key: TopicPartition,
        value: bytes | None,
        record_key: bytes | None,
        headers: Headers,
        timestamp_ms: int,
    ) -> None:
        """Write a record that no reader sees yet."""
        transaction = self._transaction(transactional_id, at)
        offset = self._broker.produce(*key, value, record_key, timestamp_ms=timestamp_ms, headers=headers or None)
        transaction.records.setdefault(key, []).append(offset)
        log = self._broker.log(*key)
        if log is not None:
            log.open.setdefault(transactional_id, offset)

    def send_offset(
        self, transactional_id: str, at: At, group_id: str, key: TopicPartition, offset: int, metadata: str
    ) -> None:
        """An offset that is pending until the transaction ends."""
        found = next(self._numbers), offset, metadata
        self._transaction(transactional_id, at).offsets[group_id, key] = found

    def end(self, transactional_id: str, at: At, *, commit: bool) -> None:
        """Commit or abort it. A request that comes again has the same answer."""
        self._check(transactional_id, at)
        if self._ended.get(transactional_id) == (at, commit):
            return
        self._check_open(transactional_id, at)
        self._end(transactional_id, commit=commit)
        self._ended[transactional_id] = at, commit

    def commit_plainly(self, group_id: str, offsets: Mapping[TopicPartition, tuple[int, str]]) -> None:
        """Offsets outside of transactions."""
        for key, found in offsets.items():
            self._latest[group_id, key] = next(self._numbers)
            self._broker.committed.setdefault(group_id, {})[key] = found

    def is_pending(self, group_id: str, key: TopicPartition) -> bool:
        """Whether an open transaction has sent an offset of it."""
        self.expire()
        return any((group_id, key) in each.offsets for each in (*self._open.values(), *self._unsettled))

    def expire(self) -> None:
        """End what is open for too long; its producer is fenced."""
        now = self._broker.clock()
        for transactional_id in [name for name, each in self._open.items() if each.deadline <= now]:
            self._end(transactional_id, commit=False)
            self._epochs[transactional_id] += 1

    def _check(self, transactional_id: str, at: At) -> None:
        self.expire()
        if self._epochs[transactional_id] != at[0]:
            raise transactions.fenced(transactional_id, "there is a newer producer with the same transactional id")

    def _check_open(self, transactional_id: str, at: At) -> None:
        """Refuse requests that are late: their transaction has ended."""
        if (ended := self._ended.get(transactional_id)) is not None and at <= ended[0]:
            raise transactions.failed(transactional_id, "the transaction has ended", retry=True)

    def _transaction(self, transactional_id: str, at: At) -> _Transaction:
        self._check(transactional_id, at)
        self._check_open(transactional_id, at)
        if transactional_id not in self._open:
            deadline = self._broker.clock() + self._timeouts[transactional_id]
            self._open[transactional_id] = _Transaction(deadline)
        return self._open[transactional_id]

    def _end(self, transactional_id: str, *, commit: bool) -> None:
        transaction = self._open.pop(transactional_id, None)
        if transaction is None:
            return
        for key, offsets in transaction.records.items():
            log = self._broker.log(*key)
            if log is None or log.open.pop(transactional_id, None) is None:
                continue  # deleted meanwhile
            if not commit:
                log.drop(offsets)
            self._broker.skip(*key)  # the marker
            self.on_end(key)
        if commit and transaction.offsets:
            self._unsettled.append(transaction)
            self.settle(partial(self._show, transaction))

    def _show(self, transaction: _Transaction) -> None:
        """Show the offsets of a committed transaction."""
        self._unsettled.remove(transaction)
        for (group_id, key), (number, offset, metadata) in transaction.offsets.items():
            if number > self._latest.get((group_id, key), 0):
                self._latest[group_id, key] = number
                self._broker.committed.setdefault(group_id, {})[key] = offset, metadata
