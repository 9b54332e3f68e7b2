"""Users' workers: correct ones pass, wrong ones are found, and the printed script reproduces it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kafka_marshal.errors import ConfigurationError
from kafka_marshal.testing import simulate as command
from kafka_marshal.testing.simulation import (
    Client,
    Fault,
    Result,
    Scenario,
    Worker,
    load_worker,
    simulate,
    simulate_one,
    story,
)
from tests.simulation import workers

# A violation counts even if a second try has none: CI's --reruns is not for these.
pytestmark = pytest.mark.flaky(reruns=0)

FILE = str(Path(workers.__file__))


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "seeds", [range(1), pytest.param(range(1, 60), marks=pytest.mark.campaign)], ids=["one", "many"]
)
@pytest.mark.parametrize(
    "worker",
    [
        workers.plain,
        workers.with_a_handler,
        workers.whose_handler_exits,
        workers.two_threads,
        workers.in_a_transaction,
        workers.looks_at_its_admin,
        workers.leads,
        workers.begins_at_the_end,
    ],
)
def test_a_worker_that_does_as_the_docs_say_breaks_no_promise(worker: Worker, seeds: range) -> None:
    simulate(worker, seeds, jobs=2).raise_for_violation()


@pytest.mark.parametrize(
    ("worker", "promise"),
    [
        (workers.commits_first, "lost"),
        pytest.param(workers.ignores_on_lost, "work without lease", marks=pytest.mark.campaign),
        pytest.param(workers.reads_on, "work without lease", marks=pytest.mark.campaign),
        pytest.param(workers.forgets_the_stored_offset, "fenced sink", marks=pytest.mark.campaign),
        (workers.falls_over, "worker"),
        pytest.param(workers.whose_thread_falls_over, "worker", marks=pytest.mark.campaign),
    ],
)
@pytest.mark.timeout(600)
def test_a_worker_with_a_bug_is_found_and_the_story_is_small(worker: Worker, promise: str) -> None:
    report = simulate(worker, 40, jobs=1)  # all are found soon, and no second process keeps searching
    [found] = report.broken
    assert found.violation is not None
    assert found.violation.promise == promise
    whole = Scenario.from_seed(found.scenario.seed, True)
    assert len(found.scenario.faults) <= len(whole.faults) / 2
    assert found.intervals < whole.intervals


@pytest.mark.parametrize(
    ("worker", "line"), [(workers.waits_for_a_queue, "queue.Queue"), (workers.goes_round, "(while not|continue)")]
)
def test_a_worker_that_hangs_the_simulation_is_located(
    worker: Worker, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(story, "LOOK_AFTER_S", 1.0)
    report = simulate(worker, 1, jobs=2)  # in a child process: pytest-timeout uses this one's SIGALRM
    [found] = report.broken
    assert found.violation is not None
    assert found.violation.promise == "hangs"
    assert re.search(rf"a thread \(main\) of c\d#1 .*{re.escape(FILE)}:\d+: .*{line}", str(found.violation))


def _told_to_end(worker: Worker) -> Result:
    """A single member receives a SIGTERM and is restarted."""
    workers.SEEN.clear()
    before = signal.getsignal(signal.SIGTERM)
    clients = (Client("c0", "yours"), Client("c1", joins=20))
    faults = (Fault(at=10, kind="term", client="c0", intervals=5),)
    result = simulate_one(Scenario(seed=1, clients=clients, faults=faults, intervals=30), worker)
    assert result.violation is None, result.tell()
    assert signal.getsignal(signal.SIGTERM) is before  # it belonged to the simulated process
    return result


def _ends(result: Result) -> list[str]:
    return [line.split()[2] for line in result.history() if line.split()[1] == "end"]


def test_sigterm_reaches_the_handler_that_a_worker_has() -> None:
    assert "c0#1" in _ends(_told_to_end(workers.with_a_handler))
    assert workers.SEEN == {"SIGTERM": 1, "loop ended": 1}


def test_a_handler_that_exits_ends_the_main_thread_in_order() -> None:
    assert "c0#1" in _ends(_told_to_end(workers.whose_handler_exits))
    assert workers.SEEN == {"SIGTERM": 1, "left in order": 1}


def test_sigterm_kills_a_worker_without_handler_but_not_one_that_ignores_it() -> None:
    starts = [line.split()[2] for line in _told_to_end(workers.plain).history() if line.split()[1] == "start"]
    assert "c0#2" in starts
    assert "c0#1" not in _ends(_told_to_end(workers.plain))  # it got no further turn
    starts = [line.split()[2] for line in _told_to_end(workers.that_ignores_it).history() if line.split()[1] == "start"]
    assert "c0#2" not in starts


def test_all_clocks_are_virtual_however_they_were_imported() -> None:
    workers.SEEN.clear()
    names = ("sleep", "perf_counter", "time_ns", "monotonic_ns")
    real = [getattr(where, name) for where in (time, workers) for name in names]
    clients = (Client("c0", "yours"), Client("c1"))
    minutes = 5 * 60_000 / 500
    scenario = Scenario(seed=1, clients=clients, messages=1.0, intervals=int(minutes), recovers=False)
    result = simulate_one(scenario, workers.by_any_clock)
    assert result.violation is None, result.tell()
    assert workers.SEEN["minutes"] >= 4
    assert [getattr(where, name) for where in (time, workers) for name in names] == real


def test_a_real_thread_is_refused_with_the_alternative() -> None:
    [found] = simulate(workers.starts_a_thread, 1, jobs=1, small=False).broken
    assert found.violation is not None
    assert found.violation.promise == "worker"
    assert "job.start(function)" in found.violation.message


def test_a_worker_that_delivers_at_most_once_is_held_to_that() -> None:
    simulate(workers.at_most_once, 3, jobs=1, delivery="at-most-once").raise_for_violation()
    [found] = simulate(workers.tries_again, 12, jobs=1, delivery="at-most-once", small=False).broken
    assert found.violation is not None
    assert found.violation.promise == "repeated"
    assert found.scenario.delivery == "at-most-once"


def test_a_worker_with_another_delivery_than_its_story_is_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--seeds", "1", "--jobs", "1", "--as-found", "--worker", f"{FILE}:at_most_once"]) == 1
    said = capsys.readouterr()
    assert "run it with --delivery at-most-once" in said.out
    assert said.err.startswith("broken: seed 0: worker: ")  # at once: shrinking may take a while


def test_a_worker_of_another_group_learns_that_a_story_has_one_group() -> None:
    [found] = simulate(workers.of_another_group, 1, jobs=1, small=False).broken
    assert found.violation is not None
    assert found.violation.promise == "worker"
    assert "has a Marshal of the group 'mine'; a story has one group" in found.violation.message


def test_a_handler_for_sigterm_does_not_keep_the_simulators_processes() -> None:
    script = [sys.executable, "-m", "kafka_marshal.testing.simulate", "--seeds", "2", "--worker"]
    done = subprocess.run([*script, f"{FILE}:with_a_handler"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_script_shows_it_by_itself(tmp_path: Path) -> None:
    script = tmp_path / "shows_it.py"
    status = command.main(["--seeds", "5", "--jobs", "1", "--worker", f"{FILE}:commits_first", "--out", str(script)])
    assert status == 1
    shown = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert shown.returncode == 1
    assert "BROKEN lost: " in shown.stdout
    assert "no process handled it" in script.read_text()
    mended = script.read_text().replace(":commits_first", ":plain")
    script.write_text(mended)
    shown = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (shown.returncode, shown.stderr) == (0, "")


def test_the_command_says_what_it_did(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    assert command.main(["--seeds", "1", "--first", "7", "--jobs", "1", "--json", str(figures)]) == 0
    assert capsys.readouterr().out.startswith("1 seeds, 0 broken; ")
    told = json.loads(figures.read_text())
    assert (told["seeds"], told["first"], told["broken"]) == (1, 7, [])
    assert told["records"] >= 1012
    assert command.main(["--history", "--first", "7"]) == 0
    assert " record " in capsys.readouterr().out
    assert command.main(["--worker", "no.such.module:worker"]) == 2
    assert "was not found" in capsys.readouterr().err


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_an_interrupted_campaign_reports_its_results(jobs: str) -> None:
    program = f"""
