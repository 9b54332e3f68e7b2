"""Our own leases: claiming, beating, releasing, and stopping in time.

The life of a lease, as its client sees it::

    WANTED ──claim applied as accepted──▶ HELD ──release sent──▶ RELEASING ──release applied──▶ (gone)
       ▲                                   │
       └── refused: wanted still           └──fenced, or not proven in time──▶ LOST (gone)

* A grant counts when our own replica has applied it, never when a broker acknowledged it (T4).
* ``hand_out_until`` is the one number a user's thread looks at before each message: our own clock's time until which
  the lease is proven (T4), or 0 while it is in doubt (T5), being let go, or over.
* Once a release was sent the epoch is over for us (C17); it is sent again until the log shows it.
* A grant nobody wants any more is released at once (C17).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from math import inf
from random import Random

from kafka_marshal.engine.effects import Key, Note, Outbox
from kafka_marshal.engine.plane import Loss, Owner
from kafka_marshal.engine.proofs import Proof, Proofs
from kafka_marshal.engine.settings import BEATS_PER_INTERVAL, MAX_BATCH_ENTRIES, EngineSettings, proof_margin_ms
from rationalizer import BeatEntry, ClaimingPartition, Heartbeat, HeartbeatBatch, Record, ReleasingPartition
from rationalizer.limits import MAX_INTERVALS

__all__ = ["HeldLease", "LeaseBook", "LeaseState", "UnseenClaims"]


@dataclass(slots=True)
class _Unseen:
    cp: int
    #: Of the claim; −1: the log has shown it.
    token: int
    #: The epoch that it has if it is granted: the offset of the claim. None: not known yet.
    epoch: int | None = None
    #: Its release is appended.
    is_released: bool = False


class UnseenClaims:
    """Those of one Marshal. A claim whose append failed is none: it may be written all the same, but seldom is."""

    def __init__(self, ids: tuple[str, str, str], outbox: Outbox) -> None:
        self._ids = ids
        self._outbox = outbox
        self._claims: dict[Key, _Unseen] = {}

    def __bool__(self) -> bool:
        return bool(self._claims)

    def dropped(self, key: Key, cp: int, token: int) -> None:
        """The lease is not wanted any more, and this claim is under way."""
        self._claims[key] = _Unseen(cp, token)

    def acked(self, token: int, offset: int | None) -> None:
        """The broker answered an append: its offset, or None where it failed."""
        for key, claim in list(self._claims.items()):
            if claim.token == token:
                claim.epoch = offset
                if offset is None:
                    del self._claims[key]

    def answered(self, key: Key) -> None:
        """The log shows what became of the claim."""
        self._claims.pop(key, None)

    def release(self, key: Key, cp: int, epoch: int) -> None:
        """The log has granted it: release it."""
        claim = self._claims[key] = _Unseen(cp, -1, epoch)
        self._append(key, claim)

    def released(self, key: Key, epoch: int) -> None:
        """A release of ours was applied."""
        if (claim := self._claims.get(key)) is not None and claim.epoch == epoch:
            del self._claims[key]

    def release_all(self) -> bool:
        """Release what may have been granted, unseen: a release of what was not is rejected. Whether there was any."""
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


#: Beats are jittered downwards to this share of their interval, at most (T4).
EARLIEST_BEAT = 0.8


class LeaseState(StrEnum):
    """Where a lease of ours stands."""

    WANTED = "wanted"
    HELD = "held"
    RELEASING = "releasing"
    LOST = "lost"


@dataclass(slots=True)
class LastProof:
    """What last showed that a lease is ours (T4)."""

    #: By our own clock (ms).
    sent_at: float = 0.0
    log_time: int = 0
    #: Until when a grant may wait for its first one.
    due: float = 0.0


@dataclass(slots=True)
class Pending:
    """What of a lease the log does not show yet."""

    #: When the claim that is under way was sent; None: none is.
    claim_sent_at: float | None = None
    claim_token: int = -1
    release_sent_at: float = 0.0
    #: What the release says to be done.
    last_offset: int | None = None


class HeldLease:
    """One lease that we hold, want or are letting go."""

    __slots__ = (
        "_beaten",
        "cp",
        "epoch",
        "hand_out_until",
        "hand_out_until_s",
        "heartbeat_interval_ms",
        "in_doubt_since",
        "key",
        "owner",
        "pending",
        "proof",
        "proven_until",
        "state",
        "stopped",
        "valid_until",
    )

    #: A lease is of a whole partition.
    keys: None = None
    #: What the log keeps beyond a gap (P5).
    most_intervals = MAX_INTERVALS

    def __init__(self, key: Key, cp: int, heartbeat_interval_ms: int, owner: Owner) -> None:
        self.key: Key = key
        self.cp: int = cp
        self.heartbeat_interval_ms: int = heartbeat_interval_ms
        self.owner: Owner = owner
        self.state: LeaseState = LeaseState.WANTED
        self.epoch: int = -1
        #: Our own clock's time until which the lease is proven (T4); 0: it is not yet.
        self.valid_until: float = 0.0
        #: Until when messages may be handed out: valid_until, or 0. Read without a lock by users' threads.
        self.hand_out_until: float = 0.0
        #: The same in seconds, for who looks before every message.
        self.hand_out_until_s: float = 0.0
        #: The same (ms) for what was granted before (at most once): the lease being let go does not end it.
        self.proven_until: float = 0.0
        #: Nothing more is handed out: it is being let go.
        self.stopped: bool = False
        #: Since when log time runs ahead of our clock (T5).
        self.in_doubt_since: float | None = None
        self.proof: LastProof = LastProof()
        self.pending: Pending = Pending()
        self._beaten: BeatEntry | None = None

    @property
    def held(self) -> bool:
        """Whether the log granted it, and nothing ended it since."""
        return self.state is LeaseState.HELD

    @property
    def ends_at(self) -> float:
        """Our own clock's time at which a held lease is over unless another proof comes (T4)."""
        return self.valid_until or self.proof.due

    @property
    def claim_expires(self) -> float:
        """When a claim that the log has not answered counts as lost; inf: none is under way."""
        if self.state is not LeaseState.WANTED:
            return inf
        return (self.pending.claim_sent_at or 0.0) + self.heartbeat_interval_ms

    @property
    def release_due(self) -> float:
        """When a release that the log does not show by then is sent again (C17); inf: none is under way."""
        if self.state is not LeaseState.RELEASING:
            return inf
        return self.pending.release_sent_at + self.heartbeat_interval_ms

    def is_ending(self, now: float) -> bool:
        """Whether nothing more is handed out: it is over, being let go, or in doubt."""
        return now >= self.hand_out_until

    def may_hand_over(self, now: float) -> bool:
        """Whether what was taken earlier, and granted (C12), may go out: not when the lease may be over (T4)."""
        return self.in_doubt_since is None and now < self.valid_until

    def beat_entry(self) -> BeatEntry:
        """Its part of the next beat; the same as last time where there is nothing new to say."""
        entry, last_offset = self._beaten, self.owner.progress_to_report()
        if entry is None or entry.epoch != self.epoch or entry.last_offset != last_offset:
            entry = self._beaten = BeatEntry(*self.key, self.epoch, last_offset)
        return entry

    def stop(self) -> None:
        """Nothing more is handed out: it is being let go."""
        self.stopped = True
        self.refresh()

    def resume(self) -> None:
        """It is not let go after all: messages are handed out again."""
        self.stopped = False
        self.refresh()

    def refresh(self) -> None:
        """Work out proven_until and hand_out_until anew."""
        self.proven_until = self.valid_until if self.held and self.in_doubt_since is None else 0.0
        self.hand_out_until = 0.0 if self.stopped else self.proven_until
        self.hand_out_until_s = self.hand_out_until / 1000.0


