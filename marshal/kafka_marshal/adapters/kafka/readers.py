"""What reads from Kafka: the tail of the coordination topic, and the reader of the user's messages.

Both need of a librdkafka consumer: fast reads, commands that never wait, a close that is safe (:class:`Reading`).

``consume(n, timeout)`` waits until it has n messages *or* the timeout is over. Asking it for many would hold back the
first one; asking it for one at a time is slow. Hence :meth:`Reading.read`: first take what is there, and only if
nothing is there wait for one message and take what came with it.

confluent-kafka lets only one thread at a time into a consumer, and a thread that waits in ``poll`` keeps the others
out. So only the reading thread calls it while it reads: another thread leaves a command, which the reading thread
carries out within a slice. If no thread reads, the command is carried out at once.
"""

from __future__ import annotations

import contextlib
import math
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from confluent_kafka import TIMESTAMP_LOG_APPEND_TIME, Consumer, KafkaError, KafkaException
from confluent_kafka import Message as KafkaMessage
from confluent_kafka import TopicPartition as KafkaPartition

from kafka_marshal.adapters.kafka.errors import (
    LOGGER,
    DebugLines,
    Troubles,
    configuration_error,
    fault_kind,
    is_of_groups,
    marshal_error,
)
from kafka_marshal.errors import ClosedError
from kafka_marshal.ports import DataFault, FaultKind, LogEntry, Message, TailBatch, TailFault, TopicPartition


@dataclass(frozen=True, slots=True)
class PollPace:
    """How often a wait checks for commands, for a close() from another thread, and for errors passed to callbacks."""

    slice_s: float
    #: If nothing has come for this long, a wait checks less often, as each check costs some 50 microseconds: ever
    #: longer waits, each with the time (s) after which it begins.
    quiet: tuple[tuple[float, float], ...] = ()

    def wait_s(self, quiet_for_s: float) -> float:
        """How long one wait may last if nothing has come for this long."""
        return next((wait_s for after_s, wait_s in reversed(self.quiet) if quiet_for_s > after_s), self.slice_s)


#: The longest wait that wakes a thread once: confluent-kafka cuts longer ones into pieces of this, to look for Ctrl-C.
LONGEST_WAIT_S = 0.2

#: 200 checks a second cost two thirds of a percent of a core, 40 a fifth of that; a command then waits for up to 25 ms,
#: and in a member all of whose partitions have been silent for long, for up to 200 ms.
STEERED = PollPace(0.005, ((1.0, 0.025), (5.0, 0.1), (15.0, LONGEST_WAIT_S)))

#: How long one look-up of a topic may hold up the readers if no broker answers.
WARM_UP_TIMEOUT_S = 0.25

#: With nothing to read, a wait ends when a command comes; librdkafka's callbacks are served this often.
STANDBY_S = 0.1

#: librdkafka takes milliseconds to end a client, or for ever (its issues 4514 and 5476): then it is left behind.
END_TIMEOUT_S = 5.0

#: librdkafka counts in whole milliseconds: a shorter wait is no wait, and waiting in such steps would be a busy loop.
SHORTEST_WAIT_S = 0.001


#: Messages taken, and what carries out the commands that are waiting.
Settle = Callable[[list[KafkaMessage], Callable[[], None]], list[KafkaMessage]]


