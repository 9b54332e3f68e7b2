"""Consumer: messages of the partitions that this member holds.

The user's thread does the reading: it fetches, groups what came by partition, gives it to the engine and takes out
what may be handed over. Between two messages of an iteration there is no lock, only two stores and a look at the
clock (T4).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby, islice
from typing import TYPE_CHECKING

from kafka_marshal.adapters.interface import DataFault, DataReader, FaultKind, Message
from kafka_marshal.batch import Batch
from kafka_marshal.collector import collector_resting
from kafka_marshal.consumer_options import ConsumerOptions
from kafka_marshal.driver import Driver
from kafka_marshal.engine.assignment import Assignment
from kafka_marshal.engine.delivery import Delivery
from kafka_marshal.engine.tracker import Run
from kafka_marshal.errors import ConfigurationError
from kafka_marshal.membership import Membership, TopicPartition

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
        self._reader: DataReader = driver.cluster.data_reader(driver.engine.settings.group_id, config)
        settings = options.settings(callbacks)
        super().__init__(marshal, driver, options.topics, settings, callbacks, self._reader.partition_counts)

    @property
    def _delivery(self) -> Delivery:
        return self._engine.delivery

    # Getting messages.

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
        while (run := self._next_run(RUN_SIZE, True, None)) is not None:
            lease = run.assignment.lease
            message: Message | None = None
            try:
                for message in run.walk:
                    if clock(*clock_id) >= lease.hand_out_until_s or stop:
                        break
                    yield message
                else:
                    run.walked(message)
            finally:
                with self._driver.locked(step=False):
                    self._delivery.leave_run(run, self._driver.now_ms())

    def _iterate_granted(self) -> Iterator[Message]:
        """At most once: batch after granted batch, looked after as in _iterate.

        What counts here is whether the lease is proven; that it is being let go does not matter to what is granted.
        Leaving the loop leaves the rest of the batch to the next loop.
        """
        runtime, stop = self._driver.runtime, self._marshal.stop_signal
        clock, clock_id = runtime.clock_gettime, runtime.clock_id
        delivery = self._delivery
        now, pace = 0.0, _Pace()
        while (run := self._next_granted(None)) is not None:
            lease = run.assignment.lease
            cursor = look_at = looked_at = delivery.granted_next
            for message in islice(run.messages, cursor, None):
                if cursor >= look_at:
                    before, now = now, clock(clock_id) * 1000.0
                    look_at = cursor + pace.stride(cursor - looked_at, now - before)
                    looked_at = cursor
                    run.since = now
                if now >= lease.proven_until or stop:
                    break
                cursor += 1
                delivery.granted_next = cursor
                if delivery.granted is not run:  # ended in this very moment
                    with self._driver.locked(step=False):
                        delivery.not_handed_out(run, cursor - 1)
                    break
                yield message

    def _poll_on(self) -> Iterator[Message]:
        while (message := self.poll(None)) is not None:
            yield message

    def poll(self, timeout: float | None = None) -> Message | None:
        """The next message, or None after timeout seconds (None: wait until there is one, or ``stop()``)."""
        found = self.consume(1, timeout)
        return found[0] if found else None

    def consume(self, num_messages: int = 1, timeout: float | None = None) -> list[Message]:
        """Up to num_messages, as many as came within timeout seconds (None: wait for all of them, or ``stop()``).

        Fewer, and at once, where the lease of one that came is being let go, or is in doubt: it should not wait here.
        What waited here until its lease was over (a process that was stopped) is not returned (T4): at least once it
        comes again, here or elsewhere; at most once it is in ``unprocessed``.
        """
        if num_messages < 1:
            raise ConfigurationError(f"num_messages must be at least 1, not {num_messages}")
        deadline = None if timeout is None else self._driver.monotonic() + timeout
        if not self._options.at_most_once:
            return self._collect(num_messages, deadline)
        while True:
            taken: list[tuple[Run, list[Message]]] = []
            wanted = num_messages
            while wanted > 0:
                if taken and deadline is not None and self._driver.monotonic() >= deadline:
                    break  # there may be more to claim, but each claim takes its time
                granted = self._take_granted(wanted, deadline, [run for run, _ in taken])
                if granted is None:
                    break
                taken.append(granted)
                wanted -= len(granted[1])
            found = [message for messages in self._still_ours(taken) for message in messages]
            if found or not taken:
                return found

    def _still_ours(self, taken: list[tuple[Run, list[Message]]]) -> list[list[Message]]:
        """At most once: of what was taken before a wait, what may go out after it (T4); the rest is reported."""
        now = self._driver.now_ms()
        late = [(run, messages) for run, messages in taken if not run.assignment.lease.may_hand_over(now)]
        if late:
            with self._driver.locked(step=False):
                for run, messages in late:
                    self._delivery.waited_too_long(run.assignment.key, messages)
        return [messages for run, messages in taken if (run, messages) not in late]

    def _collect(self, num_messages: int, deadline: float | None) -> list[Message]:
        """At least once: run after run, until there are so many messages, or the time is up."""
        while True:
            runs: list[Run] = []
            wanted = num_messages
            while wanted > 0 and (run := self._next_run(wanted, False, deadline, collected=runs)) is not None:
                runs.append(run)
                wanted -= run.size
            if wanted <= 0 and len(runs) == 1:
                return list(runs[0].messages)  # no wait since
            found = [message for run in self._still_open(runs) for message in run.messages]
            if found or not runs:
                return found

    def _still_open(self, runs: list[Run]) -> list[Run]:
        """Of what was got before a wait, what may be handed out after it: a lease may have ended meanwhile (T4)."""
        if not runs:
            return runs
        with self._driver.locked(step=False):
            now = self._driver.now_ms()
            gone = [run for run in runs if run.assignment.lease.is_ending(now)]
            for run in gone:
                self._delivery.leave_run(run, now)
        return [run for run in runs if run not in gone]

    def batches(self, max_messages: int = 500, timeout: float = 1.0) -> Iterator[Batch]:
        """Batches of one partition each, of at most max_messages, not done before ``batch.done()``.

        A batch is handed over when it is full, or when timeout seconds have passed since something for it was there.
        Ends after ``stop()`` or ``close()``.
        """
        if max_messages < 1:
            raise ConfigurationError(f"max_messages must be at least 1, not {max_messages}")
        while True:
            if self._options.at_most_once:
                granted = self._take_granted(max_messages, None)
                if granted is None:
                    return
                run, messages = granted
            else:
                found = self._next_run(max_messages, False, None, fill_s=timeout)
                if found is None:
                    return
                run, messages = found, list(found.messages)
            yield Batch(self, run, messages)

    def _next_run(
        self,
        max_messages: int,
        iterating: bool,
        deadline: float | None,
        fill_s: float = 0.0,
        collected: Sequence[Run] = (),
    ) -> Run | None:
        """Take messages of one partition in hand. None are waited for while a lease of those collected ends."""
        fill_until: float | None = None
        while True:
            with self._driver.locked(step=False):
                if self._is_over():
                    return None
                now = self._driver.now_ms()
                fullest = self._delivery.fullest(now)
                if fullest and fill_until is None:
                    fill_until = self._driver.monotonic() + fill_s
                elif not fullest and not self._delivery.is_waiting:
                    fill_until = None  # what was there is not any more. (While a lease is in doubt, it waits on.)
                if fullest and (
                    fullest >= max_messages or not fill_s or self._driver.monotonic() >= (fill_until or 0.0)
                ):
                    run = self._delivery.next_run(max_messages, iterating, now)
                    if run is not None:
                        return run
                if any(run.assignment.lease.is_ending(now) for run in collected):
                    return None
            until = [x for x in (deadline, fill_until if fullest else None) if x is not None]
            left = min(until) - self._driver.monotonic() if until else SLICE_S
            if deadline is not None and self._driver.monotonic() >= deadline:
                self._pump(0.0)
                with self._driver.locked(step=False):
                    return self._delivery.next_run(max_messages, iterating, self._driver.now_ms())
            self._pump(max(0.0, min(left, SLICE_S)))

    def _take_granted(
        self, max_messages: int, deadline: float | None, collected: Sequence[Run] = ()
    ) -> tuple[Run, list[Message]] | None:
        """At most once: the next granted messages, in order, with their run."""
        while (run := self._next_granted(deadline, collected)) is not None:
            with self._driver.locked(step=False):
                messages = self._delivery.next_granted(run, max_messages, self._driver.now_ms())
            if messages:
                return run, messages
        return None

    def _next_granted(self, deadline: float | None, collected: Sequence[Run] = ()) -> Run | None:
        """At most once: the run being handed out, or the next one, granted by the log (C13).

        No further one while a lease of those collected ends: an admin may move the position back meanwhile, and what
        waits here would be granted anew before it is handed out.
        """
        while True:
            with self._driver.locked(step=False):
                if self._is_over():
                    return None
                run = self._delivery.granted
                if run is not None:
                    if self._delivery.granted_next < len(run.messages) and self._is_proven(run):
                        return run
                    self._delivery.finish_granted(self._driver.now_ms())
                    self._spent = run.messages
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
        """Fetch what is there, waiting up to timeout_s for the first message. How many messages and faults came."""
        with self._reading:
            if self._closed:
                return 0
            fetched = self._fetched
            messages, faults = self._reader.read(READ_SIZE, timeout_s)
        self._let_go(len(messages))
        if not messages and not faults:
            return 0
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
        return len(messages) + len(faults)

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
        if self._options.at_most_once:
            return
        with self._driver.locked(step=False):
            self._delivery.done(message, self._driver.now_ms())

    def _batch_done(self, run: Run) -> None:
        if self._options.at_most_once:
            return
        with self._driver.locked(step=False):
            self._delivery.done_run(run, self._driver.now_ms())

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
