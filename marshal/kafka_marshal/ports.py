"""What the shell needs from Kafka, and what an in-memory log must offer to stand in for it.

Two implementations: :mod:`kafka_marshal.adapters.kafka` (confluent-kafka) and :mod:`kafka_marshal.adapters.memory`.
Both pass the same contract tests (``tests/contract``).

Calls marked *blocking* may wait for a broker up to their timeout and raise an error of :mod:`kafka_marshal.errors`; the
shell runs them on separate threads. All other calls return at once. Offsets, partitions and times are as in the
protocol: ints, milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol, runtime_checkable

from kafka_marshal.runtime import Runtime
from kafka_marshal.types import Key

#: What a Cluster calls a partition.
TopicPartition = Key

#: How long a producer waits for a record's acknowledgement by default.
DELIVERY_TIMEOUT_MS = 30_000

#: (offset, timestamp_ms or -1 if the stamp is not of type LogAppendTime (T1), value or None)
LogEntry = tuple[int, int, bytes | None]


@runtime_checkable
class Message(Protocol):
    """The part of confluent_kafka.Message that the engine and the in-memory log share.

    ``kafka_marshal.Message`` is this at run time; for type checkers it is a confluent_kafka.Message, whose topic,
    partition and offset are never None.
    """

    def topic(self) -> str | None: ...
    def partition(self) -> int | None: ...
    def offset(self) -> int | None: ...
    def key(self) -> str | bytes | None: ...
    def value(self) -> str | bytes | None: ...


class FaultKind(StrEnum):
    """What can go wrong while reading."""

    #: The position lies outside the log (start moved up, log truncated, topic recreated).
    OUT_OF_RANGE = "out_of_range"
    #: The topic is another one of that name: nothing of it was given. The message is its id. (Readers of data.)
    RECREATED = "recreated"
    #: The topic or partition is gone.
    UNKNOWN_TOPIC = "unknown_topic"
    #: Refused by TLS, SASL or an ACL.
    REFUSED = "refused"
    #: No broker reachable for now; reading resumes by itself when one is.
    UNREACHABLE = "unreachable"
    #: An answer was larger than the client may receive; no partition is named.
    TOO_LARGE = "too_large"
    #: The client is unusable and must be replaced.
    FATAL = "fatal"
    #: Anything else, shown to people.
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class TailFault:
    """A fault of one partition (or of the whole tail: partition None)."""

    kind: FaultKind
    partition: int | None
    message: str


@dataclass(frozen=True, slots=True)
class TailBatch:
    """What one read of a tail brought, in log order within each partition."""

    records: dict[int, list[LogEntry]] = field(default_factory=dict)
    #: Partitions whose end was reached, with the offset after the last one (also past transaction markers).
    ends: dict[int, int] = field(default_factory=dict)
    faults: Sequence[TailFault] = ()
    #: As much as one read takes: more may have been fetched, of other partitions, too.
    is_full: bool = False

    def slices(self, size: int) -> list[TailBatch]:
        """The same in batches of at most size records each; ends and faults are in the last one, never missing."""
        runs = [(cp, at, entries) for cp, entries in self.records.items() for at in range(0, len(entries), size)]
        if len(runs) <= 1:
            return [self]
        parts = [TailBatch({cp: entries[at : at + size]}) for cp, at, entries in runs]
        parts[-1] = TailBatch(parts[-1].records, self.ends, self.faults)
        return parts


class Tail(Protocol):
    """Reads partitions of the coordination topic onwards from given offsets (L4: read_uncommitted)."""

    def read(self, timeout_s: float) -> TailBatch:
        """Wait up to timeout_s for anything new; return it (many records at once when there are many)."""

    def rest(self) -> bool:
        """Fetch nothing before the next read: what comes meanwhile gathers at the broker. By the thread that reads.

        Returns whether it does; False: something has come already, and the next read brings it.
        """

    def log_ends(self) -> Mapping[int, int]:
        """Where the logs end, by partition, as of the last second's reads; without those not known yet. Any thread."""

    def follow(self, positions: Mapping[int, int]) -> None:
        """Read these partitions, too, each from its offset; any thread, also during a read. They are not read yet."""

    def leave(self, partitions: Iterable[int]) -> None:
        """Read these no more; by the thread that reads, between two reads."""

    def restart(self, positions: Mapping[int, int]) -> None:
        """Read these again, each from its offset: their fetch is stuck. By the thread that reads, between two reads."""

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Ack:
    """A broker's answer to an append. It proves nothing about the state (T4), but names the offset."""

    #: None: acknowledged without an offset, or failed.
    offset: int | None
    #: None: written. Else why not (it may have been written all the same: C17).
    error: str | None = None
    #: The appender is in a fatal state and must be replaced (C17).
    fatal: bool = False
    #: The cluster forbids us to append.
    forbidden: bool = False
    #: A broker has answered, and does not take the record.
    refused: bool = False


