"""Single records, done in any order: each one's rows once, with the newest epoch; the same for both databases."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import psycopg
import pytest

from kafka_marshal import Attempt, Message
from kafka_marshal.client.attempt import GroupKind, Handling, current
from kafka_marshal.engine.work.lanes import Order
from kafka_marshal.errors import SinkError, StaleEpochError
from kafka_marshal.sinks import FencedSink, PostgresSink, Written
from kafka_marshal.sinks.claims import interval_merged
from kafka_marshal.sinks.database import MERGE_EVERY, DoneRecords
from tests.broker.helpers import eventually
from tests.sinks.conftest import Kind, Postgres

T0 = ("flights", 0)


class Fetched:
    """A message, as far as sinks need it."""

    def __init__(self, offset: int, partition: int = 0, topic: str = "flights", key: bytes | None = None) -> None:
        self._at = topic, partition, offset
        self._key = key

    def topic(self) -> str:
        return self._at[0]

    def partition(self) -> int:
        return self._at[1]

    def offset(self) -> int:
        return self._at[2]

    def key(self) -> bytes | None:
        return self._key

    def value(self) -> None:
        return None


def message(offset: int, partition: int = 0, key: bytes | None = None) -> Message:
    made: Any = Fetched(offset, partition, key=key)
    return made  # type: ignore[no-any-return]


@contextmanager
def attempt(
    offset: int,
    epoch: int = 7,
    *,
    partition: int = 0,
    kind: GroupKind = "claimed",
    order: Order = "key",
    key: bytes | None = None,
) -> Iterator[Attempt]:
    """A handler of ``run`` with this message."""
    made = Attempt(Handling(5, "group", kind, order), message(offset, partition, key), 1, epoch)
    token = current.set(made)
    try:
        yield made
    finally:
        current.reset(token)


def handle(database: Kind, sink: FencedSink[Any], offset: int, epoch: int = 7, **more: Any) -> bool:
    """Handle a record; returns whether it was written."""
    with attempt(offset, epoch, **more), sink.record() as tx:
        if not tx.is_done:
            tx.execute(database.insert(), (offset, str(epoch)))
        return not tx.is_done


def offsets(kind: Kind) -> list[int]:
    return [offset for offset, _ in kind.rows()]


def intervals(kind: Kind) -> list[tuple[int, int]]:
    found = kind.ask("SELECT first_offset, last_offset FROM kafka_marshal_done ORDER BY 1")
    return [(first, end) for first, end in found]


# -- once -------------------------------------------------------------------------------------------------------------


def test_records_end_in_any_order_and_each_is_written_once(kind: Kind) -> None:
    sink = kind.sink()
    for offset in (5, 2, 0, 9, 1):
        assert handle(kind, sink, offset)
    assert sink.progress("group") == {T0: Written(2, 7, ranges=((5, 5), (9, 9)))}
    for offset in (9, 0, 1, 2, 5):
        assert not handle(kind, sink, offset)
    sink = kind.sink()
    for offset in (9, 0, 1, 2, 5):
        assert not handle(kind, sink, offset, epoch=8)
    assert handle(kind, sink, 3, epoch=8)
    assert offsets(kind) == [0, 1, 2, 3, 5, 9]
    assert kind.sink().progress("group") == {T0: Written(3, 8, ranges=((5, 5), (9, 9)))}


def test_what_a_block_writes_of_a_record_that_is_done_is_rolled_back(kind: Kind) -> None:
    """A handler that does not check is safe, too."""
    sink = kind.sink()
    for _ in range(3):
        with attempt(4), sink.record() as tx:
            tx.execute(kind.insert(), (4, "x"))
    assert offsets(kind) == [4]
    assert handle(kind, sink, 5), "nothing is held"


def test_an_error_of_the_database_that_the_block_keeps_to_itself(kind: Kind) -> None:
    """PostgreSQL has ended the transaction by then; SQLite has undone that statement only."""
    sink = kind.sink()

    def swallow(tx: Any) -> None:
        tx.execute(kind.insert(), (4, "x"))
        with suppress(kind.error):
            tx.execute("INSERT INTO nowhere VALUES (1)")

    if kind.name == "postgres":
        with pytest.raises(SinkError, match="has discarded the transaction"), attempt(4), sink.record() as tx:
            swallow(tx)
        with pytest.raises(SinkError, match="has discarded"), sink.transaction("group", [(*T0, 7, -1)]) as last:
            swallow(last)
        with attempt(4), sink.record() as tx:
            tx.execute(kind.insert(), (4, "x"))
            with suppress(kind.error), tx.connection.transaction():
                tx.execute("INSERT INTO nowhere VALUES (1)")
    else:
        with attempt(4), sink.record() as tx:
            swallow(tx)
    assert offsets(kind) == [4]
    assert not handle(kind, sink, 4)


def test_what_a_last_offset_says_is_done_is_done(kind: Kind) -> None:
    sink = kind.sink()
    with sink.transaction("group", [(*T0, 5, 10)]):
        pass
    assert not handle(kind, sink, 10)
    assert not handle(kind, sink, 0)
    assert handle(kind, sink, 12)
    assert handle(kind, sink, 11)
    assert sink.progress("group") == {T0: Written(12, 7)}


# -- by which epoch ---------------------------------------------------------------------------------------------------


def test_an_older_epoch_is_refused_even_where_all_that_is_newer_was_done_already(kind: Kind) -> None:
    old, new = kind.sink(), kind.sink()
    handle(kind, old, 4, epoch=7)
    assert not handle(kind, new, 4, epoch=9)
    with pytest.raises(StaleEpochError) as caught:
        handle(kind, old, 5, epoch=7)
    assert (caught.value.epoch, caught.value.stored_epoch, caught.value.retry) == (7, 9, False)
    with pytest.raises(StaleEpochError):
        handle(kind, new, 5, epoch=8)
    assert offsets(kind) == [4]


@pytest.mark.parametrize("offset", [5, 6])
def test_a_new_epochs_first_record_waits_for_the_old_ones(kind: Kind, offset: int) -> None:
    """Whichever record it is, so that no older row follows it; the same record is found."""
    old, new = kind.sink(), kind.sink()
    handle(kind, old, 0, epoch=7)
    with ThreadPoolExecutor(1) as pool:
        with attempt(5, 7), old.record() as tx:
            tx.execute(kind.insert(), (5, "7"))
            later = pool.submit(handle, kind, new, offset, 9)
            with pytest.raises(TimeoutError):
                later.result(0.5)
        assert later.result(30) is (offset == 6)
    with pytest.raises(StaleEpochError):
        handle(kind, old, 7, epoch=7)
    assert kind.rows()[:2] == [(0, "7"), (5, "7")]


def test_a_stream_of_old_records_does_not_keep_the_new_epoch_out(kind: Kind) -> None:
    """Shared row locks would: each is granted while another one is held."""
    sink, started, ended = kind.sink(), threading.Semaphore(0), []
    threads = 4 if kind.name == "sqlite" else 16  # its one lock is polled for: more of them starve each other
    pause = threading.Event()

    def stream(lane: int) -> None:
        for number in range(100_000):
            try:
                with attempt(number * 16 + lane, 7), sink.record() as tx:
                    tx.execute(kind.insert(), (number * 16 + lane, "7"))
                    pause.wait(0.005)
            except StaleEpochError:
                ended.append(lane)
                return
            started.release()

    with ThreadPoolExecutor(threads) as pool:
        lanes = [pool.submit(stream, lane) for lane in range(threads)]
        for _ in range(20):
            assert started.acquire(timeout=30)
        assert handle(kind, kind.sink(wait_s=20), 2_000_000, epoch=9)
        before = kind.ask("SELECT count(*) FROM results WHERE value = '7'")
        for each in lanes:
            each.result(30)
    assert len(ended) == threads
    assert kind.ask("SELECT count(*) FROM results WHERE value = '7'") == before


# -- at the same time -------------------------------------------------------------------------------------------------


def test_sixteen_threads_of_one_partition(kind: Kind) -> None:
    """Each record is delivered twice, in a random order."""
    sink = kind.sink()
    todo = [offset for offset in range(250) for _ in range(2)]
    random.Random(1).shuffle(todo)
    with ThreadPoolExecutor(16) as pool:
        wrote = sum(pool.map(lambda offset: handle(kind, sink, offset), todo, timeout=100))
    assert wrote == 250
    assert offsets(kind) == list(range(250))
    assert sink.progress("group") == {T0: Written(249, 7)}
    assert len(intervals(kind)) <= MERGE_EVERY + 16


def test_postgres_records_of_one_partition_are_written_side_by_side(database: str) -> None:
    """All are in their blocks at once."""
    kind = Kind("postgres", database)
    kind.setup()
    sink, barrier = kind.sink(), threading.Barrier(16)
    handle(kind, sink, 100)

    def together(offset: int) -> None:
        with attempt(offset), sink.record() as tx:
            tx.execute(kind.insert(), (offset, "x"))
            barrier.wait(30)

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(together, range(16)))
    assert offsets(kind) == [*range(16), 100]
    sink.close()


@pytest.mark.parametrize("fails", [False, True])
def test_a_second_writer_of_a_record_waits_for_the_first(kind: Kind, fails: bool) -> None:
    sink = kind.sink()
    handle(kind, sink, 0)
    with ThreadPoolExecutor(1) as pool:
        try:
            with attempt(5), sink.record() as tx:
                tx.execute(kind.insert(), (5, "first"))
                second = pool.submit(handle, kind, sink, 5)
                assert not second.done()
                if fails:
                    raise KeyError
        except KeyError:
            pass
        assert second.result(30) is fails
    assert offsets(kind) == [0, 5]


def waits(postgres: Postgres) -> None:
    locks = "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
    eventually(lambda: postgres.ask(locks), what="a statement waits")


def test_postgres_a_record_whose_row_is_merged_away_meanwhile_is_done(postgres: Postgres, database: str) -> None:
    kind = Kind("postgres", database)
    kind.setup()
    sink = kind.sink()
    for offset in (3, 4, 5):
        handle(kind, sink, offset)
    with ThreadPoolExecutor(1) as pool:
        with sink._work() as work:
            assert sink._row(work.connection, "group", T0, "merging") is not None
            sink._done(work.connection, "group", T0).merge(-1)
            second = pool.submit(handle, kind, sink, 4)
            waits(postgres)
        assert second.result(30) is False
    assert offsets(kind) == [3, 4, 5]
    assert intervals(kind) == [(3, 5)]
    sink.close()


def test_postgres_merging_waits_for_no_transaction(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a running handler's nor another merge's."""
    monkeypatch.setattr("kafka_marshal.sinks.base.MERGE_EVERY", 2)
    kind = Kind("postgres", database)
    kind.setup()
    sink = kind.sink(wait_s=1.0)
    with ThreadPoolExecutor(1) as pool, attempt(50), sink.record() as tx:
        for offset in range(1, 10):
            assert pool.submit(handle, kind, sink, offset).result(30)
        tx.execute(kind.insert(), (50, "x"))
        assert len(intervals(kind)) <= 3
        with kind.sink()._work() as work:
            kind.opened[-1]._row(work.connection, "group", T0, "merging")
            for offset in range(11, 20):
                assert pool.submit(handle, kind, sink, offset).result(30)
    assert offsets(kind) == [*range(1, 10), *range(11, 20), 50]
    for each in kind.opened:
        each.close()


