"""Lanes of many handlers of one consumer: their order, messages in flight, and what comes back."""

from __future__ import annotations

from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kafka_marshal.client.tries import Call
from kafka_marshal.engine.settings import MAX_IN_HAND_MESSAGES
from kafka_marshal.engine.work.assignment import Assignment, Run, Stage, Tracker
from kafka_marshal.engine.work.consumer import Cutting
from kafka_marshal.engine.work.lane import HANGS_MS, HeldBack, lasting
from kafka_marshal.engine.work.lanes import Order
from kafka_marshal.engine.work.tracker import Buffer
from kafka_marshal.ports import Message
from tests.engine.lanes_bench import Bench, Record, records


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_a_key_is_a_lane(bench: Bench) -> None:
    one = bench.assignment()
    lanes = bench.spread(one, records("aabbac"))
    assert [lane.key for lane in lanes] == [b"a", b"b", b"c"]
    assert bench.counts() == (3, 0)
    assert [bench.begin(lane) for lane in lanes] == [0, 2, 5]
    assert bench.counts() == (0, 3)
    a, b, _ = lanes
    assert bench.done(one, b)
    assert bench.begin(b) == 3
    assert bench.done(one, a)
    assert bench.begin(a) == 1
    assert bench.done(one, a)
    assert bench.begin(a) == 4
    assert not bench.done(one, a)
    assert bench.counts() == (0, 2)
    assert bench.spread(one, records("a", first=6))[0] is not a  # it was over


@pytest.mark.parametrize(("order", "ready"), [("key", [0, 1, 3, 4]), ("none", [0, 1, 2, 3, 4, 5]), ("partition", [0])])
def test_orders(order: Order, ready: list[int]) -> None:
    bench = Bench(order)
    lanes = bench.spread(bench.assignment(), records("ab" + "a" + "--" + "b"))
    assert [bench.begin(lane) for lane in lanes] == ready


def test_the_same_key_in_two_partitions_is_two_lanes(bench: Bench) -> None:
    first, second = bench.assignment(0), bench.assignment(1)
    lanes = bench.spread(first, records("a", 0)) + bench.spread(second, records("a", 1))
    assert [bench.begin(lane) for lane in lanes] == [0, 0]


def test_a_failed_message_is_tried_again_before_the_next_of_its_key(bench: Bench) -> None:
    one = bench.assignment()
    a, b = bench.spread(one, records("aab"))
    assert bench.begin(a) == 0
    assert not bench.failed(a, due=5.0)
    assert bench.begin(b) == 2
    assert (bench.lanes.next_due, bench.lanes.due(4.9, bench.call)) == (5.0, [])
    assert bench.lanes.due(5.0, bench.call) == [a]
    assert (bench.begin(a), a.number) == (0, 2)
    assert bench.done(one, a)
    assert (bench.begin(a), a.number) == (1, 1)
    assert bench.counts() == (0, 2)


def test_retries_that_are_due_are_no_reason_not_to_read_on(bench: Bench) -> None:
    one = bench.assignment()
    for lane in bench.spread(one, records("abc")):
        bench.begin(lane)
        bench.failed(lane, due=1.0)
    due = bench.lanes.due(1.0, bench.call)
    assert (len(due), bench.lanes.ready) == (3, 0)
    bench.spread(one, records("d", first=3))
    assert bench.lanes.ready == 1
    assert [bench.begin(lane) for lane in due] == [0, 1, 2]
    assert bench.lanes.ready == 1


def test_t4_nothing_begins_while_the_lease_is_in_doubt_and_all_does_after(bench: Bench) -> None:
    one = bench.assignment()
    lanes = bench.spread(one, records("ab"))
    one.lease.hand_out_until = 10.0
    assert [bench.begin(lane, 10.0) for lane in lanes] == [None, None]
    assert bench.counts() == (0, 0)
    assert bench.lanes.reopened(10.0) == []
    one.lease.hand_out_until = 20.0
    assert bench.lanes.reopened(11.0) == lanes
    assert bench.lanes.reopened(11.0) == []
    assert [bench.begin(lane, 11.0) for lane in lanes] == [0, 1]


