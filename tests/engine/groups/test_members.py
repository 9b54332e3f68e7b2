"""Members of a coordinated group, on virtual time: G2, G8, G11, G16, G18, G20, G21, G22, P9."""

from __future__ import annotations

from collections import Counter

import pytest

from kafka_marshal.engine.effects import Callback
from kafka_marshal.engine.groups.client import GroupClient
from kafka_marshal.engine.groups.holdings import Holdings
from kafka_marshal.engine.groups.member import EARLIEST_BEAT, MemberState, TopicReports
from kafka_marshal.engine.settings import GroupOptions
from kafka_marshal.engine.work.assignment import Stage
from kafka_marshal.errors import (
    ClientReplacedError,
    GroupForgottenError,
    InconsistentPartitioningStrategyError,
    SessionTimeoutTooHighError,
    UpgradeRequiredError,
    WrongKindError,
)
from rationalizer import (
    ClaimingPartition,
    CommitOffsets,
    ConfigureGroup,
    ForgetGroup,
    Group,
    GroupHeartbeat,
    JoinGroup,
    LeaveGroup,
    TopicsChanged,
    Upgrade,
    World,
    route_group,
    route_lease,
)
from tests.engine.harness import Member, Net

SESSION = 3_000


def net_of(partitions: int = 4, end: int = 0, start: int = 0, level: int = 2) -> Net:
    net = Net(cps=2)
    if level > 1:
        for cp in net.logs:
            net.write(Upgrade("x", "admin", "any", level), cp)
    if partitions:
        net.topic("t", partitions, end, start)
    return net


def join(
    net: Net, client_id: str, *topics: str, strategy: str = "sticky", session: int = SESSION, **options: object
) -> Member:
    member = net.member(client_id)
    member.consumer(*(topics or ("t",)), group=GroupOptions(strategy, session), **options)  # type: ignore[arg-type]
    return member


def source(member: Member) -> GroupClient:
    found = member.consumers[0].source
    assert isinstance(found, GroupClient)
    return found


def state(member: Member) -> MemberState:
    return source(member).member.state(member.clock())


def group_of(net: Net) -> Group:
    home = route_group("g", net.cps)
    world = World(home, net.cps)
    world.apply_many((offset, ts, value) for offset, (ts, value) in enumerate(net.logs[home]))
    found = world.group("g")
    assert found is not None
    return found


def group_of_or_none(net: Net) -> Group | None:
    return net.members[0].worlds[route_group("g", net.cps)].group("g")


def works_on(member: Member) -> set[int]:
    return {key[1] for key, x in member.consumers[0].assignments.items() if x.stage is Stage.ACTIVE}


def all_at_work(*members: Member, partitions: int = 4) -> bool:
    return Counter(p for member in members for p in works_on(member)) == Counter(range(partitions))


def handled(*members: Member) -> Counter[tuple[int, int]]:
    return Counter((m.partition(), m.offset()) for member in members for m in member.handled)


def read_all(net: Net, *members: Member, ms: float = 5_000) -> None:
    for _ in range(int(ms / 100)):
        for member in members:
            member.work()
        net.run(100)


def test_g2_every_partition_of_the_log_is_marked_before_the_first_join() -> None:
    net = net_of()
    member = join(net, "a")
    net.run_until(lambda: works_on(member) == {0, 1, 2, 3})
    kinds = [type(record).__name__ for record in net.records()]
    assert kinds.count("ConfigureGroup") == 2
    assert kinds.count("JoinGroup") == 1
    assert state(member) is MemberState.PART_OF_GROUP


def test_g2_before_the_first_join_all_partitions_of_the_log_are_read() -> None:
    """While some are not read, nothing is marked or due, and no member joins; after the join they may be left."""
    net = net_of()
    home = route_group("g", net.cps)
    member = net.member("a")

    def read(cps: dict[int, World]) -> None:
        member.worlds.clear()
        member.worlds.update(cps)
        member.engine.take(None, member.engine.caught_up, member.clock())
        member.settle()

    everything = dict(member.worlds)
    read({home: everything[home]})
    member.consumer("t", group=GroupOptions("sticky", SESSION))
    net.run(SESSION)
    assert not net.records(ConfigureGroup)
    assert not net.records(JoinGroup)
    assert state(member) is MemberState.STARTUP
    read(everything)
    net.run_until(lambda: works_on(member) == {0, 1, 2, 3})
    read({home: everything[home]})
    net.write(ClaimingPartition("x-1", "x", "other", "t", 0, 600_000), 1 - home)
    net.run(10 * SESSION)
    assert works_on(member) == {0, 1, 2, 3}
    second = join(net, "b")  # it reads all without needing to
    net.run_until(lambda: all_at_work(member, second))
    assert len(net.records(ConfigureGroup)) == net.cps


