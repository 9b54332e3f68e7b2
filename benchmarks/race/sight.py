"""Observations of one worker, with times of the system's monotonic clock (s, the same in all processes)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic
from typing import Any

__all__ = ["Sight"]

Tell = Callable[..., None]


class Sight:
    """A worker's records and assignment. ``saw`` is called by one thread, the rest by any."""

    def __init__(self, worker: str, tell: Tell) -> None:
        self._worker = worker
        self._tell = tell
        self._any = True
        self._watched: set[int] = set()
        self._seen: list[tuple[int, int, float]] = []
        self._held: set[int] = set()
        self._lock = threading.Lock()
        #: Time of the assignment's last change.
        self.changed_at = 0.0

    @staticmethod
    def event() -> threading.Event:
        """An event for a loop to wait on."""
        return threading.Event()

    def saw(self, partition: int, offset: int) -> None:
        """A record was delivered."""
        now = monotonic()
        if self._any:
            self._any = False
            self._tell("first", self._worker, at=now, partition=partition)
        if partition in self._watched:
            self._watched.discard(partition)
            self._tell("seen", self._worker, at=now, partition=partition)
        self._seen.append((partition, offset, now))

    def watch(self, partitions: list[int] | None) -> None:
        """Report the next record of each of these partitions (None: the next record of any, as "first")."""
        if partitions is None:
            self._any = True
        else:
            self._watched = set(partitions)

    def closing(self) -> None:
        """The worker is about to leave."""
        self._tell("closing", self._worker, at=monotonic())

    def gained(self, partitions: list[int]) -> None:
        """The side's on_assign."""
        with self._lock:
            self._held.update(partitions)
            self.changed_at = monotonic()

    def lost(self, partitions: list[int]) -> None:
        """The side's on_revoke or on_lost."""
        with self._lock:
            self._held.difference_update(partitions)
            self.changed_at = monotonic()

    @property
    def held(self) -> list[int]:
        """The partitions of this worker."""
        with self._lock:
            return sorted(self._held)

    def take(self) -> list[tuple[int, int, float]]:
        """(partition, offset, moment) of all records delivered since the last call, and of the last one then."""
        seen, self._seen = self._seen, []
        latest = {partition: (partition, offset, at) for partition, offset, at in seen}
        self._seen[:0] = latest.values()
        return seen

    def report(self) -> dict[str, Any]:
        """Everything that the parent needs."""
        return {"held": self.held, "changed_at": self.changed_at}
