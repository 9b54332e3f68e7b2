"""The comparison: it finds every kind of difference, and nothing where there is none."""

from __future__ import annotations

import csv
import io
import sqlite3
import zipfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from kafka_marshal.demo.check import Verdict, check, expected, missing_offsets
from kafka_marshal.demo.flights import COLUMNS, find_file, read
from kafka_marshal.demo.sink import Sink, create
from tests.demo.helpers import messages, row

ROWS = [
    row(carrier=carrier, origin=origin, month=str(month), dep_delay=delay, arr_delay="NA" if delay == "NA" else "3")
    for month in (1, 2)
    for carrier, origin in (("UA", "EWR"), ("AA", "JFK"))
    for delay in ("NA", "-5", "40", "0")
]
#: Two partitions, half of the rows each.
HALF = len(ROWS) // 2
ENDS = {0: HALF, 1: HALF}

Case = tuple[Path, Path]


@pytest.fixture
def case(tmp_path: Path) -> Case:
    """A file, and a database that says the same."""
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(COLUMNS)
    writer.writerows(ROWS)
    file, database = tmp_path / "flights.csv.zip", tmp_path / "delays.sqlite"
    with zipfile.ZipFile(file, "w") as packed:
        packed.writestr("flights.csv", text.getvalue())
    create(database)
    add(database, 0, ROWS[:HALF])
    add(database, 1, ROWS[HALF : HALF + 3])
    add(database, 1, ROWS[HALF + 3 :], first=3)
    return file, database


def add(database: Path, partition: int, rows: list[list[str]], first: int = 0) -> None:
    with Sink(database, "worker-1") as sink, sink.transaction() as tx:
        tx.fence("flights", partition, 1)
        tx.write(messages(rows, first))
        tx.set_last("flights", partition, first + len(rows) - 1)


def change(database: Path, statement: str) -> None:
    with closing(sqlite3.connect(database)) as db:
        assert db.execute(statement).rowcount > 0
        db.commit()


def judged(case: Case, ends: dict[int, int] | None = None) -> Verdict:
    file, database = case
    return check(database, file, None, ENDS if ends is None else ends)


def test_what_is_equal_is_found_equal(case: Case) -> None:
    verdict = judged(case)
    assert verdict.equal
    assert (verdict.rows, verdict.groups, verdict.rows_in_database) == (len(ROWS), 4, len(ROWS))
    assert (verdict.differences, verdict.lost, verdict.double) == ((), (), ())


@pytest.mark.parametrize(
    "measure",
    [
        "flights",
        "cancelled",
        "departures",
        "departure_delay_sum",
        "departure_delay_max",
        "arrivals",
        "arrival_delay_sum",
        "arrival_delay_max",
    ],
)
def test_a_number_that_is_off_by_one_is_found(case: Case, measure: str) -> None:
    change(case[1], f"UPDATE delays SET {measure} = {measure} + 1 WHERE carrier = 'AA' AND month = 2")
    verdict = judged(case)
    assert not verdict.equal
    [difference] = verdict.differences
    assert (difference.group, difference.measure) == (("AA", "JFK", 2), measure)
    assert difference.in_database == int(difference.in_file or 0) + 1


def test_a_group_that_is_missing_or_too_many_is_found(case: Case) -> None:
    change(case[1], "DELETE FROM delays WHERE carrier = 'AA' AND month = 1")
    change(case[1], "INSERT INTO delays VALUES ('ZZ', 'LGA', 3, 4, 0, 0, 0, NULL, 0, 0, NULL)")
    groups = {each.group for each in judged(case).differences}
    assert groups == {("AA", "JFK", 1), ("ZZ", "LGA", 3)}
    assert not judged(case).equal


def spoil(statement: str) -> Callable[[Path], None]:
    return lambda database: change(database, statement)


@pytest.mark.parametrize(
    ("how", "lost", "double"),
    [
        (spoil("DELETE FROM batches WHERE partition = 1 AND first_offset = 0"), ((1, 0, 2),), ()),
        (spoil("DELETE FROM batches WHERE partition = 1 AND first_offset = 3"), ((1, 3, 7),), ()),
        (spoil("DELETE FROM batches WHERE partition = 0"), ((0, 0, 7),), ()),
        (spoil("UPDATE batches SET first_offset = 4, rows = 4 WHERE first_offset = 3"), ((1, 3, 3),), ()),
        (spoil("UPDATE batches SET first_offset = 2, rows = 6 WHERE first_offset = 3"), (), ((1, 2, 2),)),
        (spoil("INSERT INTO batches SELECT * FROM batches WHERE partition = 0"), (), ((0, 0, 7),)),
        (spoil("UPDATE batches SET last_offset = 8, rows = 6 WHERE first_offset = 3"), (), ((1, 8, 8),)),
        (spoil("UPDATE batches SET rows = rows - 1 WHERE first_offset = 3"), ((1, 7, 7),), ()),
    ],
    ids=["first", "last", "whole partition", "gap", "overlap", "twice", "beyond the end", "hole within"],
)
def test_every_offset_counts_once(
    case: Case,
    how: Callable[[Path], None],
    lost: tuple[tuple[int, int, int], ...],
    double: tuple[tuple[int, int, int], ...],
) -> None:
    how(case[1])
    verdict = judged(case)
    assert (verdict.lost, verdict.double) == (lost, double)
    assert (verdict.rows_lost, verdict.rows_double) == tuple(
        sum(last - first + 1 for _, first, last in ranges) for ranges in (lost, double)
    )
    assert not verdict.equal
    assert missing_offsets(case[1], ENDS) == list(lost)


def test_a_partition_that_nobody_touched_is_lost_as_a_whole(case: Case) -> None:
    assert judged(case, {**ENDS, 2: 5}).lost == ((2, 0, 4),)


def test_partitions_without_rows_are_fine(case: Case) -> None:
    assert judged(case, {**ENDS, 2: 0}).equal


def test_the_whole_year_is_what_the_packages_authors_say() -> None:
    """Figures of the data set's own documentation, and those that anybody gets from it with another tool."""
    found = expected(find_file(), None)
    assert len(found) == 399
    assert sum(values[0] or 0 for values in found.values()) == 336_776
    assert sum(values[1] or 0 for values in found.values()) == 8_255
    assert sum(values[2] or 0 for values in found.values()) == 336_776 - 8_255
    assert max(values[4] or 0 for values in found.values()) == 1_301
    assert max(values[7] or 0 for values in found.values()) == 1_272


def test_sums_agree_with_a_plain_loop() -> None:
    places = {name: place for place, name in enumerate(COLUMNS)}
    total = arrived = 0
    for each in read(find_file(), 20_000):
        if each[places["carrier"]] == "B6" and each[places["arr_delay"]] != "NA":
            total += int(each[places["arr_delay"]])
            arrived += 1
    found = expected(find_file(), 20_000)
    jetblue = [values for (carrier, _, _), values in found.items() if carrier == "B6"]
    assert (sum(values[6] or 0 for values in jetblue), sum(values[5] or 0 for values in jetblue)) == (total, arrived)
