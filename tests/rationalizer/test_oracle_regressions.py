"""Differences between the real world and the oracle that were found once, each at its smallest."""

from __future__ import annotations

from rationalizer import ClaimingPartition, ReleasingPartition, World, encode
from tests.rationalizer.oracle import OracleWorld, shortest
from tests.rationalizer.oracle.compare import same_counts, same_outcome, same_state
from tests.rationalizer.strategies import Entry

CLAIM = encode(ClaimingPartition("1", "a", "g", "t", 0, 1000))


def all_agree(values: list[bytes]) -> None:
    """apply, apply_many and the oracle, on one log."""
    log: list[Entry] = [(offset, 1000 + offset, value) for offset, value in enumerate(values)]
    one_by_one, at_once, wanted = World(0, 1), World(0, 1), OracleWorld(0, 1)
    for entry in log:
        same_outcome(one_by_one.apply(*entry), wanted.apply(*entry))
    at_once.apply_many(log)
    for world in (one_by_one, at_once):
        same_state(world, wanted)
        same_counts(world, wanted)


def test_nil_is_no_holder() -> None:
    """A heartbeat with nil for both ids is malformed, even if the lease is free (E2, apply_many)."""
    release = encode(ReleasingPartition("1", "a", "g", "t", 0, 0, None))
    all_agree([CLAIM, release, shortest([1, 1, None, None, "g", "t", 0, 0, 5])])


def test_a_lease_without_ranges_is_restored() -> None:
    world = World(0, 1)
    world.apply(0, 1000, CLAIM)
    assert World.restore(world.snapshot(), 1).digest() == world.digest()
