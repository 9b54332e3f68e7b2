"""Guarantees of consumers: done from anywhere, revocation that waits, pause, seek, close."""

from __future__ import annotations

from collections import Counter
from itertools import groupby

import pytest

from kafka_marshal.engine.effects import Callback
from kafka_marshal.engine.work.assignment import Stage
from kafka_marshal.engine.work.run import Taken
from rationalizer import ReleasingPartition
from tests.engine.harness import HI, FakeMessage, Member, Net
from tests.engine.scenes import ASSIGN, LOST, REVOKE, T0, calls, evict, taken, working

# -- done ---------------------------------------------------------------------------------------------------------


def test_done_in_any_order() -> None:
    net, member = working()
    messages = taken(member, 10)
    for message in reversed(messages):
        member.done(message)
    net.run(HI)
    assert net.world(T0).progress.stable == 9
    assert member.consumers[0].delivery.in_hand(member.consumers[0].assignments.values()) == 0


def test_done_twice_and_done_of_what_was_never_in_flight_is_ignored_and_counted() -> None:
    net, member = working()
    messages = taken(member, 3)
    member.done(messages[0])
    member.done(messages[0])
    member.done(FakeMessage(T0, 50))
    member.done(FakeMessage(T0, 1))  # the same offset but another object: not the delivered one
    net.run(HI)
    assert net.world(T0).progress.stable == 0
    assert net.world(T0).progress.ranges == []
    assert member.consumers[0].delivery.ignored_done[T0] == 3


def test_a_batch_done_after_its_lease_ended_is_counted_whole() -> None:
    net, member = working()
    member.fetch()
    run = member.take(5)
    assert run is not None
    evict(net, member)
    net.run(50)
    member.done_run(run)
    assert member.consumers[0].delivery.ignored_done[T0] == 5


def test_a_batch_of_which_some_messages_were_done_alone() -> None:
    net, member = working()
    member.fetch()
    run = member.take(5)
    assert run is not None
    member.done(run.messages[3])
    member.done_run(run)
    member.done_run(run)
    net.run(HI)
    assert net.world(T0).progress.stable == 4
    assert member.assignment(T0).tracker.in_hand == 0
    assert member.consumers[0].delivery.ignored_done[T0] == 5


# -- iterating ----------------------------------------------------------------------------------------------------


def test_two_runs_left_in_any_order_come_again_in_order() -> None:
    """Two threads iterate; the one with the earlier messages leaves first."""
    for first_leaves_first in (True, False):
        net, member = working(end=20)
        member.fetch(20)
        runs = [member.take(10, iterating=True), member.take(10, iterating=True)]
        assert runs[0] is not None and runs[1] is not None
        runs[0].cursor, runs[1].cursor = 4, 5
        for run in runs if first_leaves_first else reversed(runs):
            assert run is not None
            member.leave_run(run)
        got = [m.at for m in member.work(3)]
        assert got == [*range(4, 10), *range(15, 20)]
        net.run(HI)
        assert net.world(T0).progress.stable == 19


def test_leaving_a_run_after_the_lease_ended_counts_what_was_not_committed() -> None:
    net, member = working()
    member.fetch(10)
    run = member.take(10, iterating=True)
    assert run is not None
    run.cursor = 2
    net.run(HI / 2)  # two are in transit to the log
    evict(net, member)
    net.tick()
    run.cursor = 7
    member.leave_run(run)
    assert member.consumers[0].delivery.ignored_done[T0] == 5
    assert net.world(T0).progress.stable == 1


# -- revocation ---------------------------------------------------------------------------------------------------


def test_an_iterating_user_lets_a_revoked_partition_go_at_its_next_message() -> None:
    """hand_out_until becomes 0, the user's thread sees it and leaves the run; the next holder gets the rest."""
    net, member = working()
    member.fetch(10)
    run = member.take(10, iterating=True)
    assert run is not None
    run.cursor = 3
    member.consumers[0].revocation.revoke(member.assignment(T0), "a test", net.now)
    member.settle()
    assert run.assignment.lease.hand_out_until == 0
    run.cursor = 4
    member.leave_run(run)
    net.tick()
    assert net.world(T0).progress.stable == 3
    net.run_until(lambda: member.can_hand_out(T0))
    assert member.work()[0].at == 4


