"""The outcomes a record can have: one table that the code, the tests and the docs share.

Each row is a transition as a reader of the log sees it: which records can end so, whether the record counts
as accepted, its effect on the state, and the rule. `tests/tables/pages.py` renders the table into
docs/protocol; a test fails when the page and the table differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from rationalizer.wire.records import KINDS, Belongs, DuringPause, Kind

OK: Final = "OK"
ALREADY_HELD: Final = "ALREADY_HELD"
OFFSET_REGRESSION: Final = "OFFSET_REGRESSION"
REPOSITIONED: Final = "REPOSITIONED"
DUPLICATE_COMMIT: Final = "DUPLICATE_COMMIT"
PARTIAL: Final = "PARTIAL"
ALREADY_MEMBER: Final = "ALREADY_MEMBER"

MALFORMED: Final = "MALFORMED"
UNSUPPORTED_VERSION: Final = "UNSUPPORTED_VERSION"
UNKNOWN_TYPE: Final = "UNKNOWN_TYPE"
WRONG_PARTITION: Final = "WRONG_PARTITION"
PAUSED: Final = "PAUSED"
HELD: Final = "HELD"
NOT_HELD: Final = "NOT_HELD"
FENCED: Final = "FENCED"
NOT_FRESH: Final = "NOT_FRESH"
STALE: Final = "STALE"
PROPOSAL_TOO_LOW: Final = "PROPOSAL_TOO_LOW"
INDIVIDUAL_COMMIT_TOO_OLD: Final = "INDIVIDUAL_COMMIT_TOO_OLD"
MAX_INDIVIDUAL_COMMIT_REACHED: Final = "MAX_INDIVIDUAL_COMMIT_REACHED"
GROUP_ACTIVE: Final = "GROUP_ACTIVE"

WRONG_KIND: Final = "WRONG_KIND"
UNKNOWN_CONSUMER: Final = "UNKNOWN_CONSUMER"
ILLEGAL_GENERATION: Final = "ILLEGAL_GENERATION"
REPLACED: Final = "REPLACED"
UNKNOWN_PARTITIONING_STRATEGY: Final = "UNKNOWN_PARTITIONING_STRATEGY"
INCONSISTENT_PARTITIONING_STRATEGY: Final = "INCONSISTENT_PARTITIONING_STRATEGY"
SESSION_TIMEOUT_TOO_HIGH: Final = "SESSION_TIMEOUT_TOO_HIGH"
GROUP_FULL: Final = "GROUP_FULL"
TOO_MANY_PARTITIONS: Final = "TOO_MANY_PARTITIONS"
NOT_ASSIGNED: Final = "NOT_ASSIGNED"
ALREADY_STARTED: Final = "ALREADY_STARTED"
INDIVIDUAL_COMMIT_NOT_ALLOWED: Final = "INDIVIDUAL_COMMIT_NOT_ALLOWED"
OUT_OF_ORDER: Final = "OUT_OF_ORDER"

NOTHING_TO_TAKE: Final = "NOTHING_TO_TAKE"
WRONG_MODE: Final = "WRONG_MODE"

NO_SUCH_BARRIER: Final = "NO_SUCH_BARRIER"
ALREADY_ANSWERED: Final = "ALREADY_ANSWERED"
BARRIER_OPEN: Final = "BARRIER_OPEN"
UNKNOWN_CHECKPOINT: Final = "UNKNOWN_CHECKPOINT"
NEWEST_CHECKPOINT: Final = "NEWEST_CHECKPOINT"
TOO_MANY_CHECKPOINTS: Final = "TOO_MANY_CHECKPOINTS"

#: Not an outcome of the log but of this release: the replica stands before an Upgrade it can't follow (E4).
UPGRADE_REQUIRED: Final = "UPGRADE_REQUIRED"


@dataclass(frozen=True, slots=True)
class CodeRow:
    """One outcome: which `records` can have it, `accepted` (None: depends), what it `means`, its `rules`."""

    code: str
    records: str
    accepted: bool | None
    means: str
    rules: str


def _named(has: Callable[[Kind], bool]) -> str:
    return ", ".join(kind.name for kind in KINDS.values() if has(kind))


#: What a record is rejected with before its plane has a say (E6, G1).
BEFORE_THE_PLANES: Final = frozenset({MALFORMED, WRONG_PARTITION, PAUSED, WRONG_KIND})

_ANY = "any"
_OF_GROUPS = _named(lambda kind: kind.belongs is not Belongs.EVERYWHERE or kind.name == "ConfigureGroup")
_BEATS = "Heartbeat, ReleasingPartition, batch entry"
_WITH_EPOCH = "Heartbeat, ReleasingPartition, ClaimingMessages, CommitRanges, batch entry, SettlingMessages"
_OF_MEMBERS = "JoinGroup, GroupHeartbeat, LeaveGroup, CommitOffsets, TopicsChanged, AnswerBarrier, SettleOffsets"
_ENTRY = "entry of CommitOffsets"
_CUT = "entry of AnswerBarrier"
_ENTRIES = f"{_ENTRY}, {_CUT}"
_SETTLED = "entry of SettlingMessages, entry of SettleOffsets"

#: All outcomes: rejections in the order in which they are checked (E6), after what is accepted.
TABLE: Final[tuple[CodeRow, ...]] = (
    CodeRow(OK, _ANY, True, "The record has taken effect.", "B3, C3-C12, G11-G14, H3, P4, T3"),
    CodeRow(
        ALREADY_HELD,
        "ClaimingPartition, ClaimingShare",
        True,
        "The sender holds the lease, or this share of it, already and it is not stale; nothing changed.",
        "B3, C3",
    ),
    CodeRow(
        NOTHING_TO_TAKE,
        "SettlingMessages",
        True,
        "No message was free, or the take was a repeat. A beat, and its entries count.",
        "B5, H3",
    ),
    CodeRow(
        OFFSET_REGRESSION,
        f"{_BEATS}, {_ENTRIES}",
        True,
        "last_offset (through) lies below stable: the progress stays, the beat, the release, the entry counts.",
        "C5, C8, G14",
    ),
    CodeRow(
        REPOSITIONED,
        f"{_BEATS}, {_ENTRY}",
        True,
        "The pausing client's last_offset (through) replaced the progress, and that changed it, or a hole went.",
        "C11, G21",
    ),
    CodeRow(
        DUPLICATE_COMMIT,
        f"CommitRanges, {_ENTRIES}, {_SETTLED}",
        True,
        "What lies above stable was all done before; nothing changed.",
        "H3, P4",
    ),
    CodeRow(
        ALREADY_MEMBER,
        "JoinGroup",
        True,
        "The sender is a member with just these values: a beat, and no reason for a rebalance.",
        "G11",
    ),
    CodeRow(
        PARTIAL,
        "HeartbeatBatch, CommitOffsets, AnswerBarrier, SettlingMessages, SettleOffsets",
        None,
        "At least one entry was rejected; a batch is accepted where another entry was, and so is what an operator "
        "settles; CommitOffsets, and what an owner settles, always. Of an AnswerBarrier no entry counts then: its "
        "sender has not answered, though it lives.",
        "D2, G14, H3, H4, X5",
    ),
    CodeRow(
        ALREADY_ANSWERED,
        "AnswerBarrier",
        True,
        "The sender has answered this barrier: its first answer stands, and this one is a beat.",
        "X5",
    ),
    CodeRow(
        NO_SUCH_BARRIER,
        f"AnswerBarrier, {_ENTRY}",
        None,
        "No barrier of this id is open, or is any more: an answer is a beat, and no more. Of an entry: the group takes "
        "checkpoints, so that progress moves with answers only.",
        "X5, X10",
    ),
    CodeRow(MALFORMED, _ANY, False, "The value, or a field of it, is not as section 2 says.", "E2, E6"),
    CodeRow(UNSUPPORTED_VERSION, _ANY, False, "The version is above the level of the CP.", "E3, E4"),
    CodeRow(UNKNOWN_TYPE, _ANY, False, "The type is not among those of the CP's level.", "E3, E6"),
    CodeRow(
        WRONG_PARTITION,
        _named(lambda kind: kind.belongs is not Belongs.EVERYWHERE),
        False,
        "The record belongs to another CP.",
        "L3",
    ),
    CodeRow(
        PAUSED,
        _named(lambda kind: kind.during_pause in (DuringPause.REJECTED, DuringPause.HANDS_IN_WITHOUT_TAKE)),
        False,
        "Another client has the group paused. Of a SettlingMessages: and it takes.",
        "C10, H3",
    ),
    CodeRow(
        WRONG_KIND,
        _OF_GROUPS,
        False,
        "The group is of the other kind: claimed where a lease of it is known, coordinated where its state is.",
        "G1",
    ),
    CodeRow(
        HELD,
        "ClaimingPartition, ClaimingShare",
        False,
        "The lease has a holder that is not stale, or a share that is not stale and that the claim overlaps. Of a "
        "ClaimingPartition it also shows that the sender waits for work.",
        "B3, C3, C4",
    ),
    CodeRow(NOT_HELD, _WITH_EPOCH, False, "The lease has no holder, and no share.", "B2, C5, C7"),
    CodeRow(
        FENCED,
        f"{_WITH_EPOCH}, SettleOffsets, {_SETTLED}",
        False,
        "The lease has another holder or share, or another epoch. Of an entry that settles: it is not the sender's, "
        "or it changed since the sender looked; of what an operator settles: no entry was accepted.",
        "B2, C5, C7, H2, H3, H4, R2",
    ),
    CodeRow(
        WRONG_MODE,
        "ClaimingShare, ClaimingMessages, SettlingMessages, SettleOffsets, BeginCheckpoint",
        False,
        "The lease, or the group, is used in another mode. Of a ClaimingShare: holes without keys, or keys at "
        "different places, are left from another mode. Holes and checkpoints exclude each other.",
        "B2, B3, H3, H4, X4",
    ),
    CodeRow(
        NOT_FRESH,
        "Heartbeat",
        False,
        "A takeover (epoch nil) of a lease that is no longer fresh: claim it like anyone else.",
        "C7",
    ),
    CodeRow(STALE, "ClaimingMessages", False, "The holder is stale.", "C12"),
    CodeRow(
        PROPOSAL_TOO_LOW,
        "ClaimingMessages",
        False,
        "The proposal is not above both granted and stable.",
        "C12",
    ),
    CodeRow(
        UNKNOWN_CONSUMER,
        _OF_MEMBERS,
        False,
        "The sender is no member, or (CommitOffsets without a member_id) does not have the group paused.",
        "G10, G11, G21",
    ),
    CodeRow(
        ILLEGAL_GENERATION,
        f"GroupHeartbeat, LeaveGroup, CommitOffsets, AnswerBarrier, SettleOffsets, Rollback, {_ENTRIES}, "
        "entry of SettleOffsets",
        None,
        "A generation above the group's; of an entry, older than what it commits to. A heartbeat of an older "
        "generation is accepted: the sender has a new one to read. Of a Rollback: not the group's.",
        "G10, G13, G14, H4, X8",
    ),
    CodeRow(
        REPLACED, "JoinGroup", False, "A later instance of this client, which the sender had not seen, is there.", "G11"
    ),
    CodeRow(
        UNKNOWN_PARTITIONING_STRATEGY,
        "JoinGroup, ConfigureGroup",
        False,
        "The strategy is not one of G17's.",
        "G11, G17, R5",
    ),
    CodeRow(
        INCONSISTENT_PARTITIONING_STRATEGY,
        "JoinGroup",
        False,
        "The other members have another strategy, and the group has none set.",
        "G11, R6",
    ),
    CodeRow(SESSION_TIMEOUT_TOO_HIGH, "JoinGroup", False, "The session is above the group's setting.", "G11, G19"),
    CodeRow(
        GROUP_FULL,
        "JoinGroup, ClaimingShare",
        False,
        "There are 1,000 other members. Of a ClaimingShare: pieces of done_through, and two for each share, would be "
        "more than 2,000.",
        "B3, G11",
    ),
    CodeRow(
        TOO_MANY_PARTITIONS,
        "JoinGroup, TopicsChanged",
        False,
        "The groups of this CP would subscribe to topics of more than 100,000 partitions.",
        "G11, G13",
    ),
    CodeRow(
        NOT_ASSIGNED,
        f"{_ENTRIES}, entry of SettleOffsets",
        False,
        "The sender does not own all of these keys, or may not commit like that.",
        "G14, G21, H4",
    ),
    CodeRow(ALREADY_STARTED, _ENTRY, False, "A start for a partition that has progress: continue from that.", "G14"),
    CodeRow(
        INDIVIDUAL_COMMIT_NOT_ALLOWED,
        f"{_ENTRIES}, entry of SettleOffsets",
        False,
        "Ranges, or messages that are opened or parked, where the group does not accept individual commits.",
        "G14, H4",
    ),
    CodeRow(
        OUT_OF_ORDER, _ENTRY, False, "The record is in order, and these ranges would leave a gap below them.", "K8"
    ),
    CodeRow(
        INDIVIDUAL_COMMIT_TOO_OLD,
        f"CommitRanges, {_ENTRIES}, {_SETTLED}",
        False,
        "All of the ranges lie at or below stable. Of a message that is opened or parked: it is done already.",
        "H3, P4",
    ),
    CodeRow(
        MAX_INDIVIDUAL_COMMIT_REACHED,
        f"CommitRanges, {_ENTRIES}, {_SETTLED}",
        False,
        "More intervals (60,000, or the group's setting), pieces (2,000) or holes (10,000) would be left than may be. "
        "Of a CommitRanges the whole record is rejected, else the entry.",
        "P5, G15, H5",
    ),
    CodeRow(
        UNKNOWN_CHECKPOINT,
        "BeginCheckpoint, Rollback, KeepCheckpoint",
        False,
        "The group does not keep it: retired, undone, or never complete. Of a BeginCheckpoint and of an end: it is not "
        "the newest.",
        "X4, X8, X9",
    ),
    CodeRow(BARRIER_OPEN, "BeginCheckpoint", False, "A checkpoint is being taken.", "X4"),
    CodeRow(NEWEST_CHECKPOINT, "KeepCheckpoint", False, "The newest checkpoint can't be retired.", "X9"),
    CodeRow(TOO_MANY_CHECKPOINTS, "KeepCheckpoint", False, "16 checkpoints are pinned: retire one.", "X9"),
    CodeRow(
        GROUP_ACTIVE,
        "ForgetGroup, CommitOffsets, BeginCheckpoint, KeepCheckpoint",
        False,
        "A lease of the group has a holder, or a share, that is not stale; a member is there that is not overdue, or "
        "the sender has not paused it. Of the first BeginCheckpoint and of an end: a member is there.",
        "C16, G21, X4, X9",
    ),
)

#: Codes of records (and batch entries) that took effect. PARTIAL depends on the entries.
ACCEPTED: Final[frozenset[str]] = frozenset(row.code for row in TABLE if row.accepted)


def of_entries(answers: Iterable[str]) -> str:
    """The code of a record of entries with these codes."""
    return OK if ACCEPTED.issuperset(answers) else PARTIAL
