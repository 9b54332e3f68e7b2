"""Offset ranges as one DataFrame: options of Spark's Kafka connector, the filter for rows already done, and the gate.

At most once, each part of a batch is read by one task, once. Spark repeats reads at a second action and, whatever
``spark.task.maxFailures``, if an executor or its shuffle files are lost. So each reading task asks the driver with the
place of its first row, and the driver says yes once. A task that gets a no fails the job before it passes on a row.

::

    executor: scan ─▶ first row of a part (topic, partition, offset) ──asks──▶ driver: Gate
                   ◀──────────────── yes (the first time), no (ever after) ───┘
"""

from __future__ import annotations

import hmac
import json
import logging
import re
import secrets
import socket
import socketserver
import struct
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import reduce
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from py4j.protocol import Py4JError
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 (as everybody calls it)
from pyspark.sql.pandas.functions import pandas_udf

from kafka_marshal import arguments
from kafka_marshal.adapters.kafka.range_reader import read_range
from kafka_marshal.engine.work.ranges import OffsetRange
from kafka_marshal.engine.work.stuck import Stuck
from kafka_marshal.errors import ConfigurationError, PositionLostError, TopicAbsentError
from kafka_marshal.logs import log
from kafka_marshal.types import Key

if TYPE_CHECKING:
    import pandas as pd


#: Marks the message of a refused task, so that the driver recognizes it.
ALREADY_READ = "this batch was read already"

#: Time-out of the driver's answer.
ANSWER_TIMEOUT_S = 30.0

_SECRET_BYTES = 32
_LENGTH = struct.Struct("!H")


class Gate:
    """Lets every part of a batch be read once. Listens on the address of Spark's driver."""

    def __init__(self, spark: SparkSession) -> None:
        self._host = spark.sparkContext.getConf().get("spark.driver.host") or "127.0.0.1"
        bind = spark.sparkContext.getConf().get("spark.driver.bindAddress") or self._host
        self._secret = secrets.token_bytes(_SECRET_BYTES)
        self._lock = threading.Lock()
        #: Running batch → parts read so far.
        self._open: dict[str, set[str]] = {}
        family = socket.AF_INET6 if ":" in bind else socket.AF_INET
        self._server = _Server((bind, 0), self._answer, family)
        threading.Thread(target=self._server.serve_forever, name="kafka-marshal-gate", daemon=True).start()

    def _answer(self, request: socket.socket) -> None:
        request.settimeout(ANSWER_TIMEOUT_S)
        if not hmac.compare_digest(_receive(request, _SECRET_BYTES), self._secret):
            return
        (length,) = _LENGTH.unpack(_receive(request, _LENGTH.size))
        batch_id, _, part = _receive(request, length).decode().partition("/")
        request.sendall(b"1" if self.admit(batch_id, part) else b"0")

    def admit(self, batch_id: str, part: str) -> bool:
        """Whether this part of a batch may be read: once, while the batch runs."""
        with self._lock:
            read = self._open.get(batch_id)
            if read is None or part in read:
                return False
            read.add(part)
            return True

    @contextmanager
    def letting_in(self, batch_id: str) -> Iterator[None]:
        """Let a batch be read within the block."""
        with self._lock:
            self._open[batch_id] = set()
        try:
            yield
        finally:
            with self._lock:
                del self._open[batch_id]

    def guarded(self, df: DataFrame, batch_id: str) -> DataFrame:
        """The same rows; each part can be read only once."""
        address = (self._host, self._server.server_address[1])
        asking: Any = _asking(address, self._secret, batch_id)  # Spark infers its kind
        ask = pandas_udf(asking, "boolean").asNondeterministic()  # type: ignore[call-overload]
        return df.where(ask(F.xxhash64("topic", "partition", "offset")))

    def close(self) -> None:
        """Stop listening: tasks that ask fail."""
        self._server.shutdown()
        self._server.server_close()


class _Server(socketserver.ThreadingTCPServer):
    """Answers each task on a separate thread."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], answer: Callable[[socket.socket], None], family: int) -> None:
        self._answer = answer
        self.address_family = family
        super().__init__(address, socketserver.BaseRequestHandler)

    def finish_request(self, request: object, client_address: object) -> None:
        assert isinstance(request, socket.socket)
        self._answer(request)

    def handle_error(self, request: object, client_address: object) -> None:
        text = "a task's question at %s got no answer; it fails"
        log(logging.WARNING, "task_not_answered", text, client_address, error=sys.exception())


def _asking(
    address: tuple[str, int], secret: bytes, batch_id: str
) -> Callable[[Iterator[pd.Series]], Iterator[pd.Series]]:
    """The function of a task. Executors don't need this package for it: a nested function is pickled by value."""
    length, timeout_s, message = _LENGTH.format, ANSWER_TIMEOUT_S, ALREADY_READ

    def ask(rows: Iterator[pd.Series]) -> Iterator[pd.Series]:
        import socket
        import struct

        import pandas as pd

        asked = False
        for places in rows:
            if not asked and len(places):
                asked = True
                part = f"{batch_id}/{places.iloc[0]}".encode()
                with socket.create_connection(address, timeout_s) as driver:
                    driver.sendall(secret + struct.pack(length, len(part)) + part)
                    answer = driver.recv(1)
                if answer != b"1":
                    raise RuntimeError(
                        f"{message}, its time is over, or Spark repeated what it had lost with an executor: at most "
                        "once means that no row is read a second time, and no row of this read was passed on. Do all "
                        "in one action; for several, write the rows somewhere first, or cache them: df = df.cache()"
                    )
            yield pd.Series(True, index=places.index)

    import pandas as pd

    # Spark infers the kind of function from these; as text they would name imports that only type checkers have.
    ask.__annotations__ = {"rows": Iterator[pd.Series], "return": Iterator[pd.Series]}
    return ask


