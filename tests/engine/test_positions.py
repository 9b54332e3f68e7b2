"""P9 and P11: start positions, messages deleted by retention, and lost positions."""

from __future__ import annotations

import pytest

from kafka_marshal.engine.effects import Callback
from kafka_marshal.engine.policies import Greedy, MaxClaims
from kafka_marshal.errors import PositionLostError
from rationalizer import ClaimingPartition, Heartbeat, HeartbeatBatch
from tests.engine.harness import HI, DataLog, Member, Net
from tests.engine.scenes import reposition

T0, T1 = ("t", 0), ("t", 1)


def starting(
    start: object = "earliest", *, low: int = 0, end: int = 50, partitions: int = 1, **options: object
) -> tuple[Net, Member]:
    net = Net(cps=1)
    net.topic("t", partitions, end=end, start=low, tid="id-1")
    net.data[T0].at_datetime = 30
    member = net.member("a")
    member.consumer("t", start=start, **options)  # type: ignore[arg-type]
    return net, member


def read_all(net: Net, member: Member, ms: float = 2 * HI) -> list[int]:
    """Messages that the member gets within ms."""
    got: list[int] = []
    until = net.now + ms
    while net.now < until:
        at_most_once = any(consumer.at_most_once for consumer in member.consumers)
        got.extend(m.at for m in (member.work_granted() if at_most_once else member.work()))
        net.tick()
    return got


def beats_with_offset(net: Net) -> list[int]:
    return [r.last_offset for r in net.records(Heartbeat) if isinstance(r, Heartbeat) and r.last_offset is not None]


# -- P9: the group's first start ----------------------------------------------------------------------------------


@pytest.mark.parametrize("held_up", ["lookup", "beat"])
def test_p9_a_first_holder_releases_only_once_the_start_is_in_the_log(held_up: str) -> None:
    """A newcomer claims during the first look-up: without a position in the log it would start at the beginning."""
    net = Net(cps=1)
    net.topic("t", 2, end=50)
    a = net.member("a")
    a.hold_lookups = held_up == "lookup"
    a.drop_if = lambda record: held_up == "beat" and isinstance(record, Heartbeat | HeartbeatBatch)
    a.consumer("t", start="latest")
    net.run(50)
    b = net.member("b")
    b.consumer("t", start="latest")
    net.run(300)
    a.hold_lookups = False
    a.answer_lookups()
    a.drop_if = lambda record: False
    net.run_until(lambda: len(b.held()) == 1, 3 * HI)
    net.run(100)
    assert net.world(b.held()[0]).progress.stable == 49
    net.data[T0].end = net.data[T1].end = 60
    assert read_all(net, a) == read_all(net, b) == list(range(50, 60))


def test_p9_closing_waits_for_the_start_no_longer_than_hi() -> None:
    """The leader does not answer: closing continues nevertheless (B14)."""
    net, member = starting("latest")
    member.hold_lookups = True
    net.run(50)
    member.close()
    net.run_until(lambda: member.consumers[0].closed, HI + 50)
    assert not net.world(T0).held


# -- P9: partitions that appear -----------------------------------------------------------------------------------


def test_p9_a_topic_that_appears_later_starts_at_the_earliest() -> None:
    net = Net(cps=1)
    member = net.member("a")
    member.consumer("t", start="latest")
    net.run(HI)
    assert net.records(ClaimingPartition) == []
    net.topic("t", 1, end=20)
    net.tell_topics()
    net.run_until(lambda: member.held() == [T0], 100)
    assert read_all(net, member) == list(range(20))


def test_p9_a_topic_that_a_pattern_finds_later_starts_at_the_earliest() -> None:
    net = Net(cps=1)
    net.topic("flights-1", 1, end=20)
    net.topic("__consumer_offsets", 1, end=20)
    member = net.member("a")
    member.consumer("^flights", start="latest")
    net.run(50)
    net.topic("flights-2", 1, end=20)
    net.tell_topics()
    net.run_until(lambda: len(member.held()) == 2, 100)
    assert {m.of for _ in range(20) for m in member.work()} == {("flights-2", 0)}


