"""``python -m tests.campaigns.modes --seed 7``: a live group changed from mode to mode, and from kind to kind.

Exit status: 0 each message was handled or given up by the operator, in one hand at a time, in order where there is one,
and the group was never stuck; 1 not, 2 wrong use.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence

from kafka_marshal.testing import open_kafka
from kafka_marshal.testing.errors import LocalBrokerError
from tests.campaigns.modes.campaign import MODES, Options, run_campaign

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.modes", description=__doc__)
    parser.add_argument("--seed", type=int, default=None, help="decides what goes wrong (chance)")
    parser.add_argument("--seeds", type=int, default=1, help="how many, each on a broker alone (1)")
    parser.add_argument("--modes", default="", help=f"one after the other, such as {','.join(MODES)} (drawn)")
    parser.add_argument("--stay", type=float, default=5.0, help="seconds in each mode, about (5)")
    parser.add_argument("--gentle", action="store_true", help="no kills, stops, outages: nothing comes twice")
    parser.add_argument("--shared-broker", action="store_true", help="one broker for all seeds, which no seed kills")
    parser.add_argument("--keep", action="store_true", help="keep what was written down")
    options = parser.parse_args(arguments)
    first = options.seed if options.seed is not None else int.from_bytes(os.urandom(3))
    logging.basicConfig(level=logging.ERROR)
    broken = 0
    try:
        kafka = open_kafka(1) if options.shared_broker else None
        try:
            for seed in range(first, first + options.seeds):
                chosen = Options(
                    seed=seed,
                    modes=tuple(filter(None, options.modes.split(","))),
                    stay_s=options.stay,
                    gentle=options.gentle or None,
                    poisons=0 if options.gentle else 1,
                    keep=options.keep,
                )
                result = run_campaign(chosen, kafka, say=lambda line: sys.stderr.write(f"{line}\n"))
                sys.stdout.writelines(f"{each}\n" for each in result.violations[:20])
                sys.stdout.write(f"{result.tell()}\n")
                sys.stdout.flush()
                broken += bool(result.violations)
        finally:
            if kafka is not None:
                kafka.stop()
    except LocalBrokerError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())
