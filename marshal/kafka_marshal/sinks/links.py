"""Connections of the program's own: which library one is of, how it runs a statement, and how it keeps a savepoint.

Nothing is imported but what the connection's own library has imported.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Any, Final, Literal

from kafka_marshal import arguments
from kafka_marshal.errors import ConfigurationError
from kafka_marshal.types import T

Vendor = Literal["postgresql", "sqlite", "mysql"]

#: What a statement returns; nothing if it returns no rows.
Rows = list[tuple[Any, ...]]

_NUMBERS = itertools.count()

#: What PostgreSQL and MySQL answer to a savepoint that is in no transaction.
_NO_TRANSACTION: Final = ("25P01", 1305)


class Link:
    """A connection of the DB API: sqlite3, PyMySQL, mysqlclient."""

    is_async = False
    _mark = "%s"

    def __init__(self, connection: Any, vendor: Vendor) -> None:
        self.connection: Any = connection
        self.vendor: Vendor = vendor

    @property
    def raw(self) -> Any:
        """The driver's own connection."""
        return self.connection

    def run(self, sql: str, parameters: Sequence[Any] = ()) -> Rows:
        """Run one statement, with ? for each parameter."""
        cursor = self._cursor()
        try:
            cursor.execute(sql.replace("?", self._mark), tuple(parameters))
            return [tuple(row) for row in cursor.fetchall()] if cursor.description else []
        finally:
            cursor.close()

    def _cursor(self) -> Any:
        """One that returns tuples, whatever the program's default is."""
        plain = f"{_library(self.connection)}.cursors"
        return self.connection.cursor(import_module(plain).Cursor)

    def nested(self) -> Any:
        """A block within the transaction: an exception goes back to its begin."""
        return self._savepoint()

    @contextmanager
    def _savepoint(self) -> Iterator[None]:
        name = f"kafka_marshal_{next(_NUMBERS)}"
        self.run(f"SAVEPOINT {name}")
        try:
            yield
        except BaseException:
            with suppress(Exception):  # the server has rolled back everything, or is gone
                self.run(f"ROLLBACK TO SAVEPOINT {name}")
            raise
        self.run(f"RELEASE SAVEPOINT {name}")

    @property
    def is_off(self) -> bool:
        """Whether there is no transaction, and none begins by itself."""
        if self.vendor == "sqlite":
            raw = self.raw
            is_auto = raw.isolation_level is None if (auto := getattr(raw, "autocommit", -1)) == -1 else auto
            return bool(is_auto) and not raw.in_transaction
        try:
            self.run("SAVEPOINT kafka_marshal")
            self.run("RELEASE SAVEPOINT kafka_marshal")
        except Exception as error:
            if code_of(error) in _NO_TRANSACTION:
                return True
            raise
        return False


class _Sqlite(Link):
    _mark = "?"

    def _cursor(self) -> Any:
        cursor = self.connection.cursor()
        cursor.row_factory = None
        return cursor


class _Psycopg(Link):
    def _cursor(self) -> Any:
        from psycopg.rows import tuple_row

        return self.connection.cursor(row_factory=tuple_row)

    def nested(self) -> Any:
        return self.connection.transaction()

    @property
    def is_off(self) -> bool:
        from psycopg.pq import TransactionStatus

        status = self.connection.info.transaction_status
        return bool(self.connection.autocommit) and status == TransactionStatus.IDLE


class _Psycopg2(Link):
    def _cursor(self) -> Any:
        return self.connection.cursor(cursor_factory=import_module("psycopg2.extensions").cursor)


class _Django(Link):
    @property
    def raw(self) -> Any:
        return self.connection.connection

    def _cursor(self) -> Any:
        return self.connection.cursor()

    def nested(self) -> Any:
        from django.db.transaction import atomic

        return atomic(using=self.connection.alias)

    @property
    def is_off(self) -> bool:
        return not self.connection.in_atomic_block and bool(self.connection.get_autocommit())


class _SqlAlchemy(Link):
    """A connection, or a session, whose objects are flushed at the end of the block."""

    @property
    def _core(self) -> Any:
        """Of a session, the connection of its transaction."""
        return self.connection.connection() if callable(self.connection.connection) else self.connection

    @property
    def raw(self) -> Any:
        return self._core.connection.driver_connection

    def run(self, sql: str, parameters: Sequence[Any] = ()) -> Rows:
        from sqlalchemy import text

        first, *others = sql.split("?")
        # A space: the colons of a cast are no part of the name.
        named = first + "".join(f":p{number} {part}" for number, part in enumerate(others))
        found = self._core.execute(text(named), {f"p{number}": each for number, each in enumerate(parameters)})
        return [tuple(row) for row in found] if found.returns_rows else []

    def nested(self) -> Any:
        return self.connection.begin_nested()


class AsyncLink(Link):
    """A connection of asyncio."""

    is_async = True

    def run(self, sql: str, parameters: Sequence[Any] = ()) -> Rows:
        raise ConfigurationError(
            f"{type(self.connection).__module__}.{type(self.connection).__qualname__} is a connection of asyncio. "
            "Nothing was written. Write 'async with fence(…)'; for other calls use a synchronous connection, with "
            "SQLAlchemy that of run_sync"
        )

    async def perform(self, step: Callable[[Link], T]) -> T:
        """Take a step that runs statements."""
        raise NotImplementedError


