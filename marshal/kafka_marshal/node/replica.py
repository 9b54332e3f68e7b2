"""Where the replay of a coordination topic starts, CP by CP (S3): from its snapshots, or from the log's beginning."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Mapping
from enum import Enum
from operator import itemgetter

from kafka_marshal.errors import AuthorizationError, KafkaUnavailableError, LogCutError, TopicChangedError
from kafka_marshal.logs import log
from kafka_marshal.node.coordination_topic import ADDRESSES_S, TopicChecks, check_one_cluster, check_topic
from kafka_marshal.node.log_reader import MonitoredTail, read_range
from kafka_marshal.ports import Cluster, FaultKind, LogEntry, TailBatch, TopicInfo
from kafka_marshal.snapshots.reader import SnapshotReader, StoredAt
from kafka_marshal.snapshots.start import CpStart, Difference
from kafka_marshal.topic_names import snapshots_topic
from rationalizer import Outcome, World
from rationalizer.log_hash import HashChecks, LogHash, RunningHash
from rationalizer.plane import Heard
from rationalizer.snapshot import digest_of
from rationalizer.snapshot_log import due, interval, next_due


class Begin(Enum):
    """Where a replica begins to read."""

    #: From snapshots (S3): for the state as it is now.
    SNAPSHOT = "snapshot"
    #: As far back as the log goes: for its history.
    HISTORY = "history"
    #: As HISTORY, and every snapshot is compared with the replay: for audits.
    CHECK = "check"


class ReplayStart:
    """Reads snapshots, and finds each CP's start among them. Call in this order: read, found, check, world."""

    def __init__(self, cluster: Cluster, topic: str, timeout_s: float, begin: Begin) -> None:
        self.begin = begin
        self.snapshots_topic: str = snapshots_topic(topic)
        #: The log of snapshots; None: it can't be used. ``lacks_snapshots``: why not, for people; "": it can.
        self.snapshots: SnapshotReader | None = None
        self.lacks_snapshots: str = ""
        self.cps: dict[int, CpStart] = {}
        self._cluster = cluster
        self._topic = topic
        self._timeout_s = timeout_s
        #: Why the log of snapshots could not be read, though there may be one.
        self._unreadable: AuthorizationError | None = None

    def read(self) -> SnapshotReader | None:
        """The log of snapshots, if there is one (*blocking*)."""
        try:
            reader = SnapshotReader.find(self._cluster, self.snapshots_topic, self._timeout_s)
            if reader is not None and self.begin is Begin.SNAPSHOT:
                reader.read_newest(2)
        except AuthorizationError as error:
            # Without the right to read snapshots, the log itself is read, if it is complete.
            self._unreadable = error
            return None
        return reader

    def found(self, reader: SnapshotReader | None, partitions: int) -> None:
        """Use the log of snapshots, if it fits a topic of this many partitions."""
        if self._unreadable is not None:
            self.lacks_snapshots = f"{self.snapshots_topic!r} is not used ({self._unreadable})"
        elif reader is None:
            self.lacks_snapshots = f"there is no topic {self.snapshots_topic!r} "
        elif (found := len(reader.partitions)) != partitions:
            self.lacks_snapshots = f"{self.snapshots_topic!r} has {found} partitions, not {partitions}, and is not used"
        else:
            self.snapshots = reader

    def check(self, marks: Mapping[int, tuple[int, int]], partitions: int) -> None:
        """Know where each CP's log begins and ends, asked for after snapshots were read (*blocking*).

        partitions: of the topic, of which only those with marks may be of interest.
        """
        cps = sorted(marks)
        if any(place.next_offset > marks[cp][1] for cp in cps for place in self._places(cp)):
            # Written since we asked. One that lies beyond the log's end after it was read can't be true.
            marks = self.marks(cps)
        is_cut = any(low > 0 for low, _ in marks.values())
        begin = self.begin
        if self.snapshots is not None and (begin is Begin.CHECK or (begin is Begin.HISTORY and is_cut)):
            self.snapshots.read_all({cp: low for cp, (low, _) in marks.items()})
        self.cps.update({cp: CpStart(cp, partitions, *marks[cp]) for cp in cps})

    def marks(self, cps: Iterable[int]) -> dict[int, tuple[int, int]]:
        """Log start and end of each CP (*blocking*)."""
        marks = self._cluster.watermarks([(self._topic, cp) for cp in cps], self._timeout_s)
        missing = sorted(cp for cp in cps if (self._topic, cp) not in marks)
        if missing:
            raise KafkaUnavailableError(
                f"partition(s) {missing} of {self._topic!r} have no leader at the moment; nothing was claimed. Try "
                "again when the brokers that hold them are back"
            )
        return {cp: found for (_, cp), found in marks.items()}

    def world(self, cp: int) -> World:
        """The state from which this CP's replay starts; at each further call, an earlier one (*blocking*)."""
        try:
            return self._find(cp)
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

    def _find(self, cp: int) -> World:
        start = self.cps[cp]
        if self.begin is not Begin.SNAPSHOT:
            return start.from_oldest(self._places(cp))
        world = start.from_snapshot(self._places(cp))
        while world is None and self.snapshots is not None and self.snapshots.read_older(cp):
            world = start.from_snapshot(self._places(cp))
        return start.from_log_start(self._places(cp)) if world is None else world

    def _places(self, cp: int) -> list[StoredAt]:
        return [] if self.snapshots is None else self.snapshots.partitions[cp].sorted()


