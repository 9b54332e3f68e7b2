"""One word for the health of each partition over a window, without a threshold to configure.

The rules follow Burrow. No lag is always ok. Otherwise, the worst first: no live holder; the position does not move; it
moved back; it moves, but the lag does not fall. The only past figure they need comes from brokers: the log end at the
beginning of the window.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Final

from rationalizer import intervals

#: The window (ms).
WINDOW_MS: Final = 60_000


class Verdict(StrEnum):
    """The health of a partition over the window."""

    #: There is no lag, or it fell, or it was 0 in between.
    OK = "ok"
    #: The position moves, but the lag did not fall over the window.
    BEHIND = "behind"
    #: The position moved back (an operator moved it), and has not caught up.
    REWOUND = "rewound"
    #: One message blocks it, while later ones or other partitions of its holder are done.
    HELD_BACK = "held_back"
    #: Its holder beats, but makes no progress.
    STALLED = "stalled"
    #: There is lag, and no live holder.
    STOPPED = "stopped"


def verdict(
    lag: int | None,
    *,
    held: bool,
    is_held_back: bool,
    still_ms: int,
    positions: Sequence[int],
    end_before: int | None,
) -> Verdict | None:
    """The verdict on one partition; None: its lag is not known.

    still_ms: how long messages have waited without progress. positions: the next offsets within the window, the first
    one at its beginning. end_before: its log end at that time; None: not known.
    """
    if lag is None:
        return None
    if lag == 0:
        return Verdict.OK
    if not held:
        return Verdict.STOPPED
    if is_held_back:
        return Verdict.HELD_BACK
    if still_ms >= WINDOW_MS:
        return Verdict.STALLED
    if positions and positions[-1] < max(positions):
        return Verdict.REWOUND
    if end_before is None or not positions:
        return Verdict.OK
    return Verdict.BEHIND if 0 < intervals.lag(positions[0], end_before) <= lag else Verdict.OK
