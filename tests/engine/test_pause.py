"""C10 and E4: a paused group, and a CP that this release can't follow any more."""

from __future__ import annotations

import pytest

from kafka_marshal.engine.effects import Callback
from kafka_marshal.engine.work.assignment import Stage
from rationalizer import (
    ClaimingPartition,
    ReleaseGroup,
    ReleasingPartition,
    Upgrade,
    codes,
    encode,
    route_lease,
)
from tests.engine.harness import HI, FakeMessage, Member, Net

T0 = ("t", 0)


def working(names: str = "a", partitions: int = 1, cps: int = 1, end: int = 50) -> tuple[Net, list[Member]]:
    net = Net(cps=cps)
    net.topic("t", partitions, end=end)
    members = [net.member(name) for name in names]
    for member in members:
        member.consumer("t")
    net.run_until(lambda: sum(len(m.held()) for m in members) == partitions)
    net.run(3 * HI)
    return net, members


# -- C10 ----------------------------------------------------------------------------------------------------------


def test_c10_a_pause_finishes_what_is_in_flight_and_releases_with_offsets() -> None:
    net, (a,) = working()
    a.fetch()
    run = a.take(3)
    assert run is not None
    net.pause(1.5 * HI)
    net.tick()
    assert a.stage(T0) is Stage.REVOKING
    assert a.take() is None, "nothing more is handed out"
    assert not net.records(ReleasingPartition), "what is in hand is waited for"
    net.run(200)
    a.done_run(run)
    net.tick()
    assert not net.world(T0).held
    assert net.world(T0).progress.stable == 2
    assert a.worlds[0].rejected == {}, "nothing of ours was rejected"


def test_c10_out_of_order_work_is_handed_in_as_well() -> None:
    """CommitRanges and ReleasingPartition pass the pause (C10)."""
    net, (a,) = working()
    a.fetch()
    run = a.take(5)
    assert run is not None
    a.done(run.messages[1])
    a.done(run.messages[3])
    net.pause(1.5 * HI)
    net.tick()
    a.done(run.messages[0])
    a.done(run.messages[2])
    a.done(run.messages[4])
    net.tick()
    assert net.world(T0).progress.stable == 4
    assert not net.world(T0).held


def test_c10_no_beats_and_no_claims_during_a_pause() -> None:
    net, (a, b) = working("ab", partitions=4, cps=2)
    a.fetch()
    assert a.take() is not None
    net.pause(10 * HI)
    began = int(net.now) + 1
    net.run(9 * HI)
    kinds = {type(r).__name__ for r in net.records(since=began)}
    assert kinds <= {"ReleasingPartition", "CommitRanges"}
    assert a.held() == b.held() == []


def test_c10_what_is_in_flight_too_long_ends_by_t4() -> None:
    """No heartbeats: a handler slower than 2 · HI loses the lease during the pause; the offset is reported."""
    net, (a,) = working()
    a.fetch()
    first, second = a.take(2), a.take(2)
    assert first is not None and second is not None
    a.done_run(first)
    net.pause(10 * HI)
    net.run_until(lambda: (Callback.LOST, T0) in a.callbacks, 2 * HI)
    net.tick()
    assert not net.world(T0).held
    assert net.world(T0).progress.stable == 1
    a.done_run(second)
    assert a.consumers[0].delivery.ignored_done[T0] == 2


@pytest.mark.parametrize("length", [0.2 * HI, 1.5 * HI, 20 * HI])
def test_c10_after_the_pause_everyone_comes_back(length: float) -> None:
    """No record shows that a pause has expired: every member must check the clock."""
    net, members = working("abc", partitions=6, cps=2)
    net.pause(length)
    net.run(length - 50)
    if length > HI:
        assert all(m.held() == [] for m in members)
    took = net.run_until(lambda: [len(m.held()) for m in members] == [2, 2, 2])
    assert took <= 8 * HI
    for member in members:
        member.work()
    assert sum(len(m.handled) for m in members) > 0


