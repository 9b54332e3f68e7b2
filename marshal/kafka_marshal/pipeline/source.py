"""``spark.readStream.format("kafka_marshal")``: a stream whose partitions are claimed, with offsets kept by the log.

Spark runs the two halves in different places::

    ClaimedStream   the driver's Python worker, one process per running query: claims, heartbeats, ranges
    read_piece      the executors' workers: read ranges with librdkafka, return Arrow batches

For Spark an offset is a text that it stores in its checkpoint and passes back. Ours names a batch of this run and its
ranges. It never decides where to read: the coordination log does.

A micro-batch, from top to bottom::

    latestOffset    the previous batch succeeded: done. Take ranges of held partitions, and name them. With
                    availableNow (Spark 4.2): wait for ranges until the group has done what existed at the start
    partitions      these ranges, cut into tasks; none for a batch of an earlier run, see ClaimedStream.plan
    read            in the executors
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.types import StructType

from kafka_marshal import arguments
from kafka_marshal.client.marshal import Marshal
from kafka_marshal.engine.work.ranges import OffsetRange
from kafka_marshal.errors import ConfigurationError, KafkaUnavailableError, MarshalError
from kafka_marshal.logs import log
from kafka_marshal.pipeline.reading import refuse_lost, refuse_missing
from kafka_marshal.pipeline.source_options import SourceOptions
from kafka_marshal.types import Key

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession
from importlib.util import find_spec
from typing import TYPE_CHECKING

from kafka_marshal.arguments import MOST_OFFSET

__all__ = [
    "IS_TOLD_OF_AVAILABLE_NOW",
    "KafkaMarshalSource",
    "ReadAllAvailable",
    "ReadMaxRows",
    "SupportsTriggerAvailableNow",
    "leases_of",
    "register",
    "rows_of",
]

#: Whether this Spark passes ``availableNow`` to a Python source.
IS_TOLD_OF_AVAILABLE_NOW = find_spec("pyspark.sql.streaming.datasource") is not None

if TYPE_CHECKING or not IS_TOLD_OF_AVAILABLE_NOW:

    @dataclass
    class ReadAllAvailable:
        """Everything there is."""

    @dataclass
    class ReadMaxRows:
        """At most this many rows."""

        max_rows: int

    class SupportsTriggerAvailableNow:
        """A source that can end with the records that existed when it started."""

else:
    from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows, SupportsTriggerAvailableNow


def rows_of(limit: object, default: int) -> int:
    """How many offsets a micro-batch may have under this limit of Spark; None: the default."""
    if isinstance(limit, ReadAllAvailable):
        return MOST_OFFSET
    return min(limit.max_rows, MOST_OFFSET) if isinstance(limit, ReadMaxRows) else default


T = TypeVar("T")
Token = dict[str, Any]
Handler = Callable[[int, FrameType | None], object] | int | None

NAME = "kafka_marshal"

SCHEMA = (
    "key binary, value binary, topic string, partition int, offset bigint, timestamp timestamp, timestampType int, "
    "epoch bigint"
)
HEADERS = ", headers array<struct<key: string, value: binary>>"

#: latestOffset waits this long for new records, as Spark asks again at once.
POLL_S = 0.2

#: The token before anything was taken.
NOTHING: Mapping[str, object] = {"run": "", "batch": 0, "ranges": []}


def register(spark: SparkSession) -> None:
    """Register ``spark.readStream.format("kafka_marshal")`` with this session. Repeated calls have no effect."""
    if not hasattr(spark, "dataSource"):
        raise arguments.wrong("spark", "a SparkSession", spark)
    spark.dataSource.register(KafkaMarshalSource)


def leases_of(df: DataFrame) -> list[tuple[str, int, int, int]]:
    """(topic, partition, epoch, last offset) of a micro-batch's rows, for ``sink.transaction``.

    For ``foreachBatch``; reads the batch's columns once (cache df if that is expensive). Rows of one partition always
    have one epoch.
    """
    from pyspark.sql import functions as F  # noqa: N812 (as everybody calls it)

    if not hasattr(df, "groupBy"):
        raise arguments.wrong("df", "a DataFrame with the source's columns", df)
    found = df.groupBy("topic", "partition", "epoch").agg(F.max("offset").alias("last")).collect()
    return sorted((row["topic"], row["partition"], row["epoch"], row["last"]) for row in found)


class KafkaMarshalSource(DataSource):
    """The source; its options are in SourceOptions, its guarantees in docs/spark.md."""

    def __init__(self, options: dict[str, str]) -> None:
        super().__init__(options)
        self.settings: SourceOptions = SourceOptions.parse(options)

    @classmethod
    def name(cls) -> str:
        return NAME

    def schema(self) -> str:
        return SCHEMA + (HEADERS if self.settings.include_headers else "")

    def streamReader(self, schema: StructType) -> KafkaMarshalReader:  # noqa: N802 (Spark's name)
        return KafkaMarshalReader(self.settings)

    def reader(self, schema: StructType) -> Any:
        raise ConfigurationError(
            "kafka_marshal is a source of streams (spark.readStream): in a batch read, nothing would keep the claims "
            "alive. Nothing was claimed. Use kafka_marshal.pipeline.claimed.ClaimedBatches, or format('kafka')"
        )


@dataclass(frozen=True)
class Piece(InputPartition):
    """The part of one task: offsets first … last of a partition, without the intervals already done (P6)."""

    topic: str
    partition: int
    first: int
    last: int
    epoch: int
    done: tuple[tuple[int, int], ...] = ()


class KafkaMarshalReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Spark's handle. Exists in several processes; the one that is asked for offsets becomes a member of the group."""

    def __init__(self, settings: SourceOptions) -> None:
        self.settings = settings
        self._stream: ClaimedStream | None = None
        self._calls: ThreadPoolExecutor | None = None
        self._handler_before: Handler = signal.SIG_DFL
        #: How often Spark has asked for the latest offset.
        self._asked = 0

    def __getstate__(self) -> SourceOptions:
        return self.settings

    def __setstate__(self, settings: SourceOptions) -> None:
        self.__init__(settings)  # type: ignore[misc]

    # In the driver's worker.

    def initialOffset(self) -> Token:  # noqa: N802
        return dict(NOTHING)

    def latestOffset(self, start: Token | None = None, limit: object = None) -> Token:  # noqa: N802
        """Spark 4.2 passes the start and the limit of the next batch; older releases pass neither.

        An older one may run with availableNow without saying so: then it asks once, and nothing that the answer names
        is ever committed. So the first answer names nothing.
        """
        self._asked += 1
        if self._asked == 1 and not IS_TOLD_OF_AVAILABLE_NOW:
            return self._ask(lambda stream: stream.begin())
        return self._ask(lambda stream: stream.latest(start, rows_of(limit, self.settings.max_records_per_batch)))

    def getDefaultReadLimit(self) -> ReadMaxRows:  # noqa: N802
        return ReadMaxRows(self.settings.max_records_per_batch)

    def reportLatestOffset(self) -> Token | None:  # noqa: N802
        """For the query's progress: topic → partition → end offset. None: Kafka does not answer at the moment."""
        return self._ask(lambda stream: stream.log_ends())

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._ask(lambda stream: stream.end_with_what_is_there())

    def partitions(self, start: Token, end: Token) -> Sequence[Piece]:
        """The log decides where to read; end only identifies the batch."""
        if start == end:
            return []
        return cut(self._ask(lambda stream: stream.plan(end)), self.settings.min_partitions)

    def commit(self, end: Token) -> None:
        self._ask(lambda stream: stream.commit(end))

    def stop(self) -> None:
        if self._calls is None:
            return
        # Spark also closes the connection, so the signal may arrive while we are already leaving.
        _set_handler(signal.SIG_IGN)
        try:
            stream, self._stream = self._stream, None
            if stream is not None:
                stream.close()
                self._say_if_asked_once()
            self._calls.shutdown(wait=False)
            self._calls = None
        finally:
            _set_handler(self._handler_before)

    def _say_if_asked_once(self) -> None:
        if self._asked == 1 and not IS_TOLD_OF_AVAILABLE_NOW:
            text = (
                "Spark asked once for what there is to read, and ended the query: nothing was read or committed. If it "
                "ran with trigger(availableNow=True) or once=True: before Spark 4.2 a Python source does not get it. "
                "Use ClaimedBatches.foreach_batch(available_now=True), another trigger, or Spark 4.2"
            )
            log(logging.ERROR, "asked_once", text)

    def _ask(self, question: Callable[[ClaimedStream], T]) -> T:
        """Ask the stream on a separate thread: the signal that ends this process must not interrupt it."""
        if self._calls is None:
            # Spark ends this process with SIGTERM: leave in order, so that the leases are released, not merely expire.
            self._handler_before = _set_handler(_leave)
            self._calls = ThreadPoolExecutor(1, "kafka-marshal-source")
        return self._calls.submit(self._answer, question).result()

    def _answer(self, question: Callable[[ClaimedStream], T]) -> T:
        if self._stream is None:
            self._stream = ClaimedStream.open(self.settings)
        return question(self._stream)

    # In the executors.

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, Piece)
        return read_piece(self.settings, partition)


