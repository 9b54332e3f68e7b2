"""The life of a coordinated group as tables: every record in every state, the moves between states, checkpoints.

The columns are those of section 5: PREPARE_FOR_REBALANCE and STEADY alike are "members", and the overdue are gone as G8
says before the column is chosen. `machine.py` is the table put into conditions; a test plays every cell against it, and
`docs.py` writes both into docs/protocol. The codes are those of a record with nothing else to it: no pause by another
client, at home, and a JoinGroup that the checks of G11 from the strategy on let pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final, NamedTuple

from rationalizer.codes import (
    ALREADY_ANSWERED,
    ALREADY_MEMBER,
    BARRIER_OPEN,
    FENCED,
    GROUP_ACTIVE,
    ILLEGAL_GENERATION,
    NEWEST_CHECKPOINT,
    NO_SUCH_BARRIER,
    OK,
    PARTIAL,
    REPLACED,
    TOO_MANY_CHECKPOINTS,
    UNKNOWN_CHECKPOINT,
    UNKNOWN_CONSUMER,
    UNKNOWN_PARTITIONING_STRATEGY,
    WRONG_KIND,
    WRONG_MODE,
)

#: The states of a group, as the fields of a Transition, and their heads.
COLUMNS: Final = {
    "unknown": "no such group",
    "ready": "READY",
    "stranger": "members, no sender",
    "member": "members, with sender",
}


class Who(Enum):
    """What besides its type and its sender decides how a record ends."""

    ANYONE = ""
    WITHOUT_ID = 'member_id ""'
    WITH_ID = "with a member_id"
    PAUSING = "of the pausing client"
    NOT_PAUSING = "of another client"


class Effect(Enum):
    """What a record does to its group."""

    NOTHING = "nothing"
    MADE_AND_JOINED = "made; newcomer"
    JOINED = "newcomer"
    JOINED_AGAIN = "joins again"
    REPLACED = "replaced"
    BEAT = "beat"
    LEFT = "leaves"
    NEW_TOPICS = "beat; rebalance"
    COMMITTED = "beat; commits"
    SETTLED = "beat; entries"
    SETTLED_BY_OPERATOR = "entries"
    MADE_AND_REPOSITIONED = "made; repositions"
    REPOSITIONED = "repositions"
    MADE = "made"
    CHANGED = "changes"
    CHANGED_TARGETS = "changes; rebalance"
    PAUSED = "pause"
    FORGOTTEN = "forgotten"
    FIRST = "first checkpoint"
    OPENED = "barrier opens"
    COMPLETED = "complete at once"
    NOTED = "noted"
    CLOSED = "noted; barrier closed"
    WENT_BACK = "all go back"
    KEPT = "retired, or pinned"
    ENDED = "takes none any more"


class Ending(NamedTuple):
    """One way for a record to end."""

    code: str
    accepted: bool
    effect: Effect


@dataclass(frozen=True, slots=True)
class Transition:
    """One row: a record, and its endings by the state of its group. No ending: section 3 says, or it can't be."""

    record: str
    who: Who
    unknown: tuple[Ending, ...]
    ready: tuple[Ending, ...]
    stranger: tuple[Ending, ...]
    member: tuple[Ending, ...]
    rule: str


def _does(effect: Effect, code: str = OK) -> tuple[Ending, ...]:
    return (Ending(code, True, effect),)


def _refused(code: str) -> tuple[Ending, ...]:
    return (Ending(code, False, Effect.NOTHING),)


def _of_members(record: str, who: Who, rule: str, *member: Ending) -> Transition:
    """A record that only a member can append."""
    unknown = _refused(UNKNOWN_CONSUMER)
    return Transition(record, who, unknown, unknown, unknown, member, rule)


def _alike(record: str, effect: Effect, rule: str) -> Transition:
    """A record that is accepted from anyone, in any state."""
    return Transition(record, Who.ANYONE, _does(effect), _does(effect), _does(effect), (), rule)


_AGAIN: Final = (*_does(Effect.BEAT, ALREADY_MEMBER), *_does(Effect.JOINED_AGAIN))
_BUG: Final = _refused(ILLEGAL_GENERATION)
_OF_LEASES: Final = (
    "Heartbeat",
    "ClaimingPartition",
    "ReleasingPartition",
    "ClaimingMessages",
    "HeartbeatBatch",
    "CommitRanges",
    "ClaimingShare",
    "SettlingMessages",
)

