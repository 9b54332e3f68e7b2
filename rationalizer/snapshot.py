"""The canonical state of a CP: the same bytes for the same state, everywhere (S1).

    [1, CP, next_offset, log_time, level, leases, pauses, groups]

in msgpack's shortest forms, leases sorted by (group, topic, partition) and pauses by group. (Python orders
strings by code point, which is the order of their UTF-8 bytes.) Pauses that are over are left out: when they
are dropped from memory must not show. Counts and events are not state.

What is read back is not trusted: it has to be a state that a replay could have reached, in its one form, or
SnapshotError says what is wrong with it. A replica must never start from a state nobody could have replayed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, cast

from msgpack import packb
from xxhash import xxh3_128_hexdigest

from rationalizer.levels import FIRST_LEVEL, SUPPORTED_LEVEL
from rationalizer.limits import MAX_OFFSET
from rationalizer.pause import Pause
from rationalizer.travel import Travels
from rationalizer.wire import wellformed as ok
from rationalizer.wire.codec import MalformedError, parse_state
from rationalizer.wire.unpacking import Message

FORMAT: Final = 1

#: Which of the eight parts the planes' rows are.
LEASES: Final = 5
GROUPS: Final = 7


class SnapshotError(Travels, ValueError):
    """Bytes that are no snapshot of a state this release can replay from.

    Nothing was taken over from them. Start from an older snapshot, or from the beginning of the log.
    """

    def __init__(self, why: str) -> None:
        super().__init__(f"not a usable snapshot: {why}. Nothing was restored from it.")


class State(NamedTuple):
    """Everything that S1 holds. `rows`: what each plane writes, by its part of the eight (`Plane.part`)."""

    partition: int
    next_offset: int
    log_time: int
    level: int
    pauses: Sequence[Pause]
    rows: Mapping[int, Sequence[Any]]


def digest_of(snapshot: bytes) -> str:
    """XXH3-128 of canonical bytes: 32 lower-case hex digits, high half first (S1)."""
    return xxh3_128_hexdigest(snapshot)


def write(state: State) -> bytes:
    """The canonical bytes of a state; rows and pauses come sorted, pauses in force only."""
    written: bytes = packb(
        (
            FORMAT,
            state.partition,
            state.next_offset,
            state.log_time,
            state.level,
            state.rows.get(LEASES, ()),
            [(pause.group_id, pause.client_id, pause.expires) for pause in state.pauses],
            state.rows.get(GROUPS, ()),
        )
    )
    return written


def read(snapshot: bytes, partitions: int) -> State:
    """The state that these bytes hold, for a log of `partitions` CPs. Raises SnapshotError.

    The planes' rows are as they were read: each plane judges its own (`Plane.load`).
    """
    try:
        top = parse_state(snapshot)
    except MalformedError as error:
        raise SnapshotError(str(error)) from None
    want(len(top) == 8, "it has not the eight parts of a state")
    form, partition, next_offset, log_time, level, leases, pause_rows, groups = top
    want(type(form) is int and form == FORMAT, f"its format is {form!r}, this release reads {FORMAT}")
    want(type(partition) is int and 0 <= partition < partitions, f"it is of no CP below {partitions}")
    want(type(next_offset) is int and 0 <= next_offset <= MAX_OFFSET + 1, "its next offset is out of range")
    want(ok.is_offset(log_time), "its log time is out of range")
    want(type(level) is int and level >= FIRST_LEVEL, "its level is out of range")
    want(level <= SUPPORTED_LEVEL, f"it is of level {level}, this release supports {SUPPORTED_LEVEL}")
    arrays = all(type(part) is tuple for part in (leases, pause_rows, groups))
    want(arrays, "leases, pauses and groups must be arrays")
    pauses = [_pause(row, log_time) for row in pause_rows]
    want_ascending("pauses", [pause.group_id for pause in pauses])
    return State(partition, next_offset, log_time, level, pauses, {LEASES: leases, GROUPS: groups})


def want(holds: bool, why: str) -> None:
    """Raise SnapshotError unless this holds."""
    if not holds:
        raise SnapshotError(why)


def want_ascending(what: str, keys: Sequence[Any]) -> None:
    """Raise SnapshotError unless these are sorted, and distinct."""
    want(all(map(_below, keys, keys[1:])), f"its {what} are not sorted, or not distinct")


def _below(left: Any, right: Any) -> bool:
    return bool(left < right)


def row_of(what: str, row: object, parts: int) -> Message:
    """A row of this many parts. Raises SnapshotError."""
    want(type(row) is tuple and len(row) == parts, f"a {what} has not its {parts} parts")
    return cast("Message", row)


def _pause(row: object, log_time: int) -> Pause:
    group_id, client_id, expires = row_of("pause", row, 3)
    want(ok.is_id(group_id) and ok.is_id(client_id), "a pause has no proper name")
    want(ok.is_offset(expires) and log_time < expires, f"the pause of {group_id} is over")
    return Pause(group_id, client_id, expires)
