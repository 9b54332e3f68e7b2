"""Where a group begins on a partition that it never held (P9)."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime

from kafka_marshal.engine.effects import Key, LookUp
from kafka_marshal.ports import Cluster

__all__ = ["GROWTH_SEEN_MS", "first_offset"]

#: At the latest this long after a topic grew, all working members know its new partitions and claim them: twice the
#: time between two of their checks.
GROWTH_SEEN_MS = 10_000


def first_offset(
    cluster: Cluster, coordination: str, log_time: int, wanted: LookUp, marks: tuple[int, int], timeout_s: float
) -> int:
    """The offset that a look-up asks for (*blocking*). marks: log start and end; log_time: the newest of all CPs."""
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
