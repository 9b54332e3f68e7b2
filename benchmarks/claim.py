"""From ``Marshal.claim`` to an owned lease, divided by a bare round trip from a producer to its consumer.

Each after 10 ms of idleness, one after the other, interleaved:

    python -m benchmarks.claim [--claims N] [--json FILE]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median, quantiles

from benchmarks.common import Row, report
from benchmarks.pair import beside_raw_pair
from kafka_marshal import Marshal


def claiming(marshal: Marshal) -> Callable[[int], float]:
    """A step that claims another partition each time, and releases it outside the measured time."""

    def step(number: int) -> float:
        began = time.perf_counter()
        lease = marshal.claim("bench", number)
        owned_s = time.perf_counter() - began
        lease.release()
        return owned_s

    return step


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--claims", type=int, default=300)
    parser.add_argument("--json")
    args = parser.parse_args()
    claims, trips = beside_raw_pair(args.claims, claiming)
    ratio = median(claims) / median(trips)
    rows = [Row("claim to owned, p50", median(claims), median(trips), ratio, 2.5, "ms", at_most=True)]
    p95 = (quantiles(claims, n=20)[-1], quantiles(trips, n=20)[-1])
    rows.append(Row("claim to owned, p95", *p95, p95[0] / p95[1], None, "ms", at_most=True))
    report("claim", rows, args.json, claims=args.claims)


if __name__ == "__main__":
    main()
