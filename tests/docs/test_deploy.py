"""The files of docs/deploy for Kubernetes and systemd are valid and match the library; its worker ends cleanly."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from confluent_kafka import Consumer, Producer, TopicPartition

from kafka_marshal.cli.work import work
from kafka_marshal.client.closing import CLOSE_TIMEOUT_S
from kafka_marshal.client.handling import DRAIN_TIMEOUT_S
from kafka_marshal.runner.parent import GOODBYE_S
from kafka_marshal.testing.layout import free_ports
from kafka_marshal.testing.plugin import CoordinationTopic, TopicFactory
from tests.client.conftest import wait_until

DEPLOY = Path(__file__).parents[2] / "docs" / "deploy"
WORKER = DEPLOY / "worker.py"
UNIT = DEPLOY / "systemd" / "kafka-marshal-worker@.service"
PROBES = ("startupProbe", "livenessProbe", "readinessProbe")
#: Settings that the worker reads.
ASKED = set(re.findall(r'environ(?:\.get\(|\[)"(\w+)"', WORKER.read_text(encoding="utf-8")))
#: Kinds of KEDA, unknown to Kubernetes without KEDA.
FOREIGN = {"ScaledObject"}


def manifests() -> Iterator[dict[str, Any]]:
    for file in sorted((DEPLOY / "kubernetes").glob("*.yaml")):
        yield from yaml.safe_load_all(file.read_text(encoding="utf-8"))


def the(kind: str) -> dict[str, Any]:
    return next(each for each in manifests() if each["kind"] == kind)


@pytest.mark.parametrize("manifest", list(manifests()), ids=lambda each: f"{each['kind']}-{each['metadata']['name']}")
def test_kubernetes_takes_each_manifest(manifest: dict[str, Any]) -> None:
    if manifest["kind"] not in FOREIGN:
        kubernetes_validate.validate(manifest, kubernetes_validate.latest_version(), strict=True)


def test_the_pod_is_what_the_worker_needs() -> None:
    pod = the("StatefulSet")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    settings = the("ConfigMap")["data"]
    own = {each["name"]: each["valueFrom"]["fieldRef"]["fieldPath"] for each in container["env"]}
    assert own == {"CLIENT_ID": "metadata.name"}
    assert set(settings) | set(own) == ASKED - {"KAFKA_CONFIG"}
    assert container["ports"] == [{"name": "metrics", "containerPort": int(settings["METRICS_PORT"])}]
    assert pod["terminationGracePeriodSeconds"] > CLOSE_TIMEOUT_S
    assert "lifecycle" not in container  # SIGTERM is all: no preStop
    (port,) = the("Service")["spec"]["ports"]
    assert (port["port"], port["targetPort"]) == (int(settings["METRICS_PORT"]), "metrics")
    selectors = [the("Service")["spec"]["selector"], the("PodDisruptionBudget")["spec"]["selector"]["matchLabels"]]
    assert selectors == [the("StatefulSet")["spec"]["template"]["metadata"]["labels"]] * 2


def test_keda_reads_what_the_worker_commits() -> None:
    assert "mirror_offsets=True" in WORKER.read_text(encoding="utf-8")
    settings = the("ConfigMap")["data"]
    scalers = [each["spec"] for each in manifests() if each["kind"] == "ScaledObject"]
    assert {each["scaleTargetRef"]["kind"] for each in scalers} == {"StatefulSet"}
    assert {each["scaleTargetRef"]["name"] for each in scalers} == {the("StatefulSet")["metadata"]["name"]}
    triggers = {trigger["type"]: trigger for each in scalers for trigger in each["triggers"]}
    mirror, lag = triggers["kafka"], triggers["metrics-api"]
    assert mirror["metadata"]["consumerGroup"] == settings["GROUP"]
    assert mirror["metadata"]["topic"] == settings["TOPICS"]
    assert lag["metadata"]["url"] == f"http://delays:{settings['METRICS_PORT']}/lag"


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    text = UNIT.read_text(encoding="utf-8")
    set_here = set(re.findall(r"(\w+)=\S+", re.findall(r"^Environment=(.*)$", text, re.MULTILINE)[0]))
    in_file = set(re.findall(r"^(\w+)=", (DEPLOY / "systemd" / "worker.env").read_text(), re.MULTILINE))
    assert set_here | in_file == ASKED - {"KAFKA_CONFIG", "METRICS_HOST"}
    assert int(re.findall(r"TimeoutStopSec=(\d+)", text)[0]) > CLOSE_TIMEOUT_S
    assert complaints(UNIT, tmp_path) == []


def test_systemd_takes_the_unit_of_the_command(tmp_path: Path) -> None:
    unit = UNIT.with_name("kafka-marshal-work.service")
    text = unit.read_text(encoding="utf-8")
    given = set(re.findall(r"--[\w-]+", re.findall(r"^ExecStart=(.*)$", text, re.MULTILINE)[0]))
    assert given <= {name for parameter in work.params for name in parameter.opts}
    assert int(re.findall(r"TimeoutStopSec=(\d+)", text)[0]) > DRAIN_TIMEOUT_S + GOODBYE_S
    assert complaints(unit, tmp_path) == []


def complaints(unit: Path, folder: Path) -> list[str]:
    """Of systemd, about a unit."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not on PATH")
    copy = folder / unit.name
    text = unit.read_text(encoding="utf-8")  # what it runs has to be there
    copy.write_text(re.sub(r"/opt/kafka-marshal/bin/\S+", sys.executable, text).replace("/opt/kafka-marshal\n", "/\n"))
    one = copy.with_name(copy.name.replace("@", "@1"))
    if one != copy:
        one.symlink_to(copy)
    done = subprocess.run(["systemd-analyze", "verify", str(one)], capture_output=True, text=True, check=False)
    return [line for line in done.stderr.splitlines() if "kafka-marshal" in line]


