"""One worker of the campaign, as a user writes one: it counts by key, and its state is saved at checkpoints."""

from __future__ import annotations

import json
import signal
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from kafka_marshal import (
    Checkpoint,
    CheckpointPolicy,
    GroupConsumer,
    LeaseLostError,
    Marshal,
    Message,
    Restore,
    Retry,
)
from kafka_marshal.checkpoints import Folder
from kafka_marshal.errors import StaleEpochError
from kafka_marshal.sinks import SqliteSink
from kafka_marshal.testing.fail_points import Doom
from tests.campaigns.chaos.lines import Pen
from tests.campaigns.chaos.worker import Job as PlainJob
from tests.campaigns.chaos.worker import lived
from tests.campaigns.checkpoints.check import Counts, add

__all__ = ["KINDS", "POINTS", "WORKER", "Job", "counted", "key_of", "policy_of", "run", "undo"]

#: This module, for the process that starts workers.
WORKER = "tests.campaigns.checkpoints.worker"

#: Kind → whose fail points (none of them: a campaign chooses from POINTS).
KINDS = {"loop": "at least once", "batches": "at least once", "run": "at least once"}

#: Where a worker dies.
POINTS = ("handling", "saving", "saved", "restoring", "restored", "completed")

#: Shares of calls of on_checkpoint that raise before and after they have saved, and of those that return a Future.
RAISES, IN_BACKGROUND = 0.04, 0.3

#: Share of first tries in ``run`` that raise.
FAILING = 0.02

#: The rows that a sink has: without a constraint, so that a row that is there twice is seen.
TABLE = "CREATE TABLE IF NOT EXISTS counted (part INTEGER, place INTEGER, key TEXT)"
ROW = "INSERT INTO counted VALUES (?, ?, ?)"

#: Shares of messages after which the program begins a checkpoint.
BEGINS = 0.001


@dataclass(frozen=True, slots=True)
class Job(PlainJob):
    """The task of one worker process."""

    #: The folder of states.
    states: str = ""
    hold: bool = False
    every_s: float = 1.0
    session_timeout_ms: int = 1_500


def undo(tx: Any, piece: Any, position: int, ranges: Sequence[tuple[int, int]]) -> None:
    """Take back the rows beyond, but for those that stay done."""
    kept = "".join(f" AND NOT (place BETWEEN {lo} AND {hi})" for lo, hi in ranges)
    tx.execute(TABLE)
    tx.execute(f"DELETE FROM counted WHERE part = ? AND place >= ?{kept}", (piece.partition, position))


def counted(database: str, partition: int) -> Counts:
    """The rows of a partition, counted."""
    found: Counts = {}
    with closing(sqlite3.connect(database, timeout=30)) as connection:
        for key, offset in connection.execute("SELECT key, place FROM counted WHERE part = ?", (partition,)):
            add(found, key, offset)
    return found


def policy_of(every_s: float, hold: bool) -> CheckpointPolicy:
    """How the group takes checkpoints."""
    return CheckpointPolicy(every=every_s, keep=8, drain=2.0, timeout=4.0, hold=hold)


class _RaisedError(Exception):
    """A handler that fails."""


def key_of(message: Message) -> str:
    """Its key as text."""
    return (message.key() or b"").decode()


