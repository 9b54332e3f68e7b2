"""Many workers on one partition, each on a batch at a time; each row once in SQLite, bad messages set aside.

    python examples/shared_worker.py localhost:9092 pictures thumbnails.db

Start it several times, kill some with -9. What fails is seen with `kafka-marshal open-messages thumbnails`, and
comes again with `kafka-marshal redrive thumbnails --all` (docs/sharing.md, docs/open-messages.md).
"""

from __future__ import annotations

import signal
import sys

from kafka_marshal import Batch, Batches, Consumer, Marshal
from kafka_marshal.sinks import SqliteSink


def work(consumer: Consumer, batch: Batch, sink: SqliteSink) -> None:
    """Handle each message by itself; what can't be handled is set aside, and the rest continues."""
    with sink.records(batch) as tx:  # another member may have written some of them before it died
        tx.execute("CREATE TABLE IF NOT EXISTS rows (place INTEGER, at INTEGER, size INTEGER)")
        for message in tx.new:
            try:
                row = message.partition(), message.offset(), int(message.value() or b"")
            except ValueError as error:
                consumer.park(message, type(error).__name__)  # no row: it comes again when it is redriven
            else:
                tx.execute("INSERT INTO rows VALUES (?, ?, ?)", row)
    batch.done()


def main(servers: str, topic: str, database: str) -> None:
    """Work until SIGTERM or Ctrl-C."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # while it starts it holds nothing
    with Marshal(servers, group_id="thumbnails") as marshal, SqliteSink(database) as sink:
        for name in (signal.SIGTERM, signal.SIGINT):
            signal.signal(name, lambda *_: marshal.stop())
        with marshal.consumer([topic], mode=Batches()) as consumer:
            for batch in consumer.batches(max_messages=500, timeout=1.0):
                work(consumer, batch, sink)


if __name__ == "__main__":
    main(*sys.argv[1:4])