def test_a_lost_lease_purges_the_buffer() -> None:
    """Messages fetched under the old epoch are never delivered, not even after winning the lease again (B19)."""
    net, member = working()
    member.fetch(10)
    assert member.consumers[0].delivery.fullest(net.now) == 10
    member.stalled = member.drop_appends = True
    net.run(2 * HI)
    assert member.consumers[0].delivery.fullest(net.now) == 0
    assert member.fetching == {}
    assert member.take() is None
    old = member.lease(T0).epoch if T0 in member.engine.book.leases else None
    assert old in (None, -1)


def test_messages_fetched_before_a_loss_and_delivered_after_it_are_dropped() -> None:
    net, member = working()
    late = [FakeMessage(T0, at) for at in range(10)]
    evict(net, member)
    net.tick()
    member.consumers[0].delivery.fetched(T0, late, net.now)  # type: ignore[arg-type]
    assert member.take() is None


# -- handler_timeout ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("iterating", [False, True])
def test_handler_timeout_a_message_in_flight_for_too_long_costs_the_lease(iterating: bool) -> None:
    """Heartbeats alone don't prove that a handler lives: the lease is released, on_lost called, done work kept."""
    net, member = working(handler_timeout_ms=3_000.0)
    member.fetch(10)
    run = member.take(5, iterating=iterating)
    assert run is not None
    if iterating:
        run.cursor = 2
    else:
        member.done(run.messages[0])
        member.done(run.messages[1])
    took = net.run_until(lambda: LOST in calls(member))
    assert 3_000 <= took <= 3_000 + HI
    net.tick()
    assert net.world(T0).progress.stable == 1
    assert "handler_timeout" in member.warnings[-1]
    assert member.take() is None  # the user asks for more
    member.settle()
    net.run_until(lambda: member.can_hand_out(T0))
    assert member.work()[0].at == 2


def test_handler_timeout_is_per_message_when_iterating() -> None:
    """A long run handled message by message is not a slow handler."""
    net, member = working(handler_timeout_ms=1_500.0)
    member.fetch(10)
    run = member.take(10, iterating=True)
    assert run is not None
    for cursor in range(10):
        run.cursor = cursor
        net.run(HI)
    assert LOST not in calls(member)
    net.run(HI)
    assert LOST in calls(member)


def test_handler_timeout_does_not_run_while_nothing_is_in_flight() -> None:
    net, member = working(handler_timeout_ms=1_500.0, end=5)
    member.work()
    net.run(10 * HI)
    assert LOST not in calls(member)


def test_handler_timeout_counts_during_a_revocation() -> None:
    """A hanging handler does not keep a waiting member from the partition for ever."""
    net, member = working(handler_timeout_ms=3_000.0)
    assert taken(member, 1)
    member.consumers[0].revocation.revoke(member.assignment(T0), "a test", net.now)
    member.settle()
    net.run_until(lambda: LOST in calls(member), 3_000 + HI)


def test_handler_timeout_a_member_whose_handler_hangs_lets_everything_go_and_claims_nothing() -> None:
    """Its other partitions would starve, and it would win the lost one back: it leaves them to other members."""
    net = Net(cps=1)
    net.topic("t", 4, end=50)
    member, other = net.member("a"), net.member("b")
    member.consumer("t", handler_timeout_ms=3_000.0)
    other.consumer("t")
    net.run_until(lambda: len(member.held()) == len(other.held()) == 2)
    member.fetch()
    run = member.take(5)
    assert run is not None
    took = net.run_until(lambda: len(other.held()) == 4)
    assert took <= 3_000 + 4 * HI
    net.run(20 * HI)
    assert member.held() == []
    assert member.consumers[0].delivery.fullest(net.now) == 0  # a thread comes back after all, and asks for more
    member.settle()
    net.run_until(lambda: len(member.held()) == 2)


