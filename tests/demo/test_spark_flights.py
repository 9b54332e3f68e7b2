"""The job's DataFrame functions against a plain loop over the same rows: parse, joins, sums, dead letters."""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from flights import bad_records, data, ledger, reference, tables
from flights.bad_records import Planted
from flights.dead_letters import collect
from tests.demo.helpers import row

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from flights.on_spark import Round, Tables

pytestmark = pytest.mark.slow

FOLDER = tables.find_folder()
ROWS = list(data.read(data.find_file(), 4_000))

Message = tuple[bytes | None, bytes | None]


@pytest.fixture(scope="module")
def joined(spark: SparkSession) -> Tables:
    from flights.on_spark import load_tables

    return load_tables(spark, FOLDER)


def kafka(spark: SparkSession, messages: Iterable[Message], partitions: int = 3) -> DataFrame:
    """Messages as Spark's connector returns them."""
    rows = [
        (key, value, "flights", number % partitions, number // partitions)
        for number, (key, value) in enumerate(messages)
    ]
    return spark.createDataFrame(rows, "key binary, value binary, topic string, partition int, offset bigint")


def add_up(records: DataFrame, joined: Tables) -> tuple[Round, list[Any]]:
    """A round's result, and the dead letters that it would write."""
    from flights.on_spark import summarize

    with summarize(records, joined) as found:
        return found, found.dead.collect()


def groups_of(found: Round) -> dict[tuple[Any, ...], tuple[Any, ...]]:
    groups = {values[:4]: values[4:] for values in found.groups}
    assert len(groups) == len(found.groups), "a group came twice"
    return groups


class Letter:
    """A row of the dead letters as a Kafka message."""

    def __init__(self, row: Any, offset: int) -> None:
        self._row, self._offset = row, offset

    def offset(self) -> int:
        return self._offset

    def value(self) -> bytes | None:
        return None if self._row.value is None else bytes(self._row.value)

    def headers(self) -> list[tuple[str, bytes]]:
        return [(header.key, bytes(header.value)) for header in self._row.headers]


# -- against the plain computation --------------------------------------------------------------------------------


def test_sums_names_and_checks_are_those_of_a_plain_loop(spark: SparkSession, joined: Tables) -> None:
    found, letters = add_up(kafka(spark, bad_records.messages(ROWS)), joined)
    wanted = reference.compute(ROWS, tables.read_tables(FOLDER))
    assert groups_of(found) == wanted.groups
    assert found.quality == wanted.quality
    assert wanted.quality["destination unknown"] > 0 and wanted.quality["no weather"] > 0
    there = bad_records.planted(ROWS)
    assert sum(there.values()) == bad_records.count(len(ROWS)) == 8
    assert Counter(collect(map(Letter, letters, range(99))).found.values()) == there
    assert found.troubles == Counter(trouble for _, trouble in there.elements())


def test_every_record_is_accounted_for_in_its_partition(spark: SparkSession, joined: Tables) -> None:
    messages = list(bad_records.messages(ROWS[:700]))
    found, _ = add_up(kafka(spark, messages, partitions=2), joined)
    assert [(part.topic, part.partition, part.first, part.last, part.rows) for part in found.parts] == [
        ("flights", 0, 0, 350, 351),
        ("flights", 1, 0, 350, 351),
    ]
    assert sum(part.dead for part in found.parts) == 2
    assert sum(int(str(values[6])) for values in found.groups) == 700


def test_rounds_add_up_to_the_same_however_they_are_cut(spark: SparkSession, joined: Tables, tmp_path: Path) -> None:
    """In the database, through its upserts, with each record in one round."""
    records = kafka(spark, bad_records.messages(ROWS[:1_500]), partitions=1)
    database = tmp_path / "delays.sqlite"
    ledger.create(database)
    with closing(sqlite3.connect(database)) as db:
        for first, last in ((0, 0), (1, 700), (701, 1_502)):
            found, _ = add_up(records.where(f"offset between {first} and {last}"), joined)
            ledger.write_round(
                FakeTransaction(db),
                "driver-1",
                {("flights", 0): -1},
                [(part.topic, part.partition, 1, part.first, part.last, part.rows) for part in found.parts],
                found.groups,
                found.quality,
                found.troubles,
            )
        db.commit()
        wanted = reference.compute(ROWS[:1_500], tables.read_tables(FOLDER))
        assert {line[:4]: line[4:] for line in db.execute("SELECT * FROM delays")} == wanted.groups
        assert dict(db.execute("SELECT * FROM quality").fetchall()) == wanted.quality
        assert db.execute("SELECT sum(messages) FROM dead_letters").fetchone() == (3,)
        assert db.execute("SELECT first_offset, last_offset, rows FROM batches").fetchall() == [
            (0, 0, 1),
            (1, 700, 700),
            (701, 1_502, 802),
        ]


class FakeTransaction:
    """A sink's transaction without a fence: the stored offset is -1."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def executemany(self, sql: str, params: Iterable[Sequence[Any]]) -> Any:
        return self._db.executemany(sql, params)

    def last_offset(self, topic: str, partition: int) -> int:
        return -1


def test_sums_made_from_another_offset_than_the_sinks_are_refused() -> None:
    with (
        closing(sqlite3.connect(":memory:")) as db,
        pytest.raises(ledger.MovedError, match=r"flights \[0\] is at offset -1 .* made from 7 on.*nothing is lost"),
    ):
        ledger.write_round(FakeTransaction(db), "d", {("flights", 0): 7}, [], [], {}, {})


def test_what_the_sink_has_is_left_out(spark: SparkSession) -> None:
    from flights.on_spark import above

    records = kafka(spark, [(None, b"x")] * 12, partitions=3)
    left = above(records, {("flights", 0): -1, ("flights", 1): 1, ("flights", 2): 3, ("planes", 0): 9})
    assert sorted((each.partition, each.offset) for each in left.collect()) == [
        *((0, offset) for offset in range(4)),
        (1, 2),
        (1, 3),
    ]


def test_an_empty_round_is_one_too(spark: SparkSession, joined: Tables) -> None:
    found, letters = add_up(kafka(spark, []).where("false"), joined)
    assert (found.parts, found.groups, found.troubles, letters) == ((), (), {}, [])
    assert set(found.quality.values()) == {0}


def test_checks_have_the_same_names_on_both_sides() -> None:
    from flights import on_spark

    assert tuple(reference.compute([], tables.PlainTables({}, {}, {})).quality) == on_spark.QUALITY


# -- parsing ------------------------------------------------------------------------------------------------------

GOOD = json.loads(data.encode(row(year="2013", hour="5", dep_time="517", sched_dep_time="515"))[1])


def changed(**values: object) -> bytes:
    """A valid flight with some fields changed; ... removes one."""
    return json.dumps({name: value for name, value in (GOOD | values).items() if value is not ...}).encode()


NO_OBJECT = "no JSON object"
OTHER_TYPE = "a field of another type"


def impossible(*names: str) -> str:
    return f"missing or impossible: {', '.join(names)}"


PARSED: Sequence[tuple[bytes | None, str | None]] = [
    (changed(), None),
    (b"  " + changed() + b"\n", None),
    (changed(dep_time=None, dep_delay=None, arr_time=None, arr_delay=None, air_time=None, tailnum=None), None),
    (changed(dep_time=...), None),
    (changed(more="than we know"), None),
    (changed(more={"and": [{}, "}"]}), None),
    (changed(dep_time=2400), None),
    (changed(tailnum="D-ÖÄÜ"), None),
    (None, "no value"),
    (b"", "no value"),
    (b" ", NO_OBJECT),
    (b"null", NO_OBJECT),
    (b"7", NO_OBJECT),
    (b'"text"', NO_OBJECT),
    (b"{}", NO_OBJECT),
    (b"[]", NO_OBJECT),
    (b"[" + changed() + b"]", NO_OBJECT),
    (changed()[:-1], NO_OBJECT),
    (changed()[:40], NO_OBJECT),
    (b"2013,1,1,517,515,2", NO_OBJECT),
    (b"\xef\xbb\xbf{", NO_OBJECT),
    (b"\xff\xfe{}", "not UTF-8"),
    (changed().replace(b'"EWR"', b'"EW\xfc"'), "not UTF-8"),
    (changed(carrier=...), impossible("carrier")),
    (changed(carrier=None), impossible("carrier")),
    (changed(carrier=""), impossible("carrier")),
    (changed(carrier="united"), impossible("carrier")),
    (changed(origin="ewr"), impossible("origin")),
    (changed(month=0), impossible("month")),
    (changed(month=13, day=32), impossible("month", "day")),
    (changed(month="January"), impossible("month")),
    (changed(month=1.5), impossible("month")),
    (changed(month=[1]), impossible("month")),
    (changed(year=10**12), impossible("year")),
    (changed(hour=25), impossible("hour")),
    (changed(sched_dep_time=575), impossible("sched_dep_time")),
    (changed(dep_time=2401), impossible("dep_time")),
    (changed(time_hour="yesterday"), impossible("time_hour")),
    (changed(dep_delay="late"), OTHER_TYPE),
    (changed(dep_delay=2.5), OTHER_TYPE),
    (changed(arr_delay={}), OTHER_TYPE),
]


def test_what_is_no_flight_is_reported_and_why(spark: SparkSession) -> None:
    from flights.on_spark import parse

    records = kafka(spark, [(None, value) for value, _ in PARSED], partitions=1)
    found = {each.offset: each.trouble for each in parse(records).select("offset", "trouble").collect()}
    assert len(found) == len(PARSED), "each record comes out once"
    wrong = [(value, found[at], trouble) for at, (value, trouble) in enumerate(PARSED) if found[at] != trouble]
    assert wrong == []


def test_json_that_others_would_refuse_is_refused(spark: SparkSession) -> None:
    from flights.on_spark import parse

    lax = [
        changed().replace(b'"', b"'"),
        changed() + changed(),
        changed() + b" trailing }",
        changed().replace(b'"month": 1', b'"month": 01'),
        changed().replace(b'"dep_delay": 0', b'"dep_delay": NaN'),
        changed().replace(b'"carrier"', b"carrier"),
        b"/* note */" + changed(),
    ]
    for text in lax:
        with pytest.raises(ValueError):
            json.loads(text.replace(b"NaN", b"nan"))
    records = kafka(spark, [(None, value) for value in lax], partitions=1)
    troubles = [each.trouble for each in parse(records).orderBy("offset").collect()]
    assert [value for value, trouble in zip(lax, troubles, strict=True) if trouble is None] == []


# -- planted rows -------------------------------------------------------------------------------------------------


def test_the_same_is_planted_every_time_and_every_kind_of_it() -> None:
    many = ROWS * 2
    assert bad_records.planted(many) == bad_records.planted(many)
    assert {trouble for _, trouble in bad_records.planted(many)} == set(bad_records.TROUBLES)
    for rows in (0, 1, 99, 100, 599, 600, 4_000):
        there: Counter[Planted] = bad_records.planted(ROWS[:rows])
        assert sum(there.values()) == bad_records.count(rows)
        assert len(list(bad_records.messages(ROWS[:rows]))) == rows + bad_records.count(rows)
