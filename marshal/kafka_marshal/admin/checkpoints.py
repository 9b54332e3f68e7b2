"""Checkpoints of a group from outside: taken, pinned, retired, listed, begun, ended; and the way back to one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from shlex import quote
from typing import Final

from kafka_marshal import arguments
from kafka_marshal.admin.base import AdminBase
from kafka_marshal.admin.pause import PauseWork
from kafka_marshal.admin.positions import LOOKUP_TIMEOUT_S
from kafka_marshal.admin.session import Asked, Session, group_in, kind_in, wrong_kind
from kafka_marshal.checkpoints import Restore, RestorePiece
from kafka_marshal.engine.groups.checkpoints.forks import of_whom
from kafka_marshal.engine.groups.checkpoints.joining import open_messages_text
from kafka_marshal.engine.work.topic_mark import kafka_counts
from kafka_marshal.errors import (
    AdminError,
    CheckpointEndedError,
    ConfigurationError,
    GroupPausedError,
    KafkaUnavailableError,
    MarshalError,
)
from kafka_marshal.node.replica import Replica
from kafka_marshal.observe.checkpoint_history import CheckpointHistory, CompleteCheckpoint, Ended
from kafka_marshal.observe.checkpoints import (
    KIND_WORDS,
    KeyCut,
    SeenProgress,
    cuts_now,
    is_initial,
    oldest_cut,
    owners_of,
    seen_by,
    waits_for,
)
from kafka_marshal.observe.text import count, time_text
from kafka_marshal.ports import Cluster, TopicPartition
from kafka_marshal.types import Placed
from rationalizer import (
    BeginCheckpoint,
    CommitEntry,
    CommitOffsets,
    Group,
    KeepCheckpoint,
    Outcome,
    Record,
    Rollback,
    World,
    codes,
    route_group,
)
from rationalizer.groups.checkpoints import Checkpoints
from rationalizer.levels import CHECKPOINTS_LEVEL
from rationalizer.limits import MAX_KEY_HASH
from rationalizer.wire.wellformed import END, PIN, PINNED, RETIRE

#: Checkpoints take 0.1 s … an hour.
_LEAST_S, _MOST_S = 0.1, 3_600.0

#: Periodic checkpoints that a group may keep.
_MOST_KEPT = 64

#: A barrier that is over needs a record of a member to be closed: how much longer than its time it is awaited (s).
WITNESS_S: Final = 5.0

#: timeout_ms of a first checkpoint: it is complete at once.
_NO_BARRIER_MS: Final = 1_000

#: How often a rollback is tried again where members came or went meanwhile.
_TRIES: Final = 20

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class KeptCheckpoint:
    """A checkpoint that the group keeps."""

    id: int
    #: Log time (ms) of its completion.
    log_time: int
    #: "passing" (made for a hand-over; goes with the next), "periodic" or "pinned".
    kind: str
    #: Its oldest cut; of the newest checkpoint with its owner. None: nothing was handed in so far.
    oldest: KeyCut | None
    is_newest: bool


@dataclass(frozen=True, slots=True)
class TakenCheckpoint:
    """A checkpoint that was asked for, and is complete."""

    id: int
    log_time: int
    took_ms: int
    #: Members that handed in, and those that own pieces.
    members: int
    owners: int
    #: Pieces with messages waiting that have an older cut in it, and why.
    older: tuple[KeyCut, ...]
    pinned: bool


@dataclass(frozen=True, slots=True)
class Rewound(Placed):
    """One partition of a rollback. Both positions are the offset to read next."""

    topic: str
    partition: int
    before: int
    after: int
    #: Messages that come again, among those that the log has as done.
    messages: int
    #: Offsets of these that retention has deleted: they do not come again.
    gone: int


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
    #: Log time (ms) at which that pause ends: no member resumes before it.
    paused_until: int | None = None
    #: Those of ``dropped`` that are pinned.
    pinned: tuple[int, ...] = ()


class GroupCheckpoints(AdminBase):
    """Methods of :class:`~kafka_marshal.admin.Admin` about checkpoints of a group, and the way back to one."""

    def checkpoint(self, group: str, pin: bool = False, timeout: float = 60.0) -> TakenCheckpoint:
        """Take a checkpoint of the group now, and wait until it is complete.

        ``pin``: keep it until it is retired. ``timeout`` (seconds): after it, the checkpoint is complete with those
        members that have answered. ``older`` of the result: pieces with messages waiting that kept an
        older cut, and why.
        Raises CheckpointEndedError, which names the members that refused or have not answered, if there is none.
        """
        self._check_group(group)
        timeout = arguments.seconds("timeout", timeout, above=0)
        if not _LEAST_S <= timeout <= _MOST_S:
            raise ConfigurationError(
                f"timeout must be {_LEAST_S} to {_MOST_S:g} s, not {timeout:g}. Nothing was changed"
            )
        arguments.a_flag("pin", pin)
        return self._act(group, lambda session: _take(session, timeout, pin))

    def checkpoints(self, group: str) -> list[KeptCheckpoint]:
        """The checkpoints that the group keeps, ascending; nothing is appended.

        Raises AdminError if the group takes none.
        """
        self._check_group(group)

        def kept(_: Cluster, replica: Replica) -> list[KeptCheckpoint]:
            known, checkpoints = takes_some(replica.worlds, group)
            newest = checkpoints.newest
            return [
                KeptCheckpoint(x.id, x.log_time, KIND_WORDS[x.kind], oldest_cut(known, x.id), x.id == newest)
                for x in checkpoints.kept
            ]

        return self._look(kept)

    def pin(self, group: str, checkpoint: int) -> None:
        """Keep this checkpoint until it is retired. Raises AdminError if it is not kept, or if 16 are pinned."""
        self._check_group(group)
        arguments.a_whole("checkpoint", checkpoint)
        self._act(group, lambda session: pin_kept(session, checkpoint))

    def retire(self, group: str, checkpoint: int) -> None:
        """Drop this checkpoint, pinned or not. Raises AdminError if it is the newest, or not kept."""
        self._check_group(group)
        arguments.a_whole("checkpoint", checkpoint)
        self._act(group, lambda session: _retire(session, checkpoint))

    def start_checkpoints(self, group: str, hold: bool = False, keep: int = 16, *, timeout: float = 30.0) -> int:
        """Let a group with progress take checkpoints from now on; returns the id of the first, which is pinned.

        All of its members need a CheckpointPolicy with ``adopt=True`` first. The group is paused until they have left;
        then they join again. ``hold``, ``keep``: as in CheckpointPolicy. ``timeout`` (seconds): how long to wait for
        them. Raises AdminError if they do not leave, if it takes checkpoints, or if it processes in transactions.
        """
        self._check_group(group)
        arguments.a_flag("hold", hold)
        arguments.a_whole("keep", keep, 1, _MOST_KEPT)
        timeout = arguments.seconds("timeout", timeout)
        self._look(lambda _, replica: _check_start(replica.worlds, group))  # before anybody is paused
        with self._paused(group, timeout) as pause:
            return pause.carry_out("start checkpoints", _start, hold, keep)

    def end_checkpoints(self, group: str, *, timeout: float = 30.0) -> None:
        """Let a group take no checkpoints any more. It continues at what the newest has; its states are not needed.

        All of its members need ``adopt=True``, or no CheckpointPolicy, first. Else as :meth:`start_checkpoints`.
        """
        self._check_group(group)
        timeout = arguments.seconds("timeout", timeout)
        self._look(lambda _, replica: takes_some(replica.worlds, group))
        with self._paused(group, timeout) as pause:
            pause.carry_out("end checkpoints", _end)

    def rollback(
        self,
        group: str,
        to: int | str | datetime,
        dry_run: bool = False,
        stay_paused: float | None = None,
        undo: Callable[[Restore], object] | None = None,
        *,
        force: bool = False,
        timeout: float = 60.0,
    ) -> RolledBack:
        """Put the group back to a checkpoint: its progress, and the states of its members.

        ``to``: an id, ``"initial"`` (before any state was saved), or a datetime (the newest complete by then). It is
        pinned first; later ones are dropped. Members that are at work restore from it and continue.

        ``stay_paused`` (seconds): pause the group first, wait until all members have left (``timeout``, seconds), and
        leave the pause in force for that long; ``release-group --resume`` ends it.

        ``undo``: is called then with a Restore whose token is the rollback's generation, to rewind sinks
        (``sink.restore``).

        ``dry_run``: only return what would change.

        ``force``: even if retention has deleted what would come again.

        Raises AdminError if there is no such checkpoint, or if another client put the group back or set its positions
        meanwhile; KafkaUnavailableError if the log did not show the result in time.
        """
        self._check_group(group)
        check_target(to)
        if undo is not None:
            arguments.a_function("undo", undo, "restore")
            if stay_paused is None:
                raise ConfigurationError(
                    "undo= rewinds sinks while no member writes to them: it goes with stay_paused=. Nothing was changed"
                )
        if dry_run:
            return self._look(lambda cluster, replica: _way(replica.worlds, group, to).planned(cluster))
        if stay_paused is None:
            return self._act(group, lambda session: _go_back(session, to, force))
        length = arguments.seconds("stay_paused", stay_paused, above=0)
        timeout = arguments.seconds("timeout", timeout)
        planned = self._look(lambda cluster, replica: _way(replica.worlds, group, to).planned(cluster))
        if not force:
            _refuse_gone(planned)
        with self.pause(group, length) as pause:
            pause.wait_released(timeout)
            done, restore = pause.carry_out("rollback", _go_back_paused, planned.to, force)
            try:
                if undo is not None:
                    undo(restore)
            except BaseException as error:
                pause.leave_in_force()
                error.add_note(
                    f"Group {group!r} is at checkpoint {done.to}, and stays paused by {pause.client_id!r}. Its sinks "
                    "may not be at it yet: do it again with this client_id (--client-id)."
                )
                raise
            until = pause.leave_in_force()
            return replace(done, paused_by=pause.client_id, paused_until=until)


def check_target(to: int | str | datetime) -> None:
    """Raise ConfigurationError unless this can name a checkpoint."""
    if isinstance(to, datetime):
        if to.tzinfo is None:
            raise ConfigurationError(f"to={to} has no time zone; say which moment is meant. Nothing was changed")
    elif to != "initial":
        if isinstance(to, str):
            raise ConfigurationError(f"to={to!r} is no checkpoint's id, 'initial' or datetime. Nothing was changed")
        arguments.a_whole("to", to)


def check_level(worlds: Mapping[int, World], group_id: str) -> None:
    """Raises AdminError if the group's partition of the log is below the level of checkpoints."""
    if worlds[route_group(group_id, len(worlds))].level < CHECKPOINTS_LEVEL:
        raise AdminError(
            f"the coordination topic is below level {CHECKPOINTS_LEVEL} of the protocol, which checkpoints need. "
            "Nothing was changed. Raise it first: kafka-marshal upgrade"
        )


