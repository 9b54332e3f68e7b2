"""Big logs: a replay from the broker beside draining and applying alone, and the memory of a large state."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from time import perf_counter
from typing import ClassVar

from benchmarks.adapters import drain_bare
from benchmarks.race.contestants import Contestant, Side
from benchmarks.race.events.base import Aim, Event, Samples
from benchmarks.race.events.crash import read_log
from benchmarks.race.grounds import CPS, Grounds
from kafka_marshal.adapters.kafka import KafkaCluster
from kafka_marshal.node.replica import Replica
from rationalizer import ClaimingPartition, World, encode, route_lease

__all__ = ["BigLog"]

RECORDS = 200_000
LEASES = 100_000

REPLAY = Contestant("kafka-marshal, replay from the broker", Side.MARSHAL, "delay 0")
DRAIN = Contestant("bare drain: value, offset, timestamp", Side.GROUP, "delay 0", {"fetch.queue.backoff.ms": 1})
APPLY = Contestant("apply_many, from memory", Side.MARSHAL, "delay 0")
IDEAL = Contestant("1 ÷ (1 ÷ drain + 1 ÷ apply_many)", Side.MARSHAL, "delay 0")
STATE = Contestant("kafka-marshal, state of 100,000 leases", Side.MARSHAL, "delay 0")


class BigLog(Event):
    """The log is written once per run; every round replays all of it, in every way."""

    name = "logs"
    title = "replay of a long log"
    units: ClassVar = {"replay": "records/s", "memory": "MB per 100,000 leases"}

    def __init__(self, records: int = RECORDS) -> None:
        self._records = records
        self._topic: dict[str, str] = {}
        self._entries: list[list[tuple[int, int, bytes | None]]] = []
        self._last: dict[str, float] = {}
        contestants = (DRAIN, APPLY, REPLAY, IDEAL, STATE)
        aims = (Aim("replay", REPLAY.name, IDEAL.name, 0.85, at_least=True),)
        conditions = {"records": records, "coordination partitions": CPS}
        super().__init__(contestants, aims, conditions)

    def round(self, grounds: Grounds, contestant: Contestant) -> Samples:
        """One of the ways; the ideal is computed from the two before it."""
        if contestant is STATE:
            return {"memory": [state_mb()]}
        if contestant is IDEAL:
            return {"replay": [1 / (1 / self._last[DRAIN.name] + 1 / self._last[APPLY.name])]}
        if grounds.bootstrap not in self._topic:
            self._topic[grounds.bootstrap] = grounds.coordination(self._records)
            self._entries = list(self._read(grounds))
        topic = self._topic[grounds.bootstrap]
        total = sum(map(len, self._entries))
        if contestant is DRAIN:
            took = drain_bare(grounds.bootstrap, topic, CPS, total, stamps=True)
        elif contestant is APPLY:
            took = self._apply()
        else:
            took = replay(grounds.bootstrap, topic)
        self._last[contestant.name] = total / took
        return {"replay": [total / took]}

    def _read(self, grounds: Grounds) -> Iterator[list[tuple[int, int, bytes | None]]]:
        by_cp: dict[int, list[tuple[int, int, bytes | None]]] = {cp: [] for cp in range(CPS)}
        for cp, offset, stamp, value in read_log(grounds.bootstrap, self._topic[grounds.bootstrap]):
            by_cp[cp].append((offset, stamp, value))
        yield from by_cp.values()

    def _apply(self) -> float:
        worlds = [World(cp, CPS) for cp in range(CPS)]
        began = perf_counter()
        for world, entries in zip(worlds, self._entries, strict=True):
            world.apply_many(entries)
        return perf_counter() - began


def replay(bootstrap: str, topic: str) -> float:
    """Seconds from the first records to the world's state (C15)."""
    cluster = KafkaCluster(bootstrap)
    replica = Replica(cluster, topic, 30.0)
    began = 0.0
    while not replica.caught_up:
        batch = replica.read(1.0)
        began = began or perf_counter()
        replica.apply(batch)
    took = perf_counter() - began
    replica.close()
    cluster.close()
    return took


def state_mb() -> float:
    """Megabytes of a world with held leases, by tracemalloc."""
    here = [number for number in range(LEASES * 2) if route_lease("flights", number, 2) == 0][:LEASES]
    who = ("instance-0123456789abcdef", "worker-1", "delays")
    log = [(n, 1, encode(ClaimingPartition(*who, "flights", partition, 3000))) for n, partition in enumerate(here)]
    tracemalloc.start()
    try:
        world = World(0, 2)
        world.apply_many(log)
        used, _ = tracemalloc.get_traced_memory()
        return used / 1e6 * 100_000 / world.lease_count
    finally:
        tracemalloc.stop()
