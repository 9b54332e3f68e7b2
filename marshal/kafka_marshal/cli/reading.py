"""The coordination log for commands that look at it: connected, read up to its end as it was, or onwards.

`Log` reads without judging the topic's settings: a log that a worker would refuse (L1) is just the one somebody wants
to look at. What makes reading itself wrong is refused here too: a log whose beginning is gone, another CP count than
it was made with (L2).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from time import monotonic

from kafka_marshal.cli.failures import CommandError
from kafka_marshal.cli.names import near
from kafka_marshal.cli.options import Options
from kafka_marshal.cli.output import say_warning, warnings_from_the_library
from kafka_marshal.errors import (
    AuthorizationError,
    KafkaUnavailableError,
    LogCutError,
    MarshalError,
    TopicChangedError,
    TopicMissingError,
)
from kafka_marshal.node.coordination_topic import DEFAULT_TOPIC, snapshots_topic
from kafka_marshal.ports import Cluster, FaultKind, LogEntry, Tail, TailBatch
from kafka_marshal.snapshots.reader import SnapshotReader
from kafka_marshal.snapshots.start import CpStart
from rationalizer import RejectedValueError, Tick, World, decode

__all__ = ["Log", "connected", "marker_count"]

#: A wait for records looks up this often, for Ctrl-C and to tell how far it is.
_SLICE_S = 0.2


@contextmanager
def connected(options: Options) -> Iterator[Cluster]:
    """The cluster that the options name. Nobody is asked anything yet."""
    servers, properties = options.connection()
    from kafka_marshal.adapters.kafka import KafkaCluster

    with warnings_from_the_library(options.debug):
        cluster = KafkaCluster(servers, properties)
        try:
            yield cluster
        except TopicMissingError as error:
            name_the_topic(error, cluster, options)
            raise
        finally:
            cluster.close()


def name_the_topic(error: TopicMissingError, cluster: Cluster, options: Options) -> None:
    """Add the topic that may be meant: a second coordination topic beside the first would share out the work twice."""
    try:
        topics = cluster.topics(options.timeout)
    except MarshalError:
        return
    hint = near(options.topic, topics.keys() - {snapshots_topic(name) for name in topics})
    if hint:
        error.add_note(f"There is a topic of a similar name{hint}")


def marker_count(value: bytes | None) -> int | None:
    """How many CPs a CP's first record says there are (L2); None where it is no such marker."""
    try:
        record = decode(value) if value is not None else None
    except RejectedValueError:
        return None
    prefix, equals, count = record.group_id.partition("=") if isinstance(record, Tick) else ("", "", "")
    return int(count) if prefix == "partitions" and equals and count.isascii() and count.isdigit() else None


