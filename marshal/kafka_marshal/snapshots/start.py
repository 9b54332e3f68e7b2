"""Where the replay of a CP starts, and whether what it finds agrees with the snapshots on its way (S3). No I/O.

A snapshot is a claim, a replay is a proof. If the log leads from one snapshot to the next and both agree, neither is
wrong by itself. So a replica starts from the second newest snapshot and compares at the newest. If they differ, one of
the two is wrong, and it is not known which. The replica then starts from an older one, until what it started from
agrees with a later snapshot, or until the beginning of the log, which needs no proof.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from kafka_marshal.errors import LogCutError, SnapshotDifferenceError
from kafka_marshal.ports import LogEntry
from kafka_marshal.snapshots.reader import StoredAt
from rationalizer import SnapshotError, World
from rationalizer.log_hash import HashChecks, LogHash, RunningHash

_NO_PLACE = "is of a place that the log does not have: no record ends there"


@dataclass(frozen=True, slots=True)
class Difference:
    """A snapshot that is invalid or disagrees with a replay; or a hash that disagrees with the log."""

    cp: int
    next_offset: int
    #: The snapshot's digest, and that of the replay; None: there is no state at this place, or none was replayed.
    #: Of a hash: as it is stored, and of the log.
    theirs: str
    ours: str | None
    #: What is wrong, for people.
    why: str
    #: Of a hash of the log (S4): the first offset that it covers. None: it is a snapshot that differs.
    since: int | None = None

    @classmethod
    def of_hash(cls, stored: LogHash, ours: str) -> Self:
        """A stored hash that is not that of the records as they were read here."""
        why = f"is not that of the records as they were read here, {ours}"
        return cls(stored.partition, stored.next_offset, stored.digest, ours, why, stored.since)

    def error(self, topic: str, snapshots: str) -> SnapshotDifferenceError:
        """The alarm (S2, S4)."""
        if self.since is not None:
            return SnapshotDifferenceError(
                f"the hash of the log that is stored for partition {self.cp} of {topic!r}, offsets {self.since} to "
                f"{self.next_offset - 1} (in {snapshots!r}, {self.theirs}), {self.why}. Either it was forged, or "
                "records were removed, added, altered or moved in time after a member had read them. Leases follow "
                "the log as it is; find out which it is: kafka-marshal audit --from-kafka compares it with all hashes"
            )
        return SnapshotDifferenceError(
            f"the snapshot of partition {self.cp} of {topic!r} at offset {self.next_offset} (in {snapshots!r}, digest "
            f"{self.theirs}) {self.why}. Either it was damaged or forged, or a replica holds a wrong state. Leases "
            "follow the log; find out which it is: kafka-marshal audit --from-kafka replays the whole log and names "
            "what differs"
        )


class CpHashes:
    """What is hashed of one CP's log while it is replayed (S4)."""

    def __init__(self, cp: int) -> None:
        self._cp = cp
        #: Stored hashes that an audit compares with the log.
        self.checks: HashChecks | None = None
        #: Of the records since the last place where a snapshot was due; None: none is kept.
        self.running: RunningHash | None = None
        #: A place where one was due was noted: so is each that follows, near the end or not, for K may fall (S2).
        self.has_noted: bool = False

    def took(self, entries: Sequence[LogEntry]) -> None:
        """These records were replayed."""
        if self.running is not None:
            self.running.take(entries)
        if self.checks is not None:
            self.checks.take(entries)

    def at(self, next_offset: int) -> LogHash | None:
        """That of the records since the last place where a snapshot was due, if it is known."""
        return None if self.running is None else self.running.at(self._cp, next_offset)


