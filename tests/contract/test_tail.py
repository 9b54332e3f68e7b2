"""The tail of the coordination topic (L4, T1)."""

from __future__ import annotations

import threading
import time

import pytest

from kafka_marshal.errors import ClosedError
from kafka_marshal.ports import FaultKind
from tests.contract.sides import LOG_TIME, TIMEOUT_S, Side, TailLog, append, eventually, recreate


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


def test_after_a_rest_it_fetches_at_once(side: Side) -> None:
    """A partition of librdkafka that is only resumed waits for up to a second."""
    topic = side.topic(2, LOG_TIME)
    log = TailLog(side.cluster.tail(topic, {0: 0, 1: 0}))
    log.rests = True
    append(side, topic, 0, [b"first"])
    log.until(lambda: log.values(0), "it reads")
    before, rounds = log.reads, 12
    for number in range(rounds):
        append(side, topic, 0, [b"%d" % number])
        log.until(lambda number=number: len(log.values(0)) == number + 2, "it comes")  # type: ignore[misc]
    assert log.reads - before < 2 * rounds, "most reads of 0.2 s bring what is there"
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