def _set_handler(handler: Handler) -> Handler:
    """Set the handler of SIGTERM; returns the old one. Has no effect outside the main thread (in a test)."""
    if threading.current_thread() is threading.main_thread():
        return signal.signal(signal.SIGTERM, handler)
    return signal.SIG_DFL


def _leave(_number: int, _frame: FrameType | None) -> None:
    _set_handler(signal.SIG_IGN)
    raise SystemExit(0)


class ClaimedStream:
    """The driver's side: the ranges of each batch, and which of them are done."""

    def __init__(self, marshal: Marshal, settings: SourceOptions) -> None:
        self._marshal = marshal
        self._settings = settings
        self._consumer = marshal.ranges(
            list(settings.topics),
            policy=settings.new_policy(),
            start=settings.start_position(),
            config=dict(settings.config),
        )
        refuse_missing(self._consumer.missing_topics())
        self._number = 0
        self._last: Token = dict(NOTHING)
        #: The ranges of the last token.
        self._taken: list[OffsetRange] = []
        #: availableNow: (topic, partition) → the first offset not wanted. None: the query runs until it is stopped.
        self._ends: Mapping[Key, int] | None = None
        #: The token of the batch that Spark works on, and its ranges.
        self._running: tuple[Token, list[OffsetRange]] | None = None

    @classmethod
    def open(cls, settings: SourceOptions) -> ClaimedStream:
        """Become a member of the group."""
        marshal = Marshal(
            settings.bootstrap_servers,
            group_id=settings.group_id,
            client_id=settings.client_id,
            topic=settings.coordination_topic,
            heartbeat_interval_ms=settings.heartbeat_interval_ms,
            config=dict(settings.config),
        )
        try:
            return cls(marshal, settings)
        except BaseException:
            marshal.close()
            raise

    def begin(self) -> Token:
        """Start claiming, without delivering anything yet."""
        return dict(self._last)

    def end_with_what_is_there(self) -> None:
        """Take no record written after now (availableNow). Raises KafkaUnavailableError."""
        self._ends = self._consumer.ends()

    def latest(self, start: Token | None = None, most: int | None = None) -> Token:
        """The end of the next batch; the end of the last one, or start, if there is nothing new.

        Spark asks for the next batch only after the last one succeeded (a failed batch ends the query): so the running
        batch is done. With availableNow, "nothing new" ends the query: it is the answer once the group, by the log, has
        done everything that existed, whichever member did it. Until then this waits.

        start: where Spark begins the batch (None before 4.2). most: its offsets (None: as in the options).
        """
        self._finish()
        if self._taken:
            return self._last  # named, and not yet planned: not taken twice
        self._refuse_lost()
        if self._number == 0 and start is not None:
            self._last = start
        most = self._settings.max_records_per_batch if most is None else most
        self._taken = self._consumer.take(most, self._ends, timeout=POLL_S)
        while not self._taken and self._ends is not None:
            if self._consumer.wait_done(self._ends, POLL_S):
                refuse_lost(self._consumer.lost_positions, self._ends)
                break
            self._taken = self._consumer.take(most, self._ends, timeout=0.0)
        if self._taken:
            self._number += 1
            ranges = [[x.topic, x.partition, x.first, x.last, x.epoch] for x in self._taken]
            self._last = {"run": self._marshal.instance_id, "batch": self._number, "ranges": ranges}
        return self._last

    def _refuse_lost(self) -> None:
        """Raise PositionLostError for any partition; with availableNow only at the end, when all others are done."""
        if self._settings.position_lost == "raise" and self._ends is None:
            lost = self._consumer.lost_positions
            refuse_lost(lost, {(each.topic, each.partition): 0 for each in lost})

    def log_ends(self) -> dict[str, dict[str, int]] | None:
        """topic → partition → end offset; None: a leader does not answer."""
        found: dict[str, dict[str, int]] = {}
        try:
            for (topic, partition), end in sorted(self._consumer.ends().items()):
                found.setdefault(topic, {})[str(partition)] = end
        except KafkaUnavailableError:
            return None
        return found

    def plan(self, end: Token) -> list[OffsetRange]:
        """The ranges of the batch that ends there; repeated questions get the same answer.

        A batch of an earlier run has none: what is not done of it comes with the next batch, by the log. At its start,
        Spark also asks for batches that it knows to be over and does not run the answer: their ranges would be taken
        for done at the next question.
        """
        if self._running is not None and self._running[0] == end:
            return self._running[1]
        if end["run"] != self._marshal.instance_id:
            return []
        if end != self._last or not self._taken:
            raise MarshalError(
                f"Spark asks again for batch {end['batch']} of this run, which is done. Nothing was read. Restart the "
                "query: the log knows where to continue"
            )
        self._running = (end, self._taken)
        self._taken = []
        return self._running[1]

    def commit(self, end: Token) -> None:
        """Spark has stored that this batch is over."""
        if self._running is not None and self._running[0] == end:
            self._finish()

    def _finish(self) -> None:
        """Mark the running batch as done; if a lease was lost meanwhile, nothing of it.

        A batch is one transaction of a fenced sink: if it rejected one partition, it has not written the others. So
        those that we still hold are repeated (a sink that has them nevertheless skips them), and the next holders do
        the lost ones.
        """
        if self._running is None:
            return
        (end, ranges), self._running = self._running, None
        lost = [given for given in ranges if not self._consumer.is_valid(given)]
        if not lost:
            # The lease may still end between check and call: then this range does not count (C5).
            self._consumer.done(ranges, flush=True)
            return
        self._consumer.give_back(ranges)
        log(
            logging.WARNING,
            "batch_lost",
            "%s: lease lost while batch %d ran; nothing of this batch is committed, what is still held comes again",
            ", ".join(f"{given.topic} [{given.partition}] (epoch {given.epoch})" for given in lost),
            end["batch"],
        )

    def close(self) -> None:
        """Release everything. The running batch is not done: Spark has not confirmed it."""
        pending = self._taken if self._running is None else self._running[1]
        if pending:
            log(
                logging.WARNING,
                "batch_unconfirmed",
                "the query ended, and Spark has not confirmed batch %d, which was delivered: %s. Nothing of it is "
                "committed: its rows are delivered again, at the next start or at another member",
                self._number,
                ", ".join(f"{x.topic} [{x.partition}] offsets {x.first} to {x.last}" for x in pending),
            )
        self._marshal.close()


