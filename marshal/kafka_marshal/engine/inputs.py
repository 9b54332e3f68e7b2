"""The inputs of an engine: functions marked as :func:`given`. All pass through :meth:`Engine.take`, one at a time.

So the run of an engine is a function of its inputs, of the records of the coordination topic, and of what it reads from
user threads (:func:`reading`). :mod:`.recording` writes these down; a replay feeds them in again. Objects in
inputs are the engine's own: an earlier ``take`` returned them. Times are by our own clock.
"""

from __future__ import annotations

from _thread import get_ident
from collections.abc import Callable
from functools import wraps
from typing import Any, Protocol, TypeVar, TypeVarTuple

from kafka_marshal.types import F, P

Ts = TypeVarTuple("Ts")

#: Functions (also those of classes) that are inputs.
GIVEN: set[Callable[..., Any]] = set()


def given(function: F) -> F:
    """Mark a function that is called from outside of the engine, through ``Engine.take`` alone."""
    GIVEN.add(function)
    return function


# What the engine reads of state that user threads change without the lock, at moments that no input shows: a user's
# thread takes messages from a run's iterator, and notes each one right before it leaves the library.

R = TypeVar("R")


class Reader(Protocol):
    """A recording, or a replay, while its engine takes an input."""

    def reading(self, name: str, read: Callable[[], Any], of: tuple[Any, ...]) -> Any:
        """Answer a reading. read: takes it; of: the object that is read, and the arguments."""


#: Thread → the reader of the engine that takes an input there. Empty unless a run is recorded or replayed.
READERS: dict[int, Reader] = {}


def reading(function: Callable[P, R]) -> Callable[P, R]:
    """Mark a method that reads what user threads change, and changes nothing itself."""
    name = function.__name__

    @wraps(function)
    def read(*args: P.args, **kwargs: P.kwargs) -> R:
        if not READERS or (reader := READERS.get(get_ident())) is None:
            return function(*args, **kwargs)
        found: R = reader.reading(name, lambda: function(*args, **kwargs), args)
        return found

    return read
