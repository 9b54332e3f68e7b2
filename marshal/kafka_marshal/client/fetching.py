"""What our own threads do for the calls of user threads on a consumer (:mod:`kafka_marshal.node.serving`).

They carry out the steps of a pull (:mod:`kafka_marshal.engine.work.pull`): read, wait, pass a run to the user's thread.
What user threads do with the run is in :mod:`kafka_marshal.client.consumer`.
"""

from __future__ import annotations

import gc
import logging
import os
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from math import inf
from typing import Any, TypeVarTuple

from kafka_marshal import arguments
from kafka_marshal.client.attempt import GroupKind
from kafka_marshal.client.base import AnyConsumer, ConsumerHost, S
from kafka_marshal.client.batch import Look
from kafka_marshal.client.closing import Limit
from kafka_marshal.client.failures import say_in_hand, shortened
from kafka_marshal.client.handled import Handled
from kafka_marshal.client.handling import Retry, check_park
from kafka_marshal.client.options import ConsumerOptions
from kafka_marshal.client.shared_reads import shared_reader
from kafka_marshal.client.transactions import TransactionalProducers
from kafka_marshal.engine.effects import TakeOver
from kafka_marshal.engine.settings import MAX_IN_HAND_MESSAGES
from kafka_marshal.engine.work.assignment import Grant, Run
from kafka_marshal.engine.work.consumer import ConsumerEngine
from kafka_marshal.engine.work.delivery import Delivery
from kafka_marshal.engine.work.in_lanes import Finished
from kafka_marshal.engine.work.open_messages import hash_of
from kafka_marshal.engine.work.pull import (
    AwaitGrant,
    Delivers,
    Fetch,
    GrantedPull,
    Pull,
    Step,
    Take,
    Wait,
    Wanted,
    hold_up,
)
from kafka_marshal.engine.work.run import Run as RunOf
from kafka_marshal.engine.work.run import offset_of, runs
from kafka_marshal.engine.work.tracker import FIRST_READ, mean_bytes
from kafka_marshal.errors import ConfigurationError, grant
from kafka_marshal.logs import log
from kafka_marshal.node.driver import Driver
from kafka_marshal.node.log_reader import FetchMonitor
from kafka_marshal.node.serving import EndedError
from kafka_marshal.node.topics import LOOKUP_TIMEOUT_S
from kafka_marshal.ports import DataFault, DataReader, FaultKind, Message
from kafka_marshal.types import Key
from rationalizer.levels import SHARING_LEVEL

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


Ts = TypeVarTuple("Ts")

#: For this long (s) after a failed read, the failure explains why a partition delivers nothing.
FAILS_FOR_S = 10.0

#: After the first replacement of a reader, the least time before the next one (s).
RENEWED_EVERY_S = 60.0


#: Gives the engine messages of one partition, and their mean size (bytes). Returns False if it did not.
Then = Callable[[Key, list[Message], float], bool]


