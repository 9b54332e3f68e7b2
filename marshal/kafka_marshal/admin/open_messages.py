"""The open messages of a group: set aside (parked), waiting for their next try, or acquired. Reading changes nothing.

Progress has passed them, or will, and they are not done all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from kafka_marshal.observe.holes import Holding
from kafka_marshal.observe.point_reads import PointReads, read_at
from kafka_marshal.ports import Cluster, TopicPartition
from rationalizer import decode
from rationalizer.holes import NO_KEY, Hole
from rationalizer.levels import SUPPORTED_LEVEL

State = Literal["parked", "waiting", "acquired"]

#: (topic, partition, offset)
Place = tuple[str, int, int]


@dataclass(frozen=True, slots=True)
class OpenMessage:
    """A message that is not done, though its partition's position may be beyond it."""

    group: str
    topic: str
    partition: int
    offset: int
    #: Where its key lies in the key space; None: the log does not say (a batch).
    key_hash: int | None
    #: How often it was delivered, to all owners together.
    delivery_count: int
    #: "parked": set aside until ``redrive`` or ``discard``. "waiting": its owner, or the next worker, tries it again.
    #: "acquired": in a worker's batch.
    state: State
    #: Why it was set aside: the class of the exception, as a rule. None: it is not parked.
    reason: str | None
    #: The offset of the record that says so, in its partition of the coordination log.
    since: int
    #: The time (ms) of that record, and the client that wrote it. None: it was pruned.
    time: int | None = None
    client: str | None = None
    #: As in Kafka. None: it has none, or it was not read (``gone``, ``unread``), or the message is acquired.
    key: bytes | None = None
    #: The beginning of its value.
    value: bytes | None = None
    #: It is not in the topic any more: retention, compaction or a deletion removed it.
    gone: bool = False
    #: Why it could not be read; "": it was, or need not be.
    unread: str = ""

    @property
    def place(self) -> Place:
        """(topic, partition, offset)"""
        return self.topic, self.partition, self.offset


def state_of(hole: Hole) -> State:
    """The state in the words of users."""
    return "parked" if hole.is_parked else "waiting" if hole.is_free else "acquired"


def messages_of(group_id: str, holdings: Iterable[Holding]) -> Iterator[OpenMessage]:
    """Each message of these holes."""
    for _, topic, partition, hole in holdings:
        key_hash = None if hole.key_hash == NO_KEY else hole.key_hash
        for offset in range(hole.first, hole.last + 1):
            yield OpenMessage(
                *(group_id, topic, partition, offset, key_hash, hole.attempts, state_of(hole), hole.reason, hole.since)
            )


class _Stored(NamedTuple):
    key: bytes | None
    value: bytes | None


#: Bytes of a value that are kept.
_MOST_OF_A_VALUE = 400


def _stored(message: Any) -> _Stored:
    value = message.value()
    return _Stored(message.key(), None if value is None else value[:_MOST_OF_A_VALUE])


def _written(message: Any) -> tuple[int, str] | None:
    """When a record of the log was written, and by which client."""
    try:
        record = decode(message.value(), SUPPORTED_LEVEL)
    except ValueError:  # no record
        return None
    return message.timestamp()[1], record.client_id


def describe(
    cluster: Cluster,
    log: str,
    messages: list[OpenMessage],
    cp_of: Callable[[TopicPartition], int],
    timeout_s: float,
    *,
    keys: bool = True,
    lost: Mapping[TopicPartition, str] = MappingProxyType({}),
) -> list[OpenMessage]:
    """The same, with what Kafka says: since when, by whom, keys and values (*blocking*).

    Messages in a worker's batch are not read; without `keys`, none is. lost: partitions whose position is lost, and
    why: other messages have these offsets now.
    """
    sinces: dict[TopicPartition, set[int]] = {}
    wanted: dict[TopicPartition, list[int]] = {}
    for each in messages:
        key = each.topic, each.partition
        sinces.setdefault((log, cp_of(key)), set()).add(each.since)
        if keys and each.state != "acquired" and key not in lost:
            wanted.setdefault(key, []).append(each.offset)
    written = read_at(cluster, sinces, _written, timeout_s)
    stored = read_at(cluster, wanted, _stored, timeout_s)
    stored.unread |= {key: f"{why}, and other messages have these offsets now" for key, why in lost.items()}
    return [_described(each, written.found.get((log, cp_of(each.place[:2]), each.since)), stored) for each in messages]


def _described(message: OpenMessage, written: tuple[int, str] | None, stored: PointReads[_Stored]) -> OpenMessage:
    time_ms, client = written or (None, None)
    key, value = stored.found.get(message.place, (None, None))
    return replace(
        message,
        time=time_ms,
        client=client,
        key=key,
        value=value,
        gone=message.place in stored.gone,
        unread=stored.unread.get(message.place[:2], "") if message.state != "acquired" else "",
    )
