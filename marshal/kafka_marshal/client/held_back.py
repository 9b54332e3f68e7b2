"""What a message of ``run(…, transactions=True)`` holds back until its transaction: its outputs, or its dead letter."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol

from kafka_marshal.client.attempt import Attempt
from kafka_marshal.client.dead_letters import headers_of
from kafka_marshal.client.transactions import Output
from kafka_marshal.engine.work.in_lanes import Finished
from kafka_marshal.engine.work.lane import Lane

#: Memory of an output besides its key, value and headers (bytes).
OUTPUT_BYTES = 300


class Held(NamedTuple):
    """What one finished message holds back."""

    attempt: Attempt
    outputs: tuple[Output, ...]
    #: The failure that has made it a dead letter, which is its only output; None: it is handled.
    error: Exception | None = None
    #: The dead letter has a traceback, without which it is smaller.
    has_trace: bool = False


def held_back(
    attempt: Attempt, outputs: tuple[Output, ...], error: Exception | None = None, has_trace: bool = False
) -> Finished:
    """A finished message, for the engine."""
    size = sum(OUTPUT_BYTES + _size_of(each) for each in outputs)
    return Finished(attempt.message, size, Held(attempt, outputs, error, has_trace))


def _size_of(each: Output) -> int:
    headers = sum(len(name) + len(value or b"") for name, value in each.headers)
    return len(each.value or b"") + len(each.key or b"") + headers


class Settling(Protocol):
    """What receives a message that waits for its transaction."""

    def settled(self, lane: Lane, what: Finished) -> None: ...

    def given_back(self, lane: Lane) -> None:
        """The partition may be another member's: the message comes again."""


class LettersInTransactions:
    """Dead letters of a run with transactions: each goes into the transaction of its message (M6)."""

    def __init__(self, topic: str, tries: Settling, secrets: Iterable[str]) -> None:
        self.topic = topic
        self._tries = tries
        self._secrets = tuple(secrets)

    def send(self, lane: Lane, attempt: Attempt, error: Exception) -> None:
        """Put a message aside; its lane continues (any thread)."""
        if attempt.is_held:
            self._tries.settled(lane, self.letter(attempt, error))
        else:  # another member may have the partition now, and decides about the message
            self._tries.given_back(lane)

    def letter(self, attempt: Attempt, error: Exception, *, with_trace: bool = True) -> Finished:
        """A message with its dead letter as its output."""
        headers = headers_of(
            attempt.message,
            attempt.group_id,
            attempt.epoch,
            attempt.number,
            error,
            own=attempt._headers or (),
            secrets=self._secrets,
            with_trace=with_trace,
        )
        made = Output(self.topic, attempt._value, attempt._key, tuple(headers))
        return held_back(attempt, (made,), error, with_trace)

    def close(self) -> None:
        """The run has ended: nothing is to be done."""
