"""A rollback that the program asks for (X8). Times: own clock, ms."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

from kafka_marshal.engine.effects import Outbox
from kafka_marshal.engine.groups.member import Membership
from kafka_marshal.errors import ConfigurationError
from rationalizer import Outcome, Rollback, codes


class GoingBack:
    """Appends a Rollback until the group has gone back, by this or by another one."""

    def __init__(self, member: Membership, outbox: Outbox, raise_error: Callable[[Exception], object]) -> None:
        self._member = member
        self._outbox = outbox
        self._raise = raise_error
        #: Where to; 0: the newest checkpoint; None: nowhere.
        self._to: int | None = None
        self._sent_at: float = -inf

    def ask(self, to: int | None, now: float) -> None:
        """All members go back to this checkpoint; None: to the newest."""
        self._to, self._sent_at = to or 0, -inf
        self.step(now)

    def step(self, now: float) -> None:
        """Send it, or send it again: a copy names a generation that is over, and undoes nothing."""
        if self._to is not None and now >= self._sent_at + self._member.interval_ms:
            self._sent_at = now
            ids = self._member.settings.ids
            self._outbox.append(self._member.home, Rollback(*ids, self._member.generation, self._to))

    def applied(self, outcome: Outcome, own: bool, now: float) -> None:
        """A Rollback was applied."""
        if self._to is None:
            return
        if outcome.accepted:
            self._to = None
        elif own and outcome.code == codes.UNKNOWN_CHECKPOINT:
            self._raise(
                ConfigurationError(
                    f"checkpoint {self._to} is not kept: it was retired, undone, or never complete. Nothing was "
                    "changed. consumer.checkpoints.kept lists those that are"
                )
            )
            self._to = None
        elif own:  # the group has moved on since
            self._sent_at = -inf

    def deadline(self) -> float:
        """When ``step`` is due (own clock, ms)."""
        return inf if self._to is None else max(0.0, self._sent_at + self._member.interval_ms)
