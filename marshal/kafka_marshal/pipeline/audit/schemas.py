"""The tables that an audit writes: their columns, and what stands in them.

Times are log time (T1) in ms, offsets without a further word are those of the coordination log, `partition` is the CP.
`topic` and `topic_partition` name the data partition that a lease is about, `first` and `last` offsets in it.
"""

from __future__ import annotations

from typing import Final

import pyarrow as pa

__all__ = ["LOG", "TABLES", "Row"]

#: A row before it is written: the values of its columns but `partition`, which a file has only one of.
Row = tuple[object, ...]

#: The log itself, as the audit keeps it: as in a dump (D1).
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
    # what it says is done (its proposal, for ClaimingMessages). Names are null where the record was too malformed to
    # have any.
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
    # One row for each time that somebody held a lease. It held at the log's offsets from_offset … to_offset − 1. A null
    # from_time: it began before the log that is left. `ended`: released, replaced, restarted, forgotten or open.
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
    # One row for each run of data offsets, `first` … `last`, that a record made done, by whom; every offset in one row
    # at most, unless the position was set back. `what`: done (all below too), range, topic (a mark: P12), granted (at
    # most once), shared (by several members of a coordinated group, by key), or repositioned (no first and last;
    # `stable` says where to). `stable` and `granted` as they are afterwards, -1: none. `epoch` is the token of the
    # piece in a coordinated group.
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
    # What must not be; see invariants.py. `holder` is who held the lease by what the log said before.
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
    # A lease came to a new holder that had one before. `how`: handed over (it was released), replaced (the old holder
    # was silent for more than 2·HI), restarted (C7). silent_ms: since the old one's last beat; unowned_ms: since its
    # release, null where it was not released or that was before the log that is left.
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
    # joined again, restarted, left, died, topics changed or configured; `client` sent the record, `died`: those that
    # were found silent for too long. `members`: after it; `moved`: pieces that came to another owner at once,
    # `revoked`: pieces whose owner was told to let go.
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
    # One row for each time that a member owned key hashes lo … hi of a partition under one fencing token. from and to
    # as in `ownership`. `ended`: let go, left, died, restarted, forgotten or open. unowned_ms: how long nobody had them
    # before: since the last owner let go, left, or was last heard of; null where nobody ever had, or it is not known.
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
    # name: takeover_ms, handover_ms, restart_ms, unowned_ms, tenures, owners (each of one lease); accepted, rejected
    # (each of one CP and code). `count` things, in all `total` ms; the other three are of one of them.
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
