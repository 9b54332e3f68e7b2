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
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from importlib.util import find_spec
from itertools import pairwise
from operator import methodcaller
from types import FrameType, MappingProxyType
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.types import StructType

from kafka_marshal import arguments
from kafka_marshal.adapters.kafka import settings
from kafka_marshal.adapters.kafka.range_reader import LogMessage, read_range
from kafka_marshal.adapters.message import headers_of
from kafka_marshal.arguments import MOST_OFFSET, near
from kafka_marshal.client.marshal import Marshal
from kafka_marshal.client.modes import Claims
from kafka_marshal.client.options import checked_topics
from kafka_marshal.engine.policies import Balanced, Greedy, Policy
from kafka_marshal.engine.work.ranges import OffsetRange
from kafka_marshal.errors import ConfigurationError, KafkaUnavailableError, MarshalError
from kafka_marshal.logs import log
from kafka_marshal.node.config import check_ids, new_client_id
from kafka_marshal.pipeline.reading import refuse_lost, refuse_missing
from kafka_marshal.runtime import LEAST_STAMP_MS, MOST_STAMP_MS
from kafka_marshal.topic_names import DEFAULT_TOPIC
from kafka_marshal.types import Key, Start, T, WhenStuck

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_POLICIES: Mapping[str, type[Policy]] = MappingProxyType({"balanced": Balanced, "greedy": Greedy})

#: Options of Spark's Kafka source (lower case) → the equivalent here.
_INSTEAD: Mapping[str, str] = MappingProxyType(
    {
        "subscribe": "topics (the same value)",
        "subscribepattern": "topics, with ^ before the regular expression",
        "assign": "topics: which partitions a query reads is decided by the claims",
        "startingoffsets": "start (earliest, latest or a time; kafka-marshal release-group sets single offsets)",
        "startingtimestamp": "start (a time such as 2013-01-31T06:00:00Z)",
        "startingoffsetsbytimestamp": "start (a time such as 2013-01-31T06:00:00Z)",
        "maxoffsetspertrigger": "max_records_per_batch",
        "minpartitions": "min_partitions",
        "includeheaders": "include_headers",
        "failondataloss": "position_lost: no offset is ever skipped silently",
        "groupidprefix": "group_id",
        "kafka.group.id": "group_id",
    }
)

#: Options of a member of a coordinated group, which a stream can't be.
_OF_GROUPS = ("checkpoints", "group", "strategy", "session_timeout")

