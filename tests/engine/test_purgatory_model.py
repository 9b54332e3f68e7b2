"""Messages that wait for transactions, under any sequence of events: each is committed once, in order, none is lost."""

from __future__ import annotations

import json
import random
from random import Random
from typing import cast

import pytest

from kafka_marshal.engine.work.assignment import Assignment, Stage
from kafka_marshal.engine.work.copies import MOST_BYTES, Copy
from kafka_marshal.engine.work.in_lanes import GATHER_MS, Block, Finished
from kafka_marshal.engine.work.lane import Lane
from kafka_marshal.engine.work.run import offset_of
from kafka_marshal.engine.work.topic_mark import KAFKA_COUNTS
from kafka_marshal.ports import Message
from rationalizer import Progress
from rationalizer.holes import NO_KEY, NO_OWNER, Hole, Holes
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


# A partition's position in a consumer group of Kafka's own: it passes no message that its metadata do not name.


def progress(stable: int, *holes: Hole, ranges: tuple[tuple[int, int], ...] = ()) -> Progress:
    made = Progress()
    made.commit_key_range(0, 2**63 - 1, stable)
    if ranges:
        made.commit(ranges, 1_000)
    made.holes = Holes(holes)
    return made


def hole(first: int, key_hash: int = 7, reason: str | None = None, last: int | None = None) -> Hole:
    return Hole(first, first if last is None else last, NO_OWNER, 1, 2, key_hash, reason)


def test_what_is_written_is_read() -> None:
    whole = Copy.of(progress(99, hole(5), hole(6, reason="ValueError: größe"), ranges=((105, 109),)), "mine")
    assert (whole.offset, whole.position, whole.ahead, whole.metadata) == (5, 100, 5, "mine")
    assert Copy.read(whole.offset, whole.text) == whole


@pytest.mark.parametrize("text", ["", "mine", "kafka-marshal 5 log", "kafka-marshal open messages {", "x" * 4_096])
def test_metadata_of_others_are_theirs(text: str) -> None:
    assert Copy.read(5, text) == Copy(5, 5, metadata=text)


@pytest.mark.parametrize("field", ["continues", "ahead", "open"])
def test_damaged_metadata_restore_nothing(field: str) -> None:
    text = Copy.of(progress(99, hole(5)), None).text
    damaged = json.loads(text.removeprefix("kafka-marshal open messages ")) | {field: ["x"]}
    text = "kafka-marshal open messages " + json.dumps(damaged)
    assert Copy.read(5, text) == Copy(5, 5, metadata=text)


def test_nothing_open_is_one_number() -> None:
    assert Copy.of(progress(99), None) == Copy(100, 100)
    assert Copy.of(progress(99), None).text == ""


def test_a_batch_without_keys_comes_again_with_all_behind_it() -> None:
    """A coordinated group holds open messages by their keys only."""
    found = Copy.of(progress(99, hole(3), hole(50, NO_KEY, last=59)), None)
    assert (found.offset, found.position, found.ahead, found.is_short) == (3, 50, 50, True)
    assert [each.first for each in found.open] == [3]


def test_a_log_without_open_messages_gets_them_all_again() -> None:
    found = Copy.of(progress(99, hole(5), hole(50)), "mine").as_one_number
    assert found == Copy(5, 5, (), 93, "mine")


def test_the_offset_of_transactions_is_in_kafka() -> None:
    exact = Copy.of(progress(99, ranges=((KAFKA_COUNTS, KAFKA_COUNTS),)), None)
    assert not exact.replaces(Copy.read(100, "kafka-marshal 5 log"))
    assert not exact.replaces(Copy.read(150, "kafka-marshal 5 log"))
    assert exact.replaces(Copy(0, 0)), "it has expired"


@pytest.mark.parametrize("seed", range(50))
def test_it_has_room_and_no_message_is_passed(seed: int) -> None:
    rng = random.Random(seed)
    stable = rng.randrange(1_000)
    holes = [
        hole(at, rng.choice([NO_KEY, *[rng.getrandbits(63)] * 300]), rng.choice([None, "reason " * rng.randrange(20)]))
        for at in range(stable + 20)
        if rng.random() < rng.choice([0.01, 0.2])
    ]
    kept = progress(stable, *holes)
    found = Copy.of(kept, "ü" * rng.randrange(100))
    assert len(found.text.encode()) <= MOST_BYTES
    assert Copy.read(found.offset, found.text)[:5] == found[:5]
    named = {each.first for each in found.open}
    for at in range(stable + 20):
        assert kept.is_done(at, 0) or at in named or at >= found.position
        assert kept.is_done(at, 0) or at >= found.offset


def test_which_copy_is_kept() -> None:
    older, newer = Copy.of(progress(89), None), Copy.of(progress(99), None)
    open_one = Copy.of(progress(99, hole(5)), None)
    assert newer.replaces(older) and not older.replaces(newer) and not newer.replaces(newer)
    assert open_one.replaces(newer), "that one passes an open message"
    assert newer.replaces(open_one), "it is done by now"
    assert not Copy.of(progress(89), "mine").replaces(newer), "of a member that is behind"