class Reading:
    """A librdkafka consumer with one reading thread, and any number of others that enqueue commands."""

    def __init__(
        self,
        name: str,
        settings: dict[str, object],
        troubles: Troubles,
        pace: PollPace = STEERED,
    ) -> None:
        """Open the consumer (nothing is sent yet). name says in errors what this reads."""
        self.name = name
        self._pace = pace
        self.troubles = troubles
        self._turn = threading.Lock()
        self._commands: deque[Callable[[], None]] = deque()
        self._closing = False
        self._end: threading.Thread | None = None
        #: Rung for a reading thread that waits with nothing to read.
        self._bell = threading.Event()
        #: Whether there is anything to read; where not, the consumer need not be asked.
        self.is_assigned: Callable[[], bool] = lambda: True
        #: Whether a command may come any moment: then each wait is as short as can be.
        self.is_hurried: Callable[[], bool] = lambda: False
        #: Messages taken before that come first.
        self.kept: list[KafkaMessage] = []
        self._quiet_since = time.monotonic()
        #: What may block for a moment and so is left to the reading thread: called after commands, before it waits.
        self.before_wait: Callable[[], None] | None = None
        try:
            self.consumer: Consumer = Consumer(settings)
        except (KafkaException, ValueError, TypeError) as error:
            raise configuration_error(error) from error

    def check_open(self) -> None:
        """Raise ClosedError once close() was called."""
        if self._closing:
            raise ClosedError(f"The {self.name} was closed; nothing more is read from it. Open a new one.")

    def enqueue_command(self, command: Callable[[], None]) -> None:
        """Have command called with the consumer free: now, or by the reading thread within a slice. Never waits."""
        self.check_open()
        self._commands.append(command)
        self._bell.set()
        self._serve_if_free()

    def warm_up(self, look: Callable[[], object]) -> None:
        """Have look() make the consumer connect and learn leaders, in a separate thread.

        No other thread uses the consumer before it is done: reads, commands and a close wait for it.
        """
        self._turn.acquire()
        threading.Thread(target=self._warm_up, args=(look,), daemon=True).start()

    def _warm_up(self, look: Callable[[], object]) -> None:
        try:
            look()
        finally:
            self._turn.release()
        self._serve_if_free()

    def use(self, work: Callable[[], object]) -> None:
        """Call work with the consumer free (*blocking*: a look-up or a read has to end first)."""
        self.check_open()
        with self._turn:
            work()

    def _serve_if_free(self) -> None:
        while self._commands and self._turn.acquire(blocking=False):
            try:
                self._serve()
            finally:
                self._turn.release()

    def _serve(self) -> None:
        while self._commands:
            command = self._commands.popleft()
            if not self._closing:
                command()

    def read(self, limit: int, timeout_s: float, settle: Settle | None = None) -> list[KafkaMessage]:
        """Up to limit messages, error messages among them; waits up to timeout_s for the first.

        Returns early and empty when librdkafka passes an error to a callback.

        settle: carries out commands that came in while messages were taken, and returns the messages that still
        belong to the assignment.
        """
        with self._turn:
            messages = self._read(limit, timeout_s)
            if messages and settle is not None:
                messages = settle(messages, self._serve)
            if self.kept:
                messages = [*self.kept, *messages]
                messages, self.kept = messages[:limit], messages[limit:]
        self._serve_if_free()
        return messages

    def _read(self, limit: int, timeout_s: float) -> list[KafkaMessage]:
        deadline = time.monotonic() + timeout_s
        self._prepare()
        messages = [] if self.kept else self.consumer.consume(limit, 0)
        while (
            not (messages or self.kept) and (remaining := deadline - time.monotonic()) > 0 and not self.troubles.pending
        ):
            first = self._wait(remaining)
            if first is not None:
                messages = [first, *self.consumer.consume(limit - 1, 0)] if limit > 1 else [first]
            else:
                self._prepare()
        if messages:
            self._quiet_since = time.monotonic()
        return messages

    def _wait(self, remaining_s: float) -> KafkaMessage | None:
        """Wait for one message, until it is time to look up."""
        if not self.is_assigned():
            self._bell.wait(min(STANDBY_S, remaining_s))
            return self.consumer.poll(0)
        quiet_s = time.monotonic() - self._quiet_since
        slice_s = SHORTEST_WAIT_S if self.is_hurried() else self._pace.wait_s(quiet_s)
        # Rounded up: else the fraction of a millisecond that librdkafka leaves out would be one more wait.
        return self.consumer.poll(math.ceil(min(slice_s, remaining_s) / SHORTEST_WAIT_S) * SHORTEST_WAIT_S)

    def _prepare(self) -> None:
        """Between two waits: end if closed, carry out commands, and what they left to be done."""
        self.check_open()
        if self._bell.is_set():
            self._bell.clear()
        self._serve()
        if self.before_wait is not None:
            self.before_wait()

    def close(self) -> None:
        """Free the consumer; waits for a read in another thread to leave (at most a slice). Idempotent.

        By another thread: one that waits for librdkafka sees no signal, and may do so for ever.
        """
        self._closing = True
        self._bell.set()
        with self._turn:
            if self._end is not None:
                return
            self._end = threading.Thread(target=self.consumer.close, name=f"end of a {self.name}", daemon=True)
            try:
                self._end.start()
            except RuntimeError:  # the interpreter ends, or the limit of threads: this one will do
                self.consumer.close()
                return
            self._end.join(END_TIMEOUT_S)
        if self._end.is_alive():
            LOGGER.error(
                "the %s has not ended %g s after its close: librdkafka hangs (its issues 4514 and 5476), with a "
                "connection and some threads. Nothing is lost or repeated; they end with the process, which continues",
                self.name,
                END_TIMEOUT_S,
            )


