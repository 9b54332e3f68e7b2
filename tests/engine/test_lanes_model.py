"""Lanes against a naive model: under any sequence of events, each lane is in order and nothing is lost."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import cast

import pytest

from kafka_marshal.client.tries import Call
from kafka_marshal.engine.work.assignment import Assignment
from kafka_marshal.engine.work.lane import Lane
from kafka_marshal.engine.work.lanes import Order
from kafka_marshal.engine.work.run import offset_of
from kafka_marshal.ports import Message
from tests.engine.lanes_bench import FOREVER, Bench, Record


class Model:
    """The model: one partition's log, and all its handlers."""

    KEYS = (b"a", b"b", b"c", None)

    def __init__(self, seed: int, order: Order) -> None:
        self.rng = rng = Random(seed)
        self.order = order
        self.bench = Bench(order)
        offset, self.log = 0, []
        for _ in range(40):
            offset += rng.choice((1, 1, 1, 2, 4))
            self.log.append(cast("Message", Record(0, offset, rng.choice(self.KEYS))))
        self.now = 1.0
        #: Messages delivered at least once whose handler has returned.
        self.ended: set[int] = set()
        #: For each handler: its lane and message, and the run and assignment that it began under.
        self.running: list[tuple[Lane, Message, Call, Assignment]] = []
        #: Queue entries of this run's workers, and of older ones.
        self.queue: list[tuple[Lane, Call]] = []
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
        assert all(self.lane_of(other) != mine for _, other, _, _ in self.running), f"{message} has not waited"
        before = [x for x in self.log if self.lane_of(x) == mine and offset_of(x) < offset_of(message)]
        assert {offset_of(x) for x in before} <= self.ended, f"{message} has overtaken another one"
        self.running.append((lane, message, call, lane.assignment))

    def end_one(self) -> None:
        if not self.running:
            return
        lane, message, call, assignment = self.running.pop(self.rng.randrange(len(self.running)))
        if self.rng.random() < 0.3:
            due = self.now + self.rng.random() if self.rng.random() < 0.9 or call is not self.bench.call else self.now
            is_ready = self.bench.lanes.failed(lane, due, call)
        else:
            self.ended.add(offset_of(message))
            assignment.tracker.mark([message])
            is_ready = self.bench.lanes.done(lane, call)
        if is_ready:
            self.queue.append((lane, call))
        self.bench.in_lanes.returned(self.now)

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
        self.bench.call = Call()
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
@pytest.mark.parametrize("block", range(4))
def test_whatever_happens_in_whatever_order(order: Order, block: int) -> None:
    for seed in range(block * 15, block * 15 + 15):
        model = Model(seed, order)
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
