"""on_checkpoint, on_restore and on_completed of one consumer: called in order, and how they ended is passed on.

They share the thread of the other callbacks: a piece that is lost and restored has its on_lost before its on_restore,
and no two callbacks run at a time. That thread holds no lock meanwhile, so none of them delays a heartbeat.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any

from kafka_marshal import arguments
from kafka_marshal.checkpoints import Checkpoint, CheckpointPiece, Restore, RestorePiece
from kafka_marshal.client.closing import calling
from kafka_marshal.engine.effects import Note, RestoreState, SaveState
from kafka_marshal.engine.groups.checkpoints.cuts import left_means, places
from kafka_marshal.engine.inputs import Ts
from kafka_marshal.engine.plane import Checkpointing
from kafka_marshal.errors import ClosedError, StaleEpochError, StateError, StateMissingError
from kafka_marshal.guard import report
from kafka_marshal.logs import Event, log
from kafka_marshal.node.driver import Driver
from kafka_marshal.node.user_calls import UserCall
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
        if lanes is not None and lanes.handlers is not None:
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
        topic, partition = piece.key
        return RestorePiece(
            topic,
            partition,
            piece.lo,
            piece.hi,
            piece.epoch,
            piece.position,
            piece.ranges,
            tuple((lo, hi, state or None) for lo, hi, state in piece.states),
            group_id=self._group_id,
            done_through=piece.done_through,
            initial=piece.initial,
        )

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
