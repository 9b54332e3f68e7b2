"""Faults of Kafka, each with a message: what happened, what it means, what to do."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException, Producer
from confluent_kafka.admin import AclOperation, AdminClient, TopicDescription

from kafka_marshal.adapters.kafka import KafkaCluster
from kafka_marshal.adapters.kafka.errors import RETRY_CODES, Troubles, fault_kind, marshal_error
from kafka_marshal.adapters.kafka.questions import SharedAdmin
from kafka_marshal.adapters.kafka.writers import KafkaAppender, KafkaProducer
from kafka_marshal.errors import (
    AuthenticationError,
    AuthorizationError,
    ClosedError,
    CoordinationTopicError,
    KafkaUnavailableError,
    MarshalError,
    ProduceError,
)
from kafka_marshal.ports import Ack, FaultKind
from kafka_marshal.testing import LocalBroker
from tests.contract.sides import TIMEOUT_S, DataLog, KafkaSide, TailLog, append, closed_port, eventually
from tests.contract.test_lookups import LOOKUPS
from tests.secured import allow, broker_properties, login


@contextmanager
def server(answer: Callable[[socket.socket], None]) -> Iterator[int]:
    """A port with a listener that is no Kafka."""
    listener = socket.create_server(("127.0.0.1", 0))
    connections: list[socket.socket] = []

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            connections.append(connection)
            threading.Thread(target=answer, args=(connection,), daemon=True).start()

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    yield listener.getsockname()[1]
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    for connection in connections:
        connection.close()
    thread.join()


def hang_up(connection: socket.socket) -> None:
    """Close, as a TLS listener does on plain text."""
    try:
        connection.recv(100)
    finally:
        connection.close()


def say_nothing(connection: socket.socket) -> None:
    """A black hole."""


# -- no listener, or another one, on the port ----------------------------------------------------------------------


def test_a_closed_port_is_named() -> None:
    port = closed_port()
    cluster = KafkaCluster(f"127.0.0.1:{port}")
    with pytest.raises(KafkaUnavailableError) as caught:
        cluster.topics(0.5)
    text = str(caught.value)
    assert type(caught.value) is KafkaUnavailableError
    assert f"127.0.0.1:{port} refuses connections" in text
    assert "bootstrap_servers" in text, "what to do"
    cluster.close()


def test_a_host_that_does_not_exist_is_named() -> None:
    cluster = KafkaCluster("no-such-host.invalid:9092")
    with pytest.raises(KafkaUnavailableError, match=r"resolve 'no-such-host\.invalid:9092'"):
        cluster.topics(3.0)
    cluster.close()


@pytest.mark.parametrize("name", LOOKUPS)
def test_a_black_hole_takes_no_longer_than_allowed(name: str) -> None:
    with server(say_nothing) as port:
        cluster = KafkaCluster(f"127.0.0.1:{port}")
        began = time.monotonic()
        with pytest.raises(KafkaUnavailableError):
            LOOKUPS[name](cluster, 0.5)
        assert time.monotonic() - began < 3.0
        cluster.close()


def test_plain_text_to_a_tls_port() -> None:
    with server(hang_up) as port:
        cluster = KafkaCluster(f"127.0.0.1:{port}")
        with pytest.raises(AuthenticationError, match="it may want TLS or SASL"):
            cluster.topics(1.0)
        cluster.close()


@pytest.mark.parametrize(
    "config",
    [
        {"security.protocol": "ssl"},
        {
            "security.protocol": "sasl_plaintext",
            "sasl.mechanism": "PLAIN",
            "sasl.username": "somebody",
            "sasl.password": "something",
        },
    ],
    ids=["ssl", "sasl"],
)
def test_tls_or_sasl_to_a_plain_port(kafka_bootstrap: str, config: dict[str, object]) -> None:
    cluster = KafkaCluster(kafka_bootstrap, config)
    for ask in LOOKUPS.values():
        with pytest.raises(AuthenticationError, match=r"security\.protocol"):
            ask(cluster, 1.0)
    log = TailLog(cluster.tail("t", {0: 0}))
    log.until(lambda: any("handshake" in fault.message.lower() for fault in log.faults), "the tail tells")
    assert {fault.kind for fault in log.faults} <= {FaultKind.REFUSED, FaultKind.UNREACHABLE}
    log.tail.close()
    appender = cluster.appender("t", delivery_timeout_ms=700)
    acks: list[Ack] = []
    appender.append(0, b"v", acks.append)
    assert appender.flush(TIMEOUT_S) == 0
    assert acks[0].error is not None
    assert "handshake" in acks[0].error.lower()
    appender.close()
    cluster.close()


# -- users and their rights ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def guarded() -> Iterator[LocalBroker]:
    """A broker where root may do everything and guest nothing."""
    with LocalBroker(properties=broker_properties("guest"), client_config=login("root")) as broker:
        yield broker


@pytest.mark.broker
def test_a_wrong_password(guarded: LocalBroker) -> None:
    cluster = KafkaCluster(guarded.bootstrap_servers, login("guest", "wrong"))
    with pytest.raises(AuthenticationError, match="Authentication failed"):
        cluster.topics(2.0)
    cluster.close()


@pytest.mark.broker
def test_an_acl_that_forbids(guarded: LocalBroker) -> None:
    side = KafkaSide(guarded.bootstrap_servers, login("root"))
    topic = side.topic(1, {"message.timestamp.type": "LogAppendTime"})
    append(side, topic, 0, [b"a"])
    cluster = KafkaCluster(guarded.bootstrap_servers, login("guest"))
    with pytest.raises(AuthorizationError, match="forbids"):
        cluster.topic_info([topic], TIMEOUT_S)
    with pytest.raises(AuthorizationError, match="forbids"):
        cluster.create_topic("another", 1, 1, {}, TIMEOUT_S)
    with pytest.raises(AuthorizationError, match="forbids"):
        cluster.watermarks([(topic, 0)], TIMEOUT_S)
    with pytest.raises(AuthorizationError, match="forbids"):
        cluster.offsets_for_time([(topic, 0)], 0, TIMEOUT_S)
    assert topic not in cluster.topics(TIMEOUT_S)
    appender = cluster.appender(topic, delivery_timeout_ms=2_000)
    acks: list[Ack] = []
    appender.append(0, b"v", acks.append)
    assert appender.flush(TIMEOUT_S) == 0
    assert acks[0].error is not None
    assert "authorization failed" in acks[0].error.lower()
    appender.close()
    cluster.close()
    side.close()


@pytest.mark.broker
def test_describing_is_not_reading(guarded: LocalBroker) -> None:
    """Metadata is allowed, reading is not: readers report it."""
    side = KafkaSide(guarded.bootstrap_servers, login("root"))
    topic = side.topic(1, {"message.timestamp.type": "LogAppendTime"})
    append(side, topic, 0, [b"a"])
    allow(guarded.bootstrap_servers, login("root"), "guest", {topic: (AclOperation.DESCRIBE,)})
    cluster = KafkaCluster(guarded.bootstrap_servers, login("guest"))
    eventually(lambda: topic in cluster.topics(TIMEOUT_S), "the ACL is known")
    assert cluster.watermarks([(topic, 0)], TIMEOUT_S) == {(topic, 0): (0, 1)}
    with pytest.raises(AuthorizationError):
        cluster.topic_config(topic, TIMEOUT_S)
    log = TailLog(cluster.tail(topic, {0: 0}))
    log.until(lambda: log.faults, "the tail tells")
    assert log.faults[0].kind is FaultKind.REFUSED
    data = DataLog(cluster.data_reader("g", {}))
    data.reader.assign({(topic, 0): 0})
    data.until(lambda: data.faults, "the reader tells")
    assert data.faults[0].kind is FaultKind.REFUSED
    assert not data.messages
    data.reader.close()
    log.tail.close()
    cluster.close()
    side.close()


def test_an_acl_that_forbids_producing(guarded: LocalBroker) -> None:
    """The idempotent producer needs no right on the cluster; a topic with only DESCRIBE rejects a record."""
    side = KafkaSide(guarded.bootstrap_servers, login("root"))
    topic = side.topic()
    allow(guarded.bootstrap_servers, login("root"), "guest", {topic: (AclOperation.DESCRIBE,)})
    cluster = KafkaCluster(guarded.bootstrap_servers, login("guest"))
    eventually(lambda: topic in cluster.topics(TIMEOUT_S), "the ACL is known")
    producer = cluster.producer({})
    errors: list[Exception | None] = []

    def answered() -> type | None:
        producer.send(topic, b"v", None, (), errors.append)
        assert producer.flush(TIMEOUT_S) == 0
        return type(errors[-1])

    assert answered() is AuthorizationError
    assert topic in str(errors[0])
    assert "WRITE" in str(errors[0])
    allow(guarded.bootstrap_servers, login("root"), "guest", {topic: (AclOperation.WRITE,)})
    eventually(lambda: answered() is type(None), "the same producer goes on once it may")
    producer.close()
    cluster.close()
    side.close()


# -- the mapping itself --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (KafkaError._AUTO_OFFSET_RESET, FaultKind.OUT_OF_RANGE),
        (KafkaError.OFFSET_OUT_OF_RANGE, FaultKind.OUT_OF_RANGE),
        (KafkaError._LOG_TRUNCATION, FaultKind.OUT_OF_RANGE),
        (KafkaError.UNKNOWN_TOPIC_OR_PART, FaultKind.UNKNOWN_TOPIC),
        (KafkaError._UNKNOWN_PARTITION, FaultKind.UNKNOWN_TOPIC),
        (KafkaError.UNKNOWN_TOPIC_ID, FaultKind.UNKNOWN_TOPIC),
        (KafkaError.TOPIC_AUTHORIZATION_FAILED, FaultKind.REFUSED),
        (KafkaError._AUTHENTICATION, FaultKind.UNREACHABLE),
        (KafkaError._SSL, FaultKind.UNREACHABLE),
        (KafkaError._ALL_BROKERS_DOWN, FaultKind.UNREACHABLE),
        (KafkaError._TRANSPORT, FaultKind.UNREACHABLE),
        (KafkaError._BAD_MSG, FaultKind.OTHER),
        (KafkaError._BAD_COMPRESSION, FaultKind.OTHER),
    ],
)
def test_kinds_of_faults(code: int, kind: FaultKind) -> None:
    assert fault_kind(KafkaError(code, "why")) is kind
    assert fault_kind(KafkaError(code, "why", fatal=True)) is FaultKind.FATAL


@pytest.mark.parametrize(
    ("code", "ours"),
    [
        (KafkaError._TIMED_OUT, KafkaUnavailableError),
        (KafkaError._TRANSPORT, KafkaUnavailableError),
        (KafkaError.REQUEST_TIMED_OUT, KafkaUnavailableError),
        (KafkaError.NOT_LEADER_FOR_PARTITION, KafkaUnavailableError),
        (KafkaError.SASL_AUTHENTICATION_FAILED, AuthenticationError),
        (KafkaError._SSL, AuthenticationError),
        (KafkaError.CLUSTER_AUTHORIZATION_FAILED, AuthorizationError),
        (KafkaError.INVALID_REQUEST, MarshalError),
    ],
)
def test_errors_of_calls(code: int, ours: type[MarshalError]) -> None:
    error = marshal_error(KafkaException(KafkaError(code, "the reason")), "asking", "host:1")
    assert type(error) is ours
    assert str(error).startswith("While asking: ")
    assert "the reason" in str(error)


def test_a_new_leader_is_looked_up_again(
    kafka_bootstrap: str, topic_factory: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restarting broker may send metadata just before its epochs grow; librdkafka keeps it for minutes."""
    key = (topic_factory(1), 0)
    with closing(KafkaCluster(kafka_bootstrap)) as cluster:
        assert cluster.watermarks([key], 10.0) == {key: (0, 0)}
        described: list[list[str]] = []
        real, answers = cluster._questions._described, iter([KafkaError(KafkaError.FENCED_LEADER_EPOCH), {key: 7}])

        def watched(names: list[str], admin: AdminClient, left_s: float) -> dict[str, TopicDescription]:
            described.append(names)
            return real(names, admin, left_s)

        def ask(_admin: AdminClient, _keys: object, _left_s: float) -> object:
            answer = next(answers)
            if isinstance(answer, KafkaError):
                raise KafkaException(answer)
            return answer

        monkeypatch.setattr(cluster._questions, "_described", watched)
        assert cluster._questions.ask_leaders("asking", [key], 10.0, ask) == {key: 7}  # type: ignore[arg-type]
        assert described == [[key[0]]]


