"""A replica: tails the coordination topic into one World per CP (C15), and refuses what it can't trust (L1, L2).

It starts from snapshots where there are any (S3), so that being ready takes as long as the state is large, and not as
long as the log.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Iterable
from enum import Enum
from operator import itemgetter

from kafka_marshal.errors import (
    AuthorizationError,
    KafkaUnavailableError,
    LogCutError,
    TopicChangedError,
    TopicUnsafeError,
)
from kafka_marshal.logs import log
from kafka_marshal.node.coordination_topic import (
    ADDRESSES_S,
    check_one_cluster,
    check_topic,
    snapshots_topic,
    topic_option,
)
from kafka_marshal.node.log_reader import read_range
from kafka_marshal.ports import Cluster, FaultKind, LogEntry, Tail, TailBatch, TailFault, TopicInfo
from kafka_marshal.snapshots.reader import Place, SnapshotReader
from kafka_marshal.snapshots.start import CpStart, Difference
from rationalizer import Outcome, World
from rationalizer.marker import said_in
from rationalizer.snapshot import digest_of
from rationalizer.snapshot_log import due, interval, next_due

__all__ = ["Applied", "Begin", "Due", "Replica"]

#: Called for each record applied once the replica has caught up: CP, offset, outcome.
Applied = Callable[[int, int, Outcome], None]

#: Called where a snapshot of a CP is due, with the state at exactly this place: CP, next offset, bytes (S1, S2).
Due = Callable[[int, int, bytes], None]

_REMEDY = (
    "Leases of this process are in doubt and end by themselves. Restart it; if the topic was made anew on purpose, all "
    "members must restart"
)

#: While it catches up, a replica looks only so many intervals before the end whether a snapshot is due: the two that a
#: start needs (S3), with what may have passed meanwhile.
NOTED_INTERVALS = 3

#: Where the number of CPs was doubled, each lease has an even chance to stay where it was. So many do not all.
TELLING_LEASES = 40

_OFFSET = itemgetter(0)


class Begin(Enum):
    """Where a replica begins to read."""

    #: From snapshots (S3): for those who need the state as it is now.
    SNAPSHOT = "snapshot"
    #: As far back as the log goes: for those who need its history.
    HISTORY = "history"
    #: As HISTORY, and every snapshot there is is compared with the replay: for those who check.
    CHECK = "check"


class Replica:
    """Worlds of all CPs of one coordination topic. Not thread-safe: the caller locks around ``apply``."""

    def __init__(
        self,
        cluster: Cluster,
        topic: str,
        timeout_s: float,
        begin: Begin = Begin.HISTORY,
        due: Due | None = None,
    ) -> None:
        """Check the topic (L1), find where its log ends now, read snapshots, and start to read (*blocking*).

        due is called where a snapshot is due (S2); while the replica catches up, at the last few places only.
        Raises TopicMissingError, TopicUnsafeError, LogCutError (no snapshot reaches the log's start),
        AuthorizationError, KafkaUnavailableError, ConfigurationError (bootstrap addresses of two clusters).
        """
        self.topic = topic
        self.snapshots_topic = snapshots_topic(topic)
        self._cluster = cluster
        self._timeout_s = timeout_s
        self._begin = begin
        self._due = due
        #: Whether the last records seen carried the broker's time (T1).
        self._stamped = True
        #: Why the log of snapshots could not be read, though there may be one.
        self._unreadable: AuthorizationError | None = None
        # Nobody here waits for the other: a start is short.
        check_one_cluster(cluster)
        with cluster.runtime.executor(1, "kafka-marshal-start") as aside:
            reading = aside.submit(self._read_snapshots)
            config, problems = check_topic(cluster, topic, timeout_s)
            self.info: TopicInfo = config.info
            cps = range(config.info.partitions)
            marks = self._marks(cps)
            #: The log of snapshots; None where it can't be used.
            self.snapshots = reading.result()
        for problem in problems:
            log(logging.WARNING, "topic_settings", "coordination topic %s: %s", topic, problem)
        #: Why there are no snapshots, for people; "" where there are.
        self.lacks_snapshots = self._look_at_snapshots()
        if any(place.next_offset > marks[cp][1] for cp in cps for place in self._places(cp)):
            # Written since we asked. One that lies beyond the log's end after it was read can't be true.
            marks = self._marks(cps)
        #: Where each CP's log ended when asked (C15).
        self._ends = {cp: marks[cp][1] for cp in cps}
        is_cut = any(low > 0 for low, _ in marks.values())
        if self.snapshots is not None and (begin is Begin.CHECK or (begin is Begin.HISTORY and is_cut)):
            self.snapshots.read_all({cp: low for cp, (low, _) in marks.items()})
        self.starts = {cp: CpStart(cp, len(cps), *marks[cp]) for cp in cps}
        self.worlds = {cp: self._first_world(cp) for cp in cps}
        self._check_markers_passed_over()
        #: CPs that have not reached the high watermark found at start, with it (C15).
        self.behind = {cp: end for cp, end in sorted(self._ends.items()) if end > self.worlds[cp].next_offset}
        self._begun_at = sum(world.next_offset for world in self.worlds.values())
        self.target_records = sum(self._ends.values()) - self._begun_at
        #: CPs whose start was refuted: they go further back at the next read.
        self._refuted: set[int] = set()
        #: Where apply stops to look: the next place to compare, or where a snapshot may be due.
        self._stops = {cp: self._next_stop(cp) for cp in cps}
        check_one_cluster(cluster, ADDRESSES_S)
        self._tail: Tail = cluster.tail(topic, {cp: world.next_offset for cp, world in self.worlds.items()})

    # Starting (S3).

    def _read_snapshots(self) -> SnapshotReader | None:
        try:
            reader = SnapshotReader.find(self._cluster, self.snapshots_topic, self._timeout_s)
            if reader is not None and self._begin is Begin.SNAPSHOT:
                reader.read_newest(2)
        except AuthorizationError as error:
            # Snapshots are a short cut. Without the right to read them the log itself is read, where it is whole.
            self._unreadable = error
            return None
        return reader

    def _look_at_snapshots(self) -> str:
        if self._unreadable is not None:
            return f"{self.snapshots_topic!r} is not used ({self._unreadable})"
        if self.snapshots is None:
            return f"there is no topic {self.snapshots_topic!r} "
        found = len(self.snapshots.shelves)
        if found != self.info.partitions:
            self.snapshots = None
            return f"{self.snapshots_topic!r} has {found} partitions, not {self.info.partitions}, and is not used"
        return ""

    def _marks(self, cps: Iterable[int]) -> dict[int, tuple[int, int]]:
        marks = self._cluster.watermarks([(self.topic, cp) for cp in cps], self._timeout_s)
        missing = sorted(cp for cp in cps if (self.topic, cp) not in marks)
        if missing:
            raise KafkaUnavailableError(
                f"partition(s) {missing} of {self.topic!r} have no leader at the moment; nothing was claimed. Try "
                "again when the brokers that hold them are back"
            )
        return {cp: found for (_, cp), found in marks.items()}

    def _places(self, cp: int) -> list[Place]:
        return [] if self.snapshots is None else self.snapshots.shelves[cp].sorted()

    def _first_world(self, cp: int) -> World:
        """Where this CP's replay starts, or starts once more, further back (*blocking*)."""
        try:
            return self._find_start(cp)
        except LogCutError as error:
            if self._unreadable is not None:
                raise self._unreadable from error
            if self.snapshots is not None and cp in self.snapshots.leaderless:
                raise KafkaUnavailableError(
                    f"partition {cp} of {self.snapshots_topic!r} has no leader at the moment, and since old log was "
                    "removed, a start needs its snapshots. Nothing was claimed. Try again when the brokers that hold "
                    "it are back"
                ) from error
            raise

    def _find_start(self, cp: int) -> World:
        start = self.starts[cp]
        if self._begin is not Begin.SNAPSHOT:
            return start.from_oldest(self._places(cp))
        world = start.from_snapshot(self._places(cp))
        while world is None and self.snapshots is not None and self.snapshots.read_older(cp):
            world = start.from_snapshot(self._places(cp))
        return start.from_log_start(self._places(cp)) if world is None else world

    def _check_markers_passed_over(self) -> None:
        """L2 where a start passes the first record over: a lease that is routed elsewhere refutes its snapshot (S1).

        With few leases that is no proof, and the first records themselves are looked at (*blocking*).
        """
        passed = [cp for cp, world in self.worlds.items() if world.next_offset > 0 and self.starts[cp].log_start == 0]
        if passed and sum(world.lease_count for world in self.worlds.values()) < TELLING_LEASES:
            first = dict.fromkeys(passed, (0, 1))
            for cp, entries in read_range(self._cluster, self.topic, first, self._timeout_s):
                self._check_marker(cp, entries[0][2])

    def _go_back(self) -> None:
        """Start the refuted CPs again, further back, and read on from there (*blocking*)."""
        for cp in sorted(self._refuted):
            log(
                logging.WARNING,
                "snapshot_differs",
                "partition %d of %r: snapshots differ from a replay from offset %d; starting further back",
                cp,
                self.topic,
                self.starts[cp].begun_at,
            )
            before = self.worlds[cp].next_offset
            self.worlds[cp] = self._first_world(cp)
            self._begun_at -= before - self.worlds[cp].next_offset
            self.target_records += before - self.worlds[cp].next_offset
            self.behind[cp] = self._ends[cp]
            self._stops[cp] = self._next_stop(cp)
        self._refuted.clear()
        self._tail.close()
        self._tail = self._cluster.tail(self.topic, {cp: w.next_offset for cp, w in self.worlds.items()})

    @property
    def differences(self) -> list[Difference]:
        """Snapshots that were found wrong at start; complete once caught up."""
        return [found for _, start in sorted(self.starts.items()) for found in start.differences]

    @property
    def caught_up(self) -> bool:
        """The state of the world is determined (C15)."""
        return not self.behind

    @property
    def records_read(self) -> int:
        """How much of the log is applied, in offsets over all CPs, since where the replay began."""
        return sum(world.next_offset for world in self.worlds.values()) - self._begun_at

    def read(self, timeout_s: float) -> TailBatch:
        """Wait for news; ``apply`` takes it in. Raises as the constructor does where a start has to go further back."""
        if self._refuted:
            self._go_back()
        return self._tail.read(timeout_s)

    def apply(self, batch: TailBatch, applied: Applied | None = None, *, history: bool = False) -> None:
        """Apply what was read; report each record once caught up, or from the first one on (history).

        Raises an error of the CoordinationTopicError family, or AuthorizationError, where reading can't go on: its log
        was cut or made anew, made for another number of CPs, or has lost its beginning to compaction.
        """
        live = history or self.caught_up
        if self.caught_up:
            self._watch_stamps(batch)
        for cp, entries in batch.records.items():
            self._apply_entries(self.worlds[cp], entries, applied if live else None)
        for cp, end in batch.ends.items():
            self._reached(cp, end)
        for cp in batch.records:
            self._reached(cp, self.worlds[cp].next_offset)
        for fault in batch.faults:
            self._judge(fault)

    def _watch_stamps(self, batch: TailBatch) -> None:
        """Say so where the topic was altered under us: without the broker's stamps no lease ever goes stale (T1)."""
        for cp, entries in batch.records.items():
            if self._stamped and entries[-1][1] < 0:
                self._stamped = False
                log(
                    logging.ERROR,
                    "stamps_missing",
                    "records of %r (partition %d, offset %d) do not carry the broker's time any more: the topic was "
                    "altered to CreateTime. Log time stands still: leases go on, but those of members that die are not "
                    "taken over, and no member can start. kafka-marshal init%s says how to mend it",
                    self.topic,
                    cp,
                    entries[-1][0],
                    topic_option(self.topic),
                )
            elif not self._stamped and entries[-1][1] >= 0:
                self._stamped = True
                text = "records of %r carry the broker's time again; all goes on as before"
                log(logging.WARNING, "stamps_back", text, self.topic)

    def _apply_entries(self, world: World, entries: list[LogEntry], applied: Applied | None) -> None:
        cp = world.partition
        if world.next_offset == 0 and entries:
            self._check_first(cp, entries[0])
        begin = 0
        while begin < len(entries) and cp not in self._refuted and world.required_level is None:
            # Up to the record that takes the next offset to the stop: what is looked at there is of exactly that place.
            end = bisect_left(entries, self._stops[cp] - 1, begin, key=_OFFSET) + 1
            run = entries if begin == 0 and end >= len(entries) else entries[begin:end]
            if applied is None:
                world.apply_many(run)
            else:
                for offset, timestamp_ms, value in run:
                    applied(cp, offset, world.apply(offset, timestamp_ms, value))
            begin = end
            if world.next_offset >= self._stops[cp]:
                self._stop(world)

    def _next_stop(self, cp: int) -> int:
        """The next offset at which there is something to compare, or a snapshot may be due."""
        stop = next_due(self.worlds[cp].next_offset)
        place = self.starts[cp].next_place
        return stop if place is None else min(stop, place)

    def _stop(self, world: World) -> None:
        """Look at a world that has just reached a stop, before the next record."""
        cp, start = world.partition, self.starts[world.partition]
        is_due = self._is_due(world)
        if is_due or start.next_place is not None:
            state = world.snapshot()
            start.reached(world.next_offset, digest_of(state))
            if is_due and self._due is not None:
                self._due(cp, world.next_offset, state)
            self._judge_start(cp)
        self._stops[cp] = self._next_stop(cp)

    def _is_due(self, world: World) -> bool:
        """Whether the state is wanted as a snapshot here; of a long history, only near its end."""
        every = interval(world.lease_count)
        if self._due is None or not due(self._stops[world.partition] - 1, world.next_offset, every):
            return False
        end = self.behind.get(world.partition)
        return end is None or world.next_offset > end - NOTED_INTERVALS * every

    def _judge_start(self, cp: int) -> None:
        if self._begin is Begin.SNAPSHOT and self.starts[cp].is_refuted:
            self._refuted.add(cp)

    def _reached(self, cp: int, offset: int) -> None:
        if cp not in self._refuted and offset >= self.behind.get(cp, offset + 1):
            self.starts[cp].ended()
            self._judge_start(cp)
            if cp not in self._refuted:
                del self.behind[cp]

    def _check_first(self, cp: int, first: LogEntry) -> None:
        """What a replay from the beginning begins with (L1, L2)."""
        if first[0] > 0:
            raise TopicUnsafeError(
                f"partition {cp} of {self.topic!r} begins at offset 0, but its first record has offset {first[0]}: "
                "what stood before it was compacted away, and others perhaps with it. Who holds what can't be known "
                "from what is left, so nothing was claimed. Let the members at work finish, then make a new topic: "
                "kafka-marshal init --topic NEW-NAME"
            )
        self._check_marker(cp, first[2])

    def _check_marker(self, cp: int, value: bytes | None) -> None:
        """The first record says how many CPs there were when the topic was made (L2)."""
        count = said_in(value)
        if count is not None and count != str(len(self.worlds)):
            raise TopicChangedError(
                f"{self.topic!r} has {len(self.worlds)} partitions, but its first record in partition {cp} says that "
                f"it was made with {count}: members that count differently would not see each other's claims. Nothing "
                "was claimed. Make a new topic with the count you want, and move all members to it"
            )

    def _judge(self, fault: TailFault) -> None:
        where = f"{self.topic!r}" if fault.partition is None else f"{self.topic!r} partition {fault.partition}"
        match fault.kind:
            case FaultKind.OUT_OF_RANGE:
                raise TopicChangedError(
                    f"{where}: our position is not in the log any more ({fault.message}): it was cut or made anew. "
                    f"{_REMEDY}"
                )
            case FaultKind.UNKNOWN_TOPIC:
                raise TopicChangedError(f"{where} is gone ({fault.message}). {_REMEDY}")
            case FaultKind.REFUSED:
                raise AuthorizationError(f"{where} can't be read: {fault.message}. {_REMEDY}")
            case FaultKind.FATAL:
                log(
                    logging.WARNING,
                    "reader_replaced",
                    "%s: reader replaced after a fatal error: %s",
                    where,
                    fault.message,
                )
                self._tail.close()
                self._tail = self._cluster.tail(self.topic, {cp: w.next_offset for cp, w in self.worlds.items()})
            case _:
                log(logging.WARNING, "fault", "%s: %s", where, fault.message)

    def check(self, info: TopicInfo | None) -> None:
        """Compare the topic as it is now with the one we read (L2); raises TopicChangedError.

        ConfigurationError where a bootstrap address has turned up that is another cluster's.
        """
        check_one_cluster(self._cluster)
        if info is None:
            raise TopicChangedError(f"{self.topic!r} is gone. {_REMEDY}")
        if info.partitions != self.info.partitions:
            raise TopicChangedError(
                f"{self.topic!r} has {info.partitions} partitions now, it had {self.info.partitions}: members that "
                "count "
                f"differently do not see each other's claims. {_REMEDY}"
            )
        if info.topic_id and self.info.topic_id and info.topic_id != self.info.topic_id:
            raise TopicChangedError(f"{self.topic!r} was deleted and made anew. {_REMEDY}")

    def catch_up(
        self,
        timeout_s: float,
        progress: Callable[[int, int], None] | None = None,
        applied: Applied | None = None,
    ) -> None:
        """Read up to the high watermark found at start (*blocking*), for those who only look.

        progress is called with (records applied, records there were), applied for each record. Raises
        KafkaUnavailableError when nothing came for timeout_s.
        """
        deadline = self._cluster.runtime.monotonic() + timeout_s
        while not self.caught_up:
            batch = self.read(0.2)
            self.apply(batch, applied, history=True)
            if batch.records or batch.ends:
                deadline = self._cluster.runtime.monotonic() + timeout_s
            elif self._cluster.runtime.monotonic() > deadline:
                raise KafkaUnavailableError(
                    f"{self.topic!r}: nothing read for {timeout_s:g} s, and partition(s) {sorted(self.behind)} are not "
                    "read to their end. Is the broker that leads them reachable?"
                )
            if progress is not None:
                progress(self.records_read, self.target_records)
        if self._begin is Begin.SNAPSHOT:
            self.tell_differences()

    def tell_differences(self) -> None:
        """Raise the alarm of S3, where the replica that looks is nobody's who would hear of it otherwise."""
        for found in self.differences:
            log(logging.ERROR, "snapshot_differs", "%s", found.error(self.topic, self.snapshots_topic))

    def stopped(self) -> Iterable[tuple[int, int]]:
        """CPs that stand before an Upgrade this release can't follow, with the level asked for (E4)."""
        return [(cp, level) for cp, world in self.worlds.items() if (level := world.required_level) is not None]

    def close(self) -> None:
        """Stop reading."""
        self._tail.close()
