"""A driver's rounds, without claims: everything is in the sink once, in any interleaving; dead letters go first."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from flights import bad_records, data, ledger, reference, tables
from flights.dead_letters import Letters, collect
from flights.kafka import Kafka
from flights.options import DriverSettings
from kafka_marshal.errors import SinkError, StaleEpochError
from kafka_marshal.sinks import SqliteSink
from tests.demo.helpers import ask
from tests.demo.test_spark_flights import kafka

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from flights.driver import Rounds
    from flights.on_spark import Tables

pytestmark = pytest.mark.slow

ROWS = list(data.read(data.find_file(), 1_200))
MESSAGES = list(bad_records.messages(ROWS))
#: Last offset of the only partition.
LAST = len(MESSAGES) - 1


@dataclass(frozen=True)
class Claimed:
    partition: int
    first: int
    last: int
    epoch: int
    topic: str = "flights"


@dataclass(frozen=True)
class Batch:
    """The used part of a ClaimedBatch."""

    ranges: Sequence[Claimed]

    @property
    def leases(self) -> list[tuple[str, int, int, int]]:
        return [(each.topic, each.partition, each.epoch, each.last) for each in self.ranges]


class Bench:
    """Drivers without processes, each with its own connection to one database."""

    def __init__(self, records: DataFrame, joined: Tables, bootstrap: str, letters: str, folder: Path) -> None:
        self.records, self.joined = records, joined
        self.bootstrap, self.letters_topic = bootstrap, letters
        self.database = folder / "delays.sqlite"
        self.told: list[Mapping[str, Any]] = []
        ledger.create(self.database)

    def driver(self, name: str, tell: Any = None) -> Rounds:
        from flights.driver import Rounds

        settings = DriverSettings(
            bootstrap=self.bootstrap,
            config={},
            topic="flights",
            coordination="",
            group_id="delays",
            client_id=name,
            database=str(self.database),
            heartbeat_interval_ms=1_000,
            batch_size=1_000,
            watchdog=False,
            dead_letters=self.letters_topic,
            tables="",
        )
        return Rounds(settings, self.joined, SqliteSink(self.database), tell or self.told.append)

    def read(self, first: int, last: int) -> DataFrame:
        return self.records.where(f"offset between {first} and {last}")

    def run(self, driver: Rounds, first: int, last: int, epoch: int) -> None:
        """A round of one range."""
        batch: Any = Batch([Claimed(0, first, last, epoch)])
        driver(self.read(first, last), batch)

    def letters(self) -> Letters:
        return collect(Kafka(self.bootstrap, {}).read(self.letters_topic))

    def is_complete(self) -> None:
        """The database agrees with the rows, and each offset is in one transaction."""
        wanted = reference.compute(ROWS, tables.read_tables(tables.find_folder()))
        assert {row[:4]: row[4:] for row in ask(self.database, "SELECT * FROM delays")} == wanted.groups
        assert dict(ask(self.database, "SELECT * FROM quality")) == wanted.quality
        rows = ask(self.database, "SELECT first_offset, last_offset, rows FROM batches ORDER BY 1")
        assert rows[0][0] == 0 and rows[-1][1] == LAST
        assert [first for first, _, _ in rows[1:]] == [last + 1 for _, last, _ in rows[:-1]]
        assert sum(count for _, _, count in rows) == len(MESSAGES)


@pytest.fixture(scope="module")
def joined(spark: SparkSession) -> Tables:
    from flights.on_spark import load_tables

    return load_tables(spark, tables.find_folder())


@pytest.fixture
def bench(
    spark: SparkSession, joined: Tables, kafka_bootstrap: str, topic_factory: Any, tmp_path: Path
) -> Iterator[Bench]:
    records = kafka(spark, MESSAGES, partitions=1).cache()
    yield Bench(records, joined, kafka_bootstrap, topic_factory(1), tmp_path)
    records.unpersist()


def test_ranges_that_come_again_differently_cut_count_once(bench: Bench) -> None:
    """A successor starts at the log's position, which may be below the sink's."""
    first, second = bench.driver("driver-1"), bench.driver("driver-2")
    bench.run(first, 0, 399, epoch=3)
    bench.run(first, 400, 700, epoch=3)
    bench.run(second, 0, 99, epoch=9)  # the sink has all of it
    bench.run(second, 100, 850, epoch=9)  # some of it is
    bench.run(second, 851, LAST, epoch=9)
    bench.is_complete()
    written = [said for said in bench.told if said["event"] == "written"]
    assert [said["skipped"] for said in written] == [0, 0, 100, 601, 0]
    there = bad_records.planted(ROWS)
    assert bench.letters().missing(there) == bench.letters().unexpected(there) == {}
    assert bench.letters().repeated == 0
    owners = ask(bench.database, "SELECT epoch, client_id FROM batches ORDER BY first_offset")
    assert owners == [(3, "driver-1"), (3, "driver-1"), (9, "driver-2"), (9, "driver-2")]


def test_a_driver_whose_lease_went_to_another_writes_nothing(bench: Bench) -> None:
    late, new = bench.driver("late"), bench.driver("new")
    bench.run(late, 0, 399, epoch=3)
    bench.run(new, 400, 700, epoch=9)
    before = ask(bench.database, "SELECT * FROM delays")
    with pytest.raises(StaleEpochError):
        bench.run(late, 701, LAST, epoch=3)
    assert ask(bench.database, "SELECT * FROM delays") == before
    assert bench.told[-1]["event"] == "fenced"
    bench.run(new, 701, LAST, epoch=9)
    bench.is_complete()


def test_a_predecessor_that_is_late_can_not_slip_in_while_spark_adds_up(bench: Bench) -> None:
    """Its rows are already in the successor's sums: if it could still commit, they would count twice."""
    late = bench.driver("late")
    refused: list[StaleEpochError] = []

    def tell(said: Mapping[str, Any]) -> None:
        if said["event"] == "computed":
            with pytest.raises(StaleEpochError) as caught:
                bench.run(late, 0, 399, epoch=3)
            refused.append(caught.value)

    bench.run(bench.driver("new", tell), 0, LAST, epoch=9)
    assert len(refused) == 1
    bench.is_complete()


