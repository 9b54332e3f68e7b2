"""The same API for asyncio: blocking calls are awaited, and a run of messages comes to the loop in one step.

A Marshal of :mod:`.marshal` does the work, on its own threads. Nothing here blocks the loop's thread.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from types import TracebackType
from typing import Any, Generic, Literal, Self, TypeVar, Unpack, cast, overload

from kafka_marshal import arguments, ports
from kafka_marshal.adapters.message import Message
from kafka_marshal.checkpoints import Checkpoint, CheckpointPolicy, Restore
from kafka_marshal.client import consumer as plain
from kafka_marshal.client import group_consumer as plain_group
from kafka_marshal.client import marshal as plain_marshal
from kafka_marshal.client.aio_calls import Calls, awaited, state_callback
from kafka_marshal.client.aio_transaction import Transaction
from kafka_marshal.client.batch import Batch
from kafka_marshal.client.checkpointing import TAKES, Checkpoints
from kafka_marshal.client.closing import DEFAULT_TIMEOUT_S
from kafka_marshal.client.group_consumer import COMMIT_TIMEOUT_S, Piece
from kafka_marshal.client.handling import Handler, Hooks, Retry, RunOptions, RunSettings
from kafka_marshal.client.health import Health
from kafka_marshal.client.options import DEFAULT_BYTES_IN_FLIGHT, MOST_TRANSACTIONAL_PRODUCERS, TRANSACTION_TIMEOUT_S
from kafka_marshal.client.parallel import carry_out
from kafka_marshal.client.shared import ConsumerArguments, ShareConsumer, SharedBatch
from kafka_marshal.client.shared_reads import DEFAULT_SHARED_BYTES
from kafka_marshal.client.tries import Call
from kafka_marshal.engine.policies import Policy
from kafka_marshal.engine.settings import MAX_SHARES
from kafka_marshal.engine.work.lanes import Order
from kafka_marshal.errors import ClosedError, ConfigurationError
from kafka_marshal.node.config import START_TIMEOUT_S
from kafka_marshal.node.serving import EndedError
from kafka_marshal.runtime import THREADS
from kafka_marshal.topic_names import DEFAULT_TOPIC
from kafka_marshal.types import Delivery, Key, Progress, Start, Strategy, TopicPartition, WhenStuck

T = TypeVar("T")


C = TypeVar("C", bound=plain.Consumer)

#: After this many messages in a row that were ready, an iteration yields to other tasks.
IN_A_ROW = 500


class Marshal:
    """:class:`kafka_marshal.Marshal` for an event loop; the arguments are the same. Use it in ``async with``.

    It connects, and reads the log to its end, when the block is entered.
    """

    def __init__(
        self,
        bootstrap_servers: str,
        *,
        group_id: str,
        client_id: str | None = None,
        topic: str = DEFAULT_TOPIC,
        heartbeat_interval_ms: int = plain_marshal.DEFAULT_HEARTBEAT_INTERVAL_MS,
        config: Mapping[str, object] | None = None,
        watchdog: bool = False,
        ordered_topics: Sequence[str] = (),
        max_bytes_shared_reads: int = DEFAULT_SHARED_BYTES,
        timeout: float = START_TIMEOUT_S,
    ) -> None:
        """As :class:`kafka_marshal.Marshal`; nothing is connected before ``async with``."""
        self._make: Callable[[], plain_marshal.Marshal] = partial(
            plain_marshal.Marshal,
            bootstrap_servers,
            group_id=group_id,
            client_id=client_id,
            topic=topic,
            heartbeat_interval_ms=heartbeat_interval_ms,
            config=config,
            watchdog=watchdog,
            ordered_topics=ordered_topics,
            max_bytes_shared_reads=max_bytes_shared_reads,
            timeout=timeout,
        )
        self._calls = Calls()
        self._marshal: plain_marshal.Marshal | None = None
        self._is_stopped = False

    @classmethod
    def on_cluster(
        cls,
        cluster: ports.Cluster,
        *,
        group_id: str,
        client_id: str | None = None,
        topic: str = DEFAULT_TOPIC,
        heartbeat_interval_ms: int = plain_marshal.DEFAULT_HEARTBEAT_INTERVAL_MS,
        ordered_topics: Sequence[str] = (),
        max_bytes_shared_reads: int = DEFAULT_SHARED_BYTES,
        timeout: float = START_TIMEOUT_S,
    ) -> Self:
        """A member on any implementation of the adapters' Cluster, such as the in-memory one."""
        made = cls("", group_id=group_id)
        made._make = partial(
            plain_marshal.Marshal.on_cluster,
            cluster,
            group_id=group_id,
            client_id=client_id,
            topic=topic,
            heartbeat_interval_ms=heartbeat_interval_ms,
            ordered_topics=ordered_topics,
            max_bytes_shared_reads=max_bytes_shared_reads,
            timeout=timeout,
        )
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
        shared_batches: Literal[True],
        **settings: Unpack[ConsumerArguments[PartitionsCallback]],
    ) -> Consumer[ShareConsumer]: ...
    @overload
    def consumer(
        self,
        topics: Sequence[str],
        *,
        shared_batches: bool = False,
        **settings: Unpack[ConsumerArguments[PartitionsCallback]],
    ) -> Consumer[plain.Consumer]: ...
    def consumer(
        self,
        topics: Sequence[str],
        *,
        delivery: Delivery = "at-least-once",
        policy: Policy | None = None,
        start: Start = "earliest",
        batch_size: int = plain.DEFAULT_BATCH_SIZE,
        handler_timeout: float | None = None,
        revoke_timeout: float | None = None,
        auto_done: bool = True,
        claim_ahead: bool = False,
        max_bytes_in_flight: int = DEFAULT_BYTES_IN_FLIGHT,
        position_lost: WhenStuck = "leave",
        partition_stuck: WhenStuck = "leave",
        transactions: bool = False,
        transaction_timeout: float = TRANSACTION_TIMEOUT_S,
        max_transactional_producers: int = MOST_TRANSACTIONAL_PRODUCERS,
        shared_batches: bool = False,
        max_shares: int = MAX_SHARES,
        on_assign: PartitionsCallback | None = None,
        on_revoke: PartitionsCallback | None = None,
        on_lost: PartitionsCallback | None = None,
        config: Mapping[str, object] | None = None,
    ) -> Consumer[Any]:
        """As :meth:`kafka_marshal.Marshal.consumer`. Use it in ``async with``.

        Callbacks get the consumer of this module. They may be coroutine functions, which run in this loop.
        """
        options = _options(locals())
        return Consumer(self, self._calls, partial(self.sync.consumer, topics), options)

    def group_consumer(
        self,
        topics: Sequence[str],
        *,
        strategy: Strategy = "sticky",
        session_timeout_ms: int = plain_marshal.DEFAULT_SESSION_TIMEOUT_MS,
        delivery: Delivery = "at-least-once",
        allow_key_share: bool = False,
        start: Start = "earliest",
        mirror_offsets: bool = False,
        batch_size: int = plain.DEFAULT_BATCH_SIZE,
        handler_timeout: float | None = None,
        revoke_timeout: float | None = None,
        auto_done: bool = True,
        max_bytes_in_flight: int = DEFAULT_BYTES_IN_FLIGHT,
        position_lost: WhenStuck = "leave",
        partition_stuck: WhenStuck = "leave",
        transactions: bool = False,
        transaction_timeout: float = TRANSACTION_TIMEOUT_S,
        max_transactional_producers: int = MOST_TRANSACTIONAL_PRODUCERS,
        checkpoints: CheckpointPolicy | None = None,
        on_checkpoint: Callable[[Checkpoint], object] | None = None,
        on_restore: Callable[[Restore], object] | None = None,
        on_completed: Callable[[int], object] | None = None,
        on_assign: PiecesCallback | None = None,
        on_revoke: PiecesCallback | None = None,
        on_lost: PiecesCallback | None = None,
        config: Mapping[str, object] | None = None,
    ) -> GroupConsumer:
        """As :meth:`kafka_marshal.Marshal.group_consumer`, used as ``consumer`` is.

        If on_checkpoint is a coroutine function, its pieces continue when the coroutine ends. The member answers when a
        future or a task that it returns is done.
        """
        options = _options(locals())
        return GroupConsumer(self, self._calls, partial(self.sync.group_consumer, topics), options)

    def assign(self, partitions: Mapping[Key, Sequence[tuple[int, int]]], **options: Any) -> Consumer[plain.Consumer]:
        """As :meth:`kafka_marshal.Marshal.assign`, used as ``consumer`` is; with the same arguments."""
        return Consumer(self, self._calls, partial(self.sync.assign, partitions), options)

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


