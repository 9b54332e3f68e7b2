"""A hundred members that share 5,000 partitions: the real client on virtual time, each with its own replica.

The simulation's checks of every record cost time proportional to members and leases: little for four members, most of
the time for a hundred. Here one more replica follows the log, and all are compared once, at the end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from random import Random

import pytest

from kafka_marshal import Claims
from kafka_marshal.adapters.memory import MemoryBroker
from kafka_marshal.adapters.opening import announced
from kafka_marshal.engine.claims.placement import FIRST_CLAIMS
from kafka_marshal.engine.policies import Balanced
from kafka_marshal.node.coordination_topic import required_settings
from kafka_marshal.node.driver import Driver
from kafka_marshal.testing.simulation import Job, Scenario
from kafka_marshal.testing.simulation.checks import Checks
from kafka_marshal.testing.simulation.living import Host, Living
from kafka_marshal.testing.simulation.network import Network, SimulatedCluster
from kafka_marshal.testing.simulation.process import BOOTSTRAP, Contents, Process
from kafka_marshal.testing.simulation.scheduler import Scheduler
from kafka_marshal.testing.simulation.story import decoded_once, quiet
from rationalizer import World, encode
from rationalizer.marker import marker

HI, CPS = 3_000, 8
#: All start within this time (ms), and the fetch interval (ms).
START_MS, FETCH_MS = 50.0, 5.0
BEATS = {"Heartbeat OK", "HeartbeatBatch OK"}

#: (topic, partition) → (client_id, epoch) of its holder.
Holders = dict[tuple[str, int], tuple[str | None, int]]


def holders(worlds: Mapping[int, World]) -> Holders:
    leases = (lease for world in worlds.values() for lease in world.leases() if lease.held)
    return {(lease.topic, lease.partition): (lease.client_id, lease.epoch) for lease in leases}


class Members(Checks):
    """Records the members and checks nothing."""

    def __init__(self, scenario: Scenario, scheduler: Scheduler) -> None:
        super().__init__(scenario, scheduler)
        self.drivers: dict[str, Driver] = {}

    def watch(self, process: Living, driver: Driver) -> None:
        self.drivers[process.client_id] = driver


class Crowd:
    """The whole group, and the log."""

    def __init__(self, seed: int, members: int, partitions: int, start_ms: float = START_MS) -> None:
        scenario = Scenario(seed, (), heartbeat_interval_ms=HI, coordination_partitions=CPS)
        self.scheduler = Scheduler()
        self.broker = MemoryBroker(lambda: self.network.broker_clock())
        self.network = Network(self.scheduler, self.broker, scenario.topic)
        self.network.on_record = self._record
        self.members = Members(scenario, self.scheduler)
        self.worlds = {cp: World(cp, CPS) for cp in range(CPS)}
        #: By type and code.
        self.records: Counter[str] = Counter()
        self.broker.create_topic(scenario.topic, CPS, 1, required_settings(1))
        self.broker.create_topic(scenario.data_topic, partitions)
        init = Process("init", Host("init"), self.network, self.members, seed)
        for cp in range(CPS):
            self.network.arrive(scenario.topic, cp, encode(marker("init", CPS)), init, 0.0)
        rng = Random(seed)
        for number in range(members):
            host = Host(f"m{number:03}", rng.uniform(0.97, 1.03), fetch_ms=FETCH_MS)
            process = Process(f"{host.name}#1", host, self.network, self.members, seed)
            work = partial(self._work, Job(process, scenario, Contents()))
            self.scheduler.call_at(start_ms * rng.random(), partial(process.run, work, lambda: None))

    def _work(self, job: Job) -> None:
        with job.marshal() as marshal, marshal.consumer([job.topic], mode=Claims(policy=Balanced())) as consumer:
            for message in consumer:
                job.handle(message)  # none comes

    def _record(self, cp: int, offset: int, stamp: int, value: bytes, sender: Living, sent_at: float) -> None:
        judged = self.worlds[cp].apply(offset, stamp, value)
        self.records[f"{judged.type} {judged.code}"] += 1

    def open_cluster(self, config: object) -> SimulatedCluster:
        """The cluster of a member's Marshal."""
        task = self.scheduler.current
        assert task is not None
        assert isinstance(task.process, Process)
        return task.process.cluster()

    def wait(self, condition: Callable[[], bool], until: float) -> None:
        while not condition():
            assert self.scheduler.now < until, sorted(self.shares())
            self.scheduler.run_until(self.scheduler.now + FETCH_MS)

    def shares(self) -> list[int]:
        """Each member's number of partitions, by its own count."""
        books = [driver.engine.book for driver in self.members.drivers.values()]
        return [sum(lease.held for lease in book.leases.values()) for book in books]

    def digest(self) -> str:
        """A digest of the log: all timestamps and bytes."""
        digest = sha256()
        for log in self.broker.existing[self.network.topic].partitions:
            digest.update(repr([(message.timestamp(), message.value()) for message in log.messages]).encode())
        return digest.hexdigest()


