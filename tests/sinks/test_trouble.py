"""Failing databases: the message, what was written, and whether a retry makes sense."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kafka_marshal.engine.work.lanes import Order
from kafka_marshal.errors import ConfigurationError, SinkError, StaleEpochError
from kafka_marshal.sinks import FencedSink, PostgresSink, RecordTransaction, SqliteSink, Written
from kafka_marshal.testing.layout import free_ports
from tests.broker.helpers import REPOSITORY, eventually
from tests.sinks.conftest import Kind, Postgres
from tests.sinks.test_done_records import T0, attempt, handle, intervals, message

CLAIM = [("flights", 0, 7, 9)]


def refusal(sink: FencedSink[Any], sql: str = "SELECT 1", claims: list[tuple[str, int, int, int]] = CLAIM) -> SinkError:
    """The error of a transaction that runs this statement."""
    with pytest.raises(SinkError) as caught, sink.transaction("group", claims) as tx:
        tx.execute(sql)
    assert "Nothing of this transaction was written" in str(caught.value)
    return caught.value


# -- killed in the middle -----------------------------------------------------------------------------------------

WRITER = """
import sys
sys.path[:0] = ["marshal", "."]
from tests.sinks.conftest import Kind
kind = Kind(sys.argv[1], sys.argv[2])
with kind.sink().transaction("group", [("flights", 0, 7, 9)]) as tx:
    tx.executemany(kind.insert(), [(offset, "killed") for offset in range(10)])
    print("written", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_writer_killed_between_write_and_commit_leaves_nothing(kind: Kind, number: signal.Signals) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, kind.name, kind.where],
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"written\n"
    process.send_signal(number)
    process.communicate(timeout=90)
    sink = kind.sink()
    with sink.transaction("group", [("flights", 0, 9, 9)]) as tx:
        assert tx.last_offset("flights", 0) == -1
        tx.executemany(kind.insert(), [(offset, "again") for offset in range(10)])
    assert kind.rows() == [(offset, "again") for offset in range(10)]


def test_a_fork_neither_uses_nor_closes_its_parents_connections(kind: Kind) -> None:
    sink = kind.sink()
    with sink.transaction("group", CLAIM):
        pass
    child = os.fork()
    if child == 0:
        status = 1
        try:
            with sink.transaction("group", [("flights", 1, 7, 3)]):
                pass
            sink.close()
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    with sink.transaction("group", [("flights", 0, 7, 12)]):
        pass
    assert sink.progress("group") == {("flights", 0): Written(12, 7), ("flights", 1): Written(3, 7)}


# -- SQLite -------------------------------------------------------------------------------------------------------


def test_sqlite_a_writer_that_stands_still_is_named_after_the_timeout(tmp_path: Path) -> None:
    first, second = SqliteSink(tmp_path / "db"), SqliteSink(tmp_path / "db", busy_timeout_s=0.1)
    with first.transaction("group", CLAIM):
        error = refusal(second)
    assert error.retry
    assert "kept the database for too long" in str(error)
    with second.transaction("group", CLAIM):
        pass
    first.close()
    second.close()


def test_sqlite_a_full_disk(tmp_path: Path) -> None:
    with SqliteSink(tmp_path / "db") as sink:
        with pytest.raises(SinkError, match="disk is full") as caught, sink.transaction("group", CLAIM) as tx:
            tx.execute("CREATE TABLE big (x)")
            [[pages]] = tx.execute("PRAGMA page_count").fetchall()
            tx.execute(f"PRAGMA max_page_count = {pages + 3}")
            tx.execute("INSERT INTO big VALUES (zeroblob(1000000))")
        assert caught.value.retry
        assert "Nothing of this transaction was written" in str(caught.value)
        assert sink.progress("group") == {}


@pytest.mark.parametrize("path", [":memory:", ""])
def test_sqlite_a_database_that_no_other_writer_shares_is_refused(path: str) -> None:
    with pytest.raises(ConfigurationError, match="which all writers share"):
        SqliteSink(path)


