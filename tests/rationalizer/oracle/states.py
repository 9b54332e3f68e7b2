"""Which bytes are a state (S1, Q23): every condition again, separately."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

from tests.rationalizer.oracle.assigning import STRATEGIES
from tests.rationalizer.oracle.checkpoint_states import are_checkpoints, is_versioned
from tests.rationalizer.oracle.group_rules import MOST_MEMBERS, MOST_PARTITIONS
from tests.rationalizer.oracle.groups import Group, Settings, canonical, in_order
from tests.rationalizer.oracle.keyed import MOST_PIECES
from tests.rationalizer.oracle.layout import (
    HIGHEST_LEVEL,
    LARGEST_OFFSET,
    SETTINGS,
    a_bool,
    a_count,
    a_hash,
    a_last_offset,
    a_member_id,
    a_partition,
    a_pattern,
    a_session,
    a_time,
    a_topic,
    added_to_groups,
    an_id,
    an_interval,
    fits,
    home_of_group,
    home_of_lease,
    int_between,
    is_int,
    or_nil,
    some_metadata,
)
from tests.rationalizer.oracle.lease_states import is_progress
from tests.rationalizer.oracle.msgpack_by_hand import NotMsgpackError, parse, shortest
from tests.rationalizer.oracle.progress import LARGEST_HASH
from tests.rationalizer.oracle.sharing_states import are_holes, are_shares_and_holes

# -- Which rows of S1 are a coordinated group: every condition by itself, as far as one state shows it ------------
# What only history could show is not asked: which targets sticky came to, and at which offset a member was replaced.


UUID5 = re.compile("[0-9a-f]{8}-[0-9a-f]{4}-5[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")


def are_groups(rows: list[Any], cp: int, partitions: int, next_offset: int, log_time: int, level: int) -> bool:
    """Whether S1's groups are such as a log leads to."""
    if not all(is_group(row, next_offset, log_time, level) for row in rows):
        return False
    names = [row[0] for row in rows]
    taken = sum(max(1, count) for row in rows for _, count in row[4])
    return (
        names == in_order(names)
        and taken <= MOST_PARTITIONS
        # G2: outside its home a group is a mark, without the map
        and all(home_of_group(row[0], partitions) == cp or row == canonical(Group(row[0]), level) for row in rows)
    )


def a_list(item: Any) -> bool:
    """Any list."""
    return isinstance(item, list)


def is_group(row: Any, next_offset: int, log_time: int, level: int) -> bool:
    """One group, by itself."""
    if not isinstance(row, list):
        return False
    takes_checkpoints = len(row) == 8 and level >= 3  # X1
    known: Any = row[7] if takes_checkpoints else None
    row, added = row[:7], [] if takes_checkpoints else row[7:]
    fields = list(added_to_groups(level).values())
    if len(added) > len(fields) or not all(check(value) for value, (_, check) in zip(added, fields, strict=False)):
        return False
    if added and added[-1] == fields[len(added) - 1][0]:  # omitted if it is the default
        return False
    generation = int_between(0, max(0, next_offset - 1))
    if not fits(row, [an_id, generation, lambda item: item in (None, *STRATEGIES), a_list, a_list, a_list, a_list]):
        return False
    name, generation_, strategy, settings, topics, members, places = row
    if not are_settings(settings, level) or not all(fits(pair, [a_topic, a_count]) for pair in topics):
        return False
    if not all(is_member(member, name, generation_, next_offset, log_time) for member in members):
        return False
    if takes_checkpoints:
        if not are_checkpoints(known, members, generation_, next_offset, log_time):
            return False
        if not all(is_versioned(place, known) for place in places):
            return False
        # what is said of the other three is as at level 2
        places = [[*place[:3], place[3:] if place[3] is not None or place[4:] else None] for place in places]
        if known[2] is not None and not may_be_open(known, places):
            return False
    elif not all(fits(place, [a_topic, a_partition, a_list, or_nil(a_list)]) for place in places):
        return False
    if level >= 5 and settings[4] not in ((None, strategy) if members else (None, *STRATEGIES)):  # R5, R6
        return False
    return (
        (strategy is None) == (members == [])
        and are_members(members)
        # G12: what a member reports is subscribed to; what none does was forgotten by the rebalance
        and [topic for topic, _ in topics] == in_order(topic for member in members for topic in member[7])
        and ascending([(place[0].encode(), place[1]) for place in places])
        and all(
            is_place(place, generation_, dict(topics), members, takes_checkpoints, next_offset, level)
            for place in places
        )
        and all(
            any(place[:2] == [topic, number] and place[2] for place in places)
            for topic, count in topics
            for number in range(count)
        )
    )


def ascending(names: list[Any]) -> bool:
    """In order, and none twice."""
    return names == sorted(set(names))


def are_settings(item: Any, level: int) -> bool:
    """G19, in the order of S1."""
    names = list(Settings().__dict__)[: 5 if level >= 5 else 4]
    return fits(item, [SETTINGS[name] for name in names]) and item[1] == in_order(item[1])


