"""What a policy is shown: each partition of the subscription that can be worked on now.

The view is kept, and only changed partitions are checked again. The log shows every change but one: a holder that
falls silent. When the first holder may have been silent for too long, all partitions are checked.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

from kafka_marshal.engine.claims.peers import Peers
from kafka_marshal.engine.plane import Work
from kafka_marshal.engine.policies import (
    IDLE_TURN,
    LEFT_OVER_TURN,
    MAX_CYCLES,
    Cycle,
    Partitions,
    PartitionView,
    standing,
)
from kafka_marshal.engine.settings import EngineSettings
from kafka_marshal.types import Key
from rationalizer.intervals import lag


class PolicyView:
    """The partitions of one consumer, as shown to its policy."""

    def __init__(self, work: Work, peers: Peers, settings: EngineSettings) -> None:
        self._work = work
        self._peers = peers
        self._settings = settings
        self._cycles: dict[Key, tuple[Cycle, ...]] = {}
        #: At the start of the current cycle: (epoch, time, done, log end).
        self._meters: dict[Key, tuple[int, float, int, int]] = {}
        self.partitions: Partitions = Partitions({})
        self._subscribed: frozenset[Key] = frozenset()
        self._by_cp: dict[int, list[Key]] = {}
        self.order: dict[Key, int] = {}
        #: CP of which nothing is shown → until when (own clock, ms).
        self.closed: dict[int, float] = {}
        #: Partitions to check again; an ordered set.
        self.touched: dict[Key, None] = {}
        #: When (own clock, ms) to check all partitions again, for silent holders and idle partitions.
        self.look_at: float = 0.0

    def opening(self, cp: int, now: float) -> list[Key]:
        """Leases that may have opened in a CP whose log time is now known (T3)."""
        return list(self._peers.opening(self._by_cp.get(cp, ()), cp, now, self.look_at))

    def measure(self, key: Key, epoch: int, done: int, log_end: int, now: float) -> bool:
        """Close a cycle of our partition if it is one HI old (ReleaseIfBehind). Returns whether the cycles changed."""
        of, since, old_done, old_end = self._meters.get(key, (-1, 0.0, 0, 0))
        if of != epoch:
            self._meters[key] = (epoch, now, done, log_end)
            return False
        seconds = (now - since) / 1000
        if seconds * 1000 < self._settings.heartbeat_interval_ms:
            return False
        self._meters[key] = (epoch, now, done, log_end)
        cycle = Cycle(lag(done + 1, log_end), (done - old_done) / seconds, (log_end - old_end) / seconds)
        before = self._cycles.get(key, ())
        cycles = (*before, cycle)[-MAX_CYCLES:]
        if cycles != before:  # a partition without traffic gives the policy nothing new
            self._cycles[key] = cycles
            return True
        return False

    def look(self, now: float, *, anew: bool) -> None:
        """Update what is shown, and when to check again. ``anew``: the subscription may have changed."""
        closed = self._peers.closed_cps(now)
        partitions: Iterable[Key] = self.touched
        if anew or now >= self.look_at or closed.keys() != self.closed.keys():
            partitions = self._work.subscription.partitions
            if anew:
                self._subscribed = frozenset(partitions)
                self._by_cp = {}
                for key in partitions:
                    self._by_cp.setdefault(self._peers.cp_of(key), []).append(key)
                self.order = {key: standing(key, cp) for cp, keys in self._by_cp.items() for key in keys}
            self.partitions = Partitions({})
            self.look_at = inf
        self.closed = closed
        alike: dict[object, PartitionView] = {}  # by holder, or by time of release: partitions share one view
        for key in partitions:
            shown = self._view(key, now, alike)
            if shown is None:
                self.partitions.take_out(key)
            else:
                self.partitions.show(key, shown)
        self.touched = {}

    def _view(self, key: Key, now: float, alike: dict[object, PartitionView]) -> PartitionView | None:
        """One partition of the subscription; None: it cannot be worked on now."""
        peers, part = self._peers, self._work.parts.get(key)
        if (
            key not in self._subscribed
            or key in self._work.blocked
            or (self.closed and peers.cp_of(key) in self.closed)
        ):
            return None
        holder: str | None = self._settings.client_id
        if part is not None and not part.over:
            if cycles := self._cycles.get(key):
                return PartitionView(holder=holder, cycles=cycles)
        else:
            self._cycles.pop(key, None)
            opens_at, holder = peers.look(key, now, self.look_at)
            if opens_at > now:
                self.look_at = min(self.look_at, opens_at)
            elif part is None:
                return self._idle(key, now, alike)
            else:  # released by us, and not yet shown in the log
                holder = self._settings.client_id
        view = alike.get(holder)
        if view is None:
            view = alike[holder] = PartitionView(holder=holder)
        return view

    def _idle(self, key: Key, now: float, alike: dict[object, PartitionView]) -> PartitionView:
        """A partition that can be claimed."""
        hi = self._settings.heartbeat_interval_ms
        since = self._peers.free_since(key, now)
        view = alike.get(since)
        if view is None:
            view = alike[since] = PartitionView(holder=None, free_since=since)
            for share in (LEFT_OVER_TURN, 1, 1 + IDLE_TURN):
                if (due := since + share * hi + 1) > now:
                    self.look_at = min(self.look_at, due)
        return view