def _receive(source: socket.socket, count: int) -> bytes:
    found = b""
    while len(found) < count:
        more = source.recv(count - len(found))
        if not more:
            raise ConnectionError("the task hung up")
        found += more
    return found


#: Largest timestamp (ms) of Spark's connector, which counts microseconds in 64 bits.
MOST_JAVA_MS = (2**63 - 1) // 1000

_NOTHING: Mapping[str, str] = MappingProxyType({})

#: Options that select records. The log decides that, so users can't set them.
_OURS = frozenset(
    {
        *("assign", "subscribe", "subscribepattern", "startingoffsets", "endingoffsets"),
        *("startingtimestamp", "endingtimestamp", "startingoffsetsbytimestamp", "endingoffsetsbytimestamp"),
        *("startingoffsetsbytimestampstrategy", "failondataloss", "kafka.isolation.level"),
        "kafka.bootstrap.servers",  # offsets of one cluster would name records of another
    }
)

#: Other options of the connector for a batch read, in its spelling → their minimum, if they are numbers.
_THEIRS = {
    "includeHeaders": None,
    "minPartitions": 1,
    "maxRecordsPerPartition": 1,
    "groupIdPrefix": None,
    "kafkaConsumer.pollTimeoutMs": 0,
    "fetchOffset.numRetries": 0,
    "fetchOffset.retryIntervalMs": 0,
}
_NUMBERS = {name.lower(): least for name, least in _THEIRS.items() if least is not None}
_MOST = 2**31 - 1

#: Options of Spark's streams that users may try here → the equivalent.
_INSTEAD = {
    "maxoffsetspertrigger": "max_records_per_batch=",
    "startingoffset": "start=",
    "startingoffsets": "start=",
    "startingtimestamp": "start= (a datetime)",
    "startingoffsetsbytimestamp": "start= (a datetime)",
    "endingoffsets": "until= of foreach_batch",
    "endingtimestamp": "until= of foreach_batch",
    "endingoffsetsbytimestamp": "until= of foreach_batch",
    "subscribe": "its argument topics",
    "subscribepattern": "its argument topics (a regular expression starts with ^)",
    "assign": "its argument topics; the claims decide about partitions",
    "kafka.isolation.level": "isolation.level in the Marshal's config",
    "kafka.bootstrap.servers": "the Marshal's bootstrap_servers",
}


def check_options(options: Mapping[str, str]) -> dict[str, str]:
    """Refuse options that are unknown or would select other records than the claimed ones (ConfigurationError).

    Spark itself ignores unknown options. Returns the options as text, as Spark takes them.
    """
    options = arguments.a_mapping("options", options, "a mapping of the Kafka connector's options to strings")
    known = {name.lower() for name in _THEIRS}
    seen: dict[str, str] = {}
    for name in options:
        if not isinstance(name, str):
            raise arguments.wrong("options: a name", "a string", name, "Nothing was claimed")
        if (other := seen.setdefault(name.lower(), name)) != name:
            raise ConfigurationError(
                f"options: {other!r} and {name!r} are one option for Spark, which would use either. Nothing was "
                "claimed; leave one out"
            )
        if not (name.lower() in known | _OURS or name.lower().startswith("kafka.")):
            instead = _INSTEAD.get(name.lower())
            hint = f"; ClaimedBatches has {instead} for it." if instead else arguments.near(name, _THEIRS)
            raise ConfigurationError(
                f"Spark's Kafka connector has no option {name!r}{hint} It has: "
                f"{', '.join(_THEIRS)}, and kafka.… for properties of its consumer. Nothing was claimed"
            )
    wrong = sorted(name for name in options if name.lower() in _OURS)
    if wrong:
        instead = _INSTEAD.get(wrong[0].lower())
        raise ConfigurationError(
            f"the option {wrong[0]!r} can't be set for claimed batches: which records a batch holds is decided by the "
            "claims and the log, and none may be skipped silently. Nothing was claimed; leave it out"
            + (f". ClaimedBatches has {instead} for it" if instead else "")
        )
    return {name: _checked(name, value) for name, value in options.items()}


