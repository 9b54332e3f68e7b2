"""A paused group, and the operations on it.

User threads run this module, and may be interrupted anywhere in it. Threads of the library carry out what they ask for
(:mod:`kafka_marshal.admin.pause_work`): these finish what is under way, and end the pause, even if the caller is gone.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, Self, TypeVar

from kafka_marshal import arguments
from kafka_marshal.admin.members import InHand
from kafka_marshal.admin.move_plans import MovePlan
from kafka_marshal.admin.pause_work import OVER, PauseWork
from kafka_marshal.admin.positions import Keep, Move, check_targets
from kafka_marshal.admin.session import Session
from kafka_marshal.client.one_process import OneProcess
from kafka_marshal.errors import AdminError, ConfigurationError, MarshalError
from kafka_marshal.logs import log
from kafka_marshal.node.engine_lock import under_lock
from kafka_marshal.node.serving import Answer, EndedError
from kafka_marshal.ports import TopicPartition
from kafka_marshal.runtime import is_ours
from kafka_marshal.types import Target

T = TypeVar("T")


class Pause(OneProcess):
    """A group paused by this admin. Created by :meth:`Admin.pause`; use it as a context manager.

    Entering pauses the group in every coordination partition; leaving the block, also by an exception, resumes it.
    Its methods extend the pause as needed; otherwise it expires ``expires_in`` seconds after the last extension, so
    that a dead admin does not stop the group for longer.

    Any thread may call it; calls run one at a time. An exception from a signal handler (Ctrl-C, an alarm) ends the call
    in progress: its work is abandoned or undone before the group resumes. If that is not possible, a note of the
    exception says so.

    Attributes:
        group_id: the group that is paused.
        client_id: the pausing client; another Admin created with it can continue.
    """

    def __init__(self, open_session: Callable[[], Session], group_id: str, client_id: str, expires_in: float) -> None:
        self.group_id = group_id
        self.client_id = client_id
        self._open_session = open_session
        self._length_ms = max(1, int(expires_in * 1000))
        self._used = False
        self._in_block = False
        self._is_told = False
        self._work: PauseWork | None = None

    # Beginning and ending.

    def start(self) -> Self:
        """Pause the group in every coordination partition (*blocking*); ``with`` does so on entering.

        Raises GroupPausedError if another client has paused it, AdminError if the log does not answer. In both cases
        what was paused already is resumed, or the message says what is not.
        """
        if self._used:
            raise ConfigurationError("a Pause can be used once. Nothing was changed; ask the Admin for another one")
        self._used = True
        session: Session | None = None
        answer: Answer[None] | None = None
        try:
            session = self._open_session()
            self._work = work = PauseWork(session, self._length_ms)
            if self._in_block:  # if __exit__ is interrupted before its first step
                weakref.finalize(self, work.end_soon).atexit = False
            answer = session.driver.servants.ask(
                work.carry_out, "start", work.begin, (), undo=lambda _: work.end_soon()
            )
            answer.wait()
            answer.receipt.out = True; return self  # fmt: skip  # noqa: E702 - one line: nothing may come in between
        except BaseException as error:
            if answer is not None:
                answer.receipt.left = True
            self._give_up(session, error)
            raise

    def _give_up(self, session: Session | None, error: BaseException) -> None:
        """It was not begun, or its start failed."""
        if self._work is not None:
            problem = self._work.finish()
            self._is_told = True
            if not isinstance(error, MarshalError) and not getattr(error, "__notes__", []):
                error.add_note(problem or f"Group {self.group_id!r} is not paused by this admin.")
        elif session is not None:
            session.close_soon()

    def resume(self) -> None:
        """Resume the group (*blocking*); ``with`` does so on leaving. A second call does nothing.

        Raises AdminError if it may still be paused, or if interrupted calls have left anything unfinished.
        """
        if self._work is None or self._is_told:
            return
        problem = self._work.finish()
        self._is_told = True
        if problem:
            raise AdminError(problem)

    def __enter__(self) -> Self:
        self._in_block = True
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if error is None:
            self.resume()
            return
        try:
            self.resume()
        except MarshalError as second:
            error.add_note(str(second))

    def __del__(self) -> None:
        if not getattr(self, "_used", True):
            text = (
                "group %r is not paused: nothing has begun this Pause. Use it as `with admin.pause(…)`, or call start()"
            )
            log(logging.WARNING, "pause_not_begun", text, self.group_id)

    # What an operator does during it.

    @property
    def seconds_left(self) -> float:
        """How long the pause lasts without an extension, by this process's clock (s); 0: it is over."""
        return 0.0 if self._work is None or self._work.is_over else self._work.hold.seconds_left

    def in_hand(self, partitions: Iterable[TopicPartition] | None = None) -> list[InHand]:
        """What members still hold, or released too late, of these partitions (None: of all), sorted."""
        return self._have("in_hand", self._live().in_hand, _checked(partitions))

    @property
    def signs_of_life(self) -> dict[str, str]:
        """client_id → its first record during the pause (ReleasingPartition …): members that are alive."""
        return self._have("signs_of_life", self._live().signs_of_life)

    def wait_released(
        self,
        timeout: float = 30.0,
        partitions: Iterable[TopicPartition] | None = None,
        *,
        handed_in: bool = False,
    ) -> list[InHand]:
        """Wait until no other client holds a lease of the group, or only stale ones (*blocking*).

        Members finish their messages in flight, and release with their offsets. Returns the partitions whose holder did
        not within two heartbeat intervals: its messages in flight are repeated by the next holder, committed ones are
        not. ``handed_in``: wait for those, too (a dead holder never does). ``partitions``: only these.
        Raises AdminError, with ``in_hand``, if a member is still at work after timeout seconds, and if the pause had
        expired before. Nothing is changed.
        """
        timeout = arguments.seconds("timeout", timeout)
        return self._have("wait_released", self._live().wait_released, timeout, _checked(partitions), handed_in)

    def reposition(
        self,
        positions: Mapping[TopicPartition, Target],
        *,
        dry_run: bool = False,
        force: bool = False,
        keep_done: bool = False,
    ) -> list[Move]:
        """Move the group's positions, back or forward (*blocking*); returns the moves.

        ``positions``: (topic, partition) → the offset to read next, ``"earliest"``, ``"latest"``, ``"readable"``
        (the first readable one from the group's position: past a corrupt batch), or a datetime.
        ``dry_run``: only return the moves. ``force``: accept offsets outside the log, too.
        ``keep_done``: messages done above the new position, out of order, stay done (claimed groups only; AdminError
        if a coordinated group has any). ``MovePlan.of(...)`` of a dry run saves what :meth:`undo` needs.
        Call ``wait_released`` first: raises AdminError if members still hold one of them, if the pause has expired, and
        for offsets outside the log; nothing is moved then. Only a failure in the very last step can leave some
        partitions moved (each as a whole); they are moved back, or the error names them, and a second call finishes it.
        """
        check_targets(positions)
        keeps = dict.fromkeys(positions, Keep()) if keep_done else {}
        return self._have("reposition", self._live().reposition, positions, dry_run, force, keeps)

    def undo(self, plan: MovePlan, *, dry_run: bool = False, force: bool = False) -> list[Move]:
        """Restore the positions before a move (*blocking*); returns the moves.

        Messages done before the move and since stay done: nothing is repeated. Coordinated groups keep no work above
        a position, so there it is repeated (``done_ahead``). Partitions that had no position before the move are
        skipped. Otherwise as :meth:`reposition`.
        """
        return self._have("reposition", self._live().reposition, plan.targets, dry_run, force, plan.keeps, True)

    def forget(self) -> int:
        """Drop the group's leases and the pause in every coordination partition (*blocking*); returns their number.

        Only after ``wait_released``. Raises AdminError if it was not done everywhere.
        """
        return self._have("forget", self._live().forget)

    def carry_out(self, what: str, do: Callable[..., T], *args: Any) -> T:
        """Call do(work, *args) on another thread (*blocking*); for the Admin. what: in words."""
        return self._have(what, do, self._live(), *args)

    def leave_in_force(self) -> int:
        """End this process's part (*blocking*): the pause runs for its whole length, until the log time (ms) returned.

        Leaving the block does not resume the group then; ``Admin.resume`` does.
        """
        until = self._have("leave_in_force", self._live().leave)
        self._is_told = True
        if self._work is not None:
            self._work.session.await_closed()
        return until

    def check(self) -> None:
        """Raise AdminError unless the pause is in force in every CP, and no other process works under our client_id."""
        self._have("check", self._live().check)

    def extend_if_short(self) -> None:
        """Extend the pause if less than half of it is left (*blocking*)."""
        self._have("extend_if_short", self._live().extend_if_short)

    def wait(self, met: Callable[[], object], timeout_s: float) -> bool:
        """Wait until met() is true, at most timeout_s; the pause is extended meanwhile (*blocking*).

        met is called under this admin's lock, on another thread, after every change: it must be quick.
        """
        arguments.a_function("met", met, "")
        return self._have("wait", self._live().wait, met, arguments.seconds("timeout_s", timeout_s))

    def __repr__(self) -> str:
        state = (
            "not begun" if self._work is None else f"{self.seconds_left:.0f} s left" if self.seconds_left else "over"
        )
        return f"Pause({self.group_id!r}, client_id={self.client_id!r}, {state})"

    def _live(self) -> PauseWork:
        if self._work is None or self._work.is_over:
            raise ConfigurationError(OVER)
        return self._work

    def _have(self, what: str, function: Callable[..., T], *args: Any) -> T:
        """Carry out one call (*blocking*)."""
        work = self._live()
        if under_lock.get() or is_ours.get():  # met() of ``wait`` asks
            found: T = function(*args)
            return found
        answer: Answer[T] = work.session.driver.servants.ask(work.carry_out, what, function, args)
        try:
            return answer.wait()
        except EndedError:
            raise ConfigurationError(OVER) from None
        except BaseException:
            answer.receipt.left = True
            raise


def _checked(partitions: Iterable[TopicPartition] | None) -> list[TopicPartition] | None:
    return None if partitions is None else arguments.partitions("partitions", partitions)