def test_c10_a_pause_that_is_ended_early_is_noticed_at_once() -> None:
    net, (a,) = working()
    net.pause(100 * HI)
    net.run(HI)
    assert a.held() == []
    net.pause(0)
    net.run_until(lambda: a.held() == [T0], 50)


def test_c10_a_pause_made_longer_is_respected() -> None:
    net, (a,) = working()
    net.pause(HI)
    net.run(0.5 * HI)
    net.pause(10 * HI)
    net.run(9 * HI)
    assert a.held() == []
    net.run_until(lambda: a.held() == [T0])


def test_c10_a_pause_of_another_group_is_no_pause() -> None:
    net, (a,) = working()
    net.pause(100 * HI, group="other")
    net.run(3 * HI)
    assert a.held() == [T0]
    assert a.can_hand_out(T0)


def test_c10_a_member_that_starts_during_a_pause_waits() -> None:
    net = Net(cps=1)
    net.topic("t", 2, end=10)
    net.pause(2 * HI)
    a = net.member("a")
    a.consumer("t")
    net.run(1.9 * HI)
    assert not net.records(ClaimingPartition)
    net.run_until(lambda: len(a.held()) == 2)


def test_c10_only_one_cp_paused() -> None:
    """ReleaseGroup is written to one CP after the other: until then the others continue."""
    net, (a,) = working(partitions=4, cps=2)
    net.write(ReleaseGroup("x-1", "x", "g", int(net.now + 5 * HI)), 0)
    net.run(HI)
    assert {route_lease(*key, 2) for key in a.held()} == {1}
    net.run_until(lambda: len(a.held()) == 4)


def test_c10_an_answer_that_says_paused_teaches_when_it_ends() -> None:
    """By our clock the pause is over, by log time not yet: one claim, one rejection, and then we wait."""
    net, (a,) = working()
    net.stamp_shift = -3 * HI  # timestamps are behind our clock
    net.pause(5 * HI)
    net.run(12 * HI)
    assert a.worlds[0].rejected.get(codes.PAUSED, 0) <= 2
    assert a.held() == [T0]


def test_c10_at_most_once_a_grant_under_way_is_answered_and_delivered() -> None:
    net = Net(cps=1)
    net.topic("t", end=30)
    a = net.member("a")
    a.consumer("t", at_most_once=True, batch_size=5)
    net.run_until(lambda: a.work_granted())
    net.tick()
    a.work_granted()  # requests the next batch
    net.pause(1.5 * HI)
    net.tick()
    got: list[FakeMessage] = []
    for _ in range(20):
        got += a.work_granted()
        net.tick()
    assert [m.at for m in got] == [5, 6, 7, 8, 9], "it was granted before the pause"
    net.run_until(lambda: not net.world(T0).held, HI)
    net.run_until(lambda: a.held() == [T0])
    for _ in range(200):
        a.work_granted()
        net.tick()
    assert [m.at for m in a.handled] == list(range(30))
    assert a.consumers[0].delivery.grants.unprocessed == []


# -- E4 -----------------------------------------------------------------------------------------------------------


def upgraded(net: Net, cp: int) -> None:
    net.append(cp, encode(Upgrade("x-1", "x", "g", 1_000)))


def by_cp(net: Net, partitions: int) -> dict[int, list[tuple[str, int]]]:
    found: dict[int, list[tuple[str, int]]] = {cp: [] for cp in net.logs}
    for p in range(partitions):
        found[route_lease("t", p, net.cps)].append(("t", p))
    return found


