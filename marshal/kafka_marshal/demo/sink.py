"""The database that the workers write to: one SQLite file, one transaction a batch, fenced by epoch (C9).

Two guards make the sink exact, and both are needed:

* the *epoch* keeps out a worker that lost its lease and does not know it yet: ``fence`` refuses an older epoch, and
  raises the stored one, so that everybody after it is refused, too;
* the *last offset*, stored in the same transaction as the sums, keeps out rows that come again: a new holder starts
  where the last heartbeat of the old one says, and the database may be ahead of that.

Counts and sums are whole numbers (minutes), so that they can be compared exactly.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Final

from kafka_marshal.demo.errors import FencedError, SinkError
from kafka_marshal.demo.flights import decode
from kafka_marshal.ports import Message

__all__ = ["BATCHES", "MEASURES", "Sink", "Transaction", "carriers", "create", "explained", "opened", "write_state"]

#: What is counted for each carrier, airport and month, in the order of the table's columns. Sums and maxima of delays
#: are in minutes; a maximum of None: no flight had one.
MEASURES: Final = (
    "flights",
    "cancelled",
    "departures",
    "departure_delay_sum",
    "departure_delay_max",
    "arrivals",
    "arrival_delay_sum",
    "arrival_delay_max",
)

#: What every run's database has, whoever works on it.
BATCHES: Final = """
-- What each transaction added: from these rows it is checked that every offset was counted once.
CREATE TABLE batches (
    topic TEXT NOT NULL, partition INTEGER NOT NULL, first_offset INTEGER NOT NULL, last_offset INTEGER NOT NULL,
    rows INTEGER NOT NULL, epoch INTEGER NOT NULL, client_id TEXT NOT NULL, written_at_ms INTEGER NOT NULL
);
-- How the run went: one row.
CREATE TABLE run (state TEXT NOT NULL, said_at_ms INTEGER NOT NULL);
"""

_SCHEMA: Final = f"""
CREATE TABLE delays (
    carrier TEXT NOT NULL, airport TEXT NOT NULL, month INTEGER NOT NULL,
    flights INTEGER NOT NULL, cancelled INTEGER NOT NULL,
    departures INTEGER NOT NULL, departure_delay_sum INTEGER NOT NULL, departure_delay_max INTEGER,
    arrivals INTEGER NOT NULL, arrival_delay_sum INTEGER NOT NULL, arrival_delay_max INTEGER,
    PRIMARY KEY (carrier, airport, month)
) WITHOUT ROWID;
-- The fencing token and the last offset of each partition.
CREATE TABLE positions (
    topic TEXT NOT NULL, partition INTEGER NOT NULL, epoch INTEGER NOT NULL, last_offset INTEGER NOT NULL,
    PRIMARY KEY (topic, partition)
) WITHOUT ROWID;
{BATCHES}
"""

_ADD: Final = """
INSERT INTO delays VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT DO UPDATE SET
    flights = flights + excluded.flights,
    cancelled = cancelled + excluded.cancelled,
    departures = departures + excluded.departures,
    departure_delay_sum = departure_delay_sum + excluded.departure_delay_sum,
    departure_delay_max = max(coalesce(departure_delay_max, excluded.departure_delay_max),
                              coalesce(excluded.departure_delay_max, departure_delay_max)),
    arrivals = arrivals + excluded.arrivals,
    arrival_delay_sum = arrival_delay_sum + excluded.arrival_delay_sum,
    arrival_delay_max = max(coalesce(arrival_delay_max, excluded.arrival_delay_max),
                            coalesce(excluded.arrival_delay_max, arrival_delay_max))
