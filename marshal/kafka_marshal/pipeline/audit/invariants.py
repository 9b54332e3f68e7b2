"""What must never be, whatever a log holds: judged by what the log said before, not by the world that is audited.

An audit that trusted the rationalizer could find nothing: whatever it concludes would be right by definition. So a
`Watched` follows each lease by the outcomes alone (who was granted what, who beat, released, was granted messages),
and every record is held against it twice: the outcome, which must be allowed by what went before, and the lease in the
world afterwards, which must be what the outcomes say. Where they part, that is a violation; the watch then goes on
from the world's state, so that one fault is told once.

It is no second rationalizer: it judges no value, no routing, no pause, and decides nothing about any record.
"""

from __future__ import annotations

from bisect import bisect_left
from enum import StrEnum

from rationalizer import Lease
from rationalizer.history import LeaseKey
from rationalizer.intervals import Intervals, union
from rationalizer.limits import NOTHING_DONE, STALE_AFTER_INTERVALS

__all__ = ["Kind", "Watched"]


class Kind(StrEnum):
    """The kinds of violations."""

    #: Somebody was granted a lease (or told that it holds it) that another held and was not stale in (C3, C7).
    TWO_OWNERS = "two owners at one offset"
    #: Stable fell although nobody who had paused the group repositioned it (C5, C11, P2).
    PROGRESS_BACK = "progress moved back without a reposition"
    #: Messages were granted that had been granted, or done, before (C12).
    OVERLAPPING_GRANTS = "overlapping grants"
    #: The log, replayed, is not in the state that a snapshot says it was in (S2), or a snapshot holds no state at all.
    SNAPSHOT_DIFFERS = "snapshot differs from the log"
    #: The records of a range are not those that a member has read (S4), or that a dump was written with (D5).
    LOG_CHANGED = "log differs from its hash"
    #: A record took effect whose sender or epoch was not the holder's (C5), or a new epoch is not above the last (C9).
    STALE_EPOCH = "record accepted with a stale epoch"
    #: Of coordinated groups. Keys came to another owner, or have two, while theirs had not let go and lives (G4, G14).
    TWO_OWNERS_OF_A_KEY = "two owners of one key"
    #: The fencing token of a new owner is not above that of the one before (G5).
    FENCE = "fencing token that does not grow"
    #: Keys are owned, or to be owned, by nobody who is a member.
    NO_MEMBER = "owner that is no member"
    #: A rebalance whose generation is not its offset, or no larger than the last; or one without a cause (G5, G9).
    GENERATION = "generation that does not grow"
    #: A record took effect of somebody who is no member, or does not own what it commits (G10, G14).
    STALE_GENERATION = "record accepted with a stale generation"
    #: Somebody is a member who is gone, or is none although it lives (G8, G11, G13).
    MEMBERS = "members other than the log says"
    #: A group is claimed and coordinated at once (G1).
    TWO_KINDS = "group that is claimed and coordinated"


class Watched:
    """One lease as the outcomes of the log tell of it; live."""

    __slots__ = (
        "client",
        "epoch",
        "granted",
        "instance",
        "interval",
        "key",
        "last_beat",
        "ranges",
        "stable",
    )

    def __init__(self, key: LeaseKey) -> None:
        self.key: LeaseKey = key
        #: The holder, None while the lease is free.
        self.client: str | None = None
        self.instance: str | None = None
        #: Of the holder or, while the lease is free, of the last one; −1 before the first.
        self.epoch: int = -1
        self.interval: int = 0
        self.last_beat: int = 0
        self.stable: int = NOTHING_DONE
        self.granted: int = NOTHING_DONE
        #: What is done above stable.
        self.ranges: Intervals = Intervals()

    @classmethod
    def of(cls, lease: Lease) -> Watched:
        """A lease as it stands where the watch begins."""
        watched = cls((lease.group_id, lease.topic, lease.partition))
        watched.adopt(lease)
        return watched

    def adopt(self, lease: Lease) -> None:
        """Go on from what the world says."""
        self.client, self.instance, self.epoch = lease.client_id, lease.instance_id, lease.epoch
        self.interval, self.last_beat = lease.heartbeat_interval_ms, lease.last_beat
        self.stable, self.granted = lease.progress.stable, lease.progress.granted
        self.ranges = Intervals.of(lease.progress.ranges)

    def is_stale(self, log_time: int) -> bool:
        """C1."""
        return log_time - self.last_beat > STALE_AFTER_INTERVALS * self.interval

    def is_held_by(self, client: str, instance: str) -> bool:
        """Whether this is the holder, whatever its epoch."""
        return self.client == client and self.instance == instance

    # -- progress ------------------------------------------------------------------------------------------------

    def through(self, offset: int) -> list[tuple[int, int]]:
        """All up to `offset` is done: the runs of offsets that were not before, and takes them in."""
        if offset <= self.stable:
            return []
        if not self.ranges.firsts:
            found = [(self.stable + 1, offset)]
            self.stable = offset
            return found
        found = self._gaps(self.stable + 1, offset)
        self.stable = self.ranges.end_of_run(offset)
        self.ranges.drop_through(self.stable)
        return found

    def commit(self, ranges: tuple[tuple[int, int], ...]) -> list[tuple[int, int]]:
        """These ranges are done: the runs of offsets that were not before, and takes them in (P3, P4)."""
        firsts, lasts = union(ranges)
        found: list[tuple[int, int]] = []
        for first, last in zip(firsts, lasts, strict=True):
            if last > self.stable:
                found += self._gaps(max(first, self.stable + 1), last)
        if found:
            edits, _ = self.ranges.plan([first for first, _ in found], [last for _, last in found])
            self.ranges.carry_out(edits)
            self.stable = self.ranges.end_of_run(self.stable)
            self.ranges.drop_through(self.stable)
        return found

    def reposition(self, offset: int) -> None:
        """The position was put there (C11)."""
        self.stable, self.granted = offset, NOTHING_DONE
        self.ranges.clear()

    def _gaps(self, first: int, last: int) -> list[tuple[int, int]]:
        """What of first … last is not in ranges."""
        firsts, lasts = self.ranges.firsts, self.ranges.lasts
        place = bisect_left(lasts, first)
        found = []
        while first <= last and place < len(firsts) and firsts[place] <= last:
            if first < firsts[place]:
                found.append((first, firsts[place] - 1))
            first = lasts[place] + 1
            place += 1
        if first <= last:
            found.append((first, last))
        return found