#: Called for each record applied once the replica has caught up: CP, offset, outcome.
Listener = Callable[[int, int, Outcome], None]

#: Called with the CP, and with the last of the heartbeats of each sender that moved nothing but numbers.
Beats = Callable[[int, Heard], None]

#: Called when a snapshot of a CP is due, with the state at exactly this place: CP, next offset, bytes (S1, S2), and
#: the hash of the records since the place before, if all of them were read (S4).
Due = Callable[[int, int, bytes, LogHash | None], None]

#: While it catches up, a replica checks only within this many intervals of the end whether a snapshot is due: the two
#: that a start needs (S3), with what may have passed meanwhile.
NOTED_INTERVALS = 3

#: If the number of CPs was doubled, each lease has an even chance to stay where it was. This many do not all stay.
TELLING_LEASES = 40

_OFFSET = itemgetter(0)


class Replica:
    """Worlds of CPs of one coordination topic. Not thread-safe: the caller locks around all but ``read``."""

    def __init__(
        self,
        cluster: Cluster,
        topic: str,
        timeout_s: float,
        begin: Begin = Begin.HISTORY,
        due: Due | None = None,
        only: Collection[int] | None = None,
        *,
        keeps_hashes: bool = False,
    ) -> None:
        """Check the topic (L1), find where its log ends now, read snapshots, and start to read (*blocking*).

        due is called when a snapshot is due (S2); while the replica catches up, at the last few places only.
        only: the CPs to read; None: all. keeps_hashes: of the log, though nothing is due, for a later owner.
        Raises TopicMissingError, TopicUnsafeError, LogCutError (no snapshot reaches the log's start),
        AuthorizationError, KafkaUnavailableError, ConfigurationError (bootstrap addresses of two clusters).
        """
        self.topic = topic
        self._cluster = cluster
        self._due = due
        self._keeps_hashes = keeps_hashes or due is not None
        start = ReplayStart(cluster, topic, timeout_s, begin)
        self.start: ReplayStart = start
        # No other thread waits for this one: a start is short.
        check_one_cluster(cluster)
        with cluster.runtime.executor(1, "kafka-marshal-start") as aside:
            reading = aside.submit(start.read)
            config, problems = check_topic(cluster, topic, timeout_s)
            self.info: TopicInfo = config.info
            cps = [cp for cp in range(config.info.partitions) if only is None or cp in only]
            marks = start.marks(cps)
            reader = reading.result()
        for problem in problems:
            log(logging.WARNING, "topic_settings", "coordination topic %s: %s", topic, problem)
        start.found(reader, self.info.partitions)
        start.check(marks, self.info.partitions)
        self.checks: TopicChecks = TopicChecks(self.info)
        self.starts: dict[int, CpStart] = start.cps
        #: The CPs that are read; nothing is known here of others.
        self.worlds: dict[int, World] = {cp: start.world(cp) for cp in cps}
        self._check_markers_passed_over(timeout_s)
        #: CPs that have not reached the high watermark found at start, with it (C15).
        self.behind: dict[int, int] = {
            cp: at.log_end for cp, at in self.starts.items() if at.log_end > self.worlds[cp].next_offset
        }
        self._begun_at = sum(world.next_offset for world in self.worlds.values())
        self.target_records: int = sum(at.log_end for at in self.starts.values()) - self._begun_at
        #: Called with timestamp and value of each record before it is applied and reported; None: nothing records.
        self.on_record: Callable[[int, bytes | None], object] | None = None
        #: What plain heartbeats are reported to, of each sender the last one before the next other record; None: they
        #: are reported like other records.
        self.on_beats: Beats | None = None
        #: CPs whose start was refuted: they go further back at the next read.
        self._refuted: set[int] = set()
        #: Where apply stops to check: the next place to compare, or where a snapshot may be due.
        self._stops = {cp: self._next_stop(cp) for cp in cps}
        for world in self.worlds.values():
            self._begin_hash(world)
        if begin is Begin.CHECK and start.snapshots is not None:
            for cp, each in self.starts.items():
                each.hashes.checks = HashChecks(start.snapshots.partitions[cp].hashes, self.worlds[cp].next_offset)
        check_one_cluster(cluster, ADDRESSES_S)
        #: The tail that it reads with: it learns what the log is known to hold, and reports what is missing.
        self.tail: MonitoredTail = self._open()

    def _open(self) -> MonitoredTail:
        positions = {cp: world.next_offset for cp, world in self.worlds.items()}
        return MonitoredTail(self._cluster, self.topic, positions, self.behind)

    def _check_markers_passed_over(self, timeout_s: float) -> None:
        """L2 if a start skips the first record: a lease that is routed elsewhere refutes its snapshot (S1).

        With few leases that is no proof, and the first records themselves are read (*blocking*).
        """
        passed = [cp for cp, world in self.worlds.items() if world.next_offset > 0 and self.starts[cp].log_start == 0]
        if passed and sum(world.lease_count for world in self.worlds.values()) < TELLING_LEASES:
            first = dict.fromkeys(passed, (0, 1))
            try:
                for cp, entries in read_range(self._cluster, self.topic, first, timeout_s):
                    self.checks.marker(cp, entries[0][2])
            except TopicChangedError:  # a prune has just removed the first record: as if it had before
                if all(low == 0 for low, _ in self.start.marks(passed).values()):
                    raise

    def _go_back(self) -> None:
        """Start the refuted CPs again, further back, and continue to read from there (*blocking*)."""
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
            self.worlds[cp] = self.start.world(cp)
            self._begun_at -= before - self.worlds[cp].next_offset
            self.target_records += before - self.worlds[cp].next_offset
            self.behind[cp] = self.starts[cp].log_end
            self._stops[cp] = self._next_stop(cp)
            self._begin_hash(self.worlds[cp])
        self._refuted.clear()
        patience_s = self.tail.monitor.patience_s
        self.tail.close()
        self.tail = self._open()
        self.tail.monitor.patience_s = patience_s

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

    @property
    def log_behind(self) -> int:
        """How many offsets of the logs are not applied, as of a second ago (any thread, without the lock)."""
        ends, worlds = self.tail.log_ends(), list(self.worlds.items())
        return sum(max(0, ends.get(cp, self.behind.get(cp, 0)) - world.next_offset) for cp, world in worlds)

    # What is read.

    @property
    def unread(self) -> list[int]:
        """CPs that are not read."""
        return [cp for cp in range(self.info.partitions) if cp not in self.worlds]

    def leave(self, cps: Collection[int]) -> None:
        """Stop reading these CPs (by the thread that reads). Their worlds are dropped: they would soon be wrong."""
        for cp in cps:
            del self.worlds[cp], self.starts[cp], self._stops[cp]
        self.tail.leave(cps)

    def take_over(self, other: Replica) -> None:
        """Continue with CPs that another replica of this topic has read to their ends, and that are not read here.

        Raises TopicChangedError if the topic is not the one that we read.
        """
        self.check(other.info)
        self.worlds.update(other.worlds)
        self.starts.update(other.starts)
        self._stops.update({cp: self._next_stop(cp) for cp in other.worlds})
        self.tail.follow({cp: world.next_offset for cp, world in other.worlds.items()})

    # Reading.

    def read(self, timeout_s: float) -> TailBatch:
        """Wait for records; ``apply`` applies them. Raises as the constructor does if a start must go further back."""
        if self._refuted:
            self._go_back()
        return self.tail.read(timeout_s)

    def apply(self, batch: TailBatch, applied: Listener | None = None, *, history: bool = False) -> None:
        """Apply what was read; report each record once caught up, or from the first one (history).

        Raises an error of the CoordinationTopicError family, or AuthorizationError, if reading can't continue: the log
        was cut or recreated, made for another number of CPs, or has lost its beginning to compaction.
        """
        live, was_caught_up = history or self.caught_up, self.caught_up
        if was_caught_up:
            self.checks.stamps(batch)
        for cp, entries in batch.records.items():
            self._apply_entries(self.worlds[cp], entries, applied if live else None)
        if was_caught_up and batch.records:
            self.checks.clocks(batch, {cp: self.worlds[cp].log_time for cp in batch.records})
        for cp, end in batch.ends.items():
            self._reached(cp, end)
        for cp in batch.records:
            self._reached(cp, self.worlds[cp].next_offset)
        for fault in batch.faults:
            if fault.partition is not None and fault.partition not in self.worlds:
                continue  # of one that is read no more
            self.checks.fault(fault)
            if fault.kind is FaultKind.FATAL:
                self.tail.renew()

    def _apply_entries(self, world: World, entries: list[LogEntry], applied: Listener | None) -> None:
        cp = world.partition
        if world.next_offset == 0 and entries:
            self.checks.first(cp, entries[0])
        begin = 0
        while begin < len(entries) and cp not in self._refuted and world.required_level is None:
            # Up to the record that takes the next offset to the stop: the check there is of exactly that place.
            end = bisect_left(entries, self._stops[cp] - 1, begin, key=_OFFSET) + 1
            run = entries if begin == 0 and end >= len(entries) else entries[begin:end]
            if applied is None:
                world.apply_many(run)
            elif self.on_beats is not None:
                _apply_and_report(world, run, applied, self.on_beats)
            else:
                for offset, timestamp_ms, value in run:
                    if self.on_record is not None:
                        self.on_record(timestamp_ms, value)
                    applied(cp, offset, world.apply(offset, timestamp_ms, value))
            self.starts[cp].hashes.took(run)
            begin = end
            if world.next_offset >= self._stops[cp]:
                self._stop(world)

    def _next_stop(self, cp: int) -> int:
        """The next offset at which there is something to compare, or a snapshot may be due."""
        stop = next_due(self.worlds[cp].next_offset)
        place = self.starts[cp].next_place
        return stop if place is None else min(stop, place)

    def _stop(self, world: World) -> None:
        """Check a world that has just reached a stop, before the next record."""
        cp, start = world.partition, self.starts[world.partition]
        is_place = due(self._stops[cp] - 1, world.next_offset, interval(world.listed))
        is_near = start.hashes.has_noted or self._is_near_end(world, NOTED_INTERVALS)
        is_due = is_place and self._due is not None and is_near
        if is_due or start.next_place is not None:
            state = world.snapshot()
            start.reached(world.next_offset, digest_of(state), world.log_time)
            if is_due and self._due is not None:
                start.hashes.has_noted = True
                self._due(cp, world.next_offset, state, start.hashes.at(world.next_offset))
            self._judge_start(cp)
        if is_place:
            self._begin_hash(world)
        self._stops[cp] = self._next_stop(cp)

    def _is_near_end(self, world: World, intervals: int) -> bool:
        """Whether what is noted here is of interest to others; of a long history, only near its end."""
        end = self.starts[world.partition].log_end
        return world.next_offset > end - intervals * interval(world.listed)

    def _begin_hash(self, world: World) -> None:
        """Hash what is read from here on, a place where a snapshot is due, if it may be stored at the next one (S4)."""
        wanted = self._keeps_hashes and self._is_near_end(world, NOTED_INTERVALS + 1)
        self.starts[world.partition].hashes.running = RunningHash(world.next_offset) if wanted else None

    def _judge_start(self, cp: int) -> None:
        if self.start.begin is Begin.SNAPSHOT and self.starts[cp].is_refuted:
            self._refuted.add(cp)

    def _reached(self, cp: int, offset: int) -> None:
        if cp not in self._refuted and offset >= self.behind.get(cp, offset + 1):
            self.starts[cp].ended()
            self._judge_start(cp)
            if cp not in self._refuted:
                del self.behind[cp]

    def check(self, info: TopicInfo | None) -> None:
        """Compare the topic as it is now with the one we read (L2); raises TopicChangedError.

        ConfigurationError if a bootstrap address belongs to another cluster.
        """
        check_one_cluster(self._cluster)
        self.checks.now(info)

    def catch_up(
        self,
        timeout_s: float,
        progress: Callable[[int, int], None] | None = None,
        applied: Listener | None = None,
        *,
        report: bool = True,
        enough: Callable[[], bool] = lambda: False,
    ) -> None:
        """Read up to the high watermark found at start (*blocking*), for callers that only read.

        progress is called with (records applied, records there were), applied for each record. report: raise the alarm
        of S3. enough: whether the rest need not be read. Raises KafkaUnavailableError when nothing came for timeout_s.
        """
        deadline = self._cluster.runtime.monotonic() + timeout_s
        while not self.caught_up and not enough():
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
        if report and self.start.begin is Begin.SNAPSHOT:
            self.report_differences()

    def report_differences(self) -> None:
        """Raise the alarm of S3, if no driver of this replica would report it otherwise."""
        for found in self.differences:
            log(logging.ERROR, "snapshot_differs", "%s", found.error(self.topic, self.start.snapshots_topic))

    def stopped(self) -> Iterable[tuple[int, int]]:
        """CPs with an Upgrade that this release can't follow, with the level asked for (E4)."""
        return [(cp, level) for cp, world in list(self.worlds.items()) if (level := world.required_level) is not None]

    def close(self) -> None:
        """Stop reading."""
        self.tail.close()


def _apply_and_report(world: World, run: list[LogEntry], applied: Listener, beats: Beats) -> None:
    """Heartbeats in bulk, other records one by one: that takes a fifth of the time."""
    heard: Heard = {}
    remaining = iter(run)
    while True:
        record = world.apply_beats(remaining, heard)
        if heard:
            beats(world.partition, heard)
            heard = {}
        if record is None:
            return
        applied(world.partition, record[0], world.apply(*record))
