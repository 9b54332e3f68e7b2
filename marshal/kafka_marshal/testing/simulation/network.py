"""The network between a simulated process and the log: latency, loss, duplicates and outages, per client.

The log itself is :class:`~kafka_marshal.adapters.memory.MemoryBroker`. A record appended here travels first, and may
be lost, late or duplicated; it reaches each client's tail at a different time; its acknowledgement may be lost too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from typing import Any

from kafka_marshal.adapters.memory import MemoryBroker, MemoryCluster
from kafka_marshal.adapters.memory.cluster import unanswered
from kafka_marshal.adapters.memory.readers import MemoryDataReader, entry_of, outside
from kafka_marshal.adapters.producing import Headers
from kafka_marshal.errors import ClosedError
from kafka_marshal.ports import (
    DELIVERY_TIMEOUT_MS,
    Ack,
    DataFault,
    FaultKind,
    LogEntry,
    Message,
    TailBatch,
    TailFault,
    TopicPartition,
)
from kafka_marshal.runtime import Runtime
from kafka_marshal.testing.simulation.living import Living
from kafka_marshal.testing.simulation.producer import (
    SimulatedProducer,
    SimulatedSending,
    SimulatedTransactionalProducer,
    wait_until,
)
from kafka_marshal.testing.simulation.runtime import SHORTEST_MS
from kafka_marshal.testing.simulation.scheduler import Over, Scheduler, Task
from kafka_marshal.topic_names import snapshots_topic

#: The brokers' clock when a story begins (ms).
BROKER_EPOCH_MS = 1_700_000_000_000.0

#: A wait this short (s) is one of a series that ends when an acknowledgement arrives or something else is due.
#: The simulator makes one long wait of the series, which has the same effect.
ACK_WATCH_S = 0.002

#: Offsets of a committed transaction are shown this long (ms) after it; every eighth of them late.
SETTLES_MS, SETTLES_LATE_MS = 2.0, 300.0


class Network:
    """Everything in transit."""

    def __init__(self, scheduler: Scheduler, broker: MemoryBroker, topic: str) -> None:
        self.scheduler = scheduler
        self.broker = broker
        #: The coordination topic.
        self.topic = topic
        self.tails: list[SimulatedTail] = []
        self.readers: list[SimulatedReader] = []
        #: Called with each record of the coordination topic: partition, offset, timestamp, value, sender, when sent.
        self.on_record: Callable[[int, int, int, bytes, Living, float], None] = lambda *_: None
        #: Called with each record of the snapshots topic: partition, value.
        self.on_snapshot: Callable[[int, bytes], None] = lambda *_: None
        #: Coordination partition → offset of its broker's clock (ms).
        self.clock_shift: dict[int, float] = {}
        self._shift = 0.0
        broker.transactions.on_end = self._readable
        broker.transactions.settle = self._settle
        #: The share of transactions' requests that the brokers take up late.
        self.slow_share: float = 0.06
        self._settled = 0
        #: Called with each partition in which a transaction has ended.
        self.on_ended: Callable[[TopicPartition], None] = lambda _: None

    def _settle(self, show: Callable[[], None]) -> None:
        """Committed offsets are shown soon after the commit was answered, and sometimes late."""
        self._settled += 1
        after_ms = SETTLES_LATE_MS if self._settled % 8 == 0 else SETTLES_MS
        self.scheduler.call_at(self.scheduler.now + after_ms, show)

    def _readable(self, key: TopicPartition) -> None:
        """Readers of committed records may get further."""
        for reader in self.readers:
            reader.written(key)
        self.on_ended(key)

    def broker_clock(self) -> float:
        """The clock of the broker that is written to (ms)."""
        return BROKER_EPOCH_MS + self.scheduler.now + self._shift

    def arrive(self, topic: str, partition: int, value: bytes, sender: Living, sent_at: float) -> int:
        """A record reaches the log; returns its offset."""
        self._shift = self.clock_shift.get(partition, 0.0) if topic == self.topic else 0.0
        offset = self.broker.produce(topic, partition, value, b"")
        self._shift = 0.0
        if topic == self.topic:
            log = self.broker.existing[topic].partitions[partition]
            stamp = log.messages[-1].timestamp()[1]
            self.on_record(partition, offset, stamp, value, sender, sent_at)
        elif topic == snapshots_topic(self.topic):
            self.on_snapshot(partition, value)
        else:
            for reader in self.readers:
                reader.written((topic, partition))
        for tail in self.tails:
            tail.written(topic, partition, offset + 1)
        return offset

    def publish(
        self,
        topic: str,
        partition: int,
        value: bytes | None,
        key: bytes | None = None,
        headers: Headers = (),
        timestamp_ms: int | None = None,
    ) -> int:
        """A message arrives in a user's topic."""
        offset = self.broker.produce(topic, partition, value, key, timestamp_ms=timestamp_ms, headers=headers or None)
        for reader in self.readers:
            reader.written((topic, partition))
        return offset

    def skip(self, topic: str, partition: int, offsets: int) -> None:
        """Add offsets without messages: transaction markers, aborted or compacted messages."""
        self.broker.skip(topic, partition, offsets)
        for reader in self.readers:
            reader.written((topic, partition))

    def cut_below(self, topic: str, partition: int, offset: int) -> None:
        """Delete a user's messages below an offset, as retention does."""
        self.broker.delete_records(topic, partition, offset)
        for reader in self.readers:
            reader.written((topic, partition))

    def changed(self, topic: str) -> None:
        """A topic was truncated, recreated, or written by other means."""
        made = self.broker.existing.get(topic)
        ends = [log.end for log in made.partitions] if made is not None else []
        for tail in self.tails:
            tail.changed(topic, ends)
        for reader in self.readers:
            for partition in range(len(ends)):
                reader.written((topic, partition))


