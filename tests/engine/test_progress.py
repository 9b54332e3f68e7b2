"""C14, P6: what is done, in whatever order, reaches the log; what is done already is not handed out again."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from hypothesis import given
from hypothesis import strategies as st

from kafka_marshal.engine.settings import MAX_IN_HAND_MESSAGES
from kafka_marshal.engine.work.assignment import Assignment
from kafka_marshal.engine.work.tracker import Tracker, offset_of
from kafka_marshal.ports import Message
from rationalizer import ClaimingPartition, CommitRanges, Heartbeat, HeartbeatBatch, ReleasingPartition
from rationalizer.limits import MAX_INTERVALS
from tests.engine.harness import HI, FakeMessage, Member, Net

T0 = ("t", 0)


def working(end: int = 100, missing: Iterable[int] = (), done: Iterable[tuple[int, int]] = ()) -> tuple[Net, Member]:
    """A member at work on t:0, of which the log says that ``done`` is done already."""
    net = Net(cps=1)
    net.topic("t", 1, end=end, missing=missing)
    if ranges := tuple(done):
        epoch = net.write(ClaimingPartition("z-1", "z", "g", "t", 0, HI), 0)
        net.write(CommitRanges("z-1", "z", "g", "t", 0, epoch, ranges), 0)
        net.write(ReleasingPartition("z-1", "z", "g", "t", 0, epoch, None), 0)
    member = net.member("a")
    member.consumer("t")
    net.run_until(lambda: member.can_hand_out(T0))
    return net, member


def taken(member: Member, count: int = 100, fetch: int = 100) -> list[FakeMessage]:
    """Messages taken in hand, one by one."""
    member.fetch(fetch)
    found: list[FakeMessage] = []
    while len(found) < count and (run := member.take(1)) is not None:
        found.extend(run.messages)  # type: ignore[arg-type]
    return found


def ranges_sent(net: Net) -> list[tuple[int, int]]:
    return [r for record in net.records(CommitRanges, "a") if isinstance(record, CommitRanges) for r in record.ranges]


# -- C14 ----------------------------------------------------------------------------------------------------------


def test_c14_what_is_done_travels_with_the_beats_at_least_once_per_hi() -> None:
    net, member = working()
    for message in taken(member, 50):
        member.done(message)
        net.run(100)
        if message.at >= 10:
            assert net.world(T0).progress.stable >= message.at - HI / 3 / 100 - 1
    assert not net.records(CommitRanges)


def test_c14_beats_say_nothing_that_the_log_knows() -> None:
    """nil says nothing (E5): a beat repeats no offset."""
    net, member = working()
    member.work()
    net.run(5 * HI)
    told = [r.last_offset for r in net.records(Heartbeat) if isinstance(r, Heartbeat) and r.last_offset is not None]
    assert told == [4]
    assert net.world(T0).progress.stable == 4


def test_c14_a_lost_beat_is_made_good_by_the_next() -> None:
    net, member = working()
    member.work()
    member.drop_appends = True
    net.run(HI / 2)
    assert net.world(T0).progress.stable == -1
    member.drop_appends = False
    net.run(HI / 2)
    assert net.world(T0).progress.stable == 4


def test_c14_the_next_holder_goes_on_at_stable_plus_1() -> None:
    """A crash repeats what was done since the last beat, and nothing else."""
    net, member = working()
    messages = taken(member, 20)
    for message in messages[:7]:
        member.done(message)
    net.run(HI / 2)
    for message in messages[7:12]:
        member.done(message)
    member.kill()
    other = net.member("b")
    other.consumer("t")
    net.run_until(lambda: other.can_hand_out(T0))
    assert [m.at for m in taken(other, 3)] == [7, 8, 9]


def test_c14_a_batch_of_beats_for_many_leases() -> None:
    """One record for all leases of a CP, each with its own offset."""
    net = Net(cps=1)
    net.topic("t", 3, end=10)
    member = net.member("a")
    member.consumer("t")
    net.run(50)
    run = None
    member.fetch(3)
    while (run := member.take(10)) is not None:
        member.done_run(run)
    before = net.count()
    net.run(HI / 3)
    [batch] = net.records()[before:]
    assert isinstance(batch, HeartbeatBatch)
    assert sorted((e.partition, e.last_offset) for e in batch.entries) == [(0, 2), (1, 2), (2, 2)]


def test_a_terminated_member_s_last_words_carry_what_is_done() -> None:
    """Ending without a release, for a fast restart (C7): beats and ranges go out first."""
    net, member = working()
    messages = taken(member, 10)
    for at in (0, 1, 4, 5):
        member.done(messages[at])
    member.engine.last_words(net.now)
    member.settle()
    assert net.world(T0).progress.stable == 1
    assert net.world(T0).progress.ranges == [(4, 5)]
    assert net.world(T0).held


# -- P6 -----------------------------------------------------------------------------------------------------------


def test_p6_islands_are_committed_as_ranges_and_merge() -> None:
    net, member = working()
    messages = taken(member, 20)
    for at in (3, 4, 7):
        member.done(messages[at])
    net.run(HI / 2)
    assert net.world(T0).progress.ranges == [(3, 4), (7, 7)]
    for at in (5, 6, 0):
        member.done(messages[at])
    net.run(HI / 2)
    assert net.world(T0).progress.stable == 0
    assert net.world(T0).progress.ranges == [(3, 7)]
    for at in (1, 2):
        member.done(messages[at])
    net.run(HI / 2)
    assert net.world(T0).progress.stable == 7
    assert net.world(T0).progress.ranges == []


def test_p6_islands_that_do_not_change_are_told_once() -> None:
    net, member = working()
    messages = taken(member, 20)
    member.done(messages[3])
    net.run(5 * HI)
    assert ranges_sent(net) == [(3, 3)]


def test_p6_a_lost_commit_of_ranges_is_sent_again() -> None:
    """The append failed, and nothing changed since: the log must get to know all the same."""
    net, member = working()
    messages = taken(member, 20)
    member.drop_if = lambda record: isinstance(record, CommitRanges)
    member.done(messages[3])
    net.run(HI / 2)
    member.drop_if = lambda record: False
    net.run(1.5 * HI)
    assert net.world(T0).progress.ranges == [(3, 3)]


def test_p6_a_release_hands_in_islands_that_were_lost_before() -> None:
    net, member = working()
    messages = taken(member, 20)
    member.drop_if = lambda record: isinstance(record, CommitRanges)
    member.done(messages[3])
    net.run(HI / 2)
    member.drop_if = lambda record: False
    member.close()
    net.run(50)
    assert not net.world(T0).held
    assert net.world(T0).progress.ranges == [(3, 3)]


def test_p6_what_is_done_is_filtered_and_only_gaps_are_committed() -> None:
    """The contract's own example: stable 40, ranges [43,45],[48,49], fetched 41–50."""
    net, member = working(end=51, done=[(0, 40), (43, 45), (48, 49)])
    messages = taken(member)
    assert [m.at for m in messages] == [41, 42, 46, 47, 50]
    for message in reversed(messages):
        member.done(message)
        net.run(HI / 2)
    assert net.world(T0).progress.stable == 50
    assert net.world(T0).progress.ranges == []
    assert ranges_sent(net) == [(50, 50), (47, 47), (46, 46), (42, 42)]


