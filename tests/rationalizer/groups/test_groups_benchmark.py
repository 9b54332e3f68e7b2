"""benchmarks/groups.py runs, and writes JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.groups import main
from rationalizer.groups.assignors import STRATEGIES


def test_it_measures_each_strategy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--rounds", "1", "--json", str(tmp_path / "groups.json")])
    rows = json.loads((tmp_path / "groups.json").read_text())["rows"]
    names = {row["name"] for row in rows}
    assert {f"{strategy}: {what}" for strategy in STRATEGIES for what in ("from nothing", "one joins")} <= names
    assert all(row["ours"] > 0 for row in rows)
    assert "sticky: one joins" in capsys.readouterr().out
