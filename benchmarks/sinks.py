"""Rows a second through a fenced sink, divided by plain inserts of the same rows; on PostgreSQL and SQLite.

    python -m benchmarks.sinks [--records N] [--rounds N] [--only fence|sinks] [--json FILE]

Rows of 100-byte values of one partition, in batches of 500 whose messages belong to two shares of its keys, one writer
each, and one by one; and of a whole partition in order (``transaction``), one writer. Plain: the same rows by as many
writers, in transactions of the same size, with executemany or COPY. A separate PostgreSQL, as it is by default (it
waits for the disk), and without waiting; interleaved, medians. And ``fence`` in a program's own transaction, divided by
the same transaction without it, by one writer of a whole partition.
"""

from __future__ import annotations

import argparse
import sqlite3
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from threading import Barrier
from time import perf_counter
from typing import Any

import psycopg

from benchmarks.common import Row, in_turns, report
from kafka_marshal.sinks import FencedSink, PostgresSink, SqliteSink, fence, fence_tables
from kafka_marshal.types import SharedEpoch
from rationalizer import key_hash
from rationalizer.routing import key_range
from tests.sinks.conftest import MariaDb, mariadb_programs, running_postgres

BATCH = 500
SHARES = 2
#: One by one: this much fewer.
SINGLE_SHARE = 20
VALUE = b"x" * 100
#: executemany, COPY, one by one.
TARGETS = (0.8, 0.6, 0.5)
TARGET_SQLITE = 0.5
IN_ORDER = f"in order, batches of {BATCH}"

TABLE = "CREATE TABLE IF NOT EXISTS results (part integer, off bigint, value {blob})"
COPY = "COPY results (part, off, value) FROM STDIN"


class Sent:
    """A message, as far as sinks need it."""

    def __init__(self, offset: int) -> None:
        self._offset = offset
        self._key = b"key %d" % (offset % 1000)

    def topic(self) -> str:
        return "bench"

    def partition(self) -> int:
        return 0

    def offset(self) -> int:
        return self._offset

    def key(self) -> bytes:
        return self._key

    def value(self) -> bytes:
        return VALUE


Messages = Sequence[Any]
Batches = Sequence[Messages]
Write = Callable[[Any, Messages], None]


def shared(records: int, size: int, shares: int = SHARES) -> list[tuple[SharedEpoch, Batches]]:
    """The batches of each share of the keys, with its token."""
    found: list[tuple[SharedEpoch, Batches]] = []
    for number in range(shares):
        lo, hi = key_range(number, shares)
        of_it = [each for each in map(Sent, range(records)) if lo <= key_hash(each.key(), each.offset()) <= hi]
        batches = [of_it[at : at + size] for at in range(0, len(of_it), size)]
        found.append((SharedEpoch(7, lo, hi), batches))
    return found


def rows(messages: Messages) -> list[tuple[int, int, bytes]]:
    return [(each.partition(), each.offset(), each.value()) for each in messages]


def many(insert: str) -> Write:
    return lambda tx, messages: tx.executemany(insert, rows(messages))


def copied(tx: Any, messages: Messages) -> None:
    with tx.connection.cursor().copy(COPY) as copy:
        for row in rows(messages):
            copy.write_row(row)


class Plain:
    """What a user writes without a sink: a connection for each writer, a transaction for each batch."""

    def __init__(self, connection: Any) -> None:
        self.connection = connection
        self.executemany = connection.cursor().executemany


@contextmanager
def plain_postgres(dsn: str) -> Iterator[Callable[[Messages, Write], None]]:
    with psycopg.connect(dsn, autocommit=True) as connection:
        tx = Plain(connection)

        def write(messages: Messages, how: Write) -> None:
            with connection.transaction():
                how(tx, messages)

        yield write


@contextmanager
def plain_sqlite(path: str) -> Iterator[Callable[[Messages, Write], None]]:
    with closing(sqlite3.connect(path, isolation_level=None, timeout=60.0)) as connection:
        connection.execute("PRAGMA synchronous = FULL")
        tx = Plain(connection)

        def write(messages: Messages, how: Write) -> None:
            connection.execute("BEGIN IMMEDIATE")
            how(tx, messages)
            connection.execute("COMMIT")

        yield write


