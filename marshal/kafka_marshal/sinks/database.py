"""One database of a sink: its tables, connections and transactions, what its errors mean, and which records it has.

``kafka_marshal_done (group_id, topic, partition, first_offset, last_offset)`` holds inclusive intervals of offsets that
do not overlap. A transaction inserts the interval of one offset for each of its records; the primary key makes a second
writer of an offset wait for the first, and then find it. Neighbours are merged later, in a short transaction.
"""

from __future__ import annotations

import json
import os
import threading
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, Generic, Literal, TypeVar

from kafka_marshal import arguments
from kafka_marshal.errors import (
    ClosedError,
    ConfigurationError,
    LeaseLostError,
    SinkError,
    StaleEpochError,
    WrongEpochKindError,
)
from kafka_marshal.sinks.claims import (
    NAMED,
    NOTHING_WRITTEN,
    Fence,
    Interval,
    Written,
    interval_merged,
    left_out,
    redone_of,
    rows_of,
)
from kafka_marshal.types import Key


@dataclass(frozen=True, slots=True)
class Table:
    """A table that sinks keep beside the user's."""

    name: str
    #: (name, type), in order.
    columns: tuple[tuple[str, str], ...]
    #: This many of them are the primary key.
    keys: int
    #: What needs it, for people.
    needed_for: str

    @property
    def shape(self) -> tuple[list[str], list[str]]:
        """(columns, primary key)."""
        names = [name for name, _ in self.columns]
        return names, names[: self.keys]

    @property
    def made_by(self) -> str:
        """The statement."""
        columns = "".join(f"{name} {kind} NOT NULL, " for name, kind in self.columns)
        return f"CREATE TABLE IF NOT EXISTS {self.name} ({columns}PRIMARY KEY ({', '.join(self.shape[1])}))"


_PARTITION = (("group_id", "text"), ("topic", "text"), ("partition", "integer"))
PROGRESS = Table("kafka_marshal_progress", (*_PARTITION, ("last_offset", "bigint"), ("epoch", "bigint")), 3, "it")
DONE = Table(
    "kafka_marshal_done",
    (*_PARTITION, ("first_offset", "bigint"), ("last_offset", "bigint")),
    4,
    "sink.record(…) and sink.records(…) need",
)
FENCES = Table(
    "kafka_marshal_fences",
    (*_PARTITION, ("lo", "bigint"), ("hi", "bigint"), ("epoch", "bigint")),
    4,
    "partitions that members share by key need",
)
TABLES = (PROGRESS, DONE, FENCES)

#: What is stored of one partition, and the row of one that was never written.
ROW = "SELECT last_offset, epoch FROM kafka_marshal_progress WHERE group_id = ? AND topic = ? AND partition = ?"
_ADD_ROW = "INSERT INTO kafka_marshal_progress VALUES (?, ?, ?, -1, -1) ON CONFLICT DO NOTHING"

#: How a partition is held until the transaction ends: shared with transactions of records; for ourselves, after those
#: that run; "free": for ourselves if none runs; "merging": for a short change that transactions of records need not
#: wait for, left out while another makes one.
Lock = Literal["shared", "exclusive", "free", "merging"]

Connection = TypeVar("Connection")

#: SQL, with ? for each parameter.
Statement = tuple[str, Sequence[Any]]

#: The step at which the database refused: "open", "begin", "fence", "write", "store" or "commit".
Stage = str

_SO = {
    "commit": (
        "Whether this transaction was committed is not known, but it was as a whole or not at all: run it again, "
        "is_done, new or last_offset() then shows it"
    ),
}

#: A connection is given back to be used again; more than this many idle ones are closed. (As many as ``run`` has
#: handlers by default.)
_IDLE = 16


class RollBackError(Exception):
    """Raised inside a transaction that is to leave no trace; its connection is well."""


class NotEnteredError(RollBackError):
    """The writer's epoch has to be entered first."""


class StoredError(RollBackError):
    """An offset that was taken for new is stored."""


@dataclass(slots=True)
class SinkWork(Generic[Connection]):
    """A transaction under way."""

    connection: Connection
    stage: Stage = "begin"


