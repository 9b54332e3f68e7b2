"""What the fenced sinks have in common: who may write, from which offset on, and all or nothing.

A table ``kafka_marshal_progress (group_id, topic, partition, last_offset, epoch)`` lies beside the user's own. A
transaction takes the rows of its partitions for itself, refuses where one has seen a newer epoch (C9), raises the
epochs, lets the user write, stores the last offsets, and commits. So a writer whose lease went to another can't write
any more from the other's first transaction on, and a batch that is written again finds its own last offset there.

Epochs of leases and fencing tokens of coordinated groups are offsets of different partitions of the log, so they can't
be compared. The kind is stored within the epoch: tokens have 2^62 added. A release that does not know of kinds takes
them for newer epochs, and is refused.
"""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Final, Generic, Literal, Self, TypeVar

from kafka_marshal import arguments
from kafka_marshal.errors import ClosedError, ConfigurationError, SinkError, StaleEpochError, WrongEpochKindError
from kafka_marshal.types import Key, SharedEpoch

__all__ = ["TABLE", "FencedSink", "GroupKind", "Progress", "Stage", "Transaction", "ended_early", "wrong_shape"]

#: The table that sinks keep beside the user's.
TABLE = "kafka_marshal_progress"

#: Its columns, in order; the first three are the primary key.
COLUMNS = ("group_id", "topic", "partition", "last_offset", "epoch")

_SET_LAST_OFFSET = (
    "UPDATE kafka_marshal_progress SET last_offset = ? WHERE group_id = ? AND topic = ? AND partition = ?"
)
_SET_EPOCH = "UPDATE kafka_marshal_progress SET epoch = ? WHERE group_id = ? AND topic = ? AND partition = ?"

#: Whose epochs they are: of leases, or of the pieces of a coordinated group.
GroupKind = Literal["claimed", "coordinated"]

#: Added to what is stored of a coordinated group.
_COORDINATED: Final = 2**62

#: Stored where nobody has written: of a new row, and of one that was converted to claims.
_NOBODY: Final = -1
_NOBODY_CLAIMED: Final = -2

Connection = TypeVar("Connection")

#: What was being done when the database said no: "open", "begin", "fence", "write", "store" or "commit".
Stage = str

_SO = {
    "commit": (
        "Whether this transaction was committed is not known, but it was as a whole or not at all: run it again, "
        "last_offset() then tells"
    ),
}
_NOTHING_WRITTEN = "Nothing of this transaction was written, and its offsets are not done"

#: A connection is given back to be used again; more than this many idle ones are closed.
_IDLE = 4


@dataclass(frozen=True, slots=True)
class Progress:
    """What a sink knows of one partition."""

    #: The offset up to which its rows are in the sink; -1: none.
    last_offset: int
    #: The newest epoch that has written, or tried to; -1: none.
    epoch: int
    #: The epochs are fencing tokens of a coordinated group.
    coordinated: bool = False

    @classmethod
    def of(cls, last_offset: int, stored: int) -> Self:
        """As the table has it."""
        kind = _kind_of(stored)
        return cls(
            last_offset, max(-1, stored - _COORDINATED if kind == "coordinated" else stored), kind == "coordinated"
        )


def _kind_of(stored: int) -> GroupKind | None:
    """Whose epoch is stored; None: nobody's, so that either kind may begin."""
    if stored == _NOBODY:
        return None
    return "coordinated" if stored >= _COORDINATED - 1 else "claimed"


@dataclass(frozen=True, slots=True)
class _Claim:
    topic: str
    partition: int
    epoch: int
    last_offset: int


@dataclass(slots=True)
class _Work(Generic[Connection]):
    """A transaction under way."""

    connection: Connection
    stage: Stage = "begin"


class Transaction(Generic[Connection]):
    """Inside a fenced transaction. Commit and rollback are the sink's: leave the block, or raise."""

    def __init__(self, connection: Connection, stored: Mapping[Key, Progress]) -> None:
        #: The database driver's own connection, for what ``execute`` does not do (COPY, for example).
        self.connection = connection
        self._stored = stored
        self._cursor: Any = connection.cursor()  # type: ignore[attr-defined]

    def last_offset(self, topic: str, partition: int) -> int:
        """The offset up to which this partition's rows are in the sink already, -1: none. Skip what is not above it."""
        try:
            return self._stored[topic, partition].last_offset
        except KeyError:
            raise ConfigurationError(
                f"{topic} [{partition}] is not one of this transaction's partitions, so it is not fenced for it. "
                f"Nothing of this transaction is written; name it where the transaction begins"
            ) from None

    def execute(self, sql: str, parameters: Sequence[Any] | Mapping[str, Any] = ()) -> Any:
        """Run one statement; the driver's cursor, to fetch from."""
        return self._cursor.execute(sql, parameters) if parameters else self._cursor.execute(sql)

    def executemany(self, sql: str, rows: Iterable[Sequence[Any] | Mapping[str, Any]]) -> Any:
        """Run one statement for each row of parameters."""
        return self._cursor.executemany(sql, rows)


