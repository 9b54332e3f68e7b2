"""A process stopped in its handlers until another has its partition: it has no effect when it continues."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from tests.client.conftest import HI, Worker, wait_until
from tests.client.running import KINDS, Crew, publish
from tests.client.test_group import SESSION


class Zombie(Worker):
    """See zombie.py."""

    def __init__(self, scene: Crew, topic: str, folder: Path, **options: object) -> None:
        self.out = folder / "zombie.jsonl"
        arguments = {
            "bootstrap": scene.bootstrap,
            "group": scene.group,
            "coordination": scene.coordination,
            "topic": topic,
            "client_id": "zombie",
            "out": str(self.out),
            "hi": HI,
            "session": SESSION if scene.kind == "group" else 0,
            **options,
        }
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("zombie.py")), json.dumps(arguments)]
        )


@pytest.mark.parametrize("act", ["fail", "write"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_a_stopped_process_makes_of_its_messages_has_no_effect(
    crew: Crew, tmp_path: Path, kind: str, act: str
) -> None:
    crew.kind = kind
    topic, dead, database = crew.topic(1), crew.topic(1), tmp_path / "rows.db"
    with sqlite3.connect(database) as rows:
        rows.execute("CREATE TABLE lines (offset)")
    count = 4 if act == "fail" else 1
    publish(crew, topic, [f"k{x}" for x in range(count)])
    options = {"act": act, "dead": dead, "database": str(database), "concurrency": count, "attempts": 1}
    zombie = Zombie(crew, topic, tmp_path, **options)
    crew.workers.append(zombie)
    wait_until(lambda: len(zombie.offsets("begin")) == count, 180)
    zombie.stop()
    _, consumer = crew.consumer("other", topic)
    for _ in range(count):
        message = consumer.poll(30.0)
        assert message is not None
        consumer.done(message)
    zombie.out.with_suffix(".go").touch()
    zombie.go_on()
    wait_until(lambda: len([line for line in zombie.lines() if line["what"] != "begin"]) == count, 60)
    assert {line["what"] for line in zombie.lines()} == {"begin", "lost False"}
    assert crew.cluster.watermarks([(dead, 0)], 10)[dead, 0] == (0, 0)
    with sqlite3.connect(database) as rows:
        assert rows.execute("SELECT * FROM lines").fetchall() == []
    assert zombie.process.poll() is None, "its run goes on"
