"""A world's state in a form that is cheap to keep and to compare, without encoding it.

It has everything that the canonical state has (S1), so two are equal exactly if their canonical bytes are.
"""

from __future__ import annotations

from rationalizer import World

__all__ = ["state_of"]


def state_of(world: World) -> tuple[object, ...]:
    """(next offset, log time, level, pauses, rows of each plane); of what is mutable a copy."""
    return world.next_offset, world.log_time, world.level, world.pauses(), world.rows()
