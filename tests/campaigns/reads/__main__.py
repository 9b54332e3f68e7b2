"""``python -m tests.campaigns.reads --seeds 3``: members of one process that read partitions together (U13).

Exit status: 0 each message was handled, in order of its key, in one hand at a time, and (gentle) once, 1 not.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence

from tests.campaigns.reads.campaign import Options, run_campaign

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.reads", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="of the first (1)")
    parser.add_argument("--seeds", type=int, default=1, help="how many (1)")
    parser.add_argument("--seconds", type=float, default=60.0, help="with faults, each (60)")
    parser.add_argument("--members", type=int, default=2, help="of each process (2)")
    parser.add_argument("--gentle", action="store_true", help="members only open and close")
    parser.add_argument("--alone", action="store_true", help="each reads by itself, to compare")
    parser.add_argument("--keep", action="store_true", help="keep what was written down")
    chosen = parser.parse_args(arguments)
    logging.basicConfig(level=logging.ERROR)
    found = 0
    for seed in range(chosen.seed, chosen.seed + chosen.seeds):
        options = Options(
            seconds=chosen.seconds,
            seed=seed,
            members=chosen.members,
            gentle=chosen.gentle,
            shared=not chosen.alone,
            keep=chosen.keep,
        )
        result = run_campaign(options, say=lambda line: sys.stderr.write(f"{line}\n"))
        sys.stdout.writelines(f"{each}\n" for each in result.violations[:40])
        sys.stdout.write(f"{result.tell()}\n")
        found += len(result.violations)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