class Log:
    """The coordination topic of one cluster: how many CPs, from where to where (*blocking*)."""

    def __init__(self, cluster: Cluster, topic: str, timeout_s: float) -> None:
        """Find the topic and where its log ends now. Raises TopicMissingError, KafkaUnavailableError."""
        self._cluster = cluster
        self._timeout_s = timeout_s
        self.topic = topic
        #: Why no broker answers, as far as the client said.
        self._trouble = ""
        info = cluster.topic_info([topic], timeout_s).get(topic)
        if info is None:
            option = "" if topic == DEFAULT_TOPIC else f" --topic {topic}"
            raise TopicMissingError(
                f"the coordination topic {topic!r} does not exist on this cluster. "
                f"Create it with kafka-marshal init{option}, or name another one with --topic."
            )
        self.partitions = info.partitions
        marks = cluster.watermarks([(topic, cp) for cp in range(info.partitions)], timeout_s)
        missing = [cp for cp in range(info.partitions) if (topic, cp) not in marks]
        if missing:
            raise KafkaUnavailableError(
                f"partition(s) {missing} of {topic!r} have no leader at the moment: what they hold can't be read. Try "
                "again when the brokers that hold them are back."
            )
        #: For each CP the first offset that is left, and its high watermark when asked (C15).
        self.starts = {cp: low for (_, cp), (low, _) in sorted(marks.items())}
        self.ends = {cp: high for (_, cp), (_, high) in sorted(marks.items())}

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
        if reader is None or len(reader.shelves) != self.partitions:
            self.refuse_if_cut()
        else:
            reader.read_all(self.starts)
            for cp, start in cut.items():
                shelf = reader.shelves[cp]
                worlds[cp] = CpStart(cp, self.partitions, start, self.ends[cp]).from_oldest(shelf.sorted())
            where = ", ".join(f"{cp} before offset {worlds[cp].next_offset}" for cp in cut)
            say_warning(
                f"old log was removed (kafka-marshal prune) in partition(s) {where}. What is told begins there; who "
                "holds a lease at that moment may have had it for longer."
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
        positions = dict(self.starts if partitions is None else partitions)
        ends = {cp: (ends or self.ends)[cp] for cp in positions}
        waiting = {cp for cp, position in positions.items() if position < ends[cp]}
        total = sum(ends[cp] - positions[cp] for cp in waiting)
        if not waiting:
            return
        tail = self._cluster.tail(self.topic, {cp: positions[cp] for cp in sorted(waiting)})
        passed = dict.fromkeys(waiting, 0)
        try:
            until = monotonic() + self._timeout_s
            while waiting:
                batch = tail.read(_SLICE_S)
                self._judge(batch)
                for cp, entries in batch.records.items():
                    if cp not in waiting:
                        continue
                    position = entries[-1][0] + 1
                    passed[cp] = min(position, ends[cp]) - positions[cp]
                    if position > ends[cp]:
                        entries = [entry for entry in entries if entry[0] < ends[cp]]
                    if position >= ends[cp]:
                        waiting.discard(cp)
                    if entries:
                        yield cp, entries
                waiting -= {cp for cp, end in batch.ends.items() if cp in waiting and end >= ends[cp]}
                if batch.records or batch.ends:
                    until = monotonic() + self._timeout_s
                elif monotonic() > until:
                    raise KafkaUnavailableError(
                        f"{self.topic!r}: nothing read for {self._timeout_s:g} s, and partition(s) {sorted(waiting)} "
                        f"are not read to their end{self._trouble}. Is the broker that leads them reachable?"
                    )
                if progress is not None:
                    progress(sum(passed.values()), total)
        finally:
            tail.close()

    def follow(self, positions: Mapping[int, int]) -> Iterator[dict[int, list[LogEntry]]]:
        """What is appended from these offsets on, batch by batch, for ever; an empty one now and then."""
        tail: Tail = self._cluster.tail(self.topic, positions)
        try:
            while True:
                batch = tail.read(_SLICE_S)
                self._judge(batch)
                yield batch.records
        finally:
            tail.close()

    def check_marker(self, cp: int, first: LogEntry) -> None:
        """Refuse a log that was made with another number of CPs (L2): records would be judged by a wrong routing."""
        count = marker_count(first[2]) if first[0] == 0 else None
        if count is not None and count != self.partitions:
            raise TopicChangedError(
                f"{self.topic!r} has {self.partitions} partitions, but its first record in partition {cp} says that it "
                f"was made with {count}: which of its records count can't be said. Make a new topic."
            )

    def _judge(self, batch: TailBatch) -> None:
        """Faults that end reading; others pass by themselves, or the wait for records runs out."""
        for fault in batch.faults:
            where = f"{self.topic!r}" if fault.partition is None else f"{self.topic!r} partition {fault.partition}"
            match fault.kind:
                case FaultKind.OUT_OF_RANGE | FaultKind.UNKNOWN_TOPIC:
                    raise TopicChangedError(
                        f"{where} was cut, deleted or made anew while it was read ({fault.message}). What was shown "
                        "before is of the old log. Run the command again."
                    )
                case FaultKind.REFUSED:
                    raise AuthorizationError(f"{where} can't be read: {fault.message}.")
                case FaultKind.FATAL:
                    raise CommandError(f"{where}: the Kafka client gave up ({fault.message}). Run the command again.")
                case _:
                    self._trouble = f" ({fault.message})"
