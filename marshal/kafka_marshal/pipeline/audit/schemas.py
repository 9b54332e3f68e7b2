"""The tables of an audit: their columns and contents.

Times are log time (T1) in ms, offsets are of the coordination log unless said otherwise, `partition` is the CP.
`topic` and `topic_partition` name the data partition of a lease, `first` and `last` are offsets in it.
"""

from __future__ import annotations

from typing import Final

import pyarrow as pa

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

_LEASE: Final = [("group", pa.string()), ("topic", pa.string()), ("topic_partition", pa.int32())]
_HOLDER: Final = [("client", pa.string()), ("instance", pa.string()), ("epoch", pa.int64())]

TABLES: Final[dict[str, pa.Schema]] = {
    # Every record: `accepted`, `code`, `log_time`, `epoch`, `entries`, `generation`, `member` as in D2. `last_offset`:
    # what it reports as done (for ClaimingMessages, its proposal). Names are null in records too malformed to have any.
    "records": pa.schema(
        [
            ("partition", pa.int32()),
            ("offset", pa.int64()),
            ("timestamp", pa.int64()),
            ("log_time", pa.int64()),
            ("type", pa.string()),
            ("accepted", pa.bool_()),
            ("code", pa.string()),
            ("epoch", pa.int64()),
            ("group", pa.string()),
            ("client", pa.string()),
            ("instance", pa.string()),
            ("topic", pa.string()),
            ("topic_partition", pa.int32()),
            ("last_offset", pa.int64()),
            ("entries", pa.list_(pa.string())),
            ("generation", pa.int64()),
            ("member", pa.string()),
        ]
    ),
    # One row for each tenure of a lease, at the log's offsets from_offset … to_offset − 1. A null from_time: it began
    # before the retained log. `ended`: released, replaced, restarted, forgotten or open.
    "ownership": pa.schema(
        [
            *_LEASE,
            *_HOLDER,
            ("partition", pa.int32()),
            ("from_offset", pa.int64()),
            ("from_time", pa.int64()),
            ("to_offset", pa.int64()),
            ("to_time", pa.int64()),
            ("ended", pa.string()),
        ]
    ),
    # One row for each run of data offsets, `first` … `last`, that a record marked as done, and its sender; each offset
    # is in at most one row unless the position was set back. `what`: done (and all below), range, topic (a mark: P12),
    # granted (at most once), shared (by several members, by key), settled (it had been open), discarded (it was open;
    # by an operator), or repositioned (no first and last; `stable` is the new position). `stable` and `granted`:
    # afterwards, -1 for none. `epoch`: in a coordinated group, the token of the piece.
    "progress": pa.schema(
        [
            *_LEASE,
            *_HOLDER,
            ("partition", pa.int32()),
            ("offset", pa.int64()),
            ("time", pa.int64()),
            ("what", pa.string()),
            ("first", pa.int64()),
            ("last", pa.int64()),
            ("stable", pa.int64()),
            ("granted", pa.int64()),
        ]
    ),
    # Violations; see invariants.py. `holder` is the lease's holder by the log before.
    "violations": pa.schema(
        [
            ("kind", pa.string()),
            ("partition", pa.int32()),
            ("offset", pa.int64()),
            ("time", pa.int64()),
            *_LEASE,
            *_HOLDER,
            ("detail", pa.string()),
        ]
    ),
    # A lease changed holders. `how`: handed over (it was released), replaced (the old holder was silent for more than
    # 2·HI), restarted (C7). silent_ms: since the old holder's last heartbeat; unowned_ms: since its release, null if it
    # was not released or that was before the retained log.
    "takeovers": pa.schema(
        [
            *_LEASE,
            *_HOLDER,
            ("partition", pa.int32()),
            ("time", pa.int64()),
            ("how", pa.string()),
            ("from_client", pa.string()),
            ("from_instance", pa.string()),
            ("silent_ms", pa.int64()),
            ("unowned_ms", pa.int64()),
        ]
    ),
    # One row for each rebalance of a coordinated group (G16). `generation` is its record's offset. `reason`: joined,
    # joined again, restarted, left, died, topics changed, configured, checkpoint or rollback. `client`: sender of the
    # record. `died`: members whose session expired. `members`: after it. `moved`: pieces that changed owner at once.
    # `revoked`: pieces whose owner must release them.
    "generations": pa.schema(
        [
            ("group", pa.string()),
            ("generation", pa.int64()),
            ("partition", pa.int32()),
            ("time", pa.int64()),
            ("reason", pa.string()),
            ("client", pa.string()),
            ("died", pa.list_(pa.string())),
            ("members", pa.int32()),
            ("moved", pa.int32()),
            ("revoked", pa.int32()),
        ]
    ),
    # One row for each tenure of key hashes lo … hi of a partition under one fencing token. from and to as in
    # `ownership`. `ended`: `let go`, left, died, restarted, forgotten or open. unowned_ms: without an owner before,
    # since the last one released them, left, or sent its last heartbeat; null if there was none or it is unknown.
    "assignments": pa.schema(
        [
            *_LEASE,
            ("lo", pa.int64()),
            ("hi", pa.int64()),
            ("client", pa.string()),
            ("instance", pa.string()),
            ("token", pa.int64()),
            ("partition", pa.int32()),
            ("from_offset", pa.int64()),
            ("from_time", pa.int64()),
            ("to_offset", pa.int64()),
            ("to_time", pa.int64()),
            ("ended", pa.string()),
            ("unowned_ms", pa.int64()),
        ]
    ),
    # One row for each share of a lease (B1). lo and hi: its key hashes, null for batches. from and to as in
    # `ownership`. `ended`: released, replaced (silent, and a claim overlapped it), expired (silent, and another sharer
    # took a batch or needed room), forgotten or open. silent_ms: from its last beat to its end, null while it is open.
    "shares": pa.schema(
        [
            *_LEASE,
            *_HOLDER,
            ("lo", pa.int64()),
            ("hi", pa.int64()),
            ("partition", pa.int32()),
            ("from_offset", pa.int64()),
            ("from_time", pa.int64()),
            ("to_offset", pa.int64()),
            ("to_time", pa.int64()),
            ("ended", pa.string()),
            ("silent_ms", pa.int64()),
        ]
    ),
    # One row for each run of messages, first … last, that were open alike (H1), from the record that opened them to the
    # one that closed them. `client`, `instance`: who closed them, or took, opened or parked them last, operators aside;
    # `epoch` is null in coordinated groups. `tries`: as the log has them, before and after redrives. `reason`: of the
    # last park. `ended`: done, discarded (by an operator), granted (at most once), repositioned, forgotten, lost, open.
    "holes": pa.schema(
        [
            *_LEASE,
            ("first", pa.int64()),
            ("last", pa.int64()),
            ("key_hash", pa.int64()),
            *_HOLDER,
            ("partition", pa.int32()),
            ("from_offset", pa.int64()),
            ("from_time", pa.int64()),
            ("to_offset", pa.int64()),
            ("to_time", pa.int64()),
            ("tries", pa.int64()),
            ("parks", pa.int64()),
            ("redrives", pa.int64()),
            ("reason", pa.string()),
            ("ended", pa.string()),
        ]
    ),
    # name: takeover_ms, handover_ms, restart_ms, unowned_ms, tenures, owners (each of one lease); accepted, rejected
    # (each of one CP and code). `count` items of `total` ms in all; the other three describe single items.
    "statistics": pa.schema(
        [
            ("name", pa.string()),
            ("partition", pa.int32()),
            *_LEASE,
            ("code", pa.string()),
            ("count", pa.int64()),
            ("total", pa.int64()),
            ("min", pa.int64()),
            ("median", pa.float64()),
            ("max", pa.int64()),
        ]
    ),
}