def test_a_timeout_says_why() -> None:
    troubles = Troubles()
    troubles(KafkaError(KafkaError._TRANSPORT, "host:1: Connection refused"))
    error = marshal_error(KafkaError(KafkaError._TIMED_OUT), "asking", "host:1", troubles)
    assert type(error) is KafkaUnavailableError
    assert "Connection refused" in str(error)
    troubles(KafkaError(KafkaError._SSL, "certificate verify failed"))
    refused = marshal_error(KafkaError(KafkaError._TIMED_OUT), "asking", "host:1", troubles)
    assert type(refused) is AuthenticationError
    assert "certificate verify failed" in str(refused)


def test_troubles_of_a_client() -> None:
    troubles = Troubles()
    troubles(KafkaError(KafkaError._TRANSPORT, "one connection failed"))
    assert not troubles.pending, "others may be up"
    troubles(KafkaError(KafkaError._ALL_BROKERS_DOWN, "3/3 brokers are down"))
    assert troubles.take_faults() == [(FaultKind.UNREACHABLE, "3/3 brokers are down (one connection failed)")]
    for _ in range(3):
        troubles(KafkaError(KafkaError._AUTHENTICATION, "wrong password"))
    assert troubles.take_faults() == [(FaultKind.UNREACHABLE, "wrong password")], "once, however often it is tried"
    troubles(KafkaError(KafkaError._FATAL, "fenced", fatal=True))
    assert troubles.fatal == "fenced"
    assert troubles.take_faults() == [(FaultKind.FATAL, "fenced")]
    assert troubles.take_faults() == []


