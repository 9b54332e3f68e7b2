"""Dead letters written by the port's producer and read by Admin, on each of the three logs."""

from __future__ import annotations

import time
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

import pytest

from kafka_marshal import Admin, DeadLetter
from kafka_marshal.adapters.memory import MemoryMessage
from kafka_marshal.admin import DeadLetters
from kafka_marshal.admin import dead_letters as reading
from kafka_marshal.client.dead_letters import headers_of
from kafka_marshal.errors import AdminError, ConfigurationError, KafkaUnavailableError
from tests.contract.sides import TIMEOUT_S, Side


def source(offset: int, key: bytes | None = b"k", value: bytes | None = b"v") -> Any:
    return MemoryMessage("orders", 3, offset, key, value, (1, 0), [("trace", b"\xff"), ("null", None)])


def write(side: Side, topic: str, messages: Iterable[Any], error: Exception | None = None, group: str = "g") -> None:
    """Write a dead letter for each message, in order."""
    producer = side.cluster.producer({})
    errors: list[Exception | None] = []
    for each in messages:
        headers = headers_of(each, group, 7, 3, error or ValueError(f"bad {each.offset()}"))
        producer.send(topic, each.value(), each.key(), headers, errors.append)
        assert producer.flush(TIMEOUT_S) == 0
    producer.close()
    assert set(errors) == {None}


def read(side: Side, topic: str, since: int | None = None, timeout_s: float = TIMEOUT_S) -> DeadLetters:
    return DeadLetters(side.cluster, topic, since, timeout_s, close=False)


def test_letters_are_read_back(side: Side) -> None:
    topic = side.topic(3)
    messages = [source(1, b"\xfe", b"\x00\xff"), source(2, None, None), source(3, b"", b"")]
    write(side, topic, messages)
    found = sorted(read(side, topic), key=lambda each: each.offset)  # those of one millisecond are in no order
    assert [(each.offset, each.key, each.value, each.reason) for each in found] == [
        (1, b"\xfe", b"\x00\xff", "bad 1"),
        (2, None, None, "bad 2"),
        (3, b"", b"", "bad 3"),
    ]
    for each in found:
        assert each.headers == (("trace", b"\xff"), ("null", None))
        assert (each.topic, each.partition, each.group, each.epoch, each.delivery_count) == ("orders", 3, "g", 7, 3)
        assert (each.error, each.repeated, each.place[0]) == ("ValueError", False, topic)
        assert abs(each.time_ms - time.time() * 1000) < 60_000


def test_all_partitions_are_merged_by_time(side: Side) -> None:
    topic = side.topic(4)
    for number in range(12):
        write(side, topic, [source(number, b"%d" % number)])
        time_passes(side)
    found = list(read(side, topic))
    assert len({each.place[1] for each in found}) > 1
    assert [each.offset for each in found] == list(range(12))


def time_passes(side: Side) -> None:
    """Wait until the next record has a later timestamp (ms)."""
    until = time.time() + 0.003
    while time.time() < until:
        time.sleep(0.001)


def test_copies_are_marked_and_other_records_counted(side: Side) -> None:
    topic = side.topic()
    write(side, topic, [source(1), source(2), source(1), source(3)])
    side.produce(topic, 0, [b"none", b"nor this"])
    write(side, topic, [source(2)])
    write(side, topic, [source(1)], group="another")
    found = read(side, topic)
    assert [(each.group, each.offset, each.repeated) for each in found] == [
        ("g", 1, False),
        ("g", 2, False),
        ("g", 1, True),
        ("g", 3, False),
        ("g", 2, True),
        ("another", 1, False),
    ]
    assert found.others == 2
    assert found.done == found.total == 8


