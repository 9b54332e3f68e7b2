"""Expected clients connect ahead; used, they are like any other, and unused ones are closed."""

from __future__ import annotations

import threading
import time

import pytest

from kafka_marshal.adapters.kafka import KafkaCluster
from kafka_marshal.client.marshal import Marshal
from kafka_marshal.errors import KafkaUnavailableError, TopicMissingError
from kafka_marshal.ports import Ack
from tests.contract.sides import LOG_TIME, TIMEOUT_S, KafkaSide, Side, TailLog, append, closed_port, eventually

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
