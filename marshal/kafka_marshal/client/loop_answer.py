"""Calls of an event loop's tasks, carried out by threads of our own: the loop waits for none of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from kafka_marshal.node.serving import LOOK_S, Answer, Servants
from kafka_marshal.runtime import EMPTY

__all__ = ["LoopBox", "awaited"]

T = TypeVar("T")


class LoopBox:
    """One thing, put once by another thread, for a task of this loop."""

    __slots__ = ("_loop", "future")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.future: asyncio.Future[Any] = loop.create_future()

    def put(self, thing: Any) -> None:
        """Wake the task (any thread); a loop that has ended needs nothing any more."""
        try:
            self._loop.call_soon_threadsafe(self._set, thing)
        except RuntimeError:
            return

    def _set(self, thing: Any) -> None:
        if not self.future.done():
            self.future.set_result(thing)

    def get(self, timeout: float) -> Any:
        """For whoever would wait in a thread: nobody does."""
        return EMPTY


async def awaited(
    servants: Servants,
    function: Callable[..., T],
    *args: object,
    undo: Callable[[T], object] | None = None,
) -> tuple[T, Answer[T]]:
    """Have ``function(is_gone, *args)`` carried out; its value, and the answer, whose ``receipt`` the caller keeps.

    Cancelled, it leaves: the value is undone. Raises what the function raises, EndedError where no thread is left.
    """
    box = LoopBox(asyncio.get_running_loop())
    answer = servants.ask(function, *args, undo=undo, box=box)
    try:
        while not box.future.done():
            was_over = servants.over
            await asyncio.wait((box.future,), timeout=LOOK_S)
            if was_over and not box.future.done():
                servants.check()
        value, error = box.future.result()
        if error is not None:
            raise error
    except BaseException:
        answer.receipt.left = True
        raise
    return value, answer
