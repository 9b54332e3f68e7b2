"""The fenced sink in PostgreSQL (extra ``[postgres]``)."""

from __future__ import annotations

import os
import select
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property, partial
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from kafka_marshal import arguments
from kafka_marshal.errors import SinkError
from kafka_marshal.sinks.base import FencedSink, Written
from kafka_marshal.sinks.claims import NOTHING_WRITTEN
from kafka_marshal.sinks.database import (
    PROGRESS,
    ROW,
    TABLES,
    DoneRecords,
    Lists,
    Lock,
    Statement,
    Table,
    ended_early,
    wrong_shape,
)
from kafka_marshal.types import Key

if TYPE_CHECKING:
    import psycopg

    Connection = psycopg.Connection[tuple[Any, ...]]
else:
    Connection = Any

#: The default, if the dsn sets none.
_CONNECT_TIMEOUT_S = 10
_APPLICATION_NAME = "kafka-marshal"

#: The beginning of SQLSTATE → (what it means, what to do, whether trying again makes sense).
_WHY = {
    "STATEMENT POOLING": (
        "the pooler before PostgreSQL pools statements, so there are no transactions, and no writer can be fenced",
        "Let it pool transactions or sessions (PgBouncer: pool_mode = transaction), or connect to PostgreSQL itself",
        False,
    ),
    "08": ("the connection to PostgreSQL was lost", "Try again when it answers", True),
    "23": ("a row was refused", "Mend the statement or the rows", False),
    "25P03": (
        "the block did nothing for too long, and PostgreSQL ended the transaction, so that it holds up no one else",
        "Do the slow work before the transaction, or raise idle_timeout_s",
        True,
    ),
    "28": ("PostgreSQL does not know this user, or the password", "Mend the dsn", False),
    "3D": ("there is no such database", "Mend the dsn, or create the database", False),
    "40": (
        "the transaction got in the way of another",
        "Try again; deadlocks end for good where all transactions write their rows in one order, sorted by key",
        True,
    ),
    "42501": ("this user may not do that", "Grant it the right", False),
    "53100": ("PostgreSQL's disk is full", "Make room, then try again", True),
    "53": ("PostgreSQL has no room left", "Try again later, or see what uses up its connections or memory", True),
    "55P03": (
        "another writer keeps the rows of these partitions for too long",
        "Try again; if it persists, see in pg_stat_activity who keeps a transaction open, or raise lock_timeout_s",
        True,
    ),
    "57": ("PostgreSQL is shutting down, or another program ended the connection", "Try again when it is back", True),
    "58": ("PostgreSQL's own machine fails", "Check its log", True),
}

#: Lock → (what takes the gate, what locks the row).
_LOCKS: dict[Lock, tuple[str, str]] = {
    "shared": ("SELECT pg_advisory_xact_lock_shared(%s)", ""),
    "exclusive": ("SELECT pg_advisory_xact_lock(%s)", " FOR UPDATE"),
    "free": ("SELECT pg_try_advisory_xact_lock(%s)", " FOR UPDATE SKIP LOCKED"),
    "merging": ("", " FOR UPDATE SKIP LOCKED"),
}


