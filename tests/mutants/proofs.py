"""The proofs that each planted bug runs into, in units: each has a name, and is run by itself.

What a unit runs depends on its name alone, so that the product, which must pass, runs exactly the same.
"""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest

from kafka_marshal.testing.simulation import Scenario, simulate_one
from rationalizer import SnapshotError, Upgrade, World, encode
from rationalizer.levels import SUPPORTED_LEVEL
from tests.campaigns.fuzz import run_story
from tests.campaigns.sinks import Options, run_campaign
from tests.campaigns.sinks.member import Place
from tests.campaigns.small_scope.groups import explore_groups
from tests.campaigns.small_scope.records import BrokenError, explore
from tests.faults.cases import CASES
from tests.faults.crew import WITHIN_S
from tests.faults.failing import PROOFS, SHARED, heard
from tests.faults.stories import WITHOUT
from tests.interrupts import MODULES, Interrupted, Points, Report, run_within, sweep
from tests.mutants.edges import edges
from tests.mutants.lane_stories import LANE_STORIES
from tests.mutants.oracle import OracleJudge, difference, state_difference
from tests.mutants.progress import progress_differs
from tests.mutants.redo_stories import REDO_STORIES
from tests.mutants.stories import MORE_STORIES, STORIES
from tests.mutants.transaction_proofs import (
    CHECKPOINT_SCRIPTS,
    MEMBER_SCRIPTS,
    SHARING_SCRIPTS,
    TRANSACTION_SCRIPTS,
    reads_uncommitted,
    script_differs,
)
from tests.mutants.transaction_stories import TRANSACTION_STORIES
from tests.mutants.wait_stories import WAIT_STORIES
from tests.rationalizer.checkpoint_stories import CHECKPOINT_STORIES, LONG
from tests.rationalizer.dumps import dump_differs
from tests.rationalizer.forged_parts import parts_differ
from tests.rationalizer.forged_states import restore_differs
from tests.rationalizer.group_sides import in_one_go, record_by_record
from tests.rationalizer.oracle import OracleWorld
from tests.rationalizer.small_limits import small_limits
from tests.rationalizer.strategies import by_seed, write_log, write_log_of_ranges, write_odd_log
from tests.sinks.conftest import running_postgres

#: Records in a row that the exhaustive search tries, of claims and of coordinated groups.
DEPTH, GROUP_DEPTH = 4, 3

#: Records of one log that is compared with the oracle's, and of one of a coordinated group.
LOG_LENGTH, GROUP_LENGTH = 80, 150

#: Hostile records of one story.
FUZZED = 600

#: Short ones, but many: there are many ways to be malformed.
ODD_LENGTH = 40

#: A call that hangs under interrupts is caught by this (s).
HANGS_S = 400.0

#: How long faults happen in a story of a coordinated group, or of lanes (HI).
SHORT_INTERVALS = 40
#: The same of members that take checkpoints.
COUNTING_INTERVALS = 20

#: Where the interpreter runs handlers of signals, these get messages.
CHECKED = ("iterate", "poll", "consume", "batches")


class Unit(NamedTuple):
    """One proof."""

    #: What a table says that a bug was caught by.
    part: str
    name: str
    #: Returns what is broken; "" if nothing is.
    run: Callable[[], str]

    def found(self) -> str:
        """What is broken; nothing in a log may make the product raise, so that an exception counts, too."""
        try:
            return self.run()
        except Exception as error:  # noqa: BLE001 - whatever it is, the product raised it
            return f"raised {type(error).__name__}: {error}"


