"""Dead letters: the headers of a record in a dead-letter topic, which describe the message that failed.

They are those of Kafka's share groups (KIP-1191), as text in UTF-8, and some more after them (see below). Every
function here is pure. The format is described in docs/dead-letters.md. The texts about an exception work for each, even
if its own methods raise; secrets that a text names are hidden (:mod:`kafka_marshal.secret`).
"""

from __future__ import annotations

import traceback
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Final, TypeVar

from kafka_marshal.adapters.message import Headers, Message
from kafka_marshal.adapters.message import headers_of as own_headers
from kafka_marshal.secret import hide, scrub

#: The text of an exception is cut to this many characters: it might be a whole page of HTML.
MOST_REASON: Final = 1_000

#: This many characters are searched for secrets: a secret that is cut in two lies beyond MOST_REASON.
_SEARCHED: Final = 2 * MOST_REASON

#: A traceback has the last FRAMES frames of each exception, and at most MOST_TRACE bytes.
FRAMES: Final = 8
MOST_TRACE: Final = 4_096

#: An exception, its cause, and the cause of that.
_CHAIN: Final = 3

#: Our own frames, which call handlers, do not help: they are left out.
_OURS: Final = str(Path(__file__).parent)

_DIRECT = "\n\nThe above exception was the direct cause of the following exception:\n\n"
_MEANWHILE = "\n\nDuring handling of the above exception, another exception occurred:\n\n"
_FIRST = "\n\nThe above exception is the first of this group:\n\n"


def class_name(error: BaseException) -> str:
    """An exception's class, as OpenTelemetry names it: with its module, unless it is built in."""
    kind = type(error)
    module = str(kind.__module__)
    return kind.__qualname__ if module == "builtins" else f"{module}.{kind.__qualname__}"


def reason_of(error: BaseException, secrets: Iterable[str] = ()) -> str:
    """The text of an exception; its class if it has none, or can't return it. secrets: hidden, too."""
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - the __str__ of a user's class may raise
        text = ""
    text = hide(scrub(text[:_SEARCHED].strip()), secrets) or type(error).__name__
    return text if len(text) <= MOST_REASON else f"{text[: MOST_REASON - 1]}…"


def place_of(error: BaseException) -> tuple[str, int]:
    """File and line that raised it, or, if it was never raised, its cause; ("", 0): not known."""
    at = error.__traceback__
    if at is None and error.__cause__ is not None:
        at = error.__cause__.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    return ("", 0) if at is None else (at.tb_frame.f_code.co_filename, at.tb_lineno)


def trace_of(error: BaseException, secrets: Iterable[str] = ()) -> str:
    """Its traceback, as Python prints it: the last frames of it and of its causes, cut to MOST_TRACE bytes."""
    text, secrets = "", tuple(secrets)
    each: BaseException | None = error
    for _ in range(_CHAIN):
        if each is None:
            break
        frames = "".join(traceback.format_list(_frames(each.__traceback__)))
        text = f"{hide(scrub(frames), secrets)}{class_name(each)}: {reason_of(each, secrets)}{text}"
        each, link = _before(each)
        text = text if each is None else f"{link}{text}"
    cut = text.lstrip("\n").encode("utf-8", "backslashreplace")
    return cut.decode() if len(cut) <= MOST_TRACE else f"…{cut[3 - MOST_TRACE :].decode('utf-8', 'ignore')}"


def _frames(tb: TracebackType | None) -> traceback.StackSummary:
    found = traceback.extract_tb(tb, limit=-FRAMES)
    while found and found[0].filename.startswith(_OURS):
        del found[0]
    return found


def _before(error: BaseException) -> tuple[BaseException | None, str]:
    """The exception that caused this one (None: none), and the text that links them."""
    if error.__cause__ is not None:
        return error.__cause__, _DIRECT
    if isinstance(error, BaseExceptionGroup):
        return error.exceptions[0], _FIRST
    return (None, "") if error.__suppress_context__ else (error.__context__, _MEANWHILE)


#: The prefix of all headers of dead letters.
PREFIX: Final = "__dlq."

TOPIC: Final = "__dlq.errors.topic"
PARTITION: Final = "__dlq.errors.partition"
OFFSET: Final = "__dlq.errors.offset"
GROUP: Final = "__dlq.errors.group"
DELIVERY_COUNT: Final = "__dlq.errors.delivery.count"
MESSAGE: Final = "__dlq.errors.message"
#: Not in KIP-1191: the fencing token, and class and traceback of the exception (as Kafka Connect calls them).
EPOCH: Final = "__dlq.errors.epoch"
CLASS_NAME: Final = "__dlq.errors.exception.class.name"
STACKTRACE: Final = "__dlq.errors.exception.stacktrace"

#: A letter is at most this many bytes larger than its message; half of them are for the traceback.
MOST_ADDED: Final = 8_192

#: A repeat is noticed if at most this many letters are between it and its original: 50 MB of memory.
REMEMBERED: Final = 250_000

#: No number in Kafka has more digits.
_MOST_DIGITS = 19

