"""Asks the leaders of partitions where their logs start and end (*blocking*, on look-up threads)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime

from kafka_marshal.engine.effects import LookUp
from kafka_marshal.errors import MarshalError
from kafka_marshal.node.engine_lock import EngineLock
from kafka_marshal.node.replica import Replica
from kafka_marshal.node.topics import LOOKUP_TIMEOUT_S
from kafka_marshal.ports import Cluster
from kafka_marshal.rate_limit import RateLimitedLog
from kafka_marshal.runtime import Executor
from kafka_marshal.types import Key

#: This long after a topic grew, at the latest, all working members know its new partitions and claim them: twice the
#: interval of their checks.
GROWTH_SEEN_MS = 10_000

#: As many look-ups as this that come together are asked for together: the first member of a fleet begins with all
#: partitions, and can hand over none before it knows their starts.
MANY = 16
#: How many are asked for in one request: their answers are taken under one lock.
TOGETHER = 100
#: How long they wait for their leaders (s) before each asks for itself.
TOGETHER_S = 2.0


class LookUps:
    """The look-ups of one driver."""

    def __init__(
        self, cluster: Cluster, replica: Replica, lock: EngineLock, rate_limited: RateLimitedLog, threads: Executor
    ) -> None:
        self._cluster = cluster
        self._replica = replica
        self._lock = lock
        self._rate_limited = rate_limited
        self._threads = threads
        self._now_ms = cluster.runtime.now_ms

    def start(self, wanted: Sequence[LookUp]) -> None:
        """Answer these, which the engine wants at the same time; the lock is held."""
        if len(wanted) < MANY:
            for each in wanted:
                self._threads.submit(self._look_up, each)
            return
        for first in range(0, len(wanted), TOGETHER):
            self._threads.submit(self._look_up_together, wanted[first : first + TOGETHER])

    def end(self) -> None:
        """Look up nothing more."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _look_up_together(self, wanted: Sequence[LookUp]) -> None:
        """On a look-up thread. What is not answered, or needs another question, is looked up for itself."""
        lock = self._lock
        asked = [each for each in wanted if lock.engine.is_asked(each)]
        if lock.life.ended or not asked:
            return
        try:
            marks = self._cluster.watermarks([each.key for each in asked], TOGETHER_S)
        except MarshalError:  # each says so if it still fails
            marks = {}
        with lock.locked():
            for each in asked:
                if each.start == "earliest" and each.key in marks:
                    low, high = marks[each.key]
                    lock.engine.take(None, lock.engine.located, each, low, high, low, self._now_ms())
                elif not lock.life.ended:
                    self._threads.submit(self._look_up, each)

    def _look_up(self, wanted: LookUp) -> None:
        """On a look-up thread."""
        key, lock, topic = wanted.key, self._lock, self._replica.topic
        while not lock.life.ended and lock.engine.is_asked(wanted):
            try:
                marks = self._cluster.watermarks([key], LOOKUP_TIMEOUT_S)
                if key in marks:
                    log_time = max(world.log_time for world in list(self._replica.worlds.values()))
                    first = _first_offset(self._cluster, topic, log_time, wanted, marks[key], LOOKUP_TIMEOUT_S)
                    with lock.locked():
                        lock.engine.take(None, lock.engine.located, wanted, *marks[key], first, self._now_ms())
                    return
                self._rate_limited.warn(
                    "no_leader", key, f"{key[0]} [{key[1]}]: has no leader at the moment; asking again"
                )
            except MarshalError as error:
                text = f"{key[0]} [{key[1]}]: log start and end not found, asking again: {error}"
                self._rate_limited.unanswered("look_up_failed", key, text)
            with lock.condition:
                lock.condition.wait(0.2)


def _first_offset(
    cluster: Cluster, coordination: str, log_time: int, wanted: LookUp, marks: tuple[int, int], timeout_s: float
) -> int:
    """Where a group begins on a partition that it never held (P9, *blocking*).

    marks: log start and end. log_time: the newest of all CPs.
    """
    low, high = marks
    key, start = wanted.key, wanted.start
    if start == "earliest" or _is_old(cluster, coordination, log_time, wanted.claims_before, timeout_s):
        return low
    if isinstance(start, datetime):
        return cluster.offsets_for_time([key], int(start.timestamp() * 1000), timeout_s).get(key, high)
    return high


def _is_old(cluster: Cluster, coordination: str, log_time: int, claims: Mapping[int, int], timeout_s: float) -> bool:
    """Whether one of these records of the coordination topic, an offset by CP, is older than GROWTH_SEEN_MS."""
    if not claims:
        return False
    places: list[Key] = [(coordination, cp) for cp in claims]
    young = cluster.offsets_for_time(places, max(0, log_time - GROWTH_SEEN_MS), timeout_s)
    return any(offset < young.get((coordination, cp), 0) for cp, offset in claims.items())
