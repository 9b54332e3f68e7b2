"""A coordinated group whose members all start within ten seconds: the real client on virtual time, as in test_scale.

A thousand whole clients are too slow here: each applies each record, so the time grows with the square of the members,
and more. `benchmarks/start_fleet.py` has one whole client in a fleet of a thousand, and the rules alone apply all joins
in tests/rationalizer/groups/test_assignors.py.
"""

from __future__ import annotations

from collections import Counter

import pytest

from benchmarks.phantoms import is_even
from kafka_marshal import Group
from kafka_marshal.adapters.opening import announced
from kafka_marshal.testing.simulation import Job
from kafka_marshal.testing.simulation.living import Host
from kafka_marshal.testing.simulation.process import BOOTSTRAP, Process
from kafka_marshal.testing.simulation.story import decoded_once, quiet
from rationalizer import Upgrade, encode, route_group
from rationalizer.levels import GROUPS_LEVEL
from tests.simulation.test_scale import CPS, Crowd

#: All start within this time; sessions as in production (ms).
STARTS_MS, SESSION_MS = 10_000.0, 10_000


class Fleet(Crowd):
    """The members of a coordinated group."""

    def __init__(self, seed: int, members: int, partitions: int) -> None:
        super().__init__(seed, members, partitions, STARTS_MS)
        init = Process("upgrade", Host("init"), self.network, self.members, seed)
        for cp in range(CPS):
            upgrade = Upgrade("u", "operator", "group", GROUPS_LEVEL)
            self.network.arrive(self.network.topic, cp, encode(upgrade), init, 0.0)

    def _work(self, job: Job) -> None:
        with (
            job.marshal() as marshal,
            marshal.consumer([job.topic], mode=Group(session_timeout=SESSION_MS / 1000)) as consumer,
        ):
            for message in consumer:
                job.handle(message)  # none comes

    def at_work(self) -> Counter[int]:
        """How many members work on each partition, by their own view."""
        found: Counter[int] = Counter()
        for driver in self.members.drivers.values():
            for source in driver.engine.groups.values():
                found.update(partition for (_, partition), piece in source.pieces.items() if piece.held)
        return found


def check(members: int, partitions: int) -> None:
    """Even within two seconds after the last start, no session lost, and all replicas are one."""
    fleet = Fleet(5, members, partitions)
    home = route_group("group", CPS)
    world = fleet.worlds[home]
    with quiet(), decoded_once(), announced(BOOTSTRAP, fleet.open_cluster):
        try:
            topics = {"events": partitions}
            fleet.wait(lambda: is_even(world.group("group"), topics, members), until=STARTS_MS + 2_000)
            fleet.wait(lambda: fleet.at_work() == Counter(range(partitions)), until=STARTS_MS + 2_500)
            fleet.scheduler.run_until(fleet.scheduler.now + SESSION_MS)
            joins = {kind: number for kind, number in fleet.records.items() if kind.startswith(("JoinGroup", "Leave"))}
            assert joins == {"JoinGroup OK": members}, "each joins once: no session was lost"
            digests = {driver.replica.worlds[home].digest() for driver in fleet.members.drivers.values()}
            assert len(digests) == 1
        finally:
            fleet.scheduler.close()


@pytest.mark.slow
def test_ten_members_of_a_group_start() -> None:
    check(10, 60)


@pytest.mark.slow
@pytest.mark.campaign
@pytest.mark.timeout(900)
def test_a_hundred_members_of_a_group_start() -> None:
    check(100, 300)
