"""``make bench-pair``: both trees are measured, the table is right, and nothing is left behind."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from benchmarks.against import __main__ as against
from benchmarks.race.hosts import ROOT
from kafka_marshal.testing.select_broker import RunningKafka

pytestmark = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="the files of a commit come from git")


def test_the_table_has_medians_of_both_and_of_the_ratios() -> None:
    found = {
        ("replay", "rate"): [(100.0, 50.0), (90.0, 60.0), (80.0, 80.0)],
        ("hand-over", "ms"): [(12.25, 10.0)],
    }
    lines = against.table(found, "a7c5f59").splitlines()
    assert lines[0].split() == ["this", "tree", "a7c5f59", "ratio", "middle", "half"]
    assert lines[1].split() == ["hand-over", "of", "a", "partition", "12.2", "10.0", "1.225", "1.225–1.225", "ms"]
    assert lines[2].split() == ["replay,", "claims", "90", "60", "1.500", "1.250–1.750", "records/s"]


def test_the_files_of_a_commit_are_there_for_as_long_as_they_are_used() -> None:
    with against.worktree("HEAD") as tree, against.packages(tree) as folder:
        assert (folder / "rationalizer" / "world.py").resolve() == tree / "rationalizer" / "world.py"
        assert (folder / "benchmarks").resolve() == ROOT / "benchmarks"
    assert not tree.exists() and not folder.exists()
    listed = subprocess.run(["git", "worktree", "list"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert str(tree) not in listed


@pytest.mark.slow
def test_each_measurement_runs_once(
    kafka_broker: RunningKafka, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KAFKA_MARSHAL_TEST_BOOTSTRAP", kafka_broker.bootstrap_servers)
    monkeypatch.setattr(against, "MESSAGES", 10_000)
    monkeypatch.setattr(against, "RECORDS", 1_000)
    monkeypatch.setattr(against, "GROUP_RECORDS", 1_000)
    against.main(["HEAD", "--rounds", "1", "--json", str(tmp_path / "pair.json")])
    samples = json.loads((tmp_path / "pair.json").read_text())["samples"]
    assert {len(pairs) for pairs in samples.values()} == {1}
    # The clock of a thread's processor time is coarse: a few messages may take none of it.
    assert all(min(pair) > 0 for name, pairs in samples.items() for pair in pairs if name.endswith((": rate", ": ms")))
    said = capsys.readouterr().out
    assert all(name in said for _, _, name, _ in against.ROWS)
