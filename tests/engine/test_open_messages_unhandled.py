"""Consumers that handle no open messages: ranges of offsets, and transactions (U3, U6). They pass over none."""

from __future__ import annotations

from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from kafka_marshal.engine.work.open_messages import (
    Entries,
    Goal,
    Mine,
    OpenOffsets,
    Request,
    SettledRequest,
    SettleRequests,
)
from kafka_marshal.engine.work.ranges import RangeDelivery
from rationalizer import (
    ClaimingPartition,
    CommitEntry,
    CommitOffsets,
    Heartbeat,
    JoinGroup,
    LeaveGroup,
    Outcome,
    Progress,
    Record,
    ReleasingPartition,
    SettleOffsets,
    SettlingMessages,
    Upgrade,
    World,
    codes,
    route_group,
)
from rationalizer.holes import NO_OWNER, Hole, Holes
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


# -- What one client wants the log to show of open messages: sent until it is shown, and no longer ----------------


AGAIN = 1_000.0


def log(stable: int, *holes: Hole) -> Progress:
    progress = Progress()
    if stable >= 0:
        progress.through(stable)
    progress.holes = Holes(holes) if holes else None
    return progress


def free(offset: int, attempts: int = 1, last: int | None = None, owner: int = NO_OWNER) -> Hole:
    key_hash = 7 if last is None else -1
    return Hole(offset, offset if last is None else last, owner, 3, attempts, key_hash, None)


def test_it_is_sent_until_the_log_shows_it() -> None:
    settling, park = SettleRequests(), Request(5, 5, Goal.PARKED, 7, 3, "Bad")
    settling.want(park)
    sent = Entries(parked=((5, 7, 3, "Bad"),))
    assert settling.entries(log(-1), 0.0, AGAIN) == sent
    assert settling.entries(log(-1), 999.0, AGAIN) is None
    assert settling.entries(log(-1), 1_000.0, AGAIN) == sent
    assert settling.look(log(-1)) == []
    assert settling.look(log(-1, free(5)._replace(reason="Bad"))) == [SettledRequest(park, True)]
    assert settling.entries(log(-1), 9_000.0, AGAIN) is None


def test_a_refused_entry_that_is_still_wanted_comes_with_the_next_heartbeat() -> None:
    settling = SettleRequests()
    settling.want(Request(5, 5, Goal.OPEN, 7, 2))
    sent = settling.entries(log(-1), 0.0, AGAIN)
    assert sent == Entries(open=((5, 5, 7, 2),))
    assert settling.refused(sent, [codes.FENCED]) == [(5, codes.FENCED)]
    assert settling.entries(log(-1, free(5, 1)), 300.0, AGAIN) == sent
    assert settling.look(log(-1, free(5, 2)))[0].is_shown


def test_what_another_client_has_settled_or_set_aside_has_no_object() -> None:
    settling, tried = SettleRequests(), Request(5, 5, Goal.OPEN, 7, 2)
    for shown in (log(9), log(9, free(5)._replace(reason="by an operator"))):
        settling.want(tried)
        assert settling.look(shown) == [SettledRequest(tried, False)]


def test_done_waits_for_the_hole_that_is_under_way_or_for_progress() -> None:
    """The record that opens it may still come: an entry before it would be rejected, and one after it is needed."""
    settling, done = SettleRequests(), Request(5, 5, Goal.DONE, 7)
    settling.want(done)
    assert settling.entries(log(3), 0.0, AGAIN) is None
    assert settling.look(log(3)) == []
    assert settling.entries(log(3, free(5)), 10.0, AGAIN) == Entries(done=((5, 5),))
    assert settling.look(log(3, free(5))) == []
    assert settling.look(log(5)) == [SettledRequest(done, True)]


