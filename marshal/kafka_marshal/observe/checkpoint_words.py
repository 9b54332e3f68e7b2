"""Checkpoints, barriers and what went back, in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from kafka_marshal.observe.text import count, span

if TYPE_CHECKING:
    from kafka_marshal.observe.checkpoint_rows import BarrierRow, CheckpointsRow
    from kafka_marshal.observe.checkpoints import Ended, Happened, Taken
    from rationalizer.groups.checkpoints import Checkpoints

#: The most members or pieces that a text lists.
_LISTED: Final = 5

_WHY_ENDED: Final = {
    "refused": "{} could not take it",
    "over": "its time was over without {}",
    "lost": "{} was lost",
    "rollback": "{} put the group back",
    "positions": "{} set positions",
}


def listed(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    more = len(names) - _LISTED
    return ", ".join(names[:_LISTED]) + (f" and {more:,} more" if more > 0 else "")


def as_of_text(newest: int, age_ms: float) -> str:
    """Which checkpoint the figures of a group are of."""
    return f"as of checkpoint {newest}, {span(age_ms)} old"


def barrier_text(barrier: BarrierRow) -> str:
    """The open barrier in words."""
    waits = f", waits for {listed(barrier.waits_for)}" if barrier.waits_for else ""
    return f"{barrier.id} is being taken for {span(barrier.open_ms)}{waits}"


def why_ended(each: Ended) -> str:
    """Why a barrier ended."""
    return _WHY_ENDED[each.why].format(each.client or "its members")


def why_went_back(why: str, client: str) -> str:
    """Why pieces went back."""
    if why == "lost":
        return f"{client} was lost"
    return f"{client} put the group back" if why == "rollback" else f"{client} set positions"


def repeated_text(checkpoints: Checkpoints | CheckpointsRow | None) -> str:
    """What is repeated if a member is taken out of a group that has these checkpoints; None: it takes none."""
    if checkpoints is None:
        return "its messages in flight are repeated"
    if checkpoints.hold:
        return (
            f"all members go back to checkpoint {checkpoints.newest} (hold), and what they did since is done again, on "
            "the states of then"
        )
    return "its pieces go back to their last cuts, and what it did since is done again, on the states of then"


def happened_text(each: Happened) -> str:
    """One event in words."""
    from kafka_marshal.observe.checkpoints import Ended, Taken

    if isinstance(each, Taken):
        return _taken_text(each)
    if isinstance(each, Ended):
        return f"barrier {each.barrier} ended without a checkpoint: {why_ended(each)}"
    undone = "" if each.undone_ms is None else f", at most {span(each.undone_ms)} undone"
    return (
        f"{why_went_back(each.why, each.client)}: {count(each.pieces, 'piece')} at checkpoint {each.checkpoint}{undone}"
    )


def _taken_text(each: Taken) -> str:
    text = f"checkpoint {each.checkpoint} is complete"
    if each.owners:
        text += f" after {span(each.took_ms)}, {each.members} of {count(each.owners, 'member')}"
    absent = sorted({cut.client or "" for cut in each.missing})
    if absent:
        text += f"; without {listed(absent)}, whose pieces keep an older cut"
    if each.handed_over:
        text += f"; hands over {count(each.handed_over, 'piece')}"
    if each.left:
        text += f"; {listed(each.left)} left"
    return text
