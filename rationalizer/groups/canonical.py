"""Groups and checkpoints of a snapshot: what their rows (S1) must be, besides each field's own rule, to be believed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from itertools import pairwise
from typing import Any, Final, cast

from rationalizer.groups.assignors import NOBODY, STRATEGIES
from rationalizer.groups.barriers import note_owners, show
from rationalizer.groups.checkpoints import NOT_SAVED, Answer, Barrier, Checkpoints, Kept, Key, Version, restored
from rationalizer.groups.group import Group, Member, PartitionProgress, Settings
from rationalizer.groups.pieces import NEVER, Piece, TopicPieces
from rationalizer.holes import NO_KEY
from rationalizer.leases.canonical import load_again, load_holes, load_progress
from rationalizer.levels import GROUPS_LEVEL
from rationalizer.limits import (
    MAX_GROUP_PARTITIONS,
    MAX_KEPT,
    MAX_KEY_HASH,
    MAX_KEY_PIECES,
    MAX_MEMBERS,
    MAX_OLD_WEIGHT,
    MAX_PARTITION_COUNT,
    MAX_PINNED,
    MAX_TOPICS,
    NOTHING_DONE,
)
from rationalizer.plane import Bounds
from rationalizer.progress import Progress
from rationalizer.routing import route_group
from rationalizer.state import (
    BARRIER,
    CHECKPOINTS,
    DATED,
    GROUP,
    MEMBER,
    PARTITION,
    PROGRESS,
    SETTINGS,
    VERSION,
    want,
    want_ascending,
)
from rationalizer.wire import wellformed as ok
from rationalizer.wire.wellformed import PASSING, PERIODIC, PINNED

#: The fields of a partition in front of its versions.
_HEAD: Final = len(DATED.fields) - 1


def read_dated(named: str, row: object, bounds: Bounds) -> Any:
    """A partition of a group that takes checkpoints: topic, partition, pieces, initial, versions."""
    want(type(row) is tuple and len(row) >= _HEAD, f"a partition of {named} has not its {_HEAD} parts")
    assert type(row) is tuple
    return DATED.read((*row[:_HEAD], row[_HEAD:]), bounds.level, f"partition of {named}")


def load_checkpoints(named: str, group: Group, row: object, partitions: Sequence[Any], bounds: Bounds) -> None:
    """The group takes these checkpoints, and has the progress that the newest of them sees."""
    said = CHECKPOINTS.read(row, bounds.level, f"list of checkpoints of {named}")
    kept = [_kept(named, each, bounds) for each in said.kept]
    want(bool(kept) and said.keep >= 1, f"{named} keeps no checkpoints, and takes some")
    want_ascending(f"checkpoints of {named}", [each.id for each in kept])
    in_order = all(one.log_time <= other.log_time for one, other in pairwise(kept))
    want(in_order, f"a checkpoint of {named} was complete before an older one")
    kinds = [each.kind for each in kept]
    want(PASSING not in kinds[:-1], f"{named} keeps a passing checkpoint below its newest")
    fits = kinds.count(PERIODIC) <= MAX_KEPT and kinds.count(PINNED) <= MAX_PINNED
    want(fits, f"{named} keeps more checkpoints than it can")
    barrier = None if said.barrier is None else _barrier(named, group, said.barrier, kept[-1], bounds)
    unset: set[Key] = set()
    for each in partitions:
        key, which = (each.topic, each.partition), f"{each.topic}/{each.partition} of {named}"
        _add_versions(which, key, [_version(which, version, bounds) for version in each.versions], kept, barrier)
        seen = any(key in one.versions for one in kept)
        want(
            seen or each.initial is not None or not each.versions,
            f"{which} has a version of the barrier, and no progress before it",
        )
        if each.initial is not None:
            progress = group.keep(*key)
            progress.initial = progress.progress.stable = each.initial
        elif seen:
            unset.add(key)
    checkpoints = group.checkpoints = restored(said.keep, said.hold, kept)
    want(checkpoints.old_weight <= MAX_OLD_WEIGHT, f"the older versions of {named} are more than it keeps")
    checkpoints.unset = unset
    checkpoints.barrier = barrier
    for key in checkpoints.seen:
        show(group, key)


def check_barrier(named: str, group: Group, checkpoints: Checkpoints) -> None:
    """The pieces are there: the open barrier still waits for an owner."""
    note_owners(group)
    barrier = checkpoints.barrier
    if barrier is not None:
        # Not is_due: an owner may have refused while it owned nothing, which closes not even one of a hold group (X6).
        want(barrier.waiting > 0, f"the barrier of {named} would have been closed")
        want(bool(barrier.reached) or not barrier.versions, f"no owner has handed in what the barrier of {named} has")


def _kept(named: str, row: object, bounds: Bounds) -> Kept:
    want(type(row) is tuple and len(row) == 3, f"a checkpoint of {named} has not its 3 parts")
    checkpoint, log_time, kind = cast("tuple[Any, ...]", row)
    good = ok.is_offset(checkpoint) and ok.is_offset(log_time) and ok.KIND.holds(kind)
    want(good and checkpoint > 0, f"a checkpoint of {named} is invalid")
    is_past = checkpoint < bounds.next_offset and log_time <= bounds.log_time
    want(is_past, f"a checkpoint of {named} is to come")
    return Kept(checkpoint, log_time, kind, {})


def _barrier(named: str, group: Group, row: object, newest: Kept, bounds: Bounds) -> Barrier:
    said = BARRIER.read(row, bounds.level, f"barrier of {named}")
    fits = newest.id < said.id < bounds.next_offset and newest.log_time <= said.opened <= bounds.log_time
    want(fits, f"the barrier of {named} was opened when it could not be")
    barrier = Barrier(said.id, said.opened, said.timeout_ms, said.passing)
    want_ascending(f"answers of {named}", [each[:1] if type(each) is tuple else () for each in said.answers])
    for each in said.answers:
        want(type(each) is tuple and len(each) == 3, f"an answer of {named} has not its 3 parts")
        slot, generation, answer = each
        want(type(slot) is int and slot in group.members, f"the barrier of {named} was answered by no member")
        good = ok.is_offset(generation) and generation <= group.generation and ok.ANSWER.holds(answer)
        want(good, f"an answer of {named} is invalid")
        barrier.answers[slot] = Answer(generation, answer)
    return barrier


def _version(which: str, row: object, bounds: Bounds) -> Version:
    said = VERSION.read(row, bounds.level, f"version of {which}")
    progress = load_progress(which, said.done_through, said.ranges, NOTHING_DONE, bounds)
    saved = load_progress(f"{which}, as saved,", said.states, (), NOTHING_DONE, bounds)
    fits = saved.piece_count <= MAX_KEY_PIECES and progress.piece_count <= MAX_KEY_PIECES
    want(fits, f"{which} has a version of more than {MAX_KEY_PIECES:,} pieces")
    want(saved.stable >= NOT_SAVED, f"{which} has states of no checkpoint")
    newest = max(checkpoint for _, _, checkpoint in saved.done_through)
    want(newest <= said.checkpoint, f"{which} has states of a later checkpoint")
    return Version(said.checkpoint, saved, progress, said.metadata)


def _add_versions(which: str, key: Key, versions: list[Version], kept: list[Kept], barrier: Barrier | None) -> None:
    """Each version goes to the first checkpoint that sees it."""
    if versions and barrier is not None and versions[-1].checkpoint == barrier.id:
        made = barrier.versions[key] = versions.pop()
        want(_names(made.saved, barrier.id), f"{which} has a version of the barrier, and nothing was handed in")
    want_ascending(f"versions of {which}", [version.checkpoint for version in versions])
    place = 0
    for version in versions:
        while place < len(kept) and kept[place].id < version.checkpoint:
            place += 1
        want(place < len(kept) and version.checkpoint > 0, f"{which} has a version that no checkpoint sees")
        want(key not in kept[place].versions, f"{which} has a version that no checkpoint sees")
        kept[place].versions[key] = version


def _names(saved: Progress, checkpoint: int) -> bool:
    return any(each == checkpoint for _, _, each in saved.done_through)


#: How a member_id ends (G6): the text of a UUID of version 5.
_UUID: Final = re.compile("[0-9a-f]{8}-[0-9a-f]{4}-5[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")
_UUID_LENGTH: Final = 36

_NO_TAKERS: Final[frozenset[int]] = frozenset()


def load_groups(rows: Sequence[Any], bounds: Bounds) -> list[Group]:
    """The groups that these rows of a snapshot describe. Raises SnapshotError."""
    want(not rows or bounds.level >= GROUPS_LEVEL, f"it holds coordinated groups below level {GROUPS_LEVEL}")
    groups = [_group(row, bounds) for row in rows]
    want_ascending("groups", [group.group_id for group in groups])
    subscribed = sum(group.weight for group in groups)
    want(subscribed <= MAX_GROUP_PARTITIONS, "its groups subscribe to too many partitions")
    return groups


def _group(row: object, bounds: Bounds) -> Group:
    said = GROUP.read(row, bounds.level, "group")
    group_id, members = said.group_id, said.members
    named = f"the group {group_id}"
    want(said.generation < max(1, bounds.next_offset), f"the generation of {named} is to come")
    group = Group(group_id)
    group.generation = said.generation
    group.settings = Settings(*SETTINGS.read(said.settings, bounds.level, f"list of settings of {named}"))
    want_ascending(f"shared topics of {named}", group.settings.accept_range_fetch)
    for each in members:
        _add_member(named, group, each, bounds)
    want_ascending(f"members of {named}", list(group.members))
    want(len(group.members) <= MAX_MEMBERS, f"{named} has too many members")
    for what in ("client_id", "member_id", "joined"):
        distinct = len({getattr(member, what) for member in group.members.values()})
        want(distinct == len(members), f"{named} has two members of one {what}")
    strategy = said.strategy
    want(strategy in STRATEGIES if members else strategy is None, f"{named} has another strategy than it can have")
    group.strategy = strategy
    wanted = group.settings.strategy
    want(wanted in {None, strategy} if members else wanted in {None, *STRATEGIES}, f"{named} has another strategy set")
    _add_topics(named, group, said.topics)
    if said.checkpoints is None:
        partitions = [PARTITION.read(each, bounds.level, f"partition of {named}") for each in said.partitions]
    else:
        partitions = [read_dated(named, each, bounds) for each in said.partitions]
    want_ascending(f"partitions of {named}", [(each.topic, each.partition) for each in partitions])
    if said.checkpoints is None:
        for each in partitions:
            if each.progress is not None:
                which = f"{each.topic}/{each.partition} of {named}"
                _add_progress(which, group.keep(each.topic, each.partition), each.progress, bounds)
    else:
        load_checkpoints(named, group, said.checkpoints, partitions, bounds)
    _add_partitions(named, group, partitions)
    if group.checkpoints is not None:
        check_barrier(named, group, group.checkpoints)
    if route_group(group_id, bounds.partitions) != bounds.partition:
        bare = GROUP.row(group, bounds.level)[1:] == GROUP.row(Group(group_id), bounds.level)[1:]
        want(bare, f"{named} belongs to another of {bounds.partitions} CPs")
    return group


def _add_member(named: str, group: Group, row: object, bounds: Bounds) -> None:
    said = MEMBER.read(row, bounds.level, f"member of {named}")
    slot, member_id, topics = said.slot, said.member_id, said.topics
    want(slot <= group.generation, f"a slot of {named} is that of no rebalance")
    unique = member_id[-_UUID_LENGTH:]
    good = member_id == f"{group.group_id}-{unique}" and _UUID.fullmatch(unique) is not None
    want(good, f"{named} has an odd member_id")
    good = len(topics) <= MAX_TOPICS and all(map(ok.is_topic, topics))
    want(good and bool(topics or said.pattern), f"the topics of member {slot} of {named} are invalid")
    want_ascending(f"topics of member {slot} of {named}", topics)
    want(said.last_beat <= bounds.log_time, f"the last beat of member {slot} of {named} is to come")
    want(slot <= said.joined < bounds.next_offset, f"member {slot} of {named} has yet to join")
    member = Member(slot, said.client_id)
    member.instance_id = said.instance_id
    member.member_id = member_id
    member.allow_key_share = said.allow_key_share
    member.pattern = said.pattern
    member.joined = said.joined
    MEMBER.restore_added(member, said)
    group.add(member)
    group.report(member, frozenset(topics))
    group.renew(member, said.session_timeout_ms, said.last_beat)


def _add_topics(named: str, group: Group, rows: Sequence[Any]) -> None:
    want(all(type(row) is tuple and len(row) == 2 for row in rows), f"a topic of {named} has not its 2 parts")
    topics: Sequence[tuple[Any, Any]] = rows
    good = all(ok.is_topic(topic) and ok.is_partition_count(count) for topic, count in topics)
    want(good, f"the topics of {named} are invalid")
    want_ascending(f"topics of {named}", [topic for topic, _ in topics])
    group.restore_counts(dict(topics))
    want(
        group.counts.keys() == group.reports.keys(),
        f"the topics of {named} are not those that its members subscribe to",
    )


def _add_partitions(named: str, group: Group, partitions: Sequence[Any]) -> None:
    subscribers = group.subscriptions()
    assigned, before, takers = 0, None, _NO_TAKERS
    for said in partitions:
        topic, partition, pieces = said.topic, said.partition, said.pieces
        which = f"{topic}/{partition} of {named}"
        has_progress = group.kept(topic, partition) is not None
        want(bool(pieces) or has_progress, f"{named} lists {topic}/{partition}, of which it has nothing")
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
    """`takers`: the members that could have it as target; none: it is no longer assigned."""
    parts = len(Piece._fields)
    want(type(row) is tuple and len(row) == parts, f"a piece of {named} has not its {parts} parts")
    lo, hi, owner, since, target, revoked = piece = Piece(*cast("tuple[Any, ...]", row))
    good = ok.is_offset(lo) and ok.is_offset(hi) and lo <= hi <= MAX_KEY_HASH
    want(good, f"the keys of a piece of {named} are no range")
    want(type(owner) is int and owner in group.members, f"{named} has an owner who is no member")
    fits = type(target) is int and (target in takers if takers else target == NOBODY)
    want(fits, f"{named} has a target who does not subscribe to it")
    want(ok.is_offset(since) and owner <= since <= group.generation, f"{named} is owned since it could not be")
    if owner == target:
        want(type(revoked) is int and revoked == NEVER, f"{named} is revoked, and is not")
    else:
        want(ok.is_offset(revoked) and since < revoked <= group.generation, f"{named} was revoked when it could not be")
    return piece


def _add_progress(named: str, kept: PartitionProgress, row: object, bounds: Bounds) -> None:
    said = PROGRESS.read(row, bounds.level, f"progress of {named}")
    kept.initial = said.initial
    kept.metadata = said.metadata
    kept.progress = load_progress(named, said.done_through, said.ranges, NOTHING_DONE, bounds)
    holes = kept.progress.holes = load_holes(named, said.holes, (), bounds)
    kept.progress.again = load_again(named, said.again, bounds)
    keyed = holes is None or all(hole.key_hash != NO_KEY for hole in holes)
    want(keyed, f"{named} has a hole without a key, as only leases have")
    many = len(said.done_through) > MAX_KEY_PIECES
    want(not many, f"{named} has more than {MAX_KEY_PIECES:,} pieces of done_through")
