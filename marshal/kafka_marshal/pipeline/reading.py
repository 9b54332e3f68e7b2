"""Offset ranges as one DataFrame: what Spark's Kafka connector is told, and which rows are left out."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from types import MappingProxyType

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 (as everybody calls it)

from kafka_marshal.engine.ranges import OffsetRange
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


def check_options(options: Mapping[str, str]) -> None:
    """Refuse options of the connector that would read other records than were claimed (ConfigurationError)."""
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
