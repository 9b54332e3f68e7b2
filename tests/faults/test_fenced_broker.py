"""What librdkafka makes of an answer that knows the new leader of one partition only (its issue 5280)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka import Producer

from kafka_marshal.adapters.kafka.settings import _FORGETS_TOPICS, Role, properties
from kafka_marshal.adapters.probe import Probe
from kafka_marshal.testing import LocalBroker
from tests.faults.fenced import FencedProxy

TOPIC, PARTITIONS = "fenced", 8
#: An unpacked wheel of another confluent-kafka to ask instead of the installed one.
OTHER = os.environ.get("FENCED_CLIENT", "")


@pytest.fixture(scope="module")
def proxied() -> Iterator[tuple[FencedProxy, LocalBroker]]:
    with FencedProxy() as proxy, LocalBroker(advertised_port=proxy.port) as broker:
        proxy.target_port = broker.port
        Probe(broker.bootstrap_servers).create_topic(TOPIC, PARTITIONS, 1, {})
        producer = Producer({"bootstrap.servers": broker.bootstrap_servers})
        for partition in range(PARTITIONS):
            producer.produce(TOPIC, b"x", partition=partition)
        assert producer.flush(30) == 0
        yield proxy, broker


def read(broker: LocalBroker, seconds: float, **config: object) -> subprocess.CompletedProcess[str]:
    """Read with a separate process, which may die."""
    program = [sys.executable, str(Path(__file__).with_name("fenced_client.py"))]
    about = [broker.bootstrap_servers, TOPIC, str(PARTITIONS), str(seconds), json.dumps(config)]
    environment = os.environ | ({"PYTHONPATH": OTHER} if OTHER else {})
    return subprocess.run(program + about, capture_output=True, text=True, env=environment, timeout=60)


def test_passes_on_all_but_fetches_of_a_fenced_broker(proxied: tuple[FencedProxy, LocalBroker]) -> None:
    proxy, broker = proxied
    proxy.fenced = False
    ended = read(broker, 3)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["read"] == PARTITIONS


def test_librdkafka_reads_memory_that_it_did_not_write(proxied: tuple[FencedProxy, LocalBroker]) -> None:
    """If this fails, it is mended: require that release, drop _FORGETS_TOPICS, and rewrite docs/reliability.md."""
    proxy, broker = proxied
    proxy.fenced = True
    ended = read(broker, 5)
    proxy.fenced = False
    assert ended.returncode == -signal.SIGSEGV or invented(ended), f"{ended.stdout} after {proxy.answered} answers"


def test_our_readers_take_up_next_to_none_of_these_answers(proxied: tuple[FencedProxy, LocalBroker]) -> None:
    proxy, broker = proxied
    before, proxy.fenced = proxy.answered, True
    ended = read(broker, 3, **_FORGETS_TOPICS)
    proxy.fenced = False
    taken_up, answered = len(invented(ended)) / (PARTITIONS - 1), proxy.answered - before
    assert answered > 10
    assert taken_up < answered / 4, f"{taken_up:g} of {answered}"
    for role in (Role.TAIL, Role.DATA):
        assert properties(role, "b:1", {}).items() >= _FORGETS_TOPICS.items()


def invented(ended: subprocess.CompletedProcess[str]) -> list[str]:
    """Lines about what no answer says: they have only that broker 1 leads partition 0."""
    lines = [line for line in ended.stderr.splitlines() if "METADATAUPDATE" in line]
    return [line for line in lines if "Topic id" not in line]