def coordinated(worlds: Mapping[int, World], group_id: str) -> Group:
    """The coordinated group. Raises AdminError if it is another kind of group, or unknown."""
    if kind_in(worlds, group_id) == "claimed":
        raise wrong_kind(group_id, "claimed")
    group = group_in(worlds, group_id)
    if group is None:
        raise AdminError(
            f"the log does not know a group {group_id!r}. Nothing was changed. kafka-marshal "
            "groups lists those that it knows"
        )
    return group


def takes_some(worlds: Mapping[int, World], group_id: str) -> tuple[Group, Checkpoints]:
    """The group and its checkpoints. Raises AdminError if it takes none."""
    group = coordinated(worlds, group_id)
    if group.checkpoints is None:
        raise AdminError(
            f"group {group_id!r} takes no checkpoints. Nothing was changed. Its members begin that with a "
            f"CheckpointPolicy; in a group that has members: kafka-marshal checkpoints {quote(group_id)} --start"
        )
    return group, group.checkpoints


def find_checkpoint(group: Group, to: int | str | datetime) -> int:
    """The checkpoint that is meant: an id, "initial", or the newest that was complete by a moment."""
    assert group.checkpoints is not None
    kept, name = group.checkpoints.kept, group.group_id
    listed = f"kafka-marshal checkpoints {quote(name)} lists those that are kept. Nothing was changed"
    if isinstance(to, datetime):
        moment = (to - _EPOCH) // timedelta(milliseconds=1)
        found = [each.id for each in kept if each.log_time <= moment]
        if not found:
            raise AdminError(
                f"group {name!r} keeps no checkpoint that was complete by {time_text(moment)}: the oldest is of "
                f"{time_text(kept[0].log_time)}. {listed}"
            )
        return found[-1]
    if to == "initial":
        if not is_initial(group, kept[0].id):
            raise AdminError(
                f"group {name!r} does not keep its first checkpoint any more: the oldest, {kept[0].id}, has states of "
                f"its members. {listed}"
            )
        return kept[0].id
    if not any(each.id == to for each in kept):
        raise AdminError(
            f"group {name!r} keeps no checkpoint {to}: it was retired, undone, or never complete. {listed}"
        )
    return int(to)


