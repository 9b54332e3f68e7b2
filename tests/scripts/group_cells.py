"""The cell of a record in the group plane's table of transitions, its outcome there, and its moves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from rationalizer import ConfigureGroup, JoinGroup, Outcome, Record, World
from rationalizer.groups.group import Group, Member
from rationalizer.groups.transitions import TRANSITIONS, Effect, Ending, Transition, Who
from rationalizer.routing import route_group
from rationalizer.state import GROUP

__all__ = ["GroupCell", "GroupCellMet", "Seen", "cell_of", "codes_of", "ending_of", "moves_of"]

OF_MEMBERS = ("JoinGroup", "GroupHeartbeat", "LeaveGroup", "TopicsChanged", "CommitOffsets")
LARGE = 1_000
ROWS = {(row.record, row.who): row for row in TRANSITIONS}


class GroupCell(NamedTuple):
    """A row of the table, and the name of a column."""

    row: Transition
    column: str


GroupCellMet = tuple[Transition, str, Ending]


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
        everything = tuple(GROUP.row(group, world.level)) if group.weight < LARGE else None
        state = group.state(log_time)
        return cls(state, group.generation, group.strategy, dict(group.counts), members, everything)


def codes_of(cell: GroupCell) -> set[str]:
    """What a record can end with in it; all other codes are of checks that the table leaves out."""
    return {ending.code for ending in getattr(cell.row, cell.column)}


def cell_of(world: World, record: Record, log_time: int) -> GroupCell | None:
    """Where the table has this record; None where the group is at home elsewhere, or of the other kind."""
    group_id, name = record.group_id, type(record).__name__
    elsewhere = route_group(group_id, world.partitions) != world.partition
    if elsewhere or any(lease.group_id == group_id for lease in world.leases()):
        return None
    pause = world.pause(group_id)
    pausing = pause is not None and pause.client_id == record.client_id and log_time < pause.expires
    group = world.group(group_id)
    who, column = _who(record, name, pausing), "unknown"
    if group is not None:
        column = _column(group, record, name, who, log_time)
    return GroupCell(ROWS[name, who], column)


def _who(record: Record, name: str, pausing: bool) -> Who:
    if name == "ForgetGroup":
        return Who.PAUSING if pausing else Who.NOT_PAUSING
    if name not in ("JoinGroup", "CommitOffsets"):
        return Who.ANYONE
    if record.own_fields()[0]:
        return Who.WITH_ID
    return Who.PAUSING if name == "CommitOffsets" and pausing else Who.WITHOUT_ID


def _column(group: Group, record: Record, name: str, who: Who, log_time: int) -> str:
    if name in OF_MEMBERS and _sender(group, record, who) is not None:
        return "member"
    buries = name in ("JoinGroup", "ForgetGroup") or who is Who.PAUSING
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
    return Ending(outcome.code, True, _effect(record, before, after, offset))


def _effect(record: Record, before: Seen, after: Seen, offset: int) -> Effect:
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
        case _:
            return Effect.NOTHING if before.everything == after.everything else Effect.CHANGED


def moves_of(earlier: str, before: Seen, after: Seen) -> list[tuple[str, str]]:
    """The moves that a record makes: first by its log time (from the state `earlier`), then by what it says."""
    rebalanced = after.generation is not None and before.generation != after.generation and after.generation > 0
    path = [earlier, before.state, *(["REBALANCING"] if rebalanced else []), after.state]
    return [(one, other) for one, other in pairwise(path) if one != other]
