"""The steps of a thread that wants messages, without any thread."""

from __future__ import annotations

from math import inf

from kafka_marshal.engine.work.assignment import Run
from kafka_marshal.engine.work.consumer import ConsumerEngine
from kafka_marshal.engine.work.pull import (
    READ_BETWEEN_TURNS,
    AwaitGrant,
    End,
    Fetch,
    GrantedPull,
    Hand,
    Pull,
    Step,
    Take,
    Wait,
    Wanted,
)
from tests.engine.harness import Member, Net
from tests.engine.scenes import T0, working


def scene(**options: object) -> tuple[Net, Member, ConsumerEngine]:
    net, member = working(**options)  # type: ignore[arg-type]
    return net, member, member.consumers[0]


def run_of(step: Step) -> Run:
    assert isinstance(step, Take), step
    return step.run


def offsets(step: Step) -> list[int | None]:
    return [message.offset() for message in run_of(step).messages]


# -- at least once ------------------------------------------------------------------------------------------------


def test_what_is_there_is_read_before_anything_is_waited_for() -> None:
    net, member, consumer = scene()
    pull = Pull(consumer, deadline=7.0)
    assert pull.next(Wanted(10), net.now) == Fetch(10, 7.0)
    member.fetch(3)
    assert offsets(pull.next(Wanted(10, came=3), net.now)) == [0, 1, 2]


def test_a_wait_that_began_with_the_time_up_was_the_last() -> None:
    net, member, consumer = scene()
    pull = Pull(consumer, deadline=7.0)
    assert pull.next(Wanted(10, at=7.5, came=0, waited=6.9), net.now) == Fetch(10, 7.0)
    assert pull.next(Wanted(10, at=8.0, came=0, waited=7.0), net.now) == End()
    member.fetch(1)
    assert offsets(pull.next(Wanted(10, at=8.0, came=0, waited=7.0), net.now)) == [0]


def test_slow_batches_of_one_partition_end_its_turn_and_what_others_have_is_read() -> None:
    net, member, consumer = scene(partitions=2, end=1_000)
    other, member.fetching = dict(member.fetching), {T0: member.fetching[T0]}
    member.fetch(1_000)  # the reader has fetched it ahead of the other one
    member.fetching = other
    for _ in range(3):
        pull = Pull(consumer, fill_s=0.0)
        assert run_of(pull.next(Wanted(5), net.now)).assignment.key == T0
        net.run(250)
    assert Pull(consumer).next(Wanted(5), net.now) == Fetch(READ_BETWEEN_TURNS, None)
    member.fetch(10)
    taken = [run_of(Pull(consumer).next(Wanted(5, came=10), net.now)).assignment.key for _ in range(2)]
    assert set(taken) == {T0, ("t", 1)}


def test_a_batch_waits_until_it_is_full_or_for_as_long_as_it_may() -> None:
    net, member, consumer = scene()
    pull = Pull(consumer, fill_s=2.0)
    assert pull.next(Wanted(10, at=1.0), net.now) == Fetch(10, inf)
    member.fetch(4)
    assert pull.next(Wanted(10, at=5.0), net.now) == Fetch(6, 7.0), "from when something is there"
    assert pull.next(Wanted(10, at=6.9), net.now) == Fetch(6, 7.0)
    assert offsets(pull.next(Wanted(10, at=7.0), net.now)) == [0, 1, 2, 3]
    member.fetch(10)
    assert offsets(Pull(consumer, fill_s=2.0).next(Wanted(10, at=7.0), net.now)) == list(range(4, 14))


def test_an_open_message_waits_for_no_others() -> None:
    net, member, consumer = scene()
    member.fetch(4)
    assignment = consumer.assignments[T0]
    assignment.buffer.put_open(assignment.buffer.take(1)[0][0], 0)
    assert offsets(Pull(consumer, fill_s=2.0).next(Wanted(10, at=1.0), net.now)) == [0]
    assert Pull(consumer, fill_s=2.0).next(Wanted(10, at=1.0), net.now) == Fetch(7, 3.0)


def test_a_batch_does_not_wait_where_memory_is_full() -> None:
    net, member, consumer = scene()
    member.fetch(4)
    consumer.delivery.memory.message_bytes = inf
    assert offsets(Pull(consumer, fill_s=2.0).next(Wanted(10), net.now)) == [0, 1, 2, 3]


def test_nothing_is_waited_for_while_a_lease_of_what_was_collected_ends() -> None:
    net, member, consumer = scene()
    member.fetch(2)
    collected = [run_of(consumer.pull.next(Wanted(2), net.now))]
    pull = Pull(consumer, collected=collected)
    assert isinstance(pull.next(Wanted(10), net.now), Fetch)
    consumer.revocation.revoke(member.assignment(T0), "a test", net.now)
    assert pull.next(Wanted(10), net.now) == End()


def test_threads_share_a_hand() -> None:
    """The second thread gets the rest of the first one's run, then a new run."""
    net, member, consumer = scene()
    hand = Hand()
    member.fetch(3)
    first = run_of(Pull(consumer, hand).next(Wanted(3), net.now))
    assert hand.run is first and consumer.assignments[T0].tracker.in_hand == 3
    member.fetch(3)
    assert run_of(Pull(consumer, hand).next(Wanted(3), net.now)) is first
    first.take(3)
    assert offsets(Pull(consumer, hand).next(Wanted(3), net.now)) == [3, 4, 5]


