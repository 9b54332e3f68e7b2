"""A pause at work, on threads of ours: what a Pause has carried out (C10, C11, C16)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

from kafka_marshal.admin.coordinated import refuse_kept, set_positions
from kafka_marshal.admin.hold import PauseKeeper
from kafka_marshal.admin.members import InHand, Members
from kafka_marshal.admin.moving import move_all
from kafka_marshal.admin.positions import Keep, Move, Target, check_targets, moves_to, resolve, stands_at
from kafka_marshal.admin.session import CallerGoneError, Session, bare_release, key_of
from kafka_marshal.errors import AdminError, ConfigurationError, GroupPausedError, MarshalError
from kafka_marshal.node.serving import EndedError
from kafka_marshal.ports import TopicPartition
from rationalizer import ForgetGroup

__all__ = ["OVER", "PauseWork"]

T = TypeVar("T")

OVER = "this Pause is not in force: it was not begun, or it is over. Nothing was changed. Use it in a with block"


def _never() -> bool:
    return False


class PauseWork:
    """A session that has the group paused. One job at a time, each on a thread of ours; see ``carry_out``."""

    def __init__(self, session: Session, length_ms: int) -> None:
        self.session = session
        self.group_id: str = session.group_id
        self.client_id: str = session.client_id
        self.hold: PauseKeeper = PauseKeeper(session, length_ms)
        self._members = Members(session, self.hold)
        session.on_applied = self._members.applied
        self._one_at_a_time = session.cluster.runtime.lock()
        #: Set by any thread: what is under way gives up, for the group is to go on.
        self.is_ending: bool = False
        #: The pause is not in force: it was not begun, or is over.
        self.is_over: bool = False
        #: What went wrong as it ended, and with calls whose callers were gone, for people.
        self.problem: str = ""
        self._unheard: list[str] = []

    def carry_out(self, is_gone: Callable[[], bool], what: str, function: Callable[..., T], args: tuple[Any, ...]) -> T:
        """Do one thing, after what is under way; that gives up where nobody waits for it any more."""
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
                raise AdminError(f"{what}: another thread has let the group go on meanwhile") from gone
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
        """Have whatever waits look whether anybody still waits for it."""
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
        """Let the group go on, and have the session closed; what went wrong, for people. A second call does nothing."""
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
        """Have it ended, from any thread, without waiting."""
        self.session.driver.post(self.end)

    def finish(self) -> str:
        """What ``end`` says (*blocking*); a user's thread."""
        driver = self.session.driver
        self.is_ending = True
        if not driver.is_over:
            with suppress(EndedError):  # another thread has ended it
                driver.servants.ask(lambda _: self.end()).wait()
        self.session.await_closed()
        return self.problem

    def _free_predecessors(self, session: Session) -> None:
        """Release what an earlier, dead run of this client_id still holds, with no offset: nobody need wait for it."""
        with session.locked():
            held = [x for x in session.leases() if x.held and x.client_id == self.client_id]
            records = [(session.cp_of(key_of(x)), bare_release(x)) for x in held]
        if any(x.outcome is None for x in session.ask(*records)):
            raise AdminError("what an earlier run of this client_id still holds could not be released in time")

    def _abandon(self, error: BaseException) -> AdminError | None:
        """Beginning failed: let everybody go on, and say how that went; None: the error itself says it all."""
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
        """client_id → the first record it sent during the pause."""
        with self.session.locked():
            return dict(self._members.signs_of_life)

    def wait_released(
        self, timeout: float, partitions: Iterable[TopicPartition] | None, handed_in: bool
    ) -> list[InHand]:
        """Wait until nobody else holds a lease of the group, or only stale ones."""
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
        """Put the group's positions elsewhere (C11). is_undo: what can't be kept done comes again."""
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
        self.ready(frozenset(targets))
        return set_positions(session, targets) if is_coordinated else move_all(self, session, targets, keeps)

    def forget(self) -> int:
        """Drop what is known of the group, and the pause with it, in every CP (C16); how many partitions it had."""
        session = self.session
        self.ready()
        with session.locked():
            count = len({(info.topic, info.partition) for info in session.infos()})
        # Home first (G2): where a coordinated group is found at work, it is not forgotten anywhere.
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
        """Raise AdminError unless the pause is in force, long enough, and nobody is at work on these partitions."""
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
        """Raise AdminError unless the pause is in force in every CP, and nobody works under our client_id."""
        session = self.session
        self.hold.check()
        with session.locked():
            self._members.check()

    def extend_if_short(self) -> None:
        """Have at least half of the pause's length left (*blocking*)."""
        self.hold.extend_if_short()

    def wait(self, met: Callable[[], object], timeout_s: float) -> bool:
        """Wait until met(), asked under the lock, at most timeout_s; the pause is extended meanwhile (*blocking*)."""
        return self.hold.wait(met, timeout_s)


def _chosen(partitions: Iterable[TopicPartition] | None) -> frozenset[TopicPartition] | None:
    return None if partitions is None else frozenset((topic, partition) for topic, partition in partitions)