def is_member(row: Any, group: str, generation: int, next_offset: int, log_time: int) -> bool:
    """G3, G6, G11."""
    slot = int_between(0, generation)  # each newcomer's join is a rebalance
    joined = int_between(0, next_offset - 1)
    ids = [a_member_id, an_id, an_id]
    if not fits(row, [slot, *ids, a_session, a_bool, a_pattern, a_list, int_between(0, log_time), joined]):
        return False
    topics = row[7]
    return (
        row[1].startswith(f"{group}-")
        and UUID5.fullmatch(row[1][len(group) + 1 :]) is not None
        and row[0] <= row[9]
        and len(topics) <= 10_000
        and all(a_topic(topic) for topic in topics)
        and topics == in_order(topics)
        and (topics != [] or row[6] != "")
    )


def are_members(rows: list[Any]) -> bool:
    """By slot; one a client; no two of one record."""
    return (
        ascending([row[0] for row in rows])
        and len(rows) <= MOST_MEMBERS
        and all(len({row[place] for row in rows}) == len(rows) for place in (1, 2, 9))
    )


def may_be_open(known: list[Any], places: list[Any]) -> bool:
    """X6: a barrier is closed when every owner has answered; X5: what was handed in is of one that is an owner."""
    answers = {row[0]: row[2] for row in known[2][4]}
    owners = [piece[2] for place in places for piece in place[2] if isinstance(piece, list) and len(piece) > 2]
    handed_in = any(
        place[3] and place[3][-1] and isinstance(place[3][-1], list) and place[3][-1][0] == known[2][0]
        for place in places
    )
    reached = any(answers.get(owner, 0) > 0 for owner in owners)
    return any(owner not in answers for owner in owners) and (reached or not handed_in)


def is_place(
    row: list[Any],
    generation: int,
    counts: dict[str, int],
    members: list[Any],
    takes_checkpoints: bool,
    next_offset: int,
    level: int,
) -> bool:
    """A partition that is listed: it has pieces or progress."""
    topic, number, pieces, progress = row
    if pieces == [] and progress is None:
        return False
    assigned = number < counts.get(topic, 0)
    subscribers = [member[0] for member in members if subscribes(member, topic, members)] if assigned else []
    slots = [member[0] for member in members]
    if not all(is_piece(piece, generation, slots, subscribers) for piece in pieces):
        return False
    edges = [-1, *(piece[1] for piece in pieces)]
    if assigned:  # G4: the pieces of an assigned partition cover the whole space
        if edges[-1] != LARGEST_HASH or any(piece[0] != edge + 1 for piece, edge in zip(pieces, edges, strict=False)):
            return False
    elif any(piece[0] <= edge for piece, edge in zip(pieces, edges, strict=False)):
        return False
    touching = [(one, other) for one, other in pairwise(pieces) if one[1] + 1 == other[0]]
    if any(one[2:] == other[2:] for one, other in touching):
        return False
    return takes_checkpoints or progress is None or is_keyed_progress(progress, next_offset, level)


def subscribes(member: list[Any], topic: str, members: list[Any]) -> bool:
    """G12."""
    if topic in member[7]:
        return True
    return member[6] != "" and any(topic in other[7] for other in members if other[6] == member[6])


def is_piece(row: Any, generation: int, slots: list[int], subscribers: list[int]) -> bool:
    """G4: [lo, hi, owner, since, target or −1, revoked or −1]."""
    if not isinstance(row, list) or len(row) != 6 or not all(is_int(part) for part in row):
        return False
    low, high, owner, since, target, revoked = row
    return (
        bool(a_hash(low) and a_hash(high) and low <= high)
        and owner in slots
        and owner <= since <= generation
        and (target in subscribers if subscribers else target == -1)
        and (revoked == -1 if owner == target else since < revoked <= generation)
    )


def is_keyed_progress(row: Any, next_offset: int, level: int) -> bool:
    """[initial, [[lo, hi, offset or −1]], [[first, last]], metadata or nil]; with holes, and at level 5 with again."""
    if level >= 5:
        if not isinstance(row, list) or len(row) != 6 or not is_again(row[5], next_offset):
            return False
        row = row[:5]
    if isinstance(row, list) and len(row) == 5 and level >= 4:
        *row, holes = row
        if not a_list(holes) or (not holes and level < 5) or not are_holes(holes, set(), next_offset):
            return False
        if any(hole[5] == -1 for hole in holes):  # H4
            return False
    if not fits(row, [int_between(-1, LARGEST_OFFSET), a_list, a_list, some_metadata]) or not a_last_offset(row[0]):
        return False
    return is_progress(row[1], row[2], -1) and len(row[1]) <= MOST_PIECES


def is_again(item: Any, next_offset: int) -> bool:
    """R1: an offset that is passed, or −1."""
    return int_between(-1, min(next_offset - 1, LARGEST_OFFSET))(item)


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
    if level >= 5:
        if len(added) != 3 or not is_again(added[2], next_offset):
            return False
        added = [] if added[:2] == [[], []] else added[:2]
    return added == [] or (level >= 4 and are_shares_and_holes(row, added, next_offset, log_time))
