"""What the account of a rolling upgrade says of what workers have written down."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.release.upgrade import Fleet


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    """Each group has handled four messages, in two processes of one place."""
    made = Fleet(tmp_path, "", {})
    for worker in [each for each in made.workers if each.name == "w0"]:
        for number, lines in enumerate(("0 0\n1 0\n", "0 1\n1 1\n")):
            worker.lives.append(tmp_path / f"{worker.kind}-w0-{number}-old.txt")
            worker.lives[-1].write_text(lines)
    return made


def test_what_comes_once_is_well(fleet: Fleet, capsys: pytest.CaptureFixture[str]) -> None:
    fleet.judge()
    assert capsys.readouterr().out.count(": 0 came twice") == 2


def test_twice_is_well_only_after_a_worker_that_was_struck(fleet: Fleet, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = fleet.workers[0].lives
    second.write_text("0 0\n0 1\n1 1\n")
    with pytest.raises(SystemExit, match="claimed: 1 came twice, no worker was struck"):
        fleet.judge()
    fleet.struck.add(first)
    fleet.judge()
    assert "claimed: 1 came twice, each from a worker" in capsys.readouterr().out


def test_what_nobody_handles_is_said(
    fleet: Fleet, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.release.upgrade.STILL_S", 0.2)
    fleet.written = dict.fromkeys(range(2), 2)
    fleet.until_handled("all")
    assert "all: 4 messages are handled" in capsys.readouterr().out
    fleet.workers[-3].lives[0].write_text("0 0\n")
    with pytest.raises(SystemExit, match="all: coordinated: 1 not handled"):
        fleet.until_handled("all")
