"""C18, C19: evicted partitions are not claimed back, and a member asked to drain hands over."""

from __future__ import annotations

from math import inf
from random import Random

import pytest

from kafka_marshal.engine.claims.client import EVICTED_INTERVALS
from kafka_marshal.engine.effects import Callback
from kafka_marshal.engine.engine import check_stuck
from kafka_marshal.engine.work.delivery import OWED_AFTER_MS
from rationalizer import ClaimingPartition, ReleasingPartition
from tests.engine.groups.counting import Store, begun
from tests.engine.groups.test_members import net_of
from tests.engine.harness import HI, Member, Net
from tests.engine.scenes import working

T0, T1 = ("t", 0), ("t", 1)


def with_two() -> tuple[Net, Member]:
    """All messages are in the first partition."""
    net, member = working(partitions=2, end=20)
    net.data[T1].end = 0
    return net, member


def evicted(net: Net, member: Member) -> float:
    """``kafka-marshal evict``: a release in its name, without waiting members; returns when it was written."""
    net.write(ReleasingPartition(*member.engine.ids, *T0, member.lease(T0).epoch, None), member.lease(T0).cp)
    at = net.now
    net.tick()
    return at


def claims(net: Net, member: Member, since: float) -> list[tuple[str, int]]:
    found = net.records(ClaimingPartition, member.client_id, int(since))
    return [(x.topic, x.partition) for x in found if isinstance(x, ClaimingPartition)]


@pytest.mark.parametrize("iterating", [False, True], ids=["explicit", "iterating"])
def test_c18_a_member_that_hangs_does_not_take_back_what_was_taken_from_it(iterating: bool) -> None:
    net, member = with_two()
    member.fetch()
    run = member.take(iterating=iterating)
    assert run is not None
    if iterating:
        next(run.walk)
    at = evicted(net, member)
    net.topic("t", 3)
    net.tell_topics()
    net.run(20 * HI)
    assert claims(net, member, at) == [], "nothing at all: not the third partition either"
    assert member.held() == [T1], "what it holds besides is its own still"
    assert (Callback.LOST, T0) in member.callbacks
    assert any("an operator took it away" in line for line in member.warnings)
    back = net.now
    if iterating:
        member.leave_run(run)
    for message in [] if iterating else run.messages:
        member.done(message)
    net.run(5 * HI)
    assert sorted(set(claims(net, member, back))) == [T0, ("t", 2)], "its handler has come back"
    assert net.world(T0).progress.stable == -1, "what it did meanwhile was not its own any more"


def test_c18_a_partition_taken_away_is_left_alone_for_three_intervals() -> None:
    net, member = working(end=20)
    at = evicted(net, member)
    net.run_until(lambda: claims(net, member, at))
    assert net.now - at >= EVICTED_INTERVALS * HI
    net.run_until(lambda: member.held() == [T0])


def test_c18_another_member_gets_it_at_once() -> None:
    net, member = with_two()
    member.fetch()
    run = member.take()
    other = net.member("b")
    evicted(net, member)
    other.consumer("t")
    net.run_until(lambda: T0 in other.held(), 2 * HI)
    net.run(20 * HI)
    assert T0 in other.held() and run is not None


@pytest.mark.parametrize("dropped", [True, False])
def test_c18_a_message_that_its_handler_has_dropped_is_not_in_flight(dropped: bool) -> None:
    net, member = working(end=20)
    member.fetch(1)
    run = member.take(1)
    assert run is not None
    kept = [] if dropped else [run.messages[0]]
    at = evicted(net, member)
    for _ in range(20):
        net.run(HI)
        member.consumers[0].delivery.reclaim(net.now - HI, -inf, net.now)
        member.settle()
    assert bool(claims(net, member, at)) is dropped
    assert len(kept) == (not dropped)


def test_c18_at_most_once_a_thread_that_comes_back_ends_it() -> None:
    net, member = working(partitions=2, end=20, at_most_once=True)
    net.run_until(lambda: bool(member.work_granted(1)))
    at = net.now
    [key] = {(m.topic(), m.partition()) for m in member.work_granted(1)}
    net.write(ReleasingPartition(*member.engine.ids, *key, member.lease(key).epoch, None), member.lease(key).cp)
    net.run(20 * HI)
    assert claims(net, member, at) == []
    member.work_granted(1)
    net.run(5 * HI)
    assert key in claims(net, member, at)


