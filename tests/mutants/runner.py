"""Plants bugs in copies, runs the short forms there, and reports what caught each."""

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

from tests.mutants.faults import FAULTS
from tests.mutants.group_members import GROUP_MEMBERS
from tests.mutants.groups import GROUPS
from tests.mutants.lanes import LANES
from tests.mutants.mutation import ROOT, Mutation, apply

__all__ = ["CONTROL", "ROOT", "Row", "as_json", "markdown", "run_all", "table", "write_report"]


#: Contents of a copy: the product and the tests that run.
TREES = ("marshal", "rationalizer", "tests/campaigns", "tests/faults", "tests/mutants", "tests/rationalizer")
#: For members of coordinated groups.
MEMBERS = ("tests/engine",)

#: The row of the product as it is, which must pass.
CONTROL = "(none: the product as it is)"


@dataclass(frozen=True, slots=True)
class Row:
    """The result of one mutation."""

    name: str
    rule: str
    file: str
    #: "exhaustive", "logs", "fuzz", "simulation", "faults", "raised"; "" if nothing was found.
    by: str
    #: The broken promise, and the seed.
    what: str
    #: Processor time.
    seconds: float
    #: The budget was exhausted before all had run.
    timed_out: bool = False

    @property
    def is_right(self) -> bool:
        """Whether a bug was caught, or the unchanged product passed within the same time."""
        return bool(self.by) != (self.name == CONTROL) and not (self.timed_out and not self.by)


#: Searches and logs of the rules can't reach code here: they are skipped, which halves the time.
SHELL = "marshal/"


def _copy(to: Path) -> None:
    # With the bytecode, as compiling everything costs seconds for each mutation; without temporary files (*.pyc.N) and
    # pytest's.
    ignored = shutil.ignore_patterns("*.so", "*-pytest-*", "*.pyc.*")
    for tree in (*TREES, *MEMBERS):
        shutil.copytree(ROOT / tree, to / tree, ignore=ignored)


def _run(mutation: Mutation | None, arguments: Sequence[str], budget_s: int) -> Row:
    """Run one mutation (None: none) in a new copy."""
    with tempfile.TemporaryDirectory(prefix="kafka-marshal-mutant-") as folder:
        tree = Path(folder).resolve()
        _copy(tree)
        if mutation is not None:
            apply(mutation, tree)
            Path(cache_from_source(str(tree / mutation.file))).unlink(missing_ok=True)
        path = os.pathsep.join((str(tree / "marshal"), str(tree)))
        environment = {**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1"}
        short = ["--tree", str(tree), "--budget", str(budget_s), *arguments]
        if mutation is not None and mutation.file.startswith(SHELL):
            short += ["--depth", "0", "--logs", "0", "--groups", "0"]
        if mutation in FAULTS:
            short += ["--first", "faults"]
        if mutation in GROUPS:
            short += ["--first", "groups"]
        if mutation in GROUP_MEMBERS:
            short += ["--judged", "0", "--seeds", "0", "--lanes", "0", "--faults", "0"]
        if mutation in LANES:
            short += ["--judged", "0", "--seeds", "0", "--members", "0", "--faults", "0"]
        command = [sys.executable, "-m", "tests.mutants.short", *short]
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
        by, what, seconds, timed_out = _read(done, budget_s)
    if mutation is None:
        return Row(CONTROL, "", "", by, what, seconds, timed_out)
    return Row(mutation.name, mutation.rule, mutation.file, by, what, seconds, timed_out)


def _read(done: subprocess.CompletedProcess[str], budget_s: int) -> tuple[str, str, float, bool]:
    """The short forms' result: (by, what, seconds, timed out)."""
    if -done.returncode in (signal.SIGXCPU, signal.SIGKILL):
        return "", f"not through within {budget_s} s", float(budget_s), True
    try:
        found = json.loads(done.stdout.splitlines()[-1])
        return found["by"], found["what"], found["seconds"], False
    except (IndexError, ValueError, KeyError):
        lines = done.stderr.strip().splitlines()  # for example not importable
        return "raised", lines[-1] if lines else f"exit status {done.returncode}", 0.0, False


def run_all(mutations: Sequence[Mutation], arguments: Sequence[str], budget_s: int, jobs: int = 2) -> Iterator[Row]:
    """Run the unchanged product first, then each mutation, in order; ``jobs`` in parallel."""
    with ThreadPoolExecutor(jobs) as pool:
        yield from pool.map(lambda mutation: _run(mutation, arguments, budget_s), (None, *mutations))


def table(rows: Sequence[Row]) -> str:
    """For people."""
    lines = [f"{'planted bug':58} {'rule':5} {'caught by':11} {'cpu s':>5}  what"]
    for row in rows:
        by = row.by or ("nothing" if row.name != CONTROL or row.timed_out else "passes")
        lines.append(f"{row.name:58} {row.rule:5} {by:11} {row.seconds:5.1f}  {row.what[:110]}")
    return "\n".join(lines)


def markdown(rows: Sequence[Row]) -> str:
    """The table for docs/reliability.md, without the unchanged product's row."""
    lines = ["| planted bug | in | rule | caught by | as | s |", "|---|---|---|---|---|---|"]
    for row in rows:
        if row.name != CONTROL:
            seed, _, promise = row.what.partition(": ")
            what = f"{promise.split(':')[0]} ({seed})" if row.by == "simulation" else row.what.split(": ")[0][:60]
            if row.by == "logs":
                what = row.what.split(",")[0]
            file = row.file.rpartition("/")[2]
            lines.append(
                f"| {row.name} | {file} | {row.rule} | {row.by or '**nothing**'} | {what} | {row.seconds:.1f} |"
            )
    return "\n".join(lines)


def write_report(path: Path, rows: Sequence[Row], figures: str) -> None:
    """Write the table between the two marks of a page."""
    begin, end = "<!-- mutants: begin -->", "<!-- mutants: end -->"
    before, _, rest = path.read_text(encoding="utf-8").partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise ValueError(f"{path} has no marks {begin} … {end}; nothing was written")
    path.write_text(f"{before}{begin}\n\n{figures}\n\n{markdown(rows)}\n\n{end}{after}", encoding="utf-8")


def as_json(rows: Sequence[Row], **about: object) -> str:
    """For machines."""
    return json.dumps({**about, "rows": [asdict(row) for row in rows]}, indent=1, ensure_ascii=False) + "\n"
