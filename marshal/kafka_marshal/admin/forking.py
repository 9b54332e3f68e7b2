"""A group forked at a checkpoint of another one, with its positions and states; and two groups compared.

Under a pause the admin is the fork's only member for a moment: it sets starts, and answers a checkpoint with all that
the source's one sees. Members restore from that checkpoint; its mark leads them to the source's states (X18)::

    pin the source's ──▶ pause the fork ──▶ first checkpoint ──▶ join, starts ──▶ checkpoint, answer ──▶ leave, pin
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from shlex import quote
from typing import Any, NamedTuple

from kafka_marshal import arguments
from kafka_marshal.admin.base import AdminBase
from kafka_marshal.admin.checkpoints import (
    check_level,
    check_target,
    coordinated,
    find_checkpoint,
    piece_of,
    pin_kept,
    takes_some,
)
from kafka_marshal.admin.groups import configure
from kafka_marshal.admin.pause import PauseWork
from kafka_marshal.admin.positions import LOOKUP_TIMEOUT_S
from kafka_marshal.admin.session import Session, group_in, kind_in, wrong_kind
from kafka_marshal.checkpoints import RestorePiece
from kafka_marshal.engine.groups.checkpoints.forks import Fork, of_whom
from kafka_marshal.engine.work.topic_mark import split
from kafka_marshal.errors import AdminError, ConfigurationError
from kafka_marshal.node.replica import Replica
from kafka_marshal.observe.checkpoints import seen_by
from kafka_marshal.observe.text import listed
from kafka_marshal.ports import Cluster, TopicPartition
from kafka_marshal.types import Placed
from rationalizer import (
    AnswerBarrier,
    BeginCheckpoint,
    CommitEntry,
    CommitOffsets,
    Group,
    JoinGroup,
    LeaveGroup,
    Progress,
    Record,
    World,
    codes,
)
from rationalizer.groups.checkpoints import saved_nowhere
from rationalizer.limits import MAX_COMMIT_ENTRIES, MAX_COMMIT_RANGES, MAX_METADATA_BYTES, MAX_OFFSET, MAX_WRITTEN_BYTES
from rationalizer.wire.wellformed import REACHED, START

#: How long (ms) the fork waits for an admin that was killed while it was the fork's member.
_SESSION_MS = 20_000

#: The most bytes of an entry without its topic and metadata, and of a range.
_ENTRY_BYTES, _RANGE_BYTES = 64, 20

#: For lengths only: more digits than a checkpoint's id will have.
_LONG_ID = 10**12


@dataclass(frozen=True, slots=True)
class ForkedPartition(Placed):
    """One partition of a fork."""

    topic: str
    partition: int
    #: The offset that the fork reads next.
    position: int
    #: Messages from there on that are in the topic now.
    waiting: int
    #: Offsets from there on that retention has deleted: the fork never sees them.
    gone: int


@dataclass(frozen=True, slots=True)
class Forked:
    """A fork, made or planned."""

    group: str
    #: The group's checkpoint, which is pinned. ``Admin.retire`` drops it when the fork needs its states no more.
    checkpoint: int
    #: The fork's name.
    name: str
    partitions: tuple[ForkedPartition, ...]
    #: The fork's own checkpoint, at which it begins; pinned. None: it was only planned.
    begins: int | None = None


@dataclass(frozen=True, slots=True)
class Compared(Placed):
    """One partition of two groups, as their newest checkpoints (of a group without: its commits) have it."""

    topic: str
    partition: int
    #: The offsets that they read next.
    position: int
    other: int
    #: "equal", or what the other group is: "behind" or "ahead".
    verdict: str
    #: How their states differ, as the function says; "": they don't, None: not compared, as the positions differ.
    states: str | None = None

    @property
    def messages(self) -> int:
        """By how many offsets the other group is behind or ahead."""
        return abs(self.position - self.other)


class GroupForks(AdminBase):
    """Methods of :class:`~kafka_marshal.admin.Admin` that try a release on a copy of a group's state."""

    def fork(
        self,
        group: str,
        checkpoint: int | str | datetime,
        name: str,
        partitions: Iterable[TopicPartition] | None = None,
        dry_run: bool = False,
        *,
        force: bool = False,
        timeout: float = 30.0,
    ) -> Forked:
        """Let another group begin with the positions and states that a checkpoint of this group has.

        The group continues, and is not touched but for the checkpoint, which is pinned: the fork's members load its
        states until they have saved their own (``on_restore`` says ``why="forked"``). They need a CheckpointPolicy, and
        read the same stores. The fork takes checkpoints as the group does, and has its settings.

        ``checkpoint``: an id, ``"initial"``, or a datetime (the newest complete by then). ``name``: the fork's group,
        which the log does not know, or without progress. ``partitions``: only these (topic, partition).

        ``dry_run``: only return what it would have. ``force``: even if retention has deleted messages that it would
        read. ``timeout`` (seconds): how long to wait until dead members of that name are gone.

        If it was not finished, a second call finishes it. Raises AdminError if there is no such checkpoint, the name is
        in use, a partition's states are in too many parts, or messages are gone; KafkaUnavailableError.
        """
        self._check_group(group)
        self._check_group(name)
        if name == group:
            raise ConfigurationError(f"name={name!r} is the group itself. Nothing was changed")
        check_target(checkpoint)
        chosen = None if partitions is None else frozenset(arguments.partitions("partitions", partitions))
        timeout = arguments.seconds("timeout", timeout)

        def planned(cluster: Cluster, replica: Replica) -> Forked:
            plan = _plan(replica.worlds, group, checkpoint, name, chosen)
            _left(replica.worlds, plan)
            return plan.shown(cluster)

        found = self._look(planned)
        if dry_run:
            return found
        if not force:
            _refuse_gone(found)
        self._refuse_living(name, timeout, "Nothing was forked", "Stop its members first, and forget the group")
        self._act(group, lambda session: pin_kept(session, found.checkpoint))
        with self._paused(name, timeout) as pause:
            begins = pause.carry_out("fork", _fork, group, found.checkpoint, chosen)
        return replace(found, begins=begins)

    def compare(
        self, group: str, other: str, states: Callable[[RestorePiece, RestorePiece], object] | None = None
    ) -> list[Compared]:
        """Where two groups are on the partitions that both have, sorted; nothing is appended.

        ``states``: is called with both pieces of each partition on which their positions are equal, as ``on_restore``
        gets them (epoch 0), to load and compare their states: True or None: they are equal; anything else says how
        they differ. Both groups must take checkpoints then. Raises AdminError if the log does not know a group.
        """
        self._check_group(group)
        self._check_group(other)
        if states is not None:
            arguments.a_function("states", states, "one, other")
        found = self._look(lambda _, replica: _both(replica.worlds, group, other, states is not None))
        return [_compared(one, two, states) for one, two in found]


