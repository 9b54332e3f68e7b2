"""Messages of ``consumer.run`` that wait for their time: up to a minute in memory, longer in the log (U2)."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from functools import partial
from typing import Any

from kafka_marshal import arguments
from kafka_marshal.adapters.message import Message
from kafka_marshal.client.fetching import FetchingConsumer
from kafka_marshal.engine.work.lane import Lane
from kafka_marshal.engine.work.open_messages import hash_of
from kafka_marshal.engine.work.run import offset_of
from kafka_marshal.errors import ConfigurationError, MarshalError

#: What waits longer than this (s) is in the log, and survives its process. A shorter wait is lost with that: the next
#: owner tries at once, as it does after any failure; records for such waits would cost more than they save.
IN_MEMORY_S = 60.0


def wait_of(not_before: Callable[[Message], object], message: Message, now_ms: float) -> float:
    """How long (ms) a first try has to wait; 0: not at all. Raises ConfigurationError for a result that is no time."""
    found = not_before(message)
    if found is None:
        return 0.0
    if not isinstance(found, datetime) or found.tzinfo is None:
        raise arguments.wrong("what not_before(…) returns", "a datetime with a time zone, or None", found)
    return max(0.0, found.timestamp() * 1000 - now_ms)


def _too_long(wait_s: float, why: str) -> ConfigurationError:
    """A message is to wait longer than this process alone may remember. why: what the log can't do."""
    return ConfigurationError(
        f"a message is to wait {wait_s:,.0f} s for its try. Waits of more than {IN_MEMORY_S:g} s have to be in the "
        f"log, and here they can't be: {why}. The message is not done, and comes again. Ask for shorter waits, "
        "or handle the topic by run(…) in a group that holds its partitions whole, without exactly_once and checkpoints"
    )


def log_it(consumer: FetchingConsumer[Any], lane: Lane, message: Message, wait_ms: float, begun: int) -> None:
    """Have the log show that the next try waits for this long, also at the next owner. begun: how many tries have."""
    assignment = lane.assignment
    place = (assignment.key, assignment.epoch, offset_of(message), hash_of(message))
    consumer._say(partial(consumer._take, consumer._engine.later, *place, begun, wait_ms))


def why_not_logged(consumer: FetchingConsumer[Any], wait_ms: float) -> ConfigurationError | None:
    """Why the log can't show that a message waits for this long; None: it can."""
    group, cause = consumer._options.settings.group, None
    if consumer._transactions is not None:
        why = "with exactly_once= progress can't pass an open message"
    elif not consumer._engine.handles_open:
        why = "with mode=Batches() the log has no try of a single message"
    elif group is not None and group.checkpoints is not None:
        why = "what is open is in no checkpoint, and this group takes some"
    else:
        try:
            consumer._require_sharing_level("a wait in the log")
        except MarshalError as error:
            why, cause = str(error), error
        else:
            return None
    refusal = _too_long(wait_ms / 1000, why)
    refusal.__cause__ = cause
    return refusal
