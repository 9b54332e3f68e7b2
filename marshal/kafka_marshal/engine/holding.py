"""A partition that we hold, want or are releasing, and until when messages of it may be delivered (T4, T5).

A lease is ours until 2 · HI − margin after we *sent* the last record that our own replica has applied as accepted and
that moved the last beat. Beats look alike, and a retry may write two copies. So a record in the log is matched with
its sending by its offset, which the broker's acknowledgement names. The acknowledgement alone proves nothing, and the
applied record alone does not say when it was sent: the second of the two completes the proof.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Protocol

from kafka_marshal.engine.settings import proof_margin_ms
from kafka_marshal.ports import Message
from kafka_marshal.types import Key
from rationalizer.limits import MAX_INTERVALS


@dataclass(frozen=True, slots=True)
class HandIn:
    """Our release, as our replica applied it as accepted."""

    last_offset: int | None
    code: str
    #: Whether our own pause of the group was in force there: last_offset replaced the progress (C11).
    pausing: bool


class Owner(Protocol):
    """What a partition is held for: a consumer's assignment, or a lease claimed by hand."""

    def granted(self, now: float) -> None:
        """The log granted it."""

    def refused(self, code: str, now: float) -> None:
        """A claim was rejected (HELD, PAUSED, NOT_FRESH …)."""

    def lost(self, reason: str, now: float) -> None:
        """It is over, and we did not release it."""

    def released(self, now: float) -> None:
        """The log shows our release."""

    def handed_in(self, hand_in: HandIn) -> None:
        """Our release was applied as accepted."""

    def beaten(self, last_offset: int | None, accepted: bool, now: float) -> None:
        """Our beat was applied."""

    def answered(self, last_offset: int, accepted: bool, code: str, now: float) -> None:
        """Our ClaimingMessages was applied (C12)."""

    def settled(self, taken: tuple[int, int] | None, now: float) -> None:
        """Our SettlingMessages was applied as accepted; taken: the batch that it took (B5)."""

    def progress_to_report(self) -> int | None:
        """The last_offset for the next beat; None: no new progress."""


class OwnKeys(Protocol):
    """Our keys of a partition that is, or was, shared by key (K1): ranges of hashes from lo to hi, both included."""

    lo: int
    hi: int

    @property
    def is_part(self) -> bool:
        """Whether other members have other keys of the partition."""

    def has(self, key: int) -> bool:
        """Whether a key hash is one of these."""

    def wants(self, message: Message) -> bool:
        """Whether a message has one of these keys, and is not done."""

    @property
    def stable_of_all(self) -> int:
        """The offset up to which everything is done for every key, those of other members too (any thread)."""

    @property
    def stable_of_others(self) -> int:
        """The offset up to which everything is done for all keys but these (any thread)."""


@dataclass(slots=True)
class LastProof:
    """The last proof that something is ours (T4)."""

    #: Our own clock (ms).
    sent_at: float = 0.0
    log_time: int = 0
    #: Our own clock (ms): a new grant without any proof is lost then.
    due: float = 0.0
    #: The token of the newest record that proved it.
    token: int = 0

    def is_ahead(self, log_time: int, now: float, interval_ms: int) -> bool:
        """Whether log time has run ahead of our clock since (T5): then nothing is proven until a later beat is."""
        if (log_time - self.log_time) - (now - self.sent_at) <= proof_margin_ms(interval_ms):
            return False
        self.sent_at, self.log_time = now, log_time
        return True


