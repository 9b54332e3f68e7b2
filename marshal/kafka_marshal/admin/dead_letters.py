"""Reads a dead-letter topic from its start, or from a moment, to its present end, without committing anything.

Each partition is in the order of its offsets; between partitions the older letter comes first. Only the next letters of
each partition are in memory: a partition that is ahead of the others is paused.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from datetime import datetime
from types import TracebackType
from typing import Any, Self, cast

from kafka_marshal import arguments
from kafka_marshal.adapters.message import Message
from kafka_marshal.client.dead_letters import DeadLetter, OddLetter, mark_repeats, read_letter
from kafka_marshal.errors import AdminError, AuthorizationError, ConfigurationError, KafkaUnavailableError
from kafka_marshal.node.serving import have_done
from kafka_marshal.ports import Cluster, DataFault, DataReader, FaultKind, TopicPartition
from kafka_marshal.rights import grant
from kafka_marshal.topic_names import is_topic_name

#: A partition with waiting records of this size, or this number, is read no further until they are requested.
HELD_BYTES = 4_000_000
HELD_RECORDS = 1_000

#: Records per read, and how long a read waits for the first one (s).
RUN = 500
SLICE_S = 0.2

#: librdkafka prefetches up to this much (KiB).
CONFIG: dict[str, object] = {"queued.max.messages.kbytes": 16_384}


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

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
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
        patience = _Patience(self._cluster.runtime.monotonic, self._timeout_s)
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
                patience.renew()
            elif patience.is_over:
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


class _Patience:
    """A time-out for reads without a record."""

    def __init__(self, clock: Callable[[], float], timeout_s: float) -> None:
        self._clock = clock
        self._timeout_s = timeout_s
        self.renew()

    def renew(self) -> None:
        """A record came."""
        self._until = self._clock() + self._timeout_s

    @property
    def is_over(self) -> bool:
        """Whether it has lasted too long."""
        return self._clock() >= self._until


def _size(message: Message) -> int:
    return len(message.value() or b"") + len(message.key() or b"") + 100


def _time_of(message: Message) -> int:
    return message.timestamp()[1]


class DeadLetterTopics:
    """Base of :class:`~kafka_marshal.admin.Admin`: its methods for dead-letter topics."""

    _open_cluster: Callable[[], Cluster]
    _timeout_s: float

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