@dataclass(frozen=True, slots=True)
class Sizes:
    """How many units of each kind."""

    #: Logs of claims; some kinds of them are tried several times as often.
    logs: int = 8
    #: Logs of coordinated groups.
    groups: int = 8
    #: Stories that the oracle judges; those that are drawn.
    judged: int = 1
    seeds: int = 6
    #: Stories that are written down.
    stories: int = len(STORIES)
    #: Stories of coordinated groups; of lanes, of each kind of group.
    members: int = 6
    lanes: int = 2
    #: Stories of members that take checkpoints.
    counting: int = 12
    #: Campaigns of sinks, on each database.
    sinks: int = 2
    #: Stories of transactions, of each kind of group.
    transactions: int = 5
    #: Points at which each call is interrupted.
    points: int = 1_000


def units(sizes: Sizes) -> list[Unit]:
    """All of them, in the order in which they are run: what catches most comes first."""
    rules = [*_exhaustive(), *_logs(sizes.logs), *_groups(sizes.groups), *_sharing()]
    return [*rules, *_audit(), *_simulation(sizes), *_sinks(sizes.sinks), *_faults(sizes.points)]


def _first(found: Iterable[str]) -> str:
    return next(filter(None, found), "")


# The rules: every order of a few records, and logs compared with the oracle.


def _exhaustive() -> Iterator[Unit]:
    yield Unit("exhaustive", "every order of claims", _every_order)
    yield Unit("exhaustive", "every order of groups", _every_order_of_groups)


def _sharing() -> Iterator[Unit]:
    for path in SHARING_SCRIPTS:
        yield Unit("sharing", path.name, partial(script_differs, path))


def _every_order() -> str:
    try:
        missing = explore(DEPTH).missing()
    except BrokenError as error:
        return str(error)
    return f"transitions that were not met: {missing}" if missing else ""


def _every_order_of_groups() -> str:
    try:
        explore_groups(GROUP_DEPTH, shared=True)
    except BrokenError as error:
        return str(error)
    return ""


def _logs(logs: int) -> Iterator[Unit]:
    if logs:
        path = Path(__file__).parents[1] / "rationalizer" / "test_fast_path.py"
        yield Unit("logs", path.name, partial(_tests, path))
    several = 4 * logs
    kinds: tuple[tuple[str, int, Callable[[int], str | Iterator[str]]], ...] = (
        ("log", logs, _log),
        ("odd log", 16 * logs, _odd_log),
        ("log with an Upgrade", logs, _log_that_stops),
        ("edges", 1, lambda seed: edges()),
        ("progress", several, progress_differs),
        ("state", several, restore_differs),
        ("parts", several, parts_differ),
        ("dump", several, dump_differs),
    )
    for kind, count, differs in kinds:
        for seed in range(count):
            yield Unit("logs", f"{kind} {seed}", partial(_differs, differs, seed))


def _differs(differs: Callable[[int], str | Iterator[str]], seed: int) -> str:
    found = differs(seed)
    return found if isinstance(found, str) else _first(found)