def test_postgres_a_writer_that_waits_too_long_gets_an_error(database: str) -> None:
    kind = Kind("postgres", database)
    kind.setup()
    slow, impatient = kind.sink(), kind.sink(wait_s=0.1)
    handle(kind, impatient, 0, epoch=6)
    with attempt(5, 6), slow.record():
        with pytest.raises(SinkError, match="for too long") as caught:
            handle(kind, impatient, 5, epoch=6)
        assert caught.value.retry
        with pytest.raises(SinkError, match="for too long"):
            handle(kind, impatient, 6, epoch=9)
    assert handle(kind, impatient, 6, epoch=9)
    for each in kind.opened:
        each.close()


# -- merging ----------------------------------------------------------------------------------------------------------


def test_intervals_are_merged_as_a_set_would_be() -> None:
    draw = random.Random(5)
    for _ in range(300):
        last, singles = draw.randint(-1, 10), sorted(draw.sample(range(30), draw.randint(0, 20)))
        moved, kept = interval_merged(last, [(each, each) for each in singles])
        done = {*range(last + 1), *singles}
        assert {*range(moved + 1), *(x for first, end in kept for x in range(first, end + 1))} == done
        assert moved + 1 not in done
        assert all(left[1] + 1 < right[0] for left, right in zip([(0, moved), *kept], kept, strict=False))