def _starts_after_the_topic_grew(before: int, after: int, **options: object) -> tuple[dict[int, int], Member]:
    """A group ends; its topic grows; a member that starts then has not seen it grow."""
    net = Net(cps=2)
    net.topic("t", before, end=20)
    first = net.member("a")
    first.consumer("t", start="latest", **options)  # type: ignore[arg-type]
    net.run(100)
    first.kill()
    oldest: dict[int, int] = {}
    for lease in (net.world(key) for key in first.held()):
        cp = first.engine.peers.cp_of((lease.topic, lease.partition))
        oldest[cp] = min(lease.epoch, oldest.get(cp, lease.epoch))
    net.topic("t", after, end=20)
    late = net.member("b")
    late.hold_lookups = True
    late.consumer("t", start="latest")
    net.run_until(lambda: len(late.held()) == after)
    return oldest, late


def test_q38_a_member_that_did_not_see_a_topic_grow_checks_the_age_of_the_group() -> None:
    """Running members would have got the new partitions at once: they were added after the first claims (P9)."""
    oldest, late = _starts_after_the_topic_grew(2, 4)
    claims = {lookup.key: dict(lookup.claims_before) for lookup in late.held_lookups}
    assert claims.keys() == {("t", 2), ("t", 3)}
    assert claims["t", 2] == claims["t", 3] == oldest


def test_q38_in_a_group_that_leaves_partitions_alone_it_is_unknown() -> None:
    _, late = _starts_after_the_topic_grew(8, 8, policy=Greedy() & MaxClaims(3))
    assert len(late.held_lookups) == 5
    assert [lookup.claims_before for lookup in late.held_lookups] == [{}] * 5


def test_q38_a_group_that_begins_has_no_past() -> None:
    oldest, late = _starts_after_the_topic_grew(0, 3)
    assert oldest == {}
    assert [lookup.claims_before for lookup in late.held_lookups] == [{}] * 3


def test_p9_a_transient_gap_in_the_metadata_costs_nothing_but_time() -> None:
    """A topic is missing in one answer (B22): its partitions are released and claimed again, with their positions."""
    net, member = starting()
    net.run(50)
    member.work()
    log = net.data.pop(T0)
    net.tell_topics()
    net.run(50)
    assert (Callback.LOST, T0) in member.callbacks
    net.data[T0] = log
    net.tell_topics()
    net.run_until(lambda: member.held() == [T0])
    assert read_all(net, member) == list(range(5, 50))
    assert member.consumers[0].errors == []


# -- P9: retention ------------------------------------------------------------------------------------------------


def test_p9_an_out_of_range_report_that_proves_wrong_loses_nothing() -> None:
    """The reader reports out of range, but the leader has the position: buffered messages are not skipped."""
    net, member = starting()
    net.run(50)
    member.fetch(10)
    member.consumers[0].positions.out_of_range(T0, net.now)
    member.settle()
    net.run(50)
    assert read_all(net, member) == list(range(50))
    assert beats_with_offset(net) == sorted(beats_with_offset(net))


def test_p9_out_of_range_twice_in_a_row() -> None:
    """Another report during the look-up: one query of the leader is enough."""
    net, member = starting(low=20)
    member.hold_lookups = True
    net.run(50)
    member.fetch()
    member.consumers[0].positions.out_of_range(T0, net.now)
    member.settle()
    assert len(member.held_lookups) == 1
    member.hold_lookups = False
    member.answer_lookups()
    assert read_all(net, member) == list(range(20, 50))


# -- P11 ----------------------------------------------------------------------------------------------------------


def test_p11_one_lost_position_stops_nothing_else() -> None:
    """No member of the group ends by it: each skips that partition, reports it once, and continues."""
    net, a = starting(partitions=3)
    read_all(net, a)
    a.close()
    net.run(HI)
    net.data[T0].end = 10
    members = [net.member(name) for name in "bcd"]
    consumers = [member.consumer("t", raises=frozenset()) for member in members]
    for _ in range(20):
        net.run(HI)
        for member in members:
            member.work()
    assert [consumer.errors for consumer in consumers] == [[], [], []]
    assert sorted(key for member in members for key in member.held()) == [("t", 1), ("t", 2)]
    assert [one[:4] for one in consumers[0].positions.stuck.lost] == [("t", 0, 50, "position lost")]
    told = [sum("position lost" in line and "--partition t:0=" in line for line in x.warnings) for x in members]
    assert told == [1, 1, 1]
    assert all((Callback.LOST, T0) in member.callbacks for member in members), "though it was never assigned"
    assert not net.world(T0).held
    reposition(net, 4)
    net.run(5 * HI)
    assert net.world(T0).held
    assert [consumer.positions.stuck.lost for consumer in consumers] == [[], [], []]


