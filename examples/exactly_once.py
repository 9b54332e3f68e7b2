"""Reads one topic, and writes each message to another in capitals: exactly once for read_committed readers.

    python examples/exactly_once.py localhost:9092 flights delays

Start it several times, kill some with -9, move the group back and forth: docs/transactions.md says what holds.
"""

from __future__ import annotations

import logging
import signal
import sys

from kafka_marshal import Batch, Consumer, LeaseLostError, Marshal, TransactionError, Transactions


def copy(consumer: Consumer, batch: Batch, target: str) -> None:
    """One transaction. What fails for a while comes again by itself, in order; anything else ends the program."""
    try:
        with consumer.transaction(batch) as tx:
            for message in batch:
                tx.produce(target, value=(message.value() or b"").upper(), key=message.key())
    except TransactionError as error:
        if not error.retry:
            raise
        logging.warning("%r comes again: %s", batch, error)
    except LeaseLostError as error:
        logging.warning("%r comes again, here or at another worker: %s", batch, error)


def main(servers: str, source: str, target: str) -> None:
    """Work until SIGTERM or Ctrl-C."""
    logging.basicConfig(level=logging.INFO)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # while it starts it holds nothing
    with Marshal(servers, group_id=f"{source}-to-{target}") as marshal:
        for name in (signal.SIGTERM, signal.SIGINT):
            signal.signal(name, lambda *_: marshal.stop())
        with marshal.consumer([source], exactly_once=Transactions()) as consumer:
            for batch in consumer.batches(max_messages=500, timeout=0.1):
                copy(consumer, batch, target)


if __name__ == "__main__":
    main(*sys.argv[1:4])
