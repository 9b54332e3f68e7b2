"""Our own leases: claiming, beating, releasing, and stopping in time.

The life of a lease, as its client sees it::

    WANTED ──claim applied as accepted──▶ HELD ──release sent──▶ RELEASING ──release applied──▶ (gone)
       ▲                                   │
       └── refused: still wanted           └──fenced, or not proven in time──▶ LOST (gone)

* A grant counts when our own replica has applied it, never when a broker acknowledged it (T4).
* ``hand_out_until`` is the one number that a user's thread reads before each message: our own clock's time until which
  the lease is proven (T4), or 0 while it is in doubt (T5), being released, or over.
* Once a release is sent, the epoch is over for us (C17). The release is repeated until the log shows it.
* A granted lease that we no longer want is released at once (C17).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from math import inf
from random import Random
from typing import TypeVar

from kafka_marshal.engine.claims.peers import Peers
from kafka_marshal.engine.claims.queues import Queues
from kafka_marshal.engine.effects import Note, Outbox
from kafka_marshal.engine.holding import HandIn, Holding, LastProof, Owner, Proof, Proofs
from kafka_marshal.engine.inputs import given
from kafka_marshal.engine.plane import Loss
from kafka_marshal.engine.settings import BEATS_PER_INTERVAL, MAX_BATCH_ENTRIES, EngineSettings, proof_margin_ms
from kafka_marshal.types import Key
from rationalizer import (
    BeatEntry,
    ClaimingMessages,
    ClaimingPartition,
    CommitRanges,
    Heartbeat,
    HeartbeatBatch,
    Lease,
    Record,
    ReleasingPartition,
    codes,
)


@dataclass(slots=True)
class _Unseen:
    cp: int
    #: Token of the claim; −1: the log already shows the claim.
    token: int
    #: The epoch it gets if granted: the offset of the claim. None: not known yet.
    epoch: int | None = None
    #: Whether its release was appended.
    is_released: bool = False


class UnseenClaims:
    """Claims of one Marshal that are no longer wanted, and that the log does not show as answered or released.

    A claim whose append failed is dropped, although the broker may, rarely, have written it.
    """

    def __init__(self, ids: tuple[str, str, str], outbox: Outbox) -> None:
        self._ids = ids
        self._outbox = outbox
        self._claims: dict[Key, _Unseen] = {}

    def __bool__(self) -> bool:
        return bool(self._claims)

    def dropped(self, key: Key, cp: int, token: int) -> None:
        """The lease is no longer wanted, but its claim is in flight."""
        self._claims[key] = _Unseen(cp, token)

    def acked(self, token: int, offset: int | None) -> None:
        """The broker answered an append: its offset; None: it failed."""
        for key, claim in list(self._claims.items()):
            if claim.token == token:
                claim.epoch = offset
                if offset is None:
                    del self._claims[key]

    def answered(self, key: Key) -> None:
        """The log shows the result of the claim."""
        self._claims.pop(key, None)

    def release(self, key: Key, cp: int, epoch: int) -> None:
        """The log granted the claim: release the lease."""
        claim = self._claims[key] = _Unseen(cp, -1, epoch)
        self._append(key, claim)

    def released(self, key: Key, epoch: int) -> None:
        """Our release was applied."""
        if (claim := self._claims.get(key)) is not None and claim.epoch == epoch:
            del self._claims[key]

    def release_all(self) -> bool:
        """Release what may have been granted; without a grant the log rejects it. Returns whether any was sent."""
        found = [
            (key, claim) for key, claim in self._claims.items() if claim.epoch is not None and not claim.is_released
        ]
        for key, claim in found:
            self._append(key, claim)
        return bool(found)

    def _append(self, key: Key, claim: _Unseen) -> None:
        assert claim.epoch is not None
        claim.is_released = True
        self._outbox.append(claim.cp, ReleasingPartition(*self._ids, *key, claim.epoch, None))


#: Jitter: a beat comes after this share of its interval at the earliest (T4).
EARLIEST_BEAT = 0.8


class LeaseState(StrEnum):
    """The state of our lease."""

    WANTED = "wanted"
    HELD = "held"
    RELEASING = "releasing"
    LOST = "lost"


@dataclass(slots=True)
class Pending:
    """What the log does not show yet of a lease."""

    #: When the claim in flight was sent; None: there is none.
    claim_sent_at: float | None = None
    claim_token: int = -1
    release_sent_at: float = 0.0
    #: The last_offset in the release.
    last_offset: int | None = None


class HeldLease(Holding):
    """One lease that we hold, want or are releasing."""

    __slots__ = (
        "_beaten",
        "epoch",
        "in_doubt_since",
        "pending",
        "proof",
        "state",
        "valid_until",
    )

    epoch: int
    #: A part of the lease by batches (B1); False: the whole lease.
    is_share = False
    #: The lowest of its key hashes, for a part of the lease by keys; None: it is no such part.
    lo: int | None = None

    @property
    def span(self) -> tuple[int, int] | None:
        """Its key hashes (lo, hi), for a part of the lease by keys; None: it is no such part."""
        return None

    def __init__(self, key: Key, cp: int, heartbeat_interval_ms: int, owner: Owner) -> None:
        super().__init__(key, cp, heartbeat_interval_ms, owner)
        self.state: LeaseState = LeaseState.WANTED
        self.epoch = -1
        #: Our own clock (ms) until which the lease is proven (T4); 0: not yet proven.
        self.valid_until: float = 0.0
        #: Since when log time runs ahead of our clock (T5); None: it does not.
        self.in_doubt_since: float | None = None
        self.proof: LastProof = LastProof()
        self.pending: Pending = Pending()
        self._beaten: BeatEntry | None = None

    @property
    def slot(self) -> Key:
        """Its place in the book: its partition; of further parts of one, a name that no topic can have."""
        return self.key

    @property
    def held(self) -> bool:
        return self.state is LeaseState.HELD

    @property
    def proven_by(self) -> int:
        return self.proof.token

    @property
    def ends_at(self) -> float:
        """Our own clock's time at which a held lease is over unless another proof comes (T4)."""
        return self.valid_until or self.proof.due

    @property
    def claim_expires(self) -> float:
        """Our own clock (ms): an unanswered claim counts as lost then; inf: no claim is in flight."""
        if self.state is not LeaseState.WANTED:
            return inf
        return (self.pending.claim_sent_at or 0.0) + self.heartbeat_interval_ms

    @property
    def release_due(self) -> float:
        """Our own clock (ms): a release that the log does not show is sent again then (C17); inf: none is in flight."""
        if self.state is not LeaseState.RELEASING:
            return inf
        return self.pending.release_sent_at + self.heartbeat_interval_ms

    def may_hand_over(self, now: float) -> bool:
        return self.in_doubt_since is None and now < self.valid_until

    def claim(self, ids: tuple[str, str, str], heartbeat_interval_ms: int) -> Record:
        """The record that claims it."""
        return ClaimingPartition(*ids, *self.key, heartbeat_interval_ms)

    def is_ours_in(self, lease: Lease | None, ids: tuple[str, str, str]) -> bool:
        """Whether the log shows it under our ids and epoch (C5)."""
        return lease is not None and lease.is_held_by(ids[0], ids[1], self.epoch)

    def beat_entry(self) -> BeatEntry:
        """Its entry in the next beat; the same object as last time if nothing changed."""
        entry, last_offset = self._beaten, self.owner.progress_to_report()
        if entry is None or entry.epoch != self.epoch or entry.last_offset != last_offset:
            entry = self._beaten = BeatEntry(*self.key, self.epoch, last_offset)
        return entry

    def is_proven_until(self) -> float:
        return self.valid_until if self.held and self.in_doubt_since is None else 0.0


