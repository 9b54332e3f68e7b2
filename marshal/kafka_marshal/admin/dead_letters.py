"""Dead-letter topics: read from the start, or from a moment, to the present end, without committing anything; redriven.

Each partition is in the order of its offsets; between partitions the older letter comes first. Only the next letters of
each partition are in memory: a partition that is ahead of the others is paused.

A group `GROUP.redrive` reads the topic to redrive it, so what was redriven is in the log and in Kafka: a run that was
killed is continued by the next one, and several at a time share the partitions.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Self, cast

from kafka_marshal import arguments
from kafka_marshal.adapters.message import Message
from kafka_marshal.admin.base import AdminBase
from kafka_marshal.admin.positions import LOOKUP_TIMEOUT_S
from kafka_marshal.client.dead_letters import DeadLetter, OddLetter, mark_repeats, read_letter
from kafka_marshal.client.marshal import Marshal
from kafka_marshal.client.modes import Transactions
from kafka_marshal.errors import (
    AdminError,
    AuthorizationError,
    ConfigurationError,
    KafkaUnavailableError,
    MarshalError,
    TransactionError,
    grant,
)
from kafka_marshal.node.serving import have_done
from kafka_marshal.ports import Cluster, DataFault, DataReader, FaultKind, TopicPartition
from kafka_marshal.topic_names import is_topic_name

#: A partition with waiting records of this size, or this number, is read no further until they are requested.
HELD_BYTES = 4_000_000
HELD_RECORDS = 1_000

#: Records per read, and how long a read waits for the first one (s).
RUN = 500
SLICE_S = 0.2

#: librdkafka prefetches up to this much (KiB).
CONFIG: dict[str, object] = {"queued.max.messages.kbytes": 16_384}

#: Letters of one transaction; with a rate, as many as are due in this time (s).
MOST_LETTERS = 500
STEP_S = 0.25

#: How often Kafka is asked whether all letters are done, by this run or by another (s).
WATCH_S = 0.5

#: How long a batch is gathered (s).
GATHER_S = 0.1


class DeadLetters(Iterator[DeadLetter]):
    """The letters of one topic, as returned by :meth:`Admin.dead_letters`. It ends by itself; ``close`` ends it early.

    Attributes:
        topic: the dead-letter topic.
        others: records so far that are not dead letters.
        unreadable: records so far with headers of a dead letter that do not name a message.
        done, total: offsets read, and to read.
    """

    def __init__(self, cluster: Cluster, topic: str, since_ms: int | None, timeout_s: float, close: bool) -> None:
        """Find the topic's present start and end (*blocking*). close: the cluster ends with this."""
        self.topic = topic
        self.others: int = 0
        self.unreadable: int = 0
        self._since_ms = since_ms
        self._timeout_s = timeout_s
        self._cluster = cluster
        self._closes = close
        self._reader: DataReader | None = None
        self._ready: deque[DeadLetter | OddLetter] = deque()
        self._letters = mark_repeats(self._read())
        try:
            self._parts = have_done(cluster.runtime, self._find)
        except BaseException:
            self.close()
            raise
        self.total: int = sum(part.end - part.next for part in self._parts.values())

    @property
    def done(self) -> int:
        """Offsets read so far."""
        return self.total - sum(max(0, part.end - part.next) for part in self._parts.values())

    def __next__(self) -> DeadLetter:
        while isinstance(letter := self.next_of_all(), OddLetter):
            pass
        return letter

    def next_of_all(self) -> DeadLetter | OddLetter:
        """The next letter, readable or not. Raises StopIteration after the last."""
        try:
            return next(self._letters)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End it; the connection is freed. Idempotent."""
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()
        if self._closes:
            self._closes = False
            self._cluster.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Inside.

    def _find(self) -> dict[TopicPartition, _Part]:
        """The range to read of each partition."""
        cluster, topic, timeout_s = self._cluster, self.topic, self._timeout_s
        info = cluster.topic_info([topic], timeout_s).get(topic)
        if info is None:
            raise AdminError(
                f"there is no topic {topic!r}{arguments.near(topic, cluster.topics(timeout_s))} Nothing was read."
            )
        keys = [(topic, partition) for partition in range(info.partitions)]
        bounds = cluster.committed_watermarks(keys, timeout_s)
        if missing := [partition for _, partition in set(keys) - bounds.keys()]:
            raise KafkaUnavailableError(
                f"partitions {sorted(missing)} of topic {topic!r} have no leader: their dead letters can't be read. "
                "Nothing was changed. Check the brokers, then try again."
            )
        begin = {} if self._since_ms is None else cluster.offsets_for_time(keys, self._since_ms, timeout_s)
        return {
            key: _Part(max(start, begin.get(key, start)), end)
            for key, (start, end) in bounds.items()
            if max(start, begin.get(key, start)) < end
        }

    def _read(self) -> Iterator[DeadLetter | OddLetter]:
        runtime = self._cluster.runtime
        while have_done(runtime, self._fill):
            while self._ready:
                yield self._ready.popleft()

    def _fill(self) -> bool:
        """Read until some letters are in order; False: there are no more."""
        parts = self._parts
        monotonic = self._cluster.runtime.monotonic
        until = monotonic() + self._timeout_s
        while True:
            while not any(part.is_behind for part in parts.values()):
                key = min((key for key, part in parts.items() if part.records), key=self._age, default=None)
                if key is None:
                    return bool(self._ready)
                self._take(parts[key].pop())
                if len(self._ready) >= RUN:
                    return True
            if self._ready:
                return True
            reader = self._opened()
            for key, part in parts.items():
                part.hold(reader, key)
            messages, faults = reader.read(RUN, SLICE_S)
            news = self._sort_in(messages, reader.take_ends())
            for fault in faults:
                self._meet(fault)
            if news:
                until = monotonic() + self._timeout_s
            elif monotonic() >= until:
                raise KafkaUnavailableError(
                    f"nothing of topic {self.topic!r} was read for {self._timeout_s:g} s, and {self.done:,} of "
                    f"{self.total:,} offsets were read by then. Nothing was changed. Check that the brokers run and "
                    "that its partitions have leaders, then try again."
                )

    def _opened(self) -> DataReader:
        if self._reader is None:
            self._reader = self._cluster.data_reader("kafka-marshal-dead-letters", CONFIG)
            self._reader.assign({key: part.next for key, part in self._parts.items()})
        return self._reader

    def _age(self, key: TopicPartition) -> tuple[int, TopicPartition]:
        return _time_of(self._parts[key].records[0]), key

    def _take(self, message: Message) -> None:
        """The next record, in order."""
        if self._since_ms is not None and _time_of(message) < self._since_ms:
            return  # its sender's clock was late
        letter = read_letter(message)
        if letter is None:
            self.others += 1
        else:
            self.unreadable += isinstance(letter, OddLetter)
            self._ready.append(letter)

    def _sort_in(self, messages: list[Any], ends: dict[TopicPartition, int]) -> bool:
        for message in messages:
            part = self._parts.get((message.topic(), message.partition()))
            if part is not None:
                part.put(cast("Message", message))
        for key, end in ends.items():
            if key in self._parts:
                self._parts[key].next = max(self._parts[key].next, end)
        return bool(messages or ends)

    def _meet(self, fault: DataFault) -> None:
        """Raise permanent faults."""
        where = self.topic if fault.partition is None else f"{self.topic} [{fault.partition}]"
        match fault.kind:
            case FaultKind.UNREACHABLE:
                return
            case FaultKind.REFUSED:
                raise AuthorizationError(
                    f"{where}: the cluster forbids reading it ({fault.message}). Nothing was changed. "
                    f"{grant('READ', 'topic', [self.topic])}."
                )
            case FaultKind.OUT_OF_RANGE if fault.partition is not None:
                self._go_on_behind((self.topic, fault.partition), fault)
            case _:
                raise AdminError(
                    f"{where}: can't be read further ({fault.message}); {self.done:,} of {self.total:,} offsets were "
                    "read by then. Nothing was changed. Try again; was the topic deleted, or is a record larger than "
                    "receive.message.max.bytes?"
                )

    def _go_on_behind(self, key: TopicPartition, fault: DataFault) -> None:
        """Continue after retention deleted the next records."""
        part = self._parts[key]
        start, _ = self._cluster.watermarks([key], self._timeout_s).get(key, (0, 0))
        if start <= part.next:
            raise AdminError(
                f"{key[0]} [{key[1]}]: offset {part.next} is not in the log ({fault.message}): the topic was recreated "
                "while it was read. Nothing was changed. Try again."
            )
        part.next = start
        if part.is_behind:
            self._opened().assign({key: start})


class _Part:
    """One partition, read from an offset to an end."""

    def __init__(self, first: int, end: int) -> None:
        #: The next offset to read, and the one at which to stop.
        self.next = first
        self.end = end
        self.records: deque[Message] = deque()
        self._bytes = 0
        self._paused = False

    @property
    def is_behind(self) -> bool:
        """Whether it must be read before the oldest letter is known."""
        return not self.records and self.next < self.end

    def put(self, message: Message) -> None:
        """A record was read."""
        offset = message.offset()
        if self.next <= offset < self.end:
            self.records.append(message)
            self._bytes += _size(message)
        self.next = max(self.next, offset + 1)

    def pop(self) -> Message:
        """The first one."""
        message = self.records.popleft()
        self._bytes -= _size(message)
        return message

    def hold(self, reader: DataReader, key: TopicPartition) -> None:
        """Pause partitions that are ahead, or at their end."""
        full = self._bytes >= HELD_BYTES or len(self.records) >= HELD_RECORDS or self.next >= self.end
        if full != self._paused:
            self._paused = full
            (reader.pause if full else reader.resume)([key])


def _size(message: Message) -> int:
    return len(message.value() or b"") + len(message.key() or b"") + 100


def _time_of(message: Message) -> int:
    return message.timestamp()[1]


class DeadLetterTopics(AdminBase):
    """Methods of :class:`~kafka_marshal.admin.Admin` about dead-letter topics."""

    def dead_letters(self, topic: str, *, since: datetime | None = None) -> DeadLetters:
        """All dead letters of a topic, from its start to its present end; nothing is committed anywhere.

        The result is an iterator of :class:`~kafka_marshal.DeadLetter`: within a partition in the order of the log,
        else the older first. Copies of an earlier letter are marked ``repeated``. Records that are not dead letters are
        skipped; ``others`` counts them, ``unreadable`` those that look like one and name no message.
        ``since`` (an aware datetime): only letters written then or later; copies of earlier ones are not marked.
        Raises AdminError if there is no such topic, or it can't be read to its end.
        """
        if not is_topic_name(topic):
            raise arguments.wrong("topic", "the name of a topic", topic, "Nothing was read")
        since_ms: int | None = None
        if since is not None:
            if since.tzinfo is None:
                raise ConfigurationError(f"since must be a datetime with a time zone, not {since!r}. Nothing was read")
            since_ms = int(since.timestamp() * 1000)
        return DeadLetters(self._open_cluster(), topic, since_ms, self._timeout_s, close=True)

    def redrive_letters(
        self,
        group: str,
        source: str,
        to: str,
        *,
        reason: str | None = None,
        rate: float | None = None,
        dry_run: bool = False,
        progress: Callable[[int, int], None] | None = None,
    ) -> RedrivenLetters:
        """Produce the dead letters of a group in the topic ``source`` into the topic ``to``: key, value and headers.

        Each is produced in a transaction that also says that it was, by a group ``GROUP.redrive``: for readers of
        committed messages none is there twice, and after an interruption another call continues. Copies of a letter are
        left out.

        ``reason``: only letters with this class of exception; later calls begin behind the others, too, which stay in
        ``source``.

        ``rate``, ``dry_run`` and ``progress`` as in :meth:`redrive`.

        Raises AdminError if there is no such topic, MarshalError.
        """
        self._check_group(group)
        for name, topic in (("source", source), ("to", to)):
            if not is_topic_name(arguments.text(name, topic)):
                raise arguments.wrong(name, "the name of a topic", topic)
        if reason is not None:
            arguments.text("reason", reason)
        if rate is not None:
            rate = arguments.a_rate("rate", rate)
        arguments.a_flag("dry_run", dry_run)
        with self._connected() as cluster:
            plan = _plan_letters(cluster, group, source, to, reason, self._timeout_s, progress if dry_run else None)
            return plan.found if dry_run else _redrive(self._open_member, cluster, plan, rate, progress)

    def _open_member(self, group: str) -> Marshal:
        return Marshal.on_cluster(
            self._open_cluster(), group_id=group, topic=self.topic, heartbeat_interval=self._heartbeat_interval
        )


# -- redriving: produced into a topic of the group, in transactions that also say so ----------------------------------


@dataclass(slots=True)
class RedrivenLetters:
    """What a run did with the letters of a topic, or would do (``dry_run``)."""

    #: The dead-letter topic, and the topic that the messages were produced into.
    source: str
    to: str
    #: The group whose positions say what was redriven.
    group: str
    redriven: int = 0
    #: Copies of a letter before them.
    repeats: int = 0
    #: Letters of other groups, and with other reasons; later runs begin behind them.
    passed_over: int = 0
    #: Records that are no dead letters, or that hold no message.
    others: int = 0


@dataclass(slots=True)
class _LetterPlan:
    """The letters that are not redriven yet, read once."""

    found: RedrivenLetters
    of_group: str
    reason: str | None
    #: Partition → the last letter's offset, where there are letters to be done.
    last: dict[TopicPartition, int] = field(default_factory=dict)
    #: What identifies a message → the place of its first letter.
    first: dict[tuple[str, str, int, int], tuple[str, int, int]] = field(default_factory=dict)
    #: Class of the exception → letters of the group that are not redriven yet.
    reasons: Counter[str] = field(default_factory=Counter)

    def judge(self, letter: DeadLetter | OddLetter | None, found: RedrivenLetters) -> bool:
        """Whether this letter is to be redriven; it is counted."""
        is_whole = isinstance(letter, DeadLetter) and not (letter.epoch is None and letter.value is None)
        if not isinstance(letter, DeadLetter) or not is_whole:
            found.others += 1
        elif letter.group != self.of_group or self.reason not in (None, letter.error, _class_of(letter)):
            found.passed_over += 1
        elif self.first.setdefault(letter.source, letter.place) != letter.place:
            found.repeats += 1
        else:
            found.redriven += 1
            return True
        return False


def _class_of(letter: DeadLetter) -> str:
    """The exception's class without its module; "": not said."""
    return (letter.error or "").rpartition(".")[2]


