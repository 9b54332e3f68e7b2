"""The short forms of the proof, run against each planted bug: in a copy, in a separate process.

Stops at the first failure and prints it as one line of JSON. It depends only on its arguments, so that the unchanged
product, which must pass, runs exactly the same.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path

import kafka_marshal
import rationalizer
from kafka_marshal.testing.simulation import Scenario, simulate, simulate_one
from rationalizer import SnapshotError, Upgrade, World, encode
from rationalizer.levels import SUPPORTED_LEVEL
from tests.campaigns.fuzz import run_story
from tests.campaigns.small_scope.groups import explore_groups
from tests.campaigns.small_scope.records import BrokenError, explore
from tests.faults.cases import CASES
from tests.faults.crew import WITHIN_S
from tests.faults.failing import PROOFS, SHARED, heard
from tests.faults.stories import WITHOUT
from tests.interrupts import MODULES, Interrupted, Points, run_within, sweep
from tests.mutants.edges import edges
from tests.mutants.lane_stories import LANE_STORIES
from tests.mutants.oracle import OracleJudge, difference, state_difference
from tests.mutants.progress import progress_differs
from tests.mutants.stories import STORIES
from tests.rationalizer.dumps import dump_differs
from tests.rationalizer.forged_parts import parts_differ
from tests.rationalizer.forged_states import GROUPS_EVERY, restore_differs
from tests.rationalizer.group_sides import in_one_go, record_by_record
from tests.rationalizer.oracle import OracleWorld
from tests.rationalizer.strategies import by_seed, write_log, write_log_of_ranges, write_odd_log

__all__ = ["Found", "main"]

#: Records of one log that is compared with the oracle.
LOG_LENGTH = 80

#: The same for coordinated groups, and the depth of the exhaustive search.
GROUP_LENGTH, GROUP_DEPTH = 150, 3

#: Hostile records of one story.
FUZZED = 600

#: Length of logs with malformed records: short but many, as there are many ways to be malformed.
ODD_LENGTH = 40

#: Time-out that catches hangs (s).
FAULTS_WITHIN_S = 400.0

#: Duration of faults in a story of a coordinated group or of lanes (HI).
SHORT_INTERVALS = 40

#: With fewer points per case, proofs that take seconds are skipped.
MANY_POINTS = 10

#: Cases interrupted where the interpreter really runs signal handlers.
CHECKED = ("iterate", "poll", "consume", "batches")

#: (the part that found it, the broken promise).
Found = tuple[str, str]


def _raised(by: str, run: Callable[[], Found | None]) -> Found | None:
    """The finding of a part; an exception counts, too, as no log may make the product raise."""
    try:
        return run()
    except Exception as error:  # noqa: BLE001 - any exception of the product
        return by, f"raised {type(error).__name__}: {error}"


def _exhaustive(depth: int) -> Found | None:
    try:
        missing = explore(depth).missing() if depth else []
    except BrokenError as error:
        return "exhaustive", str(error)
    if depth >= 4 and missing:  # from this depth on, all are reached
        return "exhaustive", f"transitions that were not met: {missing}"
    return None


def _groups(logs: int) -> Found | None:
    """Differences in coordinated groups: logs compared with the oracle, short and at limits; every order of a few."""
    if not logs:
        return None
    from tests.rationalizer.groups.test_forged_groups import FORGED  # replays logs at its import

    try:
        explore_groups(GROUP_DEPTH, shared=True)
    except BrokenError as error:
        return "exhaustive", f"{error}"
    for name, (data, _) in FORGED.items():
        try:
            World.restore(data, 2)
            return "logs", f"an invalid state is taken: {name}"
        except SnapshotError:
            pass
    for seed in range(logs):
        for proof in (record_by_record, in_one_go):
            try:
                proof(seed, GROUP_LENGTH)
            except AssertionError as error:
                told = " ".join((str(error).splitlines() or [""])[:1] + getattr(error, "__notes__", []))
                return "logs", f"group log {seed}: {told}"
        wrong = restore_differs(GROUPS_EVERY * seed) or progress_differs(seed)
        if wrong:
            return "logs", f"group {wrong}"
        for finding in run_story(seed, FUZZED, large_every=0).findings:
            return "fuzz", str(finding).partition("\n")[0]
    return None


def _logs(seeds: int) -> Iterator[str]:
    """Differences, log by log: record by record, by the fast path, and from a snapshot on."""
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
    """Differences if every other record is malformed in one place."""
    for seed in range(seeds):
        log, _ = write_odd_log(by_seed(seed), ODD_LENGTH)
        oracle, real = OracleWorld(0, 1), World(0, 1)
        for offset, stamp, value in log:
            wrong = difference(real.apply(offset, stamp, value), oracle.apply(offset, stamp, value))
            yield f"odd log {seed}, offset {offset}: {wrong}" if wrong else ""
        wrong = state_difference(real, oracle)
        yield f"odd log {seed}: {wrong}" if wrong else ""


def _logs_that_stop(seeds: int) -> Iterator[str]:
    """Differences if a log contains an unknown Upgrade (E4): all replicas stop before it for good."""
    for seed in range(seeds):
        log, _ = write_log(by_seed(seed), ODD_LENGTH)
        at, level = seed % ODD_LENGTH, SUPPORTED_LEVEL + 1 + seed % 3
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


def _of_groups(seeds: int) -> Found | None:
    """Members of coordinated groups: tests on virtual time, which take seconds, and stories."""
    if not seeds:
        return None
    members = Path(__file__).parents[1] / "engine" / "groups"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-qx", "--tb=line", "-p", "no:cacheprovider", "--noconftest", str(members)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        return "members", " ".join(line for line in done.stdout.splitlines() if line.startswith("FAILED"))
    for seed in range(seeds):
        violation = simulate_one(Scenario.from_seed(seed, intervals=SHORT_INTERVALS, coordinated=True)).violation
        if violation is not None:
            return "simulation", f"seed {seed} of groups: {violation}"
    return None


def _of_lanes(seeds: int) -> Found | None:
    """Workers with many handlers, alternating between claims and coordinated groups."""
    for number, scenario in enumerate(LANE_STORIES if seeds else ()):
        if (violation := simulate_one(scenario).violation) is not None:
            return "simulation", f"written story {number} of lanes: {violation}"
    for seed in range(seeds):
        for coordinated in (False, True):
            scenario = Scenario.from_seed(seed, intervals=SHORT_INTERVALS, coordinated=coordinated, lanes=True)
            if (violation := simulate_one(scenario).violation) is not None:
                return "simulation", f"seed {seed} of {'groups with ' if coordinated else ''}lanes: {violation}"
    return None


def _written(stories: int) -> Found | None:
    for number, scenario in enumerate(STORIES[:stories]):
        if (violation := simulate_one(scenario).violation) is not None:
            return "simulation", f"written story {number}: {violation}"
    return None


def _faults(points: int) -> Found | None:
    """Failures around a consumer, and interrupts at ``points`` points per case; also threads, with many points."""
    proofs = {**PROOFS, **(SHARED if points >= MANY_POINTS else {})}
    for name, proof in proofs.items() if points else ():
        try:
            with heard(*proof.says):
                run_within(WITHIN_S, proof.run, name)
        except BaseException as error:  # noqa: BLE001 - any exception of its threads
            return "faults", f"{name}: {_said(error)}"
    for name, attempt in CASES.items() if points else ():
        kinds = (Points.LINES, Points.CHECKS) if name.removeprefix("at most once: ") in CHECKED else (Points.LINES,)
        for kind in kinds:
            with heard():
                report = sweep(
                    attempt,
                    exception=Interrupted,
                    points=kind,
                    modules=MODULES if kind is Points.LINES else (*MODULES, "threading", "queue"),
                    without=WITHOUT,
                    limit=points,
                    per_line=1,
                    most_failures=1,
                )
            for failure in report.failures:
                return "faults", f"{name}: {failure.where}: {_said(failure.error)}"
    return None


def _said(error: BaseException) -> str:
    first = str(error).partition("\n")[0]
    return first if isinstance(error, AssertionError) else f"{type(error).__name__}: {first}"


def _in_time(points: int) -> Found | None:
    try:
        return run_within(FAULTS_WITHIN_S, lambda: _faults(points), "the proof of faults")
    except AssertionError as error:  # it hangs, or an error was logged
        return "faults", _said(error)


def _first_found(options: argparse.Namespace) -> Found | None:
    depth, logs, judged, seeds = options.depth, options.logs, options.judged, options.seeds
    parts: list[tuple[str, Callable[[], Found | None]]] = [
        ("exhaustive", lambda: _exhaustive(depth)),
        ("logs", lambda: _oracle(logs)),
        ("groups", lambda: _groups(options.groups)),
        ("simulation", lambda: _simulation(range(judged), OracleJudge)),
        ("simulation", lambda: _written(options.stories) if seeds else None),
        ("simulation", lambda: _simulation(range(judged, seeds), None)),
        ("members", lambda: _of_groups(options.members)),
        ("lanes", lambda: _of_lanes(options.lanes)),
        ("faults", lambda: _in_time(options.faults)),
    ]
    parts.sort(key=lambda part: part[0] != options.first)
    return next(filter(None, (_raised(name, run) for name, run in parts)), None)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 1 if something was found, else 0."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants.short", description=__doc__)
    parser.add_argument("--depth", type=int, default=4, help="of the exhaustive search (4); 0: without")
    parser.add_argument("--logs", type=int, default=30, help="logs that are held against the oracle (30)")
    parser.add_argument("--groups", type=int, default=30, help="logs of coordinated groups (30); 0: nothing of groups")
    parser.add_argument("--judged", type=int, default=2, help="stories that are held against the oracle (2)")
    parser.add_argument("--stories", type=int, default=len(STORIES), help="those written down (all)")
    parser.add_argument("--seeds", type=int, default=60, help="stories in all, those written down apart (60); 0: none")
    parser.add_argument("--members", type=int, default=30, help="stories of coordinated groups (30); 0: none")
    parser.add_argument("--lanes", type=int, default=30, help="stories of lanes, of each kind of group (30); 0: none")
    parser.add_argument("--faults", type=int, default=1_000, help="points of each interrupted call (all); 0: no faults")
    parser.add_argument("--first", default="", help="the part that runs before all others: exhaustive, logs, …")
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
    found = _first_found(options)
    by, what = found or ("", "")
    print(json.dumps({"by": by, "what": what, "seconds": round(time.process_time(), 1)}), flush=True)
    return int(found is not None)


if __name__ == "__main__":
    os._exit(main())  # hanging threads of a planted bug are left behind