class _Pool(Generic[Connection]):
    """A sink's idle connections. Any thread may use it; it does not refer to the sink: no circle keeps them open."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._idle: list[Connection] = []
        self._prepared = False
        self._closed = False

    def take(self, sink: FencedSink[Connection]) -> Connection:
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
            if not self._prepared:
                try:
                    sink._prepare(connection)
                except BaseException:
                    sink._disconnect(connection)
                    raise
                self._prepared = True
        return connection

    def give_back(self, sink: FencedSink[Connection], connection: Connection, well: bool) -> None:
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

    def close(self, sink: FencedSink[Connection]) -> None:
        """Close what is idle, and what is given back from now on."""
        self._check_process()
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            sink._disconnect(connection)


#: Connections that belong to a parent process: held, since the garbage collector would close them under the parent.
_PARENTS: list[Any] = []


class FencedSink(ABC, Generic[Connection]):
    """A database that refuses a writer whose lease went to another (C9), and stores each batch once.

    Any thread may use it, several at once: each transaction has a connection of its own. It can be pickled (for a
    Spark executor) and used after a fork; connections do not go along.
    """

    #: The base of the driver's errors.
    _driver_error: type[Exception]
    #: How the driver marks a parameter in a statement.
    _mark: str

    def __init__(self) -> None:
        self._pool = _Pool[Connection]()

    # What users call.

    @contextmanager
    def transaction(
        self, group_id: str, claims: Iterable[tuple[str, int, int, int]], *, kind: GroupKind = "claimed"
    ) -> Iterator[Transaction[Connection]]:
        """One transaction over partitions that this writer holds: (topic, partition, epoch, last_offset) each.

        ``epoch`` is that of the lease (or range, or batch), ``last_offset`` the last one whose rows are written here;
        both are stored together with the rows. Offsets must be handed in ascending order in each partition: what is
        stored says that everything up to it is in. Leaving the block commits; an exception writes nothing.
        ``kind``: "coordinated" where ``epoch`` is that of a piece, from a group consumer. (A partition that members
        share by key has several tokens; this table has room for one.)

        Raises:
            StaleEpochError: one of the partitions has a newer epoch here. Nothing was written; stop working on it.
            WrongEpochKindError: it has epochs of the other kind. Nothing was written; see ``convert``.
            SinkError: the database can't do it; ``retry`` says whether trying again makes sense.
        """
        arguments.one_of("kind", kind, _KINDS)
        wanted = _checked(group_id, claims, kind)
        with self._work() as work:
            work.stage = "fence"
            stored = self._fence(work.connection, group_id, wanted)
            work.stage = "write"
            yield Transaction(work.connection, stored)
            work.stage = "store"
            self._check_still_open(work.connection)
            self._store(work.connection, group_id, wanted, stored)

    def progress(self, group_id: str) -> dict[Key, Progress]:
        """(topic, partition) → what is stored for this group. Raises SinkError."""
        arguments.text("group_id", group_id)
        with self._work() as work:
            stored = self._stored(work.connection, group_id)
        return {key: Progress.of(each.last_offset, each.epoch) for key, each in stored.items()}

    def _stored(self, connection: Connection, group_id: str) -> dict[Key, Progress]:
        """The rows as they are."""
        rows = self._run(
            connection,
            "SELECT topic, partition, last_offset, epoch FROM kafka_marshal_progress WHERE group_id = ?",
            (group_id,),
        ).fetchall()
        return {(topic, partition): Progress(last, epoch) for topic, partition, last, epoch in rows}

    def rewind(self, group_id: str, positions: Mapping[Key, int]) -> None:
        """After a reposition of the group (C11): take these as last offsets (-1: from the start), back or forward.

        What lies above is written again when it comes again: remove its rows yourself where they would be double.
        Epochs stay, so old writers stay fenced. Raises SinkError.
        """
        arguments.text("group_id", group_id)
        arguments.offsets("positions", positions, -1)
        with self._work() as work:
            for (topic, partition), last_offset in sorted(positions.items()):
                self._run(work.connection, _SET_LAST_OFFSET, (last_offset, group_id, topic, partition))

    def convert(self, group_id: str, kind: GroupKind) -> None:
        """After ``kafka-marshal convert-group``: only writers of this kind of group may write; last offsets stay.

        Writers of the other kind are refused from now on, whatever their epoch. Raises SinkError.
        """
        arguments.text("group_id", group_id)
        arguments.one_of("kind", kind, _KINDS)
        with self._work() as work:
            for (topic, partition), stored in self._stored(work.connection, group_id).items():
                if _kind_of(stored.epoch) != kind:
                    fresh = _COORDINATED - 1 if kind == "coordinated" else _NOBODY_CLAIMED
                    self._run(work.connection, _SET_EPOCH, (fresh, group_id, topic, partition))

    def forget(self, group_id: str) -> None:
        """Drop what is stored for this group, epochs too: for a group that is gone, or a recreated coordination topic.

        (Epochs compare only within one coordination topic, L2.) Raises SinkError.
        """
        arguments.text("group_id", group_id)
        with self._work() as work:
            self._run(work.connection, "DELETE FROM kafka_marshal_progress WHERE group_id = ?", (group_id,))

    def close(self) -> None:
        """Close idle connections; transactions that run end in peace. A second call does nothing."""
        self._pool.close(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    # Fencing.

    def _fence(self, connection: Connection, group_id: str, wanted: Sequence[_Claim]) -> dict[Key, Progress]:
        """Take the rows for ourselves, refuse where one has seen a newer epoch, raise the others."""
        stored = self._lock_rows(connection, group_id, [(each.topic, each.partition) for each in wanted])
        for each in wanted:
            newest = stored[each.topic, each.partition].epoch
            theirs = _kind_of(newest)
            if theirs is not None and theirs != _kind_of(each.epoch):
                raise _wrong_kind(group_id, each, theirs)
            if newest > each.epoch:
                newest, epoch = Progress.of(-1, newest).epoch, Progress.of(-1, each.epoch).epoch
                raise StaleEpochError(
                    f"{each.topic} [{each.partition}]: this sink has seen epoch {newest}, newer than ours "
                    f"({epoch}): the lease went to another writer. {_NOTHING_WRITTEN} by us: the new holder goes "
                    "on from what is stored. Stop working on this partition. (If the coordination topic was made anew, "
                    "epochs began anew with it: sink.forget(group_id), once nobody writes.)",
                    topic=each.topic,
                    partition=each.partition,
                    epoch=epoch,
                    stored_epoch=newest,
                )
        for each in wanted:
            if stored[each.topic, each.partition].epoch != each.epoch:
                self._run(
                    connection,
                    _SET_EPOCH,
                    (each.epoch, group_id, each.topic, each.partition),
                )
        return stored

    def _store(
        self, connection: Connection, group_id: str, wanted: Sequence[_Claim], stored: Mapping[Key, Progress]
    ) -> None:
        for each in wanted:
            # A batch that comes again, shorter than it was, takes nothing back.
            if each.last_offset > stored[each.topic, each.partition].last_offset:
                self._run(
                    connection,
                    _SET_LAST_OFFSET,
                    (each.last_offset, group_id, each.topic, each.partition),
                )

    def _run(self, connection: Connection, sql: str, parameters: Sequence[Any] = ()) -> Any:
        cursor: Any = connection.cursor()  # type: ignore[attr-defined]
        return cursor.execute(sql.replace("?", self._mark), parameters)

    # Work.

    @contextmanager
    def _work(self) -> Iterator[_Work[Connection]]:
        """One transaction on a connection of its own. What the database says is explained by the stage it was at."""
        try:
            work = _Work(self._pool.take(self))
        except self._driver_error as error:
            raise self._explain(error, "open") from error
        well = False
        try:
            with self._scope(work.connection):
                work.stage = "write"
                yield work
                work.stage = "commit"
            well = True
        except self._driver_error as error:
            raise self._explain(error, work.stage) from error
        except (StaleEpochError, WrongEpochKindError, ConfigurationError):
            well = True
            raise
        finally:
            self._pool.give_back(self, work.connection, well)

    # What each database does in its own way.

    @abstractmethod
    def _connect(self) -> Connection: ...

    @abstractmethod
    def _is_alive(self, connection: Connection) -> bool: ...

    @abstractmethod
    def _disconnect(self, connection: Connection) -> None: ...

    @abstractmethod
    def _prepare(self, connection: Connection) -> None:
        """Make the table where it is absent; SinkError where it is of another shape."""

    @abstractmethod
    def _scope(self, connection: Connection) -> AbstractContextManager[object]:
        """A transaction: committed at the end of the block, rolled back on an exception."""

    @abstractmethod
    def _lock_rows(self, connection: Connection, group_id: str, keys: Sequence[Key]) -> dict[Key, Progress]:
        """Take these rows (made where absent) for ourselves until the end of the transaction; what they hold."""

    @abstractmethod
    def _check_still_open(self, connection: Connection) -> None:
        """SinkError where the user's block has ended the transaction by itself."""

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
            f"{self._name()}: {why} ({text}). {_SO.get(stage, _NOTHING_WRITTEN)}. {remedy}.",
            retry=retry or stage == "commit",
        )


