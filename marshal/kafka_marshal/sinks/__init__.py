"""Fenced, idempotent writes: rows, last offset and epoch in one transaction (C9).

>>> sink = SqliteSink("results.db")                                              # doctest: +SKIP
>>> with sink.transaction("delays", [("flights", 3, epoch, 1200)]) as tx:        # doctest: +SKIP
...     last = tx.last_offset("flights", 3)
...     tx.executemany("INSERT INTO ...", [row for offset, row in rows if offset > last])
"""

from kafka_marshal.sinks.base import FencedSink, Progress, Transaction
from kafka_marshal.sinks.postgres import PostgresSink
from kafka_marshal.sinks.sqlite import SqliteSink

__all__ = ["FencedSink", "PostgresSink", "Progress", "SqliteSink", "Transaction"]
