"""One message of a data topic, by its offset. Nothing is committed, and no group is affected."""

from __future__ import annotations

from dataclasses import dataclass
from shlex import quote

from kafka_marshal import arguments
from kafka_marshal.adapters.message import Message, headers_of
from kafka_marshal.admin.base import AdminBase
from kafka_marshal.admin.positions import check_name
from kafka_marshal.errors import AdminError, AuthorizationError, KafkaUnavailableError, grant
from kafka_marshal.ports import Cluster, DataFault, FaultKind, TopicPartition

SLICE_S = 0.2

#: Fetches hardly more than one message, and detects damaged bytes in uncompressed batches, too.
CONFIG: dict[str, object] = {"check.crcs": True, "queued.min.messages": 1}

#: Of confluent_kafka's timestamp types.
_STAMPS = {1: "create", 2: "append"}


@dataclass(frozen=True, slots=True)
class StoredMessage:
    """A message as it is in the log."""

    topic: str
    partition: int
    offset: int
    #: Milliseconds since 1970; None: it has none.
    timestamp: int | None
    #: "create": the producer's clock; "append": the broker's; None: no timestamp.
    timestamp_type: str | None
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...]
    #: False: of an aborted or unfinished transaction; readers of committed messages do not get it.
    committed: bool

    @classmethod
    def of(cls, message: Message, committed: bool) -> StoredMessage:
        """From a reader's message."""
        kind, stamp = message.timestamp()
        has_stamp = kind in _STAMPS and stamp >= 0
        return cls(
            message.topic(),
            message.partition(),
            message.offset(),
            stamp if has_stamp else None,
            _STAMPS[kind] if has_stamp else None,
            _raw(message.key()),
            _raw(message.value()),
            _headers(message),
            committed,
        )


def _raw(value: str | bytes | None) -> bytes | None:
    return value.encode() if isinstance(value, str) else value


def _headers(message: Message) -> tuple[tuple[str, bytes | None], ...]:
    return tuple((name, _raw(value)) for name, value in headers_of(message) or ())


def read_message(cluster: Cluster, key: TopicPartition, offset: int, timeout_s: float) -> StoredMessage:
    """The message at this offset (*blocking*).

    Raises AdminError if there is none (it names the next one), or if it can't be read.
    """
    topic, partition = key
    low, high = _watermarks(cluster, key, timeout_s)
    place = f"{topic} [{partition}]"
    if offset >= high:
        last = f"it ends at {high}, so the last message is below that" if high > low else "it is empty"
        raise AdminError(f"{place}: offset {offset} is not in the log yet: {last}. Nothing was read.")
    if offset < low:
        raise AdminError(
            f"{place}: offset {offset} is not in the log any more: it begins at {low}. Retention, compaction or a "
            "deletion of records removed what was below. Nothing was read."
        )
    found = _from(cluster, key, offset, "read_committed", timeout_s)
    if found is not None and found.offset() == offset:
        return StoredMessage.of(found, committed=True)
    uncommitted = _from(cluster, key, offset, "read_uncommitted", timeout_s)
    if uncommitted is not None and uncommitted.offset() == offset:
        return StoredMessage.of(uncommitted, committed=False)
    following = found or uncommitted
    next_one = f"The next message is at {following.offset()}" if following else f"None follows up to its end, {high}"
    raise AdminError(
        f"{place}: there is no message at offset {offset}: it was compacted away, or the offset is the marker at the "
        f"end of a transaction. {next_one}."
    )


def _watermarks(cluster: Cluster, key: TopicPartition, timeout_s: float) -> tuple[int, int]:
    topic, partition = key
    info = cluster.topic_info([topic], timeout_s).get(topic)
    if info is None:
        near = arguments.near(topic, cluster.topics(timeout_s))
        raise AdminError(f"there is no topic {topic!r}{near} Nothing was read.")
    if partition >= info.partitions:
        raise AdminError(
            f"topic {topic!r} has no partition {partition}: it has {info.partitions}, from 0 to {info.partitions - 1}. "
            "Nothing was read."
        )
    marks = cluster.watermarks([key], timeout_s).get(key)
    if marks is None:
        raise KafkaUnavailableError(
            f"{topic} [{partition}] has no leader at the moment: nothing was read. Check the brokers, then try again."
        )
    return marks


def _from(cluster: Cluster, key: TopicPartition, offset: int, isolation: str, timeout_s: float) -> Message | None:
    """The first message from this offset on; None: there is none up to the log's end."""
    reader = cluster.data_reader("kafka-marshal-show", {**CONFIG, "isolation.level": isolation})
    until = cluster.runtime.monotonic() + timeout_s
    try:
        reader.assign({key: offset})
        while cluster.runtime.monotonic() < until:
            messages, faults = reader.read(1, SLICE_S)
            if messages:
                return messages[0]  # type: ignore[return-value]  # a message of Kafka's has a place
            if reader.take_ends():
                return None
            for fault in faults:
                _meet(fault, key, offset)
    finally:
        reader.close()
    raise KafkaUnavailableError(
        f"{key[0]} [{key[1]}]: nothing was read at offset {offset} within {timeout_s:g} s, and no fault was reported. "
        "See that the broker that leads it can be reached from here, or wait for longer (--timeout)."
    )


def _meet(fault: DataFault, key: TopicPartition, offset: int) -> None:
    """Raise permanent faults."""
    place = f"{key[0]} [{key[1]}]: offset {offset}"
    match fault.kind:
        case FaultKind.UNREACHABLE:
            return
        case FaultKind.REFUSED:
            raise AuthorizationError(
                f"{place}: the cluster forbids reading it ({fault.message}). {grant('READ', 'topic', [key[0]])}."
            )
        case FaultKind.TOO_LARGE:
            raise AdminError(
                f"{place}: what is there is larger than this command may receive ({fault.message}). Raise "
                "receive.message.max.bytes in the configuration, and see that the members of the group do, too."
            )
        case _:
            raise AdminError(
                f"{place}: can't be read ({fault.message}). If its batch is corrupt, no reader gets past it: see "
                "whether another replica holds it unharmed; else leave it out: kafka-marshal skip GROUP "
                f"{quote(key[0])}:{key[1]}"
            )


class StoredMessages(AdminBase):
    """The method of :class:`~kafka_marshal.admin.Admin` about data topics."""

    def message(self, topic: str, partition: int, offset: int) -> StoredMessage:
        """The message at this offset of a data topic, done or not; nothing is committed anywhere.

        Raises AdminError if there is none (it names the next one) or it can't be read, AuthorizationError,
        KafkaUnavailableError.
        """
        check_name((topic, partition))
        offset = arguments.a_whole("offset", offset, 0)
        return self._have(lambda cluster: read_message(cluster, (topic, partition), offset, self._timeout_s))
