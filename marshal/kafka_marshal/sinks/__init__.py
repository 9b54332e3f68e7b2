"""Fenced, idempotent writes: rows, offsets and epoch in one transaction.

>>> sink = SqliteSink("results.db")                                              # doctest: +SKIP
>>> with sink.transaction("delays", [("flights", 3, epoch, 1200)]) as tx:        # doctest: +SKIP
...     last = tx.last_offset("flights", 3)
...     tx.executemany("INSERT INTO ...", [row for offset, row in rows if offset > last])

In a handler of ``consumer.run``, where records of a partition end in any order:

>>> with sink.record() as tx:                                                    # doctest: +SKIP
...     if not tx.is_done:
...         tx.execute("INSERT INTO ...", row)
"""

from kafka_marshal.sinks.base import FencedSink, RecordTransaction, SinkTransaction, Written
from kafka_marshal.sinks.delta import DeltaSink, DeltaTransaction, DeltaUndo
from kafka_marshal.sinks.postgres import PostgresSink
from kafka_marshal.sinks.sqlite import SqliteSink

__all__ = [
    "DeltaSink",
    "DeltaTransaction",
    "DeltaUndo",
    "FencedSink",
    "PostgresSink",
    "Written",
    "RecordTransaction",
    "SqliteSink",
    "SinkTransaction",
]
