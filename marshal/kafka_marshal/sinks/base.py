"""What the fenced sinks have in common: which epoch may write, from which offset on, and all or nothing.

A table ``kafka_marshal_progress (group_id, topic, partition, last_offset, epoch)`` lies beside the user's own. A
transaction takes the rows of its partitions for itself, refuses if one has seen a newer epoch, raises the
epochs, lets the user write, stores the last offsets, and commits. So a writer whose lease went to another can't write
any more from the other's first transaction on, and a batch that is written again finds its own last offset there.

The transaction of one record shares its partition's row with those of other records, and stores its offset in a second
table (``records``). Locks are always taken in this order: partitions, in order, then records, then the user's rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, Generic, Self

from kafka_marshal import arguments
from kafka_marshal.adapters.message import Message
from kafka_marshal.client.attempt import Attempt, GroupKind
from kafka_marshal.errors import ConfigurationError, SinkError
from kafka_marshal.sinks.claims import (
    KINDS,
    NOTHING_WRITTEN,
    Claim,
    Progress,
    checked,
    kind_of,
    last_offset_of,
    nobody_yet,
    refuse_others,
)
from kafka_marshal.sinks.database import Connection, Database, RollBackError, no_records
from kafka_marshal.sinks.done_records import (
    MERGE_EVERY,
    DoneRecords,
    Written,
    interval_merged,
    refuse_out_of_order,
    require_held,
    the_record,
)
from kafka_marshal.types import Key

__all__ = ["FencedSink", "Progress", "RecordTransaction", "Transaction"]

_SET_LAST_OFFSET = (
    "UPDATE kafka_marshal_progress SET last_offset = ? WHERE group_id = ? AND topic = ? AND partition = ?"
)
_ALL_DONE = (
    "SELECT topic, partition, first_offset, last_offset FROM kafka_marshal_done WHERE group_id = ? "
    "ORDER BY first_offset"
)
_PARTITIONS_DONE = "SELECT DISTINCT topic, partition FROM kafka_marshal_done WHERE group_id = ?"
_SET_EPOCH = "UPDATE kafka_marshal_progress SET epoch = ? WHERE group_id = ? AND topic = ? AND partition = ?"


class _Statements(Generic[Connection]):
    """Inside a fenced transaction. Commit and rollback are the sink's: leave the block, or raise."""

    def __init__(self, connection: Connection) -> None:
        #: The database driver's own connection, for what ``execute`` does not do (COPY, for example).
        self.connection = connection
        self._cursor: Any = connection.cursor()  # type: ignore[attr-defined]

    def execute(self, sql: str, parameters: Sequence[Any] | Mapping[str, Any] = ()) -> Any:
        """Run one statement; the driver's cursor, to fetch from."""
        return self._cursor.execute(sql, parameters) if parameters else self._cursor.execute(sql)

    def executemany(self, sql: str, rows: Iterable[Sequence[Any] | Mapping[str, Any]]) -> Any:
        """Run one statement for each row of parameters."""
        return self._cursor.executemany(sql, rows)


class Transaction(_Statements[Connection]):
    """Inside a fenced transaction. Commit and rollback are the sink's: leave the block, or raise."""

    def __init__(self, connection: Connection, stored: Mapping[Key, Progress]) -> None:
        super().__init__(connection)
        self._stored = stored

    def last_offset(self, topic: str, partition: int) -> int:
        """The offset up to which this partition's rows are in the sink already, -1: none. Skip what is not above it."""
        return last_offset_of(self._stored, topic, partition)


class RecordTransaction(_Statements[Connection]):
    """Inside the fenced transaction of one record. Commit and rollback are the sink's: leave the block, or raise."""

    def __init__(self, connection: Connection, is_done: bool) -> None:
        super().__init__(connection)
        #: Whether the sink has this record's rows already. If so, skip the work: what is written is rolled back.
        self.is_done = is_done


