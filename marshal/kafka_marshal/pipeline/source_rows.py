"""Messages as Arrow batches, column by column, without a Python object per row."""

from __future__ import annotations

from collections.abc import Sequence
from operator import methodcaller

import pyarrow as pa

from kafka_marshal.adapters.kafka.range_reader import StoredMessage
from kafka_marshal.adapters.message import headers_of
from kafka_marshal.runtime import LEAST_STAMP_MS, MOST_STAMP_MS

_FIELDS = [
    pa.field("key", pa.binary()),
    pa.field("value", pa.binary()),
    pa.field("topic", pa.string()),
    pa.field("partition", pa.int32()),
    pa.field("offset", pa.int64()),
    pa.field("timestamp", pa.timestamp("us", tz="UTC")),
    pa.field("timestampType", pa.int32()),
    pa.field("epoch", pa.int64()),
]
_HEADERS = pa.field("headers", pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())])))

_PLAIN = pa.schema(_FIELDS)
_WITH_HEADERS = pa.schema([*_FIELDS, _HEADERS])

_key = methodcaller("key")
_value = methodcaller("value")
_offset = methodcaller("offset")
_timestamp = methodcaller("timestamp")


def to_arrow(
    messages: Sequence[StoredMessage], topic: str, partition: int, epoch: int, *, headers: bool
) -> pa.RecordBatch:
    """One batch of messages, all of one partition, in the source's columns.

    timestamp: null if there is none or Spark can't represent it.
    """
    count = len(messages)
    # (type, milliseconds); type 0: the message has none.
    given = list(map(_timestamp, messages))
    stamps = [stamp if kind and LEAST_STAMP_MS <= stamp <= MOST_STAMP_MS else None for kind, stamp in given]
    columns = [
        pa.array(list(map(_key, messages)), pa.binary()),
        pa.array(list(map(_value, messages)), pa.binary()),
        pa.repeat(pa.scalar(topic, pa.string()), count),
        pa.repeat(pa.scalar(partition, pa.int32()), count),
        pa.array(list(map(_offset, messages)), pa.int64()),
        pa.array(stamps, pa.timestamp("ms", tz="UTC")).cast(pa.timestamp("us", tz="UTC")),
        pa.array([kind - 1 for kind, _ in given], pa.int32()),  # Kafka's numbers, as in Spark's Kafka source
        pa.repeat(pa.scalar(epoch, pa.int64()), count),
    ]
    if not headers:
        return pa.RecordBatch.from_arrays(columns, schema=_PLAIN)
    columns.append(pa.array([_headers(message) for message in messages], _HEADERS.type))
    return pa.RecordBatch.from_arrays(columns, schema=_WITH_HEADERS)


def _headers(message: StoredMessage) -> list[dict[str, object]] | None:
    """Headers as in Spark's Kafka source: None if there are none."""
    found = headers_of(message)
    return [{"key": name, "value": value} for name, value in found] if found else None
