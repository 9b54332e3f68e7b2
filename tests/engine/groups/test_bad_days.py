"""Members of a coordinated group under faults, on virtual time: C10, C17, C19, G1, G4, G12, G20, G21, P9, P11, P12."""

from __future__ import annotations

from random import Random

import pytest

from kafka_marshal.engine.groups.holdings import Holdings
from kafka_marshal.engine.groups.member import MemberState
from kafka_marshal.engine.settings import GroupOptions
from kafka_marshal.errors import (
    ClientReplacedError,
    WrongKindError,
)
from rationalizer import (
    ClaimingPartition,
    CommitEntry,
    CommitOffsets,
    ConfigureGroup,
    GroupHeartbeat,
    JoinGroup,
    LeaveGroup,
    TopicsChanged,
    route_group,
)
from tests.engine.groups.test_members import (
    SESSION,
    all_at_work,
    group_of,
    group_of_or_none,
    join,
    net_of,
    read_all,
    source,
    state,
    works_on,
)
from tests.engine.harness import Member


def test_g12_a_pattern_of_its_own_is_reported_though_others_subscribe_to_the_topic() -> None:
    net = net_of()
    first = join(net, "a")
    net.run_until(lambda: works_on(first) == {0, 1, 2, 3})
    there = net.topics
    net.topics = dict  # type: ignore[method-assign]  # it joins before it knows any topic
    second = join(net, "b", "^t$")
    net.run_until(lambda: source(second).member.joined)
    net.topics = there  # type: ignore[method-assign]
    net.tell_topics()
    net.run_until(lambda: all_at_work(first, second) and len(works_on(second)) == 2)


def test_g20_a_member_heard_meanwhile_is_not_witnessed() -> None:
    net = net_of()
    members = [join(net, name) for name in "abcd"]
    net.run_until(lambda: all_at_work(*members))
    net.run(SESSION)
    since, beats = net.now, len(net.records(GroupHeartbeat))
    net.run(SESSION * 20)
    assert net.now > since
    assert len(net.records(GroupHeartbeat)) - beats <= len(members) * 20 * 3 / 0.85


def test_g20_while_a_handler_hangs_nothing_is_due() -> None:
    net = net_of(end=10)
    member = join(net, "a", handler_timeout_ms=1_000.0)
    net.run_until(lambda: works_on(member) == {0, 1, 2, 3})
    member.fetch()
    assert member.take(3) is not None
    net.run_until(lambda: not source(member).member.joined)
    assert member.engine.deadline(member.clock()) > member.clock()


def test_c10_a_pause_of_a_dead_admin_ends_though_all_have_left_and_the_log_is_silent() -> None:
    net = net_of(end=10)
    member = join(net, "a")
    net.run_until(lambda: works_on(member) == {0, 1, 2, 3})
    net.pause(2 * SESSION)
    net.run_until(lambda: source(member).has_left)
    left = net.now
    net.run_until(lambda: works_on(member) == {0, 1, 2, 3})
    assert net.now - left < 3 * SESSION


def test_g20_evicted_and_replaced_meanwhile_it_does_not_come_back() -> None:
    net = net_of()
    old = join(net, "a")
    net.run_until(lambda: works_on(old) == {0, 1, 2, 3})
    me = source(old).member
    net.write(LeaveGroup(*me.settings.ids, me.member_id, me.generation), me.home)
    net.run(100)
    new = join(net, "a")
    net.run_until(lambda: works_on(new) == {0, 1, 2, 3})
    net.run(4 * SESSION)
    assert works_on(new) == {0, 1, 2, 3}
    assert isinstance(old.consumers[0].errors[0], ClientReplacedError)
    assert new.consumers[0].errors == []


def test_g20_one_that_slept_through_the_life_of_its_successor_does_not_come_back() -> None:
    net = net_of()
    old, other = join(net, "a"), join(net, "b")
    net.run_until(lambda: all_at_work(old, other) and len(works_on(other)) == 2)
    old.paused = True
    net.run_until(lambda: works_on(other) == {0, 1, 2, 3})  # it was buried
    new = join(net, "a")
    net.run_until(lambda: len(works_on(new)) == 2)
    new.close()
    net.run_until(lambda: works_on(other) == {0, 1, 2, 3})
    joins = len(net.records(JoinGroup))
    old.paused = False
    net.run(SESSION * 3)
    assert isinstance(old.consumers[0].errors[0], ClientReplacedError)
    assert len(net.records(JoinGroup)) == joins


