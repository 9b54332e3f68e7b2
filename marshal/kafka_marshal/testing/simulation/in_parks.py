"""The worker that sets messages aside: parallel handlers, of which some always fail, some sometimes; one kills."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from kafka_marshal.adapters.message import Message
from kafka_marshal.client.attempt import Attempt
from kafka_marshal.client.consumer import Consumer
from kafka_marshal.client.handling import Hooks, Retry, RetryAfter, RunSettings
from kafka_marshal.client.marshal import Marshal
from kafka_marshal.testing.simulation.holdings import place_of
from kafka_marshal.testing.simulation.in_lists import InLists
from kafka_marshal.testing.simulation.process import FailedError, Job, LaterError
from kafka_marshal.testing.simulation.waits import IN_MEMORY_INTERVALS, LONGEST_INTERVALS

#: The share of tries of good messages that fail; the last one does not.
FAILING = 0.08
#: The share of tries that ask for a later one, of those that ask for long, and of processes with ``Retry(after=…)``.
LATER, LONG, BY_AFTER = 0.04, 0.6, 0.3
#: The share of tries that end the process in an orderly way, and of slow ones; by how much at most (HI).
FATAL, SLOW, SLOW_INTERVALS = 0.0005, 0.02, 1.0


class BadError(Exception):
    """What a message raises that never works."""


def work_in_parks(job: Job, marshal: Marshal, consumer: Consumer) -> None:
    """Run until stopped."""
    chance, hi = job.random, job.heartbeat_interval_ms / 1000
    retry = Retry(chance.randint(2, 5), (chance.choice([0.0, 0.02, 0.05]) * hi, 0.1 * hi))
    by_after = job.parking.waits.is_on and chance.random() < BY_AFTER
    options: RunSettings = {}
    if by_after:
        retry = replace(retry, after=lambda error, _: error.seconds if isinstance(error, LaterError) else 0.05 * hi)
    if job.parking.waits.is_on and not job.in_lists:
        options["not_before"] = job.parking.waits.not_before

    def drawn(message: Message) -> tuple[BaseException | None, float]:
        attempt, place = Attempt.of(message), place_of(message)
        job.tries(attempt)
        slow = chance.uniform(0.0, SLOW_INTERVALS) * hi if chance.random() < SLOW else 0.0
        job.survives(message)
        if chance.random() < FATAL and not job.is_calm:
            return SystemExit(), slow
        if job.parking.waits.is_on and not attempt.is_last and not job.is_calm and chance.random() < LATER:
            return _later(job, by_after=by_after), slow
        is_bad = job.parking.is_bad(*place)
        if is_bad or (chance.random() < FAILING and not attempt.is_last):
            return BadError() if is_bad else FailedError(), slow
        return None, slow

    def handle(message: Message) -> None:
        error, slow = drawn(message)
        if error is None:
            job.handle(message, slow)
            return
        job.fail(message, slow)
        if not isinstance(error, SystemExit):
            job.failed(Attempt.of(message), error)
        raise error

    while not marshal.stopping:
        if job.in_lists:
            options["batch"], options["linger"] = job.list_options()
        run = partial(
            consumer.run,
            InLists(job, drawn, job.failed) if job.in_lists else handle,
            concurrency=chance.randint(1, 8),
            order=job.order,
            retry=retry,
            park=True,
            hooks=[Hooks(lost=lambda attempt, *_: job.parking.lost(*place_of(attempt.message)))],
            drain_timeout=chance.choice([0.1, 2.0]) * hi,
            **options,
        )
        job.again(run)


def _later(job: Job, *, by_after: bool) -> RetryAfter | LaterError:
    """What a handler raises that asks for a later try."""
    shortest, longest = (
        (IN_MEMORY_INTERVALS, LONGEST_INTERVALS) if job.random.random() < LONG else (0, IN_MEMORY_INTERVALS)
    )
    asked = RetryAfter(job.random.uniform(shortest, longest) * job.heartbeat_interval_ms / 1000)
    if not by_after:
        return asked
    error = LaterError()
    error.seconds = asked.seconds
    return error
