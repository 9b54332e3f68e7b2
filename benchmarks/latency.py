"""From produce() until the own replica has applied the record, divided by a bare produce/consume pair.

Same broker, interleaved, each after 10 ms of idleness:

    python -m benchmarks.latency [--rounds N] [--json FILE]

Ours is the whole way: engine, encoding, producer, broker, tail, decoding, replay, and waking the waiting thread.
"""

from __future__ import annotations

import argparse
import time
from statistics import median, quantiles

from benchmarks.common import Row, report
from benchmarks.pair import COORDINATION_PARTITIONS, beside_raw_pair
from kafka_marshal import Marshal
from rationalizer import Outcome, Tick


class OwnRoundTrip:
    """Appends Ticks through a Marshal's driver and waits for its replica."""

    def __init__(self, marshal: Marshal) -> None:
        self._driver = marshal._driver
        self._seen = 0
        self._driver.listeners.append(self._applied)

    def _applied(self, cp: int, offset: int, outcome: Outcome) -> None:
        if outcome.type == "Tick":
            self._seen += 1

    def __call__(self, number: int) -> float:
        """Seconds until a Tick is applied and the waiting thread knows."""
        wanted = self._seen + 1
        began = time.perf_counter()
        with self._driver.lock.locked() as engine:
            engine.outbox.append(number % COORDINATION_PARTITIONS, Tick(*engine.ids))
        with self._driver.condition:
            self._driver.wait_for(lambda: self._seen >= wanted, 10)
        return time.perf_counter() - began


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--json")
    args = parser.parse_args()
    ours, bare = beside_raw_pair(args.rounds, OwnRoundTrip)
    rows = [Row("produce to applied, p50", median(ours), median(bare), median(ours) / median(bare), 2.0, "ms", True)]
    p95 = (quantiles(ours, n=20)[-1], quantiles(bare, n=20)[-1])
    rows.append(Row("produce to applied, p95", *p95, p95[0] / p95[1], None, "ms", at_most=True))
    report("latency", rows, args.json, rounds=args.rounds)


if __name__ == "__main__":
    main()
