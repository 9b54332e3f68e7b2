"""Who shared a lease, from when to when: one fold over a log, as `rationalizer.history` does for whole leases."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rationalizer import ClaimingShare, ReleasingPartition, SettlingMessages
from rationalizer.history import End, LeaseKey, Span
from rationalizer.holes import NO_KEY

if TYPE_CHECKING:
    from rationalizer import Lease, Outcome, World
    from rationalizer.leases.shares import Share


class ShareSpans:
    """Who shared one lease, from when to when: a span for each share; by batches, its lo and hi are NO_KEY."""

    def __init__(self, key: LeaseKey) -> None:
        self.key = key
        self.all: list[Span] = []
        #: By epoch, those that have not ended.
        self._now: dict[int, tuple[Share, Span]] = {}

    def begin(self, lease: Lease | None, since: int) -> None:
        """The log begins at this log time, with this state."""
        for share in (lease and lease.shares) or ():
            self._add(share, since)

    def see(self, world: World, outcome: Outcome) -> None:
        """Take in the effect of a record that this world has just applied."""
        lease = world.lease(*self.key)
        shares = (lease and lease.shares) or ()
        if outcome.is_a(ReleasingPartition) and outcome.message.epoch in self._now and not outcome.accepted:
            share, span = self._now[outcome.message.epoch]
            if share.client_id != outcome.message.client_id:
                span.evictor = outcome.message.client_id  # C20
        is_claim = outcome.accepted and outcome.is_a(ClaimingShare)
        if not is_claim and len(shares) == len(self._now):
            return  # a share begins by its claim alone
        there = {share.epoch: share for share in shares}
        for epoch in [each for each in self._now if each not in there]:
            self._end(*self._now.pop(epoch), lease, world, outcome)
        for share in there.values():
            if share.epoch not in self._now:
                self._add(share, world.log_time)

    def now(self) -> list[tuple[Share, Span]]:
        """Those that have not ended, by keys."""
        return sorted(self._now.values(), key=lambda each: (each[1].lo, each[1].client_id))

    def without(self, free: Span) -> list[Span]:
        """The parts of a time without an owner in which no member shared it either."""
        found = []
        for share in self.all:
            if share.until_offset is not None and share.until_offset <= free.since_offset:
                continue
            if free.until_offset is not None and share.since_offset >= free.until_offset:
                break
            if share.since_offset > free.since_offset:
                at = share.since, share.since_offset, End.CLAIMED, share.client_id
                found.append(replace(free, until=at[0], until_offset=at[1], ended=at[2], ended_by=at[3]))
            if share.until_offset is None or share.until is None or share.until_offset == free.until_offset:
                return found
            free = replace(free, since=share.until, since_offset=share.until_offset)
        return [*found, free]

    def _add(self, share: Share, since: int) -> None:
        names = share.client_id, share.instance_id, share.epoch
        span = Span(self.key, True, *names, since, share.epoch, share.last_beat, lo=share.lo, hi=share.hi)
        self._now[share.epoch] = share, span
        self.all.append(span)

    def _end(self, share: Share, span: Span, lease: Lease | None, world: World, outcome: Outcome) -> None:
        span.until, span.until_offset, span.last_beat = world.log_time, world.next_offset - 1, share.last_beat
        message = outcome.message
        if lease is None or message is None:
            span.ended = End.FORGOTTEN
            return
        span.stable = done_by(lease, span)
        span.ended, span.ended_by = End.REPLACED, "" if outcome.is_a(SettlingMessages) else message.client_id
        if outcome.is_a(ReleasingPartition):
            is_evicted = span.evictor != "" and message.last_offset is None
            span.ended, span.ended_by = (End.EVICTED, span.evictor) if is_evicted else (End.RELEASED, "")


def done_by(lease: Lease, span: Span) -> int:
    """The last offset up to which all of the keys of a share are done; by batches: all keys."""
    return lease.progress.stable if span.lo == NO_KEY else lease.progress.floor([(span.lo, span.hi)])
