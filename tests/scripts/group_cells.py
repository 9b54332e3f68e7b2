"""The cell of a record in the group plane's table of transitions, its outcome there, and its moves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from rationalizer import ConfigureGroup, JoinGroup, Outcome, Record, World
from rationalizer.groups.group import Group, Member
from rationalizer.levels import SUPPORTED_LEVEL
from rationalizer.routing import route_group
from rationalizer.state import GROUP
from rationalizer.wire.wellformed import REACHED_AND_LEAVES
from tests.tables.groups import (
    CHECKPOINT_TRANSITIONS,
    SETTLE_TRANSITIONS,
    TRANSITIONS,
    CheckpointTransition,
    Effect,
    Ending,
    SettleTransition,
    Transition,
    Who,
)

OF_MEMBERS = ("JoinGroup", "GroupHeartbeat", "LeaveGroup", "TopicsChanged", "CommitOffsets", "SettleOffsets")
LARGE = 1_000
ROWS = {(row.record, row.who): row for row in TRANSITIONS}
CHECKPOINT_ROWS = {(row.record, row.who): row for row in CHECKPOINT_TRANSITIONS}
SETTLE_ROWS = {(row.record, row.who): row for row in SETTLE_TRANSITIONS}


class GroupCell(NamedTuple):
    """A row of the table, and the name of a column."""

    row: Transition
    column: str


GroupCellMet = tuple[Transition, str, Ending]


class CheckpointCell(NamedTuple):
    """A row of the table of checkpoints, and the name of a column."""

    row: CheckpointTransition
    column: str


CheckpointCellMet = tuple[CheckpointTransition, str, Ending]


class SettleCell(NamedTuple):
    """A row of the table of what settles, and the name of a column."""

    row: SettleTransition
    column: str


SettleCellMet = tuple[SettleTransition, str, Ending]


@dataclass(frozen=True)
class Seen:
    """The visible state of a group before or after a record."""

    state: str
    generation: int | None
    #: What members agreed on: strategy, and the topics' counts.
    strategy: str | None
    counts: Mapping[str, int]
    #: By slot: client, instance, and all that a join says of it.
    members: Mapping[int, tuple[str, str, tuple[object, ...]]]
    #: All of it, unless it is large.
    everything: tuple[object, ...] | None
    #: Whether it takes checkpoints, and the open barrier.
    takes: bool = False
    barrier: int | None = None

    @classmethod
    def of(cls, world: World, group_id: str, log_time: int) -> Seen:
        """The group as this world has it, judged at a log time."""
        group = world.group(group_id)
        if group is None:
            return cls("", None, None, {}, {}, None)
        members = {
            slot: (
                *(each.client_id, each.instance_id),
                (each.session_timeout_ms, each.allow_key_share, each.pattern, each.topics),
            )
            for slot, each in group.members.items()
        }
        # In the form of one level: that an Upgrade changes the form is no change.
        everything = tuple(GROUP.row(group, SUPPORTED_LEVEL)) if group.weight < LARGE else None
        state = group.state(log_time)
        checkpoints = group.checkpoints
        barrier = None if checkpoints is None or checkpoints.barrier is None else checkpoints.barrier.id
        taken = (checkpoints is not None, barrier)
        return cls(state, group.generation, group.strategy, dict(group.counts), members, everything, *taken)


def codes_of(cell: GroupCell | CheckpointCell | SettleCell) -> set[str]:
    """What a record can end with in it; all other codes are of checks that the table leaves out."""
    return {ending.code for ending in getattr(cell.row, cell.column)}


def cell_of(world: World, record: Record, log_time: int) -> GroupCell | None:
    """Where the table has this record; None where the group is at home elsewhere, or of the other kind."""
    group_id, name = record.group_id, type(record).__name__
    who, group, column = _who(record, name, _is_pausing(world, record, log_time)), world.group(group_id), "unknown"
    if (name, who) not in ROWS or not _is_here(world, group_id):
        return None
    if group is not None:
        column = _column(group, record, name, who, log_time)
    return GroupCell(ROWS[name, who], column)


def checkpoint_cell_of(world: World, record: Record, log_time: int) -> CheckpointCell | None:
    """Where the table of checkpoints has this record; None where another table says."""
    name, group = type(record).__name__, world.group(record.group_id)
    row = CHECKPOINT_ROWS.get((name, _who(record, name, _is_pausing(world, record, log_time))))
    if row is None or not _is_here(world, record.group_id):
        return None
    column = "unknown"
    if group is not None:
        column = "none" if group.checkpoints is None else "some" if group.checkpoints.barrier is None else "open"
    if column == "open" and group is not None and _closes(group, record, name, log_time):
        column = "some"
    return CheckpointCell(row, column) if getattr(row, column) else None


def settle_cell_of(world: World, record: Record, log_time: int) -> SettleCell | None:
    """Where the table of what settles has this record; None where another table says."""
    name, group = type(record).__name__, world.group(record.group_id)
    who = _who(record, name, _is_pausing(world, record, log_time))
    row = SETTLE_ROWS.get((name, who))
    if row is None or not _is_here(world, record.group_id):
        return None
    if group is None:
        return SettleCell(row, "unknown")
    column = "dated" if group.checkpoints is not None else _column(group, record, name, who, log_time)
    return SettleCell(row, column)


def _closes(group: Group, record: Record, name: str, log_time: int) -> bool:
    """X3: the barrier is closed before the record is judged."""
    checkpoints = group.checkpoints
    if name not in ("AnswerBarrier", "CommitOffsets") or checkpoints is None or checkpoints.barrier is None:
        return False
    sender, late = None, {slot for slot, each in group.members.items() if each.is_overdue(log_time)}
    if record.own_fields()[0]:
        sender = group.sender(str(record.own_fields()[0]), record.client_id, record.instance_id)
        if sender is None:
            return False
    elif len(late) < len(group.members):
        late = set()
    if sender is not None:
        late = set() if len(late) == len(group.members) else late - {sender.slot}
    owners = {piece.owner for each in group.assigned() for piece in each.pieces}
    return log_time - checkpoints.barrier.opened > checkpoints.barrier.timeout_ms or bool(owners & late)


def _has_left(group: Group, record: Record, name: str, log_time: int, sender: Member) -> bool:
    """X3, X6 (4): it answered that it leaves, and the barrier is closed, and complete, before its record is judged."""
    checkpoints = group.checkpoints
    if name != "JoinGroup" or checkpoints is None or checkpoints.hold or checkpoints.barrier is None:
        return False
    answer = checkpoints.barrier.answers.get(sender.slot)
    owns = any(piece.owner == sender.slot for each in group.assigned() for piece in each.pieces)
    return (
        answer is not None and answer.answer == REACHED_AND_LEAVES and owns and sender.instance_id != record.instance_id
    )


def _is_here(world: World, group_id: str) -> bool:
    elsewhere = route_group(group_id, world.partitions) != world.partition
    return not elsewhere and all(lease.group_id != group_id for lease in world.leases())


def _is_pausing(world: World, record: Record, log_time: int) -> bool:
    pause = world.pause(record.group_id)
    return pause is not None and pause.client_id == record.client_id and log_time < pause.expires


def _who(record: Record, name: str, pausing: bool) -> Who:
    if name == "ForgetGroup":
        return Who.PAUSING if pausing else Who.NOT_PAUSING
    if name not in ("JoinGroup", "CommitOffsets", "SettleOffsets"):
        return Who.ANYONE
    if record.own_fields()[0]:
        return Who.WITH_ID
    return Who.PAUSING if name != "JoinGroup" and pausing else Who.WITHOUT_ID


def _column(group: Group, record: Record, name: str, who: Who, log_time: int) -> str:
    sender = _sender(group, record, who) if name in OF_MEMBERS else None
    if sender is not None and not _has_left(group, record, name, log_time, sender):
        return "member"
    buries = name in ("JoinGroup", "ForgetGroup") or (name == "CommitOffsets" and who is Who.PAUSING)
    left = [each for each in group.members.values() if not (buries and each.is_overdue(log_time))]
    return "stranger" if left else "ready"


def _sender(group: Group, record: Record, who: Who) -> Member | None:
    if isinstance(record, JoinGroup) and who is Who.WITHOUT_ID:
        return group.clients.get(record.client_id)
    return group.sender(str(record.own_fields()[0]), record.client_id, record.instance_id)


def ending_of(record: Record, before: Seen, after: Seen, outcome: Outcome, offset: int) -> Ending:
    """How the record ended, by what has changed."""
    if not outcome.accepted:
        assert before.everything == after.everything, "a record that was rejected changed the group"
        return Ending(outcome.code, False, Effect.NOTHING)
    return Ending(outcome.code, True, _effect(record, before, after, offset, outcome.code))


def _effect(record: Record, before: Seen, after: Seen, offset: int, outcome_code: str) -> Effect:
    made, rebalanced = before.generation is None, after.generation == offset
    match type(record).__name__:
        case "JoinGroup" if offset in after.members:
            return Effect.MADE_AND_JOINED if made else Effect.JOINED
        case "JoinGroup":
            [slot] = [slot for slot, (client, _, _) in after.members.items() if client == record.client_id]
            if before.members[slot][1] != after.members[slot][1]:
                return Effect.REPLACED
            grown = any(count > before.counts.get(topic, -1) for topic, count in after.counts.items())
            others = (before.strategy, before.members[slot]) != (after.strategy, after.members[slot])
            return Effect.JOINED_AGAIN if rebalanced and (grown or others) else Effect.BEAT
        case "LeaveGroup" if all(client != record.client_id for client, _, _ in after.members.values()):
            return Effect.LEFT
        case "TopicsChanged":
            return Effect.NEW_TOPICS if rebalanced else Effect.BEAT
        case "GroupHeartbeat":
            return Effect.BEAT
        case "CommitOffsets" if not record.own_fields()[0]:
            return Effect.MADE_AND_REPOSITIONED if made else Effect.REPOSITIONED
        case "CommitOffsets":
            return Effect.COMMITTED
        case "ConfigureGroup" if isinstance(record, ConfigureGroup):
            if made:
                return Effect.MADE
            return Effect.CHANGED_TARGETS if rebalanced else Effect.CHANGED
        case "ForgetGroup" if after.generation is None and not made:
            return Effect.FORGOTTEN
        case "ReleaseGroup":
            return Effect.PAUSED
        case "SettleOffsets":
            return Effect.SETTLED if record.own_fields()[0] else Effect.SETTLED_BY_OPERATOR
        case "BeginCheckpoint" if not before.takes:
            return Effect.FIRST
        case "BeginCheckpoint":
            return Effect.OPENED if after.barrier == offset else Effect.COMPLETED
        case "AnswerBarrier" if outcome_code != "OK":
            return Effect.BEAT
        case "AnswerBarrier":
            return Effect.CLOSED if after.barrier is None else Effect.NOTED
        case "Rollback":
            return Effect.WENT_BACK
        case "KeepCheckpoint":
            return Effect.KEPT if after.takes else Effect.ENDED
        case _:
            return Effect.NOTHING if before.everything == after.everything else Effect.CHANGED


def moves_of(earlier: str, before: Seen, after: Seen) -> list[tuple[str, str]]:
    """The moves that a record makes: first by its log time (from the state `earlier`), then by what it says."""
    rebalanced = after.generation is not None and before.generation != after.generation and after.generation > 0
    path = [earlier, before.state, *(["REBALANCING"] if rebalanced else []), after.state]
    return [(one, other) for one, other in pairwise(path) if one != other]
