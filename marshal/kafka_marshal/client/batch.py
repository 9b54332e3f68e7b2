"""Batch: messages of one partition that are done together."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, cast

from kafka_marshal import ports
from kafka_marshal.adapters.message import Message
from kafka_marshal.client.attempt import GroupKind
from kafka_marshal.engine.work import consumer
from kafka_marshal.engine.work.assignment import Assignment, Run, stable_of
from kafka_marshal.engine.work.run import offset_of
from kafka_marshal.errors import LeaseLostError, MarshalError
from kafka_marshal.types import T, open_epoch

if TYPE_CHECKING:
    from kafka_marshal.engine.work.consumer import ConsumerEngine
    from kafka_marshal.node.driver import Driver


class Look:
    """Reads what sinks have to know, from any thread; nothing is known once the member has ended."""

    def __init__(self, driver: Driver, engine: ConsumerEngine) -> None:
        self._driver, self._engine = driver, engine

    def done_of(self, assignment: Assignment) -> Sequence[tuple[int, int]]:
        """What of its partition is done for every key, and not open: ascending, inclusive (F4)."""
        return self.read(lambda: consumer.done_of(self._engine, assignment), ())

    def aside_of(self, run: Run) -> set[int]:
        """The offsets of its messages that the program has set aside."""
        return self.read(lambda: {offset_of(run.messages[index]) for index in run.aside}, set())

    def read(self, read: Callable[[], T], unknown: T) -> T:
        """Its answer, under the engine's lock."""

        def locked() -> T:
            with self._driver.lock.locked(step=False):
                return read()

        try:
            return self._driver.call(locked)
        except MarshalError:
            return unknown


class Batch:
    """Messages of one partition, under one epoch. Not done before ``done()``.

    Attributes:
        topic, partition: where they are from.
        epoch: the fencing token, with which sinks store what the batch writes; a ``SharedEpoch`` if the partition is
            shared by key, a ``BatchToken`` if by batches.
        group_id, kind: of the consumer.
        messages: in the order of their offsets; the caller may change the list.
        first_offset, last_offset: of the first and the last message.
    """

    __slots__ = (
        "__weakref__",
        "_done",
        "_is_used",
        "_look",
        "_now_ms",
        "_run",
        "epoch",
        "first_offset",
        "group_id",
        "kind",
        "last_offset",
        "messages",
        "partition",
        "topic",
    )

    def __init__(
        self,
        done: Callable[[Run], object],
        run: Run,
        messages: list[ports.Message],
        group_id: str,
        kind: GroupKind,
        now_ms: Callable[[], float],
        look: Look | None = None,
    ) -> None:
        self._done = done
        self._look = look
        self._now_ms = now_ms
        self._run = run
        #: It has had its transaction.
        self._is_used = False
        self.topic: str
        self.partition: int
        self.topic, self.partition = run.assignment.key
        self.epoch: int = open_epoch(run.assignment.epoch) if run.is_open else run.assignment.epoch
        self.group_id: str = group_id
        self.kind: GroupKind = kind
        self.messages: list[Message] = cast("list[Message]", messages)
        self.first_offset: int = self.messages[0].offset()
        self.last_offset: int = self.messages[-1].offset()

    @property
    def open(self) -> bool:
        """Whether it is one message that was open: tried before, or redriven. Its position has passed it."""
        return self._run.is_open

    @property
    def stable(self) -> int:
        """Everything of the partition up to this offset is done in the group, or open; −1: nothing is."""
        return stable_of(self._run.assignment)

    def _done_besides(self) -> Sequence[tuple[int, int]]:
        """What of the partition is done in the group, and not open, as intervals (F4)."""
        return () if self._look is None else self._look.done_of(self._run.assignment)

    def _aside(self) -> Collection[int]:
        """The offsets of its messages that were set aside: they are not done with it."""
        return () if self._look is None else self._look.aside_of(self._run)

    @property
    def is_held(self) -> bool:
        """Whether this process can prove by its own clock that the partition is its own; at most once: always True.

        At most once the log has granted the messages to this process, and no other one will get them.
        """
        assignment = self._run.assignment
        return assignment.at_most_once or (not assignment.over and self._now_ms() < assignment.lease.proven_until)

    def require(self) -> None:
        """Raise LeaseLostError unless ``is_held``. Call it before a side effect that nothing else fences.

        If the process was stopped (SIGSTOP, a suspended machine), another member may have the partition by now. Sinks
        of this library call it before they commit what ``records(batch)`` has written.
        """
        if not self.is_held:
            raise LeaseLostError(
                f"{self.topic} [{self.partition}] offsets {self.first_offset} to {self.last_offset}: this process "
                "can't prove any more that the partition is its own (it was stopped for too long, or another member "
                "has it). Nothing may leave the process for these messages. They come again, here or elsewhere"
            )

    def done(self) -> None:
        """The whole batch is done. After its lease ended, this commits nothing, and ``ignored_done`` counts it.

        Call it then, too, or drop the batch: as long as a thread may be at work on it, its partition may not be taken
        up here again (docs/stuck.md).
        """
        self._done(self._run)

    def __len__(self) -> int:
        return len(self.messages)

    def __iter__(self) -> Iterator[Message]:
        return iter(self.messages)

    def __repr__(self) -> str:
        return f"Batch({self.topic!r}, {self.partition}, {self.first_offset}…{self.last_offset}, epoch={self.epoch})"
