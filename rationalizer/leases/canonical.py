"""Leases and holes of a snapshot: what their rows (S1) must be, besides each field's own rule, to be believed."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import pairwise
from typing import Any

from rationalizer.holes import NO_KEY, NO_OWNER, Hole, Holes
from rationalizer.intervals import Intervals
from rationalizer.leases.lease import Lease
from rationalizer.leases.shares import Share, Shares
from rationalizer.levels import SHARING_LEVEL
from rationalizer.limits import MAX_INTERVALS, MAX_KEY_HASH, MAX_KEY_PIECES
from rationalizer.plane import Bounds
from rationalizer.progress import Progress
from rationalizer.routing import route_lease
from rationalizer.state import HOLE, LEASE, SHARE, want, want_ascending
from rationalizer.wire import wellformed as ok


def load_again(named: str, again: int, bounds: Bounds) -> int:
    """Which record last opened what was done, or replaced the progress (R1). Raises SnapshotError."""
    want(again < bounds.next_offset, f"{named} was opened again by a record to come")
    return again


def load_holes(named: str, rows: tuple[Any, ...] | None, owners: Collection[int], bounds: Bounds) -> Holes | None:
    """The holes that these rows of a snapshot describe. owners: epochs of shares by batches. Raises SnapshotError."""
    if not rows:
        return None
    holes = [_hole(named, row, owners, bounds) for row in rows]
    apart = all(before.last < after.first for before, after in pairwise(holes))
    want(apart, f"the holes of {named} are not sorted, or overlap")
    alike = any(
        before.last + 1 == after.first and after.key_hash == NO_KEY and before[2:] == after[2:]
        for before, after in pairwise(holes)
    )
    want(not alike, f"two holes of {named} would be one")
    return Holes(holes)


def _hole(named: str, row: object, owners: Collection[int], bounds: Bounds) -> Hole:
    said = HOLE.read(row, bounds.level, f"hole of {named}")
    hole = Hole(said.first, said.last, said.owner, said.since, said.attempts, said.key_hash, said.reason)
    want(hole.first <= hole.last, f"a hole of {named} ends before it begins")
    want(hole.key_hash == NO_KEY or hole.first == hole.last, f"a hole of {named} has one key, and several messages")
    want(hole.since < bounds.next_offset, f"a hole of {named} is to come")
    if hole.reason is not None:
        want(hole.owner == NO_OWNER and hole.key_hash != NO_KEY, f"a parked hole of {named} is no single message")
    if hole.owner != NO_OWNER:
        want(hole.owner in owners, f"a hole of {named} has an owner that shares no batches")
        want(hole.owner < hole.since and hole.attempts > 0, f"a hole of {named} was taken before it could be")
    return hole


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
    lease.progress = load_progress(named, said.done_through, said.ranges, said.granted, bounds)
    if not lease.was_held:
        _check_never_held(named, lease, bounds)
    lease.shares = _shares(named, lease, said.shares, bounds)
    owners = [] if lease.shares is None or not lease.shares.by_batches else [share.epoch for share in lease.shares]
    holes = lease.progress.holes = load_holes(named, said.holes, owners, bounds)
    lease.progress.again = load_again(named, said.again, bounds)
    if lease.shares is not None and not lease.shares.by_batches:
        want(holes is None or not holes.has_unkeyed(), f"{named} is shared by keys, and has holes without keys")
    return lease


def _check_never_held(named: str, lease: Lease, bounds: Bounds) -> None:
    """Only a lease that was shared can be there without a holder ever."""
    want(bounds.level >= SHARING_LEVEL, f"heartbeat_interval_ms of {named} is that of no holder")
    bare = not lease.held and lease.epoch == 0 and lease.last_beat == 0 and lease.progress.granted < 0
    want(bare, f"{named} never had a holder, and has something of one")


def _shares(named: str, lease: Lease, rows: tuple[Any, ...] | None, bounds: Bounds) -> Shares | None:
    if not rows:
        return None
    want(not lease.held, f"{named} has a holder and shares")
    shares = [_share(named, lease, row, bounds) for row in rows]
    want_ascending(f"shares of {named}", [share.epoch for share in shares])
    by_batches = {share.by_batches for share in shares}
    want(len(by_batches) == 1, f"{named} is shared by keys and by batches")
    pieces = lease.progress.piece_count
    if by_batches == {True}:
        owners = {(share.client_id, share.instance_id) for share in shares}
        want(len(owners) == len(shares), f"an instance has two shares by batches of {named}")
        want(pieces == 1, f"{named} is shared by batches, and its keys are at different places")
    else:
        keys = sorted((share.lo, share.hi) for share in shares)
        apart = all(hi < lo for (_, hi), (lo, _) in pairwise(keys))
        want(apart, f"the keys of the shares of {named} overlap")
    want(2 * len(shares) < MAX_KEY_PIECES, f"{named} has too many shares")
    return Shares(shares)


def _share(named: str, lease: Lease, row: object, bounds: Bounds) -> Share:
    said = SHARE.read(row, bounds.level, f"share of {named}")
    share = Share(*said)
    good = share.lo == share.hi == NO_KEY or 0 <= share.lo <= share.hi
    want(good, f"the keys of a share of {named} are no range")
    is_later = share.epoch > lease.epoch or not lease.was_held
    want(is_later and share.epoch < bounds.next_offset, f"a share of {named} began when it could not")
    want(share.last_beat <= bounds.log_time, f"the last beat of a share of {named} lies after the log time")
    return share


def load_progress(
    named: str, pieces: tuple[Any, ...], ranges: tuple[Any, ...], granted: int, bounds: Bounds
) -> Progress:
    """The progress of a snapshot, made through its own mutators: what comes out in another form is invalid."""
    want(_are_triples(pieces), f"done_through of {named} is no list of pieces")
    want(ok.are_ranges_or_none(ranges, len(ranges)), f"the ranges of {named} are invalid")
    progress = Progress()
    if not ranges and len(pieces) == 1 and pieces[0][:2] == (0, MAX_KEY_HASH):
        # Nearly all are that simple, and in their one form. Without this, restoring takes a third longer.
        progress.stable = pieces[0][2]
        want(granted <= progress.stable, f"granted of {named} is above stable")
        progress.granted = granted
        return progress
    # What is settled is done, whatever limits say (H5).
    fits = len(ranges) <= MAX_INTERVALS or bounds.level >= SHARING_LEVEL
    want(fits, f"{named} has more than {MAX_INTERVALS:,} ranges")
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
        and ok.is_position(piece[2])
        for piece in value
    )
