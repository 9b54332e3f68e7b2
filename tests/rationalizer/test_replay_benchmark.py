"""benchmarks/replay.py runs, measures what it says it measures, and writes JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.replay import CLIENTS, LEASES, Written, main
from rationalizer import decode


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
