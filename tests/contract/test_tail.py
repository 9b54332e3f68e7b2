"""The tail of the coordination topic (L4, T1)."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any, cast

import pytest

from kafka_marshal.adapters.kafka import range_reader
from kafka_marshal.adapters.kafka.readers import Reading
from kafka_marshal.adapters.memory import MemoryCluster
from kafka_marshal.errors import ClosedError, KafkaUnavailableError
from kafka_marshal.node import log_reader
from kafka_marshal.node.log_reader import MonitoredTail, read_range
from kafka_marshal.ports import FaultKind, TailBatch
from tests.contract.sides import LOG_TIME, TIMEOUT_S, KafkaSide, Side, TailLog, append, eventually, recreate


def test_it_reads_each_partition_in_order_from_its_offset(side: Side) -> None:
    topic = side.topic(3, LOG_TIME)
    for partition in range(3):
        append(side, topic, partition, [b"%d-%d" % (partition, number) for number in range(5)])
    log = TailLog(side.cluster.tail(topic, {0: 0, 1: 3, 2: 5}))
    log.until(lambda: len(log.values(0)) == 5 and len(log.values(1)) == 2, "all is read")
    assert log.offsets(0) == [0, 1, 2, 3, 4]
    assert log.values(0) == [b"0-0", b"0-1", b"0-2", b"0-3", b"0-4"]
    assert log.offsets(1) == [3, 4]
    assert log.offsets(2) == []
    append(side, topic, 2, [b"new"])
    log.until(lambda: log.values(2), "it goes on")
    assert log.records[2][0][0] == 5
    assert not log.faults
    log.tail.close()


def test_stamps_are_the_logs(side: Side) -> None:
    topic = side.topic(1, LOG_TIME)
    before = time.time() * 1000
    append(side, topic, 0, [b"a", b"b"])
    log = TailLog(side.cluster.tail(topic, {0: 0}))
    log.until(lambda: len(log.values(0)) == 2, "all is read")
    stamps = [stamp for _, stamp, _ in log.records[0]]
    assert before - 10_000 < stamps[0] <= stamps[1] < time.time() * 1000 + 10_000
    log.tail.close()


def test_a_clients_stamp_is_no_log_time(side: Side) -> None:
    """T1: −1 if the timestamp is not of type LogAppendTime, even if a topic was altered meanwhile."""
    topic = side.topic(1, LOG_TIME)
    append(side, topic, 0, [b"stamped"])
    log = TailLog(side.cluster.tail(topic, {0: 0}))
    log.until(lambda: log.values(0), "the first is read")
    side.alter_topic(topic, {"message.timestamp.type": "CreateTime"})

    def altered() -> bool:
        append(side, topic, 0, [b"not stamped"])
        log.read()
        return log.records[0][-1][1] == -1

    eventually(altered, "the broker no longer stamps")
    assert log.records[0][0][1] > 0
    log.tail.close()


def test_a_record_without_a_value_is_handed_on(side: Side) -> None:
    topic = side.topic(1, LOG_TIME)
    side.produce(topic, 0, [None, b""])
    log = TailLog(side.cluster.tail(topic, {0: 0}))
    log.until(lambda: len(log.values(0)) == 2, "both are read")
    assert log.values(0) == [None, b""]
    log.tail.close()


def test_the_end_of_full_and_empty_partitions_is_reported(side: Side) -> None:
    topic = side.topic(2, LOG_TIME)
    append(side, topic, 0, [b"a", b"b"])
    log = TailLog(side.cluster.tail(topic, {0: 0, 1: 0}))
    log.until(lambda: log.ends == {0: 2, 1: 0}, "both ends are told")
    log.tail.close()


def test_the_end_lies_behind_transaction_markers(side: Side) -> None:
    """C15: a barrier at the high watermark is reached although the last offset has no record."""
    topic = side.topic(1, LOG_TIME)
    append(side, topic, 0, [b"a"])
    side.produce_transaction(topic, 0, [b"b"])
    high = side.cluster.watermarks([(topic, 0)], TIMEOUT_S)[topic, 0][1]
    assert high == 3
    log = TailLog(side.cluster.tail(topic, {0: 0}))
    log.until(lambda: log.ends.get(0) == high, "the end is told")
    assert log.values(0) == [b"a", b"b"]
    append(side, topic, 0, [b"c"])
    log.until(lambda: len(log.values(0)) == 3, "it goes on")
    assert log.offsets(0) == [0, 1, 3]
    log.tail.close()


def test_a_long_log_comes_whole_in_large_batches(side: Side) -> None:
    topic = side.topic(2, LOG_TIME)
    values = [b"%d" % number for number in range(20_000)]
    for partition in range(2):
        side.produce(topic, partition, values)
    log = TailLog(side.cluster.tail(topic, {0: 0, 1: 0}))
    log.until(lambda: len(log.values(0)) + len(log.values(1)) == 40_000, "all is read")
    for partition in range(2):
        assert log.offsets(partition) == list(range(20_000))
        assert log.values(partition) == values
    assert log.reads < 400, f"{log.reads} reads for 40,000 records"
    log.tail.close()


def test_a_read_returns_as_soon_as_something_arrives(side: Side) -> None:
    topic = side.topic(1, LOG_TIME)
    tail = side.cluster.tail(topic, {0: 0})
    log = TailLog(tail)
    log.until(lambda: log.ends, "the tail is up")
    waits = []
    for number in range(20):
        sent = [0.0]

        def send(sent: list[float] = sent, number: int = number) -> None:
            sent[0] = time.monotonic()
            append(side, topic, 0, [b"%d" % number])

        sender = threading.Thread(target=send)
        sender.start()
        while len(log.values(0)) <= number:
            log.read(20.0)
        waits.append(time.monotonic() - sent[0])
        sender.join()
    assert sorted(waits)[10] < 0.2, waits
    tail.close()


def test_a_read_with_nothing_to_read_ends_with_its_timeout(side: Side) -> None:
    topic = side.topic(1, LOG_TIME)
    log = TailLog(side.cluster.tail(topic, {0: 0}))
    log.until(lambda: log.ends, "the end is told")
    for timeout_s in (0.0, 0.3):
        began = time.monotonic()
        batch = log.tail.read(timeout_s)
        took = time.monotonic() - began
        assert (batch.records, batch.ends, list(batch.faults)) == ({}, {}, [])
        assert timeout_s - 0.05 <= took < timeout_s + 1.0
    log.tail.close()


@pytest.mark.parametrize("where", ["beyond the end", "below the start"])
def test_a_position_outside_of_the_log_is_reported_once_and_stops_no_other(side: Side, where: str) -> None:
    topic = side.topic(2, LOG_TIME)
    for partition in range(2):
        append(side, topic, partition, [b"a", b"b", b"c", b"d"])
    side.delete_records(topic, 0, 2)
    log = TailLog(side.cluster.tail(topic, {0: 5 if where == "beyond the end" else 1, 1: 0}))
    log.until(lambda: log.faults and len(log.values(1)) == 4, "the fault, and the other partition")
    append(side, topic, 1, [b"e"])
    log.until(lambda: len(log.values(1)) == 5, "the other partition goes on")
    assert [(fault.kind, fault.partition) for fault in log.faults] == [(FaultKind.OUT_OF_RANGE, 0)]
    assert log.faults[0].message
    assert log.values(0) == [], "nothing is guessed (L4)"
    log.tail.close()


def test_a_log_start_that_overtakes_a_reader_is_reported(side: Side) -> None:
    """Only a reader that has read everything may lose its past."""
    topic = side.topic(1, LOG_TIME)
    append(side, topic, 0, [b"a", b"b", b"c"])
    log = TailLog(side.cluster.tail(topic, {0: 0}))
    log.until(lambda: len(log.values(0)) == 3, "all is read")
    side.delete_records(topic, 0, 3)
    append(side, topic, 0, [b"d"])
    log.until(lambda: len(log.values(0)) == 4, "who was at the end reads on")
    assert not log.faults
    log.tail.close()


def test_a_shorter_recreated_log_is_reported(side: Side) -> None:
    """L2: the position is outside the new log."""
    topic = side.topic(1, LOG_TIME)
    append(side, topic, 0, [b"a", b"b", b"c"])
    log = TailLog(side.cluster.tail(topic, {0: 0}))
    log.until(lambda: len(log.values(0)) == 3, "all is read")
    recreate(side, topic, 1, LOG_TIME)
    append(side, topic, 0, [b"other"])
    log.until(lambda: log.faults, "the fault")
    assert {(fault.kind, fault.partition) for fault in log.faults} == {(FaultKind.OUT_OF_RANGE, 0)}
    assert len(log.values(0)) == 3
    log.tail.close()


def test_a_deleted_topic_harms_no_reader(side: Side) -> None:
    """Look-ups report it (L2); a reader may be silent, but neither raises nor invents records."""
    topic = side.topic(1, LOG_TIME)
    append(side, topic, 0, [b"a"])
    log = TailLog(side.cluster.tail(topic, {0: 0}))
    log.until(lambda: log.values(0), "all is read")
    side.delete_topic(topic)
    for _ in range(5):
        log.read(0.05)
    assert log.values(0) == [b"a"]
    assert {fault.kind for fault in log.faults} <= {FaultKind.UNKNOWN_TOPIC, FaultKind.OUT_OF_RANGE}
    assert side.cluster.topic_info([topic], TIMEOUT_S) == {}
    log.tail.close()


def test_a_partition_that_is_left_is_silent_and_the_others_continue(side: Side) -> None:
    topic = side.topic(3, LOG_TIME)
    log = TailLog(side.cluster.tail(topic, {0: 0, 1: 0, 2: 0}))
    for partition in range(3):
        append(side, topic, partition, [b"before"])
    log.until(lambda: all(log.values(partition) for partition in range(3)), "all is read")
    log.tail.leave([0, 2])
    for partition in (0, 2, 1):
        append(side, topic, partition, [b"after"])
    log.until(lambda: len(log.values(1)) == 2, "it goes on")
    log.read()
    assert [log.values(partition) for partition in range(3)] == [[b"before"], [b"before", b"after"], [b"before"]]
    side.delete_records(topic, 0, 1)
    log.read()
    assert not log.faults
    log.tail.close()


def test_a_partition_is_followed_from_the_offset_it_is_given(side: Side) -> None:
    """Records fetched for an earlier position are dropped, none is missed, and the end is reported again."""
    topic = side.topic(2, LOG_TIME)
    log = TailLog(side.cluster.tail(topic, {0: 0}))
    append(side, topic, 1, [b"0", b"1", b"2", b"3"])
    log.until(lambda: 0 in log.ends, "the end")
    log.tail.follow({1: 2})
    log.until(lambda: log.ends.get(1) == 4, "the rest of the other")
    assert log.offsets(1) == [2, 3]
    for turn in range(5):
        log.records.clear()
        log.ends.clear()
        append(side, topic, 1, [b"unread"] * 50)
        log.tail.leave([1])
        log.tail.follow({1: 1})
        end = 54 + 50 * turn
        log.until(lambda end=end: log.ends.get(1) == end, "the end again")  # type: ignore[misc]
        assert log.offsets(1) == list(range(1, end))
    append(side, topic, 0, [b"x"])
    log.until(lambda: log.values(0), "the first goes on")
    assert not log.faults
    log.tail.close()


def test_a_partition_is_followed_while_another_thread_reads(side: Side) -> None:
    topic = side.topic(2, LOG_TIME)
    log = TailLog(side.cluster.tail(topic, {0: 0}))
    append(side, topic, 1, [b"there"])
    log.until(lambda: 0 in log.ends, "the end")

    def follow() -> None:
        threading.Event().wait(0.1)  # the other is reading by then
        log.tail.follow({1: 0})

    follower = threading.Thread(target=follow)
    follower.start()
    log.read(5.0)
    log.until(lambda: log.values(1) == [b"there"], "what was there")
    follower.join()
    log.tail.close()


def test_without_a_broker_a_tail_reports_and_waits(side: Side) -> None:
    tail = side.unreachable().tail("t", {0: 0})
    log = TailLog(tail)
    log.until(lambda: log.faults, "the fault")
    assert log.faults[0].kind is FaultKind.UNREACHABLE
    assert log.faults[0].partition is None
    tail.close()


def test_close_ends_a_read_of_another_thread(side: Side) -> None:
    topic = side.topic(1, LOG_TIME)
    tail = side.cluster.tail(topic, {0: 0})
    ended: list[BaseException | None] = []
    reading = threading.Event()

    def read() -> None:
        try:
            while True:
                reading.set()
                tail.read(60.0)
        except ClosedError as error:
            ended.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    assert reading.wait(TIMEOUT_S)
    tail.close()
    reader.join(5.0)
    assert len(ended) == 1


def test_after_close(side: Side) -> None:
    tail = side.cluster.tail(side.topic(1, LOG_TIME), {0: 0})
    tail.close()
    tail.close()
    with pytest.raises(ClosedError):
        tail.read(0.1)


def test_it_knows_where_the_logs_end(side: Side) -> None:
    topic = side.topic(2, LOG_TIME)
    append(side, topic, 0, [b"%d" % number for number in range(5)])
    log = TailLog(side.cluster.tail(topic, {0: 0, 1: 0}))
    log.until(lambda: dict(log.tail.log_ends()) == {0: 5, 1: 0}, "both ends are known")
    append(side, topic, 1, [b"more"])
    log.until(lambda: log.tail.log_ends()[1] == 1, "the new end is known")
    log.tail.close()


def test_a_tail_that_rests_between_its_reads_gets_each_record_once(side: Side) -> None:
    topic = side.topic(3, LOG_TIME)
    log = TailLog(side.cluster.tail(topic, {0: 0, 1: 0, 2: 0}))
    log.rests = True
    for number in range(20):
        for partition in range(2):
            append(side, topic, partition, [b"%d" % number] * (number % 3))
        log.read()
    log.until(lambda: len(log.values(0)) == len(log.values(1)) == 19, "all is read")
    assert log.offsets(0) == log.offsets(1) == list(range(19))
    assert log.values(2) == []
    assert not log.faults
    log.tail.close()


def test_after_a_rest_it_reads_on(side: Side) -> None:
    topic = side.topic(2, LOG_TIME)
    log = TailLog(side.cluster.tail(topic, {0: 0, 1: 0}))
    log.rests = True
    for number in range(12):
        append(side, topic, 0, [b"%d" % number])
        log.until(lambda number=number: len(log.values(0)) == number + 1, "it comes")  # type: ignore[misc]
    assert log.values(0) == [b"%d" % number for number in range(12)]
    log.tail.close()


def test_after_a_rest_librdkafka_seeks(side: Side) -> None:
    """A partition that is only resumed waits for up to a second."""
    if not isinstance(side, KafkaSide):
        pytest.skip("of librdkafka")
    topic = side.topic(2, LOG_TIME)
    log = TailLog(side.cluster.tail(topic, {0: 0, 1: 0}))
    append(side, topic, 0, [b"first"])
    log.until(lambda: log.values(0), "it reads")
    reading, sought = cast("Any", log.tail)._reading, set()

    class Seeking:
        def __init__(self, consumer: Any) -> None:
            self._consumer = consumer

        def __getattr__(self, name: str) -> Any:
            return getattr(self._consumer, name)

        def seek(self, place: Any) -> None:
            sought.add((place.partition, place.offset))
            self._consumer.seek(place)

    reading.consumer = Seeking(reading.consumer)
    log.until(log.tail.rest, "it rests")
    log.read()
    assert sought == {(0, 1), (1, 0)}
    log.tail.close()


def test_a_tail_that_rests_reports_a_recreated_log(side: Side) -> None:
    topic = side.topic(1, LOG_TIME)
    append(side, topic, 0, [b"a", b"b", b"c"])
    log = TailLog(side.cluster.tail(topic, {0: 0}))
    log.rests = True
    log.until(lambda: len(log.values(0)) == 3, "all is read")
    recreate(side, topic, 1, LOG_TIME)
    log.until(lambda: log.faults, "it is reported")
    assert {fault.kind for fault in log.faults} <= {FaultKind.OUT_OF_RANGE, FaultKind.UNKNOWN_TOPIC}
    log.tail.close()


# -- A reader that receives nothing of the log, and no error: it is detected and repaired step by step ------------


PATIENCE_S = 0.05

#: (tails opened, restarts of the last one) that still receive nothing, and the log line of the step that helps.
STEPS = [
    pytest.param(lambda tails, restarts: restarts == 0, ["it reads again from there"], id="restart"),
    pytest.param(
        lambda tails, restarts: tails == 1, ["it reads again from there", "a new client reads on"], id="client"
    ),
    pytest.param(
        lambda tails, restarts: tails <= 4,
        ["it reads again from there", *["a new client reads on"] * 4],
        id="fourth client",
    ),
]


def stuck(cluster: MemoryCluster, is_stuck: Any) -> None:
    cluster.broker.faults.stalled = lambda client, topic, partition, tails, restarts: (
        partition == 1 and is_stuck(tails, restarts)
    )


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> MemoryCluster:
    monkeypatch.setattr(log_reader, "LONGEST_PATIENCE_S", PATIENCE_S)
    cluster = MemoryCluster()
    cluster.create_topic("log", 2, 1, LOG_TIME, TIMEOUT_S)
    return cluster


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if getattr(record, "event", "") == "reader_deaf"]


@pytest.mark.parametrize(("is_stuck", "steps"), STEPS)
def test_what_is_known_to_be_in_the_log_and_does_not_come_has_it_opened_again(
    memory: MemoryCluster, caplog: pytest.LogCaptureFixture, is_stuck: Any, steps: list[str]
) -> None:
    stuck(memory, is_stuck)
    tail = MonitoredTail(memory, "log", {0: 0, 1: 0}, {})
    offset = memory.broker.produce("log", 1, b"a")
    tail.monitor.knows(1, offset)
    log = TailLog(tail)
    log.until(lambda: log.values(1), "it comes")
    assert [step in line for step, line in zip(steps, told(caplog), strict=True)] == [True] * len(steps)
    assert all("partition 1 at offset 0 of 1" in line for line in told(caplog))
    assert tail.monitor.stalled == ""
    assert [r.getMessage() for r in caplog.records if getattr(r, "event", "") == "reader_back"]
    # The next time starts with the first step again.
    memory.broker.faults.stalled = lambda client, topic, partition, tails, restarts: False
    memory.broker.produce("log", 0, b"b")
    log.until(lambda: log.values(0), "the other goes on, too")
    tail.close()


def test_a_log_that_has_lost_what_it_had_is_read_again_from_there(
    memory: MemoryCluster, caplog: pytest.LogCaptureFixture
) -> None:
    tail = MonitoredTail(memory, "log", {0: 0, 1: 0}, {1: 1})
    TailLog(tail).until(lambda: told(caplog), "it is not waited for for ever")
    tail.close()


def test_where_no_client_gets_it_the_reader_ends(memory: MemoryCluster, caplog: pytest.LogCaptureFixture) -> None:
    stuck(memory, lambda tails, restarts: True)
    tail = MonitoredTail(memory, "log", {0: 0, 1: 0}, {1: 1})
    memory.broker.produce("log", 1, b"a")
    log = TailLog(tail)
    with pytest.raises(KafkaUnavailableError, match=r"partition 1 at offset 0 of 1.*Restart this process"):
        log.until(lambda: False, "it ends")
    assert [record.levelno for record in caplog.records][-1] == logging.ERROR
    tail.close()


def test_who_appends_nothing_asks_the_leader_of_what_is_quiet(
    memory: MemoryCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_reader, "QUIET_S", PATIENCE_S)
    stuck(memory, lambda tails, restarts: tails == 1)
    tail = MonitoredTail(memory, "log", {0: 0, 1: 0}, {})
    memory.broker.produce("log", 1, b"a")
    log = TailLog(tail)
    log.until(lambda: log.values(1), "it comes")
    tail.close()


def test_an_outage_proves_nothing(memory: MemoryCluster, caplog: pytest.LogCaptureFixture) -> None:
    """No broker has answered since the record was late: it is not the reader that gets nothing."""
    memory.broker.set_reachable(memory.client, False)
    tail = MonitoredTail(memory, "log", {0: 0, 1: 0}, {1: 1})
    memory.broker.produce("log", 1, b"a")
    for _ in range(30):
        tail.read(PATIENCE_S / 5)
    assert told(caplog) == []
    memory.broker.set_reachable(memory.client, True)
    log = TailLog(tail)
    log.until(lambda: log.values(1), "it comes")
    tail.close()


def test_a_reader_that_was_held_up_itself_waits_once_more(
    memory: MemoryCluster, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    tail = MonitoredTail(memory, "log", {0: 0, 1: 0}, {})
    tail.monitor.knows(1, 0)
    seconds = iter([100.0])
    now = tail.monitor._monotonic
    monkeypatch.setattr(tail.monitor, "_monotonic", lambda: now() + next(seconds, 100.0))  # the process was stopped
    memory.broker.produce("log", 1, b"a")
    assert tail.read(0.2).records[1]
    assert told(caplog) == []
    tail.close()


def test_what_may_wait_behind_a_flood_is_not_missing(memory: MemoryCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine at its limit takes long for what was fetched of other partitions; fetching again makes it worse."""
    now = [100.0]
    monkeypatch.setattr(memory.runtime, "monotonic", lambda: now[0], raising=False)
    tail = MonitoredTail(memory, "log", {0: 0, 1: 0}, {0: 10_000, 1: 10_000})
    batches = [TailBatch({0: [(n, 1, None)]}, is_full=True) for n in range(6)] + [TailBatch({0: [(6, 1, None)]})]
    monkeypatch.setattr(tail.tail, "read", lambda timeout_s, **_: batches.pop(0))
    for _ in range(6):
        tail.read(0.2)
        now[0] += PATIENCE_S / 2
        assert tail.monitor.missing() == []
    tail.read(0.2)  # the client has handed over all that it had
    now[0] += PATIENCE_S
    tail.monitor.end_read(0.2)
    assert tail.monitor.missing() == [], "its broker has not answered since"
    for cp in (0, 1):
        tail.monitor.knows(cp, 9_999)
    assert tail.monitor.missing() == [0, 1]
    tail.close()