class _AsyncSqlAlchemy(AsyncLink, _SqlAlchemy):
    async def perform(self, step: Callable[[Link], T]) -> T:
        return await self.connection.run_sync(lambda it: step(_SqlAlchemy(it, self.vendor)))  # type: ignore[no-any-return]


class _AsyncPsycopg(AsyncLink, _Psycopg):
    async def perform(self, step: Callable[[Link], T]) -> T:
        answers: list[Rows | Exception] = []
        while True:
            # From its first statement again, with the answers so far: it does nothing else.
            try:
                return step(_Answered(self, answers))
            except _UnansweredError as asked:
                answers.append(await self._answer(*asked.args))

    async def _answer(self, sql: str, parameters: Sequence[Any]) -> Rows | Exception:
        try:
            async with self._cursor() as cursor:
                await cursor.execute(sql.replace("?", self._mark), tuple(parameters))
                return await cursor.fetchall() if cursor.description else []
        except Exception as error:  # noqa: BLE001 - raised by the step
            return error


class _Asyncpg(_AsyncPsycopg):
    async def _answer(self, sql: str, parameters: Sequence[Any]) -> Rows | Exception:
        first, *others = sql.split("?")
        numbered = first + "".join(f"${number}{part}" for number, part in enumerate(others, 1))
        try:
            return [tuple(row) for row in await self.connection.fetch(numbered, *parameters)]
        except Exception as error:  # noqa: BLE001 - raised by the step
            return error

    @property
    def is_off(self) -> bool:
        return not self.connection.is_in_transaction()


class _UnansweredError(BaseException):
    """(sql, parameters) of a statement that has yet to run."""


class _Answered(Link):
    def __init__(self, link: AsyncLink, answers: Sequence[Rows | Exception]) -> None:
        super().__init__(link.connection, link.vendor)
        self._link, self._answers = link, iter(answers)

    @property
    def is_off(self) -> bool:
        return self._link.is_off

    def run(self, sql: str, parameters: Sequence[Any] = ()) -> Rows:
        answer = next(self._answers, None)
        if answer is None:
            raise _UnansweredError(sql, parameters)
        if isinstance(answer, Exception):
            raise answer
        return answer


_KNOWN: Final = (
    "a connection of psycopg (sync or async), asyncpg, psycopg2, sqlite3, PyMySQL or mysqlclient; a Connection or "
    "Session of SQLAlchemy (sync or async); or django.db.connection"
)


def _library(connection: object) -> str:
    """The first of the libraries that a class of it is of; "" if none is."""
    known = ("psycopg", "psycopg2", "asyncpg", "sqlalchemy", "django", "sqlite3", "pymysql", "MySQLdb")
    modules = [base.__module__.partition(".")[0] for base in type(connection).__mro__]
    return next((module for module in modules if module in known), "")


def link_of(connection: Any) -> Link:
    """Raises ConfigurationError if it is of no library that is known, or no connection."""
    library = _library(connection)
    if library == "sqlite3" and hasattr(connection, "in_transaction"):
        return _Sqlite(connection, "sqlite")
    if library in ("pymysql", "MySQLdb") and hasattr(connection, "commit"):
        return Link(connection, "mysql")
    if library == "psycopg" and hasattr(connection, "transaction"):
        is_async = hasattr(connection, "__aenter__")
        return (_AsyncPsycopg if is_async else _Psycopg)(connection, "postgresql")
    if library == "psycopg2" and hasattr(connection, "get_transaction_status"):
        return _Psycopg2(connection, "postgresql")
    if library == "asyncpg" and hasattr(connection, "is_in_transaction"):
        return _Asyncpg(connection, "postgresql")
    if library == "django" and hasattr(connection, "vendor"):
        return _Django(connection, _vendor(connection.vendor, connection))
    if library == "sqlalchemy":
        if hasattr(connection, "registry"):  # scoped: the session of this thread or task
            connection = connection()
        if hasattr(connection, "begin_nested"):
            engine = connection if hasattr(connection, "dialect") else connection.get_bind()
            kind = _AsyncSqlAlchemy if hasattr(connection, "run_sync") else _SqlAlchemy
            return kind(connection, _vendor(engine.dialect.name, connection))
    raise arguments.wrong("connection", _KNOWN, connection, "Nothing was written")


def _vendor(name: str, connection: object) -> Vendor:
    if name in ("postgresql", "sqlite"):
        return name  # type: ignore[return-value]
    if name in ("mysql", "mariadb"):
        return "mysql"
    wanted = f"one to PostgreSQL, MySQL, MariaDB or SQLite (this is one to {name})"
    raise arguments.wrong("connection", wanted, connection, "Nothing was written")


def is_operational(error: BaseException) -> bool:
    """Whether the driver takes it for the fault of the server or the network."""
    theirs = getattr(error, "orig", None) or error
    return any(base.__name__ == "OperationalError" for base in type(theirs).__mro__)


def code_of(error: BaseException) -> object:
    """What the database calls an error: MySQL's number, SQLSTATE, SQLite's name; None: not known."""
    theirs = getattr(error, "orig", None) or error
    for each in (theirs, theirs.__cause__):
        if each is not None and each.args and isinstance(each.args[0], int):
            return each.args[0]
        for name in ("sqlstate", "pgcode", "sqlite_errorname"):
            if found := getattr(each, name, None):
                return found
    return None
