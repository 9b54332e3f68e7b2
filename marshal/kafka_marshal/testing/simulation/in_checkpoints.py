"""Workers that count messages, and keep their counts with the group's checkpoints; some saves fail, some are slow."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress

from kafka_marshal.adapters.message import Message
from kafka_marshal.checkpoints import Checkpoint, CheckpointPiece, CheckpointPolicy, Restore, Store
from kafka_marshal.client.attempt import Attempt
from kafka_marshal.client.batch import Batch
from kafka_marshal.client.group_consumer import GroupConsumer
from kafka_marshal.client.handling import Retry
from kafka_marshal.client.marshal import Marshal
from kafka_marshal.client.modes import Group
from kafka_marshal.errors import ConfigurationError, StateError
from kafka_marshal.files import Files
from kafka_marshal.testing.simulation.holdings import place_of
from kafka_marshal.testing.simulation.process import FailedError, Job
from kafka_marshal.testing.simulation.scenario import Client, Counting
from kafka_marshal.types import Key, Strategy

#: In the message of each error that the story plans.
PLANNED = "as this story has it"

#: The share of saves that raise, of those that return a Future which may fail, and of those that are slow.
FAILING, IN_FUTURES, SLOW = 0.2, 0.3, 0.2
#: The share of handlers that take longer, and how long at most (HI); and of those that hang, how often and how long.
LONG, LONG_INTERVALS = 0.01, 1.5
HANGING, MOST_HANGS, HANG_TIMEOUTS = 0.003, 2, (1.2, 3.0)
#: The share of messages before which the program asks for a checkpoint.
ASKING = 0.004
#: The share of attempts of a handler that fail (``run``).
TRY_FAILING = 0.05
#: How long a handler may take if there is a limit (HI).
TIMEOUT_INTERVALS = 4.0


class _Memory(Files):
    """Files that all processes of a story share."""

    name: str = "memory"

    def __init__(self, files: dict[str, bytes]) -> None:
        self._files = files

    def check(self) -> None:
        """It is always there."""

    def write(self, path: str, data: bytes) -> None:
        self._files[path] = data

    def read(self, path: str) -> bytes | None:
        return self._files.get(path)

    def names(self, folder: str) -> list[str]:
        return [path.rpartition("/")[2] for path in self._files if path.startswith(f"{folder}/")]

    def delete(self, paths: list[str]) -> None:
        for path in paths:
            self._files.pop(path, None)


class _Counts:
    """How often one process has handled each message, by partition."""

    def __init__(self, job: Job, counting: Counting) -> None:
        self._job = job
        self._fails = counting.fails
        self._hi = job.heartbeat_interval_ms / 1000
        self._states = Store(_Memory(job.files))
        #: Partition → offset → (how often, key).
        self._counts: dict[Key, dict[int, tuple[int, str | None]]] = {}

    def add(self, message: Message) -> None:
        """Count a message that was handled."""
        key, offset = place_of(message)
        counts, value = self._counts.setdefault(key, {}), message.key()
        counts[offset] = counts.get(offset, (0, None))[0] + 1, value.decode() if isinstance(value, bytes) else value

    def save(self, checkpoint: Checkpoint) -> Future[None] | None:
        """on_checkpoint."""
        job, chance = self._job, self._job.random
        job.calls_back(checkpoint)
        is_failing = self._fails and not job.is_calm and chance.random() < FAILING
        longest = self._hi * (2.0 if self._fails and not job.is_calm else 0.3)
        seconds = chance.random() * longest if chance.random() < SLOW else 0.0
        states = [(piece, self._encoded(piece)) for piece in checkpoint.pieces]
        if chance.random() >= IN_FUTURES:
            job.sleep(seconds)
            self._write(checkpoint, states, is_failing)
            return None
        future: Future[None] = Future()

        def later() -> None:
            job.sleep(seconds)
            try:
                self._write(checkpoint, states, is_failing)
            except StateError as error:
                future.set_exception(error)
            else:
                future.set_result(None)

        job.start(later)
        return future

    def _encoded(self, piece: CheckpointPiece) -> bytes:
        counts = self._counts.get(piece.key, {})
        return json.dumps({x: each for x, each in counts.items() if piece.holds(each[1], x)}).encode()

    def _write(self, checkpoint: Checkpoint, states: list[tuple[CheckpointPiece, bytes]], is_failing: bool) -> None:
        if is_failing:
            raise StateError(f"not saved, {PLANNED}")
        for piece, state in states:
            self._states.save(checkpoint.id, piece, state)
        self._states.collect(checkpoint)

    def restore(self, restore: Restore) -> None:
        """on_restore."""
        job = self._job
        job.calls_back(restore)
        if job.random.random() < SLOW:
            job.sleep(job.random.random() * self._hi * 0.5)
        for piece in restore.pieces:
            counts = self._counts.setdefault(piece.key, {})
            for offset in [x for x, (_, key) in counts.items() if piece.holds(key, x)]:
                del counts[offset]
            for part in self._states.load_parts(piece, missing=b"{}"):
                for offset, (times, key) in json.loads(part.state).items():
                    if part.holds(key, int(offset)):
                        counts[int(offset)] = times, key
        job.restored(restore)


class _Working:
    """Handlers of one process."""

    def __init__(self, job: Job, counts: _Counts, consumer: GroupConsumer, counting: Counting, timeout: float | None):
        self._job = job
        self._counts = counts
        self._consumer = consumer
        self._fails = counting.fails
        self._timeout = timeout
        self._hangs = 0

    def before(self) -> None:
        """What the program asks for."""
        job, consumer = self._job, self._consumer
        if job.goes_back and (kept := consumer.checkpoints.kept):
            job.goes_back = False
            with suppress(ConfigurationError):  # it is gone meanwhile
                consumer.rollback(job.random.choice([None, *(each.id for each in kept)]))
        elif job.random.random() < ASKING:
            consumer.checkpoint()

    def handle(self, message: Message) -> None:
        """Handle a message, and count it."""
        self._job.handle(message, self._seconds())
        self._counts.add(message)

    def try_it(self, message: Message) -> None:
        """The handler of ``run``: some attempts fail, and leave the counts as they were."""
        self.before()
        if self._job.random.random() < TRY_FAILING and not Attempt.current().is_last:
            self._job.fail(message, self._seconds())
            raise FailedError
        self.handle(message)

    def _seconds(self) -> float:
        """How much longer than usual it takes."""
        job, hi = self._job, self._job.heartbeat_interval_ms / 1000
        if not self._fails or job.is_calm:
            return 0.0
        chance = job.random.random
        if self._timeout is not None and self._hangs < MOST_HANGS and chance() < HANGING:
            self._hangs += 1
            return job.random.uniform(*HANG_TIMEOUTS) * self._timeout
        return chance() * LONG_INTERVALS * hi if chance() < LONG else 0.0


def work_with_checkpoints(job: Job, client: Client, counting: Counting) -> None:
    """Run until stopped, as one of the ways to receive messages."""
    hi, chance = job.heartbeat_interval_ms / 1000, job.random
    timeout = chance.choice([None, TIMEOUT_INTERVALS * hi])
    counts = _Counts(job, counting)
    policy = CheckpointPolicy(
        every=max(0.1, counting.every * hi),
        keep=counting.keep,
        drain=counting.drain * hi,
        timeout=max(0.1, counting.timeout * hi),
        hold=counting.hold,
        on_checkpoint=counts.save,
        on_restore=counts.restore,
        on_completed=job.calls_back,
    )
    strategy: Strategy = job.strategy or "sticky"
    group = Group(strategy=strategy, session_timeout=job.session_timeout, allow_key_share=counting.shares)
    with (
        job.marshal() as marshal,
        marshal.consumer(
            job.topics,
            mode=group,
            batch_size=chance.choice([10, 20, 50]),
            handler_timeout=timeout,
            auto_done=client.worker != "counts-explicit",
            checkpoints=policy,
        ) as consumer,
    ):
        working = _Working(job, counts, consumer, counting, timeout)
        _WAYS[client.worker](job, marshal, consumer, working)


def _iterate(job: Job, marshal: Marshal, consumer: GroupConsumer, working: _Working) -> None:
    for message in consumer:
        working.before()
        working.handle(message)


def _explicit(job: Job, marshal: Marshal, consumer: GroupConsumer, working: _Working) -> None:
    for message in consumer:
        working.before()
        working.handle(message)
        consumer.done(message)


def _batches(job: Job, marshal: Marshal, consumer: GroupConsumer, working: _Working) -> None:
    for batch in consumer.batches(job.random.choice([5, 30]), timeout=0.05):
        working.before()
        for message in batch:
            if not _has(consumer, batch):
                break
            working.handle(message)
        batch.done()  # of one that was lost it has no effect, but that the piece can be restored


def _has(consumer: GroupConsumer, batch: Batch) -> bool:
    return any(
        (x.topic, x.partition, x.epoch) == (batch.topic, batch.partition, batch.epoch) for x in consumer.assignment()
    )


def _lanes(job: Job, marshal: Marshal, consumer: GroupConsumer, working: _Working) -> None:
    hi = job.heartbeat_interval_ms / 1000
    retry = Retry(8, (0.02 * hi, 0.2 * hi), (FailedError,))
    while not marshal.stopping:
        consumer.run(working.try_it, concurrency=job.random.randint(1, 8), order=job.order, retry=retry)


_WAYS: dict[str, Callable[[Job, Marshal, GroupConsumer, _Working], None]] = {
    "counts": _iterate,
    "counts-explicit": _explicit,
    "counts-batches": _batches,
    "counts-lanes": _lanes,
}
