"""The inputs of an engine: functions marked as :func:`given`. All pass through :meth:`Engine.take`, one at a time.

So the run of an engine is a function of its inputs, of the records of the coordination topic, and of what it reads from
user threads (:mod:`.readings`). :mod:`.recording` writes these down; a replay feeds them in again. Objects in
inputs are the engine's own: an earlier ``take`` returned them. Times are by our own clock.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, TypeVarTuple

F = TypeVar("F", bound=Callable[..., Any])
#: Of what an input returns, and of its arguments.
T = TypeVar("T")
Ts = TypeVarTuple("Ts")

#: Functions (also those of classes) that are inputs.
GIVEN: set[Callable[..., Any]] = set()


def given(function: F) -> F:
    """Mark a function that is called from outside of the engine, through ``Engine.take`` alone."""
    GIVEN.add(function)
    return function
