"""Whether a reader's fetch is stalled: records that its log is known to hold do not arrive.

librdkafka can stop fetching a partition for good, without an error: mostly after a broker hung, while offsets are
validated against a leader that does not answer. Such a partition seems quiet. The proof that it is not: a record that
the log is known to hold, by the acknowledgement of an own append or by the leader's answer, and that does not arrive.
Each repair step needs an answer of the leader that is younger than the wait before it: an outage proves nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from math import inf
from typing import Generic, TypeVar

from kafka_marshal.errors import MarshalError
from kafka_marshal.logs import log
from kafka_marshal.runtime import Runtime

K = TypeVar("K")

#: How long a record that is known to be in the log may take to arrive, with a short and a long heartbeat interval (s).
SHORTEST_PATIENCE_S = 1.0
LONGEST_PATIENCE_S = 3.0

#: Each step may take longer, in multiples of the patience: a new client has to connect, and the machine may be busy.
WAITS = (1, 1, 2, 4)

#: The leader of a partition that has been quiet this long is asked where its log ends.
QUIET_S = 10.0

#: How often to check which leaders to ask (s).
LOOK_EVERY_S = 0.2

#: If the reader itself was blocked for this long (s), missing records get their full time again.
HELD_UP_S = 0.5


class FetchMonitor(Generic[K]):
    """What one reader has to receive, by partition. One thread reads; ``knows`` is thread-safe."""

    def __init__(self, runtime: Runtime, whose: str, ask: Callable[[list[K]], Mapping[K, int]]) -> None:
        """whose: the reader's name, for people. ask: asks the leaders where these logs end (*blocking*)."""
        self._runtime = runtime
        self._monotonic = runtime.monotonic
        self._whose = whose
        self._leaders = ask
        #: How long a record that is in the log may take to come.
        self.patience_s: float = LONGEST_PATIENCE_S
        #: By partition: the next offset that it gets.
        self.next: dict[K, int] = {}
        #: By partition whose next record is known to be in the log: since when, or since anything arrived.
        self._owed: dict[K, float] = {}
        #: By partition: the end of what is known to be in the log, and when a broker last said so.
        self._known: dict[K, tuple[int, float]] = {}
        #: By partition: when to ask its leader.
        self._ask_at: dict[K, float] = {}
        self._is_asking = False
        self._look_at = 0.0
        self._read_at = self._monotonic()
        #: Partitions that were found stalled and from which nothing has arrived since, with since when.
        self._stalled: dict[K, float] = {}
        #: The number of repairs tried for each of them.
        self._tries: dict[K, int] = {}
        #: Partitions from which nothing has arrived yet: the first fetch has to find its broker.
        self._new: set[K] = set()

    def be_patient(self, heartbeat_interval_ms: float) -> None:
        """Wait a heartbeat interval for what is known to be in the log, within limits."""
        self.patience_s = min(max(heartbeat_interval_ms / 1000, SHORTEST_PATIENCE_S), LONGEST_PATIENCE_S)

    def begin(self, positions: Mapping[K, int]) -> None:
        """These partitions are read now, each from its offset."""
        self.next.update(positions)
        self._new.update(positions)
        self._ask_at.update(dict.fromkeys(positions, self._monotonic() + QUIET_S))
        for key in positions:
            self._owed.pop(key, None)

    def end(self, keys: Iterable[K]) -> None:
        """These partitions are not read any more."""
        for key in keys:
            for known in (self.next, self._ask_at, self._owed, self._known, self._stalled, self._tries):
                known.pop(key, None)
            self._new.discard(key)

    # What the log is known to hold.

    def knows(self, key: K, offset: int) -> None:
        """A broker reported that the log holds a record at this offset (any thread)."""
        if offset >= self.next.get(key, inf):
            self._known[key] = max(offset + 1, self._end(key)), self._monotonic()
            self._owed.setdefault(key, self._monotonic())

    def _ask(self, keys: list[K]) -> None:
        """Ask the leaders where these end (*blocking*, on a separate thread)."""
        try:
            for key, end in self._leaders(keys).items():
                if (
                    key in self._owed
                ):  # also where the log holds less than was known: the reader is not to wait for ever
                    self._known[key] = self._end(key), self._monotonic()
                self.knows(key, end - 1)
        except MarshalError as error:  # asked again; an unreachable broker is reported elsewhere
            now = self._monotonic()
            self._ask_at.update({key: now + self.patience_s for key in keys if key in self._ask_at})
            self._owed.update({key: now for key in keys if key in self._owed})
            log(logging.DEBUG, "log_end_unknown", "%s: where the log ends is not known: %s", self._whose, error)
        finally:
            self._is_asking = False

    # Reading.

    def begin_read(self) -> None:
        """The reader is about to read."""
        now = self._monotonic()
        if now - self._read_at > HELD_UP_S:
            self._owed.update(dict.fromkeys(list(self._owed), now))
        self._read_at = now
        if now < self._look_at or self._is_asking:
            return
        self._look_at = now + LOOK_EVERY_S
        due = [key for key, at in list(self._ask_at.items()) if self._is_due(key, at, now)]
        if due:
            self._is_asking = True
            self._ask_at.update(dict.fromkeys(due, now + QUIET_S))
            self._runtime.start(lambda: self._ask(due), "kafka-marshal-log-end")

    def end_read(self, timeout_s: float) -> None:
        """The reader has read; unless it was blocked, that took at most this long."""
        now = self._monotonic()
        if self._owed and now - self._read_at > timeout_s + HELD_UP_S:
            self._owed.update(dict.fromkeys(list(self._owed), now))
        self._read_at = now

    def received(self, key: K, position: int) -> None:
        """All records before this offset have arrived, or never will."""
        if position <= self.next.get(key, inf):
            return
        self.next[key] = position
        self._new.discard(key)
        self._ask_at[key] = self._read_at + QUIET_S
        if self._owed:
            if position >= self._end(key):
                self._owed.pop(key, None)
            elif key in self._owed:
                self._owed[key] = self._read_at
        if not self._stalled or (since := self._stalled.pop(key, None)) is None:
            return
        del self._tries[key]
        if not self._stalled:
            text = "%s reads on, after %.1f s; nothing was left out"
            log(logging.WARNING, "reader_back", text, self._whose, self._read_at - since)

    def flooded(self) -> None:
        """The reader took as much as it may at a time: what does not arrive may wait behind that, in the client."""
        if self._owed:
            self._owed.update(dict.fromkeys(list(self._owed), self._read_at))

    def excuse(self, keys: Iterable[K]) -> None:
        """Nothing arrives from these for a known reason."""
        later = self._read_at + QUIET_S
        for key in keys:
            self._owed.pop(key, None)
            if key in self._ask_at:
                self._ask_at[key] = later

    @property
    def is_owed(self) -> bool:
        """Whether the log is known to hold a record that has not arrived (any thread)."""
        return bool(self._owed)

    def missing(self) -> list[K]:
        """Partitions from which nothing arrives though the log holds more; they count as stalled once ``tried``."""
        if not self._owed:
            return []
        for key in [key for key in list(self._owed) if self.next.get(key, inf) >= self._end(key)]:
            self._owed.pop(key, None)  # it arrived while another thread reported it
        return [key for key in list(self._owed) if self._late_at(key) <= min(self._read_at, self._known[key][1])]

    def _end(self, key: K) -> int:
        return self._known.get(key, (0, 0.0))[0]

    def _late_at(self, key: K) -> float:
        wait_s = self.patience_s * WAITS[min(self._tries.get(key, 0), len(WAITS) - 1)]
        return self._owed.get(key, inf) + (max(wait_s, LONGEST_PATIENCE_S) if key in self._new else wait_s)

    def _is_due(self, key: K, at: float, now: float) -> bool:
        """Whether to ask a leader: of what is late, whether it answers at all; before that, it may have been away."""
        late_at = self._late_at(key)
        return now >= at if late_at == inf else self._known[key][1] < late_at <= now

    def tries(self, keys: Iterable[K]) -> int:
        """The largest number of repairs tried for one of these."""
        return max((self._tries.get(key, 0) for key in keys), default=0)

    def tried(self, keys: Collection[K], *, new: bool) -> None:
        """These are read again: the next step needs a proof that is younger than this. new: by a new reader."""
        for key in keys:
            self._tries[key] = self._tries.get(key, 0) + 1
            self._stalled.setdefault(key, self._owed.get(key, self._read_at))
            self._owed.pop(key, None)
            self._ask_at[key] = self._read_at
        if new:  # a new reader has to connect
            self._owed.update(dict.fromkeys(list(self._owed), self._read_at))

    def what(self, keys: Collection[K]) -> str:
        """What does not arrive, for people."""
        since = [self._stalled.get(key, self._owed.get(key, self._read_at)) for key in keys]
        where = ", ".join(f"{_name(key)} at offset {self.next.get(key)} of {self._end(key)}" for key in keys)
        return (
            f"{self._whose} gets nothing more though the log holds more: {where}, for "
            f"{self._monotonic() - min(since):.1f} s"
        )

    @property
    def stalled(self) -> str:
        """What is not read though it is in the log, for people; "": nothing (any thread)."""
        stalled = [key for key in list(self._stalled) if key in self.next]
        return self.what(stalled) if stalled else ""


def _name(key: object) -> str:
    return f"{key[0]} [{key[1]}]" if isinstance(key, tuple) else f"partition {key}"
