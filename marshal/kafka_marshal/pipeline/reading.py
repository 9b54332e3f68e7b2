"""Offset ranges as one DataFrame: options of Spark's Kafka connector, and the filter for rows already done."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import reduce
from types import MappingProxyType

from py4j.protocol import Py4JError
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 (as everybody calls it)

from kafka_marshal import arguments
from kafka_marshal.adapters.kafka.range_reader import read_range
from kafka_marshal.engine.work.ranges import OffsetRange
from kafka_marshal.engine.work.stuck import Stuck
from kafka_marshal.errors import ConfigurationError, PositionLostError, TopicAbsentError
from kafka_marshal.types import Key

#: Largest timestamp (ms) of Spark's connector, which counts microseconds in 64 bits.
MOST_JAVA_MS = (2**63 - 1) // 1000

_NOTHING: Mapping[str, str] = MappingProxyType({})

#: Options that select records. The log decides that, so users can't set them.
_OURS = frozenset(
    {
        "assign",
        "subscribe",
        "subscribepattern",
        "startingoffsets",
        "endingoffsets",
        "startingtimestamp",
        "endingtimestamp",
        "startingoffsetsbytimestamp",
        "endingoffsetsbytimestamp",
        "startingoffsetsbytimestampstrategy",
        "failondataloss",
        "kafka.isolation.level",
        "kafka.bootstrap.servers",  # offsets of one cluster would name records of another
    }
)


#: Other options of the connector for a batch read, in its spelling.
_THEIRS = (
    *("includeHeaders", "minPartitions", "maxRecordsPerPartition", "groupIdPrefix"),
    *("kafkaConsumer.pollTimeoutMs", "fetchOffset.numRetries", "fetchOffset.retryIntervalMs"),
)

#: Numeric options and their minima.
_NUMBERS = {
    "minpartitions": 1,
    "maxrecordsperpartition": 1,
    "kafkaconsumer.polltimeoutms": 0,
    "fetchoffset.numretries": 0,
    "fetchoffset.retryintervalms": 0,
}
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
