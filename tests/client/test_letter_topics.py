"""Topics unsuitable for dead letters are rejected, or warned of, before a handler is called."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from kafka_marshal import ConfigurationError, Marshal
from kafka_marshal.adapters.memory import MemoryCluster
from kafka_marshal.errors import AuthorizationError
from tests.faults.stories import TOPIC, member, memory_cluster

SOURCE = {"max.message.bytes": "5000", "retention.ms": "604800000"}


@pytest.fixture
def cluster() -> MemoryCluster:
    made = memory_cluster(1, 3)
    made.broker.existing[TOPIC].settings = SOURCE
    return made


@pytest.fixture
def marshal(cluster: MemoryCluster) -> Iterator[Marshal]:
    with member(cluster) as made:
        yield made


def run(marshal: Marshal, dead_letters: str) -> list[str]:
    """The handled messages."""
    handled: list[str] = []

    def handle(message: Any) -> None:
        handled.append(message.offset())
        if len(handled) == 3:
            marshal.stop()

    with marshal.consumer([TOPIC]) as consumer:
        consumer.run(handle, concurrency=1, dead_letters=dead_letters)
    return handled


@pytest.mark.parametrize("policy", ["compact", "compact,delete"])
def test_a_compacted_topic_is_refused(cluster: MemoryCluster, marshal: Marshal, policy: str) -> None:
    cluster.broker.create_topic("dead", settings={"cleanup.policy": policy})
    with pytest.raises(ConfigurationError, match=r"'dead' is compacted.*Nothing was handed out.*cleanup.policy=delete"):
        run(marshal, "dead")


def test_the_topics_of_the_library_itself_are_refused(marshal: Marshal) -> None:
    for name in (marshal.topic, f"{marshal.topic}_snapshots"):
        with pytest.raises(ConfigurationError, match="is a topic of kafka-marshal itself"):
            run(marshal, name)


def test_where_writing_is_forbidden_it_is_refused(
    cluster: MemoryCluster, marshal: Marshal, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.broker.create_topic("dead")
    monkeypatch.setattr(marshal._driver.cluster, "operations", lambda topic, timeout_s: frozenset({"READ", "DESCRIBE"}))
    with pytest.raises(AuthorizationError, match=r"forbids writing to it.*Nothing was handed out.*--operation Write"):
        run(marshal, "dead")


@pytest.mark.parametrize(
    ("settings", "level", "says"),
    [
        ({"max.message.bytes": "4000"}, "WARNING", "5000 bytes, dead for dead letters of up to 4000"),
        ({"max.message.bytes": "5000"}, "INFO", "--add-config max.message.bytes=13192"),
        ({"max.message.bytes": "13192"}, "", ""),
        ({"max.message.bytes": "13192", "retention.ms": "3600000"}, "WARNING", "removed from dead after 1.0 h"),
        ({"max.message.bytes": "13192", "retention.ms": "-1"}, "", ""),
        ({"max.message.bytes": "13192", "retention.ms": "604800000"}, "", ""),
    ],
)  # fmt: skip
def test_what_will_not_fit_or_not_stay_is_warned_of(
    cluster: MemoryCluster, marshal: Marshal, caplog: pytest.LogCaptureFixture, settings: Any, level: str, says: str
) -> None:
    caplog.set_level(logging.INFO, "kafka_marshal")
    cluster.broker.create_topic("dead", settings=settings)
    assert len(run(marshal, "dead")) == 3
    found = [x for x in caplog.records if getattr(x, "event", "").startswith("dead_letters_")]
    assert [x.levelname for x in found] == ([level] if level else [])
    assert all(says in x.getMessage() for x in found)


def test_who_may_not_ask_for_settings_works_all_the_same(
    cluster: MemoryCluster, marshal: Marshal, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "kafka_marshal")
    cluster.broker.create_topic("dead", settings={"cleanup.policy": "compact"})

    def refuse(name: str, timeout_s: float) -> None:
        raise AuthorizationError("It needs the right DESCRIBE_CONFIGS")

    monkeypatch.setattr(marshal._driver.cluster, "topic_config", refuse)
    assert len(run(marshal, "dead")) == 3
    (line,) = [x.getMessage() for x in caplog.records if getattr(x, "event", "") == "dead_letters_unchecked"]
    assert "DESCRIBE_CONFIGS" in line


def test_a_letter_too_large_goes_without_its_traceback(cluster: MemoryCluster, marshal: Marshal) -> None:
    """A long traceback must not keep a message from becoming a dead letter."""
    cluster.broker.create_topic("dead", settings={"max.message.bytes": "400"})
    tried = threading.Event()

    def handle(message: Any) -> None:
        tried.set()
        raise ValueError("no")

    with marshal.consumer([TOPIC]) as consumer:
        running = threading.Thread(target=lambda: consumer.run(handle, retry=None, dead_letters="dead"))
        running.start()
        assert tried.wait(20)
        while running.is_alive() and len(cluster.broker.existing["dead"].partitions[0].messages) < 3:
            running.join(0.01)
        marshal.stop()
        running.join(20)
    letters = cluster.broker.existing["dead"].partitions[0].messages
    assert len(letters) == 3
    assert all("__dlq.errors.exception.stacktrace" not in dict(x.headers() or ()) for x in letters)
