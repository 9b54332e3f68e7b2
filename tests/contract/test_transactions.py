"""Transactions, as far as the rules of exactly once lean on Kafka: the facts that they take for granted."""

from __future__ import annotations

import os
import threading
import time
from contextlib import closing
from random import Random

import pytest

from kafka_marshal.errors import (
    ClosedError,
    ConfigurationError,
    KafkaUnavailableError,
    ProduceError,
    TransactionError,
    TransactionFencedError,
)
from kafka_marshal.ports import TransactionalProducer
from tests.contract.sides import FOUND, TIMEOUT_S, DataLog, Side, eventually


class Work:
    """An input partition, an output topic and the group of one test."""

    def __init__(self, side: Side) -> None:
        self.side = side
        self.output = side.topic()
        self.key = (side.topic(), 0)
        self.group = f"g-{os.urandom(4).hex()}"
        self.id = f"{self.group}/{self.key[0]}/0"

    def producer(self, *, timeout_ms: int = 60_000) -> TransactionalProducer:
        """One that has taken over."""
        made = self.side.cluster.transactional_producer(self.id, {}, transaction_timeout_ms=timeout_ms)
        made.init(TIMEOUT_S)
        return made

    def commit(self, producer: TransactionalProducer, offset: int, *values: bytes, metadata: str = FOUND) -> None:
        producer.begin()
        for value in values:
            producer.send(self.output, value)
        producer.commit(self.group, self.key, offset, metadata, TIMEOUT_S)

    def committed(self) -> tuple[int, str] | None:
        return self.side.cluster.committed_offset(self.group, self.key, TIMEOUT_S)

    def ends(self) -> tuple[int, int]:
        """The last stable offset of the output, and its log end."""
        at, cluster = (self.output, 0), self.side.cluster
        stable = cluster.committed_watermarks([at], TIMEOUT_S)[at][1]
        return stable, cluster.watermarks([at], TIMEOUT_S)[at][1]

    def visible(self, count: int) -> list[object]:
        """Values that a reader of committed records has got when it has this many, and the end of all."""
        with closing(self.side.cluster.data_reader(self.group, {})) as reader:
            reader.assign({(self.output, 0): 0})
            log = DataLog(reader)
            log.until(lambda: len(log.messages) >= count, "the messages")
            return [message.value() for message in log.messages]


def test_outputs_and_progress_appear_together_and_not_before(side: Side) -> None:
    work = Work(side)
    assert work.committed() is None
    producer = work.producer()
    producer.begin()
    producer.send(work.output, b"first", b"k", [("h", b"1"), ("n", None)])
    producer.send(work.output, b"second", partition=0)
    eventually(lambda: work.ends() == (0, 2), "written, and not visible")
    assert work.committed() is None
    producer.commit(work.group, work.key, 5, FOUND, TIMEOUT_S)
    assert work.committed() == (5, FOUND)
    eventually(lambda: work.ends() == (3, 3), "a marker takes an offset")
    assert work.visible(2) == [b"first", b"second"]
    work.commit(producer, 9, b"third", metadata="")
    assert work.committed() == (9, "")
    eventually(lambda: work.visible(3) == [b"first", b"second", b"third"], "the next one")
    producer.close()


def test_what_is_aborted_is_never_seen(side: Side) -> None:
    work = Work(side)
    producer = work.producer()
    producer.begin()
    producer.abort(TIMEOUT_S)
    producer.begin()
    producer.send(work.output, b"given up")
    eventually(lambda: work.ends() == (0, 1), "written")
    producer.abort(TIMEOUT_S)
    producer.abort(TIMEOUT_S)
    assert work.committed() is None
    work.commit(producer, 1, b"kept")
    eventually(lambda: work.ends() == (4, 4), "two records, two markers")
    assert work.visible(1) == [b"kept"]
    producer.close()


