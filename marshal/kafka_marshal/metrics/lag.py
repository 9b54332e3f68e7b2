"""The lag of a whole group, from any of its members: for autoscalers (KEDA's ``metrics-api``)."""

from __future__ import annotations

from collections.abc import Iterator
from threading import Lock
from time import monotonic
from typing import TYPE_CHECKING, TypedDict

from kafka_marshal.errors import KafkaUnavailableError, MarshalError
from kafka_marshal.metrics.measure import Meter, ranges_of
from kafka_marshal.metrics.rows import PartitionMetrics
from kafka_marshal.types import Key, Start
from rationalizer.holes import lag_of
from rationalizer.intervals import lag

if TYPE_CHECKING:
    from kafka_marshal.engine.work.consumer import ConsumerEngine

#: Requests within this time (s) reuse the last log ends.
SAME_ENDS_S = 5.0

#: How long the brokers have to answer (s), and how long another request waits for them.
ASK_TIMEOUT_S = 3.0


class PartitionLag(TypedDict):
    """One partition."""

    topic: str
    partition: int
    #: Offsets that are neither done nor set aside; None: the partition has no leader.
    lag: int | None
    #: Of partitions that this member holds: the age of the next undone message; None: not known.
    lag_seconds: float | None


class Lag(TypedDict):
    """All partitions of the topics that this member's consumers read, with any holder."""

    group: str
    lag: int
    #: The largest of this member's partitions.
    lag_seconds: float
    partitions: list[PartitionLag]


class GroupLag:
    """Log ends from the brokers, at most every five seconds, and positions from the replica."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._asking = Lock()
        self._known: tuple[float, dict[Key, tuple[int, int]]] | None = None

    def read(self, *, closed: bool) -> Lag:
        """The lag now (*blocking*, for at most twice ASK_TIMEOUT_S). Raises MarshalError if no broker answers."""
        driver = self._meter.driver
        metrics = self._meter.read(closed=closed)
        own = {(one.topic, one.partition): one for one in metrics.partitions}
        wanted = {key: each for each in list(driver.engine.consumers.values()) for key in each.subscription.partitions}
        ends = self._ends(wanted)
        found = list(_lags(wanted, own, ends))
        return Lag(
            group=metrics.group_id,
            lag=sum(one["lag"] or 0 for one in found),
            lag_seconds=round(metrics.lag_seconds, 3),
            partitions=found,
        )

    def _ends(self, wanted: dict[Key, ConsumerEngine]) -> dict[Key, tuple[int, int]]:
        if not wanted:
            return {}
        if not self._asking.acquire(timeout=ASK_TIMEOUT_S):
            raise KafkaUnavailableError("the brokers have not said in time where the partitions' logs end")
        try:
            known, now = self._known, monotonic()
            if known is not None and now - known[0] < SAME_ENDS_S and known[1].keys() >= wanted.keys():
                return known[1]
            ends = self._meter.driver.cluster.watermarks(wanted, ASK_TIMEOUT_S)
            if not ends:
                raise MarshalError("no partition has a leader that says where its log ends")
            self._known = now, ends
            return ends
        finally:
            self._asking.release()


def _lags(
    wanted: dict[Key, ConsumerEngine], own: dict[Key, PartitionMetrics], ends: dict[Key, tuple[int, int]]
) -> Iterator[PartitionLag]:
    for key, consumer in sorted(wanted.items(), key=lambda item: item[0]):
        topic, partition = key
        one = own.get(key)
        known = None if one is None or one.lag is None else one.lag
        marks = ends.get(key)
        found = known if known is not None or marks is None else _from_log(consumer, key, *marks)
        seconds = None if one is None or one.lag_seconds is None else round(one.lag_seconds, 3)
        yield PartitionLag(topic=topic, partition=partition, lag=found, lag_seconds=seconds)


def _from_log(consumer: ConsumerEngine, key: Key, low: int, end: int) -> int:
    """The lag of a partition that this member does not hold, from its position in the log."""
    done = consumer.source.view.progress(key)
    if done is None or done.stable < 0:
        start: Start = consumer.settings.start
        return lag(low, end) if start == "earliest" else 0
    ranges = list(ranges_of(done))
    found = lag(max(low, done.stable + 1), end, ranges)
    return max(0, found + lag_of(done.open, low, end, done.stable, ranges))
