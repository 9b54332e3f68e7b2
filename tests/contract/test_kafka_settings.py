"""Settings that users may and may not change (L1, L4), and librdkafka's log lines."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaError, Producer, TopicPartition

from kafka_marshal.adapters.kafka import KafkaCluster
from kafka_marshal.adapters.kafka import cluster as kafka_cluster
from kafka_marshal.adapters.kafka.cluster import ApiVersions
from kafka_marshal.adapters.kafka.errors import LOGGER
from kafka_marshal.adapters.kafka.settings import FIXED, Role, properties
from kafka_marshal.errors import ConfigurationError, KafkaUnavailableError, MarshalError, ProduceError, TransactionError
from tests.contract.sides import FOUND, TIMEOUT_S, DataLog, KafkaSide, Side, TailLog, append, closed_port, eventually
from tests.contract.test_transactions import Work

NOBODY = "127.0.0.1:1"

REFUSED: list[tuple[str, object]] = [
    ("acks", 1),
    ("acks", "0"),
    ("request.required.acks", 1),
    ("enable.idempotence", False),
    ("enable.gapless.guarantee", "true"),
    ("transactional.id", "mine"),
    ("message.timeout.ms", 1000),
    ("delivery.timeout.ms", 1000),
    ("compression.type", "zstd"),
    ("compression.codec", "lz4"),
    ("transaction.timeout.ms", 60_000),
    ("group.id", "mine"),
    ("group.instance.id", "mine"),
    ("auto.offset.reset", "earliest"),
    ("enable.auto.commit", True),
    ("auto.commit.enable", "true"),
    ("enable.partition.eof", False),
    ("bootstrap.servers", "elsewhere:9092"),
    ("metadata.broker.list", "elsewhere:9092"),
]


@pytest.mark.parametrize(("name", "value"), REFUSED)
def test_what_the_protocol_fixes_can_not_be_set(name: str, value: object) -> None:
    with pytest.raises(ConfigurationError) as caught:
        KafkaCluster(NOBODY, {name: value})
    text = str(caught.value)
    assert repr(name) in text
    assert repr(value) in text
    assert "Nothing was sent" in text
    cluster = KafkaCluster(NOBODY)
    with pytest.raises(ConfigurationError, match=name):
        cluster.data_reader("g", {name: value})
    cluster.close()


def test_every_fixed_setting_is_tested() -> None:
    assert {name for name, _ in REFUSED} == set(FIXED)


def test_agreeing_with_what_is_fixed_is_no_error() -> None:
    config = {"acks": -1, "enable.idempotence": "True", "enable.auto.commit": False, "auto.offset.reset": "error"}
    cluster = KafkaCluster(NOBODY, config)
    cluster.appender("t", delivery_timeout_ms=1000).close()
    cluster.tail("t", {0: 0}).close()
    cluster.data_reader("g", config).close()
    cluster.close()


@pytest.mark.parametrize(
    "config",
    [
        {"no.such.property": 1},
        {"security.protocol": "carrier pigeon"},
        {"security.protocol": "ssl", "ssl.ca.location": "/does/not/exist"},
        {"socket.timeout.ms": "soon"},
        {3: 4},
        {"error_cb": 7},
    ],
)
def test_what_librdkafka_does_not_accept_is_reported_at_once(config: dict[Any, object]) -> None:
    with pytest.raises(ConfigurationError, match="Nothing was sent"):
        KafkaCluster(NOBODY, config)


@pytest.mark.parametrize("address", ["h:0", "h:65536", "h:x", "h:", "[::1]:99999", "good:9092, SSL://bad:70000"])
def test_a_port_that_is_invalid_is_refused(address: str) -> None:
    with pytest.raises(ConfigurationError, match="a port is a number from 1 to 65535"):
        KafkaCluster(address)


@pytest.mark.parametrize(
    "address", ["h", "h:65535", "[::1]:9092", "[::1]", "::1", "SASL_SSL://h", "PLAINTEXT://h:1,i:2"]
)
def test_addresses_as_librdkafka_takes_them(address: str) -> None:
    KafkaCluster(address).close()


@pytest.mark.parametrize("servers", ["", "  "])
def test_servers_must_be_named(servers: str) -> None:
    with pytest.raises(ConfigurationError, match="bootstrap_servers"):
        KafkaCluster(servers)


def test_the_users_own_settings_reach_librdkafka() -> None:
    config = {"client.id": "mine", "fetch.wait.max.ms": 7, "isolation.level": "read_uncommitted", "linger.ms": 50}
    data = properties(Role.DATA, "h:1", config)
    assert (data["client.id"], data["fetch.wait.max.ms"], data["isolation.level"]) == ("mine", 7, "read_uncommitted")
    assert properties(Role.DATA, "h:1", {})["isolation.level"] == "read_committed"


def test_the_clients_of_the_log_are_tuned_by_us() -> None:
    config = {"client.id": "mine", "fetch.wait.max.ms": 7, "isolation.level": "read_committed", "linger.ms": 50}
    tail = properties(Role.TAIL, "h:1", config)
    assert tail["client.id"] == "mine"
    assert tail["isolation.level"] == "read_uncommitted"
    assert tail["auto.offset.reset"] == "error"
    assert tail["enable.auto.commit"] is False
    assert tail["fetch.wait.max.ms"] != 7
    appender = properties(Role.APPENDER, "h:1", config)
    assert (appender["acks"], appender["enable.idempotence"], appender["linger.ms"]) == ("all", True, 0)


@pytest.mark.parametrize("role", Role)
def test_no_client_may_create_a_topic(role: Role) -> None:
    """By default librdkafka's producers and AdminClients ask for it; a user's value is ignored."""
    assert properties(role, "h:1", {"allow.auto.create.topics": True})["allow.auto.create.topics"] is False


@pytest.fixture
def kafka(kafka_broker: Any) -> Iterator[KafkaSide]:
    side = KafkaSide(kafka_broker.bootstrap_servers, kafka_broker.client_config)
    yield side
    side.close()


def test_an_open_transaction_holds_back_data_but_not_the_log(kafka: KafkaSide, kafka_broker: Any) -> None:
    """L4: all replicas read the same log; user data is read committed unless the user sets otherwise."""
    topic = kafka.topic(1, {"message.timestamp.type": "LogAppendTime"})
    settings = {**kafka_broker.client_config, "bootstrap.servers": kafka_broker.bootstrap_servers}
    producer = Producer({**settings, "transactional.id": topic})
    producer.init_transactions(TIMEOUT_S)
    producer.begin_transaction()
    producer.produce(topic, b"open", partition=0)
    producer.flush(TIMEOUT_S)
    tail = TailLog(kafka.cluster.tail(topic, {0: 0}))
    tail.until(lambda: tail.values(0) == [b"open"], "the tail sees it")
    eager = DataLog(kafka.cluster.data_reader("g", {"isolation.level": "read_uncommitted"}))
    committed = DataLog(kafka.cluster.data_reader("g", {}))
    for log in (eager, committed):
        log.reader.assign({(topic, 0): 0})
    eager.until(lambda: eager.messages, "read_uncommitted sees it")
    assert committed.read(timeout_s=0.5) == 0
    assert kafka.cluster.watermarks([(topic, 0)], TIMEOUT_S)[topic, 0] == (0, 1), "not the last stable offset"
    producer.commit_transaction(TIMEOUT_S)
    committed.until(lambda: committed.messages, "committed, it is seen")
    for log in (eager, committed):
        log.reader.close()
    tail.tail.close()


def test_librdkafka_speaks_to_logging_and_not_to_stderr(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """Without its endless repetitions and its complaints about other clients' settings."""
    port = closed_port()
    cluster = KafkaCluster(f"127.0.0.1:{port}", {"linger.ms": 5, "fetch.min.bytes": 1})
    with caplog.at_level(logging.DEBUG, LOGGER.name):
        tail = cluster.tail("t", {0: 0})
        appender = cluster.appender("t", delivery_timeout_ms=1000)
        appender.append(0, b"v")
        until = time.monotonic() + 1.5
        while time.monotonic() < until:
            tail.read(0.1)
            appender.poll(0.1)
        tail.close()
        appender.close()
    lines = [record.getMessage() for record in caplog.records if record.name == LOGGER.name]
    assert any("Connection refused" in line for line in lines)
    assert len(lines) <= 10, lines
    assert not any("CONFWARN" in line for line in lines)
    assert [line for line in capfd.readouterr().err.splitlines() if str(port) in line] == []
    cluster.close()


