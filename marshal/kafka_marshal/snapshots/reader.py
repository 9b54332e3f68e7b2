"""Reads the log of snapshots (S2): whole snapshots of each CP, from its end backwards or from its beginning.

Anyone may have written what it finds: `StoredAt.holds` says that the digest is that of the bytes, and no more.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from kafka_marshal.errors import TopicChangedError
from kafka_marshal.node.log_reader import read_range
from kafka_marshal.ports import Cluster
from rationalizer import World
from rationalizer.log_hash import LogHash
from rationalizer.snapshot_log import MalformedPartError, SnapshotParts, StoredSnapshot, decode_part

#: Records of each CP read at first, from its end: two snapshots of one part each, by members at the
#: same time. Each further step back reads four times as many.
FIRST_STEP = 4
STEPS_GROW = 4


@dataclass(frozen=True, slots=True)
class StoredAt:
    """One whole snapshot in the log of snapshots."""

    cp: int
    next_offset: int
    #: As its writer says, and whether it is that of the bytes.
    digest: str
    holds: bool
    #: Where its parts lie in the log of snapshots: first and last record.
    first: int
    last: int
    #: None where only the place is of interest.
    stored: StoredSnapshot | None

    def restore(self, partitions: int) -> World:
        """The world it describes; raises SnapshotError if it is of none."""
        assert self.stored is not None
        return self.stored.restore(partitions)


class StoredPartition:
    """Puts the snapshots of one CP together from its records, in any order."""

    def __init__(self, cp: int) -> None:
        self.cp = cp
        #: All whole ones so far, by what they say; one that was written twice counts once.
        self.places: dict[tuple[int, str, bool], StoredAt] = {}
        self._parts = SnapshotParts(cp)
        self._extents: dict[tuple[int, str], tuple[int, int]] = {}

    @property
    def junk(self) -> int:
        """Records that are no parts of snapshots of this CP."""
        return self._parts.junk

    @property
    def hashes(self) -> list[LogHash]:
        """Hashes of this CP's log that are stored beside its snapshots (S4)."""
        return list(self._parts.hashes)

    def take(self, offset: int, value: bytes | None) -> StoredAt | None:
        """Take one record in; what it makes whole."""
        stored = self._parts.add(value)
        try:
            part = decode_part(value)
        except MalformedPartError:
            return None
        at = (part.next_offset, part.digest)
        first, last = self._extents.get(at, (offset, offset))
        self._extents[at] = first, last = min(first, offset), max(last, offset)
        if stored is None or part.partition != self.cp:
            return None
        holds = stored.holds()
        key = (*at, holds)
        known = self.places.get(key)
        if known is not None:
            first, last = min(first, known.first), max(last, known.last)
        place = StoredAt(self.cp, stored.next_offset, stored.digest, holds, first, last, stored)
        self.places[key] = place
        return place

    def keep_bytes_of_lowest(self, new: StoredAt, at_least: int) -> None:
        """Free the bytes of all but those that hold at the lowest next offset, no less than at_least."""
        if not new.holds or new.next_offset < at_least:
            self._free(new)
            return
        kept = [place for place in self.places.values() if place.stored is not None and place is not new]
        for place in kept:
            if place.next_offset < new.next_offset:
                self._free(new)
                return
            if place.next_offset > new.next_offset:
                self._free(place)

    def _free(self, place: StoredAt) -> None:
        self.places[place.next_offset, place.digest, place.holds] = replace(place, stored=None)

    def sorted(self) -> list[StoredAt]:
        """All whole ones, the largest next offset first; of equal ones the latest written."""
        return sorted(self.places.values(), key=lambda place: (-place.next_offset, -place.last))

    def clear(self) -> None:
        """Forget the whole ones, and hashes; parts that wait for others stay."""
        self.places.clear()
        self._parts.hashes.clear()
        self._extents.clear()

    def distinct(self) -> int:
        """At how many next offsets there is one that holds."""
        return len({place.next_offset for place in self.places.values() if place.holds})