class _Pool(Generic[Connection]):
    """A sink's idle connections. Any thread may use it; it does not refer to the sink: no circle keeps them open."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._idle: list[Connection] = []
        #: Tables that are not there, since this user may not make them; None: not known yet.
        self._missing: frozenset[Table] | None = None
        #: Those of them that may be there by now: another user may have made the table of records, and used it.
        self._wanted = {DONE}
        self._closed = False
        self._written: dict[tuple[str, Key], Unmerged] = {}

    def written(self, group_id: str, key: Key) -> Unmerged:
        """What this process has written of a partition, record by record."""
        self._check_process()
        with self._lock:
            return self._written.setdefault((group_id, key), Unmerged())

    def take(self, sink: Dialect[Connection]) -> Connection:
        """An idle connection that works, or a new one. Raises ClosedError, and the driver's errors."""
        self._check_process()
        with self._lock:
            if self._closed:
                raise ClosedError("this sink is closed; nothing was written. Make a new one")
            connection = self._idle.pop() if self._idle else None
        # One that lay idle may have been cut meanwhile. Nothing was begun on it, so another does as well.
        if connection is not None and not sink._is_alive(connection):
            sink._disconnect(connection)
            connection = None
        if connection is None:
            connection = sink._connect()
        if self._missing is None or self._missing & self._wanted:
            try:
                self._missing = sink._prepare(connection)
            except BaseException:
                sink._disconnect(connection)
                raise
        return connection

    def has(self, table: Table) -> bool:
        """Whether a table is there: a user without the right to make it may have an older database."""
        return self._missing is not None and table not in self._missing

    def require(self, table: Table, sink: Dialect[Connection]) -> None:
        """Raise SinkError if a table is not there."""
        if self.has(table):
            return
        self._wanted.add(table)
        raise SinkError(
            f"{sink._name()}: there is no table {table.name}, which {table.needed_for}, and this user may not make it. "
            f"{NOTHING_WRITTEN}. Grant it the right to create tables; or make the table yourself, and grant it SELECT, "
            f"INSERT, UPDATE and DELETE there: {table.made_by}"
        )

    def give_back(self, sink: Dialect[Connection], connection: Connection, well: bool) -> None:
        """Keep a connection that is well, for the next one; close any other."""
        with self._lock:
            keep = well and not self._closed and len(self._idle) < _IDLE
            if keep:
                self._idle.append(connection)
        if not keep:
            sink._disconnect(connection)

    def _check_process(self) -> None:
        """In a forked child the parent's connections must be neither used nor closed: they are the parent's."""
        if self._pid != os.getpid():
            _PARENTS.append(self._idle)
            self._reset()

    def close(self, sink: Dialect[Connection]) -> None:
        """Close what is idle, and what is given back from now on."""
        self._check_process()
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            sink._disconnect(connection)


#: Connections that belong to a parent process: held, since the garbage collector would close them under the parent.
_PARENTS: list[Any] = []


