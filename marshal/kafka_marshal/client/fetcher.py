"""Reads the messages of one consumer, and notes them in its engine. Threads of our own call it.

A thread that waits for messages reads for all that wait; :mod:`.fetching` decides which one, and when.
"""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Protocol

from kafka_marshal.client.shared_reads import runs, shared_reader
from kafka_marshal.engine.work.consumer import ConsumerEngine
from kafka_marshal.engine.work.in_lanes import FIRST_READ, mean_bytes
from kafka_marshal.engine.work.pull import hold_up, hold_up_stuck
from kafka_marshal.logs import log
from kafka_marshal.node.driver import Driver
from kafka_marshal.node.stalled_fetch import FetchMonitor
from kafka_marshal.node.topics import LOOKUP_TIMEOUT_S
from kafka_marshal.ports import DataFault, DataReader, FaultKind, Message
from kafka_marshal.rights import grant
from kafka_marshal.types import Key

#: Whether the garbage collector is off now because of us.
_resting = False


@contextmanager
def collector_resting() -> Iterator[None]:
    """Switch the garbage collector off in this block (if it is on); then it examines all new objects at once.

    A fetch of 10,000 messages would start it some twelve times, each time for all messages so far: 2 ms of the 7 that
    such a batch takes. It is off for the whole process, so a block may take a few milliseconds only.
    """
    global _resting
    if not gc.isenabled():
        yield
        return
    _resting = True
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        _resting = False


def _wake_in_child() -> None:
    """After a fork in such a block, the child would never switch the collector on again."""
    global _resting
    if _resting:
        _resting = False
        gc.enable()


os.register_at_fork(after_in_child=_wake_in_child)


#: Messages taken from the reader at a time. With 500, taking the lock for each read costs a tenth of all time; with
#: 5,000, messages have left the processor's caches before the user's thread gets them.
READ_SIZE = 2_000

#: Messages fetched in a row with the collector off: some 3 ms.
BURST = 10_000

#: A wait for messages is cut into slices of this length (s), to check for stop() and errors. (confluent-kafka cuts
#: waits into slices of this length, too: a longer one would wake the thread twice.)
SLICE_S = 0.2

#: While a cut holds up what is fetched, messages of other partitions are looked for this often (s).
CUT_SLICE_S = 0.01


#: For this long (s) after a failed read, the failure explains why a partition delivers nothing.
FAILS_FOR_S = 10.0

#: After the first replacement of a reader, the least time before the next one (s).
RENEWED_EVERY_S = 60.0


class Fetching(Protocol):
    """The consumer that messages are fetched for."""

    _engine: ConsumerEngine
    _closed: bool
    #: When a read last left nothing fetched behind (own clock, ms).
    _drained_at: float
    #: How much members of this process keep for each other of what they read (bytes); 0: it reads by itself.
    _shared_bytes: int


