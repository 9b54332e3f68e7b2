"""Members on an in-memory cluster, and their HTTP endpoints."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from prometheus_client.parser import text_string_to_metric_families as parse

from kafka_marshal import Marshal
from kafka_marshal.adapters.memory import MemoryCluster
from kafka_marshal.metrics import MetricsServer
from tests.client.conftest import HI, Scene
from tests.faults.stories import answer, member, memory_cluster

PARTITIONS = 2
MESSAGES = 50


class Page(NamedTuple):
    status: int
    headers: dict[str, str]
    text: str


def get(server: MetricsServer | str, path: str, method: str = "GET", **headers: str) -> Page:
    url = server if isinstance(server, str) else server.url
    request = urllib.request.Request(f"{url}{path}", method=method, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=10) as found:
            return Page(found.status, dict(found.headers), found.read().decode())
    except urllib.error.HTTPError as error:
        with error:
            return Page(error.code, dict(error.headers), error.read().decode())


@pytest.fixture
def cluster() -> MemoryCluster:
    return memory_cluster(PARTITIONS, MESSAGES)


@pytest.fixture
def marshal(cluster: MemoryCluster) -> Iterator[Marshal]:
    made = member(cluster)
    yield made
    answer("Marshal.close()", made.close)


@pytest.fixture
def scene(kafka_bootstrap: str, topic_factory: Callable[..., str]) -> Iterator[Scene]:
    made = Scene(kafka_bootstrap, topic_factory)
    yield made
    made.close()


class ServingWorker:
    """A worker in a separate process; see serving_worker.py."""

    def __init__(self, scene: Scene, topic: str, **options: Any) -> None:
        arguments = {
            "bootstrap": scene.bootstrap,
            "group": scene.group,
            "coordination": scene.coordination,
            "topic": topic,
            "client_id": "worker-1",
            "hi": HI,
            **options,
        }
        command = [sys.executable, str(Path(__file__).with_name("serving_worker.py")), json.dumps(arguments)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()
        assert self.url.startswith("http://127.0.0.1:")

    def order(self, what: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{what}\n")
        self.process.stdin.flush()

    def get(self, path: str) -> Page:
        return get(self.url, path)

    def values(self) -> dict[str, float]:
        """The sum of each series by its name, as Prometheus would read them."""
        found: dict[str, float] = {}
        for family in parse(self.get("/metrics").text):
            for sample in family.samples:
                found[sample.name] = found.get(sample.name, 0.0) + sample.value
        return found

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def serving(scene: Scene) -> Iterator[Callable[..., ServingWorker]]:
    made: list[ServingWorker] = []

    def start(topic: str, **options: Any) -> ServingWorker:
        made.append(ServingWorker(scene, topic, **options))
        return made[-1]

    yield start
    for worker in made:
        worker.close()
