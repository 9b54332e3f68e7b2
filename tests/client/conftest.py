"""A coordination topic, data topics and members on the session's real broker."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewPartitions

from kafka_marshal import Consumer, Marshal
from kafka_marshal.adapters.kafka import KafkaCluster
from kafka_marshal.node.coordination_topic import create_topic

if TYPE_CHECKING:
    from tests.client.plant import Plant
    from tests.client.running import Crew

HI = 600


def wait_until(condition: Callable[[], Any], timeout_s: float = 60.0, what: str = "") -> Any:
    """Poll for a condition; fails after timeout_s."""
    until = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < until, f"not within {timeout_s} s: {what or condition}"
        time.sleep(0.01)
    return value


def written(out: Path) -> list[dict[str, Any]]:
    """The complete lines that programs have written there."""
    if not out.exists():
        return []
    return [json.loads(line) for line in out.read_text().split("\n")[:-1]]


class Worker:
    """A worker in a separate process; see worker.py. program: another one beside it."""

    def __init__(
        self, scene: Scene, client_id: str, topic: str, folder: Path, program: str = "worker.py", **options: object
    ) -> None:
        self.out = folder / f"{client_id}-{uuid.uuid4().hex[:6]}.jsonl"
        arguments = {
            "bootstrap": scene.bootstrap,
            "group": scene.group,
            "coordination": scene.coordination,
            "topic": topic,
            "client_id": client_id,
            "out": str(self.out),
            "hi": HI,
            **options,
        }
        command = [sys.executable, str(Path(__file__).with_name(program)), json.dumps(arguments)]
        paths = os.pathsep.join(filter(None, (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH"))))
        self.process = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": paths})

    def lines(self) -> list[dict[str, Any]]:
        """Its complete lines of output."""
        return written(self.out)

    def offsets(self, what: str = "handled") -> list[tuple[int, int]]:
        return [(line["partition"], line["offset"]) for line in self.lines() if line["what"] == what]

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def stop(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def terminate(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(20)


class Scene:
    """A new coordination topic, and everything made on it."""

    def __init__(self, bootstrap: str, new_topic: Callable[..., str]) -> None:
        self.bootstrap = bootstrap
        self.group = f"g-{uuid.uuid4().hex[:8]}"
        self.coordination = f"__marshal-{uuid.uuid4().hex[:8]}"
        self.cluster = KafkaCluster(bootstrap, {})
        create_topic(self.cluster, self.coordination, 3, 10)
        self.new_topic = new_topic
        self.members: list[Marshal] = []
        self.workers: list[Worker] = []

    def topic(self, partitions: int = 1, messages: int = 0, **settings: str) -> str:
        name = self.new_topic(partitions, settings=settings)
        self.publish(name, partitions, messages)
        return name

    def grow(self, topic: str, partitions: int) -> None:
        """Add partitions, up to ``partitions``."""
        admin = AdminClient({"bootstrap.servers": self.bootstrap})
        admin.create_partitions([NewPartitions(topic, partitions)])[topic].result(20)
        wait_until(lambda: self.cluster.topic_info([topic], 10)[topic].partitions == partitions)

    def publish(self, topic: str, partitions: int, messages: int) -> None:
        """Publish messages to each partition; the value is the message's number, from 0."""
        options = {"enable.idempotence": True, "linger.ms": 2, "queue.buffering.max.messages": 10_000_000}
        producer = Producer({"bootstrap.servers": self.bootstrap, **options})
        for number in range(messages):
            for partition in range(partitions):
                producer.produce(topic, str(number).encode(), partition=partition)
        assert producer.flush(20) == 0

    def member(self, client_id: str | None = None, **options: Any) -> Marshal:
        options = {"group_id": self.group, "topic": self.coordination, "heartbeat_interval": HI / 1000, **options}
        marshal = Marshal(self.bootstrap, client_id=client_id, **options)
        self.members.append(marshal)
        return marshal

    def worker(self, client_id: str, topic: str, folder: Path, **options: Any) -> Worker:
        worker = Worker(self, client_id, topic, folder, **options)
        self.workers.append(worker)
        return worker

    def close(self) -> None:
        for worker in self.workers:
            worker.process.kill()
            worker.process.wait()
        for member in self.members:
            member.terminate()
        self.cluster.close()


@pytest.fixture
def scene(kafka_bootstrap: str, topic_factory: Callable[..., str]) -> Iterator[Scene]:
    made = Scene(kafka_bootstrap, topic_factory)
    yield made
    made.close()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A test that is a coroutine function runs in an event loop, and hangs for 30 s at most."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    asyncio.run(asyncio.wait_for(pyfuncitem.obj(**arguments), 30))
    return True


@pytest.fixture
def crew(kafka_bootstrap: str, topic_factory: Callable[..., str]) -> Iterator[Crew]:
    from tests.client.running import Crew

    made = Crew(kafka_bootstrap, topic_factory)
    yield made
    made.close()


@pytest.fixture
def plant() -> Iterator[Plant]:
    from tests.client.plant import Plant

    made = Plant()
    yield made
    made.close()


def take(consumer: Consumer, count: int, timeout_s: float = 60.0) -> list[tuple[int, int]]:
    """Poll count messages and mark them as done; returns (partition, offset) of each."""
    found: list[tuple[int, int]] = []
    until = time.monotonic() + timeout_s
    while len(found) < count:
        message = consumer.poll(0.5)
        if message is not None:
            consumer.done(message)
            found.append((message.partition() or 0, message.offset() or 0))
        assert time.monotonic() < until, f"{len(found)} of {count} messages within {timeout_s} s"
    return found
