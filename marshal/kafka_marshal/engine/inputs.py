"""What an engine is told: all of it passes through :meth:`Engine.take`, as plain data with ids.

So a run can be written down and fed in again (:class:`InputLog`): with the records of the coordination topic, which lie
in Kafka, the same inputs make the same effects, byte for byte.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

from kafka_marshal.engine.effects import Call, Effect, Key, LookUp
from kafka_marshal.engine.work.pull import Wanted
from kafka_marshal.ports import Message, TopicInfo
from rationalizer import Outcome, World

__all__ = [
    "Acked",
    "Applied",
    "Called",
    "CaughtUp",
    "Done",
    "DoneRun",
    "Fetched",
    "Input",
    "InputLog",
    "Located",
    "LogEnds",
    "Next",
    "OutOfRange",
    "Reached",
    "ReadFailed",
    "Recreated",
    "Step",
    "TooLarge",
    "Topics",
]


class CaughtUp(NamedTuple):
    """The replica knows the world (C15). Told again when it reads other CPs: a member's home, or all."""


class Applied(NamedTuple):
    """Our replica applied one record."""

    cp: int
    offset: int
    outcome: Outcome


class Acked(NamedTuple):
    """The broker answered an append: its offset, or None where it failed or did not tell."""

    token: int
    offset: int | None


class Topics(NamedTuple):
    """What topics the cluster has now."""

    topics: Mapping[str, TopicInfo]


class Located(NamedTuple):
    """The leader told a log's start and end, and the start offset asked for."""

    asked: LookUp
    low: int
    high: int
    start: int


class Called(NamedTuple):
    """A callback of the user has returned (or raised)."""

    call: Call


class Fetched(NamedTuple):
    """Consecutive messages of one partition came from the reader."""

    consumer: int
    key: Key
    messages: list[Message]


class Reached(NamedTuple):
    """The reader has passed everything below end (P6)."""

    consumer: int
    key: Key
    end: int


class LogEnds(NamedTuple):
    """The reader has heard where a partition's log ends."""

    consumer: int
    key: Key
    end: int


class OutOfRange(NamedTuple):
    """The reader's position is not in the log (P9, P11)."""

    consumer: int
    key: Key


class Recreated(NamedTuple):
    """The reader found another topic of this name, with this id, and gave nothing of it (P11)."""

    consumer: int
    topic: str
    topic_id: str


class ReadFailed(NamedTuple):
    """Reading a partition failed at the offset that comes next. is_forbidden: by an ACL; the text says which."""

    consumer: int
    key: Key
    text: str
    is_forbidden: bool = False


class TooLarge(NamedTuple):
    """A connection broke off as an answer was larger than the reader may receive."""

    consumer: int
    text: str


class Next(NamedTuple):
    """Messages are wanted; answered with the next step of the consumer's own pull."""

    consumer: int
    wanted: Wanted


class DoneRun(NamedTuple):
    """A whole run is done; first: the offset it begins at."""

    consumer: int
    key: Key
    first: int


class Done(NamedTuple):
    """A message is done."""

    consumer: int
    message: Message


class Step(NamedTuple):
    """Time has gone by."""


Input = (
    CaughtUp
    | Applied
    | Acked
    | Topics
    | Located
    | Called
    | Fetched
    | Reached
    | LogEnds
    | OutOfRange
    | ReadFailed
    | Recreated
    | TooLarge
    | Next
    | DoneRun
    | Done
    | Step
)


class At(NamedTuple):
    """Where a record lies that was applied."""

    cp: int
    offset: int


class Fed(Protocol):
    """An engine, as a recorded run needs it."""

    def take(self, event: Input, now: float) -> object: ...

    def take_effects(self) -> list[Effect]: ...


class InputLog:
    """The inputs of one engine, with the time (own clock, ms) of each; of records applied, where they lie."""

    def __init__(self) -> None:
        self.entries: list[tuple[float, Input | At]] = []

    def note(self, event: Input, now: float) -> None:
        """To be the engine's ``recorder``."""
        self.entries.append((now, At(event.cp, event.offset) if isinstance(event, Applied) else event))

    def feed(
        self,
        engine: Fed,
        worlds: Mapping[int, World],
        record: Callable[[int, int], tuple[int, bytes | None]],
    ) -> Iterator[Sequence[Effect]]:
        """Feed the inputs to an engine that is as the recorded one was; its effects after each.

        worlds: the engine's own, as they were, of the CPs that were read; record: (CP, offset) → (timestamp in ms,
        value).
        """
        for now, entry in self.entries:
            if isinstance(entry, At):
                outcome = worlds[entry.cp].apply(entry.offset, *record(*entry))
                engine.take(Applied(*entry, outcome), now)
            else:
                engine.take(entry, now)
            yield engine.take_effects()
