"""C14, P6: progress in any order reaches the log; messages already done are not delivered again."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kafka_marshal.engine.settings import MAX_IN_HAND_MESSAGES
from kafka_marshal.engine.work.assignment import Assignment
from kafka_marshal.engine.work.run import Run, offset_of
from kafka_marshal.engine.work.tracker import FIRST_READ, InFlight, Tracker, mean_bytes
from kafka_marshal.ports import Message
from rationalizer import ClaimingPartition, CommitRanges, ReleasingPartition
from rationalizer.limits import MAX_INTERVALS
from tests.engine.harness import HI, FakeMessage, Member, Net

T0 = ("t", 0)


def working(end: int = 100, missing: Iterable[int] = (), done: Iterable[tuple[int, int]] = ()) -> tuple[Net, Member]:
    """A member that works on t:0, of which ``done`` is already done by the log."""
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
    """Messages taken one by one."""
    member.fetch(fetch)
    found: list[FakeMessage] = []
    while len(found) < count and (run := member.take(1)) is not None:
        found.extend(run.messages)  # type: ignore[arg-type]
    return found


# -- C14 ----------------------------------------------------------------------------------------------------------


def test_a_terminated_member_s_last_words_carry_what_is_done() -> None:
    """Ending without a release, for a fast restart (C7): heartbeats and ranges are sent first."""
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


def test_p6_filtering_within_and_across_fetches() -> None:
    """Fetches entirely within done offsets, and fetches that end or begin within them."""
    for size in range(1, 12):
        net, member = working(end=30, done=[(3, 8), (10, 10), (12, 20)])
        got: list[int] = []
        for _ in range(40):
            got += [m.at for m in taken(member, fetch=size)]
            net.tick()
        assert got == [0, 1, 2, 9, 11, *range(21, 30)], f"fetches of {size}"


def test_p6_holes_beside_what_is_done_already_are_not_left_open() -> None:
    """41 and 42 don't exist, and 43 to 45, fetched alone, are done: 46 closes the gap, and stable advances."""
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
    """10,000 per CommitRanges; the rest in the next one."""
    net, member = working(end=25_000)
    messages = taken(member, 25_000, fetch=25_000)
    for message in messages[1::2]:
        member.consumers[0].delivery.done([message], net.now)
    net.run(HI)
    records = [r for r in net.records(CommitRanges) if isinstance(r, CommitRanges)]
    assert [len(r.ranges) for r in records] == [10_000, 2_500]
    assert len(net.world(T0).progress.ranges) == 12_500


def test_p5_more_islands_than_the_log_takes_stay_known_here() -> None:
    """Our own record has no limit: done offsets stay done, even if the log rejects them."""
    messages: list[Message] = [FakeMessage(T0, at) for at in range(2 * MAX_INTERVALS + 10)]
    tracker: Tracker[Assignment] = Tracker(-1, [(at, at) for at in range(1, 2 * MAX_INTERVALS, 2)])
    tracker.done.commit([(2 * MAX_INTERVALS + 1, 2 * MAX_INTERVALS + 1)], 2**63 - 1)
    assert len(tracker.done.ranges) == MAX_INTERVALS + 1
    assert messages[-1].offset() == 2 * MAX_INTERVALS + 9


def test_nothing_more_is_delivered_with_too_much_in_flight() -> None:
    """MAX_IN_HAND_MESSAGES keeps the islands below the log's limit; one done() allows the next message."""
    net, member = working(end=MAX_IN_HAND_MESSAGES + 100)
    messages: list[FakeMessage] = []
    member.fetch(MAX_IN_HAND_MESSAGES + 100)
    while (run := member.take(1_000)) is not None:
        messages.extend(run.messages)  # type: ignore[arg-type]
    assert len(messages) == MAX_IN_HAND_MESSAGES
    member.consumers[0].delivery.done([messages[-1]], net.now)
    run = member.take(1_000)
    assert run is not None
    assert len(run.messages) <= 1_000
    assert MAX_IN_HAND_MESSAGES + 1_000 < MAX_INTERVALS


# -- the tracker against a naive one -------------------------------------------------------------------------------


@given(st.data())
def test_any_order_of_done_ends_with_everything_done(data: st.DataObject) -> None:
    """Against a set of offsets: gaps, islands, runs of any length, explicit and iterating, in any order."""
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


# -- Progress of explicit runs may be marked at once or one by one, with the same result --------------------------


@dataclass(frozen=True)
class Lease:
    at_most_once: bool = False


def handed_out(offsets: list[int], size: int) -> tuple[Tracker[Lease], list[FakeMessage]]:
    """A tracker of runs of ``size`` messages each, spread over lanes."""
    tracker: Tracker[Lease] = Tracker(-1, [])
    messages = [FakeMessage(("t", 0), offset) for offset in offsets]
    covers_from = 0
    for first in range(0, len(messages), size):
        run = Run(Lease(), list(messages[first : first + size]), covers_from, False, 0.0)
        run.into_lanes()
        tracker.hand_out(run)
        covers_from = run.last + 1
    return tracker, messages