class _Worker:
    def __init__(self, job: Job) -> None:
        self.job = job
        self.pen = Pen(Path(job.out))
        self.rng = Random(job.seed)
        self.doom = Doom(job.doom, None, job.times, lambda: self.pen.write("die", job.doom), job.linger_s)
        self.states = Folder(job.states)
        self.sink = SqliteSink(job.database, name="counts") if job.database else None
        self.pool = ThreadPoolExecutor(2)
        self.lock = threading.Lock()
        #: Partition → the fencing token of what it counts, and the counts.
        self.counts: dict[int, tuple[int, Counts]] = {}

    def live(self) -> None:
        """Run from the Marshal's constructor to the end."""
        job = self.job
        with Marshal(
            job.bootstrap,
            group_id=job.group,
            client_id=job.client_id,
            topic=job.coordination,
            heartbeat_interval_ms=job.heartbeat_interval_ms,
        ) as marshal:
            signal.signal(signal.SIGTERM, lambda *_: marshal.stop())
            with marshal.group_consumer(
                [job.topic],
                session_timeout_ms=job.session_timeout_ms,
                checkpoints=policy_of(job.every_s, job.hold),
                on_checkpoint=self.save,
                on_restore=self.restore,
                on_completed=self.completed,
            ) as consumer:
                _WORK[job.kind](self, consumer)
                self.pen.write("stops")
            for alarm in marshal.alarms:
                self.pen.write("alarm", type(alarm).__name__, str(alarm))

    # What the library calls.

    def save(self, checkpoint: Checkpoint) -> Future[None] | None:
        """on_checkpoint."""
        self.doom.at("saving")
        partitions = [piece.partition for piece in checkpoint.pieces]
        self.pen.write("cut", checkpoint.id, partitions, checkpoint.leaving)
        draw = self.rng.random()
        with self.lock:
            copies = {number: json.dumps(self.counts[number][1]).encode() for number in partitions}

        def keep() -> None:
            if draw > 1 - RAISES / 2:
                self.pen.write("store error", checkpoint.id, partitions)
                raise OSError("no space left on device")
            for piece in checkpoint.pieces:
                self.states.save(checkpoint.id, piece, copies[piece.partition])
            if draw > 1 - RAISES:
                self.pen.write("store error", checkpoint.id, partitions)
                raise OSError("no space left on device")
            self.pen.write("saved", checkpoint.id, partitions)
            self.doom.at("saved")
            self.states.collect(checkpoint)

        if draw < IN_BACKGROUND:
            return self.pool.submit(keep)
        keep()
        return None

    def restore(self, restore: Restore) -> None:
        """on_restore."""
        self.doom.at("restoring")
        if self.sink is not None:
            self.sink.restore(restore, undo)
        for piece in restore.pieces:
            found: Counts = json.loads(self.states.load(piece) or b"{}")
            position = [piece.position, [list(each) for each in piece.ranges], [each[2] for each in piece.states]]
            of = [piece.partition, piece.epoch, restore.why, restore.checkpoint]
            self.pen.write("restored", *of, *position, found, self.rows(piece.partition))
            with self.lock:
                self.counts[piece.partition] = (piece.epoch, found)
        self.doom.at("restored")

    def rows(self, partition: int) -> Counts | None:
        """What the sink has of a partition; None: there is no sink."""
        return counted(self.job.database, partition) if self.sink is not None else None

    def completed(self, checkpoint: int) -> None:
        """on_completed."""
        self.pen.write("completed", checkpoint)
        self.doom.at("completed")

    # Kinds of work.

    def handle(self, message: Message) -> None:
        """Count one message: what changes the state comes last."""
        partition, offset = message.partition() or 0, message.offset() or 0
        with self.lock:
            epoch, _ = self.counts[partition]
        time.sleep(self.rng.random() * self.job.handling_s)
        self.doom.at("handling")
        with self.lock:
            now, counts = self.counts[partition]
            if now != epoch:
                self.pen.write("torn", partition, epoch, now, offset)
            self.pen.write("handled", partition, now, offset)
            add(counts, key_of(message), offset)

    def loop(self, consumer: GroupConsumer) -> None:
        """The plain loop."""
        for message in consumer:
            self.handle(message)
            if self.rng.random() < BEGINS:
                consumer.checkpoint()

    def batches(self, consumer: GroupConsumer) -> None:
        """Batches, which are done as a whole."""
        for batch in consumer.batches(max_messages=20, timeout=0.05):
            try:
                if self.sink is not None:
                    with self.sink.records(batch) as tx:
                        tx.execute(TABLE)
                        tx.executemany(ROW, [(m.partition(), m.offset(), key_of(m)) for m in tx.new])
            except (StaleEpochError, LeaseLostError) as error:  # it comes again, here or at another member
                self.pen.write("refused", type(error).__name__, str(error))
                continue
            for message in batch:
                self.handle(message)
            batch.done()

    def run(self, consumer: GroupConsumer) -> None:
        """``consumer.run(handle, order="key")``, with tries that raise."""
        tried: Counter[tuple[int, int, int]] = Counter()

        def handle(message: Message) -> None:
            at = (message.partition() or 0, message.offset() or 0)
            with self.lock:
                tried[(*at, self.counts[at[0]][0])] += 1
                raises = tried[(*at, self.counts[at[0]][0])] == 1 and self.rng.random() < FAILING
            if raises:
                raise _RaisedError
            if self.sink is not None:
                with self.sink.record(message) as tx:
                    if not tx.is_done:
                        tx.execute(TABLE)
                        tx.execute(ROW, (*at, key_of(message)))
            self.handle(message)

        consumer.run(handle, concurrency=4, order="key", retry=Retry(attempts=5, backoff=(0.001, 0.05)))


_WORK: dict[str, Callable[[_Worker, GroupConsumer], None]] = {
    "loop": _Worker.loop,
    "batches": _Worker.batches,
    "run": _Worker.run,
}


def run(job: Job) -> int:
    """Run the whole process; returns its exit status."""
    return lived(_Worker(job), job.client_id)
