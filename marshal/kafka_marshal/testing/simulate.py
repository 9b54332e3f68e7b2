"""``python -m kafka_marshal.testing.simulate --seeds 1000``: the simulation from a command line.

Exit status: 0 every promise was kept, 1 one was broken (prints a script that reproduces it), 2 wrong use, 130
interrupted (Ctrl-C; prints the results so far).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kafka_marshal.errors import ConfigurationError

if TYPE_CHECKING:
    from kafka_marshal.testing.simulation import Report

__all__ = ["main", "where_it_ran"]

#: Exit status after SIGINT, as in shells.
_INTERRUPTED = 130
#: Intervals of progress lines, on a terminal and in a log.
_TELL_AFTER_S, _LOG_AFTER_S = 0.5, 60.0
#: What stories are of, an option each.
_STORIES = {
    "groups": "members of a coordinated group (mode=Group())",
    "lanes": "workers with many handlers (consumer.run), at least once",
    "transactions": "workers that commit outputs and progress together",
    "checkpoints": "a coordinated group that takes checkpoints, whose members count messages",
    "sharing": "workers that share partitions by batches, at least once",
    "lists": "lanes or parks whose handlers get lists (run(…, batch=…))",
    "redoes": "operators that open what is done, with each of the others or alone",
    "later": "parks of which some messages wait for a time (RetryAfter, not_before=)",
    "parks": "workers that set messages aside, and of operators that redrive, discard and set aside",
}
#: Linux's file with the processor's name; elsewhere Python's value is used.
_PROCESSORS = Path("/proc/cpuinfo")


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
    parser.add_argument(
        "--delivery",
        choices=("at-least-once", "at-most-once"),
        default="",
        help="how all consumers deliver (at least once; a quarter of the stories without --worker: at most once)",
    )
    for kind, text in _STORIES.items():
        parser.add_argument(f"--{kind}", action="store_true", help=f"stories of {text}")
    parser.add_argument("--keep-going", action="store_true", help="run all seeds, even when one broke a promise")
    parser.add_argument("--as-found", action="store_true", help="do not make the failing story small")
    parser.add_argument("--out", type=Path, help="write the script here, too")
    parser.add_argument("--json", type=Path, help="write all figures here")
    parser.add_argument(
        "--history", action="store_true", help="print what happened in the first seed, and nothing else"
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    options = _parser().parse_args(arguments)
    try:
        from kafka_marshal.testing.simulation import Scenario, load_worker, simulate, simulate_one
    except ImportError as error:
        sys.stderr.write(f"the simulation needs the extra kafka-marshal[simulation] ({error})\n")
        return 2

    kinds = {kind: getattr(options, kind) for kind in _STORIES}
    progress = _Progress(options.seeds, says_small=not options.as_found and not options.keep_going)
    try:
        if options.history:
            worker = load_worker(options.worker) if options.worker else None
            kinds["coordinated"] = kinds.pop("groups")
            story = Scenario.from_seed(options.first, worker is not None, delivery=options.delivery, **kinds)
            result = simulate_one(story, worker)
            sys.stdout.writelines(f"{line}\n" for line in result.history())
            sys.stderr.write(f"{result.tell()}\n")
            return int(result.violation is not None)
        progress.report = simulate(
            options.worker or None,
            range(options.first, options.first + options.seeds),
            jobs=options.jobs,
            keep_going=options.keep_going,
            small=not options.as_found,
            progress=progress,
            delivery=options.delivery,
            **kinds,
        )
    except ConfigurationError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    except KeyboardInterrupt:
        progress.end()
        seen = progress.report.seeds if progress.report else 0
        sys.stderr.write(f"interrupted after {seen} of {options.seeds} seeds; what they have shown:\n")
        return _conclude(progress.report, options) or _INTERRUPTED
    progress.end()
    return _conclude(progress.report, options)


def _conclude(report: Report | None, options: argparse.Namespace) -> int:
    """Print the result; returns the exit status. If shrinking is interrupted, the story is printed as found."""
    if report is None:
        sys.stdout.write("0 seeds\n")
        return 0
    for result in report.broken:
        sys.stdout.write(f"seed {result.scenario.seed}: {result.violation}\n")
    if report.broken:
        sys.stdout.write(f"\n{report.script}\n")
        if options.out is not None:
            options.out.write_text(report.script)
    if options.json is not None:
        about = {**where_it_ran(), "first": options.first, "jobs": options.jobs, "worker": options.worker}
        options.json.write_text(json.dumps({**about, **report.to_json()}, indent=1) + "\n")
    sys.stdout.write(f"{report.tell()}\n")
    return int(bool(report.broken))


def where_it_ran() -> dict[str, object]:
    """Processor, memory (GB), system, Python, and the commit of this source.

    The commit is "unknown" where it is installed without its history.
    """
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        commit = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        commit = "unknown"
    return {
        "commit": commit,
        "cores": os.cpu_count(),
        "processor": _processor(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
    }


def _processor() -> str:
    if _PROCESSORS.exists():
        for line in _PROCESSORS.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


class _Progress:
    """Progress on stderr: one changing line on a terminal, a line per minute in a log."""

    def __init__(self, seeds: int, *, says_small: bool) -> None:
        #: The report so far; None at the beginning.
        self.report: Report | None = None
        self._seeds = seeds
        self._says_small = says_small
        self._on_terminal = sys.stderr.isatty()
        self._told_at = time.monotonic()
        self._line_is_open = False
        #: Number of broken seeds already printed.
        self._told_of = 0

    def __call__(self, report: Report) -> None:
        self.report = report
        for result in report.broken[self._told_of :]:
            self.end()
            sys.stderr.write(f"broken: seed {result.scenario.seed}: {result.violation}\n")
            if self._says_small and getattr(result.violation, "promise", "") != "hangs":
                sys.stderr.write("looking for a smaller story that shows it; may take minutes (--as-found: not)\n")
        self._told_of = len(report.broken)
        if time.monotonic() - self._told_at < (_TELL_AFTER_S if self._on_terminal else _LOG_AFTER_S):
            return
        self._told_at = time.monotonic()
        line = f"{report.seeds} of {self._seeds} seeds, {len(report.broken)} broken, {report.seconds:.0f} s"
        sys.stderr.write(f"\r{line}" if self._on_terminal else f"{line}\n")
        sys.stderr.flush()
        self._line_is_open = self._on_terminal

    def end(self) -> None:
        """End the line."""
        if self._line_is_open:
            sys.stderr.write("\n")
        self._line_is_open = False


if __name__ == "__main__":
    sys.exit(main())
