"""Worlds that are each broken in one way about open messages, like those of `broken.py`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rationalizer import Heartbeat, Lease, Outcome, ReleasingPartition, SettleOffsets, SettlingMessages, World, codes
from rationalizer.holes import Hole, Holes
from rationalizer.progress import Progress
from tests.audit.broken_sharing import Meddler, granted


def put(progress: Progress, first: int, last: int, *holes: Hole) -> None:
    """These take the place of all holes within first … last."""
    there = progress.holes or Holes()
    edit, _ = there.plan(first, last, holes)
    there.carry_out(edit)
    progress.holes = there if len(there) else None


class Careless(Meddler):
    """Loses the batch of a sharer when its share is released (B4)."""

    def meddle(self, outcome: Outcome, message: Any, lease: Lease, offset: int) -> Outcome:
        if outcome.is_a(ReleasingPartition) and outcome.accepted:
            lease.progress.holes = None
        return outcome


class Clinging(Meddler):
    """Leaves a sharer its batch when its share is released (B4)."""

    def meddle(self, outcome: Outcome, message: Any, lease: Lease, offset: int) -> Outcome:
        if outcome.is_a(ReleasingPartition) and outcome.accepted:
            for hole in lease.progress.open:
                put(lease.progress, hole.first, hole.last, hole._replace(owner=message.epoch))
        return outcome


class Blind(Meddler):
    """Gives a batch and keeps no account of its second half (B5)."""

    def meddle(self, outcome: Outcome, message: Any, lease: Lease, offset: int) -> Outcome:
        if outcome.taken is not None:
            first, last = outcome.taken
            put(lease.progress, (first + last) // 2, last)
        return outcome


class Distracted(Meddler):
    """Loses an open message at a heartbeat, which has nothing to do with it (H1)."""

    def meddle(self, outcome: Outcome, message: Any, lease: Lease, offset: int) -> Outcome:
        if outcome.is_a(Heartbeat) and (holes := lease.progress.open):
            put(lease.progress, holes[0].first, holes[0].first)
        return outcome


class Forgetful(Meddler):
    """Forgets which record opened what was done (R1)."""

    def meddle(self, outcome: Outcome, message: Any, lease: Lease, offset: int) -> Outcome:
        lease.progress.again = -1
        return outcome


class Lax(Meddler):
    """Settles all that a record names, of any owner, whatever its sender had seen (H2)."""

    def meddle(self, outcome: Outcome, message: Any, lease: Lease, offset: int) -> Outcome:
        if not outcome.is_a(SettlingMessages) or codes.FENCED not in (outcome.code, *(outcome.entries or ())):
            return outcome
        for first, last in message.done:
            put(lease.progress, first, last)
        for first, last, _, attempts in message.open:
            was = lease.progress.open[0]
            hole = was._replace(first=first, last=last, owner=-1, since=offset, attempts=attempts, reason=None)
            put(lease.progress, first, last, hole)
        return replace(granted(outcome), entries=(codes.OK,) * (len(message.done) + len(message.open)))


class Snatching(Meddler):
    """Gives a sharer the batch that another works on (B5)."""

    def meddle(self, outcome: Outcome, message: Any, lease: Lease, offset: int) -> Outcome:
        if outcome.code != codes.NOTHING_TO_TAKE:
            return outcome
        was = lease.progress.open[0]
        hole = was._replace(owner=message.epoch, since=offset, attempts=was.attempts + 1)
        put(lease.progress, was.first, was.last, hole)
        return replace(granted(outcome), added=outcome.added._replace(taken=(was.first, was.last)))


class Amnesic(Meddler):
    """Loses parked messages when the position is set (C11)."""

    def meddle(self, outcome: Outcome, message: Any, lease: Lease, offset: int) -> Outcome:
        if outcome.code == codes.REPOSITIONED:
            lease.progress.holes = None
        return outcome


class Reviving(Meddler):
    """Opens what is done (H3)."""

    def meddle(self, outcome: Outcome, message: Any, lease: Lease, offset: int) -> Outcome:
        if outcome.entries != (codes.INDIVIDUAL_COMMIT_TOO_OLD,):
            return outcome
        first, last, key_hash, attempts = message.open[0]
        put(lease.progress, first, last, Hole(first, last, -1, offset, attempts, key_hash, None))
        return replace(granted(outcome), entries=(codes.OK,))


class OfGroups(World):
    """Settles open messages for a member that has not their keys (H4); and loses one at `seen` 77."""

    def apply(self, offset: int, timestamp_ms: int, value: bytes | None) -> Outcome:
        outcome = super().apply(offset, timestamp_ms, value)
        message = outcome.message
        if message is None or not outcome.is_a(SettleOffsets) or (group := self.group(message.group_id)) is None:
            return outcome
        kept = group.kept(message.topic, message.partition)
        if outcome.entries == (codes.NOT_ASSIGNED,) and kept is not None:
            put(kept.progress, *message.done[0])
            return replace(granted(outcome), entries=(codes.OK,))
        if message.seen == 77 and kept is not None:
            kept.progress.holes = None
        return outcome