#: Options that Spark adds for every source.
_SPARKS = ("path", "__")


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """Options of ``spark.readStream.format("kafka_marshal")``; as text, in any case."""

    #: As for librdkafka.
    bootstrap_servers: str
    group_id: str
    #: Unique in the group; with the same id, a restarted query takes over its partitions at once.
    client_id: str
    #: Names, or regular expressions starting with ``^``; separated by commas.
    topics: tuple[str, ...]
    #: librdkafka properties: the options that start with ``kafka.``, without that.
    config: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    coordination_topic: str = DEFAULT_TOPIC
    heartbeat_interval: float = 3.0
    #: Most offsets of one micro-batch, shared fairly over the partitions held.
    max_records_per_batch: int = 1_000_000
    #: Minimum number of tasks if there are enough records: ranges are cut for it. 0: one task per partition.
    min_partitions: int = 0
    #: Where the group begins on partitions it never held: "earliest", "latest", or an ISO 8601 time (no zone: UTC).
    start: str = "earliest"
    policy: str = "balanced"
    include_headers: bool = False
    #: Time-out of a task's reads (s).
    read_timeout_s: float = 60.0
    #: For a partition whose position is lost: "raise" ends the query, "leave" skips the partition.
    position_lost: WhenStuck = "raise"

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> SourceOptions:
        """Raises ConfigurationError for options that are missing, unknown or can't work."""
        given = {name.lower(): value for name, value in options.items()}
        config = {name[6:]: value for name, value in given.items() if name.startswith("kafka.")}
        if "bootstrap.servers" in config:
            servers = config.pop("bootstrap.servers")
            if given.setdefault("bootstrap_servers", servers) != servers:
                raise ConfigurationError(
                    f"bootstrap_servers is {given['bootstrap_servers']!r}, but kafka.bootstrap.servers is {servers!r}: "
                    "records would come from the first only. Nothing was claimed; leave one out"
                )
        unknown = [name for name in given if name not in _KNOWN and not name.startswith(("kafka.", *_SPARKS))]
        sparks = [name for name in given if name in _INSTEAD]
        if sparks:
            raise ConfigurationError(
                f"{sparks[0]!r} is an option of Spark's own Kafka source. The source kafka_marshal has "
                f"{_INSTEAD[sparks[0]]}. Nothing was claimed"
            )
        if coordinated := [name for name in unknown if name in _OF_GROUPS]:
            raise ConfigurationError(
                f"the source kafka_marshal has no option {coordinated[0]!r}: a stream claims its partitions, and takes "
                "no checkpoints of a group, as Spark keeps the state of its operators under its own batch numbers, "
                "which can't go back with the group's positions. Nothing was claimed. Use ClaimedBatches(spark, "
                "marshal, topics, group=True, checkpoints=CheckpointPolicy()) of kafka_marshal.pipeline.claimed"
            )
        if unknown:
            raise ConfigurationError(
                f"the source kafka_marshal has no option {unknown[0]!r}{near(unknown[0], _KNOWN)} It has: "
                f"{', '.join(_KNOWN)}, and kafka.… for librdkafka's properties. Nothing was claimed"
            )
        for name in ("bootstrap_servers", "group_id", "topics"):
            if not given.get(name, "").strip():
                raise ConfigurationError(f"the source kafka_marshal needs the option {name!r}. Nothing was claimed")
        values: dict[str, Any] = {name: text for name, text in given.items() if name in _KNOWN}
        values |= {name: read(name, values[name]) for name, read in _READ.items() if name in values}
        values["client_id"] = values.get("client_id") or new_client_id()
        made = cls(**values, config=tuple(sorted(config.items())))
        check_ids(made.group_id, made.client_id, made.heartbeat_interval)
        settings.check(dict(made.config))
        checked_topics(made.topics, made.coordination_topic)
        made.start_position()
        if made.policy not in _POLICIES:
            raise ConfigurationError(
                f"policy must be one of {', '.join(_POLICIES)}, not {made.policy!r}. Nothing was claimed"
            )
        return made

    def start_position(self) -> Start:
        """``start`` as Marshal.ranges takes it."""
        if self.start == "earliest":
            return "earliest"
        if self.start == "latest":
            return "latest"
        try:
            moment = datetime.fromisoformat(self.start)
        except ValueError:
            raise ConfigurationError(
                f"start must be earliest, latest or a time like 2013-01-31T06:00:00Z, not {self.start!r}. Nothing was "
                "claimed"
            ) from None
        return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)


def _whole(least: int) -> Callable[[str, str], int]:
    def read(name: str, text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if number < least:
            raise ConfigurationError(
                f"{name} must be a whole number, at least {least}, not {text!r}. Nothing was claimed"
            )
        return number

    return read


def _seconds(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigurationError(f"{name} must be a number of seconds, not {text!r}. Nothing was claimed") from None


def _one_of(*allowed: str) -> Callable[[str, str], str]:
    def read(name: str, text: str) -> str:
        text = text.strip().lower()
        if text not in allowed:
            raise ConfigurationError(f"{name} must be {' or '.join(allowed)}, not {text!r}. Nothing was claimed")
        return text

    return read


#: How a value is read from its name and text; all others are texts.
_READ: Mapping[str, Callable[[str, str], Any]] = MappingProxyType(
    {
        "topics": lambda _, text: tuple(topic.strip() for topic in text.split(",") if topic.strip()),
        "heartbeat_interval": _seconds,
        "max_records_per_batch": _whole(1),
        "min_partitions": _whole(0),
        "policy": lambda _, text: text.lower(),
        "include_headers": lambda name, text: _one_of("true", "false")(name, text) == "true",
        "read_timeout_s": lambda name, text: float(_whole(1)(name, text)),
        "position_lost": _one_of("raise", "leave"),
    }
)

_KNOWN = tuple(each.name for each in fields(SourceOptions) if each.name != "config")

_HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))

