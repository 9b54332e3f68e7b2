"""The work of a Pause, on threads of the library (C10, C11, C16)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from shlex import quote
from typing import Any, TypeVar

from kafka_marshal.admin.coordinated import refuse_kept, set_positions
from kafka_marshal.admin.members import InHand, Members
from kafka_marshal.admin.positions import Keep, Move, check_targets, lost_positions, moves_to, resolve, stands_at
from kafka_marshal.admin.repositioning import move_all
from kafka_marshal.admin.session import Asked, CallerGoneError, Session, bare_release, key_of
from kafka_marshal.errors import AdminError, ConfigurationError, GroupPausedError, MarshalError
from kafka_marshal.node.serving import EndedError
from kafka_marshal.ports import TopicPartition
from kafka_marshal.types import Target
from rationalizer import ForgetGroup, Record, ReleaseGroup
from rationalizer import Pause as PauseInForce
from rationalizer.limits import MAX_TIME_MS

T = TypeVar("T")

OVER = "this Pause is not in force: it was not begun, or it is over. Nothing was changed. Use it in a with block"


def _never() -> bool:
    return False


class PauseWork:
    """A session that has paused the group. One job at a time, each on its own thread; see ``carry_out``."""

    def __init__(self, session: Session, length_ms: int) -> None:
        self.session = session
        self.group_id: str = session.group_id
        self.client_id: str = session.client_id
        self.hold: PauseKeeper = PauseKeeper(session, length_ms)
        self._members = Members(session, self.hold.is_ours)
        session.on_applied = self._members.applied
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
                session.is_gone = _never
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

    def in_hand(self, partitions: Iterable[TopicPartition] | None) -> list[InHand]:
        """What members still hold, or released too late."""
        with self.session.locked():
            return self._members.in_hand(_chosen(partitions))

    def signs_of_life(self) -> dict[str, str]:
        """client_id → its first record during the pause."""
        with self.session.locked():
            return dict(self._members.signs_of_life)

    def wait_released(
        self, timeout: float, partitions: Iterable[TopicPartition] | None, handed_in: bool
    ) -> list[InHand]:
        """Wait until no other client holds a lease of the group, or only stale ones."""
        session, members, chosen = self.session, self._members, _chosen(partitions)
        self.check()
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
            return move_all(self, session, targets, keeps, lost)
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
        self.check()
        with session.locked():
            busy = {(info.topic, info.partition) for info in self._members.at_work(chosen)}
            named = "; ".join(str(x) for x in self._members.in_hand(chosen) if x.key in busy)
        if busy:
            raise AdminError(
                f"members of {self.group_id!r} are still at work: {named}. Nothing was changed. Wait for them first "
                "(wait_released; kafka-marshal release-group --wait)",
                in_hand=sorted(key for key in busy if key[0]),
            )
        self.extend_if_short()

    # What moving needs of it.

    def check(self) -> None:
        """Raise AdminError unless the pause is in force in every CP, and no other process works under our client_id."""
        session = self.session
        self.hold.check()
        with session.locked():
            self._members.check()

    def extend_if_short(self) -> None:
        """Extend the pause if less than half of it is left (*blocking*)."""
        self.hold.extend_if_short()

    def leave(self) -> int:
        """End our part, and let the pause run for its whole length; the log time (ms) at which it ends."""
        until = self.hold.extend()
        self.is_over = True
        self.session.close_soon()
        return until

    def wait(self, met: Callable[[], object], timeout_s: float) -> bool:
        """Wait until met(), asked under the lock, at most timeout_s; the pause is extended meanwhile (*blocking*)."""
        return self.hold.wait(met, timeout_s)


def _chosen(partitions: Iterable[TopicPartition] | None) -> frozenset[TopicPartition] | None:
    return None if partitions is None else frozenset((topic, partition) for topic, partition in partitions)


#: The least time between two Ticks while log time is awaited (T3).
TICK_AGAIN_MS = 100.0


@dataclass(frozen=True, slots=True)
class _Term:
    """The pause in one CP, as our own replica shows it."""

    #: Log time (ms) at which it ends.
    expires: int
    #: Own clock (ms) until which it is certainly in force, unless a broker's clock is set.
    until: float


class PauseKeeper:
    """Keeps the group of a session paused. All methods but ``seconds_left`` may block."""

    def __init__(self, session: Session, length_ms: int) -> None:
        self._session = session
        self._length_ms = length_ms
        self._terms: dict[int, _Term] = {}
        #: CPs that may be paused by one of our records, applied or not.
        self._touched: set[int] = set()
        self._last_ticks = 0.0

    @property
    def seconds_left(self) -> float:
        """How long the pause lasts without an extension, by our clock (s)."""
        until = min((term.until for term in list(self._terms.values())), default=0.0)  # any thread may ask
        return max(0.0, until - self._session.now_ms()) / 1000

    @property
    def _extend_at(self) -> float:
        return min((term.until for term in self._terms.values()), default=float("inf")) - self._length_ms / 2

    def begin(self) -> None:
        """Pause every CP. Raises GroupPausedError if another client has, AdminError if the log is silent."""
        session = self._session
        session.tick(session.cps)
        with session.locked():
            self._refuse_others([session.worlds[cp].pause(session.group_id) for cp in session.cps])
        # CP 0 first and alone: one of two admins is refused there, before it has paused another CP.
        first, *others = session.cps
        self._pause([first])
        self._pause(others)

    def extend_if_short(self) -> None:
        """Extend the pause if less than half of it is left. Raises AdminError if it had expired before."""
        if self._session.now_ms() >= self._extend_at:
            self._pause(self._session.cps)

    def extend(self) -> int:
        """Extend the pause to its whole length from now on; the log time (ms) at which the last CP's ends."""
        self._pause(self._session.cps)
        return max(term.expires for term in self._terms.values())

    def forget(self, cp: int) -> bool:
        """Let the CP forget the group, and pause it again; whether it was accepted.

        A ForgetGroup ends the pause; the next one follows at once, so that no member gets in between.
        """
        session = self._session
        stamp = session.tick([cp])[cp]
        self._touched.add(cp)
        again = ReleaseGroup(*session.ids, min(MAX_TIME_MS, stamp + self._length_ms))
        forgotten, paused = session.ask((cp, ForgetGroup(*session.ids)), (cp, again))
        return forgotten.accepted and self._take_in(paused)

    def _pause(self, cps: Sequence[int]) -> None:
        """Pause these CPs, or replace the expiry there, counted from the timestamp of a new Tick (C11)."""
        session = self._session
        stamps = session.tick(cps)
        self._touched.update(cps)
        records: list[tuple[int, Record]] = [
            (cp, ReleaseGroup(*session.ids, min(MAX_TIME_MS, stamps[cp] + self._length_ms))) for cp in cps
        ]
        answers = session.ask(*records)
        self._refuse_others([x.pause for x in answers if x.outcome is not None and not x.accepted])
        silent = [x.cp for x in answers if x.outcome is None]
        if silent:
            raise AdminError(f"partition(s) {silent} of the coordination topic did not show the pause in time")
        lapsed = [x.cp for x in answers if not self._take_in(x)]
        if lapsed:
            raise AdminError(
                f"the pause of {session.group_id!r} ran out in partition(s) {lapsed} of the coordination topic before "
                "it was seen, or extended: members may have been at work meanwhile. Pause again, for longer"
            )

    def _take_in(self, asked: Asked) -> bool:
        """Whether an answer shows the CP paused by us, with time left, and without a break since the last time."""
        outcome, pause = asked.outcome, asked.pause
        before = self._terms.get(asked.cp)
        if outcome is None or pause is None or pause.client_id != self._session.client_id:
            return False
        if before is not None and outcome.log_time >= before.expires:
            return False
        self._terms[asked.cp] = _Term(pause.expires, asked.sent_at + (pause.expires - outcome.log_time))
        return True

    def _refuse_others(self, pauses: Iterable[PauseInForce | None]) -> None:
        group_id = self._session.group_id
        for pause in pauses:
            if pause is not None and pause.client_id != self._session.client_id:
                raise GroupPausedError(
                    f"group {group_id!r} is paused by {pause.client_id!r} until {_clock(pause.expires)}. Nothing was "
                    "changed. Let that admin finish; a dead one's pause ends by itself then, or now with "
                    f"kafka-marshal release-group {quote(group_id)} --resume",
                    client_id=pause.client_id,
                    expires=pause.expires,
                )

    def is_ours(self, cp: int) -> bool:
        """Whether the log shows the CP paused by our client_id at this moment; the lock is held."""
        pause = self._session.worlds[cp].pause(self._session.group_id)
        return pause is not None and pause.client_id == self._session.client_id

    def check(self) -> None:
        """Raise AdminError unless the pause is in force in every CP, by the log and by our own clock."""
        now = self._session.now_ms()
        with self._session.locked():
            over = [
                cp
                for cp in self._session.cps
                if cp not in self._terms or now >= self._terms[cp].until or not self.is_ours(cp)
            ]
        if over:
            raise AdminError(
                f"the pause of {self._session.group_id!r} has run out, or was ended, in partition(s) {over} of the "
                "coordination topic: members may be at work again. Nothing more was changed. Pause again, for longer"
            )

    def wait(self, met: Callable[[], object], timeout_s: float, ticks: Callable[[], dict[int, float]] = dict) -> bool:
        """Wait until met() is true, under the lock, at most timeout_s; whether it became true.

        Meanwhile the pause is extended when time runs short. ticks(): CP → time (our clock, ms) at which a Tick is
        appended there, so that silent leases go stale.
        """
        deadline = self._session.now_ms() + timeout_s * 1000
        while True:
            with self._session.locked():
                due = ticks()
            tick_at = max(min(due.values(), default=float("inf")), self._last_ticks + TICK_AGAIN_MS)
            if self._session.wait_for(met, min(deadline, self._extend_at, tick_at)):
                return True
            now = self._session.now_ms()
            if now >= deadline:
                return False
            self.extend_if_short()
            if now >= tick_at:
                self._session.tick(sorted(cp for cp, at in due.items() if at <= now))
                self._last_ticks = self._session.now_ms()

    def end(self) -> str:
        """End the pause in every CP; what went wrong, in words, "" for nothing."""
        session = self._session
        cps = sorted(self._touched)
        try:
            answers = session.ask(*((cp, ReleaseGroup(*session.ids, 0)) for cp in cps))
        except MarshalError as error:
            reason, left = str(error), cps
        else:
            # A rejected one needs nothing: another client's pause is there, so ours had ended before.
            reason, left = "no answer in time", [x.cp for x in answers if x.outcome is None]
        if not left:
            return ""
        return (
            f"The pause of {session.group_id!r} by {session.client_id!r} may still be in force in partition(s) {left} "
            f"of the coordination topic ({reason}). It ends by itself within {self._length_ms / 1000:g} s; or end it "
            f"now: kafka-marshal release-group {quote(session.group_id)} --resume --client-id "
            f"{quote(session.client_id)}"
        )


def _clock(time_ms: int) -> str:
    """Log time in local time with its offset; the number itself outside of the calendar."""
    try:
        return (
            f"{(datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=time_ms)).astimezone():%Y-%m-%d %H:%M:%S%z}"
        )
    except (OverflowError, ValueError):
        return f"log time {time_ms}"
