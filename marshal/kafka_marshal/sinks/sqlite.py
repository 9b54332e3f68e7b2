"""The fenced sink in SQLite."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast
from weakref import WeakSet

from kafka_marshal import arguments
from kafka_marshal.sinks.base import FencedSink, Written
from kafka_marshal.sinks.database import ROW, TABLES, Lists, Lock, SerialDoneRecords, Table, ended_early, wrong_shape
from kafka_marshal.types import Key

#: The beginning of SQLite's error name → (what it means, what to do, whether trying again makes sense).
_WHY = {
    "SQLITE_BUSY": (
        "another writer kept the database for too long",
        "Try again; if it persists, see who keeps a transaction open, or raise busy_timeout_s",
        True,
    ),
    "SQLITE_FULL": ("the disk is full", "Make room, then try again", True),
    "SQLITE_IOERR": ("the disk fails, or its file system is full or gone", "Check the disk, then try again", True),
    "SQLITE_READONLY": ("the database can't be written to", "Give this process the right to write there", False),
    "SQLITE_CANTOPEN": ("the file can't be opened", "See that its folder exists and may be written to", False),
    "SQLITE_PERM": ("access was refused", "Give this process the right to read and write there", False),
    "SQLITE_NOTADB": ("the file is no SQLite database", "Name another file", False),
    "SQLITE_CORRUPT": ("the database is damaged", "Restore it from a copy, and rewind the sink to it", False),
    "SQLITE_CONSTRAINT": ("a row was refused", "Mend the statement or the rows", False),
    "SQLITE_AUTH": (
        "the block tried to begin or end a transaction by itself",
        "Leave COMMIT and ROLLBACK to the sink: leaving the block commits, an exception rolls back",
        False,
    ),
}


class _Connection(sqlite3.Connection):
    """Its cursors are closed with each transaction.

    One that a program still has would be freed later, for which SQLite waits until the next user of this connection,
    perhaps another thread, has what it waits for: the database, of which the program has the next transaction.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._cursors: WeakSet[sqlite3.Cursor] = WeakSet()

    def cursor(self, *arguments: Any, **options: Any) -> Any:
        made = super().cursor(*arguments, **options)
        self._cursors.add(made)
        return made

    def close_cursors(self) -> None:
        for each in list(self._cursors):  # the program may free one meanwhile, in another thread
            each.close()


class SqliteSink(FencedSink[sqlite3.Connection]):
    """Fenced writes to a SQLite file, made when absent.

    One transaction writes at a time (SQLite's own limit), others wait for up to ``busy_timeout_s`` seconds; a process
    that dies frees it at once. A new file gets a write-ahead log, so that readers do not wait for writers.
    """

    _driver_error = sqlite3.Error
    _there_error = sqlite3.IntegrityError
    _records = SerialDoneRecords
    _mark = "?"
    _lists = Lists(
        "json_each(?) AS one",
        "(SELECT json_extract(value, '$[0]') AS value, json_extract(value, '$[1]') AS last FROM json_each(?)) AS one",
    )

    def __init__(self, path: str | os.PathLike[str], *, busy_timeout_s: float = 30.0, name: str | None = None) -> None:
        """Nothing is opened yet. name: if several sinks share the file, so that each rewinds its own tables."""
        super().__init__(name)
        path = arguments.an_instance("path", path, (str, os.PathLike), "the path of a file")
        # SQLite gives each connection a separate database there: nothing would be fenced.
        if os.fspath(path) in ("", ":memory:"):
            raise arguments.wrong("path", "the path of a file, which all writers share", path, "Nothing was opened")
        self._path = Path(path)
        self._busy_timeout_s = arguments.seconds("busy_timeout_s", busy_timeout_s)

    def __reduce__(self) -> tuple[object, ...]:
        again = partial(SqliteSink, str(self._path), busy_timeout_s=self._busy_timeout_s, name=self._rows_name)
        return again, ()

    def _name(self) -> str:
        return str(self._path)

    def _connect(self) -> sqlite3.Connection:
        # The sink begins and ends transactions, and a thread may use what another has opened. No cursors share a
        # statement: a program's may be closed in its thread while the next one's runs in another, and would reset it.
        return sqlite3.connect(
            self._path,
            timeout=self._busy_timeout_s,
            isolation_level=None,
            check_same_thread=False,
            cached_statements=0,
            factory=_Connection,
        )

    def _disconnect(self, connection: sqlite3.Connection) -> None:
        connection.close()

    def _prepare(self, connection: sqlite3.Connection) -> frozenset[Table]:
        [[empty]] = connection.execute("SELECT count(*) = 0 FROM sqlite_master")
        if empty:
            connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("BEGIN IMMEDIATE")
        for table in TABLES:
            connection.execute(table.made_by)
        connection.execute("COMMIT")
        for table in TABLES:
            found = connection.execute("SELECT name, pk FROM pragma_table_info(?)", (table.name,)).fetchall()
            primary = [name for name, place in sorted(found, key=lambda row: row[1]) if place]
            if ([name for name, _ in found], primary) != table.shape:
                raise wrong_shape(self._name(), table, [name for name, _ in found])
        return frozenset()

    @contextmanager
    def _scope(self, connection: sqlite3.Connection, begins: bool = True) -> Iterator[None]:
        # What is done is done for the log, too: it has to survive a loss of power.
        connection.execute("PRAGMA synchronous = FULL")
        # At once for writing: a reader that turns writer later fails where two do so.
        connection.execute("BEGIN IMMEDIATE")
        # executescript(), for one, commits before it begins, without a word.
        connection.set_authorizer(_refuse_transactions)
        try:
            yield
            connection.set_authorizer(None)
            connection.execute("COMMIT")
        except BaseException:
            connection.set_authorizer(None)
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
        finally:
            cast("_Connection", connection).close_cursors()

    def _lock_rows(self, connection: sqlite3.Connection, group_id: str, keys: Sequence[Key]) -> dict[Key, Written]:
        self._add_rows(connection, group_id, keys)
        return {key: Written(*connection.execute(ROW, (group_id, *key)).fetchone()) for key in keys}

    def _row(self, connection: sqlite3.Connection, group_id: str, key: Key, lock: Lock) -> Written | None:
        # The transaction has the whole database for itself.
        found = connection.execute(ROW, (group_id, *key)).fetchone()
        return None if found is None else Written(*found)

    def _check_still_open(self, connection: sqlite3.Connection) -> None:
        if not connection.in_transaction:
            raise ended_early(self._name())

    def _why(self, error: Exception) -> tuple[str, str, bool]:
        name = getattr(error, "sqlite_errorname", "")
        for beginning, answer in _WHY.items():
            if name.startswith(beginning):
                return answer
        return "the database refused a statement", "See what it says, and mend the statement", False


def _refuse_transactions(action: int, *_about: str | None) -> int:
    refused = (sqlite3.SQLITE_TRANSACTION, sqlite3.SQLITE_ATTACH, sqlite3.SQLITE_DETACH)
    return sqlite3.SQLITE_DENY if action in refused else sqlite3.SQLITE_OK