class PostgresSink(FencedSink["Connection"]):
    """Fenced writes to PostgreSQL (10 or newer).

    Transactions of other partitions run side by side, and so do those of records (``record``, ``records``). Any other
    transaction of a partition waits until those before it have ended, up to ``lock_timeout_s``. A writer that stops in
    the middle (paused, swapped out) loses its transaction after ``idle_timeout_s`` without a statement, so that the
    partition's new holder can continue; one that dies, at once.

    It works behind a pooler such as PgBouncer that pools transactions or sessions: its settings and locks end with the
    transaction, it prepares no statements, and the settings of other programs have no effect on it.

    Locks, in this order: an advisory lock for each partition, shared by records; its row, but by records not; the rows
    of records, by offset, which only writers of the same offset wait for; the user's own rows.
    """

    _mark = "%s"
    _records = DoneRecords
    _lists = Lists(
        "(SELECT value::text::bigint FROM json_array_elements(?::json)) AS one",
        "(SELECT (value ->> 0)::bigint AS value, (value ->> 1)::bigint AS last FROM json_array_elements(?::json)) "
        "AS one",
    )

    def __init__(
        self, dsn: str, *, lock_timeout_s: float = 30.0, idle_timeout_s: float = 60.0, name: str | None = None
    ) -> None:
        """Nothing is opened yet. ``dsn``: as libpq takes it, an URL or ``host=… dbname=…``.

        name: if several sinks share the database, so that each rewinds its own tables.

        Raises SinkError if the extra is not installed.
        """
        super().__init__(name)
        if not isinstance(dsn, str):  # an empty one is libpq's own defaults
            raise arguments.wrong("dsn", "a string such as 'host=db dbname=delays'", dsn)
        self._lock_timeout_s = arguments.seconds("lock_timeout_s", lock_timeout_s)
        self._idle_timeout_s = arguments.seconds("idle_timeout_s", idle_timeout_s)
        try:
            import psycopg
        except ImportError as error:
            raise SinkError(
                "writing to PostgreSQL needs psycopg, which is not installed; nothing was written. "
                "pip install 'kafka-marshal[postgres]'"
            ) from error
        self._driver_error, self._there_error = psycopg.Error, psycopg.errors.UniqueViolation
        self._dsn = dsn
        #: Rows that were there once: (group, (topic, partition)).
        self._known: set[tuple[str, Key]] = set()

    def __reduce__(self) -> tuple[object, ...]:
        timeouts = {"lock_timeout_s": self._lock_timeout_s, "idle_timeout_s": self._idle_timeout_s}
        return partial(PostgresSink, self._dsn, **timeouts, name=self._rows_name), ()

    def _name(self) -> str:
        given = self._given()
        return f"PostgreSQL, database {given.get('dbname', '?')} at {given.get('host', 'the local socket')}"

    def _given(self) -> Mapping[str, Any]:
        """What the dsn says. Raises SinkError without a word of it: libpq's own errors show parts of a password."""
        from psycopg import ProgrammingError
        from psycopg.conninfo import conninfo_to_dict

        with suppress(ProgrammingError):
            given = conninfo_to_dict(self._dsn)
            if _is_plausible(self._dsn, given):
                return given
        raise SinkError(
            f"PostgreSQL: the dsn is wrong: it is neither an URL nor 'host=… dbname=…'. {NOTHING_WRITTEN}. Mend it: in "
            "an URL the characters @ : / ? # % of a password are written as %40 %3A %2F %3F %23 %25. (It is not shown, "
            "since a password may stand in it.)"
        ) from None

    def _connect(self) -> Connection:
        import psycopg
        from psycopg.conninfo import make_conninfo

        given = self._given()
        ours = {} if "connect_timeout" in given else {"connect_timeout": _CONNECT_TIMEOUT_S}
        # A pooler gives each transaction another server's connection, which knows no statement prepared before.
        return psycopg.connect(make_conninfo(self._dsn, **ours), autocommit=True, prepare_threshold=None)

    def _is_alive(self, connection: Connection) -> bool:
        from psycopg import Error

        # A server says nothing to an idle connection, unless it ends it.
        poll = select.poll()
        try:
            poll.register(connection.fileno(), select.POLLIN)
            if poll.poll(0):
                connection.execute("SELECT 1")
        except Error:
            return False
        return True

    def _disconnect(self, connection: Connection) -> None:
        connection.close()

    def _prepare(self, connection: Connection) -> frozenset[Table]:
        from psycopg import errors

        missing = set()
        for table in TABLES:
            # A user that may write rows need not have the right to create tables.
            if self._shape(connection, table) is None:
                # Another may make it at the same moment, which IF NOT EXISTS does not see.
                with suppress(errors.UniqueViolation, errors.DuplicateTable, errors.DuplicateObject):
                    try:
                        with self._scope(connection):
                            connection.execute(table.made_by)
                    except errors.InsufficientPrivilege:
                        if table is PROGRESS:
                            raise
                        missing.add(table)
                        continue
            found = self._shape(connection, table)
            if found != table.shape:
                raise wrong_shape(self._name(), table, found[0] if found is not None else [])
        return frozenset(missing)

    def _shape(self, connection: Connection, table: Table) -> tuple[list[str], list[str]] | None:
        """(columns, primary key) of the table, None if it does not exist."""
        with self._scope(connection):
            columns = connection.execute(
                "SELECT attname, coalesce(array_position(indkey::int2[], attnum), -1) FROM pg_attribute "
                "LEFT JOIN pg_index ON indrelid = attrelid AND indisprimary "
                "WHERE attrelid = to_regclass(%s) AND attnum > 0 AND NOT attisdropped ORDER BY attnum",
                (table.name,),
            ).fetchall()
        if not columns:
            return None
        primary = sorted((place, name) for name, place in columns if place >= 0)
        return [name for name, _ in columns], [name for _, name in primary]

    @contextmanager
    def _scope(self, connection: Connection, begins: bool = True) -> Iterator[None]:
        from psycopg import Error
        from psycopg.pq import TransactionStatus

        if begins:
            connection.execute(self._begin)
        try:
            yield
            connection.execute("COMMIT")
        except BaseException:
            with suppress(Error):  # of a connection that is lost
                if connection.info.transaction_status != TransactionStatus.IDLE:
                    connection.execute("ROLLBACK")
            raise

    @cached_property
    def _begin(self) -> str:
        """Begins a transaction, with what holds in it.

        For this transaction only: behind a pooler the connection is another program's before and after it. Whatever the
        database's default isolation level is: in a stricter one a lock that was waited for is an error, or a stale
        read.
        """
        settings = {
            "lock_timeout": f"{round(self._lock_timeout_s * 1000)}",
            "idle_in_transaction_session_timeout": f"{round(self._idle_timeout_s * 1000)}",
        }
        given = self._given()
        # Not when connecting: PgBouncer would leave it to the next program.
        if "application_name" not in given and "PGAPPNAME" not in os.environ:
            settings["application_name"] = f"'{_APPLICATION_NAME}'"
        # Another program's SET would make us write to other tables, unfenced. What the dsn says stays.
        if "search_path" not in str(given.get("options", "")):
            settings["search_path"] = "DEFAULT"
        local = [f"SET LOCAL {name} TO {value}" for name, value in settings.items()]
        return "; ".join(["BEGIN ISOLATION LEVEL READ COMMITTED", *local])

    def _run_all(self, connection: Connection, *statements: Statement) -> list[list[tuple[Any, ...]]]:
        from psycopg import ClientCursor

        # In one round trip. PostgreSQL takes a snapshot for each of them.
        cursor = ClientCursor(connection)
        cursor.execute(
            "; ".join(sql.replace("?", self._mark) for sql, _ in statements),
            [x for _, each in statements for x in each],
        )
        found = []
        while True:
            has_rows = cursor.pgresult and cursor.pgresult.nfields  # `description` would take longer
            found.append(cursor.fetchall() if has_rows else [])
            if not cursor.nextset():
                return found

    def _make_rows(self, connection: Connection, group_id: str, keys: Sequence[Key]) -> None:
        # Rows that are absent are made before any is locked, and committed at once: so all transactions take all
        # their locks in one order, and there is no deadlock among them. Here, not on a second connection inside of the
        # transaction: in a pool with N of them, N such transactions would wait for each other.
        if absent := [key for key in keys if (group_id, key) not in self._known]:
            with self._scope(connection):
                self._add_rows(connection, group_id, absent)
            self._known.update((group_id, key) for key in absent)

    def _lock_rows(self, connection: Connection, group_id: str, keys: Sequence[Key]) -> dict[Key, Written]:
        for key in keys:
            connection.execute("SELECT pg_advisory_xact_lock(%s)", (_gate(group_id, key),))
        stored = self._select_for_update(connection, group_id, keys)
        if any(key not in stored for key in keys):
            self._known.clear()
            raise SinkError(
                f"{self._name()}: another program deleted rows of {PROGRESS.name} (forget()?) at this moment. Nothing "
                "of this transaction was written. Try again.",
                retry=True,
            )
        return stored

    def _row(self, connection: Connection, group_id: str, key: Key, lock: Lock) -> Written | None:
        gate, clause = _LOCKS[lock]
        statements: list[Statement] = [(gate, (_gate(group_id, key),))] if gate else []
        *taken, found = self._run_all(connection, *statements, (ROW + clause, (group_id, *key)))
        return None if not found or taken == [[(False,)]] else Written(*found[0])

    def _shared(
        self, connection: Connection, group_id: str, key: Key, *statements: Statement
    ) -> list[list[tuple[Any, ...]]]:
        # No row lock for records: a stream of writers that share it keeps all others from it without an end. Advisory
        # locks are given in the order they were asked for. What their last holder did, the next statement sees.
        gate, _ = _LOCKS["shared"]
        first: list[Statement] = [(self._begin, ()), *([(gate, (_gate(group_id, key),))] if gate else [])]
        found = self._run_all(connection, *first, *statements)[-len(statements) :]
        if not found[-1]:
            self._known.discard((group_id, key))
        return found

    def _select_for_update(self, connection: Connection, group_id: str, keys: Sequence[Key]) -> dict[Key, Written]:
        rows = connection.execute(
            "SELECT p.topic, p.partition, p.last_offset, p.epoch FROM kafka_marshal_progress p "
            "JOIN unnest(%s::text[], %s::int[]) AS wanted (topic, partition) USING (topic, partition) "
            'WHERE p.group_id = %s ORDER BY p.topic COLLATE "C", p.partition FOR UPDATE OF p',
            ([topic for topic, _ in keys], [partition for _, partition in keys], group_id),
        ).fetchall()
        return {(topic, partition): Written(last, epoch) for topic, partition, last, epoch in rows}

    def _check_still_open(self, connection: Connection) -> None:
        from psycopg.pq import TransactionStatus

        status = connection.info.transaction_status
        if status == TransactionStatus.IDLE:
            raise ended_early(self._name())
        if status == TransactionStatus.INERROR:
            # Its COMMIT would be a rollback, without a word.
            raise SinkError(
                f"{self._name()}: a statement of the block failed, and the block continued: PostgreSQL has discarded "
                f"the transaction. {NOTHING_WRITTEN}. Let database errors leave the block; around a statement that may "
                "fail, use a savepoint: with tx.connection.transaction(): …"
            )

    def _why(self, error: Exception) -> tuple[str, str, bool]:
        import psycopg

        state = getattr(error, "sqlstate", None) or ""
        if "statement pooling" in str(error):
            state = "STATEMENT POOLING"
        for beginning in (state, state[:2]):
            if beginning in _WHY:
                return _WHY[beginning]
        if not state and isinstance(error, psycopg.OperationalError):
            return (
                "PostgreSQL does not answer, or the connection to it was lost",
                "See that it runs, then try again",
                True,
            )
        if not state and isinstance(error, psycopg.ProgrammingError):
            return "the dsn or the statement is wrong", "Mend it", False
        return "PostgreSQL refused a statement", "See what it says, and mend the statement", False


def _is_plausible(dsn: str, given: Mapping[str, Any]) -> bool:
    """Whether no part of a password was taken for something else, which messages show."""
    _, scheme, rest = dsn.partition("://")
    login, at, _ = rest.partition("?")[0].rpartition("@")
    is_cut = bool(scheme and at) and any(mark in login for mark in "@/")
    return not is_cut and all(port.isdigit() for port in str(given.get("port", 0)).split(",") if port)


def _gate(group_id: str, key: Key) -> int:
    """The advisory lock of a partition: shared by transactions of records, else exclusive."""
    name = "\0".join(("kafka_marshal", group_id, key[0], str(key[1])))
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "big", signed=True)
