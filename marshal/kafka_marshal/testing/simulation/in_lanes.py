"""The worker of ``consumer.run``: parallel handlers, of which some fail, some are slow and some hang."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from kafka_marshal.adapters.message import Message
from kafka_marshal.client.attempt import Attempt
from kafka_marshal.client.consumer import Consumer
from kafka_marshal.client.handling import Hooks, Retry, RunSettings
from kafka_marshal.client.marshal import Marshal
from kafka_marshal.testing.simulation.in_lists import InLists
from kafka_marshal.testing.simulation.process import FailedError, Job

#: The share of attempts that fail, and of last attempts among them that fail nevertheless.
FAILING, LAST_FAILING = 0.1, 0.1
#: The share of attempts with a final failure, the same if calls are interrupted, and the share that ends the process.
FINAL, FINAL_INTERRUPTED, FATAL = 0.002, 0.02, 0.0005
#: Smallest share of a back-off (Retry).
LEAST_WAIT = 0.5
#: The share of slow attempts, and by how much at most (HI).
SLOW, SLOW_INTERVALS = 0.02, 1.0
#: The share of attempts that hang, the most of one process, and how long (handler timeouts).
HANGING, MOST_HANGS, HANG_TIMEOUTS = 0.01, 2, (1.2, 3.0)
#: The share of processes that pause partitions, for how long, and the time between (HI).
HOLDING_SHARE, HELD_INTERVALS, OPEN_INTERVALS = 0.25, (0.3, 2.0), (1.0, 8.0)
#: Handlers submitted before a partition was paused begin within this (s).
TAKEN_UP_S = 0.005
#: Rounding of clocks (s).
ROUNDING_S = 1e-6


class FinalError(Exception):
    """A handler's failure that is not."""


class _Handling:
    """The handlers of one process."""

    def __init__(self, job: Job, retry: Retry, timeout: float | None) -> None:
        self._job = job
        self._hi = job.heartbeat_interval_ms / 1000
        self._retry = retry
        self._timeout = timeout
        self._hangs = 0
        #: (topic, partition, offset) → number of the last failed attempt, and when the next may begin (s).
        self._failed: dict[tuple[str | None, int | None, int | None], tuple[int, float]] = {}
        #: How long lists wait for more (s); and what was in a list, which may have failed as a whole since.
        self.linger = 0.0
        self.listed: set[tuple[str | None, int | None, int | None]] = set()
        #: (topic, partition, epoch) → since when it is paused (s).
        self.held: dict[tuple[str | None, int | None, int], float] = {}

    def __call__(self, message: Message) -> None:
        error, seconds = self.drawn(message)
        if error is None:
            self._job.handle(message, seconds)
            return
        self._job.fail(message, seconds)
        if isinstance(error, FailedError):
            self.failed(Attempt.of(message), error)
        raise error

    def drawn(self, message: Message) -> tuple[BaseException | None, float]:
        """What a try raises, if anything, and by how much longer than usual it takes (s)."""
        job, attempt = self._job, Attempt.of(message)
        self._check(attempt, (message.topic(), message.partition(), message.offset()))
        seconds, chance = self._seconds(), job.random.random
        if chance() < FATAL and not job.is_calm:
            return SystemExit(), seconds
        if chance() < (FINAL_INTERRUPTED if job.is_interrupted else FINAL) and not job.is_calm:
            return FinalError(), seconds
        if chance() < FAILING and (not attempt.is_last or (chance() < LAST_FAILING and not job.is_calm)):
            return FailedError(), seconds
        return None, seconds

    def failed(self, attempt: Attempt, error: BaseException) -> None:
        """A try has failed: when the next one may begin."""
        first, most = self._retry.backoff
        wait = LEAST_WAIT * min(most, first * 2 ** (attempt.number - 1))
        place = attempt.message.topic(), attempt.message.partition(), attempt.message.offset()
        self._failed[place] = attempt.number, self._job.monotonic() + wait

    def lost(self, attempt: Attempt, seconds: float, error: BaseException) -> None:
        """The hook: an attempt that failed while the lease was not proven does not count."""
        place = attempt.message.topic(), attempt.message.partition(), attempt.message.offset()
        self._failed[place] = attempt.number - 1, 0.0

    def _seconds(self) -> float:
        """How much longer than usual an attempt takes."""
        chance = self._job.random
        may_hang = self._timeout is not None and self._hangs < MOST_HANGS and not self._job.is_calm
        if may_hang and chance.random() < HANGING:
            self._hangs += 1
            return chance.uniform(*HANG_TIMEOUTS) * (self._timeout or 0.0)
        return chance.uniform(0.0, SLOW_INTERVALS) * self._hi if chance.random() < SLOW else 0.0

    def _check(self, attempt: Attempt, place: tuple[str | None, int | None, int | None]) -> None:
        """Each attempt follows its predecessor, when it is due, and none is of a paused partition."""
        job, now = self._job, self._job.monotonic()
        number, due = self._failed.get(place, (0, 0.0))
        if attempt.number > 1 and attempt.number != number + 1:
            raise RuntimeError(f"{attempt} comes after try {number}")
        if attempt.number > 1 and now < due - ROUNDING_S:
            raise RuntimeError(f"{attempt} comes {1000 * (due - now):.1f} ms before it is due")
        since = self.held.get((*place[:2], attempt.epoch))
        is_first = attempt.number == 1 and place not in self.listed
        if job.in_lists:
            self.listed.add(place)
        if since is not None and is_first and now > since + TAKEN_UP_S + self.linger:
            raise RuntimeError(f"{attempt}: its partition is held back")


def work_in_lanes(job: Job, marshal: Marshal, consumer: Consumer, timeout: float | None) -> None:
    """Run until stopped or a final failure; timeout: how long a handler may take (s)."""
    chance, hi = job.random, job.heartbeat_interval_ms / 1000
    retry = Retry(chance.randint(2, 5), (chance.choice([0.0, 0.02, 0.1]) * hi, 0.3 * hi), (FailedError,))
    handling = _Handling(job, retry, timeout)
    if chance.random() < HOLDING_SHARE:
        job.start(partial(_hold_back, job, marshal, consumer, handling))
    while not marshal.stopping:
        handle: Callable[[Any], object] = handling
        lists: RunSettings = {}
        if job.in_lists:
            lists["batch"], lists["linger"] = job.list_options()
            handle, handling.linger = InLists(job, handling.drawn, handling.failed), lists["linger"]
        run = partial(
            consumer.run,
            handle,
            concurrency=chance.randint(1, 8),
            order=job.order,
            retry=retry,
            hooks=[Hooks(lost=handling.lost)],
            drain_timeout=chance.choice([0.1, 2.0]) * hi,
            **lists,
        )
        try:
            job.again(run)
        except (FailedError, FinalError):
            if not job.is_interrupted and chance.random() < 0.5:
                return


def _hold_back(job: Job, marshal: Marshal, consumer: Consumer, handling: _Handling) -> None:
    """Another thread: pauses a random partition from time to time."""
    hi = job.heartbeat_interval_ms / 1000
    while not marshal.stopping:
        job.sleep(job.random.uniform(*OPEN_INTERVALS) * hi)
        if not (assigned := consumer.assignment()):
            continue
        chosen = job.random.choice(assigned)
        consumer.pause([chosen])
        handling.held[chosen.topic, chosen.partition, chosen.epoch] = job.monotonic()
        job.sleep(job.random.uniform(*HELD_INTERVALS) * hi)
        handling.held.clear()
        consumer.resume([chosen])
