"""The life of a lease as one table: how a record ends, by its sender and the state of the lease.

The columns are the four ways a lease can stand (C1; a lease never claimed counts as free). `claims.py` is
this table put into conditions; a test plays every cell against it, and `docs.py` writes it into docs/protocol.
The codes are those of a record with nothing else to it: no pause, and progress that moves on.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

from rationalizer.codes import ALREADY_HELD, FENCED, HELD, NOT_FRESH, NOT_HELD, OK, STALE


class Sender(Enum):
    """Who sends a record, seen from the lease's holder (a free lease's last one)."""

    HOLDER = "the holder"
    OLDER_EPOCH = "the holder, with an older epoch"
    OTHER_INSTANCE = "another instance of its client"
    OTHER_CLIENT = "another client"


@dataclass(frozen=True, slots=True)
class Transition:
    """One row: a record (`nil_epoch`: a Heartbeat with epoch nil), its sender, and the code per standing.

    `effect` says what an OK does to the lease besides its progress; `rule` cites who says so.
    """

    record: str
    sender: Sender
    free: str
    fresh: str
    unknown: str
    stale: str
    effect: str
    rule: str
    nil_epoch: bool = False


_TAKES = "held by the sender; epoch, HI and last beat are new"
_TAKES_OVER = "held by the new instance; epoch and last beat are new"
_BEATS = "last beat is new"
_FREES = "free"
_STAYS = "none"


def _with_epoch(record: str, effect: str, rule: str, stale: str = OK) -> tuple[Transition, ...]:
    """A record that carries an epoch: the holder's counts, every other is fenced (C5)."""
    return (
        Transition(record, Sender.HOLDER, NOT_HELD, OK, OK, stale, effect, rule),
        *(
            Transition(record, sender, NOT_HELD, FENCED, FENCED, FENCED, _STAYS, "C5")
            for sender in (Sender.OLDER_EPOCH, Sender.OTHER_INSTANCE, Sender.OTHER_CLIENT)
        ),
    )


TRANSITIONS: Final[tuple[Transition, ...]] = (
    Transition("ClaimingPartition", Sender.HOLDER, OK, ALREADY_HELD, ALREADY_HELD, OK, _TAKES, "C3"),
    Transition("ClaimingPartition", Sender.OTHER_INSTANCE, OK, HELD, HELD, OK, _TAKES, "C3"),
    Transition("ClaimingPartition", Sender.OTHER_CLIENT, OK, HELD, HELD, OK, _TAKES, "C3, C4"),
    *_with_epoch("Heartbeat", _BEATS, "C5, C6"),
    Transition("Heartbeat", Sender.HOLDER, NOT_HELD, FENCED, FENCED, FENCED, _STAYS, "C7", nil_epoch=True),
    Transition(
        "Heartbeat", Sender.OTHER_INSTANCE, NOT_HELD, OK, NOT_FRESH, NOT_FRESH, _TAKES_OVER, "C7", nil_epoch=True
    ),
    Transition("Heartbeat", Sender.OTHER_CLIENT, NOT_HELD, FENCED, FENCED, FENCED, _STAYS, "C7", nil_epoch=True),
    *_with_epoch("ReleasingPartition", _FREES, "C8"),
    *_with_epoch("ClaimingMessages", _STAYS, "C12", stale=STALE),
    *_with_epoch("CommitRanges", _STAYS, "C6, P4"),
)
