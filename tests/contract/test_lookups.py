"""Look-ups and topics (L1, L2, C15)."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from kafka_marshal.errors import (
    ClosedError,
    CoordinationTopicError,
    KafkaUnavailableError,
    MarshalError,
    TopicMissingError,
)
from kafka_marshal.ports import Cluster
from tests.contract.sides import LOG_TIME, TIMEOUT_S, Side, append, recreate

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