class SimulatedCluster(MemoryCluster):
    """The cluster of one Marshal or Admin of a process."""

    def __init__(self, network: Network, process: Living) -> None:
        super().__init__(broker=network.broker, client=process.name)
        self.runtime: Runtime = process.runtime
        self._network = network
        self._process = process

    @contextmanager
    def _asking(self, doing: str, timeout_s: float) -> Iterator[MemoryBroker]:
        scheduler, process = self._network.scheduler, self._process
        self._check_open()
        until = scheduler.now + timeout_s * 1000
        scheduler.park(scheduler.now + process.travel_ms() + process.travel_ms())
        while process.host.trouble.is_cut_off and scheduler.now < until:
            scheduler.park(min(until, scheduler.now + 50.0))
        self._check_open()
        if process.host.trouble.is_cut_off:
            raise unanswered(doing)
        yield self.broker

    def delete_records(self, before: Mapping[TopicPartition, int], timeout_s: float) -> dict[TopicPartition, int]:
        starts = super().delete_records(before, timeout_s)
        for topic in sorted({topic for topic, _ in before}):
            self._network.changed(topic)
        return starts

    def tail(self, topic: str, positions: Mapping[int, int]) -> SimulatedTail:  # type: ignore[override]
        self._check_open()
        return SimulatedTail(self._network, self._process, topic, positions)

    def appender(self, topic: str, *, delivery_timeout_ms: int) -> SimulatedAppender:  # type: ignore[override]
        self._check_open()
        return SimulatedAppender(self._network, self._process, topic, delivery_timeout_ms)

    def data_reader(self, group_id: str, config: Mapping[str, object]) -> SimulatedReader:
        self._check_open()
        return SimulatedReader(self._network, self._process)

    def way_of_reading(self, config: Mapping[str, object]) -> None:
        """Members of the simulation are processes."""

    def producer(  # type: ignore[override]
        self, config: Mapping[str, object], *, delivery_timeout_ms: int = DELIVERY_TIMEOUT_MS
    ) -> SimulatedProducer:
        self._check_open()
        return SimulatedProducer(self._network, self._process, delivery_timeout_ms)

    def transactional_producer(
        self, transactional_id: str, config: Mapping[str, object], *, transaction_timeout_ms: int
    ) -> SimulatedTransactionalProducer:
        self._check_open()
        return SimulatedTransactionalProducer(self._network, self._process, transactional_id, transaction_timeout_ms)

    def _is_settled(self, settled: Callable[[], bool], timeout_s: float) -> bool:
        scheduler = self._network.scheduler
        return wait_until(scheduler, settled, scheduler.now + timeout_s * 1000)


