"""Programs that write on their own connections: one for each library, behind one interface."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from typing import Any

from kafka_marshal.sinks import ConnectionSink, fence, fence_tables

#: Name → the database that it needs: "sqlite", "postgres" or "mariadb".
PROGRAMS = {
    "sqlite3": "sqlite",
    "sqlite3-begin": "sqlite",
    "psycopg": "postgres",
    "psycopg-plain": "postgres",
    "psycopg-async": "postgres",
    "psycopg2": "postgres",
    "psycopg2-begin": "postgres",
    "asyncpg-async": "postgres",
    "sqlalchemy-sqlite": "sqlite",
    "sqlalchemy-aiosqlite": "sqlite",
    "sqlalchemy-postgres": "postgres",
    "sqlalchemy-async": "postgres",
    "sqlalchemy-psycopg2": "postgres",
    "sqlalchemy-asyncpg-async": "postgres",
    "sqlalchemy-mysql": "mariadb",
    "session": "postgres",
    "session-sqlite": "sqlite",
    "session-async": "postgres",
    "django-sqlite": "sqlite",
    "django-postgres": "postgres",
    "django-mysql": "mariadb",
    "pymysql": "mariadb",
    "pymysql-committed": "mariadb",
    "mysqlclient": "mariadb",
}

Hook = Callable[[Any], object]


def nothing(_: object) -> None:
    pass


class Program:
    """``where``: a file, a dsn of libpq, or ``socket/database`` of MariaDB."""

    def __init__(self, name: str, where: str) -> None:
        self.name, self.where = name, where
        self.database = PROGRAMS[name]

    # What an outsider does.

    @property
    def vendor(self) -> Any:
        return {"sqlite": "sqlite", "postgres": "postgresql", "mariadb": "mysql"}[self.database]

    @property
    def mysql(self) -> dict[str, Any]:
        socket, _, database = self.where.rpartition("/")
        return {"unix_socket": socket, "user": "root", "database": database}

    @property
    def postgres(self) -> dict[str, str]:
        return dict(part.split("=") for part in self.where.split())

    def ask(self, sql: str) -> list[tuple[Any, ...]]:
        if self.database == "sqlite":
            with closing(sqlite3.connect(self.where, isolation_level=None)) as connection:
                return connection.execute(sql).fetchall()
        if self.database == "postgres":
            import psycopg

            with psycopg.connect(self.where, autocommit=True) as other:
                found = other.execute(sql)
                return found.fetchall() if found.description else []
        import pymysql

        with pymysql.connect(**self.mysql, ssl_disabled=True, autocommit=True) as mine, mine.cursor() as cursor:
            cursor.execute(sql)
            return list(cursor.fetchall())

    def setup(self) -> None:
        for sql in [*fence_tables(self.vendor), "CREATE TABLE results (place int, at bigint, value text)"]:
            self.ask(sql)

    def rows(self) -> list[tuple[int, int, str]]:
        return [(place, at, value) for place, at, value in self.ask("SELECT * FROM results ORDER BY 1, 2, 3")]

    def progress(self, group_id: str = "group") -> Any:
        if self.database == "sqlite":
            with closing(sqlite3.connect(self.where)) as connection, connection:
                return ConnectionSink(connection).progress(group_id)
        if self.database == "postgres":
            import psycopg

            with psycopg.connect(self.where) as other:
                return ConnectionSink(other).progress(group_id)
        import pymysql

        with pymysql.connect(**self.mysql, ssl_disabled=True) as mine:
            return ConnectionSink(mine).progress(group_id)

    # What the program does.

    def write(
        self,
        messages: Any,
        value: str = "",
        within: Hook = nothing,
        after: Hook = nothing,
        autocommit: bool = False,
        **about: Any,
    ) -> list[int]:
        """One transaction; what was new.

        within, after: called with the connection at the end of the block of the fence, and after it, before COMMIT.
        autocommit: without a transaction.
        """
        if self.is_async:
            return asyncio.run(self._write_async(messages, value, within, after, autocommit, about))
        with self._transaction(autocommit) as connection:
            with fence(connection, messages, **about) as tx:
                new = tx.new
                for each in new:
                    self._insert(connection, (each.partition(), each.offset(), value))
                within(connection)
            after(connection)
        return [each.offset() for each in new]

    async def _write_async(
        self, messages: Any, value: str, within: Hook, after: Hook, autocommit: bool, about: dict[str, Any]
    ) -> list[int]:
        async with self._transaction_async(autocommit) as connection:
            async with fence(connection, messages, **about) as tx:
                new = tx.new
                for each in new:
                    row = each.partition(), each.offset(), value
                    if self.name == "asyncpg-async":
                        await connection.execute("INSERT INTO results VALUES ($1, $2, $3)", *row)
                    elif self.name == "psycopg-async":
                        await connection.execute("INSERT INTO results VALUES (%s, %s, %s)", row)
                    else:
                        await connection.run_sync(self._insert, row)
                within(connection)
            after(connection)
        return [each.offset() for each in new]

    @property
    def is_async(self) -> bool:
        return "async" in self.name or "aio" in self.name

    def _insert(self, connection: Any, row: tuple[object, ...]) -> None:
        if self.name.startswith("sqlite3"):
            connection.execute("INSERT INTO results VALUES (?, ?, ?)", row)
        elif self.name.startswith("session"):
            self.model = getattr(self, "model", None) or _model()
            connection.add(self.model(place=row[0], at=row[1], value=row[2]))
        elif self.name.startswith("sqlalchemy"):
            from sqlalchemy import text

            values = dict(zip("abc", row, strict=True))
            connection.execute(text("INSERT INTO results VALUES (:a, :b, :c)"), values)
        else:
            with connection.cursor() as cursor:
                cursor.execute("INSERT INTO results VALUES (%s, %s, %s)", row)

    @contextmanager
    def _transaction(self, autocommit: bool) -> Iterator[Any]:
        if self.name.startswith("sqlite3"):
            level: Any = None if autocommit or self.name == "sqlite3-begin" else ""
            with closing(sqlite3.connect(self.where, isolation_level=level, timeout=30)) as connection:
                connection.row_factory = sqlite3.Row
                if self.name == "sqlite3-begin" and not autocommit:
                    connection.execute("BEGIN")
                with connection:
                    yield connection
        elif self.name.startswith("psycopg2"):
            with self._psycopg2(autocommit) as old:
                yield old
        elif self.name.startswith("psycopg"):
            import psycopg
            from psycopg.rows import dict_row

            if self.name == "psycopg-plain" and not autocommit:
                with psycopg.connect(self.where, row_factory=dict_row) as other:
                    yield other
            else:
                with psycopg.connect(self.where, row_factory=dict_row, autocommit=True) as other:
                    if autocommit:
                        yield other
                    else:
                        with other.transaction():
                            yield other
        elif self.name.startswith("django"):
            with self._django(autocommit) as wrapper:
                yield wrapper
        elif self.name.startswith(("sqlalchemy", "session")):
            with self._sqlalchemy(autocommit) as made:
                yield made
        else:
            with self._mysql(autocommit) as mine:
                yield mine

    @contextmanager
    def _psycopg2(self, autocommit: bool) -> Iterator[Any]:
        import psycopg2
        from psycopg2.extras import RealDictCursor

        with closing(psycopg2.connect(self.where, cursor_factory=RealDictCursor)) as old:
            old.autocommit = autocommit or self.name == "psycopg2-begin"
            if autocommit:
                yield old
            elif self.name == "psycopg2-begin":
                with old.cursor() as cursor:
                    cursor.execute("BEGIN")
                    try:
                        yield old
                    except BaseException:
                        cursor.execute("ROLLBACK")
                        raise
                    cursor.execute("COMMIT")
            else:
                with old:
                    yield old

    @contextmanager
    def _mysql(self, autocommit: bool) -> Iterator[Any]:
        more: dict[str, Any] = {}
        if self.name == "mysqlclient":
            import MySQLdb as library
            from MySQLdb.cursors import DictCursor
        else:
            import pymysql as library
            from pymysql.cursors import DictCursor

            more["ssl_disabled"] = True  # else each connection reads the system's certificates
        if self.name == "pymysql-committed":
            more["init_command"] = "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED"
        with closing(library.connect(**self.mysql, cursorclass=DictCursor, autocommit=autocommit, **more)) as mine:
            try:
                yield mine
            except BaseException:
                mine.rollback()
                raise
            mine.commit()

    @contextmanager
    def _django(self, autocommit: bool) -> Iterator[Any]:
        import django
        from django.conf import settings
        from django.db import connections
        from django.db.transaction import atomic

        if not settings.configured:
            settings.configure(DATABASES={"default": {}})
            django.setup()
        options: dict[str, Any] = {}
        if self.database == "sqlite":
            place = {"NAME": self.where}
        elif self.database == "postgres":
            at = self.postgres
            place = {"NAME": at["dbname"], "HOST": at["host"], "PORT": at["port"], "USER": at["user"]}
        else:
            place = {"NAME": self.mysql["database"], "USER": "root"}
            options = {"unix_socket": self.mysql["unix_socket"]}
        engine = {"sqlite": "sqlite3", "postgres": "postgresql", "mariadb": "mysql"}[self.database]
        engine = f"django.db.backends.{engine}"
        connections.databases["own"] = {
            **connections.databases["default"],
            **place,
            "ENGINE": engine,
            "OPTIONS": options,
        }
        wrapper = connections.create_connection("own")
        connections["own"] = wrapper
        try:
            if autocommit:
                yield wrapper
            else:
                with atomic(using="own"):
                    yield wrapper
        finally:
            wrapper.close()

    @property
    def _url(self) -> str:
        if self.database == "sqlite":
            return f"sqlite{'+aiosqlite' if self.is_async else ''}:///{self.where}"
        if self.database == "postgres":
            at = self.postgres
            driver = next((x for x in ("psycopg2", "asyncpg") if x in self.name), "psycopg")
            return f"postgresql+{driver}://{at['user']}@{at['host']}:{at['port']}/{at['dbname']}"
        at = self.mysql
        return f"mysql+pymysql://{at['user']}@/{at['database']}?unix_socket={at['unix_socket']}&ssl_disabled=true"

    @contextmanager
    def _sqlalchemy(self, autocommit: bool) -> Iterator[Any]:
        from sqlalchemy import create_engine
        from sqlalchemy.orm import Session
        from sqlalchemy.pool import NullPool

        engine = create_engine(self._url, poolclass=NullPool)
        if autocommit:
            engine = engine.execution_options(isolation_level="AUTOCOMMIT")
        if self.name.startswith("session"):
            with Session(engine) as session, session.begin():
                yield session
        else:
            with engine.begin() as connection:
                yield connection

    @asynccontextmanager
    async def _transaction_async(self, autocommit: bool) -> AsyncIterator[Any]:
        if self.name == "psycopg-async":
            import psycopg
            from psycopg.rows import dict_row

            connecting = psycopg.AsyncConnection.connect(self.where, row_factory=dict_row, autocommit=autocommit)
            async with await connecting as connection:
                yield connection
            return
        if self.name == "asyncpg-async":
            import asyncpg

            at = self.postgres
            mine = await asyncpg.connect(host=at["host"], port=int(at["port"]), user=at["user"], database=at["dbname"])
            try:
                if autocommit:
                    yield mine
                else:
                    async with mine.transaction():
                        yield mine
            finally:
                await mine.close()
            return
        from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
        from sqlalchemy.pool import NullPool

        engine = create_async_engine(self._url, poolclass=NullPool)
        if autocommit:
            engine = engine.execution_options(isolation_level="AUTOCOMMIT")
        if self.name.startswith("session"):
            async with AsyncSession(engine) as session, session.begin():
                yield session
        else:
            async with engine.begin() as one:
                yield one


class AsSink:
    """The program as a sink, for tests that are written for sinks."""

    def __init__(self, program: Program) -> None:
        self.program = program

    def records(self, messages: Any, **about: Any) -> Any:
        return self.record(messages, **about)

    @contextmanager
    def record(self, messages: Any = None, **about: Any) -> Iterator[Any]:
        with self.program._transaction(autocommit=False) as connection, fence(connection, messages, **about) as tx:
            yield tx

    def progress(self, group_id: str) -> Any:
        return self.program.progress(group_id)

    def rewind(self, *args: Any, **options: Any) -> None:
        with self.program._transaction(autocommit=False) as connection:
            ConnectionSink(connection).rewind(*args, **options)


def _model() -> Any:
    from sqlalchemy import BigInteger, Column, Integer, Text
    from sqlalchemy.orm import declarative_base

    base = declarative_base()
    columns = {
        "__tablename__": "results",
        "place": Column(Integer, primary_key=True),
        "at": Column(BigInteger, primary_key=True),
        "value": Column(Text, primary_key=True),
    }
    return type("Result", (base,), columns)