# -- pinning and retiring ----------------------------------------------------------------------------------------


def pin_kept(session: Session, checkpoint: int) -> None:
    """Keep it until it is retired; nothing is appended if it is pinned."""
    with session.locked():
        group, checkpoints = takes_some(session.worlds, session.group_id)
        find_checkpoint(group, checkpoint)
        is_pinned = any(kept.id == checkpoint and kept.kind == PINNED for kept in checkpoints.kept)
    if not is_pinned:
        _change(session, KeepCheckpoint(*session.ids, checkpoint, PIN), f"checkpoint {checkpoint} was not pinned")


def _retire(session: Session, checkpoint: int) -> None:
    """Drop it: the group can't go back to it any more."""
    with session.locked():
        group, _ = takes_some(session.worlds, session.group_id)
        find_checkpoint(group, checkpoint)
    _change(session, KeepCheckpoint(*session.ids, checkpoint, RETIRE), f"checkpoint {checkpoint} was not retired")


def _change(session: Session, record: Record, failed: str) -> Asked:
    """Append this record to the group's home; its answer. failed: what did not happen. Raises AdminError."""
    (asked,) = session.ask((session.home, record))
    if not asked.accepted:
        raise _refusal(session, asked, failed)
    return asked


def _refusal(session: Session, asked: Asked, failed: str) -> MarshalError:
    """Why the log did not accept it, and what to do."""
    name = session.group_id
    look = f"kafka-marshal checkpoints {quote(name)}"
    if asked.outcome is None:
        return KafkaUnavailableError(
            f"unknown whether {failed.replace(' was not ', ' was ')}: the log did not show it in time. Run {look} "
            "when the brokers are back"
        )
    code = asked.outcome.code
    if code == codes.PAUSED and asked.pause is not None:
        return GroupPausedError(
            f"{failed}: group {name!r} is paused by {asked.pause.client_id!r}. Do it again when that ends",
            client_id=asked.pause.client_id,
            expires=asked.pause.expires,
        )
    why = {
        codes.UNKNOWN_CHECKPOINT: f"the group does not keep it any more ({look})",
        codes.NEWEST_CHECKPOINT: "it is the newest, from which members restore: take another one first",
        codes.TOO_MANY_CHECKPOINTS: f"16 are pinned already: {look} --retire ID",
        codes.GROUP_ACTIVE: f"a member is there (kafka-marshal group {quote(name)})",
        codes.BARRIER_OPEN: "another one is being taken",
    }.get(code, code)
    return AdminError(f"{failed}: {why}. Nothing was changed")