class Fetcher:
    """One reader, the partitions assigned to it, and how far their messages were noted."""

    def __init__(self, consumer: FetchingConsumer[Any], driver: Driver, config: Mapping[str, object]) -> None:
        self._consumer = consumer
        self._driver = driver
        self.config = config
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
        #: How many more messages may be fetched, as of the last time that the lock was held: see ``look``.
        self._room: int = FIRST_READ

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
                while came < room and not enough() and self._room > 0 and (more := self.pump(0.0)):
                    came += more
        return came

    def wait(self, until: float, then: Then | None = None) -> float:
        """Fetch what is there; wait for the first message until then (s, monotonic), for one slice at most.

        then: called with what came, if that is of one partition; the lock is held.
        Returns when the wait began.
        """
        now, patience_ms = self._driver.monotonic(), self._engine.schedule.patience_ms(self._driver.now_ms())
        self.pump(max(0.0, min(until - now, SLICE_S, patience_ms / 1000)), then)
        return now

    def await_log(self, until: float) -> float:
        """Delivery is held up: wait for what the log will show, at most for a moment. Returns when the wait began."""
        now, driver = self._driver.monotonic(), self._driver
        with driver.condition:
            most = min(until - now, CUT_SLICE_S, self._engine.schedule.patience_ms(driver.now_ms()) / 1000)
            driver.lock.wait_for(lambda: not self._engine.delivery.is_held_up(driver.now_ms()), max(0.0, most))
        return now

    def look(self) -> None:
        """See how many more may be fetched, which user threads only increase; the lock is held.

        Half of ``max_bytes_in_flight`` is for messages that wait to be delivered.
        """
        memory = self._engine.delivery.memory
        self._room = memory.room(self._engine.delivery.buffered) if memory.message_bytes else FIRST_READ

    def _hold_up(self, room: int) -> None:
        """Stop fetching partitions that fill the memory, so that others can continue; resume when there is room.

        They are assigned again at their position: what librdkafka had fetched beyond it is fetched again.
        """
        if room > 0 and not self._held_up:
            return
        number, fetched = self._engine.number, tuple(self._fetched)
        with self._driver.lock.locked(step=False) as engine:
            of = self._engine, fetched, tuple(self._held_up), room, self._driver.now_ms()
            changes = engine.take(number, hold_up, *of) or {}
            self._change(changes)
            if room <= 0:
                self._held_up |= set(changes)
            else:
                self._held_up = {key for key in self._held_up if key in self._engine.assignments}.difference(changes)

    def stop_fetching(self, which: Callable[[Delivers, Collection[Key], float], dict[Key, int | None]]) -> None:
        """Stop fetching partitions that wait for what is in lanes, so that a read can wait for the others."""
        with self._reading, self._driver.lock.locked(step=False) as engine:
            of = self._engine, tuple(self._fetched), self._driver.now_ms()
            changes = engine.take(self._engine.number, which, *of) or {}
            self._held_up |= set(changes)
            self._change(changes)

    def pump(self, timeout_s: float, then: Then | None = None) -> int:
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
            room = self._room
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
                self._note(fetched, begun, messages, faults, ends, then)
            self._is_torn = False
        return len(messages) + len(faults)

    def _note(
        self,
        fetched: dict[Key, tuple[int, int]],
        begun: int,
        messages: list[Message],
        faults: list[DataFault],
        ends: dict[Key, int],
        then: Then | None,
    ) -> None:
        def is_of_now(key: Key) -> bool:
            """Whether what was read of it is of its present assignment, and not of one that ended meanwhile."""
            at = self._fetched.get(key)
            return fetched[key] == at if key in fetched else at is None or at[1] <= begun

        one = next(iter(fetched)) if len(fetched) == 1 and fetched is self._fetched else None
        topics = set() if one is not None else {topic for topic, _ in (*fetched, *self._fetched)}
        parts = list(runs(messages, one, topics))
        number, now, mean = self._engine.number, self._driver.now_ms(), mean_bytes(messages)
        with self._driver.lock.locked(step=False) as engine:
            if then is not None and len(parts) == 1 and not (faults or ends) and is_of_now(parts[0][0]):
                key, group = parts[0]
                if then(key, group, mean):
                    self.monitor.received(key, (group[-1].offset() or 0) + 1)
                    self._failed_at.pop(key, None)
                    return
            engine.take(number, self._engine.delivery.memory.read, len(messages), mean)
            for key, group in parts:
                if is_of_now(key):
                    engine.take(number, self._engine.delivery.fetched, key, group, now)
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
            self.look()

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
        with self._driver.lock.locked(step=False):
            for key in list(self._fetched):
                self._fetch_anew(key)

    def _ends(self, keys: list[Key]) -> dict[Key, int]:
        cluster, is_all = self._driver.cluster, self.config.get("isolation.level") == "read_uncommitted"
        ask = cluster.watermarks if is_all else cluster.committed_watermarks
        return {key: end for key, (_, end) in ask(keys, LOOKUP_TIMEOUT_S).items()}

    def _mend(self, missing: list[Key]) -> None:
        """Read again partitions that deliver nothing though the log has messages; the next try uses a new client."""
        monitor = self.monitor
        with self._driver.lock.locked(step=False):
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
            with self._driver.lock.locked(step=False):
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
        with self._driver.lock.locked(step=False):
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