def test_a_reader_waits_behind_an_open_transaction(side: Side) -> None:
    work = Work(side)
    side.produce(work.output, 0, [b"before"])
    producer = work.producer()
    producer.begin()
    producer.send(work.output, b"open")
    eventually(lambda: work.ends() == (1, 2), "written")
    side.produce(work.output, 0, [b"after"])
    with closing(side.cluster.data_reader(work.group, {})) as reader:
        reader.assign({(work.output, 0): 0})
        log = DataLog(reader)
        log.until(lambda: log.offsets(work.output, 0) == [0], "what is before")
        log.read()
        assert log.offsets(work.output, 0) == [0]
        producer.abort(TIMEOUT_S)
        log.until(lambda: log.offsets(work.output, 0) == [0, 2], "what is after")
    producer.close()


def test_init_fences_the_predecessor_and_ends_its_transaction(side: Side) -> None:
    work = Work(side)
    old = work.producer()
    work.commit(old, 3, b"done")
    old.begin()
    old.send(work.output, b"lost")
    eventually(lambda: work.ends() == (2, 3), "written")
    new = work.producer()
    assert work.committed() == (3, FOUND), "exact at once"
    with pytest.raises(TransactionFencedError, match=r"fenced \(.*come again"):
        old.commit(work.group, work.key, 4, FOUND, TIMEOUT_S)
    for _ in range(2):
        with pytest.raises(TransactionFencedError, match=r"fenced \(.*come again"):
            old.abort(TIMEOUT_S)
    work.commit(new, 4, b"again")
    assert work.committed() == (4, FOUND)
    eventually(lambda: work.visible(2) == [b"done", b"again"], "each once")
    old.close()
    new.close()


def test_a_producer_that_is_fenced_between_transactions(side: Side) -> None:
    work = Work(side)
    old = work.producer()
    work.commit(old, 3, b"done")
    new = work.producer()
    with pytest.raises(TransactionFencedError):
        work.commit(old, 4, b"lost")
    with pytest.raises(TransactionFencedError):
        old.abort(TIMEOUT_S)
    assert work.committed() == (3, FOUND)
    assert work.visible(1) == [b"done"]
    old.close()
    new.close()


def test_an_offset_that_is_pending_is_waited_for(side: Side) -> None:
    work = Work(side)
    work.commit(work.producer(), 3)
    commit = side.pending(work.id, work.group, work.key, 8)
    with pytest.raises(KafkaUnavailableError, match="may not have ended"):
        side.cluster.committed_offset(work.group, work.key, 0.5)
    found: list[tuple[int, str] | None] = []
    asking = threading.Thread(target=lambda: found.append(work.committed()))
    asking.start()
    assert found == []
    commit()
    asking.join(TIMEOUT_S)
    assert found == [(8, FOUND)]


def test_init_ends_what_is_pending(side: Side) -> None:
    """A crash between the offset and the commit: the successor reads the offset from before."""
    work = Work(side)
    work.commit(work.producer(), 3)
    side.pending(work.id, work.group, work.key, 8)
    successor = work.producer()
    assert work.committed() == (3, FOUND)
    successor.close()


def test_a_transaction_of_an_offset_alone_also_backwards(side: Side) -> None:
    work = Work(side)
    producer = work.producer()
    for offset in (7, 2, 0):
        work.commit(producer, offset)
        assert work.committed() == (offset, FOUND)
    producer.close()


def test_a_plain_commit_wins_over_an_offset_that_was_pending(side: Side) -> None:
    """Whenever the transaction ends: so an offset of another program is found by its metadata."""
    work = Work(side)
    commit = side.pending(work.id, work.group, work.key, 8)
    side.cluster.commit_for_group(work.group, {work.key: (2, "by hand")}, TIMEOUT_S)
    commit()
    assert work.committed() == (2, "by hand")
    work.commit(work.producer(), 9)
    assert work.committed() == (9, FOUND), "the next transaction wins again"


def test_partitions_and_keys_as_the_plain_producer(side: Side) -> None:
    work = Work(side)
    output = side.topic(3)
    producer, plain = work.producer(), side.cluster.producer({})
    producer.begin()
    for number in range(20):
        producer.send(output, b"transaction", b"%d" % number)
        plain.send(output, b"plain", b"%d" % number)
    producer.send(output, None, b"placed", (), 1)
    producer.send(output, b"placed", None, (), 1)
    assert plain.flush(TIMEOUT_S) == 0
    plain.close()
    producer.commit(work.group, work.key, 1, FOUND, TIMEOUT_S)
    producer.close()
    with closing(side.cluster.data_reader(work.group, {})) as reader:
        reader.assign({(output, partition): 0 for partition in range(3)})
        log = DataLog(reader)
        log.until(lambda: len(log.messages) == 42, "all of them")
    places: dict[object, list[object]] = {}
    for message in log.messages:
        places.setdefault(message.value() if message.key() is None else message.key(), []).append(message.partition())
    assert places.pop(b"placed") == [1, 1]
    assert {len(set(each)) for each in places.values()} == {1}