def test_of_a_batch_what_is_done_goes_out_in_ranges_and_only_what_is_ours() -> None:
    settling = SettleRequests(owner=70)
    for first, last in ((100, 147), (148, 150), (152, 199)):
        settling.want(Request(first, last, Goal.DONE, None))
    mine, other = free(100, 1, 199, 70), free(190, 2, 199, 64)
    assert settling.entries(log(299, mine), 0.0, AGAIN) == Entries(done=((100, 150), (152, 199)))
    assert settling.entries(log(299, mine._replace(last=189), other), 2_000.0, AGAIN) == Entries(
        done=((100, 150), (152, 189))
    )
    found = settling.look(log(299, other))
    assert [(each.request.first, each.is_shown) for each in found] == [(100, True), (148, True), (152, False)]


def test_what_is_wanted_later_replaces_it_once_what_was_sent_is_applied() -> None:
    """Until then its ``seen`` lies below that record: it would be rejected."""
    settling = SettleRequests()
    settling.want(Request(5, 5, Goal.OPEN, 7, 2))
    sent = settling.entries(log(-1), 0.0, AGAIN)
    settling.want(Request(5, 5, Goal.PARKED, 7, 5, "Bad"))
    assert settling.behind_since == 0.0
    assert settling.entries(log(-1), 1.0, AGAIN) is None
    assert settling.look(log(-1, free(5, 2))) == []
    assert sent is not None
    assert settling.refused(sent, [codes.OK]) == []
    assert settling.entries(log(-1, free(5, 2)), 2.0, AGAIN) == Entries(parked=((5, 7, 5, "Bad"),))
    settling.forget(5)
    assert not len(settling)
    settling.want(Request(6, 6, Goal.OPEN, 7, 2))
    settling.entries(log(-1), 0.0, AGAIN)
    settling.want(Request(6, 6, Goal.OPEN, 7, 1))
    assert settling.entries(log(-1), AGAIN, AGAIN) == Entries(open=((6, 6, 7, 1),)), "the first one was lost"


def test_fewer_tries_are_shown_when_the_log_has_no_more_than_these() -> None:
    settling, back = SettleRequests(), Request(5, 5, Goal.OPEN, 7, 1)
    settling.want(back)
    assert settling.look(log(-1, free(5, 2))) == []
    assert settling.look(log(-1, free(5, 1))) == [SettledRequest(back, True)]


# What is to be fetched again of a partition: as in a plain set of offsets, and in few steps for each message.


#: As many as may be open of one partition (H5).
MANY = 10_000


class Counted(list[Mine]):
    """Counts the items that are read."""

    looks = 0

    def __getitem__(self, at: Any) -> Any:
        self.looks += 1
        return super().__getitem__(at)

    def __iter__(self) -> Any:
        for each in super().__iter__():
            self.looks += 1
            yield each


def opened() -> OpenOffsets:
    holder: Any = SimpleNamespace(is_read=False)
    return OpenOffsets(holder)


@pytest.mark.parametrize("seed", range(20))
def test_what_is_fetched_is_what_a_plain_set_has(seed: int) -> None:
    random, made, plain = Random(seed), opened(), dict[int, int]()
    for number in range(300):
        first = random.randrange(60)
        last = first + random.choice([0, 0, 1, 5, 20])
        if random.random() < 0.6:
            made._read(Mine(first, last, number, 1))
            plain |= dict.fromkeys(range(first, last + 1), number)
        else:
            made._stop_reading(first, last)
            plain = {offset: of for offset, of in plain.items() if not first <= offset <= last}
        found = {offset: each.key_hash for each in made.reading for offset in range(each.first, each.last + 1)}
        assert found == plain
        assert made.reading == sorted(made.reading)
        assert sum(each.last + 1 - each.first for each in made.reading) == len(plain), "none twice"


def test_ten_thousand_redriven_at_once_take_few_steps_each() -> None:
    made = opened()
    made.reading = looked_at = Counted()
    for offset in range(0, 2 * MANY, 2):
        made._read(Mine(offset, offset, 1, 5))
    for offset in range(0, 2 * MANY, 2):
        made._read(Mine(offset, offset, 1, 5))
    assert made.reading is looked_at
    assert len(looked_at) == MANY
    assert looked_at.looks < 100 * 2 * MANY
