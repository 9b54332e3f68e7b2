"""Leases of a snapshot: what their rows (S1) must be, besides each field's own rule, to be believed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rationalizer.intervals import Intervals
from rationalizer.leases.lease import Lease
from rationalizer.limits import MAX_INTERVALS, MAX_KEY_HASH
from rationalizer.plane import Bounds
from rationalizer.progress import Progress
from rationalizer.routing import route_lease
from rationalizer.state import LEASE, want, want_ascending
from rationalizer.wire import wellformed as ok

__all__ = ["load_leases", "load_progress"]


def load_leases(rows: Sequence[Any], bounds: Bounds) -> list[Lease]:
    """The leases that these rows of a snapshot describe. Raises SnapshotError."""
    leases = [_lease(row, bounds) for row in rows]
    for lease in leases:
        here = route_lease(lease.topic, lease.partition, bounds.partitions) == bounds.partition
        want(here, f"the lease {lease.topic}/{lease.partition} belongs to another of {bounds.partitions} CPs")
    want_ascending("leases", [(lease.group_id, lease.topic, lease.partition) for lease in leases])
    return leases


def _lease(row: object, bounds: Bounds) -> Lease:
    said = LEASE.read(row, bounds.level, "lease")
    lease = Lease(said.group_id, said.topic, said.partition)
    named = f"the lease {lease.group_id}/{lease.topic}/{lease.partition}"
    lease.client_id = said.client_id
    lease.instance_id = said.instance_id
    want((lease.client_id is None) == (lease.instance_id is None), f"{named} has half a holder")
    lease.epoch = said.epoch
    want(lease.epoch < bounds.next_offset, f"the epoch of {named} lies after the snapshot")
    lease.heartbeat_interval_ms = said.heartbeat_interval_ms
    lease.last_beat = said.last_beat
    want(lease.last_beat <= bounds.log_time, f"the last beat of {named} lies after the log time")
    lease.progress = load_progress(named, said.done_through, said.ranges, said.granted)
    LEASE.restore_added(lease, said)
    return lease


def load_progress(named: str, pieces: tuple[Any, ...], ranges: tuple[Any, ...], granted: int) -> Progress:
    """The progress of a snapshot, made through its own mutators: what comes out in another form is invalid."""
    want(_are_triples(pieces), f"done_through of {named} is no list of pieces")
    want(_are_pairs(ranges), f"the ranges of {named} are invalid")
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


def _are_triples(value: tuple[Any, ...]) -> bool:
    return len(value) >= 1 and all(
        type(piece) is tuple
        and len(piece) == 3
        and ok.is_offset(piece[0])
        and ok.is_offset(piece[1])
        and piece[2] is not None
        and ok.is_last_offset(piece[2])
        for piece in value
    )


def _are_pairs(value: tuple[Any, ...]) -> bool:
    return all(
        type(pair) is tuple
        and len(pair) == 2
        and ok.is_offset(pair[0])
        and ok.is_offset(pair[1])
        and pair[0] <= pair[1]
        for pair in value
    )
