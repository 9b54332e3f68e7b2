"""One handling of one message, as its handler, hooks and sinks see it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, Literal, NamedTuple

from kafka_marshal.adapters.message import Headers, Message, headers_of, mend
from kafka_marshal.client.transactions import Headers as RecordHeaders
from kafka_marshal.client.transactions import Output, output
from kafka_marshal.engine.work.assignment import Assignment
from kafka_marshal.engine.work.lane import Lane
from kafka_marshal.engine.work.lanes import Order
from kafka_marshal.errors import ConfigurationError, LeaseLostError

#: How partitions are assigned: by claims, or by a coordinated group.
GroupKind = Literal["claimed", "coordinated"]


class Handling(NamedTuple):
    """What all attempts of one run have in common; the first four as attributes of an attempt."""

    attempts: int | None
    group_id: str
    kind: GroupKind
    order: Order
    #: A handler's changes to headers are undone. (A header costs 0.3 µs, so they are kept only if needed.)
    keeps_headers: bool = False
    #: Whether ``produce`` works.
    is_in_transaction: bool = False
    #: Its run leaves messages open behind its position.
    leaves_open: bool = False
    #: Our own clock (ms).
    now_ms: Callable[[], float] = lambda: 0.0
    #: What of a partition is done in the group, and not open, as intervals (F4).
    done_of: Callable[[Assignment], Sequence[tuple[int, int]]] = lambda _: ()


class Attempt:
    """One handling of one message by ``consumer.run``; :meth:`current` is that of the caller.

    Attributes:
        message: what is handled.
        number: 1 for the first try, 2 for the first retry … With ``park=True`` or ``Retry(durable=True)`` it counts the
            tries of earlier owners of the partition, too, as far as the log has them.
        attempts: how many tries there are at most; None: there is no limit.
        epoch: the fencing token of its partition; a ``SharedEpoch`` if the partition is shared by key, a
            ``BatchToken`` if by batches.
        group_id, kind: of the consumer.
        order: as passed to ``run``.
        stable: everything of the partition up to this offset is done, or open; −1: nothing is.
    """

    __slots__ = (
        "_assignment",
        "_at_once",
        "_handling",
        "_headers",
        "_key",
        "_lane",
        "_outputs",
        "_value",
        "attempts",
        "epoch",
        "group_id",
        "kind",
        "message",
        "number",
        "order",
        "stable",
    )

    def __init__(
        self, handling: Handling, message: Message, number: int, epoch: int, stable: int = -1, lane: Lane | None = None
    ) -> None:
        """lane: whose message it is; None: nothing can take it away."""
        self.message: Message = message
        #: As in Kafka, even if the handler changes them.
        self._key: bytes | None = message.key()
        self._value: bytes | None = message.value()
        self._headers: Headers = tuple(headers_of(message) or ()) if handling.keeps_headers else None
        self.number: int = number
        self.attempts: int | None = handling.attempts
        self.epoch: int = epoch
        self.group_id: str = handling.group_id
        self.kind: GroupKind = handling.kind
        self.order: Order = handling.order
        self.stable: int = stable
        self._handling = handling
        self._lane = lane
        self._assignment: Assignment | None = None if lane is None else lane.assignment
        #: How many messages its handler has in one call.
        self._at_once = 1
        #: What it has produced; None: nothing may be, or nothing more.
        self._outputs: list[Output] | None = [] if handling.is_in_transaction else None

    @staticmethod
    def current() -> Attempt:
        """The attempt that the caller is part of. Raises ConfigurationError outside a handler of ``consumer.run``."""
        attempt = current.get()
        if attempt is None and in_batch.get():
            raise ConfigurationError(
                "this handler of run(…, batch=…) has several messages, and each has an attempt. Nothing was done "
                "here. Call Attempt.of(message) with the one that is meant"
            )
        if attempt is None:
            raise ConfigurationError(
                "there is no attempt here: only a handler called by consumer.run(…) has one, in its own thread or task"
            )
        return attempt

    @staticmethod
    def of(message: Message) -> Attempt:
        """The attempt of one message that the caller's handler has, alone or in a batch (``run(…, batch=…)``).

        message: the very object that the handler was given. Raises ConfigurationError for any other.
        """
        attempt = current.get() or (in_batch.get() or {}).get(id(message))
        if attempt is None or attempt.message is not message:
            raise ConfigurationError(
                "there is no attempt of this message here: only a handler called by consumer.run(…) has attempts, of "
                "the messages that it was given, in its own thread or task"
            )
        return attempt

    @property
    def is_redone(self) -> bool:
        """Whether an operator has this message, which was done, handled again (``kafka-marshal redo``).

        For log lines, never for effects: False too after a start from a snapshot, and once another member's try is in
        the log (R9).
        """
        assignment, lane, offset = self._assignment, self._lane, self.message.offset()
        if assignment is None or lane is None or offset is None:
            return False
        is_open = lane.token is not None or offset in lane.partition.tried
        return is_open and assignment.consumer.redone.has(assignment.key, offset)

    @property
    def is_last(self) -> bool:
        """Whether a failure of this one is final: the message is set aside, a dead letter, or the end of ``run``."""
        return self.attempts is not None and self.number >= self.attempts

    @property
    def _count(self) -> str:
        return str(self.number) if self.attempts is None else f"{self.number} of {self.attempts}"

    def produce(
        self,
        topic: str,
        value: bytes | str | None,
        key: bytes | str | None = None,
        headers: RecordHeaders = (),
        partition: int | None = None,
    ) -> None:
        """Produce a record in the transaction of this message; only with ``exactly_once``.

        It is held back until the handler returns. Then it goes into the same transaction as the message's progress; if
        this try fails, it is dropped. Text becomes UTF-8. partition: None: chosen by the key, as Java's producer does.
        Raises ConfigurationError without transactions, and after the handler has returned.
        """
        made, outputs = output(topic, value, key, headers, partition), self._outputs
        if outputs is None:
            raise ConfigurationError(
                f"nothing can be produced to {topic!r} here: this try is over, or its run has no transactions. Nothing "
                "was produced. Call produce() before the handler returns, in a run of a consumer with exactly_once="
            )
        outputs.append(made)

    def _take_outputs(self) -> tuple[Output, ...]:
        """What it has produced; from now on ``produce`` raises."""
        outputs, self._outputs = self._outputs, None
        return tuple(outputs or ())

    def _restore(self, topic: str) -> None:
        """Undo the handler's changes to the message: its next try, and its order, need what is in Kafka."""
        message: Any = self.message
        self._restore_topic(topic)
        if message.key() is not self._key:
            message.set_key(self._key)
        if message.value() is not self._value:
            message.set_value(self._value)
        mend(message)
        if self._headers is not None:
            message.set_headers(list(self._headers) or None)

    def _restore_topic(self, topic: str) -> None:
        """Undo a handler's change of the topic: a done message is found by its topic."""
        message: Any = self.message  # typed by stubs that lack some setters
        if message.topic() != topic:
            message.set_topic(topic)

    @property
    def _leaves_open(self) -> bool:
        """The message was open, or its run leaves messages open behind its position: a last offset hides these."""
        lane = self._lane
        return self._handling.leaves_open or (lane is not None and self.message.offset() in lane.partition.tried)

    def _done_besides(self) -> Sequence[tuple[int, int]]:
        """What of the partition is done in the group, and not open, as intervals (F4)."""
        return () if self._assignment is None else self._handling.done_of(self._assignment)

    @property
    def is_held(self) -> bool:
        """Whether this process can prove, by its own clock, that it still holds the message's partition.

        Also while the partition is being released (T4).
        """
        assignment, lane = self._assignment, self._lane
        if assignment is None or lane is None:
            return True
        return not (assignment.over or lane.is_left) and self._handling.now_ms() < assignment.lease.proven_until

    def require(self) -> None:
        """Raise LeaseLostError unless ``is_held``. Call it before a side effect that nothing else fences.

        If the process was stopped (SIGSTOP, a suspended machine), another member may have the partition by now. Sinks
        of this library call it before they commit.
        """
        if not self.is_held:
            message = self.message
            raise LeaseLostError(
                f"{message.topic()} [{message.partition()}] offset {message.offset()}: this process can't prove any "
                "more that the partition is its own (it was stopped for too long, or another member has it). Nothing "
                "may leave the process for this message. It comes again, here or elsewhere"
            )

    def __repr__(self) -> str:
        message = self.message
        return (
            f"Attempt({message.topic()!r}, {message.partition()}, offset {message.offset()}, "
            f"{self._count}, epoch={self.epoch})"
        )


#: The attempt of this thread or task; None outside a handler.
current: ContextVar[Attempt | None] = ContextVar("kafka_marshal_attempt", default=None)

#: The attempts of this thread's or task's batch, by the id of their messages; None: it has none.
in_batch: ContextVar[dict[int, Attempt] | None] = ContextVar("kafka_marshal_batch", default=None)
