"""The same API for asyncio: blocking calls are awaited, and a run of messages comes to the loop in one step.

A Marshal of :mod:`.marshal` does the work, on its own threads. Nothing here blocks the loop's thread.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial, wraps
from itertools import islice
from math import inf
from types import TracebackType
from typing import Any, Concatenate, Generic, Literal, Self, TypeVar, Unpack, cast, overload

from kafka_marshal import arguments
from kafka_marshal.adapters.message import Message
from kafka_marshal.checkpoints import CheckpointPolicy
from kafka_marshal.client import committing, locks
from kafka_marshal.client import consumer as plain
from kafka_marshal.client import group_consumer as plain_group
from kafka_marshal.client import marshal as plain_marshal
from kafka_marshal.client.batch import Batch
from kafka_marshal.client.checkpointing import CheckpointStatus
from kafka_marshal.client.closing import DEFAULT_TIMEOUT_S, calling
from kafka_marshal.client.group_consumer import COMMIT_TIMEOUT_S, MemberPiece
from kafka_marshal.client.handling import RUN, Handler, RunOptions, RunSettings
from kafka_marshal.client.health import Health
from kafka_marshal.client.lease import ClaimedLease, serve_claim
from kafka_marshal.client.modes import Batches, Claims, Group, Keys, Mode
from kafka_marshal.client.options import (
    CALLBACKS,
    TAKES,
    ConsumerArguments,
    Renamed,
    check_names,
    refuse_unknown,
    takes,
)
from kafka_marshal.client.parallel import carry_out
from kafka_marshal.client.shared import ShareConsumer, SharedBatch
from kafka_marshal.client.transactions import Headers
from kafka_marshal.client.tries import RunCall
from kafka_marshal.errors import ClosedError, ConfigurationError
from kafka_marshal.node.serving import LOOK_S, EndedError, Reply, Servants
from kafka_marshal.runtime import EMPTY, THREADS, is_ours
from kafka_marshal.types import Committed, P, T, TopicPartition

S = TypeVar("S")
C = TypeVar("C", bound=plain.Consumer)
H = TypeVar("H", bound=ClaimedLease | locks.Leader)

#: After this many messages in a row that were ready, an iteration yields to other tasks.
IN_A_ROW = 500

_CLAIMS = Claims()

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
) -> tuple[T, Reply[T]]:
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
        #: The Marshal is closed: its calls return, or raise, at once.
        self._is_over = False

    async def __call__(self, function: Callable[..., T], *args: Any, **named: Any) -> T:
        """Returns the function's value. If it is cancelled, no task waits any more, but the function continues."""
        if self._is_over:
            return function(*args, **named)
        return await asyncio.wrap_future(self._threads.submit(_as_a_user, partial(function, *args, **named)))

    async def taking(self, consumer: plain.Consumer, function: Callable[..., T], *args: Any) -> T:
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
        self._is_over = True
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


def _in_loop(loop: asyncio.AbstractEventLoop, policy: CheckpointPolicy) -> CheckpointPolicy:
    """The policy with callbacks of this loop."""
    callbacks: dict[str, Any] = {}
    for name, wanted in TAKES.items():
        if (function := getattr(policy, name)) is not None:
            if not inspect.iscoroutinefunction(function):
                arguments.a_function(name, function, wanted)
            callbacks[name] = state_callback(loop, function)
    return replace(policy, **callbacks)


def _of_leader(
    name: str, function: Callable[[Leader], object] | None, shown: Callable[[locks.Leader], Leader]
) -> locks.LeaderCallback | None:
    """on_win or on_loss of this loop."""
    if function is None:
        return None
    if not inspect.iscoroutinefunction(function):
        arguments.a_function(name, function, "leader")
    call = state_callback(asyncio.get_running_loop(), function)
    return lambda leader: call(shown(leader))