@contextmanager
def crowd(seed: int, members: int, partitions: int) -> Iterator[Crowd]:
    made = Crowd(seed, members, partitions)
    with quiet(), decoded_once(), announced(BOOTSTRAP, made.open_cluster):
        try:
            yield made
        finally:
            made.scheduler.close()


@dataclass(frozen=True)
class Shown:
    """What a run has shown."""

    #: Virtual time (ms) until all shares were even.
    took: float
    records: Counter[str]
    digest: str


def share_out(seed: int, members: int, partitions: int, rest: float) -> Shown:
    """From the start to even shares, and then only heartbeats for ``rest`` HI."""
    with crowd(seed, members, partitions) as group:
        group.wait(lambda: group.shares() == [partitions // members] * members, until=HI)
        took = group.scheduler.now
        group.scheduler.run_until(took + HI / 10)  # what is under way
        records, owners = group.records.copy(), holders(group.worlds)
        assert Counter(who for who, _ in owners.values()) == {f"m{x:03}": partitions // members for x in range(members)}
        group.scheduler.run_until(took + rest * HI)
        assert (group.records - records).keys() <= BEATS, "nothing moves any more, nobody asks"
        for client_id, driver in group.members.drivers.items():
            assert holders(driver.replica.worlds) == owners
            held = {key: (client_id, lease.epoch) for key, lease in driver.engine.book.leases.items() if lease.held}
            assert held == {key: (who, epoch) for key, (who, epoch) in owners.items() if who == client_id}
        return Shown(took, records, group.digest())


def check(shown: Shown, members: int, partitions: int) -> None:
    """Shares are even soon after the last start, with few records.

    A round is two fetches, there and back: five rounds, as in tests/engine/test_scale.py. Each member's first claims
    may be rejected, as it does not know the others yet; all later ones succeed. Early members have more than their
    share by then and release it: in the mean, no partition moves more than once.
    """
    records = shown.records
    assert shown.took <= START_MS + 5 * 2 * FETCH_MS
    assert records.keys() <= {"Tick OK", "ClaimingPartition OK", "ClaimingPartition HELD", "ReleasingPartition OK"}
    assert records["ClaimingPartition OK"] - records["ReleasingPartition OK"] == partitions
    assert records["ReleasingPartition OK"] <= partitions
    assert records["ClaimingPartition HELD"] <= FIRST_CLAIMS * members
    assert records["Tick OK"] <= CPS * members


@pytest.mark.slow
def test_twelve_members_and_240_partitions_are_one_history_byte_for_byte() -> None:
    first, again, other = (share_out(seed, 12, 240, rest=2) for seed in (1, 1, 2))
    check(first, 12, 240)
    assert first == again
    assert first.digest != other.digest


@pytest.mark.slow
@pytest.mark.campaign
def test_forty_members_and_1600_partitions() -> None:
    check(share_out(3, 40, 1_600, rest=1.2), 40, 1_600)


@pytest.mark.campaign
@pytest.mark.slow
@pytest.mark.timeout(900)  # 70 s of a shared processor, and 800 MB
def test_100_members_and_5000_partitions() -> None:
    check(share_out(4, 100, 5_000, rest=1.2), 100, 5_000)
