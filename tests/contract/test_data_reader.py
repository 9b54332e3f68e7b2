"""The reader of user data."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest
from confluent_kafka import Consumer, TopicPartition

from kafka_marshal.adapters.kafka import readers
from kafka_marshal.adapters.kafka import readers as module
from kafka_marshal.adapters.kafka.cluster import KafkaCluster
from kafka_marshal.adapters.kafka.errors import Troubles
from kafka_marshal.adapters.kafka.readers import LONGEST_WAIT_S, STEERED, KafkaDataReader, PollPace, Reading
from kafka_marshal.client.shared_reads import kept_bytes, shared_reader
from kafka_marshal.errors import ClosedError, KafkaUnavailableError, TopicChangedError
from kafka_marshal.node.log_reader import bounds, judge, read_range
from kafka_marshal.ports import DataReader, FaultKind, Message, TailBatch, TailFault
from kafka_marshal.runtime import THREADS
from tests.contract.sides import LOG_TIME, TIMEOUT_S, DataLog, KafkaSide, Side, closed_port, eventually, recreate


def numbers(count: int, start: int = 0) -> list[bytes]:
    return [b"%d" % number for number in range(start, start + count)]


class Twins:
    """A shared reader, beside another one of the process that has the same partitions, and reads all the time (U13)."""

    def __init__(self, side: Side) -> None:
        def make() -> DataReader:
            return side.cluster.data_reader("group", {})

        self.first, self.second = (shared_reader(self, THREADS, make, 2**20) for _ in range(2))
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        with suppress(ClosedError):
            while True:
                self.second.read(500, 0.1)

    def assign(self, positions: Mapping[tuple[str, int], int]) -> None:
        self.first.assign(positions)
        if positions:
            self.second.assign(positions)

    def unassign(self, partitions: Iterable[tuple[str, int]]) -> None:
        partitions = list(partitions)
        self.first.unassign(partitions)
        self.second.unassign(partitions)

    def close(self) -> None:
        self.first.close()
        self.second.close()
        self._thread.join()
        assert not kept_bytes()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.first, name)


@pytest.fixture(params=["alone", "shared"])
def log(request: pytest.FixtureRequest, side: Side) -> DataLog:
    if request.param == "shared":
        if side.cluster.way_of_reading({}) is None:
            pytest.skip("they share nothing")
        return DataLog(cast("DataReader", Twins(side)))
    return DataLog(side.cluster.data_reader("group", {}))


def test_messages_come_whole_and_in_order(side: Side, log: DataLog) -> None:
    topic, other = side.topic(2), side.topic(1)
    side.produce(topic, 0, numbers(5))
    side.produce(topic, 1, numbers(5))
    side.produce(other, 0, numbers(3))
    log.reader.assign({(topic, 0): 0, (topic, 1): 2, (other, 0): 1})
    log.until(lambda: len(log.messages) == 10, "all is read")
    assert log.offsets(topic, 0) == [0, 1, 2, 3, 4]
    assert log.offsets(topic, 1) == [2, 3, 4]
    assert log.offsets(other, 0) == [1, 2]
    for message in log.messages:
        assert message.key() == b"k"
        assert message.value() == b"%d" % (message.offset() or 0)
    assert not log.faults
    side.produce(topic, 1, [b"more"])
    log.until(lambda: len(log.messages) == 11, "it goes on")
    assert log.messages[-1].offset() == 5
    log.reader.close()


def test_nothing_is_read_before_anything_is_assigned(side: Side, log: DataLog) -> None:
    side.produce(side.topic(1), 0, [b"a"])
    log.reader.assign({})
    log.reader.unassign([])
    began = time.monotonic()
    assert log.read(timeout_s=0.2) == 0
    assert 0.15 < time.monotonic() - began < 1.5
    log.reader.close()


def test_a_backlog_comes_in_large_batches_of_the_size_asked_for(side: Side, log: DataLog) -> None:
    topic = side.topic(1)
    side.produce(topic, 0, numbers(40_000))
    log.reader.assign({(topic, 0): 0})
    while len(log.messages) < 20_000:
        log.read(max_messages=500)
    while len(log.messages) < 40_000:
        log.read(max_messages=10_000, timeout_s=5.0)
    assert log.offsets(topic, 0) == list(range(40_000))
    assert log.reads < 200, f"{log.reads} reads"
    assert log.read(max_messages=1, timeout_s=0.0) == 0
    log.reader.close()


def test_a_read_returns_as_soon_as_something_arrives(side: Side, log: DataLog) -> None:
    """A read of up to 10,000 with a long timeout returns with the first message."""
    topic = side.topic(1)
    side.produce(topic, 0, [b"warm"])
    log.reader.assign({(topic, 0): 0})
    log.until(lambda: log.messages, "the reader is up")
    appender = side.cluster.appender(topic, delivery_timeout_ms=10_000)
    waits = []
    for number in range(20):
        timer = threading.Thread(target=appender.append, args=(0, b"v"))
        began = time.monotonic()
        timer.start()
        while len(log.messages) < number + 2:
            log.read(10_000, 20.0)
        waits.append(time.monotonic() - began)
        timer.join()
    assert sorted(waits)[10] < 0.2, waits
    appender.close()
    log.reader.close()


def test_a_partition_more_does_not_disturb_the_others(side: Side, log: DataLog) -> None:
    topic = side.topic(3)
    for partition in range(3):
        side.produce(topic, partition, numbers(2000))
    log.reader.assign({(topic, 0): 0})
    log.read(100)
    log.reader.assign({(topic, 1): 1000})
    log.read(100)
    log.reader.assign({(topic, 2): 1999})
    log.until(lambda: len(log.messages) >= 2000 + 1000 + 1, "all is read")
    assert log.offsets(topic, 0) == list(range(2000))
    assert log.offsets(topic, 1) == list(range(1000, 2000))
    assert log.offsets(topic, 2) == [1999]
    log.reader.close()


def test_what_was_fetched_but_not_read_is_dropped(side: Side, log: DataLog) -> None:
    topic = side.topic(2)
    side.produce(topic, 0, numbers(1000))
    side.produce(topic, 1, numbers(1000))
    log.reader.assign({(topic, 0): 0, (topic, 1): 0})
    while not (log.offsets(topic, 0) and log.offsets(topic, 1)):
        log.read(10)
    log.reader.unassign([(topic, 0)])
    seen = len(log.offsets(topic, 0))
    log.until(lambda: len(log.offsets(topic, 1)) == 1000, "the other one is read to its end")
    assert len(log.offsets(topic, 0)) == seen
    assert log.offsets(topic, 1) == list(range(1000))
    log.reader.assign({(topic, 0): 5})
    log.until(lambda: len(log.offsets(topic, 0)) == seen + 995, "assigned again, it begins where it is told")
    assert log.offsets(topic, 0)[seen:] == list(range(5, 1000))
    log.reader.close()


def test_assigning_again_moves_the_position(side: Side, log: DataLog) -> None:
    topic = side.topic(1)
    side.produce(topic, 0, numbers(500))
    for start in (0, 400, 100):
        log.messages.clear()
        log.reader.assign({(topic, 0): start})
        log.until(lambda start=start: len(log.messages) >= 500 - start, f"read from {start}")  # type: ignore[misc]
        assert log.offsets(topic, 0) == list(range(start, 500))
    log.reader.close()


def test_what_is_expected_comes_once_it_is_assigned(side: Side, log: DataLog) -> None:
    """At the expected position and at another one; before, and if it is never assigned, nothing comes."""
    topic = side.topic(4)
    for partition in range(4):
        side.produce(topic, partition, numbers(300))
    log.reader.assign({(topic, 0): 0})
    log.until(lambda: len(log.messages) == 300, "one is read")
    for turn in range(5):
        side.produce(topic, 0, numbers(1))
        log.reader.expect({(topic, 1): 100, (topic, 2): 100, (topic, 3): 100})
        for _ in range(5):
            log.read(30 + 200 * turn, 0.02)
        side.produce(topic, 1, numbers(1))
        assert {message.partition() for message in log.messages} == {0}
        log.reader.assign({(topic, 1): 100, (topic, 2): 70 + turn})
        log.reader.assign({(topic, 3): 100})
        log.reader.unassign([(topic, 3)])
        log.until(lambda: log.offsets(topic, 2)[-1:] == [299], "another position")
        log.until(lambda: log.offsets(topic, 1)[-1:] == [300 + turn], "the expected position")  # noqa: B023
        assert log.offsets(topic, 1) == list(range(100, 301 + turn))
        assert log.offsets(topic, 2) == list(range(70 + turn, 300))
        assert not log.offsets(topic, 3) and not log.faults
        log.reader.unassign([(topic, 1), (topic, 2)])
        log.messages.clear()
        side.produce(topic, 0, numbers(1))
        log.until(lambda: log.messages, "the rest is over")
        log.messages.clear()
    log.reader.close()


def test_what_is_expected_is_not_fetched_for_long(kafka_side: KafkaSide, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "EXPECTED_BYTES", 1000)
    topic = kafka_side.topic(3)
    for partition in (1, 2):
        kafka_side.produce(topic, partition, [b"x" * 600] * (partition * 2 - 1))
    reader = cast("KafkaDataReader", kafka_side.cluster.data_reader("group", {}))
    log = DataLog(reader)
    reader.assign({(topic, 0): 0})
    log.read(10, 0.5)
    reader.expect({(topic, 1): 0, (topic, 2): 0, ("nobody-made-this", 0): 0})
    assert reader._expected.keys() == {(topic, 1), (topic, 2)}
    log.until(lambda: (log.read(10, 0.05), reader._expected.keys() == {(topic, 1)})[1], "too much came of one")
    began = time.monotonic()
    log.until(lambda: (log.read(10, 0.05), not reader._expected)[1], "the other was not assigned in time")
    assert time.monotonic() - began < 2 * readers.EXPECTED_S
    assert len(reader._reading.consumer.assignment()) == 1 and not log.messages
    reader.assign({(topic, 1): 0, (topic, 2): 0})
    log.until(lambda: len(log.messages) == 4, "both are assigned after all")
    log.reader.close()


def test_pause_and_resume_lose_and_repeat_nothing(side: Side, log: DataLog) -> None:
    topic = side.topic(2)
    side.produce(topic, 0, numbers(3000))
    side.produce(topic, 1, numbers(3000))
    log.reader.assign({(topic, 0): 0, (topic, 1): 0})
    log.until(lambda: log.offsets(topic, 0), "it flows")
    log.reader.pause([(topic, 0)])
    seen = len(log.offsets(topic, 0))
    log.until(lambda: len(log.offsets(topic, 1)) == 3000, "the other goes on")
    assert log.read(timeout_s=0.3) == 0
    assert len(log.offsets(topic, 0)) == seen
    log.reader.resume([(topic, 0)])
    log.until(lambda: len(log.offsets(topic, 0)) == 3000, "it flows again")
    assert log.offsets(topic, 0) == list(range(3000))
    log.reader.close()


def test_a_paused_partition_assigned_again_flows(side: Side, log: DataLog) -> None:
    topic = side.topic(1)
    side.produce(topic, 0, numbers(10))
    log.reader.assign({(topic, 0): 0})
    log.reader.pause([(topic, 0)])
    log.reader.unassign([(topic, 0)])
    log.messages.clear()
    log.reader.assign({(topic, 0): 3})
    log.until(lambda: len(log.messages) == 7, "it flows")
    assert log.offsets(topic, 0) == list(range(3, 10))
    log.reader.close()


def test_steering_what_is_not_assigned_does_nothing(side: Side, log: DataLog) -> None:
    topic = side.topic(1)
    for steer in (log.reader.unassign, log.reader.pause, log.reader.resume):
        steer([(topic, 0), ("nobody-made-this", 3)])
    side.produce(topic, 0, numbers(3))
    log.reader.assign({(topic, 0): 0})
    log.until(lambda: len(log.messages) == 3, "it flows all the same")
    log.reader.close()


def test_steering_beside_a_read(side: Side, log: DataLog) -> None:
    """Whatever calls were made during another thread's read, messages after the last assign() follow its position."""
    topic = side.topic(2)
    side.produce(topic, 0, numbers(300))
    side.produce(topic, 1, numbers(300))
    key = (topic, 0)
    got: list[Message] = []
    stop = threading.Event()

    def read() -> None:
        while not stop.is_set():
            messages, faults = log.reader.read(7, 0.05)
            assert not faults
            got.extend(messages)

    reader = threading.Thread(target=read)
    reader.start()
    for turn in range(100):
        log.reader.assign({key: turn, (topic, 1): 299 - turn})
        if turn % 3 == 0:
            log.reader.pause([key])
            log.reader.resume([key])
        log.reader.high_watermark(*key)
        log.reader.unassign([(topic, 1)])
    log.reader.assign({key: 10})

    def offsets() -> list[int | None]:
        return [message.offset() for message in got if message.partition() == 0]

    eventually(lambda: offsets()[-290:] == list(range(10, 300)), "the log from there on, once and in order")
    stop.set()
    reader.join()
    log.reader.close()


