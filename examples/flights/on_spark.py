"""The flights job as functions on DataFrames: parse, find what is no flight, join, add up.

Nothing here knows of claims, epochs or databases: each function takes records as Spark reads them from Kafka and gives
a DataFrame, so that each can be tried and tested on a handful of rows.

::

    records ─▶ above (skip what the sink has) ─▶ parse ─┬▶ trouble is not null ─▶ dead_letters ─▶ Kafka
                                                        └▶ trouble is null ─▶ enrich (3 joins) ─▶ delays ─▶ the driver

All measures are whole numbers (minutes), so that sums do not depend on the order of the rows and can be compared
exactly.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as everybody writes it
from pyspark.sql.types import IntegerType, StringType, StructField, StructType

from flights.ledger import GROUP, NAMES, NUMBERS

__all__ = [
    "QUALITY",
    "Part",
    "Records",
    "Round",
    "Tables",
    "above",
    "dead_letters",
    "delays",
    "enrich",
    "load_tables",
    "parse",
    "summarize",
]

#: Records as Spark's connector reads them: key, value, topic, partition, offset and more.
Records: TypeAlias = DataFrame

#: Checks that a flight may fail and still count, by the names under which they are reported.
QUALITY: Final = (
    "no tail number",
    "departed, no arrival",
    "delay contradicts times",
    "carrier unknown",
    "destination unknown",
    "no weather",
)

_TEXT: Final = frozenset({"carrier", "tailnum", "origin", "dest", "time_hour"})
_FIELDS: Final = (
    *("year", "month", "day", "dep_time", "sched_dep_time", "dep_delay", "arr_time", "sched_arr_time", "arr_delay"),
    *("carrier", "flight", "tailnum", "origin", "dest", "air_time", "distance", "hour", "minute", "time_hour"),
)

#: What enrich and delays read.
_USED: Final = (
    *("carrier", "origin", "dest", "hour", "time_hour", "tailnum"),
    *("dep_time", "sched_dep_time", "dep_delay", "arr_delay"),
)

#: Where Spark puts the text of what is not of the schema.
_CORRUPT: Final = "_corrupt"

_FLIGHT: Final = StructType(
    [StructField(name, StringType() if name in _TEXT else IntegerType()) for name in _FIELDS]
    + [StructField(_CORRUPT, StringType())]
)

#: Strict JSON: Spark takes more by default than others would.
_JSON: Final = {
    "mode": "PERMISSIVE",
    "columnNameOfCorruptRecord": _CORRUPT,
    "allowSingleQuotes": "false",
    "allowNonNumericNumbers": "false",
}


@dataclass(frozen=True, slots=True)
class Tables:
    """What flights are joined with, cached in the session."""

    #: carrier, carrier_name
    airlines: DataFrame
    #: dest, destination
    airports: DataFrame
    #: origin, time_hour, wet
    weather: DataFrame


@dataclass(frozen=True, slots=True)
class Part:
    """What a round read of one partition."""

    topic: str
    partition: int
    #: Offsets of the first and the last record.
    first: int
    last: int
    #: Records, and those among them that are no flights.
    rows: int
    dead: int


@dataclass(frozen=True, slots=True)
class Round:
    """A round's result, small enough for the driver."""

    parts: tuple[Part, ...]
    #: (*GROUP, *NAMES, *NUMBERS)
    groups: tuple[tuple[object, ...], ...]
    #: Check → flights that fail it.
    quality: Mapping[str, int]
    #: Trouble → records.
    troubles: Mapping[str, int]
    #: The records behind troubles, as they go to the dead-letter topic (see dead_letters).
    dead: DataFrame


def load_tables(spark: SparkSession, folder: Path) -> Tables:
    """Read airlines.csv, airports.csv and weather.csv of a folder, and cache what the joins need.

    Raises what Spark does where a file is missing.
    """

    def read(name: str) -> DataFrame:
        return spark.read.csv((folder / name).absolute().as_uri(), header=True, nullValue="NA", enforceSchema=False)

    airlines = read("airlines.csv").select("carrier", F.col("name").alias("carrier_name"))
    airports = read("airports.csv").select(F.col("faa").alias("dest"), F.col("name").alias("destination"))
    weather = read("weather.csv").select("origin", "time_hour", (F.col("precip").cast("double") > 0).alias("wet"))
    tables = Tables(airlines.coalesce(1).cache(), airports.coalesce(1).cache(), weather.coalesce(1).cache())
    for table in (tables.airlines, tables.airports, tables.weather):
        table.count()
    return tables


