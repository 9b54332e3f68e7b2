"""Fenced, idempotent writes: rows, offsets and epoch in one transaction.

>>> sink = SqliteSink("results.db")                                              # doctest: +SKIP
>>> with sink.transaction("delays", [("flights", 3, epoch, 1200)]) as tx:        # doctest: +SKIP
...     last = tx.last_offset("flights", 3)
...     tx.executemany("INSERT INTO ...", [row for offset, row in rows if offset > last])

In a handler of ``consumer.run``, where records of a partition end in any order:

>>> with sink.record() as tx:                                                    # doctest: +SKIP
...     if not tx.is_done:
...         tx.execute("INSERT INTO ...", row)

On a connection of the program's own, in a transaction that it begins and commits:

>>> with connection.transaction(), fence(connection, batch) as tx:               # doctest: +SKIP
...     connection.cursor().executemany("INSERT INTO ...", [row(m) for m in tx.new])
"""

from kafka_marshal.sinks.base import FencedMessages, FencedSink, RecordTransaction, SinkTransaction, Written
from kafka_marshal.sinks.connection import ConnectionSink, FenceBlock, fence, fence_tables
from kafka_marshal.sinks.delta import DeltaSink, DeltaTransaction, DeltaUndo
from kafka_marshal.sinks.postgres import PostgresSink
from kafka_marshal.sinks.sqlite import SqliteSink

__all__ = [
    "ConnectionSink",
    "DeltaSink",
    "DeltaTransaction",
    "DeltaUndo",
    "FenceBlock",
    "FencedMessages",
    "FencedSink",
    "PostgresSink",
    "Written",
    "RecordTransaction",
    "SqliteSink",
    "SinkTransaction",
    "fence",
    "fence_tables",
]
