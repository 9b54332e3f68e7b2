"""Which bytes are a state (S1, Q23): every condition once more, each by itself."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from tests.rationalizer.oracle.layout import (
    LARGEST_OFFSET,
    a_last_offset,
    a_partition,
    a_time,
    a_topic,
    an_id,
    an_interval,
    an_offset,
    fits,
    home_of_lease,
    int_between,
    or_nil,
)
from tests.rationalizer.oracle.msgpack_by_hand import NotMsgpackError, parse, shortest
from tests.rationalizer.oracle.progress import LARGEST_HASH, merged
from tests.rationalizer.oracle.world import HIGHEST_LEVEL

#: Ranges of one lease (P5).
MOST_RANGES = 60_000

a_hash = int_between(0, LARGEST_HASH)


def is_state(data: bytes, partitions: int, highest_level: int = HIGHEST_LEVEL) -> bool:
    """Whether a log with so many CPs could have led to the state that these bytes say, in their one form."""
    try:
        tree: list[Any] = list(parse(data, len(data)))
    except NotMsgpackError:
        return False
    if shortest(tree) != data:
        return False
    head = [int_between(1, 1), int_between(0, partitions - 1), int_between(0, LARGEST_OFFSET + 1), a_time]
    level = int_between(1, highest_level)
    if not fits(tree, [*head, level, _any_list, _any_list, _no_groups]):
        return False
    _, cp, next_offset, log_time, _, leases, pauses, _ = tree
    return (
        all(_is_lease(row, next_offset, log_time) for row in leases)
        and all(home_of_lease(row[1], row[2], partitions) == cp for row in leases)
        and all(fits(row, [an_id, an_id, int_between(log_time + 1, LARGEST_OFFSET)]) for row in pauses)
        and _ascends([tuple(row[:3]) for row in leases])
        and _ascends([row[0] for row in pauses])
    )


def _any_list(item: Any) -> bool:
    return isinstance(item, list)


def _no_groups(item: Any) -> bool:
    return bool(item == [])


def _ascends(names: list[Any]) -> bool:
    return names == sorted(set(names))


def _is_lease(row: Any, next_offset: int, log_time: int) -> bool:
    name, holder = [an_id, a_topic, a_partition], [or_nil(an_id), or_nil(an_id)]
    epoch, last_beat = int_between(0, min(next_offset - 1, LARGEST_OFFSET)), int_between(0, log_time)
    progress = [_any_list, _any_list, int_between(-1, LARGEST_OFFSET)]
    if not fits(row, [*name, *holder, epoch, an_interval, last_beat, *progress]):
        return False
    return (row[3] is None) == (row[4] is None) and _is_progress(*row[8:])


def _is_progress(pieces: list[Any], ranges: list[Any], granted: int) -> bool:
    """P10. The lowest piece is stable."""
    if not pieces or not all(fits(piece, [a_hash, a_hash, a_last_offset]) for piece in pieces):
        return False
    if not all(fits(span, [an_offset, an_offset]) and span[0] <= span[1] for span in ranges):
        return False
    edges = [-1, *(piece[1] for piece in pieces)]
    offsets = [piece[2] for piece in pieces]
    stable = min(offsets)
    return (
        edges[-1] == LARGEST_HASH
        and all(piece[0] == edge + 1 <= piece[1] for piece, edge in zip(pieces, edges, strict=False))
        and all(one != other for one, other in pairwise(offsets))
        and [tuple(span) for span in ranges] == merged(tuple(span) for span in ranges)
        and all(first > stable + 1 for first, _ in ranges)
        and not any(first <= offset + 1 <= last for first, last in ranges for offset in offsets)
        and granted <= stable
        and len(ranges) <= MOST_RANGES
    )