def above(records: DataFrame, last: Mapping[tuple[str, int], int]) -> DataFrame:
    """Records whose offsets lie above the last ones that a sink has, by (topic, partition); −1 or absent: all."""
    for (topic, partition), offset in sorted(last.items()):
        if offset >= 0:
            there = (F.col("topic") == topic) & (F.col("partition") == partition) & (F.col("offset") <= offset)
            records = records.where(~there)
    return records


def parse(records: DataFrame) -> DataFrame:
    """Kafka's records with the flight's columns added, and ``trouble``: why a record is no flight; null: it is one.

    Nothing is dropped: every record comes out once, whatever it holds.
    """
    text = F.col("value").cast("string")
    flights = records.withColumn("_flight", F.from_json(text, _FLIGHT, _JSON))
    flights = flights.select(*records.columns, *(F.col(f"_flight.{field.name}") for field in _FLIGHT))
    wrong = F.concat_ws(", ", *_wrong_fields())  # without those that are null
    nothing = F.coalesce(*(F.col(name).cast("string") for name in _FIELDS)).isNull()
    trouble = (
        F.when(F.col("value").isNull() | (F.length("value") == 0), "no value")
        .when(~F.is_valid_utf8(text), "not UTF-8")
        .when(~_is_one_object(text) | nothing, "no JSON object")
        .when(wrong != "", F.concat(F.lit("missing or impossible: "), wrong))
        .when(F.col(_CORRUPT).isNotNull(), "a field of another type")
    )
    return flights.withColumn("trouble", trouble).drop(_CORRUPT)


def _is_one_object(text: Column) -> Column:
    """Whether a text can be one JSON object with nothing around it, which from_json alone would not mind.

    A second brace that closes is rare (a flight is flat), so only then all of the text is read again, as a list's one
    element.
    """
    listed = F.from_json(F.concat(F.lit("["), text, F.lit("]")), "array<struct<year:int>>")
    alone = F.when(F.regexp_count(text, F.lit(r"\}")) > 1, F.coalesce(F.size(listed) == 1, F.lit(False))).otherwise(
        True
    )
    return F.trim(text).rlike(r"^(?s)\{.*\}$") & alone


def _wrong_fields() -> Iterator[Column]:
    """For each field that a flight can't do without: its name, if it is not there or can't be."""
    fine = {
        "year": F.col("year").between(1903, 9999),
        "month": F.col("month").between(1, 12),
        "day": F.col("day").between(1, 31),
        "sched_dep_time": _is_time("sched_dep_time"),
        "carrier": F.col("carrier").rlike("^[0-9A-Z]{2}$"),
        "flight": F.col("flight") >= 0,
        "origin": F.col("origin").rlike("^[A-Z]{3}$"),
        "dest": F.col("dest").rlike("^[A-Z]{3}$"),
        "hour": F.col("hour").between(0, 24),
        "time_hour": F.try_to_timestamp(F.col("time_hour")).isNotNull(),
    }
    for name, good in fine.items():
        yield F.when(~F.coalesce(good, F.lit(False)), name)
    # (These may be missing: a flight was cancelled.)
    yield F.when(~_is_time("dep_time"), "dep_time")


def _is_time(name: str) -> Column:
    """Whether hhmm is a time of day, 24:00 included."""
    return F.col(name).between(0, 2400) & (F.col(name) % 100 < 60)


def dead_letters(parsed: DataFrame) -> DataFrame:
    """What goes to the dead-letter topic: key and value as they were, and headers that say whence and why.

    A record may be written again after a crash: (source.topic, source.partition, source.offset) shows which are one.
    """
    headers = F.array(
        *(
            F.struct(F.lit(name).alias("key"), column.cast("string").cast("binary").alias("value"))
            for name, column in (
                ("source.topic", F.col("topic")),
                ("source.partition", F.col("partition")),
                ("source.offset", F.col("offset")),
                ("trouble", F.col("trouble")),
            )
        )
    )
    return parsed.where(F.col("trouble").isNotNull()).select("key", "value", headers.alias("headers"))