def test_a_range_is_read_to_its_end(memory: MemoryCluster) -> None:
    for number in range(3):
        memory.broker.produce("log", 1, b"%d" % number)
    stuck(memory, lambda tails, restarts: tails == 1)
    found = [entry for _, entries in read_range(memory, "log", {1: (0, 3)}, TIMEOUT_S) for entry in entries]
    assert [offset for offset, _, _ in found] == [0, 1, 2]


def test_a_restart_reads_again_from_there(side: Side) -> None:
    topic = side.topic(2, LOG_TIME)
    for partition in range(2):
        append(side, topic, partition, [b"a", b"b"])
    log = TailLog(side.cluster.tail(topic, {0: 0, 1: 0}))
    log.until(lambda: len(log.values(0)) == len(log.values(1)) == 2, "all is read")
    log.tail.restart({1: 1})
    append(side, topic, 1, [b"c"])
    log.until(lambda: len(log.values(1)) >= 4, "the last two are read again")
    assert (log.offsets(0), log.offsets(1)) == ([0, 1], [0, 1, 1, 2])
    log.tail.close()


def test_librdkafkas_client_that_fetches_nothing_of_a_partition_does_again(
    side: Side, caplog: pytest.LogCaptureFixture
) -> None:
    """A paused partition behaves like one with a stuck fetch: no messages and no error."""
    if not isinstance(side, KafkaSide):
        pytest.skip("of librdkafka")
    from confluent_kafka import TopicPartition  # of this test alone

    topic = side.topic(2, LOG_TIME)
    tail = MonitoredTail(side.cluster, topic, {0: 0, 1: 0}, {})
    tail.monitor.patience_s = 0.3
    log = TailLog(tail)
    log.until(lambda: len(log.ends) == 2, "it reads")
    reading: Any = tail.tail
    reading._reading.use(lambda: reading._reading.consumer.pause([TopicPartition(topic, 1)]))
    append(side, topic, 1, [b"a"])
    tail.monitor.knows(1, 0)
    log.until(lambda: log.values(1) == [b"a"], "it comes")
    assert told(caplog)
    tail.close()


def test_a_range_of_messages_is_read_on_by_a_new_client(side: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader of a Spark executor."""
    if not isinstance(side, KafkaSide):
        pytest.skip("of librdkafka")
    opened: list[Reading] = []

    class Deaf(Reading):
        def use(self, work: Callable[[], object]) -> None:
            super().use(work)
            if self not in opened:
                opened.append(self)
            if len(opened) == 1:
                super().use(lambda: self.consumer.pause(self.consumer.assignment()))

    monkeypatch.setattr(range_reader, "Reading", Deaf)
    monkeypatch.setattr(range_reader, "DEAF_S", 0.5)
    topic = side.topic(1)
    side.produce(topic, 0, [b"a", b"b", b"c"])
    bootstrap = side._settings["bootstrap.servers"]
    found = [m.offset() for some in range_reader.read_range(bootstrap, {}, topic, 0, 1, 2, timeout_s=20) for m in some]
    assert (found, len(opened)) == ([1, 2], 2)