class Transaction:
    """:class:`kafka_marshal.Transaction` for an event loop; use it in ``async with``."""

    __slots__ = ("_carry_out", "_transaction")

    def __init__(self, transaction: committing.Transaction, carry_out: Callable[..., Awaitable[object]]) -> None:
        """carry_out: has a function called with these arguments by a thread of the library."""
        self._transaction = transaction
        self._carry_out = carry_out

    def produce(
        self,
        topic: str,
        value: bytes | str | None = None,
        key: bytes | str | None = None,
        headers: Headers = (),
        partition: int | None = None,
    ) -> None:
        """Produce a record when the transaction commits; it waits for nothing."""
        self._transaction.produce(topic, value, key, headers, partition)

    async def __aenter__(self) -> Self:
        self._transaction.begin()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self._carry_out(*self._transaction.end(error))


def _as(made: Callable[P, object]) -> Callable[[Callable[Concatenate[S, ...], T]], Callable[Concatenate[S, P], T]]:
    """Gives a function the arguments of another one, which are checked when it is called."""

    def signed(function: Callable[Concatenate[S, ...], T]) -> Callable[Concatenate[S, P], T]:
        known = inspect.signature(made)

        @wraps(function)
        def call(self: S, /, *given: P.args, **named: P.kwargs) -> T:
            refuse_unknown(function.__qualname__, known.parameters, named)
            try:
                known.bind(*given, **named)
            except TypeError as error:
                raise TypeError(f"{function.__qualname__}() {error}") from None
            return function(self, *given, **named)

        call.__signature__ = known.replace(  # type: ignore[attr-defined]
            parameters=[*list(inspect.signature(function).parameters.values())[:1], *known.parameters.values()]
        )
        return call

    return signed


class Leader:
    """:class:`kafka_marshal.Leader` for an event loop. Made by :meth:`Marshal.lead`."""

    def __init__(self, calls: Calls, leader: locks.Leader) -> None:
        self._calls = calls
        #: The leader that does the work.
        self.sync: locks.Leader = leader
        self.name: str = leader.name

    @property
    def leading(self) -> bool:
        """Whether this process certainly leads, by its own clock. If not, do not begin anything in its name."""
        return self.sync.leading

    @property
    def token(self) -> int:
        """The fencing token of this term. Raises LeaseLostError unless it certainly leads."""
        return self.sync.token

    async def resign(self, timeout: float | None = DEFAULT_TIMEOUT_S) -> None:
        """As :meth:`kafka_marshal.Leader.resign`."""
        in_callback = calling.get() is self.sync
        await _to_its_end(self._calls(self.sync.resign, 0.0 if in_callback else timeout))

    def __repr__(self) -> str:
        return f"aio.{self.sync!r}"


