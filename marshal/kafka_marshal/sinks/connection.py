"""The fenced sink on a connection of the program's own, within the transaction that the program begins and commits."""

from __future__ import annotations

import random
import re
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    asynccontextmanager,
    contextmanager,
    suppress,
)
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, NamedTuple, NoReturn, cast

from kafka_marshal import arguments
from kafka_marshal.adapters.message import Message
from kafka_marshal.client.attempt import GroupKind
from kafka_marshal.client.batch import Batch
from kafka_marshal.errors import ConfigurationError, SinkError
from kafka_marshal.sinks import postgres, sqlite
from kafka_marshal.sinks.base import FencedMessages, FencedSink, Written, merged_in
from kafka_marshal.sinks.claims import Records, entered, the_record, the_records, whole_blocks
from kafka_marshal.sinks.database import (
    BATCHES,
    DONE,
    FENCES,
    MERGE_EVERY,
    PATIENCE,
    PROGRESS,
    ROW,
    TABLES,
    DoneRecords,
    Lists,
    Lock,
    RollBackError,
    SerialDoneRecords,
    SinkWork,
    Stage,
)
from kafka_marshal.sinks.links import AsyncLink, Link, Rows, Vendor, code_of, is_operational, link_of
from kafka_marshal.types import Key

_UNDONE: Final = (
    "None of these messages is done. Roll the transaction back (let the error leave its block), and leave the messages "
    "undone: they come again"
)

_RUN_AGAIN: Final = "Run the whole transaction again"

#: As in `_WHY` of the sinks that own their connection.
_WHY_MYSQL: Final[dict[object, tuple[str, str, bool]]] = {
    1020: ("the transaction read before it waited, and what it read has changed", _RUN_AGAIN, True),
    1205: ("another writer keeps rows for too long", f"{_RUN_AGAIN}; see who keeps a transaction open", True),
    1213: ("the transaction got in the way of another", f"{_RUN_AGAIN}; READ COMMITTED has fewer of these", True),
    2006: ("the connection was lost", f"{_RUN_AGAIN} on another", True),
    2013: ("the connection was lost", f"{_RUN_AGAIN} on another", True),
}
_NO_TABLE: Final = ("42P01", 1146)


@dataclass(frozen=True, slots=True)
class _Database:
    """What differs: how it is called, and how it takes lists and stores offsets."""

    name: str
    lists: Lists
    records: type[DoneRecords]


_DATABASES: Final[dict[Vendor, _Database]] = {
    "postgresql": _Database("PostgreSQL", postgres.PostgresSink._lists, DoneRecords),
    "sqlite": _Database("SQLite", sqlite.SqliteSink._lists, SerialDoneRecords),
    "mysql": _Database(
        "MySQL",
        Lists(
            "JSON_TABLE(?, '$[*]' COLUMNS (value bigint PATH '$')) AS one",
            "JSON_TABLE(?, '$[*]' COLUMNS (value bigint PATH '$[0]', last bigint PATH '$[1]')) AS one",
        ),
        SerialDoneRecords,
    ),
}

#: Of MySQL: compared byte by byte, and short enough for a key.
_TEXTS: Final = {"group_id": 400, "topic": 249}


def fence_tables(database: Vendor) -> list[str]:
    """The statements that make the three tables of :func:`fence`: run them once, as a migration.

    database: "postgresql", "sqlite" or "mysql" (MariaDB, too).
    """
    arguments.one_of("database", database, tuple(_DATABASES))
    made = [table.made_by for table in TABLES]
    if database != "mysql":
        return made
    for name, length in _TEXTS.items():
        wide = f"{name} varchar({length}) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin"
        made = [each.replace(f"({name} text", f"({wide}").replace(f" {name} text", f" {wide}") for each in made]
    return [f"{_in_mysql(each)} ENGINE=InnoDB" for each in made]