def test_the_users_own_logger_and_error_callback_are_used(caplog: pytest.LogCaptureFixture) -> None:
    errors: list[KafkaError] = []
    mine = logging.getLogger("tests.mine")
    cluster = KafkaCluster(f"127.0.0.1:{closed_port()}", {"logger": mine, "error_cb": errors.append})
    with caplog.at_level(logging.DEBUG, "tests.mine"):
        log = TailLog(cluster.tail("t", {0: 0}))
        log.until(lambda: log.faults and errors, "both are told")
        log.tail.close()
        with pytest.raises(KafkaUnavailableError):
            cluster.topics(0.2)
    assert any(record.name == "tests.mine" for record in caplog.records)
    assert any(error.code() == KafkaError._ALL_BROKERS_DOWN for error in errors)
    cluster.close()


def test_a_first_append_does_not_wait_for_librdkafkas_timer(kafka: KafkaSide) -> None:
    """A record produced before librdkafka has connected waits 500 ms for its producer id."""
    topic = kafka.topic(1)
    took = []
    for _ in range(5):
        appender = kafka.cluster.appender(topic, delivery_timeout_ms=10_000)
        began = time.monotonic()
        appender.append(0, b"v")
        assert appender.flush(TIMEOUT_S) == 0
        took.append(time.monotonic() - began)
        appender.close()
    assert sorted(took)[2] < 0.4, took


