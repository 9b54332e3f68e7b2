"""The short forms of the proof, as they are run against each planted bug: in a copy, in a process of its own.

Stops at the first thing that is broken and says so in one line of JSON. What it runs depends on its arguments alone,
so that the product itself, which must pass, runs exactly the same.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path

import kafka_marshal
import rationalizer
from kafka_marshal.testing.exhaustive import BrokenError, explore
from kafka_marshal.testing.simulation import Scenario, simulate, simulate_one
from rationalizer import Upgrade, World, encode
from tests.mutants.edges import edges
from tests.mutants.oracle import OracleJudge, difference, state_difference
from tests.mutants.progress import progress_differs
from tests.mutants.stories import STORIES
from tests.rationalizer.dumps import dump_differs
from tests.rationalizer.forged_parts import parts_differ
from tests.rationalizer.forged_states import restore_differs
from tests.rationalizer.oracle import OracleWorld
from tests.rationalizer.strategies import by_seed, write_log, write_log_of_ranges, write_odd_log

__all__ = ["Found", "main"]

#: Records of one log that is held against the oracle.
LOG_LENGTH = 80

#: Short ones, but many: there are many ways to be malformed.
ODD_LENGTH = 40

#: (what found it, what was broken).
Found = tuple[str, str]


def _raised(by: str, run: Callable[[], Found | None]) -> Found | None:
    """What a part found; what it can't go on with counts, too: nothing in a log may make the product raise."""
    try:
        return run()
    except Exception as error:  # noqa: BLE001 - whatever it is, the product raised it
        return by, f"raised {type(error).__name__}: {error}"


def _exhaustive(depth: int) -> Found | None:
    try:
        missing = explore(depth).missing() if depth else []
    except BrokenError as error:
        return "exhaustive", str(error)
    if depth >= 4 and missing:  # from there on all of them are met
        return "exhaustive", f"transitions that were not met: {missing}"
    return None


