"""C12 and C13: nothing is repeated, and granted messages are delivered or reported."""

from __future__ import annotations

import sys

import pytest

from kafka_marshal.engine.work.consumer import ConsumerEngine
from kafka_marshal.engine.work.pull import GrantedPull
from kafka_marshal.engine.work.run import Taken
from kafka_marshal.errors import ClientReplacedError
from rationalizer import ClaimingMessages, codes
from tests.engine.harness import HI, FakeMessage, Member, Net

T0 = ("t", 0)


def working(end: int = 30, batch_size: int = 5, **options: object) -> tuple[Net, Member, ConsumerEngine]:
    net = Net(cps=1)
    net.topic("t", 1, end=end)
    member = net.member("a")
    consumer = member.consumer("t", at_most_once=True, batch_size=batch_size, **options)  # type: ignore[arg-type]
    net.run_until(lambda: member.can_hand_out(T0))
    return net, member, consumer


def proposing(end: int = 30) -> tuple[Net, Member, ConsumerEngine]:
    """A ClaimingMessages for 0 … 4 is in transit and not applied yet."""
    net, member, consumer = working(end)
    member.granted(consumer, 10)
    assert grants(net) == [4]
    return net, member, consumer


def read(net: Net, member: Member, ms: float) -> list[int]:
    until, got = net.now + ms, list[FakeMessage]()
    while net.now < until:
        got += member.work_granted()
        net.tick()
    return [m.at for m in got]


def grants(net: Net) -> list[int]:
    return [r.proposed_last_offset for r in net.records(ClaimingMessages) if isinstance(r, ClaimingMessages)]


def reported(consumer: ConsumerEngine) -> list[tuple[int, int]]:
    return [(first, last) for _, _, first, last in consumer.delivery.grants.unprocessed]


# -- C12, C13: the way of a batch ---------------------------------------------------------------------------------


# -- rejected -----------------------------------------------------------------------------------------------------


def test_c13_a_refused_batch_of_a_lost_lease_is_the_next_holder_s() -> None:
    net, member, consumer = working()
    epoch = member.lease(T0).epoch
    member.stalled = True
    net.run(2.2 * HI)
    member.stalled = False
    assert epoch == 0
    member.drop_appends = True
    other = net.member("b")
    other.consumer("t", at_most_once=True, batch_size=5)
    net.run_until(lambda: other.can_hand_out(T0))
    assert read(net, member, HI / 2) == []
    assert read(net, other, HI) == list(range(30))
    assert reported(consumer) == []


@pytest.mark.parametrize("lost", [False, True])
def test_c13_a_copy_granted_after_a_pause_refused_the_first_one_is_reported(lost: bool) -> None:
    """The pause releases the partition; then it ends, and a copy of the proposal in transit is granted."""
    net, member, consumer = working()
    epoch = member.lease(T0).epoch
    member.drop_if = lambda record: isinstance(record, ClaimingMessages)
    member.granted(consumer, 10)
    net.pause(10 * HI)
    net.tick()
    member.drop_if = lambda record: False
    net.run_until(
        lambda: member.worlds[0].rejected.get(codes.PAUSED)
    )  # sent again while the partition is being released
    member.stalled = True
    net.pause(0)
    net.write(ClaimingMessages(*member.engine.ids, "t", 0, epoch, 4), 0)
    if lost:
        member.drop_appends = True
        net.run(2 * HI)
        member.drop_appends = False
    else:
        assert member.work_granted() == []
    member.stalled = False
    net.tick()
    assert reported(consumer) == [(0, 4)]
    assert read(net, member, 5 * HI) == list(range(5, 30))


# -- losing the lease ---------------------------------------------------------------------------------------------


def test_c13_a_grant_answered_after_the_lease_was_lost_is_reported_if_it_was_granted() -> None:
    """By our clock the lease is over before the replica shows the grant; by the log it is granted."""
    net, member, consumer = proposing()
    member.stalled = True
    net.run(2.1 * HI)
    assert member.work_granted() == []
    assert reported(consumer) == [], "not known yet"
    member.stalled = False
    net.run(100)
    assert reported(consumer) == [(0, 4)]
    assert read(net, member, HI) == list(range(5, 30))


