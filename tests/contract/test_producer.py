"""The producer of records for users' topics: dead letters."""

from __future__ import annotations

import threading
import time
from random import Random

import pytest

from kafka_marshal.adapters.memory import AppendFate, MemoryCluster
from kafka_marshal.errors import ClosedError, KafkaUnavailableError, ProduceError
from kafka_marshal.ports import Message, Producer
from kafka_marshal.testing.simulation.living import Trouble
from tests.contract.sides import TIMEOUT_S, DataLog, KafkaSide, Side, SimulatedSide, eventually

Errors = list[Exception | None]

#: Keys and their murmur2 hashes in Java (from Kafka's tests).
HASHES = {
    b"21": -973932308,
    b"foobar": -790332482,
    b"a-little-bit-long-string": -985981536,
    b"a-little-bit-longer-string": -1486304829,
    b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8": -58897971,
    b"abc": 479470107,
}
PARTITIONS = 7


def flush(producer: Producer) -> None:
    assert producer.flush(TIMEOUT_S) == 0


def read(side: Side, topic: str, count: int, partitions: int = 1) -> list[Message]:
    reader = side.cluster.data_reader("g", {})
    reader.assign({(topic, partition): 0 for partition in range(partitions)})
    log = DataLog(reader)
    log.until(lambda: len(log.messages) >= count, f"{count} records")
    reader.close()
    return log.messages


def now_ms() -> float:
    return time.time() * 1000


def test_a_record_arrives_as_it_was_sent(side: Side) -> None:
    topic = side.topic()
    producer = side.cluster.producer({})
    errors: Errors = []
    began = now_ms()
    headers = [("text", b"a"), ("text", b"again"), ("\u00fc", b"\xff\x00"), ("empty", b""), ("null", None)]
    producer.send(topic, b"\x00\xff", b"\xfe", headers, errors.append)
    producer.send(topic, None, None, (), errors.append)
    producer.send(topic, b"", b"", [], errors.append)
    flush(producer)
    ended = now_ms()
    assert errors == [None] * 3
    full, none, empty = read(side, topic, 3)
    assert (full.key(), full.value(), full.headers()) == (b"\xfe", b"\x00\xff", headers)  # type: ignore[attr-defined]
    assert (none.key(), none.value(), none.headers()) == (None, None, None)  # type: ignore[attr-defined]
    assert (empty.key(), empty.value()) == (b"", b"")
    for each in (full, none, empty):
        kind, stamp = each.timestamp()  # type: ignore[attr-defined]
        assert kind == 1, "the sender's stamp, of the moment it was sent"
        assert began - 2 <= stamp <= ended + 2
    producer.close()


def test_the_partition_is_that_of_javas_producer(side: Side) -> None:
    topic = side.topic(PARTITIONS)
    producer = side.cluster.producer({})
    for key in HASHES:
        producer.send(topic, b"v", key)
    flush(producer)
    producer.close()
    expected = {key: (value & 0x7FFFFFFF) % PARTITIONS for key, value in HASHES.items()}
    assert {each.key(): each.partition() for each in read(side, topic, len(HASHES), PARTITIONS)} == expected


def test_records_of_one_key_keep_their_order(side: Side) -> None:
    topic = side.topic(3)
    producer = side.cluster.producer({})
    errors: Errors = []
    for number in range(300):
        producer.send(topic, b"%d" % number, b"key %d" % (number % 10), (), errors.append)
    flush(producer)
    assert errors == [None] * 300
    found: dict[object, list[object]] = {}
    for each in read(side, topic, 300, 3):
        found.setdefault(each.key(), []).append(each.value())
    assert found == {b"key %d" % key: [b"%d" % number for number in range(key, 300, 10)] for key in range(10)}
    producer.close()


