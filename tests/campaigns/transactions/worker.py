"""One worker of the campaign, as a user writes one: it consumes, transforms and produces in transactions."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any, cast

from kafka_marshal import Attempt, Consumer, Group, LeaseLostError, Marshal, Retry, TransactionError, Transactions
from kafka_marshal.errors import KafkaUnavailableError
from kafka_marshal.ports import Message
from kafka_marshal.testing.fail_points import POINTS, Doom, dying
from kafka_marshal.types import Strategy
from tests.campaigns.chaos.lines import Pen
from tests.campaigns.chaos.worker import Job as PlainJob
from tests.campaigns.chaos.worker import lived, working
from tests.campaigns.transactions.check import Output

#: This module, for the process that starts workers.
WORKER = "tests.campaigns.transactions.worker"

KINDS = {"blocks": "transactions", "run": "transactions"}

#: Most messages of a block.
BLOCK = 25

#: Share of blocks, and of first tries in a run, that produce and then raise.
FAILING = 0.04

#: transaction.timeout.ms: longer than any stop, so that only the next owner's init ends a transaction.
TRANSACTION_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Job(PlainJob):
    """The task of one worker process."""

    #: Output partition = input partition; and one by key.
    ordered: str = ""
    second: str = ""
    letters: str = ""
    #: It stops at its fail point (SIGSTOP), and does not die.
    stops: bool = False


class _RaisedError(Exception):
    """A handler that fails."""


class _Worker:
    def __init__(self, job: Job) -> None:
        self.job = job
        self.pen = Pen(Path(job.out))
        self.rng = Random(job.seed)
        step, moment = POINTS[job.doom] if job.doom else ("never", None)
        by = signal.SIGSTOP if job.stops else signal.SIGKILL
        words = "stop" if job.stops else "die"
        self.doom = Doom(step, moment, job.times, lambda: self.pen.write(words, job.doom), job.linger_s, by)

    def live(self) -> None:
        """Run from the Marshal's constructor to the end."""
        job = self.job

        def sent(cp: int, step: str, _: bytes) -> None:
            self.pen.write("sent", cp, step, "")

        with dying(job.bootstrap, self.doom, sent), working(job) as marshal:
            with self.consumer(marshal) as consumer:
                _WORK[job.kind](self, consumer)
            for alarm in marshal.alarms:
                self.pen.write("alarm", type(alarm).__name__, str(alarm))

    def consumer(self, marshal: Marshal) -> Consumer:
        """A consumer that claims, or a member of a coordinated group with a session of two HI."""
        job = self.job
        options: dict[str, Any] = {"exactly_once": Transactions(timeout=TRANSACTION_TIMEOUT_S)}
        options["on_assign"] = lambda *_: self.doom.at("assigned")
        if job.strategy:
            mode = Group(strategy=cast("Strategy", job.strategy), session_timeout=2 * job.heartbeat_interval_ms / 1000)
            return marshal.consumer([job.topic], mode=mode, **options)
        made: Consumer = marshal.consumer([job.topic], **options)
        return made

    def take_time(self) -> None:
        time.sleep(self.rng.random() * self.job.handling_s)

    def produce(self, produce: Callable[..., object], message: Message, *, counts: bool = True) -> None:
        """The outputs of a message."""
        partition, offset = message.partition() or 0, message.offset() or 0
        value = json.dumps(asdict(Output(partition, offset, counts, Path(self.job.out).stem))).encode()
        produce(self.job.ordered, value=value, partition=partition)
        produce(self.job.second, value=value, key=message.key())

    # Kinds of work.

    def blocks(self, consumer: Consumer) -> None:
        """``with consumer.transaction(batch)``."""
        for batch in consumer.batches(max_messages=self.rng.randint(1, BLOCK), timeout=0.05):
            self.doom.at("handed out")
            try:
                with consumer.transaction(batch) as tx:
                    self.block(batch, tx)
            except _RaisedError:
                self.pen.write("raised", batch.partition, batch.first_offset)
            except (
                TransactionError,
                LeaseLostError,
                KafkaUnavailableError,
            ) as error:  # it comes again
                self.pen.write("refused", type(error).__name__, str(error))
            else:
                self.doom.at("handled")

    def block(self, batch: Any, tx: Any) -> None:
        """One block."""
        raises = self.rng.random() < FAILING
        for message in batch:
            if json.loads(message.value() or b"{}")["fails"]:
                tx.produce(self.job.letters, value=message.value(), key=message.key())
            else:
                self.produce(tx.produce, message, counts=not raises)
        self.doom.at("handling")
        self.take_time()
        if raises:
            raise _RaisedError

    def run(self, consumer: Consumer) -> None:
        """``consumer.run(handle, order="key")``."""

        def handle(message: Message) -> None:
            attempt: Any = Attempt.current()
            self.doom.at("handed out")
            fails = json.loads(message.value() or b"{}")["fails"]
            raises = fails or (attempt.number == 1 and self.rng.random() < FAILING)
            self.produce(attempt.produce, message, counts=not raises)
            self.doom.at("handling")
            self.take_time()
            if raises:
                raise _RaisedError
            self.doom.at("handled")

        retry = Retry(attempts=2, backoff=(0.001, 0.01))
        calls: Any = consumer
        calls.run(handle, concurrency=8, order="key", retry=retry, dead_letters=self.job.letters)


_WORK: dict[str, Callable[[_Worker, Consumer], None]] = {"blocks": _Worker.blocks, "run": _Worker.run}


def run(job: Job) -> int:
    """Run the whole process; returns its exit status."""
    return lived(_Worker(job), job.client_id)
