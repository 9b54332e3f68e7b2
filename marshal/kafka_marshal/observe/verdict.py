"""One word for each partition: is it worked on? Over a window, without a limit that somebody has to choose.

The rules are those that Burrow made common. Nothing to do is never wrong. Then, the worst first: nobody works on it;
its position stands still; it went back; it moves, but the lag does not fall. Of the past of the logs they need what
brokers know: where one ended when the window began.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Final

from rationalizer import progress

__all__ = ["WINDOW_MS", "Verdict", "verdict"]

#: How far back it is looked.
WINDOW_MS: Final = 60_000


class Verdict(StrEnum):
    """How a partition's position went over the window."""

    #: There is nothing to do, or less than before, or there was nothing in between.
    OK = "ok"
    #: It moves, but there is more to do than at the window's beginning, and was all the time.
    BEHIND = "behind"
    #: It went back: an operator moved it, and it has not come to where it was.
    REWOUND = "rewound"
    #: One message holds it back: later ones are done, or other partitions of its holder.
    HELD_BACK = "held_back"
    #: Its holder beats, and nothing gets done.
    STALLED = "stalled"
    #: There is something to do, and nobody who is alive has it.
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

    still_ms: how long there was something to do without any progress. positions: the next offsets within the window,
    the first one at its beginning. end_before: where its log ended then; None: not known.
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
    return Verdict.BEHIND if 0 < progress.lag(positions[0], end_before) <= lag else Verdict.OK
