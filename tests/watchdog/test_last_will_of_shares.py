"""What a watchdog releases of a partition of which its worker has several ranges of keys: each share."""

from __future__ import annotations

from kafka_marshal.watchdog.parent import LastWill
from rationalizer import ClaimingShare, Record, ReleasingPartition, Upgrade, World, encode
from rationalizer.levels import SHARING_LEVEL

IDS = ("w-1", "w", "g")
KEY = ("orders", 0)


def test_each_share_has_its_release_and_one_that_ended_has_none() -> None:
    world, will = World(0, 1), LastWill(IDS)
    will.worlds, will.partitions = {0: world}, 1

    def write(record: Record) -> None:
        outcome = world.apply(world.next_offset, 1_000 + world.next_offset, encode(record))
        for key in will.touched(0, outcome):
            will.look(0, key)

    write(Upgrade("x", "admin", "any", SHARING_LEVEL))
    write(ClaimingShare(*IDS, *KEY, 1_000, 0, 9, None))
    write(ClaimingShare(*IDS, *KEY, 1_000, 20, 29, None))
    write(ClaimingShare("v-1", "v", "g", *KEY, 1_000, 10, 19, None))
    assert len(will.leases) == 2
    packed = b"".join(entry for _, entry in will.leases.values())
    assert all(encode(ReleasingPartition(*IDS, *KEY, epoch, None)) in packed for epoch in (1, 2))
    write(ReleasingPartition(*IDS, *KEY, 1, None))
    assert len(will.leases) == 1
    write(ReleasingPartition(*IDS, *KEY, 2, None))
    assert not will.leases
