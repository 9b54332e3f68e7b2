"""Claimed batches: a Spark driver that claims partitions, reads them round by round, and commits through the log.

A round, from top to bottom::

    take      ranges of all partitions held: done + 1 … log end, capped      (at most once: granted first)
    read      one DataFrame of Spark's Kafka connector over all of them      (reading.py; at most once: its gate)
    fn        the user's function; meanwhile heartbeats are sent and the next round's log ends are looked up
    commit    done, if every lease of the round still holds; else nothing is, and ranges that still hold are repeated

A lost lease cancels the Spark jobs of the round. A fenced sink rejects what they still write by the batch's epochs
(C9).

With ``group=True`` the driver is a member of a coordinated group instead. If that takes checkpoints, a round commits
nothing, and its end is the cut (X13).
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import wraps
from types import MappingProxyType, TracebackType
from typing import Any, Self
from weakref import WeakMethod

from py4j.protocol import Py4JError
from pyspark import SparkContext
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from kafka_marshal import arguments
from kafka_marshal.checkpoints import CheckpointPolicy
from kafka_marshal.client.attempt import GroupKind
from kafka_marshal.client.checkpointing import CheckpointStatus
from kafka_marshal.client.group_consumer import MemberPiece
from kafka_marshal.client.marshal import Marshal
from kafka_marshal.client.modes import Claims, Group
from kafka_marshal.client.options import check_callback, says_new
from kafka_marshal.client.ranges import GroupRangeConsumer, PiecesOfRangesCallback, RangeConsumer, RangesCallback
from kafka_marshal.engine.work.ranges import OffsetRange
from kafka_marshal.engine.work.stuck import Stuck, unrepresentable
from kafka_marshal.errors import (
    AlreadyReadError,
    ClosedError,
    ConfigurationError,
    LeaseLostError,
    MarshalError,
    PartitionStuckError,
    RangeGoneError,
    SparkSetupError,
    StaleEpochError,
)
from kafka_marshal.logs import log
from kafka_marshal.pipeline.reading import (
    ALREADY_READ,
    MOST_JAVA_MS,
    Gate,
    check_options,
    check_properties,
    first_beyond,
    java_properties,
    read_ranges,
    refuse_lost,
    refuse_missing,
    without_done,
)
from kafka_marshal.pipeline.session import check_session, first_line, kafka_options
from kafka_marshal.runtime import MOST_STAMP_MS
from kafka_marshal.types import Delivery, Key, Offsets, P, Start, T, TopicPartition, WhenStuck

__all__ = ["ClaimedBatch", "ClaimedBatches", "Totals"]


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


class CheckpointCalls:
    """The calls for checkpoints; ConfigurationError if the driver claims its partitions."""

    _consumer: RangeConsumer

    def checkpoint(self) -> None:
        """Begin a checkpoint of the group now, and return at once. In fn: this round is in it, once fn has returned."""
        self._member_for("checkpoint()").checkpoint()

    def rollback(self, to: int | None = None) -> None:
        """Have all members go back, as :meth:`GroupRangeConsumer.rollback`; the round at work is cancelled."""
        self._member_for("rollback()").rollback(to)

    @property
    def checkpoints(self) -> CheckpointStatus:
        """What this driver knows of the group's checkpoints, now."""
        return self._member_for("checkpoints").checkpoints

    def _member_for(self, what: str) -> GroupRangeConsumer:
        if isinstance(self._consumer, GroupRangeConsumer):
            return self._consumer
        raise ConfigurationError(
            f"{what} is for a group that takes checkpoints, and these batches claim their partitions. Nothing was "
            "changed. Use mode=Group() and checkpoints=CheckpointPolicy(), at all drivers of the group"
        )


_NOTHING: Mapping[str, str] = MappingProxyType({})

_CLAIMS = Claims()

#: Wait between two checks for other drivers' progress, once everything is done here.
WAIT_S = 0.1


#: The user's function, called with the round's rows and their description.
BatchFunction = Callable[[DataFrame, ClaimedBatch], object]