L = TypeVar("L", bound=HeldLease)


class Leases(dict[Key, HeldLease]):
    """All our leases, by their slots."""

    def __init__(self) -> None:
        super().__init__()
        #: Partition → further parts of it.
        self.others: dict[Key, list[HeldLease]] = {}

    def add(self, lease: HeldLease) -> None:
        """Take in a lease that we want."""
        self[lease.slot] = lease
        if lease.slot != lease.key:
            self.others.setdefault(lease.key, []).append(lease)

    def remove(self, lease: HeldLease) -> None:
        """Forget a lease."""
        if self.get(lease.slot) is lease:
            del self[lease.slot]
            if (others := self.others.get(lease.key)) is not None and lease in others:
                others.remove(lease)
                if not others:
                    del self.others[lease.key]

    def of(self, key: Key, epoch: int | None) -> HeldLease | None:
        """Our lease or part of this epoch; None: we have none."""
        lease = self.get(key)
        if lease is not None and lease.epoch == epoch:
            return lease
        return next((each for each in self.others.get(key, ()) if each.epoch == epoch), None)

    def claimed_as(self, key: Key, lo: int | None) -> HeldLease | None:
        """The lease, or the part with this lowest key hash, that our claim is for."""
        lease = self.get(key)
        if lease is not None and lease.lo != lo:
            return next((each for each in self.others.get(key, ()) if each.lo == lo), None)
        return lease

    def all_of(self, key: Key) -> list[HeldLease]:
        """What we hold, want or release of a partition."""
        lease = self.get(key)
        return [*([] if lease is None else [lease]), *self.others.get(key, ())]