# -- an appender whose producer fails -----------------------------------------------------------------------------


class FakeProducer:
    """A producer that fails on request: BufferErrors first, then errors."""

    def __init__(self, settings: dict[str, object]) -> None:
        self.settings = settings
        self.failures: list[Exception] = []
        self.queued: list[tuple[bytes, Any]] = []
        self.polls = 0

    def cluster_id(self, timeout: float) -> str:
        raise KafkaException(KafkaError(KafkaError._TIMED_OUT))

    def produce(self, topic: str, value: bytes, key: bytes, partition: int, callback: Any) -> None:
        if self.failures:
            raise self.failures.pop(0)
        self.queued.append((value, callback))

    def poll(self, timeout: float) -> int:
        self.polls += 1
        return 0

    def flush(self, timeout: float = 0.0) -> int:
        return 0

    def purge(self) -> None: ...

    def close(self) -> None:
        if self.failures:
            raise self.failures.pop(0)


@pytest.fixture
def failing() -> tuple[KafkaAppender, FakeProducer, Troubles]:
    troubles = Troubles()
    made: list[FakeProducer] = []

    def make(settings: dict[str, object]) -> Producer:
        made.append(FakeProducer(settings))
        return made[0]  # type: ignore[return-value]

    appender = KafkaAppender("t", {}, troubles, delivery_timeout_ms=321, producer=make)
    assert made[0].settings["message.timeout.ms"] == 321
    return appender, made[0], troubles