class Sender(Protocol):
    """What writes records. Any thread may; acks are called from within poll(), flush() or close() only, each once."""

    def poll(self, timeout_s: float = 0.0) -> None:
        """Serve acks that are due; waits up to timeout_s for the first."""

    def flush(self, timeout_s: float) -> int:
        """Wait for outstanding records (*blocking*), and serve their acks; returns how many are still outstanding."""

    def close(self, timeout_s: float = 0.0) -> None:
        """Flush for up to timeout_s, fail the rest, free the connection."""


class Appender(Sender, Protocol):
    """Appends values with an empty key to the coordination topic, acks=all and idempotent (L1)."""

    def append(self, partition: int, value: bytes, on_ack: Callable[[Ack], None] | None = None) -> None: ...


class Producer(Sender, Protocol):
    """Produces records to users' topics, acks=all and idempotent. close() fails what is left with ClosedError."""

    def send(
        self,
        topic: str,
        value: bytes | None,
        key: bytes | None = None,
        headers: Sequence[tuple[str, bytes | None]] = (),
        on_ack: Callable[[Exception | None], None] | None = None,
    ) -> None:
        """Send a record, stamped with the present time. Raises only ClosedError: on_ack gets all else.

        The partition is the one that Java's producer chooses for the key (murmur2); without a key it is any. on_ack:
        None: all in-sync replicas have it. Else why it is not known to be written: ProduceError, AuthorizationError,
        AuthenticationError, KafkaUnavailableError (it may be written all the same), or ClosedError. A failure is of
        this record: the next may succeed with the same producer.
        """


class TransactionalProducer(Protocol):
    """One transactional id. Not thread-safe: one caller at a time.

    Its calls block, each at most timeout_s; commit() up to socket.timeout.ms longer if a broker hangs.

    After an error of begin(), send() or commit() call abort(). If that returns, nothing of the transaction was
    committed, and begin() may come next. If it raises, the producer is of no use any more: close it. init() of a new
    one decides a transaction of unknown outcome, and :meth:`Cluster.committed_offset` then shows which way.

    Errors: TransactionFencedError, TransactionError, KafkaUnavailableError (also AuthenticationError),
    AuthorizationError, ConfigurationError (brokers too old, or transaction_timeout_ms above their limit), ClosedError.
    """

    def init(self, timeout_s: float) -> None:
        """Fence the predecessor and end its transaction. Once, before all else; after KafkaUnavailableError again."""

    def begin(self) -> None:
        """Begin a transaction. Nothing is sent yet."""

    def send(
        self,
        topic: str,
        value: bytes | None,
        key: bytes | None = None,
        headers: Sequence[tuple[str, bytes | None]] = (),
        partition: int | None = None,
    ) -> None:
        """Send a record in the transaction. If the client's queue is full it waits for room.

        partition: None: the one that :meth:`Producer.send` would choose. A record that can't be written is reported by
        commit().
        """

    def commit(self, group_id: str, key: TopicPartition, offset: int, metadata: str, timeout_s: float) -> None:
        """Commit what was sent, and offset (to be read next) with metadata for this partition of the group, as one.

        The group needs no member. Raises first what Producer.send would report of a record that could not be written.
        After KafkaUnavailableError the transaction may be committed (a broker that was frozen or restarted may have
        done it, or may still do it); abort() then raises.
        """

    def abort(self, timeout_s: float) -> None:
        """Abort the transaction, if there is one. Raises if its outcome is not known, or the producer has failed."""

    def close(self) -> None:
        """Free the connection, at once. A transaction that is open is left to the next init(). Idempotent."""


