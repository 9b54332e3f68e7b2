"""Topics and members on the session's real broker, for code that may hang: nothing waits for it for ever."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from kafka_marshal.testing import LocalBroker
from tests.cli.conftest import command, environment
from tests.client.conftest import Scene
from tests.interrupts import StuckError, run_within
from tests.secured import certified, key_store

__all__ = ["Program", "command", "environment", "real_life", "scene"]


class Careful(Scene):
    """A scene whose end does not wait for hanging members."""

    def close(self) -> None:
        for member in self.members:
            with suppress(StuckError):
                run_within(5, member.terminate)
        self.cluster.close()


@pytest.fixture
def scene(kafka_bootstrap: str, topic_factory: Callable[..., str]) -> Iterator[Careful]:
    made = Careful(kafka_bootstrap, topic_factory)
    yield made
    made.close()


class Program:
    """A user's program (programs.py) in a separate process, which must end by itself in time."""

    def __init__(self, scene: Scene, name: str, topic: str, **options: object) -> None:
        self.topic = topic
        arguments = {
            "bootstrap": scene.bootstrap,
            "group": scene.group,
            "coordination": scene.coordination,
            "topic": topic,
            **options,
        }
        command = [sys.executable, str(Path(__file__).with_name("programs.py")), name, json.dumps(arguments)]
        paths = os.pathsep.join(filter(None, (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH"))))
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": paths}
        )

    def await_line(self, wanted: str) -> None:
        """Read its output up to a line."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.strip() == wanted:
                return
        raise AssertionError(f"the program ended without {wanted!r}: {self.process.communicate()[1]}")

    def end(self, within_s: float) -> tuple[int, str, str]:
        """Its exit status and output; killed, and a failure, after ``within_s``."""
        try:
            out, err = self.process.communicate(timeout=within_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            out, err = self.process.communicate()
            raise AssertionError(f"the program has not ended after {within_s:g} s; it wrote: {out}{err}") from None
        return self.process.returncode, out, err

    def result(self, within_s: float) -> dict[str, Any]:
        """Its last line of output, as JSON."""
        status, out, err = self.end(within_s)
        assert status == 0, f"exit status {status}: {err}"
        found: dict[str, Any] = json.loads(out.splitlines()[-1])
        return found


REAL_LIFE = {
    "auto.create.topics.enable": "true",
    "num.partitions": "1",
    # With one broker this topic can't be created, so no consumer group gets a coordinator.
    "offsets.topic.replication.factor": "3",
    "offsets.topic.num.partitions": "50",
    "message.max.bytes": "100000",
    "listener.security.protocol.map": "CLIENT:SSL,INTERNAL:PLAINTEXT,CONTROLLER:PLAINTEXT",
}


@pytest.fixture(scope="module")
def real_life(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalBroker]:
    store, ca = certified(tmp_path_factory.mktemp("tls"))
    login = {"security.protocol": "SSL", "ssl.ca.location": str(ca)}
    with LocalBroker(properties={**REAL_LIFE, **key_store(store)}, client_config=login) as broker:
        yield broker