def test_t4_what_a_hand_has_left_is_not_delivered_while_its_lease_is_not_proven() -> None:
    net, member, consumer = scene()
    hand = Hand()
    member.fetch(3)
    run = run_of(Pull(consumer, hand).next(Wanted(3), net.now))
    run.assignment.lease.stop()
    assert run.has_left
    assert isinstance(Pull(consumer, hand).next(Wanted(3), net.now), Fetch)


def test_a_hand_is_smaller_after_an_interrupt_and_grows_again() -> None:
    net, member, consumer = scene(end=1_000)
    hand = Hand()
    member.fetch(500)
    run = run_of(Pull(consumer, hand).next(Wanted(500), net.now))
    run.take(100)
    hand.in_doubt = True
    hand.settle(consumer, False, hand.in_doubt, net.now)
    assert (hand.run, hand.size, hand.in_doubt) == (None, 200, False)
    assert offsets(Pull(consumer, hand).next(Wanted(200), net.now)) == list(range(100, 300))
    assert hand.size == 400


# -- at most once -------------------------------------------------------------------------------------------------

ONCE: dict[str, object] = {"at_most_once": True, "batch_size": 5}


def claimed(net: Net, member: Member, pull: GrantedPull) -> AwaitGrant:
    """A full batch was requested, and the log has answered."""
    assert pull.next(Wanted(0), net.now) == Fetch(5, None)
    member.fetch(5)
    assert pull.next(Wanted(0, came=5), net.now) == Fetch(0, None)
    step = pull.next(Wanted(0, came=0), net.now)
    assert isinstance(step, AwaitGrant)
    assert step.grant.accepted is None
    member.settle()
    net.run(20)
    assert step.grant.is_answered
    return step


def test_c13_a_batch_is_read_claimed_awaited_and_taken() -> None:
    net, member, consumer = scene(**ONCE)
    pull = GrantedPull(consumer)
    step = claimed(net, member, pull)
    pull.answered(step.grant, net.now)
    run = run_of(pull.next(Wanted(0), net.now))
    assert [message.offset() for message in run.messages] == [0, 1, 2, 3, 4]
    assert run_of(GrantedPull(consumer).next(Wanted(0), net.now)) is run, "as long as something of it is left"
    run.take(5)
    assert pull.next(Wanted(0), net.now) == Fetch(5, None)
    assert consumer.delivery.memory.spent == run.messages


def test_c13_with_nothing_to_claim_it_waits_until_the_time_is_up() -> None:
    net, member, consumer = scene(end=0, **ONCE)
    pull = GrantedPull(consumer, deadline=7.0)
    assert pull.next(Wanted(0), net.now) == Fetch(5, None)
    assert pull.next(Wanted(0, came=0), net.now) == Wait(7.0)
    assert pull.next(Wanted(0, waited=6.9), net.now) == Fetch(5, None)
    assert pull.next(Wanted(0, waited=7.0), net.now) == End()
    net.topic("t", 1, end=2, tid="id")
    member.fetch(5)
    assert pull.next(Wanted(0, waited=7.0), net.now) == Fetch(3, None), "what came last is claimed"


def test_c13_a_thread_that_waits_for_another_ones_messages_requests_nothing_again() -> None:
    net, member, consumer = scene(**ONCE)
    pull, other = GrantedPull(consumer), GrantedPull(consumer)
    step = claimed(net, member, pull)
    assert other.next(Wanted(0), net.now) == Fetch(0, None)
    assert other.next(Wanted(0, came=0), net.now) == step
    pull.answered(step.grant, net.now)
    run = run_of(pull.next(Wanted(0), net.now))
    assert run_of(other.next(Wanted(0), net.now)) is run is step.grant.run
    run.take(5)
    assert pull.next(Wanted(0), net.now) == Fetch(5, None)
    member.fetch(5)
    further = pull.next(Wanted(0, came=0), net.now)
    assert isinstance(further, AwaitGrant)
    other.answered(step.grant, net.now)  # only now its thread gets a turn
    assert not further.grant.is_answered


def test_q34_the_next_batch_is_claimed_before_this_one_is_delivered() -> None:
    net, member, consumer = scene(claim_ahead=True, **ONCE)
    pull = GrantedPull(consumer)
    step = claimed(net, member, pull)
    pull.answered(step.grant, net.now)
    assert pull.next(Wanted(0), net.now) == Fetch(5, None)
    member.fetch(5)
    assert pull.next(Wanted(0, came=5), net.now) == Fetch(0, None)
    assert consumer.delivery.grants.proposed is member.assignment(T0)
    assert run_of(pull.next(Wanted(0, came=0), net.now)) is step.grant.run


def test_q34_what_is_not_there_is_not_claimed_ahead() -> None:
    net, member, consumer = scene(end=8, claim_ahead=True, **ONCE)
    pull = GrantedPull(consumer)
    step = claimed(net, member, pull)
    pull.answered(step.grant, net.now)
    member.fetch(5)
    assert pull.next(Wanted(0), net.now) == Fetch(2, None)
    assert run_of(pull.next(Wanted(0, came=0), net.now)) is step.grant.run
    assert consumer.delivery.grants.proposed is None, "no full batch"
