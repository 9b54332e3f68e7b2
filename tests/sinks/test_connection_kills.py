"""Workers on a real broker that write on their own connections, and die at any step: each row once."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kafka_marshal.errors import LeaseLostError
from tests.broker.helpers import REPOSITORY
from tests.client.conftest import Scene
from tests.sinks.programs import Program
from tests.sinks.test_connections import opened

pytestmark = pytest.mark.broker

PARTITIONS = 3


@pytest.fixture
def scene(kafka_bootstrap: str, topic_factory: Callable[..., str]) -> Iterator[Scene]:
    made = Scene(kafka_bootstrap, topic_factory)
    yield made
    made.close()


class Workers:
    """Processes with names that stay, started again when they die."""

    def __init__(self, scene: Scene, topic: str, program: Program, form: str, seed: int, dies: float) -> None:
        self.about = {
            "bootstrap": scene.bootstrap,
            "group": scene.group,
            "coordination": scene.coordination,
            "topic": topic,
            "program": program.name,
            "where": program.where,
            "form": form,
            "dies": dies,
        }
        self.draw = random.Random(seed)
        self.deaths = 0
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str) -> None:
        about = {**self.about, "client_id": name, "seed": self.draw.random()}
        command = [sys.executable, "-m", "tests.sinks.connection_writer", json.dumps(about)]
        paths = os.pathsep.join(filter(None, ("marshal", ".", os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, "PYTHONPATH": paths}
        self.running[name] = subprocess.Popen(command, cwd=REPOSITORY, env=environment)

    def tend(self) -> None:
        """Start those again that have died by a kill; no other end is expected."""
        for name, process in self.running.items():
            status = process.poll()
            if status is not None:
                assert status == -signal.SIGKILL, (name, status)
                self.deaths += 1
                self.about["dies"] = 0.0 if self.deaths > 3 else self.about["dies"]
                self.start(name)
                return

    def end(self) -> None:
        for process in self.running.values():
            process.kill()
            process.wait()


def run(
    scene: Scene, program: Program, form: str, messages: int, seed: int, dies: float, stops: bool = False
) -> tuple[int, Counter[tuple[int, int]]]:
    """Deaths, and how often each (partition, offset) is there."""
    topic = scene.topic(PARTITIONS, messages)
    workers = Workers(scene, topic, program, form, seed, dies)
    until, had = 0.0, -1
    try:
        for name in ("a", "b"):
            workers.start(name)
        while (there := len(program.rows())) < messages * PARTITIONS:
            if there > had:  # a slow machine may take long, but each minute something is written
                until, had = time.monotonic() + 60, there
            assert time.monotonic() < until, (there, workers.deaths)
            workers.tend()
            if stops and workers.draw.random() < 0.02:
                stopped = workers.running[workers.draw.choice("ab")]
                stopped.send_signal(signal.SIGSTOP)
                time.sleep(2.5)  # its leases end
                stopped.send_signal(signal.SIGCONT)
            time.sleep(0.05)
        # What was written and not acknowledged comes again: another member finds it there, and writes what is new.
        workers.end()
        scene.publish(topic, PARTITIONS, 1)
        left = PARTITIONS
        with scene.member("c").consumer([topic]) as last:
            for batch in last.batches(max_messages=50, timeout=0.05):
                try:
                    new = program.write(batch, "c")
                except LeaseLostError:  # a busy machine: its heartbeats were late; it comes again
                    continue
                batch.done()
                assert new in ([], [messages]), new
                left -= len(new)
                if not left:
                    break
    finally:
        workers.end()
    return workers.deaths, Counter((place, at) for place, at, _ in program.rows())


def check(found: Counter[tuple[int, int]], messages: int) -> None:
    assert found == Counter((place, at) for place in range(PARTITIONS) for at in range(messages + 1))


@pytest.mark.flaky(reruns=0)
@pytest.mark.parametrize(
    ("name", "form"), [("psycopg", "batches"), ("sqlalchemy-mysql", "handlers"), ("session-async", "coroutines")]
)
def test_each_row_is_written_once(
    name: str, form: str, scene: Scene, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    seed = random.SystemRandom().randrange(1_000_000)
    deaths, found = run(scene, opened(name, request, tmp_path), form, 60, seed, 0.5 if form == "batches" else 0.03)
    check(found, 60)
    assert deaths > 0, seed


@pytest.mark.campaign
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("form", ["batches", "handlers"])
@pytest.mark.parametrize("name", ["psycopg-plain", "sqlalchemy-postgres", "django-postgres", "pymysql", "sqlite3"])
def test_each_row_is_written_once_whoever_is_killed_or_stopped(
    name: str, form: str, seed: int, scene: Scene, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    messages = 1_000 if form == "batches" else 100  # these have a transaction and a connection each
    _, found = run(scene, opened(name, request, tmp_path), form, messages, seed, 0.01, stops=True)
    check(found, messages)
