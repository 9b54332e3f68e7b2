"""A world's state in a form that is cheap to keep and to compare, without encoding it.

It has everything that the canonical state has (S1), so two are equal exactly if their canonical bytes are.
"""

from __future__ import annotations

from operator import attrgetter

from rationalizer import Group, Lease, Progress, World

__all__ = ["state_of"]

#: Immutable fields of a lease.
_plain = attrgetter(
    "group_id", "topic", "partition", "client_id", "instance_id", "epoch", "heartbeat_interval_ms", "last_beat"
)


#: Immutable fields of a coordinated group's member.
_of_member = attrgetter(
    *("slot", "member_id", "client_id", "instance_id", "session_timeout_ms", "allow_key_share", "pattern", "topics"),
    *("last_beat", "joined"),
)


def state_of(world: World) -> tuple[object, ...]:
    """(next offset, log time, level, leases, pauses, coordinated groups) of a world; mutable parts are copied."""
    leases, groups = [_row(lease) for lease in world.leases()], [_group_row(group) for group in world.groups()]
    return world.next_offset, world.log_time, world.level, leases, world.pauses(), groups


def _row(lease: Lease) -> tuple[object, ...]:
    return _plain(lease), *_done(lease.progress)


def _group_row(group: Group) -> tuple[object, ...]:
    pieces = [(name, part, *topic[part]) for name, topic in sorted(group.pieces.items()) for part in topic.partitions()]
    return (
        *(group.group_id, group.generation, group.strategy, group.settings, sorted(group.counts.items())),
        [_of_member(member) for member in group.members.values()],
        pieces,
        [(name, part, kept.initial, kept.metadata, *_done(kept.progress)) for name, part, kept in group.all_progress()],
    )


def _done(progress: Progress) -> tuple[object, ...]:
    intervals = progress.intervals
    return (
        progress.stable,
        progress.granted,
        None if progress.pieces is None else tuple(progress.done_through),
        (tuple(intervals.firsts), tuple(intervals.lasts)) if intervals.firsts else (),
    )