def partition_of(message: KafkaMessage) -> int | None:
    """The partition that an error message is about, None for all of the topic or the whole client."""
    partition = message.partition()
    # An error without a topic has the partition 0, which means nothing.
    return partition if message.topic() is not None and partition is not None and partition >= 0 else None


#: The most records one read returns. A batch that fits the caches is drained a quarter faster than one of 5,000: the
#: garbage collector, too, meets fewer objects that still live.
BATCH = 500


#: Commands for a tail are rare: a close(), a fault, or further partitions may have to wait this long. Records do not.
PACE = PollPace(LONGEST_WAIT_S)


#: Where the logs end is noted this often (s).
ENDS_EVERY_S = 1.0


class KafkaTail:
    """A tail over a librdkafka consumer that never joins a group (L4)."""

    def __init__(self, topic: str, settings: dict[str, object], troubles: Troubles) -> None:
        """Nothing is sent before ``warm_up`` or ``begin``."""
        # librdkafka wants a group.id even though no group takes part.
        settings = {**settings, "logger": troubles, "group.id": "kafka-marshal-tail", "error_cb": troubles}
        self._reading = Reading(f"tail of {topic!r}", settings, troubles, PACE)
        self._topic = topic
        self._positions: dict[int, int] = {}
        #: Why other partitions could not be read from now on: reported by the next read.
        self._failures: list[TailFault] = []
        self._lock = threading.Lock()
        #: Where the logs end. Replaced, never changed.
        self._ends: Mapping[int, int] = {}
        self._ends_due = 0.0
        #: Whether nothing is fetched now.
        self._is_resting = False
        #: What came before a rest, for the next read.
        self._came: list[KafkaMessage] = []

    def warm_up(self) -> None:
        """Begin to connect, and to look up the leaders; returns at once.

        A consumer that is connected, and then assigned a topic that it does not know, asks for its leaders only a
        second later.
        """
        self._reading.warm_up(self._warm_up)

    def _warm_up(self) -> None:
        with contextlib.suppress(KafkaException):  # no broker yet: it retries by itself
            self._reading.consumer.list_topics(self._topic, timeout=WARM_UP_TIMEOUT_S)

    def begin(self, positions: Mapping[int, int]) -> None:
        """Read these partitions, each from its offset, in librdkafka's own threads. Once, before it is read from."""
        self._positions = dict(positions)
        places = [KafkaPartition(self._topic, cp, offset) for cp, offset in positions.items()]
        self._reading.use(lambda: self._reading.consumer.assign(places))

    def read(self, timeout_s: float) -> TailBatch:
        if self._is_resting:
            self._fetch_again()
        messages, self._came = self._came or self._reading.read(BATCH, timeout_s), []
        records, others = _entries(messages)
        ends: dict[int, int] = {}
        faults: list[TailFault] = []
        for message, error in others:
            if error.code() == KafkaError._PARTITION_EOF:
                ends[message.partition()] = message.offset()
            elif not is_of_groups(error):
                faults.append(TailFault(fault_kind(error), partition_of(message), error.str()))
        with self._lock:
            for left in (records.keys() | ends.keys()) - self._positions.keys():
                records.pop(left, None)
                ends.pop(left, None)
            for cp, entries in records.items():
                self._positions[cp] = entries[-1][0] + 1
            for cp, end in ends.items():
                self._positions[cp] = max(end, self._positions[cp])
            faults.extend(self._failures)
            self._failures.clear()
        faults.extend(TailFault(kind, None, text) for kind, text in self._reading.troubles.take_faults())
        if time.monotonic() >= self._ends_due:
            self._ends_due = time.monotonic() + ENDS_EVERY_S
            with contextlib.suppress(ClosedError):
                self._reading.enqueue_command(self._look_at_ends)
        return TailBatch(records, ends, faults, len(messages) >= BATCH)

    def rest(self) -> bool:
        """Fetch nothing more. What is on its way is dropped, and fetched again from where we are."""
        if not self._is_resting:
            self._came = self._came or self._reading.read(BATCH, 0)
            if self._came:
                return False
            self._is_resting = True
            places = self._places()
            self._reading.use(partial(self._steer, partial(self._reading.consumer.pause, places)))
        return True

    def _fetch_again(self) -> None:
        """End the rest, at once: a partition that is only resumed waits until its broker's thread wakes by itself."""
        self._is_resting = False
        consumer, places = self._reading.consumer, self._places()

        def resume() -> None:
            consumer.resume(places)
            for place in places:
                consumer.seek(place)

        self._reading.use(partial(self._steer, resume))

    def _places(self) -> list[KafkaPartition]:
        with self._lock:
            return [KafkaPartition(self._topic, cp, position) for cp, position in self._positions.items()]

    def _look_at_ends(self) -> None:
        ends = {}
        with self._lock:
            positions = dict(self._positions)
        for cp, position in positions.items():
            with contextlib.suppress(KafkaException):  # it never asked a broker about this partition
                _, high = self._reading.consumer.get_watermark_offsets(KafkaPartition(self._topic, cp), cached=True)
                ends[cp] = max(high, position)
        self._ends = ends

    def log_ends(self) -> Mapping[int, int]:
        return self._ends

    def follow(self, positions: Mapping[int, int]) -> None:
        self._reading.enqueue_command(partial(self._follow, dict(positions)))

    def _follow(self, positions: dict[int, int]) -> None:
        with self._lock:
            self._positions.update(positions)
        places = [KafkaPartition(self._topic, cp, offset) for cp, offset in positions.items()]
        self._steer(lambda: self._reading.consumer.incremental_assign(places))

    def leave(self, partitions: Iterable[int]) -> None:
        left = list(partitions)
        with self._lock:
            for cp in left:
                del self._positions[cp]
        places = [KafkaPartition(self._topic, cp) for cp in left]
        self._reading.enqueue_command(lambda: self._steer(partial(self._reading.consumer.incremental_unassign, places)))

    def restart(self, positions: Mapping[int, int]) -> None:
        self._came = []
        with self._lock:
            self._positions.update(positions)
        places = [KafkaPartition(self._topic, cp, offset) for cp, offset in positions.items()]
        for steer in (self._reading.consumer.incremental_unassign, self._reading.consumer.incremental_assign):
            self._reading.use(partial(self._steer, partial(steer, places)))

    def _steer(self, steer: Callable[[], object]) -> None:
        try:
            steer()
        except KafkaException as error:  # a partition that is not read would seem silent
            with self._lock:
                self._failures.append(TailFault(FaultKind.FATAL, None, f"what is read could not be changed: {error}"))

    def close(self) -> None:
        self._reading.close()


