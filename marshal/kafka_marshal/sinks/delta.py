"""The fenced sink in a Delta table (extra ``[delta]``): rows, last offsets and epochs in one commit, without a JVM.

A Delta log keeps the latest version of each application id (``txn``). Each partition has two ids:
``group/topic/partition`` with the last offset, ``group/topic/partition/epoch`` with the fencing token. Every commit for
a partition carries both.

Commits are optimistic: a commit names the table version it read, and Delta rejects it if a commit since then carries
one of its ids. The sink then reads and checks again, so that no check is older than the commit that relies on it.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, NoReturn

from kafka_marshal import arguments
from kafka_marshal.checkpoints import Restore, RestorePiece
from kafka_marshal.client.attempt import GroupKind
from kafka_marshal.errors import ConfigurationError, SinkError
from kafka_marshal.sinks.claims import (
    KINDS,
    NOTHING_WRITTEN,
    Claim,
    Written,
    all_keys,
    checked,
    kind_of,
    last_offset_of,
    nobody_yet,
    refuse_others,
    refuse_out_of_order,
    require_held,
    rewound,
    tokens_of,
    whole_pieces,
)
from kafka_marshal.types import Key, T

if TYPE_CHECKING:
    from arro3.core import RecordBatch
    from deltalake import CommitProperties, DeltaTable


#: Commits tried for one transaction. Commits of other partitions do not count: deltalake retries these itself.
_ATTEMPTS: Final = 10

#: The longest pause before the next attempt, in seconds: writers that collided once should not collide again.
_PAUSE_S: Final = 0.2

#: Storage options, or variables of the environment, that let one commit replace another: nothing would be fenced.
_UNSAFE: Final = ("ALLOW_UNSAFE_RENAME", "AWS_S3_ALLOW_UNSAFE_RENAME", "MOUNT_ALLOW_UNSAFE_RENAME")

#: A table property that lets ids expire, and the fence with them.
_EXPIRY: Final = "delta.setTransactionRetentionDuration"

#: The process whose deltalake has started its threads; they do not survive a fork.
_started_in: int | None = None


class DeltaTransaction:
    """Inside a fenced transaction. Leaving the block commits all appended rows at once; an exception writes nothing."""

    def __init__(self, stored: Mapping[Key, Written]) -> None:
        self._stored = stored
        self._batches: list[RecordBatch] = []

    def last_offset(self, topic: str, partition: int) -> int:
        """The offset up to which this partition's rows are in the table, -1: none. Leave out what is not above it."""
        return last_offset_of(self._stored, topic, partition)

    def append(self, rows: Any) -> None:
        """Add rows to the commit: an Arrow table or batch, or a DataFrame of Polars or pandas. Kept in memory.

        Raises ConfigurationError where ``rows`` has no Arrow interface (``__arrow_c_stream__``, ``__arrow_c_array__``).
        """
        from arro3.core import Table

        if not (hasattr(rows, "__arrow_c_stream__") or hasattr(rows, "__arrow_c_array__")):
            raise arguments.wrong("rows", "an Arrow table, or a DataFrame of Polars or pandas", rows, NOTHING_WRITTEN)
        self._batches += Table.from_arrow(rows).to_batches()


class DeltaUndo:
    """Inside ``restore``: names the rows that go, in the commit that takes the last offset back."""

    def __init__(self) -> None:
        self._predicates: list[str] = []

    def delete(self, predicate: str) -> None:
        """Delete the rows for which this SQL condition is true: ``"place = 3 AND at >= 1051"``."""
        self._predicates.append(f"({arguments.text('predicate', predicate)})")


#: (tx, piece, position, ranges): deletes the program's rows from the position on, except in the ranges.
Undo = Callable[[DeltaUndo, RestorePiece, int, tuple[tuple[int, int], ...]], object]