class Marshal(Renamed):
    """:class:`kafka_marshal.Marshal` for an event loop; the arguments are the same. Use it in ``async with``.

    It connects, and reads the log to its end, when the block is entered.
    """

    @_as(plain_marshal.Marshal)
    def __init__(self, *given: Any, **named: Any) -> None:
        """As :class:`kafka_marshal.Marshal`; nothing is connected before ``async with``."""
        self._make: Callable[[], plain_marshal.Marshal] = partial(plain_marshal.Marshal, *given, **named)
        self._calls = Calls()
        self._marshal: plain_marshal.Marshal | None = None
        self._is_stopped = False

    @classmethod
    @_as(plain_marshal.Marshal.on_cluster)
    def on_cluster(cls, *given: Any, **named: Any) -> Marshal:
        """A member on any implementation of the adapters' Cluster, such as the in-memory one."""
        made = cls("", group_id="")
        made._make = partial(plain_marshal.Marshal.on_cluster, *given, **named)
        return made

    async def __aenter__(self) -> Self:
        if self._marshal is not None:
            raise ConfigurationError("this Marshal was entered before; make another one")
        entering = asyncio.ensure_future(self._calls(self._make))
        try:
            self._marshal = await asyncio.shield(entering)
        except asyncio.CancelledError:
            entering.add_done_callback(self._undo)  # it is closed as soon as it is there
            raise
        if self._is_stopped:
            self._marshal.stop()
        return self

    def _undo(self, entering: asyncio.Future[plain_marshal.Marshal]) -> None:
        if not entering.cancelled() and entering.exception() is None:
            THREADS.start(entering.result().close, "kafka-marshal-close")

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        if error is not None and self._marshal is not None:
            await _to_its_end(self._calls(self._marshal._left_by, error))
        await self.close()

    @property
    def sync(self) -> plain_marshal.Marshal:
        """The Marshal that does the work, with all its methods. (Most of its calls block.)"""
        if self._marshal is None:
            raise ConfigurationError("this Marshal is not open: use it in `async with Marshal(…) as marshal:`")
        return self._marshal

    @overload
    def consumer(
        self,
        topics: Sequence[str],
        *,
        mode: Claims = ...,
        **options: Unpack[ConsumerArguments[PartitionsCallback]],
    ) -> Consumer[plain.Consumer]: ...
    @overload
    def consumer(
        self, topics: Sequence[str], *, mode: Group, **options: Unpack[ConsumerArguments[PiecesCallback]]
    ) -> GroupConsumer: ...
    @overload
    def consumer(
        self, topics: Sequence[str], *, mode: Batches, **options: Unpack[ConsumerArguments[PartitionsCallback]]
    ) -> Consumer[ShareConsumer]: ...
    @overload
    def consumer(
        self, *, mode: Keys, **options: Unpack[ConsumerArguments[PartitionsCallback]]
    ) -> Consumer[plain.Consumer]: ...
    @takes(ConsumerArguments)
    def consumer(
        self, topics: Sequence[str] = (), *, mode: Mode = _CLAIMS, **options: Unpack[ConsumerArguments[Any]]
    ) -> Consumer[Any]:
        """As :meth:`kafka_marshal.Marshal.consumer`. Use it in ``async with``.

        Callbacks get the consumer of this module. They may be coroutine functions, which run in this loop. If
        on_checkpoint is one, its pieces continue when the coroutine ends; the member answers when a future or a task
        that it returns is done.
        """
        check_names("Marshal.consumer", ConsumerArguments, options)
        make: Callable[..., Any] = partial(self.sync.consumer, topics, mode=mode)
        return (GroupConsumer if isinstance(mode, Group) else Consumer)(self._calls, make, options)

    @asynccontextmanager
    async def lock(self, name: str, timeout: float | None = 5.0) -> AsyncIterator[ClaimedLease]:
        """As :meth:`kafka_marshal.Marshal.lock`, for ``async with``. A cancelled wait leaves no claim behind."""
        wait = locks.checked_wait(timeout)
        lease = await self._get(serve_claim, ClaimedLease.release, locks.lock_topic(name), 0, wait)
        try:
            yield lease
        finally:
            await _to_its_end(self._calls(lease.release))

    @asynccontextmanager
    async def lead(
        self,
        name: str,
        timeout: float | None = 5.0,
        *,
        on_win: Callable[[Leader], object] | None = None,
        on_loss: Callable[[Leader], object] | None = None,
    ) -> AsyncIterator[Leader]:
        """As :meth:`kafka_marshal.Marshal.lead`, for ``async with``. Callbacks may be coroutine functions."""
        wait, shown = locks.checked_wait(timeout), partial(Leader, self._calls)
        callbacks = _of_leader("on_win", on_win, shown), _of_leader("on_loss", on_loss, shown)
        about = locks.lock_topic(name), wait, callbacks, self.sync._ending.leaders
        leader = await self._get(locks.serve_lead, locks.Leader._end_soon, *about)
        try:
            yield shown(leader)
        finally:
            await _to_its_end(self._calls(leader.resign))

    async def _get(self, serve: Callable[..., H], undo: Callable[[H], object], *args: object) -> H:
        """As ``_get`` of the other one: if this is cancelled, what comes is undone."""
        sync = self.sync
        sync._check_open()
        held, answer = await awaited(sync._driver.servants, serve, sync._driver, *args, undo=undo)
        held._keeps = sync
        answer.receipt.out = True
        return held

    def stop(self) -> None:
        """Ask all loops to end. Safe in a signal handler; returns at once."""
        self._is_stopped = True
        if self._marshal is not None:
            self._marshal.stop()

    @property
    def stopping(self) -> bool:
        """Whether stop() was called."""
        return self._is_stopped or (self._marshal is not None and self._marshal.stopping)

    def health(self) -> Health:
        """The present state of this member; it waits for nothing."""
        return self.sync.health()

    async def close(self, timeout: float | None = DEFAULT_TIMEOUT_S) -> None:
        """Release everything with its offsets, and end. A second call does nothing."""
        if self._marshal is not None:
            await _to_its_end(self._calls(self._marshal.close, timeout))
            self._calls.end()

    def __repr__(self) -> str:
        return f"aio.{self._marshal!r}" if self._marshal is not None else "aio.Marshal(not open)"