def _entries(messages: list[Any]) -> tuple[dict[int, list[LogEntry]], list[tuple[Any, KafkaError]]]:
    """Messages as log entries by partition; beside them those that stand for an error or an end.

    This runs for every record of a replay: a plain loop proved fastest (beside zip and map), 75 ns a record where
    fetching takes 440. So is it cheapest to look for errors only among messages without a stamp of the log.
    """
    records: dict[int, list[LogEntry]] = {}
    others = []
    current = None
    for message in messages:
        kind, stamp = message.timestamp()
        if kind != TIMESTAMP_LOG_APPEND_TIME:
            if (error := message.error()) is not None:
                others.append((message, error))
                continue
            stamp = -1  # T1: a stamp set by a client says nothing about log time
        partition = message.partition()
        if partition != current:  # a batch holds few runs of one partition each
            current = partition
            add = records.setdefault(partition, []).append
        add((message.offset(), stamp, message.value()))
    return records, others


_ERROR = KafkaMessage.error


#: When a look-up of a topic that held up the reading thread, and had no answer, is due again.
WARM_UP_AGAIN_S = 10.0

#: How old a cached log end may grow while messages come: fresh enough to measure lag by, cheap enough not to matter.
LOOK_INTERVAL_S = 0.5


#: A partition that is expected is fetched for this long (s), and up to this many bytes, and then no more.
EXPECTED_S, EXPECTED_BYTES = 1.0, 1_000_000


class Expected:
    """A partition that is fetched already, as it is likely to be assigned at this position soon."""

    __slots__ = ("came", "position", "size", "until")

    def __init__(self, position: int, until: float) -> None:
        self.position: int = position
        #: Until when (monotonic).
        self.until: float = until
        #: Its messages so far, and their bytes.
        self.came: list[KafkaMessage] = []
        self.size: int = 0