def test_after_stop_nothing_begins(bench: Bench) -> None:
    (a,) = bench.spread(bench.assignment(), records("a"))
    bench.stop.append(True)
    assert bench.begin(a) is None
    assert bench.counts() == (0, 0)
    assert bench.lanes.reopened(1.0) == []


def test_a_recall_takes_what_waits_and_leaves_what_runs(bench: Bench) -> None:
    one = bench.assignment()
    a, b, c = bench.spread(one, records("aabbc"))
    assert bench.begin(a) == 0
    assert bench.begin(c) == 4
    bench.failed(c, due=5.0)
    bench.in_lanes.recall(one, keep=True)
    assert bench.back == [(0, [1, 2, 3, 4], 1)]
    assert one.tracker.in_hand == 1
    assert bench.begin(b) is None
    assert bench.lanes.due(9.0, bench.call) == []
    assert not bench.done(one, a)
    assert one.tracker.done.stable == 0
    assert not one.tracker.runs
    assert bench.counts() == (0, 0)


def cutting_of(bench: Bench, assignment: Assignment) -> Cutting:
    bench.assignments[assignment.key] = assignment
    delivery = SimpleNamespace(in_lanes=bench.in_lanes)
    return Cutting(cast("Any", SimpleNamespace(assignments=bench.assignments, delivery=delivery)))


def test_x13_what_waits_in_lanes_also_for_its_next_try_is_not_in_flight(bench: Bench) -> None:
    """A cut does not take it back: its tries would begin again at each checkpoint."""
    one = bench.assignment()
    cutting = cutting_of(bench, one)
    a, _, c = bench.spread(one, records("aabbc"))
    assert not cutting.is_in_hand(one.key)
    assert bench.begin(a) == 0
    assert bench.begin(c) == 4
    bench.failed(c, due=5.0)
    assert cutting.is_in_hand(one.key)
    bench.done(one, a)
    assert not cutting.is_in_hand(one.key)
    assert cutting.done_of(one.key).stable == 0
    assert bench.lanes.due(9.0, bench.call) == [c]


def test_x13_a_message_that_its_handler_has_ended_is_in_flight_until_it_is_known_as_done(bench: Bench) -> None:
    one = bench.assignment()
    cutting = cutting_of(bench, one)
    messages = records("a")
    (a,) = bench.spread(one, messages)
    assert bench.begin(a) == 0
    bench.lanes.done(a, bench.call)  # another thread; its report of the message waits for the lock
    assert cutting.is_in_hand(one.key)
    one.tracker.mark(messages)
    assert not cutting.is_in_hand(one.key)


def test_x13_a_held_up_share_closes_its_gaps_and_begins_nothing_else(bench: Bench) -> None:
    """What is done beyond a gap can't be named for some keys: without this it would drain in vain."""
    one = bench.assignment()
    cutting = cutting_of(bench, one)
    a, b, c, d = bench.spread(one, records("abcd"))
    assert bench.begin(b) == 1
    assert bench.begin(c) == 2
    bench.done(one, b)
    one.lease.hand_out_until = 0.0
    cutting.close_gaps(one.key, True)
    bench.done(one, c)
    assert bench.begin(d) is None
    assert bench.begin(a) == 0
    bench.done(one, a)
    assert (cutting.done_of(one.key).stable, cutting.done_of(one.key).ranges) == (2, [])
    assert not cutting.is_in_hand(one.key)
    cutting.close_gaps(one.key, False)
    (e,) = bench.spread(one, records("e", first=4))
    assert bench.begin(e) is None


def test_x16_a_run_that_ends_closes_gaps_where_a_cut_may_have_none(bench: Bench) -> None:
    """Otherwise a member that leaves would wait for a cut that can't come, and repeat what it did since the last."""
    share, whole = bench.assignment(), bench.assignment(1)
    share.lease.is_cut_whole = True  # type: ignore[misc]
    a, b, c, d = bench.spread(share, records("abcd"))
    e, f = bench.spread(whole, records("ef"))
    assert (bench.begin(b), bench.begin(c), bench.begin(f)) == (1, 2, 1)
    bench.done(share, b)
    bench.done(whole, f)
    bench.stop.append(True)
    assert bench.begin(a) is None
    assert bench.lanes.close_gaps()
    assert set(bench.lanes.reopened(1.0)) == {a}
    assert (bench.begin(d), bench.begin(e), bench.begin(a)) == (None, None, 0)
    assert bench.failed(a, due=2.0) is False
    bench.done(share, c)
    assert bench.lanes.reopened(1.0) == [], "what begins no more would be parked, and come, again and again"
    assert bench.lanes.close_gaps(), "its next try is due"
    assert bench.lanes.due(2.0, bench.call) == [a]
    assert bench.begin(a) == 0
    assert bench.lanes.close_gaps(), "it is with a handler"
    bench.done(share, a)
    assert not bench.lanes.close_gaps()
    assert (share.tracker.done.stable, share.tracker.done.ranges) == (2, [])


