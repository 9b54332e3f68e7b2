"""What the engine reads of state that user threads change without the lock, at moments that no input shows.

A user's thread takes messages from a run's iterator, and notes each one right before it leaves the library. The engine
reads that position when it needs it. A recording writes down what was read; a replay answers with it.
"""

from __future__ import annotations

from _thread import get_ident
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, Protocol, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Reader(Protocol):
    """A recording, or a replay, while its engine takes an input."""

    def reading(self, name: str, read: Callable[[], Any], of: tuple[Any, ...]) -> Any:
        """Answer a reading. read: takes it; of: the object that is read, and the arguments."""


#: Thread → the reader of the engine that takes an input there. Empty unless a run is recorded or replayed.
READERS: dict[int, Reader] = {}


def reading(function: Callable[P, T]) -> Callable[P, T]:
    """Mark a method that reads what user threads change, and changes nothing itself."""
    name = function.__name__

    @wraps(function)
    def read(*args: P.args, **kwargs: P.kwargs) -> T:
        if not READERS or (reader := READERS.get(get_ident())) is None:
            return function(*args, **kwargs)
        found: T = reader.reading(name, lambda: function(*args, **kwargs), args)
        return found

    return read