def _plan_letters(
    cluster: Cluster,
    group: str,
    source: str,
    to: str,
    reason: str | None,
    timeout_s: float,
    progress: Callable[[int, int], None] | None = None,
) -> _LetterPlan:
    """Read the dead-letter topic to its present end (*blocking*). Raises AdminError if a topic is missing."""
    if cluster.topic_info([to], timeout_s).get(to) is None:
        raise AdminError(f"there is no topic {to!r}. Nothing was changed. Create it, or name another one")
    plan = _LetterPlan(RedrivenLetters(source, to, f"{group}.redrive"), group, reason)
    with DeadLetters(cluster, source, None, timeout_s, close=False) as letters:
        at = _committed(cluster, plan.found.group, source, timeout_s)
        with suppress(StopIteration):
            while True:
                letter = letters.next_of_all()
                key = letter.place[:2]
                if letter.place[2] >= at.get(key, 0):
                    plan.last[key] = letter.place[2]
                    plan.judge(letter, plan.found)
                    if isinstance(letter, DeadLetter) and letter.group == group:
                        plan.reasons[_class_of(letter)] += 1
                elif isinstance(letter, DeadLetter):
                    plan.first.setdefault(letter.source, letter.place)
                if progress is not None:
                    progress(letters.done, letters.total)
        plan.found.others += letters.others
    return plan


