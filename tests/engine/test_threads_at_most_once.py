"""C13, if a user's thread has taken a message while something else happens."""

from __future__ import annotations

import sys

import pytest

from kafka_marshal.engine.work.run import Taken
from tests.engine.test_at_most_once import T0, held_back, proposing, reported


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