def test_c10_a_run_that_ends_begins_nothing_in_a_pause(bench: Bench) -> None:
    """Found by the simulation: a member that had to stop within a pause began messages below a gap."""
    share = bench.assignment()
    share.lease.is_cut_whole = True  # type: ignore[misc]
    a, b = bench.spread(share, records("ab"))
    assert bench.begin(b) == 1
    bench.done(share, b)
    bench.stop.append(True)
    assert bench.lanes.close_gaps()
    share.lease.is_paused = True  # type: ignore[misc]
    assert not bench.lanes.close_gaps()
    assert bench.begin(a) is None


def test_what_comes_again_after_a_recall_waits_for_what_runs(bench: Bench) -> None:
    one = bench.assignment()
    messages = records("aab")
    a, _ = bench.spread(one, messages)
    assert bench.begin(a) == 0
    bench.in_lanes.recall(one, keep=True)
    (b,) = bench.spread(one, messages[1:])
    assert bench.begin(b) == 2
    assert bench.done(one, a)
    assert bench.begin(a) == 1


def test_a_partition_that_comes_back_waits_for_old_handlers_of_its_keys(bench: Bench) -> None:
    old = bench.assignment()
    a, _ = bench.spread(old, records("ab"))
    assert bench.begin(a) == 0
    bench.lose(old)
    new = bench.assignment()
    (b,) = bench.spread(new, records("aba"))
    assert bench.begin(b) == 1
    assert bench.lanes.oldest(new) == 1.0
    assert bench.done(new, b) is False
    assert bench.lanes.oldest(new) is None  # the old handler must not end the new lease
    assert bench.failed(a, due=3.0)
    assert (bench.begin(a), a.assignment) == (0, new)
    assert bench.lanes.oldest(new) == 1.0


def test_a_recall_of_an_assignment_that_is_over_leaves_the_next_one_alone(bench: Bench) -> None:
    old = bench.assignment()
    (a,) = bench.spread(old, records("a"))
    bench.begin(a)
    bench.lose(old)
    new = bench.assignment()
    (b,) = bench.spread(new, records("ba"))
    bench.in_lanes.recall(old, keep=False)
    assert bench.begin(b) == 0
    assert new.tracker.in_hand == 2


def test_what_fails_as_its_lease_ends_is_not_tried_again(bench: Bench) -> None:
    """The lease is over, and its waiting messages are recalled a moment later: none may be lost in between."""
    old = bench.assignment()
    (a,) = bench.spread(old, records("a"))
    assert bench.begin(a) == 0
    old.stage = Stage.LOST
    assert not bench.failed(a, due=2.0)
    assert bench.lanes.next_due is None
    bench.lose(old)
    new = bench.assignment()
    (again,) = bench.spread(new, records("a"))
    assert bench.begin(again) == 0


def test_c18_what_failed_after_an_eviction_is_not_in_flight(bench: Bench) -> None:
    """Else the member would wait for it for ever and claim nothing."""
    one = bench.assignment()
    a, b = bench.spread(one, records("ab"))
    assert (bench.begin(a), bench.begin(b)) == (0, 1)
    bench.lose(one)
    assert one.tracker.in_hand == 2
    bench.failed(a)
    bench.in_lanes.returned(1.0)
    assert one.tracker.in_hand == 1
    bench.failed(b)
    bench.in_lanes.returned(1.0)
    assert not one.tracker.runs