def test_handler_timeout_counts_on_when_the_lease_is_lost_meanwhile() -> None:
    """The network fails: the lease is lost, and the handler keeps hanging on another connection. Found by simulation.

    The member would claim partitions without working on them, and nothing of them is in flight: others must get them.
    """
    net = Net(cps=1)
    net.topic("t", 4, end=50)
    member, other = net.member("a"), net.member("b")
    member.consumer("t", handler_timeout_ms=8_000.0)
    other.consumer("t")
    net.run_until(lambda: len(member.held()) == len(other.held()) == 2)
    member.fetch()
    assert member.take(5) is not None
    member.stalled = member.drop_appends = True
    net.run(4 * HI)
    assert Callback.LOST in [call for _, call in calls(member)]
    member.stalled = member.drop_appends = False
    net.run_until(lambda: len(member.held()) == 2)
    net.run(8_000.0)
    assert member.held() == []
    assert len(other.held()) == 4
    assert member.consumers[0].delivery.fullest(net.now) == 0  # a thread comes back after all, and asks for more
    member.settle()
    net.run_until(lambda: len(member.held()) == 2)


def test_handler_timeout_costs_one_lease_only_while_other_threads_continue() -> None:
    """One of several threads hangs: its lease is lost, those of the others are not."""
    net, member = working(partitions=2, handler_timeout_ms=3_000.0)
    member.fetch()
    hung = member.take(1)
    assert hung is not None
    key = hung.assignment.key
    for _ in range(50):
        run = member.take(1)
        if run is not None and run.assignment.key != key:
            member.done_run(run)
        net.run(100)
    assert [k for k, call in calls(member) if call is Callback.LOST] == [key]
    assert [k for k, call in calls(member) if call is Callback.REVOKE] == []


def test_handler_timeout_sees_that_another_iterating_thread_continues() -> None:
    net, member = working(partitions=2, handler_timeout_ms=3_000.0)
    member.fetch(100)
    hung, going = member.take(50, iterating=True), member.take(50, iterating=True)
    assert hung is not None and going is not None
    for cursor in range(45):
        going.cursor = cursor
        net.run(100)
    assert [k for k, call in calls(member) if call is Callback.LOST] == [hung.assignment.key]
    assert [k for k, call in calls(member) if call is Callback.REVOKE] == []


# -- pause, resume, seek ------------------------------------------------------------------------------------------


def test_user_pause_keeps_the_lease_and_delivers_nothing() -> None:
    net, member = working()
    assignment = member.assignment(T0)
    member.consumers[0].delivery.hold_back(assignment)
    net.run(5 * HI)
    member.fetch()
    assert member.take() is None
    assert member.held() == [T0]
    assignment.user_paused = False
    assert member.take() is not None


def test_user_pause_ends_what_is_being_iterated_and_it_comes_again_first() -> None:
    net, member = working(end=40)
    member.fetch(20)
    run = member.take(10, iterating=True)
    assert run is not None
    delivery, messages = member.consumers[0].delivery, run.walk
    assert [next(messages), next(messages)] == run.messages[:2]
    delivery.hold_back(run.assignment)
    assert run.cursor == 1
    assert next(messages, None) is None, "the loop ends before the third message"
    assert run.cursor == 1, "it is not known to be done, yet"
    run.walked(run.messages[1])
    delivery.leave_run(run, net.now)
    assert member.take() is None
    run.assignment.user_paused = False
    assert [m.at for m in member.work(100)][:18] == list(range(2, 20))


def test_seek_goes_forward_only() -> None:
    net, member = working()
    consumer = member.consumers[0]
    member.work()
    assert not consumer.seek(T0, 4)
    assert not consumer.seek(("t", 7), 50)
    assert consumer.seek(T0, 5), "where it is already"
    assert consumer.seek(T0, 50)
    member.settle()
    assert member.work()[0].at == 50
    net.run(HI)
    assert net.world(T0).progress.stable == 54, "what was skipped counts as done"


