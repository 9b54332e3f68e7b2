"""Spark programs in separate processes, which copy one topic into one database."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from tests.client.conftest import Scene


class Places:
    """The process that wrote each message; a message written twice is counted twice."""

    def __init__(self, scene: Scene, topic: str, folder: Path) -> None:
        self.scene, self.topic = scene, topic
        self.database = folder / "places.db"
        with sqlite3.connect(self.database) as connection:
            connection.execute("CREATE TABLE places (partition INTEGER, offset INTEGER, client TEXT)")  # no key

    def arguments(self, client_id: str, **more: object) -> dict[str, object]:
        """Arguments of claimer.py and streamer.py."""
        return {
            "bootstrap": self.scene.bootstrap,
            "group": self.scene.group,
            "coordination": self.scene.coordination,
            "topic": self.topic,
            "client_id": client_id,
            "database": str(self.database),
            "hi": 1_000,
            **more,
        }

    def count(self) -> Counter[tuple[int, int]]:
        """How often each (partition, offset) was written."""
        with sqlite3.connect(self.database) as connection:
            return Counter(connection.execute("SELECT partition, offset FROM places").fetchall())

    def written_by(self, client_id: str) -> int:
        with sqlite3.connect(self.database) as connection:
            [[count]] = connection.execute("SELECT count(*) FROM places WHERE client = ?", (client_id,))
        return int(count)

    def check_all_once(self, messages: int | None = None) -> None:
        found = self.count()
        assert messages is None or len(found) == messages, "nothing is lost"
        assert set(found.values()) == {1}, "nothing is double"


def kill_groups(processes: Iterable[subprocess.Popen[bytes]]) -> None:
    """Kill -9 each with all its children, and wait until they are gone; each leads a process group."""
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
