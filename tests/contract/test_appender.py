"""The appender of the coordination topic (L1, C17)."""

from __future__ import annotations

import threading
import time

import pytest

from kafka_marshal.errors import ClosedError
from kafka_marshal.ports import Ack, Appender
from tests.contract.sides import LOG_TIME, TIMEOUT_S, DataLog, Side, TailLog, eventually


def written(side: Side, topic: str, partition: int = 0) -> int:
    return side.cluster.watermarks([(topic, partition)], TIMEOUT_S)[topic, partition][1]


def flush(appender: Appender) -> None:
    assert appender.flush(TIMEOUT_S) == 0


def test_acks_name_the_offsets(side: Side) -> None:
    topic = side.topic(2, LOG_TIME)
    appender = side.cluster.appender(topic, delivery_timeout_ms=10_000)
    acks: dict[int, list[Ack]] = {0: [], 1: []}
    for number in range(10):
        appender.append(number % 2, b"%d" % number, acks[number % 2].append)
    flush(appender)
    expected = [Ack(offset) for offset in range(5)]
    assert acks == {0: expected, 1: expected}
    log = TailLog(side.cluster.tail(topic, {0: 0, 1: 0}))
    log.until(lambda: len(log.values(0)) + len(log.values(1)) == 10, "all is read")
    assert log.values(0) == [b"0", b"2", b"4", b"6", b"8"]
    log.tail.close()
    appender.close()


def test_acks_come_from_poll_and_flush_only(side: Side) -> None:
    topic = side.topic(1, LOG_TIME)
    appender = side.cluster.appender(topic, delivery_timeout_ms=10_000)
    threads: list[int] = []
    appender.append(0, b"a", lambda ack: threads.append(threading.get_ident()))
    eventually(lambda: written(side, topic) == 1, "the record is in the log")
    appender.append(0, b"b")
    eventually(lambda: written(side, topic) == 2, "so is the next")
    assert threads == []

    def polled() -> bool:
        appender.poll(0.1)
        return bool(threads)

    eventually(polled, "poll() calls the ack")
    assert threads == [threading.get_ident()]
    appender.close()


def test_the_key_is_empty(side: Side) -> None:
    """E1."""
    topic = side.topic(1, LOG_TIME)
    appender = side.cluster.appender(topic, delivery_timeout_ms=10_000)
    appender.append(0, b"value")
    flush(appender)
    appender.close()
    reader = side.cluster.data_reader("g", {})
    reader.assign({(topic, 0): 0})
    log = DataLog(reader)
    log.until(lambda: log.messages, "it is read")
    assert (log.messages[0].key(), log.messages[0].value()) == (b"", b"value")
    reader.close()


def test_many_threads_append_each_in_its_order(side: Side) -> None:
    topic = side.topic(1, LOG_TIME)
    appender = side.cluster.appender(topic, delivery_timeout_ms=10_000)
    acks: list[Ack] = []

    def append(thread: int) -> None:
        for number in range(200):
            appender.append(0, b"%d %d" % (thread, number), acks.append)

    threads = [threading.Thread(target=append, args=(thread,)) for thread in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    flush(appender)
    assert sorted(ack.offset for ack in acks if ack.offset is not None) == list(range(1600))
    log = TailLog(side.cluster.tail(topic, {0: 0}))
    log.until(lambda: len(log.values(0)) == 1600, "all is read")
    for each in range(8):
        mine = [value for value in log.values(0) if value is not None and value.startswith(b"%d " % each)]
        assert mine == [b"%d %d" % (each, number) for number in range(200)]
    log.tail.close()
    appender.close()


@pytest.mark.parametrize("size", [60_000, 1_100_000])
def test_a_record_too_large_fails_alone(side: Side, size: int) -> None:
    """60,000 bytes are rejected by the broker, 1,100,000 by the client."""
    topic = side.topic(1, {**LOG_TIME, "max.message.bytes": "50000"})
    appender = side.cluster.appender(topic, delivery_timeout_ms=10_000)
    acks: dict[str, Ack] = {}
    appender.append(0, b"x" * size, lambda ack: acks.__setitem__("large", ack))
    assert not acks
    flush(appender)
    appender.append(0, b"small", lambda ack: acks.__setitem__("small", ack))
    flush(appender)
    assert acks["large"].error
    assert acks["large"].offset is None
    assert not acks["large"].fatal
    assert acks["small"] == Ack(0)
    appender.close()


def test_an_unknown_partition_or_topic_fails_in_time(side: Side) -> None:
    acks: list[Ack] = []
    for topic, partition in ((side.topic(1, LOG_TIME), 7), ("nobody-made-this", 0)):
        appender = side.cluster.appender(topic, delivery_timeout_ms=700)
        began = time.monotonic()
        appender.append(partition, b"v", acks.append)
        flush(appender)
        assert time.monotonic() - began < 5.0
        appender.close()
    assert [(ack.offset, bool(ack.error), ack.fatal) for ack in acks] == [(None, True, False)] * 2
    assert "nobody-made-this" not in side.cluster.topics(TIMEOUT_S)


def test_without_a_broker_a_record_is_given_up_in_time(side: Side) -> None:
    """L1: within the delivery timeout."""
    appender = side.unreachable().appender("t", delivery_timeout_ms=500)
    acks: list[Ack] = []
    appender.append(0, b"v", acks.append)
    assert appender.flush(0.1) == 1, "still outstanding"
    assert acks == []
    began = time.monotonic()
    flush(appender)
    assert time.monotonic() - began < 5.0
    assert [(ack.offset, bool(ack.error), ack.fatal) for ack in acks] == [(None, True, False)]
    appender.close()


def test_close_drops_what_is_left_and_says_so(side: Side) -> None:
    appender = side.unreachable().appender("t", delivery_timeout_ms=60_000)
    acks: list[Ack] = []
    for _ in range(3):
        appender.append(0, b"v", acks.append)
    began = time.monotonic()
    appender.close(0.1)
    assert time.monotonic() - began < 5.0
    assert [(ack.offset, bool(ack.error)) for ack in acks] == [(None, True)] * 3


def test_close_waits_for_acks_as_long_as_asked(side: Side) -> None:
    topic = side.topic(1, LOG_TIME)
    appender = side.cluster.appender(topic, delivery_timeout_ms=10_000)
    acks: list[Ack] = []
    for _ in range(100):
        appender.append(0, b"v", acks.append)
    appender.close(TIMEOUT_S)
    assert acks == [Ack(offset) for offset in range(100)]
    assert written(side, topic) == 100


def test_an_ack_may_append(side: Side) -> None:
    topic = side.topic(1, LOG_TIME)
    appender = side.cluster.appender(topic, delivery_timeout_ms=10_000)
    acks: list[Ack] = []

    def again(ack: Ack) -> None:
        acks.append(ack)
        if len(acks) < 5:
            appender.append(0, b"v", again)

    appender.append(0, b"v", again)

    def flushed() -> bool:
        flush(appender)
        return len(acks) == 5

    eventually(flushed, "the chain of appends")
    assert acks == [Ack(offset) for offset in range(5)]
    appender.close()


def test_after_close(side: Side) -> None:
    appender = side.cluster.appender(side.topic(1, LOG_TIME), delivery_timeout_ms=1000)
    appender.close()
    appender.close()
    for call in (lambda: appender.append(0, b"v"), appender.poll, lambda: appender.flush(0.1)):
        with pytest.raises(ClosedError):
            call()
