"""Workers as written by readers of api.md, correct and wrong ones."""

from __future__ import annotations

import queue
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from time import monotonic_ns, perf_counter, sleep, time_ns

from kafka_marshal import Admin, Claims, Group, Marshal, MarshalError, MaxClaims
from kafka_marshal.adapters.memory import MemoryMessage
from kafka_marshal.testing.simulation import Job

#: Events in workers that ran in this process.
SEEN: Counter[str] = Counter()


def _works(job: Job, handler: Callable[[Marshal], object] | None = None) -> None:
    with Marshal(
        job.bootstrap_servers,
        group_id=job.group_id,
        client_id=job.client_id,
        heartbeat_interval=job.heartbeat_interval_ms / 1000,
    ) as marshal:
        if handler is not None:
            signal.signal(signal.SIGTERM, lambda *_: handler(marshal))
        with marshal.consumer([job.topic]) as consumer:
            for message in consumer:
                job.handle(message)
        SEEN["loop ended"] += 1


def plain(job: Job) -> None:
    """The README's first example, without its signal handler: SIGTERM kills it."""
    _works(job)


def member(job: Job) -> None:
    """A member of a coordinated group, as in docs/simulation.md."""
    assert job.strategy is not None
    with (
        job.marshal() as marshal,
        marshal.consumer(
            job.topics,
            mode=Group(strategy=job.strategy, session_timeout=job.session_timeout),
            delivery=job.delivery,
        ) as consumer,
    ):
        for message in consumer:
            job.handle(message)


def with_a_handler(job: Job) -> None:
    """The README's first example."""

    def stop(marshal: Marshal) -> None:
        SEEN["SIGTERM"] += 1
        marshal.stop()

    _works(job, stop)


def whose_handler_exits(job: Job) -> None:
    """A common pattern: ``sys.exit`` in the handler, and all ``with`` blocks are left."""

    def leave(_: Marshal) -> None:
        SEEN["SIGTERM"] += 1
        sys.exit(0)

    try:
        _works(job, leave)
    except SystemExit:
        SEEN["left in order"] += 1
        raise


def that_ignores_it(job: Job) -> None:
    """Ignores SIGTERM and continues."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    plain(job)


def by_any_clock(job: Job) -> None:
    """Imports functions from ``time``: all clocks are virtual, and a minute's sleep takes no time."""
    began, of_day, own, minute = perf_counter(), time_ns(), monotonic_ns(), 60.0
    while perf_counter() < began + minute:
        sleep(minute / 2)
    assert 0.6 * minute < (time_ns() - of_day) / 1e9 < 3 * minute
    assert 0.6 * minute < (monotonic_ns() - own) / 1e9 < 3 * minute
    SEEN["minutes"] += 1


def two_threads(job: Job) -> None:
    """Both iterate over one consumer; stopping the Marshal ends both."""
    with job.marshal() as marshal, marshal.consumer([job.topic]) as consumer:

        def work() -> None:
            for message in consumer:
                job.handle(message)

        job.start(work)
        work()


def whose_thread_falls_over(job: Job) -> None:
    """Wrong: the thread's error is never noticed."""
    with job.marshal() as marshal, marshal.consumer([job.topic]) as consumer:
        job.start(lambda: int("none"))
        for message in consumer:
            job.handle(message)


def starts_a_thread(job: Job) -> None:
    """Real threads have no place in virtual time."""
    with job.marshal() as marshal, marshal.consumer([job.topic]) as consumer:
        threading.Thread(target=lambda: job.handle(next(iter(consumer)))).start()


def at_most_once(job: Job) -> None:
    """The other delivery."""
    with job.marshal() as marshal, marshal.consumer([job.topic], delivery="at-most-once") as consumer:
        for message in consumer:
            job.handle(message)


def tries_again(job: Job) -> None:
    """Wrong at most once: a message that may have failed is handled again."""
    with job.marshal() as marshal, marshal.consumer([job.topic], delivery="at-most-once") as consumer:
        for message in consumer:
            job.handle(message)
            if job.random.random() < 0.01:
                job.handle(message)


def leads(job: Job) -> None:
    """Works, and sometimes does a chore while it holds a claimed name that is no topic."""
    with job.marshal() as marshal, marshal.consumer([job.topic]) as consumer:
        next_try, said = 0.0, 0
        for message in consumer:
            job.handle(message)
            if job.monotonic() < next_try:
                continue
            next_try = job.monotonic() + 1.0
            try:
                with marshal.claim("leader-of-chores", 0, timeout=0) as lease:
                    said = (lease.last_offset or 0) + 1
                    lease.heartbeat(said)
            except MarshalError:
                continue


def begins_at_the_end(job: Job) -> None:
    """Skips messages from before its start."""
    with job.marshal() as marshal, marshal.consumer([job.topic], start="latest") as consumer:
        for message in consumer:
            job.handle(message)


def reads_on(job: Job) -> None:
    """Wrong: handles an assumed next message of a partition that another member holds."""
    with job.marshal() as marshal, marshal.consumer([job.topic], mode=Claims(policy=MaxClaims(1))) as consumer:
        for message in consumer:
            job.handle(message)
            job.handle(
                MemoryMessage(job.topic, 7 - (message.partition() or 0), message.offset() or 0, None, b"", (1, 0))
            )


def of_another_group(job: Job) -> None:
    """Reads with another group, which the story does not know."""
    with job.marshal(group_id="mine") as marshal, marshal.consumer([job.topic]) as consumer:
        for message in consumer:
            job.handle(message)


def in_a_transaction(job: Job) -> None:
    """The batches of the guide, into a database whose last offset never goes back."""
    with job.marshal() as marshal, marshal.consumer([job.topic]) as consumer:
        for batch in consumer.batches(max_messages=20, timeout=0.1):
            began = time.monotonic()
            time.sleep(0.005)  # virtual, like the clock
            assert 0.004 < time.monotonic() - began < 60.0
            with job.database.transaction() as tx:
                last = tx.fence(batch.topic, batch.partition, batch.epoch)
                tx.write(m for m in batch.messages if (m.offset() or 0) > last)
                tx.set_last(batch.topic, batch.partition, batch.last_offset)
            batch.done()


def looks_at_its_admin(job: Job) -> None:
    """Works, and sometimes queries the group with an Admin."""
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
    """Wrong: fetched messages are handled even if the lease is lost."""
    with job.marshal() as marshal, marshal.consumer([job.topic]) as consumer:
        while not marshal.stopping:
            for message in consumer.consume(200, 0.5):
                job.handle(message)
                consumer.done(message)


def forgets_the_stored_offset(job: Job) -> None:
    """Wrong: fenced, but rows that the sink already has are written again."""
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
    """Wrong: raises an error that no fault can cause."""
    with job.marshal() as marshal, marshal.consumer([job.topic]) as consumer:
        for message in consumer:
            job.handle(message)
            raise ZeroDivisionError


def waits_for_a_queue(job: Job) -> None:
    """Waits for ever, as threads run one at a time and none puts anything into the queue."""
    queue.Queue[int]().get()


def goes_round(job: Job) -> None:
    """Spins without entering the simulation, so no time passes."""
    while not SEEN.get("never"):
        continue
