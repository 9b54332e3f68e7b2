"""``python -m tests.campaigns STORY …``: attacks on the product; ``STORY --help`` has the arguments of each.

Exit status: 0 every promise was kept, 1 one was broken (prints what, and the seed), 2 wrong use.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from kafka_marshal.testing.errors import LocalBrokerError
from kafka_marshal.testing.simulate import where_it_ran
from tests.campaigns.frame import Result

#: Name → the module that has ``add_arguments(parser)`` and ``runs(arguments, say)``.
STORIES = {
    "chaos": "chaos.campaign",
    "checkpoints": "checkpoints.campaign",
    "freezes": "freezes",
    "fuzz": "fuzz.campaign",
    "keeping": "keeping",
    "modes": "modes.story",
    "parks": "parks.story",
    "reads": "reads.story",
    "redos": "redos.story",
    "sharing": "sharing.story",
    "sinks": "sinks.story",
    "soak": "soak",
    "transactions": "transactions.campaign",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    name, *rest = [*(sys.argv[1:] if arguments is None else arguments), ""]
    if name not in STORIES:
        sys.stderr.write(f"{__doc__}\nSTORY: {', '.join(STORIES)}\n")
        return 2
    story = import_module(f"tests.campaigns.{STORIES[name]}")
    parser = argparse.ArgumentParser(
        prog=f"python -m tests.campaigns {name}",
        description=story.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        conflict_handler="resolve",
    )
    parser.add_argument("--seed", type=int, default=None, help="decides what goes wrong (chance)")
    parser.add_argument("--json", type=Path, help="write all figures here")
    parser.add_argument("--keep", action="store_true", help="keep what was written down")
    story.add_arguments(parser)
    chosen = parser.parse_args(rest[:-1])
    if chosen.seed is None:
        chosen.seed = int.from_bytes(os.urandom(3))
    sys.stderr.write(f"seed {chosen.seed}\n")
    logging.basicConfig(level=logging.ERROR)  # brokers die, so that broken connections are expected
    results: list[Result] = []
    try:
        for result in story.runs(chosen, lambda line: sys.stderr.write(f"{line}\n")):
            results.append(result)
            sys.stdout.writelines(f"{each}\n" for each in result.details())
            sys.stdout.write(f"{result.tell()}\n")
            sys.stdout.flush()
            if chosen.json is not None:
                found = {**where_it_ran(), "seed": chosen.seed, "campaigns": [each.to_json() for each in results]}
                chosen.json.write_text(json.dumps(found, indent=1) + "\n")
    except LocalBrokerError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return int(any(each.violations for each in results))


if __name__ == "__main__":
    sys.exit(main())
