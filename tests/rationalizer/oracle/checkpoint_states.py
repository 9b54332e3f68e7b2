"""Which rows of S1 are the checkpoints of a group, and its versions: every condition by itself.

What only history could show is not asked: whether a version that is no barrier's was made by X4 or by X10.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from tests.rationalizer.oracle.checkpoints import MOST_PINNED, MOST_STATES, PASSING, PERIODIC, PINNED
from tests.rationalizer.oracle.keyed import MOST_PIECES
from tests.rationalizer.oracle.layout import (
    a_bool,
    a_hash,
    a_last_offset,
    a_partition,
    a_timeout,
    a_topic,
    fits,
    int_between,
    is_int,
    or_nil,
    some_metadata,
)
from tests.rationalizer.oracle.lease_states import is_progress
from tests.rationalizer.oracle.progress import LARGEST_HASH

MOST_KEPT = 64


def _a_list(item: Any) -> bool:
    return isinstance(item, list)


def are_checkpoints(row: Any, members: list[Any], generation: int, next_offset: int, log_time: int) -> bool:
    """X1, X3: [keep, hold, barrier or nil, [[id, log_time, kind]]]."""
    if not fits(row, [int_between(1, MOST_KEPT), a_bool, or_nil(_a_list), _a_list]):
        return False
    barrier, kept = row[2:]
    each = [int_between(1, next_offset - 1), int_between(0, log_time), int_between(PASSING, PINNED)]
    if kept == [] or not all(fits(one, each) for one in kept):
        return False
    kinds = [one[2] for one in kept]
    if any(one[0] >= other[0] or one[1] > other[1] for one, other in pairwise(kept)):
        return False
    if PASSING in kinds[:-1] or kinds.count(PINNED) > MOST_PINNED or kinds.count(PERIODIC) > MOST_KEPT:
        return False
    return barrier is None or is_barrier(barrier, kept[-1], members, generation, next_offset, log_time)


def is_barrier(
    row: list[Any], newest: list[Any], members: list[Any], generation: int, next_offset: int, log_time: int
) -> bool:
    """X3: [id, opened, timeout_ms, passing, [[slot, generation, answer]]]."""
    opened = int_between(newest[1], log_time)
    if not fits(row, [int_between(newest[0] + 1, next_offset - 1), opened, a_timeout, a_bool, _a_list]):
        return False
    slots = {member[0] for member in members}
    answers = row[4]
    if not all(fits(one, [is_int, int_between(0, generation), int_between(0, 2)]) for one in answers):
        return False
    return all(one[0] in slots for one in answers) and all(one[0] < other[0] for one, other in pairwise(answers))


def is_versioned(row: Any, known: list[Any]) -> bool:
    """X2: [topic, partition, pieces, initial or nil, version, …]."""
    if not isinstance(row, list) or not fits(row[:4], [a_topic, a_partition, _a_list, or_nil(a_last_offset)]):
        return False
    _, _, barrier, kept = known
    versions = row[4:]
    if not all(is_version(version) for version in versions):
        return False
    ids = [version[0] for version in versions]
    if ids != sorted(set(ids)):
        return False
    newest = kept[-1][0]
    seen = {max((number for number in ids if number <= one[0]), default=None) for one in kept}
    for version in versions:
        if version[0] > newest and (barrier is None or version[0] != barrier[0]):
            return False
        if version[0] <= newest and version[0] not in seen:
            return False
    if not versions or versions[-1][0] <= newest:
        return True
    # X5: the first entry of a partition that has progress makes it, and an entry sets states
    return (row[3] is not None or len(versions) > 1) and any(part[2] == barrier[0] for part in versions[-1][1])


def is_version(row: Any) -> bool:
    """X2: [checkpoint, states, done_through, ranges, metadata]."""
    if not fits(row, [int_between(1, LARGEST_HASH), _a_list, _a_list, _a_list, some_metadata]):
        return False
    checkpoint, states, done_through, ranges, _ = row
    if not is_progress(done_through, ranges, -1) or len(done_through) > MOST_PIECES:
        return False
    if not states or len(states) > MOST_STATES:
        return False
    if not all(fits(part, [a_hash, a_hash, int_between(0, checkpoint)]) for part in states):
        return False
    edges = [-1, *(part[1] for part in states)]
    whole = edges[-1] == LARGEST_HASH
    joined = all(part[0] == edge + 1 <= part[1] for part, edge in zip(states, edges, strict=False))
    return whole and joined and all(one[2] != other[2] for one, other in pairwise(states))
