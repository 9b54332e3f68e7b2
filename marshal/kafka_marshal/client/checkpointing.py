"""Checkpoints of a group consumer: its arguments, what the program calls, and what is refused with them (section 7).

on_checkpoint, on_restore and on_completed share the thread of the other callbacks: a piece that is lost and restored
has its on_lost before its on_restore, and no two callbacks run at a time. That thread holds no lock meanwhile, so none
of them delays a heartbeat.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from shlex import quote
from typing import Any, Final, NamedTuple, cast

from kafka_marshal import arguments
from kafka_marshal.checkpoints import Checkpoint, CheckpointPiece, Restore, RestorePiece
from kafka_marshal.client.base import AnyConsumer
from kafka_marshal.client.closing import calling
from kafka_marshal.engine.effects import Note, RestoreState, SaveState
from kafka_marshal.engine.groups.checkpoints.cuts import left_means, places
from kafka_marshal.engine.groups.checkpoints.member import MemberCheckpoints
from kafka_marshal.engine.groups.client import GroupClient
from kafka_marshal.engine.inputs import Ts
from kafka_marshal.engine.plane import Checkpointing
from kafka_marshal.errors import ClosedError, ConfigurationError, StaleEpochError, StateError, StateMissingError
from kafka_marshal.guard import report
from kafka_marshal.logs import Event, log
from kafka_marshal.node.driver import Driver
from kafka_marshal.node.effects import UserCall
from kafka_marshal.runtime import is_ours

_LEAVES = (
    "this member leaves the group, others take over its pieces from their last checkpoint, and the consumer's next "
    "call raises this"
)

#: Gives the engine an input, at a time of our own clock (ms).
Dropped = Callable[[float], object]


class StateCalls:
    """Calls them for the engine. The lock is held for the public methods."""

    def __init__(self, driver: Driver, port: Any, callbacks: Mapping[str, Any]) -> None:
        """port: the consumer, whose calls can be dropped together. callbacks: by name; None: not given."""
        self._driver = driver
        self._port = port
        self._group_id = driver.engine.settings.group_id
        self._functions: Mapping[str, Callable[[Any], object] | None] = callbacks

    def save(self, asked: SaveState) -> None:
        """Have on_checkpoint called, and pass on how it ended."""
        dropped = self._input(self._checkpoints.returned, asked.barrier, asked.pieces, _dropped())
        self._submit("on_checkpoint", asked.pieces, partial(self._save, asked), dropped)

    def restore(self, asked: RestoreState) -> None:
        """Have on_restore called, and pass on how it ended."""
        dropped = self._input(self._checkpoints.restored, asked.attempt, _dropped(), False)
        self._submit("on_restore", asked.pieces, partial(self._restore, asked), dropped)

    def completed(self, checkpoint: int) -> None:
        """Have on_completed called."""
        self._submit("on_completed", (), partial(self._complete, checkpoint), None)

    def reopen(self) -> None:
        """Pieces may continue after a cut: handlers begin what waits in lanes; the thread that reads looks later."""
        lanes = self._port._engine.delivery.in_lanes.lanes
        if lanes.handlers is not None:
            lanes.handlers.put(lanes.reopened(self._driver.now_ms()))

    def _submit(self, name: str, pieces: Any, run: Callable[[], object], dropped: Dropped | None) -> None:
        of = f" of {places(piece.key for piece in pieces)}" if pieces else ""
        self._driver.effects.callbacks.submit(UserCall(f"{name}{of}", run, self._port, dropped))

    # On the callback thread.

    def _save(self, asked: SaveState) -> None:
        of = asked.barrier, asked.pieces
        returned, safe = self._checkpoints.returned, self._checkpoints.safe
        pieces = tuple(CheckpointPiece(*x.key, x.lo, x.hi, group_id=self._group_id) for x in asked.pieces)
        try:
            found = self._call("on_checkpoint", Checkpoint(asked.barrier, pieces, asked.leaving, asked.needed))
            future = _future_of(found)
        except BaseException as error:  # noqa: BLE001 - the user's, on a thread of the library
            self._report(asked, error)
            self._take(self._input(returned, *of, _exception("on_checkpoint", error)))
            return
        if future is None:
            self._take(self._input(returned, *of, None), self._input(safe, *of, None))
        else:
            self._take(self._input(returned, *of, None))
            future.add_done_callback(lambda done: self._driver.post(partial(self._saved, asked, done)))

    def _saved(self, asked: SaveState, done: Future[object]) -> None:
        """What on_checkpoint returned is done (on another thread of the library)."""
        error = None
        try:
            done.result(0)
        except BaseException as raised:  # noqa: BLE001 - the user's; CancelledError, too
            self._report(asked, raised)
            error = _exception("what on_checkpoint returned", raised)
        self._take(self._input(self._checkpoints.safe, asked.barrier, asked.pieces, error))

    def _report(self, asked: SaveState, error: BaseException) -> None:
        means = left_means(leaves=asked.leaving, is_hold=asked.is_hold)
        pieces = places(piece.key for piece in asked.pieces)
        report("on_checkpoint", error, f"the state of {pieces} is not saved for checkpoint {asked.barrier}: {means}")

    def _restore(self, asked: RestoreState) -> None:
        pieces = tuple(self._restored(piece) for piece in asked.pieces)
        try:
            restore = Restore(asked.checkpoint, asked.why, pieces, asked.positions)  # type: ignore[arg-type]
            arguments.a_result("on_restore", self._call("on_restore", restore))
        except BaseException as error:  # noqa: BLE001 - the user's
            # Others may have cut or taken these pieces since; it is raised if a newer view has them as they were.
            is_outdated = isinstance(error, StateMissingError | StaleEpochError)
            if not is_outdated:
                report("on_restore", error, _LEAVES)
            raised = _exception("on_restore", error)
            self._take(self._input(self._checkpoints.restored, asked.attempt, raised, is_outdated))
        else:
            self._say(asked)
            self._take(self._input(self._checkpoints.restored, asked.attempt, None, False))

    def _say(self, asked: RestoreState) -> None:
        words = f"restored (checkpoint {asked.checkpoint})"
        with self._driver.condition:
            for piece in asked.pieces:  # those of several calls become one line
                note = Note(Event.RESTORED, piece.key, asked.why, words)
                self._driver.effects.events.note(note, self._driver.now_ms())

    def _restored(self, piece: Any) -> RestorePiece:
        span, at = (piece.lo, piece.hi), (piece.epoch, piece.position, piece.ranges)
        saved = (piece.states, piece.groups, piece.done_through, piece.initial)
        return RestorePiece.of(self._group_id, piece.key, span, *at, *saved)

    def _complete(self, checkpoint: int) -> None:
        log(logging.DEBUG, Event.CHECKPOINT, "checkpoint %d is complete", checkpoint, checkpoint=checkpoint)
        try:
            arguments.a_result("on_completed", self._call("on_completed", checkpoint))
        except BaseException as error:  # noqa: BLE001 - the user's
            report("on_completed", error)

    def _call(self, name: str, argument: object) -> object:
        if (function := self._functions.get(name)) is None:
            return None
        calling.set(self._port)
        before = is_ours.set(False)
        try:
            return function(argument)
        finally:
            is_ours.reset(before)
            calling.set(None)

    @property
    def _checkpoints(self) -> Checkpointing:
        found: Checkpointing | None = self._port._engine.source.checkpoints
        assert found is not None  # the engine asks only then
        return found

    def _input(self, function: Callable[[*Ts, float], object], *of: *Ts) -> Dropped:
        """An input for the consumer, as a function of the time."""
        return partial(self._driver.engine.take, self._port._engine.number, function, *of)

    def _take(self, *inputs: Dropped) -> None:
        with self._driver.condition:
            for each in inputs:
                each(self._driver.now_ms())
            self._driver.lock.settle()
            self.reopen()


def _future_of(found: Any) -> Future[object] | None:
    """What on_checkpoint returned, if it is to be awaited; refuses what would never run."""
    if isinstance(found, Future):
        return found
    if isinstance(found, asyncio.Future):
        return asyncio.run_coroutine_threadsafe(_wait_for(found), found.get_loop())
    arguments.a_result("on_checkpoint", found)
    return None


async def _wait_for(future: asyncio.Future[object]) -> object:
    return await future


def _exception(what: str, error: BaseException) -> Exception:
    """What the engine takes: sys.exit() in a callback must not end a thread of the library."""
    if isinstance(error, Exception):
        return error
    wrapped = StateError(f"{what} raised {type(error).__name__}: {error}".rstrip(": "))
    wrapped.__cause__ = error
    return wrapped


def _dropped() -> ClosedError:
    return ClosedError("close() does not wait for this callback any longer")


#: By their numbers in the log (X1).
_KINDS: Final = ("passing", "periodic", "pinned")


class RestorePoint(NamedTuple):
    """A checkpoint that the group can go back to."""

    id: int
    #: When it was complete (log time, ms).
    log_time: int
    #: ``"passing"`` (taken for a hand-over, kept while it is the newest), ``"periodic"`` or ``"pinned"``.
    kind: str


@dataclass(frozen=True, slots=True)
class CheckpointStatus:
    """What a member knows of its group's checkpoints at one moment."""

    #: ``"SUBSCRIBED"`` (owns nothing), ``"POLLING"`` (delivers), ``"DRAINING"`` (a piece waits for what is in flight),
    #: ``"SAVING"``, ``"REACHED"`` (has answered, and waits: it leaves, or all hold), ``"CR_RESET_INITIATED"`` (goes
    #: back) or ``"RESET_COMPLETE"`` (has restored, and delivered nothing since).
    state: str
    #: The id of the newest complete one; None: the group takes none (yet).
    newest: int | None
    #: Ascending; the newest is the last.
    kept: tuple[RestorePoint, ...]
    #: How long the last drain took, and the longest one: from the barrier to the last cut.
    drain_seconds: float
    drain_seconds_max: float