def test_a_full_queue_is_given_one_more_chance(failing: tuple[KafkaAppender, FakeProducer, Troubles]) -> None:
    appender, producer, _ = failing
    producer.failures = [BufferError()]
    acks: list[Ack] = []
    appender.append(0, b"v", acks.append)
    assert [value for value, _ in producer.queued] == [b"v"]
    assert producer.polls == 1
    producer.failures = [BufferError(), BufferError()]
    appender.append(0, b"w", acks.append)
    assert acks == [], "not before poll()"
    appender.poll()
    assert [(ack.offset, ack.fatal) for ack in acks] == [(None, False)]
    assert acks[0].error is not None
    assert "full" in acks[0].error


def test_a_fatal_state_is_reported_with_every_ack(failing: tuple[KafkaAppender, FakeProducer, Troubles]) -> None:
    """C17: such an appender must be replaced."""
    appender, producer, troubles = failing
    acks: list[Ack] = []
    appender.append(0, b"v", acks.append)
    troubles(KafkaError(KafkaError._FATAL, "out of sequence", fatal=True))
    ((_, delivered),) = producer.queued
    delivered(KafkaError(KafkaError._PURGE_QUEUE), None)
    producer.failures = [KafkaException(KafkaError(KafkaError._FATAL, "out of sequence", fatal=True))]
    appender.append(0, b"w", acks.append)
    appender.poll()
    assert [(ack.offset, bool(ack.error), ack.fatal) for ack in acks] == [(None, True, True)] * 2


