"""Claims that are not wanted any more, and that the log has not shown yet: what it grants is released (C17)."""

from __future__ import annotations

from dataclasses import dataclass

from kafka_marshal.engine.effects import Key, Outbox
from rationalizer import ReleasingPartition

__all__ = ["UnseenClaims"]


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
