"""A stuck partition is reported once, with the remedy; its recovery is reported, too."""

from __future__ import annotations

import pytest

from kafka_marshal.engine.work.consumer import ConsumerEngine
from kafka_marshal.engine.work.stuck import LOOK_UP_AGAIN_MS, SAID_EVERY_MS, SILENT_AFTER_MS, STUCK_AFTER_MS
from kafka_marshal.errors import PartitionStuckError, PositionLostError
from kafka_marshal.ports import TopicInfo
from tests.engine.harness import HI, Member, Net
from tests.engine.scenes import T0, reposition


def at_work(end: int = 10) -> tuple[Net, Member, ConsumerEngine]:
    """A member that has handled offsets 0 to 4, with its next fetch at 5."""
    net = Net(cps=1)
    net.topic("t", 1, end=end, tid="id-1")
    member = net.member("a")
    consumer = member.consumer("t")
    net.run_until(lambda: member.held() == [T0])
    member.work()
    assert consumer.assignments[T0].buffer.fetch_next == 5
    return net, member, consumer


def looks(net: Net, member: Member, ms: float, *, log_end: int = 10, drained: bool = True) -> None:
    """The shell's checks, once in every HI."""
    until = net.now + ms
    while net.now < until:
        for consumer in member.consumers:
            for assignment in consumer.assignments.values():
                consumer.log_ends(assignment.key, log_end, net.now)
            consumer.positions.stuck.look(net.now, net.now if drained else 0.0)
        net.run(HI)


def why(consumer: ConsumerEngine) -> list[str]:
    return [one.why for one in consumer.positions.stuck.found]


def test_what_fails_once_is_a_warning() -> None:
    net, member, consumer = at_work()
    consumer.positions.stuck.failed(T0, "crc", net.now)
    looks(net, member, HI)
    assert (why(consumer), consumer.errors) == ([], [])
    assert member.warnings == ["t [0]: crc"]


def test_what_fails_again_and_again_is_one_error_that_names_the_way_past_it() -> None:
    net, member, consumer = at_work()
    for _ in range(500):
        consumer.positions.stuck.failed(T0, "crc", net.now)
        net.run(10)
    [error] = consumer.errors
    assert isinstance(error, PartitionStuckError)
    assert (error.topic, error.partition, error.offset) == ("t", 0, 5)
    assert "kafka-marshal skip g t:0" in str(error) and "crc" in str(error)
    assert member.warnings == ["t [0]: crc", str(error)]
    assert why(consumer) == ["unreadable"]
    assert member.held() == [T0], "the lease is kept: another member could not read it either"


def test_what_is_ahead_of_it_is_delivered_before_it_is_an_error() -> None:
    net, member, consumer = at_work(end=7)
    member.fetch()
    for _ in range(500):
        consumer.positions.stuck.failed(T0, "crc", net.now)
        net.run(10)
    assert (why(consumer), consumer.errors) == ([], [])
    assert [message.offset() for message in member.work()] == [5, 6]
    consumer.positions.stuck.failed(T0, "crc", net.now)
    [error] = consumer.errors
    assert isinstance(error, PartitionStuckError)
    assert error.offset == 7


def test_it_is_reported_again_seldom_and_in_the_log_alone() -> None:
    net, member, consumer = at_work()
    consumer.positions.stuck.failed(T0, "crc", net.now)
    consumer.positions.stuck.failed(T0, "crc", net.now + STUCK_AFTER_MS)
    net.now += STUCK_AFTER_MS
    member.settle()
    said = len(member.warnings)
    consumer.positions.stuck.look(net.now + SAID_EVERY_MS - 1, net.now)
    member.settle()
    assert len(member.warnings) == said
    consumer.positions.stuck.look(net.now + SAID_EVERY_MS, net.now)
    member.settle()
    assert len(member.warnings) == said + 1 and member.warnings[-1].endswith("(so for 10 minutes)")
    assert len(consumer.errors) == 1


def test_it_continues_when_messages_come() -> None:
    net, member, consumer = at_work()
    consumer.positions.stuck.failed(T0, "crc", net.now)
    consumer.positions.stuck.failed(T0, "crc", net.now + STUCK_AFTER_MS)
    member.work()
    looks(net, member, HI)
    assert why(consumer) == []
    assert "goes on" in member.warnings[-1]
    consumer.positions.stuck.failed(T0, "crc", net.now)
    assert why(consumer) == [], "another offset: it may be passed over as the one before"


def test_a_partition_that_is_released_is_not_stuck_here_any_more() -> None:
    net, _, consumer = at_work()
    consumer.positions.stuck.failed(T0, "crc", net.now)
    consumer.positions.stuck.failed(T0, "crc", net.now + STUCK_AFTER_MS)
    consumer.close(net.now)
    net.run_until(lambda: not net.world(T0).held)
    assert why(consumer) == []


