"""The scenes of the client's tests, for ranges."""

from __future__ import annotations

from collections.abc import Iterable

from kafka_marshal import OffsetRange, RangeConsumer
from tests.client.conftest import scene

__all__ = ["drain", "offsets", "scene"]


def offsets(ranges: Iterable[OffsetRange]) -> set[tuple[int, int]]:
    """(partition, offset) of everything to handle."""
    return {
        (given.partition, offset)
        for given in ranges
        for offset in range(given.first, given.last + 1)
        if not any(first <= offset <= last for first, last in given.done)
    }


def drain(consumer: RangeConsumer, wanted: int, max_records: int = 50) -> list[OffsetRange]:
    """Take wanted records and mark them as done."""
    found: list[OffsetRange] = []
    while sum(given.count for given in found) < wanted:
        taken = consumer.take(max_records, timeout=20)
        assert taken, f"only {found}"
        assert consumer.done(taken) == taken
        found.extend(taken)
    return found