class DeltaSink:
    """Fenced appends to a Delta table: a local folder, or an object store that deltalake supports.

    Any thread may use it, several at once; writers of different partitions do not disturb each other. It can be
    pickled, and keeps nothing open. deltalake does not survive ``os.fork()``: start processes with "spawn".
    """

    def __init__(
        self,
        table: str | os.PathLike[str],
        *,
        schema: Any = None,
        partition_by: Sequence[str] = (),
        storage_options: Mapping[str, str] | None = None,
    ) -> None:
        """Nothing is opened yet.

        Args:
            table: a folder, or an URL such as ``s3://bucket/flights``.
            schema: an Arrow schema (or a Delta one). An absent table is created with it; without it, that is an error.
            partition_by: columns by which a table that is created here is partitioned.
            storage_options: credentials and settings of the object store, as deltalake takes them.

        Raises:
            SinkError: the extra is not installed.
            ConfigurationError: the options allow unsafe renames, with which nothing would be fenced.
        """
        try:
            from deltalake import Schema
        except ImportError as error:
            raise SinkError(
                "writing to Delta needs deltalake, which is not installed; nothing was written. "
                "pip install 'kafka-marshal[delta]'"
            ) from error
        table = arguments.an_instance("table", table, (str, os.PathLike), "a path or an URL")
        self._table = arguments.text("table", os.fspath(table), "a path or an URL")
        self._partition_by = arguments.several("partition_by", partition_by, "a list of columns")
        self._storage_options = arguments.a_mapping("storage_options", storage_options)
        for name, value in (*self._storage_options.items(), *os.environ.items()):
            if name.upper() in _UNSAFE and str(value).lower() in ("1", "true", "yes", "on"):
                raise ConfigurationError(
                    f"{name}={value} lets one Delta commit replace another, so that an old writer could not be refused "
                    "and rows could be lost. Nothing was opened. Unset it, and use a store with conditional puts"
                )
        #: As JSON, which can be pickled.
        self._schema: str | None = None
        if schema is not None:
            if not isinstance(schema, Schema) and not hasattr(schema, "__arrow_c_schema__"):
                raise arguments.wrong("schema", "an Arrow schema", schema, "Nothing was opened")
            self._schema = (schema if isinstance(schema, Schema) else Schema.from_arrow(schema)).to_json()

    # What users call.

    @contextmanager
    def transaction(
        self, group_id: str, claims: Iterable[tuple[str, int, int, int]], *, kind: GroupKind = "claimed"
    ) -> Iterator[DeltaTransaction]:
        """One commit over partitions that this writer holds: (topic, partition, epoch, last_offset) each.

        Arguments and promises are those of :meth:`FencedSink.transaction`, but there are no locks: an epoch that is new
        here is committed when the block is entered, and older writers are refused from then on. On leaving the block
        the rows are written, epochs and last offsets checked again, and all committed at once.

        Raises:
            ConfigurationError: in a handler of ``run`` with another order than "partition", or rows of offsets that are
                all stored already. Nothing was written.
            StaleEpochError: one of the partitions has a newer epoch here. Nothing was written; stop working on it.
            LeaseLostError: in a handler of ``run``, whose partition is not proven to be its own any more.
            WrongEpochKindError: it has epochs of the other kind. Nothing was written; see ``convert``.
            SinkError: the table can't be written; ``retry`` says whether trying again makes sense.
        """
        arguments.one_of("kind", kind, KINDS)
        refuse_out_of_order()
        wanted = checked(group_id, claims, kind)
        stored = self._enter(group_id, wanted)
        tx = DeltaTransaction(stored)
        yield tx
        self._store(group_id, wanted, stored, tx._batches)

    def record(self, *_message: object, **_of: object) -> NoReturn:
        """Refused, with the reason: a Delta log has no room for records in any order."""
        raise _no_records("record")

    def records(self, *_messages: object, **_of: object) -> NoReturn:
        """Refused, with the reason: a Delta log has no room for records in any order."""
        raise _no_records("records")

    def progress(self, group_id: str, partitions: Iterable[Key]) -> dict[Key, Written]:
        """(topic, partition) → what is stored for this group, of these partitions; those with nothing are left out.

        (deltalake looks ids up by name and does not list them.) Raises SinkError.
        """
        stored = self._read(self._open(), arguments.text("group_id", group_id), _keys(partitions))
        nothing = Written(-1, -1)
        found = {key: Written.of(each.last_offset, each.epoch) for key, each in stored.items()}
        return {key: each for key, each in found.items() if each != nothing}

    def rewind(
        self,
        group_id: str,
        positions: Mapping[Key, int],
        *,
        epochs: Mapping[Key, int | None] | None = None,
        kind: GroupKind = "claimed",
    ) -> None:
        """After a reposition of the group: take these as last offsets (-1: from the start), back or forward.

        What lies above is written again when it comes again: delete its rows yourself if they would be double.
        ``epochs``, ``kind``, errors: as in :meth:`FencedSink.rewind`. Call it before workers write.
        """
        arguments.offsets("positions", positions, -1)
        arguments.offsets("epochs", epochs or {})
        claims = {key: Claim(*key, tokens_of(epoch, kind), -1) for key, epoch in (epochs or {}).items()}

        def rewound_to(key: Key, stored: Written) -> Written:
            if key in claims:
                [(_, _, epoch)] = rewound(claims[key], group_id, all_keys(stored.epoch))
                stored = Written(stored.last_offset, epoch)
            return Written(positions.get(key, stored.last_offset), stored.epoch)

        self._set(group_id, [*positions, *claims], rewound_to)

    def restore(self, restore: Restore, undo: Undo) -> None:
        """In ``on_restore`` of a group that takes checkpoints: take back what was written beyond the pieces' positions.

        One commit for each piece: ``undo(tx, piece, position, ranges)`` calls ``tx.delete(…)`` for your rows of offsets
        from ``position`` on, except those in ``ranges``. It may be called again, if other commits come first. Promises
        and errors are those of :meth:`FencedSink.restore`.
        """
        pieces = whole_pieces(restore)
        arguments.a_function("undo", undo, "tx, piece, position, ranges")
        for piece in pieces:
            for attempt in range(_ATTEMPTS):
                if self._went_back(piece, undo, attempt):
                    break

    def _went_back(self, piece: RestorePiece, undo: Undo, attempt: int) -> bool:
        """Whether a piece is restored; False: another commit came first. The last attempt raises."""
        group_id, key = piece.group_id, piece.key
        epoch = Claim(*key, tokens_of(piece.epoch, "coordinated"), -1).epoch
        table = self._open()
        stored = self._read(table, group_id, [key])[key]
        refuse_others(group_id, key, epoch, stored.epoch)
        if stored.epoch == epoch:
            return True
        tx = DeltaUndo()
        arguments.a_result("undo", undo(tx, piece, piece.position, piece.ranges))
        after = {key: Written(min(stored.last_offset, piece.position - 1), epoch)}
        properties = _properties(group_id, after)
        if tx._predicates:
            deleted = self._tried(
                lambda: table.delete(" OR ".join(tx._predicates), commit_properties=properties), attempt
            )
            if deleted is None or deleted["num_removed_files"]:
                return deleted is not None
            # Nothing to delete, and so no commit. An append that came meanwhile carries the ids.
            table = self._open()
            if self._read(table, group_id, [key])[key] != stored:
                return self._tried(_raise_late, attempt) is not None
        return self._commit(table, group_id, after, (), attempt)

    def convert(self, group_id: str, kind: GroupKind, partitions: Iterable[Key]) -> None:
        """After ``kafka-marshal convert-group``: only writers of this kind of group may write; last offsets stay.

        Writers of the other kind are refused from now on, at any epoch. Raises SinkError.
        """
        arguments.one_of("kind", kind, KINDS)

        def converted(_key: Key, stored: Written) -> Written:
            return stored if kind_of(stored.epoch) == kind else Written(stored.last_offset, nobody_yet(kind))

        self._set(group_id, partitions, converted)

    def forget(self, group_id: str, partitions: Iterable[Key]) -> None:
        """Reset what is stored for this group, epochs too: for a group that is gone, or a recreated coordination topic.

        (Epochs compare only within one coordination topic, L2.) Raises SinkError.
        """
        self._set(group_id, partitions, lambda _key, _stored: Written(-1, -1))

    # Fencing.

    def _enter(self, group_id: str, wanted: Sequence[Claim]) -> dict[Key, Written]:
        """Refuse if a newer epoch is stored, and commit ours if it is new: older writers end here."""

        def entered(stored: Mapping[Key, Written]) -> dict[Key, Written]:
            for each in wanted:
                refuse_others(group_id, each.key, each.epoch, stored[each.key].epoch)
            return {each.key: Written(stored[each.key].last_offset, each.epoch) for each in wanted}

        return self._change(group_id, [each.key for each in wanted], entered)

    def _store(
        self, group_id: str, wanted: Sequence[Claim], stored: Mapping[Key, Written], batches: Sequence[RecordBatch]
    ) -> None:
        """Commit rows and last offsets, if the table still holds what the block has seen."""
        moved = [each for each in wanted if each.last_offset > stored[each.key].last_offset]
        has_rows = any(batch.num_rows for batch in batches)
        if has_rows and not moved:
            raise ConfigurationError(
                f"{self._name()}: rows were appended, although all offsets of this transaction are in the table "
                f"already: they would be double. {NOTHING_WRITTEN}. Append only what is above tx.last_offset(…)"
            )
        if not moved:
            return
        after = {each.key: Written(max(each.last_offset, stored[each.key].last_offset), each.epoch) for each in wanted}

        def moved_on(now: Mapping[Key, Written]) -> dict[Key, Written]:
            for each in wanted:
                refuse_others(group_id, each.key, each.epoch, now[each.key].epoch)
                if now[each.key] != Written(stored[each.key].last_offset, each.epoch):
                    raise SinkError(
                        f"{self._name()}: what is stored of {each.topic} [{each.partition}] changed while this "
                        f"transaction ran, from last offset {stored[each.key].last_offset} to "
                        f"{now[each.key].last_offset}: by another transaction of this epoch, by rewind() or forget(), "
                        "or by this one, whose answer was lost. It is there as a whole or not at all. Run it again: "
                        "tx.last_offset(…) says what is there.",
                        retry=True,
                    )
            require_held(group_id, after.keys())
            return after

        self._change(group_id, list(after), moved_on, batches if has_rows else (), all_of_it=True)

    def _set(self, group_id: str, partitions: Iterable[Key], change: Callable[[Key, Written], Written]) -> None:
        """Commit other progress for these partitions, also while another writer holds them."""
        arguments.text("group_id", group_id)
        keys = _keys(partitions)
        self._change(group_id, keys, lambda stored: {key: change(key, stored[key]) for key in keys})

    def _change(
        self,
        group_id: str,
        keys: Sequence[Key],
        change: Callable[[Mapping[Key, Written]], Mapping[Key, Written]],
        batches: Sequence[RecordBatch] = (),
        *,
        all_of_it: bool = False,
    ) -> dict[Key, Written]:
        """Commit what ``change`` makes of what is stored, as often as another commit comes first; what was stored.

        all_of_it: commit the progress that stays as it was, too.
        """
        for attempt in range(_ATTEMPTS):
            table = self._open()
            stored = self._read(table, group_id, keys)
            after = {key: each for key, each in change(stored).items() if all_of_it or each != stored[key]}
            if not after or self._commit(table, group_id, after, batches, attempt):
                return stored
        raise AssertionError("the last attempt raises")

    # The table.

    def _open(self) -> DeltaTable:
        """The table as it is now, created if it is absent and its schema is known. Raises SinkError."""
        global _started_in
        from deltalake import DeltaTable, Schema
        from deltalake.exceptions import DeltaError, TableNotFoundError

        if _started_in not in (None, os.getpid()):
            raise SinkError(
                f"{self._name()}: deltalake was used before this process was forked, and does not work after a fork. "
                f'{NOTHING_WRITTEN}. Start processes with multiprocessing.get_context("spawn")'
            )
        _started_in = os.getpid()
        try:
            try:
                table = DeltaTable(self._table, storage_options=self._storage_options or None)
            except TableNotFoundError:
                if self._schema is None:
                    raise
                try:
                    DeltaTable.create(
                        self._table,
                        Schema.from_json(self._schema),
                        mode="ignore",
                        partition_by=self._partition_by or None,
                        storage_options=self._storage_options or None,
                    )
                except DeltaError:
                    # Another writer may have created it at this moment.
                    if not DeltaTable.is_deltatable(self._table, self._storage_options or None):
                        raise
                table = DeltaTable(self._table, storage_options=self._storage_options or None)
        except (DeltaError, OSError) as error:
            raise self._explain(error) from error
        if _EXPIRY in table.metadata().configuration:
            raise SinkError(
                f"{self._name()}: the table has the property {_EXPIRY}, by which Delta forgets last offsets and "
                f"epochs: old rows would be taken again, and old writers not refused. {NOTHING_WRITTEN}. Remove the "
                "property, or use another table"
            )
        return table

    def _read(self, table: DeltaTable, group_id: str, keys: Sequence[Key]) -> dict[Key, Written]:
        """As the table has it: epochs as they are stored."""

        def version(app_id: str) -> int:
            found = table.transaction_version(app_id)
            return -1 if found is None else found

        ids = {key: _app_ids(group_id, key) for key in keys}
        return {key: Written(version(offset_id), version(epoch_id)) for key, (offset_id, epoch_id) in ids.items()}

    def _commit(
        self,
        table: DeltaTable,
        group_id: str,
        progress: Mapping[Key, Written],
        batches: Sequence[RecordBatch],
        attempt: int,
    ) -> bool:
        """Whether it was committed; False: another commit came first, so read and check again. The last one raises."""
        from deltalake import write_deltalake

        properties = _properties(group_id, progress)

        def commit() -> bool:
            if batches:
                write_deltalake(table, batches, mode="append", commit_properties=properties)
            else:
                columns = table.metadata().partition_columns
                table.create_write_transaction([], "append", table.schema(), columns, commit_properties=properties)
            return True

        return self._tried(commit, attempt) is not None

    def _tried(self, commit: Callable[[], T], attempt: int) -> T | None:
        """What a commit returns; None: another one came first, so read and check again. The last attempt raises."""
        from deltalake.exceptions import CommitFailedError

        try:
            return commit()
        except CommitFailedError as error:
            if attempt + 1 == _ATTEMPTS:
                raise self._explain(error) from error
            time.sleep(random.random() * _PAUSE_S)
            return None
        except Exception as error:  # deltalake raises plain ones, too, where rows can't be cast
            raise self._explain(error, is_commit=True) from error

    def _name(self) -> str:
        return f"Delta table {self._table}"

    def _explain(self, error: Exception, is_commit: bool = False) -> SinkError:
        from deltalake.exceptions import CommitFailedError, DeltaProtocolError, SchemaMismatchError, TableNotFoundError

        fate, retry = NOTHING_WRITTEN, False
        match error:
            case CommitFailedError():
                why, retry = f"{_ATTEMPTS} commits in a row came too late", True
                remedy = "Try again; if it persists, use larger batches, so that there are fewer commits"
            case TableNotFoundError():
                why = "there is no such table, or this process may not read it"
                remedy = "Create it, or give the sink its schema"
            case SchemaMismatchError():
                why, remedy = "the rows do not fit the table's columns", "Mend the rows, or change the table first"
            case DeltaProtocolError():
                why = "the table uses features that deltalake does not support"
                remedy = "Upgrade deltalake, or use another table"
            case OSError():
                why, retry = "the storage failed", True
                remedy = "See that it answers, has room, and may be written to; then try again"
                if is_commit:
                    fate = (
                        "Whether this transaction was committed is not known, but it was as a whole or not at all: run "
                        "it again, last_offset() then says"
                    )
            case _:
                why, remedy = "deltalake refused it", "See what it says, and mend the rows or the table"
        text = " ".join(str(error).split()) or type(error).__name__
        return SinkError(f"{self._name()}: {why} ({text}). {fate}. {remedy}.", retry=retry)


