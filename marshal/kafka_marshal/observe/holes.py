"""The holes of a group: offsets that progress has passed and that are open all the same; and single messages, read.

Messages are read by their offsets: far fewer than there are in the log.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, NamedTuple

from kafka_marshal.errors import KafkaUnavailableError, grant
from kafka_marshal.ports import Cluster, DataFault, DataReader, FaultKind, TopicPartition
from kafka_marshal.types import T
from rationalizer.routing import route_group

if TYPE_CHECKING:
    from rationalizer import World
    from rationalizer.holes import Hole


class PlacedHole(NamedTuple):
    """A hole, and where it is."""

    cp: int
    topic: str
    partition: int
    hole: Hole

    @property
    def key(self) -> TopicPartition:
        """(topic, partition)"""
        return self.topic, self.partition


def holdings_of(worlds: Mapping[int, World], group_id: str) -> list[PlacedHole]:
    """All holes of a group, sorted by topic, partition and offset."""
    home = route_group(group_id, len(worlds))
    marked = (world.group(group_id) for world in (worlds[home], *worlds.values()))
    group = next((each for each in marked if each is not None), None)
    if group is not None:
        found = [
            PlacedHole(home, topic, partition, hole)
            for topic, partition, kept in group.all_progress()
            for hole in kept.progress.open
        ]
    else:
        found = [
            PlacedHole(cp, lease.topic, lease.partition, hole)
            for cp, world in worlds.items()
            for lease in world.leases()
            if lease.group_id == group_id
            for hole in lease.progress.open
        ]
    return sorted(found, key=lambda each: (each.topic, each.partition, each.hole.first))


# -- single messages -----------------------------------------------------------------------------------------


#: A gap of at most this many offsets is read through; for a larger one the reader seeks.
READ_THROUGH = 500

RUN = 500
SLICE_S = 0.2

#: Of a transaction that was aborted, too: what was delivered is shown.
CONFIG: dict[str, object] = {"isolation.level": "read_uncommitted", "queued.min.messages": RUN}


@dataclass(slots=True)
class PointReads(Generic[T]):
    """What was found at the offsets that were asked for."""

    #: (topic, partition, offset) → what `take` made of the message.
    found: dict[tuple[str, int, int], T] = field(default_factory=dict)
    #: Offsets without a message: removed by retention or compaction, or of no message.
    gone: set[tuple[str, int, int]] = field(default_factory=set)
    #: Partitions that could not be read, and why.
    unread: dict[TopicPartition, str] = field(default_factory=dict)


def read_at(
    cluster: Cluster,
    wanted: Mapping[TopicPartition, Iterable[int]],
    take: Callable[[Any], T],
    timeout_s: float,
) -> PointReads[T]:
    """Read the messages at these offsets (*blocking*). take: what is to be kept of each.

    Raises KafkaUnavailableError if nothing was read for timeout_s.
    """
    reads: PointReads[T] = PointReads()
    marks = cluster.watermarks(sorted(key for key in wanted if wanted[key]), timeout_s)
    left: dict[TopicPartition, deque[int]] = {}
    for key in sorted(wanted):
        offsets = sorted(set(wanted[key]))
        if offsets and key not in marks:
            reads.unread[key] = "the topic does not exist any more, or the partition has no leader"
            continue
        inside = [offset for offset in offsets if marks[key][0] <= offset < marks[key][1]]
        reads.gone.update((*key, offset) for offset in set(offsets).difference(inside))
        if inside:
            left[key] = deque(inside)
    if left:
        reader = cluster.data_reader("kafka-marshal-open-messages", CONFIG)
        try:
            _read(cluster, reader, left, reads, take, timeout_s)
        finally:
            reader.close()
    return reads


def _read(
    cluster: Cluster,
    reader: DataReader,
    left: dict[TopicPartition, deque[int]],
    reads: PointReads[T],
    take: Callable[[Any], T],
    timeout_s: float,
) -> None:
    monotonic = cluster.runtime.monotonic
    reader.assign({key: offsets[0] for key, offsets in left.items()})
    until = monotonic() + timeout_s
    while left:
        messages, faults = reader.read(RUN, SLICE_S)
        reached: dict[TopicPartition, int] = {}
        for message in messages:
            key, at = _place_of(message)
            reached[key] = at + 1
            offsets = left.get(key)
            while offsets and offsets[0] <= at:
                offset = offsets.popleft()
                if offset == at:
                    reads.found[(*key, offset)] = take(message)
                else:
                    reads.gone.add((*key, offset))
        for key, end in reader.take_ends().items():
            reached[key] = max(end, reached.get(key, 0))
            while key in left and left[key] and left[key][0] < end:
                reads.gone.add((*key, left[key].popleft()))
        for fault in faults:
            _meet(fault, left, reads)
        _go_on(reader, left, reached)
        if reached:
            until = monotonic() + timeout_s
        elif monotonic() >= until:
            raise KafkaUnavailableError(
                f"nothing was read of {', '.join(f'{topic} [{partition}]' for topic, partition in list(left)[:4])} for "
                f"{timeout_s:g} s. Nothing was changed. Check that the brokers run, then try again."
            )


def _place_of(message: Any) -> tuple[TopicPartition, int]:
    return (message.topic(), message.partition()), message.offset()


def _meet(fault: DataFault, left: dict[TopicPartition, deque[int]], reads: PointReads[T]) -> None:
    """A fault that stays ends the partitions that it is about."""
    if fault.kind is FaultKind.UNREACHABLE:
        return
    for key in [key for key in left if fault.topic in (None, key[0]) and fault.partition in (None, key[1])]:
        needs = f". {grant('READ', 'topic', [key[0]])}" if fault.kind is FaultKind.REFUSED else ""
        reads.unread[key] = fault.message + needs
        del left[key]


def _go_on(reader: DataReader, left: dict[TopicPartition, deque[int]], reached: Mapping[TopicPartition, int]) -> None:
    """Continue behind what was read: further on where the next offset is far away."""
    done = [key for key in reached if key in left and not left[key]]
    for key in done:
        del left[key]
    reader.unassign([*done, *(key for key in reached if key not in left and key not in done)])
    far = {key: left[key][0] for key, at in reached.items() if key in left and left[key][0] - at > READ_THROUGH}
    if far:
        reader.assign(far)