def _committed(cluster: Cluster, group: str, source: str, timeout_s: float) -> dict[TopicPartition, int]:
    """The next offset of each partition, as Kafka has it: what counts in transactions."""
    partitions = cluster.topic_info([source], timeout_s)[source].partitions
    found = {key: cluster.committed_offset(group, key, timeout_s) for key in ((source, n) for n in range(partitions))}
    return {key: at[0] for key, at in found.items() if at is not None}


def _redrive(
    open_member: Callable[[str], Marshal],
    cluster: Cluster,
    plan: _LetterPlan,
    rate: float | None,
    progress: Callable[[int, int], None] | None = None,
) -> RedrivenLetters:
    """Produce the letters of the plan into their topic (*blocking*).

    Letters that are written meanwhile may be among them. Raises MarshalError; what was done before that is done.
    """
    done = RedrivenLetters(plan.found.source, plan.found.to, plan.found.group)
    if not plan.last:
        return done
    most = MOST_LETTERS if rate is None else max(1, min(MOST_LETTERS, int(rate * STEP_S)))
    with open_member(done.group) as marshal, marshal.consumer([done.source], exactly_once=Transactions()) as consumer:
        watch = _Watch(cluster, done.group, plan.last, consumer.stop)
        monotonic, begun = cluster.runtime.monotonic, cluster.runtime.monotonic()
        try:
            for batch in consumer.batches(max_messages=most, timeout=GATHER_S):
                found = RedrivenLetters(done.source, done.to, done.group)
                try:
                    with consumer.transaction(batch) as tx:
                        for message in batch:
                            letter = read_letter(message)
                            if plan.judge(letter, found) and isinstance(letter, DeadLetter):
                                tx.produce(done.to, letter.value, letter.key, letter.headers)
                except TransactionError as error:
                    if not error.retry:
                        raise
                    continue  # it comes again, or was committed
                for name in ("redriven", "repeats", "passed_over", "others"):
                    setattr(done, name, getattr(done, name) + getattr(found, name))
                if progress is not None:
                    progress(done.redriven, plan.found.redriven)
                if watch.reached({(done.source, batch.partition): batch.last_offset + 1}):
                    break
                if rate is not None and watch.over.wait(max(0.0, begun + done.redriven / rate - monotonic())):
                    break
        finally:
            watch.end()
    watch.check()
    return done


