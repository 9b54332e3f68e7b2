"""The coordination topic for those that only read it: up to its present end, or followed.

`Log` does not check the topic's settings: a log that workers refuse (L1) is the one to examine. It refuses only what
makes reading wrong: a log whose beginning is gone, and another number of partitions than at its creation (L2).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kafka_marshal.errors import LogCutError, TopicChangedError, TopicMissingError
from kafka_marshal.logs import log
from kafka_marshal.node.log_reader import SLICE_S, MonitoredTail, bounds, judge, read_range
from kafka_marshal.node.pacing import LONGEST_STEP_MS, MANY_RECORDS
from kafka_marshal.snapshots.reader import SnapshotReader
from kafka_marshal.snapshots.start import CpStart
from kafka_marshal.topic_names import DEFAULT_TOPIC, snapshots_topic
from rationalizer import World
from rationalizer.marker import count_of

if TYPE_CHECKING:
    from kafka_marshal.ports import Cluster, LogEntry

#: What is shown again and again reads the log in such steps (s), so that it costs the broker no more than a member.
LOOK_STEP_S = LONGEST_STEP_MS / 1000


@dataclass(frozen=True, slots=True)
class Source:
    """Where a log is read from."""

    topic: str
    #: How long a broker has to answer (s).
    timeout: float
    #: Returns bootstrap.servers and the other properties of librdkafka; called for each connection.
    connection: Callable[[], tuple[str, dict[str, str]]]

    #: Opens the log of a cluster for its whole history: as it is (None), or with its archive.
    history: Callable[[Cluster, str, float], Log] | None = None

    def open(self, cluster: Cluster) -> Log:
        """The log, with its archive if there is one (*blocking*)."""
        return (self.history or Log)(cluster, self.topic, self.timeout)

    def connect(self) -> Cluster:
        """A new client of the cluster."""
        from kafka_marshal.adapters.kafka import KafkaCluster

        return KafkaCluster(*self.connection())


class Log:
    """The coordination topic of one cluster: its partitions and their bounds (*blocking*)."""

    def __init__(self, cluster: Cluster, topic: str, timeout_s: float) -> None:
        """Find the topic and where its log ends now. Raises TopicMissingError, KafkaUnavailableError."""
        self._cluster = cluster
        self._timeout_s = timeout_s
        self.topic = topic
        marks = bounds(cluster, topic, timeout_s)
        if marks is None:
            option = "" if topic == DEFAULT_TOPIC else f" --topic {topic}"
            raise TopicMissingError(
                f"the coordination topic {topic!r} does not exist on this cluster. "
                f"Create it with kafka-marshal init{option}, or name another one with --topic."
            )
        self.partitions: int = len(marks)
        #: For each CP its first offset, and its high watermark at the start (C15).
        self.starts: dict[int, int] = {cp: low for cp, (low, _) in marks.items()}
        self.ends: dict[int, int] = {cp: high for cp, (_, high) in marks.items()}

    def refuse_if_cut(self) -> None:
        """Raise LogCutError if the beginning of the log is gone."""
        cut = [cp for cp, start in self.starts.items() if start > 0]
        if cut:
            raise LogCutError(
                f"the log of {self.topic!r} does not reach back to its beginning in partition(s) {cut}: who held what "
                "before can't be known from what is left of it."
            )

    def first_worlds(self, cps: Iterable[int]) -> dict[int, World]:
        """The initial state of each of these CPs (*blocking*): empty, or a snapshot if the log was pruned.

        Logs a warning if history is gone. Raises LogCutError if no snapshot reaches the first offset.
        """
        cut = {cp: start for cp, start in self.starts.items() if start > 0 and cp in set(cps)}
        worlds = {cp: World(cp, self.partitions) for cp in cps}
        if not cut:
            return worlds
        reader = SnapshotReader.find(self._cluster, snapshots_topic(self.topic), self._timeout_s)
        if reader is None or len(reader.partitions) != self.partitions:
            self.refuse_if_cut()
        else:
            reader.read_all(self.starts)
            for cp, start in cut.items():
                stored = reader.partitions[cp]
                worlds[cp] = CpStart(cp, self.partitions, start, self.ends[cp]).from_oldest(stored.sorted())
            where = ", ".join(f"{cp} before offset {worlds[cp].next_offset}" for cp in cut)
            log(
                logging.WARNING,
                "log_pruned",
                f"old log was removed (kafka-marshal prune) in partition(s) {where}. The history begins there; a "
                "member that holds a lease at that moment may have held it for longer.",
            )
        return worlds

    def worlds_before(self, cps: Iterable[int], time_ms: int) -> dict[int, World]:
        """A state of each of these CPs that is not after this log time, if there is one without a snapshot."""
        return self.first_worlds(cps)

    def offsets_for_time(self, cps: Iterable[int], time_ms: int) -> dict[int, int]:
        """First offset of each of these CPs whose timestamp is at or after time_ms, else its end (*blocking*)."""
        found = self._cluster.offsets_for_time([(self.topic, cp) for cp in cps], time_ms, self._timeout_s)
        return {cp: offset for (_, cp), offset in found.items()}

    def read(
        self,
        partitions: Mapping[int, int] | None = None,
        ends: Mapping[int, int] | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> Iterator[tuple[int, list[LogEntry]]]:
        """Runs of records of one CP each, ascending, up to the ends found at the start (*blocking*).

        partitions: first offset of each CP to read; default: all of them from their start. ends: other ends, exclusive.
        progress: called with (offsets passed, offsets in all).
        """
        ends = self.ends if ends is None else ends
        ranges = {cp: (first, ends[cp]) for cp, first in (self.starts if partitions is None else partitions).items()}
        return read_range(self._cluster, self.topic, ranges, self._timeout_s, progress=progress)

    def follow(self, positions: Mapping[int, int]) -> Iterator[dict[int, list[LogEntry]]]:
        """Records from these offsets on, in batches and steps, without end; a batch may be empty."""
        tail = MonitoredTail(self._cluster, self.topic, positions, {})
        try:
            while True:
                batch = tail.read(SLICE_S)
                judge(self.topic, batch)
                yield batch.records
                if 0 < sum(map(len, batch.records.values())) < MANY_RECORDS and tail.rest():
                    time.sleep(LOOK_STEP_S)
        finally:
            tail.close()

    def check_marker(self, cp: int, first: LogEntry) -> None:
        """Raise TopicChangedError if the log was created with another number of CPs: routing differs."""
        count = count_of(first[2]) if first[0] == 0 else None
        if count is not None and count != self.partitions:
            raise TopicChangedError(
                f"{self.topic!r} has {self.partitions} partitions, but its first record in partition {cp} says that it "
                f"was made with {count}: which of its records count can't be said. Make a new topic."
            )
