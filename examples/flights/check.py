"""The third step: the database, held against the files: every number, every check, every dead letter, every offset."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Final

from flights.bad_records import Planted
from flights.dead_letters import Letters
from flights.ledger import GROUP, NAMES, NUMBERS, explained, opened
from flights.reference import Expected

__all__ = ["Difference", "Range", "Verdict", "ask", "check", "missing_offsets"]

#: What numbers are added up by: carrier, origin, destination, hour.
Group = tuple[Any, ...]
Value = str | int | None
#: partition, first offset, last offset (inclusive)
Range = tuple[int, int, int]

#: What there is to be shown of a message that differs.
_SHOWN: Final = 60


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


def check(
    database: Path, wanted: Expected, planted: Counter[Planted], letters: Letters, ends: Mapping[int, int]
) -> Verdict:
    """Compare. ends: partition → the offset after its last message. Raises SinkError."""
    width = len(GROUP)
    groups = {tuple(row[:width]): tuple(row[width:]) for row in ask(database, "SELECT * FROM delays")}
    found = differences((*NAMES, *NUMBERS), groups, {tuple(group): values for group, values in wanted.groups.items()})
    quality = dict(ask(database, "SELECT failed, flights FROM quality"))
    found += _counts("quality", quality, wanted.quality)
    troubles = Counter[str]()
    for (_, trouble), count in planted.items():
        troubles[trouble] += count
    found += _counts("dead letters", dict(ask(database, "SELECT trouble, messages FROM dead_letters")), troubles)
    found += _letters(letters, planted)
    lost, double = account(database, ends)
    flights = sum(int(values[len(NAMES)] or 0) for values in groups.values())
    return Verdict(
        rows=wanted.rows,
        groups=len(wanted.groups),
        rows_in_database=flights,
        differences=tuple(found),
        lost=tuple(lost),
        double=tuple(double),
    )


def _counts(what: str, found: Mapping[str, int], wanted: Mapping[str, int]) -> list[Difference]:
    """Counts by name; none there is 0."""
    names: Sequence[str] = sorted(found.keys() | wanted.keys())
    pairs = ((name, found.get(name, 0), wanted.get(name, 0)) for name in names)
    return [Difference((what,), name, mine, theirs) for name, mine, theirs in pairs if mine != theirs]


def _letters(letters: Letters, planted: Counter[Planted]) -> list[Difference]:
    found: list[Difference] = []
    both: list[tuple[Counter[Planted], bool]] = [(letters.missing(planted), False), (letters.unexpected(planted), True)]
    for letters_of, is_there in both:
        for (value, trouble), count in letters_of.items():
            shown: Value = "no value" if value is None else repr(value[:_SHOWN])
            sides: tuple[Value, Value] = (count, 0) if is_there else (0, count)
            found.append(Difference(("dead-letter topic", trouble), str(shown), *sides))
    return found


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
