"""Shares of a lease: some keys of it, or batches in turns (B1).

All shares of one lease are of one mode, since those of the other overlap them (B3). Those by keys are disjoint, those
by batches of different instances. A lease may have 999: what a record asks of them is found without going through all,
unless some are stale.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from typing import Final, Literal

from rationalizer.holes import NO_KEY
from rationalizer.limits import MAX_KEY_HASH, STALE_AFTER_INTERVALS

Freshness = Literal["free", "fresh", "unknown", "stale"]

#: Before every log time.
_NEVER: Final = -1


def freshness_at(age: int, heartbeat_interval_ms: int) -> Freshness:
    """How what has a holder stands, whose last beat is this old (C1)."""
    if age < heartbeat_interval_ms:
        return "fresh"
    return "unknown" if age <= STALE_AFTER_INTERVALS * heartbeat_interval_ms else "stale"


class Share:
    """A part of a lease (B1). Live state: read it, don't write it.

    `lo` and `hi`: its key hashes, both NO_KEY where it shares by batches.
    """

    __slots__ = ("client_id", "epoch", "heartbeat_interval_ms", "hi", "instance_id", "last_beat", "lo")

    def __init__(
        self,
        epoch: int,
        client_id: str,
        instance_id: str,
        heartbeat_interval_ms: int,
        last_beat: int,
        lo: int = NO_KEY,
        hi: int = NO_KEY,
    ) -> None:
        self.epoch = epoch
        self.client_id = client_id
        self.instance_id = instance_id
        self.heartbeat_interval_ms = heartbeat_interval_ms
        self.last_beat = last_beat
        self.lo = lo
        self.hi = hi

    @property
    def by_batches(self) -> bool:
        """Whether it has no keys, and takes batches."""
        return self.lo == NO_KEY

    @property
    def deadline(self) -> int:
        """The last log time at which it is not stale (C1)."""
        return self.last_beat + STALE_AFTER_INTERVALS * self.heartbeat_interval_ms

    def is_of(self, instance_id: str, client_id: str) -> bool:
        """Whether this is its holder."""
        return self.instance_id == instance_id and self.client_id == client_id

    def is_stale(self, log_time: int) -> bool:
        """Whether the age is above 2·HI (C1)."""
        return log_time > self.deadline

    def freshness(self, log_time: int) -> Freshness:
        """How it stands at this log time, by its age (C1)."""
        return freshness_at(log_time - self.last_beat, self.heartbeat_interval_ms)

    def __repr__(self) -> str:
        keys = "by batches" if self.by_batches else f"{self.lo} … {self.hi}"
        return f"Share({self.epoch}, {self.client_id}/{self.instance_id}, {keys}, last_beat={self.last_beat})"


class Shares:
    """The shares of one lease, at least one, ascending by epoch. Live state: read it, don't write it."""

    __slots__ = ("_by_epoch", "_calm_until", "_keyed", "_los", "_of_instance")

    def __init__(self, shares: Sequence[Share] = ()) -> None:
        #: An epoch is an offset, so a newcomer's is the largest.
        self._by_epoch: dict[int, Share] = {}
        #: Those by keys, by `lo`; those by batches, by (client_id, instance_id).
        self._los: list[int] = []
        self._keyed: list[Share] = []
        self._of_instance: dict[tuple[str, str], Share] = {}
        #: Up to this log time none is stale; maybe later, too.
        self._calm_until = _NEVER
        for share in shares:
            self.add(share)

    # -- reading ---------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """The number of shares, stale ones included."""
        return len(self._by_epoch)

    def __iter__(self) -> Iterator[Share]:
        return iter(self._by_epoch.values())

    @property
    def by_batches(self) -> bool:
        """Whether they share by batches."""
        return bool(self._of_instance)

    def parts(self) -> list[tuple[int, int, Share | None]]:
        """(lo, hi, share) of all key hashes, ascending; None: of keys that no share has."""
        found: list[tuple[int, int, Share | None]] = []
        begin = 0
        for share in self._keyed:
            if begin < share.lo:
                found.append((begin, share.lo - 1, None))
            found.append((share.lo, share.hi, share))
            begin = share.hi + 1
        if begin <= MAX_KEY_HASH:
            found.append((begin, MAX_KEY_HASH, None))
        return found

    def of(self, instance_id: str, client_id: str, epoch: int) -> Share | None:
        """The share of this epoch, if the holder is this one (B2)."""
        share = self._by_epoch.get(epoch)
        return share if share is not None and share.is_of(instance_id, client_id) else None

    def overlapping(self, instance_id: str, client_id: str, lo: int, hi: int) -> list[Share]:
        """Those that a claim by this instance overlaps, ascending by epoch (B3); lo, hi NO_KEY: by batches."""
        if (lo == NO_KEY) != self.by_batches:
            return list(self)
        if lo == NO_KEY:
            share = self._of_instance.get((client_id, instance_id))
            return [] if share is None else [share]
        left = bisect_right(self._los, lo) - 1
        if left < 0 or self._keyed[left].hi < lo:
            left += 1
        return sorted(self._keyed[left : bisect_right(self._los, hi, left)], key=_epoch)

    def stale(self, log_time: int) -> list[Share]:
        """Those that are stale, ascending by epoch."""
        if log_time <= self._calm_until:
            return []
        found = [share for share in self if share.is_stale(log_time)]
        self._calm_until = min([share.deadline for share in self], default=_NEVER)
        return found

    def all_stale(self, log_time: int) -> bool:
        """Whether there is none that is not stale."""
        return log_time > self._calm_until and all(share.is_stale(log_time) for share in self)

    # -- changing --------------------------------------------------------------------------------------

    def add(self, share: Share) -> None:
        """A share that overlaps none of them begins."""
        self._calm_until = min(self._calm_until, share.deadline) if self._by_epoch else share.deadline
        self._by_epoch[share.epoch] = share
        if share.by_batches:
            self._of_instance[share.client_id, share.instance_id] = share
        else:
            place = bisect_left(self._los, share.lo)
            self._los.insert(place, share.lo)
            self._keyed.insert(place, share)

    def remove(self, share: Share) -> None:
        """It ends."""
        del self._by_epoch[share.epoch]
        if share.by_batches:
            del self._of_instance[share.client_id, share.instance_id]
        else:
            place = bisect_left(self._los, share.lo)
            del self._los[place]
            del self._keyed[place]

    def beat(self, share: Share, log_time: int) -> None:
        """It lives; and so do all others if all were stale: then the log itself was silent (B4)."""
        if share.is_stale(log_time) and self.all_stale(log_time):
            self.revive(log_time)
        share.last_beat = log_time

    def revive(self, log_time: int, but_client: str | None = None) -> None:
        """They all beat; but_client: except those of this one."""
        for share in self:
            if share.client_id != but_client:
                share.last_beat = log_time


def _epoch(share: Share) -> int:
    return share.epoch
