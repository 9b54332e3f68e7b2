"""Whether a reader's fetch is stalled: records that its log is known to hold do not arrive.

librdkafka can stop fetching a partition for good, without an error: mostly after a broker hung, while offsets are
validated against a leader that does not answer. Such a partition seems quiet. The proof that it is not: a record that
the log is known to hold, by the acknowledgement of an own append or by the leader's answer, and that does not arrive.
Each repair step needs an answer of the leader that is younger than the wait before it: an outage proves nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from math import inf
from typing import Generic, TypeVar

from kafka_marshal.errors import AuthorizationError, KafkaUnavailableError, MarshalError, TopicChangedError, grant
from kafka_marshal.logs import log
from kafka_marshal.ports import Cluster, FaultKind, LogEntry, Tail, TailBatch
from kafka_marshal.runtime import Runtime

K = TypeVar("K")

#: How long a record that is known to be in the log may take to arrive, with a short and a long heartbeat interval (s).
SHORTEST_PATIENCE_S = 1.0
LONGEST_PATIENCE_S = 3.0

#: Each step may take longer, in multiples of the patience: a new client has to connect, and the machine may be busy.
WAITS = (1, 1, 2, 4)

#: The leader of a partition that has been quiet this long is asked where its log ends.
QUIET_S = 10.0

#: How often to check which leaders to ask (s).
LOOK_EVERY_S = 0.2

#: If the reader itself was blocked for this long (s), missing records get their full time again.
HELD_UP_S = 0.5


class FetchMonitor(Generic[K]):
    """What one reader has to receive, by partition. One thread reads; ``knows`` is thread-safe."""

    def __init__(self, runtime: Runtime, whose: str, ask: Callable[[list[K]], Mapping[K, int]]) -> None:
        """whose: the reader's name, for people. ask: asks the leaders where these logs end (*blocking*)."""
        self._runtime = runtime
        self._monotonic = runtime.monotonic
        self._whose = whose
        self._leaders = ask
        #: How long a record that is in the log may take to come.
        self.patience_s: float = LONGEST_PATIENCE_S
        #: By partition: the next offset that it gets.
        self.next: dict[K, int] = {}
        #: By partition whose next record is known to be in the log: since when, or since anything arrived.
        self._owed: dict[K, float] = {}
        #: By partition: the end of what is known to be in the log, and when a broker last said so.
        self._known: dict[K, tuple[int, float]] = {}
        #: By partition: when to ask its leader.
        self._ask_at: dict[K, float] = {}
        self._is_asking = False
        self._look_at = 0.0
        self._read_at = self._monotonic()
        #: Partitions that were found stalled and from which nothing has arrived since, with since when.
        self._stalled: dict[K, float] = {}
        #: The number of repairs tried for each of them.
        self._tries: dict[K, int] = {}
        #: Partitions from which nothing has arrived yet: the first fetch has to find its broker.
        self._new: set[K] = set()

    def be_patient(self, heartbeat_interval_ms: float) -> None:
        """Wait a heartbeat interval for what is known to be in the log, within limits."""
        self.patience_s = min(max(heartbeat_interval_ms / 1000, SHORTEST_PATIENCE_S), LONGEST_PATIENCE_S)

    def begin(self, positions: Mapping[K, int]) -> None:
        """These partitions are read now, each from its offset."""
        self.next.update(positions)
        self._new.update(positions)
        self._ask_at.update(dict.fromkeys(positions, self._monotonic() + QUIET_S))
        for key in positions:
            self._owed.pop(key, None)

    def end(self, keys: Iterable[K]) -> None:
        """These partitions are not read any more."""
        for key in keys:
            for known in (self.next, self._ask_at, self._owed, self._known, self._stalled, self._tries):
                known.pop(key, None)
            self._new.discard(key)

    # What the log is known to hold.

    def knows(self, key: K, offset: int) -> None:
        """A broker reported that the log holds a record at this offset (any thread)."""
        if offset >= self.next.get(key, inf):
            self._known[key] = max(offset + 1, self._end(key)), self._monotonic()
            self._owed.setdefault(key, self._monotonic())

    def _ask(self, keys: list[K]) -> None:
        """Ask the leaders where these end (*blocking*, on a separate thread)."""
        try:
            for key, end in self._leaders(keys).items():
                if (
                    key in self._owed
                ):  # also where the log holds less than was known: the reader is not to wait for ever
                    self._known[key] = self._end(key), self._monotonic()
                self.knows(key, end - 1)
        except MarshalError as error:  # asked again; an unreachable broker is reported elsewhere
            now = self._monotonic()
            self._ask_at.update({key: now + self.patience_s for key in keys if key in self._ask_at})
            self._owed.update({key: now for key in keys if key in self._owed})
            log(logging.DEBUG, "log_end_unknown", "%s: where the log ends is not known: %s", self._whose, error)
        finally:
            self._is_asking = False

    # Reading.

    def begin_read(self) -> None:
        """The reader is about to read."""
        now = self._monotonic()
        if now - self._read_at > HELD_UP_S:
            self._owed.update(dict.fromkeys(list(self._owed), now))
        self._read_at = now
        if now < self._look_at or self._is_asking:
            return
        self._look_at = now + LOOK_EVERY_S
        due = [key for key, at in list(self._ask_at.items()) if self._is_due(key, at, now)]
        if due:
            self._is_asking = True
            self._ask_at.update(dict.fromkeys(due, now + QUIET_S))
            self._runtime.start(lambda: self._ask(due), "kafka-marshal-log-end")

    def end_read(self, timeout_s: float) -> None:
        """The reader has read; unless it was blocked, that took at most this long."""
        now = self._monotonic()
        if self._owed and now - self._read_at > timeout_s + HELD_UP_S:
            self._owed.update(dict.fromkeys(list(self._owed), now))
        self._read_at = now

    def received(self, key: K, position: int) -> None:
        """All records before this offset have arrived, or never will."""
        if position <= self.next.get(key, inf):
            return
        self.next[key] = position
        self._new.discard(key)
        self._ask_at[key] = self._read_at + QUIET_S
        if self._owed:
            if position >= self._end(key):
                self._owed.pop(key, None)
            elif key in self._owed:
                self._owed[key] = self._read_at
        if not self._stalled or (since := self._stalled.pop(key, None)) is None:
            return
        del self._tries[key]
        if not self._stalled:
            text = "%s reads on, after %.1f s; nothing was left out"
            log(logging.WARNING, "reader_back", text, self._whose, self._read_at - since)

    def flooded(self) -> None:
        """The reader took as much as it may at a time: what does not arrive may wait behind that, in the client."""
        if self._owed:
            self._owed.update(dict.fromkeys(list(self._owed), self._read_at))

    def excuse(self, keys: Iterable[K]) -> None:
        """Nothing arrives from these for a known reason."""
        later = self._read_at + QUIET_S
        for key in keys:
            self._owed.pop(key, None)
            if key in self._ask_at:
                self._ask_at[key] = later

    @property
    def is_owed(self) -> bool:
        """Whether the log is known to hold a record that has not arrived (any thread)."""
        return bool(self._owed)

    def missing(self) -> list[K]:
        """Partitions from which nothing arrives though the log holds more; they count as stalled once ``tried``."""
        if not self._owed:
            return []
        for key in [key for key in list(self._owed) if self.next.get(key, inf) >= self._end(key)]:
            self._owed.pop(key, None)  # it arrived while another thread reported it
        return [key for key in list(self._owed) if self._late_at(key) <= min(self._read_at, self._known[key][1])]

    def _end(self, key: K) -> int:
        return self._known.get(key, (0, 0.0))[0]

    def _late_at(self, key: K) -> float:
        wait_s = self.patience_s * WAITS[min(self._tries.get(key, 0), len(WAITS) - 1)]
        return self._owed.get(key, inf) + (max(wait_s, LONGEST_PATIENCE_S) if key in self._new else wait_s)

    def _is_due(self, key: K, at: float, now: float) -> bool:
        """Whether to ask a leader: of what is late, whether it answers at all; before that, it may have been away."""
        late_at = self._late_at(key)
        return now >= at if late_at == inf else self._known[key][1] < late_at <= now

    def tries(self, keys: Iterable[K]) -> int:
        """The largest number of repairs tried for one of these."""
        return max((self._tries.get(key, 0) for key in keys), default=0)

    def tried(self, keys: Collection[K], *, new: bool) -> None:
        """These are read again: the next step needs a proof that is younger than this. new: by a new reader."""
        for key in keys:
            self._tries[key] = self._tries.get(key, 0) + 1
            self._stalled.setdefault(key, self._owed.get(key, self._read_at))
            self._owed.pop(key, None)
            self._ask_at[key] = self._read_at
        if new:  # a new reader has to connect
            self._owed.update(dict.fromkeys(list(self._owed), self._read_at))

    def what(self, keys: Collection[K]) -> str:
        """What does not arrive, for people."""
        since = [self._stalled.get(key, self._owed.get(key, self._read_at)) for key in keys]
        where = ", ".join(f"{_name(key)} at offset {self.next.get(key)} of {self._end(key)}" for key in keys)
        return (
            f"{self._whose} gets nothing more though the log holds more: {where}, for "
            f"{self._monotonic() - min(since):.1f} s"
        )

    @property
    def stalled(self) -> str:
        """What is not read though it is in the log, for people; "": nothing (any thread)."""
        stalled = [key for key in list(self._stalled) if key in self.next]
        return self.what(stalled) if stalled else ""


