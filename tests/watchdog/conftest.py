"""Workers with watchdogs in separate processes, and their records in the log."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kafka_marshal import Marshal
from rationalizer import Outcome, ReleasingPartition
from tests.client.conftest import Scene, scene, wait_until

__all__ = ["scene"]

#: Long: a worker replaced sooner than this was released by its watchdog.
LONG_HI = 10_000

#: Short: 2 · HI pass quickly.
SHORT_HI = 400


def is_running(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


class Worker:
    """worker.py in a separate process, and its watchdog."""

    def __init__(self, **arguments: object) -> None:
        environment = {**os.environ, "DATABASE_PASSWORD": "not-for-the-watchdog"}
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("worker.py")), json.dumps(arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,
        )
        self.log: list[str] = []
        self.handled: list[tuple[int, int]] = []
        self.errors: list[str] = []
        self.children: list[int] = []
        self.watchdogs: list[int] = []
        self._answers: queue.Queue[Any] = queue.Queue()
        self._readers = [
            threading.Thread(target=self._read, daemon=True),
            threading.Thread(target=self._read_errors, daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            said = json.loads(line)
            if "log" in said:
                self.log.append(said["log"])
            elif "handled" in said:
                self.handled.append(tuple(said["handled"]))
            else:
                self._answers.put(said["done"])

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.errors.append(line)

    def order(self, what: str, value: object = None) -> None:
        """Send a command that does not return."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([what, value]) + "\n")
        self.process.stdin.flush()

    def do(self, what: str, value: object = None) -> Any:
        """Send a command; returns its answer."""
        self.order(what, value)
        return self._answers.get(timeout=30)

    def ready_watchdog(self, other_than: int | None = None) -> int:
        """The watchdog's process id, once it is ready."""

        def look() -> int | None:
            found = self.do("look")
            return found["pid"] if found["ready"] and found["pid"] != other_than else None

        pid: int = wait_until(look, 90, "the watchdog is ready")
        self.watchdogs.append(pid)
        return pid

    def fork(self, *program: str) -> int:
        child: int = self.do("fork", program)
        self.children.append(child)
        return child

    def spawn(self, *program: str) -> int:
        child: int = self.do("spawn", program)
        self.children.append(child)
        return child

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def clean_up(self) -> None:
        """Kill everything that it started."""
        self.kill()
        for pid in (*self.children, *self.watchdogs):
            if is_running(pid):
                os.kill(pid, signal.SIGKILL)
        for reader in self._readers:
            reader.join(20)
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()


@dataclass(frozen=True, slots=True)
class Release:
    """A ReleasingPartition in the log, and its outcome."""

    instance_id: str
    partition: int
    epoch: int
    last_offset: int | None
    code: str


class Watched:
    """A topic, an observing member, and workers."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.topic = scene.topic(4)
        self.watcher = scene.member("watcher")
        self.releases: list[Release] = []
        self.workers: list[Worker] = []
        self.watcher._driver.listeners.append(self._applied)

    def _applied(self, cp: int, offset: int, outcome: Outcome) -> None:
        record = outcome.record
        if isinstance(record, ReleasingPartition):
            self.releases.append(
                Release(record.instance_id, record.partition, record.epoch, record.last_offset, outcome.code)
            )

    def worker(self, client_id: str = "a", hi: int = LONG_HI, **options: object) -> Worker:
        ids = {"bootstrap": self.scene.bootstrap, "group": self.scene.group, "coordination": self.scene.coordination}
        worker = Worker(**ids, topic=self.topic, client_id=client_id, hi=hi, **options)
        self.workers.append(worker)
        return worker

    def holders(self) -> dict[int, str | None]:
        return {lease.partition: lease.client_id for lease in self.watcher.world.leases()}

    def instances(self) -> set[str | None]:
        return {lease.instance_id for lease in self.watcher.world.leases()}

    def taken_over(self, partition: int = 0) -> Marshal:
        """Let another member claim, which succeeds by the rules of the log alone."""
        other = self.scene.member("b", heartbeat_interval=SHORT_HI / 1000)
        assert other.claim(self.topic, partition, timeout=20).epoch >= 0
        return other


@pytest.fixture
def watched(scene: Scene) -> Iterator[Watched]:
    made = Watched(scene)
    yield made
    for worker in made.workers:
        worker.clean_up()