def _options(given: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call that have a default, by name."""
    return {name: value for name, value in given.items() if name not in ("self", "topics")}


class Consumer(Generic[C]):
    """:class:`kafka_marshal.Consumer` for an event loop. Made by :meth:`Marshal.consumer`."""

    def __init__(self, marshal: Marshal, calls: Calls, make: Callable[..., C], options: Mapping[str, Any]) -> None:
        self._marshal = marshal
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
            if name in ("on_assign", "on_revoke", "on_lost") and value:
                options[name] = self._callback(loop, value)
            elif name in TAKES and value:
                if not inspect.iscoroutinefunction(value):
                    arguments.a_function(name, value, TAKES[name])
                options[name] = state_callback(loop, value)
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
            consumer._driver.refuse_fork()
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
        self, handle: Callable[[Message], object], *, deserialize: None = None, **settings: Unpack[RunSettings]
    ) -> None: ...
    @overload
    async def run(
        self, handle: Callable[[T], object], *, deserialize: Callable[[Message], T], **settings: Unpack[RunSettings]
    ) -> None: ...
    async def run(
        self,
        handle: Handler,
        *,
        concurrency: int = 16,
        order: Order = "key",
        retry: Retry | None = plain.DEFAULT_RETRY,
        dead_letters: str | None = None,
        drain_timeout: float = plain.DRAIN_TIMEOUT_S,
        hooks: Sequence[Hooks] = (),
        deserialize: Callable[[Message], Any] | None = None,
        transactions: bool = False,
        park: bool = False,
    ) -> None:
        """As :meth:`kafka_marshal.Consumer.run`; a coroutine function runs in this loop, a function in threads.

        If it is cancelled, it begins nothing more, and ends when what is in flight has ended, or after
        ``drain_timeout``.
        """
        consumer = self.sync
        options = RunOptions.checked(
            consumer._options,
            handle,
            concurrency,
            order,
            retry,
            dead_letters,
            drain_timeout,
            hooks,
            deserialize,
            transactions,
            park,
        )
        consumer._begin(None)
        call, loop = Call(), asyncio.get_running_loop()
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
        """The partitions this consumer works on, sorted."""
        return await self._calls(self.sync.assignment)

    async def position(self) -> list[TopicPartition]:
        """The next offset to be delivered, of each assigned partition."""
        return await self._calls(self.sync.position)

    @overload
    async def committed(self, partitions: Sequence[Any], ranges: Literal[False] = False) -> list[TopicPartition]: ...

    @overload
    async def committed(self, partitions: Sequence[Any], ranges: Literal[True]) -> list[Progress]: ...

    async def committed(self, partitions: Sequence[Any], ranges: bool = False) -> list[TopicPartition] | list[Progress]:
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
    """:class:`kafka_marshal.GroupConsumer` for an event loop. Made by :meth:`Marshal.group_consumer`."""

    async def generation(self) -> int:
        """The group's generation; 0 before the first."""
        return await self._calls(lambda: self.sync.generation)

    async def member_id(self) -> str:
        """The id that the group gave this member; "": it is not a member at present."""
        return await self._calls(lambda: self.sync.member_id)

    async def state(self) -> str:
        """``"STARTUP"``, ``"PART_OF_GROUP"``, ``"REDISCOVER"`` or ``"DOWN"``."""
        return await self._calls(lambda: self.sync.state)

    async def pieces(self) -> list[Piece]:
        """What this member works on, sorted."""
        return await self._calls(self.sync.pieces)

    async def commit(self, timeout: float = COMMIT_TIMEOUT_S) -> None:
        """When this returns, the log has all that is done of this member's pieces."""
        await self._calls(self.sync.commit, timeout)

    async def checkpoint(self) -> None:
        """Begin a checkpoint of the group now; as :meth:`kafka_marshal.GroupConsumer.checkpoint`."""
        await self._calls(self.sync.checkpoint)

    async def rollback(self, to: int | None = None) -> None:
        """Have all members go back to the newest checkpoint, or to the one with this id."""
        await self._calls(self.sync.rollback, to)

    async def checkpoints(self) -> Checkpoints:
        """What this member knows of the group's checkpoints, now."""
        return await self._calls(lambda: self.sync.checkpoints)


PiecesCallback = Callable[[GroupConsumer, list[Piece]], object]


async def _to_its_end(call: Awaitable[T]) -> T:
    """Await it to its end even if this task is cancelled meanwhile: a close must not be left half done."""
    ending = asyncio.ensure_future(call)
    try:
        return await asyncio.shield(ending)
    except asyncio.CancelledError:
        await asyncio.wait((ending,))
        raise