_CHANGED_ID = re.compile(r"Topic (?P<topic>\S+) changed id from \S+ to (?P<id>\S+)$")


class FetchIds(DebugLines):
    """The ids by which one client fetches. Called by the thread that reads.

    librdkafka fetches by topic id. If a topic was deleted and recreated it learns the new id and reads on at the old
    position, without an error. It reports the change only in a debug line, which its queue delivers in order: before
    the first message that it fetches by the new id.
    """

    #: Some lines for each answer about topics, none for messages.
    category = "metadata"

    def __init__(self, settings: dict[str, object]) -> None:
        super().__init__(settings)
        self._ids: dict[str, str] = {}
        self._recreated: dict[str, str] = {}

    def _read(self, line: str) -> None:
        if (found := _CHANGED_ID.search(line)) is not None:
            topic, topic_id = found["topic"], found["id"]
            if self._ids.get(topic, topic_id) != topic_id:
                self._recreated[topic] = topic_id
            self._ids[topic] = topic_id

    def take_recreated(self) -> dict[str, str]:
        """Topics that were recreated since the last call, with their new ids."""
        recreated = self._recreated
        if recreated:
            self._recreated = {}
        return recreated


#: ``list_topics`` of a consumer, or of an admin client.
ListTopics = Callable[..., Any]


