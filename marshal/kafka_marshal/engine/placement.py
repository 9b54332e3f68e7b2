"""Asks the policy at the right moments, and shows it the world as a view.

A policy is asked when something changed that it may care about, and when a lease is about to open, a wish wants to be
renewed, or a free partition has lain idle for HI. In between nothing is computed.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING

from kafka_marshal.engine.assignment import Assignment, Stage
from kafka_marshal.engine.observer import Observer
from kafka_marshal.engine.policies import MAX_CYCLES, Cycle, PartitionView, View, Wishes
from kafka_marshal.engine.settings import EngineSettings

if TYPE_CHECKING:
    from kafka_marshal.engine.consumer import ConsumerEngine

__all__ = ["Placement"]

Key = tuple[str, int]

#: Claims a member that wants many sends before it has seen an answer.
FIRST_CLAIMS = 32

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
        #: Claims sent since we last wanted none: answered ones let more go out (see _wave).
        self._claimed = 0
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
        claim = self._wave(tuple(key for key in wishes.claim if key not in self._let_go))
        release = wishes.release
        ask = [key for key in wishes.ask if key not in self._consumer.assignments and key not in self._let_go]
        if ask and now >= self._next_ask:
            self._next_ask = now + self._settings.heartbeat_interval_ms
            claim = (*claim, ask[0])
        if ask:
            self.deadline = min(self.deadline, self._next_ask)
        return replace(wishes, claim=claim, release=release, ask=())

    def _wave(self, wanted: tuple[Key, ...]) -> tuple[Key, ...]:
        """As many of these claims as may go out now: a few at first, two more for each that the log has answered.

        So members that start together see each other before each of them has claimed everything, and who is alone
        has thousands after some round trips.
        """
        under_way = sum(1 for x in self._consumer.assignments.values() if x.stage is Stage.CLAIMING)
        if not wanted:
            self._claimed = under_way
            return ()
        answered = self._claimed - under_way
        wave = wanted[: max(0, FIRST_CLAIMS + answered - under_way)]
        self._claimed += len(wave)
        self.dirty = self.dirty or len(wave) < len(wanted)
        return wave

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
        observer, assignments, blocked = self._observer, self._consumer.assignments, self._consumer.blocked
        closed = observer.closed_cps(now)
        self.deadline = min((*closed.values(), *self._let_go.values()), default=inf)
        shown: dict[Key, PartitionView] = {}
        held: dict[str | None, PartitionView] = {}  # one view for all that somebody holds: there may be thousands
        for key in self._consumer.subscription.partitions:
            if key in blocked or (closed and observer.cp_of(key) in closed):
                continue
            assignment = assignments.get(key)
            if assignment is not None and not assignment.over:
                holder: str | None = self._settings.client_id
                if cycles := self._cycles.get(key):
                    shown[key] = PartitionView(holder=holder, cycles=cycles)
                    continue
            else:
                if self._cycles:
                    self._cycles.pop(key, None)
                opens_at, holder = observer.look(key, now)
                if opens_at > now:
                    self.deadline = min(self.deadline, opens_at)
                elif assignment is None:
                    shown[key] = self._idle(key, now)
                    continue
                else:  # released by us, and not yet shown in the log
                    holder = self._settings.client_id
            view = held.get(holder)
            if view is None:
                view = held[holder] = PartitionView(holder=holder)
            shown[key] = view
        return shown

    def _idle(self, key: Key, now: float) -> PartitionView:
        """A partition that can be claimed."""
        hi = self._settings.heartbeat_interval_ms
        since = self._observer.free_since(key, now)
        if now - since <= hi:
            self.deadline = min(self.deadline, since + hi + 1)
        return PartitionView(holder=None, free_since=since)
