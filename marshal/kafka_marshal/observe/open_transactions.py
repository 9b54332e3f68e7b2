"""Transactions of Kafka's that have not ended: read_committed readers get nothing of a partition behind one.

confluent-kafka cannot list or describe transactions. So the topic in which the brokers keep them is read, which takes
the right READ on it. What is not read within the time, or may not be, is not named.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from kafka_marshal.errors import MarshalError
from kafka_marshal.observe.rows import span_text
from kafka_marshal.observe.text import local_ms

if TYPE_CHECKING:
    from kafka_marshal.ports import Cluster, TopicPartition

#: Its keys are transactional ids, its values TransactionLogValue of Kafka (versions 0 and 1).
STATE_TOPIC = "__transaction_state"

#: How long it is read (s).
READ_S = 5.0

#: Those that are ongoing, or whose end is not in all partitions yet.
_OPEN_STATES = (1, 2, 3)

#: The topic in which the brokers keep committed offsets.
_OFFSETS_TOPIC = "__consumer_offsets"


class Transaction(NamedTuple):
    """A transaction that has not ended."""

    transactional_id: str
    producer_id: int
    producer_epoch: int
    timeout_ms: int
    #: When it began (ms since 1970, the coordinator's clock).
    since_ms: int
    partitions: frozenset[TopicPartition]


def behind_transactions(
    cluster: Cluster, positions: dict[TopicPartition, int], now_ms: int
) -> dict[TopicPartition, str]:
    """Those of these positions that an open transaction keeps from read_committed readers, in words (*blocking*)."""
    held: dict[TopicPartition, int] = {}
    with suppress(MarshalError):
        ends, stable = cluster.watermarks(positions, READ_S), cluster.committed_watermarks(positions, READ_S)
        held = {
            key: stable[key][1]
            for key, at in positions.items()
            if key in stable and key in ends and stable[key][1] <= at < ends[key][1]
        }
    found = open_transactions(cluster, held)
    return {key: _text(key, at, found.get(key), now_ms) for key, at in held.items()}


def offsets_held_text(cluster: Cluster, group_id: str) -> str:
    """The transaction that most likely has an offset of this group, as one more sentence; "": none was found."""
    with suppress(MarshalError, KeyError):
        partitions = cluster.topic_info([_OFFSETS_TOPIC], READ_S)[_OFFSETS_TOPIC].partitions
        units, number = group_id.encode("utf-16-be"), 0
        for at in range(0, len(units), 2):  # as String.hashCode(): the partition is |hash| mod their number
            number = (31 * number + int.from_bytes(units[at : at + 2], "big")) & 0xFFFFFFFF
        key = _OFFSETS_TOPIC, min(number, 2**32 - number) % 2**31 % partitions
        if (found := open_transactions(cluster, [key]).get(key)) is not None:
            return f" It is most likely {_named(found, local_ms())}"
    return ""


def _named(found: Transaction, now_ms: float) -> str:
    since = span_text(max(0, now_ms - found.since_ms), False)
    return (
        f"transactional id {found.transactional_id!r}, producer {found.producer_id}, epoch {found.producer_epoch}, "
        f"since {since}, transaction.timeout.ms {found.timeout_ms}"
    )


def _text(key: TopicPartition, at: int, transaction: Transaction | None, now_ms: int) -> str:
    tool, place = "kafka-transactions.sh --bootstrap-server ADDRESS", f"--topic {key[0]} --partition {key[1]}"
    named = f"{tool} describe-producers {place} names it"
    if transaction is not None:
        named = _named(transaction, now_ms)
    return (
        f"a transaction is open from offset {at} on ({named}): readers with read_committed get nothing behind it until "
        f"it ends. Start its program again, or wait for its timeout; if it never ends: {tool} abort {place} "
        f"--start-offset {at}"
    )


def open_transactions(cluster: Cluster, partitions: Collection[TopicPartition]) -> dict[TopicPartition, Transaction]:
    """The oldest open transaction of each of these partitions, as far as it can be found (*blocking*)."""
    found: dict[TopicPartition, Transaction] = {}
    if not partitions:
        return found
    with suppress(MarshalError):
        for each in sorted(_read(cluster), key=lambda one: one.since_ms):
            for key in each.partitions.intersection(partitions):
                found.setdefault(key, each)
    return found


def _read(cluster: Cluster) -> Iterator[Transaction]:
    until = time.monotonic() + READ_S
    info = cluster.topic_info([STATE_TOPIC], READ_S).get(STATE_TOPIC)
    marks = cluster.watermarks([(STATE_TOPIC, number) for number in range(info.partitions if info else 0)], READ_S)
    left = {key: high for key, (low, high) in marks.items() if low < high}
    latest: dict[TopicPartition, dict[Any, Any]] = {key: {} for key in left}
    reader = cluster.data_reader("kafka-marshal-transactions", {"isolation.level": "read_uncommitted"})
    try:
        reader.assign({key: marks[key][0] for key in left})
        while left and time.monotonic() < until:
            for message in reader.read(1_000, 0.2)[0]:
                key = (STATE_TOPIC, message.partition() or 0)
                latest[key][message.key()] = message.value()
                if (message.offset() or 0) >= left.get(key, 0) - 1:
                    left.pop(key, None)
    finally:
        reader.close()
    for key, states in latest.items():
        for name, value in states.items() if key not in left else ():
            with suppress(ValueError, IndexError):
                if value is not None and (one := parse(name, value)) is not None:
                    yield one


def parse(key: bytes, value: bytes) -> Transaction | None:
    """A record of the topic; None: the transaction has ended, or the record is of a version that is not known."""
    name, fields = _Fields(key), _Fields(value)
    if name.number(2) != 0 or (version := fields.number(2)) not in (0, 1):
        return None
    fields.is_compact = version == 1
    numbers = [fields.number(size) for size in (8, 2, 4)]
    if fields.number(1) not in _OPEN_STATES:
        return None
    partitions = set()
    for _ in range(fields.count()):
        topic = fields.string()
        partitions |= {(topic, fields.number(4)) for _ in range(fields.count())}
        fields.skip_tags()
    fields.number(8)
    return Transaction(name.string(), numbers[0], numbers[1], numbers[2], fields.number(8), frozenset(partitions))


class _Fields:
    """Reads fields of Kafka's format from bytes."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0
        #: Lengths are varints, one more than they say; structs have tagged fields.
        self.is_compact = False

    def _take(self, size: int) -> bytes:
        self._at += size
        if size < 0 or self._at > len(self._data):
            raise ValueError("the record is cut")
        return self._data[self._at - size : self._at]

    def number(self, size: int) -> int:
        return int.from_bytes(self._take(size), "big", signed=True)

    def _varint(self) -> int:
        found = shift = 0
        while (byte := self._take(1)[0]) & 0x80:
            found, shift = found | (byte & 0x7F) << shift, shift + 7
        return found | byte << shift

    def count(self) -> int:
        """Of an array; none has 0."""
        return max(0, self._varint() - 1 if self.is_compact else self.number(4))

    def string(self) -> str:
        return self._take(self._varint() - 1 if self.is_compact else self.number(2)).decode("utf-8", "replace")

    def skip_tags(self) -> None:
        for _ in range(self._varint() if self.is_compact else 0):
            self._varint()
            self._take(self._varint())
