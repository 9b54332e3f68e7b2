"""Processor time of what a coordinated group asks of each replica, beside its bound:

    python -m benchmarks.groups [--rounds N] [--json FILE]

Targets: `compute_targets`, for 1,000 members and 10,000 partitions. Each replica computes them within a record, and for
each member that joins: a fleet that starts costs a thousand of them. Members subscribe to all of 10 topics, or
("unequal subscriptions") each to a random half of 100. From nothing: there were no targets before. Times are medians.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median

from benchmarks.common import Row, report
from rationalizer.groups.assignors import STRATEGIES, Before, Target, compute_targets

MEMBERS = 1_000
PARTITIONS = 10_000

#: Slots are offsets: not small, and not one after the other.
SLOTS = [1_000_000 + 17 * n for n in range(MEMBERS + 1)]

Subscribers = Mapping[str, Sequence[int]]


def bounded(name: str, bound_ms: float, rounds: int, work: Callable[[], object]) -> Row:
    """Milliseconds of processor time of this work, which should not exceed a bound."""
    spent = []
    for _ in range(rounds):
        start = time.thread_time()
        work()
        spent.append((time.thread_time() - start) * 1000)
    ours = median(spent)
    return Row(name, ours, bound_ms, ours / bound_ms, 1.0, "ms", at_most=True)


def targets(rounds: int) -> list[Row]:
    """Rows of compute_targets."""
    equal = _counts(10)
    rows = []
    for strategy in STRATEGIES:
        rows += _start_and_join(strategy, dict.fromkeys(equal, SLOTS), equal, (20, 2.5), rounds)
    chance = random.Random(75)
    halves = _counts(100)
    subscribers = {topic: [slot for slot in SLOTS if chance.random() < 0.5] for topic in halves}
    return rows + _start_and_join("sticky", subscribers, halves, (100, 100), rounds, ", unequal subscriptions")


def _counts(topics: int) -> dict[str, int]:
    return {f"topic-{n:03}": PARTITIONS // topics for n in range(topics)}


def _start_and_join(
    strategy: str,
    subscribers: Subscribers,
    counts: Mapping[str, int],
    bounds_ms: tuple[float, float],
    rounds: int,
    how: str = "",
) -> list[Row]:
    """From nothing, and the last slot joins the others."""
    others = {topic: [slot for slot in slots if slot != SLOTS[-1]] for topic, slots in subscribers.items()}

    def rebalance(subscribers: Subscribers, before: Mapping[str, Before]) -> dict[str, list[Target]]:
        return compute_targets(strategy, subscribers, counts, set(), set(), before, lambda topic: {})

    before = {}
    for topic, found in rebalance(others, {}).items():
        slots = [target for target in found if isinstance(target, int)]
        before[topic] = Before(slots, slots.copy())
    return [
        bounded(f"{strategy}{how}: from nothing", bounds_ms[0], rounds, lambda: rebalance(others, {})),
        bounded(f"{strategy}{how}: one joins", bounds_ms[1], rounds, lambda: rebalance(subscribers, before)),
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--json", help="write the figures to this file")
    options = parser.parse_args(arguments)
    rows = targets(options.rounds)
    report("groups", rows, options.json, rounds=options.rounds, members=MEMBERS, partitions=PARTITIONS)


if __name__ == "__main__":
    main()
