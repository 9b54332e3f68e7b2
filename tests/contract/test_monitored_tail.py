"""A reader that receives nothing of the log, and no error: it is detected and repaired step by step."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

from kafka_marshal.adapters.kafka import range_reader
from kafka_marshal.adapters.kafka.readers import Reading
from kafka_marshal.adapters.memory import MemoryCluster
from kafka_marshal.errors import KafkaUnavailableError
from kafka_marshal.node import log_reader
from kafka_marshal.node.log_reader import MonitoredTail, read_range
from kafka_marshal.ports import TailBatch
from tests.contract.sides import LOG_TIME, TIMEOUT_S, KafkaSide, Side, TailLog, append

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
