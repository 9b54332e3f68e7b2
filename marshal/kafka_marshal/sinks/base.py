"""What the fenced sinks have in common: which epoch may write, from which offset on, and all or nothing.

Three tables lie beside the user's own. ``kafka_marshal_progress (group_id, topic, partition, last_offset, epoch)`` has
a row for each partition. While its keys have different epochs, these are in ``kafka_marshal_fences (…, lo, hi,
epoch)``. ``kafka_marshal_done (…, first_offset, last_offset)`` holds the records beyond the last offset.

A transaction refuses if one of its partitions (or keys) has seen a newer epoch, lets the user write, stores which
offsets are done, and commits. So a writer whose lease went to another can't write any more from the other's first
transaction on, and what comes again finds itself there. The forms differ in what they store: a last offset, with the
partition taken exclusively, or each record's offset, with the partition shared by all who write records.

Locks are always taken in this order: partitions, in order; records, in order of their offsets; the user's rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, Generic, Self, cast

from kafka_marshal import arguments
from kafka_marshal.adapters.message import Message
from kafka_marshal.checkpoints import Restore, RestorePiece
from kafka_marshal.client.attempt import GroupKind
from kafka_marshal.client.batch import Batch
from kafka_marshal.errors import ConfigurationError, SinkError
from kafka_marshal.sinks.claims import (
    KINDS,
    NOTHING_WRITTEN,
    SPLIT,
    Claim,
    Fence,
    Records,
    Written,
    all_keys,
    checked,
    covers_all,
    entered,
    group_of,
    interval_merged,
    kind_of,
    last_offset_of,
    nobody_yet,
    redone_of,
    refuse_out_of_order,
    require_held,
    rewound,
    the_record,
    the_records,
    tokens_of,
    whole_blocks,
    whole_pieces,
)
from kafka_marshal.sinks.database import (
    BATCHES,
    DONE,
    FENCES,
    MERGE_EVERY,
    PATIENCE,
    Connection,
    Dialect,
    DoneRecords,
    Lock,
    NotEnteredError,
    RollBackError,
    SinkWork,
    StoredError,
    Unmerged,
)
from kafka_marshal.types import Key

__all__ = ["FencedMessages", "FencedSink", "Written", "RecordTransaction", "SinkTransaction"]

_ALL_DONE = (
    "SELECT topic, partition, first_offset, last_offset FROM kafka_marshal_done WHERE group_id = ? "
    "ORDER BY first_offset"
)
_PARTITIONS_DONE = "SELECT DISTINCT group_id, topic, partition FROM kafka_marshal_done WHERE group_id IN (?, ?)"
_SET_EPOCH = "UPDATE kafka_marshal_progress SET epoch = ? WHERE group_id = ? AND topic = ? AND partition = ?"
_STORED = "SELECT topic, partition, last_offset, epoch FROM kafka_marshal_progress WHERE group_id = ?"
#: In one statement: a partition may be split, or be whole again, at any moment.
_STORED_WITH_FENCES = (
    "SELECT p.topic, p.partition, p.last_offset, p.epoch, f.lo, f.hi, f.epoch FROM kafka_marshal_progress p "
    "LEFT JOIN kafka_marshal_fences f ON f.group_id = p.group_id AND f.topic = p.topic AND f.partition = p.partition "
    "WHERE p.group_id = ? ORDER BY p.topic, p.partition, f.lo"
)
_FENCES = (
    "SELECT lo, hi, epoch FROM kafka_marshal_fences WHERE group_id = ? AND topic = ? AND partition = ? ORDER BY lo"
)
_DROP_FENCES = "DELETE FROM kafka_marshal_fences WHERE group_id = ? AND topic = ? AND partition = ?"
_ADD_FENCE = "INSERT INTO kafka_marshal_fences VALUES (?, ?, ?, ?, ?, ?)"

#: A writer enters its epoch once; another program may drop it at the same moment (``forget``, ``convert``).
_ENTRIES = 3


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


class SinkTransaction(_Statements[Connection]):
    """Inside a fenced transaction. Commit and rollback are the sink's: leave the block, or raise."""

    def __init__(self, connection: Connection, stored: Mapping[Key, Written]) -> None:
        super().__init__(connection)
        self._stored = stored

    def last_offset(self, topic: str, partition: int) -> int:
        """The offset up to which this partition's rows are in the sink already, -1: none. Skip what is not above it."""
        return last_offset_of(self._stored, topic, partition)


