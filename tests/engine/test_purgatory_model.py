"""Messages that wait for transactions, under any sequence of events: each is committed once, in order, none is lost."""

from __future__ import annotations

from random import Random
from typing import cast

import pytest

from kafka_marshal.engine.work.assignment import Assignment, Stage
from kafka_marshal.engine.work.in_lanes import GATHER_MS, Block, Finished
from kafka_marshal.engine.work.lane import Lane
from kafka_marshal.engine.work.run import offset_of
from kafka_marshal.ports import Message
from tests.engine.lanes_bench import Bench, Record

KEYS = (b"a", b"b", b"c", None)


class Model:
    """One partition's log, its handlers, and the transactions that were committed."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = Random(seed)
        self.bench = Bench(max_bytes=rng.choice((2_000, 10**9)), put_back=self.put_back)
        self.purgatory = self.bench.in_lanes.purgatory
        self.purgatory.open()
        offset, self.log = 0, []
        for _ in range(60):
            offset += rng.choice((1, 1, 1, 2, 4))
            self.log.append(cast("Message", Record(0, offset, rng.choice(KEYS))))
        self.now, self.ready = 0.0, list[Lane]()
        self.running: list[tuple[Lane, Message]] = []
        self.committed: list[int] = []
        self.block: Block | None = None
        self.assign(-1, [])

    def assign(self, stable: int, ranges: list[tuple[int, int]]) -> None:
        self.one = self.bench.assignment(0, stable, ranges)
        self.fetch()

    def fetch(self) -> None:
        """Again: other objects."""
        self.log = [cast("Message", Record(0, offset_of(each), cast("bytes | None", each.key()))) for each in self.log]
        self.one.buffer.put(self.log, self.one.tracker)

    def put_back(self, assignment: Assignment, messages: list[Message], covers_from: int) -> None:
        assignment.buffer.put_back(messages, covers_from)

    # What may happen.

    def deliver(self) -> None:
        if self.one.buffer.size and self.one.stage is Stage.ACTIVE:
            messages, covers_from = self.one.buffer.take(self.rng.randint(1, 12))
            self.ready += self.bench.spread(self.one, messages, covers_from)

    def begin(self) -> None:
        self.ready += self.bench.lanes.reopened(self.now) + self.bench.lanes.due(self.now, self.bench.call)
        if self.ready:
            lane = self.ready.pop(self.rng.randrange(len(self.ready)))
            message = self.bench.lanes.begin(lane, self.now, self.bench.call)
            if message is not None:
                self.running.append((lane, message))

    def end(self) -> None:
        if self.running:
            lane, message = self.running.pop(self.rng.randrange(len(self.running)))
            finished = Finished(message, self.rng.choice((0, 10, 500)), None)
            self.purgatory.finish([finished], lambda _: None, self.now)
            if self.bench.lanes.done(lane, self.bench.call):
                self.ready.append(lane)

    def fail(self) -> None:
        if self.running:
            lane, _ = self.running.pop(self.rng.randrange(len(self.running)))
            if self.bench.lanes.failed(lane, self.now + 5, self.bench.call):
                self.ready.append(lane)
            self.bench.in_lanes.returned(self.now)

    def take_block(self) -> None:
        found = self.purgatory.next_block(self.rng.random() < 0.3, self.now)
        if isinstance(found, Block):
            assert self.block is None or self.block.run.assignment is not found.run.assignment, "two at a time"
            self.block = found
            done = self.one.tracker.done
            offsets = [offset_of(each) for each in found.run.messages]
            last = offsets[-1]
            assert offsets == [offset_of(x) for x in self.log if done.stable < offset_of(x) <= last], "a gap"
            assert [each.message for each in found.finished] == found.run.messages, "of an earlier delivery"

    def commit(self) -> None:
        if self.block is not None:
            block, self.block = self.block, None
            if self.purgatory.committed(block.run, self.now):
                self.committed += [offset_of(each) for each in block.run.messages]

    def abort(self) -> None:
        if self.block is not None:
            block, self.block = self.block, None
            self.purgatory.failed(block.run, self.rng.choice((0, 1, 5, 500)), self.now)

    def pause(self) -> None:
        self.bench.in_lanes.recall(self.one, keep=True)

    def revoke(self) -> None:
        self.one.stage = Stage.REVOKING
        self.bench.in_lanes.recall(self.one, keep=True)

    def keep(self) -> None:
        self.one.stage = Stage.ACTIVE

    def untake(self) -> None:
        """As ``Delivery.drop``, and then it begins again."""
        self.block = None  # its commit failed
        self.bench.in_lanes.recall(self.one, keep=True)
        self.purgatory.take_back(self.one, 0)
        for run in list(self.one.tracker.runs.values()):
            self.one.tracker.split(run, run.messages)
        stable = self.one.tracker.done.stable
        self.one.begin(stable + 1, stable, list(self.one.tracker.done.ranges))
        self.fetch()

    def lose(self) -> None:
        stable, ranges = self.one.tracker.done.stable, list(self.one.tracker.done.ranges)
        self.bench.lose(self.one)
        self.assign(stable, ranges)

    def run(self, steps: int) -> None:
        often = [self.deliver, self.begin, self.begin, self.begin, self.end, self.end, self.take_block, self.commit]
        rare = [self.fail, self.abort, self.pause, self.revoke, self.keep, self.untake, self.lose]
        for _ in range(steps):
            self.now += self.rng.choice((0.0, 1.0, GATHER_MS))
            self.rng.choice(often if self.rng.random() < 0.93 else rare)()
            flying = sum(len(run.messages) - run.done_count for run in self.one.tracker.runs.values())
            assert self.one.tracker.in_hand == flying

    def drain(self) -> None:
        """Everything goes well from now on."""
        self.keep()
        for _ in range(4_000):
            self.now += 1.0
            for step in (self.deliver, self.begin, self.end, self.take_block, self.commit):
                step()
            if len(self.committed) == len(self.log):
                break


@pytest.mark.parametrize("seed", range(40))
def test_whatever_happens_each_message_is_committed_once_and_in_order(seed: int) -> None:
    model = Model(seed)
    model.run(400)
    model.drain()
    assert model.committed == [offset_of(each) for each in model.log]
    assert model.purgatory.size == 0