def test_a_partition_that_is_new_can_be_read(side: Side, log: DataLog) -> None:
    topic = side.topic(1)
    side.produce(topic, 0, numbers(2))
    log.reader.assign({(topic, 0): 0})
    log.until(lambda: len(log.messages) == 2, "the old one")
    side.grow_topic(topic, 2)
    side.produce(topic, 1, numbers(3))
    log.reader.assign({(topic, 1): 0})
    log.until(lambda: len(log.offsets(topic, 1)) == 3, "the new one")
    assert not log.faults
    log.reader.close()


def test_a_topic_never_seen_before_flows_at_once(side: Side, log: DataLog) -> None:
    """A standby consumer gets its first partition: librdkafka alone asks for new topics only once a second."""
    waits = []
    for number in range(7):
        topic = side.topic(1)
        side.produce(topic, 0, [b"v"])
        until = time.monotonic() + 0.2 + 0.03 * number
        while (left_s := until - time.monotonic()) > 0:  # (a read ends at the end of a log)
            log.read(timeout_s=left_s)  # connected, and at no particular moment of librdkafka's second
        began = time.monotonic()
        log.reader.assign({(topic, 0): 0})
        log.until(lambda number=number: len(log.messages) > number, "its first message")  # type: ignore[misc]
        waits.append(time.monotonic() - began)
    # The second shortest: on a busy machine some take long all the same, and without our asking none is this short.
    assert sorted(waits)[1] < (0.6 if isinstance(log.reader, Twins) else 0.2), waits
    log.reader.close()


