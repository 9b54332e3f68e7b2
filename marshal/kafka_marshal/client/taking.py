"""What our own threads do for ``RangeConsumer.take``: find open ranges, or wait until there are some."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from typing import Protocol

from kafka_marshal.engine.inputs import T, Ts
from kafka_marshal.engine.work.consumer import ConsumerEngine
from kafka_marshal.engine.work.ranges import OffsetRange, RangeDelivery, RangeRun
from kafka_marshal.node.driver import Driver
from kafka_marshal.ports import Cluster
from kafka_marshal.types import Key

#: (log start, log end) by partition.
Marks = dict[Key, tuple[int, int]]

#: How long the leaders may take to answer (s).
LOOKUP_TIMEOUT_S = 10.0


class Watermarks:
    """The log starts and ends of one consumer's partitions, as their leaders answered."""

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
        """The answer to ``look_ahead``, returned once; None: there is none (yet)."""
        ahead, self.ahead = self.ahead, None
        if ahead is None or not ahead.done() or ahead.cancelled() or ahead.exception() is not None:
            return None
        return ahead.result()

    def end_of(self, key: Key) -> int | None:
        """The log end, as last read."""
        return self._ends.get(key)

    def close(self) -> None:
        """Send no more requests."""
        self._aside.shutdown(wait=False, cancel_futures=True)


#: While there is nothing new, the leaders are asked again this often (s).
POLL_S = 0.1


class Taking(Protocol):
    """The consumer that ranges are taken for."""

    _engine: ConsumerEngine
    _closed: bool

    @property
    def _delivery(self) -> RangeDelivery: ...

    def _is_over(self) -> bool: ...

    def _take(self, function: Callable[[*Ts, float], T], *of: *Ts) -> T | None: ...


class RangeTaker:
    """Takes ranges for the calls of one consumer; one at a time."""

    def __init__(self, consumer: Taking, driver: Driver, marks: Watermarks) -> None:
        self._consumer = consumer
        self._driver = driver
        self._marks = marks

    def serve(
        self, is_gone: Callable[[], bool], max_records: int, ends: Mapping[Key, int] | None, timeout: float | None
    ) -> list[OffsetRange]:
        """Carry out a ``take``, on one of our threads."""
        deadline = None if timeout is None else self._driver.monotonic() + timeout
        while not is_gone():
            keys = self.open_keys(ends)
            if keys is None:
                break
            found = self._take_known(max_records, ends, keys) or self._take_fresh(max_records, ends, keys)
            if found:
                return [run.offsets() for run in found]
            left = None if deadline is None else deadline - self._driver.monotonic()
            if left is not None and left <= 0:
                break
            self._pause(keys, ends, POLL_S if left is None else min(POLL_S, left))
        return []

    def open_keys(self, ends: Mapping[Key, int] | None) -> list[Key] | None:
        """Partitions to take from; None: the consumer has ended."""
        with self._driver.locked(step=False):
            if self._consumer._is_over():
                return None
            keys = self._open()
        return [key for key in keys if ends is None or key in ends]

    def _open(self) -> list[Key]:
        return self._consumer._take(self._consumer._delivery.open) or []

    def _pause(self, keys: list[Key], ends: Mapping[Key, int] | None, timeout_s: float) -> None:
        """Wait until there are other partitions to take from, or it is time to ask for the log ends again."""
        known = set(keys)

        def changed() -> bool:
            if self._consumer._closed or self._consumer._engine.errors:
                return True
            return any(key not in known and (ends is None or key in ends) for key in self._open())

        with self._driver.condition:
            self._driver.lock.wait_for(changed, timeout_s)  # it may last: the log is read in steps

    def _take_known(self, max_records: int, ends: Mapping[Key, int] | None, keys: Collection[Key]) -> list[RangeRun]:
        """Take from what ``look_ahead`` has found, if that fills a round: then no request is needed."""
        ahead = self._marks.take_ahead()
        if ahead is None:
            return []
        marks = _bounded(ahead, ends)
        if not all(key in marks for key in keys):
            return []
        return self._take(marks, max_records, only_full=True)

    def _take_fresh(self, max_records: int, ends: Mapping[Key, int] | None, keys: list[Key]) -> list[RangeRun]:
        if not keys:
            return []
        marks = self._marks.look_up(keys)
        with self._driver.locked(step=False):
            found = self._consumer._engine.assignments
            new = {key[0] for key, (_, end) in marks.items() if key in found and found[key].tracker.open_from() < end}
        # No reader would notice here. The answer is younger than the log ends: those are of this topic.
        infos = self._driver.cluster.topic_info(sorted(new), LOOKUP_TIMEOUT_S) if new else {}
        with self._driver.locked():
            for name, info in infos.items():
                known = self._consumer._engine.subscription.topic_id(name)
                if known is not None and info.topic_id not in ("", known):
                    self._consumer._take(self._consumer._engine.positions.reader_found, name, info.topic_id)
            ends_found = {key: end for key, (_, end) in marks.items()}
            self._consumer._take(self._consumer._delivery.beyond_end, ends_found)
        return self._take(_bounded(marks, ends), max_records, only_full=False)

    def _take(self, marks: Marks, max_records: int, *, only_full: bool) -> list[RangeRun]:
        with self._driver.locked(step=False):
            if self._consumer._is_over():
                return []
            runs = self._consumer._take(self._consumer._delivery.take_if, marks, max_records, only_full) or []
        return self._await_grants(runs) if self._consumer._engine.at_most_once else runs

    def _await_grants(self, runs: list[RangeRun]) -> list[RangeRun]:
        """Wait until our replica has applied all proposals (C13); returns those that were granted."""
        granted: list[RangeRun] = []
        waiting = list(runs)
        try:
            with self._driver.condition:
                self._driver.wait_for(lambda: all(map(self._consumer._delivery.is_answered, runs)), None)
            with self._driver.locked():
                while waiting:
                    run = waiting.pop()
                    if self._consumer._take(self._consumer._delivery.collect_range, run):
                        granted.insert(0, run)
        except BaseException:  # Ctrl-C while waiting: the caller won't get what was granted
            with self._driver.locked():
                self._consumer._take(self._consumer._delivery.lose, granted, waiting)
            raise
        return granted


def _bounded(marks: Marks, ends: Mapping[Key, int] | None) -> Marks:
    if ends is None:
        return marks
    return {key: (low, min(end, ends[key])) for key, (low, end) in marks.items() if key in ends}