def test_sqlite_places_that_will_not_do(tmp_path: Path) -> None:
    assert "can't be opened" in str(refusal(SqliteSink(tmp_path / "nowhere" / "db")))
    (tmp_path / "text").write_text("this is no database, " * 100)
    assert "is no SQLite database" in str(refusal(SqliteSink(tmp_path / "text")))
    connection = sqlite3.connect(tmp_path / "other")
    connection.execute("CREATE TABLE kafka_marshal_progress (group_id TEXT, last_offset INTEGER)")
    connection.close()
    error = refusal(SqliteSink(tmp_path / "other"))
    for part in ("of another shape here: group_id, last_offset;", "expected group_id, topic", "Rename that table"):
        assert part in str(error)


def test_sqlite_a_table_without_its_primary_key_is_of_another_shape(tmp_path: Path) -> None:
    connection = sqlite3.connect(tmp_path / "db")
    connection.execute("CREATE TABLE kafka_marshal_progress (group_id, topic, partition, last_offset, epoch)")
    connection.close()
    assert "with the primary key" in str(refusal(SqliteSink(tmp_path / "db")))


def test_sqlite_executescript_may_not_commit_on_the_quiet(tmp_path: Path) -> None:
    with SqliteSink(tmp_path / "db") as sink:
        with pytest.raises(SinkError, match="Leave COMMIT"), sink.transaction("group", CLAIM) as tx:
            tx.execute("CREATE TABLE t (x)")
            tx.connection.executescript("INSERT INTO t VALUES (1);")
        with sink.transaction("group", CLAIM) as tx:
            assert tx.last_offset("flights", 0) == -1
            assert tx.execute("SELECT count(*) FROM sqlite_master WHERE name = 't'").fetchone() == (0,)


def test_sqlite_survives_a_loss_of_power(tmp_path: Path) -> None:
    with SqliteSink(tmp_path / "db") as sink, sink.transaction("group", CLAIM) as tx:
        assert tx.execute("PRAGMA synchronous").fetchone() == (2,), "FULL"


# -- PostgreSQL ---------------------------------------------------------------------------------------------------


def test_postgres_without_a_server(postgres: Postgres) -> None:
    [closed] = free_ports(1)
    error = refusal(PostgresSink(f"host=127.0.0.1 port={closed} user=marshal password=geheim dbname=x"))
    assert error.retry
    assert "does not answer" in str(error)
    assert "geheim" not in str(error)


def test_postgres_an_invalid_dsn(postgres: Postgres) -> None:
    error = refusal(PostgresSink("this is no dsn"))
    assert not error.retry
    assert "the dsn is wrong" in str(error)
    assert "this is no" not in str(error)
    missing = refusal(PostgresSink(postgres.dsn("nowhere")))
    assert "nowhere" in str(missing)


def test_postgres_the_connection_is_lost_in_the_middle(postgres: Postgres, database: str) -> None:
    sink = PostgresSink(database)
    with pytest.raises(SinkError, match="Nothing of this transaction was written") as caught:
        cut(postgres, sink)
    assert caught.value.retry
    assert sink.progress("group") == {("flights", 0): Written(-1, -1)}
    with sink.transaction("group", CLAIM):
        pass
    # A connection cut while idle is replaced silently.
    ours = f"FROM pg_stat_activity WHERE datname = '{database.rpartition('=')[2]}'"
    postgres.ask(f"SELECT pg_terminate_backend(pid) {ours}")
    eventually(lambda: not postgres.ask(f"SELECT 1 {ours}"), what="the end of its process")
    with sink.transaction("group", [("flights", 0, 7, 10)]) as tx:
        assert tx.last_offset("flights", 0) == 9
    sink.close()


