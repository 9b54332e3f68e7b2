"""The coordination log for those that only read it: up to its end as it was, or onwards.

`Log` reads without judging the topic's settings: a log that a worker would refuse (L1) is just the one somebody wants
to look at. What makes reading itself wrong is refused here too: a log whose beginning is gone, another CP count than
it was made with (L2).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from kafka_marshal.errors import LogCutError, TopicChangedError, TopicMissingError
from kafka_marshal.logs import log
from kafka_marshal.node.coordination_topic import DEFAULT_TOPIC, snapshots_topic
from kafka_marshal.node.log_reader import SLICE_S, bounds, judge, read_range
from kafka_marshal.node.monitored_tail import MonitoredTail
from kafka_marshal.ports import Cluster, LogEntry
from kafka_marshal.snapshots.reader import SnapshotReader
from kafka_marshal.snapshots.start import CpStart
from rationalizer import World
from rationalizer.marker import count_of

__all__ = ["Log", "Source"]


@dataclass(frozen=True, slots=True)
class Source:
    """Where a log is read from."""

    topic: str
    #: How long a broker has to answer (s).
    timeout: float
    #: bootstrap.servers and the other properties of librdkafka; asked for again at each connection.
    connection: Callable[[], tuple[str, dict[str, str]]]

    def connect(self) -> Cluster:
        """A new client of the cluster."""
        from kafka_marshal.adapters.kafka import KafkaCluster

        return KafkaCluster(*self.connection())


class Log:
    """The coordination topic of one cluster: how many CPs, from where to where (*blocking*)."""

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
        #: For each CP the first offset that is left, and its high watermark when asked (C15).
        self.starts: dict[int, int] = {cp: low for cp, (low, _) in marks.items()}
        self.ends: dict[int, int] = {cp: high for cp, (_, high) in marks.items()}

    def refuse_if_cut(self) -> None:
        """Raise LogCutError where the log does not reach back to its beginning (L1)."""
        cut = [cp for cp, start in self.starts.items() if start > 0]
        if cut:
            raise LogCutError(
                f"the log of {self.topic!r} does not reach back to its beginning in partition(s) {cut}: who held what "
                "before can't be known from what is left of it."
            )

    def first_worlds(self, cps: Iterable[int]) -> dict[int, World]:
        """The state that each of these CPs begins with (*blocking*): empty, or where it was pruned a snapshot (S3).

        Says so where history is gone. Raises LogCutError where no snapshot bridges the gap.
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
                f"old log was removed (kafka-marshal prune) in partition(s) {where}. What is told begins there; who "
                "holds a lease at that moment may have had it for longer.",
            )
        return worlds

    def read(
        self,
        partitions: Mapping[int, int] | None = None,
        ends: Mapping[int, int] | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> Iterator[tuple[int, list[LogEntry]]]:
        """Runs of records of one CP each, ascending, up to the ends found at first (*blocking*).

        partitions: from which offset to read each CP; default: all from their start. ends: up to which instead.
        progress: called with (offsets passed, offsets in all).
        """
        ends = self.ends if ends is None else ends
        ranges = {cp: (first, ends[cp]) for cp, first in (self.starts if partitions is None else partitions).items()}
        return read_range(self._cluster, self.topic, ranges, self._timeout_s, progress=progress)

    def follow(self, positions: Mapping[int, int]) -> Iterator[dict[int, list[LogEntry]]]:
        """What is appended from these offsets on, batch by batch, for ever; an empty one now and then."""
        tail = MonitoredTail(self._cluster, self.topic, positions, {})
        try:
            while True:
                batch = tail.read(SLICE_S)
                judge(self.topic, batch)
                yield batch.records
        finally:
            tail.close()

    def check_marker(self, cp: int, first: LogEntry) -> None:
        """Refuse a log that was made with another number of CPs (L2): records would be judged by a wrong routing."""
        count = count_of(first[2]) if first[0] == 0 else None
        if count is not None and count != self.partitions:
            raise TopicChangedError(
                f"{self.topic!r} has {self.partitions} partitions, but its first record in partition {cp} says that it "
                f"was made with {count}: which of its records count can't be said. Make a new topic."
            )
