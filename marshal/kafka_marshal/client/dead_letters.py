"""Dead letters: what a record of a dead-letter topic says about the message that failed, written and read.

The headers are those of Kafka's share groups (KIP-1191), as text in UTF-8, and two of our own behind them. Every
function here is pure. The format is described in docs/dead-letters.md.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

from kafka_marshal.adapters.message import Message

__all__ = ["MOST_REASON", "PREFIX", "REMEMBERED", "DeadLetter", "headers_of", "mark_repeats"]

#: What the names of all headers of dead letters begin with.
PREFIX: Final = "__dlq."

TOPIC: Final = "__dlq.errors.topic"
PARTITION: Final = "__dlq.errors.partition"
OFFSET: Final = "__dlq.errors.offset"
GROUP: Final = "__dlq.errors.group"
DELIVERY_COUNT: Final = "__dlq.errors.delivery.count"
MESSAGE: Final = "__dlq.errors.message"
#: Not in KIP-1191: the fencing token, and the class of the exception (as Kafka Connect calls it).
EPOCH: Final = "__dlq.errors.epoch"
CLASS_NAME: Final = "__dlq.errors.exception.class.name"

#: The text of an exception is cut to this many characters: a record that failed may not grow by a whole page of HTML.
MOST_REASON: Final = 1_000

#: Letters between two copies of one, at most, for the later one to be known as a repeat: 50 MB of memory.
REMEMBERED: Final = 250_000

#: No number of Kafka's has more digits.
_MOST_DIGITS = 19


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """One record of a dead-letter topic: a message that failed for good, and why.

    What Kafka's share groups write has no ``error`` and no ``epoch``; key and value are None there unless the group
    copies them, and it may lack ``delivery_count`` and ``reason``.
    """

    #: Where the message was. A share group names the topic's id where it can't find its name.
    topic: str
    partition: int
    offset: int
    #: The group that gave it up.
    group: str
    #: How often it was tried; None: not said.
    delivery_count: int | None
    #: What the exception said, cut to MOST_REASON characters; "": not said.
    reason: str
    #: The exception's class, with its module unless it is built in; None: not said.
    error: str | None
    #: The fencing token of the partition when it was given up; None: not said.
    epoch: int | None
    key: bytes | None
    value: bytes | None
    #: The message's own headers.
    headers: tuple[tuple[str, bytes | None], ...]
    #: When the dead letter was written (ms since 1970); -1: not said.
    time_ms: int
    #: Topic, partition and offset of the dead letter itself.
    place: tuple[str, int, int]
    #: The same message of the same group is in a dead letter before this one; see mark_repeats().
    repeated: bool = False

    @property
    def source(self) -> tuple[str, str, int, int]:
        """What identifies the message: two letters with the same one are copies."""
        return self.group, self.topic, self.partition, self.offset

    @staticmethod
    def of(message: Message) -> DeadLetter | None:
        """The dead letter in a record; None where it does not say which message failed: it is no dead letter."""
        ours: dict[str, bytes | None] = {}
        others: list[tuple[str, bytes | None]] = []
        for name, value in _headers(message):
            if name.startswith(PREFIX):
                ours[name] = value  # of several the last counts, as in Java's Headers.lastHeader
            else:
                others.append((name, value))
        topic, group = _text(ours.get(TOPIC)), _text(ours.get(GROUP))
        partition, offset = _number(ours.get(PARTITION)), _number(ours.get(OFFSET))
        if topic is None or group is None or partition is None or offset is None:
            return None
        kind, time_ms = message.timestamp()
        return DeadLetter(
            topic,
            partition,
            offset,
            group,
            _number(ours.get(DELIVERY_COUNT)),
            _text(ours.get(MESSAGE)) or "",
            _text(ours.get(CLASS_NAME)),
            _number(ours.get(EPOCH)),
            message.key(),
            message.value(),
            tuple(others),
            time_ms if kind else -1,
            (message.topic(), message.partition(), message.offset()),
        )


def headers_of(
    message: Message, group_id: str, epoch: int, delivery_count: int, error: BaseException
) -> list[tuple[str, bytes | None]]:
    """The headers of the dead letter of a message: its own, unchanged and in their order, then what became of it.

    Headers of an earlier dead letter are left out, so that each letter names one source: the record that failed now.
    Key and value are the message's own.
    """
    kept = [(name, value) for name, value in _headers(message) if not name.startswith(PREFIX)]
    said = [
        (TOPIC, message.topic()),
        (PARTITION, str(message.partition())),
        (OFFSET, str(message.offset())),
        (GROUP, group_id),
        (DELIVERY_COUNT, str(delivery_count)),
        (MESSAGE, _reason(error)),
        (EPOCH, str(int(epoch))),
        (CLASS_NAME, _class_name(error)),
    ]
    return [*kept, *((name, text.encode("utf-8", "backslashreplace")) for name, text in said)]


def mark_repeats(letters: Iterable[DeadLetter], *, remembered: int = REMEMBERED) -> Iterator[DeadLetter]:
    """The same letters, with ``repeated`` set on each that is a copy of one before it.

    A process that dies between the acknowledgement of a dead letter and the commit of its message leaves a copy: the
    message comes again, and fails again. ``remembered``: how many sources are kept in memory; a copy that comes later
    than that is not noticed.
    """
    seen: OrderedDict[tuple[str, str, int, int], None] = OrderedDict()
    for letter in letters:
        if letter.source in seen:
            seen.move_to_end(letter.source)
            yield replace(letter, repeated=True)
            continue
        seen[letter.source] = None
        if len(seen) > remembered:
            seen.popitem(last=False)
        yield letter


def _headers(message: Message) -> list[tuple[str, bytes | None]]:
    found: Any = message.headers()
    return list(found or ())


def _reason(error: BaseException) -> str:
    """What an exception says; its class where it says nothing, or can't say it."""
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - a user's class may fail to say what it is
        text = ""
    text = text.strip() or type(error).__name__
    return text if len(text) <= MOST_REASON else f"{text[: MOST_REASON - 1]}…"


def _class_name(error: BaseException) -> str:
    kind = type(error)
    module = str(kind.__module__)
    return kind.__qualname__ if module == "builtins" else f"{module}.{kind.__qualname__}"


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode("utf-8", "replace")


def _number(value: bytes | None) -> int | None:
    if value is None or not value.isdigit() or len(value) > _MOST_DIGITS:
        return None
    return int(value)
