"""The tables of an audit, and its Parquet files: the log in pieces that can be read independently, and the tables.

Executors read and write these files with Arrow. Through the JVM a record would be copied several times, which costs
more than replaying it: as measured, one process was then faster than two executors.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from kafka_marshal.errors import AuditError
from rationalizer.dump import DumpHeader

#: A row before it is written: its values except `partition`, which is the same in all of a file.
Row = tuple[object, ...]

#: The log itself, with the columns of a dump (D1).
LOG: Final = pa.schema(
    [
        pa.field("partition", pa.int32(), nullable=False),
        pa.field("offset", pa.int64(), nullable=False),
        pa.field("timestamp", pa.int64(), nullable=False),
        pa.field("value", pa.binary()),
    ]
)

_TYPES: Final = {
    "boolean": pa.bool_(),
    "double": pa.float64(),
    "int": pa.int32(),
    "long": pa.int64(),
    "string": pa.string(),
    "strings": pa.list_(pa.string()),
}


def _columns(text: str) -> pa.Schema:
    """The columns of a table, each with the name of its type."""
    return pa.schema([(name, _TYPES[kind]) for name, kind in map(str.split, text.split(","))])


_LEASE: Final = "group string, topic string, topic_partition int"
_HOLDER: Final = "client string, instance string, epoch long"
_SPAN: Final = "from_offset long, from_time long, to_offset long, to_time long"

TABLES: Final[dict[str, pa.Schema]] = {
    # Every record: `accepted`, `code`, `log_time`, `epoch`, `entries`, `generation`, `member` as in D2. `last_offset`:
    # what it reports as done (for ClaimingMessages, its proposal). Names are null in records too malformed to have any.
    "records": _columns(
        "partition int, offset long, timestamp long, log_time long, type string, accepted boolean, code string, "
        "epoch long, group string, client string, instance string, topic string, topic_partition int, "
        "last_offset long, entries strings, generation long, member string"
    ),
    # One row for each tenure of a lease, at the log's offsets from_offset … to_offset − 1. A null from_time: it began
    # before the retained log. `ended`: released, replaced, restarted, forgotten or open.
    "ownership": _columns(f"{_LEASE}, {_HOLDER}, partition int, {_SPAN}, ended string"),
    # One row for each run of data offsets, `first` … `last`, that a record marked as done, and its sender; each offset
    # is in at most one row unless the position was set back. `what`: done (and all below), range, topic (a mark: P12),
    # granted (at most once), shared (by several members, by key), settled (it had been open), discarded (it was open;
    # by an operator), or repositioned (no first and last; `stable` is the new position). `stable` and `granted`:
    # afterwards, -1 for none. `epoch`: in a coordinated group, the token of the piece.
    "progress": _columns(
        f"{_LEASE}, {_HOLDER}, partition int, offset long, time long, what string, first long, last long, "
        "stable long, granted long"
    ),
    # Violations; see invariants.py. `holder` is the lease's holder by the log before.
    "violations": _columns(f"kind string, partition int, offset long, time long, {_LEASE}, {_HOLDER}, detail string"),
    # A lease changed holders. `how`: handed over (it was released), replaced (the old holder was silent for more than
    # 2·HI), restarted (C7). silent_ms: since the old holder's last heartbeat; unowned_ms: since its release, null if it
    # was not released or that was before the retained log.
    "takeovers": _columns(
        f"{_LEASE}, {_HOLDER}, partition int, time long, how string, from_client string, "
        "from_instance string, silent_ms long, unowned_ms long"
    ),
    # One row for each rebalance of a coordinated group (G16). `generation` is its record's offset. `reason`: joined,
    # joined again, restarted, left, died, topics changed, configured, checkpoint or rollback. `client`: sender of the
    # record. `died`: members whose session expired. `members`: after it. `moved`: pieces that changed owner at once.
    # `revoked`: pieces whose owner must release them.
    "generations": _columns(
        "group string, generation long, partition int, time long, reason string, client string, "
        "died strings, members int, moved int, revoked int"
    ),
    # One row for each tenure of key hashes lo … hi of a partition under one fencing token. from and to as in
    # `ownership`. `ended`: `let go`, left, died, restarted, forgotten or open. unowned_ms: without an owner before,
    # since the last one released them, left, or sent its last heartbeat; null if there was none or it is unknown.
    "assignments": _columns(
        f"{_LEASE}, lo long, hi long, client string, instance string, token long, partition int, {_SPAN}, "
        "ended string, unowned_ms long"
    ),
    # One row for each share of a lease (B1). lo and hi: its key hashes, null for batches. from and to as in
    # `ownership`. `ended`: released, replaced (silent, and a claim overlapped it), expired (silent, and another sharer
    # took a batch or needed room), forgotten or open. silent_ms: from its last beat to its end, null while it is open.
    "shares": _columns(f"{_LEASE}, {_HOLDER}, lo long, hi long, partition int, {_SPAN}, ended string, silent_ms long"),
    # One row for each run of messages, first … last, that were open alike (H1), from the record that opened them to the
    # one that closed them. `client`, `instance`: who closed them, or took, opened or parked them last, operators aside;
    # `epoch` is null in coordinated groups. `tries`: as the log has them, before and after redrives. `reason`: of the
    # last park. `redone_by`: the operator who opened what was done (R2). `ended`: done, discarded (by an
    # operator), granted (at most once), repositioned, forgotten, lost, open.
    "holes": _columns(
        f"{_LEASE}, first long, last long, key_hash long, {_HOLDER}, partition int, {_SPAN}, tries long, "
        "parks long, redrives long, redone_by string, reason string, ended string"
    ),
    # name: takeover_ms, handover_ms, restart_ms, unowned_ms, tenures, owners (each of one lease); accepted, rejected
    # (each of one CP and code). `count` items of `total` ms in all; the other three describe single items.
    "statistics": _columns(
        f"name string, partition int, {_LEASE}, code string, count long, total long, min long, median double, max long"
    ),
}

#: `how` of a takeover → the name of its statistic, and the column with how long it took.
TAKEOVERS: Final = {
    "replaced": ("takeover_ms", "silent_ms"),
    "handed over": ("handover_ms", "unowned_ms"),
    "restarted": ("restart_ms", "silent_ms"),
}


def table_at(folder: Path, name: str) -> Any:
    """A table's files as a pyarrow dataset."""
    return ds.dataset(folder, format="parquet", schema=TABLES[name])


