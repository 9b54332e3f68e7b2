"""Offset ranges as one DataFrame: what Spark's Kafka connector is told, and which rows are left out."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from types import MappingProxyType

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 (as everybody calls it)

from kafka_marshal import arguments
from kafka_marshal.engine.work.ranges import OffsetRange
from kafka_marshal.errors import ConfigurationError

__all__ = ["check_options", "read_ranges"]

_NOTHING: Mapping[str, str] = MappingProxyType({})

#: What says which records are read. The log decides that, so these are not the user's.
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
    }
)


#: What else the connector takes for a batch read, in its own spelling.
_THEIRS = (
    *("includeHeaders", "minPartitions", "maxRecordsPerPartition", "groupIdPrefix"),
    *("kafkaConsumer.pollTimeoutMs", "fetchOffset.numRetries", "fetchOffset.retryIntervalMs"),
)


def check_options(options: Mapping[str, str]) -> None:
    """Refuse what the connector does not know, or would read other records by than were claimed (ConfigurationError).

    Spark itself passes over an option that it does not know.
    """
    options = arguments.a_mapping("options", options, "a mapping of the Kafka connector's options to strings")
    known = {name.lower() for name in _THEIRS}
    for name in options:
        if not (str(name).lower() in known | _OURS or str(name).lower().startswith("kafka.")):
            raise ConfigurationError(
                f"Spark's Kafka connector has no option {name!r}{arguments.near(str(name), _THEIRS)} It has: "
                f"{', '.join(_THEIRS)}, and kafka.… for properties of its consumer. Nothing was claimed"
            )
    wrong = sorted(name for name in options if name.lower() in _OURS)
    if wrong:
        raise ConfigurationError(
            f"the option {wrong[0]!r} can't be set for claimed batches: which records a batch holds is decided by the "
            "claims and the log, and none may be skipped silently. Nothing was claimed; leave it out (isolation.level "
            "goes into the Marshal's config, where to begin into start=)"
        )


def read_ranges(spark: SparkSession, ranges: Sequence[OffsetRange], options: Mapping[str, str]) -> DataFrame:
    """All of these ranges as one read of Spark's Kafka connector, with its columns (key, value, topic, …).

    ranges: at least one, and at most one of each partition. Of what is done inside them no row is filtered here: see
    ``without_done``. Offsets that are gone fail the job (``failOnDataLoss``).
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


def without_done(df: DataFrame, ranges: Iterable[OffsetRange]) -> DataFrame:
    """Leave out the rows that are done already (P6)."""
    done = [_is_done(given) for given in ranges if given.done]
    return df.where(~reduce(Column.__or__, done)) if done else df


def _is_done(given: OffsetRange) -> Column:
    inside = (F.col("offset").between(first, last) for first, last in given.done)
    here = (F.col("topic") == given.topic) & (F.col("partition") == given.partition)
    return here & reduce(Column.__or__, inside)