"""

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


class Sink:
    """One worker's connection to the database. For one thread. As a context manager it is closed at the end."""

    def __init__(self, path: Path, client_id: str) -> None:
        """Open a database that is there (see :func:`create`). Raises SinkError."""
        self.path = path
        self.client_id = client_id
        with self._explained("Nothing was written"):
            self.connection = opened(path, "rw")
            # A commit that was acknowledged survives a power cut, too.
            self.connection.execute("PRAGMA synchronous = FULL")

    @contextmanager
    def transaction(self) -> Iterator[Transaction]:
        """All of it or nothing. Raises SinkError where the database says no; then nothing of it is written."""
        with self._explained("The batch was rolled back and is not done"):
            self.connection.execute("BEGIN IMMEDIATE")
            try:
                yield Transaction(self)
                self.connection.execute("COMMIT")
            except BaseException:
                # SQLite has rolled back by itself where the disk is full.
                if self.connection.in_transaction:
                    self.connection.execute("ROLLBACK")
                raise

    @contextmanager
    def _explained(self, so: str) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise explained(self.path, error, so) from error

    def close(self) -> None:
        """Close the connection."""
        self.connection.close()

    def __enter__(self) -> Sink:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Transaction:
    """What may be done within one transaction, for one batch: fence, write, set_last, in this order."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._db = sink.connection
        self._epoch = -1
        self._written: list[int] = []

    def fence(self, topic: str, partition: int, epoch: int) -> int:
        """The last offset stored for the partition (−1: none), its epoch raised to this one.

        Raises:
            FencedError: a newer epoch is stored: this one's lease is over.
        """
        found = self._db.execute(
            "SELECT epoch, last_offset FROM positions WHERE topic = ? AND partition = ?", (topic, partition)
        ).fetchone()
        stored, last = found if found is not None else (-1, -1)
        if stored > epoch:
            raise FencedError(
                f"{topic} [{partition}]: epoch {epoch} is over, {stored} has written already. Nothing was written; the "
                "partition's new holder does this work"
            )
        self._db.execute(
            "INSERT INTO positions VALUES (?, ?, ?, -1) ON CONFLICT DO UPDATE SET epoch = excluded.epoch",
            (topic, partition, epoch),
        )
        self._epoch = epoch
        return int(last)

    def write(self, messages: Iterable[Message]) -> int:
        """Add flights to the sums of their carrier, airport and month; how many there were."""
        sums: dict[tuple[str, str, int], list[int | None]] = {}
        for message in messages:
            flight = decode(message.value())
            key = flight["carrier"], flight["origin"], flight["month"]
            _add(sums.setdefault(key, [0, 0, 0, 0, None, 0, 0, None]), flight)
            self._written.append(message.offset() or 0)
        self._db.executemany(_ADD, [(*key, *values) for key, values in sums.items()])
        return len(self._written)

    def set_last(self, topic: str, partition: int, last_offset: int) -> None:
        """Store that everything up to last_offset is in. It never goes back: a batch may lie behind what is stored."""
        self._db.execute(
            "UPDATE positions SET last_offset = max(last_offset, ?) WHERE topic = ? AND partition = ?",
            (last_offset, topic, partition),
        )
        if self._written:
            first, last, rows = self._written[0], self._written[-1], len(self._written)
            now_ms = time.time_ns() // 1_000_000
            self._db.execute(
                "INSERT INTO batches VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (topic, partition, first, last, rows, self._epoch, self._sink.client_id, now_ms),
            )


def _add(values: list[int | None], flight: dict[str, int | None]) -> None:
    """Add one flight to the measures of its group."""
    flights, cancelled, departures, departure_sum, departure_max, arrivals, arrival_sum, arrival_max = values
    departure, arrival = flight["dep_delay"], flight["arr_delay"]
    values[0] = (flights or 0) + 1
    values[1] = (cancelled or 0) + (flight["dep_time"] is None)
    if departure is not None:
        values[2:5] = (departures or 0) + 1, (departure_sum or 0) + departure, _larger(departure_max, departure)
    if arrival is not None:
        values[5:8] = (arrivals or 0) + 1, (arrival_sum or 0) + arrival, _larger(arrival_max, arrival)


def _larger(one: int | None, other: int) -> int:
    return other if one is None else max(one, other)


def opened(path: Path, mode: str) -> sqlite3.Connection:
    """A connection in which transactions begin and end only where we say so. mode: "ro", "rw" or "rwc"."""
    uri = f"{path.absolute().as_uri()}?mode={mode}"
    return sqlite3.connect(uri, uri=True, timeout=_BUSY_S, isolation_level=None)


def create(path: Path, schema: str = _SCHEMA) -> None:
    """Make a database with empty tables in place of one that may be there. Raises SinkError."""
    try:
        for each in (path, path.with_name(path.name + "-wal"), path.with_name(path.name + "-shm")):
            each.unlink(missing_ok=True)
        with closing(opened(path, "rwc")) as db:
            # Readers and the one writer do not wait for each other.
            db.execute("PRAGMA journal_mode = WAL")
            db.executescript(f"BEGIN; {schema} COMMIT;")
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


def carriers(path: Path) -> list[tuple[str, int, int, float | None, int | None]]:
    """(carrier, flights, cancelled, mean and worst arrival delay in minutes), the latest first. Raises SinkError."""
    question = """
        SELECT carrier, sum(flights), sum(cancelled),
               1.0 * sum(arrival_delay_sum) / nullif(sum(arrivals), 0) AS mean, max(arrival_delay_max)
        FROM delays GROUP BY carrier ORDER BY mean DESC, carrier
    """
    try:
        with closing(opened(path, "ro")) as db:
            return db.execute(question).fetchall()
    except sqlite3.Error as error:
        raise explained(path, error, "It could not be read") from error


def explained(path: Path, error: sqlite3.Error, so: str) -> SinkError:
    """What SQLite's error means for the data, and what to do."""
    name = getattr(error, "sqlite_errorname", "")
    kind = next((kind for kind in _WHY if name.startswith(kind)), None)
    why, remedy = _WHY[kind] if kind is not None else ("the database refused", "See what it says")
    return SinkError(
        f"{path}: {why} ({error}). {so}: nothing is lost and nothing is counted twice. {remedy}, then start again."
    )
