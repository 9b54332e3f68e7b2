"""``python -m tests.campaigns.sharing --messages 1000000 --kills 150``: members that share partitions by batches.

Exit status: 0 each message was handled or given up by the operator, in one hand at a time, 1 not, 2 wrong use.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence

from kafka_marshal.testing.errors import LocalBrokerError
from tests.campaigns.sharing.campaign import Options, run_campaign

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.sharing", description=__doc__)
    parser.add_argument("--messages", type=int, default=1_000_000, help="in all partitions (1,000,000)")
    parser.add_argument("--kills", type=int, default=150, help="of workers (150)")
    parser.add_argument("--work-ms", type=float, default=2.0, help="of each message (2)")
    parser.add_argument("--seed", type=int, default=None, help="decides what goes wrong (chance)")
    parser.add_argument("--minutes", type=float, default=60.0, help="most time with faults (60)")
    parser.add_argument("--sink", action="store_true", help="rows go to SQLite, each once")
    parser.add_argument("--keep", action="store_true", help="keep what was written down")
    options = parser.parse_args(arguments)
    seed = options.seed if options.seed is not None else int.from_bytes(os.urandom(3))
    logging.basicConfig(level=logging.ERROR)
    chosen = Options(
        messages=options.messages,
        kills=options.kills,
        work_ms=options.work_ms,
        seed=seed,
        most_s=options.minutes * 60,
        sink=options.sink,
        keep=options.keep,
    )
    try:
        result = run_campaign(chosen, say=lambda line: sys.stderr.write(f"{line}\n"))
    except LocalBrokerError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.writelines(f"{each}\n" for each in result.violations[:40])
    sys.stdout.write(f"{result.tell()}\n")
    return int(bool(result.violations))


if __name__ == "__main__":
    sys.exit(main())
