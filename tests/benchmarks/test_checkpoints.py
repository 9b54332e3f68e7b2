"""benchmarks/checkpoints.py measures what it says. Its figures are not checked here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import checkpoints
from benchmarks.checkpoint_member import Member, stood_still, usual_gaps
from benchmarks.common import paired
from benchmarks.group_log import GroupLog
from benchmarks.replay import replay
from kafka_marshal.testing.select_broker import RunningKafka


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
