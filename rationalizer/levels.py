"""The levels of the protocol (E4): what each adds to the log, and since which release it can be followed.

A CP starts at the first level, and an Upgrade record raises it. A level that was released never changes: new record
types and new parts of the state belong to a new one. So a member of a new release writes and concludes the same bytes
as an old one for as long as the CP's level is the old one's (S1).
"""

from __future__ import annotations

from typing import Final, NamedTuple


class Level(NamedTuple):
    """One row of the table. `records` and `state` name what the log has since this level, and not before."""

    number: int
    #: What it makes possible, for people.
    adds: str
    #: The first release of kafka-marshal that can follow a log at this level.
    first_release: tuple[int, ...]
    #: Record types by name (`Kind.name`).
    records: tuple[str, ...]
    #: Parts of the canonical state (`state.Part.name`), or one field of an older part: "group.strategy".
    state: tuple[str, ...]


LEVELS: Final = (
    Level(
        1,
        "claimed groups",
        (0,),
        records=(
            *("Heartbeat", "ClaimingPartition", "ReleasingPartition", "ClaimingMessages", "ReleaseGroup"),
            *("HeartbeatBatch", "CommitRanges", "ForgetGroup", "Tick", "Upgrade"),
        ),
        state=("lease", "pause"),
    ),
    Level(
        2,
        "coordinated groups",
        (0, 1),
        records=("JoinGroup", "GroupHeartbeat", "LeaveGroup", "CommitOffsets", "TopicsChanged", "ConfigureGroup"),
        state=("group", "settings", "member", "partition", "progress"),
    ),
    Level(
        3,
        "checkpoints",
        (0, 2),
        records=("BeginCheckpoint", "AnswerBarrier", "Rollback", "KeepCheckpoint"),
        state=("group.checkpoints", "checkpoints", "barrier", "dated", "version"),
    ),
    Level(
        4,
        "open messages, shared partitions",
        (0, 3),
        records=("ClaimingShare", "SettlingMessages", "SettleOffsets"),
        state=("lease.shares", "lease.holes", "progress.holes", "share", "hole"),
    ),
    Level(
        5,
        "done messages again, a strategy of the group",
        (0, 4),
        records=(),
        state=("lease.again", "progress.again", "settings.strategy"),
    ),
)

#: The level every CP starts at.
FIRST_LEVEL: Final = LEVELS[0].number

#: The highest level this release can replay. An Upgrade above it stops the replica before that record.
SUPPORTED_LEVEL: Final = LEVELS[-1].number

_BY_RECORD: Final = {name: level.number for level in LEVELS for name in level.records}
_BY_STATE: Final = {name: level.number for level in LEVELS for name in level.state}


def level_of_record(name: str) -> int:
    """The level that added this record type. KeyError: no level lists it."""
    return _BY_RECORD[name]


def level_of_state(part: str, field: str = "") -> int:
    """The level that added this field of the state: its own, or that of the part. KeyError: no level lists the part."""
    return _BY_STATE.get(f"{part}.{field}", _BY_STATE[part])


#: Coordinated groups came with this level.
GROUPS_LEVEL: Final = level_of_record("JoinGroup")

#: Checkpoints of a group came with this level.
CHECKPOINTS_LEVEL: Final = level_of_record("BeginCheckpoint")

#: Holes and shares came with this level.
SHARING_LEVEL: Final = level_of_record("SettlingMessages")

#: What is done can be opened again, and a group's strategy set, since this level, by records of this version (R2, R5).
REDO_LEVEL: Final = level_of_state("lease", "again")


def can_follow(release: tuple[int, ...], level: int) -> bool:
    """Whether a release (its numbers) can follow a log at this level; False for a level that is not in the table."""
    return any(each.number == level and release >= each.first_release for each in LEVELS)


def added_above(level: int) -> str:
    """What the levels above this one add, for people: "coordinated groups, checkpoints"."""
    return ", ".join(each.adds for each in LEVELS if each.number > level)