class Dialect(ABC, Generic[Connection]):
    """What the sink of one kind of database has to know of it."""

    #: The base of the driver's errors.
    _driver_error: type[Exception]
    #: The driver's error of a row that is there already.
    _there_error: type[Exception]
    #: How the driver marks a parameter in a statement.
    _mark: str

    def __init__(self, name: str | None) -> None:
        """name: of the sink, which then has separate rows."""
        self._pool = _Pool[Connection]()
        if name is not None and NAMED in arguments.text("name", name):
            raise arguments.wrong("name", "a string without U+001F, which stands before it in the tables", name)
        self._rows_name = name

    def _rows_of(self, group_id: str) -> str:
        return rows_of(group_id, self._rows_name)

    def _run(self, connection: Connection, sql: str, parameters: Sequence[Any] = ()) -> Any:
        cursor: Any = connection.cursor()  # type: ignore[attr-defined]
        return cursor.execute(sql.replace("?", self._mark), parameters)

    def _run_all(self, connection: Connection, *statements: Statement) -> list[list[tuple[Any, ...]]]:
        """Run these in order, each after what was committed before it; the rows of each."""
        return [self._run(connection, sql, parameters).fetchall() for sql, parameters in statements]

    def _add_rows(self, connection: Connection, group_id: str, keys: Iterable[Key]) -> None:
        """Make these rows where absent."""
        for key in keys:
            self._run(connection, _ADD_ROW, (group_id, *key))

    # Work.

    @contextmanager
    def _work(
        self, group_id: str = "", rows: Sequence[Key] = (), *, begins: bool = True
    ) -> Iterator[SinkWork[Connection]]:
        """One transaction on its own connection. An error of the database is explained by the stage it was at.

        rows: what it locks first, made before it begins if a transaction can't both make and lock them. begins: else
        ``_shared`` begins it, in its first round trip.
        """
        try:
            work = SinkWork(self._pool.take(self))
        except self._driver_error as error:
            raise self._explain(error, "open") from error
        well = False
        try:
            self._make_rows(work.connection, group_id, rows)
            with self._scope(work.connection, begins):
                work.stage = "write"
                yield work
                work.stage = "commit"
            well = True
        except self._driver_error as error:
            raise self._explain(error, work.stage) from error
        except (StaleEpochError, WrongEpochKindError, LeaseLostError, ConfigurationError, RollBackError):
            well = True
            raise
        finally:
            self._pool.give_back(self, work.connection, well)

    # What each database does in its own way.

    @abstractmethod
    def _connect(self) -> Connection: ...

    def _is_alive(self, connection: Connection) -> bool:
        """Whether a connection that lay idle still works."""
        return True

    @abstractmethod
    def _disconnect(self, connection: Connection) -> None: ...

    @abstractmethod
    def _prepare(self, connection: Connection) -> frozenset[Table]:
        """Make the tables if they are absent; SinkError if one is of another shape.

        Returns those that an older database lacks and this user may not make.
        """

    @abstractmethod
    def _scope(self, connection: Connection, begins: bool = True) -> AbstractContextManager[object]:
        """A transaction: committed at the end of the block, rolled back on an exception. begins: of ``_work``."""

    def _make_rows(self, connection: Connection, group_id: str, keys: Sequence[Key]) -> None:
        """Make these rows where absent, before a transaction that locks them."""

    @abstractmethod
    def _lock_rows(self, connection: Connection, group_id: str, keys: Sequence[Key]) -> dict[Key, Written]:
        """Take these rows (made where absent) for ourselves until the end of the transaction; what they hold."""

    @abstractmethod
    def _row(self, connection: Connection, group_id: str, key: Key, lock: Lock) -> Written | None:
        """What one row holds, locked like that (not shared); None: it is absent, or locked by another."""

    def _shared(
        self, connection: Connection, group_id: str, key: Key, *statements: Statement
    ) -> list[list[tuple[Any, ...]]]:
        """Begin a transaction of records with these statements, behind its gate; the rows of each.

        The last one is for the partition's row.
        """
        return self._run_all(connection, *statements)

    _lists: Lists
    _records: type[DoneRecords]

    @abstractmethod
    def _check_still_open(self, connection: Connection) -> None:
        """SinkError if the user's block has ended the transaction by itself."""

    @abstractmethod
    def _why(self, error: Exception) -> tuple[str, str, bool]:
        """(what is wrong, what to do, whether trying again makes sense)."""

    @abstractmethod
    def _name(self) -> str:
        """What this sink is called in messages; no password in it."""

    # Errors.

    def _explain(self, error: Exception, stage: Stage) -> SinkError:
        why, remedy, retry = self._why(error)
        text = " ".join(str(error).split()) or type(error).__name__
        return SinkError(
            f"{self._name()}: {why} ({text}). {_SO.get(stage, NOTHING_WRITTEN)}. {remedy}.",
            retry=retry or stage == "commit",
        )


def wrong_shape(name: str, table: Table, found: Iterable[str]) -> SinkError:
    """There is a table of that name with other columns. name: of the sink, for people."""
    columns, keys = table.shape
    return SinkError(
        f"{name}: there is a table {table.name} of another shape here: {', '.join(found)}; expected "
        f"{', '.join(columns)} with the primary key {', '.join(keys)}. {NOTHING_WRITTEN}. Rename that "
        "table, or name another database."
    )


def ended_early(name: str) -> SinkError:
    """The user's block has ended the transaction by itself. name: of the sink, for people."""
    return SinkError(
        f"{name}: the block ended the transaction by itself (COMMIT or ROLLBACK). What it had written "
        "until then may be in the database without its offsets, and will come again (of a single record: with its "
        "offset, and what was to follow is missing): check the rows. Leave "
        "COMMIT and ROLLBACK to the sink: leaving the block commits, an exception rolls back."
    )