#: How many bytes of an invalid header are shown.
_SHOWN = 40


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """One record of a dead-letter topic: a message that failed for good, and why.

    Letters of Kafka's share groups have no ``error`` and no ``epoch``, and may lack ``delivery_count`` and ``reason``;
    key and value are None unless the group copies them.
    """

    #: Where the message was. A share group writes the topic's id if it can't find the name.
    topic: str
    partition: int
    offset: int
    #: The group that gave it up.
    group: str
    #: How often it was tried; None: not said.
    delivery_count: int | None
    #: What the exception said, cut to 1,000 characters; "": not said.
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
    #: The last frames of the exception's traceback; None: not said.
    traceback: str | None = None

    @property
    def source(self) -> tuple[str, str, int, int]:
        """What identifies the message: two letters with the same one are copies."""
        return self.group, self.topic, self.partition, self.offset

    @staticmethod
    def of(message: Message) -> DeadLetter | None:
        """The dead letter in a record; None if it does not name the message that failed: it is no dead letter."""
        found = read_letter(message)
        return found if isinstance(found, DeadLetter) else None


@dataclass(frozen=True, slots=True)
class OddLetter:
    """A record with headers of a dead letter that do not name a message; it has the fields of a DeadLetter."""

    #: Which header is missing or invalid.
    why: str
    #: The group that gave the message up; None: not said.
    group: str | None
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...]
    time_ms: int
    place: tuple[str, int, int]
    topic: None = None
    partition: None = None
    offset: None = None
    delivery_count: None = None
    error: None = None
    epoch: None = None
    traceback: None = None
    repeated: bool = False

    @property
    def reason(self) -> str:
        """What is wrong with it, in place of an exception's text."""
        return f"this letter can't be read: {self.why}"


def read_letter(message: Message) -> DeadLetter | OddLetter | None:
    """The letter in a record of a dead-letter topic; None: it has no header of a dead letter."""
    ours: dict[str, bytes | None] = {}
    others: list[tuple[str, bytes | None]] = []
    for name, value in own_headers(message) or ():
        if name.startswith(PREFIX):
            ours[name] = value  # of several, the last one counts, as in Java's Headers.lastHeader
        else:
            others.append((name, value))
    if not ours:
        return None
    kind, time_ms = message.timestamp()
    time_ms = time_ms if kind else -1
    place = message.topic(), message.partition(), message.offset()
    topic, group = _text(ours.get(TOPIC)), _text(ours.get(GROUP))
    partition, offset = _number(ours.get(PARTITION)), _number(ours.get(OFFSET))
    if topic is None or group is None or partition is None or offset is None:
        why = "; ".join(_troubles(ours))
        return OddLetter(why, group, message.key(), message.value(), tuple(others), time_ms, place)
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
        time_ms,
        place,
        traceback=_text(ours.get(STACKTRACE)),
    )


def _troubles(ours: dict[str, bytes | None]) -> Iterator[str]:
    """Why these headers do not name a message."""
    if missing := [name for name in (TOPIC, PARTITION, OFFSET, GROUP) if name not in ours]:
        yield f"it lacks {', '.join(missing)}"
    for name, is_number in ((TOPIC, False), (PARTITION, True), (OFFSET, True), (GROUP, False)):
        value = ours.get(name)
        if name in ours and value is None:
            yield f"{name} is null"
        elif is_number and value is not None and _number(value) is None:
            yield f"{name} is no number but {_text(value[:_SHOWN])!r}"


def headers_of(
    message: Message,
    group_id: str,
    epoch: int,
    delivery_count: int,
    error: BaseException,
    *,
    own: Headers = None,
    secrets: Iterable[str] = (),
    with_trace: bool = True,
) -> list[tuple[str, bytes | None]]:
    """The headers of a message's dead letter: those of the message, unchanged and in order, then the failure.

    Headers of an earlier dead letter are left out, so that each letter names one source: the record that failed now.
    own: the message's headers as in Kafka, if a handler may have changed them. secrets: hidden in texts.
    """
    own = own_headers(message) if own is None else own
    kept = [(name, value) for name, value in own or () if not name.startswith(PREFIX)]
    said = [
        (TOPIC, message.topic()),
        (PARTITION, str(message.partition())),
        (OFFSET, str(message.offset())),
        (GROUP, group_id),
        (DELIVERY_COUNT, str(delivery_count)),
        (MESSAGE, reason_of(error, secrets)),
        (EPOCH, str(int(epoch))),
        (CLASS_NAME, class_name(error)),
    ]
    if with_trace:
        said.append((STACKTRACE, trace_of(error, secrets)))
    return [*kept, *((name, text.encode("utf-8", "backslashreplace")) for name, text in said)]


L = TypeVar("L", DeadLetter, DeadLetter | OddLetter)


def mark_repeats(letters: Iterable[L], *, remembered: int = REMEMBERED) -> Iterator[L]:
    """The same letters, with ``repeated`` set on each that is a copy of one before it.

    If a process dies after the acknowledgement of a dead letter and before the commit of its message, the message comes
    again, and may fail again: that makes a copy. ``remembered``: how many sources are kept in memory; a copy that comes
    later than that is not noticed.
    """
    seen: OrderedDict[tuple[str, str, int, int], None] = OrderedDict()
    for letter in letters:
        if isinstance(letter, OddLetter):
            yield letter
            continue
        if letter.source in seen:
            seen.move_to_end(letter.source)
            yield replace(letter, repeated=True)
            continue
        seen[letter.source] = None
        if len(seen) > remembered:
            seen.popitem(last=False)
        yield letter


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode("utf-8", "replace")


def _number(value: bytes | None) -> int | None:
    if value is None or not value.isdigit() or len(value) > _MOST_DIGITS:
        return None
    return int(value)
