"""``python -m tests.campaigns.chaos --minutes 5``: faults on real brokers from a command line.

Exit status: 0 every promise was kept, 1 one was broken (prints seed, evidence and violations), 2 wrong use.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from kafka_marshal.testing.errors import LocalBrokerError
from kafka_marshal.testing.simulate import where_it_ran
from tests.campaigns.chaos.campaign import Options, Result, run_campaign

__all__ = ["main"]

#: Violations of each kind that are printed; all of them are in the file of --json.
SHOWN = 20


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.campaigns.chaos",
        description="Workers in processes of their own on a real broker, killed at every numbered step of claim, at "
        "least once and at most once, stopped, cut off, their broker killed; what each did with each message is "
        "written down outside and checked afterwards.",
    )
    parser.add_argument("--minutes", type=float, default=5.0, help="how long things go wrong (5)")
    parser.add_argument("--seed", type=int, default=None, help="decides what goes wrong (chance)")
    parser.add_argument("--cluster3", action="store_true", help="three brokers, min.insync.replicas 2: leaders change")
    parser.add_argument("--heartbeat-interval-ms", type=int, default=500, help="HI (500)")
    parser.add_argument("--messages", type=float, default=150.0, help="written a second (150)")
    parser.add_argument("--groups", action="store_true", help="members of coordinated groups (marshal.group_consumer)")
    parser.add_argument("--json", type=Path, help="write all figures here")
    parser.add_argument("--keep", action="store_true", help="keep what was written down")
    return parser


def _print_violations(result: Result) -> None:
    by_promise: dict[str, list[str]] = {}
    for each in result.findings.violations:
        by_promise.setdefault(each.promise, []).append(str(each))
    for messages in by_promise.values():
        sys.stdout.writelines(f"{message}\n" for message in messages[:SHOWN])
        if len(messages) > SHOWN:
            sys.stdout.write(f"… and {len(messages) - SHOWN} more of these\n")
    sys.stdout.write(f"seed {result.options.seed}; what was written down: {result.folder}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    options = _parser().parse_args(arguments)
    seed = options.seed if options.seed is not None else int.from_bytes(os.urandom(3))
    chosen = Options(
        minutes=options.minutes,
        seed=seed,
        brokers=3 if options.cluster3 else 1,
        broker_every_s=20.0 if options.cluster3 else 45.0,  # two of three continue: leaders change
        heartbeat_interval_ms=options.heartbeat_interval_ms,
        messages_a_second=options.messages,
        groups=options.groups,
        keep=options.keep,
    )
    logging.basicConfig(level=logging.ERROR)  # brokers die, so that broken connections are expected
    sys.stderr.write(f"seed {seed}\n")
    try:
        result = run_campaign(chosen, say=lambda line: sys.stderr.write(f"{line}\n"))
    except LocalBrokerError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    if options.json is not None:
        options.json.write_text(json.dumps({**where_it_ran(), **result.to_json()}, indent=1) + "\n")
    for name, times in sorted(result.points.items()):
        sys.stdout.write(f"{times:6} {name}\n")
    if result.unmet:
        sys.stdout.write(f"nobody died at: {', '.join(result.unmet)}\n")
    if not result.ok:
        _print_violations(result)
    sys.stdout.write(f"{result.tell()}\n")
    return int(not result.ok)


if __name__ == "__main__":
    sys.exit(main())