def _properties(group_id: str, progress: Mapping[Key, Written]) -> CommitProperties:
    """The ids that a commit carries."""
    from deltalake import CommitProperties, Transaction

    versions = [
        Transaction(app_id, version)
        for key, each in progress.items()
        for app_id, version in zip(_app_ids(group_id, key), (each.last_offset, each.epoch), strict=True)
    ]
    return CommitProperties(app_transactions=versions)


def _raise_late() -> NoReturn:
    from deltalake.exceptions import CommitFailedError

    raise CommitFailedError("rows were appended meanwhile")


def _no_records(form: str) -> ConfigurationError:
    return ConfigurationError(
        f"DeltaSink has no {form}(…): a Delta log keeps one number for each id, never forgets an id and can't list "
        f"ids, so records that end out of order would stay in it for good. {NOTHING_WRITTEN}. Use transaction(…) with "
        "whole partitions in order (batches, or order='partition'). For lanes and key shares: write files, and "
        "register each in a SqliteSink or PostgresSink, as a row in sink.records(batch)"
    )


def _app_ids(group_id: str, key: Key) -> tuple[str, str]:
    """Of the last offset, and of the epoch. A topic has no slash, so that no two partitions share an id."""
    topic, partition = key
    return f"{group_id}/{topic}/{partition}", f"{group_id}/{topic}/{partition}/epoch"


def _keys(partitions: Iterable[Key]) -> list[Key]:
    return sorted(set(arguments.partitions("partitions", partitions)))
