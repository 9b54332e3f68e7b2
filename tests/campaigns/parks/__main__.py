"""``python -m tests.campaigns.parks --seed 7``: a claimed and a coordinated group that set messages aside.

Exit status: 0 each message was handled, in the order of its key, or set aside as it must be; 1 not; 2 wrong use.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence

from kafka_marshal.testing.errors import LocalBrokerError
from tests.campaigns.parks.campaign import KINDS, Options, run_campaign
from tests.campaigns.parks.stories import STORIES

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.parks", description=__doc__)
    parser.add_argument("--story", choices=("faults", *STORIES), default="faults", help="what happens (faults)")
    parser.add_argument("--minutes", type=float, default=3.0, help="with faults (3)")
    parser.add_argument("--rate", type=float, default=200.0, help="messages in a second (200)")
    parser.add_argument("--only", choices=KINDS, help="one kind of group")
    parser.add_argument("--seed", type=int, default=None, help="decides what goes wrong (chance)")
    parser.add_argument("--keep", action="store_true", help="keep what was written down")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.ERROR)
    chosen = Options(
        seconds=options.minutes * 60,
        rate=options.rate,
        kinds=(options.only,) if options.only else KINDS,
        seed=options.seed if options.seed is not None else int.from_bytes(os.urandom(3)),
        keep=options.keep,
    )
    try:
        result = run_campaign(chosen, story=options.story, say=lambda line: sys.stderr.write(f"{line}\n"))
    except LocalBrokerError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.writelines(f"{each}\n" for each in result.violations[:40])
    sys.stdout.write(f"{result.tell()}\n")
    return int(bool(result.violations))


if __name__ == "__main__":
    sys.exit(main())