@dataclass(frozen=True, slots=True)
class DataFault:
    """A fault while reading a data partition (or all of them: topic None)."""

    kind: FaultKind
    topic: str | None
    partition: int | None
    message: str


class DataReader(Protocol):
    """Fetches the user's messages from assigned partitions. Any thread may call any method but read().

    Changes of the assignment are incremental: the other partitions continue undisturbed.
    """

    def assign(self, positions: Mapping[TopicPartition, int]) -> None:
        """Begin to fetch each partition at its offset."""

    def expect(self, positions: Mapping[TopicPartition, int]) -> None:
        """These are likely to be assigned soon, at these offsets: it may fetch them, and returns none before."""

    def unassign(self, partitions: Iterable[TopicPartition]) -> None:
        """Stop fetching; messages of these partitions fetched but not read yet are dropped."""

    def pause(self, partitions: Iterable[TopicPartition]) -> None: ...

    def resume(self, partitions: Iterable[TopicPartition]) -> None: ...

    def read(self, max_messages: int, timeout_s: float) -> tuple[list[Message], list[DataFault]]:
        """Up to max_messages, ascending within a partition; waits up to timeout_s for the first one."""

    def take_ends(self) -> dict[TopicPartition, int]:
        """Ends that the last reads have reached: the offset after all that a reader is ever given below it (P6)."""

    def partition_counts(self, topics: Iterable[str], timeout_s: float) -> dict[str, int]:
        """How many partitions each topic has, of those that it learns at once (*blocking*); never raises.

        Cheaper than :meth:`Cluster.topic_info`, which knows the ids, too, and says why a topic can't be looked up.
        """

    def high_watermark(self, topic: str, partition: int) -> int | None:
        """The log end as of the last fetch (cached, no broker asked), None if not known yet."""

    def look_at_ends(self) -> None:
        """Have high_watermark return what the last fetches reported, even if no thread reads. Never waits."""

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class TopicInfo:
    """One topic as the cluster describes it."""

    name: str
    partitions: int
    #: Changes when a topic is recreated. "" if the broker does not report it.
    topic_id: str
    internal: bool = False
    #: Partitions that had no leader.
    leaderless: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class TopicConfig:
    """A topic's info and its configuration values (names as in Kafka, values as strings)."""

    info: TopicInfo
    replication_factor: int
    settings: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class KafkaGroup:
    """A consumer group of Kafka's own (classic or KIP-848). Both are empty if there is none of that name."""

    #: client.id of each member, sorted.
    members: tuple[str, ...]
    #: The offset to be read next, and the metadata beside it.
    committed: Mapping[TopicPartition, tuple[int, str]]