def wrong_shape(name: str, found: Iterable[str]) -> SinkError:
    """There is a table of that name with other columns. name: of the sink, for people."""
    return SinkError(
        f"{name}: there is a table {TABLE} of another shape here: {', '.join(found)}; expected "
        f"{', '.join(COLUMNS)} with the primary key {', '.join(COLUMNS[:3])}. {_NOTHING_WRITTEN}. Rename that "
        "table, or name another database."
    )


def ended_early(name: str) -> SinkError:
    """The user's block has ended the transaction by itself. name: of the sink, for people."""
    return SinkError(
        f"{name}: the block ended the transaction by itself (COMMIT or ROLLBACK). What it had written "
        "until then may be in the database without its offsets, and will come again: look at the rows. Leave "
        "COMMIT and ROLLBACK to the sink: leaving the block commits, an exception rolls back."
    )


def _wrong_kind(group_id: str, claim: _Claim, theirs: GroupKind) -> WrongEpochKindError:
    ours: GroupKind = "claimed" if theirs == "coordinated" else "coordinated"
    return WrongEpochKindError(
        f"{claim.topic} [{claim.partition}]: this sink holds epochs of group {group_id!r} as a {theirs} group; "
        f"ours is of a {ours} one: they can't be compared. {_NOTHING_WRITTEN}. If the group was converted "
        f"(kafka-marshal convert-group), and no worker of the {theirs} group writes any more: "
        f"sink.convert({group_id!r}, {ours!r}). "
        "Else stop this worker",
        topic=claim.topic,
        partition=claim.partition,
        kind=ours,
        stored_kind=theirs,
    )


