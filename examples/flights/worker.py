"""One worker process: claims partitions, adds up flights, writes each batch in one transaction.

``python -m flights.worker`` is started and ended as ``child`` says; its line is a WorkerSettings.
:func:`work` is what a user of kafka-marshal writes.
"""

from __future__ import annotations

import logging
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from flights.child import FAILED, PARENT_GONE, Tell, run_child
from flights.data import decode
from flights.ledger import write_round
from flights.options import WorkerSettings
from flights.reference import compute
from flights.tables import read_tables
from kafka_marshal import Batch
from kafka_marshal.errors import StaleEpochError
from kafka_marshal.sinks import SqliteSink

__all__ = ["FAILED", "PARENT_GONE", "main", "work"]

#: A batch that is not full is handed over after this.
FILL_S = 0.2


def work(settings: WorkerSettings, tell: Tell) -> None:
    """Claim, process, write: the whole worker."""
    tables = read_tables(Path(settings.tables))
    with SqliteSink(settings.database) as database, settings.join() as marshal:
        signal.signal(signal.SIGTERM, lambda *_: marshal.stop())  # loops end, leases are released with their offsets
        with marshal.consumer([settings.topic]) as consumer:
            for batch in consumer.batches(max_messages=settings.batch_size, timeout=FILL_S):
                tell({"event": "begun", **_names(batch)})
                take_time(batch, settings.pace)
                claim = (batch.topic, batch.partition, batch.epoch, batch.last_offset)
                try:
                    with database.transaction(settings.group_id, [claim]) as tx:
                        last = tx.last_offset(batch.topic, batch.partition)
                        fresh = [m for m in batch.messages if (m.offset() or 0) > last]
                        found = compute((decode(m.value()) for m in fresh), tables)
                        groups = [(*group, *values) for group, values in found.groups.items()]
                        parts = [
                            (batch.topic, batch.partition, batch.epoch, m.offset() or 0, batch.last_offset, len(fresh))
                            for m in fresh[:1]
                        ]
                        done = {(batch.topic, batch.partition): last}
                        write_round(tx, settings.client_id, done, parts, groups, found.quality, {})
                except StaleEpochError as error:
                    # Another worker holds the partition and does this batch, so it is not reported here.
                    tell({"event": "fenced", **_names(batch)})
                    logging.warning("%s", error)
                    continue
                tell({"event": "written", **_names(batch), "skipped": len(batch) - len(fresh)})
                batch.done()


def take_time(batch: Batch, pace: int) -> None:
    """Stands for harder work than adding up: without it two cores would be through before there is much to see."""
    if pace:
        time.sleep(len(batch) / pace)


def _names(batch: Batch) -> Mapping[str, object]:
    return {"ranges": [(batch.partition, batch.first_offset, batch.last_offset)], "epoch": batch.epoch}


def main() -> int:
    """The process, from its first line to its exit status."""
    return run_child(WorkerSettings, work)


if __name__ == "__main__":
    sys.exit(main())
