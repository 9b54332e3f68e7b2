"""The pure core of kafka-marshal: what every reader concludes from the coordination log.

No Kafka, clock, randomness, threads, logging or environment: a worker, a test, a notebook and a Spark
executor that replay the same prefix of a CP hold the same state, byte for byte.

    levels              what each level of the protocol adds, and since which release (E4)
    limits, codes       what the protocol fixes: every limit, every outcome
    wire/               what can be appended: records, what is well formed, bytes and back (section 2)
    marker, routing     how many CPs there are (L2), which one a record belongs to (L3)
    intervals, progress what of a partition is done (section 4)
    leases/             the partition plane: leases, and the records about them (section 3)
    groups/             the group plane: coordinated groups with generations (sections 5 and 6)
    plane               the seam between a log and its state machines
    world               the state of one CP, its planes, and the replay that changes it (sections 1-4)
    state               each field of the state: its place in the canonical bytes and in JSON
    snapshot, dump      canonical state and digest (S1); dumps and their replay (section 9)
    snapshot_log        the records of the log of snapshots (S2)
    later               imports the names of a package at their first use
"""

from typing import TYPE_CHECKING

from rationalizer.later import later

if TYPE_CHECKING:
    from rationalizer.groups.group import Group, Member, Settings
    from rationalizer.groups.pieces import Piece
    from rationalizer.leases.lease import Lease
    from rationalizer.outcome import Outcome
    from rationalizer.plane import PausedGroup
    from rationalizer.progress import Progress
    from rationalizer.routing import key_hash, route_group, route_lease
    from rationalizer.state import SnapshotError
    from rationalizer.wire.codec import (
        MalformedError,
        RejectedValueError,
        UnknownTypeError,
        UnsupportedVersionError,
        decode,
        encode,
    )
    from rationalizer.wire.records import (
        AnswerBarrier,
        BeatEntry,
        BeginCheckpoint,
        ClaimingMessages,
        ClaimingPartition,
        ClaimingShare,
        CommitEntry,
        CommitOffsets,
        CommitRanges,
        ConfigureGroup,
        ForgetGroup,
        GroupHeartbeat,
        Heartbeat,
        HeartbeatBatch,
        InvalidRecordError,
        JoinGroup,
        KeepCheckpoint,
        LeaveGroup,
        Record,
        ReleaseGroup,
        ReleasingPartition,
        Rollback,
        SettleOffsets,
        SettlingMessages,
        Tick,
        TopicsChanged,
        Upgrade,
    )
    from rationalizer.world import World

__all__ = [
    # replaying
    "World",
    "Outcome",
    "Lease",
    "Group",
    "Member",
    "Piece",
    "Settings",
    "PausedGroup",
    "Progress",
    # records
    "Record",
    "Heartbeat",
    "ClaimingPartition",
    "ReleasingPartition",
    "ClaimingMessages",
    "ReleaseGroup",
    "HeartbeatBatch",
    "BeatEntry",
    "CommitRanges",
    "ForgetGroup",
    "JoinGroup",
    "GroupHeartbeat",
    "LeaveGroup",
    "CommitOffsets",
    "CommitEntry",
    "TopicsChanged",
    "ConfigureGroup",
    "BeginCheckpoint",
    "AnswerBarrier",
    "Rollback",
    "KeepCheckpoint",
    "ClaimingShare",
    "SettlingMessages",
    "SettleOffsets",
    "Tick",
    "Upgrade",
    # bytes and places
    "encode",
    "decode",
    "route_lease",
    "route_group",
    "key_hash",
    # errors
    "InvalidRecordError",
    "RejectedValueError",
    "MalformedError",
    "UnsupportedVersionError",
    "UnknownTypeError",
    "SnapshotError",
]

#: Module → what of it is here; imported at its first use.
_LATER = {
    "groups.group": "Group Member Settings",
    "groups.pieces": "Piece",
    "leases.lease": "Lease",
    "outcome": "Outcome",
    "plane": "PausedGroup",
    "progress": "Progress",
    "routing": "key_hash route_group route_lease",
    "state": "SnapshotError",
    "wire.codec": "MalformedError RejectedValueError UnknownTypeError UnsupportedVersionError decode encode",
    "wire.records": (
        "AnswerBarrier BeatEntry BeginCheckpoint ClaimingMessages ClaimingPartition ClaimingShare CommitEntry "
        "CommitOffsets CommitRanges ConfigureGroup ForgetGroup GroupHeartbeat Heartbeat HeartbeatBatch "
        "InvalidRecordError JoinGroup KeepCheckpoint LeaveGroup Record ReleaseGroup ReleasingPartition Rollback "
        "SettleOffsets SettlingMessages Tick TopicsChanged Upgrade"
    ),
    "world": "World",
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = later(__name__, _LATER)
