"""A pause in force in every CP: begun, extended without a break, watched, and ended (C10, C11)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from shlex import quote

from kafka_marshal.admin.session import Asked, Session
from kafka_marshal.errors import AdminError, GroupPausedError, MarshalError
from rationalizer import ForgetGroup, Record, ReleaseGroup
from rationalizer import Pause as PauseInForce
from rationalizer.limits import MAX_TIME_MS

__all__ = ["PauseKeeper"]

#: How soon after one Tick the next may follow, where log time is waited for (T3).
TICK_AGAIN_MS = 100.0


@dataclass(frozen=True, slots=True)
class _Term:
    """How long the pause lasts in one CP, as our own replica showed it."""

    #: Log time (ms) at which it ends.
    expires: int
    #: Own clock (ms) until which it is in force for certain, unless somebody sets a broker's clock.
    until: float


class PauseKeeper:
    """Keeps the group of a session paused. All methods but ``seconds_left`` may block."""

    def __init__(self, session: Session, length_ms: int) -> None:
        self._session = session
        self._length_ms = length_ms
        self._terms: dict[int, _Term] = {}
        #: CPs that may be paused by a record of ours, applied or not.
        self._touched: set[int] = set()
        self._last_ticks = 0.0

    @property
    def seconds_left(self) -> float:
        """How long the pause lasts if nobody extends it, by our own clock."""
        until = min((term.until for term in list(self._terms.values())), default=0.0)  # any thread may ask
        return max(0.0, until - self._session.now_ms()) / 1000

    @property
    def _extend_at(self) -> float:
        return min((term.until for term in self._terms.values()), default=float("inf")) - self._length_ms / 2

    def begin(self) -> None:
        """Pause every CP. Raises GroupPausedError where another client has, AdminError where the log is silent."""
        session = self._session
        session.tick(session.cps)
        with session.locked():
            self._refuse_others([session.worlds[cp].pause(session.group_id) for cp in session.cps])
        # CP 0 first and alone: of two admins at once one is refused there, before either has paused anything else.
        first, *others = session.cps
        self._pause([first])
        self._pause(others)

    def extend_if_short(self) -> None:
        """Have at least half of the pause's length left. Raises AdminError where it had run out before."""
        if self._session.now_ms() >= self._extend_at:
            self._pause(self._session.cps)

    def forget(self, cp: int) -> bool:
        """Have the CP forget the group, and go on to pause it: whether it was accepted (C16).

        A ForgetGroup ends the pause; the next one follows it at once, so that nobody comes in between.
        """
        session = self._session
        stamp = session.tick([cp])[cp]
        self._touched.add(cp)
        again = ReleaseGroup(*session.ids, min(MAX_TIME_MS, stamp + self._length_ms))
        forgotten, paused = session.ask((cp, ForgetGroup(*session.ids)), (cp, again))
        return forgotten.accepted and self._take_in(paused)

    def _pause(self, cps: Sequence[int]) -> None:
        """Pause these CPs, or replace the expiry there: counted from the stamp of a Tick just appended (C11)."""
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
        """Wait until met(), asked under the lock, at most timeout_s; whether it came true.

        Meanwhile the pause is extended where time runs short, and log time is moved in the CPs that ticks() names with
        our own clock's time (ms) for it, so that silent leases go stale (T3).
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
        """End the pause wherever it may be; what went wrong, for people, "" for nothing."""
        session = self._session
        cps = sorted(self._touched)
        try:
            answers = session.ask(*((cp, ReleaseGroup(*session.ids, 0)) for cp in cps))
        except MarshalError as error:
            reason, left = str(error), cps
        else:
            # A rejected one needs nothing: somebody else's pause stands there, so ours had ended before.
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
    """Log time for people, in local time with its offset; the bare number where no calendar reaches."""
    try:
        return (
            f"{(datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=time_ms)).astimezone():%Y-%m-%d %H:%M:%S%z}"
        )
    except (OverflowError, ValueError):
        return f"log time {time_ms}"
