"""benchmarks/lanes.py runs and judges correctly. Its figures are not checked here."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.lane_peers.work import FailedError, Order, Work
from benchmarks.lanes import HANDLERS, WORK_MS, Records, Row, equal, table, zipf

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