def _logs(seeds: int) -> Iterator[str]:
    """What differs, log by log: record by record, by the short cut, and from a snapshot on."""
    for seed in range(seeds):
        cp, cps = ((0, 1), (0, 1), (1, 2), (5, 8))[seed % 4]
        if seed % 5 == 4:
            cp, cps = 0, 1
            log, after = write_log_of_ranges(by_seed(seed), LOG_LENGTH)
        else:
            log, after = write_log(by_seed(seed), LOG_LENGTH, cp, cps)
        oracle, real, codes = OracleWorld(cp, cps), World(cp, cps), Counter[str]()
        for offset, stamp, value in log:
            wanted, outcome = oracle.apply(offset, stamp, value), real.apply(offset, stamp, value)
            codes[outcome.code] += 1
            wrong = difference(outcome, wanted) or state_difference(real, oracle)
            yield f"log {seed}, offset {offset}: {wrong}" if wrong else ""
            real = World.restore(real.snapshot(), cps) if offset % 5 == 0 else real
        at_once, half = World(cp, cps), World(cp, cps)
        at_once.apply_many(log)
        half.apply_many(log[: LOG_LENGTH // 2])
        resumed = World.restore(half.snapshot(), cps)
        resumed.apply_many(log[LOG_LENGTH // 2 :])
        for name, world in (("apply_many", at_once), ("restore and apply_many", resumed)):
            wrong = state_difference(world, after)
            yield f"log {seed}, {name}: {wrong}" if wrong else ""
        counted = Counter(at_once.accepted) + Counter(at_once.rejected)
        yield "" if counted == codes else f"log {seed}: it counts other outcomes"


def _odd_logs(seeds: int) -> Iterator[str]:
    """What differs where every other record is malformed in one place."""
    for seed in range(seeds):
        log, _ = write_odd_log(by_seed(seed), ODD_LENGTH)
        oracle, real = OracleWorld(0, 1), World(0, 1)
        for offset, stamp, value in log:
            wrong = difference(real.apply(offset, stamp, value), oracle.apply(offset, stamp, value))
            yield f"odd log {seed}, offset {offset}: {wrong}" if wrong else ""
        wrong = state_difference(real, oracle)
        yield f"odd log {seed}: {wrong}" if wrong else ""


def _logs_that_stop(seeds: int) -> Iterator[str]:
    """What differs where an Upgrade is in the log that nobody can follow (E4): all stand before it, for good."""
    for seed in range(seeds):
        log, _ = write_log(by_seed(seed), ODD_LENGTH)
        at, level = seed % ODD_LENGTH, 2 + seed % 3
        offset, stamp, _ = log[at]
        log[at:at] = [(offset, stamp, encode(Upgrade("1", "a", "g", level)))]
        oracle, real, fast = OracleWorld(0, 1), World(0, 1), World(0, 1)
        for entry in log:
            stopped, code = oracle.apply(*entry).stopped, real.apply(*entry).code
            wrong = "" if stopped == (code == "UPGRADE_REQUIRED") else f"{code}, but it should stop: {stopped}"
            yield f"log {seed} with an Upgrade, offset {entry[0]}: {wrong}" if wrong else ""
        fast.apply_many(log)
        fast.apply_many(log)
        for name, world in (("apply", real), ("apply_many", fast)):
            wrong = state_difference(world, oracle)
            if (world.next_offset, world.required_level) != (oracle.next_offset, level):
                wrong = f"it stands before {world.next_offset} and asks for level {world.required_level}"
            yield f"log {seed} with an Upgrade, {name}: {wrong}" if wrong else ""


def _oracle(seeds: int) -> Found | None:
    if not seeds:
        return None
    several = range(4 * seeds)
    wrong = next(
        filter(
            None,
            chain(
                _logs(seeds),
                _odd_logs(5 * seeds),
                _logs_that_stop(seeds),
                edges(),
                map(progress_differs, several),
                map(restore_differs, several),
                map(parts_differ, several),
                map(dump_differs, several),
            ),
        ),
        "",
    )
    return ("logs", wrong) if wrong else None


def _simulation(seeds: range, judge: Callable[[Scenario], OracleJudge] | None) -> Found | None:
    report = simulate(None, seeds, jobs=1, small=False, judge=judge)
    for result in report.broken:
        assert result.violation is not None
        return "simulation", f"seed {result.scenario.seed}: {result.violation}"
    return None


def _written(stories: int) -> Found | None:
    for number, scenario in enumerate(STORIES[:stories]):
        if (violation := simulate_one(scenario).violation) is not None:
            return "simulation", f"written story {number}: {violation}"
    return None


def _first_found(depth: int, logs: int, judged: int, stories: int, seeds: int) -> Found | None:
    return (
        _raised("exhaustive", lambda: _exhaustive(depth))
        or _raised("logs", lambda: _oracle(logs))
        or _raised("simulation", lambda: _simulation(range(judged), OracleJudge))
        or _raised("simulation", lambda: _written(stories) if seeds else None)
        or _raised("simulation", lambda: _simulation(range(judged, seeds), None))
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 1 where something was found, 0 where not."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants.short", description=__doc__)
    parser.add_argument("--depth", type=int, default=4, help="of the exhaustive search (4); 0: without")
    parser.add_argument("--logs", type=int, default=30, help="logs that are held against the oracle (30)")
    parser.add_argument("--judged", type=int, default=2, help="stories that are held against the oracle (2)")
    parser.add_argument("--stories", type=int, default=len(STORIES), help="those written down (all)")
    parser.add_argument("--seeds", type=int, default=60, help="stories in all, those written down apart (60); 0: none")
    parser.add_argument(
        "--budget", type=int, default=0, help="processor seconds; the process is killed then (0: never)"
    )
    parser.add_argument("--tree", type=Path, help="what is run must come from this folder")
    options = parser.parse_args(arguments)
    for package in (kafka_marshal, rationalizer):
        if options.tree is not None and not Path(package.__file__ or "").is_relative_to(options.tree):
            parser.error(f"{package.__name__} comes from {package.__file__}, not from {options.tree}")
    if options.budget:
        resource.setrlimit(resource.RLIMIT_CPU, (options.budget, options.budget + 1))
    found = _first_found(options.depth, options.logs, options.judged, options.stories, options.seeds)
    by, what = found or ("", "")
    print(json.dumps({"by": by, "what": what, "seconds": round(time.process_time(), 1)}))
    return int(found is not None)


if __name__ == "__main__":
    sys.exit(main())
