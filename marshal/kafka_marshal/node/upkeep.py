"""Regular work of a driver: the background thread does it, or begins it, with the lock held."""

from __future__ import annotations

import logging
from collections.abc import Callable

from kafka_marshal.engine.engine import check_stuck
from kafka_marshal.errors import UpgradeRequiredError
from kafka_marshal.logs import log
from kafka_marshal.node.effects import Appends
from kafka_marshal.node.engine_lock import DriverPart, Shared
from kafka_marshal.node.jobs import LogGuard, LongJob, Scope, SnapshotUpkeep, TopicRounds
from kafka_marshal.node.log_keeper import LogKeeper
from kafka_marshal.node.replica import Replica
from kafka_marshal.runtime import Executor
from rationalizer import Outcome, SettleOffsets, SettlingMessages, codes
from rationalizer.limits import is_later


class Levels:
    """CPs above the protocol level that this release knows (E4): consumers raise an error. The lock is held."""

    def __init__(self, replica: Replica, report: Callable[[UpgradeRequiredError], object]) -> None:
        """report: makes each consumer raise the error."""
        self._replica = replica
        self._report = report
        self._stopped: set[int] = set()

    def raise_new(self) -> None:
        """Report each CP once."""
        for cp, level in self._replica.stopped():
            if cp not in self._stopped:
                self._stopped.add(cp)
                error = self._error(cp, level)
                log(logging.ERROR, "upgrade_required", "%s", error, log_partition=cp, level=level)
                self._report(error)

    def _error(self, cp: int, level: int) -> UpgradeRequiredError:
        return UpgradeRequiredError(
            f"partition {cp} of {self._replica.topic!r} was raised to protocol level {level}, which this release of "
            "kafka-marshal does not know: leases in it end, the other partitions continue. Install a release that "
            "supports it",
            level=level,
        )

    def missed(self) -> list[UpgradeRequiredError]:
        """The errors reported so far, for a new consumer."""
        return [self._error(cp, level) for cp, level in self._replica.stopped() if cp in self._stopped]

    def check(self, cp: int) -> None:
        """Raise UpgradeRequiredError if this release can't read this CP any further."""
        level = self._replica.worlds[cp].required_level
        if level is not None:
            raise self._error(cp, level)


class Tally:
    """Counts applied records by type and outcome, once the replica has caught up. Read without the driver's lock."""

    __slots__ = ("_counts", "_group_id", "redone", "settled")

    def __init__(self, group_id: str) -> None:
        self._counts: dict[tuple[str, str], int] = {}
        self._group_id = group_id
        #: What was done with messages of the group that are, or were, set aside → how many.
        self.settled: dict[str, int] = dict.fromkeys(("parked", "redriven", "discarded"), 0)
        #: How many done messages of the group were opened again (R2).
        self.redone: int = 0

    def applied(self, cp: int, offset: int, outcome: Outcome) -> None:
        """A record was applied (a listener of the driver)."""
        what = (outcome.type or "", outcome.code)
        self._counts[what] = self._counts.get(what, 0) + 1
        if outcome.accepted and outcome.is_a(SettlingMessages, SettleOffsets):
            self._settled(outcome)

    def _settled(self, outcome: Outcome) -> None:
        message = outcome.message
        if message is None or message.group_id != self._group_id:
            return
        codes_of = iter(outcome.entries or ())
        is_operator = outcome.by_operator
        for what, entries in (("discarded", message.done), ("redriven", message.open), ("parked", message.parked)):
            for entry, code in zip(entries, codes_of, strict=False):
                if what == "parked" and is_later(str(entry[-1])):
                    continue  # it waits for its time
                if code == codes.OK and what == "redriven" and outcome.redoes:
                    self.redone += entry[1] - entry[0] + 1
                elif code == codes.OK and (is_operator or what == "parked"):
                    self.settled[what] += 1 if what == "parked" else entry[1] - entry[0] + 1

    def read(self) -> list[tuple[tuple[str, str], int]]:
        """((type, outcome), count), sorted; the type is "" if it is not known. Any thread, without the lock."""
        return sorted(list(self._counts.items()))  # noqa: C414 - the copy is atomic: the dict may grow meanwhile


class Upkeep(DriverPart):
    """The jobs of one driver; each decides when it is due."""

    def __init__(
        self,
        shared: Shared,
        appends: Appends,
        topics: TopicRounds,
        snapshots: SnapshotUpkeep,
        scope: Scope,
        guard: LogGuard,
        keeper: LogKeeper,
        lookups: Executor,
    ) -> None:
        super().__init__(shared)
        self.levels: Levels = Levels(self._replica, self._lock.raise_in_consumers)
        self.topics = topics
        self.snapshots = snapshots
        #: A listener of the driver.
        self.tally: Tally = Tally(self._events.group_id)
        #: Jobs of consumers; the lock is held to add or remove one.
        self.jobs: list[LongJob] = []
        self.scope = scope
        self.guard = guard
        self.keeper = keeper
        self._appends = appends
        self._lookups = lookups
        self._next_measure = 0.0

    def check(self, now: float) -> None:
        """Do what is due; look-up threads do what blocks."""
        self._events.check(now)
        self.levels.raise_new()
        self._appends.replace_broken()
        if self._lock.started:
            self.scope.narrow()
            jobs: tuple[LongJob, ...] = (self.topics, self.snapshots, self.scope, self.guard, self.keeper, *self.jobs)
            for job in jobs:
                if job.is_due(now):
                    self._lookups.submit(job.run)
        if now >= self._next_measure:
            interval_ms = self._lock.engine.settings.heartbeat_interval_ms
            self._next_measure = now + interval_ms
            self._measure(now)
            self.note_pause(now)
            for port in list(self._lock.ports.values()):
                port._reclaim(now - interval_ms)

    def _measure(self, now: float) -> None:
        """How far each consumer is from the ends of its partitions."""
        ports = self._lock.ports
        engine = self._lock.engine
        for number, consumer in engine.consumers.items():
            for key, assignment in consumer.assignments.items():
                end = ports[number]._log_end(key)
                if end is not None and not assignment.over:
                    engine.take(number, consumer.log_ends, key, end, now)
            engine.take(number, check_stuck, consumer, ports[number]._drained_at, now)

    def note_pause(self, now: float) -> None:
        """The client that has paused the group, if any. (By our clock: without traffic, log time stops.)"""
        group_id, peers = self._lock.engine.settings.group_id, self._lock.engine.peers
        paused = [world.pause(group_id) for cp, world in self._replica.worlds.items() if peers.paused_until(cp, now)]
        last = max(filter(None, paused), key=lambda pause: pause.expires, default=None)
        self._events.pause(last.client_id if last else "", last.expires if last else None)