def _name(key: object) -> str:
    return f"{key[0]} [{key[1]}]" if isinstance(key, tuple) else f"partition {key}"


#: How long a look-up of log ends may take (s).
ASK_TIMEOUT_S = 5.0

#: How many new clients are tried before it ends, in 24 heartbeat intervals (of 1 to 3 s). A broker that has just thawed
#: on a busy machine may need longer than two of them for the first answer.
NEW_CLIENTS = 6


class MonitoredTail:
    """A :class:`~kafka_marshal.ports.Tail` over those that a cluster gives. One thread reads."""

    def __init__(self, cluster: Cluster, topic: str, positions: Mapping[int, int], ends: Mapping[int, int]) -> None:
        """Read each partition from its position. ends: where logs are known to end."""
        self._cluster = cluster
        self._topic = topic
        #: The tail that it reads with now.
        self.tail: Tail = cluster.tail(topic, positions)
        #: What it has to receive.
        self.monitor: FetchMonitor[int] = FetchMonitor(cluster.runtime, f"the reader of {topic!r}", self._ends)
        self.monitor.begin(positions)
        self._closed = False
        for cp, end in ends.items():
            self.monitor.knows(cp, end - 1)

    def _ends(self, cps: list[int]) -> dict[int, int]:
        marks = self._cluster.watermarks([(self._topic, cp) for cp in cps], ASK_TIMEOUT_S)
        return {cp: high for (_, cp), (_, high) in marks.items()}

    def read(self, timeout_s: float) -> TailBatch:
        """As a tail; raises KafkaUnavailableError if no new client gets what the log holds."""
        monitor = self.monitor
        monitor.begin_read()
        if missing := monitor.missing():
            self._mend(sorted(missing))
        batch = self.tail.read(timeout_s)
        monitor.end_read(timeout_s)
        for cp, entries in batch.records.items():
            monitor.received(cp, entries[-1][0] + 1)
        for cp, end in batch.ends.items():
            monitor.received(cp, end)
        if batch.is_full:
            monitor.flooded()
        return batch

    def rest(self) -> bool:
        """As a tail."""
        return self.tail.rest()

    def _mend(self, stalled: list[int]) -> None:
        monitor = self.monitor
        what = monitor.what(stalled)
        tries = monitor.tries(stalled)
        if tries == 0:
            log(logging.WARNING, "reader_deaf", "%s: it reads again from there", what)
            self.tail.restart({cp: monitor.next[cp] for cp in stalled})
        elif tries <= NEW_CLIENTS:
            log(logging.ERROR, "reader_deaf", "%s, nor when it read again from there: a new client reads on", what)
            self.renew()
        else:
            error = KafkaUnavailableError(
                f"{what}, and {NEW_CLIENTS} new clients did not get it either. Nothing more is done with what is not "
                "known, and what is held here ends by itself: others continue. Restart this process; if that does not "
                "help, look whether the brokers answer fetch requests from here (quotas, network)"
            )
            log(logging.ERROR, "reader_deaf", "%s", error)
            raise error
        monitor.tried(stalled, new=tries > 0)

    def renew(self) -> None:
        """Continue with a new client (called by the thread that reads)."""
        old, self.tail = self.tail, self._cluster.tail(self._topic, self.monitor.next)
        # The old client may never close: no thread waits for it.
        self._cluster.runtime.start(old.close, "kafka-marshal-close")
        if self._closed:
            self.tail.close()

    # As a tail.

    def log_ends(self) -> Mapping[int, int]:
        return self.tail.log_ends()

    def follow(self, positions: Mapping[int, int]) -> None:
        self.monitor.begin(positions)  # first: what comes is compared with it
        self.tail.follow(positions)

    def leave(self, partitions: Iterable[int]) -> None:
        left = list(partitions)
        self.tail.leave(left)
        self.monitor.end(left)

    def restart(self, positions: Mapping[int, int]) -> None:
        self.monitor.begin(positions)
        self.tail.restart(positions)

    def close(self) -> None:
        self._closed = True
        self.tail.close()


