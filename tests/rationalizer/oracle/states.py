"""Which bytes are a state (S1, Q23): every condition again, separately."""

from __future__ import annotations

from typing import Any

from tests.rationalizer.oracle.group_states import are_groups
from tests.rationalizer.oracle.layout import (
    HIGHEST_LEVEL,
    LARGEST_OFFSET,
    a_partition,
    a_time,
    a_topic,
    an_id,
    an_interval,
    fits,
    home_of_lease,
    int_between,
    or_nil,
)
from tests.rationalizer.oracle.lease_states import is_progress
from tests.rationalizer.oracle.msgpack_by_hand import NotMsgpackError, parse, shortest
from tests.rationalizer.oracle.sharing_states import are_shares_and_holes


def is_state(data: bytes, partitions: int, highest_level: int = HIGHEST_LEVEL) -> bool:
    """Whether a log with this number of CPs could have led to the state that these bytes say, in their one form."""
    try:
        tree: list[Any] = list(parse(data, len(data)))
    except NotMsgpackError:
        return False
    if shortest(tree) != data:
        return False
    head = [int_between(1, 1), int_between(0, partitions - 1), int_between(0, LARGEST_OFFSET + 1), a_time]
    level = int_between(1, highest_level)
    if not fits(tree, [*head, level, _any_list, _any_list, _any_list]):
        return False
    _, cp, next_offset, log_time, known_level, leases, pauses, groups = tree
    return (
        all(_is_lease(row, next_offset, log_time, known_level) for row in leases)
        and all(home_of_lease(row[1], row[2], partitions) == cp for row in leases)
        and all(fits(row, [an_id, an_id, int_between(log_time + 1, LARGEST_OFFSET)]) for row in pauses)
        and _ascends([tuple(row[:3]) for row in leases])
        and _ascends([row[0] for row in pauses])
        and are_groups(groups, cp, partitions, next_offset, log_time, known_level)
        and (groups == [] or known_level >= 2)  # E6
        and {row[0] for row in leases}.isdisjoint(row[0] for row in groups)  # G1
    )


def _any_list(item: Any) -> bool:
    return isinstance(item, list)


def _ascends(names: list[Any]) -> bool:
    return names == sorted(set(names))


def _is_lease(row: Any, next_offset: int, log_time: int, level: int) -> bool:
    if not isinstance(row, list):
        return False
    row, added = row[:11], row[11:]
    name, holder = [an_id, a_topic, a_partition], [or_nil(an_id), or_nil(an_id)]
    epoch, last_beat = int_between(0, min(next_offset - 1, LARGEST_OFFSET)), int_between(0, log_time)
    progress = [_any_list, _any_list, int_between(-1, LARGEST_OFFSET)]
    interval = an_interval
    if level >= 4 and row[3:8] == [None, None, 0, 0, 0]:  # it never had a holder
        interval = int_between(0, 0)
    if not fits(row, [*name, *holder, epoch, interval, last_beat, *progress]):
        return False
    if (row[3] is None) != (row[4] is None) or not is_progress(*row[8:]):
        return False
    if row[6] == 0 and row[10] != -1:  # nothing was granted (C12)
        return False
    return added == [] or (level >= 4 and are_shares_and_holes(row, added, next_offset, log_time))
