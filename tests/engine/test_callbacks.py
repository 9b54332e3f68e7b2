"""The user's callbacks: their order, and what waits for them."""

from __future__ import annotations

from kafka_marshal.engine.effects import Callback
from kafka_marshal.engine.work.assignment import Stage
from rationalizer import ReleasingPartition
from tests.engine.harness import HI, Net
from tests.engine.scenes import ASSIGN, LOST, REVOKE, T0, calls, evict, taken, working

# -- callbacks ----------------------------------------------------------------------------------------------------


def test_on_assign_may_seek() -> None:
    net = Net(cps=1)
    net.topic("t", 1, end=20)
    member = net.member("a")
    member.hold_callbacks = True
    consumer = member.consumer("t")
    net.run(50)
    member.fetch(3)
    assert consumer.seek(T0, 7)
    member.return_callbacks()
    assert member.work()[0].at == 7
    net.run(HI)
    assert net.world(T0).progress.stable == 11


def test_on_revoke_comes_before_the_release_and_may_still_say_done() -> None:
    net, member = working()
    messages = taken(member, 3)
    member.hold_callbacks = True
    member.close()
    net.run(HI / 2)
    assert calls(member)[-1] == REVOKE
    assert not net.records(ReleasingPartition)
    for message in messages:
        member.done(message)
    member.return_callbacks()
    net.tick()
    assert not net.world(T0).held
    assert net.world(T0).progress.stable == 2


def test_beats_continue_while_on_revoke_runs() -> None:
    """A slow callback does not cost the lease."""
    net, member = working()
    member.hold_callbacks = True
    member.close()
    net.run(5 * HI)
    assert member.held() == [T0]
    member.return_callbacks()
    net.tick()
    assert not net.world(T0).held


def test_what_on_revoke_is_at_work_on_is_released_when_it_returns_though_the_consumer_has_ended() -> None:
    """``close()`` stopped waiting for it, or on_revoke itself called close()."""
    net, member = working()
    member.hold_callbacks = True
    member.close()
    member.engine.remove_consumer(member.consumers[0].number)
    net.run(5 * HI)
    assert net.world(T0).held
    member.return_callbacks()
    net.tick()
    assert not net.world(T0).held


def test_a_revocation_during_on_assign_waits_for_both_callbacks() -> None:
    """on_assign's return is not on_revoke's: the release comes after the second (the callbacks run one by one)."""
    net = Net(cps=1)
    net.topic("t", 1, end=10)
    member = net.member("a")
    member.hold_callbacks = True
    member.consumer("t")
    net.run(50)
    member.close()
    assert calls(member) == [ASSIGN, REVOKE]
    member.return_callbacks(only=1)
    net.tick()
    assert not net.records(ReleasingPartition), "on_revoke has not even begun"
    member.return_callbacks()
    net.tick()
    assert not net.world(T0).held


def test_without_on_revoke_a_release_still_waits_for_on_assign() -> None:
    net = Net(cps=1)
    net.topic("t", 1, end=10)
    member = net.member("a")
    member.hold_callbacks = True
    member.consumer("t", callbacks=frozenset({Callback.ASSIGN}))
    net.run(50)
    member.close()
    net.tick()
    assert not net.records(ReleasingPartition)
    member.return_callbacks()
    net.tick()
    assert not net.world(T0).held


def test_on_lost_is_called_once_and_nothing_is_committed_afterwards() -> None:
    net, member = working()
    messages = taken(member, 3)
    evict(net, member)
    net.run(HI)
    assert calls(member) == [ASSIGN, LOST]
    for message in messages:
        member.done(message)
    net.run(HI)
    assert net.world(T0).progress.stable == -1
    assert member.consumers[0].delivery.ignored_done[T0] == 3


def test_a_lease_lost_during_on_revoke_is_reported_and_not_released() -> None:
    net, member = working()
    member.hold_callbacks = True
    member.close()
    net.tick()
    evict(net, member)
    net.tick()
    before = len(net.records(ReleasingPartition))
    member.return_callbacks()
    net.run(HI)
    assert calls(member) == [ASSIGN, REVOKE, LOST]
    assert len(net.records(ReleasingPartition)) == before
    assert member.consumers[0].closed


def test_a_partition_that_was_not_assigned_is_not_reported_as_lost() -> None:
    """The lease was lost before on_assign: the user never had it."""
    net = Net(cps=1)
    net.topic("t", 1, end=10)
    member = net.member("a")
    member.hold_lookups = True
    member.consumer("t", start="latest")
    net.run(50)
    assert member.stage(T0) is Stage.LOCATING
    evict(net, member)
    net.run(50)
    assert member.held() == []
    assert member.callbacks == []


def test_without_callbacks_everything_goes_its_way() -> None:
    net, member = working(callbacks=frozenset())
    assert len(member.work()) == 5
    member.close()
    net.tick()
    assert member.callbacks == []
    assert net.world(T0).progress.stable == 4