def test_p9_the_first_owner_sets_the_start_also_of_what_is_revoked_already() -> None:
    net = net_of(end=20)
    first = join(net, "a", start="latest")
    net.run_until(lambda: source(first).member.joined)
    net.run(40)  # the first begins soon, the second when the first has begun
    second = join(net, "b", start="latest")
    net.run_until(lambda: all_at_work(first, second) and len(works_on(second)) == 2)
    assert {kept.progress.stable for _, _, kept in group_of(net).all_progress()} == {19}
    assert {kept.initial for _, _, kept in group_of(net).all_progress()} == {19}


def test_g21_a_member_that_is_paused_with_topics_to_report_does_not_spin() -> None:
    net = net_of(end=10)
    member = join(net, "a", "^t")
    net.run_until(lambda: works_on(member) == {0, 1, 2, 3})
    member.fetch()
    assert member.take(3) is not None  # it can't leave
    member.drop_if = lambda record: isinstance(record, TopicsChanged)
    net.topic("t2", 3)
    net.tell_topics()
    net.run(200)
    net.pause(60_000)
    net.run(SESSION * 3)  # the harness rejects deadlines in the past
    assert source(member).member.joined


def test_p12_a_position_that_an_operator_sets_under_a_pause_is_worked_on_again() -> None:
    net = net_of(partitions=0)
    net.topic("t", 1, 5, tid="one")
    member = join(net, "a")
    net.run_until(lambda: works_on(member) == {0})
    read_all(net, member, ms=SESSION)
    net.topic("t", 1, 500, tid="two")
    member.close()
    net.run(SESSION)
    again = join(net, "b")
    net.run_until(lambda: again.consumers[0].errors)
    net.pause(60_000)
    net.run_until(lambda: source(again).has_left)
    entry = CommitEntry("t", 0, through=-1)
    net.write(CommitOffsets("admin-1", "admin", "g", "", 0, False, (entry,)), route_group("g", net.cps))
    net.pause(0)
    net.run_until(lambda: works_on(again) == {0})


def test_c19_a_drained_member_hands_over_and_a_late_watchdog_of_its_last_life_drains_no_one() -> None:
    net = net_of(end=10)
    first, second = join(net, "a"), join(net, "b")
    net.run_until(lambda: all_at_work(first, second) and len(works_on(second)) == 2)
    last = source(second).member
    second.kill()
    again = join(net, "b")
    net.run_until(lambda: len(works_on(again)) == 2)
    net.write(LeaveGroup(*last.settings.ids, last.member_id, last.generation), last.home)
    net.run(SESSION)
    assert len(works_on(again)) == 2
    assert not again.engine.leases.draining
    me = source(again).member
    net.write(LeaveGroup("operator", "b", "g", me.member_id, me.generation), me.home)
    net.run_until(lambda: works_on(first) == {0, 1, 2, 3})
    assert state(again) is MemberState.STARTUP
    assert source(again).state(again.clock()) is MemberState.DOWN
    joins = len(net.records(JoinGroup))
    net.run(5 * SESSION)
    assert len(net.records(JoinGroup)) == joins


def test_g1_a_claiming_consumer_of_a_coordinated_group_hears_it_once_and_claims_no_more() -> None:
    net = net_of()
    member = net.member("a")
    for cp in net.logs:
        net.write(ConfigureGroup("x", "admin", "g"), cp)
    consumer = member.consumer("t")
    net.run(SESSION)
    assert [type(error) for error in consumer.errors] == [WrongKindError]
    assert "mode=Group()" in str(consumer.source.failure)
    assert len(net.records(ClaimingPartition)) <= 4
    net.run(10 * SESSION)
    assert len(net.records(ClaimingPartition)) <= 4


def test_c17_a_release_of_what_was_never_worked_on_is_sent_again() -> None:
    net = net_of()
    first = join(net, "a")
    net.run_until(lambda: group_of_or_none(net) is not None and source(first).member.joined)
    assert works_on(first) == set(), "it opens nothing for 50 ms after its join"
    first.drop_if = lambda record: isinstance(record, CommitOffsets) and any(x.action == 1 for x in record.entries)
    second = join(net, "b")
    net.run(SESSION / 2)
    assert works_on(second) == set()
    first.drop_if = lambda record: False
    took = net.run_until(lambda: all_at_work(first, second) and len(works_on(second)) == 2)
    assert took <= SESSION / 2


