"""Messages that nobody need handle: retention took them, or the group began behind them (P9)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from kafka_marshal.testing.simulation.scenario import Scenario
from kafka_marshal.types import Key

__all__ = ["LeftOut"]


@dataclass(frozen=True, slots=True)
class _Beginning:
    """When the group got a partition for the first time."""

    epoch: int
    #: Where its log ended then.
    end: int


class LeftOut:
    """Keeps account of them, and of what members tell of them."""

    def __init__(self, scenario: Scenario, fail: Callable[[str, str], None]) -> None:
        self._fail = fail
        #: What each topic began with: partitions that it gets later are read from their beginning.
        self._partitions = scenario.data_topics
        #: The group begins where the logs end.
        self._begins_late = any(client.worker == "latest" for client in scenario.clients)
        #: Somebody's own worker may have it begin there, or at a time, if it comes before the others.
        self.may_begin_late: bool = self._begins_late
        #: Where each log begins, if retention took something.
        self._starts: dict[Key, int] = {}
        self._beginnings: dict[Key, _Beginning] = {}
        #: Where each log of a coordinated group ended when it first had an owner.
        self._ends: dict[Key, int] = {}
        #: The group was forgotten: of a young one nobody can tell what was added later from the rest (P9).
        self._is_anew = False

    def cut(self, key: Key, before: int) -> None:
        """Retention took what lies below this offset."""
        self._starts[key] = max(before, self._starts.get(key, 0))

    def is_gone(self, key: Key, offset: int) -> bool:
        """Whether retention took it."""
        return offset < self._starts.get(key, 0)

    def granted(self, key: Key, epoch: int, end: int) -> None:
        """A record about a lease was accepted; end: of the partition's log."""
        self._beginnings.setdefault(key, _Beginning(epoch, end))

    def owned(self, key: Key, end: int) -> None:
        """Somebody owns a partition of a coordinated group: whoever sets its start looks for the log's end from now."""
        self._ends.setdefault(key, end)

    def started(self, key: Key, epoch: int) -> None:
        """A start was set (G14)."""
        self._beginnings.setdefault(key, _Beginning(epoch, self._ends.get(key, 0)))

    def forgotten(self, key: Key) -> None:
        """The group begins anew."""
        self._beginnings.pop(key, None)
        self._ends.pop(key, None)
        self._is_anew = True

    def may_be_left_out(self, key: Key, epoch: int, offset: int, stable: int) -> bool:
        """Whether a record of this epoch may say so of an offset that nobody handled; stable: what was done before."""
        if self.is_gone(key, offset):
            return True
        began = self._beginnings.get(key)
        return (
            self.may_begin_late
            and (self._is_anew or key[1] < self._partitions.get(key[0], 0))
            and stable < 0
            and began is not None
            and began.epoch == epoch
        )

    def begins(self, key: Key, epoch: int, offset: int) -> None:
        """A message is handed out."""
        began = self._beginnings.get(key)
        late = self._begins_late and key[1] < self._partitions.get(key[0], 0)
        if late and began is not None and began.epoch == epoch and offset < began.end:
            self._fail("start", f"{key[0]} [{key[1]}]: offset {offset} was there before the group began (latest)")

    def check_told(self, key: Key, told: Iterable[tuple[int, int]], ever: Collection[int], stable: int) -> None:
        """In the end: what members told to be gone is gone, and what is gone and was never handled was told (P9)."""
        start, spans = self._starts.get(key, 0), sorted(told)
        for first, last in spans:
            if last >= start:
                self._fail(
                    "gaps", f"{key[0]} [{key[1]}]: {first} to {last} were told to be gone; the log begins at {start}"
                )
                return
        for offset in range(min(ever, default=0), min(start, stable + 1)):
            if offset not in ever and not any(first <= offset <= last for first, last in spans):
                self._fail(
                    "gaps", f"{key[0]} [{key[1]}]: offset {offset} is gone, was never handled, and nobody told so"
                )
                return
