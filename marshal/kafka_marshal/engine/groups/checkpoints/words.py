"""What it means that pieces are not in a checkpoint, for people."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from kafka_marshal.engine.effects import Key

__all__ = ["left_means", "places"]

#: How many partitions one text names.
_MOST_NAMED: Final = 10


def places(keys: Iterable[Key]) -> str:
    """``flights [3], flights [4]``; of many, the first ones and the number of others."""
    names = [f"{topic} [{partition}]" for topic, partition in sorted(keys)]
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(names[:_MOST_NAMED]) + more


def left_means(*, leaves: bool, is_hold: bool) -> str:
    """What follows if pieces could not be handed in."""
    if is_hold:
        return "the checkpoint ends, for all members (hold), and is tried again. Nothing is lost"
    if leaves:
        return (
            "this member leaves, so others go on from the last cut, and what was done since is done again, on the "
            "state of that cut. Nothing is lost"
        )
    return "left for the next checkpoint, with the cut as old as it is. Nothing is lost"
