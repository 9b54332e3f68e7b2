"""What every kind of consumer has in common: topics, callbacks, assignments, errors, and a clean end.

The kinds differ in what they deliver: :mod:`.consumer` messages, :mod:`.ranges` ranges of offsets.
For both, the same engine decides which partitions they get, when, and from which offset.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from math import inf
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, Protocol, Self, TypeVar, cast, overload
from weakref import ref

from kafka_marshal import arguments
from kafka_marshal.client.closing import (
    DEFAULT_TIMEOUT_S,
    Limit,
    Releasing,
    calling,
    carry_out,
    close_if_dropped,
    end_all,
    late_text,
)
from kafka_marshal.client.one_process import OneProcess, WithBlock
from kafka_marshal.client.options import ConsumerOptions, Renamed
from kafka_marshal.client.view import open_messages
from kafka_marshal.engine.effects import Call, Callback, Piece, RestoreState, SaveState, TakeOver
from kafka_marshal.engine.inputs import Ts
from kafka_marshal.engine.settings import ConsumerSettings
from kafka_marshal.engine.subscription import Subscription
from kafka_marshal.engine.work.assignment import Stage
from kafka_marshal.engine.work.consumer import ConsumerEngine
from kafka_marshal.engine.work.pull import Hand
from kafka_marshal.engine.work.stuck import Stuck
from kafka_marshal.engine.work.topic_mark import split
from kafka_marshal.errors import ClosedError, ConfigurationError, coordinated_group
from kafka_marshal.logs import log
from kafka_marshal.node.driver import Driver
from kafka_marshal.node.life import exiting
from kafka_marshal.node.serving import EndedError
from kafka_marshal.node.topics import CountPartitions
from kafka_marshal.runtime import is_ours
from kafka_marshal.types import Committed, Key, Offsets, T, TopicPartition
from rationalizer.holes import Hole, first_open
from rationalizer.progress import Progress

if TYPE_CHECKING:
    from kafka_marshal.engine.work.consumer import ConsumerEngine
    from kafka_marshal.node.driver import Driver

#: After stop(), a call without a timeout waits this long (s): a loop that does not check for stop() must not spin.
STOPPED_S = 0.1

#: During such a wait, this often (s) it is checked whether the caller is still there.
STOPPED_SLICE_S = 0.2

_NUMBERS = (float, int)


class ConsumerHost(Protocol):
    """The Marshal of a consumer, as the consumer sees it."""

    #: Settings of librdkafka, as the user passed them.
    config: Mapping[str, object]
    #: How much members of this process keep for each other of what they read (bytes).
    max_bytes_shared_reads: int

    @property
    def group_id(self) -> str: ...


class _Loops:
    """What a consumer needs from its Marshal, without a reference to it."""

    __slots__ = ("config", "group_id")

    def __init__(self, marshal: ConsumerHost) -> None:
        self.group_id = marshal.group_id
        self.config = marshal.config


def _partition(piece: Piece, callback: Callback) -> TopicPartition:
    return TopicPartition(*piece.key, piece.position, piece.token)


S = TypeVar("S")
C = TypeVar("C", bound="AnyConsumer[Any]")


class ShowsCommitted:
    """The part of a consumer that shows what the log has as done of a partition."""

    __slots__ = ()

    _driver: Driver
    _engine: ConsumerEngine

    def _look(self, found: Callable[[float], T]) -> T:
        """What a function of the time (own clock, ms) finds in the engine, under the lock."""

        def look() -> T:
            with self._driver.lock.locked(step=False):
                return found(self._driver.now_ms())

        return self._driver.call(look)

    @overload
    def committed(
        self, partitions: Sequence[Key | TopicPartition], ranges: Literal[False] = False
    ) -> list[TopicPartition]: ...

    @overload
    def committed(self, partitions: Sequence[Key | TopicPartition], ranges: Literal[True]) -> list[Committed]: ...

    def committed(
        self, partitions: Sequence[Key | TopicPartition], ranges: bool = False
    ) -> list[TopicPartition] | list[Committed]:
        """Of each, what the group reads next (−1: it has not begun), and this member's epoch (−1: it has none).

        That is the next offset that is not done, or the first message below it that waits for another try.
        ``ranges=True``: all that is done of each, and which messages are open or set aside.
        """
        keys = arguments.partitions("partitions", partitions)
        if arguments.a_flag("ranges", ranges):
            return self._look(lambda now: [self._progress_of(key) for key in keys])
        return self._look(lambda now: [self._committed_of(key) for key in keys])

    def _committed_of(self, key: Key) -> TopicPartition:
        done = self._engine.source.view.progress(key)
        offset = -1 if done is None else self._next_of(key, done, self._engine.source.view.open(key))
        return TopicPartition(*key, offset, self._epoch_of(key))

    def _next_of(self, key: Key, done: Progress, opened: Iterable[Hole]) -> int:
        """What the group reads next; −1: nothing is done, and where it starts is not known here yet (P9)."""
        has_done = done.stable >= 0 or bool(done.ranges) or any(through >= 0 for *_, through in done.done_through)
        assignment = self._engine.assignments.get(key)
        if not has_done and (assignment is None or assignment.stage not in (Stage.ASSIGNING, Stage.ACTIVE)):
            return -1
        return first_open(done.stable + 1, opened)

    def _epoch_of(self, key: Key) -> int:
        """The token under which this member works on it now; −1: it does not."""
        assignment = self._engine.assignments.get(key)
        return -1 if assignment is None or assignment.over else assignment.epoch

    def _progress_of(self, key: Key) -> Committed:
        done = self._engine.source.view.whole_progress(key)
        if done is None:
            return Committed(-1, None, (), ())
        # A coordinated group has no leases, and its members read only the group's home.
        lease = None if self._engine.settings.group is not None else self._driver.engine.peers.lease(key)
        return Committed(
            self._next_of(key, done, done.open),
            _or_none(done.stable),
            tuple((lo, hi, _or_none(through)) for lo, hi, through in done.done_through),
            tuple((first, last) for first, last in split(done.ranges).ranges),
            open_messages(done.open, lease),
        )


class AnyConsumer(ShowsCommitted, OneProcess, WithBlock, Renamed, Generic[S]):
    """A consumer of some kind (S: the class passed to its callbacks). Made on our threads; any thread may call it.

    Two objects share one state: the user has the handle, our threads have the other (see ``.dropped``).
    """

    __slots__ = ("__dict__", "__weakref__", "_keeps")

    #: Of a handle: its Marshal, kept alive by this reference.
    _keeps: object
    #: Converts a piece to what the callback gets.
    _named: ClassVar[staticmethod[[Piece, Callback], Any]] = staticmethod(_partition)

    def __init__(
        self,
        marshal: ConsumerHost,
        driver: Driver,
        options: ConsumerOptions,
        count_partitions: CountPartitions | None = None,
    ) -> None:
        self._marshal = _Loops(marshal)
        self._driver = driver
        self._options = options
        self._closed = False
        #: Not empty: loops end. A list, since iterating threads check it before each message.
        self._stop_signal: list[bool] = []
        self._drained_at = 0.0
        #: Messages reported as done after ``close()``.
        self._done_after_close = 0
        self._limit = Limit(driver.cluster.runtime)
        self._engine: ConsumerEngine
        #: What threads take messages from. (At least once, iterating and batches do not use it.)
        self._hand: Hand
        self._leaving: Releasing
        self._entered = False
        subscription = Subscription(options.topics, driver.replica.topic)
        handle = cast("Self", object.__new__(type(self)))
        handle.__dict__ = self.__dict__
        handle._keeps = marshal
        #: The handle until the user takes it, and a weak reference to it.
        self._unfetched: list[Self] = [handle]
        self._user: ref[Self] = ref(handle)
        self._enter(subscription, options.settings, count_partitions)
        say_missing(subscription)

    def _enter(
        self, subscription: Subscription, settings: ConsumerSettings, count_partitions: CountPartitions | None
    ) -> None:
        driver = self._driver
        if settings.group is None:
            driver.upkeep.scope.read_all()
        with driver.lock.locked() as engine:
            if settings.group is None and engine.leases.is_coordinated:
                raise coordinated_group(engine.settings.group_id)
            refuse_taken(engine.consumers.values(), subscription.names)
            if engine.groups or (settings.group is not None and engine.consumers):
                raise ConfigurationError(
                    "this Marshal has a consumer already; a member of a coordinated group has one, and no claims "
                    "beside it. Nothing was changed. Make another Marshal, with a client_id of its own"
                )
            self._engine = engine.take(None, engine.add_consumer, subscription, settings)
            self._hand = self._engine.hand
            self._leaving = Releasing(driver, self._engine)
            for error in driver.upkeep.levels.missed():
                self._take(engine.raise_error, error, self._engine.number)
            driver.lock.ports[self._engine.number] = self
            self._entered = True
        try:
            driver.upkeep.topics.add(self._engine.number, subscription, count_partitions)
        except BaseException:
            self._free()
            raise

    def _take(self, function: Callable[[*Ts, float], T], *of: *Ts) -> T | None:
        """Give the engine an input for this consumer, with the time; the lock is held. None: the consumer has ended."""
        return self._driver.engine.take(self._engine.number, function, *of, self._driver.now_ms())

    def _is_over(self) -> bool:
        """Ends the loops after stop() or close(); raises what went wrong. The lock is held."""
        if self._closed or self._stop_signal:
            return True
        self._driver.lock.check()
        if self._engine.errors and (error := self._take(self._engine.take_error)) is not None:
            raise error
        if (failure := self._engine.source.failure) is not None:
            raise failure
        return False

    def _begin(self, timeout: float | None) -> float | None:
        """Begin a call for messages; returns its deadline or None. Raises ClosedError. (A user's thread.)"""
        driver = self._driver
        if (self._closed or driver.is_over) and not exiting:
            driver.life.refuse_fork()
            raise ClosedError(
                "this consumer is closed, by itself or with its Marshal: it hands out nothing more. What was not done "
                "by then comes again, here or at others. Make a new one, or end the loop: while not marshal.stopping"
            )
        if timeout is None:
            return None
        if not (timeout.__class__ in _NUMBERS and 0 <= timeout < inf):  # a call may come with each message
            timeout = arguments.seconds("timeout", timeout)
        return driver.monotonic() + timeout

    def _wait_stopped(self, deadline: float | None) -> None:
        """After stop() nothing is delivered, but the call still waits until its deadline. (A user's thread.)"""
        driver = self._driver
        driver.life.refuse_fork()

        def serve(is_gone: Callable[[], bool]) -> None:
            until = driver.monotonic() + STOPPED_S if deadline is None else deadline
            with driver.condition:
                while (left := until - driver.monotonic()) > 0 and not (is_gone() or self._closed or driver.is_over):
                    driver.condition.wait(min(left, STOPPED_SLICE_S))

        with suppress(EndedError):
            driver.servants.ask(serve).wait()

    # Looking.

    def __repr__(self) -> str:
        topics = ", ".join(sorted(self._engine.subscription.topics))
        state = "closed" if self._closed or self._driver.is_over else "stopping" if self._stop_signal else "open"
        return f"{type(self).__name__}([{topics}], group_id={self._marshal.group_id!r}, {state})"

    def assignment(self) -> list[TopicPartition]:
        """The partitions this consumer works on, each with the next offset to be delivered, sorted."""
        found = self._engine.assignments
        return self._look(
            lambda now: sorted(
                TopicPartition(*x.key, x.position, x.epoch) for x in found.values() if x.shown and not x.over
            )
        )

    @property
    def ignored_done(self) -> int:
        """How many messages or ranges were reported done after their lease ended, or twice; they committed nothing."""

        def count(_: float) -> int:
            self._drain()  # reports that came after close()
            return sum(self._engine.delivery.ignored_done.values()) + self._done_after_close

        return self._look(count)

    @property
    def unprocessed(self) -> list[Offsets]:
        """At most once: what was granted and never delivered."""

        def decide(_: float) -> list[Offsets]:
            self._driver.engine.take(self._engine.number, self._engine.delivery.grants.decide, False)
            return [Offsets(*each) for each in self._engine.delivery.grants.unprocessed]

        return self._look(decide)

    @property
    def gaps(self) -> list[Offsets]:
        """What retention removed before this consumer got it."""
        return [Offsets(*key, first, last) for key, first, last in self._engine.positions.gaps]

    @property
    def stuck(self) -> list[Stuck]:
        """Partitions that are stuck though there is something to read, each with the reason and the remedy."""
        return self._engine.positions.stuck.found

    @property
    def lost_positions(self) -> list[Stuck]:
        """Those of ``stuck`` whose position is lost: no member works on them until it is set."""
        return self._engine.positions.stuck.lost

    # What the driver asks of it (ConsumerPort).

    def _fetch(self, changes: Mapping[Key, int | None], expected: Mapping[Key, int]) -> None:
        """Carry out StartFetch and StopFetch."""

    def _take_over(self, asked: TakeOver) -> None:
        """Carry out a step of taking over; only for consumers that process in transactions."""

    def _close_producer(self, key: Key, token: int) -> None:
        """Close the transactional producer of a holding that is over."""

    def _save_state(self, asked: SaveState) -> None:
        """Save the state of some pieces: there is none."""
        if (checkpoints := self._engine.source.checkpoints) is not None:
            for function in (checkpoints.returned, checkpoints.safe):
                self._driver.post(partial(self._answer, function, asked.barrier, asked.pieces, None))

    def _restore_state(self, asked: RestoreState) -> None:
        """Restore the state of some pieces: there is none."""
        if (checkpoints := self._engine.source.checkpoints) is not None:
            self._driver.post(partial(self._answer, checkpoints.restored, asked.attempt, None, False))

    def _answer(self, function: Callable[[*Ts, float], object], *of: *Ts) -> None:
        with self._driver.lock.locked():
            self._take(function, *of)

    def _completed(self, checkpoint: int) -> None:
        """A checkpoint that this member took part in is complete."""

    def _reclaim(self, before: float) -> None:
        """Deliver again what was delivered before that time (ms), and then dropped; the lock is held."""

    def _drain(self) -> None:
        """Pass what user threads have reported to the engine; the lock is held."""

    def _log_end(self, key: Key) -> int | None:
        """The log end, as last read; None if it was never read."""
        raise NotImplementedError

    def _call(self, call: Call) -> None:
        """Run the user's callback."""
        function = self._options.callbacks.get(call.callback)
        if function is not None:
            calling.set(self)
            before = is_ours.set(False)
            try:
                found = [self._named(each, call.callback) for each in call.pieces]
                user = self._user() or self
                arguments.a_result(str(call.callback), function(user, found))
                del user
            finally:
                is_ours.reset(before)
                calling.set(None)

    # Ending.

    def stop(self) -> None:
        """Ask the loops, and ``run``, of this consumer alone to end. Safe in a signal handler; returns at once.

        Until ``close()`` it keeps its partitions, but delivers nothing more. ``marshal.stop()`` is for all consumers.
        """
        self._stop_signal.append(True)

    @property
    def stopping(self) -> bool:
        """Whether ``stop()`` was called, of this consumer or of its Marshal."""
        return bool(self._stop_signal)

    def _left_by(self, error: BaseException) -> None:
        """An exception leaves a ``with`` block: state that handlers keep is not known."""
        self._leaving.is_state_known = False
        if isinstance(error, Exception) and not isinstance(error, ClosedError):
            self._say_in_hand(error)

    def _say_in_hand(self, error: Exception) -> None:
        """An exception leaves a ``with`` block: log which message is not done."""

    def close(self, timeout: float | None = DEFAULT_TIMEOUT_S) -> None:
        """Release all partitions with their offsets. Messages in flight stay not done. A second call does nothing.

        Waits up to ``timeout`` seconds (None: without a limit) until handlers of ``run`` and callbacks have returned,
        except one that calls it, and until a member that takes checkpoints has left at one. A warning names those that
        have not. The partitions of a callback that still runs are released when it returns, all others at once.
        ``close()`` returns at most one second after ``timeout``. Any thread may call it, and so may a signal handler.
        """
        if timeout is not None:
            timeout = arguments.seconds("timeout", timeout)
        if self._closed:
            return
        self._driver.life.refuse_fork()
        self._limit.lower(timeout)
        in_callback = calling.get() is not None
        carry_out(
            self._driver,
            lambda: self._end(in_callback),
            timeout,
            lambda: f"{late_text(self._driver, 'close() of a consumer', timeout)} It goes on in the background",
        )

    def _end(self, in_callback: bool) -> None:
        """Carry out ``close``. in_callback: the caller is a callback, so it waits for none."""
        if self._closed:
            return
        if not in_callback:
            self._leaving.end_work(self._limit)
        self._leaving.identify()
        with self._driver.lock.locked():
            self._leaving.begin(self._limit, in_callback)
        end_all(self._driver, [self], in_callback)
        self._leaving.end(self._limit)
        self._free()

    def _free(self) -> None:
        """Remove what the driver keeps for this consumer."""
        if self._closed:
            return
        self._closed = True
        if not self._entered:
            self._freed()
            return
        self._driver.upkeep.topics.remove(self._engine.number)
        with self._driver.condition:
            self._drain()
            engine = self._driver.engine
            engine.take(self._engine.number, self._engine.delivery.grants.decide, True)
            engine.take(self._engine.number, engine.remove_consumer, self._engine.number)
            self._driver.lock.ports.pop(self._engine.number, None)
            self._driver.condition.notify_all()
        self._freed()

    def _freed(self) -> None:
        """Close what this kind of consumer keeps itself."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if error is not None and isinstance(error, ClosedError):
            return
        if error is not None:
            self._left_by(error)
        self.close()


def take_handle(consumer: C) -> C:
    """The handle for the user, returned once. When nothing refers to it any more, the consumer is closed."""
    handle: C = consumer._unfetched.pop()

    def end() -> None:
        consumer._limit.lower(DEFAULT_TIMEOUT_S)
        consumer._end(False)

    close_if_dropped(handle, consumer._driver, lambda: consumer._closed, end)
    return handle


def refuse_taken(consumers: Iterable[ConsumerEngine], names: Collection[str], own: object = None) -> None:
    """Raises ConfigurationError if one of these, but our own, reads a topic of these names."""
    taken = [name for x in consumers if x is not own for name in x.subscription.names if name in names]
    if taken:
        raise ConfigurationError(f"another consumer of this Marshal reads {taken[0]!r} already")


def say_missing(subscription: Subscription) -> None:
    """Warn of topics that do not exist, and of patterns that none matches."""
    known = {topic for topic, _ in subscription.partitions}
    for topic in sorted(subscription.names - known):
        text = "topic %s does not exist (yet); this consumer waits for it"
        log(logging.WARNING, "topic_missing", text, topic, topic=topic)
    for pattern in subscription.patterns:
        if not any(pattern.match(topic) for topic in known):
            text = "no topic matches %s (yet); this consumer waits for one. (Internal topics never do.)"
            log(logging.WARNING, "topic_missing", text, pattern.pattern, topic=pattern.pattern)


def check_partitions(subscription: Subscription, keys: Iterable[Key]) -> None:
    """Refuse partitions that this consumer can never get (ConfigurationError)."""
    counts = Counter(topic for topic, _ in subscription.partitions)
    for topic, partition in keys:
        if partition < counts[topic]:
            continue
        if counts[topic]:
            why = f"does not exist: {topic!r} has {counts[topic]} partition(s), 0 to {counts[topic] - 1}"
        elif topic in subscription.names:
            why = f"does not exist: there is no topic {topic!r} yet"
        else:
            why = f"is not this consumer's: it reads {', '.join(sorted(counts)) or 'no topic that exists'}"
        raise ConfigurationError(f"{topic} [{partition}] {why}. Nothing was changed")


def _or_none(offset: int) -> int | None:
    return None if offset < 0 else offset
