"""Workers that share partitions by batches, and the operator who settles what they leave open."""

from __future__ import annotations

from random import Random

from kafka_marshal.adapters.message import Message
from kafka_marshal.admin import Admin
from kafka_marshal.client.attempt import Attempt
from kafka_marshal.client.handling import Retry
from kafka_marshal.client.marshal import Marshal
from kafka_marshal.client.modes import Batches
from kafka_marshal.client.shared import ShareConsumer, SharedBatch
from kafka_marshal.testing.simulation.process import FailedError, Job
from kafka_marshal.testing.simulation.scenario import Client

#: The share of messages that are set aside, of batches of which the rest is given back, and of slow messages.
PARKED, GIVEN_BACK, SLOW, SLOW_INTERVALS = 0.004, 0.05, 0.005, 1.0
#: With handlers: the share of tries that fail, and of messages whose last one fails, too.
TRY_FAILING, LAST_FAILING = 0.05, 0.1
#: Most messages that an operator settles at a time.
MOST_SETTLED = 3


def work_in_batches(job: Job, client: Client) -> None:
    """Run until stopped: a loop over batches, or many handlers."""
    with job.marshal() as marshal:
        size = job.random.choice([10, 50])
        with marshal.consumer(job.topics, mode=Batches(), delivery=job.delivery, batch_size=size) as consumer:
            if client.worker == "shares-lanes":
                _with_handlers(job, marshal, consumer)
            else:
                _in_a_loop(job, consumer)


def _in_a_loop(job: Job, consumer: ShareConsumer) -> None:
    one_by_one = job.random.random() < 0.3
    for batch in consumer.batches(job.random.choice([5, 30, 500]), timeout=0.05):
        job.received(batch)
        _work_on(job, batch, one_by_one=one_by_one)


def _work_on(job: Job, batch: SharedBatch, *, one_by_one: bool) -> None:
    chance, hi = job.random.random, job.heartbeat_interval_ms / 1000
    stops_after = int(chance() * len(batch)) if chance() < GIVEN_BACK and not job.is_calm else len(batch)
    handled: list[Message] = []
    for message in batch:
        if len(handled) >= stops_after or not batch.is_held:
            break
        job.survives(message)
        if chance() < PARKED and not job.is_calm:
            job.fail(message)
            batch.park(message, "Bad")
            continue
        job.handle(message, chance() * SLOW_INTERVALS * hi if chance() < SLOW else 0.0)
        handled.append(message)
        if one_by_one:
            batch.done([message])
    else:
        batch.done()
        return
    batch.done(handled)
    batch.give_back()


def _with_handlers(job: Job, marshal: Marshal, consumer: ShareConsumer) -> None:
    chance, hi = job.random, job.heartbeat_interval_ms / 1000

    def handle(message: Message) -> None:
        job.survives(message)
        seconds = chance.random() * SLOW_INTERVALS * hi if chance.random() < SLOW else 0.0
        is_last = Attempt.current().is_last
        if chance.random() < TRY_FAILING and (not is_last or (chance.random() < LAST_FAILING and not job.is_calm)):
            job.fail(message, seconds)
            raise FailedError
        job.handle(message, seconds)

    while not marshal.stopping:
        consumer.run(
            handle,
            concurrency=chance.randint(1, 8),
            retry=Retry(chance.randint(1, 3), (0.02 * hi, 0.1 * hi)),
            park=True,
            drain_timeout=chance.choice([0.1, 2.0]) * hi,
        )


def settle_by_hand(admin: Admin, group_id: str, rng: Random) -> tuple[str, int, int]:
    """Redrive, discard or set aside some open messages; what was done, of how many, and how many were left."""
    found = [each for each in admin.open_messages(group_id) if each.state != "acquired"]
    if not found:
        return "nothing", 0, 0
    action = rng.choice((admin.redrive, admin.redrive, admin.discard, admin.park))
    chosen = rng.sample(found, rng.randint(1, min(MOST_SETTLED, len(found))))
    done = action(group_id, [(each.topic, each.partition, each.offset) for each in chosen])
    return done.action, len(done.messages), len(done.left)
