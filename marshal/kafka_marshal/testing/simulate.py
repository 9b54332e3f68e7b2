"""``python -m kafka_marshal.testing.simulate --seeds 1000``: the simulation from a command line.

Exit status: 0 every promise was kept, 1 one was broken (a script that shows it is printed), 2 wrong use.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from kafka_marshal.errors import ConfigurationError

__all__ = ["main"]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m kafka_marshal.testing.simulate",
        description="Run the real client, engine, policies and admin on a virtual clock and a log in memory, with "
        "faults; check what must hold with every record. One seed is one history, byte for byte.",
    )
    parser.add_argument("--seeds", type=int, default=100, help="how many (100)")
    parser.add_argument("--first", type=int, default=0, help="the first one (0)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes side by side (all processors)")
    parser.add_argument("--worker", default="", help="package.module:function or file.py:function of your own worker")
    parser.add_argument("--keep-going", action="store_true", help="run all seeds, even when one broke a promise")
    parser.add_argument("--as-found", action="store_true", help="do not make the failing story small")
    parser.add_argument("--out", type=Path, help="write the script here, too")
    parser.add_argument(
        "--history", action="store_true", help="print what happened in the first seed, and nothing else"
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    options = _parser().parse_args(arguments)
    try:
        from kafka_marshal.testing.simulation import Report, Scenario, load_worker, simulate, simulate_one
    except ImportError as error:
        sys.stderr.write(f"the simulation needs the extra kafka-marshal[simulation] ({error})\n")
        return 2

    def tell(report: Report) -> None:
        if sys.stderr.isatty() and report.seeds % 10 == 0:
            sys.stderr.write(f"\r{report.seeds} of {options.seeds} seeds, {len(report.broken)} broken")
            sys.stderr.flush()

    try:
        if options.history:
            worker = load_worker(options.worker) if options.worker else None
            result = simulate_one(Scenario.from_seed(options.first, worker is not None), worker)
            sys.stdout.writelines(f"{line}\n" for line in result.history())
            sys.stderr.write(f"{result.tell()}\n")
            return int(result.violation is not None)
        report = simulate(
            options.worker or None,
            range(options.first, options.first + options.seeds),
            jobs=options.jobs,
            keep_going=options.keep_going,
            small=not options.as_found,
            progress=tell,
        )
    except ConfigurationError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    for result in report.broken:
        sys.stdout.write(f"seed {result.scenario.seed}: {result.violation}\n")
    if report.broken:
        sys.stdout.write(f"\n{report.script}\n")
        if options.out is not None:
            options.out.write_text(report.script)
    sys.stdout.write(f"{report.tell()}\n")
    return int(bool(report.broken))


if __name__ == "__main__":
    sys.exit(main())
