"""The canonical state of a CP: the same bytes for the same state, everywhere (S1).

    [1, CP, next_offset, log_time, level, leases, pauses, groups]

in msgpack's shortest forms, leases sorted by (group, topic, partition) and pauses by group. (Python orders
strings by code point, which is the order of their UTF-8 bytes.) Pauses that are over are left out: when they
are dropped from memory must not show. Counts and events are not state.

What is read back is not trusted: it has to be a state that a replay could have reached, in its one form, or
SnapshotError says what is wrong with it. A replica must never start from a state to which no replay leads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from msgpack import packb
from xxhash import xxh3_128_hexdigest

from rationalizer.levels import FIRST_LEVEL, SUPPORTED_LEVEL
from rationalizer.limits import MAX_OFFSET
from rationalizer.plane import PausedGroup
from rationalizer.state import PAUSE, SnapshotError, want, want_ascending
from rationalizer.wire import wellformed as ok
from rationalizer.wire.codec import MalformedError, parse_state

FORMAT: Final = 1

#: Which of the eight parts the planes' rows are.
LEASES: Final = 5
GROUPS: Final = 7


class State(NamedTuple):
    """Everything that S1 holds. `rows`: what each plane writes, by its part of the eight (`Plane.part`)."""

    partition: int
    next_offset: int
    log_time: int
    level: int
    pauses: Sequence[PausedGroup]
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
            [PAUSE.row(pause, state.level) for pause in state.pauses],
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
    want(len(top) == 8, "a state has eight parts")
    form, partition, next_offset, log_time, level, leases, pause_rows, groups = top
    want(type(form) is int and form == FORMAT, f"its format is {form!r}, this release reads {FORMAT}")
    want(type(partition) is int and 0 <= partition < partitions, f"it is of no CP below {partitions}")
    want(type(next_offset) is int and 0 <= next_offset <= MAX_OFFSET + 1, "its next offset is out of range")
    want(ok.is_offset(log_time), "its log time is out of range")
    want(type(level) is int and level >= FIRST_LEVEL, "its level is out of range")
    want(level <= SUPPORTED_LEVEL, f"it is of level {level}, this release supports {SUPPORTED_LEVEL}")
    arrays = all(type(part) is tuple for part in (leases, pause_rows, groups))
    want(arrays, "leases, pauses and groups must be arrays")
    pauses = [_pause(row, level, log_time) for row in pause_rows]
    want_ascending("pauses", [pause.group_id for pause in pauses])
    return State(partition, next_offset, log_time, level, pauses, {LEASES: leases, GROUPS: groups})


def _pause(row: object, level: int, log_time: int) -> PausedGroup:
    said = PAUSE.read(row, level, "pause")
    pause = PausedGroup(said.group_id, said.client_id, said.expires)
    want(log_time < pause.expires, f"the pause of {pause.group_id} is over")
    return pause