class Consumer(Renamed, Generic[C]):
    """:class:`kafka_marshal.Consumer` for an event loop. Made by :meth:`Marshal.consumer`."""

    def __init__(self, calls: Calls, make: Callable[..., C], options: Mapping[str, Any]) -> None:
        self._calls = calls
        self._make = make
        self._options = options
        self._consumer: C | None = None

    async def __aenter__(self) -> Self:
        if self._consumer is not None:
            raise ConfigurationError("this consumer was entered before; make another one")
        loop = asyncio.get_running_loop()
        options = dict(self._options)
        for name, value in self._options.items():
            if name in CALLBACKS and value:
                options[name] = self._callback(loop, value)
            elif isinstance(value, CheckpointPolicy):
                options[name] = _in_loop(loop, value)
        entering = asyncio.ensure_future(self._calls(self._make, **options))
        try:
            self._consumer = await asyncio.shield(entering)
        except asyncio.CancelledError:
            entering.add_done_callback(self._undo)
            raise
        return self

    def _undo(self, entering: asyncio.Future[C]) -> None:
        if not entering.cancelled() and entering.exception() is None:
            THREADS.start(entering.result().close, "kafka-marshal-close")

    def _callback(self, loop: asyncio.AbstractEventLoop, function: Any) -> Callable[[object, list[Any]], object]:
        """A callback runs on a thread of the library, which waits while a coroutine function runs in the loop."""
        if not inspect.iscoroutinefunction(function):
            return lambda _, found: function(self, found)

        def call(_: object, found: list[Any]) -> object:
            return asyncio.run_coroutine_threadsafe(function(self, found), loop).result()

        return call

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        if error is not None and self._consumer is not None:
            await _to_its_end(self._calls(self._consumer._left_by, error))
        await self.close()

    @property
    def sync(self) -> C:
        """The consumer that does the work, with all its methods. (Most of its calls block.)"""
        if self._consumer is None:
            raise ConfigurationError(
                "this consumer is not open: use it in `async with marshal.consumer(…) as consumer:`"
            )
        return self._consumer

    # Getting messages.

    def __aiter__(self) -> AsyncIterator[Message]:
        """Messages, one by one; as iterating over :class:`kafka_marshal.Consumer`."""
        consumer = self.sync
        consumer._refuse_in_transactions("iterating")
        if consumer._options.settings.at_most_once or not consumer._options.auto_done:
            return self._poll_on()
        return self._iterate(consumer)

    async def _iterate(self, consumer: C) -> AsyncIterator[Message]:
        """Run after run, as ``Consumer._iterate``: before each message a clock check (T4)."""
        runtime, stop = consumer._driver.cluster.runtime, consumer._stop_signal
        clock, clock_id = runtime.clock_gettime, (runtime.clock_id,)
        while True:
            consumer._driver.life.refuse_fork()
            try:
                run, answer = await awaited(consumer._driver.servants, consumer._serve_run, undo=consumer._undo)
            except EndedError:
                return
            if run is None:
                return
            message: Message | None = None
            try:
                lease, walk = run.assignment.lease, cast("Iterator[Message]", run.walk)
                is_open = True
                while is_open and run.has_left:
                    for message in islice(walk, IN_A_ROW):
                        if clock(*clock_id) >= lease.hand_out_until_s or stop:
                            is_open = False
                            break
                        yield message
                    else:
                        await asyncio.sleep(0)
                if is_open:
                    run.walked(message)
            except BaseException as error:
                run.given_up = True
                consumer._left = message if isinstance(error, GeneratorExit) else consumer._left
                raise
            finally:
                answer.receipt.left = True
                consumer._nudge()

    async def _poll_on(self) -> AsyncIterator[Message]:
        while not self.stopping:
            try:
                message = await self.poll(None)
            except ClosedError:
                return
            if message is None:
                return
            yield message
            del message  # as in Consumer._poll_on

    async def poll(self, timeout: float | None = None) -> Message | None:
        """The next message, or None after timeout seconds. If it is cancelled, its message comes again later."""
        return await self._calls.taking(self.sync, self.sync.poll, timeout)

    async def consume(self, num_messages: int = 1, timeout: float | None = None) -> list[Message]:
        """Up to num_messages, as many as came within timeout seconds; as ``poll`` if it is cancelled."""
        return await self._calls.taking(self.sync, self.sync.consume, num_messages, timeout)

    @overload
    def batches(
        self: Consumer[ShareConsumer], max_messages: int = 500, timeout: float = 1.0
    ) -> AsyncIterator[SharedBatch]: ...
    @overload
    def batches(self, max_messages: int = 500, timeout: float = 1.0) -> AsyncIterator[Batch]: ...
    async def batches(self, max_messages: int = 500, timeout: float = 1.0) -> AsyncIterator[Any]:
        """Batches of one partition each, not done before ``batch.done()``."""
        batches = self.sync.batches(max_messages, timeout)
        while (batch := await self._calls.taking(self.sync, next, batches, None)) is not None:
            yield batch
            del batch

    def transaction(self, batch: Batch) -> Transaction:
        """``async with consumer.transaction(batch) as tx:``; as :meth:`kafka_marshal.Consumer.transaction`."""
        consumer = self.sync
        return Transaction(consumer.transaction(batch), partial(awaited, consumer._driver.servants))

    @overload
    async def run(
        self,
        handle: Callable[[Message], object] | Callable[[list[Message]], object],
        *,
        deserialize: None = None,
        **settings: Unpack[RunSettings],
    ) -> None: ...
    @overload
    async def run(
        self,
        handle: Callable[[T], object] | Callable[[list[T]], object],
        *,
        deserialize: Callable[[Message], T],
        **settings: Unpack[RunSettings],
    ) -> None: ...
    @takes(RunSettings, RUN)
    async def run(
        self,
        handle: Handler,
        *,
        deserialize: Callable[[Message], Any] | None = None,
        **settings: Unpack[RunSettings],
    ) -> None:
        """As :meth:`kafka_marshal.Consumer.run`; a coroutine function runs in this loop, a function in threads.

        If it is cancelled, it begins nothing more, and ends when what is in flight has ended, or after
        ``drain_timeout``.
        """
        consumer = self.sync
        options = RunOptions.checked(consumer._options, handle, deserialize, settings)
        consumer._begin(None)
        call, loop = RunCall(), asyncio.get_running_loop()
        running = asyncio.ensure_future(awaited(consumer._driver.servants, carry_out, consumer, options, call, loop))
        try:
            await asyncio.shield(running)
        except EndedError:
            return
        except asyncio.CancelledError:
            call.stop()
            with suppress(Exception):
                await asyncio.shield(running)
            raise
        finally:
            call.stop(abandon=True)

    # Saying what is done; looking, and steering.

    def done(self, message: Message) -> None:
        """A message from ``poll``, ``consume`` or a loop with auto_done=False is done; it waits for nothing."""
        self.sync.done(message)

    def park(self, message: Message, reason: str) -> None:
        """Set a message in flight aside; as :meth:`kafka_marshal.Consumer.park`. It waits for nothing."""
        self.sync.park(message, reason)

    async def assignment(self) -> list[TopicPartition]:
        """The partitions this consumer works on, each with the next offset to be delivered, sorted."""
        return await self._calls(self.sync.assignment)

    @overload
    async def committed(self, partitions: Sequence[Any], ranges: Literal[False] = False) -> list[TopicPartition]: ...

    @overload
    async def committed(self, partitions: Sequence[Any], ranges: Literal[True]) -> list[Committed]: ...

    async def committed(
        self, partitions: Sequence[Any], ranges: bool = False
    ) -> list[TopicPartition] | list[Committed]:
        """Of each, what the group reads next (−1: it has not begun), and this member's epoch (−1: it has none).

        ``ranges=True``: all that is done of each, and which messages are open or set aside.
        """
        return await self._calls(lambda: self.sync.committed(partitions, ranges))  # type: ignore[call-overload]

    async def pause(self, partitions: Sequence[Any] | None = None) -> None:
        """Deliver nothing of these partitions (None: of all assigned now) until ``resume``."""
        await self._calls(self.sync.pause, partitions)

    async def resume(self, partitions: Sequence[Any] | None = None) -> None:
        """Deliver messages of these partitions (None: of all) again."""
        await self._calls(self.sync.resume, partitions)

    async def subscribe(self, topics: Sequence[str]) -> None:
        """Read these topics in place of those before; as :meth:`kafka_marshal.Consumer.subscribe`."""
        await self._calls(self.sync.subscribe, topics)

    async def seek(self, topic: str, partition: int, offset: int, *, force: bool = False) -> None:
        """Go forward to offset; as :meth:`kafka_marshal.Consumer.seek`."""
        await self._calls(self.sync.seek, topic, partition, offset, force=force)

    def stop(self) -> None:
        """Ask the loops, and ``run``, of this consumer alone to end. Safe in a signal handler; returns at once."""
        self.sync.stop()

    @property
    def stopping(self) -> bool:
        """Whether ``stop()`` was called, of this consumer or of its Marshal."""
        return self.sync.stopping

    async def close(self, timeout: float | None = DEFAULT_TIMEOUT_S) -> None:
        """Release all partitions with their offsets. A second call does nothing."""
        if self._consumer is not None:
            await _to_its_end(self._calls(self._consumer.close, timeout))


