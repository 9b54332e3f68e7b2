"""Whose session has run out by our own clock: a death needs a witness, whose beat buries him (G8, G20)."""

from __future__ import annotations

from collections.abc import Collection
from math import inf
from random import Random

from rationalizer import Group

__all__ = ["Witness"]

#: We beat at once, jittered by up to this share of the session: of a fleet, few do.
WITNESS_SHARE = 1 / 20


class Witness:
    """When each other member was heard last, as our replica applied it. Times: own clock, ms."""

    def __init__(self, client_id: str, rng: Random) -> None:
        self._client_id = client_id
        self._rng = rng
        self._heard: dict[int, float] = {}
        #: When somebody's session has run out by our clock.
        self.due: float = inf

    def heard(self, group: Group, client_id: str, now: float) -> None:
        """A record of a member was accepted."""
        member = group.clients.get(client_id)
        if member is not None:
            self._heard[member.slot] = now

    def look(self, group: Group | None, now: float) -> None:
        """Others may have come or gone, or a time that was waited for is over."""
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
        """Whether somebody has been silent for a session indeed: since ``due`` was set he may have been heard."""
        members = {} if group is None else group.members
        return any(
            now >= heard + members[slot].session_timeout_ms
            for slot, heard in self._heard.items()
            if slot in members and members[slot].client_id != self._client_id
        )

    def forget(self) -> None:
        """We are a member no longer."""
        self._heard.clear()
        self.due = inf
