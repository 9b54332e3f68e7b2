"""Until when our membership is proven (T4, T5): one proof for all pieces (G20)."""

from __future__ import annotations

from collections.abc import Collection
from math import inf
from random import Random

from kafka_marshal.engine.holding import LastProof
from kafka_marshal.engine.proofs import Proof, Proofs
from kafka_marshal.engine.settings import proof_margin_ms
from rationalizer import Group

#: Jitter: when a session runs out, others beat within this share of it, so that of many members few do.
WITNESS_SHARE = 1 / 20


class Witness:
    """When our replica last applied a record of each member. Times: own clock, ms."""

    def __init__(self, client_id: str, rng: Random) -> None:
        self._client_id = client_id
        self._rng = rng
        self._heard: dict[int, float] = {}
        #: When the next session of another member runs out by our clock, plus jitter.
        self.due: float = inf

    def heard(self, group: Group, client_id: str, now: float) -> None:
        """A record of a member was applied as accepted."""
        member = group.clients.get(client_id)
        if member is not None:
            self._heard[member.slot] = now

    def look(self, group: Group | None, now: float) -> None:
        """Recompute ``due``: members may have joined or left, or ``due`` has passed."""
        slots: Collection[int] = () if group is None else group.members
        self._heard = {slot: self._heard.get(slot, now) for slot in slots}
        first = inf
        if group is not None:
            for slot, heard in self._heard.items():
                member = group.members[slot]
                at = heard + member.session_timeout_ms
                if member.client_id != self._client_id and now < at < first:
                    first = at + self._rng.random() * WITNESS_SHARE * member.session_timeout_ms
        self.due = first

    def is_needed(self, group: Group | None, now: float) -> bool:
        """Whether another member was silent for a whole session; it may have been heard since ``due`` was set."""
        members = {} if group is None else group.members
        return any(
            now >= heard + members[slot].session_timeout_ms
            for slot, heard in self._heard.items()
            if slot in members and members[slot].client_id != self._client_id
        )

    def forget(self) -> None:
        """We are no longer a member."""
        self._heard.clear()
        self.due = inf


class MemberProof:
    """When we sent the last record that the log accepted. Times: own clock, ms."""

    def __init__(self, session_timeout_ms: int) -> None:
        self._session_ms = session_timeout_ms
        self._proofs = Proofs()
        self.last: LastProof = LastProof(sent_at=-inf)
        #: Until when we are a member (T4); 0: not proven yet, or in doubt (T5).
        self.valid_until: float = 0.0

    @property
    def token(self) -> int:
        """The token of the newest record that proved it."""
        return self.last.token

    def sent(self, token: int, cp: int, now: float) -> None:
        """Our record that counts as a beat was passed to the producer."""
        self._proofs.sent(token, cp, now)

    def applied(self, cp: int, offset: int, log_time: int, now: float) -> None:
        """Our replica applied such a record as accepted."""
        self._proofs.forget_before(now - 2 * self._session_ms)
        self._take(self._proofs.applied(cp, offset, log_time, (), now))

    def acked(self, token: int, offset: int | None) -> None:
        """The broker answered an append."""
        self._take(self._proofs.acked(token, offset))

    def reset(self) -> None:
        """We are no longer a member."""
        self.__init__(self._session_ms)  # type: ignore[misc]

    def compare_clocks(self, log_time: int, now: float) -> bool:
        """Whether log time has run ahead of our clock: nothing is proven until a later beat is accepted (T5)."""
        if not self.last.is_ahead(log_time, now, self._session_ms):
            return False
        self.valid_until = 0.0
        return True

    def _take(self, proof: Proof | None) -> None:
        last = self.last
        if proof is None or proof.sent_at < last.sent_at:
            return
        last.sent_at, last.log_time, last.token = proof.sent_at, proof.log_time, max(last.token, proof.token)
        self.valid_until = proof.sent_at + self._session_ms - proof_margin_ms(self._session_ms)