class FencedMessages:
    """Messages that are written in one fenced transaction, and which of them are new."""

    def __init__(self, messages: Sequence[Message], new: Sequence[Message]) -> None:
        self._left_out = len(messages) - len(new)
        self._has_new = bool(new)
        self._new = list(new)
        self._is_asked = False

    @property
    def new(self) -> list[Message]:
        """The messages whose rows are not in the sink yet, each once, in the given order: write these only."""
        self._is_asked = True
        return self._new

    @property
    def is_done(self) -> bool:
        """Whether the sink has the rows of all messages already. If so, skip the work: it is rolled back."""
        self._is_asked = self._is_asked or not self._has_new
        return not self._has_new

    def _check(self, is_single: bool) -> None:
        """At the end of the block. Raises ConfigurationError, or RollBackError if nothing is new."""
        if self._left_out and not self._is_asked and not is_single:
            raise ConfigurationError(
                f"sink.records(…): {self._left_out} messages are in the sink already, and the block did not read "
                f"tx.new: it may have written them again. {NOTHING_WRITTEN}. Write the messages of tx.new only"
            )
        if not self._has_new:
            raise RollBackError


class RecordTransaction(_Statements[Connection], FencedMessages):
    """Inside the fenced transaction of records. Commit and rollback are the sink's: leave the block, or raise."""

    def __init__(self, connection: Connection, messages: Sequence[Message], new: Sequence[Message]) -> None:
        super().__init__(connection)
        FencedMessages.__init__(self, messages, new)


#: (tx, piece, position, ranges): deletes the program's rows from the position on, except in the ranges.
Undo = Callable[[SinkTransaction[Connection], RestorePiece, int, tuple[tuple[int, int], ...]], object]


