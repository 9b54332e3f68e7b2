"""One way to log: a sentence for people; the event's name and its fields for programs (docs/logging.md)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from typing import Final

from kafka_marshal.secret import visible

#: The library's logger. librdkafka's own lines go to its child ``kafka_marshal.librdkafka``.
LOGGER: Final = logging.getLogger("kafka_marshal")


class Event:
    """What happens to a member, as ``record.event`` of its log lines. Other lines have names, too."""

    JOINED = "joined"
    LEFT = "left"
    MEMBER = "member"
    CLAIMED = "claimed"
    RELEASED = "released"
    LOST = "lost"
    RESTORED = "restored"
    CHECKPOINT = "checkpoint"
    PAUSED = "paused"
    RESUMED = "resumed"
    KAFKA_AWAY = "kafka_away"
    KAFKA_BACK = "kafka_back"


def log(
    severity: int,
    event: str,
    message: str,
    *args: object,
    error: BaseException | None = None,
    trace: str | None = None,
    **fields: object,
) -> None:
    """Log message % args; the line's record has ``event`` and the fields as attributes. error: with its traceback.

    It is one line, whatever others call themselves. trace: shown in place of the error's own traceback.
    """
    safe = [visible(str(arg)) if isinstance(arg, str | BaseException) else arg for arg in args]
    extra = {"event": event, **fields}
    if trace is None or error is None or not LOGGER.isEnabledFor(severity):
        LOGGER.log(severity, visible(message), *safe, exc_info=error, extra=extra, stacklevel=2)
        return
    file, line, function, _ = LOGGER.findCaller(stacklevel=2)
    raised = type(error), error, error.__traceback__
    record = LOGGER.makeRecord(
        LOGGER.name, severity, file, line, visible(message), tuple(safe), raised, function, extra
    )
    record.exc_text = trace  # formatters use it if it is set
    LOGGER.handle(record)


#: A repeated message is logged this often (ms).
SAID_EVERY_MS = 10_000.0


class RateLimit:
    """Lets each thing through at once, and again once ``every`` has passed since. Any thread may ask.

    Without a lock: a signal's handler may interrupt it and ask too. What two threads log at once may appear twice.
    """

    def __init__(self, every: float, kept: int = 1_000) -> None:
        """every: in the unit of the clock that ``due`` gets. kept: how many things are remembered."""
        self._every = every
        self._kept = kept
        #: By thing: when it passed last, and how often it was held back since.
        self._said: dict[Hashable, tuple[float, int]] = {}

    def due(self, thing: Hashable, now: float) -> int | None:
        """How often this was held back since it last passed, if it passes now; None: hold it back."""
        said_at, held_back = self._said.get(thing, (float("-inf"), 0))
        if now - said_at < self._every:
            self._said[thing] = (said_at, held_back + 1)
            return None
        if thing not in self._said and len(self._said) >= self._kept:
            self._said.clear()
        self._said[thing] = (now, 0)
        return held_back


class RateLimitedLog:
    """A log that writes the same thing once every SAID_EVERY_MS, with how often it was held back in between."""

    def __init__(self, now_ms: Callable[[], float]) -> None:
        self._now_ms = now_ms
        self._repeats = RateLimit(SAID_EVERY_MS)
        #: Whether Kafka answers nothing at all: one line says that, and what fails meanwhile is for debugging.
        self.is_outage: Callable[[], bool] = lambda: False

    def say(self, level: int, event: str, thing: Hashable, message: str) -> None:
        """Log message at a level of logging, about thing."""
        held_back = self._repeats.due(thing, self._now_ms())
        if held_back is not None:
            more = f" ({held_back} more since this was said last)" if held_back else ""
            log(level, event, "%s%s", message, more)

    def unanswered(self, event: str, thing: Hashable, message: str) -> None:
        """Log message, that Kafka did not answer something, as a warning: unless it answers nothing at all."""
        if self.is_outage():
            log(logging.DEBUG, event, "%s", message)
        else:
            self.warn(event, thing, message)

    def warn(self, event: str, thing: Hashable, message: str) -> None:
        """Log message as a warning."""
        self.say(logging.WARNING, event, thing, message)
