"""A round of claimed batches: its batch, its job tag, and how its jobs are cancelled when a lease is lost."""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import wraps
from typing import ParamSpec, TypeVar

from py4j.protocol import Py4JError
from pyspark import SparkContext

from kafka_marshal import arguments
from kafka_marshal.client.attempt import GroupKind
from kafka_marshal.client.ranges import GroupRangeConsumer, RangeConsumer
from kafka_marshal.engine.work.ranges import OffsetRange
from kafka_marshal.errors import LeaseLostError
from kafka_marshal.logs import log
from kafka_marshal.types import Key

P = ParamSpec("P")
T = TypeVar("T")

#: Local property of a thread: whether tasks of its cancelled jobs are interrupted.
_INTERRUPT = "spark.job.interruptOnCancel"

#: Exceptions of Spark's calls if its Java process has ended or fn has stopped the session.
SPARK_IS_GONE: tuple[type[Exception], ...] = (Py4JError, OSError, AttributeError)

#: Interval at which jobs are cancelled again until fn returns, as it may start more.
CANCEL_EVERY_S = 0.2


@dataclass(frozen=True, slots=True)
class ClaimedBatch:
    """A round's offset ranges and leases."""

    #: Identifies these ranges under these epochs: suitable for file names.
    id: str
    group_id: str
    #: At most one per partition. last is the highest offset, not the number of rows.
    ranges: tuple[OffsetRange, ...]
    _consumer: RangeConsumer = field(repr=False, compare=False)
    _tagging: Callable[[], AbstractContextManager[object]] = field(default=nullcontext, repr=False, compare=False)

    @property
    def epochs(self) -> dict[Key, int]:
        """The fencing token of each partition."""
        return {(given.topic, given.partition): given.epoch for given in self.ranges}

    @property
    def leases(self) -> list[tuple[str, int, int, int]]:
        """(topic, partition, epoch, last offset) of each range, for ``sink.transaction``."""
        return [(given.topic, given.partition, given.epoch, given.last) for given in self.ranges]

    @property
    def kind(self) -> GroupKind:
        """Of which kind of group the epochs are, for ``sink.transaction``."""
        return "coordinated" if isinstance(self._consumer, GroupRangeConsumer) else "claimed"

    @property
    def count(self) -> int:
        """Number of offsets; there are fewer rows if Kafka has none for some (compaction, transaction markers)."""
        return sum(given.count for given in self.ranges)

    @property
    def valid(self) -> bool:
        """Whether all its leases are proven now, by this process's clock."""
        return all(self._consumer.is_valid(given) for given in self.ranges)

    def require(self) -> None:
        """Raise LeaseLostError unless ``valid``; call it before irreversible actions."""
        lost = [given for given in self.ranges if not self._consumer.is_valid(given)]
        if lost:
            raise LeaseLostError(
                f"{_name(lost[0])}: its lease (epoch {lost[0].epoch}) is lost, or can't be proven now. Nothing of this "
                "batch is committed by this driver; the partition's next holder gets it again"
            )

    def tagged(self, function: Callable[P, T]) -> Callable[P, T]:
        """Wrap a function for threads that fn starts, so that a lost lease cancels its Spark jobs, too.

        Spark keeps job tags by thread, and new threads or a pool's threads don't inherit them:
        ``pool.submit(batch.tagged(write), part)``. (PySpark's ``inheritable_thread_target(spark)`` does the same.)
        Wait for the threads in fn: when fn has returned, the round is over.
        """
        if not callable(function):
            raise arguments.wrong("function", "a function", function)
        tagging = self._tagging

        @wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> T:
            with tagging():
                return function(*args, **kwargs)

        return run


@dataclass(frozen=True, slots=True)
class Totals:
    """Totals of a call of ``foreach_batch``."""

    batches: int = 0
    #: Offsets, not rows: see ClaimedBatch.count.
    records: int = 0


class Round:
    """The running round, as the thread that notices lost leases sees it."""

    def __init__(self, batch: ClaimedBatch, cancel: Callable[[], None]) -> None:
        self.batch = batch
        self._cancel = cancel
        self._over = threading.Event()
        self._canceller: threading.Thread | None = None
        self._lock = threading.Lock()
        self.lost: set[Key] = set()

    def lose(self, keys: set[Key]) -> None:
        """Leases are lost: if some are of this round, cancel its jobs until fn has returned."""
        with self._lock:
            self.lost |= keys & self.batch.epochs.keys()
            if self.lost and self._canceller is None and not self._over.is_set():
                self._canceller = threading.Thread(
                    target=self._keep_cancelling, name="kafka-marshal-cancel", daemon=True
                )
                self._canceller.start()

    def _keep_cancelling(self) -> None:
        while not self._over.is_set():
            try:
                self._cancel()
            except SPARK_IS_GONE as error:
                text = "batch %s: its jobs were not cancelled, trying again: %s"
                log(logging.WARNING, "not_cancelled", text, self.batch.id, error, batch=self.batch.id)
            self._over.wait(CANCEL_EVERY_S)

    def end(self) -> None:
        """fn has returned: stop cancelling."""
        with self._lock:
            self._over.set()
        if self._canceller is not None:
            self._canceller.join()


def batch_id(group_id: str, ranges: Sequence[OffsetRange]) -> str:
    """16 hex digits that identify the group, the ranges and their epochs."""
    content = [group_id, *sorted((x.topic, x.partition, x.first, x.last, x.epoch, x.done) for x in ranges)]
    return hashlib.blake2b(json.dumps(content).encode(), digest_size=8).hexdigest()


def tag_of(batch_id: str) -> str:
    """The job tag of a round."""
    return f"kafka-marshal-{batch_id}"


@contextmanager
def tagged(context: SparkContext, tag: str) -> Iterator[None]:
    """Tag the jobs that this thread starts within the block, and let their tasks be interrupted when cancelled."""
    interrupting = context.getLocalProperty(_INTERRUPT)
    context.addJobTag(tag)
    context.setInterruptOnCancel(True)
    try:
        yield
    finally:
        with unless_gone(tag):
            context.removeJobTag(tag)
            context.setLocalProperty(_INTERRUPT, interrupting)  # type: ignore[arg-type]  # None removes it


@contextmanager
def unless_gone(what: str) -> Iterator[None]:
    """Clean up in Spark unless it is gone, without hiding an exception of fn."""
    try:
        yield
    except SPARK_IS_GONE as error:
        log(logging.DEBUG, "spark_gone", "%s: Spark is gone, nothing to clean up there: %s", what, error)


def _name(given: OffsetRange) -> str:
    return f"{given.topic} [{given.partition}]"
