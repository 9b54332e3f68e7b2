"""The outcomes a record can have: one table that the code, the tests and the docs share.

Each row is a transition as a reader of the log sees it: which records can end so, whether the record counts
as accepted, what became of the state, and the rule that says so. `docs.py` renders the table into
PROTOCOL.md; a test fails when the page and the table differ.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

OK: Final = "OK"
ALREADY_HELD: Final = "ALREADY_HELD"
OFFSET_REGRESSION: Final = "OFFSET_REGRESSION"
REPOSITIONED: Final = "REPOSITIONED"
DUPLICATE_COMMIT: Final = "DUPLICATE_COMMIT"
PARTIAL: Final = "PARTIAL"

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


_ANY = "any"
_LEASE = "Heartbeat, ClaimingPartition, ReleasingPartition, ClaimingMessages, CommitRanges, HeartbeatBatch"
_BEATS = "Heartbeat, ReleasingPartition, batch entry"
_WITH_EPOCH = "Heartbeat, ReleasingPartition, ClaimingMessages, CommitRanges, batch entry"

#: All outcomes: rejections in the order in which they are checked (E6), after what is accepted.
TABLE: Final[tuple[CodeRow, ...]] = (
    CodeRow(OK, _ANY, True, "The record has taken effect.", "C3-C12, P4, T3"),
    CodeRow(
        ALREADY_HELD,
        "ClaimingPartition",
        True,
        "The sender holds the lease already and it is not stale; nothing changed.",
        "C3",
    ),
    CodeRow(
        OFFSET_REGRESSION,
        _BEATS,
        True,
        "last_offset lies below stable: the progress stays, the beat or the release counts.",
        "C5, C8",
    ),
    CodeRow(
        REPOSITIONED,
        _BEATS,
        True,
        "The pausing client's last_offset replaced the progress, and that changed it.",
        "C11",
    ),
    CodeRow(
        DUPLICATE_COMMIT,
        "CommitRanges",
        True,
        "What lies above stable was all done before; nothing changed.",
        "P4",
    ),
    CodeRow(
        PARTIAL,
        "HeartbeatBatch",
        None,
        "At least one entry was rejected; accepted where another entry was accepted.",
        "D2",
    ),
    CodeRow(MALFORMED, _ANY, False, "The value, or a field of it, is not as section 2 says.", "E2, E6"),
    CodeRow(UNSUPPORTED_VERSION, _ANY, False, "The version is above the level of the CP.", "E3, E4"),
    CodeRow(UNKNOWN_TYPE, _ANY, False, "The type is not among those of the CP's level.", "E3, E6"),
    CodeRow(WRONG_PARTITION, _LEASE, False, "The record belongs to another CP.", "L3"),
    CodeRow(
        PAUSED,
        "Heartbeat, ClaimingPartition, ClaimingMessages, HeartbeatBatch, ReleaseGroup, ForgetGroup",
        False,
        "Another client has the group paused.",
        "C10",
    ),
    CodeRow(
        HELD,
        "ClaimingPartition",
        False,
        "The lease has a holder that is not stale. Also shows that the sender waits for work.",
        "C3, C4",
    ),
    CodeRow(NOT_HELD, _WITH_EPOCH, False, "The lease has no holder.", "C5, C7"),
    CodeRow(FENCED, _WITH_EPOCH, False, "The lease has another holder, or another epoch.", "C5, C7"),
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
    CodeRow(INDIVIDUAL_COMMIT_TOO_OLD, "CommitRanges", False, "All of the ranges lie at or below stable.", "P4"),
    CodeRow(
        MAX_INDIVIDUAL_COMMIT_REACHED,
        "CommitRanges",
        False,
        "More than 60,000 intervals would be left; the whole record is rejected.",
        "P5",
    ),
    CodeRow(GROUP_ACTIVE, "ForgetGroup", False, "A lease of the group is held and not stale.", "C16"),
)

#: Codes of records (and batch entries) that took effect. PARTIAL depends on the entries.
ACCEPTED: Final[frozenset[str]] = frozenset(row.code for row in TABLE if row.accepted)
