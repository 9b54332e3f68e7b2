"""A group paused, and what an operator does with it meanwhile (C10, C11, C16)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Self

from kafka_marshal.adapters.interface import TopicPartition
from kafka_marshal.admin.hold import Hold
from kafka_marshal.admin.members import InHand, Members
from kafka_marshal.admin.moving import move_all
from kafka_marshal.admin.positions import Move, Target, check_targets, moves_to, resolve, stands_at
from kafka_marshal.admin.session import Session, bare_release, key_of
from kafka_marshal.errors import AdminError, ConfigurationError, GroupPausedError, MarshalError
from kafka_marshal.one_process import OneProcess
from rationalizer import ForgetGroup

__all__ = ["Pause"]


class Pause(OneProcess):
    """A group paused by this admin. Made by :meth:`Admin.pause`; use it as a context manager, from one thread.

    Entering pauses the group in every CP; leaving the block, also by an exception, lets it go on. While its methods
    work the pause is extended as needed; between them it runs out ``expires_in`` seconds after it was last extended,
    so that a dead admin stops nobody for longer.
    """

    def __init__(self, open_session: Callable[[], Session], group_id: str, client_id: str, expires_in: float) -> None:
        self.group_id = group_id
        #: The pausing client (C10): whoever uses it too can carry on.
        self.client_id = client_id
        self._open_session = open_session
        self._length_ms = max(1, int(expires_in * 1000))
        self._used = False
        self._session: Session | None = None
        self._hold: Hold
        self._members: Members

    # Beginning and ending.

    def start(self) -> Self:
        """Pause the group in every CP (*blocking*); what ``with`` does on entering.

        Raises GroupPausedError where somebody else has it paused, AdminError where the log does not answer. In both
        cases what was paused already goes on again, or the message says what does not.
        """
        if self._used:
            raise ConfigurationError("a Pause can be used once. Nothing was changed; ask the Admin for another one")
        self._used = True
        session = self._open_session()
        self._hold = Hold(session, self._length_ms)
        self._members = Members(session, self._hold)
        session.on_applied = self._members.applied
        try:
            self._hold.begin()
            self._free_predecessors(session)
        except BaseException as error:
            replacement = self._abandon(session, error)
            if replacement is None:
                raise
            raise replacement from error
        self._session = session
        return self

    def resume(self) -> None:
        """Let the group go on (*blocking*); what ``with`` does on leaving. A second call does nothing."""
        session, self._session = self._session, None
        if session is None:
            return
        try:
            problem = self._hold.end()
        finally:
            session.close()
        if problem:
            raise AdminError(problem)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if error is None:
            self.resume()
            return
        try:
            self.resume()
        except MarshalError as second:
            error.add_note(str(second))

    def _free_predecessors(self, session: Session) -> None:
        """Release what an earlier, dead run of this client_id still holds, with no offset: nobody need wait for it."""
        with session.locked():
            held = [x for x in session.leases() if x.held and x.client_id == self.client_id]
            records = [(session.cp_of(key_of(x)), bare_release(x)) for x in held]
        if any(x.outcome is None for x in session.ask(*records)):
            raise AdminError("what an earlier run of this client_id still holds could not be released in time")

    def _abandon(self, session: Session, error: BaseException) -> AdminError | None:
        """Beginning failed: let everybody go on, and say how that went; None: the error itself says it all."""
        try:
            problem = self._hold.end()
        finally:
            session.close()
        if not isinstance(error, MarshalError):
            error.add_note(problem or f"Group {self.group_id!r} is not paused by this admin.")
            return None
        if isinstance(error, GroupPausedError) and not problem:
            return None
        ended = problem or "It is not paused by this admin anywhere; nothing was changed"
        return AdminError(f"group {self.group_id!r} could not be paused: {error}. {ended}")

    # What an operator does during it.

    @property
    def seconds_left(self) -> float:
        """How long the pause lasts if nobody extends it, by this process's clock; 0 when it is over."""
        return 0.0 if self._session is None else self._hold.seconds_left

    def in_hand(self, partitions: Iterable[TopicPartition] | None = None) -> list[InHand]:
        """What members still hold, or let go too late; of these partitions (None: of all), sorted."""
        with self._live().locked():
            return self._members.in_hand(_chosen(partitions))

    @property
    def signs_of_life(self) -> dict[str, str]:
        """client_id → the first record it sent during the pause (ReleasingPartition …): members that are alive."""
        with self._live().locked():
            return dict(self._members.signs_of_life)

    def wait_released(
        self,
        timeout: float = 30.0,
        partitions: Iterable[TopicPartition] | None = None,
        *,
        handed_in: bool = False,
    ) -> list[InHand]:
        """Wait until nobody else holds a lease of the group, or only stale ones (*blocking*).

        Members finish what they have in hand, and release with their offsets. Returns the partitions where somebody
        did not within 2·HI: what was in hand there is repeated by the next holder, what was handed in before is not.
        ``handed_in``: wait for those, too (a dead holder never does). ``partitions``: only these matter.
        Raises AdminError, with ``in_hand``, where after timeout seconds somebody is still at work, and where the pause
        had run out before. Nothing is changed.
        """
        session, members, chosen = self._live(), self._members, _chosen(partitions)
        self.check()
        busy = members.held if handed_in else members.at_work
        released = self._hold.wait(
            lambda: not busy(chosen), timeout, lambda: members.tick_times(members.at_work(chosen))
        )
        with session.locked():
            left = members.in_hand(chosen)
            keys = {key_of(lease) for lease in busy(chosen)}
        if not released:
            named = "; ".join(str(x) for x in left if x.key in keys)
            raise AdminError(
                f"after {timeout:g} s members of {self.group_id!r} have not let go: {named}. Nothing was moved. Wait "
                "for longer, see that they finish, or end a dead one's lease with kafka-marshal evict",
                in_hand=sorted(keys),
            )
        return left

    def reposition(
        self, positions: Mapping[TopicPartition, Target], *, dry_run: bool = False, force: bool = False
    ) -> list[Move]:
        """Put the group's positions elsewhere, back or forward (C11) (*blocking*); returns what was moved.

        ``positions``: (topic, partition) → the offset to be read next, ``"earliest"``, ``"latest"``, ``"readable"``
        (the first that can be read, from where the group stands: past a corrupt batch), or a datetime.
        ``dry_run``: say what would be moved, append nothing. ``force``: take offsets outside the log, too.
        Call ``wait_released`` first: raises AdminError where members still hold one of them, where the pause has run
        out, and for offsets outside the log; nothing is moved then. Only in the very last step can a failure leave some
        partitions moved (each as a whole); they are put back, or the error names them, and doing it again finishes it.
        """
        check_targets(positions)
        session = self._live()
        with session.locked():
            at = {key: stands_at(session.lease(key)) for key in positions}
        targets = resolve(session.cluster, positions, at.__getitem__, force=force)
        if dry_run or not targets:
            with session.locked():
                return moves_to(targets, session.lease)
        self._ready(frozenset(targets))
        return move_all(self, session, targets)

    def forget(self) -> int:
        """Drop the group's leases, and the pause with them, in every CP (C16) (*blocking*); how many leases there were.

        Only after ``wait_released``. Raises AdminError where it was not done everywhere.
        """
        session = self._live()
        self._ready(None)
        with session.locked():
            count = len(session.leases())
        answers = session.ask(*((cp, ForgetGroup(*session.ids)) for cp in session.cps))
        missing = [x.cp for x in answers if not x.accepted]
        if missing:
            silent = [x.cp for x in answers if x.outcome is None]
            raise AdminError(
                f"group {self.group_id!r} was forgotten in partition(s) {[x.cp for x in answers if x.accepted]} of the "
                f"coordination topic, but not in {missing}"
                + (f", of which {silent} did not answer in time" if silent else "")
                + ". Do it again to finish it (C16)"
            )
        return count

    def _ready(self, chosen: frozenset[TopicPartition] | None) -> None:
        """Raise AdminError unless the pause is in force, long enough, and nobody is at work on these partitions."""
        session = self._live()
        self.check()
        with session.locked():
            busy = {key_of(lease) for lease in self._members.at_work(chosen)}
            named = "; ".join(str(x) for x in self._members.in_hand(chosen) if x.key in busy)
        if busy:
            raise AdminError(
                f"members of {self.group_id!r} are still at work: {named}. Nothing was changed. Wait for them first "
                "(wait_released; kafka-marshal release-group --wait)",
                in_hand=sorted(busy),
            )
        self.extend_if_short()

    # What moving needs of it.

    def check(self) -> None:
        """Raise AdminError unless the pause is in force in every CP, and nobody works under our client_id."""
        session = self._live()
        self._hold.check()
        with session.locked():
            self._members.check()

    def extend_if_short(self) -> None:
        """Have at least half of the pause's length left (*blocking*)."""
        self._hold.extend_if_short()

    def wait(self, met: Callable[[], object], timeout_s: float) -> bool:
        """Wait until met(), asked under the lock, at most timeout_s; the pause is extended meanwhile (*blocking*)."""
        return self._hold.wait(met, timeout_s)

    def _live(self) -> Session:
        if self._session is None:
            raise ConfigurationError(
                "this Pause is not in force: it was not begun, or it is over. Nothing was changed. Use it in a with "
                "block"
            )
        return self._session


def _chosen(partitions: Iterable[TopicPartition] | None) -> frozenset[TopicPartition] | None:
    return None if partitions is None else frozenset((topic, partition) for topic, partition in partitions)
