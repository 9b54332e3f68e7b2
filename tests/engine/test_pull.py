"""The steps of a thread that wants messages, without any thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import inf

import pytest

from kafka_marshal.engine.awaited import AWAITED, Awaited, awaited
from kafka_marshal.engine.settings import CheckpointOptions, GroupOptions, SharingOptions
from kafka_marshal.engine.shares.taking import LINGER_MS
from kafka_marshal.engine.work.assignment import Run
from kafka_marshal.engine.work.consumer import ConsumerEngine
from kafka_marshal.engine.work.pull import (
    READ_BETWEEN_TURNS,
    AwaitGrant,
    Fetch,
    GrantedPull,
    Hand,
    Pull,
    PullEnd,
    Step,
    Take,
    Wait,
    Wanted,
)
from tests.engine.groups.test_members import SESSION, join, net_of, works_on
from tests.engine.harness import HI, Member, Net
from tests.engine.scenes import T0, working
from tests.engine.sharers import TOPIC, shared_net


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
    assert pull.next(Wanted(10, at=8.0, came=0, waited=7.0), net.now) == PullEnd()
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


def test_batches_of_several_partitions_wait_at_the_same_time() -> None:
    net, member, consumer = scene(partitions=2)
    member.fetch(4)
    first = Pull(consumer, fill_s=2.0)
    assert first.next(Wanted(10, at=5.0), net.now) == Fetch(6, 7.0)
    net.run(2_000)
    before = run_of(first.next(Wanted(10, at=7.0), net.now)).assignment.key
    second = run_of(Pull(consumer, fill_s=2.0).next(Wanted(10, at=7.0), net.now))
    assert {before, second.assignment.key} == {T0, ("t", 1)}, "it has been there for as long"


def test_what_a_full_batch_left_waits_for_others_anew() -> None:
    net, member, consumer = scene()
    member.fetch(14)
    net.run(2_000)
    assert offsets(Pull(consumer, fill_s=2.0).next(Wanted(10, at=7.0), net.now)) == list(range(10))
    assert Pull(consumer, fill_s=2.0).next(Wanted(10, at=7.0), net.now) == Fetch(6, 9.0)


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
    assert pull.next(Wanted(10), net.now) == PullEnd()


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
    assert pull.next(Wanted(0, waited=7.0), net.now) == PullEnd()
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


# What a member waits for: its reader then reads at once. Each reason begins and ends with what it is about.


#: Turns a scene: yields a member while it waits for this, and then once it does not.
Scene = Iterator[Member]


def what(member: Member) -> set[Awaited]:
    now = member.clock()
    return {each for each, is_awaited in AWAITED.items() if is_awaited(member.engine, now)}


def joining() -> Scene:
    net = net_of()
    yield (a := join(net, "a"))
    net.run_until(lambda: works_on(a) == {0, 1, 2, 3})
    yield a


def joining_again_after_an_eviction() -> Scene:
    net = net_of()
    a = join(net, "a")
    net.run_until(lambda: works_on(a) == {0, 1, 2, 3})
    a.paused = True
    b = join(net, "b")
    net.run_until(lambda: works_on(b) == {0, 1, 2, 3})
    a.paused = False
    a.turn()
    yield a
    net.run_until(lambda: works_on(a))
    net.run(HI)
    yield a


def claiming() -> Scene:
    net = Net(cps=1)
    net.topic("t", 2, end=10)
    a = net.member("a")
    a.consumer("t")
    yield a
    net.run_until(lambda: len(a.held()) == 2)
    net.run(HI)
    yield a


def taking_a_batch() -> Scene:
    net = shared_net(end=0)
    a = net.member("a")
    a.consumer(TOPIC, sharing=SharingOptions())
    net.run(HI)
    net.data[TOPIC, 0].end = 10
    a.fetch()
    net.now += 2 * LINGER_MS
    a.settle()
    yield a
    net.run_until(lambda: (a.work(), len(a.handled) == 10)[1])
    net.run(HI)
    yield a


def claiming_by_hand() -> Scene:
    net = Net(cps=1)
    a = net.member("a")
    a.engine.take(None, a.engine.leases.claim, ("t", 0), a.clock())
    a.settle()
    yield a
    net.run_until(lambda: a.held())
    yield a


def _moving(end: int) -> tuple[Net, Member, Member]:
    """b has just joined; a has messages in flight of all that it holds."""
    net = net_of(end=end)
    a = join(net, "a")
    net.run_until(lambda: works_on(a) == {0, 1, 2, 3})
    a.fetch()
    while a.take(1) is not None:
        pass
    b = join(net, "b")
    net.run_until(lambda: b.consumers[0].source.member.joined)  # type: ignore[attr-defined]
    net.run(100)
    return net, a, b


def _finish(net: Net, a: Member, b: Member) -> None:
    for consumer in a.consumers:
        for assignment in list(consumer.assignments.values()):
            for run in list(assignment.tracker.runs.values()):
                a.done_run(run)
    net.run_until(lambda: len(works_on(b)) == 2)
    net.run(HI)


def a_piece_of_another() -> Scene:
    net, a, b = _moving(end=4)
    yield b
    _finish(net, a, b)
    yield b


def releasing_a_piece() -> Scene:
    net, a, b = _moving(end=4)
    yield a
    _finish(net, a, b)
    yield a


def releasing_a_lease() -> Scene:
    net = Net(cps=1)
    net.topic("t", 1, end=10)
    a = net.member("a")
    a.consumer("t")
    net.run_until(lambda: a.held())
    a.fetch(1)
    run = a.take(1)
    assert run is not None
    net.pause(10 * HI)
    net.tick()
    yield a
    a.done_run(run)
    net.pause(0)
    net.run_until(lambda: a.held())
    net.run(HI)
    yield a


def a_checkpoint() -> Scene:
    net = net_of(end=10, level=3)
    a = net.member("a")
    a.consumer("t", group=GroupOptions("sticky", SESSION, checkpoints=CheckpointOptions(every_ms=None)))
    net.run_until(lambda: works_on(a) == {0, 1, 2, 3})
    net.run(HI)
    assert what(a) == set()
    checkpoints = a.consumers[0].source.checkpoints
    assert checkpoints is not None
    a.engine.take(a.consumers[0].number, checkpoints.take, a.clock())
    a.settle()
    yield a
    net.run(HI)
    yield a


def a_pause() -> Scene:
    net = Net(cps=1)
    net.topic("t", 1)
    a = net.member("a")
    a.consumer("t")
    net.run_until(lambda: a.held())
    net.pause(10 * HI)
    net.run_until(lambda: not a.held())
    net.run(HI)
    yield a
    net.pause(0)
    net.run_until(lambda: a.held())
    net.run(HI)
    yield a


SCENES: list[tuple[Awaited, Callable[[], Scene]]] = [
    (Awaited.JOIN, joining),
    (Awaited.JOIN, joining_again_after_an_eviction),
    (Awaited.CLAIM, claiming),
    (Awaited.CLAIM, claiming_by_hand),
    (Awaited.PIECE, a_piece_of_another),
    (Awaited.RELEASE, releasing_a_piece),
    (Awaited.RELEASE, releasing_a_lease),
    (Awaited.CHECKPOINT, a_checkpoint),
    (Awaited.PAUSE, a_pause),
    (Awaited.BATCH, taking_a_batch),
]


@pytest.mark.parametrize(("reason", "scene"), SCENES, ids=lambda x: x.__name__ if callable(x) else str(x.name))
def test_a_member_waits_for_it_as_long_as_it_is_not_there(reason: Awaited, scene: Callable[[], Scene]) -> None:
    turns = scene()
    member = next(turns)
    assert reason in what(member)
    assert awaited(member.engine, member.clock()) is not None
    member = next(turns)
    assert what(member) == set()
    assert awaited(member.engine, member.clock()) is None


def test_each_reason_has_its_scene() -> None:
    assert {reason for reason, _ in SCENES} == set(Awaited) == set(AWAITED)


def test_an_engine_that_has_ended_waits_for_nothing() -> None:
    net = net_of()
    member = join(net, "a")
    member.engine.fail(RuntimeError("over"), member.clock())
    assert awaited(member.engine, member.clock()) is None
