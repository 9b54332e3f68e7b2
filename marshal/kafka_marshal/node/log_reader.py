"""Reads a range of a topic once: where its partitions begin and end, and the records between (*blocking*)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from kafka_marshal.errors import AuthorizationError, KafkaUnavailableError, TopicChangedError
from kafka_marshal.node.monitored_tail import MonitoredTail
from kafka_marshal.ports import Cluster, FaultKind, LogEntry, TailBatch
from kafka_marshal.rights import grant

#: A wait for records is cut into slices of this length (s), for Ctrl-C and to report progress.
SLICE_S = 0.2


def bounds(cluster: Cluster, topic: str, timeout_s: float) -> dict[int, tuple[int, int]] | None:
    """Log start and high watermark of each partition, ascending; None if there is no such topic.

    Raises KafkaUnavailableError, also if a partition has no leader.
    """
    info = cluster.topic_info([topic], timeout_s).get(topic)
    if info is None:
        return None
    marks = cluster.watermarks([(topic, partition) for partition in range(info.partitions)], timeout_s)
    missing = [partition for partition in range(info.partitions) if (topic, partition) not in marks]
    if missing:
        raise KafkaUnavailableError(
            f"partition(s) {missing} of {topic!r} have no leader at the moment: what they hold can't be read. Try "
            "again when the brokers that hold them are back."
        )
    return {partition: marks[topic, partition] for partition in range(info.partitions)}


def read_range(
    cluster: Cluster,
    topic: str,
    ranges: Mapping[int, tuple[int, int]],
    timeout_s: float,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> Iterator[tuple[int, list[LogEntry]]]:
    """Runs of records of one partition each, ascending, from first to below end of each.

    progress: called with (offsets passed, offsets in all). Raises KafkaUnavailableError if nothing came for timeout_s,
    and what judge raises.
    """
    waiting = {partition: end for partition, (first, end) in sorted(ranges.items()) if first < end}
    if not waiting:
        return
    total = sum(end - ranges[partition][0] for partition, end in waiting.items())
    passed = dict.fromkeys(waiting, 0)
    trouble = ""
    tail = MonitoredTail(cluster, topic, {partition: ranges[partition][0] for partition in waiting}, waiting)
    try:
        until = cluster.runtime.monotonic() + timeout_s
        while waiting:
            batch = tail.read(SLICE_S)
            trouble = judge(topic, batch) or trouble
            for partition, entries in batch.records.items():
                end = waiting.get(partition)
                if end is None:
                    continue
                position = entries[-1][0] + 1
                passed[partition] = min(position, end) - ranges[partition][0]
                if position >= end:
                    del waiting[partition]
                    entries = [entry for entry in entries if entry[0] < end]
                if entries:
                    yield partition, entries
            for partition, end in batch.ends.items():
                if end >= waiting.get(partition, end + 1):
                    del waiting[partition]
            if batch.records or batch.ends:
                until = cluster.runtime.monotonic() + timeout_s
            elif cluster.runtime.monotonic() > until:
                raise KafkaUnavailableError(
                    f"{topic!r}: nothing read for {timeout_s:g} s, and partition(s) {sorted(waiting)} are not read to "
                    f"their end{trouble}. Is the broker that leads them reachable?"
                )
            if progress is not None:
                progress(sum(passed.values()), total)
    finally:
        tail.close()


def judge(topic: str, batch: TailBatch) -> str:
    """Raise the faults that end reading; returns the text of the last other one (they pass), in parentheses.

    Raises TopicChangedError if the log does not have the position (any more), AuthorizationError, and
    KafkaUnavailableError if the client can't continue.
    """
    trouble = ""
    for fault in batch.faults:
        where = f"{topic!r}" if fault.partition is None else f"{topic!r} partition {fault.partition}"
        match fault.kind:
            case FaultKind.OUT_OF_RANGE | FaultKind.UNKNOWN_TOPIC:
                raise TopicChangedError(
                    f"{where} was cut, deleted or recreated while it was read ({fault.message}). What was read before "
                    "is of the old log. Do it again"
                )
            case FaultKind.REFUSED:
                raise AuthorizationError(f"{where} can't be read: {fault.message}. {grant('READ', 'topic', [topic])}")
            case FaultKind.FATAL:
                raise KafkaUnavailableError(f"{where}: the Kafka client gave up ({fault.message}). Do it again")
            case _:
                trouble = f" ({fault.message})"
    return trouble
