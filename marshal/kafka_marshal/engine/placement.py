"""Asks the policy at the right moments, and shows it the world as a view.

A policy is asked when something changed that it may care about, and when a lease is about to open, a wish wants to be
renewed, or a free partition has lain idle for HI. In between nothing is computed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from kafka_marshal.engine.assignment import Assignment, Stage
from kafka_marshal.engine.observer import Observer
from kafka_marshal.engine.policies import MAX_CYCLES, Cycle, PartitionView, View, Wishes
from kafka_marshal.engine.settings import EngineSettings

if TYPE_CHECKING:
    from kafka_marshal.engine.consumer import ConsumerEngine

__all__ = ["Placement"]

Key = tuple[str, int]

_OWN_STAGES = (Stage.CLAIMING, Stage.LOCATING, Stage.POSITIONING, Stage.ASSIGNING, Stage.ACTIVE)


class Placement:
    """When to ask the policy of one consumer, and what to show it."""

    def __init__(self, consumer: ConsumerEngine, observer: Observer, settings: EngineSettings) -> None:
        self._consumer = consumer
        self._observer = observer
        self._settings = settings
        #: Something changed since the policy was last asked.
        self.dirty = True
        #: When it must be asked again though nothing changes.
        self.deadline = 0.0
        self._next_ask = 0.0
        self._let_go: dict[Key, float] = {}
        self._cycles: dict[Key, tuple[Cycle, ...]] = {}

    def let_go(self, key: Key, now: float) -> None:
        """We released this one: leave it to others, who take what is idle after an HI, unless none does by then."""
        self._let_go[key] = now + 2 * self._settings.heartbeat_interval_ms

    def measure(self, assignment: Assignment, log_end: int, now: float) -> None:
        """Close a cycle of an assignment where one HI has gone by (ReleaseIfBehind)."""
        assignment.log_end = log_end
        done = assignment.tracker.done.stable
        if assignment.meter is None:
            assignment.meter = (now, done, log_end)
            return
        since, old_done, old_end = assignment.meter
        seconds = (now - since) / 1000
        if seconds * 1000 < self._settings.heartbeat_interval_ms:
            return
        assignment.meter = (now, done, log_end)
        cycle = Cycle(max(0, log_end - done - 1), (done - old_done) / seconds, (log_end - old_end) / seconds)
        self._cycles[assignment.key] = (*self._cycles.get(assignment.key, ()), cycle)[-MAX_CYCLES:]
        self.dirty = True

    def wishes(self, now: float) -> Wishes | None:
        """What the policy wants done now; None: nothing changed, or the group is paused."""
        if not self.dirty and now < self.deadline:
            return None
        self.dirty = False
        self._let_go = {key: until for key, until in self._let_go.items() if until > now}
        partitions = self._partitions(now)
        inherited = self._inherit(partitions, now)
        if inherited:
            partitions = self._partitions(now)
        if not partitions:
            return None
        own = tuple(
            sorted(
                k
                for k, x in self._consumer.assignments.items()
                if x.stage in _OWN_STAGES and not x.releasing and k in partitions
            )
        )
        view = View(
            client_id=self._settings.client_id,
            heartbeat_interval_ms=self._settings.heartbeat_interval_ms,
            partitions=partitions,
            waiting=self._observer.waiting(self._consumer.subscription.topics, now),
            asked_for=self._observer.asked_for(now),
        )
        wishes = self._consumer.settings.policy.wishes(view, own, now)
        return self._limit(wishes, view, now)

    def _limit(self, wishes: Wishes, view: View, now: float) -> Wishes:
        """Leave to others what we have just let go; ask for at most one held lease every HI."""
        claim = tuple(key for key in wishes.claim if key not in self._let_go)
        release = wishes.release
        ask = [key for key in wishes.ask if key not in self._consumer.assignments and key not in self._let_go]
        if ask and now >= self._next_ask:
            self._next_ask = now + self._settings.heartbeat_interval_ms
            claim = (*claim, ask[0])
        if ask:
            self.deadline = min(self.deadline, self._next_ask)
        return replace(wishes, claim=claim, release=release, ask=())

    def _inherit(self, partitions: dict[Key, PartitionView], now: float) -> bool:
        """While starting: take over what an older instance of this client holds (C7)."""
        inherited = self._observer.inherited
        keys = [key for key in inherited if key in partitions and not self._consumer.is_taken(key)]
        for key in keys:
            epoch = inherited.pop(key)
            lease = self._observer.lease(key)
            if lease is not None and lease.held and lease.epoch == epoch and self._observer.opens_at(key, now) > now:
                self._consumer.claim(key, now, take_over=True)
        return bool(keys)

    def _partitions(self, now: float) -> dict[Key, PartitionView]:
        """The subscription's partitions that can be worked on now; sets when to look again."""
        hi = self._settings.heartbeat_interval_ms
        self.deadline = float("inf")
        shown: dict[Key, PartitionView] = {}
        for key in self._consumer.subscription.partitions:
            cp = self._observer.cp_of(key)
            if self._observer.is_stopped(cp):
                continue
            pause_ends = self._observer.paused_until(cp, now)
            if pause_ends is not None:
                self.deadline = min(self.deadline, pause_ends)
                continue
            if key in self._consumer.blocked:
                continue
            assignment = self._consumer.assignments.get(key)
            if assignment is not None and not assignment.over:
                cycles = self._cycles.get(key, ())
                shown[key] = PartitionView(holder=self._settings.client_id, cycles=cycles)
                continue
            self._cycles.pop(key, None)
            shown[key] = self._other(key, now, hi)
        for until in self._let_go.values():
            self.deadline = min(self.deadline, until)
        return shown

    def _other(self, key: Key, now: float, hi: int) -> PartitionView:
        opens_at = self._observer.opens_at(key, now)
        if opens_at > now:
            self.deadline = min(self.deadline, opens_at)
            lease = self._observer.lease(key)
            return PartitionView(holder=lease.client_id if lease is not None else None)
        if key in self._consumer.assignments:  # released by us, and not yet shown in the log
            return PartitionView(holder=self._settings.client_id)
        since = self._observer.free_since(key, now)
        if now - since <= hi:
            self.deadline = min(self.deadline, since + hi + 1)
        return PartitionView(holder=None, free_since=since)