#: After this many records of a partition the next transaction merges their rows first. So a table that nothing holds up
#: has little more rows than that for each partition and writing process.
MERGE_EVERY: Final = 100

#: At least this many batches between two merges: a merge costs as much as a small batch.
BATCHES: Final = 4

#: Merges in a row that may leave gaps between rows because other transactions of the partition run; the next one waits
#: for them.
PATIENCE: Final = 9

_OURS = "group_id = ? AND topic = ? AND partition = ?"
#: In ascending order: so writers of the same offsets wait for each other, and never in a circle.
_INSERT = (
    "INSERT INTO kafka_marshal_done SELECT ?, ?, ?, one.value, one.value FROM OFFSETS WHERE true ORDER BY one.value"
)
_INSERT_ONE = "INSERT INTO kafka_marshal_done VALUES (?, ?, ?, ?, ?)"
#: Half of an insertion's time: left out if everything is new, as long as that is so.
_UNLESS_THERE = " ON CONFLICT DO NOTHING RETURNING first_offset"
#: The interval that begins before this offset. Not max(): without statistics of the table PostgreSQL reads all earlier
#: rows for that.
_BEFORE = (
    "SELECT first_offset FROM kafka_marshal_done WHERE OURS AND first_offset < ? ORDER BY first_offset DESC LIMIT 1"
)
#: The interval before an offset, and those from this offset on to another.
_COVERING = (
    "SELECT * FROM (SELECT first_offset, last_offset FROM kafka_marshal_done WHERE OURS AND first_offset < ? "
    "ORDER BY first_offset DESC LIMIT 1) AS one UNION ALL SELECT first_offset, last_offset FROM kafka_marshal_done "
    "WHERE OURS AND first_offset >= ? AND first_offset <= ?"
)
#: Those of several offsets.
_SEVERAL = " AND last_offset > first_offset"
#: From the interval on that begins before this offset.
_FROM = (
    "SELECT first_offset, last_offset FROM kafka_marshal_done WHERE OURS AND first_offset >= coalesce("
    "(BEFORE), -1) ORDER BY first_offset"
)
#: The same, up to another offset.
_FROM_TO = _FROM.replace(" ORDER BY first_offset", " AND first_offset <= ? ORDER BY first_offset")
_SET_LAST_OFFSET = "UPDATE kafka_marshal_progress SET last_offset = ? WHERE OURS"
#: Of those to be written again (F10): each is a row.
_REDONE = "SELECT first_offset FROM kafka_marshal_done WHERE OURS ORDER BY first_offset"
_REDONE_BETWEEN = "SELECT first_offset FROM kafka_marshal_done WHERE OURS AND first_offset >= ? AND first_offset <= ?"
_DROP_BELOW = "DELETE FROM kafka_marshal_done WHERE OURS AND first_offset <= ? AND last_offset <= ?"
_DROP_SOME = "DELETE FROM kafka_marshal_done WHERE OURS AND first_offset IN (SELECT one.value FROM OFFSETS)"
_ADD = "INSERT INTO kafka_marshal_done SELECT ?, ?, ?, one.value, one.last FROM INTERVALS"
_DROP = "DELETE FROM kafka_marshal_done WHERE OURS"


@dataclass(frozen=True, slots=True)
class Lists:
    """How a database takes a list, a parameter in JSON, as rows of a table ``one``."""

    #: Of (value): ``[3, 5]``.
    offsets: str
    #: Of (value, last): ``[[3, 5], [8, 8]]``.
    intervals: str