def test_what_fails_in_a_partition_that_is_released_is_given_back(bench: Bench) -> None:
    one = bench.assignment()
    (a,) = bench.spread(one, records("aa"))
    assert bench.begin(a) == 0
    one.stage = Stage.REVOKING
    bench.in_lanes.recall(one, keep=False)
    assert one.tracker.in_hand == 1
    bench.failed(a, due=2.0)
    bench.in_lanes.returned(1.0)
    assert not one.tracker.runs
    assert bench.finished == [one]
    assert bench.back == [(0, [0], 0)], "it is here still, should the partition stay"
    assert bench.lanes.due(9.0, bench.call) == []


def next_run(bench: Bench, keep: bool = True) -> Call:
    """End the run and begin another one."""
    bench.lanes.is_ended = True
    for assignment in list(bench.assignments.values()):
        bench.in_lanes.recall(assignment, keep=keep)
    bench.lanes.close(bench.call)
    before, bench.call = bench.call, Call()
    bench.lanes.open(bench.call)
    return before


@pytest.mark.parametrize("is_durable", [True, False])
@pytest.mark.parametrize("how", ["done", "failed", "failed for good"])
def test_a_handler_that_a_run_has_left_behind_returns_in_the_next_one(bench: Bench, how: str, is_durable: bool) -> None:
    one = bench.assignment()
    messages = records("aab")
    a, b = bench.spread(one, messages)
    assert bench.begin(a) == 0
    before = next_run(bench)
    (c,) = bench.spread(one, messages[1:])
    assert bench.lanes.begin(b, 1.0, before) is None  # a worker of the previous run finds it in its queue
    assert bench.counts() == (1, 1)
    if how == "done":
        assert a.message is not None
        assert not one.tracker.mark([a.message])
        assert not bench.lanes.done(a, before)
    else:
        bench.lanes.is_durable = is_durable
        assert not bench.lanes.failed(a, 2.0 if how == "failed" else None, before)
        bench.lanes.is_durable = False
        assert bench.lanes.due(9.0, bench.call) == []
        begun = [each[:2] for each in bench.lanes.tries(one, None, ends=False)]
        assert begun == ([(0, 1)] if is_durable else []), "U1"
    assert bench.counts() == (1, 0)
    assert bench.lanes.reopened(1.0) == [a]  # for the workers of this run
    assert bench.begin(a) == (1 if how == "done" else 0)
    assert a.number == 1
    assert bench.begin(c) == 2


def test_what_a_run_had_ready_is_not_counted_in_the_next_one(bench: Bench) -> None:
    one = bench.assignment()
    a, *_ = bench.spread(one, records("abcdef"))
    bench.begin(a)
    next_run(bench)
    assert bench.counts() == (0, 1)


def test_only_the_run_that_owns_the_lanes_gets_retries(bench: Bench) -> None:
    one = bench.assignment()
    (a,) = bench.spread(one, records("a"))
    bench.begin(a)
    bench.failed(a, due=2.0)
    assert bench.lanes.due(3.0, Call()) == []
    assert bench.lanes.due(3.0, bench.call) == [a]


def test_messages_at_gaps_are_done_with_those_that_are_there(bench: Bench) -> None:
    """Compaction, transaction markers: offsets 0, 1, 4, 6 and 7 are never delivered."""
    one = bench.assignment()
    messages: list[Message] = [Record(0, 2, b"a"), Record(0, 3, b"b"), Record(0, 5, b"a"), Record(0, 8, b"c")]
    a, b, c = bench.spread(one, messages, covers_from=0)
    for lane in (c, b):
        bench.begin(lane)
        bench.done(one, lane)
    assert (one.tracker.done.stable, one.tracker.done.ranges) == (-1, [(3, 3), (6, 8)])
    bench.begin(a)
    bench.done(one, a)
    assert one.tracker.done.stable == 3
    bench.in_lanes.recall(one, keep=True)
    assert bench.back == [(0, [5], 3)]


