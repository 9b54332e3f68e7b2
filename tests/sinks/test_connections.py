"""``fence`` on the program's own connection, of each library: rows and progress are one transaction."""

from __future__ import annotations

import asyncio
import random
import sqlite3
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest

from kafka_marshal import MessagesFailedError
from kafka_marshal.errors import ConfigurationError, SinkError, StaleEpochError, WrongEpochKindError
from kafka_marshal.sinks import ConnectionSink, Written, fence, fence_tables
from kafka_marshal.sinks.database import MERGE_EVERY
from tests.sinks import test_several_writers
from tests.sinks.conftest import MariaDb, Postgres
from tests.sinks.programs import PROGRAMS, AsSink, Program, nothing
from tests.sinks.test_done_records import attempt, message
from tests.sinks.test_lists import handler_of

#: Part of a program's name → the libraries that it needs.
NEEDS = {
    "sqlalchemy": ["sqlalchemy", "greenlet"],
    "session": ["sqlalchemy", "greenlet"],
    "aiosqlite": ["aiosqlite"],
    "psycopg2": ["psycopg2"],
    "asyncpg": ["asyncpg"],
    "django": ["django"],
    "django-mysql": ["MySQLdb"],
    "mysqlclient": ["MySQLdb"],
}


def opened(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> Program:
    for part, modules in NEEDS.items():
        for module in modules:
            if part in name and find_spec(module) is None:
                pytest.skip(f"{module} is not installed")
    if PROGRAMS[name] == "sqlite":
        where = str(tmp_path / "results.db")
    elif PROGRAMS[name] == "postgres":
        postgres: Postgres = request.getfixturevalue("postgres")
        where = postgres.dsn(postgres.new_database())
    else:
        mariadb: MariaDb = request.getfixturevalue("mariadb")
        where = f"{mariadb.socket}/{mariadb.new_database()}"
    found = Program(name, where)
    found.setup()
    return found


@pytest.fixture(params=list(PROGRAMS))
def program(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Program]:
    yield opened(request.param, request, tmp_path)


def about(epoch: int = 7) -> dict[str, Any]:
    return {"group_id": "group", "epoch": epoch, "kind": "claimed", "value": str(epoch)}


def several(*offsets: int) -> list[Any]:
    return [message(each) for each in offsets]


def test_rows_and_progress_are_one_transaction_and_each_message_is_written_once(program: Program) -> None:
    assert program.write(several(3, 4, 0), **about()) == [3, 4, 0]
    assert program.write(several(4, 5), **about()) == [5]
    assert program.write(several(3, 4), **about(8)) == []
    assert program.rows() == [(0, 0, "7"), (0, 3, "7"), (0, 4, "7"), (0, 5, "7")]
    found = program.progress()["flights", 0]
    assert (found.last_offset, found.epoch) == (0, 8)
    covered = {at for first, last in found.ranges for at in range(first, last + 1)}
    assert covered == {3, 4, 5}


def test_an_older_epoch_is_refused_and_leaves_nothing(program: Program) -> None:
    program.write(several(0), **about(7))
    program.write(several(0), **about(9))  # it has nothing to write, and is the newest from now on
    with pytest.raises(StaleEpochError, match="Stop working"):
        program.write(several(1), **about(7))
    with pytest.raises(WrongEpochKindError):
        program.write(several(1), **{**about(9), "kind": "coordinated"})
    assert program.rows() == [(0, 0, "7")]
    assert program.write(several(1), **about(9)) == [1]


class BrokenError(Exception):
    pass


def fail(_: object) -> None:
    raise BrokenError


def test_what_is_rolled_back_is_neither_written_nor_done(program: Program) -> None:
    for within, after in ((fail, nothing), (nothing, fail)):
        with pytest.raises(BrokenError):
            program.write(several(0, 1), within=within, after=after, **about())
        assert program.rows() == []
    assert program.write(several(0, 1), **about()) == [0, 1]


def test_without_a_transaction_it_is_refused(program: Program) -> None:
    with pytest.raises(ConfigurationError, match="autocommit mode"):
        program.write(several(0), autocommit=True, **about())
    assert program.rows() == []
    assert program.ask("SELECT * FROM kafka_marshal_done") == []


def test_an_error_that_the_program_catches_takes_the_block_back(program: Program) -> None:
    """It commits what it did besides; rows and progress of the block are not there."""
    if program.is_async:
        pytest.skip("the same blocks, awaited")
    with program._transaction(autocommit=False) as connection:
        with suppress(BrokenError), fence(connection, several(0, 1), **plain()) as tx:
            for each in tx.new:
                program._insert(connection, (0, each.offset(), "lost"))
            raise BrokenError
        program._insert(connection, (5, 5, "besides"))
    assert program.rows() == [(5, 5, "besides")]
    assert program.write(several(0, 1), **about()) == [0, 1]


def test_a_block_that_did_not_ask_what_is_new_is_taken_back(program: Program) -> None:
    if program.is_async:
        pytest.skip("the same blocks, awaited")
    program.write(several(0), **about())
    with (
        pytest.raises(ConfigurationError, match=r"did not read tx\.new"),
        program._transaction(False) as connection,
        fence(connection, several(0, 1), **plain()),
    ):
        program._insert(connection, (0, 0, "twice"))
    assert program.rows() == [(0, 0, "7")]


def plain(epoch: int = 7) -> dict[str, Any]:
    return {"group_id": "group", "epoch": epoch, "kind": "claimed"}


def test_a_handler_needs_no_arguments_and_what_it_writes_of_a_done_message_is_rolled_back(program: Program) -> None:
    for value in ("first", "again"):
        with attempt(4):
            write = partial(program.write, None, value)
            assert write() == ([4] if value == "first" else [])
    if not program.is_async:
        with attempt(4), program._transaction(False) as connection, fence(connection) as tx:
            program._insert(connection, (0, 4, "unasked"))
        assert tx.is_done
    assert program.rows() == [(0, 4, "first")]


ENDS = {
    "sqlite3": "COMMIT",
    "psycopg-plain": "COMMIT",
    "sqlalchemy-postgres": "ROLLBACK",
    "django-postgres": "COMMIT",
    "pymysql": "CREATE TABLE other (x int)",  # which commits
    "sqlalchemy-mysql": "COMMIT",
}


@pytest.mark.parametrize("name", ENDS)
def test_a_block_that_ends_the_transaction_is_an_error(
    name: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Libraries may say it once more, in their words."""
    program = opened(name, request, tmp_path)
    try:
        program.write(several(0), within=lambda on: ConnectionSink(on)._link.run(ENDS[name]), **about())
    except Exception as error:  # noqa: BLE001
        found: BaseException | None = error
        while found is not None and "ended the transaction by itself" not in str(found):
            found = found.__context__
        assert found is not None, error
    else:
        pytest.fail("no error")


@pytest.mark.parametrize("name", ["psycopg", "psycopg-async", "session"])
def test_a_stricter_level_of_postgresql_is_refused(name: str, postgres: Postgres) -> None:
    if name == "session":
        pytest.importorskip("sqlalchemy")
    for level in ("repeatable read", "serializable"):
        program = Program(name, postgres.dsn(postgres.new_database(level)))
        program.setup()
        with pytest.raises(ConfigurationError, match="ISOLATION LEVEL READ COMMITTED"):
            program.write(several(0), **about())
        assert program.rows() == []


@pytest.mark.parametrize("name", ["pymysql", "pymysql-committed", "sqlalchemy-mysql"])
def test_a_snapshot_of_mysql_hides_neither_a_newer_epoch_nor_what_is_done(
    name: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    program = opened(name, request, tmp_path)
    other = Program("pymysql", program.where)
    other.write(several(0, 1), **about(7))
    with program._transaction(False) as connection:
        ConnectionSink(connection)._link.run("SELECT * FROM kafka_marshal_done, kafka_marshal_progress")
        other.write(several(2, 3), **about(7))
        with fence(connection, several(2, 3, 4), **plain()) as tx:
            assert [each.offset() for each in tx.new] == [4]
    with pytest.raises(StaleEpochError), program._transaction(False) as connection:
        ConnectionSink(connection)._link.run("SELECT * FROM kafka_marshal_done, kafka_marshal_progress")
        other.write(several(9), **about(8))
        with fence(connection, several(5), **plain()):
            pass


@pytest.mark.parametrize("name", ["sqlite3", "psycopg", "pymysql", "pymysql-committed"])
def test_an_entry_waits_for_writers_that_passed_before_it(
    name: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    program = opened(name, request, tmp_path)
    program.write(several(9), **about(7))
    order: list[str] = []

    def newer() -> list[int]:
        return program.write(several(1, 3), within=lambda _: order.append("newer"), **about(8))

    with ThreadPoolExecutor() as pool:

        def begin(_: object) -> None:
            running.append(pool.submit(newer))
            with suppress(TimeoutError):
                running[0].result(0.3)
            order.append("older")

        running: list[Future[list[int]]] = []
        assert program.write(several(0), after=begin, **about(7)) == [0]
        assert running[0].result(30) == [1, 3]
    assert order == ["older", "newer"]
    with pytest.raises(StaleEpochError):
        program.write(several(2), **about(7))
    assert program.rows() == [(0, 0, "7"), (0, 1, "8"), (0, 3, "8"), (0, 9, "7")]


@pytest.mark.parametrize("name", ["sqlite3", "psycopg", "session", "pymysql"])
def test_the_answer_to_a_commit_may_be_lost(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """The program runs it again, whether it was committed or not."""
    program = opened(name, request, tmp_path)
    with suppress(BrokenError):
        program.write(several(0, 1), **about())
        raise BrokenError
    assert program.write(several(0, 1, 2), **about()) == [2]
    assert [at for _, at, _ in program.rows()] == [0, 1, 2]


@pytest.mark.parametrize("name", ["psycopg", "sqlalchemy-postgres", "django-postgres", "psycopg-async"])
def test_a_connection_that_is_lost_leaves_nothing(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    program = opened(name, request, tmp_path)
    cut = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND datname = "
    with pytest.raises(SinkError, match="connection") as caught:
        program.write(several(0), within=lambda _: program.ask(f"{cut}current_database()"), **about())
    assert caught.value.retry
    assert program.rows() == []
    assert program.write(several(0), **about()) == [0]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", ["sqlite3", "psycopg", "pymysql"])
def test_each_answer_is_that_of_the_model_of_sinks(
    name: str, seed: int, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kafka_marshal.sinks.connection.MERGE_EVERY", 7)
    program = opened(name, request, tmp_path)
    kind: Any = SimpleNamespace(sink=lambda: AsSink(program))
    test_several_writers.test_each_answer_is_that_of_a_model(kind, seed, monkeypatch)


@pytest.mark.parametrize("name", ["sqlite3", "psycopg", "pymysql"])
def test_rows_of_offsets_are_merged(
    name: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("random.random", random.Random(7).random)
    program = opened(name, request, tmp_path)
    with program._transaction(False) as connection:
        for offset in range(0, 250, 2):  # in one transaction: many blocks may be
            with fence(connection, several(offset), **plain(), stable=offset - 1) as tx:
                assert tx.new
    at = program.progress()["flights", 0]
    assert at.last_offset > 100
    assert len(at.ranges) < MERGE_EVERY


@pytest.mark.parametrize("name", ["sqlite3", "psycopg", "pymysql", "django-sqlite", "session"])
def test_tables_that_are_missing_are_named(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    program = opened(name, request, tmp_path)
    program.ask("DROP TABLE kafka_marshal_progress")
    with pytest.raises(SinkError, match=rf"fence_tables\('{program.vendor}'\)"):
        program.write(several(0), **about())


def test_what_is_no_connection_is_refused_with_those_that_are_known() -> None:
    with closing(sqlite3.connect(":memory:")) as connection:
        for wrong in (None, "dsn", object(), connection.cursor()):
            with pytest.raises(ConfigurationError, match=r"psycopg .*sqlite3.*SQLAlchemy.*django"):
                fence(wrong, several(0), **plain())
        with pytest.raises(ConfigurationError, match="Write 'with fence"):
            asyncio.run(fence(connection, several(0), **plain()).__aenter__())


def test_with_on_a_connection_of_asyncio_is_refused(postgres: Postgres) -> None:
    async def write() -> None:
        async with await psycopg.AsyncConnection.connect(postgres.dsn("postgres")) as connection:
            with fence(connection, several(0), **plain()):
                pass

    with pytest.raises(ConfigurationError, match="async with fence"):
        asyncio.run(write())


def test_a_name_has_rows_of_its_own_and_other_forms_are_refused() -> None:
    with closing(sqlite3.connect(":memory:")) as connection, connection:
        for statement in fence_tables("sqlite"):
            connection.execute(statement)
        for name in (None, "delays"):
            with fence(connection, several(0), name=name, **plain()) as tx:
                assert len(tx.new) == 1
        sink = ConnectionSink(connection, name="delays")
        assert sink.progress("group") == {("flights", 0): Written(0, 7)}
        sink.forget("group")
        assert (sink.progress("group"), len(ConnectionSink(connection).progress("group"))) == ({}, 1)
        for refused in (sink.transaction, sink.restore):
            with pytest.raises(ConfigurationError, match="Nothing was"):
                refused()


def test_in_a_handler_of_lists(program: Program) -> None:
    """The epoch is that of the messages' attempts."""

    def refuse(_: object) -> None:
        raise MessagesFailedError({0: ValueError("refused")})

    found = several(3, 4, 0)
    with handler_of(found):
        with pytest.raises(ConfigurationError, match="would be done without their rows"):
            program.write(found, within=refuse)
        assert program.rows() == []
        assert program.write(found[:2], "x") == [3, 4]
        assert program.write(found[2], "x") == [0]
        assert program.write(found, "y") == []
        with pytest.raises(ConfigurationError, match="no attempt of this message"):
            program.write(several(3))
    assert program.rows() == [(0, 0, "x"), (0, 3, "x"), (0, 4, "x")]
