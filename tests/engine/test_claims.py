"""C3, C4, C5, C6, C7, C16 and C17: claims on held leases, restarts, and grants that are no longer wanted."""

from __future__ import annotations

from kafka_marshal.engine.effects import Callback
from kafka_marshal.engine.policies import Balanced, Greedy, MaxClaims
from kafka_marshal.errors import ClientReplacedError
from rationalizer import (
    ClaimingPartition,
    ForgetGroup,
    Heartbeat,
    HeartbeatBatch,
    Record,
    ReleasingPartition,
    codes,
    decode,
)
from tests.engine.harness import HI, Member, Net

T0, T1 = ("t", 0), ("t", 1)


def group_of(names: str, partitions: int = 1, cps: int = 1) -> tuple[Net, list[Member]]:
    net = Net(cps=cps)
    net.topic("t", partitions, end=100)
    members = [net.member(name) for name in names]
    for member in members:
        member.consumer("t")
    return net, members


def takeovers(net: Net) -> list[Record]:
    return [r for r in net.records(Heartbeat) if isinstance(r, Heartbeat) and r.epoch is None]


# -- C3, C4 -------------------------------------------------------------------------------------------------------


def test_c4_a_claim_moves_as_few_partitions_as_are_missing() -> None:
    net, (a,) = group_of("a", partitions=8, cps=2)
    net.run(50)
    b = net.member("b")
    b.consumer("t")
    net.run_until(lambda: len(b.held()) == 4)
    net.run(5 * HI)
    assert len(a.held()) == len(b.held()) == 4
    assert [c for c, _ in a.callbacks].count(Callback.REVOKE) == 4


def test_c4_claims_are_repeated_once_every_hi_while_no_holder_releases() -> None:
    """A Greedy holder never releases; the waiting client claims at a bounded rate."""
    net = Net(cps=1)
    net.topic("t", 2, end=10)
    a, b = net.member("a"), net.member("b")
    a.consumer("t", policy=Greedy())
    net.run(50)
    b.consumer("t")
    net.run(10 * HI)
    assert len(a.held()) == 2
    assert 9 <= len(net.records(ClaimingPartition, "b")) <= 11


def test_c4_claims_expire_so_that_a_dead_client_is_not_counted_for_ever() -> None:
    net, (a,) = group_of("a", partitions=2)
    net.run(50)
    b = net.member("b")
    b.drop_if = lambda record: False
    b.consumer("t")
    b.kill()
    peers = a.engine.peers
    net.tick()
    assert peers.waiting(frozenset({"t"}), net.now) == {"b": {"t"}}
    net.run_until(lambda: len(a.held()) == 1)
    net.run_until(lambda: not peers.waiting(frozenset({"t"}), net.now), 2 * HI + 10)
    assert peers.asked_for(net.now) == ()
    net.run_until(lambda: len(a.held()) == 2, 3 * HI)  # no member claimed it


def test_c4_claims_for_other_topics_do_not_count() -> None:
    net, (a,) = group_of("a")
    net.topic("u", 2)
    net.tick()
    assert a.engine.peers.waiting(frozenset({"t"}), net.now) == {}
    net.write(ClaimingPartition("z-1", "z", "g", "u", 0, HI), 0)
    net.write(ClaimingPartition("y-1", "y", "g", "u", 0, HI), 0)
    net.tick()
    assert a.engine.peers.waiting(frozenset({"t"}), net.now) == {}
    assert a.engine.peers.waiting(frozenset({"u"}), net.now) == {"y": {"u"}}


def test_c4_what_the_last_holder_was_asked_for_the_next_one_is_not() -> None:
    net, (a, b, c) = group_of("abc")
    net.run(50)
    net.write(ClaimingPartition("b-1", "b", "g", "t", 0, HI), 0)
    net.tick()
    assert c.engine.peers.asked_for(net.now) == (T0,)
    a.close()
    assert net.run_until(lambda: b.held() or c.held()) <= 50
    net.tick()
    assert c.engine.peers.asked_for(net.now) == ()


# -- C5, C6 -------------------------------------------------------------------------------------------------------


