"""Helpers of the broker tests."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from confluent_kafka import Consumer, Message, Producer, TopicPartition

from kafka_marshal.testing import RunningKafka

REPOSITORY = Path(__file__).parents[2]


def eventually(met: Callable[[], object], timeout_s: float = 60.0, what: str = "it") -> None:
    """Wait for a condition instead of a fixed time."""
    until = time.monotonic() + timeout_s
    while not met():
        assert time.monotonic() < until, f"{what} did not happen within {timeout_s} s"
        time.sleep(0.01)


def alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def children_of(pid: int) -> list[int]:
    """Process ids of the children, of all threads."""
    found = []
    for thread in Path(f"/proc/{pid}/task").iterdir():
        found += [int(child) for child in Path(thread, "children").read_text().split()]
    return found


def produce(kafka: RunningKafka, topic: str, *values: bytes, timeout_s: float = 90.0) -> None:
    """Write values to partition 0, acknowledged by all."""
    producer = Producer({"bootstrap.servers": kafka.bootstrap_servers, "acks": "all", **kafka.client_config})
    errors: list[object] = []
    for value in values:
        producer.produce(topic, value, partition=0, on_delivery=lambda error, _message: errors.append(error))
    assert producer.flush(timeout_s) == 0
    assert errors == [None] * len(values)


def consume(kafka: RunningKafka, topic: str, count: int, timeout_s: float = 90.0) -> list[bytes | None]:
    """The first count values of partition 0."""
    consumer = Consumer(
        {
            "bootstrap.servers": kafka.bootstrap_servers,
            "group.id": "reader",
            "enable.auto.commit": False,
            **kafka.client_config,
        }
    )
    consumer.assign([TopicPartition(topic, 0, 0)])
    values: list[bytes | None] = []
    until = time.monotonic() + timeout_s
    try:
        while len(values) < count:
            assert time.monotonic() < until, f"only {len(values)} of {count} messages within {timeout_s} s"
            message: Message | None = consumer.poll(0.2)
            if message is not None and message.error() is None:
                value = message.value()
                assert value is None or isinstance(value, bytes)
                values.append(value)
    finally:
        consumer.close()
    return values


def run_python(program: str, **variables: str) -> subprocess.Popen[str]:
    """A Python program as a process; its standard output can be read."""
    return subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stdin=subprocess.PIPE,
        text=True,
        env={**os.environ, **variables},
    )
