"""What a strategy deals: partitions to members, or, in a topic that is shared by key, members to partitions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

#: In place of a slot: no member.
NOBODY: Final = -1


class Lot(NamedTuple):
    """The partitions of one topic, and the members that may get them; in K2, members and the partitions they go to."""

    #: Slots, ascending; at least one.
    takers: Sequence[int]
    #: How many things there are to deal.
    size: int
    #: By thing: the one slot that had it, or NOBODY; may be shorter than `size`, or longer.
    had: Sequence[int] = ()
    #: By thing: the one slot that owns it, or NOBODY; may be shorter than `size`, or longer.
    owned: Sequence[int] = ()


def fill(slots: Sequence[int], size: int) -> list[int]:
    """These slots as a list of this length: cut, or filled up with NOBODY."""
    filled = list(slots[:size])
    filled += [NOBODY] * (size - len(filled))
    return filled