class Fetcher:
    """One reader, the partitions assigned to it, and how far their messages were noted."""

    def __init__(self, consumer: Fetching, driver: Driver, config: Mapping[str, object], max_bytes: int) -> None:
        self._consumer = consumer
        self._driver = driver
        self.config = config
        self._max_bytes = max_bytes
        self._reading = driver.cluster.runtime.lock()
        self.reader: DataReader = self._open()
        #: Partition → the numbers of its latest assignment and of the one before. The dict is replaced, never changed:
        #: a thread that reads compares the dict of before its read with the present one.
        self._fetched: dict[Key, tuple[int, int]] = {}
        #: The number of the last assignment that ``_fetched`` shows.
        self._assigns = 0
        #: All partitions ever fetched (messages of others can't be reported done here) → the latest assignment.
        self.ever_fetched: dict[Key, int] = {}
        #: A read has begun whose messages are not noted yet.
        self._is_torn = False
        #: Partitions that are not fetched until there is room for them.
        self._held_up: set[Key] = set()
        #: Notices partitions that the reader delivers nothing of; ``_renewed_at``: its last replacement (s, monotonic).
        self.monitor: FetchMonitor[Key] = FetchMonitor(driver.cluster.runtime, "the reader of messages", self._ends)
        self.monitor.be_patient(driver.engine.settings.heartbeat_interval_ms)
        self._renewed_at = float("-inf")
        #: When reading a partition last failed (s, monotonic): this explains its silence. inf: it is forbidden.
        self._failed_at: dict[Key, float] = {}
        #: How often messages were fetched again because a read was not noted.
        self.reread: int = 0

    def _open(self) -> DataReader:
        cluster, group_id = self._driver.cluster, self._driver.engine.settings.group_id
        most = self._consumer._shared_bytes
        way = cluster.way_of_reading(self.config) if most else None
        make = partial(cluster.data_reader, group_id, self.config)
        return make() if way is None else shared_reader((way, group_id), cluster.runtime, make, most)

    @property
    def _engine(self) -> ConsumerEngine:
        return self._consumer._engine

    def partition_counts(self, topics: Iterable[str], timeout_s: float) -> dict[str, int]:
        """Topic → its number of partitions (*blocking*)."""
        return self.reader.partition_counts(topics, timeout_s)

    def fetch(self, changes: Mapping[Key, int | None]) -> None:
        """Fetch each partition from its offset on, or (None) stop fetching it; the lock is held."""
        self._held_up.difference_update(changes)
        self._change(changes)

    def _change(self, changes: Mapping[Key, int | None]) -> None:
        number = self._assigns + 1
        begun = {key: offset for key, offset in changes.items() if offset is not None}
        numbers = {key: (number, self.ever_fetched.get(key, 0)) for key in begun}
        self.ever_fetched.update(dict.fromkeys(begun, number))
        ended = [key for key, offset in changes.items() if offset is None]
        if ended:
            self.reader.unassign(ended)
        if begun:
            self.reader.assign(begun)
        # Last: a thread that reads meanwhile takes its messages for older ones, and they are fetched again.
        self.monitor.end(ended)
        self.monitor.begin(begun)
        kept = {key: number for key, number in self._fetched.items() if key not in changes}
        self._fetched = {**kept, **numbers}
        self._assigns = number

    def fill(self, room: int, enough: Callable[[], bool] = lambda: False) -> int:
        """Fetch what is there, ``room`` messages at most, until enough(). Returns the number of messages and faults."""
        came = 0
        room = min(room, BURST)
        if room > 0:
            with collector_resting():
                while came < room and not enough() and self._room() > 0 and (more := self.pump(0.0)):
                    came += more
        return came

    def wait(self, until: float) -> float:
        """Fetch what is there; wait for the first message until then (s, monotonic), for one slice at most.

        Returns when the wait began.
        """
        now = self._driver.monotonic()
        self.pump(max(0.0, min(until - now, SLICE_S)))
        return now

    def await_cut(self, until: float) -> float:
        """A cut holds up what is fetched: wait for its end, at most for a moment. Returns when the wait began."""
        now, driver = self._driver.monotonic(), self._driver
        with driver.condition:
            driver.lock.wait_for(
                lambda: not self._engine.delivery.is_held_up(driver.now_ms()), max(0.0, min(until - now, CUT_SLICE_S))
            )
        return now

    def _room(self) -> int:
        """How many more may be fetched: half of ``max_bytes_in_flight`` is for messages that wait to be delivered."""
        memory = self._engine.delivery.memory
        if not memory.message_bytes:
            return FIRST_READ
        with self._driver.locked(step=False):
            return memory.room(self._engine.delivery.buffered)

    def _hold_up(self, room: int) -> None:
        """Stop fetching partitions that fill the memory, so that others can continue; resume when there is room.

        They are assigned again at their position: what librdkafka had fetched beyond it is fetched again.
        """
        if room > 0 and not self._held_up:
            return
        number, fetched = self._engine.number, tuple(self._fetched)
        with self._driver.locked(step=False) as engine:
            of = self._engine, fetched, tuple(self._held_up), room, self._driver.now_ms()
            changes = engine.take(number, hold_up, *of) or {}
            self._change(changes)
            if room <= 0:
                self._held_up |= set(changes)
            else:
                self._held_up = {key for key in self._held_up if key in self._engine.assignments}.difference(changes)

    def hold_up_stuck(self) -> None:
        """Stop fetching partitions that are stuck in lanes, so that a read can wait for the others."""
        with self._reading, self._driver.locked(step=False) as engine:
            of = self._engine, tuple(self._fetched), self._driver.now_ms()
            changes = engine.take(self._engine.number, hold_up_stuck, *of) or {}
            self._held_up |= set(changes)
            self._change(changes)

    def pump(self, timeout_s: float) -> int:
        """Fetch what is there, waiting up to timeout_s for the first message. Returns how many messages and faults.

        A read is noted before another thread reads. If an exception prevented that, the messages would be missing as
        if Kafka had removed them (P6): so the next read begins where the last noted one ended.
        """
        with self._reading:
            if self._consumer._closed:
                return 0
            self.monitor.begin_read()
            if missing := self.monitor.missing():
                self._mend(missing)
            if self._is_torn:
                self._go_back()
            room = self._room()
            self._hold_up(room)
            self._is_torn = True
            begun = self._assigns  # before the dict, without the lock: else it might be of a change under way
            fetched = self._fetched
            limit = max(1, min(READ_SIZE, room))
            messages, faults = self.reader.read(limit, timeout_s)
            if len(messages) < limit:
                self._consumer._drained_at = self._driver.now_ms()
            self.monitor.end_read(timeout_s)
            ends = self.reader.take_ends()
            if messages or faults or ends or self._engine.delivery.memory.spent:
                self._note(fetched, begun, messages, faults, ends)
            self._is_torn = False
        return len(messages) + len(faults)

    def _note(
        self,
        fetched: dict[Key, tuple[int, int]],
        begun: int,
        messages: list[Message],
        faults: list[DataFault],
        ends: dict[Key, int],
    ) -> None:
        def is_of_now(key: Key) -> bool:
            """Whether what was read of it is of its present assignment, and not of one that ended meanwhile."""
            at = self._fetched.get(key)
            return fetched[key] == at if key in fetched else at is None or at[1] <= begun

        one = next(iter(fetched)) if len(fetched) == 1 and fetched is self._fetched else None
        parts = list(runs(messages, one, {topic for topic, _ in (*fetched, *self._fetched)}))
        number, now, mean = self._engine.number, self._driver.now_ms(), mean_bytes(messages)
        with self._driver.locked(step=False) as engine:
            engine.take(number, self._engine.delivery.memory.read, len(messages), mean)
            for key, group in parts:
                if is_of_now(key):
                    engine.take(number, self._engine.fetched, key, group, now)
                    self.monitor.received(key, (group[-1].offset() or 0) + 1)
                    self._driver.lock.empty_outbox()  # what follows of this partition may be of an old position now
                    self._failed_at.pop(key, None)
                elif key in self._fetched:
                    self._fetch_anew(key)
            for key, end in ends.items():
                if is_of_now(key):
                    engine.take(number, self._engine.reached, key, end, now)
                    self.monitor.received(key, end)
                    self._driver.lock.empty_outbox()
            for fault in faults:
                self._judge(fault)

    def _go_back(self) -> None:
        """Fetch again from the end of the last read that was noted: a later one was not."""
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

    def _ends(self, keys: list[Key]) -> dict[Key, int]:
        cluster, is_all = self._driver.cluster, self.config.get("isolation.level") == "read_uncommitted"
        ask = cluster.watermarks if is_all else cluster.committed_watermarks
        return {key: end for key, (_, end) in ask(keys, LOOKUP_TIMEOUT_S).items()}

    def _mend(self, missing: list[Key]) -> None:
        """Read again partitions that deliver nothing though the log has messages; the next try uses a new client."""
        monitor = self.monitor
        with self._driver.locked(step=False):
            assignments, recent = self._engine.assignments, self._driver.monotonic() - FAILS_FOR_S
            excused = [
                key
                for key in missing
                if self._failed_at.get(key, recent) > recent
                or (x := assignments.get(key)) is None
                or x.over
                or x.user_paused
            ]
        monitor.excuse(excused)
        stalled = sorted(set(missing).difference(excused))
        tries = monitor.tries(stalled)
        if not stalled or (tries > 1 and self._driver.monotonic() < self._renewed_at + RENEWED_EVERY_S):
            monitor.excuse(stalled)
            return
        if tries == 0:
            log(logging.WARNING, "reader_deaf", "%s: it reads again from there", monitor.what(stalled))
            with self._driver.locked(step=False):
                for key in stalled:
                    self._fetch_anew(key)
        else:
            text = "%s, nor when it read again from there: a new client reads on"
            log(logging.ERROR, "reader_deaf", text, monitor.what(stalled))
            self._renew()
        monitor.tried(stalled, new=tries > 0)

    def _renew(self) -> None:
        """Continue with a new client from what was noted: librdkafka's may be stuck for good (a frozen broker)."""
        self._renewed_at = self._driver.monotonic()
        new = self._open()
        with self._driver.locked(step=False):
            old, self.reader = self.reader, new
            found = {key: x for key in self._fetched if (x := self._engine.assignments.get(key)) and not x.over}
            self._fetched = {}
            self._change({key: x.fetch_from for key, x in found.items()})
            self.reader.pause([key for key, x in found.items() if x.user_paused])
        # The old client may never close: no thread waits for it.
        self._driver.cluster.runtime.start(old.close, "kafka-marshal-close")

    def _fetch_anew(self, key: Key) -> None:
        """Fetch it again: it was assigned again during the read, so its messages may be of the old assignment."""
        assignment = self._engine.assignments.get(key)
        if assignment is not None and not assignment.over:
            self.fetch({key: assignment.fetch_from})

    def _judge(self, fault: DataFault) -> None:
        number, now, engine = self._engine.number, self._driver.now_ms(), self._driver.engine
        positions = self._engine.positions
        if fault.kind is FaultKind.TOO_LARGE:
            self._failed_at.update(dict.fromkeys(self._fetched, self._driver.monotonic()))
            engine.take(number, positions.stuck.too_large, fault.message, now)
        elif fault.kind is FaultKind.RECREATED and fault.topic is not None:
            engine.take(number, positions.reader_found, fault.topic, fault.message, now)
            for key in [key for key in self._fetched if key[0] == fault.topic]:
                self._fetch_anew(key)  # if the engine knew it already, and the position is of the new topic
        elif fault.topic is None or fault.partition is None:
            self._driver.effects.rate_limited.unanswered("fault", ("fetching", number), f"fetching: {fault.message}")
        elif fault.kind is FaultKind.OUT_OF_RANGE:
            engine.take(number, positions.out_of_range, (fault.topic, fault.partition), now)
        else:
            is_forbidden = fault.kind is FaultKind.REFUSED
            at = float("inf") if is_forbidden else self._driver.monotonic()
            self._failed_at[fault.topic, fault.partition] = at
            needs = f". {grant('READ', 'topic', [fault.topic])}" if is_forbidden else ""
            of = (fault.topic, fault.partition), f"{fault.message}{needs}", now, is_forbidden
            engine.take(number, positions.stuck.failed, *of)

    def close(self) -> None:
        """Close the reader (*blocking*)."""
        with self._reading:
            self.reader.close()
