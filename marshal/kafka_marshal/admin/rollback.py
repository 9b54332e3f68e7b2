"""A group put back to a checkpoint; and the begin and the end of its checkpoints. All of it blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from shlex import quote
from typing import Final

from kafka_marshal.admin.checkpoint_work import change, check_level, coordinated, find, pin, refusal, takes_some
from kafka_marshal.admin.pause_work import PauseWork
from kafka_marshal.admin.positions import LOOKUP_TIMEOUT_S
from kafka_marshal.admin.session import Session
from kafka_marshal.checkpoints import Restore, RestorePiece
from kafka_marshal.engine.groups.checkpoints.joining import open_messages_text
from kafka_marshal.engine.work.topic_mark import kafka_counts
from kafka_marshal.errors import AdminError, KafkaUnavailableError
from kafka_marshal.observe.cuts import Seen, seen_by
from kafka_marshal.observe.text import count
from kafka_marshal.ports import Cluster, TopicPartition
from rationalizer import (
    BeginCheckpoint,
    CommitEntry,
    CommitOffsets,
    Group,
    KeepCheckpoint,
    Outcome,
    Rollback,
    World,
    codes,
)
from rationalizer.limits import MAX_KEY_HASH
from rationalizer.wire.wellformed import END, PINNED

#: timeout_ms of a first checkpoint: it is complete at once.
_NO_BARRIER_MS: Final = 1_000

#: How often a rollback is tried again where members came or went meanwhile.
_TRIES: Final = 20


@dataclass(frozen=True, slots=True)
class Rewound:
    """One partition of a rollback. Both positions are the offset to read next."""

    topic: str
    partition: int
    before: int
    after: int
    #: Messages that come again, among those that the log has as done.
    messages: int
    #: Offsets of these that retention has deleted: they do not come again.
    gone: int

    @property
    def key(self) -> TopicPartition:
        """(topic, partition)"""
        return self.topic, self.partition


@dataclass(frozen=True, slots=True)
class RolledBack:
    """A rollback, done or planned."""

    group: str
    #: The checkpoint.
    to: int
    #: Of the rollback: all fencing tokens of before are lower. None: it was only planned.
    generation: int | None
    partitions: tuple[Rewound, ...]
    #: Checkpoints that go with it, pinned ones too.
    dropped: tuple[int, ...]
    #: The client whose pause stays in force; None: the group is not paused by this.
    paused_by: str | None = None
    #: Log time (ms) at which that pause ends.
    paused_until: int | None = None
    #: Those of ``dropped`` that are pinned.
    pinned: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class _Way:
    """From the newest checkpoint to another: what each sees of every partition."""

    group_id: str
    to: int
    dropped: tuple[int, ...]
    pinned: tuple[int, ...]
    partitions: tuple[tuple[TopicPartition, Seen, Seen], ...]

    def planned(self, cluster: Cluster) -> RolledBack:
        """With what retention has deleted since (*blocking*)."""
        marks = cluster.watermarks([key for key, _, _ in self.partitions], LOOKUP_TIMEOUT_S) if self.partitions else {}
        found = []
        for key, now, then in self.partitions:
            low, _ = marks.get(key, (0, 0))
            gone = max(0, min(low, now.position) - then.position)
            messages = max(0, _done(now) - _done(then) - gone)
            found.append(Rewound(*key, now.position, then.position, messages, gone))
        return RolledBack(self.group_id, self.to, None, tuple(found), self.dropped, pinned=self.pinned)


def _way(worlds: Mapping[int, World], group_id: str, to: int | str | datetime) -> _Way:
    """The way to this checkpoint; of a live session under its lock."""
    group, checkpoints = takes_some(worlds, group_id)
    target = find(group, to)
    partitions = tuple(
        (key, seen_by(group, key, checkpoints.newest), seen_by(group, key, target))
        for key in group.partitions()
        if group.kept(*key) is not None
    )
    above = [kept for kept in checkpoints.kept if kept.id > target]
    pinned = tuple(kept.id for kept in above if kept.kind == PINNED)
    return _Way(group_id, target, tuple(kept.id for kept in above), pinned, partitions)


def plan(cluster: Cluster, worlds: Mapping[int, World], group_id: str, to: int | str | datetime) -> RolledBack:
    """What a rollback would change now (*blocking*)."""
    return _way(worlds, group_id, to).planned(cluster)


def _done(seen: Seen) -> int:
    """How many offsets are done; of a partition shared by key, in proportion to the keys."""
    through = sum((done + 1) * (hi - lo + 1) for lo, hi, done in seen.done_through) // (MAX_KEY_HASH + 1)
    return through + sum(last - max(first, seen.position) + 1 for first, last in seen.ranges if last >= seen.position)


def refuse_gone(planned: RolledBack) -> None:
    """Raise AdminError if retention took messages that would have to come again."""
    gone = [each for each in planned.partitions if each.gone]
    if gone:
        named = ", ".join(f"{each.topic} [{each.partition}]: {count(each.gone, 'offset')}" for each in gone[:5])
        raise AdminError(
            f"retention has deleted messages that checkpoint {planned.to} of group {planned.group!r} has as not done: "
            f"{named}{' …' * (len(gone) > 5)}. Nothing was changed. The state would go back without them: lost. "
            "Choose a later checkpoint, or force it (--force)"
        )


def go_back(session: Session, to: int | str | datetime, force: bool) -> RolledBack:
    """Put the group back; all members restore from the checkpoint, under new fencing tokens."""
    came_between: list[str] = []

    def applied(cp: int, offset: int, outcome: Outcome) -> None:
        message = outcome.message
        if cp != session.home or not outcome.accepted or message is None or message.group_id != session.group_id:
            return
        if message.instance_id == session.instance_id:
            return
        if outcome.is_a(Rollback):
            came_between.append(f"{message.client_id!r} has put the group back at {offset}")
        elif outcome.is_a(CommitOffsets) and not message.member_id:
            came_between.append(f"{message.client_id!r} has set positions at {offset}")

    before, session.on_applied = session.on_applied, applied
    try:
        with session.locked():
            way = _way(session.worlds, session.group_id, to)
        planned = way.planned(session.cluster)
        if not force:
            refuse_gone(planned)
        pin(session, planned.to)
        for _ in range(_TRIES):
            if came_between:
                raise AdminError(
                    f"group {session.group_id!r} was not put back: {came_between[0]} meanwhile. Look again: "
                    f"kafka-marshal checkpoints {quote(session.group_id)}"
                )
            with session.locked():
                group, _ = takes_some(session.worlds, session.group_id)
                record = Rollback(*session.ids, group.generation, planned.to)
                way = _way(session.worlds, session.group_id, planned.to)
            (asked,) = session.ask((session.home, record))
            if asked.accepted:
                return replace(way.planned(session.cluster), generation=asked.offset)
            if asked.outcome is None:
                raise KafkaUnavailableError(
                    f"unknown whether group {session.group_id!r} went back to checkpoint {planned.to}: the log did not "
                    f"show it in time. Run kafka-marshal checkpoints {quote(session.group_id)} when the brokers are "
                    "back; a second rollback undoes nothing more"
                )
            if asked.outcome.code != codes.ILLEGAL_GENERATION and not came_between:
                raise refusal(session, asked, f"group {session.group_id!r} was not put back")
        raise AdminError(
            f"group {session.group_id!r} was not put back: its members came and went {_TRIES} times meanwhile. Nothing "
            "was changed. Do it again with --stay-paused (stay_paused=), which pauses it first"
        )
    finally:
        session.on_applied = before


def go_back_paused(work: PauseWork, to: int, force: bool) -> tuple[RolledBack, Restore]:
    """The same under our pause, when all members have left; and what sinks are to go back to."""
    work.ready()
    done = go_back(work.session, to, force)
    return done, restore_of(work.session, done)


def restore_of(session: Session, done: RolledBack) -> Restore:
    """What sinks are to go back to, for whole partitions, with the rollback's generation as the token (F8)."""
    assert done.generation is not None
    with session.locked():
        group, _ = takes_some(session.worlds, session.group_id)
        keys = [key for key in group.partitions() if group.kept(*key) is not None]
        seen = {key: seen_by(group, key, done.to) for key in keys}
        initial = {key: _initial(group, key) for key in keys}
    marks = session.cluster.watermarks(keys, LOOKUP_TIMEOUT_S) if keys else {}
    pieces = []
    for key in keys:
        position = max(seen[key].position, marks.get(key, (0, 0))[0])
        pieces.append(
            RestorePiece(
                *key,
                0,
                MAX_KEY_HASH,
                done.generation,
                position,
                seen[key].ranges,
                tuple((lo, hi, id_ or None) for lo, hi, id_ in seen[key].states),
                group_id=session.group_id,
                done_through=seen[key].done_through,
                initial=initial[key],
            )
        )
    return Restore(done.to, "rollback", tuple(pieces), {(each.topic, each.partition): each.position for each in pieces})


