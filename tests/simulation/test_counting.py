"""What the check of states finds wrong where one record closes a barrier and sets positions (X3, X10)."""

from __future__ import annotations

import json
from itertools import combinations

from kafka_marshal.testing.simulation.counting import States
from kafka_marshal.testing.simulation.recorded import state_of
from rationalizer import (
    ClaimingMessages,
    ClaimingPartition,
    CommitRanges,
    ForgetGroup,
    Heartbeat,
    Progress,
    Record,
    ReleaseGroup,
    ReleasingPartition,
    Tick,
    Upgrade,
    World,
    encode,
)
from rationalizer.groups.checkpoints import Barrier, Checkpoints, Kept, Key, Version, saved_nowhere
from rationalizer.limits import MAX_KEY_HASH
from rationalizer.wire.wellformed import PERIODIC

ONE, OTHER = ("events", 0), ("events", 1)


class _Group:
    """A group that takes checkpoints, whose members save what they counted, and the check of that."""

    def __init__(self) -> None:
        self.broken: list[str] = []
        self.states = States(lambda promise, message: self.broken.append(message))
        self.states.hashes = {ONE: [1] * 3, OTHER: [1] * 3}
        self.found = Checkpoints(4, hold=False)
        self.completes(1, {})
        self.states.look(self.found, None)

    def completes(self, checkpoint: int, versions: dict[Key, Version]) -> None:
        self.found.complete(Kept(checkpoint, 0, PERIODIC, dict(versions)))

    def saves(self, key: Key, checkpoint: int, *counts: int) -> Version:
        """Counts of offsets 0, 1 …, of which all are done."""
        data = json.dumps({offset: (times, None) for offset, times in enumerate(counts)}).encode()
        path = f"g/{key[0]}/{key[1]}/{checkpoint}-{0:016x}-{MAX_KEY_HASH:016x}.state"
        self.states.files = {**self.states.files, path: b"head\n" + data}
        return _version(checkpoint, checkpoint, len(counts) - 1)

    def sees(self, barrier: Barrier | None = None) -> list[str]:
        """What is found wrong of the newest checkpoint."""
        self.states.look(self.found, barrier)
        return self.broken


def _version(checkpoint: int, state: int, stable: int) -> Version:
    states, progress = saved_nowhere(), Progress()
    states.stable, progress.stable = state, stable
    return Version(checkpoint, states, progress, None)


def _barrier(key: Key, version: Version) -> Barrier:
    found = Barrier(version.checkpoint, 0, 1000, passing=False)
    found.versions[key] = version
    return found


def test_the_barriers_checkpoint_is_kept_beside_that_of_the_positions() -> None:
    group = _Group()
    barrier = _barrier(ONE, group.saves(ONE, 5, 1, 1))
    group.completes(5, barrier.versions)
    group.completes(8, {OTHER: _version(8, 0, 2)})
    assert group.sees(barrier) == []
    group.completes(9, {ONE: group.saves(ONE, 9, 1, 1, 1)})
    assert group.sees() == []


def test_a_version_that_positions_replace_at_once_is_checked_too() -> None:
    group = _Group()
    barrier = _barrier(ONE, group.saves(ONE, 5, 1, 2))
    group.completes(8, {ONE: _version(8, 5, 2)})
    assert group.sees(barrier) == ["events [0]: checkpoint 5 has offset 1 2 times in its state, and should 1 times"]


def test_what_is_done_again_after_positions_were_set_counts_again() -> None:
    group = _Group()
    barrier = _barrier(ONE, group.saves(ONE, 5, 1, 1))
    group.completes(8, {ONE: _version(8, 5, 0)})
    assert group.sees(barrier) == []
    group.completes(9, {ONE: group.saves(ONE, 9, 1, 2, 1)})
    assert group.sees() == []
    group.completes(11, {ONE: group.saves(ONE, 11, 1, 2, 2)})
    assert len(group.sees()) == 1


# -- The cheap state for comparing replicas distinguishes everything that the canonical one does (S1) -------------


A, B = ("a1", "a", "g"), ("b1", "b", "g")


def test_two_are_equal_exactly_where_the_canonical_bytes_are() -> None:
    records: list[Record] = [
        ClaimingPartition(*A, "t", 0, 100),
        Heartbeat(*A, "t", 0, 0, 4),
        CommitRanges(*A, "t", 0, 0, ((7, 8),)),
        ClaimingMessages(*A, "t", 0, 0, 20),
        ReleaseGroup(*B, 9_000),
        ReleaseGroup(*B, 0),
        ReleasingPartition(*A, "t", 0, 0, 6),
        ClaimingPartition(*B, "t", 0, 200),
        Tick(*A),
        Upgrade(*A, 2),
        ForgetGroup(*A),
    ]
    worlds = []
    for skipped in [
        None,
        *range(len(records)),
    ]:  # in each except the first, one record is replaced by one without effect
        world = World(0, 1)
        for offset, record in enumerate(records):
            world.apply(offset, 1_000 + 10 * offset, b"" if offset == skipped else encode(record))
            worlds.append((state_of(world), world.snapshot()))
    # And states that differ in a single field.
    claim, grant = ClaimingPartition(*A, "t", 0, 100), ClaimingMessages(*A, "t", 0, 0, 20)
    logs: list[tuple[Record, ...]] = [
        (claim, Tick(*A)),
        (Tick(*A), claim),  # another epoch
        (ClaimingPartition(*A, "t", 0, 101), Tick(*A)),
        (ClaimingPartition("a2", "a", "g", "t", 0, 100), Tick(*A)),
        (ClaimingPartition("a1", "b", "g", "t", 0, 100), Tick(*A)),
        (claim, grant),
        (claim, ClaimingMessages(*A, "t", 0, 0, 21)),
    ]
    for log in logs:
        world = World(0, 1)
        for offset, record in enumerate(log):
            world.apply(offset, 1_000, encode(record))
        worlds.append((state_of(world), world.snapshot()))
    for (one, one_bytes), (other, other_bytes) in combinations(worlds, 2):
        assert (one == other) is (one_bytes == other_bytes)
    assert len({snapshot for _, snapshot in worlds}) > 3 * len(records)
