"""A log with a story: three workers, one that joins, one that is killed and fenced, a pause; and a second group."""

from __future__ import annotations

import random
from itertools import count

from kafka_marshal.ui.moments import Moment
from rationalizer import (
    BeatEntry,
    ClaimingPartition,
    Heartbeat,
    HeartbeatBatch,
    Record,
    ReleaseGroup,
    ReleasingPartition,
    Tick,
    route_lease,
)
from tests.cli.harness import Log
from tests.fleet import Fleet, let_go, started

GROUP, TOPIC, PARTITIONS, CPS = "delays", "flights", 24, 8
BEGIN = 1_764_100_000_000
#: Seconds after the beginning.
JOINS, KILLED_AT, TAKEN_AT, FENCED_AT, PAUSED_AT, END = 60, 150, 158, 160, 200, 280


def after(seconds: float) -> Moment:
    """The moment ``seconds`` after the beginning."""
    return Moment(BEGIN + int(seconds * 1000))


class _Story:
    def __init__(self) -> None:
        self.log = Log(CPS)
        self.now = BEGIN
        self.holder = {number: f"worker-{number % 3 + 1}" for number in range(PARTITIONS)}
        self.done = dict.fromkeys(range(PARTITIONS), 0)
        for cp in range(CPS):
            self.log.add(Tick("init", "init", f"partitions={CPS}"), self.now, cp)
        self.now += 1000
        self.epoch = {number: self.claim(number, worker) for number, worker in self.holder.items()}

    def add(self, record: Record, cp: int | None = None) -> int:
        return self.log.add(record, self.now, cp)

    def claim(self, number: int, worker: str) -> int:
        return self.add(ClaimingPartition(_run(worker), worker, GROUP, TOPIC, number, 3000))

    def beat(self, worker: str, rng: random.Random) -> None:
        entries: dict[int, list[BeatEntry]] = {}
        for number, holder in self.holder.items():
            if holder == worker:
                self.done[number] += rng.randrange(20)
                entry = BeatEntry(TOPIC, number, self.epoch[number], self.done[number])
                entries.setdefault(route_lease(TOPIC, number, CPS), []).append(entry)
        for cp, of_cp in entries.items():
            self.add(HeartbeatBatch(_run(worker), worker, GROUP, tuple(of_cp)), cp)

    def hand_over(self, number: int, worker: str) -> None:
        """The worker claims, the holder releases, the worker claims again."""
        holder = self.holder[number]
        self.claim(number, worker)
        self.add(ReleasingPartition(_run(holder), holder, GROUP, TOPIC, number, self.epoch[number], self.done[number]))
        self.epoch[number], self.holder[number] = self.claim(number, worker), worker


def _run(worker: str) -> str:
    return f"host-{worker[-1]}/4{worker[-1]}/0.1.0/x"


def story() -> bytes:
    """The log as a dump."""
    told, rng = _Story(), random.Random(4)
    alive = ["worker-1", "worker-2", "worker-3"]
    for second in range(1, END):
        told.now = BEGIN + second * 1000
        for worker in alive:
            told.beat(worker, rng)
        if second == JOINS:
            alive.append("worker-4")
        if JOINS <= second < JOINS + 36 and second % 6 == 0:
            told.hand_over(4 * (second - JOINS) // 6, "worker-4")
        if second == KILLED_AT:
            alive.remove("worker-2")
        if second == TAKEN_AT:
            for number, holder in list(told.holder.items()):
                if holder == "worker-2":
                    heir = alive[number % 3]
                    told.epoch[number], told.holder[number] = told.claim(number, heir), heir
        if second == FENCED_AT:
            told.add(Heartbeat(_run("worker-2"), "worker-2", GROUP, TOPIC, 1, 2, 5))
        if second == PAUSED_AT:
            for cp in range(CPS):
                told.add(ReleaseGroup("admin/1/0.1.0/x", "admin-7", GROUP, told.now + 20_000), cp)
    _coordinated(told)
    return told.log.dump


def _coordinated(told: _Story) -> None:
    fleet = Fleet("billing", CPS, told.add)
    fleet.upgrade()
    steps = count(told.now + 10, 100)
    generation = fleet.join("a", {"invoices": 6})
    told.now = next(steps)
    fleet.commit("a", generation, *started("invoices", *range(6)))
    told.now = next(steps) + 2000
    generation = fleet.join("b", {"invoices": 6})
    told.now += 100
    fleet.commit("a", generation, let_go("invoices", 0, 5), let_go("invoices", 3, 5))
    told.now += 900
    fleet.beat("b", generation)