@pytest.fixture
def start(coordination_topic: CoordinationTopic, tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    started = []
    program = tmp_path / "worker.py"
    program.write_text(WORKER.read_text().replace("group_id=", f'topic="{coordination_topic.name}", group_id=', 1))

    def run(name: str, topic: str, port: int) -> subprocess.Popen[bytes]:
        settings = {
            "KAFKA_MARSHAL_BOOTSTRAP": coordination_topic.bootstrap,
            "GROUP": f"group-of-{topic}",
            "TOPICS": topic,
            "CLIENT_ID": name,
            "METRICS_PORT": str(port),
        }
        with (tmp_path / name).open("ab") as out:
            started.append(subprocess.Popen([sys.executable, program], env={**os.environ, **settings}, stdout=out))
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.wait()


def answers(port: int, path: str) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as found:
            return bool(found.status == 200)
    except (urllib.error.URLError, ConnectionError):
        return False


@pytest.mark.broker
def test_the_worker_hands_over_at_sigterm(
    start: Callable[..., subprocess.Popen[bytes]],
    coordination_topic: CoordinationTopic,
    topic_factory: TopicFactory,
    tmp_path: Path,
) -> None:
    topic = topic_factory(2)
    producer = Producer({"bootstrap.servers": coordination_topic.bootstrap})

    def handled(name: str) -> list[str]:
        return (tmp_path / name).read_text().splitlines() if (tmp_path / name).exists() else []

    def produce(partitions: tuple[int, ...]) -> None:
        for partition in partitions:
            producer.produce(topic, b"x", partition=partition)
        assert producer.flush(10) == 0

    probes = {each: the("StatefulSet")["spec"]["template"]["spec"]["containers"][0][each] for each in PROBES}
    port, other = free_ports(2)
    first = start("delays-0", topic, port)
    for probe in probes.values():
        wait_until(lambda probe=probe: answers(port, probe["httpGet"]["path"]), 180)  # type: ignore[misc]
    produce((0, 1))
    wait_until(lambda: len(handled("delays-0")) == 2)
    second = start("delays-1", topic, other)
    wait_until(lambda: answers(other, "/readyz"), 180)
    first.send_signal(signal.SIGTERM)
    assert first.wait(30) == 0
    produce((0, 1))
    wait_until(lambda: len(handled("delays-1")) == 2)
    assert set(handled("delays-1")).isdisjoint(handled("delays-0"))  # nothing is repeated
    second.send_signal(signal.SIGTERM)
    assert second.wait(30) == 0
    mirror = Consumer({"bootstrap.servers": coordination_topic.bootstrap, "group.id": f"group-of-{topic}"})
    try:
        found = mirror.committed([TopicPartition(topic, 0), TopicPartition(topic, 1)], 20)
        assert [each.offset for each in found] == [2, 2]  # what KEDA reads
    finally:
        mirror.close()