def test_c5_a_holder_that_sees_another_epoch_stops_at_once() -> None:
    """The log shows another holder, so our lease is over, whichever process wrote it."""
    net, (a,) = group_of("a")
    net.run(50)
    a.fetch()
    run = a.take()
    assert run is not None
    lease = a.lease(T0)
    net.write(ReleasingPartition("a-0-0", "a", "g", "t", 0, lease.epoch, None), 0)  # evict does this
    net.write(ClaimingPartition("b-1", "b", "g", "t", 0, HI), 0)
    net.tick()
    assert a.held() == []
    assert (Callback.LOST, T0) in a.callbacks
    assert a.fetching == {}
    a.done_run(run)
    net.run(HI)
    assert net.world(T0).progress.stable == -1, "a fenced holder commits nothing"
    assert not net.records(ReleasingPartition, "a")[1:], "and releases nothing: it is not his"


def test_c6_a_late_heartbeat_revives_a_lease_that_was_not_taken() -> None:
    """Heartbeats were lost until the lease was stale in the log, but a new one arrives before any claim."""
    net, (a,) = group_of("a")
    net.run(50)
    epoch = a.lease(T0).epoch
    net.now += 5
    a.engine.book.beat(a.lease(T0), None, net.now)
    net.stamp_shift = 2.5 * HI
    a.settle()
    net.tick()
    assert net.world(T0).epoch == epoch
    assert net.world(T0).freshness(net.logs[0][-1][0]) == "fresh"


# -- C7 -----------------------------------------------------------------------------------------------------------


def restarted(partitions: int = 2, after: float = 100.0) -> tuple[Net, Member, Member]:
    """A member that was killed and started again with its client_id."""
    net = Net(cps=2)
    net.topic("t", partitions, end=10)
    first = net.member("a")
    first.consumer("t")
    net.run(500)
    first.work()
    net.run_until(lambda: net.records(HeartbeatBatch, "a") or net.records(Heartbeat, "a"))
    first.kill()
    net.run(after)
    second = net.member("a")
    second.consumer("t")
    return net, first, second


def test_c7_not_fresh_falls_back_to_a_claim_when_the_lease_opens() -> None:
    """A takeover between HI and 2 · HI after the last heartbeat is rejected; the lease is claimed like any other."""
    net, _, second = restarted(partitions=1, after=1.4 * HI)
    net.run(20)
    world = second.worlds[second.engine.peers.cp_of(T0)]
    assert world.rejected[codes.NOT_FRESH] == 1
    assert second.held() == []
    net.run_until(lambda: second.held() == [T0], 1.2 * HI)
    assert len(takeovers(net)) == 1, "epoch nil is sent only while starting"
    assert net.world(T0).instance_id == second.engine.settings.instance_id


def test_c7_the_new_instance_beats_by_the_lease_s_own_interval() -> None:
    net, _, _ = restarted(partitions=1)
    third = net.member("a", hi=5 * HI)
    third.consumer("t")
    net.run(30)
    assert third.lease(T0).heartbeat_interval_ms == HI
    before = net.count()
    net.run(3 * HI)
    assert net.count() - before >= 8


def test_c7_what_is_taken_over_beside_leases_of_a_longer_interval_is_beaten_in_time() -> None:
    """The CP's next heartbeat was due by the longer interval: the lease expired before it (C7, T4)."""
    net = Net(cps=1)
    net.topic("t", 1)
    net.topic("u", 1)
    old = net.member("a")
    old.consumer("t")
    net.run(50)
    old.kill()
    new = net.member("a", hi=10 * HI)
    new.consumer("u")
    net.run(30)
    assert new.held() == [("u", 0)]
    new.consumer("t")
    net.run(30)
    epoch = new.lease(T0).epoch
    assert new.lease(T0).heartbeat_interval_ms == HI
    net.run(4 * HI)
    assert (net.world(T0).client_id, net.world(T0).epoch) == ("a", epoch)
    assert new.lease(T0).held


