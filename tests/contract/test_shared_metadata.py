"""Members of one process share their topic metadata (Q39), and with no other process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping

import pytest

from kafka_marshal.adapters.kafka import KafkaCluster
from kafka_marshal.adapters.kafka.questions import KEPT_S, Looks, looks_with
from kafka_marshal.errors import ClosedError
from kafka_marshal.ports import TopicInfo
from tests.contract.sides import TIMEOUT_S, KafkaSide

LONG_S = 600.0


Open = Callable[[Mapping[str, object]], KafkaCluster]


@pytest.fixture
def cluster(request: pytest.FixtureRequest) -> Iterator[Open]:
    """Opens clusters of the session's broker with different settings."""
    broker = request.getfixturevalue("kafka_broker")
    made: list[KafkaCluster] = []

    def opened(config: Mapping[str, object]) -> KafkaCluster:
        made.append(KafkaCluster(broker.bootstrap_servers, {**broker.client_config, **config}))
        return made[-1]

    yield opened
    for one in made:
        one.close()


@pytest.mark.broker
def test_a_look_of_one_does_for_another_that_allows_for_its_age(cluster: Open, kafka_side: KafkaSide) -> None:
    topic = kafka_side.topic(2)
    one, other, stranger = cluster({"client.id": "a"}), cluster({"client.id": "b"}), cluster({"client.rack": "r"})
    described = one.topic_info([topic], TIMEOUT_S)
    listed = one.topics(TIMEOUT_S)
    kafka_side.grow_topic(topic, 3)
    assert other.topic_info([topic], TIMEOUT_S, LONG_S) == described
    assert other.topics(TIMEOUT_S, LONG_S) == listed
    wait_for_growth(other, topic, 3)
    assert one.topic_info([topic], TIMEOUT_S, LONG_S)[topic].partitions == 3, "the newest look counts"
    assert one.topics(TIMEOUT_S, LONG_S)[topic].partitions == 3
    kafka_side.grow_topic(topic, 4)
    wait_for_growth(stranger, topic, 4)
    assert one.topic_info([topic], TIMEOUT_S, LONG_S)[topic].partitions == 3, "whose settings differ may see another"
    one.close()
    with pytest.raises(ClosedError):
        one.topics(TIMEOUT_S, LONG_S)


def wait_for_growth(asked: KafkaCluster, topic: str, partitions: int) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        described = asked.topic_info([topic], TIMEOUT_S)[topic].partitions
        listed = asked.topics(TIMEOUT_S)[topic].partitions
        if described == listed == partitions:
            return
        time.sleep(0.05)
    pytest.fail(f"{topic} did not grow: described with {described}, listed with {listed}")


def info(name: str, partitions: int = 1) -> TopicInfo:
    return TopicInfo(name, partitions, "id")


def test_what_is_too_old_or_unknown_is_not_reported() -> None:
    looks, now = Looks(), time.monotonic()
    looks.record_topics({"a": info("a")}, now - 5)
    looks.record_topic_info(["a", "gone"], {"a": info("a")}, now - 5)
    assert looks.topics(4) is None
    assert looks.topics(6) == {"a": info("a")}
    assert looks.topic_info(["a"], 4) is None
    assert looks.topic_info(["a", "gone"], 6) == {"a": info("a")}, "that there is none is known, too"
    assert looks.topic_info(["a", "b"], 6) is None
    assert Looks().topics(LONG_S) is None


def test_a_look_that_began_earlier_and_ended_later_does_not_count() -> None:
    looks, now = Looks(), time.monotonic()
    for partitions, asked_at in ((2, now - 1), (1, now - 2)):
        looks.record_topics({"a": info("a", partitions)}, asked_at)
        looks.record_topic_info(["a"], {"a": info("a", partitions)}, asked_at)
    assert looks.topics(6) == looks.topic_info(["a"], 6) == {"a": info("a", 2)}


def test_a_topic_that_is_gone_by_the_newest_look_is_gone() -> None:
    looks, now = Looks(), time.monotonic()
    looks.record_topic_info(["a"], {"a": info("a")}, now - 2)
    looks.record_topic_info(["a"], {}, now - 1)
    assert looks.topic_info(["a"], LONG_S) == {}


def test_topics_that_are_no_longer_used_are_forgotten() -> None:
    looks, now = Looks(), time.monotonic()
    looks.record_topic_info(["old"], {}, now - KEPT_S - 2)
    looks.record_topic_info(["new"], {}, now - 1)
    assert looks.topic_info(["new"], LONG_S) == {}
    assert looks.topic_info(["old"], LONG_S) is None


def test_metadata_is_shared_only_with_the_same_settings() -> None:
    ours = looks_with("a:1", {"sasl.username": "me", "client.id": "x"})
    assert looks_with("a:1", {"client.id": "y", "sasl.username": "me"}) is ours
    assert looks_with("a:2", {"sasl.username": "me"}) is not ours
    assert looks_with("a:1", {"sasl.username": "you"}) is not ours
    assert looks_with("a:1", {"default.topic.config": {}}) is not looks_with("a:1", {"default.topic.config": {}})
