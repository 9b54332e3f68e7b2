"""pytest plugin: Kafka for tests, real or in memory, installed and enabled with the package.

Nothing is started before a test uses it, and one broker serves the whole session. As tests create and delete topics,
they use a running Kafka only if ``KAFKA_MARSHAL_TEST_BOOTSTRAP`` names it, and print it at their start.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple, Protocol

from kafka_marshal.arguments import a_whole
from kafka_marshal.errors import needs

try:
    import pytest
except ModuleNotFoundError:
    needs("test", "pytest")
    raise

if TYPE_CHECKING:
    from kafka_marshal.testing.memory import MemoryKafka
    from kafka_marshal.testing.select_broker import RunningKafka

__all__ = [
    "CoordinationTopic",
    "TopicFactory",
    "coordination_topic",
    "kafka_bootstrap",
    "kafka_broker",
    "kafka_cluster3",
    "memory_marshal",
    "topic_factory",
]


class CoordinationTopic(NamedTuple):
    """The value of the fixture ``coordination_topic``: ``Marshal(bootstrap, topic=name, group_id=…)``."""

    #: Name of the topic; its snapshots topic exists, too.
    name: str
    #: bootstrap.servers of its Kafka.
    bootstrap: str


def pytest_report_header() -> str | None:
    """Name the external Kafka on which tests create and delete topics."""
    named, operators = os.environ.get("KAFKA_MARSHAL_TEST_BOOTSTRAP"), os.environ.get("KAFKA_MARSHAL_BOOTSTRAP")
    if named:
        return f"kafka-marshal: tests create and delete topics on {named} (KAFKA_MARSHAL_TEST_BOOTSTRAP)"
    if operators:
        return (
            f"kafka-marshal: tests start their own broker and leave {operators} alone (KAFKA_MARSHAL_BOOTSTRAP; "
            "to test on a running Kafka, set KAFKA_MARSHAL_TEST_BOOTSTRAP)"
        )
    return None


class TopicFactory(Protocol):
    """The value of the fixture ``topic_factory``."""

    def __call__(
        self,
        partitions: int = 1,
        *,
        prefix: str = "test",
        settings: Mapping[str, str] | None = None,
        kafka: RunningKafka | None = None,
    ) -> str:
        """Create a topic with a unique name and return the name.

        Args:
            partitions: their number.
            prefix: of the name.
            settings: topic settings, names and values as in Kafka.
            kafka: the cluster (default: the session's ``kafka_broker``), such as the fixture ``kafka_cluster3``.
        """


@pytest.fixture(scope="session")
def kafka_broker() -> Iterator[RunningKafka]:
    """A Kafka of one broker for the whole session (see :mod:`kafka_marshal.testing.select_broker`)."""
    from kafka_marshal.testing.select_broker import open_kafka

    kafka = open_kafka(1)
    yield kafka
    kafka.stop()


@pytest.fixture(scope="session")
def kafka_bootstrap(kafka_broker: RunningKafka) -> str:
    """bootstrap.servers of ``kafka_broker``."""
    return kafka_broker.bootstrap_servers


@pytest.fixture(scope="module")
def kafka_cluster3() -> Iterator[RunningKafka]:
    """Three local brokers that may be killed and paused, for the tests of one module.

    Restart what you kill: the module's other tests need three. (Not for the whole session, as three brokers use a
    gigabyte of memory.)
    """
    from kafka_marshal.testing.select_broker import open_kafka

    kafka = open_kafka(3, controllable=True)
    yield kafka
    kafka.stop()


@pytest.fixture
def topic_factory(request: pytest.FixtureRequest) -> Iterator[TopicFactory]:
    """Creates topics, and deletes them after the test."""
    from kafka_marshal.adapters.probe import Probe

    probes: dict[str, Probe] = {}
    made: dict[str, list[str]] = {}
    numbers = itertools.count(1)
    test = re.sub(r"[^A-Za-z0-9._-]+", "-", request.node.name)[:80].strip("-")

    def create(
        partitions: int = 1,
        *,
        prefix: str = "test",
        settings: Mapping[str, str] | None = None,
        kafka: RunningKafka | None = None,
    ) -> str:
        partitions = a_whole("partitions", partitions, 1)
        where: RunningKafka = kafka if kafka is not None else request.getfixturevalue("kafka_broker")
        address = where.bootstrap_servers
        if address not in probes:
            probes[address] = Probe(address, where.client_config)
        # Random, as a Kafka that outlives the session may have topics of the last one.
        name = f"{prefix}-{test}-{next(numbers)}-{os.urandom(3).hex()}"
        probes[address].create_topic(name, partitions, min(3, len(where.broker_ids)), settings or {})
        made.setdefault(address, []).append(name)
        return name

    yield create
    for address, names in made.items():
        probes[address].delete_topics(names)


@pytest.fixture
def coordination_topic(kafka_broker: RunningKafka) -> Iterator[CoordinationTopic]:
    """A coordination topic for this test, as ``kafka-marshal init`` creates it; deleted after the test."""
    from kafka_marshal.adapters.probe import Probe
    from kafka_marshal.admin import Admin
    from kafka_marshal.topic_names import snapshots_topic

    topic = CoordinationTopic(f"__marshal-test-{os.urandom(4).hex()}", kafka_broker.bootstrap_servers)
    try:
        Admin(topic.bootstrap, topic=topic.name, config=kafka_broker.client_config).init()
        yield topic
    finally:
        probe = Probe(topic.bootstrap, kafka_broker.client_config)
        probe.delete_topics([topic.name, snapshots_topic(topic.name)])


@pytest.fixture
def memory_marshal() -> Iterator[MemoryKafka]:
    """A Kafka in memory, and workers on it that are killed and paused at will: no Java, no Docker, milliseconds."""
    from kafka_marshal.testing.memory import MemoryKafka

    kafka = MemoryKafka()
    try:
        yield kafka
    finally:
        kafka.end()