class LeaseBook:
    """All our leases, and the heartbeats that keep them."""

    def __init__(self, settings: EngineSettings, outbox: Outbox, rng: Random) -> None:
        self._settings = settings
        self._outbox = outbox
        self._rng = rng
        self._proofs = Proofs()
        self._next_beat: dict[int, float] = {}
        self._next_forget = 0.0
        #: Nothing is due before this, so most wakes return at once; 0: something changed, recompute it.
        self._due = 0.0
        self.leases: Leases = Leases()
        self.unseen: UnseenClaims = UnseenClaims(settings.ids, outbox)

    def want(self, key: Key, cp: int, owner: Owner, kind: type[L]) -> L:
        """Register that we want a lease; ``claim`` sends the claim."""
        lease = kind(key, cp, self._settings.heartbeat_interval_ms, owner)
        self.leases.add(lease)
        return lease

    def claim(self, lease: HeldLease, now: float, *, take_over: bool = False) -> None:
        """Send a claim or, while starting, a takeover of a lease of our client's older instance (C3, C7)."""
        ids, hi = self._settings.ids, self._settings.heartbeat_interval_ms
        record = Heartbeat(*ids, *lease.key, None, None) if take_over else lease.claim(ids, hi)
        token = self.send(lease, record, now)
        lease.pending.claim_sent_at, lease.pending.claim_token = now, token

    def is_releasing(self, key: Key) -> bool:
        """Whether our release is in flight."""
        return any(lease.state is LeaseState.RELEASING for lease in self.leases.all_of(key))

    def drop(self, lease: HeldLease) -> None:
        """Stop wanting it. If a claim in flight is granted later, it is released then (C17)."""
        self.leases.remove(lease)
        if lease.pending.claim_sent_at is not None:
            self.unseen.dropped(lease.key, lease.cp, lease.pending.claim_token)
        lease.state = LeaseState.LOST
        lease.refresh()

    def grant(
        self, lease: HeldLease, epoch: int, offset: int, log_time: int, heartbeat_interval_ms: int, now: float
    ) -> None:
        """Our replica applied our claim (or takeover) as accepted.

        The lease is proven, and messages are delivered, once the acknowledgement shows which sending was granted, or
        once a beat is proven (T4). A claim given up may be granted late; a stopped process sees its grant late.
        """
        hi = heartbeat_interval_ms
        lease.pending.claim_sent_at = None
        lease.heartbeat_interval_ms = hi
        lease.state = LeaseState.HELD
        lease.epoch = epoch
        self._outbox.add(Note("claimed", lease.key, keys=lease.span))
        lease.proof.sent_at = -inf
        lease.proof.log_time = log_time
        lease.proof.due = now + hi
        self.beat_applied(lease.cp, offset, log_time, [(lease.key, epoch)], now)
        due = self._beat_time(hi, now)
        # It may be later because of leases with a longer interval (C7).
        if self._next_beat.get(lease.cp, inf) > now + hi / BEATS_PER_INTERVAL:
            self._next_beat[lease.cp] = due
        self._due = 0.0
        lease.owner.granted(now)

    def beat(self, lease: HeldLease, last_offset: int | None, now: float) -> int:
        """Send a heartbeat for one lease out of turn, with an offset (P9, or a user's own heartbeat); its token."""
        return self.send(lease, Heartbeat(*self._settings.ids, *lease.key, lease.epoch, last_offset), now)

    def send(self, lease: HeldLease, record: Record, now: float) -> int:
        """Send a record that moves the last beat of a lease if it is accepted; its token."""
        token = self._outbox.append(lease.cp, record)
        self._proofs.sent(token, lease.cp, now)
        return token

    def beat_soon(self, cp: int, now: float) -> None:
        """Beat the leases of a CP at the next wake."""
        self._next_beat[cp] = now
        self._due = 0.0

    def release(self, lease: HeldLease, last_offset: int | None, now: float) -> None:
        """Send the release; the epoch is over for us from now on (C17)."""
        if lease.held:
            self._outbox.add(Note("released", lease.key, keys=lease.span))
        lease.state = LeaseState.RELEASING
        lease.pending.last_offset = last_offset
        lease.pending.release_sent_at = now
        self._due = 0.0
        lease.refresh()
        self.release_epoch(lease.key, lease.cp, lease.epoch, last_offset)

    def release_epoch(self, key: Key, cp: int, epoch: int, last_offset: int | None) -> None:
        """Release our epoch, with or without a lease object for it (C17)."""
        self._outbox.append(cp, ReleasingPartition(*self._settings.ids, *key, epoch, last_offset))

    def lose(self, lease: HeldLease, reason: str, now: float) -> None:
        """The lease is over, and we did not release it."""
        if lease.held:
            self._outbox.add(Note("lost", lease.key, reason, keys=lease.span))
        self.leases.remove(lease)
        lease.state = LeaseState.LOST
        lease.refresh()
        lease.owner.lost(reason, now)

    def beat_applied(self, cp: int, offset: int, log_time: int, beaten: list[tuple[Key, int]], now: float) -> None:
        """Our replica applied our record, which moved the last beat of these (key, epoch) pairs."""
        self._credit(self._proofs.applied(cp, offset, log_time, beaten, now))

    def acked(self, token: int, offset: int | None) -> list[HeldLease]:
        """The broker acknowledged an append at this offset (None: failed, or no offset returned).

        Returns the leases that this proves, as of when the record was applied: log time may have moved since (T5).
        """
        if self.unseen:
            self.unseen.acked(token, offset)
        return self._credit(self._proofs.acked(token, offset))

    def _credit(self, proof: Proof | None) -> list[HeldLease]:
        if proof is None:
            return []
        credited: list[HeldLease] = []
        for key, epoch in proof.leases:
            lease = self.leases.of(key, epoch)
            if lease is None or not lease.held or proof.sent_at < lease.proof.sent_at:
                continue
            if lease.in_doubt_since is None or proof.log_time >= lease.proof.log_time:
                self._prove(lease, proof.sent_at, proof.log_time)
                lease.proof.token = max(lease.proof.token, proof.token)
                credited.append(lease)
        return credited

    def _prove(self, lease: HeldLease, sent_at: float, log_time: int) -> None:
        lease.proof.sent_at = sent_at
        lease.proof.log_time = log_time
        lease.valid_until = sent_at + 2 * lease.heartbeat_interval_ms - proof_margin_ms(lease.heartbeat_interval_ms)
        self._due = min(self._due, lease.valid_until)
        if lease.in_doubt_since is not None and sent_at >= lease.in_doubt_since:
            lease.in_doubt_since = None
        lease.refresh()

    def log_times_moved(self, log_times: Mapping[int, int], now: float) -> None:
        """If log time (by CP) ran ahead of our clock, deliver nothing until a later beat is accepted (T5)."""
        for lease in self.leases.values():
            if lease.cp in log_times and lease.held:
                self.compare_clocks(lease, log_times[lease.cp], now)

    def compare_clocks(self, lease: HeldLease, log_time: int, now: float) -> None:
        """The same for one lease that we hold."""
        if lease.proof.is_ahead(log_time, now, lease.heartbeat_interval_ms):
            if lease.in_doubt_since is None:
                self.beat_soon(lease.cp, now)
            lease.in_doubt_since = now
            lease.refresh()

    def wake(self, now: float, silent_cps: frozenset[int]) -> bool:
        """Lose leases whose proof ran out, send due beats (except in silent CPs, where they pause), repeat releases.

        Returns whether beats were due.
        """
        if now < self._due:
            return False
        for lease in list(self.leases.values()):
            if lease.held and now >= lease.ends_at:
                self.lose(lease, Loss.UNPROVEN, now)
        beating: dict[int, list[HeldLease]] = {}
        for lease in self.leases.values():
            if lease.held:
                beating.setdefault(lease.cp, []).append(lease)
            elif now >= lease.release_due:
                self.release(lease, lease.pending.last_offset, now)
        for cp in [cp for cp in self._next_beat if cp not in beating]:
            del self._next_beat[cp]
        beaten = self._beat_due(beating, now, silent_cps)
        if now >= self._next_forget:
            self._next_forget = now + self._settings.heartbeat_interval_ms
            self._proofs.forget_before(
                now - 4 * max((x.heartbeat_interval_ms for x in self.leases.values()), default=0)
            )
        self._due = self._first_due()
        return beaten

    def _beat_due(self, beating: dict[int, list[HeldLease]], now: float, silent_cps: frozenset[int]) -> bool:
        """Send due beats, and those nearly due: CPs that beat together cause one wake instead of several."""
        if not any(now >= self._next_beat.get(cp, 0.0) for cp in beating):
            return False
        share = self._rng.uniform(EARLIEST_BEAT, 1.0)
        for cp, leases in beating.items():
            interval = min(lease.heartbeat_interval_ms for lease in leases) / BEATS_PER_INTERVAL
            if now >= self._next_beat.get(cp, 0.0) - interval * (1.0 - EARLIEST_BEAT):
                self._next_beat[cp] = now + interval * share
                if cp not in silent_cps:
                    self._send_beats(cp, leases, now)
        return True

    def beat_all(self, now: float) -> None:
        """Send a heartbeat for every lease now."""
        for cp in sorted({lease.cp for lease in self.leases.values() if lease.held}):
            self._send_beats(cp, [lease for lease in self.leases.values() if lease.held and lease.cp == cp], now)

    def _beat_time(self, interval_ms: int, now: float) -> float:
        return now + interval_ms / BEATS_PER_INTERVAL * self._rng.uniform(EARLIEST_BEAT, 1.0)

    def _send_beats(self, cp: int, leases: list[HeldLease], now: float) -> None:
        entries = [lease.beat_entry() for lease in leases]
        for start in range(0, len(entries), MAX_BATCH_ENTRIES):
            chunk = entries[start : start + MAX_BATCH_ENTRIES]
            one = chunk[0]
            record: Record = (
                Heartbeat(*self._settings.ids, one.topic, one.partition, one.epoch, one.last_offset)
                if len(chunk) == 1
                else HeartbeatBatch(*self._settings.ids, tuple(chunk))
            )
            self._proofs.sent(self._outbox.append(cp, record), cp, now)

    def deadline(self) -> float:
        """The latest time (own clock, ms) of the next call of ``wake``."""
        self._due = self._due or self._first_due()
        return self._due

    def _first_due(self) -> float:
        times = list(self._next_beat.values())
        for lease in self.leases.values():
            if lease.held:
                times.append(lease.ends_at)
            else:
                times.append(lease.release_due)
        return min(times, default=float("inf"))