#: Rows of a row group of the log: a task of modest memory can hold several.
_GROUP_ROWS: Final = 65_536
_GROUP_BYTES: Final = 8 * 1024 * 1024

#: Rows read from a row group at once.
_BATCH_ROWS: Final = 16_384

#: Metadata of files that we wrote: their records are in order; holds the fields of a dump's header.
_TOPIC: Final = b"kafka_marshal.topic"
_PARTITIONS: Final = b"kafka_marshal.partitions"


class LogWriter:
    """Writes the records of one CP, in order of their offsets, to one Parquet file."""

    def __init__(self, path: Path, partition: int, header: DumpHeader) -> None:
        self.path = path
        self._partition = partition
        schema = LOG.with_metadata({_TOPIC: header.topic, _PARTITIONS: str(header.partitions)})
        self._writer = pq.ParquetWriter(path, schema, compression="snappy", use_dictionary=["partition"])
        self._offsets: list[int] = []
        self._stamps: list[int] = []
        self._values: list[bytes | None] = []
        self._bytes = 0

    def add(self, offset: int, timestamp_ms: int, value: bytes | None) -> None:
        """One record."""
        self._offsets.append(offset)
        self._stamps.append(timestamp_ms)
        self._values.append(value)
        self._bytes += len(value or b"")
        if len(self._offsets) >= _GROUP_ROWS or self._bytes >= _GROUP_BYTES:
            self._write()

    def close(self) -> None:
        """The file is complete."""
        if self._offsets:
            self._write()
        self._writer.close()

    def _write(self) -> None:
        arrays = [
            pa.repeat(pa.scalar(self._partition, pa.int32()), len(self._offsets)),
            pa.array(self._offsets, pa.int64()),
            pa.array(self._stamps, pa.int64()),
            pa.array(self._values, pa.binary()),
        ]
        self._writer.write_batch(pa.record_batch(arrays, schema=self._writer.schema), row_group_size=_GROUP_ROWS)
        self._offsets.clear()
        self._stamps.clear()
        self._values.clear()
        self._bytes = 0


@dataclass(frozen=True, slots=True)
class LogPiece:
    """A row group of one CP's records, ascending; the offsets are of its first and last record."""

    path: str
    row_group: int
    partition: int
    first: int
    last: int
    rows: int
    bytes: int


def header_of(path: Path) -> DumpHeader | None:
    """The header in a file that a LogWriter wrote; None for any other Parquet file."""
    metadata = pq.read_schema(path).metadata or {}
    if _TOPIC not in metadata or _PARTITIONS not in metadata:
        return None
    return DumpHeader(metadata[_TOPIC].decode(), int(metadata[_PARTITIONS]))


def has_statistics(path: Path) -> bool:
    """Whether `pieces_of` can read its contents from statistics."""
    metadata = pq.read_metadata(path)
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    columns = [group.column(i) for group in groups if group.num_rows for i in range(metadata.num_columns)]
    return all(
        column.statistics is not None and column.statistics.has_min_max
        for column in columns
        if column.path_in_schema in ("partition", "offset")
    )