class FencedSink(Dialect[Connection]):
    """A database that refuses a writer whose lease went to another, and stores each batch once.

    Any thread may use it, several at once: each transaction has its own connection. It can be pickled (for a Spark
    executor) and used after a fork; connections do not go along.
    """

    # What users call.

    @contextmanager
    def transaction(
        self, group_id: str, claims: Iterable[tuple[str, int, int, int]], *, kind: GroupKind = "claimed"
    ) -> Iterator[SinkTransaction[Connection]]:
        """One transaction over partitions that this writer holds: (topic, partition, epoch, last_offset) each.

        ``epoch`` is that of the lease (or range, or batch), ``last_offset`` the last one whose rows are written here;
        both are stored together with the rows. Offsets must be handed in ascending order in each partition: what is
        stored says that everything up to it is in. Leaving the block commits; an exception writes nothing.
        ``kind``: "coordinated" where ``epoch`` is that of a piece, from a group consumer.

        Where records of a partition end in any order, or members share it by key, use :meth:`record` or
        :meth:`records`. In a handler of ``consumer.run`` this form is right with order="partition" only: retries come
        before the next record, and a dead letter counts as done.

        Locks: its partitions, exclusively, until the end.

        Raises:
            ConfigurationError: in a handler of ``run`` with another order; for a partition that is shared by key; or
                records up to ``last_offset`` were stored by the other forms, which this one would write again. Nothing
                was written.
            StaleEpochError: one of the partitions has a newer epoch here. Nothing was written; stop working on it.
            LeaseLostError: in a handler of ``run``, whose partition is not proven to be its own any more.
            WrongEpochKindError: it has epochs of the other kind. Nothing was written; see ``convert``.
            SinkError: the database can't do it; ``retry`` says whether trying again makes sense.
        """
        arguments.one_of("kind", kind, KINDS)
        refuse_out_of_order()
        wanted = checked(group_id, claims, kind)
        rows = self._rows_of(group_id)
        with self._work(rows, [each.key for each in wanted]) as work:
            work.stage = "fence"
            stored = self._fence(work.connection, rows, wanted)
            self._refuse_records(work.connection, rows, wanted, stored)
            work.stage = "write"
            yield SinkTransaction(work.connection, stored)
            work.stage = "store"
            self._check_still_open(work.connection)
            for each in wanted:
                # A batch that comes again, shorter than it was, takes nothing back.
                if each.last_offset > stored[each.key].last_offset:
                    self._done(work.connection, rows, each.key).set_last_offset(each.last_offset)
            require_held(group_id, {each.key for each in wanted})

    def record(
        self,
        message: Message | None = None,
        *,
        group_id: str | None = None,
        epoch: int | None = None,
        kind: GroupKind | None = None,
        stable: int | None = None,
    ) -> AbstractContextManager[RecordTransaction[Connection]]:
        """The transaction of one record, in a handler of ``consumer.run``; records may end in any order.

        Ask ``tx.is_done`` first: the sink may have this record's rows already. If so, what the block writes is rolled
        back. Leaving the block commits the rows and that the record is done; an exception writes nothing.

        Message, group, epoch and kind are those of the handler's attempt. Callers with their own threads (``poll`` and
        ``done``) give all four, and now and then ``stable``: everything up to here is done in this group
        (``LeaseInfo.stable``), so that rows that other offsets keep apart are dropped.

        Blocks must not be nested. In a coroutine, run the block as a whole by ``asyncio.to_thread``.

        Locks and errors: as in :meth:`records`.
        """
        return self._recorded(the_record(message, group_id, epoch, kind, stable))

    def records(
        self,
        messages: Batch | Iterable[Message],
        *,
        group_id: str | None = None,
        epoch: int | None = None,
        kind: GroupKind | None = None,
        stable: int | None = None,
    ) -> AbstractContextManager[RecordTransaction[Connection]]:
        """One transaction over messages of one partition, in any order, also of one that members share by key.

        Write the messages of ``tx.new`` only: the sink has the rows of the others. Leaving the block commits the rows
        and that the messages are done; an exception writes nothing, and if nothing is new, the block is rolled back.

        ``messages``: a batch of a consumer; or messages, with ``group_id``, ``epoch`` (a ``SharedEpoch``, too) and
        ``kind`` together. ``stable``: as in :meth:`record`.

        Locks: shares its partition with other transactions of records; waits for those with the same offsets. The first
        transaction of a newer epoch, and the last-offset form, wait until those that run have ended.

        Raises:
            ConfigurationError: wrong arguments; or something was left out and the block did not read ``tx.new``.
            StaleEpochError: a key of the messages has a newer epoch here. Nothing was written; stop working on it.
            LeaseLostError, WrongEpochKindError, SinkError: as in :meth:`transaction`.
        """
        return self._recorded(the_records(messages, group_id, epoch, kind, stable))

    @contextmanager
    def _recorded(self, of: Records) -> Iterator[RecordTransaction[Connection]]:
        rows = self._rows_of(of.group_id)
        written = self._pool.written(rows, of.key)
        self._tidy(of, written)
        with whole_blocks(), suppress(RollBackError), self._admitted(of, written) as (work, new, redone):
            done = self._done(work.connection, rows, of.key)
            tx = RecordTransaction(work.connection, [message for message, _ in of.messages], of.first_of_each(new))
            work.stage = "write"
            yield tx
            work.stage = "store"
            self._check_still_open(work.connection)
            tx._check(of.is_single)
            if aside := new & of.aside():
                done.take_out(aside, new)
                new -= aside
            done.strike_out(redone & new)
            of.require_held()
        if new:
            with written.lock:
                written.offsets.extend(new)

    @contextmanager
    def _admitted(self, of: Records, written: Unmerged) -> Iterator[tuple[SinkWork[Connection], set[int], set[int]]]:
        """A transaction in which the keys of all messages have our epochs; they are entered before it if need be.

        With the offsets that were not done, and now are; and those of them that are written again (F10).
        """
        rows, are_new = self._rows_of(of.group_id), written.are_new
        for _ in range(_ENTRIES + are_new):
            entries = written.entries
            try:
                with self._work(begins=False) as work:
                    work.stage = "fence"
                    self._pool.require(DONE, self)
                    new, stored, redone = self._added(work.connection, of, are_new)
                    # Only now, to be in one round trip: what it has added is rolled back.
                    if stored is None or not of.may_write(self._fences(work.connection, rows, of.key, stored.epoch)):
                        raise NotEnteredError
                    written.are_new = len(new) == len(of.offsets)
                    yield work, new, redone
                    return
            except NotEnteredError:
                self._enter(of, written, entries)
            except StoredError:
                are_new = False
        raise SinkError(
            f"{self._name()}: another program changed what is stored of {of.key[0]} [{of.key[1]}] (forget()? "
            f"convert()?) at this moment. {NOTHING_WRITTEN}. Try again.",
            retry=True,
        )

    def _added(self, connection: Connection, of: Records, are_new: bool) -> tuple[set[int], Written | None, set[int]]:
        """Begin a transaction of records: the offsets that were not done, the partition's row, and the redone."""
        rows = self._rows_of(of.group_id)
        run, begin = partial(self._run, connection), partial(self._shared, connection, rows, of.key)
        try:
            return self._records(run, begin, self._lists, rows, of.key).add(of.offsets, are_new=are_new)
        except self._there_error as error:
            raise StoredError from error

    def _enter(self, of: Records, written: Unmerged, entries: int) -> None:
        """Store the epochs where older ones are, after transactions that run; and merge.

        entries: as many as were seen before the keys were found to have older epochs.
        """
        rows = self._rows_of(of.group_id)
        with written.lock:
            if written.entries != entries and written.entered == of.tokens:
                return  # another thread has entered since
            besides = of.done_besides(of.stable)
            with self._work(rows, [of.key]) as work:
                work.stage = "fence"
                stored = self._lock_rows(work.connection, rows, [of.key])[of.key]
                before = self._fences(work.connection, rows, of.key, stored.epoch)
                of.refuse_kind(before)
                after = entered(before, of.tokens) if of.enters else before
                self._set_fences(work.connection, rows, of.key, stored.epoch, after)
                known = besides if of.is_newest(after) else ()
                self._done(work.connection, rows, of.key).merge(stored.last_offset, known)
            written.entered = of.tokens
            written.entries += 1
            written.offsets.clear()

    def _tidy(self, of: Records, written: Unmerged) -> None:
        """Note what is stable, and merge rows if it is time."""
        with written.lock:
            # A stable offset is good for its epoch: before the next one the group may have been repositioned.
            if written.tokens != of.tokens:
                written.tokens, written.stable = of.tokens, -1
            written.stable = max(written.stable, of.stable)
            if len(written.offsets) >= max(MERGE_EVERY, BATCHES * (len(of.messages) - 1)):
                self._merge(of, written)

    def _merge(self, of: Records, written: Unmerged) -> None:
        """Merge the rows written since the last time, and what is stable, unless transactions of records run."""
        besides = of.done_besides(written.stable)
        with self._work() as work:
            work.stage = "fence"
            lock: Lock = "free" if written.postponed < PATIENCE else "exclusive"
            found = merged_in(self, work.connection, of, besides, min(written.offsets), lock)
        if found is None:
            return  # another transaction merges
        is_free, last = found
        written.postponed = 0 if is_free or not besides or besides[-1][1] <= last else written.postponed + 1
        written.offsets.clear()

    def progress(self, group_id: str) -> dict[Key, Written]:
        """(topic, partition) → what is stored for this group. Raises SinkError."""
        group_id = self._rows_of(arguments.text("group_id", group_id))
        with self._work() as work:
            done: dict[Key, list[tuple[int, int]]] = {}
            # Before the last offsets: what is merged into them meanwhile is found twice, and not missed.
            if self._pool.has(DONE):
                for topic, partition, first, end in self._run(work.connection, _ALL_DONE, (group_id,)).fetchall():
                    done.setdefault((topic, partition), []).append((first, end))
            stored = self._stored(work.connection, group_id)
            fences: dict[Key, list[Fence]] = {}
            if any(each.epoch == SPLIT for each in stored.values()):
                stored, fences = self._stored_with_fences(work.connection, group_id)
        found = {}
        for key, each in stored.items():
            last_offset, ranges = interval_merged(each.last_offset, done.get(key, []))
            found[key] = Written.of(last_offset, each.epoch, tuple(ranges), fences.get(key, ()))
        return found

    def _stored(self, connection: Connection, group_id: str) -> dict[Key, Written]:
        """The rows as they are."""
        rows = self._run(connection, _STORED, (group_id,)).fetchall()
        return {(topic, partition): Written(last, epoch) for topic, partition, last, epoch in rows}

    def _stored_with_fences(
        self, connection: Connection, group_id: str
    ) -> tuple[dict[Key, Written], dict[Key, list[Fence]]]:
        self._pool.require(FENCES, self)
        stored: dict[Key, Written] = {}
        fences: dict[Key, list[Fence]] = {}
        for topic, partition, last, epoch, *fence in self._run(connection, _STORED_WITH_FENCES, (group_id,)).fetchall():
            stored[topic, partition] = Written(last, epoch)
            if epoch == SPLIT and fence[0] is not None:
                fences.setdefault((topic, partition), []).append((fence[0], fence[1], fence[2]))
        return stored, fences

    def rewind(
        self,
        group_id: str,
        positions: Mapping[Key, int] | None = None,
        *,
        epochs: Mapping[Key, int | None] | None = None,
        kind: GroupKind = "claimed",
        parked: Mapping[Key, Iterable[int]] | None = None,
        redone: Mapping[Key, Iterable[int]] | None = None,
        undone: Mapping[Key, Iterable[int]] | None = None,
    ) -> None:
        """After a reposition of the group: take these as last offsets (-1: from the start), back or forward.

        What lies above is written again when it comes again, single records too: remove its rows yourself if they
        would be double.

        ``epochs``: of partitions, those at which the group was repositioned: ``move.epoch`` of what
        ``pause.reposition`` returned, EPOCH in the output of ``kafka-marshal release-group``. Every writer that held
        the partition before is refused from then on. Without it the epochs stay, and such a writer, if it is late, is
        refused only after the next one has written. ``kind``: of the group.

        ``parked``: of partitions, the offsets that were set aside and stay so: ``move.parked`` of the same. Those whose
        rows are not here are written when they are redriven; without it they count as written.

        ``redone``: *before* messages are opened again (``Admin.redo``), once for each plan: ``plan.offsets``. Just
        these are written when they come again; without it their handlers find them done, and the old rows stay. Their
        rows are still there: let the statement be an upsert, or delete them. Without positions; the group works on.

        ``undone``: ``plan.offsets`` again, of a redo that was undone, or is over: what was not written again counts as
        written, as the rest of the partition.

        Call it before workers write after the reposition. Raises ConfigurationError if one has written already (epochs
        only), WrongEpochKindError, SinkError; nothing was changed then.
        """
        group_id = self._rows_of(arguments.text("group_id", group_id))
        positions = {} if positions is None else positions
        arguments.offsets("positions", positions, -1)
        arguments.offsets("epochs", epochs or {})  # None, as of a move that was only planned, is refused
        entered_at = cast("Mapping[Key, int]", epochs or {})
        arguments.one_of("kind", kind, KINDS)
        claims = {key: Claim(*key, tokens_of(epoch, kind), -1) for key, epoch in entered_at.items()}
        aside, opened, closed = (
            _offsets(*each) for each in (("parked", parked), ("redone", redone), ("undone", undone))
        )
        if opened or closed:
            if positions or claims or aside:
                raise ConfigurationError(
                    "sink.rewind: redone and undone are of a group that works on, the others of one that was "
                    "repositioned. Nothing was changed. Call it once for each"
                )
            _redo(self, group_id, opened, closed)
            return
        with self._work(group_id, sorted(claims)) as work:
            wanted = claims.keys() | (positions.keys() & self._stored(work.connection, group_id).keys())
            for key, stored in self._lock_rows(work.connection, group_id, sorted(wanted)).items():
                if key in claims:
                    before = self._fences(work.connection, group_id, key, stored.epoch)
                    after = rewound(claims[key], group_id, before)
                    self._set_fences(work.connection, group_id, key, stored.epoch, after)
                if key not in positions:
                    continue
                if aside.get(key):
                    self._pool.require(DONE, self)
                done = self._done(work.connection, group_id, key)
                if self._pool.has(DONE):
                    done.rewind(stored.last_offset, positions[key], aside.get(key, ()))
                else:
                    done.set_last_offset(positions[key])

    def restore(self, restore: Restore, undo: Undo[Connection]) -> None:
        """In ``on_restore`` of a group that takes checkpoints: take back what was written beyond the pieces' positions.

        One transaction for each piece. ``undo(tx, piece, position, ranges)`` deletes your rows of offsets from
        ``position`` on, except those in ``ranges`` (inclusive intervals, which are done); the sink takes back what it
        has stored of them. Every writer from before is refused from then on. Called again, it does nothing: what was
        written since stays.

        Sinks that share a database need a ``name`` each, so that each rewinds its own tables.

        Locks: the partition, exclusively, until the end.

        Raises:
            ConfigurationError: a piece has only some keys of its partition. Nothing was changed.
            StaleEpochError: a newer epoch is here: another member has the piece by now. Pieces before it went back.
            WrongEpochKindError, SinkError: as in :meth:`transaction`.
        """
        pieces = whole_pieces(restore)
        arguments.a_function("undo", undo, "tx, piece, position, ranges")
        for piece in pieces:
            group_id, key = self._rows_of(piece.group_id), piece.key
            claim = Claim(*key, tokens_of(piece.epoch, "coordinated"), -1)
            with self._work(group_id, [key]) as work:
                work.stage = "fence"
                stored = self._lock_rows(work.connection, group_id, [key])[key]
                before = self._fences(work.connection, group_id, key, stored.epoch)
                after = claim.enter_all(group_id, before)
                if after == before:
                    continue  # rewound already: what is beyond was written since
                self._set_fences(work.connection, group_id, key, stored.epoch, after)
                work.stage = "write"
                tx = SinkTransaction(work.connection, {key: stored})
                arguments.a_result("undo", undo(tx, piece, piece.position, piece.ranges))
                work.stage = "store"
                self._check_still_open(work.connection)
                done = self._done(work.connection, group_id, key)
                if self._pool.has(DONE):
                    done.go_back(stored.last_offset, piece.position - 1, piece.ranges)
                else:
                    done.set_last_offset(min(stored.last_offset, piece.position - 1))

    def convert(self, group_id: str, kind: GroupKind) -> None:
        """After ``kafka-marshal convert-group``: only writers of this kind of group may write; last offsets stay.

        Writers of the other kind are refused from now on, at any epoch. Raises SinkError.
        """
        group_id = self._rows_of(arguments.text("group_id", group_id))
        arguments.one_of("kind", kind, KINDS)
        with self._work() as work:
            for key, stored in self._locked(work.connection, group_id).items():
                if kind_of(stored.epoch) != kind:
                    self._set_fences(work.connection, group_id, key, stored.epoch, all_keys(nobody_yet(kind)))

    def forget(self, group_id: str) -> None:
        """Drop what is stored for this group, epochs too: for a group that is gone, or a recreated coordination topic.

        (Epochs compare only within one coordination topic, L2.) Raises SinkError.
        """
        group_id = self._rows_of(arguments.text("group_id", group_id))
        with self._work() as work:
            for key, stored in self._locked(work.connection, group_id).items():
                if stored.epoch == SPLIT:
                    self._run(work.connection, _DROP_FENCES, (group_id, *key))
            self._run(work.connection, "DELETE FROM kafka_marshal_progress WHERE group_id = ?", (group_id,))
            if self._pool.has(DONE):
                everything = group_id, redone_of(group_id)
                self._run(work.connection, "DELETE FROM kafka_marshal_done WHERE group_id IN (?, ?)", everything)

    def close(self) -> None:
        """Close idle connections; transactions that run end in peace. A second call does nothing."""
        self._pool.close(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Fencing.

    def _fence(self, connection: Connection, group_id: str, wanted: Sequence[Claim]) -> dict[Key, Written]:
        """Lock the rows, refuse if a key has seen a newer epoch, raise the others."""
        stored = self._lock_rows(connection, group_id, [each.key for each in wanted])
        for each in wanted:
            epoch = stored[each.key].epoch
            after = each.enter_all(group_id, self._fences(connection, group_id, each.key, epoch))
            self._set_fences(connection, group_id, each.key, epoch, after)
        return stored

    def _fences(self, connection: Connection, group_id: str, key: Key, epoch: int) -> tuple[Fence, ...]:
        """Of one partition, whose gate we have. epoch: as its row has it."""
        if epoch != SPLIT:
            return all_keys(epoch)
        self._pool.require(FENCES, self)
        found = tuple((lo, hi, each) for lo, hi, each in self._run(connection, _FENCES, (group_id, *key)).fetchall())
        if not covers_all(found):
            raise SinkError(
                f"{self._name()}: {FENCES.name} does not have one epoch for each key of {key[0]} [{key[1]}]: another "
                f"program has changed it. {NOTHING_WRITTEN}. Restore it; or, once nothing writes, drop the epochs and "
                f"keep what is done: sink.convert({group_of(group_id)!r}, 'claimed'), then "
                f"sink.convert({group_of(group_id)!r}, 'coordinated')"
            )
        return found

    def _set_fences(self, connection: Connection, group_id: str, key: Key, epoch: int, fences: Sequence[Fence]) -> None:
        """Store these; rows of fences are there only while keys have different epochs. epoch: as its row has it."""
        if epoch == SPLIT:
            self._run(connection, _DROP_FENCES, (group_id, *key))
        if len(fences) > 1:
            self._pool.require(FENCES, self)
            for fence in fences:
                self._run(connection, _ADD_FENCE, (group_id, *key, *fence))
        now = fences[0][2] if len(fences) == 1 else SPLIT
        if now != epoch:
            self._run(connection, _SET_EPOCH, (now, group_id, *key))

    def _locked(self, connection: Connection, group_id: str) -> dict[Key, Written]:
        """Take all rows of the group for ourselves, as far as they are there."""
        locked = {}
        for key in sorted(self._stored(connection, group_id)):
            row = self._row(connection, group_id, key, "exclusive")
            if row is not None:
                locked[key] = row
        return locked

    def _refuse_records(
        self, connection: Connection, group_id: str, wanted: Sequence[Claim], stored: dict[Key, Written]
    ) -> None:
        """Where single records are done beyond the last offset, the last-offset form would write them again."""
        if not self._pool.has(DONE):
            return
        rows = self._run(connection, _PARTITIONS_DONE, (group_id, redone_of(group_id))).fetchall()
        found = {tuple(row) for row in rows}
        for each in wanted:
            if (redone_of(group_id), *each.key) in found:
                raise ConfigurationError(
                    f"{each.topic} [{each.partition}]: messages are to be written again (redo), and a last offset "
                    f"would hide them. {NOTHING_WRITTEN}. Use sink.records(…); or, so that the old rows stay, "
                    f"sink.rewind({group_of(group_id)!r}, undone=…)"
                )
            if (group_id, *each.key) not in found:
                continue
            last, kept = self._done(connection, group_id, each.key).merge(stored[each.key].last_offset)
            stored[each.key] = replace(stored[each.key], last_offset=last)
            if kept and kept[0][0] <= each.last_offset:
                first, end = kept[0]
                raise ConfigurationError(
                    f"{each.topic} [{each.partition}]: single records beyond the last offset {last} are in this sink, "
                    f"{first} to {end} for example, stored by sink.record(…) or sink.records(…). sink.transaction(…) "
                    f"would write them again. {NOTHING_WRITTEN}. Continue with that form; or, once nothing writes, "
                    f"sink.rewind({group_of(group_id)!r}, {{({each.topic!r}, {each.partition}): offset}}) with the "
                    "offset up to which everything is done in the group"
                )

    def _done(self, connection: Connection, group_id: str, key: Key) -> DoneRecords:
        run, run_all = partial(self._run, connection), partial(self._run_all, connection)
        return self._records(run, run_all, self._lists, group_id, key)


def _offsets(name: str, given: object) -> dict[Key, list[int]]:
    """Of an argument that has offsets by partition: ascending, each once. Raises ConfigurationError."""
    found = arguments.a_mapping(name, given, "a mapping of (topic, partition) to offsets")
    arguments.partitions(name, found)
    return {
        key: sorted({arguments.a_whole(f"{name}: an offset of {key!r}", each) for each in offsets})
        for key, offsets in found.items()
    }


def _redo(
    sink: FencedSink[Connection], group_id: str, opened: Mapping[Key, list[int]], closed: Mapping[Key, list[int]]
) -> None:
    """F10: what is to be written again, and what is not any more; one transaction for all partitions."""
    with sink._work(group_id, sorted(opened)) as work:
        wanted = opened.keys() | (closed.keys() & sink._stored(work.connection, group_id).keys())
        for key, stored in sink._lock_rows(work.connection, group_id, sorted(wanted)).items():
            sink._pool.require(DONE, sink)
            done = sink._done(work.connection, group_id, key)
            if offsets := opened.get(key):
                done.reopen(stored.last_offset, offsets)
            elif offsets := closed.get(key):
                done.close_again(stored.last_offset, offsets)


def merged_in(
    sink: FencedSink[Connection],
    connection: Connection,
    of: Records,
    besides: Sequence[tuple[int, int]],
    since: int,
    lock: Lock,
) -> tuple[bool, int] | None:
    """Merge in this transaction: whether no transaction of records runs, the last offset; None: another merges."""
    group_id, key = sink._rows_of(of.group_id), of.key
    at = sink._row(connection, group_id, key, lock)
    is_free = at is not None
    if at is None:
        at = sink._row(connection, group_id, key, "merging")
    if at is None:
        return None
    # A writer of records below it that still runs would leave rows that overlap.
    fences = sink._fences(connection, group_id, key, at.epoch) if is_free else ()
    known = besides if is_free and of.is_newest(fences) else ()
    return is_free, sink._done(connection, group_id, key).merge(at.last_offset, known, since)[0]