def known(tracker: Tracker[Lease]) -> object:
    left = [
        offset_of(message)
        for run in tracker.runs.values()
        for message, is_done in zip(run.messages, run.marks, strict=True)
        if not is_done
    ]
    return tracker.done.stable, tracker.done.ranges, tracker.in_hand, sorted(left)


@pytest.mark.parametrize("seed", range(50))
def test_at_once_or_one_by_one(seed: int) -> None:
    """In any order, with gaps without messages, and some twice."""
    rng = Random(seed)
    offsets = sorted(rng.sample(range(200), 120))
    size = rng.choice([1, 7, 50, 120])
    (one, ones), (many, manies) = handed_out(offsets, size), handed_out(offsets, size)
    order = rng.sample(range(len(offsets)), len(offsets))
    order += order[:5]
    while order:
        part, order = order[: (n := rng.randint(1, 60))], order[n:]
        refused = [message.offset() for index in part for message in one.mark([ones[index]])]
        assert [message.offset() for message in many.mark([manies[index] for index in part])] == refused
        assert known(many) == known(one)
    assert known(many) == (offsets[-1], [], 0, [])
    assert many.runs == {}


def test_one_message_keeps_no_others() -> None:
    tracker, messages = handed_out(list(range(1000)), 1000)
    tracker.mark(messages[1:])
    assert [len(run.messages) for run in tracker.runs.values()] == [1]
    assert tracker.mark([messages[5]]) == [messages[5]]
    assert tracker.mark([messages[0]]) == []
    assert tracker.done.stable == 999


def test_what_comes_back_after_many_are_done_covers_what_is_not() -> None:
    """A run whose done messages were dropped is split like any other."""
    tracker, messages = handed_out(list(range(10)), 10)
    tracker.mark([messages[index] for index in (1, 2, 4, 6, 8, 9)])
    [run] = tracker.runs.values()
    back = tracker.split(run, [messages[3], messages[5]])
    assert [[m.offset() for m in part] for part, _ in back] == [[3, 5]]
    assert tracker.in_hand == 2
    tracker.mark([messages[0], messages[7]])
    assert (tracker.done.stable, tracker.done.ranges) == (2, [(4, 4), (6, 9)])


def test_h1_an_open_message_between_those_of_a_run_is_done_in_one_call_with_them() -> None:
    """It is a run by itself, whose offset lies within the other run."""
    tracker: Tracker[Lease] = Tracker(-1, [])
    messages: list[Message] = [FakeMessage(("t", 0), offset) for offset in range(4)]
    around = Run(Lease(), [*messages[:2], messages[3]], 0, False, 0.0)
    opened = Run(Lease(), messages[2:3], 2, False, 0.0)
    opened.is_open = True
    for run in (around, opened):
        run.into_lanes()
        tracker.hand_out(run)
    assert tracker.mark(messages) == []
    assert not tracker.runs
    assert tracker.done.stable == 3


@pytest.mark.parametrize("is_in_lanes", [True, False])
@pytest.mark.parametrize("at", [0, 1])
def test_r2_a_message_of_a_run_comes_again_while_others_of_it_are_in_flight(is_in_lanes: bool, at: int) -> None:
    """It was done, and an operator opened it again: it is the run's first, or what stays of a split begins there."""
    tracker: Tracker[Lease] = Tracker(-1, [])
    messages: list[Message] = [FakeMessage(("t", 0), offset) for offset in range(4)]
    around, again = Run(Lease(), messages, 0, False, 0.0), FakeMessage(("t", 0), at)
    opened = Run(Lease(), [again], at, False, 0.0)
    opened.is_open = True
    if is_in_lanes:
        around.into_lanes()
        opened.into_lanes()
    tracker.hand_out(around)
    assert tracker.mark(messages[at : at + 1]) == []
    tracker.hand_out(opened)
    assert [at for _, at in tracker.split(around, messages[:at])] == [0] * at
    assert tracker.has(opened)
    assert tracker.open_from() == 4 * (1 - at)
    assert tracker.run_at(at) is opened
    assert tracker.mark([*messages[at + 1 :], again]) == []
    assert tracker.mark([again]) == [again]
    assert (tracker.runs, tracker.in_hand, tracker.open_from()) == ({}, 0, 4 * (1 - at))
    assert tracker.done.ranges == ([(1, 3)] if at else [])


# -- Memory limits; one message is always allowed -----------------------------------------------------------------


@pytest.mark.parametrize("at_most_once", [False, True])
@pytest.mark.parametrize("limit", [1, 500, 999, 1_001])
def test_one_message_may_wait_and_one_be_in_flight_however_large_it_is(limit: int, at_most_once: bool) -> None:
    memory = InFlight(limit, at_most_once=at_most_once)
    assert memory.room(0) == FIRST_READ
    memory.read(1, mean_bytes([FakeMessage(("t", 0), 0)]))
    assert memory.room(0) == 1
    assert memory.room(1) == 0
    assert memory.most_in_hand >= 1
