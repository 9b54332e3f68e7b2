"""Both sinks, behind one interface; a temporary PostgreSQL, and a temporary MariaDB."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from kafka_marshal.sinks import FencedSink, PostgresSink, SqliteSink
from kafka_marshal.testing.broker import Processes
from kafka_marshal.testing.layout import free_ports

#: Becomes another user (PostgreSQL refuses to run as root), then the program.
_AS_OTHER = "import os, sys; u, g = map(int, sys.argv[1:3]); os.setgroups([]); os.setgid(g); os.setuid(u); "
_AS_OTHER += "os.execv(sys.argv[3], sys.argv[3:])"


def binary(name: str) -> str | None:
    """A program of PostgreSQL's server: on PATH or in Debian's folder."""
    debian = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"), reverse=True)
    return shutil.which(name) or next((str(each) for each in debian), None)


class Postgres:
    """A server on a free port of 127.0.0.1, with its data in a temporary folder."""

    def __init__(self, folder: Path, server: str, initdb: str, settings: Sequence[str]) -> None:
        self.folder = folder
        self.prefix: list[str] = []
        if os.geteuid() == 0:
            user = pwd.getpwnam("nobody")
            os.chown(folder, user.pw_uid, user.pw_gid)
            self.prefix = [sys.executable, "-I", "-c", _AS_OTHER, str(user.pw_uid), str(user.pw_gid)]
        data = folder / "data"
        command = [initdb, "-D", str(data), "-U", "marshal", "--auth=trust", "--no-sync", "--locale=C", "-E", "UTF8"]
        done = subprocess.run([*self.prefix, *command], capture_output=True, text=True, cwd="/", check=False)
        if done.returncode != 0:
            pytest.skip(f"initdb can't make a database here: {done.stderr.strip()[-300:]}")
        [self.port] = free_ports(1)
        self.command = [server, "-D", str(data), "-p", str(self.port), "-h", "127.0.0.1", "-k", ""]
        self.command += [part for setting in settings for part in ("-c", setting)]
        self.processes = Processes(folder, keep=False)
        self.start()

    def start(self) -> None:
        self.processes.start("postgres", [*self.prefix, *self.command], self.folder / "log")
        import psycopg

        until = time.monotonic() + 60
        while True:
            try:
                psycopg.connect(self.dsn("postgres"), connect_timeout=2).close()
            except psycopg.OperationalError:
                log = (self.folder / "log").read_text(errors="replace")[-1000:]
                assert self.processes.exit_status("postgres") is None and time.monotonic() < until, log
                time.sleep(0.05)
            else:
                return

    def dsn(self, database: str) -> str:
        return f"host=127.0.0.1 port={self.port} user=marshal dbname={database}"

    def new_database(self, isolation: str | None = None) -> str:
        """Its name. isolation: its default."""
        name = f"d{os.urandom(6).hex()}"
        self.ask(f"CREATE DATABASE {name}")
        if isolation is not None:
            self.ask(f"ALTER DATABASE {name} SET default_transaction_isolation = '{isolation}'")
        return name

    def ask(self, sql: str, database: str = "postgres") -> list[tuple[object, ...]]:
        import psycopg

        with psycopg.connect(self.dsn(database), autocommit=True) as connection:
            cursor = connection.execute(sql)
            return cursor.fetchall() if cursor.description else []


@contextmanager
def running_postgres(*settings: str) -> Iterator[Postgres]:
    """A server, until the end of the block; the test is skipped if there is none here."""
    pytest.importorskip("psycopg", reason="psycopg is not installed (the extra [postgres])")
    server, initdb = binary("postgres"), binary("initdb")
    if server is None or initdb is None:
        pytest.skip("no PostgreSQL server here (Debian, Ubuntu: apt-get install postgresql)")
    # Not under pytest's folder, which only its owner may enter.
    running = Postgres(Path(tempfile.mkdtemp(prefix="kafka-marshal-postgres-")), server, initdb, settings)
    try:
        yield running
    finally:
        running.processes.end()


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    with running_postgres("fsync=off", "track_commit_timestamp=on") as running:
        yield running


@pytest.fixture
def database(postgres: Postgres) -> str:
    """The dsn of a new database."""
    return postgres.dsn(postgres.new_database())


class MariaDb:
    """A server on a socket in a temporary folder, with its data."""

    def __init__(self, folder: Path, server: str, install: str) -> None:
        self.folder, self.socket = folder, folder / "socket"
        prefix: list[str] = []
        if os.geteuid() == 0:
            user = pwd.getpwnam("nobody")
            os.chown(folder, user.pw_uid, user.pw_gid)
            prefix = [sys.executable, "-I", "-c", _AS_OTHER, str(user.pw_uid), str(user.pw_gid)]
        data = f"--datadir={folder / 'data'}"
        command = [install, "--no-defaults", data, "--auth-root-authentication-method=normal", "--skip-test-db"]
        done = subprocess.run([*prefix, *command], capture_output=True, text=True, cwd="/", check=False)
        if done.returncode != 0:
            pytest.skip(f"mariadb-install-db can't make a database here: {(done.stdout + done.stderr).strip()[-300:]}")
        self.processes = Processes(folder, keep=False)
        command = [server, "--no-defaults", data, f"--socket={self.socket}", f"--pid-file={folder / 'pid'}"]
        command += ["--skip-networking", "--innodb-flush-log-at-trx-commit=0", "--innodb-buffer-pool-size=32M"]
        self.processes.start("mariadb", [*prefix, *command], folder / "log")
        until = time.monotonic() + 60
        while True:
            try:
                with socket.socket(socket.AF_UNIX) as probe:
                    probe.connect(str(self.socket))
            except OSError:
                log = (folder / "log").read_text(errors="replace")[-1000:]
                assert self.processes.exit_status("mariadb") is None and time.monotonic() < until, log
                time.sleep(0.05)
            else:
                return

    def new_database(self) -> str:
        """Its name."""
        name = f"d{os.urandom(6).hex()}"
        self.ask(f"CREATE DATABASE {name}")
        return name

    def ask(self, sql: str, database: str | None = None) -> list[tuple[Any, ...]]:
        import pymysql

        options: dict[str, Any] = {"user": "root", "database": database, "autocommit": True, "ssl_disabled": True}
        connection = pymysql.connect(unix_socket=str(self.socket), **options)
        with connection, connection.cursor() as cursor:
            cursor.execute(sql)
            return list(cursor.fetchall())


def mariadb_programs() -> tuple[str, str] | None:
    """The server, and what makes its data folder; None if they, or PyMySQL, are not here."""
    path = os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin"))
    server, install = shutil.which("mariadbd", path=path), shutil.which("mariadb-install-db", path=path)
    return None if server is None or install is None or find_spec("pymysql") is None else (server, install)


@pytest.fixture(scope="session")
def mariadb() -> Iterator[MariaDb]:
    """A server; the test is skipped if there is none here."""
    programs = mariadb_programs()
    if programs is None:
        pytest.skip("no MariaDB server here (Debian, Ubuntu: apt-get install mariadb-server), or no PyMySQL")
    running = MariaDb(Path(tempfile.mkdtemp(prefix="kafka-marshal-mariadb-")), *programs)
    try:
        yield running
    finally:
        running.processes.end()


class Kind:
    """Makes sinks of one kind that share one database."""

    def __init__(self, name: str, where: str) -> None:
        self.name, self.where = name, where
        self.opened: list[FencedSink[Any]] = []

    def sink(self, wait_s: float = 30.0) -> FencedSink[Any]:
        """A further writer; wait_s: how long it waits for others."""
        made: FencedSink[Any] = sink_of(self.name, self.where, wait_s)
        self.opened.append(made)
        return made

    @property
    def error(self) -> type[Exception]:
        """Of its driver."""
        return self.sink()._driver_error

    @property
    def mark(self) -> str:
        return "?" if self.name == "sqlite" else "%s"

    def insert(self, rows: str = "(offset_, value)") -> str:
        return f"INSERT INTO results {rows} VALUES ({self.mark}, {self.mark})"

    def setup(self) -> None:
        import psycopg

        sql = "CREATE TABLE results (offset_ bigint, value text)"
        if self.name == "sqlite":
            import sqlite3

            connection = sqlite3.connect(self.where)
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute(sql)
            connection.close()
        else:
            with psycopg.connect(self.where) as other:
                other.execute(sql)

    def ask(self, sql: str) -> list[tuple[Any, ...]]:
        """What an outsider sees."""
        if self.name == "sqlite":
            import sqlite3

            connection = sqlite3.connect(self.where, isolation_level=None)
            try:
                return connection.execute(sql).fetchall()
            finally:
                connection.close()
        import psycopg

        with psycopg.connect(self.where) as other:
            cursor = other.execute(sql)
            found: list[tuple[Any, ...]] = cursor.fetchall() if cursor.description else []
            return found

    def rows(self) -> list[tuple[int, str]]:
        """All results, sorted."""
        return [(offset, value) for offset, value in self.ask("SELECT offset_, value FROM results ORDER BY 1, 2")]


def sink_of(name: str, where: str, wait_s: float = 30.0) -> FencedSink[Any]:
    if name == "sqlite":
        return SqliteSink(where, busy_timeout_s=wait_s)
    return PostgresSink(where, lock_timeout_s=wait_s)


@pytest.fixture(params=["sqlite", "postgres"])
def kind(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Kind]:
    """Each test runs with both."""
    where = str(tmp_path / "results.db") if request.param == "sqlite" else request.getfixturevalue("database")
    kind = Kind(request.param, where)
    kind.setup()
    yield kind
    for each in kind.opened:
        each.close()
