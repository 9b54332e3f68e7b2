"""Handlers that are coroutine functions, awaited in tasks of one event loop (:mod:`.parallel`)."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Iterable
from typing import Any, cast

from kafka_marshal.client.attempt import Attempt
from kafka_marshal.client.closing import calling
from kafka_marshal.client.ready import Ready, check_result, deserialized
from kafka_marshal.client.tries import Tries, cancelled
from kafka_marshal.engine.work.lane import Lane
from kafka_marshal.runtime import is_ours

#: A handler that awaits nothing keeps the loop: after this number of messages in a row its task yields.
IN_A_ROW = 100


class Tasks:
    """As many tasks as handlers may run at a time."""

    def __init__(self, tries: Tries, loop: asyncio.AbstractEventLoop | None) -> None:
        """loop: where they run; None: in a new loop, in a new thread."""
        self._tries = tries
        self._theirs = loop
        self._have_ended = threading.Event()
        #: Lanes for the tasks; any thread adds lanes, the loop's thread takes them.
        self._ready = Ready()
        #: A future for each task that waits for a lane.
        self._idle: deque[asyncio.Future[None]] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._has_started = False
        #: How many tasks there are, and how many there should be.
        self._tasks = self._wanted = 0
        self._is_over = False
        #: Lane → the task in which its handler runs.
        self._running: dict[Lane, asyncio.Task[None]] = {}
        #: Lanes whose handlers were cancelled because they took too long.
        self._late: set[Lane] = set()

    def start(self) -> None:
        if self._theirs is None:
            self._tries.runtime.start(self._in_own_loop, "kafka-marshal-handlers")
        else:
            asyncio.run_coroutine_threadsafe(self._main(), self._theirs)
        self._has_started = True

    def _in_own_loop(self) -> None:
        try:
            asyncio.run(self._main())
        except BaseException as error:  # noqa: BLE001 - the run raises it: a thread's own error would go to stderr
            self._tries.end(error)

    async def _main(self) -> None:
        try:
            is_ours.set(False)
            calling.set(self._tries.consumer)
            self._loop = asyncio.get_running_loop()
            concurrency = self._tries.options.concurrency
            tasks = [asyncio.ensure_future(self._work(x % 2 == 1)) for x in range(concurrency)]
            self._wanted = self._tasks = concurrency
            await asyncio.wait(tasks)
        except BaseException as error:
            self._tries.end(_noted(error))
            raise
        finally:
            self._wanted = 0
            self._have_ended.set()

    @property
    def count(self) -> tuple[int, int]:
        return self._tasks, self._wanted

    def put(self, lanes: Iterable[Lane]) -> None:
        for lane in lanes:
            self._ready.put(lane)
        if self._ready and self._idle:
            self._call(self._rouse)

    def _call(self, function: Any, *args: object) -> None:
        """Have the loop's thread call it (any thread)."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *args)

    def _rouse(self) -> None:
        try:
            for _ in range(len(self._idle) if self._is_over else min(len(self._ready), len(self._idle))):
                future = self._idle.popleft()
                if not future.done():
                    future.set_result(None)
        except BaseException as error:  # noqa: BLE001 - the loop would log it, and tasks would wait on
            self._tries.end(error)

    def look(self, now: float) -> None:
        timeout = self._tries.handler_timeout_ms
        if timeout is not None:
            for lane in self._tries.lanes.hanging(now - timeout):
                self._call(self._cancel, lane, lane.began)

    def _cancel(self, lane: Lane, began: float) -> None:
        """Cancel a handler, unless it has returned meanwhile."""
        task = self._running.get(lane)
        if task is not None and lane.began == began and lane not in self._late:
            self._late.add(lane)
            task.cancel()

    def end(self, timeout: float) -> None:
        self._is_over = True
        self._call(self._rouse)
        for lane in self._tries.lanes.hanging(float("inf")):
            self._call(self._cancel, lane, lane.began)
        if self._has_started:
            self._have_ended.wait(timeout)

    async def _work(self, longest: bool) -> None:
        """Handle messages until the end (a task)."""
        try:
            await self._handle_on(longest)
        except BaseException as error:
            self._tries.end(_noted(error))  # without this handler, the run must not seem complete
            if isinstance(error, asyncio.CancelledError):
                raise
        finally:
            self._tasks -= 1

    async def _handle_on(self, longest: bool) -> None:
        tries, now_ms, in_a_row = self._tries, self._tries.runtime.now_ms, 0
        while True:
            lane = self._ready.take(longest)
            if lane is None:
                if self._is_over:
                    return
                await self._wait()
                in_a_row = 0
                continue
            began, turn = now_ms(), lane.turn
            try:
                attempt = tries.begin(lane, began)
                if attempt is None:
                    continue
                if await self._handle(lane, attempt, began):
                    self._ready.put(lane)  # this task takes the next one, so no other must be woken
            except BaseException as error:  # noqa: BLE001 - what follows a handler ends the run
                tries.broken(lane, turn + 1, error)
            in_a_row += 1
            if in_a_row >= IN_A_ROW:
                in_a_row = 0
                await asyncio.sleep(0)

    async def _handle(self, lane: Lane, attempt: Attempt, began: float) -> bool:
        """Call the handler, and deal with its result; whether the lane is ready again."""
        tries, options, task = self._tries, self._tries.options, asyncio.current_task()
        handle, deserialize, message = cast("Any", options.handle), options.deserialize, attempt.message
        self._running[lane] = cast("asyncio.Task[None]", task)
        try:
            result = await handle(message if deserialize is None else deserialized(deserialize, message))
            if result is not None:
                check_result(result)
        except BaseException as error:  # noqa: BLE001 - it is reported, and may end the run
            self._running.pop(lane, None)
            if self._was_late(lane):
                if self._is_over:  # it was cancelled as the run ends
                    tries.given_back(lane)
                    return False
                error = self._named(error)
            elif task is not None and task.cancelling() == 0:
                error = cancelled(error)
            tries.failed(lane, attempt, began, error)
            return False
        self._running.pop(lane, None)
        self._was_late(lane)
        return tries.done(lane, attempt, began)

    async def _wait(self) -> None:
        future = asyncio.get_running_loop().create_future()
        self._idle.append(future)
        if self._ready or self._is_over:  # the thread that put the lane there saw no idle task
            self._idle.pop()
        else:
            await future

    def _was_late(self, lane: Lane) -> bool:
        """Whether we have cancelled its handler; clears the cancellation, for the task's next handler."""
        if lane not in self._late:
            return False
        self._late.discard(lane)
        if (task := asyncio.current_task()) is not None:
            task.uncancel()
        return True

    def _named(self, error: BaseException) -> BaseException:
        """The error of a handler that we have cancelled: a TimeoutError, unless it raised another one."""
        if not isinstance(error, asyncio.CancelledError):
            return error
        timeout_s = (self._tries.handler_timeout_ms or 0.0) / 1000
        late = TimeoutError(f"the handler has not returned within handler_timeout ({timeout_s:g} s), and was cancelled")
        late.__cause__ = error
        return late


def _noted(error: BaseException) -> BaseException:
    """Explain a cancellation, whose own text is empty."""
    if isinstance(error, asyncio.CancelledError) and not hasattr(error, "__notes__"):
        error.add_note(
            "the program has cancelled a task that calls handlers, or has stopped its event loop: this ends run(…). "
            "What was not done comes again, here or elsewhere"
        )
    return error
