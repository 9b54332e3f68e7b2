"""Behind PgBouncer each transaction may get another server connection, shared with other programs."""

from __future__ import annotations

import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest

from kafka_marshal.errors import SinkError, StaleEpochError
from kafka_marshal.sinks import PostgresSink, Written
from kafka_marshal.testing.layout import free_ports
from tests.broker.helpers import eventually
from tests.sinks.conftest import Postgres
from tests.sinks.test_done_records import message

#: A second name for the database, with one server connection: its state affects the next transaction.
_CONFIGURATION = """
[databases]
{name} = host=127.0.0.1 port={server} dbname={name} user=marshal
one = host=127.0.0.1 port={server} dbname={name} user=marshal pool_size=1
by_statement = host=127.0.0.1 port={server} dbname={name} user=marshal pool_mode=statement
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
auth_type = any
pool_mode = transaction
default_pool_size = {pool}
"""
#: Fewer than the writers below, so that each transaction gets connections that others used.
_POOL = 4
_CLAIM = [("flights", 0, 7, 9)]


class Pooled:
    """A database with a strict default, behind its own PgBouncer."""

    def __init__(self, postgres: Postgres) -> None:
        pgbouncer = shutil.which("pgbouncer", path=f"{os.environ['PATH']}:/usr/sbin")
        if pgbouncer is None:
            pytest.skip("no PgBouncer here (Debian, Ubuntu: apt-get install pgbouncer)")
        self.postgres = postgres
        self.name = postgres.new_database("repeatable read")
        [self.port] = free_ports(1)
        ini = postgres.folder / f"{self.name}.ini"
        ini.write_text(_CONFIGURATION.format(name=self.name, server=postgres.port, port=self.port, pool=_POOL))
        log = postgres.folder / f"{self.name}.log"
        postgres.processes.start(self.name, [*postgres.prefix, pgbouncer, str(ini)], log)
        eventually(self._answers, what="PgBouncer answers")
        self.ask("CREATE TABLE results (partition int, offset_ int)")

    def dsn(self, name: str | None = None) -> str:
        return f"host=127.0.0.1 port={self.port} user=marshal dbname={name or self.name}"

    def ask(self, sql: str, name: str | None = None) -> list[tuple[object, ...]]:
        with psycopg.connect(self.dsn(name), autocommit=True, prepare_threshold=None) as connection:
            cursor = connection.execute(sql)
            return cursor.fetchall() if cursor.description else []

    def waits_for_a_lock(self) -> bool:
        waiting = f"SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = '{self.name}'"
        return bool(self.postgres.ask(waiting))

    def _answers(self) -> bool:
        try:
            return self.ask("SELECT 1") == [(1,)]
        except psycopg.OperationalError:
            return False


@pytest.fixture(scope="module")
def pooled(postgres: Postgres) -> Pooled:
    return Pooled(postgres)  # PgBouncer ends with the server, whose supervisor started it


def test_an_older_epoch_that_waited_for_a_newer_one_is_refused(pooled: Pooled) -> None:
    """In repeatable read it would continue with the state from before its wait: an old epoch."""
    for form in ("transaction", "record"):
        old, new = PostgresSink(pooled.dsn()), PostgresSink(pooled.dsn())
        with old.transaction(form, _CLAIM):
            pass

        def late(form: str = form, old: PostgresSink = old) -> None:
            block = (
                old.transaction(form, [("flights", 0, 7, 12)])
                if form == "transaction"
                else old.record(message(12), group_id=form, epoch=7, kind="claimed")
            )
            with block as tx:
                tx.execute("INSERT INTO results VALUES (99, 12)")

        with ThreadPoolExecutor(1) as pool:
            with new.transaction(form, [("flights", 0, 9, 10)]):
                waiting = pool.submit(late)
                eventually(pooled.waits_for_a_lock, what="the stale writer waits")
            with pytest.raises(StaleEpochError):
                waiting.result(30)
        assert new.progress(form) == {("flights", 0): Written(10, 9)}
        old.close()
        new.close()
    assert pooled.ask("SELECT count(*) FROM results WHERE partition = 99") == [(0,)]