def test_p6_filtering_within_and_across_fetches() -> None:
    """Whole fetches of what is done, fetches that end within it, and fetches that begin within it."""
    for size in range(1, 12):
        net, member = working(end=30, done=[(3, 8), (10, 10), (12, 20)])
        got: list[int] = []
        for _ in range(40):
            got += [m.at for m in taken(member, fetch=size)]
            net.tick()
        assert got == [0, 1, 2, 9, 11, *range(21, 30)], f"fetches of {size}"


def test_p6_offsets_that_kafka_never_delivers_are_done_with_the_next_one() -> None:
    net, member = working(end=20, missing=[0, 1, 5, 6, 7, 18, 19])
    messages = taken(member)
    assert [m.at for m in messages] == [2, 3, 4, *range(8, 18)]
    member.done(messages[0])
    net.run(HI / 2)
    assert net.world(T0).progress.stable == 2, "0 and 1 never come"
    member.done(messages[3])
    net.run(HI / 2)
    assert net.world(T0).progress.ranges == [(5, 8)]
    for message in messages:
        member.done(message)
    net.run(HI / 2)
    assert net.world(T0).progress.stable == 17, "18 and 19 may still come"


def test_p6_holes_beside_what_is_done_already_are_not_left_open() -> None:
    """41 and 42 never come, and 43 to 45, fetched alone, are done: 46 closes the hole, and stable moves on."""
    for size in (1, 2, 3, 4, 10):
        net, member = working(end=50, missing=[41, 42], done=[(0, 40), (43, 45)])
        got: list[FakeMessage] = []
        for _ in range(20):
            for message in taken(member, fetch=size):
                got.append(message)
                member.done(message)
            net.tick()
        assert [m.at for m in got] == [46, 47, 48, 49]
        net.run(HI / 2)
        assert net.world(T0).progress.stable == 49, f"fetches of {size}"
        assert net.world(T0).progress.ranges == []