class ClaimedBatches(CheckpointCalls):
    """Claims partitions of these topics for this Spark driver and delivers their records in rounds.

    ``max_records_per_batch``: most offsets of one round, shared fairly over the partitions held.

    ``mode``: :class:`Claims`, or :class:`Group`: this driver is a member of a coordinated group.

    ``delivery``: ``"at-least-once"`` (a failed round is repeated) or ``"at-most-once"`` (a round is granted by the log
    before it is read; a failure loses it).

    ``handler_timeout`` (seconds): how long a round may take, else its leases go to other members.

    ``revoke_timeout`` (seconds, 600 by default): the same for a round with a lease that another member claims.

    ``checkpoints`` (with ``mode=Group()``): a round commits nothing; progress moves when a checkpoint is complete, with
    the state that ``on_checkpoint`` saves between two rounds.

    ``start``, ``position_lost`` and the callbacks are those of :meth:`Marshal.ranges`.

    ``options``: for Spark's Kafka connector (``minPartitions``, ``includeHeaders``, ``kafka.…``); the connection is the
    Marshal's, translated for Spark.

    Raises SparkSetupError (no connector, or versions that do not match), TopicAbsentError, and ConfigurationError for
    what can't work, such as at most once with ``spark.speculation`` or ``spark.task.maxFailures`` above 1.
    """

    @says_new
    def __init__(
        self,
        spark: SparkSession,
        marshal: Marshal,
        topics: Sequence[str],
        *,
        max_records_per_batch: int = 1_000_000,
        mode: Claims | Group = _CLAIMS,
        delivery: Delivery = "at-least-once",
        start: Start = "earliest",
        handler_timeout: float | None = None,
        revoke_timeout: float | None = None,
        position_lost: WhenStuck = "leave",
        checkpoints: CheckpointPolicy | None = None,
        on_assign: RangesCallback | PiecesOfRangesCallback | None = None,
        on_revoke: RangesCallback | PiecesOfRangesCallback | None = None,
        on_lost: RangesCallback | PiecesOfRangesCallback | None = None,
        options: Mapping[str, str] = _NOTHING,
    ) -> None:
        _check_kind(spark)
        options = check_options(options)
        arguments.an_instance("marshal", marshal, Marshal, "a Marshal")
        max_records_per_batch = arguments.a_whole("max_records_per_batch", max_records_per_batch, 1)
        check_callback("on_lost", on_lost)
        if not marshal.bootstrap_servers:
            raise ConfigurationError(
                "this Marshal is not on a real Kafka, so Spark can't read there. Nothing was claimed"
            )
        check_session(spark)
        check_properties(options, java_properties(spark))
        if delivery == "at-most-once":
            _check_at_most_once(spark)
        self._spark = spark
        self._marshal = marshal
        self._max_records = max_records_per_batch
        self._at_most_once = delivery == "at-most-once"
        self._on_lost: Callable[..., object] | None = on_lost
        self._has_state = checkpoints is not None and checkpoints.on_checkpoint is not None
        self._takes_checkpoints = checkpoints is not None
        self._round: Round | None = None
        self._working = threading.Lock()
        self._options = kafka_options(marshal.bootstrap_servers, marshal.config, options)
        self._gate = Gate(spark) if self._at_most_once else None
        try:
            make: Callable[..., RangeConsumer] = marshal.ranges
            self._consumer = make(
                topics,
                mode=mode,
                delivery=delivery,
                start=start,
                handler_timeout=handler_timeout,
                revoke_timeout=revoke_timeout,
                position_lost=position_lost,
                checkpoints=checkpoints,
                on_assign=on_assign,
                on_revoke=on_revoke,
                on_lost=_weakly(self._lost),
            )
        except BaseException:
            self._close_gate()
            raise
        if self._gate is not None:
            self._consumer.at_end = self._gate.close
        try:
            refuse_missing(self._consumer.missing_topics())
        except BaseException:
            self.close()
            raise

    # Working.

    def foreach_batch(
        self,
        fn: BatchFunction,
        *,
        available_now: bool = False,
        until: Mapping[Key, int] | None = None,
    ) -> Totals:
        """Call fn(df, batch) round after round, and commit each round through the log when fn has returned.

        Runs until ``marshal.stop()`` or ``close()``, unless ``available_now`` (records that exist now) or ``until``
        ((topic, partition) → the first offset not wanted) set an end. Then it returns when, by the log, the *group* has
        done everything up to there: if another driver dies with its part, this one does it. ``df`` has the columns of
        Spark's Kafka connector, without rows that are already done.

        Exceptions of fn are raised to the caller. Nothing of that round is committed then, and the next call delivers
        its records again, with later ones (at most once: not again, as they were granted). A round that lost a lease
        is no error: a warning is logged, nothing of it is committed, and the ranges whose leases still hold are
        delivered again. Jobs of threads that fn starts are cancelled with it if ``batch.tagged`` wraps their function.

        A partition whose position is lost is skipped (``lost_positions``); with ``available_now`` or ``until``,
        PositionLostError is raised when all others are done.

        Raises ConfigurationError if ``until`` names a partition that does not exist or is of another topic,
        PartitionStuckError if Spark can't represent a record's timestamp, SparkSetupError if fn has stopped the
        session, RangeGoneError if retention deleted a part of a round while it was read (the next call continues
        behind it and adds it to ``gaps``), AlreadyReadError (at most once), and what ``RangeConsumer.take`` raises.
        """
        arguments.a_function("fn", fn, "df, batch")
        arguments.a_flag("available_now", available_now)
        if until is not None:
            arguments.offsets("until", until)
        if self._consumer.closed:
            raise ClosedError("these claimed batches are closed; nothing was claimed. Make others")
        if not self._working.acquire(blocking=False):
            raise ConfigurationError(
                "foreach_batch runs already; one round at a time. Make another Marshal for another"
            )
        try:
            ends: Mapping[Key, int] | None = None
            if available_now or until is not None:
                ends = self._consumer.ends()
            if until is not None:
                _check_until(until, ends or {})
                ends = until
            batches = records = 0
            while not self._is_over():
                self._refuse_stopped()
                ranges = self._take(ends)
                if ranges:
                    if self._handle(fn, ranges):
                        batches, records = batches + 1, records + sum(given.count for given in ranges)
                elif ends is None or self._is_over() or self._consumer.wait_done(ends, WAIT_S):
                    break
            if not self._is_over():
                refuse_lost(self._consumer.lost_positions, ends or {})
            return Totals(batches, records)
        finally:
            self._working.release()

    def _take(self, ends: Mapping[Key, int] | None) -> list[OffsetRange]:
        try:
            return self._consumer.take(self._max_records, ends, timeout=None if ends is None else 0.0)
        except ClosedError:
            if self._consumer.closed:  # by another thread
                return []
            raise

    def _refuse_stopped(self) -> None:
        if self._spark.sparkContext._jsc is None:
            raise SparkSetupError(
                "This Spark session was stopped (spark.stop()), in fn or by another thread: no further round can be "
                "read. What was committed stays done, the rest comes again. Make another session with "
                "kafka_marshal.pipeline.session.spark_session(), and ClaimedBatches on it"
            )

    def _is_over(self) -> bool:
        return self._marshal.stopping or self._consumer.closed

    def _handle(self, fn: BatchFunction, ranges: list[OffsetRange]) -> bool:
        """Run one round; returns whether it was committed."""
        group_id = self._marshal.group_id
        number, context = batch_id(group_id, ranges), self._spark.sparkContext
        batch = ClaimedBatch(number, group_id, tuple(ranges), self._consumer, lambda: tagged(context, tag_of(number)))
        called = False
        try:
            with self._gate.letting_in(batch.id) if self._gate else nullcontext():
                df = self._frame(batch)
                if not self._at_most_once:
                    self._consumer.look_ahead()
                called = True
                lost = self._call(fn, df, batch)
        except BaseException as error:
            self._undo(ranges, called)
            if (ours := self._explain(error, batch)) is not None:
                raise ours from error
            raise
        if lost is False and self._consumer.done(ranges, flush=True, together=True):
            return True
        goes_back = self._has_state and lost is not None and any(map(self._consumer.holds, ranges))
        self._undo(ranges, called)
        text = "batch %s: a lease of it was lost while it was at work. %s"
        log(logging.WARNING, "batch_lost", text, batch.id, self._fate(), batch=batch.id)
        if goes_back:  # fn has returned: its state has what comes again
            self.rollback()
        return False

    def _frame(self, batch: ClaimedBatch) -> DataFrame:
        df = read_ranges(self._spark, batch.ranges, self._options)
        if self._gate is not None:
            df = self._gate.guarded(df, batch.id)
        return without_done(df, batch.ranges)

    def _call(self, fn: BatchFunction, df: DataFrame, batch: ClaimedBatch) -> bool | None:
        """Call fn under the batch's job tag; returns whether a lease was lost meanwhile. None: fn raised for that."""
        context, tag = self._spark.sparkContext, tag_of(batch.id)
        at_work = Round(batch, lambda: context.cancelJobsWithTag(tag))
        self._round = at_work
        at_work.lose({(given.topic, given.partition) for given in batch.ranges if not self._consumer.holds(given)})
        try:
            with tagged(context, tag):
                fn(df, batch)
        except Exception as error:
            if not at_work.lost and not self._is_of_leases(error, batch):
                raise
            text = "batch %s: stopped with its lease: %s"
            log(logging.WARNING, "batch_lost", text, batch.id, first_line(error), batch=batch.id)
            return None
        except BaseException:  # Ctrl-C: Spark would continue its jobs
            with unless_gone(batch.id):
                context.cancelJobsWithTag(tag)
            raise
        finally:
            self._round = None
            at_work.end()
        return bool(at_work.lost)

    def _is_of_leases(self, error: Exception, batch: ClaimedBatch) -> bool:
        """Whether a lease that is lost or can't be proven caused this error.

        A sink, here or in an executor, may know a newer epoch before our replica does. Without a lost lease, it is an
        ordinary error.
        """
        kinds = (StaleEpochError, LeaseLostError)
        if not isinstance(error, kinds) and not any(kind.__name__ in str(error) for kind in kinds):
            return False
        if not batch.valid:
            return True
        return self._consumer.wait_lost(batch.ranges, 2 * self._marshal.heartbeat_interval)

    def _lost(self, consumer: RangeConsumer, partitions: list[TopicPartition] | list[MemberPiece]) -> None:
        """on_lost, on the callback thread."""
        at_work = self._round
        if at_work is not None:
            at_work.lose({(lost.topic, lost.partition) for lost in partitions})
        if self._on_lost is not None:
            self._on_lost(consumer, partitions)

    # After a failure.

    def _undo(self, ranges: list[OffsetRange], called: bool) -> None:
        """Give back an uncommitted round. At most once, what fn was called with is not delivered again."""
        if self._at_most_once and called:
            self._consumer.done([given for given in ranges if self._consumer.holds(given)])
        else:
            self._consumer.give_back(ranges)

    def _fate(self) -> str:
        if self._at_most_once:
            return "It was granted before it was read, so no member gets it again (at most once)"
        return "Nothing of it is committed; it comes again, here or at the partitions' next holders"

    def _explain(self, error: BaseException, batch: ClaimedBatch) -> MarshalError | None:
        """Add to an error what it means for the data; raise a MarshalError if the cause is known."""
        if isinstance(error, PySparkException | Py4JError):
            if self._at_most_once and ALREADY_READ in str(error):
                return AlreadyReadError(
                    f"batch {batch.id}: {ALREADY_READ}. At most once, a row is read one time: by one action, or from a "
                    "cache of your own (df = df.cache()). The batch was granted and is not repeated; the next call "
                    "continues behind it"
                )
            gone = self._gone(batch)
            if gone:
                return RangeGoneError(
                    f"batch {batch.id}: {', '.join(_interval(*each) for each in gone)} went from the log while they "
                    f"were read (retention, or DeleteRecords). {self._fate()}. What is gone is then in gaps; "
                    "process faster than retention deletes, or keep the topic's records for longer",
                    gone=gone,
                )
        if (place := self._wrong_stamp(error, batch)) is not None:
            topic, partition, offset, stamp = place
            text = unrepresentable(topic, partition, offset, stamp, self._marshal.group_id)
            if isinstance(error, PySparkException | Py4JError):
                return PartitionStuckError(
                    f"batch {batch.id}: {text}. {self._fate()}", topic=topic, partition=partition, offset=offset
                )
            error.add_note(f"kafka-marshal: {text}.")
        error.add_note(f"kafka-marshal: batch {batch.id} ({batch.count} offsets) failed. {self._fate()}.")
        return None

    def _wrong_stamp(self, error: BaseException, batch: ClaimedBatch) -> tuple[str, int, int, int] | None:
        """The first record of the batch whose timestamp caused this error: its place and timestamp (ms)."""
        if isinstance(error, PySparkException | Py4JError) and "long overflow" in str(error):
            most = MOST_JAVA_MS
        elif isinstance(error, ValueError | OverflowError) and "out of range" in str(error):
            most = MOST_STAMP_MS
        else:
            return None
        try:
            return first_beyond(self._marshal.bootstrap_servers, self._marshal.config, batch.ranges, most)
        except MarshalError as failure:
            text = "batch %s: its timestamps could not be checked: %s"
            log(logging.WARNING, "look_up_failed", text, batch.id, failure, batch=batch.id)
            return None

    def _gone(self, batch: ClaimedBatch) -> list[tuple[str, int, int, int]]:
        """The parts of the batch that retention has deleted."""
        try:
            starts = self._consumer.starts(batch.epochs)
        except MarshalError as error:
            text = "batch %s: log starts not found: %s"
            log(logging.WARNING, "look_up_failed", text, batch.id, error, batch=batch.id)
            return []
        found = []
        for given in batch.ranges:
            start = starts.get((given.topic, given.partition), 0)
            if start > given.first:
                found.append((given.topic, given.partition, given.first, min(given.last, start - 1)))
        return found

    # Looking.

    def assignment(self) -> list[TopicPartition]:
        """The partitions held by this driver, sorted, each with the next offset to be delivered."""
        return self._consumer.assignment()

    @property
    def lost_positions(self) -> list[Stuck]:
        """Partitions whose position is lost: no member works on them until it is set."""
        return self._consumer.lost_positions

    @property
    def gaps(self) -> list[Offsets]:
        """Offsets that retention deleted before they were handled."""
        return self._consumer.gaps

    @property
    def unprocessed(self) -> list[Offsets]:
        """At most once: offsets granted but never passed to fn."""
        return self._consumer.unprocessed

    # Ending.

    def close(self) -> None:
        """Release all partitions with their offsets. A running round is not committed. May be called twice.

        With checkpoints, this driver leaves at one, which waits for a running round, for up to 30 seconds.
        """
        at_work = self._round
        if at_work is not None and not (self._consumer.closed or self._takes_checkpoints):
            text = "closed while batch %s is at work: nothing of it is committed. %s"
            log(logging.WARNING, "batch_unconfirmed", text, at_work.batch.id, self._fate(), batch=at_work.batch.id)
        self._consumer.close()
        self._close_gate()

    def _close_gate(self) -> None:
        if self._gate is not None:
            self._gate.close()

    def __repr__(self) -> str:
        return f"ClaimedBatches({self._consumer!r})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if error is not None:
            self._consumer._left_by(error)
        self.close()