class CpStart:
    """The start of one CP's replay: from where, and what it is compared with."""

    def __init__(self, cp: int, partitions: int, log_start: int, log_end: int) -> None:
        """log_start, log_end: of the CP, asked for after its snapshots were read."""
        self.cp = cp
        self._partitions = partitions
        #: Of the CP: the first offset that is there, and the high watermark, when asked.
        self.log_start = log_start
        self.log_end = log_end
        #: What is wrong with snapshots in themselves, and what differs from the replay as it was last started.
        self._unfit: dict[tuple[int, str], Difference] = {}
        self._differing: dict[tuple[int, str], Difference] = {}
        #: Snapshots that a replay from an earlier place has reached and found the same: next offset → log time (ms).
        self.agreed: dict[int, int] = {}
        #: Places to compare at, ascending; and others of the very place that the replay starts from.
        self._ahead: list[StoredAt] = []
        self._beside: list[StoredAt] = []
        #: Started from before, and found wanting.
        self._tried: set[tuple[int, str]] = set()
        self.hashes: CpHashes = CpHashes(cp)
        #: Next offset of where it starts; whether that needs no proof.
        self.begun_at: int = 0
        self._begun_with = ""
        self.from_beginning: bool = False
        self._agreed_since = False

    def from_snapshot(self, places: Sequence[StoredAt]) -> World | None:
        """The world to start from: the newest of these not tried yet that is not of the newest place (S3).

        None: there is none (any more); look further back, then see `from_log_start`.
        """
        usable = self._usable(places)
        newest = max((place.next_offset for place in usable), default=0)
        for place in usable:
            if not self.log_start <= place.next_offset < newest or (place.next_offset, place.digest) in self._tried:
                continue
            self._tried.add((place.next_offset, place.digest))
            if (world := self._begun(place, usable)) is not None:
                return world
        return None

    def from_oldest(self, places: Sequence[StoredAt]) -> World:
        """The world to start from in order to see as much of the log as there is. Raises LogCutError."""
        usable = self._usable(places)
        if self.log_start == 0:
            return self.from_log_start(places)
        for place in reversed(usable):
            if place.stored is None or place.next_offset < self.log_start:
                continue
            if (world := self._begun(place, usable)) is not None:
                return world
        raise self._cut("no snapshot bridges the gap")

    def from_log_start(self, places: Sequence[StoredAt]) -> World:
        """An empty world at the beginning of the log. Raises LogCutError if that is gone.

        SnapshotDifferenceError if it is gone and the snapshots that it still reaches contradict each other.
        """
        if self.log_start > 0:
            if self._differing:
                last = list(self._differing.values())[-1]
                raise SnapshotDifferenceError(
                    f"partition {self.cp} of the log begins at offset {self.log_start}, and the snapshots from there "
                    f"on contradict it or each other (at offset {last.next_offset}: it {last.why}). Which of them is "
                    "true can't be known, so nothing was claimed. If a member of the fleet is still at work, start "
                    "again when it has written its next snapshot; else make a new topic with kafka-marshal init "
                    "--topic NEW-NAME"
                )
            raise self._cut("there are no two snapshots that the log reaches back to")
        world = World(self.cp, self._partitions)
        self._begin(world, self._usable(places))
        self.from_beginning = True
        return world

    def _cut(self, why: str) -> LogCutError:
        return LogCutError(
            f"the coordination log does not reach back to its beginning in partition(s) [{self.cp}], it starts at "
            f"offset {self.log_start}, and {why}: who holds what can't be known, so nothing was claimed. Old log may "
            "only be removed by kafka-marshal prune, which keeps what a start needs. Members that still run know their "
            "group's positions, and keep them in Kafka's own consumer group of its name: stop none of them before "
            "kafka-consumer-groups --describe shows that. Then make a new topic (kafka-marshal init --topic NEW-NAME), "
            "and take them over (kafka-marshal --topic NEW-NAME import-group GROUP)"
        )

    def _usable(self, places: Sequence[StoredAt]) -> list[StoredAt]:
        """Those that hold and lie within the log, the largest next offset first."""
        usable = []
        for place in places:
            if not place.holds:
                self._refuse(place, "is damaged: its digest is not that of its bytes")
            elif place.next_offset > self.log_end:
                self._refuse(place, f"lies beyond the end of the log, {self.log_end}")
            else:
                usable.append(place)
        return usable

    def _begun(self, place: StoredAt, usable: Sequence[StoredAt]) -> World | None:
        """The world of this place, to continue from; None, with a difference noted, if the snapshot is invalid."""
        try:
            world = place.restore(self._partitions)
        except SnapshotError as error:
            self._refuse(place, f"can't be started from: {error}")
            return None
        self._begin(world, usable)
        return world

    def _begin(self, world: World, usable: Sequence[StoredAt]) -> None:
        self.begun_at = world.next_offset
        self._agreed_since = False
        self._differing.clear()  # of a start that agreed with nothing, and proves nothing
        self._beside = [place for place in usable if place.next_offset == self.begun_at]
        if len(self._beside) > 1 or self.begun_at == 0:
            self._begun_with = world.digest()
            self._beside = [place for place in self._beside if place.digest != self._begun_with]
        else:
            self._beside.clear()
        self._ahead = sorted(
            (place for place in usable if place.next_offset > self.begun_at), key=lambda place: place.next_offset
        )

    # On the way.

    @property
    def next_place(self) -> int | None:
        """The next offset at which there is something to compare."""
        return self._ahead[0].next_offset if self._ahead else None

    def reached(self, next_offset: int, digest: str, log_time: int) -> None:
        """The replay is at this next offset and log time, with the state of this digest."""
        while self._ahead and self._ahead[0].next_offset <= next_offset:
            place = self._ahead.pop(0)
            if place.next_offset < next_offset:
                self._differ(place, None, _NO_PLACE)
            elif place.digest != digest:
                self._differ(place, digest, f"differs from a replay from offset {self.begun_at}, which gives {digest}")
            else:
                self._agreed_since = True
                self.agreed[next_offset] = log_time
                while self._beside:
                    why = "differs from another one of the same place, which the log bears out"
                    self._differ(self._beside.pop(), self._begun_with, why)

    def ended(self) -> None:
        """The replay is at the end of the log as it was when the snapshots were read."""
        while self._ahead:
            self._differ(self._ahead.pop(0), None, _NO_PLACE)
        if self.hashes.checks is not None:
            self.hashes.checks.ended(self.log_end)

    @property
    def is_refuted(self) -> bool:
        """All was compared, and what the replay started from agrees with nothing: it must start further back."""
        return not self._ahead and not self._agreed_since and not self.from_beginning and self.begun_at > 0

    @property
    def differences(self) -> list[Difference]:
        """What is wrong with snapshots and hashes, as far as it is known."""
        wrong = [] if self.hashes.checks is None else self.hashes.checks.wrong
        changed = [Difference.of_hash(stored, ours) for stored, ours in wrong]
        return [*self._unfit.values(), *self._differing.values(), *changed]

    def _refuse(self, place: StoredAt, why: str) -> None:
        key = (place.next_offset, place.digest)
        self._unfit.setdefault(key, Difference(self.cp, place.next_offset, place.digest, None, why))

    def _differ(self, place: StoredAt, ours: str | None, why: str) -> None:
        key = (place.next_offset, place.digest)
        self._differing[key] = Difference(self.cp, place.next_offset, place.digest, ours, why)