def test_p9_the_first_owner_sets_the_start_of_every_partition_in_one_record() -> None:
    net = net_of(end=20, start=5)
    member = join(net, "a")
    net.run_until(lambda: works_on(member) == {0, 1, 2, 3})
    starts = [entry for record in net.records(CommitOffsets) for entry in record.entries]  # type: ignore[attr-defined]
    assert [(entry.partition, entry.action, entry.through) for entry in starts] == [(p, 2, 4) for p in range(4)]
    assert len(net.records(CommitOffsets)) == 1
    assert {kept.initial for _, _, kept in group_of(net).all_progress()} == {4}


def test_p9_latest_starts_at_the_end_but_a_partition_added_later_at_its_beginning() -> None:
    net = net_of(partitions=2, end=20)
    member = join(net, "a", start="latest")
    net.run_until(lambda: works_on(member) == {0, 1})
    net.topic("t", 3, 30)
    net.tell_topics()
    net.run_until(lambda: works_on(member) == {0, 1, 2})
    assert {p: kept.initial for _, p, kept in group_of(net).all_progress()} == {0: 19, 1: 19, 2: -1}


def test_g18_one_more_member_gets_its_part_and_what_stays_never_stops() -> None:
    net = net_of(end=50)
    first = join(net, "a")
    net.run_until(lambda: works_on(first) == {0, 1, 2, 3})
    before = {key: x.epoch for key, x in first.consumers[0].assignments.items()}
    second = join(net, "b")
    net.run_until(lambda: all_at_work(first, second) and len(works_on(second)) == 2)
    kept = {key: x.epoch for key, x in first.consumers[0].assignments.items()}
    assert kept.items() <= before.items()
    assert [key for callback, key in first.callbacks if callback is Callback.LOST] == []
    read_all(net, first, second)
    assert handled(first, second) == Counter((p, o) for p in range(4) for o in range(50))


def test_g18_what_is_in_flight_is_finished_before_it_is_released() -> None:
    net = net_of(end=10)
    first = join(net, "a")
    net.run_until(lambda: works_on(first) == {0, 1, 2, 3})
    first.fetch()
    runs = []
    while (run := first.take(5)) is not None:
        runs.append(run)
    second = join(net, "b")
    net.run(SESSION * 2)
    assert works_on(second) == set(), "what it should have is in somebody's hand"
    for run in runs:
        first.done_run(run)
    net.run_until(lambda: len(works_on(second)) == 2)
    read_all(net, first, second)
    assert set(handled(first, second).values()) | {1} == {1}
    assert len(handled(first, second)) + 20 == 40


def test_g20_a_dead_member_is_buried_by_another_s_beat_within_its_session() -> None:
    net = net_of(end=30)
    first, second = join(net, "a"), join(net, "b")
    net.run_until(lambda: all_at_work(first, second) and len(works_on(second)) == 2)
    second.kill()
    died = net.now
    net.run_until(lambda: works_on(first) == {0, 1, 2, 3})
    assert SESSION <= net.now - died + SESSION / 3 <= SESSION * 1.5
    assert [type(r).__name__ for r in net.records()].count("Tick") <= 2
    read_all(net, first)
    assert len(handled(first)) == 120


def test_g20_a_member_not_proven_in_time_delivers_nothing_and_continues_when_the_log_answers() -> None:
    net = net_of(end=100)
    member = join(net, "a")
    net.run_until(lambda: works_on(member) == {0, 1, 2, 3})
    member.drop_appends = True
    net.run(SESSION)
    assert state(member) is MemberState.REDISCOVER
    member.fetch()
    assert member.take(5) is None
    member.drop_appends = False
    net.run_until(lambda: state(member) is MemberState.PART_OF_GROUP)
    assert member.take(5) is not None
    assert [c for c, _ in member.callbacks if c is Callback.LOST] == []