class DoneRecords:
    """The records of one partition that are done, as one connection sees them inside its transaction."""

    def __init__(
        self,
        run: Callable[[str, Sequence[Any]], Any],
        run_all: Callable[..., list[Any]],
        lists: Lists,
        group_id: str,
        key: Key,
    ) -> None:
        self._run_sql = run
        self._run_all = run_all
        self._lists = lists
        self._of = (group_id, *key)
        self._redone_of = (redone_of(group_id), *key)

    def _run(self, sql: str, parameters: Sequence[Any]) -> Any:
        return self._run_sql(self._sql(sql), parameters)

    def _sql(self, sql: str) -> str:
        sql = sql.replace("BEFORE", _BEFORE).replace("OURS", _OURS).replace("OFFSETS", self._lists.offsets)
        return sql.replace("INTERVALS", self._lists.intervals)

    def add(self, offsets: list[int], *, are_new: bool = False) -> tuple[set[int], Written | None, set[int]]:
        """Store ascending offsets as done; those that were not, the partition's row, if there is one, and the redone.

        The redone are those of the new ones that are written again (F10), to be struck out. It waits for others that
        store the same.

        are_new: probably all of them; the driver's error of a row that is there already if one is not.
        """
        insert, values = (_INSERT, [json.dumps(offsets)]) if len(offsets) > 1 else (_INSERT_ONE, offsets * 2)
        # Rows may be merged into others while the insertion waits, so the others come after it. And intervals into the
        # last offset between the two.
        inserted, intervals, redone, row = self._run_all(
            (self._sql(insert if are_new else insert + _UNLESS_THERE), (*self._of, *values)),
            (self._sql(_COVERING + _SEVERAL), (*self._of, offsets[0], *self._of, offsets[0], offsets[-1])),
            (self._sql(_REDONE_BETWEEN), (*self._redone_of, offsets[0], offsets[-1])),
            (ROW, self._of),
        )
        new = set(offsets) if are_new else {offset for (offset,) in inserted}
        stored = Written(*row[0]) if row else None
        below = stored.last_offset if stored else -1
        done: set[int] = set()
        if below >= offsets[0] or any(end >= offsets[0] for _, end in intervals):
            done = {x for x in new if x <= below or any(begin < x <= end for begin, end in intervals)}
        if done:  # intervals never overlap, even if the block commits by itself
            self._run(_DROP_SOME, (*self._of, json.dumps(sorted(done))))
        return new - done, stored, {offset for (offset,) in redone} & (new - done)

    def set_last_offset(self, offset: int) -> None:
        """Of the partition, whose row must be locked."""
        self._run(_SET_LAST_OFFSET, (offset, *self._of))

    def take_out(self, offsets: set[int], added: set[int]) -> None:
        """Some of the offsets that this transaction has added are not done after all."""
        self._run(_DROP_SOME, (*self._of, json.dumps(sorted(offsets))))

    def strike_out(self, offsets: set[int]) -> None:
        """These are written again, by this transaction (F10)."""
        if offsets:
            self._run(_DROP_SOME, (*self._redone_of, json.dumps(sorted(offsets))))

    def reopen(self, last_offset: int, offsets: Sequence[int]) -> None:
        """These ascending offsets are to be written again, whether they were stored or not. Its row is locked."""
        stored = self._run(_FROM, (*self._of, *self._of, -1)).fetchall()
        last, done = interval_merged(last_offset, stored)
        self._put(left_out([(0, last), *done], offsets))
        self.strike_out(set(offsets))
        self._run(_ADD, (*self._redone_of, json.dumps([(each, each) for each in offsets])))

    def close_again(self, last_offset: int, offsets: Sequence[int]) -> None:
        """Those of these ascending offsets that are yet to be written again are done. Its row is locked."""
        redone = [each for each in self._redone() if each in set(offsets)]
        self.strike_out(set(redone))
        self.merge(last_offset, [(each, each) for each in redone])

    def _redone(self) -> list[int]:
        return [offset for (offset,) in self._run(_REDONE, self._redone_of).fetchall()]

    def merge(self, last_offset: int, besides: Sequence[Interval] = (), since: int = -1) -> tuple[int, list[Interval]]:
        """Merge intervals from offset ``since`` on, and with the last offset; what is left. Its row must be locked.

        last_offset: as stored. besides: ascending, they are done, too, but those to be written again (F10). Few
        statements, whatever there is to merge.
        """
        if besides:
            besides = left_out(besides, self._redone())
        beyond = [each for each in besides if each[1] > last_offset]
        if beyond and (len(beyond) > 1 or beyond[0][0] > last_offset + 1):
            since = -1  # between open messages: it may meet any row
        found = self._run(_FROM, (*self._of, *self._of, since)).fetchall()
        last, kept = interval_merged(last_offset, sorted([*beyond, *found]))
        if last > last_offset:
            self.set_last_offset(last)
        self._run(_DROP_BELOW, (*self._of, last, last))
        if gone := [first for first, end in set(found).difference(kept) if end > last]:
            self._run(_DROP_SOME, (*self._of, json.dumps(gone)))
        if merged := list(set(kept).difference(found)):
            self._run(_ADD, (*self._of, json.dumps(merged)))
        return last, kept

    def go_back(self, last_offset: int, to: int, ranges: Sequence[Interval]) -> None:
        """Forget what is above offset ``to``, except in these ranges, and store the last offset. Its row is locked.

        last_offset: as stored. What is there and in ranges was stored once, and does not come again.
        """
        stored = self._run(_FROM, (*self._of, *self._of, -1)).fetchall()
        kept = [(first, min(end, to)) for first, end in stored if first <= to]
        for first, end in ((to + 1, last_offset), *stored):
            within = ((max(first, begin, to + 1), min(end, last)) for begin, last in ranges)
            kept += [each for each in within if each[0] <= each[1]]
        self._put([(0, min(last_offset, to)), *sorted(kept)])

    def rewind(self, last_offset: int, to: int, parked: Sequence[int]) -> None:
        """Everything up to offset ``to`` is done, but those that are parked and not stored now. Its row is locked.

        last_offset: as stored. What is above is forgotten.
        """
        stored = self._run(_FROM, (*self._of, *self._of, -1)).fetchall() if parked else []
        firsts = [first for first, _ in stored]
        aside = list[int]()
        for offset in sorted(set(parked)):
            place = bisect_right(firsts, offset) - 1
            if last_offset < offset and not (place >= 0 and offset <= stored[place][1]):
                aside.append(offset)
        self._put(left_out([(0, to)], aside))
        self._run(_DROP, self._redone_of)

    def _put(self, intervals: Sequence[Interval]) -> None:
        """Just these ascending ones are done."""
        last, kept = interval_merged(-1, intervals)
        self._run(_DROP, self._of)
        if kept:
            self._run(_ADD, (*self._of, json.dumps(kept)))
        self.set_last_offset(last)


