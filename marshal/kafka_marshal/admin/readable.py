"""Past what can't be read: a batch that a disk or a client has spoilt stops whoever reads it, for ever.

Where a corrupt batch ends nobody can tell from its bytes. So reading is tried further up, in steps that double, until
something comes, and then halved back to the first offset from which it does. A batch is read as a whole or not at all.
"""

from __future__ import annotations

from typing import Any, cast

from kafka_marshal.clock import is_moment
from kafka_marshal.errors import AdminError
from kafka_marshal.ports import Cluster, FaultKind, TopicPartition

__all__ = ["first_readable", "first_with_a_moment"]

#: How long one try may take before the partition is said to be out of reach.
TRY_S = 10.0

SLICE_S = 0.2

#: Messages of one read.
STEP = 1_000

#: What a read of spoilt bytes ends in: librdkafka may take some of them for an offset, and be refused there.
FAILED = (FaultKind.OTHER, FaultKind.OUT_OF_RANGE)

#: Spoilt bytes are to be noticed in uncompressed batches, too.
CONFIG: dict[str, object] = {"check.crcs": True}


def first_readable(cluster: Cluster, key: TopicPartition, first: int, end: int) -> int:
    """The first offset from ``first`` on at which reading succeeds; ``end``, the log's, where none does (*blocking*).

    Raises AdminError where nothing is answered.
    """
    if first >= end or _can_read(cluster, key, first):
        return min(first, end)
    bad, step = first, 1
    while (good := min(bad + step, end)) < end and not _can_read(cluster, key, good):
        bad, step = good, 2 * step
    while good - bad > 1:
        middle = (bad + good) // 2
        if _can_read(cluster, key, middle):
            good = middle
        else:
            bad = middle
    return good


def first_with_a_moment(cluster: Cluster, key: TopicPartition, first: int, end: int) -> tuple[int, list[int]]:
    """The first record's offset from first on whose timestamp Spark can represent, and the timestamps before (ms).

    ``end`` if there is none (*blocking*). A record that can't be read ends the search at its offset.
    """
    wrong: list[int] = []
    reader = cluster.data_reader("kafka-marshal-skip", CONFIG)
    try:
        reader.assign({key: first})
        for _ in range(int(TRY_S / SLICE_S)):
            messages, faults = reader.read(STEP, SLICE_S)
            for message in messages:
                kind, stamp = cast("Any", message).timestamp()  # of the in-memory log, too
                if not kind or is_moment(stamp):
                    return cast("int", message.offset()), wrong
                wrong.append(stamp)
                first = cast("int", message.offset()) + 1
            if faults or first >= end or reader.take_ends():
                break
    finally:
        reader.close()
    return first, wrong


def _can_read(cluster: Cluster, key: TopicPartition, offset: int) -> bool:
    # A reader of its own: what one says of an offset may come when it reads at the next.
    reader = cluster.data_reader("kafka-marshal-skip", CONFIG)
    try:
        reader.assign({key: offset})
        for _ in range(int(TRY_S / SLICE_S)):
            messages, faults = reader.read(1, SLICE_S)
            if messages or reader.take_ends():
                return True
            if any((x.topic, x.partition) == key and x.kind in FAILED for x in faults):
                return False
    finally:
        reader.close()
    raise AdminError(
        f"{key[0]} [{key[1]}]: nothing was read at offset {offset} within {TRY_S:g} s, and no fault was told. Nothing "
        "was changed. Can the broker that leads it be reached from here? Is a record larger than "
        "receive.message.max.bytes?"
    )
