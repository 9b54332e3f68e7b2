"""Messages that need not be handled: retention deleted them, or the group began behind them (P9)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from kafka_marshal.testing.simulation.scenario import Scenario
from kafka_marshal.types import Key


@dataclass(frozen=True, slots=True)
class _Beginning:
    """The group's first lease of a partition."""

    epoch: int
    #: The end of its log then.
    end: int


class Excused:
    """Records them, and what members report of them."""

    def __init__(self, scenario: Scenario, fail: Callable[[str, str], None]) -> None:
        self._fail = fail
        #: Partitions of each topic at the start; later ones are read from their beginning.
        self._partitions = scenario.data_topics
        #: The group begins at the logs' ends.
        self._begins_late = any(client.worker == "latest" for client in scenario.clients)
        #: A user's worker may make it begin there, or at a timestamp, if it starts first.
        self.may_begin_late: bool = self._begins_late
        #: First offset of each log from which retention deleted something.
        self._starts: dict[Key, int] = {}
        self._beginnings: dict[Key, _Beginning] = {}
        #: End of each log of a coordinated group when it first had an owner.
        self._ends: dict[Key, int] = {}
        #: The group was forgotten: a young group cannot distinguish partitions that were added later (P9).
        self._was_forgotten = False

    def cut(self, key: Key, before: int) -> None:
        """Retention deleted everything below this offset."""
        self._starts[key] = max(before, self._starts.get(key, 0))

    def is_gone(self, key: Key, offset: int) -> bool:
        """Whether retention deleted it."""
        return offset < self._starts.get(key, 0)

    def granted(self, key: Key, epoch: int, end: int) -> None:
        """A record about a lease was accepted; end: the end of the partition's log."""
        self._beginnings.setdefault(key, _Beginning(epoch, end))

    def owned(self, key: Key, end: int) -> None:
        """A partition of a coordinated group has an owner: its start is resolved against the log's end from now on."""
        self._ends.setdefault(key, end)

    def started(self, key: Key, epoch: int) -> None:
        """A start was set (G14)."""
        self._beginnings.setdefault(key, _Beginning(epoch, self._ends.get(key, 0)))

    def forgotten(self, key: Key) -> None:
        """The group starts over."""
        self._beginnings.pop(key, None)
        self._ends.pop(key, None)
        self._was_forgotten = True

    def is_excused(self, key: Key, epoch: int, offset: int, stable: int) -> bool:
        """Whether a record of this epoch may call an unhandled offset done; stable: what was done before."""
        if self.is_gone(key, offset):
            return True
        began = self._beginnings.get(key)
        return (
            self.may_begin_late
            and (self._was_forgotten or key[1] < self._partitions.get(key[0], 0))
            and stable < 0
            and began is not None
            and began.epoch == epoch
        )

    def begins(self, key: Key, epoch: int, offset: int) -> None:
        """A message is delivered."""
        began = self._beginnings.get(key)
        late = self._begins_late and key[1] < self._partitions.get(key[0], 0)
        if late and began is not None and began.epoch == epoch and offset < began.end:
            self._fail("start", f"{key[0]} [{key[1]}]: offset {offset} was there before the group began (latest)")

    def check_reported(self, key: Key, reported: Iterable[tuple[int, int]], ever: Collection[int], stable: int) -> None:
        """At the end: what members reported as gone is gone, and what is gone and unhandled was reported (P9)."""
        start, spans = self._starts.get(key, 0), sorted(reported)
        for first, last in spans:
            if last >= start:
                self._fail(
                    "gaps", f"{key[0]} [{key[1]}]: {first} to {last} were reported as gone; the log begins at {start}"
                )
                return
        for offset in range(min(ever, default=0), min(start, stable + 1)):
            if offset not in ever and not any(first <= offset <= last for first, last in spans):
                self._fail(
                    "gaps",
                    f"{key[0]} [{key[1]}]: offset {offset} is gone, was never handled, and no member reported it",
                )
                return