# -- the plan ----------------------------------------------------------------------------------------------------


class _Begin(NamedTuple):
    """Where a fork begins on a partition."""

    key: TopicPartition
    #: The offset before the source's first.
    start: int
    progress: Progress
    #: Without its own checkpoint.
    mark: Fork


@dataclass(frozen=True, slots=True)
class _Plan:
    group: Group
    name: str
    checkpoint: int
    partitions: tuple[_Begin, ...]

    def shown(self, cluster: Cluster) -> Forked:
        """With what the topics hold (*blocking*)."""
        marks = cluster.watermarks([each.key for each in self.partitions], LOOKUP_TIMEOUT_S) if self.partitions else {}
        found = []
        for each in self.partitions:
            position = each.progress.stable + 1
            low, high = marks.get(each.key, (0, 0))
            gone, waiting = max(0, low - position), max(0, high - max(low, position))
            found.append(ForkedPartition(*each.key, position, waiting, gone))
        return Forked(self.group.group_id, self.checkpoint, self.name, tuple(found))


def _plan(
    worlds: Mapping[int, World],
    group_id: str,
    checkpoint: int | str | datetime,
    name: str,
    chosen: frozenset[TopicPartition] | None,
) -> _Plan:
    """What the fork has; of a live session under its lock."""
    check_level(worlds, name)
    group, _ = takes_some(worlds, group_id)
    found = find_checkpoint(group, checkpoint)
    keys = [key for key in group.partitions() if group.kept(*key) is not None]
    if unknown := sorted((chosen or set()) - set(keys)):
        raise AdminError(f"group {group_id!r} has no position on {_names(unknown)}. Nothing was changed")
    begins = tuple(_begin(group, key, found) for key in keys if chosen is None or key in chosen)
    for each in begins:
        if len(each.mark.text.encode()) > MAX_METADATA_BYTES or _size(each) > MAX_WRITTEN_BYTES:
            raise AdminError(
                f"{_names([each.key])}: its state at checkpoint {found} is in {len(each.mark.states)} parts, with "
                f"{len(each.progress.ranges)} intervals done beyond its position, or the group's name is long: more "
                "than a fork can name. Nothing was changed. Fork a checkpoint in which it is whole, or leave it out "
                "(partitions=, --partitions)"
            )
    return _Plan(group, name, found, begins)


