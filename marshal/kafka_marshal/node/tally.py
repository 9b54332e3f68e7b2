"""How many records of the log the replica has applied, by type and outcome."""

from __future__ import annotations

from rationalizer import Outcome

__all__ = ["Tally"]


class Tally:
    """Counts what is applied once the replica has caught up. The driver's lock is held, but for reading."""

    __slots__ = ("_counts",)

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str], int] = {}

    def applied(self, cp: int, offset: int, outcome: Outcome) -> None:
        """A record was applied (a listener of the driver)."""
        what = (outcome.type or "", outcome.code)
        self._counts[what] = self._counts.get(what, 0) + 1

    def read(self) -> list[tuple[tuple[str, str], int]]:
        """((type, outcome), count), sorted; the type is "" where it is not known. Any thread, without the lock."""
        return sorted(list(self._counts.items()))  # noqa: C414 - one step of the interpreter: it may grow meanwhile
