"""The database: created and written; the message if it can't be. (For the fence see tests/sinks.)"""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path

import pytest

from flights import SinkError
from flights.ledger import create, opened, write_state
from tests.demo.helpers import ask


@pytest.fixture
def path(tmp_path: Path) -> Path:
    create(tmp_path / "delays.sqlite")
    return tmp_path / "delays.sqlite"


def test_what_is_no_database_is_recognised(tmp_path: Path) -> None:
    path = tmp_path / "delays.sqlite"
    path.write_bytes(b"something else entirely" * 100)
    with pytest.raises(SinkError, match="is no database"):
        write_state(path, "running")
    create(path)  # it belongs to the demo's folder: replaced
    assert ask(path, "SELECT * FROM delays") == []


def test_a_database_that_is_locked_for_long_says_so(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flights.ledger._BUSY_S", 0.05)
    with closing(opened(path, "rw")) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(SinkError, match="locked"):
            write_state(path, "running")
        other.execute("ROLLBACK")
    write_state(path, "running")


def test_a_database_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(SinkError, match="can't be opened"):
        write_state(tmp_path / "delays.sqlite", "running")
    assert not (tmp_path / "delays.sqlite").exists()


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(SinkError, match="Nothing was started"):
        create(tmp_path / "nowhere" / "delays.sqlite")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everything")
def test_a_folder_without_the_right_to_write(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(SinkError, match="Nothing was started"):
        create(tmp_path / "delays.sqlite")


def test_the_state_is_one_line_that_is_replaced(path: Path) -> None:
    write_state(path, "running")
    write_state(path, "equal")
    assert [state for state, _ in ask(path, "SELECT * FROM run")] == ["equal"]
