"""Worlds that are each broken in one way about shares of a lease, like those of `broken.py`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rationalizer import (
    ClaimingMessages,
    ClaimingPartition,
    ClaimingShare,
    ForgetGroup,
    Heartbeat,
    Lease,
    Outcome,
    ReleasingPartition,
    World,
    codes,
)
from rationalizer.holes import NO_KEY
from rationalizer.leases.shares import Share


class Meddler(World):
    """Applies records, then changes the lease of the record."""

    def apply(self, offset: int, timestamp_ms: int, value: bytes | None) -> Outcome:
        outcome = super().apply(offset, timestamp_ms, value)
        message = outcome.message
        if message is None or not hasattr(message, "partition"):
            return outcome
        lease = self.lease(message.group_id, message.topic, message.partition)
        return outcome if lease is None else self.meddle(outcome, message, lease, offset)

    def meddle(self, outcome: Outcome, message: Any, lease: Lease, offset: int) -> Outcome:
        """Do it."""
        raise NotImplementedError


def granted(outcome: Outcome, code: str = codes.OK) -> Outcome:
    """The same record, accepted."""
    return replace(outcome, accepted=True, code=code)


class Crowded(Meddler):
    """Grants a share that overlaps another one, which ends, though it is not stale (B3)."""

    ends = True

    def meddle(self, outcome: Outcome, message: Any, lease: Lease, offset: int) -> Outcome:
        if outcome.code != codes.HELD or not outcome.is_a(ClaimingShare) or lease.shares is None:
            return outcome
        lo, hi = (NO_KEY, NO_KEY) if message.lo is None else (message.lo, message.hi)
        instance, client = message.instance_id, message.client_id
        for share in lease.shares.overlapping(instance, client, lo, hi) if self.ends else ():
            lease.shares.remove(share)
        lease.shares.add(Share(offset, client, instance, message.heartbeat_interval_ms, self.log_time, lo, hi))
        return granted(outcome) if self.ends else outcome


class Doubled(Crowded):
    """Says HELD, and makes the share beside the other."""

    ends = False


class Flattering(Meddler):
    """Confirms a share that another has."""

    def meddle(self, outcome: Outcome, message: Any, lease: Lease, offset: int) -> Outcome:
        is_refused = outcome.code == codes.HELD and outcome.is_a(ClaimingShare)
        return granted(outcome, codes.ALREADY_HELD) if is_refused else outcome


class Exclusive(Meddler):
    """Grants the whole lease while shares are not stale (C3, B4)."""

    def meddle(self, outcome: Outcome, message: Any, lease: Lease, offset: int) -> Outcome:
        if outcome.code != codes.HELD or not outcome.is_a(ClaimingPartition):
            return outcome
        lease.shares = None
        lease.client_id, lease.instance_id, lease.epoch = message.client_id, message.instance_id, offset
        lease.heartbeat_interval_ms, lease.last_beat = message.heartbeat_interval_ms, self.log_time
        return granted(outcome)


class Impatient(Meddler):
    """Ends the other shares with each beat, though they are not stale (B4)."""

    def meddle(self, outcome: Outcome, message: Any, lease: Lease, offset: int) -> Outcome:
        if outcome.is_a(Heartbeat) and outcome.accepted and lease.shares is not None:
            for share in list(lease.shares):
                if share.epoch != message.epoch:
                    lease.shares.remove(share)
        return outcome


class Immortal(Meddler):
    """Keeps a share that was released (B4)."""

    def meddle(self, outcome: Outcome, message: Any, lease: Lease, offset: int) -> Outcome:
        if outcome.is_a(ReleasingPartition) and outcome.accepted and lease.shares is not None:
            lease.shares.add(Share(message.epoch, message.client_id, message.instance_id, 1000, self.log_time))
        return outcome


class Loose(Meddler):
    """Accepts a beat of a share that ended (B2)."""

    def meddle(self, outcome: Outcome, message: Any, lease: Lease, offset: int) -> Outcome:
        is_late = outcome.code == codes.FENCED and outcome.is_a(Heartbeat)
        return granted(outcome) if is_late else outcome


class Sleepy(Meddler):
    """Counts a sharer's beat for nothing (C6)."""

    def meddle(self, outcome: Outcome, message: Any, lease: Lease, offset: int) -> Outcome:
        for share in lease.shares or ():
            if outcome.is_a(Heartbeat) and share.epoch == message.epoch:
                share.last_beat -= 1
        return outcome


class Generous(Meddler):
    """Grants messages for good to a sharer (B2)."""

    def meddle(self, outcome: Outcome, message: Any, lease: Lease, offset: int) -> Outcome:
        return granted(outcome) if outcome.is_a(ClaimingMessages) and lease.shares is not None else outcome


class Oblivious(World):
    """Forgets groups whose shares are not stale (C16)."""

    def apply(self, offset: int, timestamp_ms: int, value: bytes | None) -> Outcome:
        outcome = super().apply(offset, timestamp_ms, value)
        if outcome.code == codes.GROUP_ACTIVE and outcome.is_a(ForgetGroup):
            self._leases.forget("g")
            return granted(outcome)
        return outcome
