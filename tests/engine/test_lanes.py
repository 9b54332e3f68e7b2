"""Lanes of many handlers of one consumer: their order, messages in flight, and what comes back."""

from __future__ import annotations

from collections import Counter
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kafka_marshal.client.tries import RunCall
from kafka_marshal.engine.settings import MAX_IN_HAND_MESSAGES
from kafka_marshal.engine.work.assignment import Assignment, Run, Stage, Tracker
from kafka_marshal.engine.work.consumer import Cutting
from kafka_marshal.engine.work.lane import HANGS_MS, HeldBack, Lane, lasting
from kafka_marshal.engine.work.lanes import Order
from kafka_marshal.engine.work.run import offset_of
from kafka_marshal.engine.work.tracker import Buffer
from kafka_marshal.ports import Message
from tests.engine.lanes_bench import FOREVER, Bench, Record, records


@pytest.fixture
def bench() -> Bench:
    return Bench()


@pytest.mark.parametrize(("order", "ready"), [("key", [0, 1, 3, 4]), ("none", [0, 1, 2, 3, 4, 5]), ("partition", [0])])
def test_orders(order: Order, ready: list[int]) -> None:
    bench = Bench(order)
    lanes = bench.spread(bench.assignment(), records("ab" + "a" + "--" + "b"))
    assert [bench.begin(lane) for lane in lanes] == ready


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


def test_u1_what_comes_before_a_logged_try_of_its_key_is_logged_too(bench: Bench) -> None:
    """Two messages of a key have failed in one list. The next owner begins with what is open: both, in order."""
    one = bench.assignment()
    (a,) = bench.spread(one, records("aaa"))
    assert bench.begin(a) == 0
    b = bench.lanes.along(a, 1.0, bench.call)
    assert b is not None
    c = bench.lanes.along(b, 1.0, bench.call)
    assert c is not None

    def logged(*, ends: bool = False) -> list[tuple[int, int]]:
        return sorted(each[:2] for each in bench.lanes.tries(one, None, ends))

    assert logged() == []
    bench.done(one, c)
    bench.failed(b, due=1.0)
    assert logged() == [(0, 1), (1, 1)], "the first one has not returned"
    bench.failed(a, due=1.0)
    assert logged() == [(0, 1), (1, 1)]
    assert [bench.begin(each) for each in bench.lanes.due(1.0, bench.call)] == [None, 0]
    assert logged() == [(0, 1), (1, 1)], "its second try is under way"
    assert logged(ends=True) == [(0, 1), (1, 1)]
    bench.done(one, a)
    assert logged() == [(1, 1)]
    assert bench.lanes.freed(1.0) == [b]
    assert bench.begin(b) == 1
    assert logged() == []


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


def test_only_the_run_that_owns_the_lanes_gets_retries(bench: Bench) -> None:
    one = bench.assignment()
    (a,) = bench.spread(one, records("a"))
    bench.begin(a)
    bench.failed(a, due=2.0)
    assert bench.lanes.due(3.0, RunCall()) == []
    assert bench.lanes.due(3.0, bench.call) == [a]


def test_a_lane_that_handlers_were_given_twice_waits_for_the_time_of_its_next_try(bench: Bench) -> None:
    """An operator settled its first message while it waited for a handler: for its second one it was given again."""
    one = bench.assignment()
    (a,) = bench.spread(one, records("aa"))
    bench.lanes.skip(one, 0)
    assert bench.begin(a) == 1
    bench.failed(a, due=9.0)
    assert bench.begin(a) is None
    assert bench.lanes.due(8.0, bench.call) == []
    assert bench.lanes.due(9.0, bench.call) == [a]
    assert bench.begin(a) == 1


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


def test_u3_an_open_message_that_waited_for_its_time_comes_before_later_ones() -> None:
    """A later one of its key would begin before it."""
    buffer, messages = Buffer(), records("aaaa")
    buffer.put_open(messages[1], 0, is_early=True)
    buffer.put_open(messages[2], 2)
    buffer.put_open(messages[3], 3)
    buffer.release([1])
    buffer.put_open(messages[0], 0)
    taken = [buffer.take(10) for _ in range(buffer.size)]
    assert taken == [([messages[0]], 0), ([messages[1]], 0), ([messages[2]], 2), ([messages[3]], 3)]


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