def test_a_partition_that_is_ahead_is_held(side: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the topic, only the next letters of each partition are in memory."""
    monkeypatch.setattr(reading, "HELD_RECORDS", 5)
    monkeypatch.setattr(reading, "RUN", 3)
    topic = side.topic(2)
    producer = side.cluster.producer({})
    for partition, key in enumerate((b"21", b"abc")):  # all letters of one partition are older than the other's
        for number in range(100):
            headers = headers_of(source(100 * partition + number), "g", 1, 1, ValueError("x"))
            producer.send(topic, b"v", key, headers)
        assert producer.flush(TIMEOUT_S) == 0
        time_passes(side)
    producer.close()
    found = read(side, topic)
    most, offsets = 0, []
    for each in found:
        offsets.append(each.offset)
        most = max(most, *(len(part.records) for part in found._parts.values()))
    assert offsets == list(range(200))
    assert most <= 8


def test_it_ends_at_the_end_that_was_there_when_it_began(side: Side) -> None:
    topic = side.topic(2)
    write(side, topic, [source(1), source(2)])
    found = read(side, topic)
    write(side, topic, [source(3)])
    assert [each.offset for each in found] == [1, 2]


def test_behind_offsets_that_no_one_is_given(side: Side) -> None:
    """Transaction markers at the end, and records deleted by retention at the start."""
    topic = side.topic()
    write(side, topic, [source(1), source(2)])
    side.produce_transaction(topic, 0, [b"not ours"])
    side.delete_records(topic, 0, 1)
    found = read(side, topic)
    assert [each.offset for each in found] == [2]
    assert found.others == 1


def test_retention_may_take_what_comes_next(side: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "HELD_RECORDS", 5)
    monkeypatch.setattr(reading, "RUN", 3)
    topic = side.topic()
    producer = side.cluster.producer({})
    for number in range(100):
        producer.send(topic, b"v", None, headers_of(source(number), "g", 1, 1, ValueError("x")))
    assert producer.flush(TIMEOUT_S) == 0
    producer.close()
    found = read(side, topic)
    offsets = [next(found).offset]
    side.delete_records(topic, 0, 50)
    offsets += [each.offset for each in found]
    assert offsets == sorted(set(offsets))
    assert (offsets[0], offsets[-1]) == (0, 99)
    assert set(range(50, 100)) <= set(offsets)
    assert side.name == "kafka" or 40 not in offsets, "librdkafka has read ahead"


def test_a_topic_that_goes_away_ends_it_with_an_error(side: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    """It must not look like the end of the topic."""
    monkeypatch.setattr(reading, "RUN", 1)
    monkeypatch.setattr(reading, "HELD_RECORDS", 1)
    topic = side.topic()
    write(side, topic, [source(number, value=b"v" * 100_000) for number in range(3)])
    found = read(side, topic, timeout_s=1.0)
    assert next(found).offset == 0
    side.delete_topic(topic)
    try:
        assert [each.offset for each in found] == [1, 2]
        assert side.name == "kafka", "librdkafka may have read ahead"
    except (KafkaUnavailableError, AdminError) as error:
        assert "of 3 offsets" in str(error)


def test_since_a_moment(side: Side) -> None:
    topic = side.topic(2)
    write(side, topic, [source(1), source(2)])
    time_passes(side)
    since = int(time.time() * 1000)
    write(side, topic, [source(3), source(1)])
    side.produce(topic, 0, [b"of a sender whose clock is behind"], [1_000])
    found = read(side, topic, since)
    assert [(each.offset, each.repeated) for each in found] == [(3, False), (1, False)]
    assert found.others == 0
    assert list(read(side, topic, since + 3_600_000)) == []


def test_an_empty_topic_has_no_letters(side: Side) -> None:
    found = read(side, side.topic(2))
    assert list(found) == []
    assert list(found) == [], "nor later"
    assert (found.total, found.others) == (0, 0)


def test_a_topic_that_does_not_exist(side: Side) -> None:
    name = side.topic()
    with pytest.raises(AdminError, match=rf"there is no topic '{name}x'; did you mean '{name}'\? Nothing was read"):
        read(side, f"{name}x")


def test_without_a_broker(side: Side) -> None:
    with pytest.raises(KafkaUnavailableError):
        DeadLetters(side.unreachable(), "t", None, 0.3, close=False)


def test_closing_early_ends_it(side: Side) -> None:
    topic = side.topic()
    write(side, topic, [source(1), source(2)])
    with read(side, topic) as found:
        assert next(found).offset == 1
    found.close()


def test_nothing_is_committed(side: Side) -> None:
    topic = side.topic()
    write(side, topic, [source(1)])
    assert len(list(read(side, topic))) == 1
    assert side.cluster.kafka_group("kafka-marshal-dead-letters", TIMEOUT_S).committed == {}


@pytest.mark.broker
def test_an_admin_reads_them(kafka_side: Any, kafka_bootstrap: str) -> None:
    topic = kafka_side.topic(2)
    write(kafka_side, topic, [source(1)])
    admin = Admin(kafka_bootstrap)
    found: list[DeadLetter] = list(admin.dead_letters(topic))
    assert [each.offset for each in found] == [1]
    assert list(admin.dead_letters(topic, since=datetime.fromtimestamp(0, UTC))) == found
    assert list(admin.dead_letters(topic, since=datetime(2100, 1, 1, tzinfo=UTC))) == []
    for wrong in ({"topic": "a b"}, {"topic": topic, "since": datetime(2100, 1, 1)}):  # noqa: DTZ001
        with pytest.raises(ConfigurationError, match="Nothing was read"):
            admin.dead_letters(**wrong)
