"""What handlers of ``consumer.run`` return, and what ``deserialize`` makes of a message: nothing is still to run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kafka_marshal import arguments
from kafka_marshal.adapters.message import Message
from kafka_marshal.errors import ConfigurationError

__all__ = ["check_result", "deserialized"]


def check_result(result: object) -> None:
    """Refuse a result whose work has not run: its message is not done."""
    if what := arguments.unfinished(result):
        arguments.drop(result)
        raise ConfigurationError(
            f"the handler has returned {what}: its work has not run, or not to its end, so its message is not done and "
            "comes again. Give run(…) a function that does the work, or the coroutine function itself instead of a "
            "function that calls it; wait for the result of a future"
        )


def deserialized(deserialize: Callable[[Message], Any], message: Message) -> Any:
    """What the handler gets; refuses what would have to be awaited first."""
    value = deserialize(message)
    if arguments.is_awaited(value):
        arguments.drop(value)
        raise ConfigurationError(
            "deserialize has returned something that must be awaited, and run(…) awaits it nowhere. Its message is not "
            "done. Give a function that returns the value, or deserialize in the handler"
        )
    return value
