"""What a world is like, in a form that is cheap to keep and to compare: by plain equality, with no bytes made of it.

It holds all that the canonical state holds (S1), so two are equal exactly where the canonical bytes are.
"""

from __future__ import annotations

from operator import attrgetter

from rationalizer import Lease, World

__all__ = ["state_of"]

#: What never changes but by being set anew.
_plain = attrgetter(
    "group_id", "topic", "partition", "client_id", "instance_id", "epoch", "heartbeat_interval_ms", "last_beat"
)


def state_of(world: World) -> tuple[object, ...]:
    """(next offset, log time, level, leases, pauses) of a world; of what is mutable a copy."""
    return world.next_offset, world.log_time, world.level, [_row(lease) for lease in world.leases()], world.pauses()


def _row(lease: Lease) -> tuple[object, ...]:
    progress = lease.progress
    intervals = progress.intervals
    return (
        _plain(lease),
        progress.stable,
        progress.granted,
        None if progress.pieces is None else tuple(progress.done_through),
        (tuple(intervals.firsts), tuple(intervals.lasts)) if intervals.firsts else (),
    )