#: Name of each column, its type in Spark and in Arrow. The last one is there if headers are asked for.
_COLUMNS = (
    ("key", "binary", pa.binary()),
    ("value", "binary", pa.binary()),
    ("topic", "string", pa.string()),
    ("partition", "int", pa.int32()),
    ("offset", "bigint", pa.int64()),
    ("timestamp", "timestamp", pa.timestamp("us", tz="UTC")),
    ("timestampType", "int", pa.int32()),
    ("epoch", "bigint", pa.int64()),
    ("headers", "array<struct<key: string, value: binary>>", _HEADERS),
)

_key = methodcaller("key")
_value = methodcaller("value")
_offset = methodcaller("offset")
_timestamp = methodcaller("timestamp")


def to_arrow(
    messages: Sequence[LogMessage], topic: str, partition: int, epoch: int, *, headers: bool
) -> pa.RecordBatch:
    """One batch of messages, all of one partition, in the source's columns.

    timestamp: null if there is none or Spark can't represent it.
    """
    count = len(messages)
    # (type, milliseconds); type 0: the message has none.
    given = list(map(_timestamp, messages))
    stamps = [stamp if kind and LEAST_STAMP_MS <= stamp <= MOST_STAMP_MS else None for kind, stamp in given]
    columns = [
        pa.array(list(map(_key, messages)), pa.binary()),
        pa.array(list(map(_value, messages)), pa.binary()),
        pa.repeat(pa.scalar(topic, pa.string()), count),
        pa.repeat(pa.scalar(partition, pa.int32()), count),
        pa.array(list(map(_offset, messages)), pa.int64()),
        pa.array(stamps, pa.timestamp("ms", tz="UTC")).cast(pa.timestamp("us", tz="UTC")),
        pa.array([kind - 1 for kind, _ in given], pa.int32()),  # Kafka's numbers, as in Spark's Kafka source
        pa.repeat(pa.scalar(epoch, pa.int64()), count),
    ]
    if headers:
        columns.append(pa.array([_headers(message) for message in messages], _HEADERS))
    schema = pa.schema([(name, kind) for name, _, kind in _COLUMNS[: len(columns)]])
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _headers(message: LogMessage) -> list[dict[str, object]] | None:
    """Headers as in Spark's Kafka source: None if there are none."""
    found = headers_of(message)
    return [{"key": name, "value": value} for name, value in found] if found else None


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


Token = dict[str, Any]
Handler = Callable[[int, FrameType | None], object] | int | None

NAME = "kafka_marshal"

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
        columns = _COLUMNS if self.settings.include_headers else _COLUMNS[:-1]
        return ", ".join(f"{name} {kind}" for name, kind, _ in columns)

    def streamReader(self, schema: StructType) -> KafkaMarshalReader:  # noqa: N802 (Spark's name)
        return KafkaMarshalReader(self.settings)

    def reader(self, schema: StructType) -> Any:
        raise ConfigurationError(
            "kafka_marshal is a source of streams (spark.readStream): in a batch read, nothing would keep the claims "
            "alive. Nothing was claimed. Use kafka_marshal.pipeline.claimed.ClaimedBatches, or format('kafka')"
        )


@dataclass(frozen=True)
class SourcePiece(InputPartition):
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

    def partitions(self, start: Token, end: Token) -> Sequence[SourcePiece]:
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
        assert isinstance(partition, SourcePiece)
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
            mode=Claims(policy=_POLICIES[settings.policy]()),
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
            heartbeat_interval=settings.heartbeat_interval,
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


def cut(ranges: Sequence[OffsetRange], at_least: int) -> list[SourcePiece]:
    """Cut ranges evenly into pieces: at least one per range, and at_least in all."""
    total = sum(given.last - given.first + 1 for given in ranges)
    pieces = []
    for given in ranges:
        size = given.last - given.first + 1
        count = max(1, min(size, round(at_least * size / total)))
        bounds = [given.first + size * i // count for i in range(count + 1)]
        for first, stop in pairwise(bounds):
            done = tuple((a, b) for a, b in given.done if b >= first and a < stop)
            pieces.append(SourcePiece(given.topic, given.partition, first, stop - 1, given.epoch, done))
    return pieces


def read_piece(settings: SourceOptions, piece: SourcePiece) -> Iterator[pa.RecordBatch]:
    """The records of a piece, in Arrow batches of up to 10,000. Raises RangeGoneError, KafkaUnavailableError."""
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