def _begin(group: Group, key: TopicPartition, checkpoint: int) -> _Begin:
    kept = group.kept(*key)
    assert kept is not None
    version = next((each for each in reversed(group.versions(key)) if each.checkpoint <= checkpoint), None)
    if version is None:
        progress, saved, metadata = Progress(), saved_nowhere(), None
        progress.stable = kept.initial
    else:
        progress, saved, metadata = version.progress.copy(), version.saved, version.metadata
    if of_whom(metadata, saved.done_through)[1]:
        raise AdminError(
            f"{_names([key])}: at checkpoint {checkpoint} group {group.group_id!r} has saved no states yet: it "
            f"was forked. Nothing was changed. Take one first: kafka-marshal checkpoint {quote(group.group_id)}"
        )
    states = tuple((lo, hi, state) for lo, hi, state in saved.done_through)
    mark = Fork(_LONG_ID, group.group_id, checkpoint, states)
    return _Begin(key, min(kept.initial, progress.stable), progress, mark)


def _names(keys: Iterable[TopicPartition]) -> str:
    return listed([f"{topic} [{partition}]" for topic, partition in keys], 5)


def _left(worlds: Mapping[int, World], plan: _Plan) -> list[_Begin]:
    """What is still to be written, if an earlier call was not finished. Raises AdminError if the name is in use."""
    name = plan.name
    if kind_in(worlds, name) == "claimed":
        raise wrong_kind(name, "claimed")
    fork = group_in(worlds, name)
    if fork is None:
        return list(plan.partitions)
    begins = {each.key: each for each in plan.partitions}
    done: set[TopicPartition] = set()
    other: list[TopicPartition] = []
    for topic, partition, kept in fork.all_progress():
        each, seen = begins.get((topic, partition)), seen_by(fork, (topic, partition), MAX_OFFSET)
        mark = Fork.read(seen.metadata)
        if each is None or fork.checkpoints is None or kept.initial != each.start:
            other.append((topic, partition))
        elif mark is not None and mark._replace(checkpoint=_LONG_ID) == each.mark:
            is_used = [state for _, _, state in seen.states] != [mark.checkpoint]
            (other.append if is_used or seen.position != each.progress.stable + 1 else done.add)(each.key)
        elif fork.versions(each.key):
            other.append(each.key)
    if other:
        raise AdminError(
            f"group {name!r} has positions already ({_names(other)}), other than those of the fork. Nothing was "
            f"changed. Choose another name, or drop what the log knows of it: kafka-marshal forget-group {quote(name)}"
        )
    return [each for each in plan.partitions if each.key not in done]


def _refuse_gone(found: Forked) -> None:
    if gone := [each.key for each in found.partitions if each.gone]:
        raise AdminError(
            f"retention has deleted messages that come after checkpoint {found.checkpoint} of group {found.group!r}: "
            f"{_names(gone)}. Nothing was changed. The fork would never see them, and differ for that. Choose a later "
            "checkpoint, or force it (--force)"
        )


# -- carried out -------------------------------------------------------------------------------------------------


def _entries(each: _Begin, checkpoint: int) -> Iterator[CommitEntry]:
    """What an answer says of a partition: the mark, and all that is done."""
    stable, ranges = each.progress.stable, each.progress.ranges
    mark = each.mark._replace(checkpoint=checkpoint).text
    yield CommitEntry(*each.key, through=None if stable == each.start else stable, metadata=mark)
    for lo, hi, through in each.progress.done_through:
        if through > stable:
            yield CommitEntry(*each.key, lo, hi, through=through)
    for at in range(0, len(ranges), MAX_COMMIT_RANGES):
        yield CommitEntry(*each.key, ranges=tuple(ranges[at : at + MAX_COMMIT_RANGES]))


def _size(each: _Begin) -> int:
    """At most this many bytes."""
    entries = list(_entries(each, _LONG_ID))
    ranges = sum(len(entry.ranges) for entry in entries) * _RANGE_BYTES
    return len(entries) * (_ENTRY_BYTES + len(each.key[0].encode())) + len(each.mark.text.encode()) + ranges


def _chunks(left: list[_Begin]) -> Iterator[list[_Begin]]:
    """As many partitions as one record has room for."""
    chunk: list[_Begin] = []
    size = entries = 0
    for each in left:
        more, number = _size(each), len(list(_entries(each, 0)))
        if chunk and (size + more > MAX_WRITTEN_BYTES or entries + number > MAX_COMMIT_ENTRIES):
            yield chunk
            chunk, size, entries = [], 0, 0
        chunk.append(each)
        size, entries = size + more, entries + number
    if chunk:
        yield chunk