def cut(ranges: Sequence[OffsetRange], at_least: int) -> list[Piece]:
    """Cut ranges evenly into pieces: at least one per range, and at_least in all."""
    total = sum(given.last - given.first + 1 for given in ranges)
    pieces = []
    for given in ranges:
        size = given.last - given.first + 1
        count = max(1, min(size, round(at_least * size / total)))
        bounds = [given.first + size * i // count for i in range(count + 1)]
        for first, stop in pairwise(bounds):
            done = tuple((a, b) for a, b in given.done if b >= first and a < stop)
            pieces.append(Piece(given.topic, given.partition, first, stop - 1, given.epoch, done))
    return pieces


def read_piece(settings: SourceOptions, piece: Piece) -> Iterator[pa.RecordBatch]:
    """The records of a piece, in Arrow batches of up to 10,000. Raises RangeGoneError, KafkaUnavailableError."""
    from kafka_marshal.adapters.kafka.range_reader import read_range
    from kafka_marshal.pipeline.source_rows import to_arrow

    steps = read_range(
        settings.bootstrap_servers,
        dict(settings.config),
        piece.topic,
        piece.partition,
        piece.first,
        piece.last,
        timeout_s=settings.read_timeout_s,
    )
    for messages in steps:
        if piece.done:
            messages = [m for m in messages if not any(a <= (m.offset() or 0) <= b for a, b in piece.done)]
        if messages:
            yield to_arrow(messages, piece.topic, piece.partition, piece.epoch, headers=settings.include_headers)