class SnapshotReader:
    """The log of snapshots beside one coordination topic. All methods but `partitions` block; one thread at a time."""

    def __init__(self, cluster: Cluster, topic: str, partitions: int, timeout_s: float) -> None:
        """topic: the log of snapshots, which has this many partitions. Finds where it ends now."""
        self._cluster = cluster
        self._topic = topic
        self._timeout_s = timeout_s
        self.partitions: dict[int, StoredPartition] = {cp: StoredPartition(cp) for cp in range(partitions)}
        marks = cluster.watermarks([(topic, cp) for cp in self.partitions], timeout_s)
        #: CPs whose snapshots have no leader at the moment: as if there were none, for now.
        self.leaderless: set[int] = {cp for cp in self.partitions if (topic, cp) not in marks}
        self.starts: dict[int, int] = {cp: marks.get((topic, cp), (0, 0))[0] for cp in self.partitions}
        self.ends: dict[int, int] = {cp: marks.get((topic, cp), (0, 0))[1] for cp in self.partitions}
        #: Read down to here.
        self._down_to = dict(self.ends)
        self._step = dict.fromkeys(self.partitions, FIRST_STEP)

    @classmethod
    def find(cls, cluster: Cluster, topic: str, timeout_s: float) -> SnapshotReader | None:
        """The reader of this log of snapshots, None if there is no such topic."""
        info = cluster.topic_info([topic], timeout_s).get(topic)
        return None if info is None else cls(cluster, topic, info.partitions, timeout_s)

    def look_before(self, ends: Mapping[int, int]) -> None:
        """Go back from these records of the log of snapshots on, instead of from its end."""
        self._down_to.update({cp: max(end, self.starts[cp]) for cp, end in ends.items()})

    def read_newest(self, wanted: int) -> None:
        """Go back until each CP has snapshots that hold at this many offsets, or no more are left."""
        while True:
            ranges = {
                cp: self._further(cp)
                for cp, stored in self.partitions.items()
                if stored.distinct() < wanted and self._down_to[cp] > self.starts[cp]
            }
            if not ranges:
                return
            self._take(ranges)

    def read_older(self, cp: int) -> bool:
        """Go one step further back in one CP; whether there was anything left."""
        if self._down_to[cp] <= self.starts[cp]:
            return False
        self._take({cp: self._further(cp)})
        return True

    def read_all(self, log_starts: Mapping[int, int]) -> None:
        """Read all of these CPs. Bytes are kept only of the lowest next offset that the log still reaches."""
        for cp in log_starts:
            stored = self.partitions[cp]
            whole = {cp: (self.starts[cp], self._down_to[cp])}
            for _, entries in read_range(self._cluster, self._topic, whole, self._timeout_s):
                for offset, _, value in entries:
                    place = stored.take(offset, value)
                    if place is not None:
                        stored.keep_bytes_of_lowest(place, log_starts[cp])
            self._down_to[cp] = self.starts[cp]

    def read_news(self, cps: Collection[int]) -> list[StoredAt]:
        """What was completed since the last poll, in these CPs.

        Other CPs are skipped: a replica that reads them again later starts from what was there.
        """
        marks = self._cluster.watermarks([(self._topic, cp) for cp in self.partitions], self._timeout_s)
        for (_, cp), (low, high) in marks.items():
            if high < self.ends[cp]:  # recreated meanwhile: all of it is new
                self.ends[cp] = low
        ranges = {cp: (max(low, self.ends[cp]), high) for (_, cp), (low, high) in marks.items() if high > self.ends[cp]}
        found = []
        if ranges:
            wanted = {cp: ranges[cp] for cp in ranges if cp in cps}
            for cp, entries in read_range(self._cluster, self._topic, wanted, self._timeout_s):
                for offset, _, value in entries:
                    place = self.partitions[cp].take(offset, value)
                    if place is not None:
                        found.append(place)
        for cp, (_, end) in ranges.items():
            self.ends[cp] = end
        return found

    def forget(self) -> None:
        """Free what was read: only what comes from now on is of interest."""
        for stored in self.partitions.values():
            stored.clear()

    def _further(self, cp: int) -> tuple[int, int]:
        end = self._down_to[cp]
        first = max(self.starts[cp], end - self._step[cp])
        self._down_to[cp] = first
        self._step[cp] *= STEPS_GROW
        return first, end

    def _take(self, ranges: Mapping[int, tuple[int, int]]) -> None:
        try:
            for cp, entries in read_range(self._cluster, self._topic, ranges, self._timeout_s):
                for offset, _, value in entries:
                    self.partitions[cp].take(offset, value)
        except TopicChangedError:
            if not self._was_cut(ranges):
                raise
            self._take({cp: (max(first, self.starts[cp]), end) for cp, (first, end) in ranges.items()})

    def _was_cut(self, ranges: Mapping[int, tuple[int, int]]) -> bool:
        """Whether old snapshots were removed as they were to be read, by a prune, and no more than that."""
        before = dict(self.starts)
        marks = self._cluster.watermarks([(self._topic, cp) for cp in ranges], self._timeout_s)
        self.starts.update({cp: low for (_, cp), (low, _) in marks.items()})
        is_the_same = all(marks.get((self._topic, cp), (0, -1))[1] >= end for cp, (_, end) in ranges.items())
        return is_the_same and any(self.starts[cp] > before[cp] for cp in ranges)
