"""Which of our records the log has proven, and when we had sent them (T4).

A lease is ours until 2 · HI − margin after we *sent* the last record that our own replica has applied as accepted and
that moved the last beat. Beats look alike, and a retry may write two copies. So a record in the log is matched with
its sending by its offset, which the broker's acknowledgement names. The acknowledgement alone proves nothing, and the
applied record alone does not say when it was sent: the second of the two completes the proof.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kafka_marshal.types import Key


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