def _log(seed: int) -> Iterator[str]:
    """Record by record, by the short cut, and from a snapshot on."""
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
        yield f"offset {offset}: {wrong}" if wrong else ""
        real = World.restore(real.snapshot(), cps) if offset % 5 == 0 else real
    at_once, half = World(cp, cps), World(cp, cps)
    at_once.apply_many(log)
    half.apply_many(log[: LOG_LENGTH // 2])
    resumed = World.restore(half.snapshot(), cps)
    resumed.apply_many(log[LOG_LENGTH // 2 :])
    for name, world in (("apply_many", at_once), ("restore and apply_many", resumed)):
        wrong = state_difference(world, after)
        yield f"{name}: {wrong}" if wrong else ""
    counted = Counter(at_once.accepted) + Counter(at_once.rejected)
    yield "" if counted == codes else "it counts other outcomes"


def _odd_log(seed: int) -> Iterator[str]:
    """Every other record is malformed in one place."""
    log, _ = write_odd_log(by_seed(seed), ODD_LENGTH)
    oracle, real = OracleWorld(0, 1), World(0, 1)
    for offset, stamp, value in log:
        wrong = difference(real.apply(offset, stamp, value), oracle.apply(offset, stamp, value))
        yield f"offset {offset}: {wrong}" if wrong else ""
    yield state_difference(real, oracle)


def _log_that_stops(seed: int) -> Iterator[str]:
    """An Upgrade to a level that is not supported (E4): all replicas stop before it, for good."""
    log, _ = write_log(by_seed(seed), ODD_LENGTH)
    at, level = seed % ODD_LENGTH, SUPPORTED_LEVEL + 1 + seed % 3
    offset, stamp, _ = log[at]
    log[at:at] = [(offset, stamp, encode(Upgrade("1", "a", "g", level)))]
    oracle, real, fast = OracleWorld(0, 1), World(0, 1), World(0, 1)
    for entry in log:
        stopped, code = oracle.apply(*entry).stopped, real.apply(*entry).code
        right = stopped == (code == "UPGRADE_REQUIRED")
        yield "" if right else f"offset {entry[0]}: {code}, but it should stop: {stopped}"
    fast.apply_many(log)
    fast.apply_many(log)
    for name, world in (("apply", real), ("apply_many", fast)):
        wrong = state_difference(world, oracle)
        if (world.next_offset, world.required_level) != (oracle.next_offset, level):
            wrong = f"it stands before {world.next_offset} and asks for level {world.required_level}"
        yield f"{name}: {wrong}" if wrong else ""


def _groups(logs: int) -> Iterator[Unit]:
    if logs:
        yield Unit("groups", "forged states of groups", _forged)
    for seed in range(logs):
        yield Unit("groups", f"group log {seed}", partial(_group_log, seed))
        yield Unit("fuzz", f"fuzz {seed}", partial(_fuzz, seed))
    for name in (name for name in CHECKPOINT_STORIES if logs and name not in LONG):
        yield Unit("checkpoints", f"story {name}", partial(_checkpoint_story, name))
    for seed in range(2 * logs):
        yield Unit("checkpoints", f"checkpoint log {seed}", partial(_group_log, seed, True))
        name = f"checkpoint log {1_000 + seed} of small limits"
        yield Unit("checkpoints", name, partial(_group_log, 1_000 + seed, True, small=True))


def _forged() -> str:
    from tests.rationalizer.groups.test_forged_groups import FORGED  # what it is made of is replayed at its import

    for name, (data, _) in FORGED.items():
        with contextlib.suppress(SnapshotError):
            World.restore(data, 2)
            return f"an invalid state is restored: {name}"
    return ""


def _group_log(seed: int, takes: bool | None = None, small: bool = False) -> str:
    with pytest.MonkeyPatch.context() as patch:
        if small:
            small_limits(patch)
        for proof in (record_by_record, in_one_go):
            try:
                proof(seed, GROUP_LENGTH, takes=takes)
            except AssertionError as error:
                return " ".join([_said(error), *getattr(error, "__notes__", [])])
    return ""


def _checkpoint_story(name: str) -> str:
    oracle, real = OracleWorld(0, 1), World(0, 1)
    for offset, stamp, value in CHECKPOINT_STORIES[name]()[0]:
        wanted, outcome = oracle.apply(offset, stamp, value), real.apply(offset, stamp, value)
        if wrong := difference(outcome, wanted) or state_difference(real, oracle):
            return f"offset {offset}: {wrong}"
        real = World.restore(real.snapshot(), 1)
    return ""


def _fuzz(seed: int) -> str:
    return _first(str(finding).partition("\n")[0] for finding in run_story(seed, FUZZED, large_every=0).findings)


# Members: stories of the simulation, and those tests of members of coordinated groups that run on virtual time.


def _simulation(sizes: Sizes) -> Iterator[Unit]:
    for path in MEMBER_SCRIPTS if sizes.members else ():
        yield Unit("scripts", path.name, partial(script_differs, path))
    for seed in range(sizes.seeds):
        yield Unit("simulation", f"seed {seed}", partial(_story, Scenario.from_seed(seed), seed < sizes.judged))
    for number, scenario in enumerate((*STORIES, *MORE_STORIES)[: sizes.stories]):
        yield Unit("simulation", f"written story {number}", partial(_story, scenario))
    for path in sorted(MEMBERS.glob("test_*.py")) if sizes.members else ():
        yield Unit("members", path.name, partial(_tests, path))
    for seed in range(sizes.members):
        scenario = Scenario.from_seed(seed, intervals=SHORT_INTERVALS, coordinated=True)
        yield Unit("members", f"seed {seed} of groups", partial(_story, scenario))
    for number, scenario in enumerate(LANE_STORIES if sizes.lanes else ()):
        yield Unit("lanes", f"written story {number} of lanes", partial(_story, scenario))
    for seed in range(sizes.lanes):
        for coordinated, name in ((False, "lanes"), (True, "groups with lanes")):
            scenario = Scenario.from_seed(seed, intervals=SHORT_INTERVALS, coordinated=coordinated, lanes=True)
            yield Unit("lanes", f"seed {seed} of {name}", partial(_story, scenario))
    for number, scenario in enumerate(REDO_STORIES if sizes.lanes else ()):
        yield Unit("redo", f"written story {number} of redo", partial(_story, scenario))

    for number, scenario in enumerate(WAIT_STORIES if sizes.lanes else ()):
        yield Unit("waits", f"written story {number} of waits", partial(_story, scenario))
    if sizes.lanes:
        yield Unit("pacing", QUEUE.name, partial(_tests, QUEUE))
        for path, fixtures in LISTS:
            name = f"{path.parent.name}/{path.name}"
            yield Unit("lists", name, partial(_tests, path, "-p", fixtures, "--noconftest"))
    for path in CHECKPOINT_SCRIPTS if sizes.counting else ():
        yield Unit("counting", path.name, partial(script_differs, path))
    for seed in range(sizes.counting):
        scenario = Scenario.from_seed(seed, intervals=COUNTING_INTERVALS, checkpoints=True)
        yield Unit("counting", f"seed {seed} of checkpoints", partial(_story, scenario))
    for path in TRANSACTION_SCRIPTS if sizes.transactions else ():
        yield Unit("transactions", path.name, partial(script_differs, path))
    if sizes.transactions:
        yield Unit("transactions", "how committed offsets are asked for", reads_uncommitted)
    for number, scenario in enumerate(TRANSACTION_STORIES if sizes.transactions else ()):
        yield Unit("transactions", f"written story {number} of transactions", partial(_story, scenario))
    for seed in range(sizes.transactions):
        for coordinated, name in ((False, "transactions"), (True, "groups in transactions")):
            scenario = Scenario.from_seed(seed, intervals=SHORT_INTERVALS, coordinated=coordinated, transactions=True)
            yield Unit("transactions", f"seed {seed} of {name}", partial(_story, scenario))


MEMBERS = Path(__file__).parents[1] / "engine" / "groups"
#: What begins, and when, without threads.
QUEUE = Path(__file__).parents[1] / "client" / "test_pacing_queue.py"
#: Lists of messages, and what sinks store in them; with their fixtures.
LISTS = (
    (QUEUE.with_name("test_run_in_batches.py"), "tests.client.conftest"),
    (QUEUE.parents[1] / "sinks" / "test_lists.py", "tests.sinks.conftest"),
)


def _story(scenario: Scenario, judged: bool = False) -> str:
    return str(simulate_one(scenario, judge=OracleJudge(scenario) if judged else None).violation or "")


class _Failures:
    """A plugin for pytest."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.names.append(report.nodeid.rpartition("::")[2])

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.names.append(f"{report.nodeid} could not be collected")


def _tests(path: Path, *more: str) -> str:
    failures = _Failures()
    with contextlib.redirect_stdout(io.StringIO()):
        without = [part for name in ("cacheprovider", "terminal", "hypothesispytest") for part in ("-p", f"no:{name}")]
        arguments = ["-x", "-c", os.devnull, "-W", "ignore", *(more or ("--noconftest",)), *without, str(path)]
        status = pytest.main(arguments, [failures])
    return ", ".join(failures.names) or ("" if status == pytest.ExitCode.OK else f"pytest ended with {status!r}")


# The audit: broken rationalizers are found, and right logs have none; what it follows against plain accounts.


AUDITED = Path(__file__).parents[1] / "audit"


def _audit() -> Iterator[Unit]:
    for name in ("test_shares.py", "test_holes.py"):
        yield Unit("audit", f"audit of {name}", partial(_tests, AUDITED / name))


# Sinks: what one transaction after another answers, and several writers at once. PostgreSQL's part needs its server.


SINKS = Path(__file__).parents[1] / "sinks"


def _sinks(campaigns: int) -> Iterator[Unit]:
    if not campaigns:
        return
    for name in (
        "test_several_writers.py",
        "test_fences.py",
        "test_done_records.py",
        "test_restore.py",
        "test_open.py",
    ):
        yield Unit("sinks", name, partial(_tests, SINKS / name, "-p", "tests.sinks.conftest", "--noconftest"))
    name, some = "test_connections.py", ("-k", "sqlite3 or psycopg or pymysql")
    yield Unit("sinks", name, partial(_tests, SINKS / name, "-p", "tests.sinks.conftest", "--noconftest", *some))
    for seed in range(campaigns):
        yield Unit("sinks", f"campaign {seed} on SQLite", partial(_on_sqlite, seed))
        yield Unit("sinks", f"campaign {seed} on PostgreSQL", partial(_on_postgres, seed))


def _on_sqlite(seed: int) -> str:
    with tempfile.TemporaryDirectory() as folder:
        place = Place("sqlite", str(Path(folder) / "campaign.db"))
        return _first(run_campaign(Options.short(500, seed), place).violations)


def _on_postgres(seed: int) -> str:
    try:
        with running_postgres("fsync=off", "track_commit_timestamp=on") as postgres:
            place = Place("postgres", postgres.dsn(postgres.new_database("repeatable read")))
            return _first(run_campaign(Options.short(2_500, seed), place).violations)
    except pytest.skip.Exception:
        return ""


# What fails around a consumer, and interrupts at each line of the calls that users make.


def _faults(points: int) -> Iterator[Unit]:
    if not points:
        return
    for name in {**PROOFS, **SHARED}:
        yield Unit("faults", name, partial(_proof, name))
    for name in CASES:
        checked = name.removeprefix("at most once: ") in CHECKED
        for kind in (Points.LINES, Points.CHECKS) if checked else (Points.LINES,):
            yield Unit("faults", f"{name}: {kind.value}", partial(_interrupted, name, kind, points))


def _proof(name: str) -> str:
    proof = {**PROOFS, **SHARED}[name]
    try:
        with heard(*proof.says):
            run_within(WITHIN_S, proof.run, name)
    except BaseException as error:  # noqa: BLE001 - whatever a thread of it raised
        return _said(error)
    return ""


def _sweep(name: str, kind: Points, points: int) -> Report:
    return sweep(
        CASES[name],
        exception=Interrupted,
        points=kind,
        modules=MODULES if kind is Points.LINES else (*MODULES, "threading", "queue"),
        without=WITHOUT,
        limit=points,
        per_line=1,
        most_failures=1,
    )


def _interrupted(name: str, kind: Points, points: int) -> str:
    try:
        with heard():
            report = run_within(HANGS_S, partial(_sweep, name, kind, points), name)
    except AssertionError as error:  # it is stuck, or something was logged
        return _said(error)
    return _first(f"{failure.where}: {_said(failure.error)}" for failure in report.failures)


def _said(error: BaseException) -> str:
    first = str(error).partition("\n")[0]
    return first if first and isinstance(error, AssertionError) else f"{type(error).__name__}: {first}"
