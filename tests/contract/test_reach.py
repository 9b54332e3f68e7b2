"""What a cluster that does not answer is said to be, and how often it is tried."""

from __future__ import annotations

import logging
import socket
import time
from contextlib import closing

import pytest
from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient

from kafka_marshal.adapters.kafka import KafkaCluster
from kafka_marshal.adapters.kafka.errors import Troubles, marshal_error
from kafka_marshal.errors import KafkaUnavailableError
from tests.contract.sides import eventually
from tests.contract.test_kafka_errors import say_nothing, server


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