@pytest.mark.parametrize("seed", range(20))
def test_a_run_shrinks_to_what_is_not_done(bench: Bench, seed: int) -> None:
    """One endless message keeps neither its neighbours in memory nor their progress from the log."""
    rng = Random(seed)
    one, messages = bench.assignment(), cast("list[Message]", [Record(0, 3 * x, str(x).encode()) for x in range(100)])
    lanes = bench.spread(one, messages, covers_from=0)
    stuck = rng.randrange(100)
    rest = [lane for lane in lanes if lane is not lanes[stuck]]
    rng.shuffle(rest)
    left = set(range(100))
    for lane in rest:
        bench.begin(lane)
        bench.done(one, lane)
        left.remove(lanes.index(lane))
        kept = [each for run in one.tracker.runs.values() for each in run.messages]
        assert one.tracker.in_hand == len(left)
        assert len(kept) <= 2 * len(left)
        assert {3 * number for number in left} <= {each.offset() for each in kept}
    assert [run.messages for run in one.tracker.runs.values()] == [[messages[stuck]]]
    below = 3 * (stuck - 1) if stuck else -1
    above = [(3 * stuck + 1, 297)] if stuck < 99 else []
    assert (one.tracker.done.stable, one.tracker.done.ranges) == (below, above)


@pytest.mark.parametrize(
    "count", [20_000, pytest.param(10_000_000, marks=[pytest.mark.campaign, pytest.mark.timeout(900)])]
)
def test_any_number_of_records_pass_one_that_is_stuck(bench: Bench, count: int) -> None:
    one, size = bench.assignment(), 1_000
    stuck, *_ = bench.spread(one, records("s"))
    assert bench.begin(stuck) == 0
    for first in range(1, count, size):
        messages: list[Message] = [
            Record(0, offset, str(offset % 97).encode()) for offset in range(first, first + size)
        ]
        ready = bench.spread(one, messages)
        while ready:
            lane = ready.pop()
            bench.begin(lane)
            if bench.done(one, lane):
                ready.append(lane)
        assert [run.messages for run in one.tracker.runs.values()] == [[stuck.message]]
        assert one.tracker.done.ranges == [(1, first + size - 1)]
        assert bench.counts() == (0, 1)
        assert len(stuck.partition.lanes) == 1


def test_a_partition_has_as_much_in_flight_as_there_is_room_for_all(bench: Bench) -> None:
    one = bench.assignment()
    bench.room = 3
    assert not bench.in_lanes.holds_up(one)
    bench.spread(one, records("aa"))
    assert not bench.in_lanes.holds_up(one)
    bench.spread(one, records("a", first=2))
    assert bench.in_lanes.holds_up(one)
    bench.room = 10**9
    assert not bench.in_lanes.holds_up(one)
    bench.spread(one, records("a" * MAX_IN_HAND_MESSAGES, first=3))
    assert bench.in_lanes.holds_up(one)


@pytest.mark.parametrize("order", ["key", "partition"])
def test_u1_what_comes_before_a_message_that_is_tried_alone_is_tried_before_it(order: Order) -> None:
    bench = Bench(order)
    one, other = bench.assignment(0), bench.assignment(1)
    bench.lanes.watch(one, [1], [1])
    (a,) = bench.spread(one, records("aa"))
    (b,) = bench.spread(other, records("b", 1))
    assert bench.lanes.next_alone(0.0) is None
    assert bench.begin(b) is None
    assert bench.begin(a) == 0
    assert bench.done(one, a)
    found = bench.lanes.next_alone(0.0)
    assert found is not None
    assert found[:3] == (*one.key, 1)
    assert bench.begin(a) is None
    bench.lanes.admit(one, 1)
    assert bench.lanes.reopened(0.0) == [a]
    assert bench.begin(a) == 1
    assert bench.begin(b) is None
    assert not bench.done(one, a)
    assert bench.lanes.reopened(0.0) == []
    assert bench.begin(b) is None
    bench.lanes.admit(one, 1)
    assert set(bench.lanes.reopened(0.0)) == {b}


def test_u1_a_message_that_is_tried_alone_and_hangs_holds_the_others_up_for_ten_seconds() -> None:
    bench = Bench()
    one, other = bench.assignment(0), bench.assignment(1)
    bench.lanes.watch(one, [0], [0])
    (a,), (b,) = bench.spread(one, records("a")), bench.spread(other, records("b", 1))
    assert bench.begin(b) is None
    bench.lanes.admit(one, 0)
    assert bench.begin(a, 1.0) == 0
    assert bench.lanes.reopened(HANGS_MS) == []
    assert bench.lanes.reopened(1.0 + HANGS_MS) == [b]
    assert bench.begin(b, 1.0 + HANGS_MS) == 0


