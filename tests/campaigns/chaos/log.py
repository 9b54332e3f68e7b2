"""The coordination log beside its workers: read while it grows, and again at the end, from the beginning."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from kafka_marshal.adapters.kafka import KafkaCluster
from kafka_marshal.client.view import holdings
from kafka_marshal.errors import KafkaUnavailableError, MarshalError
from kafka_marshal.node.log_reader import bounds, read_range
from kafka_marshal.ports import LogEntry
from rationalizer import World
from rationalizer.dump import DumpHeader, DumpRecord, header_line, record_line

LOOK_S = 0.2
PATIENCE_S = 60.0


class Follower:
    """An observing replica in a separate thread. It keeps only the state."""

    def __init__(self, bootstrap: str, topic: str, partitions: int) -> None:
        self.worlds = {cp: World(cp, partitions) for cp in range(partitions)}
        self.records = 0
        self.failure: MarshalError | None = None
        self._lock = threading.Lock()
        self._cluster = KafkaCluster(bootstrap)
        self._tail = self._cluster.tail(topic, dict.fromkeys(self.worlds, 0))
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._end.is_set():
                batch = self._tail.read(LOOK_S)
                with self._lock:
                    for cp, entries in batch.records.items():
                        self.worlds[cp].apply_many(entries)
                        self.records += len(entries)
        except MarshalError as error:
            self.failure = error

    def leases(self) -> dict[tuple[str, str, int], tuple[str | None, int, str]]:
        """(group, topic, partition) → (holding instance, stable, freshness)."""
        with self._lock:
            found: dict[tuple[str, str, int], tuple[str | None, int, str]] = {
                (x.group_id, x.topic, x.partition): (x.instance_id, x.progress.stable, x.freshness(world.log_time))
                for world in self.worlds.values()
                for x in world.leases()
            }
            for world in self.worlds.values():
                for info, progress in holdings(world):
                    if info.kind == "coordinated":
                        place = (info.group_id, info.topic, info.partition)
                        found[place] = (info.instance_id, progress.stable, info.freshness)
            return found

    def close(self) -> None:
        """End the thread."""
        self._end.set()
        self._thread.join(10)
        self._tail.close()
        self._cluster.close()


def read_topic(bootstrap: str, topic: str, partitions: Iterable[int]) -> Mapping[int, list[LogEntry]]:
    """All of a topic, from the beginning to the present ends of its partitions."""
    found: dict[int, list[LogEntry]] = {partition: [] for partition in partitions}
    cluster = KafkaCluster(bootstrap)
    try:
        for partition, entries in read_range(cluster, topic, _bounds(cluster, topic), PATIENCE_S):
            found[partition] += entries
    finally:
        cluster.close()
    return found


def _bounds(cluster: KafkaCluster, topic: str) -> Mapping[int, tuple[int, int]]:
    """Bounds of the partitions; one whose leader was just elected may be missing at first."""
    until = time.monotonic() + PATIENCE_S
    while True:
        try:
            found = bounds(cluster, topic, PATIENCE_S)
        except KafkaUnavailableError:
            if time.monotonic() > until:
                raise
        else:
            assert found is not None, f"{topic} is gone"
            return found


def write_dump(path: Path, log: Mapping[int, Iterable[LogEntry]]) -> None:
    """A dump (D1), for ``kafka-marshal replay`` and ``audit``."""
    with path.open("w", encoding="utf-8") as file:
        file.write(header_line(DumpHeader("__marshal", len(log))) + "\n")
        for cp, entries in sorted(log.items()):
            file.writelines(record_line(DumpRecord(cp, *entry)) + "\n" for entry in entries)
