"""Groups in the canonical state (S1): one row each, and what such a row must be to be believed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Any, Final

from rationalizer.groups.assignors import NOBODY, STRATEGIES
from rationalizer.groups.group import Group, Member, PartitionProgress, Settings
from rationalizer.groups.pieces import NEVER, Piece, TopicPieces
from rationalizer.leases.canonical import load_progress
from rationalizer.levels import GROUPS_LEVEL
from rationalizer.limits import (
    MAX_GROUP_PARTITIONS,
    MAX_KEY_HASH,
    MAX_KEY_PIECES,
    MAX_MEMBERS,
    MAX_PARTITION_COUNT,
    MAX_TOPICS,
    NOTHING_DONE,
)
from rationalizer.plane import Bounds
from rationalizer.routing import route_group
from rationalizer.snapshot import row_of, want, want_ascending
from rationalizer.wire import wellformed as ok

__all__ = ["group_row", "load_groups"]

#: How a member_id ends (G6): the text of a UUID of version 5.
_UUID: Final = re.compile("[0-9a-f]{8}-[0-9a-f]{4}-5[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")
_UUID_LENGTH: Final = 36

_NO_TAKERS: Final[frozenset[int]] = frozenset()


def group_row(group: Group) -> tuple[object, ...]:
    """The group as S1 writes it."""
    settings = group.settings
    return (
        group.group_id,
        group.generation,
        group.strategy,
        (
            settings.accept_individual_commit,
            settings.accept_range_fetch,
            settings.max_session_timeout_ms,
            settings.max_individual_commits,
        ),
        sorted(group.counts.items()),
        [_member_row(member) for member in group.members.values()],
        [_partition_row(group, topic, partition) for topic, partition in group.partitions()],
    )


def _member_row(member: Member) -> tuple[object, ...]:
    return (
        member.slot,
        member.member_id,
        member.client_id,
        member.instance_id,
        member.session_timeout_ms,
        member.allow_key_share,
        member.pattern,
        sorted(member.topics),
        member.last_beat,
        member.joined,
    )


def _partition_row(group: Group, topic: str, partition: int) -> tuple[object, ...]:
    pieces = group.pieces.get(topic)
    return (
        topic,
        partition,
        () if pieces is None else pieces[partition],
        _progress_row(group.kept(topic, partition)),
    )


def _progress_row(kept: PartitionProgress | None) -> tuple[object, ...] | None:
    if kept is None:
        return None
    return kept.initial, kept.progress.done_through, kept.progress.ranges, kept.metadata


def load_groups(rows: Sequence[Any], bounds: Bounds) -> list[Group]:
    """The groups that these rows of a snapshot describe. Raises SnapshotError."""
    want(not rows or bounds.level >= GROUPS_LEVEL, f"it holds coordinated groups below level {GROUPS_LEVEL}")
    groups = [_group(row, bounds) for row in rows]
    want_ascending("groups", [group.group_id for group in groups])
    subscribed = sum(group.weight for group in groups)
    want(subscribed <= MAX_GROUP_PARTITIONS, "its groups subscribe to too many partitions")
    return groups


def _group(row: object, bounds: Bounds) -> Group:
    group_id, generation, strategy, settings, topics, members, partitions = row_of("group", row, 7)
    want(ok.is_id(group_id), "a group has no proper name")
    named = f"the group {group_id}"
    want(ok.is_offset(generation) and generation < max(1, bounds.next_offset), f"the generation of {named} is to come")
    want(all(type(each) is tuple for each in (topics, members, partitions)), f"{named} has no proper lists")
    group = Group(group_id)
    group.generation = generation
    group.settings = _settings(named, settings)
    for each in members:
        _add_member(named, group, each, bounds)
    want_ascending(f"members of {named}", list(group.members))
    want(len(group.members) <= MAX_MEMBERS, f"{named} has too many members")
    for what in ("client_id", "member_id", "joined"):
        distinct = len({getattr(member, what) for member in group.members.values()})
        want(distinct == len(members), f"{named} has two members of one {what}")
    want(strategy in STRATEGIES if members else strategy is None, f"{named} has another strategy than it can have")
    group.strategy = strategy
    _add_topics(named, group, topics)
    _add_partitions(named, group, partitions)
    listed = [(each[0], each[1]) for each in partitions]
    want_ascending(f"partitions of {named}", listed)
    if route_group(group_id, bounds.partitions) != bounds.partition:
        bare = generation == 0 and group.settings == Settings() and not members and not partitions
        want(bare, f"{named} belongs to another of {bounds.partitions} CPs")
    return group


def _settings(named: str, row: object) -> Settings:
    individual, shared, session, commits = row_of(f"list of settings of {named}", row, 4)
    values = {
        "accept_individual_commit": individual,
        "accept_range_fetch": shared,
        "max_session_timeout_ms": session,
        "max_individual_commits": commits,
    }
    want(ok.are_settings(values), f"the settings of {named} are none")
    want_ascending(f"shared topics of {named}", shared)
    return Settings(**values)


def _add_member(named: str, group: Group, row: object, bounds: Bounds) -> None:
    slot, member_id, client, instance, session, share, pattern, topics, last_beat, joined = row_of("member", row, 10)
    want(ok.is_offset(slot) and slot <= group.generation, f"a slot of {named} is that of no rebalance")
    want(ok.is_id(client) and ok.is_id(instance), f"member {slot} of {named} has no proper name")
    unique = member_id[-_UUID_LENGTH:] if type(member_id) is str else ""
    good = member_id == f"{group.group_id}-{unique}" and _UUID.fullmatch(unique) is not None
    want(good, f"{named} has an odd member_id")
    want(ok.is_session_timeout(session), f"the session of member {slot} of {named} is out of range")
    want(type(share) is bool and ok.is_pattern(pattern), f"member {slot} of {named} subscribes to nothing that can be")
    good = type(topics) is tuple and len(topics) <= MAX_TOPICS and all(map(ok.is_topic, topics))
    want(good and bool(topics or pattern), f"the topics of member {slot} of {named} are none")
    want_ascending(f"topics of member {slot} of {named}", topics)
    want(
        ok.is_offset(last_beat) and last_beat <= bounds.log_time,
        f"the last beat of member {slot} of {named} is to come",
    )
    want(ok.is_offset(joined) and slot <= joined < bounds.next_offset, f"member {slot} of {named} has yet to join")
    member = Member(slot, client)
    member.instance_id = instance
    member.member_id = member_id
    member.allow_key_share = share
    member.pattern = pattern
    member.joined = joined
    group.add(member)
    group.report(member, frozenset(topics))
    group.renew(member, session, last_beat)


def _add_topics(named: str, group: Group, rows: Sequence[Any]) -> None:
    topics = [row_of(f"topic of {named}", row, 2) for row in rows]
    good = all(ok.is_topic(topic) and ok.is_partition_count(count) for topic, count in topics)
    want(good, f"the topics of {named} are none")
    want_ascending(f"topics of {named}", [topic for topic, _ in topics])
    group.restore_counts(dict(topics))
    want(group.counts.keys() == group.reported(), f"the topics of {named} are not those that its members subscribe to")


def _add_partitions(named: str, group: Group, rows: Sequence[Any]) -> None:
    subscribers = group.subscriptions()
    assigned, before, takers = 0, None, _NO_TAKERS
    for row in rows:
        topic, partition, pieces, progress = row_of(f"partition of {named}", row, 4)
        good = ok.is_topic(topic) and ok.is_partition(partition) and type(pieces) is tuple
        want(good, f"a partition of {named} has no proper name")
        which = f"{topic}/{partition} of {named}"
        want(bool(pieces) or progress is not None, f"{named} lists {topic}/{partition}, of which it has nothing")
        if progress is not None:
            _add_progress(which, group.keep(topic, partition), progress)
        is_assigned = partition < group.counts.get(topic, 0)
        assigned += is_assigned
        if not pieces and not is_assigned:
            continue
        want(partition < MAX_PARTITION_COUNT, f"{which} can't be assigned")
        if topic != before:
            before, takers = topic, frozenset(subscribers.get(topic, ()))
        found = [_piece(which, group, takers if is_assigned else _NO_TAKERS, each) for each in pieces]
        ends = [-1, *(piece.hi for piece in found)]
        ordered = all(end < piece.lo for end, piece in zip(ends, found, strict=False))
        want(ordered, f"the pieces of {which} overlap")
        whole = ends[-1] == MAX_KEY_HASH and all(end + 1 == piece.lo for end, piece in zip(ends, found, strict=False))
        want(whole or not is_assigned, f"the pieces of {which} do not cover all keys")
        of_topic = group.pieces.setdefault(topic, TopicPieces())
        of_topic.grow(max(partition + 1, group.counts.get(topic, 0)))
        of_topic.put(partition, found)
    want(assigned == sum(group.counts.values()), f"{named} does not list all partitions of its topics")


def _piece(named: str, group: Group, takers: AbstractSet[int], row: object) -> Piece:
    """`takers`: those who could have it as target; none: it is no longer assigned."""
    lo, hi, owner, since, target, revoked = row_of(f"piece of {named}", row, 6)
    want(ok.is_offset(lo) and ok.is_offset(hi) and lo <= hi <= MAX_KEY_HASH, f"a piece of {named} is none")
    want(type(owner) is int and owner in group.members, f"{named} has an owner who is no member")
    fits = type(target) is int and (target in takers if takers else target == NOBODY)
    want(fits, f"{named} has a target who does not subscribe to it")
    want(ok.is_offset(since) and owner <= since <= group.generation, f"{named} is owned since it could not be")
    if owner == target:
        want(type(revoked) is int and revoked == NEVER, f"{named} is revoked, and is not")
    else:
        want(ok.is_offset(revoked) and since < revoked <= group.generation, f"{named} was revoked when it could not be")
    return Piece(lo, hi, owner, since, target, revoked)


def _add_progress(named: str, kept: PartitionProgress, row: object) -> None:
    initial, done_through, ranges, metadata = row_of(f"progress of {named}", row, 4)
    want(initial is not None and ok.is_last_offset(initial), f"the start of {named} is out of range")
    want(ok.is_metadata(metadata), f"the metadata of {named} is none")
    kept.initial = initial
    kept.metadata = metadata
    kept.progress = load_progress(named, done_through, ranges, NOTHING_DONE)
    want(len(done_through) <= MAX_KEY_PIECES, f"{named} has more than {MAX_KEY_PIECES:,} pieces of done_through")
