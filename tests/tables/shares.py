"""Every record about one lease in every state, from level 4 on: with shares, and with holes (section 7b).

`leases.py` has what holds without them. A test plays every cell, and `pages.py` writes the table into the pages.
The codes are those of a record with nothing else to it: no pause by another client, and progress that moves on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from rationalizer.codes import (
    ALREADY_HELD,
    FENCED,
    GROUP_FULL,
    HELD,
    NOT_HELD,
    NOTHING_TO_TAKE,
    OK,
    PARTIAL,
    WRONG_MODE,
)

#: How a lease can stand, as the fields of a ShareTransition, and their heads. A record that carries an epoch overlaps
#: all shares, and a ClaimingShare what B3 says.
SHARE_COLUMNS: Final = {
    "free": "free",
    "held": "held, not stale",
    "stale": "held, stale",
    "shared": "a share that it overlaps is not stale",
    "silent": "only stale shares overlap it",
}


@dataclass(frozen=True, slots=True)
class ShareTransition:
    """One row: a record, and the codes that it can end with. None: section 3 says."""

    record: str
    nil_epoch: bool
    free: tuple[str, ...]
    held: tuple[str, ...]
    stale: tuple[str, ...]
    shared: tuple[str, ...]
    silent: tuple[str, ...]
    effect: str
    rule: str


_THE_SHARES: Final = (OK, FENCED)
_ENTRIES: Final = (OK, PARTIAL, FENCED)
_OF_HOLDER: Final = (OK, PARTIAL, WRONG_MODE, FENCED)
_OF_SHARE: Final = (OK, PARTIAL, NOTHING_TO_TAKE, WRONG_MODE, FENCED)


def _of_share(record: str, effect: str, rule: str) -> ShareTransition:
    return ShareTransition(record, False, (NOT_HELD,), (), (), _THE_SHARES, _THE_SHARES, effect, rule)


SHARE_TRANSITIONS: Final[tuple[ShareTransition, ...]] = (
    ShareTransition(
        "ClaimingPartition",
        False,
        (OK,),
        (ALREADY_HELD, HELD),
        (OK,),
        (HELD,),
        (OK,),
        "held by the sender; all shares end",
        "B4, C3",
    ),
    ShareTransition(
        "ClaimingShare",
        False,
        (OK, WRONG_MODE, GROUP_FULL),
        (HELD,),
        (OK, WRONG_MODE),
        (ALREADY_HELD, HELD),
        (OK, WRONG_MODE),
        "the share begins; a stale holder goes, and shares that it overlaps end",
        "B3, B4",
    ),
    _of_share("Heartbeat", "the share's last beat is new", "B2, C6"),
    ShareTransition("Heartbeat", True, (NOT_HELD,), (), (), (NOT_HELD,), (NOT_HELD,), "none", "B2, C7"),
    _of_share("ReleasingPartition", "the share ends", "B2, B4, C8"),
    ShareTransition(
        *("ClaimingMessages", False, (NOT_HELD,), (), (), (WRONG_MODE, FENCED), (WRONG_MODE, FENCED), "none", "B2, C12")
    ),
    _of_share("CommitRanges", "none", "B2, P4"),
    ShareTransition(
        "SettlingMessages",
        False,
        (NOT_HELD,),
        _OF_HOLDER,
        _OF_HOLDER,
        _OF_SHARE,
        _OF_SHARE,
        "last beat is new; entries; a take, if it shares by batches",
        "B2, B5, H3",
    ),
    ShareTransition("SettlingMessages", True, _ENTRIES, _ENTRIES, _ENTRIES, _ENTRIES, _ENTRIES, "entries", "H2, H3"),
)
