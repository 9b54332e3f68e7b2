"""One worker process: claims partitions, adds up flights, writes each batch in one transaction.

``python -m kafka_marshal.demo.worker`` reads one line of JSON from its standard input (WorkerSettings) and
works until SIGTERM, or until that pipe closes because its parent is gone, however it went. On its standard output it
says which batch it has in hand; that is for the one who chooses the moment to kill it, nothing is concluded from it.

:func:`work` is what a user of kafka-marshal writes; the rest is how a process is started and ended.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kafka_marshal import Batch, Marshal, MarshalError
from kafka_marshal.demo.errors import FencedError
from kafka_marshal.demo.options import FAILURE, WorkerSettings
from kafka_marshal.demo.sink import Sink

__all__ = ["FAILED", "PARENT_GONE", "main", "work"]

#: Exit statuses: an error (said on standard error), and the parent's end.
FAILED = 1
PARENT_GONE = 4

#: A batch that is not full is handed over after this.
FILL_S = 0.2

Tell = Callable[[Mapping[str, object]], None]


def work(settings: WorkerSettings, tell: Tell) -> None:
    """Claim, process, write: the whole worker."""
    with (
        Sink(Path(settings.database), settings.client_id) as database,
        Marshal(
            settings.bootstrap,
            group_id=settings.group_id,
            client_id=settings.client_id,
            topic=settings.coordination,
            heartbeat_interval_ms=settings.heartbeat_interval_ms,
            config=settings.config,
        ) as marshal,
    ):
        signal.signal(signal.SIGTERM, lambda *_: marshal.stop())  # loops end, leases are released with their offsets
        with marshal.consumer([settings.topic]) as consumer:
            for batch in consumer.batches(max_messages=settings.batch_size, timeout=FILL_S):
                tell({"event": "begun", **_names(batch)})
                take_time(batch, settings.pace)
                try:
                    with database.transaction() as tx:
                        last = tx.fence(batch.topic, batch.partition, batch.epoch)
                        written = tx.write(m for m in batch.messages if (m.offset() or 0) > last)
                        tx.set_last(batch.topic, batch.partition, batch.last_offset)
                except FencedError as error:
                    # Somebody else holds the partition and does this batch: it is not ours to report.
                    tell({"event": "fenced", **_names(batch)})
                    logging.warning("%s", error)
                    continue
                tell({"event": "written", **_names(batch), "skipped": len(batch) - written})
                batch.done()


def take_time(batch: Batch, pace: int) -> None:
    """Stands for harder work than adding up: without it two cores would be through before there is much to see."""
    if pace:
        time.sleep(len(batch) / pace)


def _names(batch: Batch) -> dict[str, object]:
    return {
        "partition": batch.partition,
        "first": batch.first_offset,
        "last": batch.last_offset,
        "epoch": batch.epoch,
    }


def main() -> int:
    """The process, from its first line to its exit status."""
    # Ctrl-C goes to the parent, which ends its workers in order.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    settings = WorkerSettings(**json.loads(_first_line()))
    threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()
    name = settings.client_id.replace("%", "%%")
    logging.basicConfig(format=f"%(asctime)s {name} %(levelname)s %(name)s: %(message)s", level=logging.INFO)
    # Told before there is a Marshal to stop: there is nothing to release either.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    try:
        work(settings, _tell)
    except MarshalError as error:
        logging.error("%s", error)
        why = str(error)
    except Exception as error:
        logging.exception("The batch in hand is not done; another worker gets it.")
        why = f"{type(error).__name__}: {error}. The batch in hand is not done; another worker gets it"
    else:
        return 0
    # To the parent itself, too: the log may lie on a disk that is full.
    _tell({"event": FAILURE, "why": why})
    return FAILED


def _first_line() -> bytes:
    """Unbuffered: the thread that watches the pipe must find the rest of it."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(sys.stdin.fileno(), 1)
        if not byte:
            sys.exit(PARENT_GONE)
        line += byte
    return line


def _end_with_parent() -> None:
    """Nothing more is ever sent: the pipe ends when the parent does."""
    os.read(sys.stdin.fileno(), 1)
    # What is in hand is neither written nor done, so nothing is lost: there is nobody to wait for.
    os._exit(PARENT_GONE)


def _tell(event: Mapping[str, Any]) -> None:
    """One line, at once: a killed process keeps what it told."""
    os.write(sys.stdout.fileno(), json.dumps(event).encode() + b"\n")


if __name__ == "__main__":
    sys.exit(main())
