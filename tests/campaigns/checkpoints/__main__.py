"""``python -m tests.campaigns.checkpoints --kills 300``: groups by piece, shared by key, with ``hold``, and with sinks.

Exit status: 0 each state was that of a plain count, and nothing came again that must not; 1 not, 2 wrong use.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from kafka_marshal.testing.errors import LocalBrokerError
from kafka_marshal.testing.simulate import where_it_ran
from tests.campaigns.checkpoints.campaign import KINDS, Options, run_campaign

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.checkpoints", description=__doc__)
    parser.add_argument("--kills", type=int, default=300, help="of workers (300)")
    parser.add_argument("--seed", type=int, default=None, help="decides what goes wrong (chance)")
    parser.add_argument("--minutes", type=float, default=60.0, help="most for each kind of group (60)")
    parser.add_argument("--only", choices=tuple(KINDS), help="one kind of group")
    parser.add_argument("--workers", help="the kind of each, such as loop,run,batches")
    parser.add_argument("--heartbeat-interval-ms", type=int, default=500, help="HI (500)")
    parser.add_argument("--json", type=Path, help="write all figures here")
    parser.add_argument("--keep", action="store_true", help="keep what was written down")
    options = parser.parse_args(arguments)
    seed = options.seed if options.seed is not None else int.from_bytes(os.urandom(3))
    logging.basicConfig(level=logging.ERROR)
    kinds = [options.only] if options.only else list(KINDS)
    results = []
    for kind in kinds:
        chosen = Options(
            kills=options.kills // len(kinds),
            seed=seed,
            heartbeat_interval_ms=options.heartbeat_interval_ms,
            most_s=options.minutes * 60,
            keep=options.keep,
        )
        chosen = replace(chosen, **KINDS[kind])
        if options.workers:
            chosen = replace(chosen, workers=tuple(options.workers.split(",")))
        try:
            result = run_campaign(chosen, say=lambda line: sys.stderr.write(f"{line}\n"))
        except LocalBrokerError as error:
            sys.stderr.write(f"{error}\n")
            return 2
        results.append(result)
        sys.stdout.writelines(f"{times:6} {name}\n" for name, times in result.points.items())
        sys.stdout.writelines(f"{each}\n" for each in result.violations[:40])
        sys.stdout.writelines(f"lost, neither killed nor stopped: {each}\n" for each in result.account.unexplained[:10])
        sys.stdout.write(f"{result.tell()}\n")
        sys.stdout.flush()
        if options.json is not None:
            found = {**where_it_ran(), "campaigns": [each.to_json() for each in results]}
            options.json.write_text(json.dumps(found, indent=1) + "\n")
    return int(any(each.violations for each in results))


if __name__ == "__main__":
    sys.exit(main())