class KafkaDataReader:
    """A data reader over one librdkafka consumer that never joins a group and never commits."""

    def __init__(
        self, group_id: str, settings: dict[str, object], troubles: Troubles, list_topics: ListTopics | None = None
    ) -> None:
        """Open it; nothing is fetched before assign().

        list_topics: of a client that is connected already, and may see what this one may.
        """
        self._list_topics = list_topics
        settings = {**settings, "logger": troubles, "group.id": group_id, "error_cb": troubles}
        self._topic_ids = FetchIds(settings)
        troubles.takes_line = self._topic_ids.take
        self._bootstrap = str(settings["bootstrap.servers"])
        self._reading = Reading("data reader", settings, troubles)
        #: Where each partition was assigned.
        self._assigned: dict[TopicPartition, int] = {}
        self._expected: dict[TopicPartition, Expected] = {}
        #: Partitions that the commands carried out last were about.
        self._changed: set[TopicPartition] = set()
        self._log_ends: dict[TopicPartition, int] = {}
        #: Ends that reads have reached and no caller has taken.
        self._ends: dict[TopicPartition, int] = {}
        #: Partitions whose unknown log end a waiting command will look up.
        self._asked_for: set[TopicPartition] = set()
        #: Topics assigned whose leaders librdkafka may not know, and when we made it look them up (monotonic).
        self._new_topics: set[str] = set()
        #: Topics that were looked up without an answer, and when.
        self._unanswered: dict[str, float] = {}
        self._reading.before_wait = self._before_wait
        self._reading.is_assigned = lambda: bool(self._assigned)
        self._reading.is_hurried = lambda: bool(self._expected)
        self._next_look = 0.0
        #: Messages came since the last look-up of log ends. (One is due after the last of them too, if no more come.)
        self._look_owed = False

    def assign(self, positions: Mapping[TopicPartition, int]) -> None:
        if positions:
            self._reading.enqueue_command(partial(self._reassign, dict(positions)))

    def expect(self, positions: Mapping[TopicPartition, int]) -> None:
        self._reading.enqueue_command(partial(self._expect, positions))

    def unassign(self, partitions: Iterable[TopicPartition]) -> None:
        self._reading.enqueue_command(partial(self._remove, list(dict.fromkeys(partitions))))

    def pause(self, partitions: Iterable[TopicPartition]) -> None:
        self._reading.enqueue_command(partial(self._set_paused, list(dict.fromkeys(partitions)), True))

    def resume(self, partitions: Iterable[TopicPartition]) -> None:
        self._reading.enqueue_command(partial(self._set_paused, list(dict.fromkeys(partitions)), False))

    # Commands, carried out with the consumer free.

    def _expect(self, positions: Mapping[TopicPartition, int]) -> None:
        """Only of topics that are read, whose leaders are known."""
        topics, until = {topic for topic, _ in self._assigned}, time.monotonic() + EXPECTED_S
        for key, position in positions.items():
            if key[0] in topics and key not in self._assigned and key not in self._expected:
                with contextlib.suppress(KafkaException):  # it says so if it is assigned
                    self._reading.consumer.incremental_assign([KafkaPartition(*key, position)])
                    self._expected[key] = Expected(position, until)

    def _put_aside(self, messages: list[KafkaMessage]) -> list[KafkaMessage]:
        """Keep those of expected partitions until these are assigned; returns the others."""
        others: list[KafkaMessage] = []
        for message in messages:
            expected = self._expected.get((cast("str", message.topic()), cast("int", message.partition())))
            (others if expected is None else expected.came).append(message)
            if expected is not None:
                expected.size += len(message.value() or b"")
        return others

    def _reassign(self, positions: dict[TopicPartition, int]) -> None:
        for key, position in list(positions.items()):
            expected = self._expected.get(key)
            if expected is not None and expected.position == position:  # fetched from there: all that came is of it
                self._reading.kept += self._expected.pop(key).came
                self._assigned[key] = positions.pop(key)
        if not positions:
            return
        self._remove(list(positions))
        new_topics = self._new_topics_of(positions)
        try:
            self._reading.consumer.incremental_assign(
                [KafkaPartition(topic, partition, offset) for (topic, partition), offset in positions.items()]
            )
        except KafkaException as error:
            LOGGER.error("%s", marshal_error(error, f"assigning {_names(positions)}", self._bootstrap))
            return
        self._assigned.update(positions)
        self._changed.update(positions)
        self._new_topics.update(new_topics)

    def _new_topics_of(self, positions: Iterable[TopicPartition]) -> set[str]:
        """The topics of these whose leaders librdkafka does not know: it knows only those that it reads from.

        (Of a partition that such a topic has got since, it learns within a second, and no question makes it sooner.)
        """
        due = time.monotonic() - WARM_UP_AGAIN_S
        found = {topic for topic, _ in positions if self._unanswered.get(topic, due) <= due}
        return found.difference(topic for topic, _ in self._assigned) if found else found

    def _before_wait(self) -> None:
        """Have the leaders of newly assigned topics looked up now (on the reading thread: it may wait for the broker).

        By itself librdkafka asks for a topic it does not know once a second: a first record would come a second late.
        """
        if self._expected:
            now = time.monotonic()
            self._remove([k for k, x in self._expected.items() if now > x.until or x.size > EXPECTED_BYTES])
        if self._new_topics:
            names, self._new_topics = self._new_topics, set()
            # If no broker answers, not again and again.
            self._unanswered.update(dict.fromkeys(names, time.monotonic()))
            self._warm_up(names)

    def _remove(self, partitions: list[TopicPartition]) -> None:
        known = [key for key in partitions if key in self._assigned or key in self._expected]
        if known:
            for key in known:
                self._assigned.pop(key, None)
                self._expected.pop(key, None)
                self._log_ends.pop(key, None)
            self._changed.update(known)
            self._reading.kept = [m for m in self._reading.kept if (m.topic(), m.partition()) not in known]
            self._reading.consumer.incremental_unassign([KafkaPartition(*key) for key in known])

    def _remove_topics(self, topics: Collection[str]) -> None:
        self._remove([key for key in (*self._assigned, *self._expected) if key[0] in topics])

    def _set_paused(self, partitions: list[TopicPartition], paused: bool) -> None:
        known = [KafkaPartition(*key) for key in partitions if key in self._assigned]
        if known:
            (self._reading.consumer.pause if paused else self._reading.consumer.resume)(known)

    # Reading.

    def read(self, max_messages: int, timeout_s: float) -> tuple[list[Message], list[DataFault]]:
        messages = self._reading.read(max_messages, timeout_s, self._settle)
        faults: list[DataFault] = []
        if recreated := self._topic_ids.take_recreated():
            # Some may be of the old topic still: they are dropped, as their positions mean nothing any more.
            messages = [message for message in messages if message.topic() not in recreated]
            faults.extend(DataFault(FaultKind.RECREATED, topic, None, new) for topic, new in sorted(recreated.items()))
            self._reading.enqueue_command(partial(self._remove_topics, recreated))
        if any(map(_ERROR, messages)):
            messages = _without_errors(messages, faults, self._ends)
        if self._reading.troubles.pending:
            faults.extend(DataFault(kind, None, None, text) for kind, text in self._reading.troubles.take_faults())
        if messages:
            self._look_owed = True
        if self._look_owed and time.monotonic() >= self._next_look:
            self._reading.enqueue_command(self._look_at_log_ends)
        return cast("list[Message]", messages), faults

    def take_ends(self) -> dict[TopicPartition, int]:
        ends, self._ends = self._ends, {}
        return ends

    def _settle(self, messages: list[KafkaMessage], serve: Callable[[], None]) -> list[KafkaMessage]:
        """Carry out commands that came in while these messages were taken; drop what may be of an older assignment."""
        self._changed.clear()
        serve()
        if changed := frozenset(self._changed):
            # Assigned (again) meanwhile: a message may have been fetched before or after; it is fetched again.
            if again := {key: self._assigned[key] for key in changed if key in self._assigned}:
                self._reassign(again)
            messages = [m for m in messages if (m.topic(), m.partition()) not in changed]
        return self._put_aside(messages) if self._expected else messages

    def partition_counts(self, topics: Iterable[str], timeout_s: float) -> dict[str, int]:
        names = list(topics)
        if self._list_topics is None:
            return _counted(self._reading.consumer.list_topics, names, timeout_s)
        # This client, which is new, connects meanwhile: before it is assigned anything, mostly.
        self._reading.warm_up(partial(self._warm_up, names))
        return _counted(self._list_topics, names, timeout_s)

    def _warm_up(self, names: Iterable[str]) -> None:
        """Connect, and learn the leaders of these topics.

        By a question about one partition, whose leader is looked up with those of all. (list_topics would do, too, but
        creates an object for each partition while it holds the interpreter's lock; 900 can trigger a garbage
        collection.)
        """
        deadline = time.monotonic() + WARM_UP_TIMEOUT_S
        for topic in names:
            with contextlib.suppress(KafkaException):  # it retries by itself
                left_s = max(SHORTEST_WAIT_S, deadline - time.monotonic())
                self._reading.consumer.get_watermark_offsets(KafkaPartition(topic, 0), timeout=left_s)
                self._unanswered.pop(topic, None)

    def high_watermark(self, topic: str, partition: int) -> int | None:
        self._reading.check_open()
        key = (topic, partition)
        if key not in self._log_ends and key in self._assigned and key not in self._asked_for:
            # This one alone: a caller asks for the ends of a thousand new partitions one after the other.
            self._asked_for.add(key)
            self._reading.enqueue_command(partial(self._look_at_log_end, key))
        return self._log_ends.get(key)

    def look_at_ends(self) -> None:
        if time.monotonic() >= self._next_look:
            self._reading.enqueue_command(self._look_at_log_ends)

    def _look_at_log_ends(self) -> None:
        self._look_owed = False
        self._next_look = time.monotonic() + LOOK_INTERVAL_S
        for key in self._assigned:
            self._look_at_log_end(key)

    def _look_at_log_end(self, key: TopicPartition) -> None:
        self._asked_for.discard(key)
        if key not in self._assigned:
            return  # unassigned since it was asked for
        at = KafkaPartition(*key)
        try:
            _, high = self._reading.consumer.get_watermark_offsets(at, cached=True)
            (position,) = self._reading.consumer.position([at])
        except KafkaException:  # it never asked a broker about this partition
            return
        # A fetch may bring records that the end reported with it does not count yet.
        known = max(high, position.offset)
        if known >= 0:
            self._log_ends[key] = known

    def close(self) -> None:
        self._reading.close()


def _without_errors(
    messages: list[KafkaMessage], faults: list[DataFault], ends: dict[TopicPartition, int]
) -> list[KafkaMessage]:
    real = []
    for message in messages:
        error = message.error()
        if error is None:
            real.append(message)
        elif error.code() == KafkaError._PARTITION_EOF:
            ends[cast("str", message.topic()), cast("int", message.partition())] = cast("int", message.offset())
        elif not is_of_groups(error):
            faults.append(DataFault(fault_kind(error), message.topic(), partition_of(message), error.str()))
    return real


def _names(partitions: Iterable[TopicPartition]) -> str:
    return ", ".join(f"{topic} [{partition}]" for topic, partition in sorted(partitions))


def _counted(list_topics: ListTopics, names: list[str], timeout_s: float) -> dict[str, int]:
    """How many partitions those of these topics have that are there (*blocking*)."""
    deadline = time.monotonic() + timeout_s
    found = {}
    with contextlib.suppress(KafkaException):  # the caller that asks for the ids gets the error, too
        for topic in names:
            described = list_topics(topic, timeout=max(0.001, deadline - time.monotonic())).topics[topic]
            if described.error is None:
                found[topic] = len(described.partitions)
    return found
