"""What a cluster that does not answer is said to be, and how often it is tried."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException, Producer
from confluent_kafka.admin import AdminClient

from kafka_marshal import Admin, ConfigurationError, Marshal
from kafka_marshal.adapters.kafka import KafkaCluster
from kafka_marshal.adapters.kafka.errors import Troubles, marshal_error
from kafka_marshal.adapters.kafka.writers import KafkaTransactionalProducer
from kafka_marshal.cli import main
from kafka_marshal.errors import KafkaUnavailableError, TopicMissingError, TransactionError
from kafka_marshal.node.coordination_topic import create_topic
from kafka_marshal.ports import Ack, FaultKind
from kafka_marshal.testing import LocalBroker, TcpProxy
from kafka_marshal.testing.layout import free_ports
from kafka_marshal.testing.proxy import Direction
from tests.contract.sides import (
    FOUND,
    LOG_TIME,
    TIMEOUT_S,
    DataLog,
    KafkaSide,
    Side,
    TailLog,
    append,
    closed_port,
    eventually,
)
from tests.contract.test_kafka_errors import say_nothing, server
from tests.contract.test_transactions import Work


def test_a_frozen_broker_is_silent_and_neither_refuses_nor_is_old() -> None:
    """librdkafka's last word may be of the time before it froze, and its guesses of 2016."""
    troubles = Troubles()
    troubles(KafkaError(KafkaError._TRANSPORT, "host:1: Connection refused (after 5002ms in state APIVERSION_QUERY)"))
    with server(say_nothing) as port:
        error = marshal_error(KafkaError(KafkaError._TIMED_OUT), "asking", f"127.0.0.1:{port}", troubles)
    assert type(error) is KafkaUnavailableError
    assert f"127.0.0.1:{port} accepts connections and is silent" in str(error)
    assert not any(each in str(error) for each in ("refused", "security.protocol", "advertised"))


def test_a_connection_that_is_neither_accepted_nor_refused() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        address = listener.getsockname()
        waiting = [socket.socket() for _ in range(4)]  # more than it keeps: further ones get no answer
        for each in waiting:
            each.setblocking(False)
            each.connect_ex(address)
        error = marshal_error(KafkaError(KafkaError._TIMED_OUT), "asking", f"127.0.0.1:{address[1]}")
        for each in waiting:
            each.close()
    assert "neither accepts nor refuses" in str(error)
    assert "frozen" in str(error), "it accepts as many as its backlog holds"
    assert "firewall" in str(error)


@pytest.mark.parametrize(
    "line",
    [
        "b:1: ApiVersionRequest failed: Timed out: probably due to broker version < 0.10 (see api.version.request)",
        "b:1: Disconnected: requesting ApiVersion: might be caused by broker version < 0.10 (see api.version.request)",
    ],
)
def test_what_librdkafka_guesses_is_left_out(line: str) -> None:
    troubles = Troubles()
    troubles(KafkaError(KafkaError._TRANSPORT, line))
    troubles.log(logging.ERROR, "%s (after 3ms in state APIVERSION_QUERY)", line)
    reason = troubles.recent()
    assert reason is not None
    assert "0.10" not in reason.str()
    assert "b:1: " in reason.str()


def test_a_broken_connection_is_asked_again_but_no_change(kafka_bootstrap: str) -> None:
    """As one slow answer among those of a fleet that starts."""
    with closing(KafkaCluster(kafka_bootstrap)) as cluster:
        tries: list[float] = []

        def ask(_admin: AdminClient, left_s: float) -> int:
            tries.append(left_s)
            if len(tries) % 2:
                raise KafkaException(KafkaError(KafkaError._TRANSPORT))
            return 7

        assert cluster._questions.ask("asking", 10.0, ask) == 7
        assert len(tries) == 2
        with pytest.raises(KafkaUnavailableError, match="not known"):
            cluster._questions.ask("changing", 10.0, ask, changing=True)
        assert len(tries) == 3


def test_a_client_without_a_broker_connects_ten_times_a_second_at_most() -> None:
    """librdkafka asks for its coordinator without a pause: 90 times a second with reconnect.backoff.ms at 10."""
    connected: list[float] = []

    def note(connection: socket.socket) -> None:
        connected.append(time.monotonic())
        connection.close()

    with server(note) as port:
        cluster = KafkaCluster(f"127.0.0.1:{port}")
        tail = cluster.tail("t", {0: 0})
        eventually(lambda: len(connected) > 20 or (connected and time.monotonic() > connected[0] + 4), "connections")
        tail.close()
        cluster.close()
    assert len([at for at in connected if at < connected[0] + 1]) <= 15


# -- Bootstrap addresses of two clusters: each has its own log, so both would assign the same partitions ----------


DIFFERENT = "brokers of different clusters"


@pytest.fixture(scope="module")
def addresses(kafka_bootstrap: str) -> Iterator[list[str]]:
    with LocalBroker() as other:
        found = [kafka_bootstrap, other.bootstrap_servers]
        for address in found:
            cluster = KafkaCluster(address)
            create_topic(cluster, "__two", 2, 10)
            cluster.close()
        yield found


