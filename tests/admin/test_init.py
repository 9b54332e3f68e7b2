"""`Admin.init`, the Python form of `kafka-marshal init` (L1, L2, S2)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from uuid import uuid4

import pytest

from kafka_marshal import Admin, ConfigurationError
from kafka_marshal.adapters.kafka import KafkaCluster
from kafka_marshal.adapters.probe import Probe
from kafka_marshal.errors import TopicChangedError, TopicUnsafeError
from kafka_marshal.node.coordination_topic import required_settings
from kafka_marshal.topic_names import snapshots_topic
from rationalizer import encode
from rationalizer.levels import SUPPORTED_LEVEL
from rationalizer.marker import marker
from tests.client.conftest import wait_until

pytestmark = pytest.mark.broker


@pytest.fixture
def name(kafka_bootstrap: str) -> Iterator[str]:
    """A name for a coordination topic, which is deleted after the test."""
    topic = f"__marshal-init-{uuid4().hex[:8]}"
    yield topic
    Probe(kafka_bootstrap).delete_topics([topic, snapshots_topic(topic)])


@pytest.fixture
def make(kafka_bootstrap: str, name: str) -> Callable[..., None]:
    """Creates the topic without ``init``."""

    def create(partitions: int = 2, **settings: str) -> None:
        changed = required_settings(1) | {key.replace("_", "."): value for key, value in settings.items()}
        Probe(kafka_bootstrap).create_topic(name, partitions, 1, changed)

    return create


def test_it_creates_the_topic_once(kafka_bootstrap: str, name: str) -> None:
    admin = Admin(kafka_bootstrap, topic=name)
    report = admin.init(3)
    assert (report.topic, report.partitions, report.replication_factor) == (name, 3, 1)
    assert report.done[0].startswith(f"created {name!r}: 3 partitions")
    assert len(report.done) == 3
    assert report.warnings == ()
    cluster = KafkaCluster(kafka_bootstrap, {})
    try:
        assert set(cluster.watermarks([(name, cp) for cp in range(3)], 10).values()) == {(0, 2)}
        assert cluster.topic_config(snapshots_topic(name), 10) is not None
    finally:
        cluster.close()
    assert admin.upgrade() == [], "a new topic is at the newest level"
    assert admin.init().done == ()
    assert admin.init(3).done == ()
    with pytest.raises(ConfigurationError, match="has 3 partitions, not 4"):
        admin.init(4)


def test_it_continues_where_a_creation_stopped(kafka_bootstrap: str, name: str, make: Callable[..., None]) -> None:
    make(2)
    report = Admin(kafka_bootstrap, topic=name).init()
    assert [line.split()[0] for line in report.done] == ["appended", "created"]
    assert "partition(s) 0, 1" in report.done[0]


def test_a_topic_of_an_older_release_is_raised_when_it_is_asked_for(
    kafka_bootstrap: str, name: str, make: Callable[..., None]
) -> None:
    make(2)
    cluster = KafkaCluster(kafka_bootstrap, {})
    appender = cluster.appender(name, delivery_timeout_ms=10_000)
    for cp in range(2):
        appender.append(cp, encode(marker("init-1", 2)))
    assert appender.flush(10) == 0
    appender.close()
    cluster.close()
    admin = Admin(kafka_bootstrap, topic=name)
    assert f"partition(s) 0, 1 are below level {SUPPORTED_LEVEL}" in admin.init().warnings[0]
    assert admin.upgrade() == [0, 1]
    assert admin.init().warnings == ()


def test_a_topic_that_is_not_fit_is_refused(kafka_bootstrap: str, name: str, make: Callable[..., None]) -> None:
    make(1, message_timestamp_type="CreateTime")
    with pytest.raises(TopicUnsafeError, match=r"message\.timestamp\.type"):
        Admin(kafka_bootstrap, topic=name).init()


def test_partitions_that_were_added_are_noticed(kafka_bootstrap: str, name: str) -> None:
    from confluent_kafka.admin import AdminClient
    from confluent_kafka.cimpl import NewPartitions

    admin = Admin(kafka_bootstrap, topic=name)
    admin.init(2)
    client = AdminClient({"bootstrap.servers": kafka_bootstrap})
    client.create_partitions([NewPartitions(name, 3)])[name].result(10)
    cluster = KafkaCluster(kafka_bootstrap, {})
    try:
        wait_until(lambda: cluster.topic_info([name], 10)[name].partitions == 3)
    finally:
        cluster.close()
    with pytest.raises(TopicChangedError):
        admin.init()


@pytest.mark.parametrize("partitions", [0, -1, 10_001])
def test_a_number_that_can_not_be_meant(partitions: int) -> None:
    with pytest.raises(ConfigurationError, match="from 1 to 10000"):
        Admin("127.0.0.1:1").init(partitions)
