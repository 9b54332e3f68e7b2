"""Workers whose outputs and progress are committed together, in blocks or by many handlers; some of them fail."""

from __future__ import annotations

from functools import partial

from kafka_marshal.adapters.message import Message
from kafka_marshal.client.attempt import Attempt
from kafka_marshal.client.batch import Batch
from kafka_marshal.client.consumer import Consumer
from kafka_marshal.client.handling import Retry
from kafka_marshal.client.marshal import Marshal
from kafka_marshal.errors import KafkaUnavailableError, LeaseError, TransactionError
from kafka_marshal.testing.simulation.ledger import OUTPUTS, output_partition
from kafka_marshal.testing.simulation.process import FailedError, Job

#: Choices of ``transaction_timeout`` (s).
TIMEOUTS = (1.0, 2.0, 5.0)
#: The share of blocks that end with an exception.
FAILING = 0.05
#: The share of handlers that take up to a heartbeat interval longer.
SLOW = 0.02


def work_in_transactions(job: Job, consumer: Consumer, lost: set[tuple[str, int]], at_once: int = 1) -> None:
    """Run until stopped; lost: partitions that were lost, maintained by callbacks.

    at_once: batches that are processed side by side, each in its own thread.
    """
    running: set[Batch] = set()

    def block(batch: Batch) -> None:
        try:
            _block(job, consumer, batch, lost)
        finally:
            running.discard(batch)

    for batch in consumer.batches(job.random.choice([5, 30]), timeout=0.05):
        lost.discard((batch.topic, batch.partition))
        job.received(batch)
        if at_once == 1:
            _block(job, consumer, batch, lost)
            continue
        running.add(batch)
        job.start(partial(block, batch))
        while len(running) >= at_once:
            job.sleep(0.005)


def _block(job: Job, consumer: Consumer, batch: Batch, lost: set[tuple[str, int]]) -> None:
    key = batch.topic, batch.partition
    try:
        with consumer.transaction(batch) as transaction:
            for message in batch:
                if key in lost:
                    raise FailedError
                job.handle(message)
                transaction.produce(OUTPUTS, _value(message), partition=output_partition(key))
            if job.random.random() < FAILING:
                raise FailedError
    except (FailedError, TransactionError, LeaseError, KafkaUnavailableError):
        return


def work_in_transactional_lanes(job: Job, marshal: Marshal, consumer: Consumer) -> None:
    """Run until stopped: many handlers, whose outputs wait for those before them."""
    chance, hi = job.random, job.heartbeat_interval_ms / 1000

    def handle(message: Message) -> None:
        attempt = Attempt.current()
        slow = chance.random() * hi if chance.random() < SLOW else 0.0
        value, partition = _value(message), output_partition((message.topic() or "", message.partition() or 0))
        if chance.random() < FAILING and not attempt.is_last:
            job.fail(message, slow)
            attempt.produce(OUTPUTS, f"{value} in vain", partition=partition)
            raise FailedError
        job.handle(message, slow)
        attempt.produce(OUTPUTS, value, partition=partition)

    retry = Retry(8, (0.02 * hi, 0.3 * hi), (FailedError,))
    while not marshal.stopping:
        consumer.run(handle, concurrency=chance.randint(2, 8), order=job.order, retry=retry)


def _value(message: Message) -> str:
    return f"{message.topic()}/{message.partition()}/{message.offset()}"