def test_many_writers_on_few_connections_write_every_row_once(pooled: Pooled) -> None:
    sink, together = PostgresSink(pooled.dsn()), threading.Barrier(12)

    def records(number: int) -> None:
        together.wait(30)  # missing rows are created at the same moment, by more writers than there are connections
        for offset in range(20):
            with sink.record(message(offset, number), group_id="many", epoch=7, kind="claimed") as tx:
                tx.execute("INSERT INTO results VALUES (%s, %s)", (number, offset))

    def batches(number: int) -> None:
        together.wait(30)
        for last in range(4, 20, 5):
            with sink.transaction("many", [("flights", number, 7, last)]) as tx:
                first = tx.last_offset("flights", number) + 1
                tx.executemany("INSERT INTO results VALUES (%s, %s)", [(number, at) for at in range(first, last + 1)])

    def work(number: int) -> None:
        (records if number % 2 else batches)(number)

    with ThreadPoolExecutor(12) as pool:
        list(pool.map(work, range(12), timeout=60))
    assert pooled.ask("SELECT count(*), count(DISTINCT (partition, offset_)) FROM results WHERE partition < 12") == [
        (240, 240)
    ]
    sink.close()


def test_nothing_stays_on_a_connection_that_others_use_next(pooled: Pooled) -> None:
    seen = (
        "SELECT current_setting('lock_timeout'), current_setting('idle_in_transaction_session_timeout'), "
        "current_setting('default_transaction_isolation'), current_setting('search_path'), "
        "current_setting('application_name'), "
        "(SELECT count(*) FROM pg_prepared_statements), (SELECT count(*) FROM pg_listening_channels()), "
        "(SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()), "
        "(SELECT count(*) FROM pg_class WHERE relpersistence = 't')"
    )
    before = pooled.ask(seen, "one")
    with PostgresSink(pooled.dsn("one")) as sink:
        for last in range(9, 20):
            with sink.transaction("left", [("flights", 0, 7, last)]):
                pass
            with sink.record(message(last, 1), group_id="left", epoch=7, kind="claimed"):
                pass
        with pytest.raises(StaleEpochError), sink.transaction("left", [("flights", 0, 6, 30)]):
            pytest.fail("it may not get here")
        with pytest.raises(SinkError), sink.transaction("left", [("flights", 0, 7, 30)]) as tx:
            tx.execute("SELECT 1 / 0")
        assert pooled.ask(seen, "one") == before
        sink.rewind("left", {("flights", 0): 3})
        sink.convert("left", "coordinated")
        sink.progress("left")
        sink.forget("left")
        assert pooled.ask(seen, "one") == before


@pytest.mark.parametrize(
    "left_behind",
    [
        "SET search_path TO elsewhere",
        "SET default_transaction_isolation TO 'serializable'",
        "SET lock_timeout TO 1",
        "PREPARE _pg3_0 AS SELECT 1",
    ],
)
def test_what_another_program_left_does_not_count(pooled: Pooled, left_behind: str) -> None:
    group = left_behind.split()[1]
    pooled.ask("CREATE SCHEMA IF NOT EXISTS elsewhere")
    with PostgresSink(pooled.dsn("one")) as old, PostgresSink(pooled.dsn("one")) as new:
        with new.transaction(group, [("flights", 0, 9, 9)]):
            pass
        pooled.ask(left_behind, "one")
        try:
            for _ in range(6):  # a driver prepares frequent statements
                with pytest.raises(StaleEpochError), old.transaction(group, _CLAIM):
                    pytest.fail("it may not get here")
            with new.transaction(group, [("flights", 0, 9, 10)]):
                pass
        finally:
            pooled.ask("DISCARD ALL", "one")
        assert new.progress(group) == {("flights", 0): Written(10, 9)}


def test_a_search_path_in_the_dsn_stays(postgres: Postgres, pooled: Pooled) -> None:
    pooled.ask("CREATE SCHEMA named")
    dsn = f"{postgres.dsn(pooled.name)} options='-c search_path=named'"
    with PostgresSink(dsn) as sink, sink.transaction("path", _CLAIM) as tx:
        tx.execute("CREATE TABLE here (x int)")
    assert pooled.ask("SELECT count(*) FROM named.here, named.kafka_marshal_progress") == [(0,)]


def test_a_pool_of_statements_is_refused(pooled: Pooled) -> None:
    with PostgresSink(pooled.dsn("by_statement")) as sink:
        for _ in range(2):
            with pytest.raises(SinkError, match="pool_mode = transaction") as caught:
                sink.progress("group")
            assert not caught.value.retry
            assert "Nothing of this transaction was written" in str(caught.value)