@dataclass(slots=True)
class _Waiting:
    """A record that waits for a reachable broker."""

    partition: int
    value: bytes
    #: When it was appended: its content is as of then, however long it waits.
    sent_at: float
    deadline: float
    on_ack: Callable[[Ack], None] | None


class SimulatedAppender(SimulatedSending):
    """Appends records to the log."""

    _network: Network

    def __init__(self, network: Network, process: Living, topic: str, delivery_timeout_ms: int) -> None:
        super().__init__(network, process, delivery_timeout_ms)
        self._topic = topic
        process.links.appenders.append(self)

    def append(self, partition: int, value: bytes, on_ack: Callable[[Ack], None] | None = None) -> None:
        if self._closed:
            raise ClosedError("The appender was closed; nothing was appended. Open a new one.")
        now = self._network.scheduler.now
        self._open += 1
        self._waiting.append(_Waiting(partition, value, now, now + self._timeout_ms, on_ack))
        self._send()

    def _unreached(self, record: _Waiting) -> Ack:
        return Ack(None, "no broker could be reached in time")

    def _dispatch(self, record: _Waiting, now: float) -> None:
        process, on_ack = self._process, record.on_ack
        problem = self._network.broker.refusal(self._topic, record.partition, record.value)
        if problem is not None:
            self._answer(process.reaches_at(), on_ack, Ack(None, problem))
            return
        lost = Ack(None, "the broker did not acknowledge in time")
        if self._is_lost(record, lost):
            return
        arrival, answers, twice = self._journey(record.partition, record, lost)
        network = self._network

        def arrive(first: bool = True) -> None:
            offset = network.arrive(self._topic, record.partition, record.value, process, record.sent_at)
            if first and answers:
                # A retry of a written record is acknowledged without an offset.
                self._answer(process.reaches_at(), on_ack, Ack(None if twice else offset))

        network.scheduler.call_at(arrival, arrive)
        if twice:
            network.scheduler.call_at(arrival + self._timeout_ms * process.rng.random(), lambda: arrive(False))

    def _answer(self, at: float, on_ack: Callable[[Any], None] | None, answer: object) -> None:
        super()._answer(at, on_ack, answer)
        for tail in self._process.links.tails:
            tail.answered(at)

    def next_due(self) -> float:
        """When the next acknowledgement arrives."""
        return min([due[0] for due in self._due], default=inf)

    def poll(self, timeout_s: float = 0.0) -> None:
        if self._closed:
            raise ClosedError("The appender was closed.")
        if self._waiting:
            self._send()
        if self._due:
            self._call()

    def flush(self, timeout_s: float) -> int:
        if self._closed:
            raise ClosedError("The appender was closed.")
        scheduler = self._network.scheduler
        until = scheduler.now + timeout_s * 1000
        while True:
            self._send()
            self._call()
            if not self._open or scheduler.now >= until:
                return self._open
            scheduler.park(min(until, max(scheduler.now + SHORTEST_MS, min(self.next_due(), scheduler.now + 5.0))))

    def close(self, timeout_s: float = 0.0) -> None:
        if not self._closed:
            self.flush(timeout_s)
            self._closed = True
            now = self._network.scheduler.now
            for record in self._waiting:
                self._answer(now, record.on_ack, Ack(None, "the appender was closed before this was sent"))
            self._waiting.clear()
            self._call_all()
            self._process.links.appenders.remove(self)


