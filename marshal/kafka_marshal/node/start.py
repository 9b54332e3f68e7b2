"""Where the replay of a coordination topic starts, CP by CP (S3): from its snapshots, or from the log's beginning."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum

from kafka_marshal.errors import AuthorizationError, KafkaUnavailableError, LogCutError
from kafka_marshal.ports import Cluster
from kafka_marshal.snapshots.reader import SnapshotReader, StoredAt
from kafka_marshal.snapshots.start import CpStart
from kafka_marshal.topic_names import snapshots_topic
from rationalizer import World


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