def test_what_is_held_back(bench: Bench) -> None:
    one, other = bench.assignment(0), bench.assignment(1)
    a, b = bench.spread(one, records("abb"))
    (c,) = bench.spread(other, records("c", 1))
    bench.begin(b, 100.0)
    bench.begin(c, 2_000.0)
    bench.failed(b, due=500.0)
    bench.begin(a, 600.0)
    (found,) = bench.lanes.held_back(2_500.0, 1_000.0)
    assert found == HeldBack("t", 0, 0, b"a", 1_900.0, 3, "")
    assert str(found) == "t [0]: held back at offset 0 for 2 s by key b'a'"
    bench.done(one, a)
    (found,) = bench.lanes.held_back(2_500.0, 1_000.0)
    assert found[2:7] == (1, b"b", 2_400.0, 2, "")
    one.stage, one.releasing = Stage.REVOKING, "the group is paused"
    (found,) = bench.lanes.held_back(2_500.0, 1_000.0)
    assert str(found).endswith("by key b'b'; it is to be released (the group is paused), which waits for that")
    one.stage = Stage.RELEASED
    assert bench.lanes.held_back(2_500.0, 1_000.0) == ()


def test_two_handlers_at_one_offset_are_compared(bench: Bench) -> None:
    """A recreated topic has another message at an offset that an old handler still has."""
    old = bench.assignment()
    (a,) = bench.spread(old, records("a"))
    bench.begin(a)
    bench.lose(old)
    (b,) = bench.spread(bench.assignment(), records("b"))
    bench.begin(b)
    assert len(bench.lanes.held_back(5_000.0, 1_000.0)) == 1


@pytest.mark.parametrize(
    ("ms", "text"), [(1_499, "1 s"), (119_000, "119 s"), (180_000, "3 min"), (19_800_000, "5.5 h")]
)
def test_durations_are_for_people(ms: float, text: str) -> None:
    assert lasting(ms) == text


def test_handlers_that_hang_are_found(bench: Bench) -> None:
    a, b = bench.spread(bench.assignment(), records("ab"))
    bench.begin(a, 1.0)
    bench.begin(b, 5.0)
    assert bench.lanes.hanging(5.0) == [a]


@pytest.mark.parametrize("taken", [1, 3])
def test_a_partition_takes_no_more_than_it_leaves_for_all_others(bench: Bench, taken: int) -> None:
    """A partition that takes all free memory at once leaves nothing to the others."""
    one = bench.assignment()
    bench.room = 100
    assert bench.in_lanes.share(one, 1_000) == 50
    bench.spread(one, records("abc"[:taken]))
    bench.room = 100 - taken
    share = bench.in_lanes.share(one, 1_000)
    assert taken + share <= bench.room - share < taken + share + 2


# Messages given up to be read again later must not be delivered twice.


def test_what_is_given_up_begins_after_all_that_is_in_flight() -> None:
    """Else a message in flight would be read and delivered a second time."""
    buffer, tracker = Buffer(), Tracker(-1, ())
    messages = records("a" * 10)
    buffer.put(messages, tracker)
    buffer.take(10)
    for back, covers_from in ((messages[2:3], 1), (messages[6:], 5)):
        buffer.put_back(back, covers_from)
    buffer.give_up(4)
    assert (buffer.size, buffer.first, buffer.fetch_next) == (1, 2, 5)
    buffer.give_up(0)
    assert (buffer.size, buffer.first, buffer.fetch_next) == (0, None, 1)
    assert buffer.is_given_up
    buffer.put(messages[1:], tracker)
    assert not buffer.is_given_up


def test_after_the_end_of_a_run_a_handler_has_had_its_message_since_it_began(bench: Bench) -> None:
    """Not since that was spread: it may have waited in its lane for long, and its lease would be lost."""
    one = bench.assignment()
    (a,) = bench.spread(one, records("aa"))
    bench.begin(a, 300.0)
    assert bench.in_lanes.oldest(one, 350.0) == 300.0
    bench.lanes.is_ended = True
    assert bench.in_lanes.oldest(one, 350.0) == 300.0
    one.tracker.hand_out(Run(one, records("bb", first=2), 2, True, 200.0))
    assert bench.in_lanes.oldest(one, 350.0) == 200.0, "a loop has this one"
    bench.done(one, a)
    bench.in_lanes.recall(one, keep=True)
    assert bench.in_lanes.oldest(one, 350.0) == 200.0