class Watched(Consumer):
    """Records the topics of each query to a broker."""

    asked: ClassVar[list[str]] = []

    def get_watermark_offsets(
        self, partition: TopicPartition, timeout: float = -1, cached: bool = False
    ) -> tuple[int, int]:
        if not cached:
            self.asked.append(partition.topic)
        return super().get_watermark_offsets(partition, timeout=timeout, cached=cached)

    def list_topics(self, *args: Any, **options: Any) -> Any:
        raise AssertionError("an object of each partition, with the interpreter's lock in hand")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Topics that readers made from now on ask brokers about."""
    monkeypatch.setattr(Watched, "asked", found := list[str]())
    monkeypatch.setattr(readers, "Consumer", Watched)
    return found


@pytest.mark.broker
def test_leaders_are_looked_up_only_where_librdkafka_may_not_know_them(kafka_side: KafkaSide, asked: list[str]) -> None:
    """The look-up waits behind a fetch, and so do partitions that do not move: 180 ms on a busy broker."""
    log, topic, missing = DataLog(kafka_side.cluster.data_reader("group", {})), kafka_side.topic(3), "not-there"

    def assign(partition: int, *queries: str) -> None:
        """An assignment causes these queries; a busy broker makes them late."""
        asked.clear()
        log.reader.assign({(topic, partition): 0})
        log.read(timeout_s=0.3)
        eventually(lambda: log.read(timeout_s=0.1) or asked == list(queries), f"{list(queries)} and not {asked}")

    keys = [(topic, number) for number in range(3)]
    eventually(lambda: len(kafka_side.cluster.watermarks(keys, TIMEOUT_S)) == 3, "the new topic has leaders")
    assert log.reader.partition_counts([topic, missing], TIMEOUT_S) == {topic: 3}
    eventually(lambda: asked == [topic, missing], "it connects, and learns the leaders")
    log.read(timeout_s=0.3)  # completes it
    assign(1, topic)  # the first of its topic: what was learnt before is forgotten (_FORGETS_TOPICS)
    log.reader.unassign([(topic, 1)])
    assign(1, topic)
    assign(2)
    assign(0)
    log.reader.unassign([(topic, number) for number in range(3)])
    assign(2, topic)
    log.reader.close()


def test_where_no_broker_answers_leaders_are_not_looked_up_over_and_over_again(asked: list[str]) -> None:
    """Each look-up delays the reader by a quarter of a second."""
    cluster = KafkaCluster(f"127.0.0.1:{closed_port()}")
    reader = cluster.data_reader("group", {})
    for _ in range(3):
        reader.assign({("t", 0): 0})
        reader.read(1, 0.01)
        reader.unassign([("t", 0)])
    assert asked == ["t"]
    reader.close()
    cluster.close()


def test_offsets_without_messages_are_stepped_over(side: Side, log: DataLog) -> None:
    """P6: transaction markers."""
    topic = side.topic(1)
    side.produce_transaction(topic, 0, numbers(2))
    side.produce_transaction(topic, 0, numbers(2, 3))
    log.reader.assign({(topic, 0): 0})
    log.until(lambda: len(log.messages) == 4, "all is read")
    assert log.offsets(topic, 0) == [0, 1, 3, 4]
    log.reader.close()


@pytest.mark.parametrize("start", [1, 9])
def test_a_position_outside_of_the_log_is_reported_and_can_be_mended(side: Side, log: DataLog, start: int) -> None:
    """P9, P11: retention deleted it, or it never existed. No message is delivered by guess."""
    topic = side.topic(2)
    side.produce(topic, 0, numbers(5))
    side.produce(topic, 1, numbers(5))
    side.delete_records(topic, 0, 3)
    log.reader.assign({(topic, 0): start, (topic, 1): 0})
    log.until(lambda: log.faults and len(log.offsets(topic, 1)) == 5, "the fault, and the other partition")
    fault = log.faults[0]
    assert (fault.kind, fault.topic, fault.partition) == (FaultKind.OUT_OF_RANGE, topic, 0)
    assert log.offsets(topic, 0) == []
    log.reader.assign({(topic, 0): 3})
    log.until(lambda: len(log.offsets(topic, 0)) == 2, "it is read from where it is told")
    assert len(log.faults) == 1
    log.reader.close()


@pytest.mark.parametrize("count", [1, 9], ids=["shorter", "longer"])
def test_a_topic_that_is_recreated_is_reported_before_anything_of_it_is_given(
    side: Side, log: DataLog, count: int
) -> None:
    """P11."""
    topic, other = side.topic(2), side.topic(1)
    for partition in range(2):
        side.produce(topic, partition, numbers(5))
    log.reader.assign({(topic, 0): 0, (topic, 1): 0, (other, 0): 0})
    log.until(lambda: len(log.messages) == 10, "all is read")
    recreate(side, topic, 2, {})
    for partition in range(2):
        side.produce(topic, partition, [b"new"] * count)
    side.produce(other, 0, numbers(1))
    log.until(lambda: log.faults, "the fault")
    new_id = side.cluster.topic_info([topic], TIMEOUT_S)[topic].topic_id
    log.until(lambda: log.offsets(other, 0) == [0], "others go on")
    for _ in range(3):
        log.read()
    assert {(x.kind, x.topic, x.partition, x.message) for x in log.faults} == {
        (FaultKind.RECREATED, topic, None, new_id)
    }
    assert len(log.messages) == 11 and b"new" not in {message.value() for message in log.messages}
    log.reader.assign({(topic, 0): 0})
    log.until(lambda: log.offsets(topic, 0)[5:] == list(range(count)), "it is read once it is assigned again")
    log.reader.close()


def test_high_watermark_is_that_of_the_last_fetch(side: Side, log: DataLog) -> None:
    topic = side.topic(2)
    side.produce(topic, 0, numbers(5))
    assert log.reader.high_watermark(topic, 0) is None
    log.reader.assign({(topic, 0): 4})
    log.until(lambda: log.messages, "it flows")
    log.until(lambda: log.reader.high_watermark(topic, 0) == 5, "the end is known")
    assert log.reader.high_watermark(topic, 1) is None
    assert log.reader.high_watermark("nobody-made-this", 0) is None
    side.produce(topic, 0, numbers(5))
    log.until(lambda: len(log.messages) == 6, "it goes on")
    log.until(lambda: log.reader.high_watermark(topic, 0) == 10, "the new end is known, though nothing more comes")
    log.reader.unassign([(topic, 0)])
    assert log.reader.high_watermark(topic, 0) is None
    log.reader.close()


def test_without_a_broker_a_reader_reports_and_waits(side: Side) -> None:
    log = DataLog(side.unreachable().data_reader("g", {}))
    log.reader.assign({("t", 0): 0})
    log.until(lambda: log.faults, "the fault")
    assert (log.faults[0].kind, log.faults[0].topic) == (FaultKind.UNREACHABLE, None)
    log.reader.close()


def test_close_ends_a_read_of_another_thread(side: Side, log: DataLog) -> None:
    topic = side.topic(1)
    log.reader.assign({(topic, 0): 0})
    ended = []
    reading = threading.Event()

    def read() -> None:
        try:
            while True:
                reading.set()
                log.reader.read(10, 60.0)
        except ClosedError as error:
            ended.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    assert reading.wait(TIMEOUT_S)
    log.reader.close()
    reader.join(5.0)
    assert len(ended) == 1


def test_after_close(side: Side, log: DataLog) -> None:
    topic = side.topic(1)
    log.reader.close()
    log.reader.close()
    for call in (
        lambda: log.reader.read(1, 0.1),
        lambda: log.reader.assign({(topic, 0): 0}),
        lambda: log.reader.unassign([(topic, 0)]),
        lambda: log.reader.pause([(topic, 0)]),
        lambda: log.reader.resume([(topic, 0)]),
        lambda: log.reader.high_watermark(topic, 0),
    ):
        with pytest.raises(ClosedError):
            call()


def test_a_standby_reader_is_woken_by_any_call_that_changes_it(
    side: Side, log: DataLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With nothing assigned it waits (here: for an hour); an assign or a close ends the wait."""
    monkeypatch.setattr(readers, "STANDBY_S", 3600.0)
    topic, ended = side.topic(1), threading.Event()

    def read() -> None:
        try:
            while True:
                log.read(timeout_s=3600.0)
        except ClosedError:
            ended.set()

    threading.Thread(target=read, daemon=True).start()
    side.produce(topic, 0, numbers(3))  # takes long enough that the reader waits by now
    log.reader.assign({(topic, 0): 0})
    eventually(lambda: log.offsets(topic, 0) == [0, 1, 2], "woken by the assignment")
    log.reader.unassign([(topic, 0)])
    side.produce(topic, 0, numbers(3))
    log.reader.close()
    assert ended.wait(TIMEOUT_S)


