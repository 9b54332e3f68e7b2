"""Logs failures of the handlers of ``consumer.run``: each kind once with its traceback, then how often.

A kind is a class and the line that raised it. Counts are logged once a minute, and when the run ends.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from typing import Any, Final

from kafka_marshal import ports
from kafka_marshal.client.attempt import Attempt
from kafka_marshal.client.dead_letters import class_name, place_of, reason_of, trace_of
from kafka_marshal.engine.settings import EngineSettings
from kafka_marshal.logs import log
from kafka_marshal.runtime import Lock
from kafka_marshal.secret import values_of
from rationalizer.limits import MAX_REASON_BYTES

#: How often a kind of failure, and dead letters, are logged again (ms), with their number since the last time.
EVERY_MS: Final = 60_000.0

#: How many kinds are distinguished (a program may create classes without end); all others are one kind.
MOST_KINDS: Final = 32

#: How many dead letters in a minute get a line each.
LETTERS: Final = 20

#: A line shows this many bytes of a key.
_KEY_SHOWN: Final = 60


@dataclass(slots=True)
class _Kind:
    """One kind of failure, since it was last logged."""

    said_at: float
    text: str
    count: int = 0


class RunFailures:
    """The failures of one run. Any thread may call."""

    def __init__(self, now_ms: Callable[[], float], lock: Lock, secrets: tuple[str, ...], **whose: Any) -> None:
        """secrets: hidden in every text. whose: log fields of each line."""
        self._now_ms = now_ms
        self._lock = lock
        self.secrets = secrets
        self._whose = whose
        self._kinds: dict[Hashable, _Kind] = {}
        self._letters_from = -inf
        self._letters = self._letters_unsaid = 0
        self._topic = ""
        self._next_look = inf

    def failed(self, attempt: Attempt, error: BaseException) -> None:
        """A try has failed."""
        now, where = self._now_ms(), place_of(error)
        kind: Hashable = type(error).__module__, type(error).__qualname__, where
        with self._lock:
            if kind not in self._kinds and len(self._kinds) >= MOST_KINDS:
                kind = None
            known = self._kinds.get(kind)
            if known is not None and (known.count or now < known.said_at + 2 * EVERY_MS):  # else it is news again
                known.count += 1
                self._next_look = min(self._next_look, known.said_at + EVERY_MS)
                return
            text = f"{class_name(error)} at {where[0]}:{where[1]}" if kind is not None else "other failures"
            self._kinds[kind] = _Kind(now, text)
        log(
            logging.WARNING,
            "handler_failed",
            "the handler failed: %s: %s (%s, try %s). Failures of this kind are counted from now on, and said "
            "once a minute",
            class_name(error),
            reason_of(error, self.secrets),
            shown(attempt),
            attempt._count,
            error=error,
            trace=trace_of(error, self.secrets),
            **self._fields(attempt),
        )

    def put_aside(self, attempt: Attempt, error: BaseException, topic: str) -> None:
        """A message is a dead letter."""
        now = self._now_ms()
        with self._lock:
            self._topic = topic
            if now - self._letters_from >= EVERY_MS and not self._letters_unsaid:
                self._letters_from, self._letters = now, 0
            self._letters += 1
            if self._letters > LETTERS:
                self._letters_unsaid += 1
                self._next_look = min(self._next_look, self._letters_from + EVERY_MS)
                return
        log(
            logging.INFO,
            "dead_letter",
            "%s was put aside in %s after %s tries: %s: %s",
            shown(attempt),
            topic,
            attempt._count,
            class_name(error),
            reason_of(error, self.secrets),
            **self._fields(attempt),
        )

    def _fields(self, attempt: Attempt) -> dict[str, Any]:
        message = attempt.message
        where = {"topic": message.topic(), "partition": message.partition(), "offset": message.offset()}
        return {**self._whose, **where}

    def look(self, now: float) -> None:
        """Log what is due (now: own clock, ms)."""
        if now < self._next_look:
            return
        self._say(now - EVERY_MS)

    def end(self) -> None:
        """The run ends: log what was only counted."""
        self._say(inf)

    def _say(self, said_before: float) -> None:
        now = self._now_ms()
        with self._lock:
            due = [x for x in self._kinds.values() if x.count and x.said_at <= said_before]
            told = [(x.count, x.text, (now - x.said_at) / 1000) for x in due]
            for kind in due:
                kind.count, kind.said_at = 0, now
            letters = self._letters_unsaid if self._letters_from <= said_before else 0
            if letters:
                self._letters_from, self._letters, self._letters_unsaid = now, 0, 0
            waiting = [x.said_at for x in self._kinds.values() if x.count]
            waiting += [self._letters_from] if self._letters_unsaid else []
            self._next_look = min(waiting, default=inf) + EVERY_MS
        for count, text, seconds in told:
            log(
                logging.WARNING,
                "handler_failed",
                "%d more failure(s) of handlers in %.0f s: %s",
                count,
                seconds,
                text,
                **self._whose,
            )
        if letters:
            text = "%d more message(s) were put aside in %s"
            log(logging.INFO, "dead_letter", text, letters, self._topic, **self._whose)


def say_in_hand(error: Exception, message: ports.Message, config: Mapping[str, object], ids: EngineSettings) -> None:
    """An exception has left a program's own loop: name the message in flight, in the exception and in the log."""
    where = f"{_shown(message, message.key())} was in flight"
    with suppress(Exception):  # an exception may refuse a note
        error.add_note(f"{where}. At least once, what was in flight and is not done comes again, here or elsewhere")
    log(
        logging.WARNING,
        "loop_failed",
        "%s when %s ended the loop: %s",
        where,
        class_name(error),
        reason_of(error, values_of(config)),
        group=ids.group_id,
        client=ids.client_id,
        topic=message.topic(),
        partition=message.partition(),
        offset=message.offset(),
    )


def shown(attempt: Attempt) -> str:
    """The message of an attempt, for people."""
    return _shown(attempt.message, attempt._key)


def _shown(message: ports.Message, key: object) -> str:
    key = key if isinstance(key, bytes | str | None) else repr(key)
    text = "" if key is None else f", key {key[:_KEY_SHOWN]!r}{'…' if len(key) > _KEY_SHOWN else ''}"
    return f"{message.topic()} [{message.partition()}] offset {message.offset()}{text}"


def shortened(reason: str) -> str:
    """A reason as a record may have it: at most 64 bytes, without control characters."""
    shown = "".join(each for each in reason if each.isprintable()) or "unknown"
    return shown.encode()[:MAX_REASON_BYTES].decode(errors="ignore")