def test_closing_while_the_join_is_under_way_leaves_no_member_behind() -> None:
    net = net_of()
    for cp in net.logs:
        net.write(ConfigureGroup("x", "admin", "g"), cp)
    member = net.member("a")
    member.stalled = True
    member.consumer("t", group=GroupOptions("sticky", SESSION))
    assert net.records(JoinGroup)
    member.close()
    net.tick()
    assert not source(member).has_left, "the log may show it as a member yet"
    member.stalled = False
    net.run_until(lambda: source(member).has_left)
    assert group_of(net).members == {}


def test_g20_a_restart_within_its_predecessor_s_session_waits_a_little() -> None:
    """Others need not compute a rebalance for each start of a process that crashes repeatedly."""
    net = net_of()
    first = join(net, "a")
    net.run_until(lambda: works_on(first) == {0, 1, 2, 3})
    first.kill()
    waited = []
    for life in range(20):
        again = net.member("a", rng=Random(life))
        again.consumer("t", group=GroupOptions("sticky", SESSION))
        waited.append(net.run_until(lambda again=again: source(again).member.joined))  # type: ignore[misc]
        again.kill()
    assert len(set(waited)) > 5
    assert SESSION / 100 < sum(waited) / 20 < SESSION / 20 + 20


@pytest.mark.parametrize("noticed", [True, False])
def test_p12_a_topic_recreated_while_members_work_is_reported_by_its_owner(noticed: bool) -> None:
    net = net_of(partitions=0)
    net.topic("t", 2, 5, tid="one")
    members = [join(net, name) for name in "ab"]
    net.run_until(lambda: all_at_work(*members, partitions=2))
    read_all(net, *members, ms=SESSION)
    for partition in range(2):
        del net.data["t", partition]
    if noticed:
        net.tell_topics()
        net.run(100)
        assert not any(works_on(member) for member in members)
    net.topic("t", 2, 3, tid="two")
    net.tell_topics()
    net.run(SESSION)
    lost = [found.partition for member in members for found in member.consumers[0].positions.stuck.lost]
    assert sorted(lost) == [0, 1]


def test_p11_where_an_admin_sets_a_lost_position_members_that_had_left_continue() -> None:
    net = net_of(partitions=1, end=20)
    member = join(net, "a")
    net.run_until(lambda: works_on(member) == {0})
    member.work()
    net.run(SESSION)
    net.data["t", 0].start = net.data["t", 0].end = 0  # another log: position 5 is outside it
    member.engine.take(1, member.engine.consumers[1].positions.out_of_range, ("t", 0), member.clock())
    member.settle()
    net.run_until(lambda: ("t", 0) in member.consumers[0].blocked)
    net.pause(60_000)
    net.run_until(lambda: source(member).has_left)
    net.data["t", 0].end = 20
    stable = next(kept.progress.stable for _, _, kept in group_of(net).all_progress())
    net.write(CommitOffsets("admin-1", "admin", "g", "", 0, False, (CommitEntry("t", 0, through=stable),)), 0)
    net.write(CommitOffsets("admin-1", "admin", "g", "", 0, False, (CommitEntry("t", 0, through=stable),)), 1)
    net.pause(0)
    net.run_until(lambda: works_on(member) == {0})


def test_g4_an_idle_member_goes_through_its_pieces_once_a_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    net = net_of()
    member = join(net, "a")
    net.run_until(lambda: works_on(member) == {0, 1, 2, 3})
    looks: list[float] = []
    monkeypatch.setattr(Holdings, "follow_all", lambda _, now: looks.append(now))
    net.run(10 * SESSION)
    assert looks == []


def test_a_member_that_closes_with_a_hung_handler_and_hears_no_more_does_not_spin() -> None:
    net = net_of(end=10)
    member = join(net, "a", handler_timeout_ms=1_000.0)
    net.run_until(lambda: works_on(member) == {0, 1, 2, 3})
    member.fetch()
    assert member.take(3) is not None
    member.stalled = True
    member.close()
    net.run(SESSION * 2)  # the harness rejects deadlines in the past


def test_p9_no_one_joins_before_the_cluster_has_reported_its_topics(monkeypatch: pytest.MonkeyPatch) -> None:
    """A member without topics would get a partition later and take it for an added one."""
    net = net_of(end=20)
    with monkeypatch.context() as untold:
        untold.setattr(Member, "look_at_topics", lambda self: None)
        member = join(net, "a", start="latest")
        net.run(SESSION)
    assert net.records(JoinGroup) == []
    net.tell_topics()
    net.run_until(lambda: works_on(member) == {0, 1, 2, 3})
    assert {kept.initial for _, _, kept in group_of(net).all_progress()} == {19}