def _checked(name: str, value: object) -> str:
    """The value as text; checks numbers and flags, as Spark's error does not name the option."""
    if isinstance(value, bool):
        value = str(value).lower()
    if value is None or not isinstance(value, str | int | float):
        raise arguments.wrong(f"the option {name!r}", "a string", value, "Nothing was claimed")
    text = str(value)
    least = _NUMBERS.get(name.lower())
    if least is not None and not (re.fullmatch(r"[0-9]{1,10}", text) and least <= int(text) <= _MOST):
        raise arguments.wrong(
            f"the option {name!r}", f"a whole number from {least} to {_MOST}", value, "Nothing was claimed"
        )
    if name.lower() == "includeheaders" and text.lower() not in ("true", "false"):
        raise arguments.wrong(f"the option {name!r}", "true or false", value, "Nothing was claimed")
    return text


def java_properties(spark: SparkSession) -> frozenset[str]:
    """Names of the Java consumer's properties in this Spark's client; empty if it can't be asked."""
    try:
        names = spark._jvm.org.apache.kafka.clients.consumer.ConsumerConfig.configNames()  # type: ignore[union-attr]
        return frozenset(map(str, names))
    except (Py4JError, TypeError):  # not in the driver's class loader
        return frozenset()


def check_properties(options: Mapping[str, str], known: Collection[str]) -> None:
    """Refuse a ``kafka.…`` option that looks like a misspelt property of the consumer (ConfigurationError).

    Others may be for a login module or an interceptor of the user.
    """
    for option in options:
        name = option.lower().removeprefix("kafka.")
        if option.lower().startswith("kafka.") and name not in known:
            hint = arguments.near(name, known)
            if hint != ".":
                raise ConfigurationError(
                    f"Kafka's Java consumer has no property {name!r}{hint} It would ignore this one. Nothing was "
                    "claimed; correct the option's name (kafka.…)"
                )


def refuse_missing(topics: Sequence[str]) -> None:
    """Raise TopicAbsentError if one of the named topics does not exist."""
    if topics:
        raise TopicAbsentError(
            f"the topic {topics[0]!r} does not exist on this cluster, so there is nothing to read. Nothing of it "
            "was claimed. Create it first, or mend its name"
        )


def refuse_lost(lost: Iterable[Stuck], ends: Mapping[Key, int]) -> None:
    """PositionLostError: a caller that asked for all up to ``ends`` must not take a skipped partition as done."""
    for each in lost:
        if (each.topic, each.partition) in ends:
            raise PositionLostError(each.text, topic=each.topic, partition=each.partition, offset=each.offset)


def read_ranges(spark: SparkSession, ranges: Sequence[OffsetRange], options: Mapping[str, str]) -> DataFrame:
    """All of these ranges as one read of Spark's Kafka connector, with its columns (key, value, topic, …).

    ranges: at least one, and at most one of each partition. Rows that are already done are included: see
    ``without_done``. Deleted offsets fail the job (``failOnDataLoss``).
    """
    starts: dict[str, dict[str, int]] = {}
    ends: dict[str, dict[str, int]] = {}
    for given in ranges:
        starts.setdefault(given.topic, {})[str(given.partition)] = given.first
        ends.setdefault(given.topic, {})[str(given.partition)] = given.last + 1
    settings = {
        **options,
        "assign": json.dumps({topic: sorted(map(int, offsets)) for topic, offsets in starts.items()}),
        "startingOffsets": json.dumps(starts),
        "endingOffsets": json.dumps(ends),
        "failOnDataLoss": "true",
    }
    return spark.read.format("kafka").options(**settings).load()


def first_beyond(
    bootstrap_servers: str, config: Mapping[str, object], ranges: Iterable[OffsetRange], most_ms: int
) -> tuple[str, int, int, int] | None:
    """The first record in these ranges whose timestamp is beyond ±most_ms (*blocking*).

    Its topic, partition, offset and timestamp (ms). Raises RangeGoneError, KafkaUnavailableError.
    """
    for given in ranges:
        for messages in read_range(bootstrap_servers, config, given.topic, given.partition, given.first, given.last):
            for message in messages:
                kind, stamp = message.timestamp()
                if kind and abs(stamp) > most_ms:
                    return given.topic, given.partition, message.offset() or 0, stamp
    return None


def without_done(df: DataFrame, ranges: Iterable[OffsetRange]) -> DataFrame:
    """Filter out rows that are already done (P6)."""
    done = [_is_done(given) for given in ranges if given.done]
    return df.where(~reduce(Column.__or__, done)) if done else df


def _is_done(given: OffsetRange) -> Column:
    inside = (F.col("offset").between(first, last) for first, last in given.done)
    here = (F.col("topic") == given.topic) & (F.col("partition") == given.partition)
    return here & reduce(Column.__or__, inside)