# -- taking one --------------------------------------------------------------------------------------------------


class _Taking:
    """Begins a checkpoint, and follows it."""

    def __init__(self, session: Session, timeout_s: float) -> None:
        self._session = session
        self._timeout_s = timeout_s
        self._until = session.now_ms() + (timeout_s + WITNESS_S) * 1000
        self.history = CheckpointHistory(session.group_id)
        self._ends: dict[TopicPartition, int] = {}

    def take(self) -> CompleteCheckpoint:
        """The checkpoint, when it is complete."""
        session = self._session
        with session.locked():
            takes_some(session.worlds, session.group_id)
            self.history.begin(session.worlds[session.home])
            session.on_applied = self._applied
            keys = sorted({key for key, _ in owners_of(takes_some(session.worlds, session.group_id)[0])})
        marks = session.cluster.watermarks(keys, LOOKUP_TIMEOUT_S) if keys else {}
        self._ends = {key: high for key, (_, high) in marks.items()}
        checkpoint = self._begin()
        session.wait_for(lambda: self._result(checkpoint) or not self._is_open(checkpoint), self._until)
        with session.locked():
            result = self._result(checkpoint)
            if isinstance(result, CompleteCheckpoint):
                return result
            group, _ = takes_some(session.worlds, session.group_id)
            raise self._ended(group, checkpoint, result)

    def _applied(self, cp: int, offset: int, outcome: Outcome) -> None:
        world = self._session.worlds[cp]
        if cp == self._session.home and outcome.of_group and outcome.message.group_id == self._session.group_id:
            self.history.see(world, outcome)

    def _begin(self) -> int:
        """Begin one; another client's is awaited first."""
        session, timeout_ms = self._session, round(self._timeout_s * 1000)
        while True:
            with session.locked():
                _, checkpoints = takes_some(session.worlds, session.group_id)
                after, keep = checkpoints.newest, checkpoints.keep
            (asked,) = session.ask(
                (session.home, BeginCheckpoint(*session.ids, after, timeout_ms, keep, checkpoints.hold))
            )
            if asked.accepted:
                return asked.offset
            code = None if asked.outcome is None else asked.outcome.code
            if code not in (codes.BARRIER_OPEN, codes.UNKNOWN_CHECKPOINT) or session.now_ms() >= self._until:
                raise _refusal(session, asked, "no checkpoint was taken")
            session.wait_for(lambda: self._open_barrier() is None, self._until)

    def _open_barrier(self) -> int | None:
        group = self._session.group()
        if group is None or group.checkpoints is None or group.checkpoints.barrier is None:
            return None
        return group.checkpoints.barrier.id

    def _is_open(self, checkpoint: int) -> bool:
        return self._open_barrier() == checkpoint

    def _result(self, checkpoint: int) -> CompleteCheckpoint | Ended | None:
        found = self.history.taken.get(checkpoint)
        return found or next((each for each in self.history.ended if each.barrier == checkpoint), None)

    def _ended(self, group: Group, checkpoint: int, result: CompleteCheckpoint | Ended | None) -> CheckpointEndedError:
        name = self._session.group_id
        refused: list[str] = []
        waits = waits_for(group)
        if isinstance(result, Ended):
            names = [each for each in result.client.split(", ") if each]
            refused, waits = (names, []) if result.why == "refused" else ([], names)
        who = ", ".join(map(repr, refused or waits)) or "its members"
        why = f"{who} could not take it" if refused else f"{who} did not answer within {self._timeout_s:g} s"
        if isinstance(result, Ended) and result.why not in ("refused", "over"):
            why = {
                "lost": f"{who} was lost meanwhile",
                "rollback": f"{who} put the group back meanwhile",
                "positions": f"{who} set positions meanwhile",
            }[result.why]
        return CheckpointEndedError(
            f"checkpoint {checkpoint} of group {name!r} was not completed: {why}. Nothing moved, nothing is undone: "
            f"the one before it counts. Do it again, or look for a handler that hangs: kafka-marshal check --group "
            f"{quote(name)}",
            checkpoint=checkpoint,
            refused=refused,
            waits_for=waits,
        )

    def older(self, group: Group, taken: CompleteCheckpoint) -> tuple[KeyCut, ...]:
        """Pieces that have an older cut in it although messages waited when it was begun, and why; under the lock."""
        missing = {(cut.key, cut.lo): cut.why for cut in taken.missing}
        found = []
        for cut in cuts_now(group):
            if cut.cut == taken.checkpoint or (cut.cut is not None and cut.cut > taken.checkpoint):
                continue
            seen = seen_by(group, cut.key, taken.checkpoint)
            if seen.position < self._ends.get(cut.key, seen.position) or (cut.key, cut.lo) in missing:
                why = missing.get((cut.key, cut.lo), "a message was in flight for too long, or it could not be saved")
                found.append(replace(cut, why=why))
        return tuple(found)


