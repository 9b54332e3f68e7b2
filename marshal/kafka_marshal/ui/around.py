"""Reads the log around one moment, from the snapshots before it: it is there in seconds, however long the log."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from kafka_marshal.node.coordination_topic import snapshots_topic
from kafka_marshal.observe.log import Log, Source
from kafka_marshal.ports import Cluster
from kafka_marshal.snapshots.reader import SnapshotReader, StoredAt
from kafka_marshal.ui.fold import History, begins
from rationalizer import SnapshotError, World

__all__ = ["Around", "read_around"]

#: What comes after the moment is read, too: so much of it, and at most so many records of each CP.
AFTER_MS: Final = 600_000
AFTER_RECORDS: Final = 5_000


class Around:
    """A history of a part of the log: all records of each CP from one log time to another."""

    def __init__(self, history: History, until: int) -> None:
        self.history = history
        #: What follows that log time (ms) is not in it.
        self.until = until

    def covers(self, time: int) -> bool:
        """Whether the state at this log time (ms) can be told from it."""
        return begins(self.history) <= time <= self.until


def read_around(source: Source, time: int, place: tuple[int, int] | None, stop: Callable[[], bool]) -> Around | None:
    """Read from the last snapshot of each CP before this log time (ms) on (*blocking*). None: told to stop.

    place: (CP, offset) of the record whose time is meant instead. Raises KafkaUnavailableError;
    LogCutError where the log begins after that time.
    """
    cluster = source.connect()
    try:
        log = Log(cluster, source.topic, source.timeout)
        if place is not None:
            cp, offset = place
            time = max(entries[0][1] for _, entries in log.read({cp: offset}, {cp: offset + 1}))
        worlds = _worlds_before(cluster, log, time, source.timeout)
        history = History(log.partitions, worlds)
        begin = {cp: world.next_offset for cp, world in worlds.items()}
        keys = [(log.topic, cp) for cp in worlds]
        next_one, later = (cluster.offsets_for_time(keys, at + 1, source.timeout) for at in (time, time + AFTER_MS))
        ends, until = {}, time + AFTER_MS
        for key in keys:
            _, cp = key
            ends[cp] = max(begin[cp], min(later[key], next_one[key] + AFTER_RECORDS))
        for cp, entries in log.read(begin, ends):
            history.take(cp, entries)
            if stop():
                return None
        cut_short = [history.worlds[key[1]].log_time for key in keys if ends[key[1]] < later[key]]
        return Around(history, min([until, *cut_short]))
    finally:
        cluster.close()


def _worlds_before(cluster: Cluster, log: Log, time: int, timeout_s: float) -> dict[int, World]:
    """The state of each CP at the last snapshot that was written before this log time; else where the log begins."""
    found: dict[int, World] = {}
    topic = snapshots_topic(log.topic)
    reader = SnapshotReader.find(cluster, topic, timeout_s)
    if reader is not None and len(reader.partitions) == log.partitions:
        keys = [(topic, cp) for cp in reader.partitions if cp not in reader.leaderless]
        reader.look_before({cp: end for (_, cp), end in cluster.offsets_for_time(keys, time, timeout_s).items()})
        reader.read_newest(1)
        for cp in reader.partitions:
            if (world := _before(reader, cp, log, time)) is not None:
                found[cp] = world
    return found | log.first_worlds([cp for cp in log.starts if cp not in found])


def _before(reader: SnapshotReader, cp: int, log: Log, time: int) -> World | None:
    """The newest state before this log time that a snapshot of this CP tells, and no other one of its place denies."""
    tried: set[int] = set()
    while True:
        places: dict[int, list[StoredAt]] = {}
        for place in reader.partitions[cp].sorted():
            if place.holds and place.next_offset >= log.starts[cp] and place.next_offset not in tried:
                places.setdefault(place.next_offset, []).append(place)
        for next_offset, (place, *others) in places.items():
            tried.add(next_offset)
            try:
                world = place.restore(log.partitions)
            except SnapshotError:
                continue
            if not others and world.log_time <= time:
                return world
        if not reader.read_older(cp):
            return None