def _initial(group: Group, key: TopicPartition) -> int:
    kept = group.kept(*key)
    return -1 if kept is None else kept.initial


# -- the first checkpoint, and the end ---------------------------------------------------------------------------


def check_start(worlds: Mapping[int, World], name: str) -> None:
    """Raises AdminError if the group can't begin to take checkpoints."""
    group = coordinated(worlds, name)
    check_level(worlds, name)
    if group.checkpoints is not None:
        raise AdminError(f"group {name!r} takes checkpoints already. Nothing was changed")
    if marked := _in_transactions(group):
        topic, partition, position = marked[0]
        raise AdminError(
            f"group {name!r} processes in transactions ({topic} [{partition}]), and Kafka's offset can't go back with "
            "a checkpoint. Nothing was changed. Set the position of each such partition, which ends that: "
            f"kafka-marshal release-group {quote(name)} --partition {quote(f'{topic}:{partition}={position}')}"
        )
    for topic, partition, kept in group.all_progress():
        if kept.progress.holes is not None:
            raise AdminError(open_messages_text(name, topic, partition))


def start(work: PauseWork, hold: bool, keep: int) -> int:
    """Begin the first checkpoint of a group, under our pause; its id."""
    session = work.session
    name = session.group_id
    with session.locked():
        check_start(session.worlds, name)
    _bury(work)
    record = BeginCheckpoint(*session.ids, 0, _NO_BARRIER_MS, keep, hold)
    return change(session, record, f"group {name!r} takes no checkpoints").offset


def end(work: PauseWork) -> None:
    """End the checkpoints of a group, under our pause: what the newest has is its progress."""
    session = work.session
    with session.locked():
        _, checkpoints = takes_some(session.worlds, session.group_id)
    _bury(work)
    record = KeepCheckpoint(*session.ids, checkpoints.newest, END)
    change(session, record, f"the checkpoints of group {session.group_id!r} were not ended")


def _in_transactions(group: Group) -> list[tuple[str, int, int]]:
    """(topic, partition, position) of what is processed in transactions (M3)."""
    found = []
    for topic, partition in group.partitions():
        kept = group.kept(topic, partition)
        if kept is not None and kafka_counts(kept.progress):
            found.append((topic, partition, kept.progress.stable + 1))
    return found


def _bury(work: PauseWork) -> None:
    """Remove members that are dead (G21): an entry that says nothing about a partition."""
    session = work.session
    work.ready()
    with session.locked():
        group = session.group()
        key = next(iter(group.partitions()), ("none", 0)) if group is not None and group.members else None
    if key is not None:
        entry = CommitEntry(*key)
        change(session, CommitOffsets(*session.ids, "", 0, False, (entry,)), "members that are silent were not removed")