#: With this number of messages delivered and none done, the program probably does not report what is done.
MANY = 1_000

#: With fewer, this long (ms) after a second call for messages: a handler may take a while. At once if the program has
#: dropped more than one: nobody can say any more that those are done.
LONG_MS = 60_000.0

#: Said again after this time (ms), with the count of then.
SAID_EVERY_MS = 600_000.0

#: What user threads report; the engine gets it in this order. Or what gives the engine an input.
Said = Message | Run | Finished | partial[object]


class Undone:
    """The messages of one consumer, until the first is done: they stay in flight, also if the program drops them."""

    def __init__(self) -> None:
        #: When it was said last, and when a second call for messages was first seen (own clock, ms).
        self._said_at = -inf
        self._since: float | None = None
        #: Cancelled calls: from when to when (own clock, ms) they may have taken messages that no task saw.
        self.cancelled: list[list[float]] = []

    def look(self, runs: Iterable[Run], before: float, now: float) -> str:
        """The warning; "": none is due. before: a message delivered since then may be on its way (own clock, ms)."""
        if now < self._said_at + SAID_EVERY_MS:
            return ""
        handed_out = dropped = 0
        calls: set[int] = set()
        for run in runs:
            handed_out += run.left
            dropped += 0 if run.has_left else len(run.dropped(before))
            calls.update(id(taken.out) for taken in run.taken if taken.out[0])
        if self._since is None and len(calls) > 1:
            self._since = now
        is_long = self._since is not None and now >= self._since + LONG_MS
        if handed_out < MANY and dropped < 2 and not is_long:
            return ""
        self._said_at = now
        return (
            f"poll(), consume() or batches() have delivered {handed_out:,} message(s), and none was ever reported as "
            "done. None is lost: they stay in flight, and come again after a restart or at the next owner. "
            f"At {MAX_IN_HAND_MESSAGES:,} of a partition, or half of max_bytes_in_flight, nothing "
            "more is delivered. Call consumer.done(message), or batch.done(), once it is handled; or iterate over "
            'the consumer, or use delivery="at-most-once"'
        )

    def since(self, before: float) -> float:
        """From when on messages that the program has dropped come again, though it reports none as done."""
        found = min((began for began, _ in self.cancelled), default=inf)
        self.cancelled = [each for each in self.cancelled if each[1] >= before]
        return found


#: Messages an iteration takes at a time. Those that it has not reached are not in flight, and can be given back.
RUN_SIZE = 10_000

#: close() checks this often (s) whether ``run`` has ended.
END_LOOK_S = 0.02

#: Reports of done messages wait for the next heartbeat or call; with this number the engine gets them at once.
SAID_AT_ONCE = 10_000