def cut(postgres: Postgres, sink: PostgresSink) -> None:
    with sink.transaction("group", CLAIM) as tx:
        tx.execute("CREATE TABLE t (x int)")
        pid = tx.connection.info.backend_pid
        postgres.ask(f"SELECT pg_terminate_backend({pid})")
        eventually(lambda: not postgres.ask(f"SELECT 1 FROM pg_stat_activity WHERE pid = {pid}"), what="the cut")
        tx.execute("INSERT INTO t VALUES (1)")


def test_postgres_lost_at_commit_says_that_it_is_not_known(postgres: Postgres, database: str) -> None:
    """A trigger that waits at commit holds the backend there while it is killed."""
    import psycopg

    with psycopg.connect(database) as other:
        other.execute(
            "CREATE TABLE t (x int);"
            "CREATE FUNCTION wait() RETURNS trigger LANGUAGE plpgsql AS "
            "$$ BEGIN PERFORM pg_sleep(600); RETURN NULL; END $$;"
            "CREATE CONSTRAINT TRIGGER at_commit AFTER INSERT ON t DEFERRABLE INITIALLY DEFERRED "
            "FOR EACH ROW EXECUTE FUNCTION wait()"
        )
    sink = PostgresSink(database)
    sleeping = "SELECT pid FROM pg_stat_activity WHERE state = 'active' AND query = 'COMMIT' AND wait_event = 'PgSleep'"

    def kill() -> None:
        eventually(lambda: postgres.ask(sleeping), what="a commit that waits")
        [[pid]] = postgres.ask(sleeping)
        postgres.ask(f"SELECT pg_terminate_backend({pid})")

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(SinkError) as caught, sink.transaction("group", CLAIM) as tx:
        tx.execute("INSERT INTO t VALUES (1)")
    killer.join()
    assert caught.value.retry
    assert "Whether this transaction was committed is not known" in str(caught.value)
    assert "last_offset() then shows it" in str(caught.value)
    with sink.transaction("group", CLAIM) as tx:
        assert tx.last_offset("flights", 0) == -1
    sink.close()


def test_postgres_a_writer_that_stands_still_is_named_and_then_ended(postgres: Postgres, database: str) -> None:
    slow = PostgresSink(database, idle_timeout_s=1.0)
    impatient, patient = PostgresSink(database, lock_timeout_s=0.1), PostgresSink(database)
    newer = [("flights", 0, 9, 20)]
    with pytest.raises(SinkError, match="did nothing for too long") as caught, slow.transaction("group", CLAIM) as tx:
        error = refusal(impatient, claims=newer)
        assert error.retry
        assert "keeps the rows of these partitions for too long" in str(error)
        with patient.transaction("group", newer) as other:
            assert other.last_offset("flights", 0) == -1
        tx.execute("SELECT 1")
    assert caught.value.retry
    with pytest.raises(StaleEpochError), slow.transaction("group", CLAIM):
        pytest.fail("it may not get here")
    for each in (slow, impatient, patient):
        each.close()


@pytest.mark.parametrize(
    ("state", "says", "retry"),
    [
        ("53100", "disk is full", True),
        ("53300", "no room left", True),
        ("40P01", "got in the way of another", True),
        ("42501", "Grant it the right", False),
        ("23505", "a row was refused", False),
        ("22012", "refused a statement", False),
    ],
)
def test_postgres_what_its_codes_mean(database: str, state: str, says: str, retry: bool) -> None:
    sink = PostgresSink(database)
    error = refusal(sink, f"DO $$ BEGIN RAISE EXCEPTION USING ERRCODE = '{state}', MESSAGE = 'as planned'; END $$")
    assert says in str(error)
    assert "as planned" in str(error)
    assert error.retry == retry
    sink.close()


def test_postgres_a_table_of_another_shape(database: str) -> None:
    import psycopg

    with psycopg.connect(database) as other:
        other.execute("CREATE TABLE kafka_marshal_progress (group_id text PRIMARY KEY, epoch int)")
    assert "of another shape here: group_id, epoch;" in str(refusal(PostgresSink(database)))