def test_one_producer_for_many_topics_and_threads(side: Side) -> None:
    topics = [side.topic(), side.topic()]
    producer = side.cluster.producer({})
    errors: Errors = []

    def send(thread: int) -> None:
        for number in range(100):
            producer.send(topics[thread % 2], b"%d %d" % (thread, number), None, (), errors.append)

    threads = [threading.Thread(target=send, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    flush(producer)
    assert errors == [None] * 400
    for which, topic in enumerate(topics):
        values = [each.value() for each in read(side, topic, 200)]
        for sender in (which, which + 2):
            mine = [value for value in values if isinstance(value, bytes) and value.startswith(b"%d " % sender)]
            assert mine == [b"%d %d" % (sender, number) for number in range(100)]
    producer.close()


def test_acks_come_from_poll_and_flush_only(side: Side) -> None:
    topic = side.topic()
    producer = side.cluster.producer({})
    threads: list[int] = []
    producer.send(topic, b"v", None, (), lambda error: threads.append(threading.get_ident()))
    read(side, topic, 1)
    assert threads == []

    def polled() -> bool:
        producer.poll(0.1)
        return bool(threads)

    eventually(polled, "poll() calls the ack")
    assert threads == [threading.get_ident()]
    producer.close()


def test_poll_waits_for_the_first_ack_and_no_longer(side: Side) -> None:
    topic = side.topic()
    producer = side.cluster.producer({})
    errors: Errors = []
    producer.send(topic, b"v", None, (), errors.append)
    began = time.monotonic()

    def polled() -> bool:
        producer.poll(TIMEOUT_S)
        return bool(errors)

    eventually(polled, "the ack")
    assert errors == [None]
    assert time.monotonic() - began < TIMEOUT_S / 2
    began = time.monotonic()
    producer.poll(0.05)
    assert time.monotonic() - began < 5.0
    producer.close()


def test_an_ack_may_send(side: Side) -> None:
    topic = side.topic()
    producer = side.cluster.producer({})
    errors: Errors = []

    def again(error: Exception | None) -> None:
        errors.append(error)
        if len(errors) < 5:
            producer.send(topic, b"v", None, (), again)

    producer.send(topic, b"v", None, (), again)

    def flushed() -> bool:
        flush(producer)
        return len(errors) == 5

    eventually(flushed, "the chain of records")
    assert errors == [None] * 5
    producer.close()


def test_a_record_too_large_fails_alone(side: Side) -> None:
    topic = side.topic(1, {"max.message.bytes": "60000"})
    producer = side.cluster.producer({})
    errors: dict[str, Exception | None] = {}
    noise = Random(7).randbytes(70_000)  # incompressible
    for name, value in (("before", b"a"), ("large", noise), ("after", b"b" * 20_000)):
        producer.send(topic, value, b"k", (), lambda error, name=name: errors.__setitem__(name, error))  # type: ignore[misc]
    assert errors == {}
    flush(producer)
    assert errors["before"] is errors["after"] is None
    error = errors["large"]
    assert type(error) is ProduceError
    assert (error.topic, error.retry) == (topic, False)
    assert topic in str(error)
    assert "70,001 bytes" in str(error)
    assert "max.message.bytes" in str(error)
    assert "not done and comes again" in str(error)
    assert [each.value() for each in read(side, topic, 2)] == [b"a", b"b" * 20_000]
    producer.close()


def test_a_record_may_be_as_large_as_the_topic_allows(side: Side) -> None:
    """The client has no limit below the topic's: any message fits as a dead letter."""
    topic = side.topic(1, {"max.message.bytes": "3000000"})
    producer = side.cluster.producer({})
    errors: Errors = []
    producer.send(topic, b"x" * 2_500_000, None, (), errors.append)
    flush(producer)
    assert errors == [None]
    producer.close()


@pytest.mark.broker
def test_a_value_that_fits_compressed_is_taken(kafka_side: KafkaSide) -> None:
    """Sources may have compressed batches, with larger values than a topic accepts uncompressed."""
    topic = kafka_side.topic(1, {"max.message.bytes": "60000"})
    producer = kafka_side.cluster.producer({})
    errors: Errors = []
    producer.send(topic, b"x" * 200_000, None, (), errors.append)
    flush(producer)
    assert errors == [None]
    producer.close()


def test_a_topic_that_does_not_exist(side: Side) -> None:
    producer = side.cluster.producer({})
    errors: Errors = []
    began = time.monotonic()
    producer.send("nobody-made-this", b"v", None, (), errors.append)
    flush(producer)
    assert time.monotonic() - began < 10.0
    (error,) = errors
    assert type(error) is ProduceError
    assert (error.topic, error.retry) == ("nobody-made-this", True)
    assert "'nobody-made-this' does not exist" in str(error)
    assert "not done and comes again" in str(error)
    assert "nobody-made-this" not in side.cluster.topics(TIMEOUT_S), "nor does it now"
    topic = side.topic()
    producer.send(topic, b"v", None, (), errors.append)
    flush(producer)
    assert errors[1:] == [None], "the next record goes its way"
    producer.close()


def test_a_topic_that_was_deleted_and_recreated(side: Side) -> None:
    topic = side.topic()
    producer = side.cluster.producer({}, delivery_timeout_ms=5_000)
    errors: Errors = []
    producer.send(topic, b"old", None, (), errors.append)
    flush(producer)
    side.delete_topic(topic)
    side.cluster.create_topic(topic, 1, 1, {}, TIMEOUT_S)

    def sent() -> bool:
        producer.send(topic, b"new", None, (), errors.append)
        flush(producer)
        return errors[-1] is None

    eventually(sent, "a record in the new topic")
    assert read(side, topic, 1)[-1].value() == b"new"
    producer.close()


def test_without_a_broker_a_record_is_given_up_in_time(side: Side) -> None:
    producer = side.unreachable().producer({}, delivery_timeout_ms=500)
    errors: Errors = []
    producer.send("t", b"v", None, (), errors.append)
    assert producer.flush(0.1) == 1, "still outstanding"
    assert errors == []
    began = time.monotonic()
    flush(producer)
    assert time.monotonic() - began < 5.0
    (error,) = errors
    assert type(error) is KafkaUnavailableError
    assert "It may be in the topic all the same" in str(error)
    assert "not done and comes again" in str(error)
    producer.close()


def test_close_fails_what_is_left_and_says_so(side: Side) -> None:
    producer = side.unreachable().producer({}, delivery_timeout_ms=60_000)
    errors: Errors = []
    for _ in range(3):
        producer.send("t", b"v", None, (), errors.append)
    began = time.monotonic()
    producer.close(0.1)
    assert time.monotonic() - began < 5.0
    assert [type(error) for error in errors] == [ClosedError] * 3
    assert "not done and comes again" in str(errors[0])


def test_close_waits_for_acks_as_long_as_asked(side: Side) -> None:
    topic = side.topic()
    producer = side.cluster.producer({})
    errors: Errors = []
    for _ in range(100):
        producer.send(topic, b"v", None, (), errors.append)
    producer.close(TIMEOUT_S)
    assert errors == [None] * 100
    assert len(read(side, topic, 100)) == 100


def test_after_close(side: Side) -> None:
    producer = side.cluster.producer({})
    producer.close()
    producer.close()
    for call in (lambda: producer.send("t", b"v"), producer.poll, lambda: producer.flush(0.1)):
        with pytest.raises(ClosedError):
            call()


# -- faults of the doubles ----------------------------------------------------------------------------------------


def fated(fate: AppendFate) -> tuple[Errors, list[bytes | None]]:
    """Answers to a producer of the log in memory, and the topic's records, on a stopped clock."""
    now = 1_000.0
    cluster = MemoryCluster(lambda: now)
    cluster.broker.create_topic("t")
    fates = iter([fate, AppendFate.WRITTEN])
    cluster.broker.faults.append = lambda *_: next(fates)
    producer = cluster.producer({}, delivery_timeout_ms=500)
    errors: Errors = []
    producer.send("t", b"first", None, (), errors.append)
    producer.send("t", b"second", None, (), errors.append)
    producer.poll()
    now += 500.0
    producer.flush(0.0)
    return errors, [message.value() for message in cluster.broker.existing["t"].partitions[0].messages]


@pytest.mark.parametrize(
    ("fate", "kinds", "written"),
    [
        (AppendFate.WRITTEN, [None, None], [b"first", b"second"]),
        (AppendFate.DUPLICATED, [None, None], [b"first", b"first", b"second"]),
        (AppendFate.UNACKNOWLEDGED, [None, KafkaUnavailableError], [b"first", b"second"]),
        (AppendFate.LOST, [None, KafkaUnavailableError], [b"second"]),
        (AppendFate.FATAL, [ProduceError, None], [b"second"]),
    ],
)
def test_each_fate_in_memory(fate: AppendFate, kinds: list[type | None], written: list[bytes]) -> None:
    errors, values = fated(fate)
    assert [None if error is None else type(error) for error in errors] == kinds
    assert values == written


def troubled(trouble: Trouble) -> tuple[Errors, list[bytes | None]]:
    """Answers to a producer of the simulation with this trouble, and the topic's records at the end."""
    side = SimulatedSide()
    errors: Errors = []

    def body() -> None:
        topic = side.topic()
        side.process.host.trouble = trouble
        producer = side.cluster.producer({}, delivery_timeout_ms=1_000)
        began = side.time.monotonic()
        for number in range(20):
            producer.send(topic, b"%d" % number, b"k", (), errors.append)
        assert producer.flush(60.0) == 0
        assert side.time.monotonic() - began <= 1.1, "within the delivery timeout"
        producer.close()
        side.time.sleep(10.0)
        values.extend(message.value() for message in side._broker.existing[topic].partitions[0].messages)

    values: list[bytes | None] = []
    side.play(body)
    side.close()
    return errors, values


ALL = [b"%d" % number for number in range(20)]


def test_simulated_losses_are_errors_and_leave_no_record() -> None:
    errors, values = troubled(Trouble(loss=0.5))
    assert {type(error) for error in errors} == {type(None), KafkaUnavailableError}
    assert len(values) == errors.count(None)


def test_a_simulated_ack_that_is_lost_leaves_the_record() -> None:
    errors, values = troubled(Trouble(ack_loss=1.0))
    assert [type(error) for error in errors] == [KafkaUnavailableError] * 20
    assert values == ALL


def test_simulated_records_arrive_late_or_twice() -> None:
    errors, values = troubled(Trouble(late=0.5, duplicates=0.5))
    assert {type(error) for error in errors} == {type(None), KafkaUnavailableError}
    assert set(values) == set(ALL)
    assert len(values) > len(ALL)


def test_a_simulated_outage_is_an_error_for_each() -> None:
    errors, values = troubled(Trouble(is_cut_off=True))
    assert [type(error) for error in errors] == [KafkaUnavailableError] * 20
    assert values == []
