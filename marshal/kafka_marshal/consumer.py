"""Consumer: messages of the partitions that this member holds.

Threads of our own do the reading, each for a call of a user's thread (:mod:`kafka_marshal.serving`): they fetch, group
what came by partition, give it to the engine and take out a run that may be handed over. A user's thread takes
message after message from the run's iterator: no lock, and a look at the clock (T4).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby, islice
from typing import TYPE_CHECKING, TypeVar, cast

from kafka_marshal.adapters.interface import DataFault, DataReader, FaultKind, Message
from kafka_marshal.batch import Batch
from kafka_marshal.collector import collector_resting
from kafka_marshal.consumer_options import ConsumerOptions
from kafka_marshal.driver import Driver
from kafka_marshal.engine.assignment import Assignment, Stage
from kafka_marshal.engine.delivery import Delivery
from kafka_marshal.engine.tracker import ALL, Run, Taken
from kafka_marshal.errors import ClosedError, ConfigurationError
from kafka_marshal.membership import Membership, TopicPartition
from kafka_marshal.serving import Answer

if TYPE_CHECKING:
    from kafka_marshal.marshal import Marshal

__all__ = ["Consumer", "TopicPartition"]

logger = logging.getLogger("kafka_marshal")

Key = tuple[str, int]

DEFAULT_BATCH_SIZE = 1_000

#: Messages taken from the fetcher at a time. Fewer than the 700 new objects that make Python's garbage collector look
#: at them all: messages that are let go as fast as they come then never cost a collection, a fifth of all time.
READ_SIZE = 500

#: At most once, messages fetched in a row with the collector at rest: some 3 ms.
BURST = 10_000

#: Messages an iteration takes at a time. What it has not reached yet is not in hand and can still be given up.
RUN_SIZE = 1_000

#: At most once, when so many messages in a row took less than this together, the clock is looked at once for the next
#: so many. (They are granted: were the process stopped among them, the few it still gets are nobody else's, ever.)
CLOCK_STRIDE = 8
CLOCK_STRIDE_MS = 1.0

#: The longest one wait for messages lasts before stop() and errors are looked at. (A longer one would wake the thread
#: twice: confluent-kafka cuts waits into pieces of this.)
SLICE_S = 0.2

#: Messages ``poll`` takes at a time from the engine.
HAND_SIZE = 1_000

#: What user threads have said to be done waits for the next beat or call; so many are told at once.
SAID_AT_ONCE = 10_000

T = TypeVar("T")

PartitionsCallback = Callable[["Consumer", list[TopicPartition]], object]


class Consumer(Membership["Consumer"]):
    """Hands out the messages of the partitions this member holds. Made by :meth:`Marshal.consumer`.

    ``done``, ``close``, ``pause``, ``seek`` … may be called from any thread; messages are best asked for by one.
    """

    def __init__(
        self,
        marshal: Marshal,
        driver: Driver,
        options: ConsumerOptions,
        callbacks: Mapping[str, PartitionsCallback | None],
        config: Mapping[str, object],
    ) -> None:
        self._options = options
        self._reading = driver.runtime.lock()
        #: What is being fetched, with a number for each time it was assigned. Replaced, never changed: a reading
        #: thread compares what it was before its read with what it is now.
        self._fetched: dict[Key, int] = {}
        self._assigns = 0
        #: A batch that was handed out (at most once), on its way out of memory; see _let_go.
        self._spent: list[Message] = []
        #: A read is under way, or was parted from its note.
        self._is_torn = False
        #: How often messages were fetched again, as a read was not noted.
        self.reread = 0
        #: What threads take messages from, but for iterating and batches at least once.
        self._hand: Run | None = None
        #: An exception may have kept a message taken from the hand from leaving the library.
        self._in_doubt = False
        self._reader: DataReader = driver.cluster.data_reader(driver.engine.settings.group_id, config)
        settings = options.settings(callbacks)
        super().__init__(marshal, driver, options.topics, settings, callbacks, self._reader.partition_counts)

    @property
    def _delivery(self) -> Delivery:
        return self._engine.delivery

    # Getting messages: user threads.

    def __iter__(self) -> Iterator[Message]:
        """Messages, one by one. Ends after ``stop()`` or ``close()``.

        Each is done when the next one is asked for, unless the consumer was made with ``auto_done=False``.
        A message in hand when the loop is left by ``break`` or by an exception is not done: it comes again, here or
        at the next holder.
        """
        if self._options.at_most_once:
            return self._iterate_granted()
        return self._iterate() if self._options.auto_done else self._poll_on()

    def _iterate(self) -> Iterator[Message]:
        """Run after run; between two messages no lock, no store, and a look at what the engine allows.

        The engine ends a lease by setting hand_out_until_s to 0, which is seen before the very next message. For the
        case that the whole process was stopped, the clock is compared, too, before each message: a look at it for
        several would hand out the others while somebody else has the partition (T4).
        """
        runtime, stop = self._driver.runtime, self._marshal.stop_signal
        # Handed over as the tuple that clock_gettime takes, which is made anew for each message otherwise: a fifth of
        # all that is done here between two messages.
        clock, clock_id = runtime.clock_gettime, (runtime.clock_id,)
        while True:
            answer = self._ask(self._serve_run, undo=self._undo)
            try:
                run = answer.wait()
                if run is None:
                    return
                lease = run.assignment.lease
                message: Message | None = None
                for message in run.walk:
                    if clock(*clock_id) >= lease.hand_out_until_s or stop:
                        break
                    yield message
                else:
                    run.walked(message)
            finally:
                # From here on, and where not even this is reached, ``undo`` sees to the rest of the run.
                answer.receipt.left = True
                self._nudge()

    def _iterate_granted(self) -> Iterator[Message]:
        """At most once: batch after granted batch, looked after as in _iterate.

        What counts here is whether the lease is proven; that it is being let go does not matter to what is granted.
        Leaving the loop leaves the rest of the batch to the next loop.
        """
        runtime, stop = self._driver.runtime, self._marshal.stop_signal
        clock, clock_id = runtime.clock_gettime, runtime.clock_id
        now, pace = 0.0, _Pace()
        run: Run | None = None
        message: Message | None = None
        messages: list[Message] = []
        try:
            while (run := self._hand_for(None)) is not None:
                lease = run.assignment.lease
                messages, out = [], [0]
                run.taken.append(Taken(messages, out, run.since))
                count = look_at = looked_at = 0
                for message in run.walk:
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
        except BaseException:
            self._in_doubt = True
            if message is not None and run is not None:
                self._refuse(run, [message, *messages])  # but for those that have left
            raise

    def _poll_on(self) -> Iterator[Message]:
        while (message := self.poll(None)) is not None:
            yield message

    def poll(self, timeout: float | None = None) -> Message | None:
        """The next message, or None after timeout seconds (None: wait until there is one, or ``stop()``)."""
        message, out = None, [0]
        try:
            deadline = self._deadline(timeout)
            while (hand := self._hand_for(deadline)) is not None:
                message = next(hand.walk, None)
                if message is None:
                    continue
                now = self._driver.now_ms()
                if self._may_leave(hand, now):
                    hand.since = now
                    hand.taken.append(Taken([message], out, now))
                    out[0] = 1; return message  # fmt: skip  # noqa: E702 - one line: nothing may come in between
                self._refuse(hand, [message])
                message = None
            return None
        except BaseException:
            self._in_doubt = True
            if message is not None and hand is not None:
                self._refuse(hand, [message])  # unless it has left
            raise

    def consume(self, num_messages: int = 1, timeout: float | None = None) -> list[Message]:
        """Up to num_messages, as many as came within timeout seconds (None: wait for all of them, or ``stop()``).

        Fewer, and at once, where the lease of one that came is being let go, or is in doubt: it should not wait here.
        What waited here until its lease was over (a process that was stopped) is not returned (T4): at least once it
        comes again, here or elsewhere; at most once it is in ``unprocessed``.
        """
        if num_messages < 1:
            raise ConfigurationError(f"num_messages must be at least 1, not {num_messages}")
        found: list[tuple[Run, list[Message]]] = []
        try:
            deadline = self._deadline(timeout)
            while True:
                found = []
                self._collect(found, num_messages, deadline)
                now, out, ours = self._driver.now_ms(), [0], []
                for run, messages in found:
                    if self._may_leave(run, now):
                        run.since = now
                        run.taken.append(Taken(messages, out, now))
                        ours.extend(messages)
                    else:
                        self._refuse(run, messages)
                if ours or not found:
                    out[0] = ALL; return ours  # fmt: skip  # noqa: E702 - one line: nothing may come in between
        except BaseException:
            self._in_doubt = True
            for run, messages in found:
                self._refuse(run, messages)  # but for those that have left
            raise

    def _collect(self, found: list[tuple[Run, list[Message]]], num_messages: int, deadline: float | None) -> None:
        """Run after run, until there are so many messages, or the time is up."""
        wanted = num_messages
        while wanted > 0 and (hand := self._hand_for(deadline, [run for run, _ in found])) is not None:
            found.append((hand, list(islice(hand.walk, wanted))))
            wanted -= len(found[-1][1])
            if not found[-1][1]:
                found.pop()
            if self._options.at_most_once and deadline is not None and self._driver.monotonic() >= deadline:
                break  # there may be more to claim, but each claim takes its time

    def batches(self, max_messages: int = 500, timeout: float = 1.0) -> Iterator[Batch]:
        """Batches of one partition each, of at most max_messages, not done before ``batch.done()``.

        A batch is handed over when it is full, or when timeout seconds have passed since something for it was there.
        Ends after ``stop()`` or ``close()``.
        """
        if max_messages < 1:
            raise ConfigurationError(f"max_messages must be at least 1, not {max_messages}")
        return (
            self._batches_granted(max_messages) if self._options.at_most_once else self._batches(max_messages, timeout)
        )

    def _batches(self, max_messages: int, timeout: float) -> Iterator[Batch]:
        while True:
            answer = self._ask(self._serve_batch, max_messages, timeout, undo=self._undo)
            try:
                run = answer.wait()
                if run is None:
                    return
                batch = Batch(self, run, list(run.messages))
                answer.receipt.out = True; yield batch  # fmt: skip  # noqa: E702 - one line: nothing may come in between
                del batch
            except BaseException:
                answer.receipt.left = True
                raise

    def _batches_granted(self, max_messages: int) -> Iterator[Batch]:
        messages: list[Message] = []
        hand: Run | None = None
        try:
            while (hand := self._hand_for(None)) is not None:
                messages = list(islice(hand.walk, max_messages))
                now = self._driver.now_ms()
                if messages and self._may_leave(hand, now):
                    hand.since = now
                    out = [0]
                    hand.taken.append(Taken(messages, out, now))
                    batch = Batch(self, hand, list(messages))
                    out[0] = ALL; yield batch  # fmt: skip  # noqa: E702 - one line: nothing may come in between
                    del batch
                elif messages:
                    self._refuse(hand, messages)
        except BaseException:
            self._in_doubt = True
            if hand is not None:
                self._refuse(hand, messages)  # unless they have left
            raise

    def _deadline(self, timeout: float | None) -> float | None:
        return None if timeout is None else self._driver.monotonic() + timeout

    def _ask(self, function: Callable[..., T], *args: object, undo: Callable[[T], object] | None = None) -> Answer[T]:
        self._driver.refuse_fork()
        if self._driver.is_over:
            raise ClosedError("this Marshal is closed; make a new one")
        return self._driver.servants.ask(function, *args, undo=undo)

    def _may_leave(self, run: Run, now: float) -> bool:
        """Whether a message that was taken from a run may be handed out now (T4, T5)."""
        if self._closed or self._marshal.stop_signal:
            return False
        lease = run.assignment.lease
        return lease.may_hand_over(now) if self._options.at_most_once else now < lease.hand_out_until

    def _refuse(self, run: Run, messages: Sequence[Message]) -> None:
        """What was taken must not be handed out any more: it goes back."""
        run.refused.extend(messages)
        self._in_doubt = True
        self._nudge()

    def _hand_for(self, deadline: float | None, collected: Sequence[Run] = ()) -> Run | None:
        """The run that threads take messages from now; a new one where that has come to its end."""
        hand = self._hand
        is_good = hand is not None and not self._in_doubt and not self._engine.errors and not self._closed
        if is_good and hand is not None and hand.has_left and self._may_leave(hand, self._driver.now_ms()):
            return hand
        if self._closed and self._driver.is_over:
            return None
        answer = self._ask(self._serve_hand, deadline, collected)
        try:
            return answer.wait()
        finally:
            answer.receipt.left = True

    # Getting messages: threads of our own, for a call of a user's thread (serving.py).

    def drain(self) -> None:
        """Tell the engine what user threads have said; the lock is held."""
        while self._inbox:
            said = self._inbox.popleft()
            now = self._driver.now_ms()
            if isinstance(said, Run):
                self._delivery.done_run(said, now)
            else:
                self._delivery.done(cast("Message", said), now)
        if self._in_doubt:
            self._regather()

    def _undo(self, run: Run | None) -> None:
        """A run did not reach the thread that had asked for it, or that thread has left it."""
        if run is not None and not self._closed:
            with self._driver.locked(step=False):
                self._delivery.undo_run(run, self._driver.now_ms())

    def _regather(self) -> None:
        """Something that was taken from a run may not have left the library: it is the next again (lock held)."""
        self._in_doubt = False
        if self._options.at_most_once:
            self._delivery.decide()
            return
        self._hand = None
        now = self._driver.now_ms()
        for assignment in [x for x in self._engine.assignments.values() if x.tracker.runs]:
            if not self._delivery.recall(assignment, keep=assignment.stage is not Stage.REVOKING):
                self._in_doubt = True  # a thread is about to hand something out, or a traceback still shows it
            self._engine.try_finish(assignment, now)

    def _serve_run(self, is_gone: Callable[[], bool]) -> Run | None:
        self._recall_hand()
        return self._next_run(is_gone, RUN_SIZE, None, iterating=True)

    def _serve_batch(self, is_gone: Callable[[], bool], max_messages: int, timeout: float) -> Run | None:
        self._recall_hand()
        return self._next_run(is_gone, max_messages, None, fill_s=timeout)

    def _recall_hand(self) -> None:
        """What ``poll`` has not taken from its hand yet comes first."""
        if self._hand is not None or self._in_doubt:
            with self._driver.locked(step=False):
                self._regather()

    def _serve_hand(self, is_gone: Callable[[], bool], deadline: float | None, collected: Sequence[Run]) -> Run | None:
        if self._options.at_most_once:
            self._hand = run = self._next_granted(is_gone, deadline, collected)
            return run
        with self._driver.locked(step=False):
            hand = self._hand
            if hand is not None and not hand.has_left:
                self._in_doubt = self._in_doubt or not (collected or hand.is_settled)
                self._hand = None
            if self._in_doubt:
                self._regather()
        return self._next_run(is_gone, HAND_SIZE, deadline, shared=True, collected=collected)

    def _next_run(
        self,
        is_gone: Callable[[], bool],
        max_messages: int,
        deadline: float | None,
        *,
        iterating: bool = False,
        shared: bool = False,
        fill_s: float = 0.0,
        collected: Sequence[Run] = (),
    ) -> Run | None:
        """Take messages of one partition in hand. None are waited for while a lease of those collected ends."""
        fill_until: float | None = None
        while True:
            with self._driver.locked(step=False):
                if is_gone() or self._is_over():
                    return None
                now = self._driver.now_ms()
                if shared and (hand := self._hand) is not None and hand.has_left and self._may_leave(hand, now):
                    return hand  # another thread has got one meanwhile
                fullest = self._delivery.fullest(now)
                if fullest and fill_until is None:
                    fill_until = self._driver.monotonic() + fill_s
                elif not fullest and not self._delivery.is_waiting:
                    fill_until = None  # what was there is not any more. (While a lease is in doubt, it waits on.)
                if fullest and (
                    fullest >= max_messages or not fill_s or self._driver.monotonic() >= (fill_until or 0.0)
                ):
                    run = self._take_run(max_messages, iterating, shared, now)
                    if run is not None:
                        return run
                if any(run.assignment.lease.is_ending(now) for run in collected):
                    return None
            until = [x for x in (deadline, fill_until if fullest else None) if x is not None]
            left = min(until) - self._driver.monotonic() if until else SLICE_S
            if deadline is not None and self._driver.monotonic() >= deadline:
                self._pump(0.0)
                with self._driver.locked(step=False):
                    return self._take_run(max_messages, iterating, shared, self._driver.now_ms())
            self._pump(max(0.0, min(left, SLICE_S)))

    def _take_run(self, max_messages: int, iterating: bool, shared: bool, now: float) -> Run | None:
        """The next run, if there is one; a shared one is the hand from here on (lock held)."""
        if shared and self._hand is not None and self._hand.has_left:
            self._regather()
        run = self._delivery.next_run(max_messages, iterating, now, shared=shared)
        if shared and run is not None:
            self._hand = run
        return run

    def _next_granted(
        self, is_gone: Callable[[], bool], deadline: float | None, collected: Sequence[Run] = ()
    ) -> Run | None:
        """At most once: the run being handed out, or the next one, granted by the log (C13).

        No further one while a lease of those collected ends: an admin may move the position back meanwhile, and what
        waits here would be granted anew before it is handed out.
        """
        while True:
            with self._driver.locked(step=False):
                if is_gone() or self._is_over():
                    return None
                if self._in_doubt:
                    self._regather()
                run = self._delivery.granted
                if run is not None:
                    if self._delivery.has_granted() and self._is_proven(run):
                        return run
                    self._delivery.finish_granted(self._driver.now_ms())
                    self._spent = list(run.messages)
                now = self._driver.now_ms()
                if any(run.assignment.lease.is_ending(now) for run in collected):
                    return None
                self._delivery.take_up(now)
                if self._delivery.granted is not None:
                    continue
                waiting = self._delivery.proposed
                room = self._options.batch_size - self._delivery.fullest(self._driver.now_ms())
            if waiting is None and self._fill(room):
                continue  # a backlog is there: claim full batches
            with self._driver.locked(step=False):
                waiting = self._delivery.propose(self._driver.now_ms())
            if waiting is not None:
                self._await_grant(waiting)
                if self._options.claim_ahead:
                    self._claim_ahead()
                continue
            left = SLICE_S if deadline is None else deadline - self._driver.monotonic()
            if left <= 0:
                self._pump(0.0)
                with self._driver.locked(step=False):
                    if not self._delivery.ready(self._driver.now_ms()):
                        return None
                continue
            self._pump(min(left, SLICE_S))

    def _is_proven(self, run: Run) -> bool:
        """Whether a granted message may go out: also while its lease is let go, not when it may be over (T4, T5)."""
        return self._driver.now_ms() < run.assignment.lease.proven_until

    def _await_grant(self, assignment: Assignment) -> None:
        """Wait until our replica has applied the ClaimingMessages (C13); fetching the next batch fills the time.

        No more than that one: it keeps the interpreter from the thread that reads the answer.
        """

        def answered() -> bool:
            return assignment.over or assignment.grant is None or assignment.grant.accepted is not None

        with self._driver.locked(step=False):
            room = self._options.batch_size - self._delivery.fullest(self._driver.now_ms())
        self._fill(room, answered)
        with self._driver.condition:
            self._driver.wait_for(answered, None)
        with self._driver.locked(step=False):
            self._delivery.collect(assignment, self._driver.now_ms())

    def _claim_ahead(self) -> None:
        """Claim the batch after the one that is about to be handed out, if a full one is there to be had (C13)."""
        size = self._options.batch_size
        while True:
            with self._driver.locked(step=False):
                if self._delivery.granted is None:
                    return
                room = size - self._delivery.fullest(self._driver.now_ms())
                if room <= 0:
                    self._delivery.propose(self._driver.now_ms())
                    return
            if not self._fill(room):
                return

    def _fill(self, room: int, enough: Callable[[], bool] = lambda: False) -> int:
        """Fetch what is there, for room messages at most, until it is enough. How many messages and faults came."""
        came = 0
        room = min(room, BURST)
        if room > 0:
            with collector_resting():
                while came < room and not enough() and (more := self._pump(0.0)):
                    came += more
        return came

    def _pump(self, timeout_s: float) -> int:
        """Fetch what is there, waiting up to timeout_s for the first message. How many messages and faults came.

        What is read is noted before anybody else reads. A read that was not, as something raised in between, would
        leave a hole that looks like one of Kafka's (P6): the next one begins where the last noted one ended.
        """
        with self._reading:
            if self._closed:
                return 0
            if self._is_torn:
                self._go_back()
            self._is_torn = True
            fetched = self._fetched
            messages, faults = self._reader.read(READ_SIZE, timeout_s)
            self._let_go(len(messages))
            if messages or faults:
                self._note(fetched, messages, faults)
            self._is_torn = False
        return len(messages) + len(faults)

    def _note(self, fetched: dict[Key, int], messages: list[Message], faults: list[DataFault]) -> None:
        one = next(iter(fetched)) if len(fetched) == 1 and fetched is self._fetched else None
        runs = list(_runs(messages, one, {topic for topic, _ in (*fetched, *self._fetched)}))
        with self._driver.locked(step=False):
            for key, group in runs:
                if fetched.get(key, self._fetched.get(key)) == self._fetched.get(key):
                    self._delivery.fetched(key, group)
                elif key in self._fetched:
                    self._fetch_anew(key)
            for fault in faults:
                self._judge(fault)

    def _go_back(self) -> None:
        """Fetch again from where the last read that was noted has ended: a read since then was not."""
        self._is_torn = False
        self.reread += 1
        logger.error(
            "reading messages was interrupted before they were noted; they are fetched again, and nothing is lost. "
            "This is a fault of a callback, or of kafka-marshal: please report it with the traceback before this line"
        )
        with self._driver.locked(step=False):
            for key in list(self._fetched):
                self._fetch_anew(key)

    def _let_go(self, count: int) -> None:
        """Free as many of the messages of the batch before as new ones came; all of them when none came.

        In step with them, the garbage collector sees no growth and keeps out; freed all at once, they would make room
        for a full batch of new objects, each of which it would look at, for a fifth of all time.
        """
        if self._spent:
            del self._spent[-count if count else 0 :]

    def _fetch_anew(self, key: Key) -> None:
        """Assigned again during the read: these may be messages of the older assignment, so the lot is fetched anew."""
        assignment = self._engine.assignments.get(key)
        if assignment is not None and not assignment.over:
            self.fetch({key: assignment.fetch_next})

    def _judge(self, fault: DataFault) -> None:
        if fault.topic is None or fault.partition is None:
            self._engine.warn(f"fetching: {fault.message}")
        elif fault.kind is FaultKind.OUT_OF_RANGE:
            self._engine.out_of_range((fault.topic, fault.partition), self._driver.now_ms())
        else:
            self._engine.warn(f"{fault.topic} [{fault.partition}]: {fault.message}")

    # Saying what is done.

    def done(self, message: Message) -> None:
        """A message from ``poll``, ``consume`` or a loop with auto_done=False is done; any order, any thread.

        After its lease ended this commits nothing and is counted in ``ignored_done``.
        """
        self._say(message)

    def _batch_done(self, run: Run) -> None:
        self._say(run)

    def _say(self, what: Message | Run) -> None:
        if self._options.at_most_once:
            return
        self._driver.refuse_fork()
        self._inbox.append(what)
        self._nudge()
        if len(self._inbox) == SAID_AT_ONCE:
            self._driver.call(self._hear)

    # Looking, and steering.

    def position(self) -> list[TopicPartition]:
        """The next offset to be handed out, of each assigned partition."""
        return self.assignment()

    def pause(self, partitions: Sequence[tuple[str, int] | TopicPartition] | None = None) -> None:
        """Hand out nothing of these partitions (None: of all assigned now) until ``resume``; the leases are kept.

        At most once, what is granted already waits for ``resume``, too, and so does the partition's release.
        """
        self._set_paused(partitions, True)

    def resume(self, partitions: Sequence[tuple[str, int] | TopicPartition] | None = None) -> None:
        """Hand out messages of these partitions (None: of all) again."""
        self._set_paused(partitions, False)

    def _set_paused(self, partitions: Sequence[tuple[str, int] | TopicPartition] | None, paused: bool) -> None:
        self._driver.call(self._carry_out_pause, partitions, paused)

    def _carry_out_pause(self, partitions: Sequence[tuple[str, int] | TopicPartition] | None, paused: bool) -> None:
        with self._driver.locked():
            wanted = None if partitions is None else {(topic, partition) for topic, partition, *_ in partitions}
            chosen = [x for key, x in self._engine.assignments.items() if wanted is None or key in wanted]
            for assignment in chosen:
                if paused:
                    self._delivery.hold_back(assignment)
                else:
                    assignment.user_paused = False
            keys = [x.key for x in chosen if x.shown and not x.over]
            if keys:
                (self._reader.pause if paused else self._reader.resume)(keys)

    def seek(self, topic: str, partition: int, offset: int) -> None:
        """Go forward to offset: everything below it is done already, in a sink that is ahead of the log.

        Raises ConfigurationError for a partition not assigned, and for going back (only an admin may: C11).
        """
        self._driver.call(self._carry_out_seek, topic, partition, offset)

    def _carry_out_seek(self, topic: str, partition: int, offset: int) -> None:
        with self._driver.locked():
            if not self._engine.seek((topic, partition), offset):
                raise ConfigurationError(
                    f"{topic} [{partition}]: can't seek to {offset}: the partition is not assigned to this "
                    "consumer, or the "
                    "offset lies behind its position. To go back, reposition the group: kafka-marshal release-group"
                )

    # What the driver asks of it (ConsumerPort).

    def fetch(self, changes: Mapping[Key, int | None]) -> None:
        """Carry out StartFetch and StopFetch."""
        if self._closed:
            return
        self._assigns += 1
        begun = {key: offset for key, offset in changes.items() if offset is not None}
        ended = [key for key, offset in changes.items() if offset is None]
        kept = {key: number for key, number in self._fetched.items() if key not in changes}
        self._fetched = {**kept, **dict.fromkeys(begun, self._assigns)}
        if ended:
            self._reader.unassign(ended)
        if begun:
            self._reader.assign(begun)

    def log_end(self, key: Key) -> int | None:
        """The log end as of the last fetch."""
        return None if self._closed else self._reader.high_watermark(*key)

    # Ending.

    def _freed(self) -> None:
        with self._reading:
            self._reader.close()


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


def _runs(messages: list[Message], one: Key | None, topics: set[str]) -> Iterator[tuple[Key, list[Message]]]:
    """Cut at every change of partition or topic, as cheaply as what is being fetched allows.

    one: the only partition fetched, before and after the read. The unbound methods of the messages' own type run
    in C, a tenth of the time of a Python key function.
    """
    if not messages:
        return
    if one is not None and (messages[0].topic(), messages[0].partition()) == one:
        yield one, messages
        return
    kind = type(messages[0])
    for partition, group in groupby(messages, kind.partition):
        run = list(group)
        parts = [(run[0].topic(), run)] if len(topics) == 1 else groupby(run, kind.topic)
        for topic, part in parts:
            yield (topic or "", partition or 0), list(part)
