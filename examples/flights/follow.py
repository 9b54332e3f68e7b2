"""Reads the coordination log: while the demo runs, and as a whole at its end."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from flights.ownership import History
from kafka_marshal.errors import KafkaUnavailableError
from kafka_marshal.node.log_reader import bounds, read_range
from kafka_marshal.node.replica import Replica
from kafka_marshal.ports import Cluster
from rationalizer.dump import DumpHeader, DumpRecord

__all__ = ["Follower", "read_log"]

logger: logging.Logger = logging.getLogger("flights")

_TIMEOUT_S = 15.0


class Follower:
    """A replica of its own that follows the log on a thread; any thread may ask it. A context manager."""

    def __init__(self, cluster: Cluster, coordination: str, group_id: str, topic: str) -> None:
        """Open it and begin (*blocking*). Raises as Replica does."""
        self._history = History(group_id, topic)
        self._lock = threading.Lock()
        self._replica = Replica(cluster, coordination, _TIMEOUT_S)
        self._ended = False
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._follow, name="demo-follower", daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        worlds = self._replica.worlds
        try:
            while not self._ended:
                batch = self._replica.read(0.2)
                with self._lock:
                    self._replica.apply(batch, lambda cp, _, out: self._history.observe(worlds[cp], out), history=True)
        except Exception as error:
            logger.exception("the coordination log can't be followed any more")
            self._failure = error

    def ask(self, question: Callable[[History], dict[int, str]]) -> dict[int, str]:
        """Ask the history as it is now. Raises what ended the following, if it ended by itself."""
        if self._failure is not None:
            raise self._failure
        with self._lock:
            return question(self._history)

    def holders(self) -> dict[int, str]:
        """Partition → who holds it now, by the log."""
        return self.ask(History.holders)

    def close(self) -> None:
        """Stop following."""
        self._ended = True
        self._thread.join(5.0)
        self._replica.close()

    def __enter__(self) -> Follower:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_log(cluster: Cluster, topic: str) -> tuple[DumpHeader, list[DumpRecord]]:
    """The whole coordination log up to its end as it is now (*blocking*).

    Raises KafkaUnavailableError where it can't be read to its end.
    """
    marks = bounds(cluster, topic, _TIMEOUT_S)
    if marks is None:
        raise KafkaUnavailableError(f"The coordination topic {topic!r} is gone. Nothing can be concluded without it.")
    runs = read_range(cluster, topic, marks, _TIMEOUT_S)
    return DumpHeader(topic, len(marks)), [DumpRecord(cp, *entry) for cp, entries in runs for entry in entries]
