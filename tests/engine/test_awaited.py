"""What a member waits for: its reader then reads at once. Each reason begins and ends with what it is about."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from kafka_marshal.engine.awaited import AWAITED, Awaited, awaited
from kafka_marshal.engine.settings import CheckpointOptions, GroupOptions, SharingOptions
from kafka_marshal.engine.shares.taking import LINGER_MS
from tests.engine.groups.test_members import SESSION, join, net_of, works_on
from tests.engine.harness import HI, Member, Net
from tests.engine.sharers import TOPIC, shared_net

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
    a.engine.take(None, a.engine.leases.claim, ("t", 0))
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
