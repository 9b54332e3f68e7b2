"""The third step: is what the workers added up the same as what the file says, row by row?

The file is added up in SQL, which shares nothing with what the workers run.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Final

from kafka_marshal.demo.flights import COLUMNS, MISSING, read
from kafka_marshal.demo.sink import MEASURES, explained, opened

__all__ = ["Difference", "Range", "Verdict", "account", "ask", "check", "differences", "expected", "missing_offsets"]

#: What numbers are added up by: carrier, airport, month; or carrier, origin, destination, hour.
Group = tuple[Any, ...]
Value = str | int | None
#: partition, first offset, last offset (inclusive)
Range = tuple[int, int, int]

_USED: Final = ("carrier", "origin", "month", "dep_time", "dep_delay", "arr_delay")

_ADD_UP: Final = """
SELECT carrier, origin, month,
       count(*), count(*) - count(dep_time),
       count(dep_delay), coalesce(sum(dep_delay), 0), max(dep_delay),
       count(arr_delay), coalesce(sum(arr_delay), 0), max(arr_delay)
FROM flights GROUP BY carrier, origin, month
"""


@dataclass(frozen=True, slots=True)
class Difference:
    """A number that differs; None: the group is not there at all, or no flight of it had a delay."""

    group: Group
    measure: str
    in_database: Value
    in_file: Value


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the comparison found."""

    #: Rows in the file, groups in the file, rows that the database says it added up.
    rows: int
    groups: int
    rows_in_database: int
    differences: tuple[Difference, ...]
    #: Offsets that no transaction holds, and that more than one holds.
    lost: tuple[Range, ...]
    double: tuple[Range, ...]

    @property
    def equal(self) -> bool:
        """Nothing differs, nothing is lost, nothing is double."""
        return not (self.differences or self.lost or self.double) and self.rows == self.rows_in_database

    @property
    def rows_lost(self) -> int:
        """How many offsets are missing."""
        return sum(last - first + 1 for _, first, last in self.lost)

    @property
    def rows_double(self) -> int:
        """How many offsets were added again."""
        return sum(last - first + 1 for _, first, last in self.double)


def expected(file: Path, rows: int | None) -> dict[Group, tuple[int | None, ...]]:
    """The measures of each group, straight from the file. Raises DataMissingError."""
    places = [COLUMNS.index(name) for name in _USED]
    numbers = [name not in ("carrier", "origin") for name in _USED]

    def cells() -> Iterator[list[str | int | None]]:
        for row in read(file, rows):
            texts = [row[place] for place in places]
            yield [
                None if text in ("", MISSING) else int(text) if number else text
                for text, number in zip(texts, numbers, strict=True)
            ]

    with closing(sqlite3.connect(":memory:")) as db:
        db.execute(f"CREATE TABLE flights ({', '.join(_USED)})")
        db.executemany("INSERT INTO flights VALUES (?, ?, ?, ?, ?, ?)", cells())
        return {(carrier, origin, month): tuple(found) for carrier, origin, month, *found in db.execute(_ADD_UP)}


def found_in(database: Path) -> dict[Group, tuple[Value, ...]]:
    """The measures of each group that the workers added up. Raises SinkError."""
    rows = ask(database, "SELECT * FROM delays")
    return {(carrier, airport, month): tuple(values) for carrier, airport, month, *values in rows}


def check(database: Path, file: Path, rows: int | None, ends: Mapping[int, int]) -> Verdict:
    """Compare the database with the file. ends: partition → the offset after its last message.

    Raises SinkError, DataMissingError.
    """
    wanted, found = expected(file, rows), found_in(database)
    lost, double = account(database, ends)
    return Verdict(
        rows=_flights(wanted),
        groups=len(wanted),
        rows_in_database=_flights(found),
        differences=tuple(differences(MEASURES, found, wanted)),
        lost=tuple(lost),
        double=tuple(double),
    )


def _flights(groups: Mapping[Group, tuple[Value, ...]]) -> int:
    return sum(int(values[0] or 0) for values in groups.values())


def differences(
    names: Sequence[str], found: Mapping[Group, tuple[Value, ...]], wanted: Mapping[Group, tuple[Value, ...]]
) -> list[Difference]:
    """Every value that is not the same in both, by group and name. A group that is not there has no values."""
    nothing = (None,) * len(names)
    return [
        Difference(group, name, mine, theirs)
        for group in sorted(wanted.keys() | found.keys())
        for name, mine, theirs in zip(names, found.get(group, nothing), wanted.get(group, nothing), strict=True)
        if mine != theirs
    ]


def account(database: Path, ends: Mapping[int, int]) -> tuple[list[Range], list[Range]]:
    """Offsets that no transaction holds, and that more than one holds. Raises SinkError."""
    return _tile(_ranges(database), ends)


def missing_offsets(database: Path, ends: Mapping[int, int]) -> list[Range]:
    """Offsets that no transaction holds. Raises SinkError."""
    return account(database, ends)[0]


def _ranges(database: Path) -> list[Range]:
    """What each transaction added, by partition and offset. A transaction whose rows have gaps is taken apart."""
    found = ask(database, "SELECT partition, first_offset, last_offset, rows FROM batches ORDER BY 1, 2, 3")
    ranges: list[Range] = []
    for partition, first, last, rows in found:
        # A topic without transactions or compaction has every offset: fewer rows than offsets means some were lost.
        ranges.append((partition, first, first + rows - 1 if rows < last - first + 1 else last))
    return ranges


def _tile(ranges: Iterable[Range], ends: Mapping[int, int]) -> tuple[list[Range], list[Range]]:
    """Where sorted ranges leave gaps in 0 … end − 1 of their partitions, and where they overlap or go beyond."""
    by_partition = {partition: list(found) for partition, found in groupby(ranges, key=lambda each: each[0])}
    lost: list[Range] = []
    double: list[Range] = []
    for partition in sorted(ends.keys() | by_partition.keys()):
        following = 0
        for _, first, last in by_partition.get(partition, []):
            if first > following:
                lost.append((partition, following, first - 1))
            elif first < following:
                double.append((partition, first, min(last, following - 1)))
            following = max(following, last + 1)
        end = ends.get(partition, 0)
        if following < end:
            lost.append((partition, following, end - 1))
        elif following > end:
            double.append((partition, end, following - 1))
    return lost, double


def ask(database: Path, question: str) -> list[tuple[Any, ...]]:
    """Rows of the workers' database. Raises SinkError."""
    try:
        with closing(opened(database, "ro")) as db:
            return db.execute(question).fetchall()
    except sqlite3.Error as error:
        raise explained(database, error, "It could not be compared with the file") from error