# -- Lanes against a naive model: under any sequence of events, each lane is in order and nothing is lost ---------


class Model:
    """The model: one partition's log, and all its handlers."""

    KEYS = (b"a", b"b", b"c", None)

    def __init__(self, seed: int, order: Order, batch: int = 1) -> None:
        self.rng = rng = Random(seed)
        self.order = order
        #: A handler has up to this many messages of one key at a time.
        self.batch = batch
        self.batches = 0
        self.bench = Bench(order)
        offset, self.log = 0, []
        for _ in range(40):
            offset += rng.choice((1, 1, 1, 2, 4))
            self.log.append(cast("Message", Record(0, offset, rng.choice(self.KEYS))))
        self.now = 1.0
        #: Messages delivered at least once whose handler has returned.
        self.ended: set[int] = set()
        #: For each handler: its lane and message, and the run and assignment that it began under.
        self.running: list[tuple[Lane, Message, RunCall, Assignment]] = []
        #: Lane → the number of its batch; and batches whose handlers have returned.
        self.batch_of: dict[Lane, int] = {}
        self.returned: set[int] = set()
        #: Queue entries of this run's workers, and of older ones.
        self.queue: list[tuple[Lane, RunCall]] = []
        self.assign()

    def lane_of(self, message: Message) -> object:
        if self.order == "partition":
            return "all"
        key = message.key() if self.order == "key" else None
        return message.offset() if key is None else key

    def assign(self) -> None:
        done = getattr(self, "one", None)
        stable, ranges = (-1, []) if done is None else (done.tracker.done.stable, list(done.tracker.done.ranges))
        self.one = self.bench.assignment(0, stable, ranges)
        self.one.buffer.put(self.log, self.one.tracker)
        self.bench.back.clear()

    # What may happen.

    def take(self) -> None:
        if self.one.buffer.size:
            messages, covers_from = self.one.buffer.take(self.rng.randint(1, 12))
            self.queue += [(lane, self.bench.call) for lane in self.bench.spread(self.one, messages, covers_from)]

    def begin(self) -> None:
        if not self.queue:
            return
        lane, call = self.queue.pop(self.rng.randrange(len(self.queue)))
        message = self.bench.lanes.begin(lane, self.now, call)
        if message is None:
            return
        mine = self.lane_of(message)
        assert call is self.bench.call, "a worker of an older run has begun something"
        assert not lane.assignment.over
        assert self.now < lane.assignment.lease.hand_out_until
        with_handlers = [x for each, x, _, _ in self.running if self.batch_of.get(each) not in self.returned]
        assert all(self.lane_of(other) != mine for other in with_handlers), f"{message} has not waited"
        before = [x for x in self.log if self.lane_of(x) == mine and offset_of(x) < offset_of(message)]
        assert {offset_of(x) for x in before} <= self.ended, f"{message} has overtaken another one"
        self.running.append((lane, message, call, lane.assignment))
        if self.batch > 1:
            self.begin_along(lane, message, call)

    def begin_along(self, lane: Lane, message: Message, call: RunCall) -> None:
        """More messages of the same key, for the same handler."""
        self.batches += 1
        self.batch_of[lane] = self.batches
        follow = [x for x in self.log if self.lane_of(x) == self.lane_of(message) and offset_of(x) > offset_of(message)]
        for _ in range(self.rng.randrange(self.batch)):
            behind = self.bench.lanes.along(lane, self.now, call)
            if behind is None:
                break
            assert not lane.is_single, f"{lane.message} is to be tried by itself"
            assert self.now < behind.assignment.lease.hand_out_until
            assert behind.message is not None
            place = follow.index(behind.message)
            assert {offset_of(x) for x in follow[:place]} <= self.ended, "not the next of its key"
            follow = follow[place + 1 :]
            self.running.append((behind, behind.message, call, behind.assignment))
            self.batch_of[behind] = self.batches
            lane = behind

    def end_one(self) -> None:
        if not self.running:
            return
        place = self.rng.randrange(len(self.running))
        if self.running[place][0].behind in [each for each, *_ in self.running]:
            return  # the last one of a batch is settled first
        lane, message, call, assignment = self.running.pop(place)
        self.returned.add(self.batch_of.get(lane, -1))
        if self.batch > 1 and self.rng.random() < 0.3:
            is_ready = self.bench.lanes.apart(lane, call, is_single=self.rng.random() < 0.5)
        elif self.rng.random() < 0.3:
            due = self.now + self.rng.random() if self.rng.random() < 0.9 or call is not self.bench.call else self.now
            is_ready = self.bench.lanes.failed(lane, due, call)
        else:
            self.ended.add(offset_of(message))
            assignment.tracker.mark([message])
            is_ready = self.bench.lanes.done(lane, call)
        if is_ready:
            self.queue.append((lane, call))
        self.bench.in_lanes.returned(self.now)
        self.queue += [(lane, self.bench.call) for lane in self.bench.lanes.freed(self.now)]

    def time(self) -> None:
        self.now += self.rng.random()
        found = self.bench.lanes.due(self.now, self.bench.call) + self.bench.lanes.reopened(self.now)
        self.queue += [(lane, self.bench.call) for lane in found]

    def doubt(self) -> None:
        self.one.lease.hand_out_until = self.rng.choice((self.now, FOREVER))

    def recall(self) -> None:
        self.bench.in_lanes.recall(self.one, keep=True)
        runs = {offset_of(message) for _, message, _, assignment in self.running if assignment is self.one}
        left = [offset_of(x) for run in self.one.tracker.runs.values() for x in run.messages if not self.is_done(x)]
        assert sorted(left) == sorted(runs)
        by_offset = {offset_of(x): x for x in self.log}
        for _, offsets, covers_from in self.bench.back:
            self.one.buffer.put_back([by_offset[offset] for offset in offsets], covers_from)
        self.bench.back.clear()

    def lose(self) -> None:
        self.bench.lose(self.one)
        self.assign()

    def run_again(self) -> None:
        self.bench.lanes.is_ended = True
        self.recall()
        self.bench.lanes.close(self.bench.call)
        if self.rng.random() < 0.3:
            self.end_one()
        self.bench.call = RunCall()
        self.bench.lanes.open(self.bench.call)

    def is_done(self, message: Message) -> bool:
        return self.one.tracker.done.is_done(offset_of(message))

    # What must hold.

    def check(self) -> None:
        lanes, tracker = self.bench.lanes, self.one.tracker
        assert lanes.running == len(self.running)
        assert lanes.ready == sum(call is self.bench.call and lane.number == 1 for lane, call in self.queue)
        in_hand = [offset_of(x) for run in tracker.runs.values() for x in run.messages if not self.is_done(x)]
        assert len(in_hand) == len(set(in_hand)) == tracker.in_hand, "a message is in hand twice, or not counted"
        done = {offset_of(x) for x in self.log if self.is_done(x)}
        assert done <= self.ended, "done, and no handler has returned"
        assert len(done) + len(in_hand) + self.one.buffer.size == len(self.log), "a message is lost"

    def finish(self) -> None:
        """Stop faults: everything ends and is done."""
        self.one.lease.hand_out_until = FOREVER
        self.rng.random = lambda: 0.9  # type: ignore[method-assign]
        for _ in range(1_000):
            for step in (self.take, self.time, self.begin, self.end_one):
                step()
                self.check()
            if self.one.tracker.done.stable == offset_of(self.log[-1]):
                break
        assert self.one.tracker.done.stable == offset_of(self.log[-1])
        assert not self.one.tracker.runs
        assert self.bench.lanes.running == len(self.running) == 0


@pytest.mark.parametrize("order", ["key", "partition", "none"])
@pytest.mark.parametrize("batch", [1, 5])
@pytest.mark.parametrize("block", range(4))
def test_whatever_happens_in_whatever_order(order: Order, batch: int, block: int) -> None:
    for seed in range(block * 15, block * 15 + 15):
        model = Model(seed, order, batch)
        often = [model.take, model.begin, model.begin, model.end_one, model.end_one, model.time, model.time]
        seldom = [model.doubt, model.recall, model.lose, model.run_again]
        met: Counter[str] = Counter()
        for _ in range(model.rng.randint(20, 250)):
            step = model.rng.choice(often if model.rng.random() < 0.9 else seldom)
            step()
            met[step.__name__] += 1
            try:
                model.check()
            except AssertionError as error:
                raise AssertionError(f"seed {seed}, after {step.__name__}: {error}") from error
        model.finish()
