"""A world as the log of snapshots stores it."""

from __future__ import annotations

from rationalizer import World
from rationalizer.snapshot_log import encode_state


def encode_snapshot(world: World) -> list[bytes]:
    """The records that store this world as it is now, in order (S2)."""
    return encode_state(world.partition, world.next_offset, world.snapshot())
