"""benchmarks/groups.py runs, and writes JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import groups
from rationalizer.groups.assignors import STRATEGIES


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
