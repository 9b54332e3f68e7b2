"""The program of docs/locks.md on a real broker: its leader is stopped and killed, and an old token writes nothing."""

from __future__ import annotations

import re
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cli.harness import Command
from tests.client.conftest import HI, Scene, wait_until

pytestmark = pytest.mark.broker

PAGE = Path(__file__).parents[2] / "docs" / "locks.md"


class Process:
    """One run of the program."""

    def __init__(self, scene: Scene, client_id: str, folder: Path) -> None:
        (source,) = re.findall(r"^```python\n(# program: leader.py\n.*?)^```", PAGE.read_text(), re.M | re.S)
        settings = (
            f'"{scene.bootstrap}", group_id="{scene.group}", client_id="{client_id}", topic="{scene.coordination}", '
            f"heartbeat_interval={HI / 1000}"
        )
        source = source.replace('"localhost:9092", group_id="reports"', settings)
        assert settings in source
        self.out = folder / f"{client_id}.out"
        (folder / f"{client_id}.py").write_text(source)
        with self.out.open("wb") as out:
            command = [sys.executable, f"{client_id}.py"]
            self.process = subprocess.Popen(command, cwd=folder, stdout=out, stderr=out)

    def tokens(self, what: str) -> list[int]:
        """The tokens of its lines of this kind."""
        return [int(number) for number in re.findall(rf"^{what} (?:with token )?(\d+)", self.out.read_text(), re.M)]

    def await_line(self, what: str) -> int:
        return int(wait_until(lambda: self.tokens(what), 60, f"{what}: {self.out.read_text()}")[-1])


@pytest.fixture
def run(scene: Scene, tmp_path: Path) -> Iterator[Callable[[str], Process]]:
    started: list[Process] = []

    def start(client_id: str) -> Process:
        started.append(Process(scene, client_id, tmp_path))
        return started[-1]

    yield start
    for each in started:
        each.process.kill()
        each.process.wait()


def test_a_stopped_leader_is_replaced_and_its_token_is_refused(
    run: Callable[[str], Process],
    scene: Scene,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    a = run("a")
    first = a.await_line("handled")
    b = run("b")
    begun = len(a.tokens("working"))
    wait_until(lambda: len(a.tokens("working")) > begun)  # its write follows in half a second
    a.process.send_signal(signal.SIGSTOP)
    second = b.await_line("handled")
    assert second > first
    a.process.send_signal(signal.SIGCONT)
    assert a.await_line("refused:") == first
    with sqlite3.connect(tmp_path / "reports.db") as database:
        assert database.execute("SELECT token FROM reports").fetchone() == (second,)
    kafka = Command(capfd, monkeypatch)
    about = ("--bootstrap", scene.bootstrap, "--topic", scene.coordination)
    checked = kafka("check", "--group", scene.group, *about)
    assert checked.status == 0, checked
    shown = kafka("status", "--group", scene.group, *about)
    assert "lock:hourly" in shown.out
    assert "no such topic" not in shown.out
    assert str(second) in kafka("who", scene.group, "lock:hourly", 0, *about).out
    moved = kafka("release-group", scene.group, "--to", "earliest", "--dry-run", *about)
    assert "has no positions yet" in moved.err

    b.process.kill()
    third = wait_until(lambda: [token for token in a.tokens("handled") if token > second], 60)[0]
    assert third > second
    a.process.send_signal(signal.SIGTERM)
    assert a.process.wait(30) == 0, a.out.read_text()
    assert "Traceback" not in a.out.read_text()
