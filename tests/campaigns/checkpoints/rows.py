"""The rows that workers write into a fenced sink, in SQLite or PostgreSQL, and how they are taken back."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any, TypeVar

from kafka_marshal.checkpoints import RestorePiece
from kafka_marshal.errors import SinkError
from kafka_marshal.sinks import FencedSink, PostgresSink, SqliteSink
from tests.campaigns.checkpoints.check import Counts, add

#: Without a constraint, so that a row that is there twice is seen. ``spoilt`` is written by the bad release only.
TABLES = (
    "CREATE TABLE IF NOT EXISTS counted (part INTEGER, place BIGINT, key TEXT)",
    "CREATE TABLE IF NOT EXISTS spoilt (part INTEGER, place BIGINT, key TEXT)",
)

#: A worker that is stopped within a transaction loses it after this time.
IDLE_S, LOCK_S = 2.0, 10.0

Row = tuple[int, int, str]
T = TypeVar("T")


class Rows:
    """One database, a path or a dsn, as a worker sees it."""

    def __init__(self, database: str) -> None:
        self.database = database
        #: Partition → its rows, counted in the transaction that took others back: later a newer owner's may be there.
        self.left: dict[int, Counts] = {}
        self._is_postgres = "dbname=" in database
        self.sink: FencedSink[Any] = (
            PostgresSink(database, lock_timeout_s=LOCK_S, idle_timeout_s=IDLE_S, name="counts")
            if self._is_postgres
            else SqliteSink(database, name="counts")
        )

    def make_tables(self) -> None:
        """Before any worker starts."""
        with closing(self._connect()) as connection:
            for table in TABLES:
                connection.execute(table)
            connection.commit()

    def _connect(self) -> Any:
        if not self._is_postgres:
            return sqlite3.connect(self.database, timeout=30)
        import psycopg

        return psycopg.connect(self.database)

    def _sql(self, statement: str) -> str:
        return statement.replace("?", "%s") if self._is_postgres else statement

    def write(self, tx: Any, rows: Sequence[Row], *, spoils: bool) -> None:
        """Write rows within a transaction of the sink. spoils: wrong ones, and others into its own table."""
        if spoils:
            tx.executemany(self._sql("INSERT INTO spoilt VALUES (?, ?, ?)"), rows)
            rows = [(part, place, f"{key}!") for part, place, key in rows for _ in range(2)]
        tx.executemany(self._sql("INSERT INTO counted VALUES (?, ?, ?)"), rows)

    def undo(self, tx: Any, piece: RestorePiece, position: int, ranges: Sequence[tuple[int, int]]) -> None:
        """Take back the rows beyond, but for those that stay done; as the release before knows them."""
        self._undo("counted", tx, piece, position, ranges)

    def undo_all(self, tx: Any, piece: RestorePiece, position: int, ranges: Sequence[tuple[int, int]]) -> None:
        """The same as the bad release has it, which knows its own table."""
        for table in ("counted", "spoilt"):
            self._undo(table, tx, piece, position, ranges)

    def _undo(self, table: str, tx: Any, piece: RestorePiece, position: int, ranges: Sequence[tuple[int, int]]) -> None:
        kept = "".join(f" AND NOT (place BETWEEN {lo} AND {hi})" for lo, hi in ranges)
        tx.execute(self._sql(f"DELETE FROM {table} WHERE part = ? AND place >= ?{kept}"), (piece.partition, position))
        found: Counts = {}
        for key, offset in tx.execute(self._sql("SELECT key, place FROM counted WHERE part = ?"), (piece.partition,)):
            add(found, key, offset)
        self.left[piece.partition] = found

    def spoilt(self) -> int:
        """Rows that only the bad release writes."""
        with closing(self._connect()) as connection:
            return int(connection.execute("SELECT count(*) FROM spoilt").fetchone()[0])


def retrying(call: Callable[[], T]) -> T:
    """Call until the database says no more that it makes sense to try again."""
    while True:
        try:
            return call()
        except SinkError as error:
            if not error.retry:
                raise
            time.sleep(0.05)