def test_records_go_to_the_log_uncompressed(kafka: KafkaSide) -> None:
    """L1: whatever the topic's default, the producer sends uncompressed batches; large values survive."""
    topic = kafka.topic(1, {"max.message.bytes": "2097152", "message.timestamp.type": "LogAppendTime"})
    value = b"z" * 899_999
    append(kafka, topic, 0, [value])
    log = TailLog(kafka.cluster.tail(topic, {0: 0}))
    log.until(lambda: log.values(0), "it is read")
    assert log.values(0) == [value]
    log.tail.close()


# -- Kafka's consumer groups: reading and writing their commits from outside --------------------------------------


def test_a_group_that_no_one_knows_is_empty(side: Side) -> None:
    found = side.cluster.kafka_group(f"g-{os.urandom(4).hex()}", TIMEOUT_S)
    assert (found.members, found.committed) == ((), {})


def test_what_is_committed_is_there(side: Side) -> None:
    topic, group = side.topic(3), f"g-{os.urandom(4).hex()}"
    side.cluster.commit_for_group(group, {(topic, 0): (7, "so far"), (topic, 2): (0, "")}, TIMEOUT_S)
    side.cluster.commit_for_group(group, {(topic, 0): (5, "")}, TIMEOUT_S)
    side.cluster.commit_for_group(group, {}, TIMEOUT_S)
    found = side.cluster.kafka_group(group, TIMEOUT_S)
    assert (found.members, found.committed) == ((), {(topic, 0): (5, ""), (topic, 2): (0, "")})
    assert side.cluster.kafka_group(f"{group}x", TIMEOUT_S).committed == {}


@pytest.mark.broker
@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_a_group_with_members_is_seen_and_takes_nothing(protocol: str, kafka_broker: Any) -> None:
    cluster = KafkaCluster(kafka_broker.bootstrap_servers, kafka_broker.client_config)
    topic, group = f"contract-{os.urandom(4).hex()}", f"g-{os.urandom(4).hex()}"
    cluster.create_topic(topic, 1, 1, {}, TIMEOUT_S)
    settings = {"group.id": group, "client.id": "worker-1", "group.protocol": protocol, "auto.offset.reset": "earliest"}
    consumer = Consumer({**kafka_broker.client_config, "bootstrap.servers": kafka_broker.bootstrap_servers, **settings})
    try:
        consumer.subscribe([topic])
        while not consumer.assignment():
            consumer.poll(0.1)
        consumer.commit(offsets=[TopicPartition(topic, 0, 3, "mine")], asynchronous=False)
        found = cluster.kafka_group(group, TIMEOUT_S)
        assert (found.members, found.committed) == (("worker-1",), {(topic, 0): (3, "mine")})
        with pytest.raises(MarshalError):
            cluster.commit_for_group(group, {(topic, 0): (9, "")}, TIMEOUT_S)
    finally:
        consumer.close()
    assert cluster.kafka_group(group, TIMEOUT_S).members == ()
    cluster.commit_for_group(group, {(topic, 0): (9, "")}, TIMEOUT_S)
    assert cluster.kafka_group(group, TIMEOUT_S).committed == {(topic, 0): (9, "")}
    cluster.close()


# -- Transactions with a real broker: what has no counterpart in memory -------------------------------------------


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
    monkeypatch.setattr(kafka_cluster, "NEEDED", {"OffsetFetch": 99})
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
