"""Workers as somebody writes them who has read api.md, right and wrong ones."""

from __future__ import annotations

import time

from kafka_marshal import Admin, Marshal
from kafka_marshal.testing.simulation import Job


def plain(job: Job) -> None:
    """The README's first example."""
    with (
        Marshal(
            job.bootstrap_servers,
            group_id=job.group_id,
            client_id=job.client_id,
            heartbeat_interval_ms=job.heartbeat_interval_ms,
        ) as marshal,
        marshal.consumer([job.topic]) as consumer,
    ):
        for message in consumer:
            job.handle(message)


def in_a_transaction(job: Job) -> None:
    """The batches of api.md."""
    with job.marshal() as marshal, marshal.consumer([job.topic]) as consumer:
        for batch in consumer.batches(max_messages=20, timeout=0.1):
            began = time.monotonic()
            time.sleep(0.005)  # virtual, as the clock is
            assert 0.004 < time.monotonic() - began < 60.0
            with job.database.transaction() as tx:
                last = tx.fence(batch.topic, batch.partition, batch.epoch)
                tx.write(m for m in batch.messages if (m.offset() or 0) > last)
                tx.set_last(batch.topic, batch.partition, max(last, batch.last_offset))
            batch.done()


def looks_at_its_admin(job: Job) -> None:
    """Works, and looks at the group with an Admin now and then."""
    with job.marshal() as marshal, marshal.consumer([job.topic]) as consumer:
        for message in consumer:
            job.handle(message)
            if job.random.random() < 0.001:
                admin: Admin = job.admin(client_id=f"{job.client_id}-admin")
                assert all(lease.topic for lease in admin.progress(job.group_id))


def commits_first(job: Job) -> None:
    """Wrong: a message is done before it is handled, so a crash loses it."""
    with job.marshal() as marshal, marshal.consumer([job.topic], auto_done=False) as consumer:
        for message in consumer:
            consumer.done(message)
            job.handle(message)


def ignores_on_lost(job: Job) -> None:
    """Wrong: what was fetched is handled whatever became of the lease."""
    with job.marshal() as marshal, marshal.consumer([job.topic]) as consumer:
        while not marshal.stopping:
            for message in consumer.consume(200, 0.5):
                job.handle(message)
                consumer.done(message)


def forgets_the_stored_offset(job: Job) -> None:
    """Wrong: fenced, but what the sink has already is written again."""
    with job.marshal() as marshal, marshal.consumer([job.topic]) as consumer:
        for batch in consumer.batches(max_messages=20, timeout=0.1):
            job.sleep(0.02)
            with job.database.transaction() as tx:
                tx.fence(batch.topic, batch.partition, batch.epoch)
                tx.write(batch.messages)
                tx.set_last(batch.topic, batch.partition, batch.last_offset)
            job.sleep(0.02)
            batch.done()


def falls_over(job: Job) -> None:
    """Wrong: raises what no fault can cause."""
    with job.marshal() as marshal, marshal.consumer([job.topic]) as consumer:
        for message in consumer:
            job.handle(message)
            raise ZeroDivisionError
