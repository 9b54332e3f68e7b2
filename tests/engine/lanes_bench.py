"""Lanes with a minimal consumer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Lock
from types import SimpleNamespace
from typing import Any, cast

from kafka_marshal.client.tries import RunCall
from kafka_marshal.engine.work.assignment import Assignment, Mover, Run, Stage, Tracker
from kafka_marshal.engine.work.in_lanes import InLanes
from kafka_marshal.engine.work.lane import Lane
from kafka_marshal.engine.work.lanes import Lanes, Order
from kafka_marshal.engine.work.run import offset_of
from kafka_marshal.engine.work.tracker import InFlight
from kafka_marshal.ports import Message

FOREVER = 1e12

PutBack = Callable[[Assignment, list[Message], int], None]


class Record:
    """A message with a key."""

    def __init__(self, partition: int, offset: int, key: bytes | None = None) -> None:
        self._place = partition, offset
        self._key = key

    def topic(self) -> str:
        return "t"

    def partition(self) -> int:
        return self._place[0]

    def offset(self) -> int:
        return self._place[1]

    def key(self) -> bytes | None:
        return self._key

    def value(self) -> bytes:
        return b""

    def __len__(self) -> int:
        return 0  # as confluent-kafka's: that of its value

    def __repr__(self) -> str:
        return f"{self._place[0]}@{self._place[1]} {self._key!r}"


def records(keys: str, partition: int = 0, first: int = 0) -> list[Message]:
    """A record for each letter, which is its key; "-": without key."""
    letters = enumerate(keys, first)
    return [Record(partition, offset, None if key == "-" else key.encode()) for offset, key in letters]


class Bench:
    """Lanes with one owner and a minimal consumer."""

    def __init__(
        self, order: Order = "key", room: int = 10**9, put_back: PutBack | None = None, max_bytes: int = 10**9
    ) -> None:
        self.room = room
        self.stop: list[bool] = []
        self.finished: list[Assignment] = []
        self.back: list[tuple[int, list[int], int]] = []
        self.assignments: dict[tuple[str, int], Assignment] = {}
        revocation = SimpleNamespace(try_finish=lambda assignment, now: self.finished.append(assignment))
        self.mover = cast(
            "Mover",
            SimpleNamespace(
                at_most_once=False,
                assignments=self.assignments,
                revocation=revocation,
                knows=lambda assignment: True,
                source=SimpleNamespace(checkpoints=None),
            ),
        )
        memory = InFlight(max_bytes, at_most_once=False)
        memory.read(1, 1.0)
        self.in_lanes = InLanes(self.mover, put_back or self._put_back, lambda **_: self.room, memory)
        self.in_lanes.lanes = self.lanes = Lanes(order, Lock(), self.stop, 0.0)
        self.call = RunCall()
        self.lanes.open(self.call)

    def _put_back(self, assignment: Assignment, messages: list[Message], covers_from: int) -> None:
        self.back.append((assignment.key[1], [offset_of(each) for each in messages], covers_from))

    def assignment(self, partition: int = 0, stable: int = -1, ranges: Sequence[tuple[int, int]] = ()) -> Assignment:
        made = Assignment(("t", partition), self.mover)
        made.lease = cast(
            "Any",
            SimpleNamespace(
                hand_out_until=FOREVER,
                proven_until=FOREVER,
                keys=None,
                epoch=1,
                held=True,
                most_intervals=60_000,
                is_cut_whole=False,
                is_paused=False,
            ),
        )
        made.stage = Stage.ACTIVE
        made.tracker = Tracker(stable, ranges)
        self.assignments[made.key] = made
        return made

    def spread(self, assignment: Assignment, messages: list[Message], covers_from: int | None = None) -> list[Lane]:
        first = offset_of(messages[0]) if covers_from is None else covers_from
        run = Run(assignment, messages, first, False, 0.0)
        assignment.tracker.hand_out(run)
        return self.in_lanes.spread(run)

    def begin(self, lane: Lane, now: float = 1.0) -> int | None:
        message = self.lanes.begin(lane, now, self.call)
        return None if message is None else message.offset()

    def done(self, assignment: Assignment, lane: Lane) -> bool:
        assert lane.message is not None
        assert not assignment.tracker.mark([lane.message])
        return self.lanes.done(lane, self.call)

    def failed(self, lane: Lane, due: float | None = None) -> bool:
        return self.lanes.failed(lane, due, self.call)

    def lose(self, assignment: Assignment) -> None:
        """Lose an assignment as ``Revocation.lost`` does."""
        assignment.lease = cast(
            "Any",
            SimpleNamespace(
                hand_out_until=0.0,
                proven_until=0.0,
                keys=None,
                epoch=1,
                held=False,
                most_intervals=60_000,
                is_cut_whole=False,
                is_paused=False,
            ),
        )
        assignment.stage = Stage.LOST
        self.in_lanes.recall(assignment, keep=False)
        self.assignments.pop(assignment.key, None)

    def counts(self) -> tuple[int, int]:
        return self.lanes.ready, self.lanes.running
