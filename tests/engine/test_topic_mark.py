"""P12: the log records in which topic a position was reached, even while no member runs."""

from __future__ import annotations

import pytest

from kafka_marshal.engine.work.assignment import Stage
from kafka_marshal.engine.work.topic_mark import FIRST_MARK, NO_ID, SENT_AT_ONCE, Marked, mark_of, split
from kafka_marshal.errors import PositionLostError
from kafka_marshal.ports import TopicInfo
from rationalizer import ClaimingPartition, CommitRanges, Heartbeat, HeartbeatBatch, ReleasingPartition
from rationalizer.limits import MAX_OFFSET
from tests.engine.harness import HI, FakeMessage, Member, Net
from tests.engine.scenes import reposition, taken

T0 = ("t", 0)


def one_life(net: Net, client_id: str = "a", **options: object) -> Member:
    """A member that works for a while and ends."""
    member = net.member(client_id)
    member.consumer("t", **options)  # type: ignore[arg-type]
    net.run_until(lambda: member.held() == [T0])
    for _ in range(20):
        worked(member)
        net.tick()
    net.run(2 * HI)
    return member


def worked(member: Member) -> list[FakeMessage]:
    """What it gets now."""
    return member.work_granted() if member.consumers[0].at_most_once else member.work()


def stopped(net: Net, member: Member) -> None:
    for consumer in member.consumers:
        consumer.close(net.now)
    net.run_until(lambda: not net.world(T0).held)
    net.members.remove(member)


def marks(net: Net) -> frozenset[int]:
    return split(net.world(T0).progress.ranges).marks


def marked(end: int = 500, **options: object) -> Net:
    """A group that worked on the first topic of the name and has ended."""
    net = Net(cps=1)
    net.topic("t", 1, end=end, tid="id-1")
    stopped(net, one_life(net, **options))  # type: ignore[arg-type]
    return net


def test_p12_the_mark_is_an_offset_no_partition_reaches() -> None:
    found = {mark_of(f"id-{n}") for n in range(1000)}
    assert len(found) == 1000
    assert all(mark is not None and FIRST_MARK <= mark <= MAX_OFFSET for mark in found)
    assert mark_of("vTXnzXnWRlOe9hD9LH4DHw") == 8122400889712612103
    assert mark_of("") is mark_of(NO_ID) is None


def test_p12_marks_are_taken_out_of_the_ranges() -> None:
    assert split([]) == Marked([], frozenset())
    assert split([(3, 4), (7, 7)]) == Marked([(3, 4), (7, 7)], frozenset())
    assert split([(3, 4), (FIRST_MARK, FIRST_MARK)]) == Marked([(3, 4)], frozenset({FIRST_MARK}))
    neighbours = (FIRST_MARK + 4, FIRST_MARK + 5)  # which the log has merged (P3)
    assert split([neighbours]).marks == set(neighbours)


def test_p12_a_holder_marks_its_position_once() -> None:
    net = marked()
    assert marks(net) == {mark_of("id-1")}
    assert sum(isinstance(record, CommitRanges) for record in net.records()) == 1
    stopped(net, one_life(net, "b"))
    assert sum(isinstance(record, CommitRanges) for record in net.records()) == 1


def test_p12_where_nothing_is_done_nothing_is_marked() -> None:
    net = Net(cps=1)
    net.topic("t", 1, end=0, tid="id-1")
    one_life(net)
    assert marks(net) == frozenset()


def test_p12_a_mark_that_was_lost_on_its_way_is_sent_again() -> None:
    net = Net(cps=1)
    net.topic("t", 1, end=50, tid="id-1")
    member = net.member("a")
    member.drop_if = lambda record: isinstance(record, CommitRanges)
    member.consumer("t")
    net.run_until(lambda: member.held() == [T0])
    member.work()
    net.run(2 * HI)
    assert marks(net) == frozenset()
    member.drop_if = lambda record: False
    net.run(2 * HI)
    assert marks(net) == {mark_of("id-1")}


@pytest.mark.parametrize("at_most_once", [False, True])
@pytest.mark.parametrize("end", [3, 500])
def test_p12_a_topic_recreated_while_no_member_ran_is_noticed(end: int, at_most_once: bool) -> None:
    """Shorter than the position, and longer: nothing is skipped, and no member continues at the old position."""
    net = marked(at_most_once=at_most_once)
    stable = net.world(T0).progress.stable
    net.topic("t", 1, end=end, tid="id-2")
    member = net.member("b")
    consumer = member.consumer("t", at_most_once=at_most_once)
    net.run(5 * HI)
    [error] = consumer.errors
    assert isinstance(error, PositionLostError) and "recreated" in str(error) and "--partition t:0=" in str(error)
    assert not member.held() and not worked(member)
    assert net.world(T0).progress.stable == stable


