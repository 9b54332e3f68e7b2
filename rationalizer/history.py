"""Who owned what from when to when: one fold over a log, for all that replay it.

A span is one owner's time with a lease, under one epoch, or the time in which it had no owner:

    grant   another owner, or the first one (C3, C7)
    free    the owner released it (C8)
    forget  its group was forgotten (C16)

`Owners.see` concludes these from the state after a record. An audit, which does not trust the state, calls them itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from rationalizer.limits import MAX_KEY_HASH, NOTHING_DONE
from rationalizer.outcome import Outcome
from rationalizer.wire.records import ForgetGroup, Heartbeat, ReleasingPartition
from rationalizer.world import World

__all__ = ["BEFORE", "End", "LeaseKey", "Owners", "Span"]

#: (group, topic, partition)
LeaseKey = tuple[str, str, int]

#: The log time of what was so already where the replay began.
BEFORE: Final = -1


class End(StrEnum):
    """How a span ended."""

    OPEN = "open"
    RELEASED = "released"
    #: An operator released it in its owner's name, or had the owner leave (C20).
    EVICTED = "evicted"
    #: Another member claimed it, the owner having been silent for too long (C1, C3).
    REPLACED = "replaced"
    #: A newer instance of the owner took over (C7).
    RESTARTED = "restarted"
    #: It left its coordinated group (G13, X6).
    LEFT = "left"
    #: All of its group went back to a checkpoint (X7, X8).
    RESET = "reset"
    FORGOTTEN = "forgotten"
    #: It had no owner.
    CLAIMED = "claimed"


@dataclass(slots=True)
class Span:
    """One owner's time with a lease, or the time without an owner. Times are log time (ms), offsets the CP's."""

    key: LeaseKey
    #: False: it has no owner; the names and the epoch are then the last owner's, "" where that is not known.
    held: bool
    client_id: str
    instance_id: str
    epoch: int
    since: int
    since_offset: int
    #: As far as the log was read.
    last_beat: int
    #: None while it lasts.
    until: int | None = None
    until_offset: int | None = None
    ended: End = End.OPEN
    #: client_id of the next owner, where that ended it; of a lease that was evicted: the operator's.
    ended_by: str = ""
    #: What was done when it ended, or by now.
    stable: int = NOTHING_DONE
    #: Its release said nothing of offsets.
    wordless: bool = False
    #: client_id of an operator who said that the owner is to be evicted (C20).
    evictor: str = ""
    #: The key hashes that it is about: a part of them only in a coordinated group (G4).
    lo: int = 0
    hi: int = MAX_KEY_HASH
    #: False: a piece of a partition of a coordinated group.
    is_lease: bool = True
    #: For how much (ms) of the time from its last beat to its end the whole log was silent, where that was looked up.
    stood_ms: int = 0

    @property
    def partition(self) -> int:
        """The data partition."""
        return self.key[2]


@dataclass(slots=True)
class Owners:
    """Folds a log into spans, and keeps the one that each lease is in."""

    now: dict[LeaseKey, Span] = field(default_factory=dict)

    def begin(self, world: World) -> None:
        """The replay begins with this state: what is so has been so since before."""
        for lease in world.leases():
            key = (lease.group_id, lease.topic, lease.partition)
            names = (lease.client_id or "", lease.instance_id or "")
            at = lease.epoch if lease.held else world.next_offset
            self.now[key] = Span(key, lease.held, *names, lease.epoch, BEFORE, at, lease.last_beat)

    def grant(
        self, key: LeaseKey, client_id: str, instance_id: str, epoch: int, offset: int, log_time: int, ended: End
    ) -> Span | None:
        """A new owner; what ended by that. ended: how, if it had an owner."""
        before = self._close(key, offset, log_time, ended, client_id)
        if before is not None and not before.held:
            before.ended = End.CLAIMED
        self.now[key] = Span(key, True, client_id, instance_id, epoch, log_time, offset, log_time)
        return before

    def free(self, key: LeaseKey, offset: int, log_time: int, ended: End = End.RELEASED) -> Span | None:
        """It has no owner any more; what ended by that."""
        before = self._close(key, offset, log_time, ended)
        if before is not None and ended is End.EVICTED:
            before.ended_by = before.evictor
        last = ("", "", 0) if before is None else (before.client_id, before.instance_id, before.epoch)
        self.now[key] = Span(key, False, *last, log_time, offset, log_time)
        return before

    def forget(self, key: LeaseKey, offset: int, log_time: int) -> Span | None:
        """There is no such lease any more; what ended by that."""
        self._close(key, offset, log_time, End.FORGOTTEN)
        return self.now.pop(key, None)

    def _close(self, key: LeaseKey, offset: int, log_time: int, ended: End, by: str = "") -> Span | None:
        span = self.now.get(key)
        if span is not None:
            span.until, span.until_offset, span.ended, span.ended_by = log_time, offset, ended, by
        return span

    def touched(self, outcome: Outcome) -> list[LeaseKey]:
        """The leases that a record which took effect is about, in its order; one may be named more than once."""
        message = outcome.message
        if message is not None and outcome.accepted and outcome.is_a(ForgetGroup):
            return [key for key in self.now if key[0] == message.group_id]
        return [key for key, _ in outcome.leases]

    def overhear(self, outcome: Outcome) -> None:
        """Take in a record that was rejected: it may say who evicts an owner (C20)."""
        if outcome.accepted or not outcome.is_a(ReleasingPartition) or (lease := outcome.lease) is None:
            return
        message, span = outcome.message, self.now.get(lease)
        if span is not None and span.held and span.epoch == message.epoch and span.client_id != message.client_id:
            span.evictor = message.client_id

    def see(self, key: LeaseKey, world: World, outcome: Outcome) -> Span | None:
        """Take in the effect on a lease of a record, which this world has just applied; the span that it began."""
        if not outcome.accepted:
            self.overhear(outcome)
            return None
        lease, span = world.lease(*key), self.now.get(key)
        at = world.next_offset - 1, world.log_time
        if lease is None:
            self.forget(key, *at)
            return None
        if span is not None:
            span.stable = lease.progress.stable
        if span is not None and span.epoch == lease.epoch and span.held == lease.held:
            span.last_beat = lease.last_beat
            return None
        if lease.client_id is None or lease.instance_id is None:
            if outcome.share is not None:  # a stale holder goes (B3)
                self.free(key, *at, End.REPLACED)
                return self.now[key]
            if span is not None and outcome.is_a(ReleasingPartition) and outcome.message is not None:
                span.wordless = outcome.message.last_offset is None
            is_evicted = span is not None and span.wordless and span.evictor != ""
            self.free(key, *at, End.EVICTED if is_evicted else End.RELEASED)
        else:
            ended = End.RESTARTED if outcome.is_a(Heartbeat) else End.REPLACED
            self.grant(key, lease.client_id, lease.instance_id, lease.epoch, *at, ended)
        return self.now[key]