def test_a_record_that_is_too_large_or_has_no_topic_is_reported_by_commit(side: Side) -> None:
    work = Work(side)
    small = side.topic(1, {"max.message.bytes": "60000"})
    config = {"batch.size": 16_384}  # so that it is refused alone
    producer = side.cluster.transactional_producer(work.id, config, transaction_timeout_ms=60_000)
    producer.init(TIMEOUT_S)
    noise = Random(7).randbytes(70_000)  # incompressible
    for topic, value, retry, text in (
        (small, noise, False, r"70,000 bytes.*max\.message\.bytes"),
        ("no-such-topic", b"v", True, "'no-such-topic' does not exist"),
    ):
        producer.begin()
        producer.send(work.output, b"beside it")
        producer.send(topic, value)
        with pytest.raises(ProduceError, match=text) as caught:
            producer.commit(work.group, work.key, 5, FOUND, TIMEOUT_S)
        assert (caught.value.topic, caught.value.retry) == (topic, retry)
        producer.abort(TIMEOUT_S)
        assert work.committed() is None
    work.commit(producer, 6, b"afterwards")
    assert work.committed() == (6, FOUND)
    eventually(lambda: work.visible(1) == [b"afterwards"], "none beside")
    producer.close()


def test_calls_in_the_wrong_order_send_nothing(side: Side) -> None:
    work = Work(side)
    producer = side.cluster.transactional_producer(work.id, {}, transaction_timeout_ms=60_000)
    with pytest.raises(TransactionError):
        producer.begin()
    producer.init(TIMEOUT_S)
    with pytest.raises(TransactionError, match="no transaction is open"):
        producer.send(work.output, b"v")
    with pytest.raises(TransactionError, match="no transaction is open"):
        producer.commit(work.group, work.key, 1, FOUND, TIMEOUT_S)
    producer.begin()
    with pytest.raises(TransactionError, match="a transaction is open"):
        producer.begin()
    producer.close()
    producer.close()
    for call in (producer.begin, lambda: producer.send("t", b"v"), lambda: producer.abort(1), lambda: producer.init(1)):
        with pytest.raises(ClosedError):
            call()
    assert work.ends() == (0, 0)


def test_a_limit_above_that_of_the_brokers(side: Side) -> None:
    with pytest.raises(ConfigurationError, match=r"timeout of transactions of 7200 s.*transaction\.max\.timeout\.ms"):
        Work(side).producer(timeout_ms=7_200_000)


def test_without_a_broker_init_and_the_offset_end_in_time(side: Side) -> None:
    cluster = side.unreachable()
    producer = cluster.transactional_producer("g/t/0", {}, transaction_timeout_ms=10_000)
    began = time.monotonic()
    for _ in range(2):
        with pytest.raises(KafkaUnavailableError, match="no answer"):
            producer.init(0.3)
    with pytest.raises(KafkaUnavailableError):
        cluster.committed_offset("g", ("t", 0), 0.3)
    producer.close()
    assert time.monotonic() - began < 5.0


def test_a_transaction_that_is_open_for_too_long_is_ended_by_the_broker_in_memory() -> None:
    from kafka_marshal.adapters.memory import MemoryCluster

    now = 1_000.0
    cluster = MemoryCluster(lambda: now)
    cluster.broker.create_topic("o")
    producer = cluster.transactional_producer("g/t/0", {}, transaction_timeout_ms=500)
    producer.init(0)
    producer.begin()
    producer.send("o", b"v")
    now += 500
    assert cluster.committed_watermarks([("o", 0)], 0) == {("o", 0): (0, 2)}
    with pytest.raises(TransactionFencedError):
        producer.commit("g", ("t", 0), 1, "", 0)
    producer.init(0)