def test_g8_an_expired_member_joins_again_and_loses_what_it_had() -> None:
    net = net_of(end=30)
    first, second = join(net, "a"), join(net, "b")
    net.run_until(lambda: all_at_work(first, second) and len(works_on(second)) == 2)
    had = works_on(second)
    second.paused = True
    net.run_until(lambda: works_on(first) == {0, 1, 2, 3})
    second.paused = False
    net.run_until(lambda: all_at_work(first, second) and len(works_on(second)) == 2)
    assert {key[1] for callback, key in second.callbacks if callback is Callback.LOST} == had


def test_g11_a_restart_moves_nothing_and_waits_for_no_session() -> None:
    net = net_of(end=30)
    first, second = join(net, "a"), join(net, "b")
    net.run_until(lambda: all_at_work(first, second) and len(works_on(second)) == 2)
    had = works_on(second)
    second.kill()
    again = join(net, "b")
    took = net.run_until(lambda: works_on(again) == had)
    assert took < SESSION / 3
    assert len(works_on(first)) == 2


def test_g20_the_replaced_instance_ends_for_good() -> None:
    net = net_of()
    old = join(net, "a")
    net.run_until(lambda: works_on(old) == {0, 1, 2, 3})
    new = join(net, "a")
    net.run_until(lambda: works_on(new) == {0, 1, 2, 3})
    assert isinstance(old.consumers[0].errors[0], ClientReplacedError)
    joins = len(net.records(JoinGroup))
    net.run(SESSION * 3)
    assert len(net.records(JoinGroup)) == joins


def test_closing_finishes_commits_and_leaves() -> None:
    net = net_of(end=10)
    first, second = join(net, "a"), join(net, "b")
    net.run_until(lambda: all_at_work(first, second) and len(works_on(second)) == 2)
    second.work()
    second.close()
    net.run_until(lambda: source(second).has_left and works_on(first) == {0, 1, 2, 3})
    assert len(net.records(LeaveGroup, "b")) == 1
    read_all(net, first)
    assert set(handled(first, second).values()) == {1}
    assert len(handled(first, second)) == 40


@pytest.mark.parametrize("beats", [2, 3, 20])
def test_t4_a_member_beats_as_often_in_a_session_as_it_was_told_to(beats: int) -> None:
    net = net_of()
    member = net.member("a")
    member.consumer("t", group=GroupOptions("sticky", SESSION, beats=beats))
    net.run_until(lambda: net.records(GroupHeartbeat))
    before = len(net.records(GroupHeartbeat))
    net.run(10 * SESSION)
    assert 10 * beats <= len(net.records(GroupHeartbeat)) - before <= 10 * beats / EARLIEST_BEAT + 1


def test_g22_progress_is_the_beat_and_an_idle_member_only_beats() -> None:
    net = net_of(end=100)
    member = join(net, "a")
    net.run_until(lambda: works_on(member) == {0, 1, 2, 3})
    net.run(SESSION)
    beats = len(net.records(GroupHeartbeat))
    member.work()
    net.run(SESSION * 0.34)
    assert len(net.records(GroupHeartbeat)) <= beats + 1
    assert {kept.progress.stable for _, _, kept in group_of(net).all_progress()} == {4}
    since = net.now
    net.run(SESSION * 10)
    assert 30 <= len(net.records(since=int(since))) <= 10 * 3 / 0.8 + 2


def test_g22_at_most_once_nothing_is_repeated_after_a_crash() -> None:
    net = net_of(end=40)
    first = join(net, "a", at_most_once=True)
    net.run_until(lambda: works_on(first) == {0, 1, 2, 3})
    for _ in range(10):
        first.work_granted()
        net.run(50)
    first.kill()
    second = join(net, "b", at_most_once=True)
    net.run_until(lambda: works_on(second) == {0, 1, 2, 3})
    for _ in range(200):
        second.work_granted()
        net.run(50)
    seen = handled(first, second)
    assert set(seen.values()) == {1}
    assert len(seen) >= 160 - 10


def test_g14_a_partition_that_has_not_begun_does_not_begin_with_a_text() -> None:
    """Its metadata would be its progress: it would begin at its log's start, whatever the start is to be."""
    net = net_of(1)
    member = join(net, "a")
    net.run_until(lambda: source(member).reports._pieces.keys() == {("t", 0)})
    reports, texts = source(member).reports, {("t", 0): "x"}
    assert group_of(net).kept("t", 0) is None
    assert reports.describe(texts) == [("t", 0)]
    net.run_until(lambda: works_on(member) == {0})
    net.run(SESSION)
    assert reports.describe(texts | {("t", 7): "y"}) == [("t", 7)]
    assert reports.describe(texts) == []
    net.run(SESSION)
    kept = group_of(net).kept("t", 0)
    assert kept is not None
    assert kept.metadata == "x"