def test_close_notes_a_fatal_error(failing: tuple[KafkaAppender, FakeProducer, Troubles]) -> None:
    appender, producer, troubles = failing
    producer.failures = [KafkaException(KafkaError(KafkaError._FATAL, "forbidden", fatal=True))]
    appender.close()
    assert troubles.fatal


def test_an_ack_may_lack_the_offset(failing: tuple[KafkaAppender, FakeProducer, Troubles]) -> None:
    """C17: a retry of a record that was already written."""
    appender, producer, _ = failing
    acks: list[Ack] = []
    appender.append(0, b"v", acks.append)

    class Delivered:
        def offset(self) -> int:
            return -1001

    ((_, delivered),) = producer.queued
    delivered(None, Delivered())
    appender.poll()
    assert acks == [Ack(None)]


def test_what_a_cluster_refuses_to_create_is_reported_with_its_reason(kafka_bootstrap: str) -> None:
    cluster = KafkaCluster(kafka_bootstrap)
    with pytest.raises(CoordinationTopicError, match=r"cleanup\.policy|bogus"):
        cluster.create_topic("contract-refused", 1, 1, {"cleanup.policy": "bogus"}, TIMEOUT_S)
    assert cluster.topic_info(["contract-refused"], TIMEOUT_S) == {}
    cluster.close()


def test_a_broker_that_the_client_itself_has_dropped_is_asked_again() -> None:
    """Found by chaos with killed brokers: a look-up with this error ended a Marshal and all its leases."""
    error = marshal_error(KafkaException(KafkaError(KafkaError._DESTROY_BROKER)), "looking up t", "a:1", Troubles())
    assert isinstance(error, KafkaUnavailableError)
    assert KafkaError._DESTROY_BROKER in RETRY_CODES


# -- a producer whose producer fails ------------------------------------------------------------------------------


class FakeDataProducer(FakeProducer):
    """The same for records of any topic."""

    def produce(self, topic: str, value: Any, key: Any, partition: int, callback: Any, headers: Any = None) -> None:
        super().produce(topic, value, key, partition, callback)


class Producing:
    """A KafkaProducer on fakes, and its acknowledgements."""

    def __init__(self) -> None:
        self.made: list[FakeDataProducer] = []
        self.troubles = Troubles()
        self.errors: list[Exception | None] = []
        self.producer = KafkaProducer({}, self.troubles, delivery_timeout_ms=321, producer=self._make)

    def _make(self, settings: dict[str, object]) -> Producer:
        self.made.append(FakeDataProducer(settings))
        return self.made[-1]  # type: ignore[return-value]

    def send(self, answer: KafkaError | None) -> None:
        self.producer.send("orders.dead", b"v", b"key", (), self.errors.append)
        _, delivered = self.made[-1].queued.pop()
        delivered(answer, None)
        self.producer.poll()


