"""The workers of ``run`` (:mod:`.parallel`): threads that call functions, or tasks of an event loop for coroutines.

If all workers took lanes in turn, the lane of a frequent key would wait for all others after each of its messages, and
be left alone at the end. If all took the longest first, a rare key would wait for the whole backlog of frequent ones.
So half of the workers do each. And one try in two is a message's first, if any waits: many that fail, and are tried
again and again, hold no others up.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, cast

from kafka_marshal.client.attempt import Attempt
from kafka_marshal.client.closing import calling
from kafka_marshal.client.handling import check_result, deserialized
from kafka_marshal.client.tries import Tries, cancelled
from kafka_marshal.engine.work.lane import Lane, RateLimited
from kafka_marshal.logs import log
from kafka_marshal.runtime import is_ours

if TYPE_CHECKING:
    from kafka_marshal.client.in_batches import Gathered

#: Lanes are sorted by the number of binary digits of their waiting messages; longer ones than this count the same.
MOST_DIGITS = 12

#: With this number of lanes waiting, all workers take them in turn: the workers for that may all be stuck.
MOST_IN_TURN = 10_000


class LaneQueue(Protocol):
    """The lanes that wait for a worker, and the rates that limit them now."""

    @property
    def limits(self) -> tuple[RateLimited, ...]: ...
    def __len__(self) -> int: ...
    def put(self, lane: Lane) -> None: ...
    def take(self, longest: bool) -> Lane | None: ...


class Ready:
    """The lanes that wait for a worker. Any thread calls it, without a lock: each step is atomic in the interpreter.

    Workers that take no more lanes than were put find one each.
    """

    limits: tuple[RateLimited, ...] = ()

    def __init__(self) -> None:
        #: Each lane is in a cell that is in several queues; the worker that takes the lane empties the cell.
        self._in_turn: deque[list[Lane]] = deque()
        self._by_length: list[deque[list[Lane]]] = [deque() for _ in range(MOST_DIGITS + 1)]
        #: Those whose first message was not tried before; those whose was, and whether one of them is the next.
        self._new: deque[list[Lane]] = deque()
        self._again: deque[list[Lane]] = deque()
        self._is_again = False

    def __len__(self) -> int:
        """How many there are, or more."""
        return len(self._in_turn)

    def put(self, lane: Lane) -> None:
        """This lane may begin."""
        cell = [lane]
        if lane.number > 1:
            _forget_empty(self._again)
            self._again.append(cell)
        else:
            _forget_empty(self._new)
            self._new.append(cell)
            if lane.rest:  # those with one message are in turn, behind all longer ones
                as_long = self._by_length[min(len(lane.rest).bit_length(), MOST_DIGITS)]
                _forget_empty(as_long)
                as_long.append(cell)
        _forget_empty(self._in_turn)
        self._in_turn.append(cell)

    def take(self, longest: bool) -> Lane | None:
        """The lane with the most messages (longest), or the one that has waited longest; None: there is none."""
        if self._again:
            self._is_again = not self._is_again
            if (lane := _first(self._again if self._is_again else self._new)) is not None:
                return lane
        if longest and len(self._in_turn) < MOST_IN_TURN:
            for cells in reversed(self._by_length):
                if cells and (lane := _first(cells)) is not None:
                    return lane
        return _first(self._in_turn)


def _first(cells: deque[list[Lane]]) -> Lane | None:
    while cells:
        try:
            return cells.popleft().pop()
        except IndexError:
            pass  # another thread was faster
    return None


def _forget_empty(cells: deque[list[Lane]]) -> None:
    """Drop empty cells at the front: there are all whose lanes were taken in turn."""
    try:
        while cells and not cells[0]:
            if cell := cells.popleft():
                cells.appendleft(cell)
    except IndexError:
        pass  # another thread has forgotten them


class Threads:
    """Handlers called in threads, ``concurrency`` of them."""

    def __init__(self, tries: Tries) -> None:
        self._tries = tries
        self._ready: LaneQueue = Ready()
        #: True for each lane that is ready, None for each thread that has to end.
        self._calls = tries.runtime.mailbox()
        #: How many there are, and how many there should be: one more for each that hangs.
        self._lock = tries.runtime.lock()
        self._threads = 0
        self._wanted = tries.options.concurrency
        #: One thread at a time gathers a batch: else few messages would be spread over many small ones.
        self._gathering = tries.runtime.lock()
        #: The lane that begins the next one.
        self._next: Lane | None = None
        #: For the wait of that thread; nothing notifies it.
        self._more = tries.runtime.condition()
        #: The first lanes of the batches that handlers have.
        self._heads: set[Lane] = set()

    def start(self) -> None:
        while self._threads < self._wanted:
            with self._lock:
                self._threads += 1
                number = self._threads
            self._tries.runtime.start(partial(self._work, number % 2 == 0), f"kafka-marshal-handler-{number}")

    def put(self, lanes: Iterable[Lane]) -> None:
        for lane in lanes:
            self._ready.put(lane)
            self._calls.put(True)

    def wake(self, count: int) -> None:
        for _ in range(count):
            self._calls.put(True)

    def look(self, now: float) -> None:
        timeout = self._tries.handler_timeout_ms
        if timeout is None:
            return
        lanes = self._tries.lanes.hanging(now - timeout)
        hanging = len(lanes if self._tries.options.batch is None else self._heads.intersection(lanes))
        if self._tries.options.concurrency + hanging > self._wanted:
            log(
                logging.WARNING,
                "handlers_hang",
                "%d handler(s) have taken longer than handler_timeout: others get what they have, their threads are "
                "left behind, and new ones take their place",
                hanging,
            )
        self._wanted = self._tries.options.concurrency + hanging
        self.start()

    def end(self, timeout: float) -> None:
        self._wanted = 0
        for _ in range(self._threads):
            self._calls.put(None)

    @property
    def count(self) -> tuple[int, int]:
        return self._threads, self._wanted

    @property
    def limits(self) -> tuple[RateLimited, ...]:
        return self._ready.limits

    def _work(self, longest: bool) -> None:
        """Handle messages until the end (a worker)."""
        try:
            if (self._handle_on if self._tries.options.batch is None else self._handle_batches)(longest):
                return
        except BaseException as error:  # noqa: BLE001 - without this handler, the run must not seem complete
            self._tries.end(error)
        with self._lock:
            self._threads -= 1

    def _handle_on(self, longest: bool) -> bool:
        """Handle until the end; True: there was one thread too many. No lock is held while the handler runs."""
        tries, handle, deserialize = self._tries, self._tries.options.handle, self._tries.options.deserialize
        call, take, now_ms = self._calls.get, self._ready.take, tries.runtime.now_ms
        is_ours.set(False)
        calling.set(tries.consumer)
        is_called = False
        while is_called or call() is not None:
            is_called, lane = False, take(longest)
            if lane is None:
                continue
            began, turn = now_ms(), lane.turn
            try:
                attempt = tries.begin(lane, began)
                if attempt is None:
                    continue
                try:
                    message = attempt.message
                    result = handle(message if deserialize is None else deserialized(deserialize, message))
                    if result is not None:
                        check_result(result)
                except BaseException as error:  # noqa: BLE001 - it is reported, and may end the run
                    tries.failed(lane, attempt, began, cancelled(error))
                else:
                    is_called = tries.done(lane, attempt, began)
                    if is_called:  # this thread takes it: to wake another one costs more than all the rest
                        self._ready.put(lane)
            except BaseException as error:  # noqa: BLE001 - what follows a handler ends the run
                tries.broken(lane, turn + 1, error)
            if self._threads > self._wanted and self._is_one_too_many():
                if is_called:
                    self._calls.put(True)
                return True
        return False

    def _handle_batches(self, longest: bool) -> bool:
        """As ``_handle_on``, with a list of messages for each call of the handler."""
        from kafka_marshal.client.in_batches import Gathered

        tries, handle = self._tries, self._tries.options.handle
        is_ours.set(False)
        calling.set(tries.consumer)
        while True:
            batch, error = Gathered(tries), None
            try:
                with self._gathering:
                    if not self._gather(batch, longest):
                        return False
                if messages := batch.prepare():
                    self._heads.add(head := batch.ones[0].lane)
                    try:
                        if (result := handle(messages)) is not None:
                            check_result(result)
                    except BaseException as raised:  # noqa: BLE001 - it is reported, and may end the run
                        error = cancelled(raised)
                    self._heads.discard(head)
                    batch.end(error)
            except BaseException as error:
                batch.broken(error)
                raise
            if self._threads > self._wanted and self._is_one_too_many():
                return True

    def _gather(self, batch: Gathered, longest: bool) -> bool:
        """Begin what the batch has, which may be nothing. False: the end."""
        if self._calls.get() is None:
            return False
        runtime, is_called = self._tries.runtime, True
        until = runtime.monotonic() + self._tries.options.linger
        while not batch.is_full:
            lane, self._next = self._next or self._ready.take(longest), None
            if lane is None:
                left = until - runtime.monotonic()
                if not batch.ones or left <= 0 or batch.is_due:
                    break
                with self._more:  # a mailbox has no timeout
                    self._more.wait(min(left, LINGER_CHECK_S))
                continue
            if not is_called and self._calls.get() is None:  # that of this lane, or the end
                self._calls.put(None)
            is_called = False
            if not batch.add(lane):
                self._next = lane
                self._calls.put(True)
                break
        return True

    def _is_one_too_many(self) -> bool:
        """Whether this thread was replaced while its handler hung, or the run has ended."""
        with self._lock:
            is_one = self._threads > self._wanted
            self._threads -= is_one
            return is_one


#: A handler that awaits nothing keeps the loop: after this number of messages in a row its task yields.
IN_A_ROW = 100

#: A worker that waits for more messages of its batch checks this often (s).
LINGER_CHECK_S = 0.005


class Tasks:
    """As many tasks as handlers may run at a time."""

    def __init__(self, tries: Tries, loop: asyncio.AbstractEventLoop | None) -> None:
        """loop: where they run; None: in a new loop, in a new thread."""
        self._tries = tries
        self._theirs = loop
        self._have_ended = threading.Event()
        #: Lanes for the tasks; any thread adds lanes, the loop's thread takes them.
        self._ready: LaneQueue = Ready()
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
        #: One task at a time gathers a batch; and the lane that begins the next one.
        self._gathering = asyncio.Lock()
        self._next: Lane | None = None

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

    @property
    def limits(self) -> tuple[RateLimited, ...]:
        return self._ready.limits

    def put(self, lanes: Iterable[Lane]) -> None:
        for lane in lanes:
            self._ready.put(lane)
        if self._ready and self._idle:
            self._call(self._rouse)

    def wake(self, count: int) -> None:
        if self._idle:
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
            await (self._handle_on if self._tries.options.batch is None else self._handle_batches)(longest)
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

    async def _handle_batches(self, longest: bool) -> None:
        """As ``_handle_on``, with a list of messages for each call of the handler."""
        from kafka_marshal.client.in_batches import Gathered

        while True:
            batch = Gathered(self._tries)
            try:
                async with self._gathering:
                    if not await self._gather(batch, longest):
                        return
                if messages := batch.prepare():
                    await self._handle_batch(batch, messages)
            except BaseException as error:
                batch.broken(_noted(error))
                raise
            await asyncio.sleep(0)

    async def _gather(self, batch: Gathered, longest: bool) -> bool:
        """Begin what the batch has. False: the end."""
        tries, until = self._tries, 0.0
        while not batch.is_full:
            lane, self._next = self._next or self._ready.take(longest), None
            if lane is not None:
                if not batch.ones:
                    until = tries.runtime.monotonic() + tries.options.linger
                if not batch.add(lane):
                    self._next = lane
                    break
            elif batch.ones:
                left = until - tries.runtime.monotonic()
                if left <= 0 or batch.is_due:
                    break
                await asyncio.sleep(min(left, LINGER_CHECK_S))
            elif self._is_over:
                return False
            else:
                await self._wait()
        return True

    async def _handle_batch(self, batch: Gathered, messages: list[Any]) -> None:
        """Call the handler, and settle each message."""
        task, head, error = cast("asyncio.Task[None]", asyncio.current_task()), batch.ones[0].lane, None
        self._running[head] = task
        try:
            if (result := await cast("Any", self._tries.options.handle)(messages)) is not None:
                check_result(result)
        except BaseException as raised:  # noqa: BLE001 - it is reported, and may end the run
            error = raised
        self._running.pop(head, None)
        if self._was_late(head) and error is not None:
            error = self._named(error)
            if self._is_over:  # it was cancelled as the run ends
                batch.give_back(error)
                return
        elif error is not None and task.cancelling() == 0:
            error = cancelled(error)
        batch.end(error)

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
