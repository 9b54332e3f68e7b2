"""``python -m tests.campaigns.fuzz``: hostile records from a command line.

Exit status: 0 every promise was kept, 1 one was broken (prints the record that shows it), 2 wrong use.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.campaigns.fuzz.author import LARGE_EVERY
from tests.campaigns.fuzz.campaign import OfflineReport, run_offline
from tests.campaigns.fuzz.story import run_story
from tests.figures import keep_figures

__all__ = ["main"]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.campaigns.fuzz",
        description="Hostile records, by grammar and by mutation: straight into the replay, or (--broker) into a real "
        "coordination log while workers work.",
    )
    parser.add_argument("--inputs", type=int, default=100_000, help="how many (100,000)")
    parser.add_argument("--seed", type=int, default=0, help="the first one (0); a log of 2,000 inputs has one")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes side by side (all processors)")
    parser.add_argument("--story", action="store_true", help="only the log of this seed, to see a finding again")
    parser.add_argument("--large-every", type=int, default=LARGE_EVERY, help="one input in so many is above 1 kB")
    parser.add_argument("--keep-going", action="store_true", help="do not end at the first finding")
    parser.add_argument("--json", type=Path, help="put the figures into this file; others that are in it stay")
    parser.add_argument("--broker", action="store_true", help="into a real log, while workers work (starts a broker)")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    options = _parser().parse_args(arguments)
    if options.inputs < 1 or options.jobs < 1:
        sys.stderr.write("--inputs and --jobs must be at least 1\n")
        return 2
    # What librdkafka retries by itself is not reported here.
    logger = logging.getLogger("kafka_marshal")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        return _run(options)
    finally:
        logger.setLevel(level)


def _run(options: argparse.Namespace) -> int:
    if options.broker:
        from tests.campaigns.fuzz.broker import fuzz_a_broker

        flood = fuzz_a_broker(options.inputs, seed=options.seed, progress=_progress)
        return _end(flood.tell(), flood.problems, flood.holds, "broker", flood.figures(), options.json)
    if options.story:
        story = run_story(options.seed, 2_000, options.large_every)
        sys.stdout.writelines(f"{finding}\n" for finding in story.findings)
        sys.stdout.write(f"seed {options.seed}: {story.inputs} inputs, {len(story.findings)} findings\n")
        return int(bool(story.findings))

    def tell(report: OfflineReport) -> None:
        _progress(f"{report.total.inputs:,} of {options.inputs:,} inputs, {len(report.total.findings)} findings")

    report = run_offline(
        options.inputs,
        first=options.seed,
        jobs=options.jobs,
        large_every=options.large_every,
        keep_going=options.keep_going,
        progress=tell,
    )
    problems = [str(finding) for finding in report.total.findings]
    return _end(report.tell(), problems, report.holds, "offline", report.figures(), options.json)


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"\r{text} ")
        sys.stderr.flush()


def _end(
    line: str, problems: Sequence[str], holds: bool, which: str, figures: dict[str, Any], path: Path | None
) -> int:
    sys.stdout.writelines(f"{problem}\n" for problem in problems)
    sys.stdout.write(f"{line}\n")
    if path is not None:
        keep_figures(path, which, figures)
    return int(not holds)


if __name__ == "__main__":
    sys.exit(main())
