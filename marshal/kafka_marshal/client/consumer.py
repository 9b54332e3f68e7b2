"""Consumer: messages of the partitions that this member holds.

This module is what user threads run, and may be interrupted anywhere in it. A thread of our own fetches and takes out
a run that may be handed over (:mod:`.fetching`); the user's takes message after message from the run's
iterator: no lock, and a look at the clock (T4).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any, TypeVar, Unpack, cast, overload

from kafka_marshal import arguments, ports
from kafka_marshal.adapters.message import Message
from kafka_marshal.client.attempt import Order
from kafka_marshal.client.base import TopicPartition, check_partitions
from kafka_marshal.client.batch import Batch
from kafka_marshal.client.fetching import FetchingConsumer
from kafka_marshal.client.handling import Handler, Hooks, Retry, RunOptions, RunSettings
from kafka_marshal.client.parallel import Call, carry_out, finish
from kafka_marshal.engine.consumer_inputs import Pause, Seek
from kafka_marshal.engine.work.assignment import Run
from kafka_marshal.engine.work.run import ALL, Taken
from kafka_marshal.errors import ClosedError, ConfigurationError
from kafka_marshal.node.engine_lock import under_lock
from kafka_marshal.node.serving import LOOK_S, Answer, EndedError, LateError
from kafka_marshal.node.topics import LOOKUP_TIMEOUT_S
from kafka_marshal.types import Key

__all__ = ["Consumer", "PartitionsCallback", "TopicPartition"]


DEFAULT_BATCH_SIZE = 1_000

#: At most once, when so many messages in a row took less than this together, the clock is looked at once for the next
#: so many. (They are granted: were the process stopped among them, the few it still gets are nobody else's, ever.)
CLOCK_STRIDE = 8
CLOCK_STRIDE_MS = 1.0

#: How long ``run`` waits for handlers that have begun, once it is to end (s).
DRAIN_TIMEOUT_S = 30.0

DEFAULT_RETRY = Retry()

T = TypeVar("T")

_Found = list[tuple[Run, list[ports.Message]]]


PartitionsCallback = Callable[["Consumer", list[TopicPartition]], object]


class Consumer(FetchingConsumer["Consumer"]):
    """Hands out the messages of the partitions this member holds. Made by :meth:`Marshal.consumer`.

    Any thread may call anything. Several may ask for messages: each message goes to one of them, and those of a
    partition are handed out in order. An exception raised in here by a signal (Ctrl-C, an alarm) loses nothing: the
    loop may go on with the same consumer.
    """

    # Getting messages: user threads.

    def __iter__(self) -> Iterator[Message]:
        """Messages, one by one. Ends after ``stop()`` or ``close()``.

        Each is done when the next one is asked for, unless the consumer was made with ``auto_done=False``.
        A message in hand when the loop is left by ``break`` or by an exception is not done: it comes again, here or
        at the next holder.
        """
        if self._options.settings.at_most_once:
            return self._iterate_granted()
        return self._iterate() if self._options.auto_done else self._poll_on()

    def _iterate(self) -> Iterator[Message]:
        """Run after run; between two messages no lock, no store, and a look at what the engine allows.

        The engine ends a lease by setting hand_out_until_s to 0, which is seen before the very next message. For the
        case that the whole process was stopped, the clock is compared, too, before each message: a look at it for
        several would hand out the others while somebody else has the partition (T4).
        """
        runtime, stop = self._driver.cluster.runtime, self._stop_signal
        # Handed over as the tuple that clock_gettime takes, which is made anew for each message otherwise: a fifth of
        # all that is done here between two messages.
        clock, clock_id = runtime.clock_gettime, (runtime.clock_id,)
        while True:
            try:
                answer = self._ask(self._serve_run, undo=self._undo)
            except EndedError:
                return
            message: Message | None = None
            try:
                run = self._waited(answer)
                if run is None:
                    return
                lease = run.assignment.lease
                for message in cast("Iterator[Message]", run.walk):
                    if clock(*clock_id) >= lease.hand_out_until_s or stop:
                        break
                    yield message
                else:
                    run.walked(message)
            except GeneratorExit:
                self._left = message
                raise
            finally:
                # From here on, and where not even this is reached, ``undo`` sees to the rest of the run.
                answer.receipt.left = True
                self._nudge()

    def _iterate_granted(self) -> Iterator[Message]:
        """At most once: batch after granted batch, looked after as in _iterate.

        What counts here is whether the lease is proven; that it is being let go does not matter to what is granted.
        Leaving the loop leaves the rest of the batch to the next loop.
        """
        runtime, stop = self._driver.cluster.runtime, self._stop_signal
        clock, clock_id = runtime.clock_gettime, runtime.clock_id
        now, pace = 0.0, _Pace()
        run: Run | None = None
        message: Message | None = None
        messages: list[ports.Message] = []
        out = [0]
        try:
            while (run := self._hand_for(None)) is not None:
                lease = run.assignment.lease
                messages, out = [], [0]
                run.taken.append(Taken(messages, out, run.since))
                count = look_at = looked_at = 0
                for message in cast("Iterator[Message]", run.walk):
                    messages.append(message)
                    if count >= look_at:
                        before, now = now, clock(clock_id) * 1000.0
                        look_at = count + pace.stride(count - looked_at, now - before)
                        looked_at = count
                        run.since = now
                    if now >= lease.proven_until or stop:
                        self._refuse(run, [message])
                        break
                    count += 1  # noqa: SIM113 - not of those that must not be handed out
                    out[0] = count; yield message  # fmt: skip  # noqa: E702 - one line: nothing may come in between
        except BaseException as error:
            if _is_withheld(error, out):
                return  # close() came in between, and has reported it
            self._left = message if isinstance(error, GeneratorExit) else None
            self._hand.in_doubt = True
            if message is not None and run is not None:
                self._refuse(run, [message, *messages])  # but for those that have left
            raise

    def _poll_on(self) -> Iterator[Message]:
        while not self._stop_signal:
            try:
                message = self.poll(None)
            except ClosedError:
                return
            if message is None:
                return
            yield message

    def poll(self, timeout: float | None = None) -> Message | None:
        """The next message, or None after timeout seconds (None: wait until there is one, or ``stop()``).

        Not done before ``done(message)``. Loop ``while not marshal.stopping``: after ``stop()`` every call waits its
        timeout out (without one, a tenth of a second) and returns None, after ``close()`` it raises ClosedError.
        """
        message: Message | None = None
        out = [0]
        try:
            deadline = self._begin(timeout)
            if self._stop_signal:
                self._wait_stopped(deadline)
                return None
            while (hand := self._hand_for(deadline)) is not None:
                message = next(hand.walk, None)  # type: ignore[assignment]  # a reader made it
                if message is None:
                    continue
                now = self._driver.now_ms()
                if self._may_leave(hand, now):
                    hand.since = now
                    hand.taken.append(Taken([message], out, now))
                    if self._closed:
                        return None  # close() reports it, at most once
                    out[0] = 1; return message  # fmt: skip  # noqa: E702 - one line: nothing may come in between
                self._refuse(hand, [message])
                message = None
            return None
        except BaseException as error:
            self._hand.in_doubt = True  # first: another interrupt may come at once
            if _is_withheld(error, out):
                return None  # close() came in between, and has reported it
            if message is not None and hand is not None:
                self._refuse(hand, [message])  # unless it has left
            raise

    def consume(self, num_messages: int = 1, timeout: float | None = None) -> list[Message]:
        """Up to num_messages, as many as came within timeout seconds (None: wait for all of them, or ``stop()``).

        Fewer, and at once, where the lease of one that came is being released, or is in doubt: it should not wait here.
        What waited here until its lease was over (a process that was stopped) is not returned (T4): at least once it
        comes again, here or elsewhere; at most once it is in ``unprocessed``. After ``stop()`` and ``close()`` as
        ``poll``, with an empty list.
        """
        num_messages = arguments.a_whole("num_messages", num_messages, 1)
        found: _Found = []
        ours: list[Message] = []
        out = [0]
        try:
            deadline = self._begin(timeout)
            if self._stop_signal:
                self._wait_stopped(deadline)
                return []
            while True:
                found = []
                self._collect(found, num_messages, deadline)
                now, out, ours = self._driver.now_ms(), [0], []
                for run, messages in found:
                    if self._may_leave(run, now):
                        run.since = now
                        run.taken.append(Taken(messages, out, now))
                        ours.extend(messages)  # type: ignore[arg-type]  # as in poll
                    else:
                        self._refuse(run, messages)
                if self._closed:
                    return []  # as in poll
                if ours or not found:
                    out[0] = ALL; return ours  # fmt: skip  # noqa: E702 - one line: nothing may come in between
        except BaseException as error:
            self._hand.in_doubt = True
            if _is_withheld(error, out):
                return []
            for run, messages in found:
                self._refuse(run, messages)  # but for those that have left
            raise

    def _collect(self, found: _Found, num_messages: int, deadline: float | None) -> None:
        """Run after run, until there are so many messages, or the time is up."""
        wanted = num_messages
        while wanted > 0 and (hand := self._hand_for(deadline, [run for run, _ in found])) is not None:
            found.append((hand, list(islice(hand.walk, wanted))))
            wanted -= len(found[-1][1])
            if not found[-1][1]:
                found.pop()
            if self._options.settings.at_most_once and deadline is not None and self._driver.monotonic() >= deadline:
                break  # there may be more to claim, but each claim takes its time

    def batches(self, max_messages: int = 500, timeout: float = 1.0) -> Iterator[Batch]:
        """Batches of one partition each, of at most max_messages, not done before ``batch.done()``.

        A batch is handed over when it is full, or when timeout seconds have passed since something for it was there.
        Ends after ``stop()`` or ``close()``.
        """
        max_messages = arguments.a_whole("max_messages", max_messages, 1)
        arguments.seconds("timeout", timeout)
        return (
            self._batches_granted(max_messages) if self._engine.at_most_once else self._batches(max_messages, timeout)
        )

    def _batches(self, max_messages: int, timeout: float) -> Iterator[Batch]:
        while True:
            try:
                answer = self._ask(self._serve_batch, max_messages, timeout, undo=self._undo)
            except EndedError:
                return
            run: Run | None = None
            try:
                run = self._waited(answer)
                if run is None:
                    return
                batch = Batch(self._say, run, list(run.messages))
                run.holder = weakref.ref(batch)
                answer.receipt.out = True; yield batch  # fmt: skip  # noqa: E702 - one line: nothing may come in between
                del batch
            except BaseException as error:
                if isinstance(error, GeneratorExit) and run is not None:
                    self._left = cast("Message", run.messages[0])
                answer.receipt.left = True
                raise

    def _batches_granted(self, max_messages: int) -> Iterator[Batch]:
        messages: list[ports.Message] = []
        hand: Run | None = None
        out = [0]
        try:
            while (hand := self._hand_for(None)) is not None:
                messages = list(islice(hand.walk, max_messages))
                now = self._driver.now_ms()
                if messages and self._may_leave(hand, now):
                    hand.since = now
                    out = [0]
                    hand.taken.append(Taken(messages, out, now))
                    batch = Batch(self._say, hand, list(messages))
                    if self._closed:
                        return  # as in poll
                    out[0] = ALL; yield batch  # fmt: skip  # noqa: E702 - one line: nothing may come in between
                    del batch
                elif messages:
                    self._refuse(hand, messages)
        except BaseException as error:
            if _is_withheld(error, out):
                return
            self._hand.in_doubt = True
            if hand is not None:
                self._refuse(hand, messages)  # unless they have left
            raise

    def _ask(self, function: Callable[..., T], *args: object, undo: Callable[[T], object] | None = None) -> Answer[T]:
        self._left = None
        self._driver.refuse_fork()
        if self._driver.is_over:
            raise EndedError("this Marshal is closed; make a new one")
        return self._driver.servants.ask(function, *args, undo=undo)

    @staticmethod
    def _waited(answer: Answer[Run | None]) -> Run | None:
        """The run that was asked for; None where another thread has closed the Marshal meanwhile."""
        try:
            return answer.wait()
        except EndedError:
            return None

    def _refuse(self, run: Run, messages: Sequence[ports.Message]) -> None:
        """What was taken must not be handed out any more: it goes back."""
        run.refused.extend(messages)
        self._hand.in_doubt = True
        self._nudge()

    def _hand_for(self, deadline: float | None, collected: Sequence[Run] = ()) -> Run | None:
        """The run that threads take messages from now; a new one where that has come to its end."""
        hand = self._hand.run
        is_good = hand is not None and not self._hand.in_doubt and not self._engine.errors and not self._closed
        if is_good and hand is not None and hand.has_left and self._may_leave(hand, self._driver.now_ms()):
            return hand
        try:
            answer = self._ask(self._serve_hand, deadline, collected)
            try:
                return answer.wait(None if deadline is None else deadline - self._driver.monotonic() + LOOK_S)
            finally:
                answer.receipt.left = True
        except (EndedError, LateError):  # late where our own threads are held up
            return None

    # Many handlers.

    @overload
    def run(
        self, handle: Callable[[Message], object], *, deserialize: None = None, **settings: Unpack[RunSettings]
    ) -> None: ...
    @overload
    def run(
        self, handle: Callable[[T], object], *, deserialize: Callable[[Message], T], **settings: Unpack[RunSettings]
    ) -> None: ...
    def run(
        self,
        handle: Handler,
        *,
        concurrency: int = 16,
        order: Order = "key",
        retry: Retry | None = DEFAULT_RETRY,
        dead_letters: str | None = None,
        drain_timeout: float = DRAIN_TIMEOUT_S,
        hooks: Sequence[Hooks] = (),
        deserialize: Callable[[Message], Any] | None = None,
    ) -> None:
        """Call handle(message) for each message, many at a time, until ``stop()``; each is done when it returns.

        ``handle``: a function, called in ``concurrency`` threads, or a coroutine function, awaited in as many tasks of
        one event loop in a thread of its own. What it returns is ignored, but work that has not run (a coroutine, a
        future, a generator) ends the run with ConfigurationError. ``Attempt.current()`` says which try it is.
        ``order``: no handling of a message begins before that of the one before it has ended, retries included, among
        those with the same key (``"key"``; one without a key waits for none), of the same partition, or
        ``"none"``. Keys never wait for each other. It holds across rebalances and restarts, for first handlings: a
        crash may repeat what was not reported, and a dead letter is out of order.
        ``retry``: a message whose handler raises is tried again in its place. After the last failure it goes to the
        topic ``dead_letters``, with headers that say where it is from and why, and is done then: a crash in between
        repeats the dead letter. Without that topic the exception ends the run and is raised here; the message is not
        done, and comes again. Errors of this library make no dead letter, and what fails once the lease is not proven
        has no effect: docs/handlers.md says which does what.
        A message that takes for ever holds back its key alone; its partition goes on until 50,000 messages of it, or
        its share of ``max_bytes_in_flight``, are in hand. With ``handler_timeout`` (of the consumer) a coroutine is
        cancelled after that time, as a failure with TimeoutError; a thread can't be: its partition is
        released, and the thread left behind.
        ``drain_timeout`` (seconds): after ``stop()``, and when the run ends by an exception, handlers that run have
        this long to return; what they have by then comes again. A second Ctrl-C waits no longer.
        ``hooks``: functions called before and after each try. ``deserialize``: handle gets what it makes of the
        message; its failures count as the handler's.

        Raises what ended the run: a handler's last exception, or one that is no Exception (SystemExit …). Raises
        ConfigurationError for ``delivery="at-most-once"``.
        """
        options = RunOptions.checked(
            self._options, handle, concurrency, order, retry, dead_letters, drain_timeout, hooks, deserialize
        )
        self._begin(None)
        call = Call()
        try:
            answer = self._ask(carry_out, self, options, call)
            answer.wait()
        except EndedError:
            return
        except BaseException:
            if not call.is_over:  # an interrupt, here: what is in hand ends first
                call.stop()
                with suppress(EndedError):
                    self._ask(finish, self, call).wait()
            raise
        finally:
            call.stop(abandon=True)  # an interrupt while that was waited for

    # Saying what is done.

    def done(self, message: ports.Message) -> None:
        """A message from ``poll``, ``consume`` or a loop with auto_done=False is done; any order, any thread.

        After its lease ended, or after ``close()``, this commits nothing and is counted in ``ignored_done``, as what
        is not in hand is. Raises ConfigurationError for what is of a partition that this consumer never had.
        """
        try:
            is_known = (message.topic(), message.partition()) in self._fetcher.ever_fetched
        except (AttributeError, TypeError):
            wanted = "one that this consumer has handed out (of a batch, call batch.done())"
            raise arguments.wrong("message", wanted, message) from None
        if not is_known:
            raise ConfigurationError(
                f"{message.topic()} [{message.partition()}]: this consumer has never had this partition, so it has not "
                "handed out this message. Nothing was committed; call done() of the consumer that it came from"
            )
        self._say(message)

    # Looking, and steering.

    def position(self) -> list[TopicPartition]:
        """The next offset to be handed out, of each assigned partition."""
        return self.assignment()

    def pause(self, partitions: Sequence[tuple[str, int] | TopicPartition] | None = None) -> None:
        """Hand out nothing of these partitions (None: of all assigned now) until ``resume``; the leases are kept.

        What is not assigned now is left as it is; ConfigurationError for a partition that does not exist.
        At most once, what is granted already waits for ``resume``, too, and so does the partition's release.
        """
        self._set_paused(partitions, True)

    def resume(self, partitions: Sequence[tuple[str, int] | TopicPartition] | None = None) -> None:
        """Hand out messages of these partitions (None: of all) again."""
        self._set_paused(partitions, False)

    def _set_paused(self, partitions: Sequence[tuple[str, int] | TopicPartition] | None, paused: bool) -> None:
        wanted = None if partitions is None else set(arguments.partitions("partitions", partitions))
        self._begin(None)
        self._driver.call(self._carry_out_pause, wanted, paused)

    def _carry_out_pause(self, wanted: set[Key] | None, paused: bool) -> None:
        with self._driver.locked():
            check_partitions(self._engine.subscription, wanted or ())
            if keys := self._take(Pause(self._engine.number, wanted, paused)):
                reader = self._fetcher.reader
                (reader.pause if paused else reader.resume)(keys)

    def seek(self, topic: str, partition: int, offset: int, *, force: bool = False) -> None:
        """Go forward to offset: everything below it is done already, in a sink that is ahead of the log.

        Raises ConfigurationError for a partition not assigned, for going back (only an admin may: C11), and, without
        force, for an offset beyond the partition's log end; KafkaUnavailableError where that can't be looked up.
        """
        arguments.text("topic", topic)
        partition = arguments.a_whole("partition", partition, 0, arguments.MOST_PARTITION)
        offset = arguments.a_whole("offset", offset)
        self._begin(None)
        self._driver.call(self._carry_out_seek, topic, partition, offset, arguments.a_flag("force", force))

    def _carry_out_seek(self, topic: str, partition: int, offset: int, force: bool) -> None:
        with self._driver.locked(step=False):
            check_partitions(self._engine.subscription, [(topic, partition)])
        if not force and not under_lock.get():  # nobody else may wait for a look-up
            marks = self._driver.cluster.watermarks([(topic, partition)], LOOKUP_TIMEOUT_S)
            end = marks.get((topic, partition), (0, offset))[1]
            if offset > end:
                raise ConfigurationError(
                    f"{topic} [{partition}]: can't seek to {offset}: the log ends at {end}, so nothing is done below "
                    "that. Nothing was changed. Was the topic recreated, or is the sink another topic's? "
                    "seek(..., force=True) insists"
                )
        with self._driver.locked():
            if self._take(Seek(self._engine.number, (topic, partition), offset)):
                return
        position = {x[:2]: x.offset for x in self.assignment()}.get((topic, partition), -1)
        if offset < position:
            why = f"its position is {position} already. To go back, reposition the group: kafka-marshal release-group"
        else:
            why = "it is not assigned to this consumer now, or about to be released: see assignment()"
        raise ConfigurationError(f"{topic} [{partition}]: can't seek to {offset}: {why}. Nothing was changed")


def _is_withheld(error: BaseException, out: list[int]) -> bool:
    """Whether messages could not leave the library any more (``Run.withhold``)."""
    return not out and isinstance(error, IndexError)


class _Pace:
    """How fast messages went lately, one look at the clock after the other."""

    __slots__ = ("_messages", "_took_ms")

    def __init__(self) -> None:
        self._messages = 0
        self._took_ms = 0.0

    def stride(self, messages: int, took_ms: float) -> int:
        """How many messages the next look is for, after so many since the last one took so long."""
        if messages == 0:  # a run begins: what there was before it was no handling
            return 1
        self._messages += messages
        self._took_ms += took_ms
        if self._took_ms >= CLOCK_STRIDE_MS:  # slow, or one of them was: count anew
            self._messages, self._took_ms = 0, 0.0
        if self._messages < CLOCK_STRIDE:
            return 1
        self._messages, self._took_ms = 0, 0.0
        return CLOCK_STRIDE
