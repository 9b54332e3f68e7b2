"""One worker of the campaign, as a user writes one, in a separate process; it records its actions."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Protocol, cast

from kafka_marshal import ClaimedLease, Claims, Consumer, Group, HeldError, LeaseLostError, Marshal, TopicPartition
from kafka_marshal.errors import (
    ClaimTimeoutError,
    ClientReplacedError,
    KafkaUnavailableError,
    StaleEpochError,
)
from kafka_marshal.ports import Message
from kafka_marshal.sinks import SqliteSink
from kafka_marshal.testing.fail_points import POINTS, Doom, dying
from kafka_marshal.types import Strategy
from tests.campaigns.chaos.lines import Pen, digest_of

#: This module, for the process that starts workers.
WORKER = "tests.campaigns.chaos.worker"

#: Results of ``run``: closed, no broker, replaced, a fault. A campaign can cause the first three.
CLOSED, UNAVAILABLE, REPLACED, FAULT = 0, 3, 4, 1
OWN_STATUSES = (CLOSED, UNAVAILABLE, REPLACED)

#: Messages of a batch at least once, and of a request at most once.
BATCH, GRANT = 20, 10

#: Share of messages whose handling takes up to an HI, so that heartbeats occur within it and others wait behind it.
LONG_SHARE = 0.02

#: Kind → delivery.
KINDS = {
    "iterate": "at least once",
    "batches": "at least once",
    "sink": "at least once",
    "once": "at most once",
    "once ahead": "at most once",
    "by hand": "by hand",
}


@dataclass(frozen=True, slots=True)
class Job:
    """The task of one worker process."""

    bootstrap: str
    coordination: str
    group: str
    topic: str
    partitions: int
    kind: str
    client_id: str
    heartbeat_interval_ms: int
    #: Its file of lines.
    out: str
    seed: int
    #: The fail point's name and occurrence; "": none.
    doom: str = ""
    times: int = 1
    #: Time after which it closes regularly (s); 0: never.
    stop_after_s: float = 0.0
    #: How long it waits at a fail point between records before it dies (s).
    linger_s: float = 0.0
    #: Longest handling of a message (s).
    handling_s: float = 0.003
    #: The fenced sink's file, for the kind "sink".
    database: str = ""
    #: Strategy of a coordinated group; "": the group claims its partitions.
    strategy: str = ""


@contextmanager
def working(job: Job) -> Iterator[Marshal]:
    """The Marshal of a job; SIGTERM, or its time, ends it in order."""
    with Marshal(
        job.bootstrap,
        group_id=job.group,
        client_id=job.client_id,
        topic=job.coordination,
        heartbeat_interval=job.heartbeat_interval_ms / 1000,
    ) as marshal:
        signal.signal(signal.SIGTERM, lambda *_: marshal.stop())
        if job.stop_after_s:
            timer = threading.Timer(job.stop_after_s, marshal.stop)
            timer.daemon = True
            timer.start()
        yield marshal


class _Worker:
    def __init__(self, job: Job) -> None:
        self.job = job
        self.pen = Pen(Path(job.out))
        self.rng = Random(job.seed)
        step, moment = POINTS[job.doom] if job.doom else ("never", None)
        self.doom = Doom(step, moment, job.times, lambda: self.pen.write("die", job.doom), job.linger_s)
        self.epochs: dict[tuple[str, int], int] = {}
        self.told = 0

    def live(self) -> None:
        """Run from the Marshal's constructor to the end."""
        job = self.job
        self.pen.write("born", job.group, job.client_id, job.kind, job.doom)

        def sent(cp: int, step: str, value: bytes) -> None:
            self.pen.write("sent", cp, step, digest_of(value))

        with dying(job.bootstrap, self.doom, sent), working(job) as marshal:
            self.pen.write("start", job.group, job.client_id, marshal.instance_id, job.kind, job.doom)
            _WORK[job.kind](self, marshal)
            self._tell_digests(marshal)

    def _tell_digests(self, marshal: Marshal) -> None:
        for alarm in marshal.alarms:
            self.pen.write("error", type(alarm).__name__, str(alarm))
        with marshal._driver.lock.locked():
            for cp, world in sorted(marshal._driver.replica.worlds.items()):
                self.pen.write("digest", cp, world.next_offset, world.digest())

    # One message.

    def handle(self, topic: str, partition: int, offset: int, epoch: int, number: int) -> None:
        """Handle one message: the line that says "end" is the work."""
        self.doom.at("handed out")
        self.pen.write("begin", topic, partition, offset, epoch, number)
        took = self.rng.random() * self.job.handling_s
        if self.rng.random() < LONG_SHARE:
            took = self.rng.random() * self.job.heartbeat_interval_ms / 1000
        time.sleep(took / 2)
        self.doom.at("handling")
        time.sleep(took / 2)
        self.pen.write("end", topic, partition, offset)
        self.doom.at("handled")

    def handle_message(self, message: Message, epoch: int) -> None:
        """The same for a message from Kafka."""
        topic, partition, offset = _place(message)
        self.handle(topic, partition, offset, epoch, int(message.value() or b"-1"))

    def done(self, message: Message) -> None:
        """Mark a message as done."""
        self.pen.write("done", *_place(message))
        self.doom.at("done")

    def consumer(self, marshal: Marshal, **options: Any) -> Consumer:
        """A consumer that claims, or a member of a coordinated group with a session of two HI."""
        job = self.job
        options |= {"on_assign": self.assigned, "on_lost": self.lost}
        if not job.strategy:
            made: Consumer = marshal.consumer([job.topic], **options)
            return made
        mode = Group(strategy=cast("Strategy", job.strategy), session_timeout=2 * job.heartbeat_interval_ms / 1000)
        return marshal.consumer([job.topic], mode=mode, **options)

    # Callbacks.

    def assigned(self, _: Consumer, partitions: list[TopicPartition]) -> None:
        """on_assign: before the first message of these partitions."""
        for each in partitions:
            self.epochs[each.topic, each.partition] = each.epoch
        self.doom.at("assigned")

    def lost(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        """on_lost."""
        for each in partitions:
            self.pen.write("lost", each.topic, each.partition)
        self.report(consumer)

    def report(self, consumer: Consumer) -> None:
        """At most once: record offsets that were granted but not delivered, as reported by the client."""
        found = consumer.unprocessed
        for each in found[self.told :]:
            self.pen.write("reported", *each)
        self.told = len(found)

    def report_unanswered(self, consumer: Consumer) -> None:
        """At the end: record pending requests, which the log may or may not have granted since."""
        for (topic, partition), _, first, last in consumer._engine.delivery.grants._given_up:
            self.pen.write("reported", topic, partition, first, last)

    # Kinds of work.

    def iterate(self, marshal: Marshal) -> None:
        """At least once, message by message: done when the next one is requested."""
        before: Message | None = None
        with self.consumer(marshal) as consumer:
            for message in consumer:
                if before is not None:
                    self.done(before)
                self.handle_message(message, self._epoch(message))
                before = message

    def batches(self, marshal: Marshal) -> None:
        """At least once, in batches."""
        with self.consumer(marshal) as consumer:
            for batch in consumer.batches(max_messages=BATCH, timeout=0.05):
                self.pen.write(
                    "handed", batch.topic, batch.partition, batch.first_offset, batch.last_offset, batch.epoch
                )
                for message in batch:
                    self.handle_message(message, batch.epoch)
                batch.done()
                for message in batch:
                    self.pen.write("done", *_place(message))
                self.doom.at("done")

    def sink(self, marshal: Marshal) -> None:
        """At least once into a fenced sink: each batch is one transaction with its offsets (C9)."""
        with (
            SqliteSink(self.job.database) as sink,
            self.consumer(marshal) as consumer,
        ):
            for batch in consumer.batches(max_messages=BATCH, timeout=0.05):
                self.doom.at("handed out")
                claim = (batch.topic, batch.partition, batch.epoch, batch.last_offset)
                try:
                    with sink.transaction(self.job.group, [claim]) as tx:
                        last = tx.last_offset(batch.topic, batch.partition)
                        rows = [(*_place(x), batch.epoch, int(x.value() or b"-1")) for x in batch]
                        tx.executemany(
                            "INSERT INTO handled VALUES (NULL, ?, ?, ?, ?, ?)", [x for x in rows if x[2] > last]
                        )
                        self.doom.at("handling")
                        time.sleep(self.rng.random() * self.job.handling_s)
                except StaleEpochError:
                    self.pen.write("fenced", batch.topic, batch.partition, batch.epoch)
                    continue  # another worker's from here on
                self.doom.at("handled")
                batch.done()
                self.doom.at("done")

    def once(self, marshal: Marshal) -> None:
        """At most once: by iteration, or in batches with requests ahead."""
        ahead = self.job.kind == "once ahead"
        options = {"mode": Claims(claim_ahead=True)} if ahead else {}
        with self.consumer(marshal, delivery="at-most-once", batch_size=GRANT, **options) as consumer:
            if ahead:
                for batch in consumer.batches(max_messages=GRANT):
                    for message in batch:
                        self.report(consumer)
                        self.handle_message(message, batch.epoch)
            else:
                for message in consumer:
                    self.report(consumer)
                    self.handle_message(message, self._epoch(message))
        self.report(consumer)
        self.report_unanswered(consumer)

    def by_hand(self, marshal: Marshal) -> None:
        """Leases by hand: work without a topic, numbered by offsets; half of the partitions at most once."""
        while not marshal.stopping:
            partition = self.rng.randrange(self.job.partitions)
            try:
                with marshal.claim(self.job.topic, partition, timeout=0.1) as lease:
                    for _ in range(self.rng.randrange(1, 20)):
                        self._some_by_hand(lease)
            except (HeldError, LeaseLostError, ClaimTimeoutError):
                continue

    def _some_by_hand(self, lease: ClaimedLease) -> None:
        done = lease.last_offset
        first = 0 if done is None else done + 1
        last = first + self.rng.randrange(3)
        at_most_once = bool(lease.partition % 2)
        if at_most_once:
            try:
                lease.grant(last)
            except LeaseLostError:
                self.pen.write("reported", lease.topic, lease.partition, first, last)
                raise
        for offset in range(first, last + 1):
            if not at_most_once:  # a grant is never revoked (C12)
                lease.require()
            self.handle(lease.topic, lease.partition, offset, lease.epoch, offset)
        lease.heartbeat(last)

    def _epoch(self, message: Message) -> int:
        topic, partition, _ = _place(message)
        return self.epochs.get((topic, partition), -1)


_WORK: dict[str, Callable[[_Worker, Marshal], None]] = {
    "iterate": _Worker.iterate,
    "batches": _Worker.batches,
    "sink": _Worker.sink,
    "once": _Worker.once,
    "once ahead": _Worker.once,
    "by hand": _Worker.by_hand,
}


def _place(message: Message) -> tuple[str, int, int]:
    return message.topic() or "", message.partition() or 0, message.offset() or 0


class Living(Protocol):
    """What a worker process does."""

    pen: Pen

    def live(self) -> None: ...


def lived(worker: Living, name: str) -> int:
    """The exit status of a worker process, after all of its life."""
    try:
        worker.live()
    except KafkaUnavailableError as error:
        worker.pen.write("unavailable", str(error))
        return UNAVAILABLE
    except ClientReplacedError as error:
        worker.pen.write("replaced", str(error))
        return REPLACED
    except Exception as error:
        logging.exception("worker %s", name)
        worker.pen.write("error", type(error).__name__, str(error))
        return FAULT
    worker.pen.write("closed")
    return CLOSED


def run(job: Job) -> int:
    """Run the whole process; returns its exit status."""
    return lived(_Worker(job), job.client_id)