def test_postgres_a_user_without_right_to_create_tables_writes_to_an_existing_one(
    postgres: Postgres, database: str
) -> None:
    import psycopg

    name = f"u{os.urandom(4).hex()}"
    with psycopg.connect(database) as other:
        other.execute(f"CREATE USER {name}; REVOKE CREATE ON SCHEMA public FROM PUBLIC")
    limited = f"{database} user={name}"
    assert "Grant it the right" in str(refusal(PostgresSink(limited)))
    with PostgresSink(database) as owner:
        assert owner.progress("group") == {}
    with psycopg.connect(database) as other:
        other.execute(f"GRANT SELECT, INSERT, UPDATE, DELETE ON kafka_marshal_progress, kafka_marshal_done TO {name}")
    with PostgresSink(limited) as sink:
        with sink.transaction("group", CLAIM):
            pass
        assert sink.progress("group") == {("flights", 0): Written(9, 7)}


def test_postgres_other_partitions_are_written_side_by_side(database: str) -> None:
    first, second = PostgresSink(database), PostgresSink(database, lock_timeout_s=0.5)
    with first.transaction("group", CLAIM), ThreadPoolExecutor(1) as pool:

        def other() -> None:
            with second.transaction("group", [("flights", 1, 3, 4)]):
                pass

        pool.submit(other).result(30)
    assert second.progress("group") == {("flights", 0): Written(9, 7), ("flights", 1): Written(4, 3)}
    first.close()
    second.close()


def test_postgres_a_strict_default_of_the_database_does_not_matter(postgres: Postgres, database: str) -> None:
    import psycopg

    with psycopg.connect(database) as other:
        other.execute("CREATE TABLE t (x int)")
    name = database.rpartition("=")[2]
    postgres.ask(f"ALTER DATABASE {name} SET default_transaction_isolation = 'serializable'")
    old, new = PostgresSink(database), PostgresSink(database)
    with ThreadPoolExecutor(1) as pool:
        with old.transaction("group", CLAIM):

            def later() -> int:
                with new.transaction("group", [("flights", 0, 9, 12)]) as tx:
                    return tx.last_offset("flights", 0)

            waiting = pool.submit(later)
            locks = "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
            eventually(lambda: postgres.ask(locks), what="the second writer waits")
        assert waiting.result(30) == 9
    old.close()
    new.close()


def test_postgres_without_its_driver_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(SinkError, match=r"pip install 'kafka-marshal\[postgres\]'"):
        PostgresSink("dbname=x")


# -- If records end in any order: what a sink rejects, and its reasons --------------------------------------------


@pytest.mark.parametrize("order", ["key", "none"])
def test_a_last_offset_is_refused_where_records_end_in_any_order(kind: Kind, order: Order) -> None:
    sink = kind.sink()
    with (
        attempt(5, order=order),
        pytest.raises(ConfigurationError, match=f"order='{order}'.*left out for good.*sink.record"),
        sink.transaction("group", [(*T0, 7, 5)]),
    ):
        pytest.fail("it may not get here")
    assert sink.progress("group") == {}


def test_with_order_partition_both_forms_are_right(kind: Kind) -> None:
    sink = kind.sink()
    with attempt(5, order="partition"), sink.transaction("group", [(*T0, 7, 5)]):
        pass
    assert handle(kind, sink, 6, order="partition")
    with attempt(7, order="partition"), sink.transaction("group", [(*T0, 7, 7)]) as tx:
        assert tx.last_offset(*T0) == 6
    assert sink.progress("group") == {T0: Written(7, 7)}


def test_a_last_offset_is_refused_where_it_would_write_single_records_again(kind: Kind) -> None:
    sink = kind.sink()
    for offset in (0, 1, 4, 5):
        handle(kind, sink, offset)
    with (
        pytest.raises(ConfigurationError, match=r"last offset 1 .* 4 to 5 .*sink.rewind"),
        sink.transaction("group", [(*T0, 7, 4)]),
    ):
        pytest.fail("it may not get here")
    with sink.transaction("group", [(*T0, 7, 3)]) as tx:
        assert tx.last_offset(*T0) == 1
    with sink.transaction("group", [(*T0, 7, 9)]) as tx:
        assert tx.last_offset(*T0) == 5
    assert intervals(kind) == []


