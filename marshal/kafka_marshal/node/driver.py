"""The thin shell around the engine: one background thread, one lock.

The thread tails the coordination topic, applies what comes, tells the engine, and carries out what the engine wants.
Calls of user threads are carried out by threads of our own (``servants``), under the lock, which no user's thread
ever holds. Blocking look-ups and the user's callbacks run on threads of their own, too: neither may ever hold up a
heartbeat.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial
from math import inf
from typing import TypeVar

from kafka_marshal.client.serving import EndedError, Servants
from kafka_marshal.engine.effects import (
    Append,
    Call,
    Callback,
    Effect,
    Key,
    LookUp,
    Note,
    Piece,
    StartFetch,
    StopFetch,
    Warn,
)
from kafka_marshal.engine.engine import Engine
from kafka_marshal.engine.settings import EngineSettings
from kafka_marshal.errors import (
    AuthorizationError,
    ClosedError,
    ForkedError,
    KafkaUnavailableError,
    MarshalError,
    SnapshotDifferenceError,
    UpgradeRequiredError,
)
from kafka_marshal.guard import report
from kafka_marshal.logs import log
from kafka_marshal.node.append_failures import AppendFailures
from kafka_marshal.node.config import START_TIMEOUT_S
from kafka_marshal.node.coordination_topic import topic_option
from kafka_marshal.node.engine_lock import ConsumerPort, Hold, under_lock
from kafka_marshal.node.events import Events
from kafka_marshal.node.fork_guard import WATCHED
from kafka_marshal.node.pulse import Pulse
from kafka_marshal.node.replica import Applied, Begin, Replica
from kafka_marshal.node.start_offset import first_offset
from kafka_marshal.node.topic_rounds import TopicRounds
from kafka_marshal.node.topics import LOOKUP_TIMEOUT_S
from kafka_marshal.node.user_calls import UserCalls
from kafka_marshal.ports import Ack, Appender, Cluster, FaultKind, TailBatch
from kafka_marshal.repeats import Told
from kafka_marshal.runtime import Thread, is_ours
from kafka_marshal.snapshots.publisher import SnapshotKeeper
from kafka_marshal.snapshots.reader import SnapshotReader
from kafka_marshal.snapshots.start import Difference
from rationalizer import Heartbeat, HeartbeatBatch, Outcome, ReleaseGroup, encode

__all__ = ["ACK_WATCH_MS", "ConsumerPort", "Driver"]

T = TypeVar("T")

#: The longest the background thread waits for the log before it looks at the clock again: what another thread made due
#: meanwhile is late by this at most. With 100 leases a look costs a third of a millisecond, and beats come as often.
MAX_WAIT_MS = 1_000.0

#: How long a Marshal that ends waits for its background thread.
END_TIMEOUT_S = 2.0

#: While an acknowledgement is due, which is for so long after an append, it is looked for this often.
ACK_WATCH_MS = 50.0
ACK_WAIT_MS = 1.0

#: Beats of several CPs come back one by one within a few milliseconds: so long they are let gather, to be read at once.
#: Somebody who wants something meanwhile ends the wait.
BEATS_WAIT_S = 0.012

#: In a process of several members so many records are applied with the lock in hand: with ten, 500 kept it for 100 ms.
#: Who is alone keeps it for all 500. Giving way is a sleep, of a millisecond or more on a busy machine; after each 16
#: records it took most of the time, and a member fell behind 12,000 records a second.
AT_ONCE = 16

#: Look-ups side by side: one that waits for a leader must not hold up the others.
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
        self.runtime = runtime = cluster.runtime
        self.now_ms, self.monotonic = runtime.now_ms, runtime.monotonic
        self.forked = False
        #: Called at the interpreter's end, unless this driver has ended by then.
        self.at_exit: Callable[[], object] | None = None
        self.told = Told(runtime.now_ms)
        self.condition = runtime.condition()
        self._hold, self._hold_and_step = Hold(self, step=False), Hold(self, step=True)
        self.replica = Replica(
            cluster, topic, timeout_s, Begin.SNAPSHOT, self._snapshot_due if keep_snapshots else None
        )
        self._keep_snapshots = keep_snapshots
        self._keeper = self._new_keeper(self.replica.snapshots)
        self._keeper_running = False
        #: Snapshots that were found to differ from our replica (S2).
        self.alarms: list[SnapshotDifferenceError] = []
        if keep_snapshots and self._keeper is None:
            self._warn_of_no_snapshots()
        settings = make_settings(self.replica.info.partitions)
        self.engine = Engine(settings, self.replica.worlds, self.runtime.random())
        self.ports: dict[int, ConsumerPort] = {}
        #: Called, under the lock, with (CP, offset, outcome) for each record applied, after the engine was told.
        self.listeners: list[Applied] = []
        self._topic = topic
        self._started = self._ended = False
        self._stopped_cps: set[int] = set()
        self._appender: Appender = cluster.appender(topic, delivery_timeout_ms=settings.heartbeat_interval_ms)
        self._retired: list[Appender] = []
        self._replace_appender = False
        #: Appends whose acknowledgement has not come, and when the last one was handed over.
        self._unanswered, self._appended_at = 0, 0.0
        #: What was carried out last were beats of several CPs, and nothing else waits for an answer.
        self._beats_sent = False
        #: When the engine is asked again at the latest, acknowledgement or not.
        self._settle_by = 0.0
        self._lookups = runtime.executor(LOOKUP_THREADS, "kafka-marshal-lookup")
        self.callbacks = UserCalls(runtime)
        self.topics = TopicRounds(self, topic)
        self.pulse = Pulse(runtime, settings.client_id, settings.heartbeat_interval_ms)
        self.servants = servants
        servants.look = self.pulse.look
        self.failures = AppendFailures(topic, self.told)
        #: What happens, for people.
        self.events = Events(settings, self.now_ms())
        self._next_measure = 0.0
        self._thread: Thread | None = None
        try:
            WATCHED.add(self)
            self._thread = runtime.start(self._run, "kafka-marshal")
            self._await_start(timeout_s)
        except BaseException:  # Ctrl-C: nobody else will end what has begun
            self.shut_down()
            raise

    def _await_start(self, timeout_s: float) -> None:
        read = -1
        with self.condition:
            while not self._started and self.engine.failure is None:
                if not self.condition.wait(timeout_s) and self.replica.records_read == read:
                    self.engine.failure = KafkaUnavailableError(
                        f"the coordination topic {self._topic!r} was not read to its end: nothing came for "
                        f"{timeout_s:g} s from partition(s) {sorted(self.replica.behind)}. Nothing was claimed. "
                        "Are the brokers that lead them reachable?"
                    )
                read = self.replica.records_read
            failure = self.engine.failure
        if failure is not None:
            raise failure

    # The background thread.

    def _run(self) -> None:
        self.pulse.begin()
        try:
            while not self._ended:
                self._turn()
        except BaseException as error:  # noqa: BLE001 - this thread never ends without a word
            if not self._ended:  # else: the tail was closed under us, as shut_down does
                self.fail(self.pulse.ended_by(error))

    def _turn(self) -> None:
        self.servants.undo_lost()
        self.events.tell()
        if self._beats_sent:
            self._let_beats_gather()
        batch = self.replica.read(self.pulse.turned(self._wait_s()))
        whole = batch
        is_alone = self.runtime.whole_batches and len(WATCHED) == 1
        *others, batch = batch.slices(AT_ONCE) if self._started and not is_alone else (batch,)
        for some in others:
            with self.condition:
                if self._ended:
                    return
                self.replica.apply(some, self._applied)
                self.engine.compare_clocks(self.now_ms())
            self.runtime.give_way()
        with self.condition:
            if self._ended:
                return
            self._note_answer(whole)
            was_started, unanswered = self._started, self._unanswered
            self.replica.apply(batch, self._applied if was_started else None)
            if not was_started and self.replica.caught_up:
                self._caught_up()
            self._appender.poll()
            is_news = bool(batch.records or batch.faults) or unanswered != self._unanswered
            if was_started and not is_news and self.now_ms() < self._settle_by:
                return  # an acknowledgement was looked for, and is not there yet; or the log ends where it ended
            self.drain()
            self._periodic()
            self.settle()

    def _note_answer(self, batch: TailBatch) -> None:
        now = self.now_ms()
        if batch.records or batch.ends:
            self.events.heard(now)
        for fault in batch.faults:
            if fault.kind is FaultKind.UNREACHABLE:
                self.events.trouble(fault.message, now)

    def _let_beats_gather(self) -> None:
        with self.condition:
            self._beats_sent = False
            self.condition.wait(BEATS_WAIT_S)

    def _caught_up(self) -> None:
        self._started = True
        self._report_differences(self.replica.differences)
        self.engine.caught_up(self.now_ms())

    def _applied(self, cp: int, offset: int, outcome: Outcome) -> None:
        now = self.now_ms()
        self.engine.applied(cp, offset, outcome, now)
        if outcome.type == ReleaseGroup.__name__:
            self._note_pause(now)
        for listener in self.listeners:
            listener(cp, offset, outcome)

    def _note_pause(self, now: float) -> None:
        """Who has paused the group, if anybody. (By our clock: without traffic, log time stands still.)"""
        group_id, observer = self.engine.settings.group_id, self.engine.observer
        paused = [world.pause(group_id) for cp, world in self.replica.worlds.items() if observer.paused_until(cp, now)]
        last = max(filter(None, paused), key=lambda pause: pause.expires, default=None)
        self.events.pause(last.client_id if last else "", last.expires if last else None)

    def _wait_s(self) -> float:
        now = self.now_ms()
        with self.condition:
            # A grant counts once the acknowledgement of its own sending is there, and nothing wakes us for that.
            soon = self._unanswered > 0 and now - self._appended_at < ACK_WATCH_MS
            if not soon or now >= self._settle_by:
                deadline = self.engine.deadline(now) if self._started else inf
                self._settle_by = min(deadline, now + MAX_WAIT_MS)
            return max(0.0, min(ACK_WAIT_MS if soon else inf, self._settle_by - now)) / 1000

    def _periodic(self) -> None:
        now = self.now_ms()
        self.events.look(now)
        for cp, level in self.replica.stopped():
            if cp not in self._stopped_cps:
                self._stopped_cps.add(cp)
                self._report_upgrade(cp, level)
        if self._replace_appender:
            self._replace_appender = False
            self._retired.append(self._appender)
            self._appender = self.cluster.appender(
                self._topic, delivery_timeout_ms=self.engine.settings.heartbeat_interval_ms
            )
        if self._started and self.topics.is_due(now):
            self._lookups.submit(self.topics.look)
        if self._keeper is not None and not self._keeper_running and now >= self._keeper.due_at() and self._started:
            self._keeper_running = True
            self._lookups.submit(self._look_after_snapshots, self._keeper)
        if now >= self._next_measure:
            self._next_measure = now + self.engine.settings.heartbeat_interval_ms
            self._measure(now)
            self._note_pause(now)
            for port in list(self.ports.values()):
                port._reclaim(now - self.engine.settings.heartbeat_interval_ms)

    def _report_upgrade(self, cp: int, level: int) -> None:
        error = self._upgrade_error(cp, level)
        log(logging.ERROR, "upgrade_required", "%s", error, log_partition=cp, level=level)
        for consumer in self.engine.consumers.values():
            consumer.errors.append(error)

    def _upgrade_error(self, cp: int, level: int) -> UpgradeRequiredError:
        return UpgradeRequiredError(
            f"partition {cp} of {self._topic!r} was raised to protocol level {level}, which this release of "
            "kafka-marshal does not know: leases in it end, the other partitions go on. Install a release that "
            "supports it",
            level=level,
        )

    def upgrades_told(self) -> list[UpgradeRequiredError]:
        """What a consumer that comes now has missed: CPs that were raised above our level (E4); the lock is held."""
        return [self._upgrade_error(cp, level) for cp, level in self.replica.stopped() if cp in self._stopped_cps]

    def check_level(self, cp: int) -> None:
        """Raise UpgradeRequiredError where nothing more can be known of this CP (E4); the lock is held."""
        level = self.replica.worlds[cp].required_level
        if level is not None:
            raise self._upgrade_error(cp, level)

    # Snapshots (S2).

    def _warn_of_no_snapshots(self) -> None:
        log(
            logging.WARNING,
            "snapshots_missing",
            "%s: members start from the beginning of the log, which takes longer as it grows, and do not compare what "
            "they hold. kafka-marshal init%s makes it, and says what is wrong with one that is there",
            self.replica.lacks_snapshots,
            topic_option(self.replica.topic),
        )

    def _new_keeper(self, reader: SnapshotReader | None) -> SnapshotKeeper | None:
        if reader is None or not self._keep_snapshots:
            return None
        return SnapshotKeeper(self.cluster, reader, self.replica.snapshots_topic, self.runtime.random(), self.now_ms())

    def _snapshot_due(self, cp: int, next_offset: int, state: bytes) -> None:
        if self._keeper is not None:
            self._keeper.note(cp, next_offset, state, self.now_ms())

    def _look_after_snapshots(self, keeper: SnapshotKeeper) -> None:
        """On a look-up thread."""
        try:
            found = keeper.work(self.now_ms())
            with self.condition:
                if found and not self._ended:
                    self._report_differences(found)
                    self.condition.notify_all()
        except Exception as error:  # noqa: BLE001 - logged with its traceback
            # A fault of ours. Work goes on without snapshots, as it does where there is no topic for them.
            text = "no more snapshots are taken by this process, nor compared"
            log(logging.ERROR, "snapshots_failed", text, error=error)
            self._keeper = None
        finally:
            self._keeper_running = False

    def _report_differences(self, found: Iterable[Difference]) -> None:
        for difference in found:
            if self._keeper is not None and not self._keeper.is_news(difference):
                continue
            error = difference.error(self._topic, self.replica.snapshots_topic)
            log(logging.ERROR, "snapshot_differs", "%s", error)
            self.alarms.append(error)
            for consumer in self.engine.consumers.values():
                consumer.errors.append(error)

    def find_snapshots(self) -> None:
        """The topic may have been made since (on a look-up thread)."""
        if self._keep_snapshots and self._keeper is None and self.replica.snapshots is None:
            try:
                reader = SnapshotReader.find(self.cluster, self.replica.snapshots_topic, LOOKUP_TIMEOUT_S)
            except MarshalError as error:  # was said at start; work goes on without
                log(logging.DEBUG, "snapshots_missing", "no snapshots: %s", error)
                return
            if reader is not None and len(reader.shelves) == len(self.replica.worlds):
                self.replica.snapshots = reader
                self._keeper = self._new_keeper(reader)

    def _measure(self, now: float) -> None:
        for number, consumer in self.engine.consumers.items():
            for key, assignment in consumer.assignments.items():
                end = self.ports[number]._log_end(key)
                if end is not None and not assignment.over:
                    consumer.log_ends(key, end, now)
            consumer.positions.stuck.look(now, self.ports[number]._drained_at)

    def fail(self, error: Exception) -> None:
        """End for good: every lease is over."""
        with self.condition:
            if self.engine.failure is None:
                self.engine.fail(error, self.now_ms())
            self._carry_out(self.engine.take_effects())
            self.condition.notify_all()

    # User threads.

    def call(self, function: Callable[..., T], *args: object) -> T:
        """Have ``function(*args)`` carried out by a thread of ours; it takes the lock itself, if it needs it.

        Directly where that is the one way: under the lock already, or where this driver has ended.
        """
        self.refuse_fork()
        if under_lock.get() or is_ours.get() or self._ended:
            return function(*args)
        try:
            return self.servants.ask(lambda _: function(*args)).wait()
        except EndedError:
            if not self.is_over:
                raise
            return function(*args)

    def post(self, function: Callable[[], object]) -> None:
        """Have function called by a thread of ours, soon."""
        if not self._ended and not self.forked:
            self.servants.post(function)

    # Under the lock.

    @property
    def is_over(self) -> bool:
        """Whether this driver has ended."""
        return self._ended

    def drain(self) -> None:
        """Tell the engine what user threads have said since; the lock is held."""
        for port in list(self.ports.values()):
            port._drain()

    def mark_forked(self) -> None:
        """In a forked child: what the parent had fetched, and its leases, are the parent's alone."""
        self.forked = True
        for lease in self.engine.book.leases.values():
            lease.valid_until = 0.0
            lease.refresh()

    def refuse_fork(self) -> None:
        """Raise ForkedError in a forked child: its copy of the lock may be held for ever."""
        if self.forked:
            raise ForkedError(
                "this Marshal was made in the parent process and can't be used after a fork: its leases belong to the "
                "parent. Make a Marshal of its own in the child"
            )

    def locked(self, *, step: bool = True) -> Hold:
        """Use the engine; on leaving, what it wants done is carried out.

        With step=False what is due by time is left to the background thread: for handing out and looking, which are
        frequent.
        """
        return self._hold_and_step if step else self._hold

    def empty_outbox(self) -> None:
        """Carry out what the engine wants done, if anything; the lock is held."""
        if self.engine.outbox.effects:
            self._carry_out(self.engine.take_effects())
            self.condition.notify_all()

    def settle(self) -> None:
        """Let the engine do what is due, and carry it out; the lock is held."""
        if self._started and not self._ended:
            self.engine.step(self.now_ms())
        self._carry_out(self.engine.take_effects())
        self.condition.notify_all()

    def check(self) -> None:
        """Raise why this driver can't go on, if it can't; the lock is held."""
        if self._ended:
            raise ClosedError("this Marshal is closed; make a new one")
        if self.engine.failure is not None:
            raise self.engine.failure

    def wait_for(self, predicate: Callable[[], T], timeout_s: float | None) -> T:
        """Wait under the lock until predicate() is true, this driver fails or the time is up; its last value."""
        self.condition.wait_for(lambda: predicate() or self.engine.failure is not None or self._ended, timeout_s)
        return predicate()

    def _carry_out(self, effects: list[Effect]) -> None:
        # Partitions move in groups: what the consumer's reader and the user are told is told once for all of them.
        fetching: dict[int, dict[Key, int | None]] = {}
        calls: list[tuple[int, Callback, list[Piece]]] = []
        self._beats_sent = self._unanswered == 0 and len(effects) > 1 and all(map(_is_beat, effects))
        for effect in effects:
            match effect:
                case Append(cp=cp, record=record, token=token):
                    self._unanswered += 1
                    self._appended_at = self.now_ms()
                    self._appender.append(cp, encode(record), partial(self._acked, token))
                case StartFetch(consumer=number, key=key, offset=offset):
                    fetching.setdefault(number, {})[key] = offset
                case StopFetch(consumer=number, key=key):
                    fetching.setdefault(number, {})[key] = None
                case LookUp():
                    self._lookups.submit(self._look_up, effect)
                case Call(consumer=number, callback=callback, pieces=pieces):
                    if not calls or calls[-1][:2] != (number, callback):
                        calls.append((number, callback, []))
                    calls[-1][2].extend(pieces)
                case Note():
                    self.events.note(effect, self.now_ms())
                case Warn(message=message, is_error=is_error):
                    self.told.say(logging.ERROR if is_error else logging.WARNING, "warning", message, message)
        for number, changes in fetching.items():
            if (port := self.ports.get(number)) is not None:
                port._fetch(changes)
        for number, callback, called in calls:
            self.callbacks.submit(self._call, self.ports.get(number), Call(number, callback, tuple(called)))

    def _acked(self, token: int, ack: Ack) -> None:
        self.failures.hear(ack.error, now := self.now_ms())
        self._replace_appender = self._replace_appender or ack.fatal
        if ack.forbidden:
            self.fail(
                AuthorizationError(
                    f"appending to {self._topic!r} is forbidden: {ack.error}. Without it no lease can be claimed or "
                    "kept; those of this process end. Ask for an ACL that allows WRITE on the topic"
                )
            )
        with self.condition:
            self._unanswered -= 1
            if ack.error is None:
                self.events.heard(now)
            else:
                self.events.trouble(ack.error, now)
            self.engine.acked(token, ack.offset, self.now_ms())

    # On the look-up and callback threads.

    def _look_up(self, wanted: LookUp) -> None:
        key = wanted.key
        while not self._ended and self.engine.is_asked(wanted):
            try:
                marks = self.cluster.watermarks([key], LOOKUP_TIMEOUT_S)
                if key in marks:
                    log_time = max(world.log_time for world in self.replica.worlds.values())
                    first = first_offset(self.cluster, self._topic, log_time, wanted, marks[key], LOOKUP_TIMEOUT_S)
                    with self.locked():
                        self.engine.located(wanted, *marks[key], first, self.now_ms())
                    return
                self.told.warn("no_leader", key, f"{key[0]} [{key[1]}]: has no leader at the moment; asking again")
            except MarshalError as error:
                text = f"{key[0]} [{key[1]}]: log start and end not found, asking again: {error}"
                self.told.warn("look_up_failed", key, text)
            with self.condition:
                self.condition.wait(0.2)

    def _call(self, port: ConsumerPort | None, call: Call) -> None:
        try:
            if port is not None:
                port._call(call)
        except BaseException as error:  # noqa: BLE001 - the user's, on a thread of ours
            report(str(call.callback), error)
        finally:
            with self.condition:
                self.engine.called(call, self.now_ms())
                self.settle()

    # The end.

    def flush(self, timeout_s: float) -> None:
        """Wait until what was appended is acknowledged (*blocking*)."""
        self._appender.flush(timeout_s)

    def shut_down(self) -> None:
        """End the thread and free everything (*blocking*, briefly)."""
        with self.condition:
            self._ended = True
            self.condition.notify_all()
            self.events.gather()
        self.events.tell()
        self.replica.close()
        if self._thread is not None and not self.runtime.is_current(self._thread):
            self._thread.join(END_TIMEOUT_S)
        self._lookups.shutdown(wait=False, cancel_futures=True)
        self.callbacks.shutdown(wait=False)
        self.servants.end()
        for appender in (*self._retired, self._appender):
            appender.close()
        self.cluster.close()
        WATCHED.discard(self)


def _is_beat(effect: Effect) -> bool:
    return isinstance(effect, Append) and isinstance(effect.record, Heartbeat | HeartbeatBatch)
