"""``fence`` on the program's own connection, of each library: rows and progress together, by the rules of ``record``."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from kafka_marshal.errors import ConfigurationError, StaleEpochError, WrongEpochKindError
from tests.sinks.conftest import MariaDb, Postgres
from tests.sinks.programs import PROGRAMS, Program
from tests.sinks.test_done_records import message

#: Part of a program's name → the libraries that it needs.
NEEDS = {
    "sqlalchemy": ["sqlalchemy", "greenlet"],
    "session": ["sqlalchemy", "greenlet"],
    "aiosqlite": ["aiosqlite"],
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
    for where in ("within", "after"):
        with pytest.raises(BrokenError):
            program.write(several(0, 1), **about(), **{where: fail})
        assert program.rows() == []
    assert program.write(several(0, 1), **about()) == [0, 1]


def test_without_a_transaction_it_is_refused(program: Program) -> None:
    with pytest.raises(ConfigurationError, match="autocommit mode"):
        program.write(several(0), autocommit=True, **about())
    assert program.rows() == []
    assert program.ask("SELECT * FROM kafka_marshal_done") == []
