"""What threads of our own do for the calls of user threads on a consumer (:mod:`kafka_marshal.node.serving`).

They fetch, group what came by partition, give it to the engine and take out a run that may be handed over. What user
threads do with the run stands in :mod:`kafka_marshal.client.consumer`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import cast

from kafka_marshal.client.base import Host, Membership, S, TopicPartition
from kafka_marshal.client.gc_pause import collector_resting
from kafka_marshal.client.options import ConsumerOptions
from kafka_marshal.client.undone import Undone
from kafka_marshal.engine.inputs import Fetched, OutOfRange, Reached, ReadFailed, TooLarge
from kafka_marshal.engine.work import tracker
from kafka_marshal.engine.work.assignment import Assignment, Run, Stage
from kafka_marshal.engine.work.delivery import Delivery
from kafka_marshal.logs import log
from kafka_marshal.node.driver import Driver
from kafka_marshal.ports import DataFault, DataReader, FaultKind, Message
from kafka_marshal.types import Key

__all__ = ["FetchingConsumer"]


#: Messages taken from the fetcher at a time: with 500 the lock, taken for each read, costs a tenth of all time; with
#: 5,000 what one thread has read falls out of the processor's caches before another one gets it.
READ_SIZE = 2_000

#: What a message takes besides its value (bytes): two objects, and librdkafka's part of it.
MESSAGE_BYTES = 500

#: Messages fetched in a row with the collector at rest: some 3 ms.
BURST = 10_000

#: Messages of the first read, which tells how large messages are.
FIRST_READ = 16

#: Of a read, every so many messages are measured; of a short one, all.
MEASURED_ONE_IN = 8

#: Messages an iteration takes at a time. What it has not reached yet is not in hand and can still be given up.
RUN_SIZE = 10_000

#: The longest one wait for messages lasts before stop() and errors are looked at. (A longer one would wake the thread
#: twice: confluent-kafka cuts waits into pieces of this.)
SLICE_S = 0.2

#: Messages ``poll`` takes at a time from the engine. An interrupt has all of these that have not left given back, so
#: after one it is twice what was handed out since the one before, or the least; it doubles with each hand.
HAND_SIZE = 10_000
LEAST_HAND = 64


class FetchingConsumer(Membership[S]):
    """The part of a consumer that runs on threads of our own."""

    def __init__(
        self,
        marshal: Host,
        driver: Driver,
        options: ConsumerOptions,
        callbacks: Mapping[str, Callable[[S, list[TopicPartition]], object] | None],
        config: Mapping[str, object],
    ) -> None:
        self._options = options
        self._reading = driver.cluster.runtime.lock()
        #: What is being fetched, with a number for each time it was assigned. Replaced, never changed: a reading
        #: thread compares what it was before its read with what it is now.
        self._fetched: dict[Key, int] = {}
        self._assigns = 0
        #: What was fetched at any time: other messages are not ours to be done.
        self._ever_fetched: set[Key] = set()
        self._undone = Undone()
        #: A batch that was handed out (at most once), on its way out of memory; see _let_go.
        self._spent: list[Message] = []
        #: A read is under way, or was parted from its note.
        self._is_torn = False
        #: Partitions of which nothing is fetched until there is room for them.
        self._held_up: set[Key] = set()
        #: How large a message is, as the last reads have shown; 0: nothing was read yet.
        self._message_bytes = 0.0
        #: How often messages were fetched again, as a read was not noted.
        self.reread = 0
        #: What threads take messages from, but for iterating and batches at least once.
        self._hand: Run | None = None
        self._hand_size = HAND_SIZE
        #: An exception may have kept a message taken from the hand from leaving the library.
        self._in_doubt = False
        self._config = config
        self._reader: DataReader = driver.cluster.data_reader(driver.engine.settings.group_id, config)
        settings = options.settings(callbacks)
        super().__init__(marshal, driver, options.topics, settings, callbacks, self._count_partitions)

    def _count_partitions(self, topics: Iterable[str], timeout_s: float) -> dict[str, int]:
        return self._reader.partition_counts(topics, timeout_s)

    @property
    def _delivery(self) -> Delivery:
        return self._engine.delivery

    def _may_leave(self, run: Run, now: float) -> bool:
        """Whether a message that was taken from a run may be handed out now (T4, T5)."""
        if self._closed or self._marshal.stop_signal:
            return False
        lease = run.assignment.lease
        return lease.may_hand_over(now) if self._options.at_most_once else now < lease.hand_out_until

    # Getting messages: threads of our own, for a call of a user's thread (serving.py).

    def _drain(self) -> None:
        """Tell the engine what user threads have said; the lock is held."""
        while self._inbox:
            said = self._inbox.popleft()
            now = self._driver.now_ms()
            if isinstance(said, tracker.Run):
                self._delivery.done_run(said, now)
            else:
                self._delivery.done(cast("Message", said), now)
        if self._in_doubt:
            self._regather()

    def _reclaim(self, before: float) -> None:
        """Hand out again what was handed out before that time (ms), and dropped; the lock is held."""
        if self._options.at_most_once:
            return
        now = self._driver.now_ms()
        if not self._delivery.is_done_said:
            runs = [run for x in self._engine.assignments.values() for run in x.tracker.runs.values() if run.is_marked]
            if text := self._undone.look(runs, self._delivery.dropped, now):
                self._engine.warn(text)
        self._delivery.reclaim(before, now)

    def _undo(self, run: Run | None) -> None:
        """A run did not reach the thread that had asked for it, or that thread has left it."""
        if run is not None and not self._closed:
            with self._driver.locked(step=False):
                self._delivery.undo_run(run, self._driver.now_ms())

    def _regather(self) -> None:
        """Something that was taken from a run may not have left the library: it is the next again (lock held)."""
        self._in_doubt = False
        if self._options.at_most_once:
            self._delivery.grants.decide()
            return
        if self._hand is not None:
            self._hand_size = max(LEAST_HAND, min(2 * self._hand.handed_out, HAND_SIZE))
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
        return self._next_run(is_gone, self._hand_size, deadline, shared=True, collected=collected)

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
                    fullest >= max_messages
                    or not fill_s
                    or self._room() <= 0
                    or self._driver.monotonic() >= (fill_until or 0.0)
                ):
                    run = self._take_run(max_messages, iterating, shared, now)
                    if run is not None:
                        return run
                if any(run.assignment.lease.is_ending(now) for run in collected):
                    return None
            if self._fill(max_messages - fullest, is_gone):
                continue  # a backlog is there: each run that is handed over costs two turns of threads
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
            self._hand_size = min(2 * self._hand_size, HAND_SIZE)
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
                run = self._delivery.grants.granted
                if run is not None:
                    if self._delivery.grants.has_granted() and self._is_proven(run):
                        return run
                    self._delivery.grants.finish_granted(self._driver.now_ms())
                    self._spent = list(run.messages)
                now = self._driver.now_ms()
                if any(run.assignment.lease.is_ending(now) for run in collected):
                    return None
                self._delivery.grants.take_up(now)
                if self._delivery.grants.granted is not None:
                    continue
                waiting = self._delivery.grants.proposed
                room = self._options.batch_size - self._delivery.fullest(self._driver.now_ms())
            if waiting is None and self._fill(room):
                continue  # a backlog is there: claim full batches
            with self._driver.locked(step=False):
                if self._delivery.grants.is_handing_out and not self._options.claim_ahead:
                    continue  # another thread was faster
                waiting = self._delivery.grants.propose(self._driver.now_ms())
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

        No more than that one: it keeps the interpreter from the thread that reads the answer. Another thread may be
        faster: then what is under way of this assignment is the claim after this one, whose answer is not there yet.
        """

        def answered() -> bool:
            return assignment.over or grant is not assignment.grant or grant is None or grant.accepted is not None

        with self._driver.locked(step=False):
            grant = assignment.grant
            room = self._options.batch_size - self._delivery.fullest(self._driver.now_ms())
        self._fill(room, answered)
        with self._driver.condition:
            self._driver.wait_for(answered, None)
        with self._driver.locked(step=False):
            if assignment.grant is grant:
                self._delivery.grants.collect(assignment, self._driver.now_ms())

    def _claim_ahead(self) -> None:
        """Claim the batch after the one that is about to be handed out, if a full one is there to be had (C13)."""
        size = self._options.batch_size
        while True:
            with self._driver.locked(step=False):
                if self._delivery.grants.granted is None:
                    return
                room = size - self._delivery.fullest(self._driver.now_ms())
                if room <= 0:
                    self._delivery.grants.propose(self._driver.now_ms())
                    return
            if not self._fill(room):
                return

    def _fill(self, room: int, enough: Callable[[], bool] = lambda: False) -> int:
        """Fetch what is there, for room messages at most, until it is enough. How many messages and faults came."""
        came = 0
        room = min(room, BURST)
        if room > 0:
            with collector_resting():
                while came < room and not enough() and self._room() > 0 and (more := self._pump(0.0)):
                    came += more
        return came

    def _room(self) -> int:
        """How many messages more may be fetched: half of ``max_bytes_in_flight`` may wait here, half be in hand."""
        if not self._message_bytes:
            return FIRST_READ
        with self._driver.locked(step=False):
            waiting = self._delivery.buffered
        return self._half() - waiting

    def _measure(self, messages: list[Message]) -> None:
        """How large messages are; large ones are remembered for a while, as others of their kind may follow."""
        some = messages if len(messages) <= FIRST_READ else messages[::MEASURED_ONE_IN]
        mean = sum(len(message.value() or b"") + MESSAGE_BYTES for message in some) / len(some)
        self._message_bytes = max(mean, self._message_bytes * 0.9)
        if not self._options.at_most_once:  # there a batch is in hand, and no more
            self._delivery.most_in_hand = max(1, self._half())

    def _half(self) -> int:
        return int(self._options.max_bytes_in_flight / 2 / self._message_bytes)

    def _hold_up(self, room: int) -> None:
        """Fetch nothing more of partitions that fill the memory, so that others can go on; and again, once they don't.

        They are assigned again where they stand: what librdkafka had fetched ahead of that is fetched anew.
        """
        if room > 0 and not self._held_up:
            return
        with self._driver.locked(step=False):
            assignments = self._engine.assignments
            if room <= 0:
                full = [key for key in self._fetched if (x := assignments.get(key)) is not None and x.buffer.size]
                if full and self._delivery.is_full:
                    self._engine.warn(
                        f"max_bytes_in_flight ({self._options.max_bytes_in_flight} bytes) is reached: nothing more is "
                        "handed out of partitions of which messages are in hand, until some of those are done"
                    )
                self._held_up |= set(full)
                self._change(dict.fromkeys(full))
                return
            ready = [
                key
                for key in self._held_up
                if (x := assignments.get(key)) is not None and (not x.buffer.size or room >= self._half() / 2)
            ]
            self._change({key: assignments[key].buffer.fetch_next for key in ready})
            self._held_up = {key for key in self._held_up if key in assignments}.difference(ready)

    def _pump(self, timeout_s: float) -> int:
        """Fetch what is there, waiting up to timeout_s for the first message. How many messages and faults came.

        What is read is noted before anybody else reads. A read that was not, as something raised in between, would
        leave a hole that looks like one of Kafka's (P6): the next one begins where the last noted one ended.
        """
        with self._reading:
            if self._closed:
                return 0
            if self._engine.positions.stuck.is_reader_deaf:
                self._renew()
            if self._is_torn:
                self._go_back()
            room = self._room()
            self._hold_up(room)
            self._is_torn = True
            fetched = self._fetched
            limit = max(1, min(READ_SIZE, room))
            messages, faults = self._reader.read(limit, timeout_s)
            if len(messages) < limit:
                self._drained_at = self._driver.now_ms()
            self._let_go(len(messages))
            if messages:
                self._measure(messages)
            ends = self._reader.take_ends()
            if messages or faults or ends:
                self._note(fetched, messages, faults, ends)
            self._is_torn = False
        return len(messages) + len(faults)

    def _note(
        self, fetched: dict[Key, int], messages: list[Message], faults: list[DataFault], ends: dict[Key, int]
    ) -> None:
        one = next(iter(fetched)) if len(fetched) == 1 and fetched is self._fetched else None
        runs = list(_runs(messages, one, {topic for topic, _ in (*fetched, *self._fetched)}))
        number, now = self._engine.number, self._driver.now_ms()
        with self._driver.locked(step=False) as engine:
            for key, group in runs:
                if fetched.get(key, self._fetched.get(key)) == self._fetched.get(key):
                    engine.take(Fetched(number, key, group), now)
                elif key in self._fetched:
                    self._fetch_anew(key)
            for key, end in ends.items():
                if fetched.get(key, self._fetched.get(key)) == self._fetched.get(key):
                    engine.take(Reached(number, key, end), now)
            for fault in faults:
                self._judge(fault)

    def _go_back(self) -> None:
        """Fetch again from where the last read that was noted has ended: a read since then was not."""
        self._is_torn = False
        self.reread += 1
        log(
            logging.ERROR,
            "read_torn",
            "reading messages was interrupted before they were noted; they are fetched again, and nothing is lost. "
            "This is a fault of a callback, or of kafka-marshal: please report it with the traceback before this line",
        )
        with self._driver.locked(step=False):
            for key in list(self._fetched):
                self._fetch_anew(key)

    def _renew(self) -> None:
        """Read on with a new client, from what was noted: librdkafka's may stand still for good (a frozen broker)."""
        log(
            logging.WARNING, "reader_replaced", "nothing comes though there is something to read: a new client reads on"
        )
        new = self._driver.cluster.data_reader(self._driver.engine.settings.group_id, self._config)
        with self._driver.locked(step=False):
            old, self._reader = self._reader, new
            self._engine.positions.stuck.is_reader_deaf = False
            found = {key: x for key in self._fetched if (x := self._engine.assignments.get(key)) and not x.over}
            self._fetched = {}
            self._change({key: x.buffer.fetch_next for key, x in found.items()})
            self._reader.pause([key for key, x in found.items() if x.user_paused])
        self._driver.post(old.close)

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
            self._fetch({key: assignment.buffer.fetch_next})

    def _judge(self, fault: DataFault) -> None:
        number, now, take = self._engine.number, self._driver.now_ms(), self._driver.engine.take
        if fault.kind is FaultKind.TOO_LARGE:
            take(TooLarge(number, fault.message), now)
        elif fault.topic is None or fault.partition is None:
            self._engine.warn(f"fetching: {fault.message}")
        elif fault.kind is FaultKind.OUT_OF_RANGE:
            take(OutOfRange(number, (fault.topic, fault.partition)), now)
        else:
            take(ReadFailed(number, (fault.topic, fault.partition), fault.message), now)

    # What the driver asks of it (ConsumerPort).

    def _fetch(self, changes: Mapping[Key, int | None]) -> None:
        """Carry out StartFetch and StopFetch."""
        if self._closed:
            return
        self._held_up.difference_update(changes)
        self._change(changes)

    def _change(self, changes: Mapping[Key, int | None]) -> None:
        self._assigns += 1
        begun = {key: offset for key, offset in changes.items() if offset is not None}
        self._ever_fetched.update(begun)
        ended = [key for key, offset in changes.items() if offset is None]
        if ended:
            self._reader.unassign(ended)
        if begun:
            self._reader.assign(begun)
        # Last: who reads meanwhile counts what comes as of before, and it is fetched again.
        kept = {key: number for key, number in self._fetched.items() if key not in changes}
        self._fetched = {**kept, **dict.fromkeys(begun, self._assigns)}

    def _log_end(self, key: Key) -> int | None:
        """The log end as of the last fetch."""
        return None if self._closed else self._reader.high_watermark(*key)

    # Ending.

    def _freed(self) -> None:
        with self._reading:
            self._reader.close()


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
