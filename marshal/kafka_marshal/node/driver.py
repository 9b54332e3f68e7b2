"""The thin shell around the engine: one background thread, one lock.

The thread tails the coordination topic, applies the records, passes them to the engine, and carries out what the engine
wants. Threads of the library (``servants``) carry out calls of user threads, under the lock, which no user thread ever
holds. Blocking look-ups and the user's callbacks run on separate threads: neither may hold up a heartbeat.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from itertools import count
from random import Random
from typing import TYPE_CHECKING

from kafka_marshal.engine.engine import Engine
from kafka_marshal.engine.settings import EngineSettings
from kafka_marshal.errors import ConfigurationError, KafkaUnavailableError
from kafka_marshal.instance import release
from kafka_marshal.logs import RateLimitedLog, log
from kafka_marshal.node.config import START_TIMEOUT_S
from kafka_marshal.node.effects import Effects
from kafka_marshal.node.engine_lock import EngineLock, Shared, under_lock
from kafka_marshal.node.events import Events
from kafka_marshal.node.jobs import LogGuard, Scope, SnapshotUpkeep, TopicRounds
from kafka_marshal.node.life import WATCHED, Life, Pulse
from kafka_marshal.node.log_keeper import LogKeeper
from kafka_marshal.node.pacing import Pacing, Steps
from kafka_marshal.node.replica import Begin, Listener, Replica
from kafka_marshal.node.serving import EndedError, Servants
from kafka_marshal.node.upkeep import Upkeep
from kafka_marshal.ports import Cluster, FaultKind, TailBatch
from kafka_marshal.runtime import Condition, Thread, is_ours
from kafka_marshal.types import T
from rationalizer import Outcome, ReleaseGroup
from rationalizer.log_hash import LogHash

if TYPE_CHECKING:
    from kafka_marshal.engine.recording import EngineRecorder


#: How long a Marshal that ends waits for its background thread (s).
END_TIMEOUT_S = 2.0

#: Records applied per lock acquisition in a process of several members: with ten members, 500 kept the lock for 100 ms.
#: A single member keeps it for all 500. Yielding is a sleep of a millisecond or more on a busy machine. After every 16
#: records it took most of the time, and a member fell behind at 12,000 records a second.
AT_ONCE = 16

#: How many look-ups run at a time: one that waits for a leader must not delay the others.
LOOKUP_THREADS = 4


class Driver:
    """Runs one engine against one cluster."""

    def __init__(
        self,
        cluster: Cluster,
        topic: str,
        make_settings: Callable[[int], EngineSettings],
        *,
        servants: Servants,
        keep_snapshots: bool = False,
        timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        """Open the replica, start the thread, wait until the world is known (*blocking*).

        servants: have begun, and end with this driver.
        keep_snapshots: take snapshots of the replica, and compare it with those of others (S2).
        timeout_s: how long the start waits for Kafka; progress restarts the wait.
        """
        self.cluster = cluster
        runtime = cluster.runtime
        self.now_ms: Callable[[], float] = runtime.now_ms
        self.monotonic: Callable[[], float] = runtime.monotonic
        self.condition: Condition = runtime.condition()
        self.life: Life = Life(runtime)
        replica = Replica(cluster, topic, timeout_s, Begin.SNAPSHOT, self._snapshot_due if keep_snapshots else None)
        self.replica: Replica = replica
        snapshots = SnapshotUpkeep(
            cluster,
            replica,
            self.condition,
            self.life,
            lambda error: self.lock.raise_in_consumers(error),
            keep=keep_snapshots,
        )
        settings = make_settings(replica.info.partitions)
        rng = runtime.random()
        self.engine: Engine = Engine(settings, replica.worlds, rng)
        recorder = record(self.engine, rng)
        if recorder is not None:
            replica.on_record = recorder.record
        replica.tail.monitor.be_patient(settings.heartbeat_interval_ms)
        engine, now_ms = self.engine, self.now_ms  # not self: a life outlasts its driver
        self.life.on_fork = lambda: engine.take(None, engine.forked, now_ms())
        lock = EngineLock(self.condition, self.life, self.engine, self.now_ms)
        self.lock: EngineLock = lock
        self.pacing: Pacing = Pacing(lock, self.now_ms, Steps(runtime, lock, lambda: replica.tail.monitor.is_owed))
        rate_limited, events = RateLimitedLog(self.now_ms), Events(settings, self.now_ms())
        rate_limited.is_outage = lambda: events.is_silent(self.now_ms())
        shared = Shared(cluster, replica, lock, events, rate_limited)
        lookups = runtime.executor(LOOKUP_THREADS, "kafka-marshal-lookup")
        self.effects: Effects = Effects(shared, self.pacing, lookups)
        lock.carry_out = self.effects.carry_out
        topics = TopicRounds(shared, snapshots.find, timeout_s)
        scope = Scope(shared, snapshots, timeout_s)
        guard = LogGuard(shared, keep=keep_snapshots)
        keeper = LogKeeper(shared, guard)
        self.upkeep: Upkeep = Upkeep(shared, self.effects.appends, topics, snapshots, scope, guard, keeper, lookups)
        #: Called, under the lock, with (CP, offset, outcome) for each record applied, after the engine took it.
        self.listeners: list[Listener] = [self.upkeep.tally.applied]
        self.pulse: Pulse = Pulse(runtime, settings.client_id, settings.heartbeat_interval_ms)
        self.servants = servants
        servants.check_pulse = self.pulse.check
        self._thread: Thread | None = None
        try:
            WATCHED.add(self.life)
            self._thread = runtime.start(self._run, "kafka-marshal")
            self._await_start(topic, timeout_s)
        except BaseException:  # Ctrl-C: nothing else will end what has begun
            self.shut_down()
            raise

    def _snapshot_due(self, cp: int, next_offset: int, state: bytes, log_hash: LogHash | None) -> None:
        self.upkeep.snapshots.note(cp, next_offset, state, log_hash)

    def _await_start(self, topic: str, timeout_s: float) -> None:
        read = -1
        with self.condition:
            while not self.lock.started and self.engine.failure is None:
                if not self.condition.wait(timeout_s) and self.replica.records_read == read:
                    error = KafkaUnavailableError(
                        f"the coordination topic {topic!r} was not read to its end: nothing came for "
                        f"{timeout_s:g} s from partition(s) {sorted(self.replica.behind)}. Nothing was claimed. "
                        "Are the brokers that lead them reachable?"
                    )
                    self.engine.take(None, self.engine.fail, error, self.now_ms())
                read = self.replica.records_read
            failure = self.engine.failure
        if failure is not None:
            raise failure

    # The background thread.

    def _run(self) -> None:
        self.pulse.begin()
        try:
            while not self.life.ended:
                self._turn()
        except BaseException as error:  # noqa: BLE001 - this thread never ends without a word
            if not self.life.ended:  # else: the tail was closed under us, as shut_down does
                self.lock.fail(self.pulse.ended_by(error))

    def _turn(self) -> None:
        self.servants.undo_lost()
        self.effects.events.write()
        if self.pacing.beats_sent:
            self.pacing.let_beats_gather()
        whole = batch = self._read(self.pulse.turned(self.pacing.wait_s()))
        is_alone = self.cluster.runtime.whole_batches and len(WATCHED) == 1
        *others, batch = batch.slices(AT_ONCE) if self.lock.started and not is_alone else (batch,)
        for some in others:
            with self.condition:
                if self.life.ended:
                    return
                self.replica.apply(some, self._applied)
                self.engine.take(None, self.engine.leases.compare_clocks, self.now_ms())
            self.cluster.runtime.give_way()
        with self.condition:
            if self.life.ended:
                return
            self._note_answer(whole)
            was_started, unanswered = self.lock.started, self.pacing.unanswered
            self.replica.apply(batch, self._applied if was_started else None)
            if not was_started and self.replica.caught_up:
                self._caught_up()
            self.effects.appends.poll()
            is_news = bool(batch.records or batch.faults) or unanswered != self.pacing.unanswered
            if was_started and not is_news and not self.pacing.is_due():
                return  # an acknowledgement is not there yet, or the log has not grown
            self.lock.drain()
            self.upkeep.check(self.now_ms())
            self.effects.check(self.now_ms())
            self.lock.settle()

    def _read(self, wait_s: float) -> TailBatch:
        """What came; nothing if it has to turn before the next step begins."""
        steps = self.pacing.steps
        if steps.begin_rest(wait_s, self.pacing.due_at) and self.replica.tail.rest():
            if not steps.wait():
                return TailBatch()
            wait_s = self.pacing.wait_s()
        batch = self.replica.read(wait_s)
        if steps.read(batch):
            self.replica.tail.rest()  # now: soon the next fetch is on its way
        return batch

    def _note_answer(self, batch: TailBatch) -> None:
        now, events = self.now_ms(), self.effects.events
        if batch.records or batch.ends:
            events.heard(now)
        for fault in batch.faults:
            if fault.kind is FaultKind.UNREACHABLE:
                events.trouble(fault.message, now)

    def _caught_up(self) -> None:
        self.lock.started = True
        self.upkeep.snapshots.report(self.replica.differences)
        self.engine.take(None, self.engine.caught_up, self.now_ms())

    def _applied(self, cp: int, offset: int, outcome: Outcome) -> None:
        now = self.now_ms()
        self.engine.take(None, self.engine.applied, cp, offset, outcome, now)
        self.pacing.steps.heard(outcome)
        if outcome.is_a(ReleaseGroup):
            self.upkeep.note_pause(now)
        for listener in self.listeners:
            listener(cp, offset, outcome)

    # User threads.

    def call(self, function: Callable[..., T], *args: object) -> T:
        """Have ``function(*args)`` carried out by a thread of the library; it takes the lock itself, if it needs it.

        Called directly if the lock is held already, or if this driver has ended.
        """
        self.life.refuse_fork()
        if under_lock.get() or is_ours.get() or self.life.ended:
            return function(*args)
        try:
            return self.servants.ask(lambda _: function(*args)).wait()
        except EndedError:
            if not self.is_over:
                raise
            return function(*args)

    def post(self, function: Callable[[], object]) -> None:
        """Have a thread of the library call function soon."""
        if not self.is_over and not self.life.forked:
            self.servants.post(function)

    @property
    def is_over(self) -> bool:
        """Whether this driver has ended."""
        return self.life.ended

    def wait_for(self, predicate: Callable[[], T], timeout_s: float | None) -> T:
        """Wait under the lock until predicate() is true, this driver fails or the time is up; its last value.

        Meanwhile the log is read at once.
        """
        with self.pacing.steps.waiting():
            return self.lock.wait_for(predicate, timeout_s)

    def say(self, event: str, text: str, **fields: object) -> None:
        """Log an event of this member at INFO, after earlier ones (any thread)."""
        with self.condition:
            self.effects.events.say(event, text, **fields)

    # The end.

    def flush(self, timeout_s: float) -> None:
        """Wait until what was appended is acknowledged (*blocking*)."""
        self.effects.appends.flush(timeout_s)

    def shut_down(self) -> None:
        """End the thread and free everything (*blocking*, briefly)."""
        events = self.effects.events
        with self.condition:
            self.life.ended = True
            self.life.at_exit = None  # it refers to the driver
            self.pacing.steps.ring()
            self.condition.notify_all()
            events.gather()
        events.write()
        self.replica.close()
        if self._thread is not None and not self.cluster.runtime.is_current(self._thread):
            self._thread.join(END_TIMEOUT_S)
        self.effects.end()
        self.servants.end()
        self.effects.appends.close()
        self.cluster.close()
        WATCHED.discard(self.life)


#: KAFKA_MARSHAL_RECORD=file: the run of this process's engine, written down for a replay (HACKING.md).
RECORD = "KAFKA_MARSHAL_RECORD"

#: Lines are handed to the system when they make this many bytes, and at each step of the engine: what a kill -9 takes
#: is the last few milliseconds.
FLUSH_AT = 64 * 1024


class RecordFile:
    """One file; it is not there before, and only its owner may read it."""

    def __init__(self, path: str) -> None:
        self.path: str
        self._file, self.path = _opened(path)
        self._lines: list[bytes] = []
        self._bytes = 0
        #: Called once if it can't be written.
        self.failed: Callable[[Exception], object] = lambda error: None

    def write(self, line: str) -> None:
        """Append a line; the engine's lock is held."""
        data = line.encode()
        self._lines.append(data)
        self._bytes += len(data)
        if self._bytes >= FLUSH_AT or '"step"' in line:
            self.flush()

    def flush(self) -> None:
        """Hand over to the system what is written so far."""
        data, self._lines, self._bytes = b"".join(self._lines), [], 0
        try:
            while data:
                data = data[os.write(self._file, data) :]
        except OSError as error:
            self.failed(error)


