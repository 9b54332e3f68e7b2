"""A worker from outside: right ones pass, wrong ones are found, and the script that is printed shows it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kafka_marshal.errors import ConfigurationError
from kafka_marshal.testing import simulate as command
from kafka_marshal.testing.simulation import Scenario, Worker, load_worker, simulate
from tests.simulation import workers

FILE = str(Path(workers.__file__))


@pytest.mark.parametrize("worker", [workers.plain, workers.in_a_transaction, workers.looks_at_its_admin])
def test_a_worker_that_does_as_the_docs_say_breaks_no_promise(worker: Worker) -> None:
    simulate(worker, 12, jobs=2).raise_for_violation()


@pytest.mark.parametrize(
    ("worker", "promise"),
    [
        (workers.commits_first, "lost"),
        (workers.ignores_on_lost, "work without lease"),
        (workers.forgets_the_stored_offset, "fenced sink"),
        (workers.falls_over, "worker"),
    ],
)
@pytest.mark.timeout(600)
def test_a_worker_with_a_bug_is_found_and_the_story_is_small(worker: Worker, promise: str) -> None:
    report = simulate(worker, 40, jobs=2)
    [found] = report.broken
    assert found.violation is not None
    assert found.violation.promise == promise
    whole = Scenario.from_seed(found.scenario.seed, True)
    assert len(found.scenario.faults) <= len(whole.faults) / 2
    assert found.intervals < whole.intervals


def test_the_script_shows_it_by_itself(tmp_path: Path) -> None:
    script = tmp_path / "shows_it.py"
    status = command.main(["--seeds", "5", "--jobs", "1", "--worker", f"{FILE}:commits_first", "--out", str(script)])
    assert status == 1
    shown = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert shown.returncode == 1
    assert "BROKEN lost: " in shown.stdout
    assert "nobody handled it" in script.read_text()
    mended = script.read_text().replace(":commits_first", ":plain")
    script.write_text(mended)
    shown = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (shown.returncode, shown.stderr) == (0, "")


def test_the_command_says_what_it_did(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    assert command.main(["--seeds", "2", "--first", "7", "--jobs", "1", "--json", str(figures)]) == 0
    assert capsys.readouterr().out.startswith("2 seeds, 0 broken; ")
    told = json.loads(figures.read_text())
    assert (told["seeds"], told["first"], told["broken"]) == (2, 7, [])
    assert told["records"] >= 2 * 1012
    assert command.main(["--history", "--first", "7"]) == 0
    assert " record " in capsys.readouterr().out
    assert command.main(["--worker", "no.such.module:worker"]) == 2
    assert "was not found" in capsys.readouterr().err


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_who_is_interrupted_tells_what_it_has_seen(jobs: str) -> None:
    program = f"""
import sys
from kafka_marshal.testing import simulate
simulate._LOG_AFTER_S = 0
sys.exit(simulate.main(["--seeds", "100000", "--jobs", "{jobs}"]))
"""
    command = [sys.executable, "-c", program]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stderr is not None
        assert re.match(r"\d+ of 100000 seeds, 0 broken, \d+ s\n", process.stderr.readline())
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does it: to the parent and its processes
        said, complained = process.communicate()
    assert process.returncode == 130
    assert re.match(r"[1-9]\d* seeds, 0 broken; ", said)
    assert "interrupted after" in complained
    assert "Traceback" not in complained
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)


@pytest.mark.parametrize("name", ["worker", "json:", ":dumps", "json:nothing", "nowhere.py:worker"])
def test_what_names_no_worker_is_refused(name: str) -> None:
    with pytest.raises(ConfigurationError):
        load_worker(name)
