"""All partitions of a group at a moment, one after the other: what the page's map is compared with."""

from __future__ import annotations

from typing import NamedTuple

from kafka_marshal.ui.fold import GroupHistory, History
from kafka_marshal.ui.moments import WORDS, Moment, freshness_of, held_at


class Cell(NamedTuple):
    topic: str
    partition: int
    lo: int
    hi: int
    client: str
    instance: str
    #: Its holder's freshness in the words of `status`.
    state: str
    epoch: int


def cells(history: History, group: GroupHistory, moment: Moment) -> list[Cell]:
    return [
        Cell(
            *found.key[1:],
            held.lo,
            held.hi,
            held.client,
            held.instance,
            WORDS[freshness_of(group, found, held, moment)],
            held.epoch,
        )
        for found in group.ordered()
        for held in held_at(history, found, moment)
    ]
