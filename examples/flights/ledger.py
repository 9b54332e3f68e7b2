"""The database: what a batch or a round adds, in one fenced transaction of :mod:`kafka_marshal.sinks`.

The sink refuses an epoch that is over, and stores each partition's last offset with the rows (C9). Spark makes a
round's sums before the transaction begins, so what they leave out must still be true in it: :func:`write_round` checks.

Counts and sums are whole numbers (minutes), so that they can be compared exactly.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Final, Protocol

from flights.errors import SinkError

__all__ = [
    "GROUP",
    "NAMES",
    "NUMBERS",
    "MovedError",
    "Part",
    "Transaction",
    "create",
    "explained",
    "opened",
    "write_round",
    "write_state",
]

#: The columns of the table delays: what is added up by, what the joins add, what is counted. Sums and maxima of delays
#: are in minutes; a maximum of None: no flight had one.
GROUP: Final = ("carrier", "origin", "dest", "hour")
NAMES: Final = ("carrier_name", "destination")
NUMBERS: Final = (
    "flights",
    "cancelled",
    "departures",
    "departure_delay_sum",
    "departure_delay_max",
    "arrivals",
    "arrival_delay_sum",
    "arrival_delay_max",
    "wet_departures",
    "wet_departure_delay_sum",
)

#: What a transaction adds of one partition: (topic, partition, epoch, first and last offset, rows).
Part = tuple[str, int, int, int, int, int]

_MAXIMA: Final = frozenset(name for name in NUMBERS if name.endswith("_max"))

_SCHEMA: Final = f"""
CREATE TABLE delays (
    carrier TEXT NOT NULL, origin TEXT NOT NULL, dest TEXT NOT NULL, hour INTEGER NOT NULL,
    carrier_name TEXT, destination TEXT,
    {", ".join(f"{name} INTEGER{'' if name in _MAXIMA else ' NOT NULL'}" for name in NUMBERS)},
    PRIMARY KEY (carrier, origin, dest, hour)
) WITHOUT ROWID;
-- Flights that fail a check and count all the same.
CREATE TABLE quality (failed TEXT PRIMARY KEY, flights INTEGER NOT NULL) WITHOUT ROWID;
-- Messages that are no flights, by what is wrong with them. They themselves are in the dead-letter topic.
CREATE TABLE dead_letters (trouble TEXT PRIMARY KEY, messages INTEGER NOT NULL) WITHOUT ROWID;
-- What each transaction added: from these rows it is checked that every offset was counted once.
CREATE TABLE batches (
    topic TEXT NOT NULL, partition INTEGER NOT NULL, first_offset INTEGER NOT NULL, last_offset INTEGER NOT NULL,
    rows INTEGER NOT NULL, epoch INTEGER NOT NULL, client_id TEXT NOT NULL, written_at_ms INTEGER NOT NULL
);
-- How the run went: one row.
CREATE TABLE run (state TEXT NOT NULL, said_at_ms INTEGER NOT NULL);
"""


def _added(name: str) -> str:
    """How a number that comes is put together with the one that is there."""
    if name not in _MAXIMA:
        return f"{name} = {name} + excluded.{name}"
    return f"{name} = max(coalesce({name}, excluded.{name}), coalesce(excluded.{name}, {name}))"


_ADD: Final = (
    f"INSERT INTO delays VALUES ({', '.join('?' * (len(GROUP) + len(NAMES) + len(NUMBERS)))}) "  # noqa: S608 - ours
    f"ON CONFLICT DO UPDATE SET {', '.join(map(_added, NUMBERS))}"
)
_ADD_QUALITY: Final = "INSERT INTO quality VALUES (?, ?) ON CONFLICT DO UPDATE SET flights = flights + excluded.flights"
_ADD_DEAD: Final = (
    "INSERT INTO dead_letters VALUES (?, ?) ON CONFLICT DO UPDATE SET messages = messages + excluded.messages"
)
_ADD_BATCH: Final = "INSERT INTO batches VALUES (?, ?, ?, ?, ?, ?, ?, ?)"


class MovedError(SinkError):
    """The sink's last offset is another one than that the sums were made from: they must be made again."""