def _weakly(method: Callable[[RangeConsumer, Any], None]) -> Callable[[RangeConsumer, Any], None]:
    """The same callback with only a weak reference to its object, so that its end is noticed."""
    mine = WeakMethod(method)

    def call(consumer: RangeConsumer, partitions: Any) -> None:
        if (found := mine()) is not None:
            found(consumer, partitions)

    return call


def _check_until(until: Mapping[Key, int], known: Mapping[Key, int]) -> None:
    """Refuse to wait for a partition that no driver of the group can get."""
    for topic, partition in until:
        if (topic, partition) not in known:
            here = ", ".join(sorted({name for name, _ in known})) or "no topic that exists"
            raise ConfigurationError(
                f"until: {topic} [{partition}] is no partition of what this driver reads ({here}), so the call would "
                "wait for ever. Nothing was read. Correct the topic or the partition's number"
            )


def _check_kind(spark: SparkSession) -> None:
    if "connect" in type(spark).__module__:
        raise ConfigurationError(
            "claimed batches need a Spark session whose driver is this process: a session of Spark Connect can't "
            "cancel the jobs of a lost lease. Nothing was claimed; make one with "
            "kafka_marshal.pipeline.session.spark_session()"
        )
    if not hasattr(spark, "readStream"):  # by its methods: the class may be a subclass or a test double
        raise arguments.wrong("spark", "a SparkSession", spark, "Nothing was claimed")