class _Watch:
    """Stops the consumer when Kafka has the last letter of each partition as done: another run may have some."""

    def __init__(
        self, cluster: Cluster, group: str, last: Mapping[TopicPartition, int], stop: Callable[[], None]
    ) -> None:
        self._cluster = cluster
        self._group = group
        self._left = dict(last)
        self._lock = threading.Lock()
        self._stop = stop
        self._error: MarshalError | None = None
        self.over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kafka-marshal-redrive", daemon=True)
        self._thread.start()

    def reached(self, at: Mapping[TopicPartition, int]) -> bool:
        """Note the next offsets of partitions; whether all is done."""
        with self._lock:
            for key, offset in at.items():
                if key in self._left and offset > self._left[key]:
                    del self._left[key]
            return not self._left

    def _run(self) -> None:
        try:
            while not self.over.wait(WATCH_S):
                with self._lock:
                    left = list(self._left)
                found = {key: self._cluster.committed_offset(self._group, key, LOOKUP_TIMEOUT_S) for key in left}
                if self.reached({key: at[0] for key, at in found.items() if at is not None}):
                    break
        except MarshalError as error:
            self._error = error
        self.over.set()
        self._stop()

    def end(self) -> None:
        """It is not needed any more (*blocking*)."""
        self.over.set()
        self._thread.join()

    def check(self) -> None:
        """Raise what ended it early."""
        if self._error is not None:
            raise self._error
