"""Consumers that handle no open messages: ranges of offsets, and transactions (U3, U6). They pass over none."""

from __future__ import annotations

import pytest

from kafka_marshal.engine.work.ranges import RangeDelivery
from rationalizer import (
    ClaimingPartition,
    CommitEntry,
    CommitOffsets,
    Heartbeat,
    JoinGroup,
    LeaveGroup,
    Outcome,
    Record,
    ReleasingPartition,
    SettleOffsets,
    SettlingMessages,
    Upgrade,
    World,
    codes,
    route_group,
)
from rationalizer.levels import SHARING_LEVEL
from rationalizer.limits import MAX_KEY_HASH
from rationalizer.wire.records import Opened, Parked
from rationalizer.wire.wellformed import START
from tests.engine.groups.test_members import SESSION, join, net_of, works_on
from tests.engine.harness import HI, Member, Net
from tests.engine.scenes import T0, reposition

B, OPERATOR = ("b-1", "b", "g"), ("o-1", "o", "g")
SEEN = 2**62
KEY = MAX_KEY_HASH // 3
PARKED: Parked = ((5, KEY, 5, "Bad"), (12, KEY, 5, "Bad"))


def left(opened: Opened = (), parked: Parked = PARKED, done: int = 9) -> Net:
    """What another worker has left of a partition of 20 messages."""
    net = Net(cps=1)
    net.topic("t", 1, end=20)
    net.write(Upgrade("x", "admin", "any", SHARING_LEVEL), 0)
    epoch = net.write(ClaimingPartition(*B, *T0, HI), 0)
    net.write(SettlingMessages(*B, *T0, epoch, SEEN, open=opened, parked=parked), 0)
    net.write(Heartbeat(*B, *T0, epoch, done), 0)
    net.write(ReleasingPartition(*B, *T0, epoch, None), 0)
    return net


def at_work(net: Net, **options: object) -> Member:
    member = net.member("a")
    member.consumer("t", **options)  # type: ignore[arg-type]
    net.run(2 * HI)
    return member


def ranges_of(net: Net, member: Member, count: int = 100) -> list[tuple[int, int, tuple[tuple[int, int], ...]]]:
    (consumer,) = member.engine.consumers.values()
    assert isinstance(consumer.ranges, RangeDelivery)
    runs = consumer.ranges.take({key: (log.start, log.end) for key, log in net.data.items()}, count, member.clock())
    member.settle()
    for run in runs:
        consumer.ranges.done_range(run.offsets(), member.clock())
    member.settle()
    return [(run.first, run.last, run.left_out) for run in runs]


def held_back(member: Member) -> str:
    """Why it works on nothing."""
    (consumer,) = member.engine.consumers.values()
    assert not member.held()
    (stuck,) = consumer.positions.stuck.lost
    return stuck.text


def test_ranges_leave_out_what_is_set_aside_and_progress_passes_it() -> None:
    net = left()
    member = at_work(net, ranges=True)
    assert ranges_of(net, member) == [(10, 19, ((12, 12),))]
    net.run(HI)
    progress = net.world(T0).progress
    assert progress.stable == 19
    assert [(hole.first, hole.reason) for hole in progress.open] == [(5, "Bad"), (12, "Bad")]


@pytest.mark.parametrize("options", [{"ranges": True}, {"transactions": True}], ids=str)
def test_what_waits_for_another_try_holds_the_partition_back(options: dict[str, object]) -> None:
    net = left(opened=((5, 6, None, 1),), parked=())
    member = at_work(net, **options)
    assert "kafka-marshal discard g t:0:" in held_back(member)
    assert net.world(T0).progress.stable == 9
    net.write(SettlingMessages(*OPERATOR, *T0, None, SEEN, ((5, 6),)), 0)
    net.run_until(lambda: member.held())


