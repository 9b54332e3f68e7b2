"""Reading ranges of a topic."""

from __future__ import annotations

import pytest

from kafka_marshal.errors import KafkaUnavailableError, TopicChangedError
from kafka_marshal.node.log_reader import bounds, judge, read_range
from kafka_marshal.ports import FaultKind, TailBatch, TailFault
from tests.contract.sides import LOG_TIME, TIMEOUT_S, Side


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
