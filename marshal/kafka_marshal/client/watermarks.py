"""Where logs begin and end, as the leaders say: asked for at once, or ahead of the call that needs it."""

from __future__ import annotations

from collections.abc import Collection
from concurrent.futures import Future

from kafka_marshal.engine.effects import Key
from kafka_marshal.ports import Cluster

__all__ = ["Marks", "Watermarks"]

#: (log start, log end) by partition.
Marks = dict[Key, tuple[int, int]]

#: How long the leaders may take to answer.
LOOKUP_TIMEOUT_S = 10.0


class Watermarks:
    """What one consumer has asked the leaders of its partitions."""

    def __init__(self, cluster: Cluster, *, committed: bool) -> None:
        """committed: logs end at the last stable offset, as for a read_committed reader."""
        self._ask = cluster.committed_watermarks if committed else cluster.watermarks
        self._aside = cluster.runtime.executor(1, "kafka-marshal-ahead")
        self.ahead: Future[Marks] | None = None
        self._ends: dict[Key, int] = {}

    def look_up(self, keys: Collection[Key]) -> Marks:
        """Ask the leaders (*blocking*)."""
        marks = self._ask(keys, LOOKUP_TIMEOUT_S)
        self._ends |= {key: end for key, (_, end) in marks.items()}
        return marks

    def look_ahead(self, keys: Collection[Key]) -> None:
        """Ask them in the background."""
        self.ahead = self._aside.submit(self.look_up, keys) if keys else None

    def take_ahead(self) -> Marks | None:
        """What they have answered to ``look_ahead``, once; None: nothing (yet)."""
        ahead, self.ahead = self.ahead, None
        if ahead is None or not ahead.done() or ahead.cancelled() or ahead.exception() is not None:
            return None
        return ahead.result()

    def end_of(self, key: Key) -> int | None:
        """The log end as of the last look."""
        return self._ends.get(key)

    def close(self) -> None:
        """Ask for nothing more."""
        self._aside.shutdown(wait=False, cancel_futures=True)