_NONE = CheckpointStatus("SUBSCRIBED", None, (), 0.0, 0.0)


class CheckpointingMember(AnyConsumer[Any]):
    """The part of a member that takes checkpoints, whatever it delivers."""

    #: Calls the user's callbacks.
    _state_calls: StateCalls

    @property
    def _member(self) -> GroupClient:
        return cast("GroupClient", self._engine.source)

    # The program's calls.

    def checkpoint(self) -> None:
        """Begin a checkpoint of the group now, and return at once.

        Nothing more is delivered here until the log has answered, so this member's cut is at this place: what was
        delivered before is in the checkpoint once it is done. If one is being taken already, that one serves. Raises
        ConfigurationError if the consumer was made without ``checkpoints=``.
        """
        self._refuse_without_checkpoints("checkpoint()")
        self._begin(None)
        if self._adopts_none():
            raise ConfigurationError(
                f"checkpoint(): group {self._marshal.group_id!r} takes no checkpoints (yet), and this member was made "
                "with adopt=True. Nothing was changed. commit() commits what is done; kafka-marshal checkpoints "
                f"{quote(self._marshal.group_id)} --start has the group take them"
            )
        self._driver.call(self._carry_out_checkpoint)

    def rollback(self, to: int | None = None) -> None:
        """Have all members go back to the newest checkpoint, or to the one with this id, and return at once.

        What was done since is done again, with state that ``on_restore`` takes from there; checkpoints after it are
        dropped. A ``done`` of a message in flight has no effect any more. Raises ConfigurationError if the group has no
        such checkpoint (``checkpoints.kept`` names them), or if the consumer was made without ``checkpoints=``.
        """
        self._refuse_without_checkpoints("rollback()")
        to = None if to is None else arguments.a_whole("to", to)
        self._begin(None)
        self._driver.call(self._carry_out_rollback, to)

    @property
    def checkpoints(self) -> CheckpointStatus:
        """What this member knows of the group's checkpoints, now."""
        self._refuse_without_checkpoints("checkpoints")
        return self._look(self._checkpoints)

    def _checkpoints(self, now: float) -> CheckpointStatus:
        found = self._member.checkpoints
        if found is None:
            return _NONE
        kept = tuple(RestorePoint(number, log_time, _KINDS[kind]) for number, log_time, kind in found.kept)
        return CheckpointStatus(str(found.state), found.newest, kept, found.drain_seconds, found.drain_seconds_max)

    def _carry_out_rollback(self, to: int | None) -> None:
        kept = {each.id for each in self._look(self._checkpoints).kept}
        if not kept or (to is not None and to not in kept):
            there = f"it has {', '.join(map(str, sorted(kept)))}" if kept else "it takes none (yet)"
            what = "checkpoint" if to is None else f"checkpoint {to}"
            raise ConfigurationError(
                f"rollback(): group {self._marshal.group_id!r} has no {what} to go back to: {there}. Nothing was "
                f"changed. kafka-marshal checkpoints {quote(self._marshal.group_id)} lists them"
            )
        with self._driver.lock.locked():
            if (found := self._ready()) is not None:
                self._take(found.go_back, to)

    def _carry_out_checkpoint(self) -> None:
        with self._driver.lock.locked():
            if (found := self._ready()) is not None:
                self._take(found.take)

    def _ready(self) -> MemberCheckpoints | None:
        self._drain()
        self._driver.lock.check()
        if self._member.failure is not None:
            raise self._member.failure
        return self._member.checkpoints

    # What is refused.

    def _refuse_commit(self) -> None:
        if self._takes_checkpoints and not self._adopts_none():
            raise ConfigurationError(
                "commit() is not possible in a group that takes checkpoints: progress moves only at one, together with "
                "the state that belongs to it. Nothing was changed. Call checkpoint(), which begins one now"
            )

    def _refuse_without_checkpoints(self, what: str) -> None:
        if not self._takes_checkpoints:
            raise ConfigurationError(
                f"{what} is for a group that takes checkpoints, and this consumer was made without them. Nothing was "
                "changed. Add checkpoints=CheckpointPolicy() to the consumer, at all members; without, "
                "commit() commits what is done"
            )

    @property
    def _takes_checkpoints(self) -> bool:
        """Whether it was made with ``checkpoints=``."""
        options = self._options.settings.group
        return options is not None and options.checkpoints is not None

    def _adopts_none(self) -> bool:
        """Whether it was made with ``adopt=True``, and its group takes no checkpoints."""
        options = self._options.settings.group
        adopts = options is not None and options.checkpoints is not None and options.checkpoints.adopt
        return adopts and self._look(self._checkpoints).newest is None

    # What the engine asks for (the lock is held).

    def _save_state(self, asked: SaveState) -> None:
        self._state_calls.save(asked)

    def _restore_state(self, asked: RestoreState) -> None:
        self._state_calls.restore(asked)

    def _completed(self, checkpoint: int) -> None:
        self._state_calls.completed(checkpoint)
        self._state_calls.reopen()
