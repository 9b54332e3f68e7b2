"""Holds back what would be said again and again, and counts it."""

from __future__ import annotations

from collections.abc import Hashable

__all__ = ["Repeats"]


class Repeats:
    """Lets each thing through at once, and again once ``every`` has passed since. Any thread may ask.

    Without a lock: a signal's handler may interrupt it and ask too. What two threads say at once may be said twice.
    """

    def __init__(self, every: float, kept: int = 1_000) -> None:
        """every: in the unit of the clock that ``due`` gets. kept: so many things are remembered."""
        self._every = every
        self._kept = kept
        #: By thing: when it was said last, and how often it was held back since.
        self._said: dict[Hashable, tuple[float, int]] = {}

    def due(self, thing: Hashable, now: float) -> int | None:
        """How often this was held back since it was said last, where it is to be said now; None: hold it back."""
        said_at, held_back = self._said.get(thing, (float("-inf"), 0))
        if now - said_at < self._every:
            self._said[thing] = (said_at, held_back + 1)
            return None
        if thing not in self._said and len(self._said) >= self._kept:
            self._said.clear()
        self._said[thing] = (now, 0)
        return held_back
