"""Shares of leases by batches, as one consumer claims, keeps and reports them (U7)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import ceil, inf
from typing import TYPE_CHECKING, Protocol, cast

from kafka_marshal.engine.claims.client import LeaseView, NamedClient
from kafka_marshal.engine.claims.leases import HeldLease
from kafka_marshal.engine.holding import Holding
from kafka_marshal.engine.plane import Loss, Settles, Work
from kafka_marshal.engine.settings import MAX_SHARES
from kafka_marshal.types import Key
from rationalizer import ClaimingShare, Lease, Record, SettlingMessages, codes
from rationalizer.holes import Hole
from rationalizer.leases.shares import Share

if TYPE_CHECKING:
    from rationalizer.wire.records import Take

#: In heartbeat intervals: what another mode has left is claimed when our replica shows that it is done, or after this.
WRONG_MODE_REST = 10.0

#: How many partitions each member has shares of, of those that it would have alone.
SHARED_BY = 2


class ShareLease(HeldLease):
    """A part of a lease, by batches. It outlasts silence: until another member ends it, its beats are accepted (B4)."""

    __slots__ = ("start",)

    is_share = True

    #: Where the group begins, if the log does not know the lease; None: at offset 0.
    start: int | None

    @property
    def claim_expires(self) -> float:
        return inf if self.pending.claim_sent_at is None else super().claim_expires

    @property
    def ends_at(self) -> float:
        return inf  # nothing is delivered past ``hand_out_until``; what is settled late counts (C6)

    def claim(self, ids: tuple[str, str, str], heartbeat_interval_ms: int) -> Record:
        return ClaimingShare(*ids, *self.key, heartbeat_interval_ms, None, None, self.start)

    def is_ours_in(self, lease: Lease | None, ids: tuple[str, str, str]) -> bool:
        return (
            lease is not None and lease.shares is not None and lease.shares.of(ids[0], ids[1], self.epoch) is not None
        )


class ShareView(LeaseView):
    """Open messages are what sharers work on: none stands in the way."""

    def open(self, key: Key) -> Sequence[Hole]:
        return ()


#: Why a share is released although the member could keep it.
MOVES = "it has nothing to do here, and messages wait in other partitions"


class _Seen(Protocol):
    """What a share knows of its partition."""

    #: A record may have changed that.
    is_dirty: bool

    @property
    def is_idle(self) -> bool:
        """Whether it has no batch, and nothing is free."""


def _share(own: Holding) -> ShareLease:
    return cast("ShareLease", own)  # it comes from ``ShareSource.claim``


#: Code of a refused claim → the warning.
_REFUSED = {
    codes.HELD: (
        "another member works on it without shared_batches=True, or on some of its keys; this one waits until it has "
        "released it. Nothing is lost. Let all members of the group share batches, or none"
    ),
    codes.WRONG_MODE: (
        "members have worked on different keys of it, and are at different places, so it can't be shared by batches "
        "yet. Nothing is lost. Let a member hold it whole until all keys are at one place, or set its position"
    ),
    codes.GROUP_FULL: "it has as many sharers as the log keeps. This member waits, and works on other partitions",
}


class ShareSource(NamedClient):
    """The source of a consumer that shares its partitions by batches."""

    refusals: Mapping[str, str] = _REFUSED

    def attach(self, work: Work) -> None:
        super().attach(work)
        self.view: ShareView = ShareView(self._peers, work.subscription)
        #: Partitions that are held in another mode.
        self._held: set[Key] = set()
        #: Partitions whose keys are at different places, as the log said when it refused a claim.
        self._scattered: set[Key] = set()
        #: Shares that had nothing to do at the last check, and when (own clock, ms) the next one is.
        self._idle: set[Key] = set()
        self._check_at = 0.0

    # What its consumer reads.

    def lease_of(self, key: Key) -> Lease | None:
        """The lease, as our replica has it."""
        return self._peers.lease(key)

    def next_offset(self, own: Holding) -> int:
        """The next offset of our replica of its CP."""
        return self._peers.next_offset(own.cp)

    def silent_in(self, share: Share, cp: int, now: float) -> float:
        """In how many ms a share will be silent, as far as we know; below 0: the next take ends it (U8)."""
        return share.deadline - self._peers.log_time(cp, now)

    # What its consumer sends.

    def claim_from(self, own: Holding, start: int | None, now: float) -> None:
        """Claim a share; start: where the group begins if the log does not know the lease."""
        lease = _share(own)
        lease.start = start
        self._book.claim(lease, now)

    def settle(self, own: Holding, entries: Settles | None, taking: Take | None, now: float) -> None:
        """Settle messages, and take the next ones."""
        lease = _share(own)
        seen = self._peers.next_offset(lease.cp)
        record = SettlingMessages(*self._settings.ids, *lease.key, lease.epoch, seen, take=taking)
        if entries is not None:
            record = replace(record, done=entries.done, open=entries.open, parked=entries.parked)
        self._book.send(lease, record, now)

    # Claiming.

    def look_again(self, key: Key | None = None) -> None:
        super().look_again()
        for part in self._work.parts.values() if key is None else [self._work.parts.get(key)]:
            if part is not None:
                cast("_Seen", part).is_dirty = True

    def refused(self, key: Key, code: str, now: float) -> None:
        """The log refused a claim: wait until that may have changed, and say so once."""
        self._claim_at[key] = now + self._settings.heartbeat_interval_ms / 2
        if code == codes.HELD:
            self._held.add(key)
            self._claim_at[key] = max(self._claim_at[key], self._peers.opens_at(key, now))
        if code == codes.WRONG_MODE:
            self._scattered.add(key)
            self._claim_at[key] = now + WRONG_MODE_REST * self._settings.heartbeat_interval_ms
        if key not in self._told:
            self._say(key, code)

    def granted(self, key: Key) -> None:
        super().granted(key)
        self._held.discard(key)
        self._scattered.discard(key)

    def _may_claim(self, key: Key, now: float) -> bool:
        if now >= self._claim_at.get(key, 0.0):
            return True
        lease = self._peers.lease(key)
        if key in self._scattered and lease is not None and lease.progress.piece_count == 1:
            self._scattered.discard(key)
            return True
        return (
            key in self._held
            and lease is not None
            and not lease.held
            and (lease.shares is None or lease.shares.by_batches)
        )

    def taken_away(self, key: Key, reason: str, now: float) -> bool:
        if reason == Loss.EVICTED:
            self._claim_at[key] = now + 3 * self._settings.heartbeat_interval_ms
        return False  # messages in flight come again as a batch, at the member that takes it

    def step(self, now: float) -> None:
        if self.failure is not None:
            return
        if self._is_limited and now >= self._check_at:
            self._check_at = now + self._settings.heartbeat_interval_ms
            self._move(now)
        if not (self._is_dirty or now >= super()._next_claim()):
            return
        self._is_dirty = False
        parts, blocked = self._work.parts, self._work.blocked
        open_now = [
            key
            for key in self._work.subscription.partitions
            if key not in parts and key not in blocked and not self.is_taken(key) and self._may_claim(key, now)
        ]
        self._claim_at = {key: at for key, at in self._claim_at.items() if at > now}
        room = self._most() - len(parts)
        for key in sorted(open_now, key=self._preference)[: max(0, room)]:
            if self.view.closed(self._peers.cp_of(key), now):
                self._claim_at[key] = now + self._settings.heartbeat_interval_ms / 2
                continue
            self.want(key, now)

    def _move(self, now: float) -> None:
        """Release one share that was idle at the last two checks, if messages wait where this member has none."""
        parts, partitions = self._work.parts, self._work.subscription.partitions
        if len(parts) < self._most():
            return
        idle = {key for key, part in parts.items() if cast("_Seen", part).is_idle and self._sharers(key) > 1}
        still_idle, self._idle = idle & self._idle, idle
        if still_idle and any(key not in parts and self._waits(key) for key in partitions):
            self._work.let_go(max(still_idle, key=self._sharers), MOVES, now)

    def _waits(self, key: Key) -> bool:
        """Whether messages seem to wait there: all of its sharers have batches."""
        lease = self._peers.lease(key)
        if lease is None or lease.shares is None or lease.progress.holes is None:
            return False
        return {share.epoch for share in lease.shares} <= set(lease.progress.holes.owners())

    def _preference(self, key: Key) -> tuple[bool, int]:
        return not self._waits(key), self._sharers(key)

    def want(self, key: Key, now: float) -> None:
        """Register that a share is wanted; its consumer has it claimed once it knows where the group begins."""
        cp = self._peers.cp_of(key)
        self._take_on(key, lambda owner: self._book.want(key, cp, owner, ShareLease))

    def _most(self) -> int:
        """How many partitions to have shares of."""
        partitions = self._work.subscription.partitions
        if len(partitions) <= self._wanted_shares:
            return len(partitions)
        workers = {share.client_id for key in partitions for share in self._shares(key)} | {self._settings.client_id}
        return max(self._wanted_shares, ceil(SHARED_BY * len(partitions) / len(workers)))

    @property
    def _wanted_shares(self) -> int:
        sharing = self._wanted.sharing
        return MAX_SHARES if sharing is None else sharing.max_shares

    def _shares(self, key: Key) -> Sequence[Share]:
        lease = self._peers.lease(key)
        return () if lease is None or lease.shares is None else list(lease.shares)

    def _sharers(self, key: Key) -> int:
        return len(self._shares(key))

    def _next_claim(self) -> float:
        return min(super()._next_claim(), self._check_at) if self._is_limited else super()._next_claim()

    @property
    def _is_limited(self) -> bool:
        """Whether there are more partitions than a member has shares of."""
        return len(self._work.subscription.partitions) > self._wanted_shares