def test_a_redrive_holds_ranges_back_until_a_worker_has_handled_it() -> None:
    net = left()
    member = at_work(net, ranges=True)
    assert member.held()
    net.write(SettlingMessages(*OPERATOR, *T0, None, SEEN, open=((5, 5, None, 0),)), 0)
    net.run_until(lambda: not member.held())
    assert "offset 5" in held_back(member)
    reposition(net, 15)
    net.run_until(lambda: member.held())
    assert ranges_of(net, member) == [(16, 19, ())]


def test_a_redrive_at_most_once_loses_none_of_the_ranges_that_were_granted() -> None:
    net = left()
    member = at_work(net, ranges=True, at_most_once=True)
    (consumer,) = member.engine.consumers.values()
    assert isinstance(consumer.ranges, RangeDelivery)
    (run,) = consumer.ranges.take({T0: (0, 20)}, 100, member.clock())
    member.settle()
    net.run(100)
    net.write(SettlingMessages(*OPERATOR, *T0, None, SEEN, open=((5, 5, None, 0),)), 0)
    net.run(HI)
    assert consumer.ranges.collect_range(run, member.clock())
    assert member.held()
    assert consumer.ranges.done_range(run.offsets(), member.clock())
    member.settle()
    net.run_until(lambda: not member.held())
    assert consumer.delivery.grants.unprocessed == []
    assert "offset 5" in held_back(member)


def test_transactions_and_messages_set_aside_are_not_together() -> None:
    net = left()
    assert "kafka-marshal discard g t:0:" in held_back(at_work(net, transactions=True))
    for hole in PARKED:
        net.write(SettlingMessages(*OPERATOR, *T0, None, SEEN, ((hole[0], hole[0]),)), 0)
    (member,) = net.members
    net.run_until(lambda: member.held())


# -- coordinated groups -------------------------------------------------------------------------------------


def left_in_group(opened: Opened = (), parked: Parked = PARKED) -> Net:
    """What a member that has left the group has left of it."""
    net = net_of(1, end=20, level=SHARING_LEVEL)
    home = route_group("g", net.cps)
    world = World(home, net.cps)
    for offset, (stamp, value) in enumerate(net.logs[home]):
        world.apply(offset, stamp, value)

    def write(record: Record) -> Outcome:
        offset = net.write(record, home)
        outcome = world.apply(offset, *net.logs[home][offset])
        assert outcome.code == codes.OK, record
        return outcome

    joined = write(JoinGroup(*B, "", 0, SESSION, "sticky", False, "", (("t", 1),)))
    assert joined.member is not None
    assert joined.generation is not None
    of = (*B, joined.member, joined.generation)
    write(CommitOffsets(*of, False, (CommitEntry(*T0, action=START, through=-1),)))
    write(SettleOffsets(*of, SEEN, *T0, (), opened, parked))
    write(CommitOffsets(*of, False, (CommitEntry(*T0, through=9),)))
    write(LeaveGroup(*of))
    return net


def group_at_work(net: Net, **options: object) -> Member:
    member = join(net, "a", **options)  # type: ignore[arg-type]
    net.run(2 * SESSION)
    return member


def test_a_group_s_ranges_leave_out_what_is_set_aside() -> None:
    net = left_in_group()
    assert ranges_of(net, group_at_work(net, ranges=True)) == [(10, 19, ((12, 12),))]


@pytest.mark.parametrize("options", [{"ranges": True}, {"transactions": True}], ids=str)
def test_what_a_group_has_open_holds_the_partition_back(options: dict[str, object]) -> None:
    net = left_in_group(opened=((5, 5, KEY, 1),), parked=())
    member = group_at_work(net, **options)
    (consumer,) = member.engine.consumers.values()
    assert [stuck.text for stuck in consumer.positions.stuck.lost if "kafka-marshal discard g t:0:" in stuck.text]
    net.write(SettleOffsets(*OPERATOR, "", 0, SEEN, *T0, ((5, 5),)), route_group("g", net.cps))
    net.run_until(lambda: not consumer.positions.stuck.lost and works_on(member))
