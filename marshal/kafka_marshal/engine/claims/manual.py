"""A lease claimed by hand: pending calls, and the log's answers."""

from __future__ import annotations

from dataclasses import dataclass

from kafka_marshal.engine.claims.leases import HeldLease, LeaseBook, LeaseState
from kafka_marshal.engine.claims.peers import Peers
from kafka_marshal.engine.effects import Outbox
from kafka_marshal.engine.holding import HandIn
from kafka_marshal.engine.inputs import given
from kafka_marshal.types import Key
from rationalizer import ClaimingMessages, CommitRanges, codes


@dataclass(slots=True)
class Answer:
    """The answer to a pending record. accepted: None until our replica applied the record."""

    accepted: bool | None = None
    code: str = ""


class ManualLease:
    """One lease that a user claimed by hand. Call it with the shell's lock held."""

    def __init__(self, key: Key, book: LeaseBook, peers: Peers, outbox: Outbox, ids: tuple[str, str, str]) -> None:
        self.key = key
        self.lease: HeldLease = book.want(key, peers.cp_of(key), self, HeldLease)
        #: Why the last claim was rejected; "": no claim was rejected yet.
        self.refusal: str = ""
        #: Why the lease was lost; "": it was not.
        self.loss: str = ""
        self.is_released: bool = False
        #: The release that ended it; None: not applied yet, or the lease ended otherwise.
        self.hand_in: HandIn | None = None
        self._book = book
        self._peers = peers
        self._outbox = outbox
        self._ids = ids
        self._beats: list[tuple[int | None, Answer]] = []
        self._grants: dict[int, Answer] = {}
        self._next_try = 0.0
        self._tried = False

    @property
    def is_proven(self) -> bool:
        """Whether it can be used: granted by the log, and proven by our own sending (T4)."""
        return self.lease.held and self.lease.valid_until > 0

    # Notifications from the lease (Owner).

    def granted(self, now: float) -> None:
        self.refusal = ""

    def refused(self, code: str, now: float) -> None:
        self.refusal = code
        self._next_try = now + self.lease.heartbeat_interval_ms

    def lost(self, reason: str, now: float) -> None:
        self.loss = reason
        self._answer_all(codes.FENCED)

    def released(self, now: float) -> None:
        self.is_released = True
        self._answer_all(codes.NOT_HELD)

    def beaten(self, last_offset: int | None, accepted: bool, now: float) -> None:
        for place, (offset, answer) in enumerate(self._beats):
            if offset == last_offset:
                answer.accepted = accepted
                del self._beats[: place + 1]
                return

    def settled(self, taken: tuple[int, int] | None, now: float) -> None:
        pass

    def progress_to_report(self) -> int | None:
        return None

    def answered(self, last_offset: int, accepted: bool, code: str, now: float) -> None:
        """Our ClaimingMessages was applied; any accepted copy counts (C17)."""
        answer = self._grants.get(last_offset)
        if answer is not None and not answer.accepted:
            answer.accepted, answer.code = accepted, code

    def handed_in(self, hand_in: HandIn) -> None:
        """Our release was applied as accepted; the first copy ends the lease."""
        self.hand_in = self.hand_in or hand_in

    def _answer_all(self, code: str) -> None:
        for _, answer in self._beats:
            if answer.accepted is None:
                answer.accepted, answer.code = False, code
        for answer in self._grants.values():
            if answer.accepted is None:
                answer.accepted, answer.code = False, code
        self._beats.clear()

    # Requests of the user.

    def step(self, now: float) -> None:
        """Claim, or claim again once that may succeed; while another member holds it, once per HI as a request (C4)."""
        lease = self.lease
        if lease.state is not LeaseState.WANTED:
            return
        if lease.pending.claim_sent_at is not None and now < lease.pending.claim_sent_at + lease.heartbeat_interval_ms:
            return
        if self._peers.is_stopped(lease.cp):
            self.refusal = codes.UPGRADE_REQUIRED
            return
        if self._peers.paused_until(lease.cp, now) is not None:
            self.refusal = codes.PAUSED
            return
        first = not self._tried
        if first or now >= min(self._next_try, self._peers.opens_at(self.key, now)):
            self._next_try = now + lease.heartbeat_interval_ms
            self._tried = True
            epoch = self._peers.inherited.pop(self.key, None) if first else None
            held = self._peers.lease(self.key)
            self._book.claim(lease, now, take_over=held is not None and held.held and held.epoch == epoch)

    def deadline(self, now: float) -> float:
        """When (own clock, ms) ``step`` is due again."""
        lease = self.lease
        if lease.state is not LeaseState.WANTED:
            return float("inf")
        if self._peers.is_stopped(lease.cp):
            return float("inf")
        if lease.pending.claim_sent_at is not None and now < lease.pending.claim_sent_at + lease.heartbeat_interval_ms:
            return lease.pending.claim_sent_at + lease.heartbeat_interval_ms
        pause_ends = self._peers.paused_until(lease.cp, now)
        if pause_ends is not None:
            return pause_ends
        return max(now + 1, min(self._next_try, self._peers.opens_at(self.key, now)))

    @given
    def beat(self, last_offset: int | None, now: float) -> Answer:
        """Send a heartbeat with an offset (C14)."""
        answer = Answer()
        self._beats.append((last_offset, answer))
        self._book.beat(self.lease, last_offset, now)
        return answer

    @given
    def grant(self, last_offset: int, now: float) -> Answer:
        """Send a ClaimingMessages up to last_offset (C12)."""
        answer = self._grants[last_offset] = Answer()
        record = ClaimingMessages(*self._ids, *self.key, self.lease.epoch, last_offset)
        self._outbox.append(self.lease.cp, record)
        return answer

    @given
    def commit_ranges(self, ranges: tuple[tuple[int, int], ...]) -> None:
        """Send a CommitRanges (P3); an admin restores old progress with it (C11)."""
        self._outbox.append(self.lease.cp, CommitRanges(*self._ids, *self.key, self.lease.epoch, ranges))

    @given
    def release(self, last_offset: int | None, now: float) -> None:
        """Release the lease, or stop waiting for its grant."""
        if self.lease.held:
            self._book.release(self.lease, last_offset, now)
        elif self.lease.state is LeaseState.WANTED:
            self._book.drop(self.lease)
            self.is_released = True

    @given
    def release_bare(self, now: float) -> None:
        """Release without an offset, even if a release with one is in flight: the copy first in the log counts."""
        if self.lease.state is LeaseState.RELEASING:
            self._book.release(self.lease, None, now)
        else:
            self.release(None, now)