def _check_at_most_once(spark: SparkSession) -> None:
    """Refuse settings under which Spark itself repeats a read."""
    conf = spark.sparkContext.getConf()
    if str(conf.get("spark.speculation", "false")).lower() == "true":
        raise ConfigurationError(
            "at most once can't be kept with spark.speculation: it runs a task twice at the same time. Nothing was "
            "claimed. Turn it off, or use delivery='at-least-once'"
        )
    tries = str(conf.get("spark.task.maxFailures", "4"))
    failures = _task_max_failures(spark.sparkContext.master or "", tries)
    if failures > 1:
        raise ConfigurationError(
            f"at most once can't be kept with {failures} tries of a task (spark.task.maxFailures, 4 where it is not "
            "set; with local[N,F] it is F): a task that fails is started again. Nothing was claimed. Set "
            "spark.task.maxFailures=1, or use delivery='at-least-once'"
        )


def _task_max_failures(master: str, setting: str) -> int:
    """How often Spark tries a task: inside one process it ignores the setting."""
    if (tries := re.fullmatch(r"local\[\s*[\d*]+\s*,\s*(\d+)\s*\]", master)) is not None:
        return int(tries[1])
    if re.fullmatch(r"local(\[\s*[\d*]+\s*\])?", master):
        return 1
    return int(setting)


def _interval(topic: str, partition: int, first: int, last: int) -> str:
    return f"{topic} [{partition}] offsets {first} to {last}"