def _opened(path: str) -> tuple[int, str]:
    """A new file of this name, or with a number behind it: several Marshals may begin at once."""
    for number in count(1):
        name = path if number == 1 else f"{path}.{number}"
        try:
            return os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), name
        except FileExistsError:
            continue
        except OSError as error:
            raise ConfigurationError(
                f"{RECORD}={path}: this file can't be written: {error.strerror}. Nothing was started. Name one that "
                "can, or unset it"
            ) from error
    raise AssertionError("there is always another number")


def record(engine: Engine, rng: Random) -> EngineRecorder | None:
    """Write down this engine's run, if the environment says where; None: it does not."""
    if not (path := os.environ.get(RECORD)):
        return None
    from kafka_marshal.engine.recording import EngineRecorder  # not for a worker that records nothing

    file = RecordFile(path)

    def failed(error: Exception) -> None:
        engine.recorder = None
        text = "%s can't be written any more, and the recording ends here; the worker continues: %s"
        log(logging.ERROR, "recording_ended", text, file.path, error)

    file.failed = failed
    recorder = EngineRecorder(engine, rng, file.write, failed, release())
    log(
        logging.WARNING,
        "recording",
        "this process writes down what its engine does, to %s (%s is set): it is slower, and the file grows without "
        "limit. It holds names, offsets and coordination records, and no key, value or header of a message",
        file.path,
        RECORD,
    )
    return recorder