class FencedSink(Database[Connection]):
    """A database that refuses a writer whose lease went to another, and stores each batch once.

    Any thread may use it, several at once: each transaction has its own connection. It can be pickled (for a Spark
    executor) and used after a fork; connections do not go along.
    """

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

        Where records of a partition end in any order, use :meth:`record`. In a handler of ``consumer.run`` this form is
        right with order="partition" only: retries come before the next record, and a dead letter counts as done.

        Locks: its partitions, exclusively, until the end.

        Raises:
            ConfigurationError: in a handler of ``run`` with another order; or single records up to ``last_offset``
                were stored by :meth:`record`, which this form would write again. Nothing was written.
            StaleEpochError: one of the partitions has a newer epoch here. Nothing was written; stop working on it.
            LeaseLostError: in a handler of ``run``, whose partition is not proven to be its own any more.
            WrongEpochKindError: it has epochs of the other kind. Nothing was written; see ``convert``.
            SinkError: the database can't do it; ``retry`` says whether trying again makes sense.
        """
        arguments.one_of("kind", kind, KINDS)
        refuse_out_of_order()
        wanted = checked(group_id, claims, kind)
        with self._work(group_id, [each.key for each in wanted]) as work:
            work.stage = "fence"
            stored = self._fence(work.connection, group_id, wanted)
            self._refuse_records(work.connection, group_id, wanted, stored)
            work.stage = "write"
            yield Transaction(work.connection, stored)
            work.stage = "store"
            self._check_still_open(work.connection)
            for each in wanted:
                # A batch that comes again, shorter than it was, takes nothing back.
                if each.last_offset > stored[each.key].last_offset:
                    self._run(work.connection, _SET_LAST_OFFSET, (each.last_offset, group_id, *each.key))
            require_held(group_id, {each.key for each in wanted})

    @contextmanager
    def record(
        self,
        message: Message | None = None,
        *,
        group_id: str | None = None,
        epoch: int | None = None,
        kind: GroupKind | None = None,
        stable: int | None = None,
    ) -> Iterator[RecordTransaction[Connection]]:
        """The transaction of one record, in a handler of ``consumer.run``; records may end in any order.

        Ask ``tx.is_done`` first: the sink may have this record's rows already. If so, what the block writes is rolled
        back. Leaving the block commits the rows and that the record is done; an exception writes nothing.

        Message, group, epoch and kind are those of the handler's attempt. Callers with their own threads (``poll`` and
        ``done``) give all four, and now and then ``stable``: everything up to here is done in this group
        (``LeaseInfo.stable``), so that rows that other offsets keep apart are dropped.

        Blocks must not be nested. In a coroutine, run the block as a whole by ``asyncio.to_thread``.

        Locks: shares its partition with other records; waits for a transaction of the same offset. The first record of
        a newer epoch waits until transactions of older ones have ended.

        Raises:
            ConfigurationError: there is no attempt here, or not all four are given. Nothing was written.
            StaleEpochError, WrongEpochKindError, SinkError: as in :meth:`transaction`.
        """
        is_attempts = group_id is None
        group_id, claim = the_record(message, group_id, epoch, kind)
        if stable is None:
            stable = Attempt.current().stable if is_attempts else -1
        stable = arguments.a_whole("stable", stable, -1)
        written = self._pool.written(group_id, claim.key)
        with written.lock:
            self._enter_epoch(group_id, claim, written, stable)
        with suppress(RollBackError), self._work() as work:
            work.stage = "fence"
            stored = self._row(work.connection, group_id, claim.key, "shared")
            if stored is not None:
                refuse_others(group_id, claim, stored.epoch)
            if stored is None or stored.epoch != claim.epoch:
                written.epoch = None
                raise SinkError(
                    f"{self._name()}: another program changed what is stored of {claim.topic} [{claim.partition}] "
                    f"(forget()? convert()?) at this moment. {NOTHING_WRITTEN}. Try again.",
                    retry=True,
                )
            tx = RecordTransaction(
                work.connection, not self._done(work.connection, group_id, claim.key).add(claim.last_offset)
            )
            work.stage = "write"
            yield tx
            work.stage = "store"
            self._check_still_open(work.connection)
            if tx.is_done:
                raise RollBackError
            require_held(group_id, {claim.key})
        if not tx.is_done:
            with written.lock:
                written.offsets.append(claim.last_offset)

    def _enter_epoch(self, group_id: str, claim: Claim, written: Written, stable: int) -> None:
        """Store the epoch if it is new here, after transactions of older ones; merge if it is due."""
        is_new = written.epoch != claim.epoch
        # A stable offset is good for its epoch: before the next one the group may have been repositioned.
        stable = stable if is_new else max(stable, written.stable)
        if is_new:
            with self._work(group_id, [claim.key]) as work:
                work.stage = "fence"
                if not self._pool.has_records:
                    raise no_records(self._name())
                stored = self._fence(work.connection, group_id, [claim])[claim.key]
                self._done(work.connection, group_id, claim.key).merge(stored.last_offset, stable)
            written.epoch = claim.epoch
            written.offsets.clear()
        elif len(written.offsets) >= MERGE_EVERY:
            with self._work() as work:
                work.stage = "fence"
                at = self._row(work.connection, group_id, claim.key, "merging")
                if at is not None and at.epoch == claim.epoch:
                    since = min(written.offsets)
                    self._done(work.connection, group_id, claim.key).merge(at.last_offset, stable, since)
            if at is not None:
                written.offsets.clear()
        written.stable = stable

    def progress(self, group_id: str) -> dict[Key, Progress]:
        """(topic, partition) → what is stored for this group. Raises SinkError."""
        arguments.text("group_id", group_id)
        with self._work() as work:
            done: dict[Key, list[tuple[int, int]]] = {}
            # Before the last offsets: what is merged into them meanwhile is found twice, and not missed.
            if self._pool.has_records:
                for topic, partition, first, end in self._run(work.connection, _ALL_DONE, (group_id,)).fetchall():
                    done.setdefault((topic, partition), []).append((first, end))
            stored = self._stored(work.connection, group_id)
        found = {}
        for key, each in stored.items():
            last_offset, ranges = interval_merged(each.last_offset, done.get(key, []))
            found[key] = Progress.of(last_offset, each.epoch, tuple(ranges))
        return found

    def _stored(self, connection: Connection, group_id: str) -> dict[Key, Progress]:
        """The rows as they are."""
        rows = self._run(
            connection,
            "SELECT topic, partition, last_offset, epoch FROM kafka_marshal_progress WHERE group_id = ?",
            (group_id,),
        ).fetchall()
        return {(topic, partition): Progress(last, epoch) for topic, partition, last, epoch in rows}

    def rewind(self, group_id: str, positions: Mapping[Key, int]) -> None:
        """After a reposition of the group: take these as last offsets (-1: from the start), back or forward.

        What lies above is written again when it comes again, single records too: remove its rows yourself if they
        would be double. Epochs stay, so old writers stay fenced. Call it while no worker writes. Raises SinkError.
        """
        arguments.text("group_id", group_id)
        arguments.offsets("positions", positions, -1)
        with self._work() as work:
            for key in self._locked(work.connection, group_id, positions):
                self._run(work.connection, _SET_LAST_OFFSET, (positions[key], group_id, *key))
                if self._pool.has_records:
                    self._done(work.connection, group_id, key).drop()

    def convert(self, group_id: str, kind: GroupKind) -> None:
        """After ``kafka-marshal convert-group``: only writers of this kind of group may write; last offsets stay.

        Writers of the other kind are refused from now on, at any epoch. Raises SinkError.
        """
        arguments.text("group_id", group_id)
        arguments.one_of("kind", kind, KINDS)
        with self._work() as work:
            for key, stored in self._locked(work.connection, group_id).items():
                if kind_of(stored.epoch) != kind:
                    self._run(work.connection, _SET_EPOCH, (nobody_yet(kind), group_id, *key))

    def forget(self, group_id: str) -> None:
        """Drop what is stored for this group, epochs too: for a group that is gone, or a recreated coordination topic.

        (Epochs compare only within one coordination topic, L2.) Raises SinkError.
        """
        arguments.text("group_id", group_id)
        with self._work() as work:
            self._locked(work.connection, group_id)
            self._run(work.connection, "DELETE FROM kafka_marshal_progress WHERE group_id = ?", (group_id,))
            if self._pool.has_records:
                self._run(work.connection, "DELETE FROM kafka_marshal_done WHERE group_id = ?", (group_id,))

    def close(self) -> None:
        """Close idle connections; transactions that run end in peace. A second call does nothing."""
        self._pool.close(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    # Fencing.

    def _fence(self, connection: Connection, group_id: str, wanted: Sequence[Claim]) -> dict[Key, Progress]:
        """Lock the rows, refuse if one has seen a newer epoch, raise the others."""
        stored = self._lock_rows(connection, group_id, [each.key for each in wanted])
        for each in wanted:
            refuse_others(group_id, each, stored[each.key].epoch)
        for each in wanted:
            if stored[each.key].epoch != each.epoch:
                self._run(connection, _SET_EPOCH, (each.epoch, group_id, *each.key))
        return stored

    def _locked(
        self, connection: Connection, group_id: str, wanted: Iterable[Key] | None = None
    ) -> dict[Key, Progress]:
        """Take these rows of the group for ourselves (None: all), as far as they are there."""
        found = self._stored(connection, group_id)
        locked = {}
        for key in sorted(found if wanted is None else found.keys() & wanted):
            row = self._row(connection, group_id, key, "exclusive")
            if row is not None:
                locked[key] = row
        return locked

    def _refuse_records(
        self, connection: Connection, group_id: str, wanted: Sequence[Claim], stored: dict[Key, Progress]
    ) -> None:
        """Where single records are done beyond the last offset, the last-offset form would write them again."""
        if not self._pool.has_records:
            return
        found = {tuple(row) for row in self._run(connection, _PARTITIONS_DONE, (group_id,)).fetchall()}
        for each in wanted:
            if each.key not in found:
                continue
            last, kept = self._done(connection, group_id, each.key).merge(stored[each.key].last_offset, -1)
            stored[each.key] = replace(stored[each.key], last_offset=last)
            if kept and kept[0][0] <= each.last_offset:
                first, end = kept[0]
                raise ConfigurationError(
                    f"{each.topic} [{each.partition}]: single records beyond the last offset {last} are in this sink, "
                    f"{first} to {end} for example, stored by sink.record(…). sink.transaction(…) would write them "
                    f"again. {NOTHING_WRITTEN}. Continue with sink.record(…); or, once nothing writes, "
                    f"sink.rewind({group_id!r}, {{({each.topic!r}, {each.partition}): offset}}) with the offset up to "
                    "which everything is done in the group"
                )

    def _done(self, connection: Connection, group_id: str, key: Key) -> DoneRecords:
        return DoneRecords(partial(self._run, connection), group_id, key)
