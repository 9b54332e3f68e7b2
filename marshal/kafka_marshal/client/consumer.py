"""Consumer: messages of the partitions that this member holds.

User threads run this module, and a signal may interrupt them anywhere in it. A thread of our own fetches messages and
prepares a run of them (:mod:`.fetching`). The user's thread takes one message after another from the run's iterator:
without a lock, and with a check of the clock before each (T4).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any, Unpack, cast, overload

from kafka_marshal import arguments, ports
from kafka_marshal.adapters.message import Message
from kafka_marshal.client.base import check_partitions, refuse_taken, say_missing
from kafka_marshal.client.batch import Batch
from kafka_marshal.client.committing import Transaction
from kafka_marshal.client.fetching import FetchingConsumer
from kafka_marshal.client.handling import RUN, Handler, RunOptions, RunSettings
from kafka_marshal.client.options import checked_topics, takes
from kafka_marshal.client.parallel import carry_out, finish
from kafka_marshal.client.tries import RunCall
from kafka_marshal.engine.work.assignment import Run
from kafka_marshal.engine.work.run import ALL, Taken
from kafka_marshal.errors import ClosedError, ConfigurationError
from kafka_marshal.node.engine_lock import under_lock
from kafka_marshal.node.serving import LOOK_S, EndedError, LateError, Reply
from kafka_marshal.node.topics import LOOKUP_TIMEOUT_S
from kafka_marshal.types import Key, T, TopicPartition

#: At most once: if CLOCK_STRIDE messages in a row took less than CLOCK_STRIDE_MS in total, the next as many share one
#: check of the clock. (They are granted: if the process is stopped among them, no other member ever gets them.)
CLOCK_STRIDE = 8
CLOCK_STRIDE_MS = 1.0


_Found = list[tuple[Run, list[ports.Message]]]


PartitionsCallback = Callable[["Consumer", list[TopicPartition]], object]


class Consumer(FetchingConsumer["Consumer"]):
    """Delivers the messages of the partitions this member holds. Made by :meth:`Marshal.consumer`.

    Any thread may call any method. Several threads may ask for messages: each message goes to one of them, and those
    of a partition are delivered in order. An exception raised in here by a signal (Ctrl-C, an alarm) loses nothing:
    the loop may continue with the same consumer.
    """

    # Getting messages: user threads.

    def __iter__(self) -> Iterator[Message]:
        """Messages, one by one. Ends after ``stop()`` or ``close()``.

        Each is done when the next one is asked for, unless the consumer was made with ``auto_done=False``.
        Left by ``break`` or an exception, the message in flight is not done: it comes again, here or elsewhere.
        """
        self._refuse_in_transactions("iterating")
        if self._options.settings.at_most_once:
            return self._iterate_granted()
        return self._iterate() if self._options.auto_done else self._poll_on()

    def _iterate(self) -> Iterator[Message]:
        """Run after run; between two messages no lock, no store, and one check of the engine's limit.

        The engine ends a lease by setting hand_out_until_s to 0, which is seen before the very next message. As the
        whole process may have been stopped, the clock is compared before each message, too: one check for several
        would deliver the others while another member has the partition (T4).
        """
        runtime, stop = self._driver.cluster.runtime, self._stop_signal
        # The arguments of clock_gettime are one tuple, made once: to make it for each message costs a fifth of the
        # time between two messages.
        clock, clock_id = runtime.clock_gettime, (runtime.clock_id,)
        run: Run | None = None
        while True:
            try:
                answer = self._ask(self._serve_run, run, undo=self._undo)
            except EndedError:
                return
            message: Message | None = None
            run = None
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
            except BaseException as error:
                if run is not None:
                    run.given_up = True
                self._left = message if isinstance(error, GeneratorExit) else self._left
                raise
            finally:
                # From here on ``undo`` returns the rest of the run, also if this line is never reached.
                answer.receipt.left = True
                self._nudge()

    def _iterate_granted(self) -> Iterator[Message]:
        """At most once: one granted batch after another, with the checks of _iterate.

        Here the lease only has to be proven: what is granted may be delivered while the lease is being released.
        If the loop is left, the next loop gets the rest of the batch.
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
                    count += 1  # noqa: SIM113 - counts only those that may be delivered
                    out[0] = count; yield message  # fmt: skip  # noqa: E702 - one line: nothing may come in between
        except BaseException as error:
            if _is_withheld(error, out):
                return  # close() came in between, and has reported the message
            self._left = message if isinstance(error, GeneratorExit) else None
            self._hand.in_doubt = True
            if message is not None and run is not None:
                self._refuse(run, [message, *messages])  # except those that were delivered
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
            del message  # else one that the program has dropped would be in flight during the next call

    def poll(self, timeout: float | None = None) -> Message | None:
        """The next message, or None after timeout seconds (None: wait until there is one, or ``stop()``).

        It is not done before ``done(message)``; of a program that never calls it, the next ones come all the same (see
        docs/threads.md). Loop ``while not marshal.stopping``: after ``stop()`` every call waits for its timeout
        (without one, a tenth of a second) and returns None; after ``close()`` it raises ClosedError.
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
                        return None  # at most once, close() reports it
                    out[0] = 1; return message  # fmt: skip  # noqa: E702 - one line: nothing may come in between
                self._refuse(hand, [message])
                message = None
            return None
        except BaseException as error:
            self._hand.in_doubt = True  # first: another interrupt may come at once
            if _is_withheld(error, out):
                return None  # close() came in between, and has reported the message
            if message is not None and hand is not None:
                self._refuse(hand, [message])  # unless it was delivered
            raise

    def consume(self, num_messages: int = 1, timeout: float | None = None) -> list[Message]:
        """Up to num_messages, as many as came within timeout seconds (None: wait for all of them, or ``stop()``).

        Returns early, with fewer, if the lease of a collected message is being released or in doubt. Messages whose
        lease ended while they waited here (the process was stopped) are not returned. At least once they come again,
        here or elsewhere; at most once they are in ``unprocessed``. After ``stop()`` it returns an empty list, and
        after ``close()`` it raises ClosedError.
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
                self._refuse(run, messages)  # except those that were delivered
            raise

    def _collect(self, found: _Found, num_messages: int, deadline: float | None) -> None:
        """Run after run, until there are num_messages, or the deadline is over."""
        wanted = num_messages
        while wanted > 0 and (hand := self._hand_for(deadline, [run for run, _ in found])) is not None:
            found.append((hand, list(islice(hand.walk, wanted))))
            wanted -= len(found[-1][1])
            if not found[-1][1]:
                found.pop()
            if self._options.settings.at_most_once and deadline is not None and self._driver.monotonic() >= deadline:
                break  # more could be claimed, but each claim takes time

    def batches(self, max_messages: int = 500, timeout: float = 1.0) -> Iterator[Batch]:
        """Batches of one partition each, of at most max_messages, not done before ``batch.done()``.

        A batch is delivered when it is full, or timeout seconds after its first message was there. It is in flight
        until ``batch.done()``, or until nothing refers to it, in any thread. Ends after ``stop()`` or ``close()``.
        """
        max_messages = arguments.a_whole("max_messages", max_messages, 1)
        arguments.seconds("timeout", timeout)
        if self._engine.at_most_once:
            return self._batches_granted(max_messages)
        return self._batches(max_messages, timeout)

    def _batch_of(self, run: Run) -> Batch:
        return Batch(self._say_batch, run, list(run.messages), *self._about())

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
                if not self._may_leave(run, self._driver.now_ms()):  # this process was stopped during the wait (T4)
                    answer.receipt.left = True
                    continue
                batch = self._batch_of(run)
                run.holder = weakref.ref(batch)
                answer.receipt.out = True; yield batch  # fmt: skip  # noqa: E702 - one line: nothing may come in between
                del batch
            except BaseException as error:
                if isinstance(error, GeneratorExit) and run is not None and run.assignment.tracker.has(run):
                    self._left = cast("Message", run.messages[0])
                answer.receipt.left = True
                raise

    def _say_batch(self, run: Run) -> None:
        self._refuse_in_transactions("batch.done()")
        self._say(run)

    def transaction(self, batch: Batch) -> Transaction:
        """A transaction of a batch: ``with consumer.transaction(batch) as tx: tx.produce("invoices", value=…)``.

        Leaving the block commits what was produced and that the batch is done, as one: readers with read_committed
        see each output once. Transactions of one partition are committed in the order of their batches; one that is
        ready early waits there for those before it. An exception in the block ends it: nothing is produced, and the
        batch comes again, as do all later batches of its partition. Any thread may have one.

        Raises on entering: TransactionError (retry) if the batch was dropped, since an earlier one failed; it comes
        again. On leaving, with nothing committed: the same, also if no broker answers; TransactionLostError; without
        retry if a record can't be written; AuthorizationError. On leaving, if Kafka has the last word: TransactionError
        (retry) if the outcome is not known, TransactionFencedError if another owner has taken over. What was not
        committed comes again, here or at another member. Raises ConfigurationError without ``exactly_once=``.
        """
        if self._transactions is None:
            raise ConfigurationError(
                "this consumer does not process in transactions. Nothing was committed. Make it with "
                "exactly_once=Transactions(); or call batch.done()"
            )
        arguments.an_instance("batch", batch, Batch, "a Batch of this consumer's batches()")
        if batch._run.assignment.consumer is not self._engine:
            raise arguments.wrong("batch", "a Batch of this consumer", batch)
        return Transaction(self, batch, self._ask)

    def _refuse_in_transactions(self, what: str) -> None:
        """Raise ConfigurationError for another way of progress, on a consumer that processes in transactions."""
        if self._transactions is not None:
            raise ConfigurationError(
                f"{what} reports progress to the log alone, and this consumer was made with exactly_once=: what it "
                "produces and its progress are committed together. Nothing was changed. Use `with "
                "consumer.transaction(batch) as tx:` for each batch of consumer.batches(), or run(handle)"
            )

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
                    batch = Batch(self._say, hand, list(messages), *self._about())
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
                self._refuse(hand, messages)  # unless they were delivered
            raise

    def _ask(self, function: Callable[..., T], *args: object, undo: Callable[[T], object] | None = None) -> Reply[T]:
        self._left = None
        self._driver.life.refuse_fork()
        if self._driver.is_over:
            raise EndedError("this Marshal is closed; make a new one")
        return self._driver.servants.ask(function, *args, undo=undo)

    @staticmethod
    def _waited(answer: Reply[Run | None]) -> Run | None:
        """The run that was asked for; None if another thread has closed the Marshal meanwhile."""
        try:
            return answer.wait()
        except EndedError:
            return None

    def _refuse(self, run: Run, messages: Sequence[ports.Message]) -> None:
        """These messages were taken, but must not be delivered any more: give them back."""
        run.refused.extend(messages)
        self._hand.in_doubt = True
        self._nudge()

    def _hand_for(self, deadline: float | None, collected: Sequence[Run] = ()) -> Run | None:
        """The run that threads take messages from; a new one if the present one is used up."""
        hand = self._hand.run
        is_good = hand is not None and not self._hand.in_doubt and not self._engine.errors and not self._closed
        if is_good and hand is not None and hand.has_left and self._may_leave(hand, self._driver.now_ms()):
            return hand
        self._refuse_in_transactions("poll() and consume()")
        try:
            answer = self._ask(self._serve_hand, deadline, collected)
            try:
                return answer.wait(None if deadline is None else deadline - self._driver.monotonic() + LOOK_S)
            finally:
                answer.receipt.left = True
        except (EndedError, LateError):  # late: our own threads are blocked
            return None

    # Many handlers.

    @overload
    def run(
        self,
        handle: Callable[[Message], object] | Callable[[list[Message]], object],
        *,
        deserialize: None = None,
        **settings: Unpack[RunSettings],
    ) -> None: ...
    @overload
    def run(
        self,
        handle: Callable[[T], object] | Callable[[list[T]], object],
        *,
        deserialize: Callable[[Message], T],
        **settings: Unpack[RunSettings],
    ) -> None: ...
    @takes(RunSettings, RUN)
    def run(
        self,
        handle: Handler,
        *,
        deserialize: Callable[[Message], Any] | None = None,
        **settings: Unpack[RunSettings],
    ) -> None:
        """Call handle(message) for each message, many at a time, until ``stop()``; each is done when it returns.

        ``handle``: a function, called in ``concurrency`` threads, or a coroutine function, awaited in as many tasks of
        one event loop in a separate thread. Its result is ignored, but one whose work has not run (a coroutine, a
        future, a generator) ends the run with ConfigurationError. ``Attempt.current()`` says which try it is. One that
        never returns delays its own key only; its partition continues until 50,000 of its messages, or its share of
        ``max_bytes_in_flight``, are in flight.

        ``deserialize``: handle gets its result instead of the message; its failures count as the handler's.

        ``concurrency``: how many messages are handled at a time.

        ``order``: which messages are handled one after another, retries included: those with the same key (``"key"``;
        messages without a key wait for none), those of the same partition (``"partition"``), or ``"none"``. With
        ``"key"``, keys never wait for each other. First handlings keep this order across rebalances and restarts; a
        crash may repeat what was not reported, and a dead letter is out of order.

        ``retry``: a message whose handler raises is tried again in its place. After the last failure it goes to
        ``dead_letters``; without that, the exception ends the run and is raised here, and the message comes again.
        Errors of this library make no dead letter, and a failure after the lease is no longer proven has no effect: see
        docs/handlers.md.

        ``dead_letters``: the topic for what failed for the last time, with headers that give its source and the reason.
        Then it is done: a crash in between repeats the dead letter.

        ``park``: instead of a dead letter, the message is set aside in the group's log, with the class of the exception
        as the reason. Its key continues, and the message waits there for ``kafka-marshal redrive`` or ``discard``.
        Tries that wait are logged, so a handover does not start them again; see docs/open-messages.md.

        ``drain_timeout`` (seconds): how long running handlers may take to return after ``stop()``, or after an
        exception has ended the run; what is not done by then comes again. A second Ctrl-C ends this wait.

        ``hooks``: functions called before and after each try.

        ``batch``: handle gets lists of at most this many messages, and each is settled by itself: those that a
        ``MessagesFailedError`` names have failed, and the others are done. After any other exception each is tried
        alone, and the try of the list does not count. With ``order="key"`` no two messages of a key are in two lists at
        a time. ``linger`` (seconds): how long a list that is not full waits for more.

        ``rate``: at most this many tries begin in a second, of all topics (a number, or a ``Rate``) or by topic (a
        dictionary). What waits for that holds up nothing else. ``priority``: priority(message) is 0 … 9, and 9 begins
        first; while several wait, one begin in ten is of a lower one. See docs/handlers.md.

        With ``handler_timeout`` (of the consumer) a coroutine is cancelled after that time and fails with TimeoutError.
        A thread can't be cancelled: its partition is released, and the thread is left behind.

        With ``exactly_once`` (of the consumer) ``Attempt.current().produce(…)`` in a handler holds records back until
        the message's transaction. One transaction of a partition at a time commits the next finished messages, in
        order: what they have produced, their dead letters and the progress appear together, once, for readers with
        ``isolation.level=read_committed``. A slow message delays what is visible of its partition, but no other
        handler: see docs/transactions.md.

        Raises what ended the run: a handler's last exception, or one that is no Exception (SystemExit …). Raises
        ConfigurationError for ``delivery="at-most-once"``.
        """
        options = RunOptions.checked(self._options, handle, deserialize, settings)
        self._begin(None)
        call = RunCall()
        try:
            answer = self._ask(carry_out, self, options, call)
            answer.wait()
        except EndedError:
            return
        except BaseException:
            if not call.is_over:  # interrupted here: wait until what is in flight ends
                call.stop()
                with suppress(EndedError):
                    self._ask(finish, self, call).wait()
            raise
        finally:
            call.stop(abandon=True)  # interrupted again during that wait

    # Saying what is done.

    def done(self, message: ports.Message) -> None:
        """A message from ``poll``, ``consume`` or a loop with auto_done=False is done; any order, any thread.

        After its lease ended, after ``close()``, or for a message not in flight, this commits nothing and is counted
        in ``ignored_done``. Raises ConfigurationError for a message of a partition that this consumer never had.
        """
        try:
            is_known = (message.topic(), message.partition()) in self._handed_out_of
        except (AttributeError, TypeError):
            wanted = "one that this consumer has handed out (of a batch, call batch.done())"
            raise arguments.wrong("message", wanted, message) from None
        if not is_known:
            self._refuse_in_transactions("done()")
            raise ConfigurationError(
                f"{message.topic()} [{message.partition()}]: this consumer has never had this partition, so it has not "
                "handed out this message. Nothing was committed; call done() of the consumer that it came from"
            )
        self._say(message)

    # Looking, and steering.

    def pause(self, partitions: Sequence[tuple[str, int] | TopicPartition] | None = None) -> None:
        """Deliver nothing of these partitions (None: of all assigned now) until ``resume``; the leases are kept.

        It has no effect on partitions not assigned now. Raises ConfigurationError if one does not exist. At most once,
        what is granted already waits for ``resume``, too, and so does the partition's release.
        """
        self._set_paused(partitions, True)

    def resume(self, partitions: Sequence[tuple[str, int] | TopicPartition] | None = None) -> None:
        """Deliver messages of these partitions (None: of all) again."""
        self._set_paused(partitions, False)

    def _set_paused(self, partitions: Sequence[tuple[str, int] | TopicPartition] | None, paused: bool) -> None:
        wanted = None if partitions is None else set(arguments.partitions("partitions", partitions))
        self._begin(None)
        self._driver.call(self._carry_out_pause, wanted, paused)

    def _carry_out_pause(self, wanted: set[Key] | None, paused: bool) -> None:
        with self._driver.lock.locked():
            check_partitions(self._engine.subscription, wanted or ())
            if keys := self._take(self._engine.pause, wanted, paused):
                reader = self._fetcher.reader
                (reader.pause if paused else reader.resume)(keys)

    def subscribe(self, topics: Sequence[str]) -> None:
        """Read these topics in place of those before, while it runs: what is in both lists never stops.

        ``topics``: names and ^patterns, all that it is to read from now on. Partitions of others are released as by
        ``close()``: handlers finish what they have. New ones begin where ``start=`` says, as those of a new consumer.

        Members of a coordinated group join again with these topics, and the group is rebalanced once.

        Raises ConfigurationError for topics that can't be read, or that another consumer of this Marshal reads, and for
        consumers that share partitions (by keys or batches), or take checkpoints; KafkaUnavailableError if Kafka does
        not answer: the change holds all the same, and new topics are found as soon as it does.
        """
        settings = self._options.settings
        names = checked_topics(topics, self._driver.replica.topic)
        if any((settings.keys, settings.sharing, settings.shares_keys, settings.group and settings.group.checkpoints)):
            raise ConfigurationError(
                "subscribe() changes the topics of consumers with mode=Claims() and mode=Group(); this one names its "
                "partitions, shares them by keys or batches, or takes checkpoints. Nothing was changed. Close it, and "
                "make another one for the new topics: its partitions are handed over in order"
            )
        self._begin(None)
        self._driver.call(self._carry_out_subscribe, names)

    def _carry_out_subscribe(self, names: tuple[str, ...]) -> None:
        driver, engine, subscription = self._driver, self._engine, self._engine.subscription
        with driver.lock.locked():
            refuse_taken(driver.engine.consumers.values(), names, engine)
            self._take(engine.subscribe, names)
        driver.upkeep.topics.add(engine.number, subscription)
        say_missing(subscription)

    def seek(self, topic: str, partition: int, offset: int, *, force: bool = False) -> None:
        """Go forward to offset: everything below it is done already, in a sink that is ahead of the log.

        Raises ConfigurationError for a partition not assigned, for going back (only an admin may do that), and, without
        force, for an offset beyond the partition's log end; KafkaUnavailableError if that can't be looked up.
        """
        self._refuse_in_transactions("seek()")
        arguments.text("topic", topic)
        partition = arguments.a_whole("partition", partition, 0, arguments.MOST_PARTITION)
        offset = arguments.a_whole("offset", offset)
        self._begin(None)
        self._driver.call(self._carry_out_seek, topic, partition, offset, arguments.a_flag("force", force))

    def _carry_out_seek(self, topic: str, partition: int, offset: int, force: bool) -> None:
        with self._driver.lock.locked(step=False):
            check_partitions(self._engine.subscription, [(topic, partition)])
        if not force and not under_lock.get():  # no thread may wait for the lock during a look-up
            marks = self._driver.cluster.watermarks([(topic, partition)], LOOKUP_TIMEOUT_S)
            end = marks.get((topic, partition), (0, offset))[1]
            if offset > end:
                raise ConfigurationError(
                    f"{topic} [{partition}]: can't seek to {offset}: the log ends at {end}, so nothing is done below "
                    "that. Nothing was changed. Was the topic recreated, or is the sink another topic's? "
                    "seek(..., force=True) insists"
                )
        with self._driver.lock.locked():
            if self._driver.engine.take(self._engine.number, self._engine.seek, (topic, partition), offset):
                return
        position = {x[:2]: x.offset for x in self.assignment()}.get((topic, partition), -1)
        if offset < position:
            why = f"its position is {position} already. To go back, reposition the group: kafka-marshal release-group"
        else:
            why = "it is not assigned to this consumer now, or about to be released: see assignment()"
        raise ConfigurationError(f"{topic} [{partition}]: can't seek to {offset}: {why}. Nothing was changed")


def _is_withheld(error: BaseException, out: list[int]) -> bool:
    """Whether messages could not be delivered any more (``Run.withhold``)."""
    return not out and isinstance(error, IndexError)


class _Pace:
    """How fast messages were taken lately, from one check of the clock to the next."""

    __slots__ = ("_messages", "_took_ms")

    def __init__(self) -> None:
        self._messages = 0
        self._took_ms = 0.0

    def stride(self, messages: int, took_ms: float) -> int:
        """How many messages the next check covers; ``messages`` were taken since the last one, in ``took_ms``."""
        if messages == 0:  # a run begins: the time before it was not spent on handling
            return 1
        self._messages += messages
        self._took_ms += took_ms
        if self._took_ms >= CLOCK_STRIDE_MS:  # slow, or one of them was: count again from 0
            self._messages, self._took_ms = 0, 0.0
        if self._messages < CLOCK_STRIDE:
            return 1
        self._messages, self._took_ms = 0, 0.0
        return CLOCK_STRIDE
