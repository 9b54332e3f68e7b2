"""Leases in the canonical state (S1): one row each, and what such a row must be to be believed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rationalizer.intervals import Intervals
from rationalizer.leases.lease import Lease
from rationalizer.limits import MAX_INTERVALS, MAX_KEY_HASH, MAX_OFFSET
from rationalizer.plane import Bounds
from rationalizer.progress import Progress
from rationalizer.routing import route_lease
from rationalizer.snapshot import row_of, want, want_ascending
from rationalizer.wire import wellformed as ok

__all__ = ["lease_row", "load_leases", "load_progress"]


def lease_row(lease: Lease) -> tuple[object, ...]:
    """The lease as S1 writes it."""
    progress = lease.progress
    return (
        lease.group_id,
        lease.topic,
        lease.partition,
        lease.client_id,
        lease.instance_id,
        lease.epoch,
        lease.heartbeat_interval_ms,
        lease.last_beat,
        progress.done_through,
        progress.ranges,
        progress.granted,
    )


def load_leases(rows: Sequence[Any], bounds: Bounds) -> list[Lease]:
    """The leases that these rows of a snapshot describe. Raises SnapshotError."""
    leases = [_lease(row, bounds.next_offset, bounds.log_time) for row in rows]
    for lease in leases:
        here = route_lease(lease.topic, lease.partition, bounds.partitions) == bounds.partition
        want(here, f"the lease {lease.topic}/{lease.partition} belongs to another of {bounds.partitions} CPs")
    want_ascending("leases", [(lease.group_id, lease.topic, lease.partition) for lease in leases])
    return leases


def _lease(row: object, next_offset: int, log_time: int) -> Lease:
    group_id, topic, partition, client_id, instance_id, epoch, interval, last_beat, *progress = row_of("lease", row, 11)
    want(ok.is_id(group_id) and ok.is_topic(topic) and ok.is_partition(partition), "a lease has no proper name")
    named = f"the lease {group_id}/{topic}/{partition}"
    free = client_id is None and instance_id is None
    want(free or (ok.is_id(client_id) and ok.is_id(instance_id)), f"{named} has half a holder")
    want(ok.is_offset(epoch) and epoch < next_offset, f"the epoch of {named} lies after the snapshot")
    want(ok.HEARTBEAT_INTERVAL.holds(interval), f"the heartbeat interval of {named} is out of range")
    want(ok.is_offset(last_beat) and last_beat <= log_time, f"the last beat of {named} lies after the log time")
    lease = Lease(group_id, topic, partition)
    lease.client_id = client_id
    lease.instance_id = instance_id
    lease.epoch = epoch
    lease.heartbeat_interval_ms = interval
    lease.last_beat = last_beat
    lease.progress = load_progress(named, *progress)
    return lease


def load_progress(named: str, pieces: object, ranges: object, granted: object) -> Progress:
    """The progress of a snapshot, made through its own mutators: what comes out in another form was none."""
    want(_are_triples(pieces), f"done_through of {named} is no list of pieces")
    want(ranges == () or _are_pairs(ranges), f"the ranges of {named} are none")
    want(type(granted) is int and -1 <= granted <= MAX_OFFSET, f"granted of {named} is out of range")
    assert isinstance(pieces, tuple)
    assert isinstance(ranges, tuple)
    assert isinstance(granted, int)
    progress = Progress()
    if not ranges and len(pieces) == 1 and pieces[0][:2] == (0, MAX_KEY_HASH):
        # Nearly all are that simple, and in their one form. Without this, restoring takes a third longer.
        progress.stable = pieces[0][2]
        want(granted <= progress.stable, f"granted of {named} is above stable")
        progress.granted = granted
        return progress
    want(len(ranges) <= MAX_INTERVALS, f"{named} has more than {MAX_INTERVALS:,} ranges")
    _restore_pieces(named, progress, pieces)
    want(granted <= progress.stable, f"granted of {named} is above stable")
    progress.granted = granted
    progress.intervals = Intervals.of(ranges)
    progress.settle()
    same = tuple(progress.done_through) == pieces and tuple(progress.ranges) == ranges
    want(same, f"the progress of {named} is not in its one form (P10)")
    return progress


def _restore_pieces(named: str, progress: Progress, pieces: Iterable[tuple[int, int, int]]) -> None:
    at = 0
    for lo, hi, _ in pieces:
        want(lo == at and lo <= hi, f"the pieces of {named} have gaps or overlap")
        at = hi + 1
    want(at == MAX_KEY_HASH + 1, f"the pieces of {named} do not cover all key hashes")
    progress.restore_pieces(list(pieces))


def _are_triples(value: object) -> bool:
    return (
        type(value) is tuple
        and len(value) >= 1
        and all(
            type(piece) is tuple
            and len(piece) == 3
            and ok.is_offset(piece[0])
            and ok.is_offset(piece[1])
            and piece[2] is not None
            and ok.is_last_offset(piece[2])
            for piece in value
        )
    )


def _are_pairs(value: object) -> bool:
    return type(value) is tuple and all(
        type(pair) is tuple
        and len(pair) == 2
        and ok.is_offset(pair[0])
        and ok.is_offset(pair[1])
        and pair[0] <= pair[1]
        for pair in value
    )