def _take(session: Session, timeout_s: float, should_pin: bool) -> TakenCheckpoint:
    """Take a checkpoint, and wait until it is complete. Raises CheckpointEndedError with those that refused."""
    with session.locked():
        check_level(session.worlds, session.group_id)
    taking = _Taking(session, timeout_s)
    taken = taking.take()
    with session.locked():
        group, _ = takes_some(session.worlds, session.group_id)
        older = taking.older(group, taken)
    if should_pin:
        pin_kept(session, taken.checkpoint)
    return TakenCheckpoint(
        taken.checkpoint, taken.log_time, taken.took_ms, taken.members, taken.owners, older, should_pin
    )


# -- the way back ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Way:
    """From the newest checkpoint to another: what each sees of every partition."""

    group_id: str
    to: int
    dropped: tuple[int, ...]
    pinned: tuple[int, ...]
    partitions: tuple[tuple[TopicPartition, SeenProgress, SeenProgress], ...]

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
    target = find_checkpoint(group, to)
    partitions = tuple(
        (key, seen_by(group, key, checkpoints.newest), seen_by(group, key, target))
        for key in group.partitions()
        if group.kept(*key) is not None
    )
    above = [kept for kept in checkpoints.kept if kept.id > target]
    pinned = tuple(kept.id for kept in above if kept.kind == PINNED)
    return _Way(group_id, target, tuple(kept.id for kept in above), pinned, partitions)