class SimulatedTail:
    """The tail of one client: it shows a record once it has reached this client."""

    def __init__(self, network: Network, process: Living, topic: str, positions: Mapping[int, int]) -> None:
        self._network = network
        self._process = process
        self._topic = topic
        self._positions = dict(positions)
        #: Partition → (time of arrival, the log's end then), ascending; and the end that has arrived.
        self._coming: dict[int, deque[tuple[float, int]]] = {cp: deque() for cp in positions}
        self._here: dict[int, int] = {}
        self._last: dict[int, float] = {}
        self._reported_ends: dict[int, int] = {}
        #: Whether positions may be outside the log.
        self._is_unsure = True
        self._reported_cut_off = False
        #: Not read yet: existing records may be read.
        self._is_new = True
        self._parked: Task | None = None
        #: Latest time of the parked task's turn, and whether it waits for acknowledgements.
        self._wakes_at = 0.0
        self._is_watching = False
        self._closed = False
        made = network.broker.existing.get(topic)
        for cp in positions:
            self._here[cp] = made.partitions[cp].end if made is not None else 0
        network.tails.append(self)
        process.links.tails.append(self)

    def answered(self, at: float) -> None:
        """An acknowledgement will arrive then."""
        if self._parked is not None and self._is_watching and at < self._wakes_at:
            self._wakes_at = at
            self._network.scheduler.wake(self._parked, at)

    def written(self, topic: str, partition: int, end: int) -> None:
        """The log has grown."""
        if topic != self._topic or partition not in self._coming or self._process.dead:
            return
        process = self._process
        at = process.reaches_at()
        if process.host.trouble.deaf_until:
            at = max(at, process.host.trouble.deaf_until.get(partition, 0.0))
        at = self._last[partition] = max(at, self._last.get(partition, 0.0))
        self._coming[partition].append((at, end))
        if self._parked is not None and at < self._wakes_at:
            self._wakes_at = at
            self._network.scheduler.wake(self._parked, at)

    def changed(self, topic: str, ends: Sequence[int]) -> None:
        """The log was replaced, and has these ends now."""
        if topic == self._topic:
            self._is_unsure = True
            for partition, end in enumerate(ends):
                if partition in self._coming:
                    self._coming[partition].clear()
                    self._here[partition] = min(self._here[partition], end)
                    self.written(topic, partition, end)

    def read(self, timeout_s: float) -> TailBatch:
        self._check_open()
        scheduler = self._network.scheduler
        found = self._look()
        if found is not None:
            return found
        self._wait(scheduler, timeout_s)
        self._check_open()
        return self._look() or TailBatch()

    def rest(self) -> bool:
        return True

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("The tail was closed; nothing more is read from it. Open a new one.")

    def _wait(self, scheduler: Scheduler, timeout_s: float) -> None:
        until = scheduler.now + max(SHORTEST_MS, timeout_s * 1000 / self._process.runtime.rate)
        self._is_watching = timeout_s <= ACK_WATCH_S
        if self._is_watching:
            until = max(until, min(self._process.next_ack(), self._process.next_due(self)))
        if not self._process.host.trouble.is_cut_off:
            for coming in self._coming.values():
                if coming and coming[0][0] < until:
                    until = coming[0][0]
        self._parked, self._wakes_at = scheduler.current, until
        scheduler.park(until)
        self._parked, self._is_watching = None, False

    def _look(self) -> TailBatch | None:
        if self._process.host.trouble.is_cut_off:
            reported, self._reported_cut_off = self._reported_cut_off, True
            return None if reported else TailBatch(faults=(TailFault(FaultKind.UNREACHABLE, None, "no broker"),))
        self._reported_cut_off = False
        now = self._network.scheduler.now
        batch = self._outside() if self._is_unsure else None
        for cp, coming in self._coming.items():
            if not self._is_new and (not coming or coming[0][0] > now):
                continue
            while coming and coming[0][0] <= now:
                self._here[cp] = coming.popleft()[1]
            end, position = self._here[cp], self._positions[cp]
            if position < end:
                batch = batch or TailBatch()
                batch.records[cp] = self._entries(cp, position, end)
                self._positions[cp] = end
            if self._reported_ends.get(cp) != end:
                batch = batch or TailBatch()
                batch.ends[cp] = self._reported_ends[cp] = end
        self._is_new = False
        return batch

    def _outside(self) -> TailBatch | None:
        """Stop reading partitions whose position is outside the log, and report them."""
        faults = []
        self._is_unsure = self._topic not in self._network.broker.existing
        for cp in list(self._coming):
            log = self._network.broker.log(self._topic, cp)
            if log is not None and (text := outside(log, self._positions[cp])) is not None:
                del self._coming[cp]
                faults.append(TailFault(FaultKind.OUT_OF_RANGE, cp, text))
        return TailBatch(faults=faults) if faults else None

    def _entries(self, cp: int, position: int, end: int) -> list[LogEntry]:
        log = self._network.broker.log(self._topic, cp)
        return [] if log is None else [entry_of(x) for x in log.messages[log.index(position) : log.index(end)]]

    def log_ends(self) -> Mapping[int, int]:
        return dict(self._here)

    def follow(self, positions: Mapping[int, int]) -> None:
        self._check_open()
        self._positions.update(positions)
        self._here.update(positions)
        self._is_unsure = True
        made = self._network.broker.existing.get(self._topic)
        for cp in positions:
            self._coming[cp] = deque()
            if made is not None:
                self.written(self._topic, cp, made.partitions[cp].end)

    def leave(self, partitions: Iterable[int]) -> None:
        self._check_open()
        for cp in partitions:
            del self._positions[cp], self._here[cp]
            self._coming.pop(cp, None)
            self._reported_ends.pop(cp, None)
            self._last.pop(cp, None)

    def restart(self, positions: Mapping[int, int]) -> None:
        self._check_open()
        self._positions.update(positions)  # records in transit arrive no earlier

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._network.tails.remove(self)
            self._process.links.tails.remove(self)
            if self._parked is not None:
                self._network.scheduler.wake(self._parked, self._network.scheduler.now)


