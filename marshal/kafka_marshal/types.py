"""Types that several layers share, and users import (from :mod:`kafka_marshal`, most of them).

Types of one layer are in that layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal, NamedTuple, ParamSpec, Self, TypeVar

from rationalizer.limits import LATER, MAX_KEY_HASH, is_later

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
P = ParamSpec("P")

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


class Offsets(NamedTuple):
    """A run of offsets of one partition."""

    topic: str
    partition: int
    first: int
    #: Included.
    last: int


class Placed:
    """What is of one partition of a topic."""

    __slots__ = ()
    topic: str
    partition: int

    @property
    def key(self) -> Key:
        """(topic, partition)"""
        return self.topic, self.partition


class SharedEpoch(int):
    """The fencing token of some keys of a partition, of a member that shares it by key: valid for lo … hi only.

    Each part of these keys has its token, since members get them at different times: ``parts``. The number
    itself is the newest of them. A program that fences by it keeps a token for each key range, and compares each
    message's key hash with the token of its part; SQL sinks do so (``sink.record``, ``sink.records``).
    """

    lo: int
    hi: int
    #: (lo, hi, token) of each part, both hashes inclusive, ascending.
    parts: tuple[tuple[int, int, int], ...]

    def __new__(cls, epoch: int, lo: int, hi: int, parts: Iterable[tuple[int, int, int]] = ()) -> Self:
        """epoch: the generation since which its newest part is owned. parts: none: all of it since then."""
        made = super().__new__(cls, epoch)
        made.lo, made.hi = lo, hi
        made.parts = tuple(parts) or ((lo, hi, epoch),)
        return made

    def __getnewargs__(self) -> tuple[Any, ...]:
        return int(self), self.lo, self.hi, self.parts


class BatchToken(int):
    """The fencing token of a batch of a partition that several members share by batches: good for its messages alone.

    Larger than that of anyone who had them before. A program compares it with the epochs it has stored, and stores it
    nowhere: batches of other members, with smaller ones, are as rightful. SQL sinks do so.
    """


class OpenEpoch(int):
    """The epoch of a partition, of a message of it that was open: the position has passed it, and it is not done.

    So a last offset says nothing of it: sinks take it by ``record`` and ``records`` only.
    """


def open_epoch(epoch: int) -> int:
    """The epoch of a message that was open."""
    return epoch if isinstance(epoch, SharedEpoch) else OpenEpoch(epoch)


class TopicPartition(NamedTuple):
    """One partition, with the next offset to be delivered and the epoch of its lease."""

    topic: str
    partition: int
    offset: int
    epoch: int


#: The last second that a datetime can have (ms), less a day for time zones.
_LAST_MS = 253_402_214_399_000


def reason_until(due_ms: float) -> str:
    """Why a message is open that waits until then (log time, ms), rounded up to a second."""
    at = datetime.fromtimestamp(-(min(due_ms, _LAST_MS) // -1000), UTC)
    return f"{LATER}{at:%Y-%m-%dT%H:%M:%SZ}"


def due_of(reason: str | None) -> int | None:
    """Until when (log time, ms) a message with this reason waits; None: it does not wait for a time."""
    if reason is None or not is_later(reason):
        return None
    try:
        return int(datetime.fromisoformat(reason[len(LATER) : -1] + "+00:00").timestamp() * 1000)
    except ValueError:  # no time: it waits no longer
        return 0


@dataclass(frozen=True, slots=True)
class OpenMessages:
    """Messages that progress has passed, and that are open all the same: offsets first … last (H1)."""

    first: int
    last: int
    #: How often they were delivered.
    delivery_count: int
    #: client_id of the sharer that has them in flight; None: nobody has.
    holder: str | None
    #: Why they are set aside; None: they wait for their next try.
    parked: str | None
    #: The hash of the message's key; None: it is not known, and there may be several messages.
    key_hash: int | None

    @property
    def is_parked(self) -> bool:
        """Whether they are set aside until an operator decides."""
        return self.parked is not None and not is_later(self.parked)

    @property
    def until(self) -> int | None:
        """Until when (ms since 1970) they wait for their next try; None: they do not wait for a time."""
        return due_of(self.parked)


@dataclass(frozen=True, slots=True)
class Committed:
    """What of one partition is done for a group."""

    #: What the group reads next; −1: it has not begun. Everything below is done or set aside.
    offset: int
    #: Up to this offset everything is done, or in ``open``; None: nothing is.
    stable: int | None
    #: (lo, hi, offset) of each part of the key hashes that differ: up to that offset all is done, or in ``open``.
    keys: tuple[tuple[int, int, int | None], ...]
    #: Done beyond stable, as inclusive intervals.
    ranges: tuple[tuple[int, int], ...]
    #: Open all the same, ascending.
    open: tuple[OpenMessages, ...] = ()
    #: What a member of a coordinated group said with its ``commit(metadata=…)``; None: nothing yet.
    metadata: str | None = None


@dataclass(frozen=True, slots=True)
class Sharer:
    """One of several that work on a partition at the same time."""

    client_id: str
    instance_id: str
    epoch: int
    #: "fresh", "unknown" or "stale", as of a lease.
    freshness: str
    heartbeat_interval_ms: int
    #: Log time (ms).
    last_beat: int
    #: The first and the last of its key hashes; None: it takes batches.
    keys: tuple[int, int] | None


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
    #: The key hashes that it is about, both inclusive; all of them unless the partition is shared by keys.
    lo: int = 0
    hi: int = MAX_KEY_HASH
    #: client_id of the member that waits for it: its owner finishes what is in flight, and releases it.
    goes_to: str | None = None
    #: Messages that are open though progress has passed them, of these keys (H1).
    open: tuple[OpenMessages, ...] = ()
    #: Those that share it; then the holder above is the one of them that was heard last.
    sharers: tuple[Sharer, ...] = ()

    @property
    def holder(self) -> str | None:
        """The holder's client_id, None while the lease is free."""
        return self.client_id