def checked(net: Net, member: Member, ms: float) -> list[str]:
    """What the shell's checks report within this time; one in every HI."""
    until, before = net.now + ms, len(member.warnings)
    while net.now < until:
        net.run(HI)
        member.engine.take(member.consumers[0].number, check_stuck, member.consumers[0], 0.0, member.clock())
        member.settle()
    return member.warnings[before:]


def test_c18_what_does_not_come_back_is_reported_until_it_does() -> None:
    net, member = with_two()
    member.fetch()
    run = member.take()
    evicted(net, member)
    assert run is not None
    assert not any("still has" in line for line in checked(net, member, OWED_AFTER_MS - HI))
    [line] = checked(net, member, 2 * HI)
    assert "t [0]: was taken away 10 s ago, and the program still has 5 message(s) of it, from offset 0 on" in line
    assert "this consumer claims nothing" in line
    assert "done()" in line and "drop" in line
    assert checked(net, member, 10 * HI) == [], "once, and then every ten minutes"
    [one] = member.consumers[0].delivery.owed.held_back(member.clock())
    assert one[:4] == (*T0, 0, None) and one.in_hand == 5
    member.done_run(run)
    assert checked(net, member, 2 * HI)[0].startswith("t [0]: nothing waits any more for what was taken away, after 2")
    assert member.consumers[0].delivery.owed.held_back(member.clock()) == []


def test_c18_at_most_once_a_thread_that_stays_away_is_reported() -> None:
    net, member = working(end=20, at_most_once=True)
    net.run_until(lambda: bool(member.work_granted(1)))
    evicted(net, member)
    [line] = [line for line in checked(net, member, OWED_AFTER_MS + 2 * HI) if "still has" in line]
    assert "its next call ends this" in line


def test_a_piece_whose_state_waits_for_messages_of_before_is_reported() -> None:
    net = net_of(partitions=1, end=5, level=3)
    member = begun(net, "a", Store(), Random(0), every_ms=None)
    net.run_until(lambda: T0 in member.source.pieces and member.source.pieces[T0].is_restored)
    member.fetch()
    run = member.take()
    checkpoints = member.consumers[0].source.checkpoints
    assert checkpoints is not None
    member.engine.take(member.consumers[0].number, checkpoints.go_back, None, member.clock())
    member.settle()
    [line] = [line for line in checked(net, member, OWED_AFTER_MS + 3 * HI) if "still has" in line]
    assert run is not None
    assert "5 message(s) of it, from offset 0 on" in line and "the state of this piece is not restored here" in line


def test_a_members_own_release_is_no_eviction() -> None:
    net, member = working(end=20)
    member.consumers[0].revocation.revoke(member.assignment(T0), "surplus", net.now)
    net.run(HI)
    assert member.consumers[0].delivery.owed.found == []
    assert not any("operator" in line for line in member.warnings)


def asked_to_drain(net: Net, member: Member, *, epoch: int | None = None) -> None:
    """``kafka-marshal drain``: a release by another instance; it is rejected, and the member sees it."""
    lease = member.lease(T0)
    wanted = lease.epoch if epoch is None else epoch
    net.write(ReleasingPartition("admin-1", member.client_id, "g", *T0, wanted, None), lease.cp)
    net.tick()


def test_c19_a_member_asked_to_hand_over_finishes_releases_and_claims_nothing_more() -> None:
    net, member = with_two()
    member.fetch()
    run = member.take()
    assert run is not None
    asked_to_drain(net, member)
    at = net.now
    net.run(3 * HI)
    assert member.held() == [T0], "it has something of this one in hand"
    member.done_run(run)
    net.run(3 * HI)
    assert member.held() == []
    assert net.world(T0).progress.stable == run.last, "nothing is repeated"
    net.run(20 * HI)
    assert claims(net, member, at) == []
    assert sum("asks 'a' to hand over" in line for line in member.warnings) == 1
    other = net.member("b")
    other.consumer("t")
    net.run(3 * HI)
    assert other.held() == [T0, T1]


def test_c19_a_request_about_another_epoch_or_another_client_is_ignored() -> None:
    net, member = working(partitions=2, end=20)
    asked_to_drain(net, member, epoch=member.lease(T0).epoch + 1)
    net.write(ReleasingPartition("admin-1", "z", "g", *T0, member.lease(T0).epoch, None), member.lease(T0).cp)
    net.run(3 * HI)
    assert member.held() == [T0, T1]
    assert not member.engine.leases.draining