def test_nothing_comes_though_the_log_continues() -> None:
    net, member, consumer = at_work()
    looks(net, member, SILENT_AFTER_MS)
    assert why(consumer) == []
    looks(net, member, 3 * HI)
    assert why(consumer) == ["silent"]
    assert "offsets 5 to 9" in member.warnings[-1]
    assert consumer.errors == [], "it mends itself: no loop is to end by it"
    member.work()
    looks(net, member, HI)
    assert why(consumer) == []


def test_a_reader_that_has_lost_touch_is_sent_again() -> None:
    """After a change of leader it may wait for ever without knowing a later end offset."""
    net, member, consumer = at_work()
    member.fetching.clear()  # it reads nothing any more …
    looks(net, member, SILENT_AFTER_MS, log_end=5)
    assert why(consumer) == [] and consumer.assignments[T0].watch.asked_end == 0
    looks(net, member, 3 * HI, log_end=5)
    assert consumer.assignments[T0].watch.asked_end == 10, "the leader was asked"
    looks(net, member, SILENT_AFTER_MS, log_end=5)
    assert why(consumer) == ["silent"]
    assert "it is fetched again" in member.warnings[-1]
    member.fetching[T0] = (consumer.number, 5)
    assert [message.at for message in member.work()] == [5, 6, 7, 8, 9]
    looks(net, member, 2 * HI, log_end=10)
    assert why(consumer) == []


def test_a_leader_that_does_not_answer_is_not_asked_again_and_again() -> None:
    net, member, _ = at_work()
    member.hold_lookups = True
    looks(net, member, 20 * SILENT_AFTER_MS, log_end=5)
    assert len(member.held_lookups) == 1


@pytest.mark.parametrize("case", ["at the end", "nobody reads", "paused", "fetched"])
def test_who_is_merely_quiet_is_not_stuck(case: str) -> None:
    """At the end; a user that does not poll, or a queue that is never empty; paused by the user; not taken yet."""
    net, member, consumer = at_work()
    if case == "paused":
        consumer.assignments[T0].user_paused = True
    if case == "fetched":
        member.fetch(2)
    net.data[T0].end = end = 5 if case == "at the end" else 10
    looks(net, member, 5 * SILENT_AFTER_MS, log_end=end, drained=case != "nobody reads")
    assert why(consumer) == []


def test_a_record_that_is_too_large_is_reported_where_nothing_comes() -> None:
    net, member, consumer = at_work()
    for _ in range(4):
        consumer.positions.stuck.too_large("Invalid response size 5000149", net.now)
        looks(net, member, HI)
    [error] = consumer.errors
    assert why(consumer) == ["too large"]
    assert "receive.message.max.bytes" in str(error) and "skip g t:0 --to 6" in str(error)


def test_a_record_that_is_too_large_elsewhere_does_not_concern_a_partition_that_continues() -> None:
    net, member, consumer = at_work(end=100)
    for _ in range(8):
        consumer.positions.stuck.too_large("Invalid response size 5000149", net.now)
        member.work()
        looks(net, member, HI, log_end=100)
    assert why(consumer) == []


def test_a_partition_without_a_leader_is_reported_until_it_has_one() -> None:
    net, member, consumer = at_work(end=5)
    gone = {"t": TopicInfo("t", 1, "id-1", leaderless=frozenset({0}))}
    member.engine.metadata(gone, net.now)
    looks(net, member, SILENT_AFTER_MS / 2, log_end=5)
    assert why(consumer) == [], "leaders are elected all the time"
    member.engine.metadata(gone, net.now)
    looks(net, member, SILENT_AFTER_MS, log_end=5)
    assert why(consumer) == ["no leader"]
    assert consumer.errors == []
    net.tell_topics()
    assert why(consumer) == []


def test_p11_a_lost_position_is_stuck_until_it_is_set() -> None:
    net, member, consumer = at_work()
    net.topic("t", 1, end=500, tid="id-2")
    net.tell_topics()
    net.run(2 * HI)
    assert why(consumer) == ["position lost"]
    assert isinstance(consumer.errors[0], PositionLostError)
    assert sum("release-group g --partition t:0" in line for line in member.warnings) == 1
    reposition(net, -1)
    net.run_until(lambda: member.held() == [T0])
    assert why(consumer) == []


def test_p9_a_reader_that_is_thrown_out_of_range_again_and_again_asks_the_leader_once_a_second() -> None:
    """librdkafka reads an offset from a corrupt batch's bytes, which the broker rejects."""
    net, member, consumer = at_work()
    member.hold_lookups = True
    asked: list[float] = []
    began = net.now
    while net.now < began + 5 * LOOK_UP_AGAIN_MS:
        consumer.positions.out_of_range(T0, net.now)
        member.settle()
        net.run(10)
        asked += [net.now for _ in member.held_lookups]
        member.answer_lookups()
    assert asked[0] <= began + 20, "the first time at once"
    assert len(asked) == pytest.approx(5, abs=1)