TRANSITIONS: Final[tuple[Transition, ...]] = (
    Transition(
        "JoinGroup",
        Who.WITHOUT_ID,
        _does(Effect.MADE_AND_JOINED),
        _does(Effect.JOINED),
        _does(Effect.JOINED),
        (*_AGAIN, *_does(Effect.REPLACED), *_refused(REPLACED)),
        "G6, G11",
    ),
    _of_members("JoinGroup", Who.WITH_ID, "G11", *_AGAIN),
    _of_members(
        "GroupHeartbeat",
        Who.ANYONE,
        "G10, G13",
        *(*_does(Effect.BEAT), *_does(Effect.BEAT, ILLEGAL_GENERATION), *_BUG),
    ),
    _of_members("LeaveGroup", Who.ANYONE, "G10, G13", *_does(Effect.LEFT), *_BUG),
    _of_members("TopicsChanged", Who.ANYONE, "G13", *_does(Effect.BEAT), *_does(Effect.NEW_TOPICS)),
    _of_members(
        "CommitOffsets",
        Who.WITH_ID,
        "G10, G14",
        *(*_does(Effect.COMMITTED), *_does(Effect.COMMITTED, PARTIAL), *_BUG),
    ),
    Transition(
        "CommitOffsets",
        Who.PAUSING,
        (*_does(Effect.MADE_AND_REPOSITIONED), *_does(Effect.MADE_AND_REPOSITIONED, PARTIAL)),
        (*_does(Effect.REPOSITIONED), *_does(Effect.REPOSITIONED, PARTIAL)),
        _refused(GROUP_ACTIVE),
        (),
        "G21",
    ),
    Transition(
        "CommitOffsets",
        Who.WITHOUT_ID,
        _refused(UNKNOWN_CONSUMER),
        _refused(UNKNOWN_CONSUMER),
        _refused(UNKNOWN_CONSUMER),
        (),
        "G21",
    ),
    Transition(
        "ConfigureGroup",
        Who.ANYONE,
        (*_does(Effect.MADE), *_refused(UNKNOWN_PARTITIONING_STRATEGY)),
        (*_does(Effect.CHANGED), *_refused(UNKNOWN_PARTITIONING_STRATEGY)),
        (*_does(Effect.CHANGED), *_does(Effect.CHANGED_TARGETS), *_refused(UNKNOWN_PARTITIONING_STRATEGY)),
        (),
        "G2, G19, R5, R7",
    ),
    _alike("ReleaseGroup", Effect.PAUSED, "C10"),
    Transition(
        "ForgetGroup",
        Who.PAUSING,
        _does(Effect.NOTHING),
        _does(Effect.FORGOTTEN),
        _refused(GROUP_ACTIVE),
        (),
        "C16",
    ),
    Transition(
        "ForgetGroup",
        Who.NOT_PAUSING,
        _does(Effect.NOTHING),
        _refused(GROUP_ACTIVE),
        _refused(GROUP_ACTIVE),
        (),
        "C16",
    ),
    *(
        Transition(record, Who.ANYONE, (), _refused(WRONG_KIND), _refused(WRONG_KIND), (), "G1")
        for record in _OF_LEASES
    ),
    _alike("Tick", Effect.NOTHING, "T3"),
    _alike("Upgrade", Effect.NOTHING, "E4"),
)


#: What a group takes, as the fields of a CheckpointTransition, and their heads.
CHECKPOINT_COLUMNS: Final = {
    "unknown": "no such group",
    "none": "takes none",
    "some": "takes some, no barrier open",
    "open": "barrier open",
}


@dataclass(frozen=True, slots=True)
class CheckpointTransition:
    """One row: a record, and its endings by the checkpoints of its group. No ending: TRANSITIONS says."""

    record: str
    who: Who
    unknown: tuple[Ending, ...]
    none: tuple[Ending, ...]
    some: tuple[Ending, ...]
    open: tuple[Ending, ...]
    rule: str


_NO_CHECKPOINT: Final = _refused(UNKNOWN_CHECKPOINT)
_NO_MEMBER: Final = _refused(UNKNOWN_CONSUMER)
_NO_BARRIER: Final = (*_NO_MEMBER, *_BUG, *_does(Effect.BEAT, NO_SUCH_BARRIER))
_BACK: Final = (*_does(Effect.WENT_BACK), *_BUG, *_NO_CHECKPOINT)
_KEEPS: Final = (
    *(*_does(Effect.KEPT), *_NO_CHECKPOINT, *_refused(NEWEST_CHECKPOINT)),
    *(*_refused(TOO_MANY_CHECKPOINTS), *_refused(GROUP_ACTIVE)),
)
_ENDS: Final = _does(Effect.ENDED)
_HOLES: Final = _refused(WRONG_MODE)
_STARTS: Final = (*_does(Effect.COMMITTED), *_does(Effect.COMMITTED, PARTIAL))
_POSITIONS: Final = (*_does(Effect.REPOSITIONED), *_does(Effect.REPOSITIONED, PARTIAL), *_refused(GROUP_ACTIVE))
_FORGETS: Final = (*_does(Effect.FORGOTTEN), *_refused(GROUP_ACTIVE))