def test_a_thousand_unknown_log_ends_are_looked_up_once_per_partition(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The driver asks for each in turn under its lock: checking all of them each time took seconds."""
    looks: Counter[str] = Counter()

    class Counting(Consumer):
        def get_watermark_offsets(self, *args: Any, **options: Any) -> Any:
            looks["log end"] += 1
            return super().get_watermark_offsets(*args, **options)

    monkeypatch.setattr(readers, "Consumer", Counting)
    cluster = KafkaCluster(f"127.0.0.1:{closed_port()}")
    reader = cluster.data_reader("group", {})
    reader.assign({("t", number): 0 for number in range(1_000)})
    assert [reader.high_watermark("t", number) for number in range(1_000)] == [None] * 1_000
    assert looks["log end"] == 1_000
    reader.close()
    cluster.close()


def test_log_ends_are_known_though_no_one_reads_if_they_are_checked(side: Side, log: DataLog) -> None:
    topic = side.topic(1)
    side.produce(topic, 0, numbers(5))
    log.reader.assign({(topic, 0): 0})
    log.until(lambda: len(log.offsets(topic, 0)) == 5, "all is read")
    side.produce(topic, 0, numbers(3))

    def known() -> bool:
        log.reader.look_at_ends()
        return log.reader.high_watermark(topic, 0) == 8

    eventually(known, "the end is known, without a read")
    log.reader.close()
    with pytest.raises(ClosedError):
        log.reader.look_at_ends()
        log.reader.high_watermark(topic, 0)


# -- Reading ranges of a topic ------------------------------------------------------------------------------------


def test_bounds_are_of_each_partition(side: Side) -> None:
    topic = side.topic(2, LOG_TIME)
    side.produce(topic, 1, [b"a", b"b", b"c"])
    side.delete_records(topic, 1, 1)
    assert bounds(side.cluster, topic, TIMEOUT_S) == {0: (0, 0), 1: (1, 3)}
    assert bounds(side.cluster, f"{topic}-not-there", TIMEOUT_S) is None


def test_what_lies_between_is_read_and_no_more(side: Side) -> None:
    topic = side.topic(3, LOG_TIME)
    side.produce(topic, 0, [b"0", b"1", b"2", b"3"])
    side.produce(topic, 1, [b"4", b"5"])
    side.produce_transaction(topic, 1, [b"6"])
    ranges = {0: (1, 3), 1: (0, 4), 2: (0, 0)}  # offset 3 of partition 1 has no message
    told: list[tuple[int, int]] = []
    found: dict[int, list[tuple[int, bytes | None]]] = {}
    for partition, entries in read_range(
        side.cluster, topic, ranges, TIMEOUT_S, progress=lambda *done: told.append(done)
    ):
        found.setdefault(partition, []).extend((offset, value) for offset, _, value in entries)
    assert found == {0: [(1, b"1"), (2, b"2")], 1: [(0, b"4"), (1, b"5"), (2, b"6")]}
    assert told[-1][1] == 6


def test_a_wait_for_what_never_comes_ends(side: Side) -> None:
    topic = side.topic(1, LOG_TIME)
    side.produce(topic, 0, [b"a"])
    reading = read_range(side.unreachable(), topic, {0: (0, 1)}, 0.5)
    with pytest.raises(KafkaUnavailableError, match="nothing read for"):
        next(reading)


def test_faults_that_pass_are_reported_and_others_raised() -> None:
    def batch(kind: FaultKind) -> TailBatch:
        return TailBatch(faults=[TailFault(kind, 0, "why")])

    assert judge("t", batch(FaultKind.UNREACHABLE)) == " (why)"
    with pytest.raises(TopicChangedError, match="while it was read"):
        judge("t", batch(FaultKind.OUT_OF_RANGE))
    with pytest.raises(KafkaUnavailableError, match="gave up"):
        judge("t", batch(FaultKind.FATAL))


# A reader's poll interval: short while messages arrive, growing while none do; and its end, if librdkafka hangs.


def test_a_wait_is_as_long_as_the_silence_before_allows() -> None:
    pace = PollPace(0.005, ((1.0, 0.025), (5.0, 0.1)))
    assert [pace.wait_s(quiet) for quiet in (0.0, 1.0, 1.1, 5.0, 5.1, 1e6)] == [0.005, 0.005, 0.025, 0.025, 0.1, 0.1]
    assert PollPace(0.05).wait_s(1e6) == 0.05


def test_who_steers_a_busy_reader_waits_for_milliseconds_only() -> None:
    assert STEERED.wait_s(0.0) <= 0.005
    assert max(STEERED.wait_s(quiet) for quiet in range(100)) <= LONGEST_WAIT_S


def a_reading() -> Any:
    return Reading("data reader", {"bootstrap.servers": "127.0.0.1:1", "group.id": "g"}, Troubles())


def test_a_client_that_never_ends_is_left_behind_with_a_word(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """librdkafka's issue 4514, which needs a refused fetch and a close within the same millisecond."""
    monkeypatch.setattr(module, "END_TIMEOUT_S", 0.05)
    reading, hangs = a_reading(), threading.Event()
    consumer, reading.consumer = reading.consumer, SimpleNamespace(close=hangs.wait)
    try:
        reading.close()
        reading.close()
        [line] = [record.getMessage() for record in caplog.records if "has not ended" in record.getMessage()]
        assert "the data reader has not ended 0.05 s after its close" in line and "Nothing is lost" in line
    finally:
        hangs.set()
        consumer.close()


def test_it_is_closed_where_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    reading = a_reading()
    monkeypatch.setattr(threading.Thread, "start", refuse)
    reading.close()
    with pytest.raises(RuntimeError, match="closed"):
        reading.consumer.poll(0)