def test_c13_a_grant_answered_after_this_member_has_failed_is_reported_too() -> None:
    """Replaced, as another CP showed first."""
    net, member, consumer = proposing()
    member.engine.fail(ClientReplacedError("a newer instance"), member.clock())
    assert reported(consumer) == [], "not known yet"
    net.run(100)
    assert reported(consumer) == [(0, 4)]


def test_c13_a_grant_refused_after_the_lease_was_lost_is_not_reported() -> None:
    net, member, consumer = working()
    member.drop_appends = True
    member.granted(consumer)
    net.run(2.1 * HI)
    member.drop_appends = False
    assert read(net, member, 4 * HI) == list(range(30))
    assert reported(consumer) == []


# -- revocation, close --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("refused", [False, True])
def test_c13_an_end_without_release_reports_what_the_log_grants_after_it(refused: bool) -> None:
    """``terminate`` waits until no answer is pending; a claim at the last moment may be granted (C13)."""
    net, member, consumer = working()
    net.run(HI / 2)
    net.stamp_shift = 2.5 * HI if refused else 0.0
    member.granted(consumer)
    consumer.delivery.grants.abandon(net.now)
    assert (reported(consumer), len(consumer.delivery.grants.awaited)) == ([], 1)
    net.run(10)
    assert reported(consumer) == ([] if refused else [(0, 4)])
    assert not consumer.delivery.grants.awaited


def test_c13_an_end_without_release_reports_what_was_granted_and_not_collected() -> None:
    net, member, consumer = ahead()
    consumer.delivery.grants.abandon(net.now)
    assert sorted(reported(consumer)) == [(1, 4), (5, 9)]
    assert not consumer.delivery.grants.awaited
    assert member.held() == [T0], "nothing is let go"


def test_c13_a_thread_that_waits_for_a_grant_while_another_closes_gets_nothing() -> None:
    net, member, consumer = proposing()
    grant = member.assignment(T0).grant
    assert grant is not None
    member.close()
    net.run_until(lambda: consumer.closed, 100)
    consumer.pull.answered(grant, net.now)
    assert consumer.delivery.grants.granted is None
    assert reported(consumer) == [(0, 4)]


def held_back(member: Member, consumer: ConsumerEngine) -> None:
    consumer.delivery.hold_back(member.assignment(T0))


def test_c13_user_pause_keeps_a_partition_from_being_claimed_further() -> None:
    net, member, consumer = working()
    held_back(member, consumer)
    assert read(net, member, HI) == []
    assert grants(net) == []
    member.assignment(T0).user_paused = False
    assert read(net, member, HI) == list(range(30))


def test_c13_user_pause_holds_back_what_is_granted() -> None:
    """In transit or in the middle of the batch; it is delivered first when the pause is over."""
    net, member, consumer = proposing()
    held_back(member, consumer)
    assert read(net, member, HI) == []
    assert net.world(T0).progress.stable == 4, "granted meanwhile"
    member.assignment(T0).user_paused = False
    assert consumer.delivery.grants.is_waiting
    assert [m.at for m in member.work_granted(3)] == [0, 1, 2]
    held_back(member, consumer)
    assert read(net, member, HI) == []
    member.assignment(T0).user_paused = False
    assert read(net, member, HI) == list(range(3, 30))
    assert reported(consumer) == []


def test_c13_user_pause_holds_back_what_is_claimed_ahead_in_order() -> None:
    net, member, consumer = ahead()
    held_back(member, consumer)
    assert read(net, member, HI) == []
    member.assignment(T0).user_paused = False
    assert read(net, member, HI) == list(range(1, 30))