CHECKPOINT_TRANSITIONS: Final[tuple[CheckpointTransition, ...]] = (
    CheckpointTransition(
        "BeginCheckpoint",
        Who.ANYONE,
        _NO_CHECKPOINT,
        (*_does(Effect.FIRST), *_NO_CHECKPOINT, *_refused(GROUP_ACTIVE), *_HOLES),
        (*_does(Effect.OPENED), *_does(Effect.COMPLETED), *_NO_CHECKPOINT),
        (*_NO_CHECKPOINT, *_refused(BARRIER_OPEN)),
        "X4, X6",
    ),
    CheckpointTransition(
        "AnswerBarrier",
        Who.ANYONE,
        _NO_MEMBER,
        _NO_BARRIER,
        _NO_BARRIER,
        (
            *(*_NO_BARRIER, *_does(Effect.NOTED), *_does(Effect.CLOSED)),
            *(*_does(Effect.BEAT, PARTIAL), *_does(Effect.BEAT, ALREADY_ANSWERED)),
        ),
        "G10, X3, X5, X6",
    ),
    CheckpointTransition("Rollback", Who.ANYONE, _NO_CHECKPOINT, _NO_CHECKPOINT, _BACK, _BACK, "X8"),
    CheckpointTransition("KeepCheckpoint", Who.ANYONE, _NO_CHECKPOINT, _NO_CHECKPOINT, (*_KEEPS, *_ENDS), _KEEPS, "X9"),
    CheckpointTransition("CommitOffsets", Who.WITH_ID, (), (), _STARTS, _STARTS, "X2, X10"),
    CheckpointTransition("CommitOffsets", Who.PAUSING, (), (), _POSITIONS, _refused(GROUP_ACTIVE), "G21, X10"),
    CheckpointTransition("ForgetGroup", Who.PAUSING, (), (), _FORGETS, _FORGETS, "C16"),
)


#: A group, as the fields of a SettleTransition, and their heads.
SETTLE_COLUMNS: Final = {**COLUMNS, "dated": "takes checkpoints"}


@dataclass(frozen=True, slots=True)
class SettleTransition:
    """One row: a record that settles, and its endings by the state of its group."""

    record: str
    who: Who
    unknown: tuple[Ending, ...]
    ready: tuple[Ending, ...]
    stranger: tuple[Ending, ...]
    member: tuple[Ending, ...]
    dated: tuple[Ending, ...]
    rule: str


_SETTLED: Final = (*_does(Effect.SETTLED), *_does(Effect.SETTLED, PARTIAL), *_BUG)
_BY_OPERATOR: Final = (
    *_does(Effect.SETTLED_BY_OPERATOR),
    *_does(Effect.SETTLED_BY_OPERATOR, PARTIAL),
    *_refused(FENCED),
)

SETTLE_TRANSITIONS: Final[tuple[SettleTransition, ...]] = (
    SettleTransition("SettleOffsets", Who.WITH_ID, _NO_MEMBER, _NO_MEMBER, _NO_MEMBER, _SETTLED, _HOLES, "G10, H4"),
    SettleTransition("SettleOffsets", Who.WITHOUT_ID, _NO_MEMBER, _BY_OPERATOR, _BY_OPERATOR, (), _HOLES, "H2, H4"),
    SettleTransition("SettleOffsets", Who.PAUSING, _NO_MEMBER, _BY_OPERATOR, _BY_OPERATOR, (), _HOLES, "H2, H4"),
)


class Move(NamedTuple):
    """A change of state (G7), and what makes it. "": the CP knows no such group. REBALANCING lasts within a record."""

    before: str
    after: str
    why: str
    rule: str


_REBALANCES: Final = "JoinGroup, LeaveGroup, TopicsChanged, new settings; or one that buries the overdue"

MOVES: Final[tuple[Move, ...]] = (
    Move("", "READY", "ConfigureGroup; positions of the pausing client", "G2, G21"),
    Move("", "REBALANCING", "JoinGroup", "G11"),
    Move("READY", "REBALANCING", "JoinGroup", "G11"),
    Move("STEADY", "REBALANCING", _REBALANCES, "G8, G9"),
    Move("PREPARE_FOR_REBALANCE", "REBALANCING", _REBALANCES, "G8, G9"),
    Move("REBALANCING", "STEADY", "owners and targets are the same", "G16"),
    Move(
        "REBALANCING",
        "PREPARE_FOR_REBALANCE",
        "a piece is revoked; or new settings while a member is overdue",
        "G16, G19",
    ),
    Move("REBALANCING", "READY", "no member is left", "G16"),
    Move("STEADY", "PREPARE_FOR_REBALANCE", "a session runs out", "G8"),
    Move(
        "PREPARE_FOR_REBALANCE",
        "STEADY",
        "the owner of the last revoked piece releases it; an overdue member is heard first",
        "G8, G14",
    ),
    Move("READY", "", "ForgetGroup", "C16"),
    Move("PREPARE_FOR_REBALANCE", "", "ForgetGroup while all members are overdue", "C16"),
)