def recreated() -> tuple[Net, list[Member]]:
    """Two members work on two partitions; the topic is deleted and recreated, longer than their positions."""
    net = Net(cps=1)
    net.topic("t", 2, end=50, tid="id-1")
    members = [net.member("a"), net.member("b")]
    for member in members:
        member.consumer("t")
    net.run_until(lambda: all(len(m.held()) == 1 for m in members))
    for member in members:
        member.work()
        member.work()
    net.topic("t", 2, end=500, tid="id-2")
    net.tell_topics()
    return net, members


@pytest.mark.parametrize("at_most_once", [False, True])
@pytest.mark.parametrize("counted_first", [False, True])
def test_p11_partitions_that_the_new_topic_lacks_are_released_and_lost_where_they_come_back(
    at_most_once: bool, counted_first: bool
) -> None:
    """Recreated with fewer, then grown: new offsets below the old position are not skipped silently."""
    net = Net(cps=1)
    net.topic("t", 2, end=10, tid="id-1")
    member = net.member("a")
    consumer = member.consumer("t", at_most_once=at_most_once)
    net.run_until(lambda: len(member.held()) == 2)
    assert len(read_all(net, member)) == 20
    del net.data[T1]
    net.topic("t", 1, end=0, tid="id-2")
    if counted_first:
        net.topic_ids["t"] = ""
        net.tell_topics()
        net.topic_ids["t"] = "id-2"
    net.tell_topics()
    net.run(2 * HI)
    assert member.held() == []
    net.topic("t", 2, end=500, tid="id-2")
    net.tell_topics()
    assert read_all(net, member, 5 * HI) == [] and member.held() == []
    assert sorted(str(error)[:5] for error in consumer.errors) == ["t [0]", "t [1]"]


def test_p11_progress_that_was_under_way_does_not_unblock() -> None:
    """Unreported progress is reported with the release; it is no reposition."""
    net, member = starting()
    net.run(50)
    member.work()
    net.topic("t", 1, end=500, tid="id-2")
    net.tell_topics()
    net.run(HI)
    assert net.world(T0).progress.stable == 4
    net.run(10 * HI)
    assert member.held() == []


def test_p11_a_topic_recreated_between_two_polls_is_recognised_later_too() -> None:
    """Missing in one poll, back in the next with another id."""
    net, member = starting()
    net.run(50)
    member.work()
    net.run(HI)
    del net.data[T0]
    net.tell_topics()
    net.run(HI)
    net.topic("t", 1, end=500, tid="id-2")
    net.tell_topics()
    net.run(10 * HI)
    assert member.held() == []
    assert isinstance(member.consumers[0].errors[0], PositionLostError)


def test_p11_an_unclaimed_partition_of_a_recreated_topic_is_just_read() -> None:
    """The group never had a position in it."""
    net = Net(cps=1)
    net.topic("t", 2, end=50, tid="id-1")
    member = net.member("a")
    member.consumer("t", policy=MaxClaims(1))
    net.run(50)
    [mine] = member.held()
    net.topic("t", 2, end=5, tid="id-2")
    net.tell_topics()
    net.run_until(lambda: member.held() not in ([], [mine]))
    assert read_all(net, member) == [0, 1, 2, 3, 4]


def test_p11_missing_topic_ids_are_no_change() -> None:
    net, member = starting()
    net.run(50)
    net.topic_ids["t"] = ""
    net.tell_topics()
    net.run(50)
    net.topic_ids["t"] = "id-1"
    net.tell_topics()
    net.run(50)
    assert member.held() == [T0]
    assert member.consumers[0].errors == []


def test_a_member_with_a_limit_takes_grown_partitions_up_to_it() -> None:
    net = Net(cps=1)
    net.topic("t", 1)
    member = net.member("a")
    member.consumer("t", policy=Greedy() & MaxClaims(2))
    net.run(50)
    net.data[T1] = DataLog()
    net.data["t", 2] = DataLog()
    net.tell_topics()
    net.run(3 * HI)
    assert len(member.held()) == 2