@pytest.mark.parametrize(
    ("code", "kind", "says"),
    [
        (KafkaError.UNKNOWN_TOPIC_OR_PART, ProduceError, "topic 'orders.dead' does not exist"),
        (KafkaError._UNKNOWN_TOPIC, ProduceError, "topic 'orders.dead' does not exist"),
        (KafkaError.MSG_SIZE_TOO_LARGE, ProduceError, "A record of 4 bytes was not produced: it is larger than"),
        (KafkaError.TOPIC_AUTHORIZATION_FAILED, AuthorizationError, "needs the right WRITE on topic 'orders.dead'"),
        (KafkaError._MSG_TIMED_OUT, KafkaUnavailableError, "may come to be there twice"),
        (KafkaError.NOT_ENOUGH_REPLICAS, KafkaUnavailableError, "was not acknowledged in time"),
        (KafkaError.NOT_LEADER_FOR_PARTITION, KafkaUnavailableError, "was not acknowledged in time"),
        (KafkaError._PURGE_INFLIGHT, ClosedError, "closed before a record for topic 'orders.dead'"),
        (KafkaError.INVALID_RECORD, ProduceError, "Correct what the reason names"),
    ],
)
def test_why_a_record_was_not_produced(code: int, kind: type[Exception], says: str) -> None:
    producing = Producing()
    producing.send(KafkaError(code))
    (error,) = producing.errors
    assert type(error) is kind
    assert says in str(error)
    assert "orders.dead" in str(error)
    assert "not done and comes again" in str(error)


def test_a_record_that_was_not_accepted_says_so() -> None:
    producing = Producing()
    producing.troubles(KafkaError(KafkaError._AUTHENTICATION, "wrong password"))
    producing.send(KafkaError(KafkaError._MSG_TIMED_OUT))
    (error,) = producing.errors
    assert type(error) is AuthenticationError
    assert "wrong password" in str(error)


def test_a_record_for_a_full_queue_is_not_sent() -> None:
    producing = Producing()
    producing.made[0].failures = [BufferError(), BufferError()]
    producing.producer.send("orders.dead", b"v", None, (), producing.errors.append)
    assert producing.errors == [], "not before poll()"
    producing.producer.poll()
    (error,) = producing.errors
    assert type(error) is KafkaUnavailableError
    assert "queue.buffering.max.messages" in str(error)


def test_after_a_fatal_error_a_producer_begins_again() -> None:
    producing = Producing()
    sender = producing.producer
    sender.send("orders.dead", b"1", None, (), producing.errors.append)
    producing.troubles(KafkaError(KafkaError._FATAL, "out of sequence", fatal=True))
    producing.made[0].failures = [KafkaException(KafkaError(KafkaError._FATAL, "fatal", fatal=True))]
    sender.send("orders.dead", b"2", None, (), producing.errors.append)
    assert len(producing.made) == 1, "the first record is under way still"
    ((_, delivered),) = producing.made[0].queued
    delivered(KafkaError(KafkaError._PURGE_QUEUE), None)
    sender.poll()
    assert [type(error) for error in producing.errors] == [ProduceError] * 2
    assert ["out of sequence" in str(error) for error in producing.errors] == [True] * 2
    assert [getattr(error, "retry", None) for error in producing.errors] == [True] * 2
    producing.send(None)
    assert producing.errors[2:] == [None]
    assert len(producing.made) == 2
    assert producing.made[1].settings == producing.made[0].settings


# -- Brokers that are up but briefly fenced: a topic is created when they are registered again --------------------


FENCED = KafkaError(
    KafkaError.INVALID_REPLICATION_FACTOR,
    "Unable to replicate the partition 1 time(s): All brokers are currently fenced, or have all their log directories "
    "cordoned.",
)
TOO_MANY = KafkaError(
    KafkaError.INVALID_REPLICATION_FACTOR,
    "Unable to replicate the partition 3 time(s): The target replication factor of 3 cannot be reached because only 1 "
    "broker(s) are registered.",
)


