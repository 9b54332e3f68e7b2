"""The cheap state for comparing replicas distinguishes everything that the canonical one does (S1)."""

from __future__ import annotations

from itertools import combinations

from kafka_marshal.testing.simulation.recorded import state_of
from rationalizer import (
    ClaimingMessages,
    ClaimingPartition,
    CommitRanges,
    ForgetGroup,
    Heartbeat,
    Record,
    ReleaseGroup,
    ReleasingPartition,
    Tick,
    Upgrade,
    World,
    encode,
)

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