class SimulatedReader(MemoryDataReader):
    """Fetches messages; a read waits for the next one."""

    def __init__(self, network: Network, process: Living) -> None:
        super().__init__(network.broker, process.name)
        self._network = network
        self._process = process
        self._parked: Task | None = None
        self._reported_cut_off = False
        #: Something may have arrived since the last read.
        self._is_news = True
        network.readers.append(self)

    def written(self, key: TopicPartition) -> None:
        """A message is there."""
        if key not in self._positions:
            return
        self._is_news = True
        if self._parked is not None:
            self._network.scheduler.wake(self._parked, self._network.scheduler.now + self._process.travel_ms())

    def _wake(self) -> None:
        self._is_news = True
        if self._parked is not None:
            self._network.scheduler.wake(self._parked, self._network.scheduler.now)

    def assign(self, positions: Mapping[TopicPartition, int]) -> None:
        super().assign(positions)
        self._wake()

    def resume(self, partitions: Iterable[TopicPartition]) -> None:
        super().resume(partitions)
        self._wake()

    def partition_counts(self, topics: Iterable[str], timeout_s: float) -> dict[str, int]:
        scheduler, process = self._network.scheduler, self._process
        scheduler.park(scheduler.now + min(process.travel_ms() + process.travel_ms(), timeout_s * 1000))
        return {} if process.host.trouble.is_cut_off else super().partition_counts(topics, timeout_s)

    def read(self, max_messages: int, timeout_s: float) -> tuple[list[Message], list[DataFault]]:
        scheduler = self._network.scheduler
        if scheduler.over:
            raise Over
        self._check_open()
        found = self._fetched(max_messages)
        if found is not None or timeout_s <= 0:
            return found or ([], [])
        self._parked = scheduler.current
        scheduler.park(scheduler.now + max(SHORTEST_MS, timeout_s * 1000 / self._process.runtime.rate))
        self._parked = None
        self._check_open()
        return self._fetched(max_messages) or ([], [])

    def _fetched(self, max_messages: int) -> tuple[list[Message], list[DataFault]] | None:
        if self._process.host.trouble.is_cut_off:
            reported, self._reported_cut_off = self._reported_cut_off, True
            return None if reported else ([], [DataFault(FaultKind.UNREACHABLE, None, None, "no broker")])
        self._reported_cut_off = False
        if self._is_news:
            found = self._look(max_messages)
            self._is_news = found is not None
            if found is not None:
                self._process.interrupting.tear(found[0])
            return found
        return None

    def close(self) -> None:
        super().close()
        if self in self._network.readers:
            self._network.readers.remove(self)
        self._wake()