class Cluster(Protocol):
    """One Kafka cluster (or its in-memory double): look-ups, and a factory for the readers and writers."""

    #: The clock and the threads of its users: calls that block, block these.
    runtime: Runtime

    def cluster_ids(self, wait_s: float) -> Mapping[str, str]:
        """The cluster of each bootstrap address, of those that answered within wait_s (*blocking*).

        The first call begins to ask. Empty if there is one address only, and so nothing to compare.
        """

    def topics(self, timeout_s: float, max_age_s: float = 0.0) -> dict[str, TopicInfo]:
        """All topics by name (*blocking*). Topic ids may be "" here.

        max_age_s: metadata that another client of this process fetched within this time is used again.
        """

    def topic_info(self, names: Iterable[str], timeout_s: float, max_age_s: float = 0.0) -> dict[str, TopicInfo]:
        """Only those of names that exist, with topic ids (*blocking*); max_age_s as in :meth:`topics`."""

    def topic_config(self, name: str, timeout_s: float) -> TopicConfig | None:
        """Info and settings, None if there is no such topic (*blocking*)."""

    def operations(self, topic: str, timeout_s: float) -> frozenset[str] | None:
        """What we may do with a topic that exists: READ, WRITE … (*blocking*); None: the brokers do not say."""

    def broker_count(self, timeout_s: float) -> int:
        """How many brokers the cluster has (*blocking*)."""

    def create_topic(
        self, name: str, partitions: int, replication_factor: int, settings: Mapping[str, str], timeout_s: float
    ) -> None:
        """Create a topic (*blocking*); CoordinationTopicError if the broker says no."""

    def alter_topic(self, name: str, settings: Mapping[str, str | None], timeout_s: float) -> None:
        """Change settings of a topic, and no others (*blocking*). None: back to the brokers' default.

        TopicMissingError if there is no such topic, MarshalError if the broker says no.
        """

    def watermarks(
        self, partitions: Iterable[TopicPartition], timeout_s: float
    ) -> dict[TopicPartition, tuple[int, int]]:
        """(log start, high watermark), asked of the leaders now (*blocking*). Unknown partitions are left out."""

    def committed_watermarks(
        self, partitions: Iterable[TopicPartition], timeout_s: float
    ) -> dict[TopicPartition, tuple[int, int]]:
        """(log start, last stable offset): where a read_committed reader ends now (*blocking*)."""

    def offsets_for_time(
        self, partitions: Iterable[TopicPartition], timestamp_ms: int, timeout_s: float
    ) -> dict[TopicPartition, int]:
        """First offset whose timestamp is at or after timestamp_ms, else the high watermark (*blocking*)."""

    def delete_records(self, before: Mapping[TopicPartition, int], timeout_s: float) -> dict[TopicPartition, int]:
        """Remove all records below an offset, at most up to the high watermark; the new log starts (*blocking*).

        Partitions that do not exist are skipped. A log that already starts further up stays as it is. MarshalError
        if the broker refuses; some partitions may have been cut by then.
        """

    def kafka_group(self, group_id: str, timeout_s: float) -> KafkaGroup:
        """A consumer group of Kafka's own, as its coordinator knows it now (*blocking*)."""

    def commit_for_group(
        self, group_id: str, offsets: Mapping[TopicPartition, tuple[int, str]], timeout_s: float
    ) -> None:
        """Commit (offset to be read next, metadata) for a consumer group of Kafka's own, made if need be (*blocking*).

        MarshalError if the broker refuses: while the group has members, it does.
        """

    def committed_offset(self, group_id: str, key: TopicPartition, timeout_s: float) -> tuple[int, str] | None:
        """(offset to be read next, metadata) of one of Kafka's own groups; None if there is none (*blocking*).

        While a transaction that has sent an offset has not ended, it waits (read_committed); KafkaUnavailableError in
        the end. ConfigurationError if the brokers (before 2.5) can't wait.
        """

    def expect(self, topic: str, *, delivery_timeout_ms: int | None = None) -> None:
        """A tail, and an appender with this timeout, will be asked for soon: connect meanwhile. It may do nothing.

        None: no appender.
        """

    def tail(self, topic: str, positions: Mapping[int, int]) -> Tail:
        """A tail of the partitions named by positions, each from its offset."""

    def appender(self, topic: str, *, delivery_timeout_ms: int) -> Appender:
        """An appender that gives up on a record after delivery_timeout_ms (L1: within HI)."""

    def data_reader(self, group_id: str, config: Mapping[str, object]) -> DataReader:
        """A reader of user data. config: librdkafka properties on top of the cluster's own."""

    def way_of_reading(self, config: Mapping[str, object]) -> Hashable | None:
        """What two readers of this process have in common that read the same, and as the same user; None: they share
        nothing. config: as for data_reader.
        """

    def producer(self, config: Mapping[str, object], *, delivery_timeout_ms: int = DELIVERY_TIMEOUT_MS) -> Producer:
        """A producer of user data that gives up on a record after delivery_timeout_ms. config: as for data_reader."""

    def transactional_producer(
        self, transactional_id: str, config: Mapping[str, object], *, transaction_timeout_ms: int
    ) -> TransactionalProducer:
        """The producer of one transactional id; config as for producer().

        transaction_timeout_ms: the brokers abort a transaction that is open for longer.
        """

    def close(self) -> None: ...
