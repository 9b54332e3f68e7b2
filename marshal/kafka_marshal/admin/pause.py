"""A paused group, and the operations on it (C10, C11, C16).

User threads run :class:`Pause`, and may be interrupted anywhere in it. Threads of the library carry out what they ask
for (:class:`PauseWork`): these finish what is under way, and end the pause, even if the caller is gone.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from kafka_marshal import arguments
from kafka_marshal.admin.members import InHand, Members, PauseKeeper
from kafka_marshal.admin.positions import (
    Keep,
    Move,
    MovePlan,
    check_targets,
    lost_positions,
    moves_to,
    resolve,
    stands_at,
)
from kafka_marshal.admin.repositioning import move_all, refuse_kept, set_positions
from kafka_marshal.admin.session import CallerGoneError, Session, bare_release, key_of, never
from kafka_marshal.client.one_process import OneProcess
from kafka_marshal.errors import AdminError, ConfigurationError, GroupPausedError, MarshalError
from kafka_marshal.logs import log
from kafka_marshal.node.engine_lock import under_lock
from kafka_marshal.node.serving import EndedError, Reply
from kafka_marshal.ports import TopicPartition
from kafka_marshal.runtime import is_ours
from kafka_marshal.types import T, Target
from rationalizer import ForgetGroup

OVER = "this Pause is not in force: it was not begun, or it is over. Nothing was changed. Use it in a with block"


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
        answer: Reply[None] | None = None
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
        """What members still hold, or did not hand in in time, of these partitions (None: of all), sorted."""
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
        not within two heartbeat intervals, or was evicted: its messages in flight are repeated by the next holder,
        committed ones are not. Those that were released after about one interval are returned, too, as ``"slow"``:
        their messages in flight may be repeated. (The log does not show what a member leaves behind earlier: at its
        ``revoke_timeout`` or ``handler_timeout``, at its end, or killed with a watchdog.)

        ``handed_in``: wait for those, too (a dead holder never does).

        ``partitions``: only these.

        Raises AdminError, with ``in_hand``, if a member is still at work after timeout seconds, and if the pause is not
        in force all the time. Nothing is changed.
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

        ``positions``: (topic, partition) → the offset to read next, ``"earliest"``, ``"latest"``, ``"readable"`` (the
        first readable one from the group's position: past a corrupt batch), or a datetime.

        ``dry_run``: only return the moves.

        ``force``: accept offsets outside the log, too.

        ``keep_done``: messages done above the new position, out of order, stay done (claimed groups only; AdminError if
        a coordinated group has any). ``MovePlan.of(...)`` of a dry run saves what :meth:`undo` needs. Call
        ``wait_released`` first: raises AdminError if members still hold one of them, if the pause has expired, and for
        offsets outside the log; nothing is moved then. Only a failure in the very last step can leave some partitions
        moved (each as a whole); they are moved back, or the error names them, and a second call finishes it.
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
        self._have("check", self._live().hold.check)

    def extend_if_short(self) -> None:
        """Extend the pause if less than half of it is left (*blocking*)."""
        self._have("extend_if_short", self._live().hold.extend_if_short)

    def wait(self, met: Callable[[], object], timeout_s: float) -> bool:
        """Wait until met() is true, at most timeout_s; the pause is extended meanwhile (*blocking*).

        met is called under this admin's lock, on another thread, after every change: it must be quick.
        """
        arguments.a_function("met", met, "")
        return self._have("wait", self._live().hold.wait, met, arguments.seconds("timeout_s", timeout_s))

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
        answer: Reply[T] = work.session.driver.servants.ask(work.carry_out, what, function, args)
        try:
            return answer.wait()
        except EndedError:
            raise ConfigurationError(OVER) from None
        except BaseException:
            answer.receipt.left = True
            raise


def _checked(partitions: Iterable[TopicPartition] | None) -> frozenset[TopicPartition] | None:
    return None if partitions is None else frozenset(arguments.partitions("partitions", partitions))


# -- on threads of the library ---------------------------------------------------------------------------------------


class PauseWork:
    """A session that has paused the group. One job at a time, each on its own thread; see ``carry_out``."""

    def __init__(self, session: Session, length_ms: int) -> None:
        self.session = session
        self.group_id: str = session.group_id
        self.client_id: str = session.client_id
        self.hold: PauseKeeper = PauseKeeper(session, length_ms)
        self._members: Members = self.hold.members
        self._one_at_a_time = session.cluster.runtime.lock()
        #: Set by any thread: the job in progress gives up, since the group is to resume.
        self.is_ending: bool = False
        #: The pause is not in force: it was not begun, or is over.
        self.is_over: bool = False
        #: What went wrong at its end, and in calls whose callers were gone, in words.
        self.problem: str = ""
        self._unheard: list[str] = []

    def carry_out(self, is_gone: Callable[[], bool], what: str, function: Callable[..., T], args: tuple[Any, ...]) -> T:
        """Run a job after the one in progress, which gives up if its caller is gone."""
        self._hurry()
        with self._one_at_a_time:
            if self.is_over:
                raise ConfigurationError(OVER)
            session = self.session
            session.is_gone = lambda: self.is_ending or is_gone()
            try:
                found = function(*args)
            except CallerGoneError as gone:
                if what == "forget":
                    self._unheard.append("forget was interrupted: do it again, it may be done in a part of the log")
                if is_gone():
                    raise
                raise AdminError(f"{what}: another thread has resumed the group meanwhile") from gone
            except BaseException as error:
                if is_gone():
                    self._unheard.append(f"{what} was interrupted: {error}")
                raise
            finally:
                session.is_gone = never
            if is_gone() and what == "reposition":
                self._unheard.append("reposition was interrupted too late: all positions were moved")
            return found

    def _hurry(self) -> None:
        """Wake the job in progress, to check whether its caller still waits."""
        with self.session.driver.condition:
            self.session.driver.condition.notify_all()

    def begin(self) -> None:
        """Pause the group in every CP."""
        try:
            self.hold.begin()
            self._free_predecessors(self.session)
        except BaseException as error:
            replacement = self._abandon(error)
            if replacement is None:
                raise
            raise replacement from error

    def end(self) -> str:
        """Resume the group and close the session; what went wrong, in words. A second call does nothing."""
        self.is_ending = True
        self._hurry()
        with self._one_at_a_time:
            self._end()
        return self.problem

    def _end(self) -> None:
        if self.is_over:
            return
        self.is_over = True
        try:
            self.problem = ". ".join([*filter(None, [self.hold.end()]), *self._unheard])
        finally:
            self.session.close_soon()

    def end_soon(self) -> None:
        """End it from any thread, without waiting."""
        self.session.driver.post(self.end)

    def finish(self) -> str:
        """The result of ``end`` (*blocking*); on a user's thread."""
        driver = self.session.driver
        self.is_ending = True
        if not driver.is_over:
            with suppress(EndedError):  # another thread has ended it
                driver.servants.ask(lambda _: self.end()).wait()
        self.session.await_closed()
        return self.problem

    def _free_predecessors(self, session: Session) -> None:
        """Release what an earlier, dead run of this client_id still holds, without offsets, so that no member waits."""
        with session.locked():
            held = [x for x in session.leases() if x.held and x.client_id == self.client_id]
            records = [(session.cp_of(key_of(x)), bare_release(x)) for x in held]
        if any(x.outcome is None for x in session.ask(*records)):
            raise AdminError("what an earlier run of this client_id still holds could not be released in time")

    def _abandon(self, error: BaseException) -> AdminError | None:
        """Resume the group after a failed start; what went wrong, None: nothing but the error."""
        self._end()
        problem = self.problem
        if not isinstance(error, MarshalError):
            error.add_note(problem or f"Group {self.group_id!r} is not paused by this admin.")
            return None
        if isinstance(error, GroupPausedError) and not problem:
            return None
        ended = problem or "It is not paused by this admin anywhere; nothing was changed"
        return AdminError(f"group {self.group_id!r} could not be paused: {error}. {ended}")

    # What an operator does during it.

    def in_hand(self, chosen: frozenset[TopicPartition] | None) -> list[InHand]:
        """What members still hold, or did not hand in in time."""
        with self.session.locked():
            return self._members.in_hand(chosen)

    def signs_of_life(self) -> dict[str, str]:
        """client_id → its first record during the pause."""
        with self.session.locked():
            return dict(self._members.signs_of_life)

    def wait_released(self, timeout: float, chosen: frozenset[TopicPartition] | None, handed_in: bool) -> list[InHand]:
        """Wait until no other client holds a lease of the group, or only stale ones."""
        session, members = self.session, self._members
        self.hold.check()
        busy = members.held if handed_in else members.at_work
        released = self.hold.wait(
            lambda: not busy(chosen), timeout, lambda: members.tick_times(members.at_work(chosen))
        )
        with session.locked():
            left = members.in_hand(chosen)
            keys = {(info.topic, info.partition) for info in busy(chosen)}
        if not released:
            named = "; ".join(str(x) for x in left if x.key in keys)
            raise AdminError(
                f"after {timeout:g} s members of {self.group_id!r} have not let go: {named}. Nothing was moved. Wait "
                "for longer, see that they finish, or end a dead one's lease with kafka-marshal evict",
                in_hand=sorted(key for key in keys if key[0]),
            )
        self.hold.check()
        return left

    def reposition(
        self,
        positions: Mapping[TopicPartition, Target],
        dry_run: bool,
        force: bool,
        keeps: Mapping[TopicPartition, Keep],
        is_undo: bool = False,
    ) -> list[Move]:
        """Move the group's positions. is_undo: work that can't stay done is repeated."""
        check_targets(positions)
        session = self.session
        with session.locked():
            at = {key: stands_at(session.progress(key)) for key in positions}
            is_coordinated = session.kind() == "coordinated"
        targets = resolve(session.cluster, positions, at.__getitem__, force=force)
        if is_coordinated and not is_undo:
            with session.locked():
                refuse_kept(self.group_id, moves_to(targets, session.progress, keeps=keeps))
        if is_coordinated:
            keeps = {}
        if dry_run or not targets:
            with session.locked():
                return moves_to(targets, session.progress, keeps=keeps)
        with session.locked():
            some_open = {key: found for key in targets if (found := session.progress(key)) is not None and found.open}
        lost = lost_positions(session.cluster, some_open, some_open.get)
        self.ready(frozenset(targets))
        if not is_coordinated:
            return move_all(self.hold, session, targets, keeps, lost)
        if lost:  # what was set aside was of another topic: none of it stays
            set_positions(session, dict.fromkeys(lost, 0))
        return set_positions(session, targets)

    def forget(self) -> int:
        """Drop the group and the pause in every CP; returns the number of its partitions."""
        session = self.session
        self.ready()
        with session.locked():
            count = len({(info.topic, info.partition) for info in session.infos()})
        # Home first (G2): a coordinated group at work is then not forgotten anywhere.
        answers = session.ask((session.home, ForgetGroup(*session.ids)))
        if answers[0].accepted:
            others = [cp for cp in session.cps if cp != session.home]
            answers += session.ask(*((cp, ForgetGroup(*session.ids)) for cp in others))
        missing = [x.cp for x in answers if not x.accepted]
        if missing and not answers[0].accepted:
            code = "no answer in time" if answers[0].outcome is None else answers[0].outcome.code
            raise AdminError(
                f"group {self.group_id!r} was not forgotten: partition {session.home} of the coordination topic, which "
                f"is asked first, says {code}. Do it again"
            )
        if missing:
            silent = [x.cp for x in answers if x.outcome is None]
            raise AdminError(
                f"group {self.group_id!r} was forgotten in partition(s) {[x.cp for x in answers if x.accepted]} of the "
                f"coordination topic, but not in {missing}"
                + (f", of which {silent} did not answer in time" if silent else "")
                + ". Do it again to finish it"
            )
        return count

    def ready(self, chosen: frozenset[TopicPartition] | None = None) -> None:
        """Raise AdminError unless the pause is in force for long enough, and no member works on these partitions."""
        session = self.session
        self.hold.check()
        with session.locked():
            busy = {(info.topic, info.partition) for info in self._members.at_work(chosen)}
            named = "; ".join(str(x) for x in self._members.in_hand(chosen) if x.key in busy)
        if busy:
            raise AdminError(
                f"members of {self.group_id!r} are still at work: {named}. Nothing was changed. Wait for them first "
                "(wait_released; kafka-marshal release-group --wait)",
                in_hand=sorted(key for key in busy if key[0]),
            )
        self.hold.extend_if_short()

    def leave(self) -> int:
        """End our part, and let the pause run for its whole length; the log time (ms) at which it ends."""
        until = self.hold.extend()
        self.is_over = True
        self.session.close_soon()
        return until