def test_p12_setting_the_position_ends_it_and_the_next_holder_marks_again() -> None:
    net = marked()
    net.topic("t", 1, end=500, tid="id-2")
    reposition(net, -1)
    assert marks(net) == frozenset()
    member = one_life(net, "b")
    assert marks(net) == {mark_of("id-2")}
    stopped(net, member)
    assert one_life(net, "c").held() == [T0]


def test_p12_the_same_topic_is_read_on() -> None:
    net = marked()
    member = net.member("b")
    member.consumer("t")
    net.run_until(lambda: member.held() == [T0])
    assert [message.at for message in member.work()][:1] == [net.world(T0).progress.stable + 1]


@pytest.mark.parametrize("then", ["id-1", "id-2"])
def test_p12_nothing_begins_before_the_id_is_known(then: str) -> None:
    """A member that knows the topic exists but not yet its id."""
    net = marked()
    member = net.member("b")
    net.topic_ids["t"] = ""
    consumer = member.consumer("t")
    net.run_until(lambda: member.held() == [T0])
    net.run(3 * HI)
    assert consumer.assignments[T0].stage is Stage.IDENTIFYING
    assert member.work() == []
    assert member.engine.topic_ids.take_wanted() and not member.engine.topic_ids.take_wanted()
    net.topic_ids["t"] = then
    net.tell_topics()
    net.run(HI)
    assert bool(member.work()) == (then == "id-1")
    assert bool(consumer.errors) == (then == "id-2")


def test_p12_nothing_begins_before_the_id_is_known_though_no_mark_is_in_the_log() -> None:
    """Topics with many partitions are counted first: what is done then would be marked as of a later topic."""
    net = Net()
    net.topic("t", 1, end=20, tid="id-1")
    net.topic_ids["t"] = ""
    member = net.member("a")
    member.consumer("t")
    net.run_until(lambda: member.held() == [T0])
    net.run(3 * HI)
    assert member.work() == []
    assert member.engine.topic_ids.take_wanted()
    net.topic_ids["t"] = "id-1"
    net.tell_topics()
    net.run_until(lambda: bool(member.work()))
    net.run(HI)
    progress = net.world(T0).progress
    assert progress.stable >= 0
    assert split(progress.ranges).marks == {mark_of("id-1")}


def test_p12_a_member_that_waits_for_the_id_can_close() -> None:
    net = marked()
    stable = net.world(T0).progress.stable
    member = net.member("b")
    net.topic_ids["t"] = ""
    member.consumer("t")
    net.run_until(lambda: member.held() == [T0])
    stopped(net, member)
    assert net.world(T0).progress.stable == stable


def test_p12_the_id_of_a_topic_that_was_gone_is_not_that_of_before() -> None:
    """Missing in one poll, counted in the next, described in a later one."""
    net = marked()
    member = net.member("b")
    consumer = member.consumer("t")
    net.run_until(lambda: member.held() == [T0])
    member.engine.metadata({}, net.now)
    net.run(HI)
    member.engine.metadata({"t": TopicInfo("t", 1, "")}, net.now)
    net.run(3 * HI)
    assert member.work() == []
    net.topic("t", 1, end=500, tid="id-2")
    member.engine.metadata(net.topics(), net.now)
    net.run(3 * HI)
    assert member.work() == []
    assert any("recreated" in str(error) for error in consumer.errors)


def test_p12_a_broker_without_topic_ids_is_believed() -> None:
    net = marked()
    net.topic_ids["t"] = NO_ID
    assert one_life(net, "b").held() == [T0]


def test_p12_positions_of_before_are_marked_a_few_at_a_time() -> None:
    """A member with thousands must not flood the log at its start; with the first messages all marks go at once."""
    partitions = 3 * SENT_AT_ONCE
    net = Net(cps=1)
    net.topic("t", partitions, end=2, tid="id-1")
    for partition in range(partitions):
        epoch = net.write(ClaimingPartition("old-1", "old", "g", "t", partition, HI), 0)
        net.write(ReleasingPartition("old-1", "old", "g", "t", partition, epoch, 1), 0)
    member = net.member("a")
    member.consumer("t")
    net.run_until(lambda: len(member.held()) == partitions)
    net.run(6 * HI)
    sent = [record for record in net.records() if isinstance(record, CommitRanges)]
    assert {record.partition for record in sent} == set(range(partitions))
    assert len(sent) == partitions


@pytest.mark.parametrize("how", ["done", "flight", "release", "ranges"])
def test_p12_no_progress_is_in_the_log_before_its_mark(how: str) -> None:
    """However early the topic is recreated: what the log says is done is of a topic that it names."""
    net = Net(cps=1)
    net.topic("t", 1, end=50, tid="id-1")
    member = net.member("a")
    consumer = member.consumer("t")
    net.run_until(lambda: member.held() == [T0])
    messages = taken(member, 5)
    for message in messages[1 if how == "ranges" else 0 :] if how != "flight" else ():
        member.done(message)
    if how == "release":
        consumer.close(net.now)
    net.run(2 * HI)
    records = net.records()
    [at] = [
        place
        for place, record in enumerate(records)
        if isinstance(record, CommitRanges) and record.ranges[0][0] >= FIRST_MARK
    ]
    told = [place for place, record in enumerate(records) if says_what_is_done(record)]
    assert bool(told) == (how != "flight")
    assert all(place > at for place in told)


