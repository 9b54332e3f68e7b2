"""Transactions with a real broker: what has no counterpart in memory."""

from __future__ import annotations

import logging
import os
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaError

from kafka_marshal.adapters.kafka import KafkaCluster, groups
from kafka_marshal.adapters.kafka.groups import ApiVersions
from kafka_marshal.errors import ConfigurationError, KafkaUnavailableError, ProduceError, TransactionError
from tests.contract.sides import FOUND, TIMEOUT_S, KafkaSide, eventually
from tests.contract.test_transactions import Work


def threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


@pytest.mark.broker
@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_members_of_the_group_make_no_difference(kafka_side: KafkaSide, kafka_broker: Any, protocol: str) -> None:
    """The broker checks neither member nor generation of a consumer that never joined: only the id fences."""
    work = Work(kafka_side)
    settings = {"group.id": work.group, "group.protocol": protocol, "auto.offset.reset": "earliest"}
    member = Consumer({**kafka_broker.client_config, "bootstrap.servers": kafka_broker.bootstrap_servers, **settings})
    with closing(work.producer()) as producer:
        member.subscribe([work.key[0]])
        eventually(lambda: member.poll(0.1) or member.assignment(), "it has joined")
        work.commit(producer, 3, b"v")
        assert work.committed() == (3, FOUND)
        member.close()
        work.commit(producer, 4, b"v")
        assert work.committed() == (4, FOUND)


@pytest.mark.broker
def test_init_finds_a_connected_broker(kafka_side: KafkaSide) -> None:
    """Otherwise librdkafka asks for the coordinator only 500 ms later, at each second take-over."""
    work, lines = Work(kafka_side), logging.getLogger(f"test.{os.urandom(4).hex()}")
    found: list[str] = []

    def note(line: logging.LogRecord) -> bool:
        found.append(line.getMessage())
        return False

    lines.setLevel(logging.DEBUG)
    lines.addFilter(note)
    config = {"debug": "eos", "logger": lines}
    with closing(kafka_side.cluster.transactional_producer(work.id, config, transaction_timeout_ms=60_000)) as producer:
        producer.init(TIMEOUT_S)
        work.commit(producer, 1, b"v")
    assert any("FindCoordinator response" in line for line in found)
    assert not any("No brokers available" in line for line in found)


@pytest.mark.broker
def test_close_frees_everything_at_once(kafka_side: KafkaSide) -> None:
    """Also with a transaction open, records under way, or no broker: the threads of librdkafka end with it."""
    work = Work(kafka_side)
    before = threads()
    cluster = kafka_side.unreachable()
    for number in range(2):
        alone = cluster.transactional_producer(f"g/t/{number}", {}, transaction_timeout_ms=60_000)
        alone.close()
    cluster.close()
    for _ in range(3):
        producer = work.producer()
        producer.begin()
        for number in range(1_000):
            producer.send(work.output, b"%d" % number)
        producer.close()
    eventually(lambda: threads() <= before, "no thread is left")
    with closing(work.producer()) as successor:
        work.commit(successor, 1, b"kept")
    assert work.visible(1) == [b"kept"]


@pytest.mark.broker
def test_a_full_queue_makes_send_wait(kafka_side: KafkaSide) -> None:
    work = Work(kafka_side)
    config = {"queue.buffering.max.messages": 10}
    producer = kafka_side.cluster.transactional_producer(work.id, config, transaction_timeout_ms=60_000)
    producer.init(TIMEOUT_S)
    work.commit(producer, 1, *(b"%d" % number for number in range(200)))
    producer.close()
    assert work.visible(200) == [b"%d" % number for number in range(200)]


@pytest.mark.broker
def test_a_batch_that_is_too_large_for_a_topic_is_sent_in_smaller_ones(kafka_side: KafkaSide) -> None:
    work = Work(kafka_side)
    work.output = kafka_side.topic(1, {"max.message.bytes": "60000"})
    values = [Random(number).randbytes(1_000) for number in range(200)]  # incompressible
    producer = work.producer()
    with pytest.raises(TransactionError, match="smaller ones"):
        work.commit(producer, 1, *values)
    with pytest.raises(TransactionError, match="smaller ones"):
        producer.abort(TIMEOUT_S)
    producer.close()
    with closing(work.producer()) as successor:
        work.commit(successor, 1, *values)
        assert work.visible(200) == values
        successor.begin()
        successor.send(work.output, Random(0).randbytes(70_000))
        with pytest.raises(ProduceError, match="70,000 bytes"):
            successor.commit(work.group, work.key, 2, FOUND, TIMEOUT_S)


@pytest.mark.broker
def test_brokers_too_old_are_refused(kafka_side: KafkaSide, monkeypatch: pytest.MonkeyPatch) -> None:
    work = Work(kafka_side)
    monkeypatch.setattr(groups, "NEEDED", {"OffsetFetch": 99})
    with pytest.raises(ConfigurationError, match=r"too old.*OffsetFetch up to version \d+, and 99 .*Kafka 2\.5"):
        work.committed()


def test_versions_are_read_from_lines_of_librdkafka() -> None:
    line = "[thrd:127.0.0.1:9092/1]: 127.0.0.1:9092/1:   ApiKey OffsetFetch (9) Versions 0..{}"
    settings: dict[str, object] = {}
    versions = ApiVersions(settings)
    assert settings == {"debug": "feature"}
    found = []
    for newest in (7, 6):
        assert versions.take(10, line.format(newest))
        found.append(versions.lacking)
    assert found == [None, "they know OffsetFetch up to version 6, and 7 is needed"]
    assert not versions.take(40, "an error")
    settings = {"debug": "topic"}
    assert not ApiVersions(settings).take(10, line.format(7)), "a user that debugs sees the lines"
    assert settings == {"debug": "topic,feature"}


def test_a_record_without_an_answer_is_not_said_to_come_twice() -> None:
    """A transaction that was not committed is not visible, even if its records reached the broker."""
    cluster = KafkaCluster("127.0.0.1:1", {"log_level": 0})
    producer = cluster.transactional_producer("g/t/0", {}, transaction_timeout_ms=60_000)
    error = producer._error("out", 3, KafkaError(KafkaError._MSG_TIMED_OUT))
    assert isinstance(error, KafkaUnavailableError)
    assert "'g/t/0' was not committed" in str(error) and "'out' was not acknowledged" in str(error)
    assert "twice" not in str(error)
    producer.close()
    cluster.close()