def test_c7_an_older_instance_ends_and_answers_nothing() -> None:
    """It ends with ClientReplacedError, stops fetching, and appends nothing more: no heartbeat, release or claim."""
    net, (old,) = group_of("a", partitions=3)
    net.run(50)
    old.fetch()
    run = old.take()
    assert run is not None
    new = net.member("a")
    before = net.count()
    new.consumer("t")
    net.run(30)
    assert len(new.held()) == 3
    assert isinstance(old.engine.failure, ClientReplacedError)
    assert "client_id 'a'" in str(old.engine.failure)
    assert old.held() == [] and old.fetching == {}
    assert {key for call, key in old.callbacks if call is Callback.LOST} == {("t", p) for p in range(3)}
    old.done_run(run)
    net.run(10 * HI)
    since = [decode(value) for _, value in net.logs[0][before:]]
    assert since
    assert {r.instance_id for r in since} == {new.engine.settings.instance_id}
    assert old.engine.deadline(net.now) == float("inf")


def test_c7_a_releasing_instance_is_replaced_too() -> None:
    """Its release is in transit when the newer instance takes over: it is replaced nevertheless."""
    net, (old,) = group_of("a")
    net.run(50)
    old.drop_if = lambda record: isinstance(record, ReleasingPartition)
    old.close()
    new = net.member("a")
    new.consumer("t")
    net.run(30)
    assert new.held() == [T0]
    assert isinstance(old.engine.failure, ClientReplacedError)


def test_c7_a_second_copy_of_the_takeover_does_not_end_the_new_instance() -> None:
    """A retry wrote it twice: the copy is rejected (the holding instance sends no nil) and has no effect."""
    net, (old,) = group_of("a")
    net.run(50)
    old.kill()
    new = net.member("a")
    new.duplicate = True
    new.consumer("t")
    net.run(3 * HI)
    assert new.held() == [T0]
    assert new.engine.failure is None


def test_c7_leases_of_other_topics_are_left_alone() -> None:
    net = Net(cps=1)
    net.topic("t", 1)
    net.topic("u", 1)
    old = net.member("a")
    old.consumer("t", "u")
    net.run(50)
    old.kill()
    new = net.member("a")
    new.consumer("t")
    net.run(30)
    assert new.held() == [T0]
    assert len(takeovers(net)) == 1


def test_c7_a_restart_during_a_pause_waits_for_its_end() -> None:
    net, (old,) = group_of("a")
    net.run(50)
    old.kill()
    net.pause(500)
    new = net.member("a")
    new.consumer("t")
    net.run(400)
    assert [type(r).__name__ for r in net.records(client_id="a", since=int(net.now) - 350)] == []
    net.run_until(lambda: new.held() == [T0])
    assert takeovers(net), "it was fresh still when the pause ended"


def test_c7_a_lease_by_hand_is_taken_over_too() -> None:
    net = Net(cps=1)
    first = net.member("a")
    first.engine.leases.claim(T0, first.clock())
    first.settle()
    net.run(30)
    first.kill()
    second = net.member("a")
    manual = second.engine.leases.claim(T0, second.clock())
    second.settle()
    net.run(30)
    assert manual.is_proven
    assert len(takeovers(net)) == 1


def test_c7_what_is_claimed_by_hand_is_not_taken_over_by_a_consumer_as_well() -> None:
    net, (old,) = group_of("a", partitions=2)
    net.run(50)
    old.kill()
    new = net.member("a")
    manual = new.engine.leases.claim(T0, new.clock())
    consumer = new.consumer("t")
    net.run(3 * HI)
    assert manual.is_proven
    assert list(consumer.assignments) == [T1]


# -- C16 ----------------------------------------------------------------------------------------------------------


def test_c16_a_forgotten_group_starts_over() -> None:
    """Its leases are gone from the log: working members have lost them, and start= applies again (P9)."""
    net, (a,) = group_of("a")
    net.run(50)
    a.work()
    net.run(500)
    a.paused = True
    net.run(3 * HI)
    net.write(ForgetGroup("admin-1", "admin", "g"), 0)
    a.paused = False
    net.tick()
    assert (Callback.LOST, T0) in a.callbacks
    net.run_until(lambda: a.held() == [T0])
    assert a.assignment(T0).buffer.fetch_next == 0
    assert net.world(T0).progress.stable == -1


# -- C17 ----------------------------------------------------------------------------------------------------------