@pytest.mark.parametrize(
    ("refusals", "within_s", "tries", "refused"),
    [([FENCED, FENCED], 10.0, 3, False), ([FENCED] * 9, 0.0, 1, True), ([TOO_MANY], 10.0, 1, True)],
)
def test_a_topic_is_created_as_soon_as_brokers_take_part_again(
    monkeypatch: pytest.MonkeyPatch, refusals: list[KafkaError], within_s: float, tries: int, refused: bool
) -> None:
    """A controller without heartbeats of any broker answers that the replication factor is invalid."""
    asked: list[float] = []

    class Controller:
        @contextmanager
        def use(self) -> Iterator[object]:
            yield self

        def create_topics(self, new: list[Any], request_timeout: float, **_: object) -> dict[str, Future[None]]:
            answer: Future[None] = Future()
            if len(asked) < len(refusals):
                answer.set_exception(KafkaException(refusals[len(asked)]))
            else:
                answer.set_result(None)
            asked.append(request_timeout)
            return {new[0].topic: answer}

    with closing(KafkaCluster(f"127.0.0.1:{closed_port()}")) as cluster, monkeypatch.context() as patch:
        patch.setattr(cluster, "_admin", Controller())
        patch.setattr(cluster, "_ready", lambda *_: True)
        if refused:
            with pytest.raises(CoordinationTopicError, match="did not create topic 't': Unable to replicate"):
                cluster.create_topic("t", 1, 1, {}, within_s)
        else:
            cluster.create_topic("t", 1, 1, {}, within_s)
    assert len(asked) == tries


# -- An AdminClient is never destroyed on a thread of librdkafka, which would abort the process -------------------


#: Arguments: bootstrap servers, whether the cluster is closed. An answer arrives after the cluster has become garbage,
#: and the collector starts on the thread that brings it.
PROGRAM = """
import gc, sys, threading
from confluent_kafka.admin import AdminClient
from kafka_marshal.adapters.kafka import KafkaCluster

arrived, dropped, collected = threading.Event(), threading.Event(), threading.Event()
ask = AdminClient.describe_configs

def answered(_):
    arrived.set()
    dropped.wait(10)
    gc.collect()
    collected.set()

def describe_configs(self, *args, **options):
    answers = ask(self, *args, **options)
    for answer in answers.values():
        answer.add_done_callback(answered)
    return answers

def use_and_drop():
    cluster = KafkaCluster(sys.argv[1])
    cluster.cycle = cluster
    assert cluster.topic_config("not-there", 10) is None
    assert arrived.wait(10)
    if sys.argv[2] == "closed":
        threading.Timer(0.2, dropped.set).start()
        cluster.close()

AdminClient.describe_configs = describe_configs
gc.disable()
use_and_drop()
dropped.set()
assert collected.wait(10)
for thread in threading.enumerate():
    if thread.name == "kafka-marshal-destroy":
        thread.join(10)
"""


@pytest.mark.parametrize("how", ["closed", "dropped"])
def test_garbage_collected_on_a_thread_of_librdkafka(kafka_bootstrap: str, how: str) -> None:
    command = [sys.executable, "-c", PROGRAM, kafka_bootstrap, how]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert ran.returncode == 0, ran.stderr


def test_a_client_in_use_outlives_its_close() -> None:
    admin = SharedAdmin({"bootstrap.servers": "127.0.0.1:1", "error_cb": lambda _error: None})
    with ExitStack() as stack:
        clients = [stack.enter_context(admin.use()) for _ in range(2)]
        closer = threading.Thread(target=admin.close)
        closer.start()
        closer.join(10)
        assert not closer.is_alive()  # it does not wait for its users
        with pytest.raises(ClosedError), admin.use():
            pass
        assert all(client.poll(0) >= 0 for client in clients)
    with pytest.raises(RuntimeError):
        clients[0].poll(0)
    admin.close()
