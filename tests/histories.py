"""Digests of simulated histories, to compare before and after a change of structure.

python -m tests.histories --seeds 200 > before; …; python -m tests.histories --seeds 200 | diff before -
"""

from __future__ import annotations

import argparse
from multiprocessing import get_context

from kafka_marshal.testing.simulation import Scenario, simulate_one


def digest(seed: int) -> str:
    """A line for one seed."""
    result = simulate_one(Scenario.from_seed(seed))
    broken = "" if result.violation is None else f" {result.violation}"
    return f"{seed} {result.history_digest}{broken}"


def main() -> None:
    """Print a line for each seed, in order."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=None)
    options = parser.parse_args()
    with get_context("spawn").Pool(options.jobs) as pool:
        for line in pool.imap(digest, range(options.first, options.first + options.seeds)):
            print(line, flush=True)


if __name__ == "__main__":
    main()
