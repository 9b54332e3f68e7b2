"""benchmarks/lanes.py runs and judges correctly. Its figures are not checked here."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import checkpoints, groups
from benchmarks.checkpoint_member import Member, stood_still, usual_gaps
from benchmarks.common import paired
from benchmarks.group_log import GroupLog
from benchmarks.lane_peers.work import FailedError, Order, Work
from benchmarks.lanes import HANDLERS, WORK_MS, Records, Row, equal, table, zipf
from benchmarks.replay import CLIENTS, LEASES, Written, main, replay
from kafka_marshal.testing.select_broker import RunningKafka
from rationalizer import decode
from rationalizer.groups.assignors import STRATEGIES

ROOT = Path(__file__).parents[2]


def order(**more: object) -> Order:
    """Of four records."""
    given: dict[str, object] = {
        "side": "threads",
        "bootstrap": "localhost:9092",
        "topic": "t",
        "group": "g",
        "coordination": "c",
        "records": 4,
        "others": 4,
        "work_ms": 0.1,
        "concurrency": 16,
        "stuck": -1,
        "stuck_key": "",
        "fail_every": 0,
        "quiet_s": 1.0,
        "limit_s": 1.0,
    }
    return Order(**{**given, **more})  # type: ignore[arg-type]


def test_what_is_possible_is_what_the_most_frequent_key_allows() -> None:
    even = Records("even", "t", [f"k{number % 20}" for number in range(2000)], 0)
    assert even.possible_s == pytest.approx(2000 / HANDLERS * WORK_MS / 1000)
    skewed = Records("skewed", "t", [*("k0" for _ in range(500)), *(f"k{number % 19}" for number in range(1500))], 501)
    assert skewed.possible_s == pytest.approx((500 + 79) * WORK_MS / 1000)
    assert skewed.others == 2000 - 79


def test_keys_are_drawn_as_said_and_the_same_in_each_run() -> None:
    keys = zipf(20_000)
    assert keys == zipf(20_000)
    assert keys.count("k0") / keys.count("k9") == pytest.approx(10, rel=0.3)
    assert len(set(equal(1_000))) == 20


def test_an_order_comes_through_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    given = order(stuck_key="k=9", quiet_s=0.5)
    monkeypatch.setattr(sys, "argv", ["worker", *given.arguments()])
    assert Order.given() == given


def test_a_record_begun_before_the_one_before_it_has_ended_is_an_inversion() -> None:
    work = Work(order())
    work.handle(0, b"a", b"-1        ")
    work.handle(2, b"a", b"1         ")
    work.handle(1, b"a", b"0         ")
    work.handle(3, b"b", b"-1        ")
    assert work._inversions == [2]


def test_one_record_in_so_many_fails_once() -> None:
    work = Work(order(fail_every=2))
    with pytest.raises(FailedError):
        work.handle(1, b"a", b"-1        ")
    work.handle(1, b"a", b"-1        ")
    assert len(work._ended) == 1


def test_losses_are_reported_and_no_line_is_too_long() -> None:
    rows = [
        Row("work", "run, threads", "records/s", [1000.0], [0.9, 0.97, 0.94], aim=0.95),
        Row("work", "share group", "records/s", [2_000.0], [1.4], 12_345, "x" * 80),
        Row("work", "pyrallel-consumer 1.0.0", "records/s", note="needs Python 3.12, and there is none"),
        Row("cost", "run, threads, 1", "µs", [5.0, 30.0, 9.0], aim=10.0),
        Row("memory", "run, threads", "MB", aim=200.0),
    ]
    assert [row.missed for row in rows] == [True, False, False, False, True]
    lines = table(rows).splitlines()
    assert max(map(len, lines)) <= 80
    assert [line for line in lines if "MISSED" in line] == [lines[2], lines[-1]]
    assert re.search(r"0\.940 +0\.90-0\.97", lines[2])


@pytest.mark.campaign
@pytest.mark.broker
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_short_run(tmp_path: Path) -> None:
    """Without peers that need a download and without slow parts."""
    target = tmp_path / "lanes.json"
    options = [
        "--short",
        "--only",
        "threads,pool",
        "--pass-by",
        "20000",
        "--scenes",
        "work,memory",
        "--json",
        str(target),
    ]
    command = [sys.executable, "-m", "benchmarks.lanes", *options]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    rows = json.loads(target.read_text())["rows"]
    assert all(row["samples"] for row in rows), run.stdout
    assert [row["inversions"] for row in rows] == [0] * len(rows)
    assert len({row["scene"] for row in rows}) == 6
    assert max(map(len, run.stdout.splitlines())) <= 80


# -- benchmarks/checkpoints.py measures what it says. Its figures are not checked here ----------------------------


def member(saved: list[tuple[float, int]], handled: dict[int, list[tuple[float, float]]]) -> Member:
    """One that has worked, without a broker."""
    made = object.__new__(Member)
    made.saved, made.handled = saved, handled
    return made


def test_a_standstill_is_from_the_last_handler_before_the_cut_to_the_first_one_after_it() -> None:
    worked = member([(0.5, 0), (3.02, 0), (9.0, 0)], {0: [(1.0, 2.0), (2.0, 3.0), (3.1, 4.0)], 1: [(3.0, 3.05)]})
    assert stood_still(worked, since=0.0) == [pytest.approx(100)]
    assert stood_still(worked, since=3.1) == []
    assert usual_gaps(worked, since=0.0) == [pytest.approx(0), pytest.approx(100)]


def test_a_row_of_rounds_has_the_median_of_their_ratios_and_what_lies_around_it() -> None:
    row = paired("rate", [(90.0, 100.0), (80.0, 100.0), (100.0, 100.0)], 0.9, "messages/s")
    assert (row.ours, row.baseline, row.ratio, row.spread, row.reached) == (90.0, 100.0, 0.9, (0.8, 1.0), True)


@pytest.mark.parametrize("takes_checkpoints", [True, False])
def test_the_log_of_a_group_is_accepted_as_a_whole(takes_checkpoints: bool) -> None:
    log = GroupLog(60, checkpoints=takes_checkpoints)
    assert replay(log.begin, log.work, 0, 1) > 0


def test_a_checkpoint_and_a_handover_are_measured(
    kafka_broker: RunningKafka, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KAFKA_MARSHAL_TEST_BOOTSTRAP", kafka_broker.bootstrap_servers)
    short: dict[str, Any] = {"STANDSTILL_S": 0.5, "SETTLE_S": 0.1, "AFTER_S": 0.3, "PHASE_S": (0.0, 0.1), "MORE": 0}
    for name, value in short.items():
        monkeypatch.setattr(checkpoints, name, value)
    target = tmp_path / "found.json"
    checkpoints.main(["--only", "standstill,handover", "--rounds", "1", "--json", str(target)])
    rows = json.loads(target.read_text())["rows"]
    assert len(rows) == 7
    assert all(row["ours"] > 0 and row["baseline"] > 0 for row in rows)


# -- benchmarks/replay.py runs, measures what it says it measures, and writes JSON --------------------------------


def test_the_log_is_as_described() -> None:
    written = Written(3000)
    sizes = [len(value) for _, _, value in written.beats if value is not None]
    assert 70 <= sum(sizes) / len(sizes) <= 80
    assert len({value for _, _, value in written.claims}) == LEASES
    assert len({decode(value).client_id for _, _, value in written.beats}) == CLIENTS


def test_it_reports_a_ratio_and_writes_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--records", "2000", "--rounds", "5", "--json", str(tmp_path / "replay.json")])
    found = json.loads((tmp_path / "replay.json").read_text())
    assert [row["name"] for row in found["rows"]] == ["pure Python: heartbeats", "pure Python: heartbeat batches of 3"]
    # Of the same rounds, but a median of ratios is no ratio of medians: on a busy machine they lie far apart.
    assert all(0.2 < row["ratio"] / (row["ours"] / row["baseline"]) < 5 for row in found["rows"])
    assert "pure Python: heartbeats" in capsys.readouterr().out


# -- benchmarks/groups.py runs, and writes JSON -------------------------------------------------------------------


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A tenth of its members, and of the partitions of its targets; test_group_costs.py replays states of full size.

    The states are cached: other tests of this process must not get small ones, nor this one theirs.
    """
    states = (groups.grown, groups.cut, groups.in_key_pieces)
    monkeypatch.setattr(groups, "MEMBERS", 100)
    monkeypatch.setattr(groups, "PARTITIONS", 1_000)
    monkeypatch.setattr(groups, "SLOTS", groups.SLOTS[:101])
    for state in states:
        state.cache_clear()
    yield
    for state in states:
        state.cache_clear()


@pytest.mark.campaign
@pytest.mark.usefixtures("small")
def test_it_measures_each_strategy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    groups.main(["--rounds", "1", "--json", str(tmp_path / "groups.json")])
    rows = json.loads((tmp_path / "groups.json").read_text())["rows"]
    names = {row["name"] for row in rows}
    assert {f"{strategy}: {what}" for strategy in STRATEGIES for what in ("from nothing", "one joins")} <= names
    assert all(row["ours"] > 0 for row in rows)
    assert "sticky: one joins" in capsys.readouterr().out