def test_c13_held_back_and_lost_is_reported() -> None:
    net, member, consumer = ahead()
    held_back(member, consumer)
    assert read(net, member, HI / 2) == []
    member.paused = True
    net.run(4 * HI)
    member.paused = False
    net.run(10)
    assert sorted(reported(consumer)) == [(1, 4), (5, 9)]
    member.assignment(T0).user_paused = False
    assert min(read(net, member, HI)) == 10, "nothing of them comes back"


@pytest.mark.parametrize("how", ["close", "terminate"])
def test_c13_held_back_is_reported_at_the_end(how: str) -> None:
    net, member, consumer = proposing()
    net.tick()
    assert len(member.work_granted(2)) == 2
    held_back(member, consumer)
    if how == "close":
        member.close()
        net.run_until(lambda: consumer.closed, 100)
    else:
        consumer.delivery.grants.abandon(net.now)
    assert reported(consumer) == [(2, 4)]


def test_c13_a_release_waits_for_what_is_held_back() -> None:
    net, member, consumer = proposing()
    net.tick()
    assert len(member.work_granted(2)) == 2
    held_back(member, consumer)
    consumer.revocation.revoke(member.assignment(T0), "a test wants it", net.now)
    assert read(net, member, 3 * HI) == []
    assert member.held() == [T0]
    member.assignment(T0).user_paused = False
    assert [m.at for m in member.work_granted()] == [2, 3, 4]
    assert member.work_granted() == []
    net.run_until(lambda: not member.held(), 100)
    assert reported(consumer) == []


def test_c13_what_is_held_back_counts_for_no_handler() -> None:
    net, member, consumer = working(handler_timeout_ms=2.0 * HI)
    member.granted(consumer, 10)
    net.run_until(lambda: bool(member.work_granted(1)))
    held_back(member, consumer)
    assert read(net, member, 5 * HI) == []
    assert member.held() == [T0]
    member.assignment(T0).user_paused = False
    assert read(net, member, HI)[:4] == [1, 2, 3, 4]


def test_c13_done_and_beats_by_the_user_do_not_matter() -> None:
    """At most once, the grant is the progress: later calls of the user have no effect."""
    net, member, consumer = working(end=5)
    got = read(net, member, HI)
    assert got == [0, 1, 2, 3, 4]
    consumer.delivery.done([FakeMessage(T0, 4)], net.now)
    assert consumer.delivery.ignored_done[T0] == 1
    assert net.world(T0).progress.granted == 4


# -- C13: claiming ahead -------------------------------------------------------------------------------------------


def ahead(end: int = 30) -> tuple[Net, Member, ConsumerEngine]:
    """0 … 4 are granted and in flight, 5 … 9 requested ahead and granted, too."""
    net, member, consumer = working(end, claim_ahead=True)
    member.granted(consumer, 10)
    net.run_until(lambda: bool(member.work_granted(1)))
    assert grants(net) == [4, 9]
    net.run(10)
    return net, member, consumer


def test_q34_claimed_ahead_a_revocation_delivers_both_batches_first() -> None:
    net, a, consumer = ahead(end=10)
    net.topic("t", 2, end=10)
    a.look_at_topics()
    b = net.member("b")
    b.consumer("t", at_most_once=True, batch_size=5)
    got = {"a": [m.at for m in a.handled if m.of == T0], "b": list[int]()}
    for _ in range(800):
        got["a"] += [m.at for m in a.work_granted(1) if m.of == T0]
        got["b"] += [m.at for m in b.work_granted(1) if m.of == T0]
        net.tick()
    assert len(a.held()) == len(b.held()) == 1
    assert sorted(got["a"] + got["b"]) == list(range(10))
    assert reported(consumer) == []


def test_q34_claimed_ahead_a_pause_lets_both_batches_be_delivered() -> None:
    net, member, consumer = ahead()
    net.pause(1.5 * HI)
    net.run_until(lambda: not member.work_granted() and not member.held(), 2 * HI)
    assert [m.at for m in member.handled] == list(range(10))
    assert reported(consumer) == []
    assert net.world(T0).progress.stable == 9