def says_what_is_done(record: object) -> bool:
    """Whether it reports an offset as done."""
    match record:
        case CommitRanges(ranges=[(first, _), *_]):
            return first < FIRST_MARK
        case ReleasingPartition() | Heartbeat():
            return record.last_offset is not None
        case HeartbeatBatch():
            return any(entry.last_offset is not None for entry in record.entries)
    return False


@pytest.mark.parametrize("deleted", [False, True])
@pytest.mark.parametrize(("done", "at_most_once"), [(0, False), (3, False), (3, True)])
def test_p12_a_topic_recreated_before_the_first_heartbeat_is_lost_for_the_next_member_too(
    done: int, at_most_once: bool, deleted: bool
) -> None:
    net = Net(cps=1)
    net.topic("t", 1, end=50, tid="id-1")
    member = net.member("a")
    consumer = member.consumer("t", at_most_once=at_most_once)
    net.run_until(lambda: member.held() == [T0])
    if at_most_once:
        member.work_granted()
    else:
        messages = taken(member, 5)
        for message in messages[:done]:
            member.done(message)
    if deleted:
        member.engine.metadata({}, net.now)
    net.topic("t", 1, end=500, tid="id-2")
    net.tell_topics()
    net.run(5 * HI)
    assert T0 in consumer.blocked
    consumer.close(net.now)
    net.run_until(lambda: not net.world(T0).held)
    net.members.remove(member)
    heir = net.member("b")
    second = heir.consumer("t", at_most_once=at_most_once)
    net.run(5 * HI)
    [error] = second.errors
    assert "recreated" in str(error) and not worked(heir)
    assert f"at offset {net.world(T0).progress.stable + 1}," in str(error)
    assert marks(net) == {mark_of("id-1")}


def test_p12_what_is_done_beyond_a_gap_stays_apart_from_the_mark() -> None:
    net = Net(cps=1)
    net.topic("t", 1, end=50, tid="id-1")
    member = net.member("a")
    member.consumer("t")
    net.run_until(lambda: member.held() == [T0])
    messages = taken(member, 5)
    member.done(messages[0])
    member.done(messages[3])
    net.run(2 * HI)
    assert split(net.world(T0).progress.ranges).ranges == [(3, 3)]
    assert marks(net) == {mark_of("id-1")}
    stopped(net, member)
    heir = net.member("b")
    heir.consumer("t")
    net.run_until(lambda: heir.held() == [T0])
    assert [message.at for message in taken(heir, 5)] == [1, 2, 4, 5]


def test_p12_a_life_shorter_than_a_beat_is_marked_with_its_release() -> None:
    net = Net(cps=1)
    net.topic("t", 1, end=50, tid="id-1")
    member = net.member("a")
    consumer = member.consumer("t")
    net.run_until(lambda: member.held() == [T0])
    member.work()
    assert net.world(T0).progress.stable == -1
    consumer.close(net.now)
    net.run_until(lambda: not net.world(T0).held)
    assert net.world(T0).progress.stable == 4
    assert marks(net) == {mark_of("id-1")}


def test_q43_of_two_marks_one_is_of_another_topic() -> None:
    net = marked()
    epoch = net.write(ClaimingPartition("old-1", "old", "g", "t", 0, HI), 0)
    other = mark_of("id-0") or 0
    net.write(CommitRanges("old-1", "old", "g", "t", 0, epoch, ((other, other),)), 0)
    net.write(ReleasingPartition("old-1", "old", "g", "t", 0, epoch, None), 0)
    assert marks(net) == {mark_of("id-0"), mark_of("id-1")}
    member = net.member("b")
    consumer = member.consumer("t")
    net.run(3 * HI)
    assert member.held() == []
    assert isinstance(consumer.errors[0], PositionLostError)


def test_q43_a_position_of_before_is_marked_for_what_is_there() -> None:
    """An older release has reached it."""
    net = Net(cps=1)
    net.topic("t", 1, end=50, tid="id-1")
    epoch = net.write(ClaimingPartition("old-1", "old", "g", "t", 0, HI), 0)
    net.write(ReleasingPartition("old-1", "old", "g", "t", 0, epoch, 9), 0)
    member = net.member("b")
    member.consumer("t")
    net.run_until(lambda: member.held() == [T0])
    assert member.work()[0].at == 10
    net.run(2 * HI)
    assert marks(net) == {mark_of("id-1")}