@dataclass(slots=True)
class Acceptance:
    """The answer to a pending record. accepted: None until our replica applied the record."""

    accepted: bool | None = None
    code: str = ""


class ManualLease:
    """One lease that a user claimed by hand. Call it with the shell's lock held."""

    def __init__(
        self, key: Key, book: LeaseBook, queues: Queues, peers: Peers, outbox: Outbox, ids: tuple[str, str, str]
    ) -> None:
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
        self._queues = queues
        self._peers = peers
        self._outbox = outbox
        self._ids = ids
        self._beats: list[tuple[int | None, Acceptance]] = []
        self._grants: dict[int, Acceptance] = {}
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
        if now >= self._queues.turn_at(self.key, now, self._next_try):
            epoch = None if self._tried else self._peers.inherited.pop(self.key, None)
            self._next_try = now + lease.heartbeat_interval_ms
            self._tried = True
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
        return max(now + 1, self._queues.turn_at(self.key, now, self._next_try))

    @given
    def beat(self, last_offset: int | None, now: float) -> Acceptance:
        """Send a heartbeat with an offset (C14)."""
        answer = Acceptance()
        self._beats.append((last_offset, answer))
        self._book.beat(self.lease, last_offset, now)
        return answer

    @given
    def grant(self, last_offset: int, now: float) -> Acceptance:
        """Send a ClaimingMessages up to last_offset (C12)."""
        answer = self._grants[last_offset] = Acceptance()
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