def _in_mysql(sql: str, *, locks: bool = False) -> str:
    sql = re.sub(r"\bpartition\b", "`partition`", sql)
    sql = sql.replace("ON CONFLICT DO NOTHING", "ON DUPLICATE KEY UPDATE epoch = epoch")
    # A snapshot may be older than the lock of the partition's row; what is locked is read as it is now.
    return sql.replace("LIMIT 1)", "LIMIT 1 FOR UPDATE)") + " FOR UPDATE" if locks else sql


class _Found(Rows):
    def fetchall(self) -> Rows:
        """As a cursor."""
        return self


class _Admitted(NamedTuple):
    """The offsets that were not done, and now are; and those of them that are written again (F10)."""

    new: set[int]
    redone: set[int]


class ConnectionSink(FencedSink[Any]):
    """A fenced sink on a connection of the program's own: all it does is part of the transaction that runs there.

    For what is not :func:`fence`: ``progress``, ``rewind``, ``convert``, ``forget``, each with the program's BEGIN and
    COMMIT around it. The tables are those of the other SQL sinks, made by :func:`fence_tables`.
    """

    def __init__(self, connection: Any, *, name: str | None = None) -> None:
        """name: as of the other sinks.

        Raises ConfigurationError if the connection is of no library that is known.
        """
        super().__init__(name)
        self._link = link_of(connection)
        self._database = _DATABASES[self._link.vendor]
        self._records, self._lists = self._database.records, self._database.lists
        self._pool._missing = frozenset()
        self._locks = self._link.vendor == "mysql"

    def transaction(self, *_: object, **__: object) -> NoReturn:
        """Refused: a last offset would hide what comes again in another order. Use :func:`fence`."""
        raise ConfigurationError(
            "a sink on the program's own connection has no transaction(…): the transaction is the program's. Nothing "
            "was written. Use fence(connection, batch) within it, which stores each message by itself"
        )

    def restore(self, *_: object, **__: object) -> NoReturn:
        """Refused: it takes a transaction for each piece. Use a PostgresSink or SqliteSink, which has the same rows."""
        raise ConfigurationError(
            "a sink on the program's own connection has no restore(…), which takes a transaction for each piece. "
            "Nothing was changed. Use PostgresSink(…).restore or SqliteSink(…).restore on the same database"
        )

    def progress(self, group_id: str) -> dict[Key, Written]:
        """As of the other sinks; takes no locks."""
        locks, self._locks = self._locks, False
        try:
            return super().progress(group_id)
        finally:
            self._locks = locks

    # Steps of a fence, each a function of what the database answers (AsyncLink).

    def _begin(self, link: Link, of: Records, waits: bool) -> None:
        """Before the block, and not undone with it: takes the partition, and enters our epochs if need be.

        waits: for all writers of the partition, so that it can be merged.

        Raises ConfigurationError if there is no transaction.
        """
        try:
            is_off = link.is_off
        except Exception as error:
            raise self._explain(error, "begin") from error
        if is_off:
            raise _no_transaction()
        rows, key = self._rows_of(of.group_id), of.key
        if link.vendor == "postgresql":
            found = self._run(link, ROW, (rows, *key)).fetchall()
            is_entered = bool(found) and of.may_write(self._fences(link, rows, key, found[0][1]))
            if is_entered and not waits:
                self._take_gate(link, rows, key, "shared")
                return
        # It begins with a statement that writes: before these sqlite3 begins a transaction by itself.
        stored = self._lock_rows(link, rows, [key])[key]
        before = self._fences(link, rows, key, stored.epoch)
        if not of.may_write(before):
            of.refuse_kind(before)
            self._set_fences(link, rows, key, stored.epoch, entered(before, of.tokens))

    def _admit(self, link: Link, of: Records) -> tuple[FencedMessages, _Admitted]:
        """The begin of the block: what is new is stored as done."""
        rows, key = self._rows_of(of.group_id), of.key
        new, stored, redone = self._done(link, rows, key).add(of.offsets)
        if stored is None or not of.may_write(self._fences(link, rows, key, stored.epoch)):
            raise SinkError(
                f"{self._name()}: another program changed what is stored of {key[0]} [{key[1]}] (forget()? "
                f"convert()?) at this moment. {_UNDONE}. {_RUN_AGAIN}.",
                retry=True,
            )
        return FencedMessages([message for message, _ in of.messages], of.first_of_each(new)), _Admitted(new, redone)

    def _settle(
        self, link: Link, of: Records, admitted: _Admitted, aside: set[int], besides: Sequence[tuple[int, int]] | None
    ) -> None:
        """The end of the block. besides: what is done without the sink, to merge; None: not now."""
        done = self._done(link, self._rows_of(of.group_id), of.key)
        if aside := admitted.new & aside:
            done.take_out(aside, admitted.new)
        done.strike_out(admitted.redone - aside)
        if besides is not None:
            merged_in(self, link, of, besides, -1, "free")
        of.require_held()

    # What the database is asked.

    def _run(self, connection: Any, sql: str, parameters: Sequence[Any] = ()) -> Any:
        if self._link.vendor == "mysql":
            sql = _in_mysql(sql, locks=self._locks and sql.startswith("SELECT"))
        try:
            return _Found(connection.run(sql, parameters))
        except ConfigurationError:
            raise
        except Exception as error:
            raise self._explain(error, "write") from error

    def _take_gate(self, link: Link, group_id: str, key: Key, lock: Lock) -> bool:
        """Of PostgreSQL: whether we have it."""
        gate, _ = postgres._LOCKS[lock]
        if self._link.vendor != "postgresql" or not gate:
            return True
        gate = f"{gate.replace('%s', '?')}, current_setting('transaction_isolation')"
        [[taken, isolation]] = self._run(link, gate, (postgres._gate(group_id, key),)).fetchall()
        if isolation not in ("read committed", "read uncommitted"):
            raise ConfigurationError(
                f"fence(…): this transaction is {isolation.upper()}. There PostgreSQL reads what was there when the "
                "transaction began, so a writer whose lease went to another would not be refused, and messages that "
                f"are done would be new. {_UNDONE}. Begin it with ISOLATION LEVEL READ COMMITTED"
            )
        return taken is not False

    def _lock_rows(self, connection: Any, group_id: str, keys: Sequence[Key]) -> dict[Key, Written]:
        locked = {}
        lock = "" if self._link.vendor != "postgresql" else " FOR UPDATE"
        for key in sorted(keys):
            self._take_gate(connection, group_id, key, "exclusive")
            self._add_rows(connection, group_id, [key])
            [row] = self._run(connection, ROW + lock, (group_id, *key)).fetchall()
            locked[key] = Written(*row)
        return locked

    def _row(self, connection: Any, group_id: str, key: Key, lock: Lock) -> Written | None:
        if not self._take_gate(connection, group_id, key, lock):
            return None
        clause = postgres._LOCKS[lock][1] if self._link.vendor == "postgresql" else ""
        found = self._run(connection, ROW + clause, (group_id, *key)).fetchall()
        return Written(*found[0]) if found else None

    @contextmanager
    def _work(self, group_id: str = "", rows: Sequence[Key] = (), *, begins: bool = True) -> Iterator[SinkWork[Any]]:
        if not self._link.is_async and self._link.is_off:
            raise _no_transaction()
        yield SinkWork(self._link)

    def _recorded(self, of: Records) -> Any:
        return FenceBlock(self, of)

    def _connect(self) -> Any:
        return self._link

    def _disconnect(self, connection: Any) -> None:
        """It is the program's."""

    def _prepare(self, connection: Any) -> Any:
        return frozenset()

    def _scope(self, connection: Any, begins: bool = True) -> Any:
        return connection.nested()

    def _check_still_open(self, connection: Any) -> None:
        """The savepoint's end does."""

    def _name(self) -> str:
        return f"{self._database.name}, on this program's connection"

    def _explain(self, error: Exception, stage: Stage) -> SinkError:
        why, remedy, retry = self._why(error)
        text = " ".join(str(error).split("\n(Background")[0].split()) or type(error).__name__
        return SinkError(f"{self._name()}: {why} ({text}). {_UNDONE}. {remedy}.", retry=retry)

    def _why(self, error: Exception) -> tuple[str, str, bool]:
        code = code_of(error)
        if code in _NO_TABLE or "no such table: kafka_marshal" in str(error):
            names = ", ".join(table.name for table in (PROGRESS, DONE, FENCES))
            return (
                f"the tables {names} are not all there",
                f"Run the statements of fence_tables({self._link.vendor!r}) once, as a migration",
                False,
            )
        if self._link.vendor == "mysql":
            if code in _WHY_MYSQL:
                return _WHY_MYSQL[code]
        else:
            known = postgres._WHY if self._link.vendor == "postgresql" else sqlite._WHY
            for beginning, (why, remedy, retry) in known.items():
                if code is not None and str(code).startswith(beginning):
                    return why, _RUN_AGAIN if retry else remedy, retry
        if code is None and is_operational(error):
            return "the database does not answer, or the connection to it was lost", _RUN_AGAIN, True
        return "the database refused a statement of fence(…)", "See what it says", False


