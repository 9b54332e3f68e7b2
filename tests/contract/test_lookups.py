"""Look-ups and topics (L1, L2, C15)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any

import pytest

from kafka_marshal.adapters.kafka import KafkaCluster
from kafka_marshal.adapters.kafka.questions import KEPT_S, Looks, looks_with
from kafka_marshal.errors import (
    ClosedError,
    CoordinationTopicError,
    KafkaUnavailableError,
    MarshalError,
    TopicMissingError,
)
from kafka_marshal.ports import Cluster, TopicInfo
from tests.contract.sides import LOG_TIME, TIMEOUT_S, KafkaSide, Side, append, recreate

LOOKUPS: dict[str, Callable[[Cluster, float], object]] = {
    "topics": lambda cluster, s: cluster.topics(s),
    "topic_info": lambda cluster, s: cluster.topic_info(["t"], s),
    "topic_config": lambda cluster, s: cluster.topic_config("t", s),
    "broker_count": lambda cluster, s: cluster.broker_count(s),
    "create_topic": lambda cluster, s: cluster.create_topic("t", 1, 1, {}, s),
    "alter_topic": lambda cluster, s: cluster.alter_topic("t", {"max.message.bytes": "1"}, s),
    "watermarks": lambda cluster, s: cluster.watermarks([("t", 0)], s),
    "offsets_for_time": lambda cluster, s: cluster.offsets_for_time([("t", 0)], 0, s),
    "delete_records": lambda cluster, s: cluster.delete_records({("t", 0): 1}, s),
    "kafka_group": lambda cluster, s: cluster.kafka_group("g", s),
    "commit_for_group": lambda cluster, s: cluster.commit_for_group("g", {("t", 0): (1, "")}, s),
}


def test_a_created_topic_is_there_as_asked_for(side: Side) -> None:
    topic = side.topic(3, {**LOG_TIME, "retention.ms": "-1"})
    info = side.cluster.topic_info([topic], TIMEOUT_S)[topic]
    assert (info.name, info.partitions, info.internal) == (topic, 3, False)
    assert info.topic_id, "L2 rests on the id"
    config = side.cluster.topic_config(topic, TIMEOUT_S)
    assert config is not None
    assert config.info == info
    assert config.replication_factor == 1
    assert config.settings["message.timestamp.type"] == "LogAppendTime"
    assert config.settings["retention.ms"] == "-1"
    assert config.settings["cleanup.policy"] == "delete", "what was not asked for is told too"
    assert side.cluster.topics(TIMEOUT_S)[topic].partitions == 3
    assert side.cluster.broker_count(TIMEOUT_S) >= 1


def test_what_does_not_exist_is_left_out(side: Side) -> None:
    topic = side.topic()
    assert set(side.cluster.topic_info([topic, "nobody-made-this", "no topic/has this name"], TIMEOUT_S)) == {topic}
    assert side.cluster.topic_info([], TIMEOUT_S) == {}
    assert side.cluster.topic_config("nobody-made-this", TIMEOUT_S) is None
    assert "nobody-made-this" not in side.cluster.topics(TIMEOUT_S), "looking does not create"
    unknown = [(topic, 0), (topic, 9), ("nobody-made-this", 0)]
    assert side.cluster.watermarks(unknown, TIMEOUT_S) == {(topic, 0): (0, 0)}
    assert side.cluster.offsets_for_time(unknown, 0, TIMEOUT_S) == {(topic, 0): 0}
    assert side.cluster.watermarks([], TIMEOUT_S) == {}
    assert side.cluster.offsets_for_time([], 0, TIMEOUT_S) == {}


def test_partitions_are_counted_of_topics_that_exist(side: Side) -> None:
    topic, other = side.topic(3), side.topic(1)
    reader = side.cluster.data_reader("group", {})
    assert reader.partition_counts([topic, other], TIMEOUT_S) == {topic: 3, other: 1}
    some = reader.partition_counts([topic, "nobody-made-this", "no topic/has this name"], TIMEOUT_S)
    assert some.items() <= {topic: 3}.items(), "who misses one asks topic_info"
    assert reader.partition_counts([], TIMEOUT_S) == {}
    assert "nobody-made-this" not in side.cluster.topics(TIMEOUT_S), "looking does not create"
    side.grow_topic(topic, 4)
    assert reader.partition_counts([topic], TIMEOUT_S) == {topic: 4}
    reader.close()


def test_without_a_broker_nothing_is_counted_and_nothing_raised(side: Side) -> None:
    reader = side.unreachable().data_reader("group", {})
    assert reader.partition_counts(["t"], 0.2) == {}
    reader.close()


def test_a_topic_is_not_created_twice(side: Side) -> None:
    topic = side.topic(2)
    with pytest.raises(CoordinationTopicError, match="there already"):
        side.cluster.create_topic(topic, 3, 1, {}, TIMEOUT_S)
    assert side.cluster.topic_info([topic], TIMEOUT_S)[topic].partitions == 2


@pytest.mark.parametrize(
    ("name", "partitions", "replicas"), [("ok-name", 1, 99), ("bad name/", 1, 1), ("ok-name", 0, 1)]
)
def test_what_the_cluster_can_not_create_is_refused(side: Side, name: str, partitions: int, replicas: int) -> None:
    with pytest.raises(CoordinationTopicError, match=r"did not create|can't be created"):
        side.cluster.create_topic(name, partitions, replicas, {}, TIMEOUT_S)
    assert side.cluster.topic_info([name], TIMEOUT_S) == {}


def test_a_recreated_topic_has_another_id(side: Side) -> None:
    topic = side.topic(2)
    first = side.cluster.topic_info([topic], TIMEOUT_S)[topic]
    recreate(side, topic, 2, {})
    second = side.cluster.topic_info([topic], TIMEOUT_S)[topic]
    assert second.partitions == first.partitions
    assert second.topic_id != first.topic_id


def test_growth_is_seen(side: Side) -> None:
    topic = side.topic(1)
    before = side.cluster.topic_info([topic], TIMEOUT_S)[topic]
    side.grow_topic(topic, 4)
    after = side.cluster.topic_info([topic], TIMEOUT_S)[topic]
    assert after.partitions == 4
    assert after.topic_id == before.topic_id
    assert set(side.cluster.watermarks([(topic, p) for p in range(4)], TIMEOUT_S)) == {(topic, p) for p in range(4)}


def test_watermarks_are_those_of_now(side: Side) -> None:
    """C15: never from a cache."""
    topic = side.topic(2, LOG_TIME)
    appender = side.cluster.appender(topic, delivery_timeout_ms=10_000)
    for count in range(1, 21):
        appender.append(1, b"v")
        assert appender.flush(TIMEOUT_S) == 0
        marks = side.cluster.watermarks([(topic, 0), (topic, 1)], TIMEOUT_S)
        assert marks == {(topic, 0): (0, 0), (topic, 1): (0, count)}
    appender.close()


def test_watermarks_follow_the_log_start_and_count_transaction_markers(side: Side) -> None:
    topic = side.topic()
    side.produce_transaction(topic, 0, [b"a", b"b", b"c"])
    assert side.cluster.watermarks([(topic, 0)], TIMEOUT_S) == {(topic, 0): (0, 4)}
    side.delete_records(topic, 0, 2)
    assert side.cluster.watermarks([(topic, 0)], TIMEOUT_S) == {(topic, 0): (2, 4)}


def test_offsets_for_time(side: Side) -> None:
    topic = side.topic(2)
    base = int(time.time() * 1000) - 100_000
    side.produce(topic, 0, [b"a", b"b", b"c"], [base, base + 1000, base + 2000])

    def at(moment: int) -> dict[tuple[str, int], int]:
        return side.cluster.offsets_for_time([(topic, 0), (topic, 1)], moment, TIMEOUT_S)

    assert at(0) == {(topic, 0): 0, (topic, 1): 0}
    assert at(base)[topic, 0] == 0
    assert at(base + 1)[topic, 0] == 1
    assert at(base + 2000)[topic, 0] == 2
    assert at(base + 2001) == {(topic, 0): 3, (topic, 1): 0}, "after the last one: the high watermark"
    assert at(-5)[topic, 0] == 0


def test_offsets_for_time_on_a_log_that_stamps(side: Side) -> None:
    topic = side.topic(1, LOG_TIME)
    append(side, topic, 0, [b"a", b"b"])
    hour_ms = 3_600_000
    now = int(time.time() * 1000)
    assert side.cluster.offsets_for_time([(topic, 0)], now - hour_ms, TIMEOUT_S) == {(topic, 0): 0}
    assert side.cluster.offsets_for_time([(topic, 0)], now + hour_ms, TIMEOUT_S) == {(topic, 0): 2}


def test_records_below_an_offset_are_deleted(side: Side) -> None:
    topic = side.topic(2, LOG_TIME)
    append(side, topic, 0, [b"a", b"b", b"c"])
    append(side, topic, 1, [b"d"])
    found = side.cluster.delete_records({(topic, 0): 2, (topic, 1): 0, (topic, 9): 1, ("nobody-made-this", 0): 1}, 15)
    assert found == {(topic, 0): 2, (topic, 1): 0}
    assert side.cluster.watermarks([(topic, 0), (topic, 1)], TIMEOUT_S) == {(topic, 0): (2, 3), (topic, 1): (0, 1)}
    assert side.cluster.delete_records({(topic, 0): 1}, TIMEOUT_S) == {(topic, 0): 2}, "a log start never goes back"
    assert side.cluster.delete_records({(topic, 0): 3}, TIMEOUT_S) == {(topic, 0): 3}, "all of it may go"
    assert side.cluster.delete_records({}, TIMEOUT_S) == {}


def test_records_beyond_the_end_can_not_be_deleted(side: Side) -> None:
    topic = side.topic(1, LOG_TIME)
    append(side, topic, 0, [b"a", b"b"])
    with pytest.raises(MarshalError, match="deleting records"):
        side.cluster.delete_records({(topic, 0): 3}, TIMEOUT_S)
    assert side.cluster.watermarks([(topic, 0)], TIMEOUT_S) == {(topic, 0): (0, 2)}


@pytest.mark.parametrize("name", LOOKUPS)
def test_an_unanswered_look_up_ends_in_time(side: Side, name: str) -> None:
    cluster = side.unreachable()
    began = time.monotonic()
    with pytest.raises(KafkaUnavailableError) as caught:
        LOOKUPS[name](cluster, 0.4)
    assert time.monotonic() - began < 3.0
    text = str(caught.value)
    assert text.startswith("While "), "what happened"
    assert "leases" in text, "what it means"


@pytest.mark.parametrize("name", LOOKUPS)
def test_a_look_up_after_close_says_so(side: Side, name: str) -> None:
    side.cluster.close()
    side.cluster.close()
    with pytest.raises(ClosedError):
        LOOKUPS[name](side.cluster, 1.0)


def test_nothing_is_opened_after_close(side: Side) -> None:
    side.cluster.close()
    with pytest.raises(ClosedError):
        side.cluster.tail("t", {0: 0})
    with pytest.raises(ClosedError):
        side.cluster.appender("t", delivery_timeout_ms=1000)
    with pytest.raises(ClosedError):
        side.cluster.data_reader("g", {})


def test_settings_are_changed_one_by_one_and_back_to_the_default(side: Side) -> None:
    topic = side.topic(1, {"max.message.bytes": "2000000"})

    def settings() -> list[str]:
        config = side.cluster.topic_config(topic, TIMEOUT_S)
        assert config is not None
        return [
            config.settings[name] for name in ("min.compaction.lag.ms", "max.compaction.lag.ms", "max.message.bytes")
        ]

    before = settings()
    side.cluster.alter_topic(topic, {"min.compaction.lag.ms": "70000", "max.compaction.lag.ms": "70000"}, TIMEOUT_S)
    assert settings() == ["70000", "70000", "2000000"]
    side.cluster.alter_topic(topic, {"min.compaction.lag.ms": None, "max.compaction.lag.ms": None}, TIMEOUT_S)
    assert settings() == before
    with pytest.raises(TopicMissingError, match="Nothing was changed"):
        side.cluster.alter_topic("nobody-made-this", {"max.message.bytes": "1"}, TIMEOUT_S)


# -- librdkafka knows the leaders before offsets are looked up: its search for them may crash the process ---------


#: Calls that look up leaders on the caller's thread.
OF_LEADERS = ("list_offsets", "delete_records")

QUESTIONS: dict[str, Callable[[Cluster, str], object]] = {
    "watermarks": lambda cluster, topic: cluster.watermarks([(topic, 0), (topic, 1)], TIMEOUT_S),
    "offsets_for_time": lambda cluster, topic: cluster.offsets_for_time([(topic, 0)], 0, TIMEOUT_S),
    "committed_watermarks": lambda cluster, topic: cluster.committed_watermarks([(topic, 0)], TIMEOUT_S),
    "delete_records": lambda cluster, topic: cluster.delete_records({(topic, 0): 1}, TIMEOUT_S),
}


class Spied:
    """A shared AdminClient that records its calls."""

    def __init__(self, shared: Any) -> None:
        self._shared = shared
        self.metadata_age_s = shared.metadata_age_s
        self.asked: list[str] = []

    @contextmanager
    def use(self) -> Iterator[object]:
        with self._shared.use() as admin:
            yield _Admin(admin, self.asked)


class _Admin:
    def __init__(self, admin: Any, asked: list[str]) -> None:
        self._admin, self._asked = admin, asked

    def __getattr__(self, name: str) -> Any:
        if name != "poll":
            self._asked.append(name)
        return getattr(self._admin, name)


@contextmanager
def spied(bootstrap: str, config: dict[str, object] | None = None) -> Iterator[tuple[KafkaCluster, Spied]]:
    with closing(KafkaCluster(bootstrap, config or {})) as cluster:
        shared = cluster._questions._admin
        spy = Spied(shared)
        cluster._questions._admin = spy  # type: ignore[assignment]
        try:
            yield cluster, spy
        finally:
            cluster._questions._admin = shared


@pytest.fixture
def topic(kafka_bootstrap: str) -> str:
    side = KafkaSide(kafka_bootstrap, {})
    found = side.topic(2)
    append(side, found, 0, [b"a", b"b"])
    side.cluster.close()
    return found


@pytest.mark.parametrize("name", QUESTIONS)
def test_leaders_are_looked_up_before_anything_searches_for_them(name: str, kafka_bootstrap: str, topic: str) -> None:
    with spied(kafka_bootstrap) as (cluster, spy):
        QUESTIONS[name](cluster, topic)
        assert spy.asked[0] == "describe_topics"
        assert set(spy.asked[1:]) & set(OF_LEADERS)
        spy.asked.clear()
        QUESTIONS["watermarks"](cluster, topic)
        assert spy.asked == ["list_offsets"] * 2, "what is known is not asked again"


def test_they_are_looked_up_again_before_librdkafka_forgets_them(kafka_bootstrap: str, topic: str) -> None:
    with spied(kafka_bootstrap, {"metadata.max.age.ms": 3}) as (cluster, spy):
        for _ in range(3):
            QUESTIONS["watermarks"](cluster, topic)
        assert spy.asked.count("describe_topics") == 3


def test_a_topic_that_is_made_later_is_found(kafka_bootstrap: str, topic: str) -> None:
    with spied(kafka_bootstrap) as (cluster, _):
        later = f"{topic}-later"
        assert cluster.watermarks([(later, 0), (topic, 0)], TIMEOUT_S) == {(topic, 0): (0, 2)}
        cluster.create_topic(later, 1, 1, {}, TIMEOUT_S)
        assert cluster.watermarks([(later, 0)], TIMEOUT_S) == {(later, 0): (0, 0)}


# -- Members of one process share their topic metadata (Q39), and with no other process ---------------------------


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