def test_merging_keeps_the_table_small_below_a_record_that_is_stuck(kind: Kind) -> None:
    sink = kind.sink()
    for offset in range(1, 3 * MERGE_EVERY):
        handle(kind, sink, offset)
        assert len(intervals(kind)) <= MERGE_EVERY + 1
    assert sink.progress("group") == {T0: Written(-1, 7, ranges=((1, 3 * MERGE_EVERY - 1),))}
    assert not handle(kind, kind.sink(), 150)
    handle(kind, sink, 0)
    assert sink.progress("group") == {T0: Written(3 * MERGE_EVERY - 1, 7)}
    handle(kind, kind.sink(), 1000, epoch=8)
    assert intervals(kind) == [(1000, 1000)], "a new epoch merges all of it"


@pytest.mark.parametrize("seed", range(3))
def test_whatever_is_merged_no_record_is_forgotten(kind: Kind, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    monkeypatch.setattr("kafka_marshal.sinks.base.MERGE_EVERY", 3)
    draw, sink, wrote, epoch = random.Random(seed), kind.sink(), set(), 1
    for _ in range(200):
        offset = draw.randrange(60)
        epoch += draw.random() < 0.05
        assert handle(kind, sink, offset, epoch) == (offset not in wrote)
        wrote.add(offset)
        if draw.random() < 0.05:
            sink = kind.sink()
    assert offsets(kind) == sorted(wrote)


def test_offsets_that_never_come_are_left_behind_by_what_is_stable(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    """For example, every other offset is a marker."""
    monkeypatch.setattr("kafka_marshal.sinks.base.MERGE_EVERY", 10)
    sink = kind.sink()
    for offset in range(1, 100, 2):
        handle(kind, sink, offset)
    assert len(intervals(kind)) == 50
    for offset in range(101, 201, 2):
        with attempt(offset), sink.record(stable=offset - 20):
            pass
    assert len(intervals(kind)) <= 25
    at = sink.progress("group")[T0]
    assert 150 < at.last_offset < 199
    with attempt(at.last_offset - 1), sink.record() as tx:
        assert tx.is_done


def test_what_another_writer_has_stored_is_found_by_one_that_found_all_new_before(kind: Kind) -> None:
    ours, theirs = kind.sink(), kind.sink()
    for offset in (1, 2):
        assert handle(kind, ours, offset)
    for offset in (4, 6, 7):
        assert handle(kind, theirs, offset)
    with ours.records([message(x) for x in range(4, 9)], group_id="group", epoch=7, kind="claimed") as tx:
        assert [each.offset() for each in tx.new] == [5, 8]
    assert not handle(kind, ours, 6)
    assert handle(kind, ours, 9)
    assert not handle(kind, theirs, 8)
    assert ours.progress("group")[T0].ranges == ((1, 2), (4, 9))


def test_a_merge_is_a_few_statements_whatever_there_is_to_merge(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    """Members that share a partition by key leave intervals of one or two offsets."""
    sink, statements = kind.sink(), list[str]()
    with sink.records(
        [message(offset) for offset in range(300) if offset % 3], group_id="group", epoch=7, kind="claimed"
    ) as tx:
        assert len(tx.new) == 200
    run = sink._run

    def counted(connection: Any, sql: str, parameters: Any = ()) -> Any:
        statements.append(sql)
        return run(connection, sql, parameters)

    monkeypatch.setattr(sink, "_run", counted)
    handle(kind, sink, 1_000, epoch=8)
    assert intervals(kind) == [*((at, at + 1) for at in range(1, 300, 3)), (1_000, 1_000)]
    assert len(statements) < 16


def test_an_interval_around_what_is_stable_is_kept(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    """Merging reads no lower than necessary, so it may not see it."""
    monkeypatch.setattr("kafka_marshal.sinks.base.MERGE_EVERY", 3)
    sink = kind.sink()
    for offset in (10, 11, 12, 13, 20, 22, 24):
        handle(kind, sink, offset)
    with attempt(30), sink.record(stable=11):
        pass
    for offset in (32, 34):
        handle(kind, sink, offset)
    assert sink.progress("group")[T0].last_offset == 13
    assert intervals(kind)[0] == (10, 13)
    for offset in (12, 13):
        assert not handle(kind, sink, offset)
    assert handle(kind, sink, 14)


def test_what_was_stable_does_not_outlive_a_reposition(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reposition ends leases, so a new epoch follows it."""
    monkeypatch.setattr("kafka_marshal.sinks.base.MERGE_EVERY", 2)
    sink = kind.sink()
    with attempt(50), sink.record(stable=40):
        pass
    sink.rewind("group", {T0: 9})
    for offset in (13, 12, 11, 15, 30):
        assert handle(kind, sink, offset, epoch=8)
    assert sink.progress("group")[T0].last_offset == 9


# -- other tests ------------------------------------------------------------------------------------------------------


def test_rewind_forgets_single_records_above(kind: Kind) -> None:
    sink = kind.sink()
    for offset in (0, 1, 3, 5):
        handle(kind, sink, offset)
    sink.rewind("group", {T0: 0})
    assert sink.progress("group") == {T0: Written(0, 7)}
    assert not handle(kind, sink, 0)
    assert handle(kind, sink, 5)
    sink.rewind("group", {T0: 4, ("flights", 9): 1})
    assert sink.progress("group") == {T0: Written(4, 7)}
    assert not handle(kind, sink, 3)


def test_forget_drops_single_records(kind: Kind) -> None:
    sink = kind.sink()
    handle(kind, sink, 3)
    sink.forget("group")
    assert sink.progress("group") == {}
    assert intervals(kind) == []
    assert handle(kind, sink, 3), "it enters again"


def test_an_older_database_gets_the_second_table(kind: Kind) -> None:
    kind.ask(
        "CREATE TABLE kafka_marshal_progress (group_id text NOT NULL, topic text NOT NULL, partition integer NOT NULL, "
        "last_offset bigint NOT NULL, epoch bigint NOT NULL, PRIMARY KEY (group_id, topic, partition))"
    )
    kind.ask("INSERT INTO kafka_marshal_progress VALUES ('group', 'flights', 0, 4, 6)")
    sink = kind.sink()
    assert not handle(kind, sink, 4)
    assert handle(kind, sink, 6)
    assert sink.progress("group") == {T0: Written(4, 7, ranges=((6, 6),))}


def test_a_second_table_of_another_shape_is_named(kind: Kind) -> None:
    kind.ask("CREATE TABLE kafka_marshal_done (x integer PRIMARY KEY)")
    with pytest.raises(SinkError, match="table kafka_marshal_done of another shape here: x;"):
        kind.sink().progress("group")


def test_postgres_an_older_database_and_no_right_to_make_tables(postgres: Postgres, database: str) -> None:
    """The last-offset form works; single records name the missing table until an operator creates it."""
    kind = Kind("postgres", database)
    kind.setup()
    kind.sink().progress("group")
    kind.ask("DROP TABLE kafka_marshal_done")
    name = f"u{database[-8:]}"
    kind.ask(f"CREATE USER {name}")
    kind.ask("REVOKE CREATE ON SCHEMA public FROM PUBLIC")
    kind.ask(f"GRANT SELECT, INSERT, UPDATE, DELETE ON kafka_marshal_progress, results TO {name}")
    with PostgresSink(f"{database} user={name}") as sink:
        with sink.transaction("group", [(*T0, 5, 3)]):
            pass
        assert sink.progress("group") == {T0: Written(3, 5)}
        sink.rewind("group", {T0: 2})
        sink.convert("group", "claimed")
        with pytest.raises(SinkError, match=r"no table kafka_marshal_done.*CREATE TABLE"):
            handle(kind, sink, 5)
        sink.forget("group")
        kind.sink().progress("group")
        kind.ask(f"GRANT SELECT, INSERT, UPDATE, DELETE ON kafka_marshal_done TO {name}")
        with pytest.raises(SinkError, match="forget"), sink.transaction("group", [(*T0, 5, 3)]):
            pass
        assert handle(kind, sink, 5)
    for each in kind.opened:
        each.close()


def test_a_coroutine_writes_in_a_thread_of_asyncio(kind: Kind) -> None:
    sink = kind.sink()

    def write() -> None:
        with sink.record() as tx:
            tx.execute(kind.insert(), (5, str(tx.is_done)))

    async def handler(offset: int) -> None:
        with attempt(offset):
            await asyncio.to_thread(write)

    async def run() -> None:
        await asyncio.gather(*(handler(offset) for offset in range(6)))

    asyncio.run(run())
    assert sink.progress("group") == {T0: Written(5, 7)}


def test_one_row_is_read_to_find_the_one_before_an_offset(database: str) -> None:
    """Also in a table that PostgreSQL has no statistics of: with max() it read all earlier rows, for each batch."""
    with PostgresSink(database) as sink:
        sink.progress("g")  # makes the tables
    run = DoneRecords(run=lambda sql, given: None, run_all=list, lists=PostgresSink._lists, group_id="g", key=("t", 0))
    sql = "EXPLAIN (ANALYZE, FORMAT JSON) " + run._sql("BEFORE").replace("?", "%s")
    with psycopg.connect(database) as connection:
        rows = "SELECT 'g', 't', 0, 2 * number, 2 * number FROM generate_series(1, 5000) AS number"
        connection.execute(f"INSERT INTO kafka_marshal_done {rows}")
        found = psycopg.ClientCursor(connection).execute(sql, ("g", "t", 0, 9_000)).fetchall()
    ((plan,),) = found
    assert plan[0]["Plan"]["Plans"][0]["Actual Rows"] == 1, plan


def test_a_transaction_that_a_thread_still_refers_to_disturbs_no_later_one(kind: Kind) -> None:
    """They have one connection after the other, and the same statement."""
    sink = kind.sink()
    values = {"sqlite": "json_each({})", "postgres": "json_array_elements_text({}::json)"}[kind.name].format(kind.mark)
    sql = f"INSERT INTO results SELECT CAST(value AS bigint), 'x' FROM {values} RETURNING offset_"
    with sink.record(message(0), group_id="group", epoch=7, kind="claimed") as before:
        before.executemany(sql, [("[]",)])
    with sink.record(message(1), group_id="group", epoch=7, kind="claimed") as tx:
        cursor = tx.execute(sql, ("[1, 2, 3]",))
        found = [cursor.fetchone()]
        del before
        found += cursor.fetchall()
    assert found == [(1,), (2,), (3,)]
    assert kind.rows() == [(1, "x"), (2, "x"), (3, "x")]