def together(writers: Sequence[Callable[[], None]]) -> float:
    """Seconds until all writers have ended, each in a thread."""
    start = Barrier(len(writers) + 1)

    def begin(writer: Callable[[], None]) -> None:
        start.wait()
        writer()

    with ThreadPoolExecutor(len(writers)) as pool:
        running = [pool.submit(begin, writer) for writer in writers]
        start.wait()
        began = perf_counter()
        for each in running:
            each.result()
        return perf_counter() - began


def fenced(make: Callable[[], FencedSink[Any]], records: int, size: int, how: Write) -> float:
    """Through records(), or record() one by one; a new group, so that nothing is stored yet."""
    with make() as sink:
        group = f"g{perf_counter()}"

        def writer(epoch: SharedEpoch, batches: Batches) -> None:
            about: dict[str, Any] = {"group_id": group, "epoch": epoch, "kind": "coordinated"}
            for batch in batches:
                if size == 1:
                    with sink.record(batch[0], **about) as single:
                        if not single.is_done:
                            how(single, batch)
                else:
                    with sink.records(batch, **about) as several:
                        how(several, several.new)

        return together([partial(writer, *share) for share in shared(records, size)])


def in_order(make: Callable[[], FencedSink[Any]], records: int, size: int, how: Write) -> float:
    """Through transaction(), by one writer."""
    with make() as sink:
        group = f"g{perf_counter()}"

        def writer(batches: Batches) -> None:
            for batch in batches:
                with sink.transaction(group, [("bench", 0, 7, batch[-1].offset())]) as tx:
                    last = tx.last_offset("bench", 0)
                    how(tx, [each for each in batch if each.offset() > last])

        return together([partial(writer, shared(records, size, 1)[0][1])])


def plain(make: Callable[[], Any], records: int, size: int, how: Write, shares: int = SHARES) -> float:
    def writer(batches: Batches) -> None:
        with make() as write:
            for batch in batches:
                write(batch, how)

    return together([partial(writer, batches) for _, batches in shared(records, size, shares)])


def own(connect: Callable[[], Any], insert: str, records: int, size: int, is_fenced: bool) -> float:
    """In the program's own transactions, one for each batch, on one connection."""
    batches = shared(records, size, 1)[0][1]
    about: dict[str, Any] = {"group_id": f"g{perf_counter()}", "epoch": 7, "kind": "claimed"}
    with closing(connect()) as connection, closing(connection.cursor()) as cursor:
        connection.commit()
        began = perf_counter()
        for batch in batches:
            if is_fenced:
                with fence(connection, batch, **about) as tx:
                    cursor.executemany(insert, rows(tx.new))
            else:
                cursor.executemany(insert, rows(batch))
            connection.commit()
        return perf_counter() - began


@contextmanager
def databases(folder: Path) -> Iterator[list[tuple[str, Callable[[], Any], str]]]:
    """Name, what connects, and the statement, each with its tables; MariaDB only if it is installed."""
    found: list[tuple[str, Callable[[], Any], str]] = []
    marks = "INSERT INTO results VALUES (%s, %s, %s)"
    with running_postgres("fsync=on") as postgres, ExitStack() as stack:
        name = postgres.new_database()
        for sql in [*fence_tables("postgresql"), TABLE.format(blob="bytea")]:
            postgres.ask(sql, name)
        found.append(("psycopg, PostgreSQL", partial(psycopg.connect, postgres.dsn(name)), marks))
        path = str(folder / "own.db")
        with closing(sqlite3.connect(path)) as connection:
            for sql in ["PRAGMA journal_mode = WAL", *fence_tables("sqlite"), TABLE.format(blob="blob")]:
                connection.execute(sql)
        found.append(("sqlite3", partial(sqlite3.connect, path), "INSERT INTO results VALUES (?, ?, ?)"))
        if (programs := mariadb_programs()) is not None:
            import pymysql

            maria = MariaDb(Path(tempfile.mkdtemp(prefix="kafka-marshal-mariadb-")), *programs)
            stack.callback(maria.processes.end)
            at = maria.new_database()
            maria.ask("SET GLOBAL innodb_flush_log_at_trx_commit = 1")
            for sql in [*fence_tables("mysql"), TABLE.format(blob="blob")]:
                maria.ask(sql, at)
            there: dict[str, Any] = {"unix_socket": str(maria.socket), "user": "root", "database": at}
            found.append(("PyMySQL, MariaDB", partial(pymysql.connect, **there, ssl_disabled=True), marks))
        yield found