def _done(seen: SeenProgress) -> int:
    """How many offsets are done; of a partition shared by key, in proportion to the keys."""
    through = sum((done + 1) * (hi - lo + 1) for lo, hi, done in seen.done_through) // (MAX_KEY_HASH + 1)
    return through + sum(last - max(first, seen.position) + 1 for first, last in seen.ranges if last >= seen.position)


def _refuse_gone(planned: RolledBack) -> None:
    """Raise AdminError if retention took messages that would have to come again."""
    gone = [each for each in planned.partitions if each.gone]
    if gone:
        named = ", ".join(f"{each.topic} [{each.partition}]: {count(each.gone, 'offset')}" for each in gone[:5])
        raise AdminError(
            f"retention has deleted messages that checkpoint {planned.to} of group {planned.group!r} has as not done: "
            f"{named}{' …' * (len(gone) > 5)}. Nothing was changed. The state would go back without them: lost. "
            "Choose a later checkpoint, or force it (--force)"
        )


def _go_back(session: Session, to: int | str | datetime, force: bool) -> RolledBack:
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
            _refuse_gone(planned)
        pin_kept(session, planned.to)
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
                raise _refusal(session, asked, f"group {session.group_id!r} was not put back")
        raise AdminError(
            f"group {session.group_id!r} was not put back: its members came and went {_TRIES} times meanwhile. Nothing "
            "was changed. Do it again with --stay-paused (stay_paused=), which pauses it first"
        )
    finally:
        session.on_applied = before