def test_p6_a_hole_at_the_end_of_a_fetch() -> None:
    net, member = working(end=50, missing=[44, 48], done=[(0, 40), (43, 43), (47, 47)])
    for size in (1, 2, 3, 5):
        for _ in range(20):
            for message in taken(member, fetch=size):
                member.done(message)
            net.tick()
    net.run(HI / 2)
    assert net.world(T0).progress.stable == 49


def test_p6_more_islands_than_one_record_takes() -> None:
    """10,000 to a CommitRanges; the rest in the next one."""
    net, member = working(end=25_000)
    messages = taken(member, 25_000, fetch=25_000)
    for message in messages[1::2]:
        member.consumers[0].delivery.done(message, net.now)
    net.run(HI)
    records = [r for r in net.records(CommitRanges) if isinstance(r, CommitRanges)]
    assert [len(r.ranges) for r in records] == [10_000, 2_500]
    assert len(net.world(T0).progress.ranges) == 12_500


def test_p5_more_islands_than_the_log_takes_stay_known_here() -> None:
    """Our own book has no limit: what is done stays done, whatever the log refuses."""
    messages: list[Message] = [FakeMessage(T0, at) for at in range(2 * MAX_INTERVALS + 10)]
    tracker: Tracker[Assignment] = Tracker(-1, [(at, at) for at in range(1, 2 * MAX_INTERVALS, 2)])
    tracker.done.commit([(2 * MAX_INTERVALS + 1, 2 * MAX_INTERVALS + 1)], 2**63 - 1)
    assert len(tracker.done.ranges) == MAX_INTERVALS + 1
    assert messages[-1].offset() == 2 * MAX_INTERVALS + 9


def test_nothing_more_is_handed_out_with_too_much_in_hand() -> None:
    """MAX_IN_HAND_MESSAGES keeps the islands below the log's limit; one done() lets the next one out."""
    net, member = working(end=MAX_IN_HAND_MESSAGES + 100)
    messages: list[FakeMessage] = []
    member.fetch(MAX_IN_HAND_MESSAGES + 100)
    while (run := member.take(1_000)) is not None:
        messages.extend(run.messages)  # type: ignore[arg-type]
    assert len(messages) == MAX_IN_HAND_MESSAGES
    member.consumers[0].delivery.done(messages[-1], net.now)
    run = member.take(1_000)
    assert run is not None
    assert len(run.messages) <= 1_000
    assert MAX_IN_HAND_MESSAGES + 1_000 < MAX_INTERVALS


# -- the tracker against a naive one -------------------------------------------------------------------------------


@given(st.data())
def test_any_order_of_done_ends_with_everything_done(data: st.DataObject) -> None:
    """Against a set of offsets: holes, islands, runs of any length, explicit and iterating, in any order."""
    end = data.draw(st.integers(1, 40))
    missing = data.draw(st.sets(st.integers(0, end - 1), max_size=10))
    already = data.draw(st.sets(st.integers(0, end - 1), max_size=15))
    ranges = [(at, at) for at in sorted(already)]
    net, member = working(end=end, missing=missing, done=ranges)
    delivered: dict[int, FakeMessage] = {}
    done: set[int] = set()
    for _ in range(200):
        if data.draw(st.booleans()):
            member.fetch(data.draw(st.integers(1, 7)))
        run = member.take(data.draw(st.integers(1, 9)), iterating=data.draw(st.booleans()))
        if run is None and not any(log.offsets(member.fetching[T0][1], 1) for log in [net.data[T0]]):
            break
        if run is None:
            continue
        offsets = [m.offset() for m in run.messages]
        assert offsets == sorted(set(offsets) - missing - already)  # type: ignore[type-var]
        assert not done & set(offsets)
        if run.iterating:
            gone_through = data.draw(st.integers(0, len(run.messages)))
            handed_out = list(islice(run.walk, gone_through))
            if to_its_end := gone_through == len(run.messages) and data.draw(st.booleans()):
                assert next(run.walk, None) is None
                run.walked(handed_out[-1])
            done.update(offset_of(m) for m in (handed_out if to_its_end else handed_out[:-1]))
            member.leave_run(run)
        else:
            delivered.update({m.at: m for m in run.messages})  # type: ignore[attr-defined, misc]
    for at in data.draw(st.permutations(sorted(delivered))):
        member.done(delivered[at])
        done.add(at)
    net.run(HI)
    progress = net.world(T0).progress
    expected = already | done
    for at in range(end):
        if at in expected:
            assert progress.is_done(at), f"{at} was done"
        elif at not in missing:
            assert not progress.is_done(at), f"{at} was never done"
    assert progress.stable >= max(done, default=-1)