#: Functions or coroutine functions.
PartitionsCallback = Callable[[Consumer[plain.Consumer], list[TopicPartition]], object]


class GroupConsumer(Consumer[plain_group.GroupConsumer]):
    """:class:`kafka_marshal.GroupConsumer` for an event loop. Made by ``marshal.consumer(…, mode=Group())``."""

    async def generation(self) -> int:
        """The group's generation; 0 before the first."""
        return await self._calls(lambda: self.sync.generation)

    async def member_id(self) -> str:
        """The id that the group gave this member; "": it is not a member at present."""
        return await self._calls(lambda: self.sync.member_id)

    async def state(self) -> str:
        """``"STARTUP"``, ``"PART_OF_GROUP"``, ``"REDISCOVER"`` or ``"DOWN"``."""
        return await self._calls(lambda: self.sync.state)

    async def pieces(self) -> list[MemberPiece]:
        """What this member works on, sorted."""
        return await self._calls(self.sync.pieces)

    async def commit(
        self, timeout: float = COMMIT_TIMEOUT_S, *, metadata: Mapping[tuple[str, int], str] | None = None
    ) -> None:
        """When this returns, the log has all that is done of this member's pieces, and these texts beside it."""
        await self._calls(lambda: self.sync.commit(timeout, metadata=metadata))

    async def checkpoint(self) -> None:
        """Begin a checkpoint of the group now; as :meth:`kafka_marshal.GroupConsumer.checkpoint`."""
        await self._calls(self.sync.checkpoint)

    async def rollback(self, to: int | None = None) -> None:
        """Have all members go back to the newest checkpoint, or to the one with this id."""
        await self._calls(self.sync.rollback, to)

    async def checkpoints(self) -> CheckpointStatus:
        """What this member knows of the group's checkpoints, now."""
        return await self._calls(lambda: self.sync.checkpoints)


PiecesCallback = Callable[[GroupConsumer, list[MemberPiece]], object]


async def _to_its_end(call: Awaitable[T]) -> T:
    """Await it to its end even if this task is cancelled meanwhile: a close must not be left half done."""
    ending = asyncio.ensure_future(call)
    try:
        return await asyncio.shield(ending)
    except asyncio.CancelledError:
        await asyncio.wait((ending,))
        raise
