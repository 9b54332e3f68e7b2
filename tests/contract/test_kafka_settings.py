"""Settings that users may and may not change (L1, L4), and librdkafka's log lines."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import Any

import pytest
from confluent_kafka import KafkaError, Producer

from kafka_marshal.adapters.kafka import KafkaCluster
from kafka_marshal.adapters.kafka.errors import LOGGER
from kafka_marshal.adapters.kafka.settings import FIXED, Role, properties
from kafka_marshal.errors import ConfigurationError, KafkaUnavailableError
from tests.contract.sides import TIMEOUT_S, DataLog, KafkaSide, TailLog, append, closed_port

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