def _fork(work: PauseWork, group_id: str, checkpoint: int, chosen: frozenset[TopicPartition] | None) -> int:
    """Make the fork, or finish it, under our pause; its checkpoint."""
    work.ready()
    session = work.session
    with session.locked():
        plan = _plan(session.worlds, group_id, checkpoint, session.group_id, chosen)
        left, source = _left(session.worlds, plan), plan.group.checkpoints
        settings = asdict(plan.group.settings)
    assert source is not None
    configure(session, {})  # it is a coordinated group in every CP from now on (G2)
    with session.locked():
        fork = session.group()
        is_begun = fork is not None and fork.checkpoints is not None
    if not is_begun:
        _write(session, BeginCheckpoint(*session.ids, 0, _SESSION_MS, source.keep, source.hold))
    if left:
        _Member(session, source.keep, source.hold).carry_over(left)
    with session.locked():
        _, found = takes_some(session.worlds, session.group_id)
        begins = found.newest
    pin_kept(session, begins)
    configure(session, settings)
    return begins


def _write(session: Session, record: Record) -> int:
    """Append this record to the fork's home; its offset. Raises AdminError unless the log accepts all of it."""
    (asked,) = session.ask((session.home, record))
    code = None if asked.outcome is None else asked.outcome.code
    if not asked.accepted or code == codes.PARTIAL:
        raise AdminError(
            f"group {session.group_id!r} is not forked yet: the log "
            + ("did not show a record in time" if code is None else f"says {code} to {type(record).__name__}")
            + ". Begin no members. Do it again, which finishes it"
        )
    return asked.offset


class _Member:
    """Us, as the fork's only member."""

    def __init__(self, session: Session, keep: int, hold: bool) -> None:
        self._session = session
        self._more = _SESSION_MS, keep, hold

    def carry_over(self, left: list[_Begin]) -> None:
        """Set starts, and answer checkpoints with what is done (*blocking*)."""
        session = self._session
        topics: dict[str, int] = {}
        for topic, partition in (each.key for each in left):
            topics[topic] = max(topics.get(topic, 0), partition + 1)
        with session.locked():
            seen = session.worlds[session.home].next_offset
        counts = tuple(sorted(topics.items()))
        _write(session, JoinGroup(*session.ids, "", seen, _SESSION_MS, "sticky", False, "", counts))
        try:
            for chunk in _chunks(left):
                with session.locked():
                    fork, found = takes_some(session.worlds, session.group_id)
                    new = [each for each in chunk if fork.kept(*each.key) is None]
                starts = tuple(CommitEntry(*each.key, action=START, through=each.start) for each in new)
                if starts:
                    _write(session, CommitOffsets(*session.ids, *self._me, False, starts))
                at = _write(session, BeginCheckpoint(*session.ids, found.newest, *self._more))
                entries = tuple(entry for each in chunk for entry in _entries(each, at))
                _write(session, AnswerBarrier(*session.ids, *self._me, at, REACHED, entries))
        finally:
            session.ask((session.home, LeaveGroup(*session.ids, *self._me)))

    @property
    def _me(self) -> tuple[str, int]:
        """Our id, and the fork's generation."""
        with self._session.locked():
            fork = coordinated(self._session.worlds, self._session.group_id)
            me = fork.clients.get(self._session.client_id)
            if me is None:
                raise AdminError(f"group {fork.group_id!r} is not forked yet: we were removed from it. Do it again")
            return me.member_id, fork.generation


# -- compared ----------------------------------------------------------------------------------------------------


def _both(
    worlds: Mapping[int, World], group_id: str, other_id: str, has_states: bool
) -> list[tuple[RestorePiece, RestorePiece]]:
    """What both groups have of each partition."""
    sides: list[dict[TopicPartition, RestorePiece]] = []
    for name in (group_id, other_id):
        group = takes_some(worlds, name)[0] if has_states else coordinated(worlds, name)
        pieces = {}
        for topic, partition, kept in group.all_progress():
            seen = seen_by(group, (topic, partition), MAX_OFFSET)
            if group.checkpoints is None:
                done = kept.progress
                seen = replace(seen, done_through=tuple(done.done_through), ranges=tuple(split(done.ranges).ranges))
            pieces[topic, partition] = piece_of(name, (topic, partition), seen, kept.initial, seen.position, 0)
        sides.append(pieces)
    return [(one, sides[1][key]) for key, one in sides[0].items() if key in sides[1]]


def _compared(one: RestorePiece, two: RestorePiece, states: Callable[[Any, Any], object] | None) -> Compared:
    is_equal = (one.position, one.ranges, one.done_through) == (two.position, two.ranges, two.done_through)
    verdict = "equal" if is_equal else "behind" if two.position < one.position else "ahead"
    difference = None
    if states is not None and is_equal:
        found = states(one, two)
        difference = "" if found is True or found is None else "they differ" if found is False else str(found)
    return Compared(one.topic, one.partition, one.position, two.position, verdict, difference)