def test_without_an_attempt_all_four_are_given(kind: Kind) -> None:
    sink = kind.sink()
    given: dict[str, Any] = {"group_id": "group", "epoch": 7, "kind": "claimed"}

    def refused(match: str, *args: Any, **kwargs: Any) -> None:
        with pytest.raises(ConfigurationError, match=match) as caught, sink.record(*args, **kwargs):
            pytest.fail("it may not get here")
        assert "Nothing was" in str(caught.value)

    refused("outside of a handler")
    refused("outside of a handler", message(1))
    refused("together", **given)
    for missing in given:
        refused("together", message(1), **{name: value for name, value in given.items() if name != missing})
    refused("message must be", object(), **given)
    refused("kind must be", message(1), **(given | {"kind": "x"}))
    refused("epoch must be", message(1), **(given | {"epoch": -1}))
    refused("offset must be", message(-1001), **given)
    refused("stable must be", message(1), **given, stable=-2)
    with sink.record(message(1), **given) as tx:
        assert isinstance(tx, RecordTransaction)
    with attempt(5):
        refused("handler of flights \\[0\\] offset 5", message(6))
        with sink.record(message(5)):
            pass
        with sink.record(message(6), **given):
            pass
    assert sink.progress("group") == {T0: Written(-1, 7, ranges=((1, 1), (5, 6)))}


def test_committing_in_the_block_is_reported(kind: Kind) -> None:
    sink = kind.sink()
    with pytest.raises(SinkError, match="Leave COMMIT"), attempt(5), sink.record() as tx:
        tx.execute(kind.insert(), (5, "x"))
        tx.execute("COMMIT")


def test_committing_by_oneself_does_not_damage_what_is_stored(kind: Kind) -> None:
    sink = kind.sink()
    for offset in (3, 4, 5):
        handle(kind, sink, offset)
    handle(kind, sink, 9, epoch=8)
    assert intervals(kind) == [(3, 5), (9, 9)]
    with pytest.raises(SinkError, match="Leave COMMIT"), attempt(4, 8), sink.record() as tx:
        tx.execute("COMMIT")
    assert intervals(kind) == [(3, 5), (9, 9)]
    assert not handle(kind, sink, 5, epoch=8)


def test_sqlite_a_cursor_that_a_program_keeps_blocks_no_other_thread(tmp_path: Path) -> None:
    """Its end waited for the thread that had its connection then, and that one for the program's next transaction."""
    with SqliteSink(tmp_path / "db", busy_timeout_s=10) as sink:
        kept: list[Any] = []
        opened = [sink._pool.take(sink) for _ in range(2)]  # the later one is taken first
        for connection in opened:
            sink._pool.give_back(sink, connection, well=True)
        with sink.transaction("group", [("flights", 0, 7, 1)]) as tx:
            kept.append(tx.execute("SELECT 1 UNION SELECT 2"))
            first = tx.connection
        with pytest.raises(sqlite3.ProgrammingError, match="closed cursor"):
            kept[0].fetchall()
        sink._pool._idle.sort(key=lambda each: each is not first)  # another one is taken first
        begins = threading.Event()
        first.set_trace_callback(lambda sql: begins.set() if sql.startswith("BEGIN") else None)

        def wait() -> None:
            with sink.transaction("group", [("flights", 1, 7, 1)]) as other:  # SinkError, had it to wait for long
                assert other.connection is first

        with sink.transaction("group", [("flights", 0, 7, 2)]) as tx:
            assert tx.connection is not first
            waiter = threading.Thread(target=wait)
            waiter.start()
            assert begins.wait(30)
            kept.clear()
        waiter.join()
    assert [each.last_offset for each in SqliteSink(tmp_path / "db").progress("group").values()] == [2, 1]
