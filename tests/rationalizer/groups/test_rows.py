"""Rows of the canonical state are copies: those kept do not change with the world."""

from __future__ import annotations

from benchmarks.groups import GROUP, Fleet, join
from rationalizer import ConfigureGroup


def test_the_pieces_of_a_partition_that_is_shared_by_key_are_copied_too() -> None:
    fleet = Fleet()
    fleet.append(ConfigureGroup("1", "admin", GROUP, (("accept_range_fetch", ("t",)),)))
    for number in range(2):
        fleet.append(join(number, (("t", 1),)))
    group = fleet.world.group(GROUP)
    assert group is not None
    rows, before = fleet.world.rows(), repr(fleet.world.rows())
    group.pieces["t"].cut[0].reverse()
    assert repr(rows) == before