def test_g21_a_pause_empties_the_group_and_its_end_fills_it_again() -> None:
    net = net_of(end=10)
    member = join(net, "a")
    net.run_until(lambda: works_on(member) == {0, 1, 2, 3})
    net.pause(60_000)
    net.run_until(lambda: source(member).has_left)
    assert group_of(net).members == {}
    net.pause(0)
    net.run_until(lambda: works_on(member) == {0, 1, 2, 3})


def test_g20_a_forgotten_group_ends_its_members() -> None:
    net = net_of()
    member = join(net, "a")
    net.run_until(lambda: works_on(member) == {0, 1, 2, 3})
    member.paused = True
    net.pause(60_000)
    net.run(SESSION * 2)
    for cp in net.logs:
        net.write(ForgetGroup("admin-1", "admin", "g"), cp)
    member.paused = False
    net.run(100)
    assert isinstance(member.consumers[0].errors[0], GroupForgottenError)


def test_g20_evicted_it_stays_away_for_three_sessions() -> None:
    net = net_of()
    member = join(net, "a")
    net.run_until(lambda: works_on(member) == {0, 1, 2, 3})
    me = source(member).member
    net.write(LeaveGroup(*me.settings.ids, me.member_id, me.generation), me.home)
    evicted = net.now
    net.run(100)
    assert works_on(member) == set()
    net.run_until(lambda: works_on(member) == {0, 1, 2, 3})
    assert net.now - evicted >= 3 * SESSION


def test_a_hung_handler_costs_the_membership_and_it_joins_again_when_it_is_back() -> None:
    net = net_of(end=10)
    first, second = join(net, "a", handler_timeout_ms=1_000.0), join(net, "b")
    net.run_until(lambda: all_at_work(first, second) and len(works_on(first)) == 2)
    first.fetch()
    run = first.take(3)
    assert run is not None
    net.run_until(lambda: works_on(second) == {0, 1, 2, 3})
    net.run(SESSION * 3)
    assert works_on(first) == set()
    first.delivery_of(run).done_run(run, first.clock())
    first.settle()
    net.run_until(lambda: len(works_on(first)) == 2)


def test_g12_a_topic_that_comes_later_is_reported_by_one_of_many() -> None:
    net = net_of(partitions=2)
    members = [join(net, name, "^t") for name in "abc"]
    net.run_until(lambda: sum(len(works_on(m)) for m in members) == 2)
    net.topic("t2", 3)
    net.tell_topics()
    net.run_until(lambda: sum(len(m.consumers[0].assignments) for m in members) == 5)
    assert len(net.records(TopicsChanged)) == 1


@pytest.mark.parametrize(
    ("options", "error"),
    [({"strategy": "range"}, InconsistentPartitioningStrategyError), ({"session": 60_000}, SessionTimeoutTooHighError)],
)
def test_g11_a_rejected_member_gets_the_reason_and_the_others_continue(
    options: dict[str, object], error: type[Exception]
) -> None:
    net = net_of()
    first = join(net, "a")
    net.run_until(lambda: works_on(first) == {0, 1, 2, 3})
    net.write(ConfigureGroup("x", "admin", "g", (("max_session_timeout_ms", 30_000),)), route_group("g", 2))
    other = join(net, "b", **options)  # type: ignore[arg-type]
    net.run(SESSION)
    assert [type(found) for found in other.consumers[0].errors] == [error]
    assert works_on(first) == {0, 1, 2, 3}


def test_g1_a_claimed_group_is_left_alone() -> None:
    net = net_of()
    net.write(ClaimingPartition("c-1", "c", "g", "t", 0, 1_000), route_lease("t", 0, 2))
    member = join(net, "a")
    net.run(SESSION)
    assert [type(found) for found in member.consumers[0].errors] == [WrongKindError]
    assert "convert-group" in str(member.consumers[0].errors[0])
    assert net.records(JoinGroup) == net.records(ConfigureGroup) == []


def test_g2_below_level_2_it_says_that_an_upgrade_is_due() -> None:
    net = net_of(level=1)
    member = join(net, "a")
    net.run(SESSION)
    assert [type(found) for found in member.consumers[0].errors] == [UpgradeRequiredError]


# -- A revoked partition: taken back, or released in time ------------------------------------------------------------