def measure_fence(args: argparse.Namespace, folder: Path) -> list[Row]:
    """fence(…) beside the same transactions without it."""
    found = []
    with databases(folder) as all_of_them:
        for name, connect, insert in all_of_them:
            for size, records in ((BATCH, args.records), (1, args.records // SINGLE_SHARE)):
                runs = [partial(own, connect, insert, records, size, is_fenced) for is_fenced in (True, False)]
                times = in_turns(args.rounds, *runs)
                ratios = [y / x for x, y in times]
                with_it, without = (records / median(column) for column in zip(*times, strict=True))
                what = f"fence, {name}: {f'batches of {size}' if size > 1 else 'one by one'}"
                spread = min(ratios), max(ratios)
                found.append(Row(what, with_it, without, median(ratios), None, "rows/s", spread=spread))
    return found


def measure(args: argparse.Namespace, folder: Path) -> list[Row]:
    """All rows of the table."""
    path, sqlite_insert = str(folder / "bench.db"), "INSERT INTO results VALUES (?, ?, ?)"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute(TABLE.format(blob="blob"))
    insert = many("INSERT INTO results VALUES (%s, %s, %s)")
    found = []
    with running_postgres("fsync=on") as postgres:
        name = postgres.new_database()
        dsn, free = postgres.dsn(name), f"{postgres.dsn(name)} options='-c synchronous_commit=off'"
        postgres.ask(TABLE.format(blob="bytea"), name)
        cases: list[tuple[str, Any, Any, int, Write, float | None]] = []
        for what, where in (("PostgreSQL", dsn), ("PostgreSQL, no wait for the disk", free)):
            ours, theirs = partial(PostgresSink, where), partial(plain_postgres, where)
            targets = TARGETS if where == dsn else (None, None, None)
            cases += [
                (f"{what}: batches of {BATCH}, executemany", ours, theirs, BATCH, insert, targets[0]),
                (f"{what}: batches of {BATCH}, COPY", ours, theirs, BATCH, copied, targets[1]),
                (f"{what}: one by one", ours, theirs, 1, insert, targets[2]),
                (f"{what}: {IN_ORDER}, executemany", ours, theirs, BATCH, insert, None),
                (f"{what}: {IN_ORDER}, COPY", ours, theirs, BATCH, copied, None),
            ]
        on_file = partial(SqliteSink, path), partial(plain_sqlite, path)
        cases += [
            (f"SQLite: batches of {BATCH}, executemany", *on_file, BATCH, many(sqlite_insert), TARGET_SQLITE),
            (f"SQLite: {IN_ORDER}, executemany", *on_file, BATCH, many(sqlite_insert), None),
            ("SQLite: one by one", *on_file, 1, many(sqlite_insert), None),
        ]
        for name, ours, theirs, size, how, target in cases:
            records = args.records if size > 1 else args.records // SINGLE_SHARE
            with_sink, shares = (in_order, 1) if IN_ORDER in name else (fenced, SHARES)
            runs = partial(with_sink, ours, records, size, how), partial(plain, theirs, records, size, how, shares)
            times = in_turns(args.rounds, *runs)
            ratios = [y / x for x, y in times]
            with_it, without = (records / median(column) for column in zip(*times, strict=True))
            spread = min(ratios), max(ratios)
            found.append(Row(name, with_it, without, median(ratios), target, "rows/s", spread=spread))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--records", type=int, default=40_000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", choices=["sinks", "fence"])
    parser.add_argument("--json")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = [] if args.only == "fence" else measure(args, Path(folder))
        found += [] if args.only == "sinks" else measure_fence(args, Path(folder))
    report("sinks", found, args.json, records=args.records, rounds=args.rounds, writers=SHARES)


if __name__ == "__main__":
    main()