def test_e4_leases_in_a_stopped_cp_end_and_the_others_continue() -> None:
    """Messages in flight are finished and reported: the record is written, though we can't read it any more."""
    net, (a,) = working(partitions=4, cps=2)
    stopped, going = by_cp(net, 4)[0], by_cp(net, 4)[1]
    assert stopped and going
    while a.work():
        pass
    upgraded(net, 0)
    net.run(100)
    assert a.held() == going
    releases = [r for r in net.records(ReleasingPartition) if isinstance(r, ReleasingPartition)]
    assert [(r.topic, r.partition) for r in releases] == stopped
    assert {r.last_offset for r in releases} == {49}
    assert {key for call, key in a.callbacks if call is Callback.REVOKE} == set(stopped)
    net.run(10 * HI)
    assert a.held() == going
    assert all(a.can_hand_out(key) for key in going)
    assert len(net.records(ReleasingPartition)) == len(stopped), "nothing waits for an answer that can't come"


def test_e4_what_is_in_flight_in_a_stopped_cp_is_waited_for_as_long_as_t4_allows() -> None:
    net, (a,) = working()
    a.fetch()
    run = a.take()
    assert run is not None
    upgraded(net, 0)
    net.run(HI)
    assert not net.records(ReleasingPartition)
    a.done_run(run)
    assert len(net.records(ReleasingPartition)) == 1
    assert a.held() == []
    net, (a,) = working()
    a.fetch()
    assert a.take() is not None
    upgraded(net, 0)
    net.run(2 * HI)
    assert a.held() == []
    assert (Callback.LOST, T0) in a.callbacks


def test_e4_nothing_is_claimed_or_beaten_in_a_stopped_cp() -> None:
    net, (a, b) = working("ab", partitions=8, cps=2)
    upgraded(net, 0)
    net.run(5 * HI)
    before = len(net.logs[0])
    net.run(20 * HI)
    assert len(net.logs[0]) == before
    assert len(a.held()) + len(b.held()) == len(by_cp(net, 8)[1])
    a.kill()
    net.run(10 * HI)
    assert b.held() == by_cp(net, 8)[1], "the others are balanced and taken over as ever"
    assert len(net.logs[0]) == before


def test_e4_a_member_that_starts_before_a_stopped_cp() -> None:
    net = Net(cps=2)
    net.topic("t", 8, end=10)
    upgraded(net, 0)
    a = net.member("a")
    a.consumer("t")
    net.run(10 * HI)
    assert a.held() == by_cp(net, 8)[1]
    assert len(net.logs[0]) == 1


def test_e4_a_claim_under_way_in_a_cp_that_stops_is_given_up() -> None:
    net = Net(cps=1)
    net.topic("t", 1)
    a = net.member("a")
    a.stalled = True
    a.consumer("t")
    net.logs[0].clear()
    upgraded(net, 0)
    a.stalled = False
    net.run(5 * HI)
    assert a.engine.book.leases == {}
    assert len(net.logs[0]) == 1


def test_e4_a_consumer_closes_though_a_cp_has_stopped() -> None:
    net, (a,) = working(partitions=4, cps=2)
    upgraded(net, 0)
    net.run(10)
    a.close()
    net.run_until(lambda: a.consumers[0].closed, HI)


def test_e4_a_release_under_way_when_the_cp_stops_is_not_waited_for() -> None:
    net, (a,) = working()
    a.stalled = True
    upgraded(net, 0)
    a.close()
    assert not a.consumers[0].closed
    a.stalled = False
    net.run_until(lambda: a.consumers[0].closed, 50)


def test_e4_a_lease_by_hand_in_a_stopped_cp() -> None:
    """A held one ends by T4; a claimed one is rejected with the reason and not claimed again."""
    net = Net(cps=1)
    a = net.member("a")
    held = a.engine.leases.claim(T0, a.clock())
    a.settle()
    net.run(20)
    upgraded(net, 0)
    net.tick()
    wanted = a.engine.leases.claim(("t", 1), a.clock())
    a.settle()
    net.run(3 * HI)
    assert "not confirmed" in held.loss
    assert wanted.refusal == codes.UPGRADE_REQUIRED
    before = net.count()
    net.run(5 * HI)
    assert net.count() == before