#: A wait for records is cut into slices of this length (s), for Ctrl-C and to report progress.
SLICE_S = 0.2


def bounds(cluster: Cluster, topic: str, timeout_s: float) -> dict[int, tuple[int, int]] | None:
    """Log start and high watermark of each partition, ascending; None if there is no such topic.

    Raises KafkaUnavailableError, also if a partition has no leader.
    """
    info = cluster.topic_info([topic], timeout_s).get(topic)
    if info is None:
        return None
    marks = cluster.watermarks([(topic, partition) for partition in range(info.partitions)], timeout_s)
    missing = [partition for partition in range(info.partitions) if (topic, partition) not in marks]
    if missing:
        raise KafkaUnavailableError(
            f"partition(s) {missing} of {topic!r} have no leader at the moment: what they hold can't be read. Try "
            "again when the brokers that hold them are back."
        )
    return {partition: marks[topic, partition] for partition in range(info.partitions)}


def read_range(
    cluster: Cluster,
    topic: str,
    ranges: Mapping[int, tuple[int, int]],
    timeout_s: float,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> Iterator[tuple[int, list[LogEntry]]]:
    """Runs of records of one partition each, ascending, from first to below end of each.

    progress: called with (offsets passed, offsets in all). Raises KafkaUnavailableError if nothing came for timeout_s,
    and what judge raises.
    """
    waiting = {partition: end for partition, (first, end) in sorted(ranges.items()) if first < end}
    if not waiting:
        return
    total = sum(end - ranges[partition][0] for partition, end in waiting.items())
    passed = dict.fromkeys(waiting, 0)
    trouble = ""
    tail = MonitoredTail(cluster, topic, {partition: ranges[partition][0] for partition in waiting}, waiting)
    try:
        until = cluster.runtime.monotonic() + timeout_s
        while waiting:
            batch = tail.read(SLICE_S)
            trouble = judge(topic, batch) or trouble
            for partition, entries in batch.records.items():
                end = waiting.get(partition)
                if end is None:
                    continue
                position = entries[-1][0] + 1
                passed[partition] = min(position, end) - ranges[partition][0]
                if position >= end:
                    del waiting[partition]
                    entries = [entry for entry in entries if entry[0] < end]
                if entries:
                    yield partition, entries
            for partition, end in batch.ends.items():
                if end >= waiting.get(partition, end + 1):
                    del waiting[partition]
            if batch.records or batch.ends:
                until = cluster.runtime.monotonic() + timeout_s
            elif cluster.runtime.monotonic() > until:
                raise KafkaUnavailableError(
                    f"{topic!r}: nothing read for {timeout_s:g} s, and partition(s) {sorted(waiting)} are not read to "
                    f"their end{trouble}. Is the broker that leads them reachable?"
                )
            if progress is not None:
                progress(sum(passed.values()), total)
    finally:
        tail.close()


def judge(topic: str, batch: TailBatch) -> str:
    """Raise the faults that end reading; returns the text of the last other one (they pass), in parentheses.

    Raises TopicChangedError if the log does not have the position (any more), AuthorizationError, and
    KafkaUnavailableError if the client can't continue.
    """
    trouble = ""
    for fault in batch.faults:
        where = f"{topic!r}" if fault.partition is None else f"{topic!r} partition {fault.partition}"
        match fault.kind:
            case FaultKind.OUT_OF_RANGE | FaultKind.UNKNOWN_TOPIC:
                raise TopicChangedError(
                    f"{where} was cut, deleted or recreated while it was read ({fault.message}). What was read before "
                    "is of the old log. Do it again"
                )
            case FaultKind.REFUSED:
                raise AuthorizationError(f"{where} can't be read: {fault.message}. {grant('READ', 'topic', [topic])}")
            case FaultKind.FATAL:
                raise KafkaUnavailableError(f"{where}: the Kafka client gave up ({fault.message}). Do it again")
            case _:
                trouble = f" ({fault.message})"
    return trouble
