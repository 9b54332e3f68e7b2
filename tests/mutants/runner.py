"""Plants bugs in copies, runs the short form of the proof there, and reports what caught what."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib.util import cache_from_source
from pathlib import Path

from tests.mutants.audit import AUDIT
from tests.mutants.checkpoint_members import CHECKPOINT_MEMBERS
from tests.mutants.checkpoints import CHECKPOINTS
from tests.mutants.faults import FAULTS
from tests.mutants.group_members import GROUP_MEMBERS
from tests.mutants.groups import GROUPS
from tests.mutants.lanes import LANES
from tests.mutants.lists import LISTS
from tests.mutants.mutation import ROOT, Mutation, apply
from tests.mutants.pacing import PACING
from tests.mutants.sharing import SHARING
from tests.mutants.sinks import SINKS
from tests.mutants.transactions import TRANSACTIONS
from tests.mutants.wait_stories import WAITS
from tests.sinks.conftest import binary, mariadb_programs

__all__ = ["CONTROL", "ROOT", "Row", "as_json", "markdown", "run_all", "table", "write_report"]


#: What a copy needs: the product, and what runs against it.
TREES = (
    "marshal",
    "rationalizer",
    *(f"tests/{name}" for name in ("campaigns", "faults", "mutants", "rationalizer", "tables")),
)
#: Tests that are proofs, of members of coordinated groups and of sinks, and what they import.
TESTS = ("tests/audit", "tests/engine", "tests/scripts", "tests/sinks", "tests/broker", "tests/client")

#: The row of the product as it is, which must pass.
CONTROL = "(none: the product as it is)"


@dataclass(frozen=True, slots=True)
class Row:
    """The result of one mutation."""

    name: str
    rule: str
    file: str
    #: The part of the proofs that found it, or "raised"; "" if nothing was found.
    by: str
    #: The proof that found it.
    unit: str
    #: What was broken.
    what: str
    #: Of a processor.
    seconds: float
    #: The budget was over before all had run.
    timed_out: bool = False

    @property
    def is_right(self) -> bool:
        """A bug was caught; the product itself was not, within the same time."""
        return bool(self.by) != (self.name == CONTROL) and not (self.timed_out and not self.by)


#: What lies here can't be seen by searches and logs of the rules alone.
SHELL = "marshal/"

#: The last table: which unit caught what. A bug runs into that one first.
RESULTS = ROOT / "benchmarks" / "results" / "mutants.json"


def _parts(mutation: Mutation | None) -> tuple[str, ...]:
    """Where a bug is looked for, in order; (): everywhere."""
    if mutation in SINKS:
        return ("sinks",)
    if mutation in TRANSACTIONS:
        return ("transactions",)
    if mutation in PACING:
        return ("pacing",)
    if mutation in LISTS:
        return ("lists",)
    if mutation in WAITS:
        return ("waits",)
    if mutation in LANES:
        return ("lanes",)
    if mutation in GROUP_MEMBERS:
        return ("members",)
    if mutation in FAULTS:
        return ("scripts", "faults", "simulation", "members", "lanes")
    if mutation in CHECKPOINT_MEMBERS:
        return ("counting", "members")
    if mutation in CHECKPOINTS:
        return ("checkpoints",)
    if mutation in AUDIT:
        return ("audit",)
    if mutation in SHARING:
        return ("sharing",)
    if mutation in GROUPS:
        return ("exhaustive", "groups", "fuzz", "logs", "simulation", "members")
    if mutation is not None and mutation.file.startswith(SHELL):
        return ("scripts", "simulation", "members", "lanes", "faults")
    return ()


def catchers() -> dict[str, str]:
    """The unit that caught each bug when the whole table was made last."""
    rows = json.loads(RESULTS.read_text(encoding="utf-8"))["rows"]
    return {row["name"]: row["unit"] for row in rows if row.get("unit")}


def drawable() -> set[str]:
    """Bugs that were caught last, but those of PostgreSQL or MariaDB if there is no server here."""
    has_postgres = binary("postgres") is not None and binary("initdb") is not None
    lacking = [name for name, has in (("postgres", has_postgres), ("mysql", mariadb_programs())) if not has]
    rows = json.loads(RESULTS.read_text(encoding="utf-8"))["rows"]
    caught = {x["name"]: f"{x['unit']}{x['what']}" for x in rows if x.get("unit")}
    return {name for name, by in caught.items() if not any(each in by for each in lacking)}


def _copy(to: Path) -> None:
    # With the bytecode, valid while a file's time is: to compile all of it costs seconds for each mutation.
    # Without files that are being written (*.pyc.N), and without pytest's own.
    ignored = shutil.ignore_patterns("*.so", "*-pytest-*", "*.pyc.*")
    for tree in (*TREES, *TESTS):
        shutil.copytree(ROOT / tree, to / tree, ignore=ignored)
    for path in (ROOT / "tests").glob("*.py"):
        shutil.copy2(path, to / "tests")
    (to / "docs").mkdir()
    shutil.copy2(ROOT / "docs" / "audit.md", to / "docs")  # whose questions are tests


def _run(mutation: Mutation | None, arguments: Sequence[str], budget_s: int) -> Row:
    """One mutation (None: none) in a new copy."""
    with tempfile.TemporaryDirectory(prefix="kafka-marshal-mutant-") as folder:
        tree = Path(folder).resolve()
        _copy(tree)
        if mutation is not None:
            apply(mutation, tree)
            Path(cache_from_source(str(tree / mutation.file))).unlink(missing_ok=True)
        path = os.pathsep.join((str(tree / "marshal"), str(tree)))
        environment = {**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, "-m", "tests.mutants.short", "--tree", str(tree), "--budget", str(budget_s)]
        done = subprocess.run(
            [*command, *arguments], cwd=tree, env=environment, capture_output=True, text=True, check=False
        )
        by, unit, what, seconds, timed_out = _read(done, budget_s)
    if mutation is None:
        return Row(CONTROL, "", "", by, unit, what, seconds, timed_out)
    return Row(mutation.name, mutation.rule, mutation.file, by, unit, what, seconds, timed_out)


def _read(done: subprocess.CompletedProcess[str], budget_s: int) -> tuple[str, str, str, float, bool]:
    """What the short form said: (by, unit, what, seconds, timed out)."""
    if -done.returncode in (signal.SIGXCPU, signal.SIGKILL):
        return "", "", f"not finished within {budget_s} s", float(budget_s), True
    try:
        found = json.loads(done.stdout.splitlines()[-1])
        return found["by"], found["unit"], found["what"], found["seconds"], False
    except (IndexError, ValueError, KeyError):
        lines = done.stderr.strip().splitlines()  # not even importable, say
        return "raised", "", lines[-1] if lines else f"exit status {done.returncode}", 0.0, False


def run_all(
    mutations: Sequence[Mutation], arguments: Sequence[str], budget_s: int, jobs: int = 2, whole: bool = True
) -> Iterator[Row]:
    """Each mutation, in order, up to ``jobs`` at a time; then the product itself.

    whole: the product has to pass everything; else only those units that caught a mutation.
    """
    known = catchers()

    def run(mutation: Mutation) -> Row:
        first = ["--first", known[mutation.name]] if mutation.name in known else []
        parts = _parts(mutation)
        return _run(mutation, [*(("--parts", *parts) if parts else ()), *first, *arguments], budget_s)

    caught = []
    with ThreadPoolExecutor(jobs) as pool:
        control = pool.submit(_run, None, arguments, budget_s) if whole else None
        for row in pool.map(run, mutations):
            caught.append(row.unit)
            yield row
        only = ["--only", "--first", *filter(None, caught)]
        yield control.result() if control is not None else _run(None, [*arguments, *only], budget_s)


def table(rows: Sequence[Row]) -> str:
    """For people."""
    lines = [f"{'planted bug':58} {'rule':5} {'caught by':11} {'cpu s':>5}  what"]
    for row in rows:
        by = row.by or ("nothing" if row.name != CONTROL or row.timed_out else "passes")
        what = ": ".join(filter(None, (row.unit, row.what)))[:110]
        lines.append(f"{row.name:58} {row.rule:5} {by:11} {row.seconds:5.1f}  {what}")
    return "\n".join(lines)


def markdown(rows: Sequence[Row]) -> str:
    """For docs/reliability.md: what caught what, without the product's own row."""
    lines = ["| planted bug | in | rule | caught by | as | s |", "|---|---|---|---|---|---|"]
    for row in rows:
        if row.name != CONTROL:
            what = row.what.split(": ")[0][:60]
            file = row.file.rpartition("/")[2]
            by = row.by or "**nothing**"
            lines.append(f"| {row.name} | {file} | {row.rule} | {by} | {row.unit}: {what} | {row.seconds:.1f} |")
    return "\n".join(lines)


def write_report(path: Path, rows: Sequence[Row], figures: str) -> None:
    """Put the table between the two marks of a page."""
    begin, end = "<!-- mutants: begin -->", "<!-- mutants: end -->"
    before, _, rest = path.read_text(encoding="utf-8").partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise ValueError(f"{path} has no marks {begin} … {end}; nothing was written")
    path.write_text(f"{before}{begin}\n\n{figures}\n\n{markdown(rows)}\n\n{end}{after}", encoding="utf-8")


def as_json(rows: Sequence[Row], **about: object) -> str:
    """For machines."""
    return json.dumps({**about, "rows": [asdict(row) for row in rows]}, indent=1, ensure_ascii=False) + "\n"