def _go_back_paused(work: PauseWork, to: int, force: bool) -> tuple[RolledBack, Restore]:
    """The same under our pause, when all members have left; and what sinks are to go back to."""
    work.ready()
    done = _go_back(work.session, to, force)
    return done, _restore_of(work.session, done)


def _restore_of(session: Session, done: RolledBack) -> Restore:
    """What sinks are to go back to, for whole partitions, with the rollback's generation as the token (F8)."""
    assert done.generation is not None
    with session.locked():
        group, _ = takes_some(session.worlds, session.group_id)
        initial = {key: kept.initial for key in group.partitions() if (kept := group.kept(*key)) is not None}
        keys = list(initial)
        seen = {key: seen_by(group, key, done.to) for key in keys}
    marks = session.cluster.watermarks(keys, LOOKUP_TIMEOUT_S) if keys else {}
    pieces = []
    for key in keys:
        position = max(seen[key].position, marks.get(key, (0, 0))[0])
        pieces.append(piece_of(session.group_id, key, seen[key], initial[key], position, done.generation))
    return Restore(done.to, "rollback", tuple(pieces), {(each.topic, each.partition): each.position for each in pieces})


def piece_of(
    group_id: str, key: TopicPartition, seen: SeenProgress, initial: int, position: int, epoch: int
) -> RestorePiece:
    """A whole partition as a checkpoint sees it, as a member would be given it."""
    states, groups = of_whom(seen.metadata, seen.states)
    saved = (states, groups, seen.done_through, initial)
    return RestorePiece.of(group_id, key, (0, MAX_KEY_HASH), epoch, position, seen.ranges, *saved)


# -- the first checkpoint, and the end ---------------------------------------------------------------------------


def _check_start(worlds: Mapping[int, World], name: str) -> None:
    """Raises AdminError if the group can't begin to take checkpoints."""
    group = coordinated(worlds, name)
    check_level(worlds, name)
    if group.checkpoints is not None:
        raise AdminError(f"group {name!r} takes checkpoints already. Nothing was changed")
    for topic, partition, kept in group.all_progress():
        if kafka_counts(kept.progress):
            position = f"{topic}:{partition}={kept.progress.stable + 1}"
            raise AdminError(
                f"group {name!r} processes in transactions ({topic} [{partition}]), and Kafka's offset can't go back "
                "with a checkpoint. Nothing was changed. Set the position of each such partition, which ends that: "
                f"kafka-marshal release-group {quote(name)} --partition {quote(position)}"
            )
    for topic, partition, kept in group.all_progress():
        if kept.progress.holes is not None:
            raise AdminError(open_messages_text(name, topic, partition))


def _start(work: PauseWork, hold: bool, keep: int) -> int:
    """Begin the first checkpoint of a group, under our pause; its id."""
    session = work.session
    name = session.group_id
    with session.locked():
        _check_start(session.worlds, name)
    _bury(work)
    record = BeginCheckpoint(*session.ids, 0, _NO_BARRIER_MS, keep, hold)
    return _change(session, record, f"group {name!r} takes no checkpoints").offset


def _end(work: PauseWork) -> None:
    """End the checkpoints of a group, under our pause: what the newest has is its progress."""
    session = work.session
    with session.locked():
        _, checkpoints = takes_some(session.worlds, session.group_id)
    _bury(work)
    record = KeepCheckpoint(*session.ids, checkpoints.newest, END)
    _change(session, record, f"the checkpoints of group {session.group_id!r} were not ended")


def _bury(work: PauseWork) -> None:
    """Remove members that are dead (G21): an entry that says nothing about a partition."""
    session = work.session
    work.ready()
    with session.locked():
        group = session.group()
        key = next(iter(group.partitions()), ("none", 0)) if group is not None and group.members else None
    if key is not None:
        entry = CommitEntry(*key)
        _change(
            session, CommitOffsets(*session.ids, "", 0, False, (entry,)), "members that are silent were not removed"
        )
