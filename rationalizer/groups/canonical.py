"""Groups in the canonical state (S1): one row each, and what such a row must be to be believed."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from rationalizer.groups.assignors import NOBODY, STRATEGIES
from rationalizer.groups.group import Group, Member, PartitionProgress, Settings
from rationalizer.groups.pieces import NEVER, Piece, TopicPieces
from rationalizer.leases.canonical import load_progress
from rationalizer.limits import MAX_GROUP_PARTITIONS, MAX_KEY_HASH, MAX_MEMBERS, MAX_PARTITION_COUNT, NOTHING_DONE
from rationalizer.plane import Bounds
from rationalizer.routing import route_group
from rationalizer.snapshot import row_of, want, want_ascending
from rationalizer.wire import wellformed as ok

__all__ = ["group_row", "load_groups"]


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
    want(not rows or bounds.level >= 2, "it holds coordinated groups below level 2")
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
    want(len(group.clients) == len(group.members), f"{named} has two members of one client")
    want(strategy in STRATEGIES if members else strategy is None, f"{named} has another strategy than it can have")
    group.strategy = strategy
    _add_topics(named, group, topics)
    for each in partitions:
        _add_partition(named, group, each)
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
    want(ok.is_offset(slot) and slot < bounds.next_offset, f"a slot of {named} lies after the snapshot")
    want(ok.is_id(client) and ok.is_id(instance), f"member {slot} of {named} has no proper name")
    want(ok.MEMBER_ID.holds(member_id) and member_id.startswith(f"{group.group_id}-"), f"{named} has an odd member_id")
    want(ok.is_session_timeout(session), f"the session of member {slot} of {named} is out of range")
    want(type(share) is bool and ok.is_pattern(pattern), f"member {slot} of {named} subscribes to nothing that can be")
    want(type(topics) is tuple and all(map(ok.is_topic, topics)), f"the topics of member {slot} of {named} are none")
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


def _add_partition(named: str, group: Group, row: object) -> None:
    topic, partition, pieces, progress = row_of(f"partition of {named}", row, 4)
    good = ok.is_topic(topic) and ok.is_partition(partition) and type(pieces) is tuple
    want(good, f"a partition of {named} has no proper name")
    want(bool(pieces) or progress is not None, f"{named} lists {topic}/{partition}, of which it has nothing")
    if progress is not None:
        _add_progress(f"{topic}/{partition} of {named}", group.keep(topic, partition), progress)
    if pieces:
        want(partition < MAX_PARTITION_COUNT, f"{topic}/{partition} of {named} can't be assigned")
        found = [_piece(f"{topic}/{partition} of {named}", group, each) for each in pieces]
        ordered = all(before.hi < piece.lo for before, piece in itertools.pairwise(found))
        want(ordered, f"the pieces of {topic}/{partition} of {named} overlap")
        of_topic = group.pieces.setdefault(topic, TopicPieces())
        of_topic.grow(max(partition + 1, group.counts.get(topic, 0)))
        of_topic.put(partition, found)


def _piece(named: str, group: Group, row: object) -> Piece:
    lo, hi, owner, since, target, revoked = row_of(f"piece of {named}", row, 6)
    want(ok.is_offset(lo) and ok.is_offset(hi) and lo <= hi <= MAX_KEY_HASH, f"a piece of {named} is none")
    want(type(owner) is int and owner in group.members, f"{named} has an owner who is no member")
    of_member = type(target) is int and (target == NOBODY or target in group.members)
    want(of_member, f"{named} has a target who is no member")
    want(ok.is_offset(since) and since <= group.generation, f"{named} is owned since a generation to come")
    if owner == target:
        want(type(revoked) is int and revoked == NEVER, f"{named} is revoked, and is not")
    else:
        want(
            ok.is_offset(revoked) and since <= revoked <= group.generation, f"{named} was revoked when it could not be"
        )
    return Piece(lo, hi, owner, since, target, revoked)


def _add_progress(named: str, kept: PartitionProgress, row: object) -> None:
    initial, done_through, ranges, metadata = row_of(f"progress of {named}", row, 4)
    want(initial is not None and ok.is_last_offset(initial), f"the start of {named} is out of range")
    want(ok.is_metadata(metadata), f"the metadata of {named} is none")
    kept.initial = initial
    kept.metadata = metadata
    kept.progress = load_progress(named, done_through, ranges, NOTHING_DONE)