def test_seek_within_what_is_buffered() -> None:
    _, member = working(end=20)
    member.fetch(20)
    assert member.consumers[0].seek(T0, 7)
    assert [m.at for m in member.work(100)] == list(range(7, 20))


def test_seek_while_messages_are_in_flight() -> None:
    """Offsets below count as done, in flight or not; done() for them has no effect."""
    net, member = working(end=20)
    messages = taken(member, 5)
    assert member.consumers[0].seek(T0, 10)
    member.settle()
    net.run(HI)
    assert net.world(T0).progress.stable == 9
    for message in messages:
        member.done(message)
    assert member.work()[0].at == 10


def test_seek_to_the_end_and_beyond() -> None:
    """A sink may be ahead of the log."""
    net, member = working(end=20)
    assert member.consumers[0].seek(T0, 20)
    member.settle()
    assert member.work() == []
    net.data[T0].end = 23
    assert [m.at for m in member.work()] == [20, 21, 22]


def test_seek_of_what_is_being_released_is_refused() -> None:
    net, member = working()
    taken(member, 1)
    member.consumers[0].revocation.revoke(member.assignment(T0), "a test", net.now)
    assert not member.consumers[0].seek(T0, 50)


# -- close --------------------------------------------------------------------------------------------------------


# -- Turns --------------------------------------------------------------------------------------------------------


def test_a_slow_loop_gives_each_partition_its_turn() -> None:
    net, member = working(partitions=2, end=1_000)
    member.fetch(1_000)
    seen: list[int | None] = []
    for _ in range(4):
        run = member.take(10_000, iterating=True)
        assert run is not None
        message = None
        for message in run.walk:
            seen.append(message.partition())
            net.run(50)
        run.walked(message)
        member.leave_run(run)
    order = [partition for partition, _ in groupby(seen)]
    assert order in ([0, 1, 0, 1], [1, 0, 1, 0])
    assert len(seen) < 60, "a turn is half a second, and no more than a message longer"
    assert {p: x.tracker.done.stable + 1 for (_, p), x in member.consumers[0].assignments.items()} == Counter(seen)


def test_what_a_poll_has_not_taken_when_its_turn_is_over_waits_for_the_next_one() -> None:
    net, member = working(partitions=2, end=1_000)
    member.fetch(1_000)
    delivery = member.consumers[0].delivery
    run = delivery.next_run(1_000, False, net.now, shared=True)
    assert run is not None
    first = next(run.walk)
    run.taken.append(Taken([first], [1], net.now))
    net.run(600)
    assert not run.has_left
    other = delivery.next_run(1_000, False, net.now, shared=True)
    assert other is not None
    assert other.assignment is not run.assignment
    again = delivery.next_run(1_000, False, net.now, shared=True)
    assert again is not None
    assert (again.first, again.size) == (1, 999)


def test_one_partition_alone_has_all_the_time_there_is() -> None:
    net, member = working(end=1_000)
    member.fetch(1_000)
    run = member.take(10_000, iterating=True)
    assert run is not None
    next(run.walk)
    net.run(5_000)
    assert run.has_left


def granted(net: Net, member: Member) -> list[FakeMessage]:
    """The delivered messages of the next batch."""
    got: list[FakeMessage] = []
    while not got:
        net.tick()
        got += member.work_granted(1_000)
    return got


def test_at_most_once_slow_batches_are_small_where_several_partitions_are_held() -> None:
    net, member = working(partitions=2, end=2_000, at_most_once=True, batch_size=1_000)
    sizes: list[tuple[int, int]] = []
    for _ in range(6):
        member.fetch(1_000)
        batch = granted(net, member)
        sizes.append((batch[0].partition(), len(batch)))
        for _ in batch:
            net.run(20)
    assert sizes[0][1] == 100
    assert all(size <= 25 for _, size in sizes[1:])
    assert {partition for partition, _ in sizes} == {0, 1}


# -- The user's callbacks: their order, and what waits for them ---------------------------------------------------


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
