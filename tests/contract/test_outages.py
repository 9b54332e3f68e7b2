"""A broker that goes and comes back, or whose answers are lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
from confluent_kafka import Producer

from kafka_marshal.adapters.kafka.writers import KafkaTransactionalProducer
from kafka_marshal.errors import KafkaUnavailableError, TransactionError
from kafka_marshal.ports import Ack, FaultKind
from kafka_marshal.testing import LocalBroker, TcpProxy
from kafka_marshal.testing.proxy import Direction
from tests.contract.sides import FOUND, TIMEOUT_S, DataLog, KafkaSide, TailLog, eventually
from tests.contract.test_transactions import Work


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
