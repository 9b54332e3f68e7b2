"""The worker of ``consumer.transaction``: outputs and progress are committed together; some blocks fail."""

from __future__ import annotations

from kafka_marshal.client.consumer import Consumer
from kafka_marshal.errors import KafkaUnavailableError, LeaseError, TransactionError
from kafka_marshal.testing.simulation.outputs import OUTPUTS, output_partition
from kafka_marshal.testing.simulation.process import Job

__all__ = ["TIMEOUTS", "work_in_transactions"]

#: Choices of ``transaction_timeout`` (s).
TIMEOUTS = (1.0, 2.0, 5.0)
#: The share of blocks that end with an exception.
FAILING = 0.05


class FailedError(Exception):
    """A block's failure: its outputs are never seen, and its batch comes again."""


def work_in_transactions(job: Job, consumer: Consumer, lost: set[tuple[str, int]]) -> None:
    """Run until stopped; lost: partitions that were lost, maintained by callbacks."""
    for batch in consumer.batches(job.random.choice([5, 30]), timeout=0.05):
        key = batch.topic, batch.partition
        lost.discard(key)
        job.received(batch)
        try:
            with consumer.transaction(batch) as transaction:
                for message in batch:
                    if key in lost:
                        raise FailedError
                    job.handle(message)
                    value = f"{batch.topic}/{batch.partition}/{message.offset()}"
                    transaction.produce(OUTPUTS, value, partition=output_partition(key))
                if job.random.random() < FAILING:
                    raise FailedError
        except (FailedError, TransactionError, LeaseError, KafkaUnavailableError):
            continue
