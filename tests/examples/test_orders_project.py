"""The project of worker processes: its files fit together, and it works on a broker as its command says."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from confluent_kafka import Producer

from kafka_marshal.client.handling import DRAIN_TIMEOUT_S
from kafka_marshal.runner.parent import GOODBYE_S
from kafka_marshal.testing.layout import free_ports
from tests.client.conftest import Scene, wait_until
from tests.client.conftest import scene as scene

PROJECT = Path(__file__).parents[2] / "examples" / "orders_project"
SOURCE = (PROJECT / "orders.py").read_text(encoding="utf-8")
#: The command of the image.
COMMAND: list[str] = yaml.safe_load(re.findall(r"^CMD (.*)$", (PROJECT / "Dockerfile").read_text(), re.MULTILINE)[0])


def test_the_files_fit_together() -> None:
    manifest = yaml.safe_load((PROJECT / "k8s.yaml").read_text())
    kubernetes_validate.validate(manifest, kubernetes_validate.latest_version(), strict=True)
    pod = manifest["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    services = yaml.safe_load((PROJECT / "compose.yaml").read_text())["services"]
    asked = set(re.findall(r'environ\.get\("(\w+)"', SOURCE))
    assert {each["name"] for each in container["env"]} == asked
    assert set(services["orders"]["environment"]) <= asked
    port = int(re.findall(r"port=(\d+)", SOURCE)[0])
    assert container["ports"] == [{"name": "metrics", "containerPort": port}]
    assert services["kafka"]["ports"] == [f"{port}:{port}"]
    patience = {pod["terminationGracePeriodSeconds"], int(services["orders"]["stop_grace_period"].rstrip("s"))}
    assert min(patience) > DRAIN_TIMEOUT_S + GOODBYE_S
    assert services["init"]["command"] == ["kafka-marshal", "init"]
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    assert project["dependencies"] == ["kafka-marshal[cli,prometheus]"]
    assert ["kafka-marshal", "work", "--app", f"{PROJECT.joinpath('orders.py').stem}:worker"] == COMMAND


@pytest.fixture
def run(scene: Scene, tmp_path: Path) -> Iterator[Any]:
    """Runs the image's command with further arguments, on topics and a port of this test's own."""
    started: list[subprocess.Popen[bytes]] = []

    def one(*more: str) -> tuple[subprocess.Popen[bytes], Path]:
        log = tmp_path / f"log-{len(started)}"
        own = ["--topic", scene.coordination, "--group", scene.group, "--name", "w", *more]
        environment = {**os.environ, "KAFKA_MARSHAL_BOOTSTRAP": scene.bootstrap}
        with log.open("wb") as out:
            argv = [sys.executable, "-m", *COMMAND, *own]
            argv[2] = "kafka_marshal"
            started.append(subprocess.Popen(argv, cwd=PROJECT, env=environment, stdout=out, stderr=out))
        return started[-1], log

    yield one
    for process in started:
        process.kill()
        process.wait()


@pytest.mark.broker
def test_its_check_names_what_is_missing(run: Any) -> None:
    process, log = run("--topics", "absent", "--check")
    assert process.wait(60) == 1
    assert "'absent'" in log.read_text()
    assert "orders:handle" not in log.read_text(), "it can be imported"


@pytest.mark.broker
def test_it_handles_orders_and_ends_in_good_order(scene: Scene, run: Any) -> None:
    topic, (port,) = scene.topic(4), free_ports(1)
    producer = Producer({"bootstrap.servers": scene.bootstrap})
    for number in range(20):
        producer.produce(topic, b"%d" % (100 * number), b"customer %d" % (number % 5))
    assert producer.flush(30) == 0
    process, log = run("--topics", topic, "--port", str(port))
    wait_until(lambda: process.poll() is not None or len(re.findall(r"customer \d owes", log.read_text())) >= 20)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0, log.read_text()
    found = re.findall(r"customer (\d) owes (\d+\.\d\d)", log.read_text())  # threads print into one line at times
    assert sorted(found) == sorted((str(x % 5), f"{x:.2f}") for x in range(20)), shlex.join(COMMAND)
    by_customer = [[float(cents) for who, cents in found if who == str(x)] for x in range(5)]
    assert by_customer == [sorted(each) for each in by_customer], "each customer's in order"