def stuck(net: Net, member: Member) -> None:
    """One message of each partition is in flight with a hanging handler; two more are done."""
    for key in sorted(member.consumers[0].assignments):
        member.fetch()
        run = member.take(3)
        assert run is not None, key
        member.done(run.messages[1])
        member.done(run.messages[2])


def test_g18_a_plan_that_gives_a_partition_back_has_it_delivered_again() -> None:
    net = net_of(2, end=20)
    a = join(net, "a")
    net.run_until(lambda: works_on(a) == {0, 1})
    stuck(net, a)
    b = join(net, "b")
    net.run_until(lambda: len(works_on(a)) == 1)
    [gone] = {0, 1} - works_on(a)
    net.members.remove(b)  # it dies before it owns anything
    net.run_until(lambda: works_on(a) == {0, 1}, 3 * SESSION)
    read_all(net, a, ms=500)
    assert {(gone, offset) for offset in range(3, 20)} <= handled(a).keys()
    assert (gone, 0) not in handled(a), "what is in hand does not come a second time"
    assert [x for x, key in a.callbacks if key == ("t", gone)] == [Callback.ASSIGN, Callback.REVOKE, Callback.ASSIGN]


def test_g18_a_message_that_hangs_keeps_a_partition_no_longer_than_revoke_timeout() -> None:
    net = net_of(2, end=20)
    a = join(net, "a", revoke_timeout_ms=4_000.0)
    net.run_until(lambda: works_on(a) == {0, 1})
    stuck(net, a)
    left_behind = {key[1]: next(iter(x.tracker.runs.values())) for key, x in a.consumers[0].assignments.items()}
    b = join(net, "b")
    net.run_until(lambda: len(works_on(b)) == 1, 4_000 + SESSION)
    [gone] = works_on(b)
    a.done(left_behind[gone].messages[0])
    read_all(net, b, ms=1_000)
    assert handled(b) == {(gone, 0): 1, **{(gone, offset): 1 for offset in range(3, 20)}}
    assert a.consumers[0].delivery.ignored_done["t", gone] == 1
    [error] = [text for text in a.warnings if "is released" in text]
    assert f"t [{gone}]" in error and "offset 0 (key None)" in error
    assert state(a) is MemberState.PART_OF_GROUP


def test_g21_a_pause_that_ends_has_what_is_in_flight_delivered_again() -> None:
    net = net_of(1, end=20)
    a = join(net, "a")
    net.run_until(lambda: works_on(a) == {0})
    stuck(net, a)
    net.pause(1_000)
    net.run(500)
    assert works_on(a) == set()
    net.run_until(lambda: works_on(a) == {0}, 2 * SESSION)
    read_all(net, a, ms=500)
    assert {(0, offset) for offset in range(3, 20)} == handled(a).keys()


# -- What a member computes while others join: no more than each join changes -------------------------------------


PARTITIONS, JOINS = 60, 12


def test_a_member_follows_what_a_join_moved_and_not_all_that_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first member of a fleet has everything: a join of another must not cost a check of each of them."""
    net = net_of(PARTITIONS)
    first = join(net, "a")
    net.run_until(lambda: len(works_on(first)) == PARTITIONS)
    calls: Counter[Holdings | TopicReports] = Counter()
    follow, compare = Holdings.follow, TopicReports._lacks

    def followed(self: Holdings, *about: object) -> None:
        calls[self] += 1
        follow(self, *about)  # type: ignore[arg-type]

    def compared(self: TopicReports, *about: object) -> bool:
        calls[self] += 1
        return compare(self, *about)  # type: ignore[arg-type]

    monkeypatch.setattr(Holdings, "follow", followed)
    monkeypatch.setattr(TopicReports, "_lacks", compared)
    holdings, reports = source(first).holdings, source(first).member._reports
    others = [join(net, f"m{number:02}", session=10 * SESSION) for number in range(JOINS)]
    net.run_until(lambda: len(works_on(first)) <= PARTITIONS // (JOINS + 1) + 1)
    net.run_until(lambda: sum(len(works_on(member)) for member in [first, *others]) == PARTITIONS)
    assert len(net.records(JoinGroup)) == JOINS + 1
    moved = PARTITIONS - len(works_on(first))
    assert moved <= calls[holdings] <= 4 * moved, "each is revoked, released, and no more"
    calls.clear()
    net.run(3 * SESSION)
    assert calls[reports] == calls[holdings] == 0, "nothing has changed since"