def test_q34_claimed_ahead_the_lease_lost_both_are_reported() -> None:
    net, member, consumer = ahead()
    member.paused = True
    net.run(4 * HI)
    member.paused = False
    net.run(10)
    assert member.work_granted() == []
    assert sorted(reported(consumer)) == [(1, 4), (5, 9)]


def test_q34_claimed_ahead_waiting_counts_for_no_handler() -> None:
    """The batch requested ahead is not in flight: its time begins when its predecessor is finished."""
    net, member, consumer = working(handler_timeout_ms=2.0 * HI, claim_ahead=True)
    member.granted(consumer, 10)
    net.run_until(lambda: bool(member.work_granted(1)))
    net.run(1.5 * HI)
    assert [m.at for m in member.work_granted()] == [1, 2, 3, 4]
    net.run(1.5 * HI)
    assert [m.at for m in member.work_granted()] == [5, 6, 7, 8, 9]
    assert reported(consumer) == []


def test_c13_a_wait_that_was_broken_off_is_taken_up_again() -> None:
    """Ctrl-C in the wait for a grant, and the loop continues: it waits for the same batch, and none is lost."""
    net, member, consumer = proposing()
    consumer.pull = GrantedPull(consumer)
    assert read(net, member, HI) == list(range(30))
    assert grants(net)[0] == 4
    assert reported(consumer) == []


# -- C13, if a user's thread has taken a message while something else happens -------------------------------------


@pytest.mark.parametrize("left", [True, False], ids=["handed out", "not handed out"])
def test_c13_a_lease_that_ends_while_a_thread_has_a_message(left: bool) -> None:
    """A thread has a message that has not left the library when the lease ends: it is reported unless it leaves."""
    net, member, consumer = proposing()
    net.tick()
    run = consumer.delivery.grants.collect(member.assignment(T0), net.now)
    assert run is not None
    run.take(2)
    message = next(run.walk)
    out = [0]
    run.taken.append(Taken([message], out, net.now))
    consumer.delivery.grants.give_up(run.assignment, net.now)  # the engine, at the same time
    assert reported(consumer) == [(3, 4)], "what becomes of the third is open"
    out[0] = int(left)
    del message
    consumer.hand.regather(consumer, net.now)
    assert sorted(reported(consumer)) == ([(3, 4)] if left else [(2, 2), (3, 4)])
    consumer.delivery.grants.decide(True)
    assert sorted(reported(consumer)) == ([(3, 4)] if left else [(2, 2), (3, 4)]), "once"


def test_c13_a_message_taken_in_the_moment_of_a_pause_comes_after_it() -> None:
    """Another thread pauses between two messages of an iteration: the second was taken but not delivered."""
    net, member, consumer = proposing()
    net.run_until(lambda: bool(member.work_granted(1)))
    run, delivery = consumer.delivery.grants.granted, consumer.delivery
    assert run is not None
    taken = next(run.walk)  # the thread has taken message 1 …
    held_back(member, consumer)
    assert taken.offset() == 1
    del taken  # … and sees that it must not deliver it
    assert delivery.grants.granted is not run
    member.assignment(T0).user_paused = False
    delivery.grants.take_up(net.now)
    assert delivery.grants.has_granted()
    assert [m.at for m in member.work_granted()] == [1, 2, 3, 4]
    assert reported(consumer) == []


def test_c13_a_message_that_leaves_and_is_dropped_while_we_count_is_not_delivered_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A thread delivers and drops a taken message between our check of what has left and our count."""
    net, member, consumer = proposing()
    net.tick()
    run = consumer.delivery.grants.collect(member.assignment(T0), net.now)
    assert run is not None
    out = [0]
    run.taken.append(Taken([next(run.walk)], out, net.now))
    count = sys.getrefcount

    def counted(message: object) -> int:
        out[0] = 1
        return count(message) - 1  # without our own argument

    monkeypatch.setattr("kafka_marshal.engine.work.run.sys.getrefcount", counted)
    assert run.astray() == []
    monkeypatch.undo()
    assert consumer.delivery.grants.has_granted()
    assert [message.offset() for message in run.take(10)] == [1, 2, 3, 4]