_KINDS: Final = ("claimed", "coordinated")


def _checked(group_id: object, claims: object, kind: GroupKind) -> list[_Claim]:
    """With epochs as they are stored. Sorted, each partition once: all lock rows in the same order."""
    merged: dict[Key, _Claim] = {}
    wanted = "a list of (topic, partition, epoch, last_offset)"
    for claim in arguments.several("claims", claims, wanted):
        if not isinstance(claim, tuple | list) or len(claim) != 4 or not isinstance(claim[0], str):
            raise arguments.wrong("claims", wanted, claims, "Nothing was written")
        topic = claim[0]
        if isinstance(claim[2], SharedEpoch):
            raise ConfigurationError(
                f"{topic} [{claim[1]}] is shared by key: a last offset of the whole partition would hide other "
                "members' messages. Nothing was written. Give the consumer allow_key_share=False, or keep tokens and "
                "offsets by (topic, partition, lo, hi) in a table of your own"
            )
        partition, epoch, last_offset = (arguments.a_whole(f"claims: {claim!r}", x, -1) for x in claim[1:])
        if epoch < 0 or last_offset < -1 or partition < 0:
            raise ConfigurationError(
                f"{topic} [{partition}]: epoch {epoch}, last offset {last_offset} are not of a lease. Nothing was "
                "written"
            )
        before = merged.get((topic, partition))
        if before is not None and before.epoch != epoch:
            raise ConfigurationError(
                f"{topic} [{partition}] stands in the transaction with epochs {before.epoch} and {epoch}: one of them "
                "is over. Nothing was written; drop the ranges of the older epoch"
            )
        last = last_offset if before is None else max(last_offset, before.last_offset)
        merged[topic, partition] = _Claim(topic, partition, epoch, last)
    if kind == "coordinated":
        merged = {key: replace(each, epoch=each.epoch + _COORDINATED) for key, each in merged.items()}
    if not merged or not isinstance(group_id, str) or not group_id:
        raise ConfigurationError(
            "a fenced transaction needs the group's id and at least one (topic, partition, epoch, last_offset): else "
            "nothing would refuse an older writer. Nothing was written"
        )
    return [merged[key] for key in sorted(merged)]
