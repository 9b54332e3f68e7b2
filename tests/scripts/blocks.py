"""The commands of scripts about messages that wait for a transaction (`kafka_marshal/engine/work/in_lanes.py`).

partition [at=40] [done=45-49]      a new one: everything below 40 is done, and these offsets, too
deliver 40-49 [keys=aab]            to lanes, one key each (or these keys, over and over)
begin 40 45-47                      handlers get these
end 45-47 [bytes=10]                they return, and each has produced this much
fail 40                             it raises: its next try is due later
wait 100                            time passes (ms)
block [urgent]                      a thread asks for the next transaction
commit, abort [most=1]              the transaction of the last block is committed; or not: it comes again, or, with
                                    `most`, is tried again in blocks of at most that many
revoke, pause, lose, close          the partition is to be released; handed back by the user; lost; the run ends
untake                              its producer is lost, and all in flight is dropped, as in `Delivery.drop`
room 3                              room for this many more messages in flight: is more of the partition delivered?
buffer                              what is delivered next
state                               the position, and what is in flight: handled messages wait for a transaction
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kafka_marshal.engine.work.assignment import Assignment, Stage
from kafka_marshal.engine.work.in_lanes import Block, Finished
from kafka_marshal.engine.work.lane import Lane
from kafka_marshal.engine.work.run import offset_of
from kafka_marshal.engine.work.tracker import Buffer
from kafka_marshal.ports import Message
from tests.engine.lanes_bench import Bench, Record
from tests.scripts.records import options_of


def offsets_of(words: Iterable[str]) -> list[int]:
    found: list[int] = []
    for word in words:
        first, _, last = word.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def spans_of(offsets: Iterable[int]) -> str:
    spans: list[list[int]] = []
    for offset in offsets:
        if spans and offset == spans[-1][1] + 1:
            spans[-1][1] = offset
        else:
            spans.append([offset, offset])
    return " ".join(f"{first}-{last}" if last > first else str(first) for first, last in spans) or "none"


class Blocks:
    """One partition, its lanes, and the thread that commits."""

    def __init__(self) -> None:
        self.now = 0.0
        self._start()

    def _start(self, at: int = 0, done: list[tuple[int, int]] | None = None) -> None:
        self.bench = bench = Bench(put_back=self._put_back)
        self.purgatory = bench.in_lanes.purgatory
        self.purgatory.open()
        self.one: Assignment = bench.assignment(0, at - 1, done or [])
        self.one.buffer = Buffer()
        self.lanes: dict[int, Lane] = {}
        self.messages: dict[int, Message] = {}
        self.running: dict[int, Lane] = {}
        self.printed: list[str] = []
        self.block: Block | None = None
        self.ignored: list[int] = []

    def _put_back(self, assignment: Assignment, messages: list[Message], covers_from: int) -> None:
        assignment.buffer.put_back(messages, covers_from)
        self.printed.append(f"comes again: {spans_of(map(offset_of, messages))}")

    def play(self, line: str) -> Iterator[str]:
        name, *words = line.split()
        yield from getattr(self, f"do_{name}")(*options_of(words)) or ()
        yield from self.printed
        self.printed.clear()
        if self.ignored:
            yield f"counts for nothing: {spans_of(self.ignored)}"
            self.ignored.clear()
        if self.bench.finished and self.one.stage is Stage.REVOKING and not self.one.tracker.runs:
            yield f"is released at {self.position}"
        self.bench.finished.clear()

    @property
    def position(self) -> int:
        return self.one.tracker.done.stable + 1

    def do_partition(self, _: list[str], options: dict[str, str]) -> None:
        spans = [tuple(map(int, each.split("-"))) for each in options.get("done", "").split(",") if each]
        self._start(int(options.get("at", 0)), spans)  # type: ignore[arg-type]

    def do_deliver(self, words: list[str], options: dict[str, str]) -> None:
        offsets, keys = offsets_of(words), options.get("keys")
        fetched = [self.one.buffer.first is not None and o >= (self.one.buffer.first or 0) for o in offsets]
        if all(fetched) and self.one.buffer.size:
            messages, covers_from = self.one.buffer.take(len(offsets))
            assert [offset_of(each) for each in messages] == offsets, "something else comes next"
        else:
            messages = [
                Record(0, offset, (keys[place % len(keys)] if keys else str(offset)).encode())
                for place, offset in enumerate(offsets)
            ]
            covers_from = max(self.one.tracker.in_hand_to + 1, self.position)
        self.bench.spread(self.one, messages, covers_from)
        self.messages |= {offset_of(each): each for each in messages}

    def do_begin(self, words: list[str], _: dict[str, str]) -> None:
        self.bench.lanes.due(self.now, self.bench.call)
        for offset in offsets_of(words):
            lane = self.bench.lanes._partitions[self.one.key].lanes[self.messages[offset].key()]
            found = self.bench.begin(lane, self.now)
            if found != offset:
                raise ValueError(f"the lane has {found}")
            self.running[offset] = lane

    def do_end(self, words: list[str], options: dict[str, str]) -> None:
        for offset in offsets_of(words):
            each = Finished(self.messages[offset], int(options.get("bytes", 0)), f"o{offset}")
            self.purgatory.finish([each], lambda message: self.ignored.append(offset_of(message)), self.now)
            self.bench.lanes.done(self.running.pop(offset), self.bench.call)

    def do_fail(self, words: list[str], _: dict[str, str]) -> None:
        for offset in offsets_of(words):
            self.bench.failed(self.running.pop(offset), self.now + 1_000)
        self.bench.in_lanes.returned(self.now)

    def do_wait(self, words: list[str], _: dict[str, str]) -> None:
        self.now += float(words[0])

    def do_block(self, words: list[str], _: dict[str, str]) -> Iterator[str]:
        found = self.purgatory.next_block("urgent" in words, self.now)
        if isinstance(found, Block):
            self.block = found
            held = [each.held for each in found.finished]
            assert held == [f"o{offset_of(each)}" for each in found.run.messages]
            yield f"transaction: {spans_of(map(offset_of, found.run.messages))}, then {found.run.last + 1}"
        elif found == float("inf"):
            yield "nothing"
        else:
            yield f"nothing for {found - self.now:g} ms"

    def do_commit(self, _: list[str], __: dict[str, str]) -> Iterator[str]:
        assert self.block is not None
        if not self.purgatory.committed(self.block.run, self.now):
            yield "it was dropped meanwhile"

    def do_abort(self, _: list[str], options: dict[str, str]) -> None:
        assert self.block is not None
        self.purgatory.failed(self.block.run, int(options.get("most", 0)), self.now)

    def do_revoke(self, _: list[str], __: dict[str, str]) -> None:
        self.one.stage = Stage.REVOKING
        self.bench.in_lanes.recall(self.one, keep=True)
        self.bench.finished.append(self.one)

    def do_pause(self, _: list[str], __: dict[str, str]) -> None:
        self.bench.in_lanes.recall(self.one, keep=True)

    def do_lose(self, _: list[str], __: dict[str, str]) -> None:
        self.bench.lose(self.one)

    def do_close(self, _: list[str], __: dict[str, str]) -> None:
        self.purgatory.close(self.now)

    def do_untake(self, _: list[str], __: dict[str, str]) -> None:
        self.bench.in_lanes.recall(self.one, keep=True)
        self.purgatory.take_back(self.one, 0)
        for run in list(self.one.tracker.runs.values()):
            for messages, covers_from in self.one.tracker.split(run, run.messages):
                self._put_back(self.one, messages, covers_from)

    def do_room(self, words: list[str], _: dict[str, str]) -> Iterator[str]:
        self.bench.room = int(words[0])
        yield "nothing more is delivered" if self.bench.in_lanes.holds_up(self.one) else "more is delivered"

    def do_buffer(self, _: list[str], __: dict[str, str]) -> Iterator[str]:
        found = [offset_of(each) for messages, _ in self.one.buffer._parts for each in messages]
        yield f"comes next: {spans_of(found)}"

    def do_state(self, _: list[str], __: dict[str, str]) -> Iterator[str]:
        flying = [
            offset_of(each)
            for _, run in sorted(self.one.tracker.runs.items())
            for each, mark in zip(run.messages, run.marks, strict=True)
            if not mark
        ]
        waiting = self.purgatory._waiting.get(self.one)
        handled = sorted(waiting.finished) if waiting is not None else []
        assert self.one.tracker.in_hand == len(flying)
        assert self.purgatory.size == sum(each.size for each in self.purgatory._waiting.values())
        yield (
            f"position {self.position}, in flight {spans_of(flying)}, handled {spans_of(handled)}, "
            f"{self.purgatory.size} bytes"
        )
