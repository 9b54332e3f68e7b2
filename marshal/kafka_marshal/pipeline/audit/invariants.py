"""Kinds of violations, and the state of a lease by the outcomes alone, independent of the audited world.

An audit that trusted the rationalizer could find nothing: whatever it concludes would be right by definition. So a
`WatchedLease` follows each lease by the outcomes (grants, heartbeats, releases, granted messages), and every record is
checked twice: the outcome must be allowed by the previous state, and the lease in the world must equal what the
outcomes imply. A difference is a violation; the watch then continues from the world's state, so that one fault is
reported once.

It is no second rationalizer: it checks no value, no routing and no pause, and decides no record's outcome.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from kafka_marshal.pipeline.audit.files import TABLES, Row
from rationalizer import Lease, World
from rationalizer.history import BEFORE, LeaseKey
from rationalizer.holes import NO_KEY
from rationalizer.intervals import Intervals, union
from rationalizer.leases.shares import Share
from rationalizer.limits import NOTHING_DONE, STALE_AFTER_INTERVALS


class Breach(StrEnum):
    """The kinds of violations."""

    #: A lease was granted to (or confirmed for) a client while another held it and was not stale (C3, C7).
    TWO_OWNERS = "two owners at one offset"
    #: Stable fell without a reposition by an admin that had paused the group (C5, C11, P2).
    PROGRESS_BACK = "progress moved back without a reposition"
    #: Messages were granted that had been granted or done before (C12).
    OVERLAPPING_GRANTS = "overlapping grants"
    #: The replayed log differs from a snapshot (S2), or a snapshot holds no state.
    SNAPSHOT_DIFFERS = "snapshot differs from the log"
    #: The records of a range are not those that a member read (S4) or that a dump was written with (D5).
    LOG_CHANGED = "log differs from its hash"
    #: A record of another sender or epoch than the holder's took effect (C5), or an epoch does not grow (C9).
    STALE_EPOCH = "record accepted with a stale epoch"
    #: An open message was settled or taken by a sender that does not have it, or had not seen it so (H2, H3, B5).
    OUT_OF_REACH = "open message settled out of reach"
    #: The state does not have a message open any more, and no record closed it (H1).
    LOST = "open message that no record closed"
    #: Keys changed owner, or have two, while a living owner had not released them (G4, G14); shares of a lease that are
    #: not stale overlap, or are others than the log says (B3, B4).
    TWO_OWNERS_OF_A_KEY = "two owners of one key"
    #: The fencing token of a new owner is not above its predecessor's (G5).
    FENCE = "fencing token that does not grow"
    #: Keys are assigned or targeted to a slot without a member.
    NO_MEMBER = "owner that is no member"
    #: A rebalance's generation is not its offset or does not grow, or it has no cause (G5, G9).
    GENERATION = "generation that does not grow"
    #: A record took effect whose sender is no member or does not own what it commits (G10, G14).
    STALE_GENERATION = "record accepted with a stale generation"
    #: The state lists a member that is gone, or lacks one that lives (G8, G11, G13).
    MEMBERS = "members other than the log says"
    #: A checkpoint was complete without an owner's answer, or what a group went back to is not what it had (X6, X8).
    CHECKPOINT = "checkpoint other than the log says"
    #: A group is claimed and coordinated at once (G1).
    TWO_KINDS = "group that is claimed and coordinated"


#: Rows that are buffered before they are written.
KEPT_ROWS: Final = 16_384

#: Takes a table's name and its rows.
Write = Callable[[str, list[Row]], None]

#: Owner of a violation that concerns no owner in particular.
NO_OWNER: Final = (None, None, None)


class Notes:
    """What the observers of one replay share: the record at work, pauses, the rows of tables, violations."""

    def __init__(self, world: World, write: Write) -> None:
        """write: called where there are many rows, and at the end."""
        self.world = world
        #: By kind.
        self.violations: dict[str, int] = {}
        #: By table.
        self.rows: dict[str, list[Row]] = {name: [] for name in TABLES if name != "statistics"}
        #: Of the record at work.
        self.offset: int = world.next_offset
        self.log_time: int = world.log_time
        #: Group → the client that has it paused, and until when.
        self.pauses: dict[str, tuple[str, int]] = {
            pause.group_id: (pause.client_id, pause.expires) for pause in world.pauses()
        }
        self._write = write

    @property
    def at(self) -> tuple[int, int]:
        """The offset and the log time of the record at work."""
        return self.offset, self.log_time

    def pauser(self, group_id: str) -> str | None:
        """The client that has the group paused now."""
        client, expires = self.pauses.get(group_id, (None, 0))
        return client if self.log_time < expires else None

    def report(
        self,
        kind: Breach,
        about: tuple[str, str | None, int | None],
        detail: str,
        owner: tuple[str | None, str | None, int | None] = NO_OWNER,
    ) -> None:
        """Add a violation: what it is about (topic and partition may be None), and the owner until then."""
        self.violations[kind] = self.violations.get(kind, 0) + 1
        self.rows["violations"].append((str(kind), *self.at, *about, *owner, detail))

    def violation(self, kind: Breach, watched: WatchedLease, detail: str) -> None:
        """Add a violation about a lease."""
        epoch = watched.epoch if watched.epoch >= 0 else None
        self.report(kind, watched.key, detail, (watched.client, watched.instance, epoch))

    def flush(self, tables: Iterable[str] = ()) -> None:
        """Write the rows of these tables, by default of all."""
        for name in tables or self.rows:
            if rows := self.rows[name]:
                self._write(name, rows)
                rows.clear()


class _Held:
    """What a lease and a share have in common."""

    __slots__ = ()
    client: str | None
    instance: str | None
    interval: int
    last_beat: int

    def is_stale(self, log_time: int) -> bool:
        """C1."""
        return log_time - self.last_beat > STALE_AFTER_INTERVALS * self.interval

    def is_held_by(self, client: str, instance: str) -> bool:
        """Whether this is the holder, whatever its epoch."""
        return self.client == client and self.instance == instance


@dataclass(slots=True)
class WatchedShare(_Held):
    """One share of a lease (B1), as `Share` has it. `since`, `until`: log time; BEFORE: it began before the replay."""

    key: LeaseKey
    epoch: int
    client: str
    instance: str
    interval: int
    last_beat: int
    #: NO_KEY: by batches.
    lo: int
    hi: int
    since: int = BEFORE
    until: int | None = None
    until_offset: int | None = None
    ended: str = "open"

    @classmethod
    def of(cls, key: LeaseKey, share: Share, since: int = BEFORE) -> WatchedShare:
        """A share of the state."""
        ids = share.epoch, share.client_id, share.instance_id
        return cls(key, *ids, share.heartbeat_interval_ms, share.last_beat, share.lo, share.hi, since)

    @property
    def by_batches(self) -> bool:
        """Whether it has no keys."""
        return self.lo == NO_KEY

    def is_so_in(self, share: Share | None) -> bool:
        """Whether the state has it so, too."""
        return share is not None and WatchedShare.of(self.key, share, self.since) == self

    def overlaps(self, other: WatchedShare) -> bool:
        """B3."""
        if self.by_batches and other.by_batches:
            return self.is_held_by(other.client, other.instance)
        return self.by_batches or other.by_batches or (self.lo <= other.hi and other.lo <= self.hi)

    def __str__(self) -> str:
        what = "its share by batches" if self.by_batches else f"its share of the keys {self.lo} … {self.hi}"
        return f"{self.client}/{self.instance} with {what}, epoch {self.epoch}"


class WatchedLease(_Held):
    """The present state of one lease by the outcomes of the log."""

    __slots__ = (
        "client",
        "epoch",
        "granted",
        "instance",
        "interval",
        "key",
        "last_beat",
        "ranges",
        "shares",
        "stable",
    )

    def __init__(self, key: LeaseKey) -> None:
        self.key: LeaseKey = key
        #: The holder; None while the lease is free.
        self.client: str | None = None
        self.instance: str | None = None
        #: The holder's or, while the lease is free, the last holder's; −1 before the first.
        self.epoch: int = -1
        self.interval: int = 0
        self.last_beat: int = 0
        self.stable: int = NOTHING_DONE
        self.granted: int = NOTHING_DONE
        #: Offsets done above stable.
        self.ranges: Intervals = Intervals()
        #: By epoch, ascending.
        self.shares: dict[int, WatchedShare] = {}

    @classmethod
    def of(cls, lease: Lease) -> WatchedLease:
        """A lease at the place where the watch begins."""
        watched = cls((lease.group_id, lease.topic, lease.partition))
        watched.adopt(lease)
        watched.shares = {share.epoch: WatchedShare.of(watched.key, share) for share in lease.shares or ()}
        return watched

    def adopt(self, lease: Lease) -> None:
        """Continue from the world's state."""
        self.client, self.instance, self.epoch = lease.client_id, lease.instance_id, lease.epoch
        self.interval, self.last_beat = lease.heartbeat_interval_ms, lease.last_beat
        self.stable, self.granted = lease.progress.stable, lease.progress.granted
        self.ranges = Intervals.of(lease.progress.ranges)
        if not lease.was_held:
            self.epoch = -1

    def has_share(self, instance: str, client: str, epoch: int | None) -> bool:
        """Whether an epoch is that of a share of this instance (B2)."""
        share = None if epoch is None else self.shares.get(epoch)
        return share is not None and share.is_held_by(client, instance)

    def shares_are_silent(self, log_time: int) -> bool:
        """Whether there are shares, and all are stale (B4)."""
        return bool(self.shares) and all(share.is_stale(log_time) for share in self.shares.values())

    def revive(self, log_time: int, but_client: str | None = None) -> None:
        """All shares beat, but those of this client (B4)."""
        for share in self.shares.values():
            if share.client != but_client:
                share.last_beat = log_time

    # -- progress ------------------------------------------------------------------------------------------------

    def through(self, offset: int) -> list[tuple[int, int]]:
        """Mark all up to `offset` as done; returns the runs of offsets that were not."""
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
        """Mark these ranges as done; returns the runs of offsets that were not (P3, P4)."""
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

    def passed(self, first: int, last: int) -> list[tuple[int, int]]:
        """The parts of first … last that are at or below stable, or in ranges."""
        found = []
        for low, high in [*self._gaps(max(first, self.stable + 1), last), (last + 1, last)]:
            if first < low:
                found.append((first, low - 1))
            first = high + 1
        return found

    def reposition(self, offset: int) -> None:
        """An admin set the position (C11)."""
        self.stable, self.granted = offset, NOTHING_DONE
        self.ranges.clear()

    def _gaps(self, first: int, last: int) -> list[tuple[int, int]]:
        """The parts of first … last that are not in ranges."""
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
