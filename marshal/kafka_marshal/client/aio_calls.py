"""Calls that block, for an event loop: they are carried out by other threads, and awaited."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any, TypeVar

from kafka_marshal.node.serving import LOOK_S, Answer, Servants
from kafka_marshal.runtime import EMPTY, THREADS, is_ours

if TYPE_CHECKING:
    from kafka_marshal.client.consumer import Consumer

T = TypeVar("T")

#: How many calls may wait at a time, each in a thread: mostly polls without a timeout.
MOST_CALLS = 256


class LoopBox:
    """One thing, put once by another thread, for a task of this loop."""

    __slots__ = ("_loop", "future")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.future: asyncio.Future[Any] = loop.create_future()

    def put(self, thing: Any) -> None:
        """Wake the task (any thread); no effect if the loop has ended."""
        try:
            self._loop.call_soon_threadsafe(self._set, thing)
        except RuntimeError:
            return

    def _set(self, thing: Any) -> None:
        if not self.future.done():
            self.future.set_result(thing)

    def get(self, timeout: float) -> Any:
        """For a caller that would wait in a thread: it returns at once, as there is none."""
        return EMPTY


async def awaited(
    servants: Servants,
    function: Callable[..., T],
    *args: object,
    undo: Callable[[T], object] | None = None,
) -> tuple[T, Answer[T]]:
    """Have ``function(is_gone, *args)`` carried out; returns its value, and the answer with its ``receipt``.

    If it is cancelled, the value is undone. Raises what the function raises, EndedError if no thread is left.
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


class Calls:
    """Threads for calls that block."""

    def __init__(self) -> None:
        self._threads = THREADS.executor(MOST_CALLS, "kafka-marshal-aio")

    async def __call__(self, function: Callable[..., T], *args: Any, **named: Any) -> T:
        """Returns the function's value. If it is cancelled, no task waits any more, but the function continues."""
        return await asyncio.wrap_future(self._threads.submit(_as_a_user, partial(function, *args, **named)))

    async def taking(self, consumer: Consumer, function: Callable[..., T], *args: Any) -> T:
        """A call that returns messages. No task sees what it takes after it was cancelled: that comes again."""
        now_ms = consumer._driver.now_ms
        span = [now_ms(), inf]

        def take() -> T:
            try:
                return function(*args)
            finally:
                span[1] = now_ms()

        try:
            return await self(take)
        except asyncio.CancelledError:
            consumer._undone.cancelled.append(span)
            raise

    def end(self) -> None:
        self._threads.shutdown(wait=False)


def _as_a_user(function: Callable[[], T]) -> T:
    """Call it as one of the user's threads would, which waits for ours."""
    is_ours.set(False)
    return function()


def run_in(loop: asyncio.AbstractEventLoop, work: Any) -> Future[Any]:
    """Have the loop await something; any thread may call it."""

    async def wait() -> object:
        return await work

    return asyncio.run_coroutine_threadsafe(wait(), loop)


def state_callback(loop: asyncio.AbstractEventLoop, function: Callable[[Any], object]) -> Callable[[Any], object]:
    """on_checkpoint and the like of this loop: a coroutine runs to its end; what it returns may be awaited later."""

    def call(asked: Any) -> object:
        found = run_in(loop, function(asked)).result() if inspect.iscoroutinefunction(function) else function(asked)
        if inspect.iscoroutine(found):  # of a function that is not one itself: its work has not begun
            found = run_in(loop, found).result()
        is_future = inspect.isawaitable(found) and not isinstance(found, Future)
        return run_in(loop, found) if is_future else found

    return call