def pieces_of(paths: Iterable[Path]) -> Iterator[LogPiece]:
    """The pieces of files in which each row group is of one CP and ascends, by their statistics alone."""
    for path in paths:
        metadata = pq.read_metadata(path)
        columns = {metadata.schema.column(i).name: i for i in range(metadata.num_columns)}
        for number in range(metadata.num_row_groups):
            group = metadata.row_group(number)
            if group.num_rows:
                cp = group.column(columns["partition"]).statistics
                offset = group.column(columns["offset"]).statistics
                size = group.column(columns["value"]).total_uncompressed_size
                yield LogPiece(str(path), number, cp.min, offset.min, offset.max, group.num_rows, size)


Run = tuple[list[int], list[int], list[bytes | None]]


def read_pieces(pieces: Sequence[LogPiece], first: int, end: int | None) -> Iterator[Run]:
    """The records with first <= offset < end, in batches of (offsets, timestamps, values)."""
    for piece in pieces:
        if piece.last < first or (end is not None and piece.first >= end):
            continue
        rows = max(1, min(_BATCH_ROWS, _BATCH_ROWS * _GROUP_BYTES // (4 * max(1, piece.bytes))))
        with pq.ParquetFile(piece.path) as file:
            columns = ["offset", "timestamp", "value"]
            for batch in file.iter_batches(rows, row_groups=[piece.row_group], columns=columns, use_threads=False):
                offsets = batch.column(0).to_numpy()
                low = 0 if piece.first >= first else int(offsets.searchsorted(first))
                high = len(offsets) if end is None or piece.last < end else int(offsets.searchsorted(end))
                if low < high:
                    batch = batch.slice(low, high - low)
                    yield (
                        offsets[low:high].tolist(),
                        batch.column(1).to_numpy().tolist(),
                        batch.column(2).to_numpy(zero_copy_only=False).tolist(),
                    )


class TableFiles:
    """One writer's share of the tables: at most one file in each folder, which counts once it has its final name.

    A task may be tried twice, even at the same time, and one of them ends without a result: so names are unique, and
    only files that a successful task reported become part of the tables.
    """

    def __init__(self, out: Path, name: str, partition: int | None) -> None:
        self._out = out
        self._name = f"{name}-{uuid.uuid4().hex}"
        self._partition = partition
        self._writers: dict[str, pq.ParquetWriter] = {}

    def write(self, table: str, rows: list[Row]) -> None:
        """Write rows, without `partition` if this writer is of one CP."""
        schema = TABLES[table]
        columns: list[Any] = [list(column) for column in zip(*rows, strict=True)] or [[] for _ in schema]
        place = schema.get_field_index("partition")
        arrays = []
        if self._partition is not None:
            columns.insert(place, None)
        for field, column in zip(schema, columns, strict=True):
            if column is None:
                arrays.append(pa.repeat(pa.scalar(self._partition, pa.int32()), len(rows)))
            else:
                arrays.append(pa.array(column, field.type))
        self._writer(table).write_batch(pa.record_batch(arrays, schema=schema))

    def _writer(self, table: str) -> pq.ParquetWriter:
        writer = self._writers.get(table)
        if writer is None:
            folder = self._out / table
            folder.mkdir(parents=True, exist_ok=True)
            # Spark and pyarrow skip names that begin with an underscore.
            writer = pq.ParquetWriter(folder / f"_{self._name}.parquet", TABLES[table], compression="snappy")
            self._writers[table] = writer
        return writer

    def close(self) -> list[str]:
        """Complete the files; returns their paths below the folder of the tables."""
        found = []
        for table, writer in self._writers.items():
            writer.close()
            name = f"{table}/{self._name}.parquet"
            os.replace(self._out / table / f"_{self._name}.parquet", self._out / name)
            found.append(name)
        self._writers.clear()
        return found

    def drop(self) -> None:
        """Remove what was written so far."""
        for table, writer in self._writers.items():
            with contextlib.suppress(OSError):
                writer.close()
            (self._out / table / f"_{self._name}.parquet").unlink(missing_ok=True)
        self._writers.clear()


def refuse_unsorted(pieces: Sequence[LogPiece]) -> None:
    """Raise AuditError if pieces of one CP overlap: their writer did not keep the log's order."""
    for before, after in itertools.pairwise(pieces):
        if before.partition == after.partition and before.last >= after.first:
            raise AuditError(
                f"{after.path}: offset {after.first} of partition {after.partition} is also in {before.path}. "
                "Nothing was concluded. Give files that hold each record of the log once."
            )