@pytest.mark.parametrize("order", [1, -1])
def test_q35_two_clusters_are_refused_by_name(addresses: list[str], order: int) -> None:
    with pytest.raises(ConfigurationError, match=DIFFERENT) as told:
        Marshal(",".join(addresses[::order]), group_id="g", topic="__two")
    assert all(address in str(told.value) for address in addresses)


def test_q35_two_clusters_are_refused_to_an_admin(addresses: list[str]) -> None:
    with pytest.raises(ConfigurationError, match=DIFFERENT), Admin(",".join(addresses), topic="__two").pause("g"):
        pytest.fail("paused the group on one cluster of two")


@pytest.mark.parametrize("command", ["init", "status"])
def test_q35_two_clusters_are_refused_by_the_command(
    addresses: list[str], command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main([command, "--bootstrap", ",".join(addresses), "--topic", "__two"])
    assert code == 2
    assert DIFFERENT in capsys.readouterr().err


def test_one_cluster_by_two_names_is_one(addresses: list[str]) -> None:
    port = addresses[0].rpartition(":")[2]
    cluster = KafkaCluster(f"{addresses[0]},localhost:{port}")
    found = cluster.cluster_ids(10)
    cluster.close()
    assert len(found) == 2
    assert len(set(found.values())) == 1


def test_an_address_that_is_down_is_left_out_and_not_waited_for(addresses: list[str]) -> None:
    dead = f"127.0.0.1:{free_ports(1)[0]}"
    cluster = KafkaCluster(f"{dead},{addresses[0]}")
    found = cluster.cluster_ids(60)
    cluster.close()
    assert list(found) == addresses[:1]
    with Marshal(f"{dead},{addresses[0]}", group_id="g", topic="__two") as marshal:
        assert marshal.world.leases() == []


def test_one_address_is_not_asked(addresses: list[str]) -> None:
    cluster = KafkaCluster(addresses[0])
    assert cluster.cluster_ids(60) == {}
    cluster.close()


def test_q35_a_member_that_learns_it_later_ends(addresses: list[str]) -> None:
    """The second cluster's broker starts while the member is working."""
    with pytest.raises(ConfigurationError, match=DIFFERENT):
        _meet_late(addresses)


def _meet_late(addresses: list[str]) -> None:
    cluster = KafkaCluster(",".join(addresses))
    known, asked = cluster.cluster_ids, 0

    def slow(wait_s: float) -> dict[str, str]:
        nonlocal asked
        asked += 1
        return {} if asked <= 2 else known(10)

    cluster.cluster_ids = slow  # type: ignore[method-assign]
    with (
        Marshal.on_cluster(cluster, group_id="g", topic="__two") as marshal,
        marshal.consumer(["nothing"]) as consumer,
    ):
        consumer.poll(20)


# -- Expected clients connect ahead; used, they are like any other, and unused ones are closed --------------------


HI = 1_000
#: A connected consumer with an unknown topic asks for it only after this time (s).
ASKED_AGAIN_S = 1.0


def test_what_was_expected_reads_and_appends_like_any_other(side: Side) -> None:
    topic = side.topic(2, LOG_TIME)
    append(side, topic, 1, [b"first", b"second"])
    side.cluster.expect(topic, delivery_timeout_ms=HI)
    side.cluster.expect(topic, delivery_timeout_ms=HI)
    log, second = (TailLog(side.cluster.tail(topic, {0: 0, 1: at})) for at in (1, 0))
    log.until(lambda: log.values(1) == [b"second"], "what was there is read")
    second.until(lambda: second.values(1) == [b"first", b"second"], "another tail reads for itself")
    appender, other = (side.cluster.appender(topic, delivery_timeout_ms=HI) for _ in range(2))
    assert appender is not other
    acks: list[Ack] = []
    appender.append(0, b"new", acks.append)
    appender.flush(TIMEOUT_S)
    assert [ack.offset for ack in acks] == [0]
    log.until(lambda: log.values(0) == [b"new"], "it goes on")
    for each in (log.tail, second.tail, appender, other):
        each.close()


def first_record_of_an_expected_tail_s(side: KafkaSide) -> float:
    topic = side.topic(1, LOG_TIME)
    append(side, topic, 0, [b"first"])
    side.cluster.expect(topic, delivery_timeout_ms=HI)
    for _ in range(100):  # some tenths of a second, as in a start: it is connected then
        side.cluster.topics(TIMEOUT_S)
    began = time.monotonic()
    log = TailLog(side.cluster.tail(topic, {0: 0}))
    log.until(lambda: log.values(0), "it is read")
    log.tail.close()
    return time.monotonic() - began


@pytest.mark.broker
def test_a_tail_that_was_expected_need_not_ask_twice(kafka_side: KafkaSide) -> None:
    """A connected client that does not know its topic sometimes asks only after a second."""
    took = [first_record_of_an_expected_tail_s(kafka_side) for _ in range(8)]
    assert max(took) < ASKED_AGAIN_S / 2, took


@pytest.mark.broker
def test_a_start_that_fails_leaves_no_thread(kafka_side: KafkaSide) -> None:
    before = set(threading.enumerate())
    assert isinstance(kafka_side.cluster, KafkaCluster)
    with pytest.raises(TopicMissingError):
        Marshal(kafka_side.cluster._bootstrap, group_id="g", topic="nobody-made-this")
    eventually(lambda: not set(threading.enumerate()) - before, "all threads of it have ended")


def test_a_start_without_a_broker_says_so_and_closes_all() -> None:
    before = set(threading.enumerate())
    with pytest.raises(KafkaUnavailableError):
        Marshal(f"127.0.0.1:{closed_port()}", group_id="g", timeout=0.5)
    eventually(lambda: not set(threading.enumerate()) - before, "all threads of it have ended")


# -- A broker that goes and comes back, or whose answers are lost -------------------------------------------------


@pytest.fixture(scope="module")
def proxied() -> Iterator[tuple[TcpProxy, LocalBroker]]:
    """A broker behind a network that can fail."""
    with TcpProxy() as proxy, LocalBroker(advertised_port=proxy.port) as broker:
        proxy.target_port = broker.port
        yield proxy, broker


class _FailsAtCommit:
    """A librdkafka producer that calls something before its commit."""

    def __init__(self, producer: Producer, call: Callable[[], object]) -> None:
        self._producer = producer
        self._call = call

    def __getattr__(self, name: str) -> Any:
        return getattr(self._producer, name)

    def __len__(self) -> int:
        return len(self._producer)

    def commit_transaction(self, timeout: float) -> None:
        self._call()
        self._producer.commit_transaction(timeout)


@pytest.mark.broker
@pytest.mark.parametrize("lost", [Direction.TO_CLIENT, Direction.TO_BROKER])
def test_a_commit_without_an_answer_is_decided_by_the_successor(
    proxied: tuple[TcpProxy, LocalBroker], lost: Direction
) -> None:
    proxy, broker = proxied
    with closing(KafkaSide(broker.bootstrap_servers, {})) as side:
        work = Work(side)
        producer = work.producer()
        work.commit(producer, 4, b"before")  # a new broker takes a while to find the group's coordinator
        assert isinstance(producer, KafkaTransactionalProducer)
        producer._producer = _FailsAtCommit(producer._producer, lambda: proxy.black_hole(lost))  # type: ignore[assignment]
        producer.begin()
        producer.send(work.output, b"once")
        with pytest.raises(KafkaUnavailableError, match="It may be committed, or come to be"):
            producer.commit(work.group, work.key, 5, FOUND, 1.0)
        for call in (producer.begin, lambda: producer.abort(1.0)):
            with pytest.raises(TransactionError):
                call()
        producer.close()
        proxy.restore()
        with closing(work.producer()) as successor:
            found = work.committed()
            assert found == (5, FOUND) if lost is Direction.TO_CLIENT else found in ((4, FOUND), (5, FOUND))
            if found == (4, FOUND):
                work.commit(successor, 5, b"once")
            assert work.visible(2) == [b"before", b"once"]
            eventually(lambda: len(set(work.ends())) == 1, "nothing is open")
            assert work.visible(2) == [b"before", b"once"]


@pytest.mark.broker
def test_everything_continues_after_an_outage(proxied: tuple[TcpProxy, LocalBroker]) -> None:
    """Nothing is lost, repeated or out of order; the tail reports the outage."""
    proxy, broker = proxied
    with closing(KafkaSide(broker.bootstrap_servers, {})) as side:
        topic = side.topic(1, {"message.timestamp.type": "LogAppendTime"})
        tail = TailLog(side.cluster.tail(topic, {0: 0}))
        data = DataLog(side.cluster.data_reader("g", {}))
        data.reader.assign({(topic, 0): 0})
        appender = side.cluster.appender(topic, delivery_timeout_ms=30_000)
        acks: list[Ack] = []

        def send(first: int) -> None:
            for number in range(first, first + 10):
                appender.append(0, b"%d" % number, acks.append)

        send(0)
        tail.until(lambda: len(tail.values(0)) == 10, "all is well")
        data.until(lambda: len(data.messages) == 10, "all is well")
        proxy.cut()
        tail.until(lambda: tail.faults, "the tail tells of the outage")
        send(10)
        with pytest.raises(KafkaUnavailableError):
            side.cluster.watermarks([(topic, 0)], 0.5)
        proxy.restore()
        tail.until(lambda: len(tail.values(0)) == 20, "what was sent meanwhile arrives")
        data.until(lambda: len(data.messages) == 20, "what was sent meanwhile arrives")
        send(20)
        tail.until(lambda: len(tail.values(0)) == 30, "it goes on")
        assert tail.values(0) == [b"%d" % number for number in range(30)]
        assert {fault.kind for fault in tail.faults} == {FaultKind.UNREACHABLE}
        assert appender.flush(TIMEOUT_S) == 0
        assert [ack.offset for ack in acks] == list(range(30))
        assert side.cluster.watermarks([(topic, 0)], TIMEOUT_S) == {(topic, 0): (0, 30)}
        appender.close()
        tail.tail.close()
        data.reader.close()
