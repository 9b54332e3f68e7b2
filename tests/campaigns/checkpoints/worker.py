"""One worker of the campaign, as a user writes one: it counts by key, and its state is saved at checkpoints."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from kafka_marshal import (
    Batch,
    Checkpoint,
    CheckpointPolicy,
    Group,
    GroupConsumer,
    LeaseLostError,
    Message,
    Restore,
    Retry,
)
from kafka_marshal.checkpoints import Folder, RestorePiece
from kafka_marshal.errors import StaleEpochError
from kafka_marshal.testing.fail_points import Doom
from kafka_marshal.types import SharedEpoch
from tests.campaigns.chaos.lines import Pen
from tests.campaigns.chaos.worker import Job as PlainJob
from tests.campaigns.chaos.worker import lived, working
from tests.campaigns.checkpoints.check import Counts, add
from tests.campaigns.checkpoints.rows import Rows, retrying

#: This module, for the process that starts workers.
WORKER = "tests.campaigns.checkpoints.worker"

#: Kind → whose fail points (none of them: a campaign chooses from POINTS).
DELIVERIES = {"loop": "at least once", "batches": "at least once", "run": "at least once"}

#: Where a worker dies.
POINTS = ("handling", "saving", "saved", "restoring", "restored", "completed")

#: Shares of calls of on_checkpoint that raise before and after they have saved, and of those that return a Future.
RAISES, IN_BACKGROUND = 0.04, 0.3

#: Share of first tries in ``run`` that raise.
FAILING = 0.02

#: Shares of messages after which the program begins a checkpoint.
BEGINS = 0.001

#: The longest drain.
DRAIN_S = 2.0


@dataclass(frozen=True, slots=True)
class Job(PlainJob):
    """The task of one worker process."""

    #: The folder of states.
    states: str = ""
    hold: bool = False
    every_s: float = 1.0
    session_timeout_ms: int = 1_500
    #: Members share partitions by key.
    shares: bool = False
    #: Handlers of ``run``.
    concurrency: int = 4
    #: A release that counts wrong, and writes wrong rows.
    spoils: bool = False


def policy_of(every_s: float, hold: bool) -> CheckpointPolicy:
    """How the group takes checkpoints."""
    return CheckpointPolicy(every=every_s, keep=8, drain=DRAIN_S, timeout=4.0, hold=hold)


class _RaisedError(Exception):
    """A handler that fails."""


def restored_line(piece: RestorePiece, restore: Restore, found: Counts, rows: Counts | None) -> list[Any]:
    """What is written down of a piece: where it continues, with which state and rows, and of which keys."""
    spans, through = [list(each) for each in piece.ranges], [list(each) for each in piece.done_through]
    tokens = piece.epoch.parts if isinstance(piece.epoch, SharedEpoch) else ()
    of = [piece.partition, int(piece.epoch), restore.why, restore.checkpoint, piece.position, spans]
    return [*of, piece.states, found, rows, [piece.lo, piece.hi, tokens], through]


def _key_of(message: Message) -> str:
    return (message.key() or b"").decode()


class _Worker:
    def __init__(self, job: Job) -> None:
        self.job = job
        self.pen = Pen(Path(job.out))
        self.rng = Random(job.seed)
        self.doom = Doom(job.doom, None, job.times, lambda: self.pen.write("die", job.doom), job.linger_s)
        self.states = Folder(job.states)
        self.rows = Rows(job.database) if job.database else None
        self.consumer: GroupConsumer | None = None
        self.pool = ThreadPoolExecutor(2)
        self.lock = threading.Lock()
        #: Partition → the fencing token of what it counts, and the counts.
        self.counts: dict[int, tuple[int, Counts]] = {}

    def live(self) -> None:
        """Run from the Marshal's constructor to the end."""
        job = self.job
        with working(job) as marshal:
            with marshal.consumer(
                [job.topic],
                mode=Group(session_timeout=job.session_timeout_ms / 1000, allow_key_share=job.shares),
                checkpoints=replace(
                    policy_of(job.every_s, job.hold),
                    on_checkpoint=self.save,
                    on_restore=self.restore,
                    on_completed=self.completed,
                ),
            ) as consumer:
                self.consumer = consumer
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
        if (rows := self.rows) is not None:
            undo = rows.undo_all if self.job.spoils else rows.undo
            retrying(partial(rows.sink.restore, restore, undo))
        for piece in restore.pieces:
            found: Counts = {}
            for part in self.states.load_parts(piece):
                found |= {key: count for key, count in json.loads(part.state).items() if part.holds(key.rstrip("!"))}
            there = rows.left.get(piece.partition) if rows is not None else None
            self.pen.write("restored", *restored_line(piece, restore, found, there))
            with self.lock:
                self.counts[piece.partition] = (piece.epoch, found)
        self.doom.at("restored")

    def completed(self, checkpoint: int) -> None:
        """on_completed."""
        drained_s = 0.0 if self.consumer is None else self.consumer.checkpoints.drain_seconds
        self.pen.write("completed", checkpoint, drained_s)
        self.doom.at("completed")

    # Kinds of work.

    def handle(self, message: Message) -> None:
        """Count one message: what changes the state comes last."""
        partition, offset = message.partition() or 0, message.offset() or 0
        with self.lock:
            before = self.counts[partition]
        time.sleep(self.rng.random() * self.job.handling_s)
        self.doom.at("handling")
        with self.lock:
            epoch, counts = now = self.counts[partition]
            if now is not before:
                self.pen.write("torn", partition, before[0], epoch, offset)
            self.pen.write("handled", partition, epoch, offset)
            add(counts, f"{_key_of(message)}!" if self.job.spoils else _key_of(message), offset)

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
                retrying(partial(self._write, batch))
            except (StaleEpochError, LeaseLostError) as error:  # it comes again, here or at another member
                self.pen.write("refused", type(error).__name__, str(error))
                continue
            for message in batch:
                self.handle(message)
            batch.done()

    def _write(self, batch: Batch) -> None:
        if self.rows is not None:
            with self.rows.sink.records(batch) as tx:
                new = [(m.partition() or 0, m.offset() or 0, _key_of(m)) for m in tx.new]
                self.rows.write(tx, new, spoils=self.job.spoils)

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
            if self.rows is not None:
                with self.rows.sink.record(message) as tx:
                    if not tx.is_done:
                        self.rows.write(tx, [(*at, _key_of(message))], spoils=self.job.spoils)
            self.handle(message)

        retry = Retry(attempts=5, backoff=(0.001, 0.05))
        consumer.run(handle, concurrency=self.job.concurrency, order="key", retry=retry)


_WORK: dict[str, Callable[[_Worker, GroupConsumer], None]] = {
    "loop": _Worker.loop,
    "batches": _Worker.batches,
    "run": _Worker.run,
}


def run(job: Job) -> int:
    """Run the whole process; returns its exit status."""
    return lived(_Worker(job), job.client_id)