import sys
from kafka_marshal.testing import simulate
from kafka_marshal.testing.simulation import campaign
simulate._LOG_AFTER_S = 0
campaign.CHUNK = 1
sys.exit(simulate.main(["--seeds", "100000", "--jobs", "{jobs}"]))
"""
    command = [sys.executable, "-c", program]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stderr is not None
        assert re.match(r"\d+ of 100000 seeds, 0 broken, \d+ s\n", process.stderr.readline())
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the parent and its children
        said, complained = process.communicate()
    assert process.returncode == 130
    assert re.match(r"[1-9]\d* seeds, 0 broken; ", said)
    assert "interrupted after" in complained
    assert "Traceback" not in complained
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)


@pytest.mark.parametrize(
    "name", ["worker", "json:", ":dumps", "json:nothing", "nowhere.py:worker", "os:sep", "os:abort"]
)
def test_what_names_no_worker_is_refused(name: str) -> None:
    with pytest.raises(ConfigurationError):
        load_worker(name)


def test_a_file_that_is_no_python_is_refused(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("def worker(job:\n")
    with pytest.raises(ConfigurationError, match="can't be read"):
        load_worker(f"{tmp_path}/broken.py:worker")


def test_the_script_finds_a_worker_and_what_lies_beside_it_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "beside_mine.py").write_text("class Mine(Exception):\n    pass\n")
    (tmp_path / "mine_own.py").write_text("import beside_mine\n\n\ndef worker(job):\n    raise beside_mine.Mine\n")
    script, elsewhere = tmp_path / "shows_it.py", tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(tmp_path)
    assert command.main(["--seeds", "1", "--jobs", "1", "--worker", "mine_own.py:worker", "--out", str(script)]) == 1
    shown = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False, cwd=elsewhere)
    assert "BROKEN worker: " in shown.stdout
