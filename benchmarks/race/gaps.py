"""How long a partition paused at a worker, without delays of the broker."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise

__all__ = ["beyond_ms", "first_seen", "longest_ms"]

#: Partition → offset → time of first delivery (s).
Seen = Mapping[int, Mapping[int, float]]


def first_seen(records: Iterable[tuple[int, int, float]]) -> Seen:
    """First deliveries of (partition, offset, moment); repeats don't count."""
    seen: dict[int, dict[int, float]] = {}
    for partition, offset, at in records:
        seen.setdefault(partition, {}).setdefault(offset, at)
    return seen


def longest_ms(worker: Seen, partitions: Iterable[int], began: float, until: float) -> float:
    """The longest time between two records of one of these partitions; the whole time if there were not two."""
    gaps = [until - began for partition in partitions if len(worker.get(partition, ())) < 2]
    for partition in partitions:
        gaps += [late - early for early, late in pairwise(sorted(worker.get(partition, {}).values()))]
    return 1000 * max(gaps)


def beyond_ms(worker: Seen, bystander: Seen, partitions: Iterable[int], began: float, until: float) -> float:
    """The largest excess of a gap over the bystander's between the same two records.

    The bystander is in no group: if both waited, the producer, the broker or the machine was late. Records that only
    the bystander has seen are still missing at the worker, whose gap then runs until the end. If the bystander has not
    seen two records, there is nothing to compare: 0.
    """
    found = []
    for partition in partitions:
        mine, others = worker.get(partition), bystander[partition]
        if not mine:
            found.append(until - began)
            continue
        first = min(mine)
        for early, late in pairwise(sorted(offset for offset in others if offset >= first)):
            usual = others[late] - others[early]
            found.append(mine.get(late, until) - mine.get(early, until) - usual)
    return 1000 * max(found, default=0.0)