def _is_time(of: Records, every: int = 1) -> bool:
    """Whether to merge: by chance, as often as sinks that count do. (A connection may be new for each transaction.)"""
    messages = len(of.messages)
    return random.random() * every * max(MERGE_EVERY, BATCHES * (messages - 1)) < messages


def _ended(name: str) -> SinkError:
    return SinkError(
        f"{name}: the block of fence(…) ended the transaction by itself (COMMIT, ROLLBACK, or a statement that "
        "commits, as CREATE TABLE of MySQL). What it had written until then may be in the database: then its messages "
        "are done there, and what was to follow is missing. Check the rows. Leave COMMIT and ROLLBACK to the code "
        "around fence(…)"
    )


def _no_transaction() -> ConfigurationError:
    return ConfigurationError(
        "fence(…): no transaction runs on this connection, which is in autocommit mode: rows and progress would be "
        "committed one by one, and a crash in between would lose messages or double them. Nothing was written. Begin "
        "a transaction around fence(…), and commit it before the messages are done: 'with connection.transaction():' "
        "of psycopg, 'with engine.begin() as connection:' of SQLAlchemy, 'with transaction.atomic():' of Django; BEGIN "
        "of sqlite3; connection.begin() of MySQL"
    )


class FenceBlock(AbstractContextManager[FencedMessages], AbstractAsyncContextManager[FencedMessages]):
    """What :func:`fence` returns: to be entered once, by ``with``, or ``async with`` on a connection of asyncio."""

    def __init__(self, sink: ConnectionSink, of: Records) -> None:
        self._sink, self._link, self._of = sink, sink._link, of
        self._block: Any = None
        self._is_settled = False
        self._waits = _is_time(of, PATIENCE + 1)

    def __enter__(self) -> FencedMessages:
        if isinstance(self._link, AsyncLink):
            self._link.run("")  # refuses
        self._block = self._within()
        return cast("FencedMessages", self._block.__enter__())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return cast("bool | None", self._block.__exit__(kind, error, trace))

    async def __aenter__(self) -> FencedMessages:
        if not isinstance(self._link, AsyncLink):
            raise ConfigurationError(
                "'async with fence(…)' needs a connection of asyncio: this one would stop the event loop. Nothing was "
                "written. Write 'with fence(…)', in a thread"
            )
        self._block = self._within_async(self._link)
        return cast("FencedMessages", await self._block.__aenter__())

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return cast("bool | None", await self._block.__aexit__(kind, error, trace))

    @contextmanager
    def _within(self) -> Iterator[FencedMessages]:
        sink, link, of = self._sink, self._link, self._of
        sink._begin(link, of, self._waits)
        with whole_blocks(), self._kept_open(), suppress(RollBackError), link.nested():
            tx, admitted = sink._admit(link, of)
            yield tx
            tx._check(of.is_single)
            sink._settle(link, of, admitted, of.aside(), self._besides())
            self._is_settled = True

    @asynccontextmanager
    async def _within_async(self, link: AsyncLink) -> AsyncIterator[FencedMessages]:
        sink, of = self._sink, self._of
        await link.perform(lambda on: sink._begin(on, of, self._waits))
        with whole_blocks(), self._kept_open(), suppress(RollBackError):
            async with link.nested():
                tx, admitted = await link.perform(lambda on: sink._admit(on, of))
                yield tx
                tx._check(of.is_single)
                aside, besides = of.aside(), self._besides()
                await link.perform(lambda on: sink._settle(on, of, admitted, aside, besides))
                self._is_settled = True

    def _besides(self) -> Sequence[tuple[int, int]] | None:
        return self._of.done_besides(self._of.stable) if self._waits or _is_time(self._of) else None

    @contextmanager
    def _kept_open(self) -> Iterator[None]:
        """Around the savepoint, whose end fails if the block has ended the transaction."""
        try:
            yield
        except Exception as error:
            if not self._is_settled:
                raise
            found = self._sink._explain(error, "store")
            raise found if found.retry else _ended(self._sink._name()) from error