class Transaction(Protocol):
    """What is used of a sink's open transaction."""

    def last_offset(self, topic: str, partition: int, /) -> int: ...
    def executemany(self, sql: str, rows: Iterable[Sequence[Any]], /) -> Any: ...


#: How long a worker waits for the others' transactions, each of which takes some milliseconds.
_BUSY_S: Final = 30.0

_WHY: Final = {
    "SQLITE_FULL": ("the disk (or the quota) is full", "Make room"),
    "SQLITE_IOERR": ("the disk can't be written or read", "Make room, or look at the disk"),
    "SQLITE_READONLY": ("it may not be written", "Give this user the right to write it and its folder"),
    "SQLITE_CANTOPEN": ("it can't be opened", "See that the folder is there and may be written"),
    "SQLITE_BUSY": (f"another process kept it locked for {_BUSY_S:.0f} s", "End what holds it"),
    "SQLITE_NOTADB": ("it is no database", "Name another folder"),
    "SQLITE_CORRUPT": ("it is damaged", "Remove it"),
}


def write_round(
    tx: Transaction,
    client_id: str,
    based_on: Mapping[tuple[str, int], int],
    parts: Iterable[Part],
    groups: Iterable[tuple[object, ...]],
    quality: Mapping[str, int],
    troubles: Mapping[str, int],
) -> None:
    """Add a round to what is there.

    based_on: (topic, partition) → the sink's last offset when the round was added up, which is left out of it.

    Raises:
        MovedError: it is another one now. Nothing may be committed.
    """
    for (topic, partition), then in based_on.items():
        now = tx.last_offset(topic, partition)
        if now != then:
            raise MovedError(
                f"{topic} [{partition}] is at offset {now} in the database, and the sums were made from {then} on. "
                "They were not written: nothing is lost and nothing counted twice; the round is done again."
            )
    tx.executemany(_ADD, groups)
    tx.executemany(_ADD_QUALITY, sorted(quality.items()))
    tx.executemany(_ADD_DEAD, sorted(troubles.items()))
    now_ms = time.time_ns() // 1_000_000
    tx.executemany(
        _ADD_BATCH,
        [
            (topic, partition, first, last, rows, epoch, client_id, now_ms)
            for topic, partition, epoch, first, last, rows in parts
        ],
    )


def opened(path: Path, mode: str) -> sqlite3.Connection:
    """A connection in which transactions begin and end only where we say so. mode: "ro", "rw" or "rwc"."""
    uri = f"{path.absolute().as_uri()}?mode={mode}"
    return sqlite3.connect(uri, uri=True, timeout=_BUSY_S, isolation_level=None)


def create(path: Path) -> None:
    """Make a database with empty tables in place of one that may be there. Raises SinkError."""
    try:
        for each in (path, path.with_name(path.name + "-wal"), path.with_name(path.name + "-shm")):
            each.unlink(missing_ok=True)
        with closing(opened(path, "rwc")) as db:
            # Readers and the one writer do not wait for each other.
            db.execute("PRAGMA journal_mode = WAL")
            db.executescript(f"BEGIN; {_SCHEMA} COMMIT;")
    except sqlite3.Error as error:
        raise explained(path, error, "Nothing was started") from error
    except OSError as error:
        raise SinkError(f"{path}: {error.strerror}. Nothing was started. Name another folder with --dir.") from error


def write_state(path: Path, state: str) -> None:
    """Note in the database how the run goes. Raises SinkError."""
    try:
        with closing(opened(path, "rw")) as db:
            db.executescript("BEGIN; DELETE FROM run;")
            db.execute("INSERT INTO run VALUES (?, ?)", (state, time.time_ns() // 1_000_000))
            db.execute("COMMIT")
    except sqlite3.Error as error:
        raise explained(path, error, f"It does not say how the run went ({state})") from error


def explained(path: Path, error: sqlite3.Error, so: str) -> SinkError:
    """What SQLite's error means for the data, and what to do."""
    name = getattr(error, "sqlite_errorname", "")
    kind = next((kind for kind in _WHY if name.startswith(kind)), None)
    why, remedy = _WHY[kind] if kind is not None else ("the database refused", "See what it says")
    return SinkError(
        f"{path}: {why} ({error}). {so}: nothing is lost and nothing is counted twice. {remedy}, then start again."
    )
