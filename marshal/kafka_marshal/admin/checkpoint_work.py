"""Checkpoints of a group from outside: begun, pinned, retired, listed. All of it blocks, but reading."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from shlex import quote
from typing import Final

from kafka_marshal.admin.positions import LOOKUP_TIMEOUT_S
from kafka_marshal.admin.session import Asked, Session, group_in, kind_in, wrong_kind
from kafka_marshal.errors import AdminError, CheckpointEndedError, GroupPausedError, KafkaUnavailableError, MarshalError
from kafka_marshal.observe.checkpoints import CheckpointHistory, Ended, Taken
from kafka_marshal.observe.cuts import KIND_WORDS, Cut, cuts_now, is_initial, oldest_cut, owners_of, seen_by, waits_for
from kafka_marshal.observe.text import time_text
from kafka_marshal.ports import TopicPartition
from rationalizer import BeginCheckpoint, Group, KeepCheckpoint, Outcome, Record, World, codes, route_group
from rationalizer.groups.checkpoints import Checkpoints
from rationalizer.levels import CHECKPOINTS_LEVEL
from rationalizer.wire.wellformed import PIN, PINNED, RETIRE

#: A barrier that is over needs a record of a member to be closed: how much longer than its time it is awaited (s).
WITNESS_S: Final = 5.0

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
    oldest: Cut | None
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
    older: tuple[Cut, ...]
    pinned: bool


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


def kept_by(group: Group) -> list[KeptCheckpoint]:
    """The checkpoints that the group keeps, ascending."""
    checkpoints = group.checkpoints
    if checkpoints is None:
        return []
    return [
        KeptCheckpoint(
            kept.id, kept.log_time, KIND_WORDS[kept.kind], oldest_cut(group, kept.id), kept.id == checkpoints.newest
        )
        for kept in checkpoints.kept
    ]


def find(group: Group, to: int | str | datetime) -> int:
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


def pin(session: Session, checkpoint: int) -> None:
    """Keep it until it is retired; nothing is appended if it is pinned."""
    with session.locked():
        group, checkpoints = takes_some(session.worlds, session.group_id)
        find(group, checkpoint)
        is_pinned = any(kept.id == checkpoint and kept.kind == PINNED for kept in checkpoints.kept)
    if not is_pinned:
        change(session, KeepCheckpoint(*session.ids, checkpoint, PIN), f"checkpoint {checkpoint} was not pinned")


def retire(session: Session, checkpoint: int) -> None:
    """Drop it: the group can't go back to it any more."""
    with session.locked():
        group, _ = takes_some(session.worlds, session.group_id)
        find(group, checkpoint)
    change(session, KeepCheckpoint(*session.ids, checkpoint, RETIRE), f"checkpoint {checkpoint} was not retired")


def change(session: Session, record: Record, failed: str) -> Asked:
    """Append this record to the group's home; its answer. failed: what did not happen. Raises AdminError."""
    (asked,) = session.ask((session.home, record))
    if not asked.accepted:
        raise refusal(session, asked, failed)
    return asked


def refusal(session: Session, asked: Asked, failed: str) -> MarshalError:
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

    def take(self) -> Taken:
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
            if isinstance(result, Taken):
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
                raise refusal(session, asked, "no checkpoint was taken")
            session.wait_for(lambda: self._open_barrier() is None, self._until)

    def _open_barrier(self) -> int | None:
        group = self._session.group()
        if group is None or group.checkpoints is None or group.checkpoints.barrier is None:
            return None
        return group.checkpoints.barrier.id

    def _is_open(self, checkpoint: int) -> bool:
        return self._open_barrier() == checkpoint

    def _result(self, checkpoint: int) -> Taken | Ended | None:
        found = self.history.taken.get(checkpoint)
        return found or next((each for each in self.history.ended if each.barrier == checkpoint), None)

    def _ended(self, group: Group, checkpoint: int, result: Taken | Ended | None) -> CheckpointEndedError:
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

    def older(self, group: Group, taken: Taken) -> tuple[Cut, ...]:
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


def take(session: Session, timeout_s: float, should_pin: bool) -> TakenCheckpoint:
    """Take a checkpoint, and wait until it is complete. Raises CheckpointEndedError with those that refused."""
    with session.locked():
        check_level(session.worlds, session.group_id)
    taking = _Taking(session, timeout_s)
    taken = taking.take()
    with session.locked():
        group, _ = takes_some(session.worlds, session.group_id)
        older = taking.older(group, taken)
    if should_pin:
        pin(session, taken.checkpoint)
    return TakenCheckpoint(
        taken.checkpoint, taken.log_time, taken.took_ms, taken.members, taken.owners, older, should_pin
    )