def test_what_moved_under_the_sums_is_not_written_over(bench: Bench) -> None:
    """With the same epoch only the check of the last offset guards it: two rounds of one range at once."""

    def tell(said: Mapping[str, Any]) -> None:
        if said["event"] == "computed":
            bench.run(bench.driver("twin"), 0, 399, epoch=3)

    with pytest.raises(ledger.MovedError, match="at offset 399 in the database"):
        bench.run(bench.driver("driver-1", tell), 0, LAST, epoch=3)
    bench.run(bench.driver("driver-1"), 0, LAST, epoch=3)
    bench.is_complete()


def test_a_crash_between_dead_letters_and_database_repeats_letters_and_loses_none(bench: Bench) -> None:
    class CrashError(Exception):
        pass

    def tell(said: Mapping[str, Any]) -> None:
        if said["event"] == "lettered":
            raise CrashError

    with pytest.raises(CrashError):
        bench.run(bench.driver("driver-1", tell), 0, LAST, epoch=3)
    assert ask(bench.database, "SELECT count(*) FROM batches") == [(0,)]
    bench.run(bench.driver("driver-2"), 0, LAST, epoch=9)
    bench.is_complete()
    letters, there = bench.letters(), bad_records.planted(ROWS)
    assert letters.missing(there) == letters.unexpected(there) == {}
    assert letters.repeated == sum(there.values()) == 3
    # Their sources are correct: the record there equals the letter's.
    assert {source: value for source, (value, _) in letters.found.items()} == {
        ("flights", 0, at): MESSAGES[at][1] for _, _, at in letters.found
    }


def test_a_sink_that_refuses_leaves_the_round_undone(bench: Bench) -> None:
    driver = bench.driver("driver-1")
    with closing(sqlite3.connect(bench.database)) as db:
        db.execute("ALTER TABLE delays RENAME TO elsewhere")
    with pytest.raises(SinkError, match=r"delays\.sqlite"):
        bench.run(driver, 0, LAST, epoch=3)
    assert ask(bench.database, "SELECT count(*) FROM batches") == [(0,)]
    with closing(sqlite3.connect(bench.database)) as db:
        db.execute("ALTER TABLE elsewhere RENAME TO delays")
    bench.run(driver, 0, LAST, epoch=3)
    bench.is_complete()
