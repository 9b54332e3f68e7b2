"""Every limit of the protocol, by name, with its reason.

A limit here is part of the protocol, not of the configuration: two replicas with different limits would
reject different records and hold different states (E3). So none of them can be set.
"""

from __future__ import annotations

from typing import Final

# -- the value as a whole (E2) ---------------------------------------------------------------------------

#: Bytes of one record value. Kafka's own limit on the topic is twice that (L1), so what is too long is
#: still delivered, and rejected by all alike.
MAX_VALUE_BYTES: Final = 1_048_576

#: Bytes that writers stay below (L1): room for what a broker or a client adds to a batch.
MAX_WRITTEN_BYTES: Final = 900_000

#: Containers within containers, the record itself being the first. Reading never recurses, so this bounds
#: work and not the stack.
MAX_DEPTH: Final = 8

#: Fields in front of each type's own: version, type, instance_id, client_id, group_id (E1).
HEAD_FIELDS: Final = 5

# -- fields (E2) -----------------------------------------------------------------------------------------

#: Kafka's own limit on topic names, counted in UTF-8 bytes.
MAX_TOPIC_BYTES: Final = 249

#: Instance, client and group ids, in UTF-8 bytes: what fits a file name and a metrics label.
MAX_ID_BYTES: Final = 255

#: Kafka's partitions are int32.
MAX_PARTITION: Final = 2**31 - 1

#: Offsets, epochs and times are int64 in Kafka and never negative here.
MAX_OFFSET: Final = 2**63 - 1
MAX_TIME_MS: Final = 2**63 - 1

#: The position below every offset: nothing is done (P2).
NO_RECORD: Final = -1  # in place of a record's offset
NOTHING_DONE: Final = -1

#: Below 100 ms scheduling noise would look like death; above ten minutes a takeover would take too long.
MIN_HEARTBEAT_INTERVAL_MS: Final = 100
MAX_HEARTBEAT_INTERVAL_MS: Final = 600_000

#: A member's id is its group's and a UUID: one dash and 36 characters more than an id.
MAX_MEMBER_ID_BYTES: Final = MAX_ID_BYTES + 37

#: A regular expression that a member subscribes by, in UTF-8 bytes.
MAX_PATTERN_BYTES: Final = 1_000

#: What a member keeps beside its progress (Kafka's own limit is 4,096; a checkpoint's name fits this).
MAX_METADATA_BYTES: Final = 255

#: Topics that one record reports, and partitions of one topic: bound the work of a rebalance.
MAX_TOPICS: Final = 10_000
MAX_PARTITION_COUNT: Final = 100_000

#: Below 100 ms scheduling noise would look like death; the upper end is an int32, and a setting (G19) is below it.
MIN_SESSION_TIMEOUT_MS: Final = 100
MAX_SESSION_TIMEOUT_MS: Final = 2**31 - 1

#: Entries of one CommitOffsets, and topics that `accept_range_fetch` names.
MAX_COMMIT_ENTRIES: Final = 10_000
MAX_SHARED_TOPICS: Final = 100

#: The largest level an Upgrade can name.
MAX_LEVEL: Final = 2**31 - 1

#: Ranges in one CommitRanges: bounds the work of one record.
MAX_COMMIT_RANGES: Final = 10_000

# -- state -----------------------------------------------------------------------------------------------

#: Intervals that one lease may hold after a record (P5): keeps a lease below 1 MB in a snapshot.
MAX_INTERVALS: Final = 60_000

#: Members of one group, and partitions of all topics that the groups of one CP subscribe to (G11): a rebalance takes
#: milliseconds.
MAX_MEMBERS: Final = 1_000
MAX_GROUP_PARTITIONS: Final = 100_000

#: Pieces of done_through that one partition of a coordinated group may have (G15): twice its most members. Of a lease:
#: these, and two for each share (B3), so that sharers cut no more.
MAX_KEY_PIECES: Final = 2_000

#: Log time that a barrier can be open for (X3): below 100 ms no member could answer; an hour is longer than any drain.
MIN_BARRIER_TIMEOUT_MS: Final = 100
MAX_BARRIER_TIMEOUT_MS: Final = 3_600_000

#: Periodic and pinned checkpoints of a group (X1, X9): bound what a rollback looks through.
MAX_KEPT: Final = 64
MAX_PINNED: Final = 16

#: Weight of the versions of one group that only older checkpoints see (X6): some 30 MB in a snapshot.
MAX_OLD_WEIGHT: Final = 1_000_000

#: Offsets from here on are marks, and no message's (P12).
FIRST_MARK: Final = 1 << 62

#: Entries of one SettlingMessages or SettleOffsets, offsets of one entry or take, and of all entries of a record
#: together: bound what one record can touch.
MAX_SETTLED_ENTRIES: Final = 10_000
MAX_SETTLED_OFFSETS: Final = 1_000_000
MAX_SETTLED_TOGETHER: Final = 10_000_000

#: Deliveries that an entry can say a message has had, and bytes of the reason for which it is parked.
MAX_ATTEMPTS: Final = 1_000_000
MAX_REASON_BYTES: Final = 64

#: Holes of one partition (H5): what a handler failed on is to be seen, not to fill the state.
MAX_HOLES: Final = 10_000

#: Holes of a CP from which on clients set no more messages aside, so that its state and snapshots stay small. The log
#: itself has no such limit.
MANY_HOLES: Final = 100_000

#: Key hashes are 0 … MAX_KEY_HASH (P7): xxHash64 less its lowest bit, so that they fit Kafka's int64.
MAX_KEY_HASH: Final = 2**63 - 1

#: A lease is unknown from 1 HI of age on, and stale above this many (C1).
STALE_AFTER_INTERVALS: Final = 2

# -- snapshots (S2) --------------------------------------------------------------------------------------

#: Bytes of a state in one record of the log of snapshots: as L1 for all that is written, less the other fields.
MAX_PART_BYTES: Final = 900_000

#: Parts of one snapshot: bounds what a forged record can claim. Good for a state of 3.6 GB.
MAX_SNAPSHOT_PARTS: Final = 4_096

#: A snapshot is taken where the next offset reaches a multiple of this, or of a multiple of it that is no less than the
#: number of leases: so a replica starts within a fraction of a second, and writing states of some 100 bytes a lease
#: costs less than the log itself, whose records are as long.
SNAPSHOT_INTERVAL: Final = 10_000

#: What a reason begins with if its message is not set aside, but tried at the time that follows (U2).
LATER: Final = "LATER "


def is_later(reason: str) -> bool:
    """Whether this reason is a time: "LATER 2026-11-30T09:20:00Z"."""
    return len(reason) == 26 and reason.startswith(LATER) and reason.endswith("Z")