def test_c17_a_grant_that_is_no_longer_wanted_is_released_at_once() -> None:
    net = Net(cps=1)
    net.topic("t")
    member = net.member("a")
    manual = member.engine.leases.claim(T0, member.clock())
    member.settle()
    manual.release(None, net.now)  # gave up before the log answered
    net.run(20)
    assert len(net.records(ReleasingPartition)) == 1
    assert not net.world(T0).held
    assert member.held() == []


def test_others_of_the_group_in_one_process_do_not_claim_the_same() -> None:
    """Two consumers of one Marshal whose patterns overlap: each partition has one assignment."""
    net = Net(cps=1)
    net.topic("t", 4, end=5)
    a = net.member("a")
    first = a.consumer("^t")
    second = a.consumer("^t", policy=Balanced() & MaxClaims(3))
    net.run(5 * HI)
    assert sorted([*first.assignments, *second.assignments]) == [("t", p) for p in range(4)]
    assert len(a.held()) == 4


# -- leases by hand -----------------------------------------------------------------------------------------------


def test_a_lease_by_hand_waits_for_its_turn_and_gets_it_when_released() -> None:
    net = Net(cps=1)
    a, b = net.member("a"), net.member("b")
    first = a.engine.leases.claim(T0, a.clock())
    a.settle()
    net.run(20)
    second = b.engine.leases.claim(T0, b.clock())
    b.settle()
    net.run(50)
    assert second.refusal == "HELD"
    assert not second.is_proven
    first.release(41, net.now)
    a.settle()
    net.run_until(lambda: second.is_proven, HI + 100)
    assert net.world(T0).progress.stable == 41


def test_a_lost_claim_by_hand_waits_for_the_end_of_a_pause_and_not_in_circles() -> None:
    """Found by the simulation (seed 1997): it was due again after HI, but nothing could be done while paused."""
    net = Net(cps=1)
    a = net.member("a")
    a.drop_appends = True
    lease = a.engine.leases.claim(T0, a.clock())
    a.settle()
    a.drop_appends = False
    net.pause(10 * HI)
    net.run(2 * HI)
    assert not lease.is_proven
    assert a.due > a.clock() + HI, "nothing is due before the pause ends"
    net.run_until(lambda: lease.is_proven, 9 * HI)


def test_answers_to_heartbeats_by_hand_reach_the_waiting_threads() -> None:
    """A lost heartbeat is answered, too: the next one shows that the log has passed it."""
    net = Net(cps=1)
    a = net.member("a")
    lease = a.engine.leases.claim(T0, a.clock())
    a.settle()
    net.run(20)
    a.drop_appends = True
    lost = lease.beat(10, net.now)
    a.settle()
    a.drop_appends = False
    seen = lease.beat(20, net.now)
    a.settle()
    net.tick()
    assert seen.accepted
    assert lost.accepted is None or lost.accepted, "20 is done, so 10 is"
    rejected = lease.beat(5, net.now)
    a.settle()
    net.tick()
    assert rejected.accepted, "a regression changes nothing, and the beat counts (C5)"
    assert net.world(T0).progress.stable == 20


def test_a_lost_lease_by_hand_answers_the_waiting_threads() -> None:
    net = Net(cps=1)
    a = net.member("a")
    lease = a.engine.leases.claim(T0, a.clock())
    a.settle()
    net.run(20)
    a.drop_appends = True
    beat, grant = lease.beat(1, net.now), lease.grant(5, net.now)
    a.settle()
    net.run(2 * HI)
    assert lease.loss
    assert beat.accepted is False
    assert grant.accepted is False


def test_a_member_s_leases_by_hand_and_by_consumer_share_their_beats() -> None:
    net = Net(cps=1)
    net.topic("t", 2, end=5)
    a = net.member("a")
    a.engine.leases.claim(("u", 0), a.clock())
    a.consumer("t")
    net.run(5 * HI)
    assert len(a.held()) == 3
    beats = [r for r in net.records() if isinstance(r, Heartbeat | HeartbeatBatch)]
    assert all(isinstance(r, HeartbeatBatch) and len(r.entries) == 3 for r in beats[2:])
