"""The canonical state of a CP: the same bytes for the same state, everywhere (S1).

    [1, CP, next_offset, log_time, level, leases, pauses, groups]

in msgpack's shortest forms, leases sorted by (group, topic, partition) and pauses by group. (Python orders
strings by code point, which is the order of their UTF-8 bytes.) Pauses that are over are left out: when they
are dropped from memory must not show. Counts and events are not state.

What is read back is not trusted: it has to be a state that a replay could have reached, in its one form, or
SnapshotError says what is wrong with it. A replica must never start from a state nobody could have replayed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple, cast

from msgpack import packb
from xxhash import xxh3_128_hexdigest

from rationalizer import wellformed as ok
from rationalizer.codec import MalformedError, parse_state
from rationalizer.intervals import Intervals
from rationalizer.lease import Lease, Pause
from rationalizer.limits import FIRST_LEVEL, MAX_INTERVALS, MAX_KEY_HASH, MAX_OFFSET, SUPPORTED_LEVEL
from rationalizer.progress import Progress
from rationalizer.routing import route_lease
from rationalizer.unpacking import Message

FORMAT: Final = 1


class SnapshotError(ValueError):
    """Bytes that are no snapshot of a state this release can replay from.

    Nothing was taken over from them. Start from an older snapshot, or from the beginning of the log.
    """

    def __init__(self, why: str) -> None:
        super().__init__(f"not a usable snapshot: {why}. Nothing was restored from it.")


class State(NamedTuple):
    """Everything that S1 holds, in order."""

    partition: int
    next_offset: int
    log_time: int
    level: int
    leases: Sequence[Lease]
    pauses: Sequence[Pause]


def digest_of(snapshot: bytes) -> str:
    """XXH3-128 of canonical bytes: 32 lower-case hex digits, high half first (S1)."""
    return xxh3_128_hexdigest(snapshot)


def write(state: State) -> bytes:
    """The canonical bytes of a state; leases and pauses come sorted, pauses in force only."""
    written: bytes = packb(
        (
            FORMAT,
            state.partition,
            state.next_offset,
            state.log_time,
            state.level,
            [_lease_row(lease) for lease in state.leases],
            [(pause.group_id, pause.client_id, pause.expires) for pause in state.pauses],
            (),
        )
    )
    return written


def _lease_row(lease: Lease) -> tuple[object, ...]:
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


def read(snapshot: bytes, partitions: int) -> State:
    """The state that these bytes hold, for a log of `partitions` CPs. Raises SnapshotError."""
    try:
        top = parse_state(snapshot)
    except MalformedError as error:
        raise SnapshotError(str(error)) from None
    _want(len(top) == 8, "it has not the eight parts of a state")
    form, partition, next_offset, log_time, level, lease_rows, pause_rows, groups = top
    _want(type(form) is int and form == FORMAT, f"its format is {form!r}, this release reads {FORMAT}")
    _want(type(partition) is int and 0 <= partition < partitions, f"it is of no CP below {partitions}")
    _want(type(next_offset) is int and 0 <= next_offset <= MAX_OFFSET + 1, "its next offset is out of range")
    _want(ok.is_offset(log_time), "its log time is out of range")
    _want(type(level) is int and level >= FIRST_LEVEL, "its level is out of range")
    _want(level <= SUPPORTED_LEVEL, f"it is of level {level}, this release supports {SUPPORTED_LEVEL}")
    _want(groups == (), "it holds coordinated groups, which this release does not know")
    _want(type(lease_rows) is tuple and type(pause_rows) is tuple, "leases and pauses must be arrays")
    state = State(
        partition,
        next_offset,
        log_time,
        level,
        [_lease(row, next_offset, log_time) for row in lease_rows],
        [_pause(row, log_time) for row in pause_rows],
    )
    for lease in state.leases:
        here = route_lease(lease.topic, lease.partition, partitions) == partition
        _want(here, f"the lease {lease.topic}/{lease.partition} belongs to another of {partitions} CPs")
    _want_ascending("leases", [(lease.group_id, lease.topic, lease.partition) for lease in state.leases])
    _want_ascending("pauses", [pause.group_id for pause in state.pauses])
    # Whatever else may be odd about the bytes: they have to be the ones that this state is written as.
    _want(write(state) == snapshot, "it is not in canonical form")
    return state


def _want(holds: bool, why: str) -> None:
    if not holds:
        raise SnapshotError(why)


def _want_ascending(what: str, keys: Sequence[Any]) -> None:
    _want(all(map(_below, keys, keys[1:])), f"its {what} are not sorted, or not distinct")


def _below(left: Any, right: Any) -> bool:
    return bool(left < right)


def _row(what: str, row: object, parts: int) -> Message:
    _want(type(row) is tuple and len(row) == parts, f"a {what} has not its {parts} parts")
    return cast("Message", row)


def _lease(row: object, next_offset: int, log_time: int) -> Lease:
    group_id, topic, partition, client_id, instance_id, epoch, interval, last_beat, *progress = _row("lease", row, 11)
    _want(ok.is_id(group_id) and ok.is_topic(topic) and ok.is_partition(partition), "a lease has no proper name")
    named = f"the lease {group_id}/{topic}/{partition}"
    free = client_id is None and instance_id is None
    _want(free or (ok.is_id(client_id) and ok.is_id(instance_id)), f"{named} has half a holder")
    _want(ok.is_offset(epoch) and epoch < next_offset, f"the epoch of {named} lies after the snapshot")
    _want(ok.HEARTBEAT_INTERVAL.holds(interval), f"the heartbeat interval of {named} is out of range")
    _want(ok.is_offset(last_beat) and last_beat <= log_time, f"the last beat of {named} lies after the log time")
    lease = Lease(group_id, topic, partition)
    lease.client_id = client_id
    lease.instance_id = instance_id
    lease.epoch = epoch
    lease.heartbeat_interval_ms = interval
    lease.last_beat = last_beat
    lease.progress = _progress(named, *progress)
    return lease


def _pause(row: object, log_time: int) -> Pause:
    group_id, client_id, expires = _row("pause", row, 3)
    _want(ok.is_id(group_id) and ok.is_id(client_id), "a pause has no proper name")
    _want(ok.is_offset(expires) and log_time < expires, f"the pause of {group_id} is over")
    return Pause(group_id, client_id, expires)


def _progress(named: str, pieces: object, ranges: object, granted: object) -> Progress:
    """The progress, made through its own mutators: what comes out in another form was none."""
    _want(_are_triples(pieces), f"done_through of {named} is no list of pieces")
    _want(ranges == () or _are_pairs(ranges), f"the ranges of {named} are none")
    _want(type(granted) is int and -1 <= granted <= MAX_OFFSET, f"granted of {named} is out of range")
    assert isinstance(pieces, tuple)
    assert isinstance(ranges, tuple)
    assert isinstance(granted, int)
    progress = Progress()
    if not ranges and len(pieces) == 1 and pieces[0][:2] == (0, MAX_KEY_HASH):
        # Nearly all are that simple, and in their one form. Without this, restoring takes a third longer.
        progress.stable = pieces[0][2]
        _want(granted <= progress.stable, f"granted of {named} is above stable")
        progress.granted = granted
        return progress
    _want(len(ranges) <= MAX_INTERVALS, f"{named} has more than {MAX_INTERVALS:,} ranges")
    _restore_pieces(named, progress, pieces)
    _want(granted <= progress.stable, f"granted of {named} is above stable")
    progress.granted = granted
    progress.intervals = Intervals.of(ranges)
    progress.settle()
    same = tuple(progress.done_through) == pieces and tuple(progress.ranges) == ranges
    _want(same, f"the progress of {named} is not in its one form (P10)")
    return progress


def _restore_pieces(named: str, progress: Progress, pieces: Iterable[tuple[int, int, int]]) -> None:
    at = 0
    for lo, hi, _ in pieces:
        _want(lo == at and lo <= hi, f"the pieces of {named} have gaps or overlap")
        at = hi + 1
    _want(at == MAX_KEY_HASH + 1, f"the pieces of {named} do not cover all key hashes")
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
