"""The worker of ``consumer.run``: handlers side by side, of which some fail, some take their time, and some hang."""

from __future__ import annotations

from functools import partial

from kafka_marshal.adapters.message import Message
from kafka_marshal.client.attempt import Attempt
from kafka_marshal.client.consumer import Consumer
from kafka_marshal.client.handling import Hooks, Retry
from kafka_marshal.client.marshal import Marshal
from kafka_marshal.testing.simulation.process import Job

__all__ = ["work_in_lanes"]

#: The share of tries that fail; of the last tries among them, those that fail all the same.
FAILING, LAST_FAILING = 0.1, 0.1
#: The share of tries that fail for good, and the same where calls are interrupted: there must be some; and of those
#: that end the process.
FINAL, FINAL_INTERRUPTED, FATAL = 0.002, 0.02, 0.0005
#: Of a back-off, at least (Retry).
LEAST_WAIT = 0.5
#: The share of tries that take longer, and how much, in HI, at most.
SLOW, SLOW_INTERVALS = 0.02, 1.0
#: The share of tries that hang, how often one process hangs, and how long, in handler timeouts.
HANGING, MOST_HANGS, HANG_TIMEOUTS = 0.01, 2, (1.2, 3.0)
#: The share of processes that hold partitions back, and for how long after which time, in HI.
HOLDING_SHARE, HELD_INTERVALS, OPEN_INTERVALS = 0.25, (0.3, 2.0), (1.0, 8.0)
#: What was taken up when its partition was held back is begun within this (s).
TAKEN_UP_S = 0.005
#: By clocks with fractions (s).
ROUNDING_S = 1e-6


class FailedError(Exception):
    """A handler's own: it is worth another try."""


class FinalError(Exception):
    """Another one, which is not."""


class _Handling:
    """The handlers of one process."""

    def __init__(self, job: Job, retry: Retry, timeout: float | None) -> None:
        self._job = job
        self._hi = job.heartbeat_interval_ms / 1000
        self._retry = retry
        self._timeout = timeout
        self._hangs = 0
        #: (topic, partition, offset) → the number of the try that failed last, and when the next one may begin (s).
        self._failed: dict[tuple[str | None, int | None, int | None], tuple[int, float]] = {}
        #: (topic, partition, epoch) → since when it is held back (s).
        self.held: dict[tuple[str | None, int | None, int], float] = {}

    def __call__(self, message: Message) -> None:
        job, attempt = self._job, Attempt.current()
        place = message.topic(), message.partition(), message.offset()
        self._look(attempt, place)
        seconds, chance = self._seconds(), job.random.random
        if chance() < FATAL and not job.is_calm:
            job.fail(message, seconds)
            raise SystemExit
        if chance() < (FINAL_INTERRUPTED if job.is_interrupted else FINAL) and not job.is_calm:
            job.fail(message, seconds)
            raise FinalError
        if chance() < FAILING and (not attempt.is_last or (chance() < LAST_FAILING and not job.is_calm)):
            job.fail(message, seconds)
            first, most = self._retry.backoff
            wait = LEAST_WAIT * min(most, first * 2 ** (attempt.number - 1))
            self._failed[place] = attempt.number, job.monotonic() + wait
            raise FailedError
        job.handle(message, seconds)

    def lost(self, attempt: Attempt, seconds: float, error: BaseException) -> None:
        """The hook: a try that failed while the lease was not proven counts for nothing."""
        place = attempt.message.topic(), attempt.message.partition(), attempt.message.offset()
        self._failed[place] = attempt.number - 1, 0.0

    def _seconds(self) -> float:
        """How much longer than usual a try takes."""
        chance = self._job.random
        may_hang = self._timeout is not None and self._hangs < MOST_HANGS and not self._job.is_calm
        if may_hang and chance.random() < HANGING:
            self._hangs += 1
            return chance.uniform(*HANG_TIMEOUTS) * (self._timeout or 0.0)
        return chance.uniform(0.0, SLOW_INTERVALS) * self._hi if chance.random() < SLOW else 0.0

    def _look(self, attempt: Attempt, place: tuple[str | None, int | None, int | None]) -> None:
        """Each try comes after the one before it, when it is due, and none of what is held back."""
        now = self._job.monotonic()
        number, due = self._failed.get(place, (0, 0.0))
        if attempt.number > 1 and attempt.number != number + 1:
            raise RuntimeError(f"{attempt} comes after try {number}")
        if attempt.number > 1 and now < due - ROUNDING_S:
            raise RuntimeError(f"{attempt} comes {1000 * (due - now):.1f} ms before it is due")
        since = self.held.get((*place[:2], attempt.epoch))
        if since is not None and attempt.number == 1 and now > since + TAKEN_UP_S:
            raise RuntimeError(f"{attempt}: its partition is held back")


def work_in_lanes(job: Job, marshal: Marshal, consumer: Consumer, timeout: float | None) -> None:
    """Until it is to stop, or a failure was final; timeout: how long a handler may take (s)."""
    chance, hi = job.random, job.heartbeat_interval_ms / 1000
    retry = Retry(chance.randint(2, 5), (chance.choice([0.0, 0.02, 0.1]) * hi, 0.3 * hi), (FailedError,))
    handling = _Handling(job, retry, timeout)
    if chance.random() < HOLDING_SHARE:
        job.start(partial(_hold_back, job, marshal, consumer, handling))
    while not marshal.stopping:
        run = partial(
            consumer.run,
            handling,
            concurrency=chance.randint(1, 8),
            order=job.order,
            retry=retry,
            hooks=[Hooks(lost=handling.lost)],
            drain_timeout=chance.choice([0.1, 2.0]) * hi,
        )
        try:
            job.again(run)
        except (FailedError, FinalError):
            if not job.is_interrupted and chance.random() < 0.5:
                return


def _hold_back(job: Job, marshal: Marshal, consumer: Consumer, handling: _Handling) -> None:
    """Another thread: now and then nothing is taken from a partition for a while."""
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