def fence(
    connection: Any,
    messages: Batch | Message | Iterable[Message] | None = None,
    *,
    group_id: str | None = None,
    epoch: int | None = None,
    kind: GroupKind | None = None,
    stable: int | None = None,
    name: str | None = None,
) -> FenceBlock:
    """``records`` and ``record`` of a sink, within a transaction that the program has begun on its own connection.

    >>> with connection.transaction():                            # doctest: +SKIP
    ...     with fence(connection, batch) as tx:
    ...         connection.cursor().executemany(INSERT, [row(m) for m in tx.new])
    >>> batch.done()                                              # doctest: +SKIP

    Entering the block refuses an older epoch, and stores that the messages are done; the program writes the rows of
    ``tx.new`` in the block, and COMMITs after it, both together. Only then are the messages done. An exception in the
    block goes back to its begin (a savepoint), and so does a block in which nothing is new.

    ``connection``: of psycopg (sync or async), psycopg2, asyncpg, sqlite3, PyMySQL, mysqlclient; a Connection or
    Session of SQLAlchemy (sync or async); or ``django.db.connection``. On a connection of asyncio, write
    ``async with``. Several blocks one after another, of several partitions, may be in one transaction. It needs the
    tables of :func:`fence_tables`.

    ``messages``: a batch; None, or its message, in a handler of ``consumer.run``; one or several of its list, of one
    partition, with ``batch=``; else messages of one partition with ``group_id``, ``epoch`` and ``kind``. These and
    ``stable`` are as in ``records`` and ``record``. ``name``: as of a sink.

    Locks: on PostgreSQL and SQLite as ``records``; on MySQL the partition, exclusively, until the program's COMMIT.

    Raises:
        ConfigurationError: wrong arguments; no transaction has begun; or, on PostgreSQL, one stricter than READ
            COMMITTED; or something was left out and the block did not read ``tx.new``.
        StaleEpochError: a key of the messages has a newer epoch here. Roll back; stop working on it.
        LeaseLostError, WrongEpochKindError, SinkError: as in ``records``. Roll back.
    """
    sink = ConnectionSink(connection, name=name)
    if messages is None or (not isinstance(messages, Batch) and hasattr(messages, "topic")):
        of = the_record(cast("Message | None", messages), group_id, epoch, kind, stable)
    else:
        of = the_records(messages, group_id, epoch, kind, stable)
    return FenceBlock(sink, of)
