"""Types that several layers share, and users import (from :mod:`kafka_marshal`, most of them).

Types of one layer are in that layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Literal, NamedTuple, Self

from rationalizer.limits import MAX_KEY_HASH

__all__ = ["Delivery", "Key", "LeaseInfo", "SharedEpoch", "Start", "Strategy", "Target", "TopicPartition", "WhenStuck"]

#: (topic, partition)
Key = tuple[str, int]

#: What happens to a message when the process that handles it dies: it is repeated, or it is lost.
Delivery = Literal["at-least-once", "at-most-once"]

#: Where a group begins on partitions that it never held.
Start = Literal["earliest", "latest"] | datetime

#: How a coordinated group shares out partitions (G17).
Strategy = Literal["sticky", "range", "roundrobin"]

#: A partition that is stuck: leave it alone and work on, or raise that from the next call, too.
WhenStuck = Literal["leave", "raise"]

#: The offset to be read next, "earliest", "latest", "readable" (the first one from the group's position that can be
#: read), or a moment (an aware datetime: the first message at or after it).
Target = int | str | datetime


class SharedEpoch(int):
    """The fencing token of a part of a partition that is shared by key: valid for the key hashes lo … hi only.

    A program that fences by it keeps a token for each (topic, partition, lo, hi), and refuses one that is older than
    that of any overlapping part. A share that grew has the token of its newest part. If the next rebalance shrinks it
    again, its owner comes with an older token, and is refused until another member has owned the keys. Fence whole
    partitions instead.
    """

    lo: int
    hi: int

    def __new__(cls, epoch: int, lo: int, hi: int) -> Self:
        """epoch: the generation since which the part is owned."""
        made = super().__new__(cls, epoch)
        made.lo, made.hi = lo, hi
        return made


class TopicPartition(NamedTuple):
    """One partition, with the next offset to be delivered and the epoch of its lease."""

    topic: str
    partition: int
    offset: int
    epoch: int


@dataclass(frozen=True, slots=True)
class LeaseInfo:
    """One lease at one moment, or one piece of a partition of a coordinated group (``kind``)."""

    topic: str
    partition: int
    #: client_id of the holder; None: free.
    client_id: str | None
    instance_id: str | None
    #: The fencing token (C9): grows with every holder.
    epoch: int
    #: "free", "fresh", "unknown" or "stale", at log time (C1).
    freshness: str
    heartbeat_interval_ms: int
    #: Log time (ms) of the last beat.
    last_beat: int
    #: Everything up to this offset is done; None: nothing is (P2).
    stable: int | None
    #: Done beyond stable, as inclusive intervals (P1).
    ranges: tuple[tuple[int, int], ...]
    #: At-most-once high-water mark; None: none (C12).
    granted: int | None
    group_id: str
    #: "coordinated": ``epoch`` is the generation since which the owner has the piece, 0 if it has no owner, and
    #: ``heartbeat_interval_ms`` half of its session.
    kind: Literal["claimed", "coordinated"] = "claimed"
    #: The key hashes that it is about, both inclusive; all of them unless a coordinated group shares the partition.
    lo: int = 0
    hi: int = MAX_KEY_HASH
    #: client_id of the member that waits for it: its owner finishes what is in flight, and releases it.
    goes_to: str | None = None

    @property
    def holder(self) -> str | None:
        """The holder's client_id, None while the lease is free."""
        return self.client_id
