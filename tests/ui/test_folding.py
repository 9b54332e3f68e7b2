"""A long log is folded by processes side by side: the same history, and none of them is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from kafka_marshal.ui import archive as archives
from kafka_marshal.ui import folding
from kafka_marshal.ui.archive import Histories, read_dump
from rationalizer.dump import DumpError
from tests.cli.test_replay import changed_dump
from tests.client.conftest import wait_until
from tests.ui.test_kept import answers


@pytest.fixture(autouse=True)
def _side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "DUMP_AT_LEAST", 0)
    monkeypatch.setattr(folding, "processes", lambda: 2)


def read(path: Path, stop: threading.Event | None = None) -> Histories:
    found = Histories("?", is_live=False)
    with path.open("rb") as file:
        read_dump(found, file, stop or threading.Event())
    return found


@pytest.fixture
def path(dump: bytes, tmp_path: Path) -> Path:
    found = tmp_path / "story.dump"
    found.write_bytes(dump)
    return found


def test_a_dump_is_folded_side_by_side(path: Path, archive: Histories, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []
    real = subprocess.Popen

    def start(command: list[str], **more: Any) -> Any:
        started.append(command)
        return real(command, **more)

    monkeypatch.setattr(subprocess, "Popen", start)
    found = read(path)
    assert len(started) == 2
    assert found.complete
    assert found.progress == (path.stat().st_size,) * 2
    assert found.whole is not None
    assert archive.whole is not None
    assert answers(found.whole) == answers(archive.whole)


def test_a_process_that_is_killed_is_noticed(
    path: Path, archive: Histories, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = subprocess.Popen

    def start_and_kill(command: list[str], **more: Any) -> Any:
        found = real(command, **more)
        found.kill()
        return found

    monkeypatch.setattr(subprocess, "Popen", start_and_kill)
    found = read(path)
    [line] = caplog.records
    assert line.getMessage().endswith("; the page reads the log by itself, which takes longer")
    assert found.whole is not None
    assert archive.whole is not None
    assert answers(found.whole) == answers(archive.whole)


def test_a_damaged_dump_is_refused_with_its_line_and_a_changed_one_is_named(path: Path, tmp_path: Path) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:100]) + lines[100].replace(b'"offset"', b'"ofset"') + b"".join(lines[101:]))
    with pytest.raises(DumpError, match='line 101: "offset" must be an int'):
        read(path)
    changed = tmp_path / "changed.dump"
    changed.write_bytes(changed_dump())
    found = read(changed)
    assert found.complete
    assert "the dump was changed after it was written" in found.problem


_PARENT = """
import sys, threading
from kafka_marshal.ui import folding
from rationalizer import World
folding.processes = lambda: 2
worlds = {cp: World(cp, 2) for cp in range(2)}
list(folding.fold(folding.of_dump(sys.argv[1]), worlds, {0: 1, 1: 1}, threading.Event()))
"""


def children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_there(pid: int) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks into /proc")
def test_no_process_is_left_after_a_kill(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "never")  # the processes wait for its first byte
    with subprocess.Popen([sys.executable, "-c", _PARENT, str(tmp_path / "never")]) as parent:
        left = wait_until(lambda: len(found := children(parent.pid)) == 2 and found, 180)
        wait_until(lambda: all(len(list(Path(f"/proc/{pid}/task").iterdir())) > 1 for pid in left), 180)  # it reads
        parent.send_signal(signal.SIGKILL)
    wait_until(lambda: not any(map(is_there, left)), 180)


def test_reading_ends_where_it_is_asked_to(path: Path) -> None:
    stop = threading.Event()
    stop.set()
    assert not read(path, stop).complete


def test_shares_are_about_equal() -> None:
    assert folding._shares({0: 5, 1: 1, 2: 3, 3: 1}, 2) == [[0], [2, 1, 3]]
    assert folding._shares({0: 5}, 2) == [[0]]
    assert folding._shares({0: 0, 1: 0, 2: 0}, 2) == [[0, 2], [1]]


def test_what_is_handed_over_is_shown_meanwhile(path: Path) -> None:
    from kafka_marshal.ui.kept import pack
    from tests.ui.test_kept import folded, of_story

    log = of_story()
    halves = list(range(log.partitions))[::2], list(range(log.partitions))[1::2]
    sent = (
        *((folding.HISTORY, 0, 10), (folding.HISTORY, 0, 20), (folding.HISTORY, 1, 10), (folding.HISTORY, 1, 20)),
        *((folding.DONE, 0, None), (folding.HISTORY, 1, 30), (folding.DONE, 1, None)),
    )
    answers_ = [(number, kind, pack(folded(log, upto, cps=halves[number]))) for kind, number, upto in sent]
    *shown, (last, found) = folding._collect(2, answers_)
    assert [kind for kind, _ in shown] == 3 * [folding.HISTORY]
    sizes = [sum(world.next_offset for world in history.worlds.values()) for _, history in shown]
    assert sizes == sorted(sizes)
    assert last == folding.DONE
    assert answers(found) == answers(folded(log))


def test_a_process_that_ends_before_its_share_is_folded_is_noticed() -> None:
    with pytest.raises(folding.ProcessLostError, match=r"ended \(status -9\)"):
        list(folding._collect(1, [(0, folding.PROGRESS, (1, 2)), (0, folding._ENDED, "status -9")]))