class FetchingConsumer(AnyConsumer[S]):
    """The part of a consumer that runs on our own threads."""

    def __init__(self, marshal: ConsumerHost, driver: Driver, options: ConsumerOptions) -> None:
        self._shared_bytes = marshal.max_bytes_shared_reads if options.settings.shares_keys else 0
        self._fetcher = Fetcher(self, driver, options.config)
        #: Its transactional producers; None: it does not process in transactions.
        self._transactions: TransactionalProducers | None = None
        if options.transactions is not None:
            self._transactions = TransactionalProducers(driver, options.transactions, options.config)
        #: Partitions whose messages may be reported as done one by one: in transactions, none.
        self._handed_out_of: Collection[Key] = self._fetcher.ever_fetched if self._transactions is None else ()
        self._undone = Undone()
        self._handled = Handled(driver.cluster.runtime.lock())
        #: The message in flight (or the first of the batch) when a loop was left.
        self._left: Message | None = None
        #: What user threads have reported as done, and the engine does not know yet.
        self._inbox: deque[Said] = deque()
        self._nudged = False
        super().__init__(marshal, driver, options, self._fetcher.partition_counts)
        self._leaving.settle = self._end_run

    @property
    def _kind(self) -> GroupKind:
        """How its partitions are assigned."""
        return "claimed" if self._options.settings.group is None else "coordinated"

    def _about(self) -> tuple[str, GroupKind, Callable[[], float], Look]:
        """What a batch says of its consumer: group, kind of it, the clock (ms), and what sinks have to know."""
        return self._marshal.group_id, self._kind, self._driver.now_ms, Look(self._driver, self._engine)

    @property
    def _delivery(self) -> Delivery:
        return self._engine.delivery

    def _may_leave(self, run: Run, now: float) -> bool:
        """Whether a message that was taken from a run may be delivered now (T4, T5)."""
        if self._closed or self._stop_signal:
            return False
        lease = run.assignment.lease
        return lease.may_hand_over(now) if self._options.settings.at_most_once else now < lease.hand_out_until

    def _say(self, what: Said) -> None:
        """Report a message or a whole run as done, a message as finished, for a transaction, or aside (any thread)."""
        if self._options.settings.at_most_once:
            return
        if self._driver.life.forked:
            self._driver.life.refuse_fork()
        self._inbox.append(what)
        if self._engine.schedule.is_moving:
            self._nudge()
        if len(self._inbox) == SAID_AT_ONCE:
            self._driver.call(self._hear)

    def _nudge(self) -> None:
        """If an assignment moves, pass reports on at once: a revocation may wait for them."""
        if self._engine.schedule.is_moving and not self._nudged:
            self._nudged = True
            self._driver.post(self._hear)

    def _hear(self) -> None:
        self._nudged = False
        with self._driver.lock.locked():
            self._drain()  # reports that came after close()

    def park(self, message: Message, reason: str) -> None:
        """Set a message in flight aside in the group's log, for an operator; the others continue without it.

        For messages of ``poll``, ``consume``, ``batches()`` and loops; ``run`` has ``park=True``. reason: at most 64
        bytes, shown by ``kafka-marshal open-messages``. After its lease ended, this has no effect, and is counted in
        ``ignored_done``. Raises ConfigurationError below level 4 of the coordination topic, at most once, with
        transactions, in a group that takes checkpoints, and for a message that this consumer never delivered.
        """
        arguments.text("reason", reason)
        check_park(self._options, Retry(1), park=True, dead_letters=None, call="park(…)")
        key = message.topic() or "", -1 if (partition := message.partition()) is None else partition
        if key not in self._fetcher.ever_fetched:
            raise ConfigurationError(
                f"{key[0]} [{key[1]}]: this consumer has never had this partition, so it has not delivered this "
                "message. Nothing was set aside; call park() of the consumer that it came from"
            )
        self._require_sharing_level("park(…)")
        of = key, -1, offset_of(message), hash_of(message), 0, shortened(reason)
        self._say(partial(self._take, self._engine.park, *of))

    def _require_sharing_level(self, what: str) -> None:
        """Raise ConfigurationError if the coordination topic can't hold open messages yet (U6)."""
        level = min(world.level for world in list(self._driver.engine.worlds.values()))
        if level < SHARING_LEVEL:
            raise ConfigurationError(
                f"{what}: level {SHARING_LEVEL} of the coordination topic is needed, which is at level {level}. "
                "Nothing was delivered or set aside. Once all members have this release, raise it: kafka-marshal "
                "upgrade"
            )

    # Getting messages: our own threads, for a call of a user's thread (serving.py).

    def _drain(self) -> None:
        """Pass what user threads have reported to the engine; the lock is held."""
        number = self._engine.number
        if number not in self._driver.engine.consumers:
            while self._inbox:
                said = self._inbox.popleft()
                self._done_after_close += said.size if isinstance(said, RunOf) else 1
            return
        waits = self._delivery.in_lanes.lanes.has_waits  # that is reported before its partition is released
        if not waits and self._delivery.in_lanes.lanes.has_returned:
            self._take(self._delivery.in_lanes.returned)
        done: list[Message] = []
        finished: list[Finished] = []
        while self._inbox:
            said = self._inbox.popleft()
            if isinstance(said, Finished):
                finished.append(said)
                continue
            if not isinstance(said, RunOf | partial):
                done.append(said)
                continue
            if done:
                self._take(self._delivery.done, done)
                done = []
            if isinstance(said, partial):
                said()
            else:
                self._take(self._delivery.done_run, said)
        if done:
            self._take(self._delivery.done, done)
        if finished:
            self._take(self._delivery.finish, finished)
        if waits:
            self._take(self._delivery.in_lanes.returned)
        if self._hand.in_doubt:
            self._take(self._hand.regather, self._engine)

    def _reclaim(self, before: float) -> None:
        """Deliver again what was delivered before that time (ms), and then dropped; the lock is held.

        A program that reports nothing as done continues, as with confluent-kafka: only what a cancelled call took comes
        again, and what a release would wait for.
        """
        if self._options.settings.at_most_once:
            return
        since = -inf
        settings = self._options.settings
        if not (self._delivery.is_done_said or settings.transactions) and settings.sharing is None:
            since = self._undone.since(before)
            runs = [run for x in self._engine.assignments.values() for run in x.tracker.runs.values() if run.is_marked]
            if text := self._undone.look(runs, before, self._driver.now_ms()):
                self._driver.engine.take(self._engine.number, self._engine.warn, text)
        self._take(self._delivery.reclaim, before, since)

    def _undo(self, run: Run | None) -> None:
        """Take back a run that did not reach the thread that asked for it, or that the thread has left."""
        if run is not None and not self._closed:
            with self._driver.lock.locked(step=False):
                self._take(self._delivery.undo_run, run)

    def _serve_run(self, is_gone: Callable[[], bool], left: Run | None = None) -> Run | None:
        """left: the thread that asks has left this run."""
        try:
            self._recall_hand()
        except BaseException:
            self._undo(left)
            raise
        return self._pull(Pull(self._engine), is_gone, iterating=True, left=left)

    def _serve_batch(self, is_gone: Callable[[], bool], max_messages: int, timeout: float) -> Run | None:
        self._recall_hand()
        return self._pull(Pull(self._engine, fill_s=timeout), is_gone, max_messages)

    def _recall_hand(self) -> None:
        """Put back what ``poll`` has not taken yet: it comes first."""
        if self._hand.run is not None or self._hand.in_doubt:
            with self._driver.lock.locked(step=False):
                self._take(self._hand.regather, self._engine)

    def _serve_hand(self, is_gone: Callable[[], bool], deadline: float | None, collected: Sequence[Run]) -> Run | None:
        hand, until = self._hand, inf if deadline is None else deadline
        if self._options.settings.at_most_once:
            return self._pull(GrantedPull(self._engine, hand, deadline=until, collected=collected), is_gone)
        with self._driver.lock.locked(step=False):
            self._take(hand.settle, self._engine, bool(collected), hand.in_doubt)
        return self._pull(Pull(self._engine, hand, deadline=until, collected=collected), is_gone, hand.size)

    def _pull(
        self,
        pull: Pull,
        is_gone: Callable[[], bool],
        max_messages: int = RUN_SIZE,
        iterating: bool = False,
        left: Run | None = None,
    ) -> Run | None:
        """Carry out the pull step by step. Returns its run; None if the pull or the consumer ends.

        A message that comes while a thread waits enters the engine once, and the lock is taken once for it.
        """
        fetcher, came, waited = self._fetcher, None, None
        found: list[tuple[Step | None, bool]] = []

        def take(function: Callable[[*Ts, Wanted, float], Step], *of: *Ts) -> None:
            """Find the next step; the lock is held."""
            wanted = Wanted(max_messages, iterating, self._driver.monotonic(), came, waited)
            engine, number = self._driver.engine, self._engine.number
            step = engine.take(number, function, *of, wanted, self._driver.now_ms())
            fetcher.look()
            found.append((step, self._delivery.is_held_up(self._driver.now_ms())))

        def then(key: Key, messages: list[Message], mean: float) -> bool:
            if is_gone() or self._closed or self._stop_signal or self._engine.errors or self._engine.source.failure:
                return False
            take(pull.come, key, messages, mean)
            return True

        while True:
            if not found:
                with self._driver.lock.locked(step=False):
                    if is_gone() or self._is_over():
                        if left is not None:
                            self._take(self._delivery.undo_run, left)
                        return None
                    if left is None:
                        take(pull.next)
                    else:
                        take(pull.after, left)
                    left = None
            step, is_held_up = found.pop()
            came = waited = None
            match step:
                case Take(run):
                    return run
                case Fetch(room, until):
                    came = fetcher.fill(room, is_gone)
                    if not came and until is not None:
                        waited = fetcher.await_log(until) if is_held_up else fetcher.wait(until, then)
                case Wait(until):
                    waited = fetcher.wait(until)
                case AwaitGrant(grant):
                    self._await(pull, grant)
                case _:
                    return None

    def _await(self, pull: Pull, grant: Grant) -> None:
        """Wait until our replica has applied the ClaimingMessages (C13); meanwhile, fetch the next batch."""
        with self._driver.lock.locked(step=False):
            room = self._take(pull.room) or 0  # None: closed since, by another thread
            self._fetcher.look()
        self._fetcher.fill(room, lambda: grant.is_answered)
        with self._driver.condition:
            self._driver.wait_for(lambda: grant.is_answered, None)
        with self._driver.lock.locked(step=False):
            self._take(pull.answered, grant)

    def _say_in_hand(self, error: Exception) -> None:
        found: Message | None = None
        if not (self._closed or self._driver.is_over or self._driver.life.forked):
            with suppress(EndedError):
                found = self._driver.call(self._first_undone)
        # Read last: a loop notes its message before it gives it back.
        left, self._left = self._left if found is None else found, None
        if left is not None:
            say_in_hand(error, left, self._marshal.config, self._driver.engine.settings)

    def _first_undone(self) -> Message | None:
        """The first message that user threads have taken and not done, of the first partition that has one."""
        with self._driver.lock.locked(step=False):
            self._drain()
            for _, assignment in sorted(self._engine.assignments.items()):
                for run in assignment.tracker.runs.values():
                    if (found := run.first_undone) is not None:
                        return found
        return None

    # What the driver asks of it (ConsumerPort).

    def _fetch(self, changes: Mapping[Key, int | None], expected: Mapping[Key, int]) -> None:
        """Carry out StartFetch and StopFetch; what is expected is read ahead."""
        if expected and not self._closed:
            self._fetcher.reader.expect(expected)
        if changes and not self._closed:
            self._fetcher.fetch(changes)

    def _take_over(self, asked: TakeOver) -> None:
        if self._transactions is not None:
            self._transactions.take_over(asked)

    def _close_producer(self, key: Key, token: int) -> None:
        if self._transactions is not None:
            self._transactions.close_producer(key, token)

    def _look_at_ends(self) -> None:
        """Update ``_log_end`` from what the client knows, without a request to a broker (any thread; no wait)."""
        if not self._closed:
            self._fetcher.reader.look_at_ends()

    def _log_end(self, key: Key) -> int | None:
        """The log end, as of the last fetch."""
        return None if self._closed else self._fetcher.reader.high_watermark(*key)

    # Ending.

    def _end_run(self, limit: Limit) -> None:
        """Before the close: ``run`` begins nothing more; wait for its handlers, up to the limit (*blocking*)."""
        if (owner := self._delivery.in_lanes.lanes.owner) is None:
            return
        owner.is_ending = True
        with self._driver.condition:
            while not (owner.is_over or limit.is_over or self._driver.is_over):
                self._driver.condition.wait(END_LOOK_S)

    def _freed(self) -> None:
        if self._transactions is not None:
            self._transactions.end()
        self._fetcher.close()