class Holding:
    """A lease, some keys of one, or a piece of a coordinated group."""

    __slots__ = (
        "cp",
        "hand_out_until",
        "hand_out_until_s",
        "heartbeat_interval_ms",
        "key",
        "owner",
        "proven_until",
        "stopped",
    )

    #: Our keys of the partition; None: all of them, with the same progress.
    keys: OwnKeys | None = None
    #: Whether its claim says where the group begins (B3), so that this is looked up before.
    is_claimed_with_start: bool = False
    #: How many intervals the log keeps beyond a gap (P5).
    most_intervals: int = MAX_INTERVALS
    #: Whether a checkpoint can't name what is done beyond a gap: its cut must have none.
    is_cut_whole: bool = False
    #: Whether the group is paused, and takes checkpoints: nothing begins, not even to close a gap (C10).
    is_paused: bool = False
    #: Whether the program has its state (X17); without checkpoints: True.
    is_restored: bool = True
    #: Whether a barrier holds it up: no more messages are delivered (X14).
    is_held_up: bool = False

    def __init__(self, key: Key, cp: int, heartbeat_interval_ms: int, owner: Owner) -> None:
        self.key: Key = key
        #: The CP with its records (L3).
        self.cp: int = cp
        self.heartbeat_interval_ms: int = heartbeat_interval_ms
        self.owner: Owner = owner
        #: Whether it is being released: no more messages are delivered.
        self.stopped: bool = False
        #: Until when (own clock, ms) messages may be delivered (T4); 0: not at all. Read without a lock.
        self.hand_out_until: float = 0.0
        #: The same in seconds, for threads that check it before every message.
        self.hand_out_until_s: float = 0.0
        #: The same (ms) for messages granted earlier (at most once): a pending release does not end it.
        self.proven_until: float = 0.0

    @property
    def epoch(self) -> int:
        """The fencing token (C9)."""
        raise NotImplementedError

    @property
    def held(self) -> bool:
        """Whether the log granted it, and nothing ended it since."""
        raise NotImplementedError

    @property
    def proven_by(self) -> int:
        """The number of the newest of our records that the log accepted for it; see ``PartitionReports.prove``."""
        raise NotImplementedError

    @property
    def claim_expires(self) -> float:
        """When (own clock, ms) an unanswered claim counts as lost; inf: no claim is in flight."""
        return inf

    def is_ending(self, now: float) -> bool:
        """Whether no more messages are delivered: it is over, being released, or in doubt."""
        return now >= self.hand_out_until

    def may_hand_over(self, now: float) -> bool:
        """Whether messages granted earlier (C12, G22) may be delivered: not if it may be over (T4)."""
        raise NotImplementedError

    def stop(self) -> None:
        """Deliver no more messages: a release follows."""
        self.stopped = True
        self.refresh()

    def resume(self) -> None:
        """Deliver messages again: no release follows after all."""
        self.stopped = False
        self.refresh()

    def refresh(self) -> None:
        """Recompute until when it is proven, and messages may be delivered."""
        self.proven_until = self.is_proven_until()
        self.hand_out_until = 0.0 if self.stopped or self.is_held_up else self.proven_until
        self.hand_out_until_s = self.hand_out_until / 1000.0

    def is_proven_until(self) -> float:
        """Until when (own clock, ms) it is ours for sure; 0: it is over, or in doubt."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Proof:
    """These leases, at these epochs, were beaten by a record sent at sent_at."""

    #: Our own clock (ms) when the record was passed to the producer.
    sent_at: float
    #: Log time right after the record was applied (for T5).
    log_time: int
    #: (key, epoch) of every lease it kept alive.
    leases: tuple[tuple[Key, int], ...]
    #: The token of the record: a record that was sent later has a larger one.
    token: int


class Proofs:
    """Matches sendings, acknowledgements and applied records."""

    def __init__(self) -> None:
        self._sent: dict[int, tuple[int, float]] = {}
        self._acked: dict[tuple[int, int], tuple[int, float]] = {}
        self._applied: dict[tuple[int, int], tuple[int, tuple[tuple[Key, int], ...], float]] = {}

    def sent(self, token: int, cp: int, now: float) -> None:
        """A record that moves the last beat was passed to the producer."""
        self._sent[token] = (cp, now)

    def acked(self, token: int, offset: int | None) -> Proof | None:
        """The broker answered. offset: None: the append failed, or it returned no offset."""
        sending = self._sent.pop(token, None)
        if sending is None or offset is None:
            return None
        cp, sent_at = sending
        applied = self._applied.pop((cp, offset), None)
        if applied is None:
            self._acked[cp, offset] = (token, sent_at)
            return None
        log_time, leases, _ = applied
        return Proof(sent_at, log_time, leases, token)

    def applied(
        self, cp: int, offset: int, log_time: int, leases: Sequence[tuple[Key, int]], now: float
    ) -> Proof | None:
        """Our replica applied our record, which moved the last beat of these leases."""
        sending = self._acked.pop((cp, offset), None)
        if sending is None:
            self._applied[cp, offset] = (log_time, tuple(leases), now)
            return None
        token, sent_at = sending
        return Proof(sent_at, log_time, tuple(leases), token)

    def forget_before(self, time: float) -> None:
        """Drop what was sent or applied before time: too old to prove anything."""
        self._sent = {token: sending for token, sending in self._sent.items() if sending[1] >= time}
        self._acked = {place: sending for place, sending in self._acked.items() if sending[1] >= time}
        self._applied = {place: entry for place, entry in self._applied.items() if entry[2] >= time}
