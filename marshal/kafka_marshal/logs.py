"""One way to log: a sentence for people; the event's name and its fields for programs (docs/logging.md)."""

from __future__ import annotations

import logging
from typing import Final

from kafka_marshal.visible import visible

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