class LeaseBook:
    """All our leases, and the beats that keep them."""

    def __init__(self, settings: EngineSettings, outbox: Outbox, rng: Random) -> None:
        self._settings = settings
        self._outbox = outbox
        self._rng = rng
        self._proofs = Proofs()
        self._next_beat: dict[int, float] = {}
        self._next_forget = 0.0
        #: Nothing is due before this, so that most wakes look at nothing; 0: something changed, work it out anew.
        self._due = 0.0
        self.leases: dict[Key, HeldLease] = {}
        self.unseen: UnseenClaims = UnseenClaims(settings.ids, outbox)

    def want(self, key: Key, cp: int, owner: Owner) -> HeldLease:
        """Note that we want a lease; ``claim`` sends the claim."""
        lease = HeldLease(key, cp, self._settings.heartbeat_interval_ms, owner)
        self.leases[key] = lease
        return lease

    def claim(self, lease: HeldLease, now: float, *, take_over: bool = False) -> None:
        """Send a claim, or, while starting, a takeover of our predecessor's lease (C3, C7)."""
        topic, partition = lease.key
        record = (
            Heartbeat(*self._settings.ids, topic, partition, None, None)
            if take_over
            else ClaimingPartition(*self._settings.ids, topic, partition, self._settings.heartbeat_interval_ms)
        )
        token = self._outbox.append(lease.cp, record)
        self._proofs.sent(token, lease.cp, now)
        lease.pending.claim_sent_at, lease.pending.claim_token = now, token

    def is_releasing(self, key: Key) -> bool:
        """Whether a release of ours is under way."""
        lease = self.leases.get(key)
        return lease is not None and lease.state is LeaseState.RELEASING

    def drop(self, lease: HeldLease) -> None:
        """Want it no longer. A claim under way that is granted later is released then (C17)."""
        if self.leases.get(lease.key) is lease:
            del self.leases[lease.key]
        if lease.pending.claim_sent_at is not None:
            self.unseen.dropped(lease.key, lease.cp, lease.pending.claim_token)
        lease.state = LeaseState.LOST
        lease.refresh()

    def grant(
        self, lease: HeldLease, epoch: int, offset: int, log_time: int, heartbeat_interval_ms: int, now: float
    ) -> None:
        """Our replica applied our claim (or takeover) as accepted.

        It is proven, and messages are handed out, once the acknowledgement has told which of our sendings this was (a
        claim given up may be granted late, a stopped process sees its grant late), or once a beat is proven (T4).
        """
        hi = heartbeat_interval_ms
        lease.pending.claim_sent_at = None
        lease.heartbeat_interval_ms = hi
        lease.state = LeaseState.HELD
        lease.epoch = epoch
        self._outbox.add(Note("claimed", lease.key))
        lease.proof.sent_at = -inf
        lease.proof.log_time = log_time
        lease.proof.due = now + hi
        self.beat_applied(lease.cp, offset, log_time, [(lease.key, epoch)], now)
        due = self._beat_time(hi, now)
        if self._next_beat.get(lease.cp, inf) > now + hi / BEATS_PER_INTERVAL:  # of leases with a longer interval (C7)
            self._next_beat[lease.cp] = due
        self._due = 0.0
        lease.owner.granted(now)

    def beat(self, lease: HeldLease, last_offset: int | None, now: float) -> None:
        """Beat one lease out of turn, with an offset (P9, or a user's own heartbeat)."""
        token = self._outbox.append(lease.cp, Heartbeat(*self._settings.ids, *lease.key, lease.epoch, last_offset))
        self._proofs.sent(token, lease.cp, now)

    def beat_soon(self, cp: int, now: float) -> None:
        """Beat the leases of a CP at the next wake."""
        self._next_beat[cp] = now
        self._due = 0.0

    def release(self, lease: HeldLease, last_offset: int | None, now: float) -> None:
        """Send the release; from here on the epoch is over for us (C17)."""
        if lease.held:
            self._outbox.add(Note("released", lease.key))
        lease.state = LeaseState.RELEASING
        lease.pending.last_offset = last_offset
        lease.pending.release_sent_at = now
        self._due = 0.0
        lease.refresh()
        self.release_epoch(lease.key, lease.cp, lease.epoch, last_offset)

    def release_epoch(self, key: Key, cp: int, epoch: int, last_offset: int | None) -> None:
        """Release an epoch of ours, whether or not a lease object stands for it (C17)."""
        self._outbox.append(cp, ReleasingPartition(*self._settings.ids, *key, epoch, last_offset))

    def lose(self, lease: HeldLease, reason: str, now: float) -> None:
        """The lease is over, not by our will."""
        if lease.held:
            self._outbox.add(Note("lost", lease.key, reason))
        if self.leases.get(lease.key) is lease:
            del self.leases[lease.key]
        lease.state = LeaseState.LOST
        lease.refresh()
        lease.owner.lost(reason, now)

    def beat_applied(self, cp: int, offset: int, log_time: int, beaten: list[tuple[Key, int]], now: float) -> None:
        """Our replica applied a record of ours that moved the last beat of these (key, epoch)s."""
        self._credit(self._proofs.applied(cp, offset, log_time, beaten, now))

    def acked(self, token: int, offset: int | None) -> list[HeldLease]:
        """The broker acknowledged an append at this offset (None: failed, or no offset told); what that proves.

        It proves it as of when the record was applied: log time may have moved on since (T5).
        """
        if self.unseen:
            self.unseen.acked(token, offset)
        return self._credit(self._proofs.acked(token, offset))

    def _credit(self, proof: Proof | None) -> list[HeldLease]:
        if proof is None:
            return []
        credited: list[HeldLease] = []
        for key, epoch in proof.leases:
            lease = self.leases.get(key)
            if lease is None or not lease.held or lease.epoch != epoch or proof.sent_at < lease.proof.sent_at:
                continue
            if lease.in_doubt_since is None or proof.log_time >= lease.proof.log_time:
                self._prove(lease, proof.sent_at, proof.log_time)
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
        """T5: where log time (by CP) ran ahead of our clock, hand out nothing until a later beat is accepted."""
        for lease in self.leases.values():
            if lease.cp in log_times and lease.held:
                self.compare_clocks(lease, log_times[lease.cp], now)

    def compare_clocks(self, lease: HeldLease, log_time: int, now: float) -> None:
        """The same of one lease that we hold."""
        ahead = (log_time - lease.proof.log_time) - (now - lease.proof.sent_at)
        if ahead > proof_margin_ms(lease.heartbeat_interval_ms):
            if lease.in_doubt_since is None:
                self.beat_soon(lease.cp, now)
            lease.in_doubt_since = now
            lease.proof.log_time = log_time
            lease.proof.sent_at = now
            lease.refresh()

    def wake(self, now: float, silent_cps: frozenset[int]) -> bool:
        """Lose what is not proven any more, send due beats (none in silent CPs: paused there), repeat releases.

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
        """Beat where it is due, and where it might as well be: CPs that beat together wake us once, not once each."""
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
        """Beat every lease now."""
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
        """When ``wake`` has something to do again, at the latest."""
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