def enrich(parsed: DataFrame, tables: Tables) -> DataFrame:
    """Those that are flights, joined with airlines, airports (of the destination) and weather (at the origin).

    Each flight comes out once, whether the other tables know it or not: ``wet`` is null where the weather is not known.
    """
    flights = parsed.where(F.col("trouble").isNull())
    joined = flights.join(F.broadcast(tables.airlines), "carrier", "left")
    joined = joined.join(F.broadcast(tables.airports), "dest", "left")
    return joined.join(F.broadcast(tables.weather), ["origin", "time_hour"], "left")


def delays(enriched: DataFrame) -> DataFrame:
    """Flights added up: one row for each of GROUP, with NAMES, NUMBERS and one column for each of QUALITY."""
    wet, delay = F.coalesce(F.col("wet"), F.lit(False)), F.col("dep_delay")
    measures = {
        "flights": F.count(F.lit(1)),
        "cancelled": F.count_if(F.col("dep_time").isNull()),
        "departures": F.count("dep_delay"),
        "departure_delay_sum": F.coalesce(F.sum("dep_delay"), F.lit(0)),
        "departure_delay_max": F.max("dep_delay"),
        "arrivals": F.count("arr_delay"),
        "arrival_delay_sum": F.coalesce(F.sum("arr_delay"), F.lit(0)),
        "arrival_delay_max": F.max("arr_delay"),
        "wet_departures": F.count(F.when(wet, delay)),
        "wet_departure_delay_sum": F.coalesce(F.sum(F.when(wet, delay)), F.lit(0)),
    }
    departed = F.col("dep_time").isNotNull()
    late = _minutes("dep_time") - _minutes("sched_dep_time") - delay
    quality = {
        "no tail number": F.col("tailnum").isNull(),
        "departed, no arrival": departed & F.col("arr_delay").isNull(),
        "delay contradicts times": F.coalesce(late % 1440 != 0, departed),
        "carrier unknown": F.col("carrier_name").isNull(),
        "destination unknown": F.col("destination").isNull(),
        "no weather": F.col("wet").isNull(),
    }
    names = [F.first(name).alias(name) for name in NAMES]
    numbers = [measures[name].alias(name) for name in NUMBERS]
    checks = [F.count_if(quality[name]).alias(name) for name in QUALITY]
    return enriched.groupBy(*GROUP).agg(*names, *numbers, *checks)


def _minutes(name: str) -> Column:
    """Since midnight, of a time written as hhmm."""
    return F.floor(F.col(name) / 100) * 60 + F.col(name) % 100


@contextmanager
def summarize(records: DataFrame, tables: Tables) -> Iterator[Round]:
    """Parse and add up the records of a round, which are read once; within the block ``dead`` can be written.

    Two Spark jobs: what came of which partition, and the groups. Raises what Spark raises.
    """
    # A task for each core, not for each partition: to prepare one takes longer than a thousand rows.
    records = records.coalesce(records.sparkSession.sparkContext.defaultParallelism)
    dead = F.col("trouble").isNotNull()
    # What is kept until both jobs are done: the text of what goes to the dead letters only, and no column in vain.
    original = [F.when(dead, F.col(name)).alias(name) for name in ("key", "value")]
    parsed = parse(records).select("topic", "partition", "offset", *original, "trouble", *_USED).persist()
    try:
        offset = F.col("offset")
        counted = parsed.groupBy("topic", "partition", "trouble").agg(
            F.count(F.lit(1)).alias("rows"), F.min(offset).alias("first"), F.max(offset).alias("last")
        )
        parts: dict[tuple[str, int], Part] = {}
        troubles: dict[str, int] = {}
        for topic, partition, trouble, rows, first, last in counted.collect():
            letters = 0 if trouble is None else rows
            if trouble is not None:
                troubles[trouble] = troubles.get(trouble, 0) + rows
            old = parts.get((topic, partition), Part(topic, partition, first, last, 0, 0))
            parts[topic, partition] = Part(
                topic, partition, min(old.first, first), max(old.last, last), old.rows + rows, old.dead + letters
            )
        found = delays(enrich(parsed, tables)).collect()
        width = len(GROUP) + len(NAMES) + len(NUMBERS)
        quality = {check: sum(row[width + place] for row in found) for place, check in enumerate(QUALITY)}
        groups = tuple(tuple(row[:width]) for row in found)
        yield Round(tuple(parts[key] for key in sorted(parts)), groups, quality, troubles, dead_letters(parsed))
    finally:
        parsed.unpersist()