class SerialDoneRecords(DoneRecords):
    """The same in a database where no other transaction runs meanwhile: neighbours are one interval from the start."""

    def add(self, offsets: list[int], *, are_new: bool = False) -> tuple[set[int], Written | None, set[int]]:
        """Store ascending offsets as done; those that were not, and more, as above."""
        between = (*self._of, *self._of, offsets[0], offsets[-1])
        found, redone, row = self._run_all(
            (self._sql(_FROM_TO), between),
            (self._sql(_REDONE_BETWEEN), (*self._redone_of, offsets[0], offsets[-1])),
            (ROW, self._of),
        )
        stored = Written(*row[0]) if row else None
        last, done = interval_merged(stored.last_offset if stored else -1, found)
        firsts = [first for first, _ in done]
        new = [x for x in offsets if x > last and not ((at := bisect_right(firsts, x)) and x <= done[at - 1][1])]
        self._add(new)
        return set(new), stored, {offset for (offset,) in redone} & set(new)

    def take_out(self, offsets: set[int], added: set[int]) -> None:
        """Some of the offsets that this transaction has added are not done after all."""
        super().take_out(added, added)
        self._add(sorted(added - offsets))

    def _add(self, offsets: list[int]) -> None:
        self._run(_ADD, (*self._of, json.dumps(interval_merged(-2, [(x, x) for x in offsets])[1])))


@dataclass(slots=True)
class Unmerged:
    """What this process has written of a partition since it last merged."""

    #: Held while an epoch is entered or rows are merged: once is enough for all threads.
    lock: threading.Lock = field(default_factory=threading.Lock)
    #: The tokens of the last writer, those that were entered last, and how often any were.
    tokens: tuple[Fence, ...] = ()
    entered: tuple[Fence, ...] = ()
    entries: int = 0
    offsets: list[int] = field(default_factory=list)
    #: The last transaction found none of its offsets stored.
    are_new: bool = False
    #: Everything up to here is done in the group: the highest offset that a writer with these tokens has named.
    stable: int = -1
    #: Merges in a row that had to leave out what is stable.
    postponed: int = 0
