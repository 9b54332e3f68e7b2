"""A partition of a coordinated group that is ours: see :class:`~kafka_marshal.engine.plane.Ownership`."""

from __future__ import annotations

from dataclasses import dataclass

from kafka_marshal.engine.effects import Key
from kafka_marshal.engine.plane import Owner

__all__ = ["HeldPiece", "LettingGo"]


@dataclass(slots=True)
class LettingGo:
    """A letting-go under way; why it is, for what to do next."""

    last_offset: int | None
    why: str
    sent_at: float


class HeldPiece:
    """One partition that the log shows as ours, all of its keys. Its proof is the member's: one beat keeps all (T4)."""

    __slots__ = (
        "cp",
        "epoch",
        "hand_out_until",
        "hand_out_until_s",
        "heartbeat_interval_ms",
        "held",
        "key",
        "letting_go",
        "owner",
        "proven_until",
        "stopped",
        "valid_until",
    )

    def __init__(self, key: Key, cp: int, epoch: int, session_timeout_ms: int, owner: Owner) -> None:
        self.key = key
        self.cp = cp
        #: The generation since which it is ours, of its newest part (G5).
        self.epoch = epoch
        #: As a lease's: two of them, and it is over.
        self.heartbeat_interval_ms = session_timeout_ms // 2
        self.owner = owner
        self.held = True
        self.stopped = False
        #: Our own clock's time until which the member is proven (T4); 0: it is not, or in doubt.
        self.valid_until = 0.0
        self.hand_out_until = 0.0
        self.hand_out_until_s = 0.0
        self.proven_until = 0.0
        self.letting_go: LettingGo | None = None

    def is_ending(self, now: float) -> bool:
        """Whether nothing more is handed out: it is over, being let go, or in doubt."""
        return now >= self.hand_out_until

    def may_hand_over(self, now: float) -> bool:
        """Whether what was taken earlier, and granted (G22), may go out: not when it may be over (T4)."""
        return now < self.valid_until

    def stop(self) -> None:
        """Nothing more is handed out: it is being let go."""
        self.stopped = True
        self.prove(self.valid_until)

    def end(self) -> None:
        """It is over."""
        self.held = False
        self.prove(0.0)

    def prove(self, until: float) -> None:
        """The member is proven until then (own clock, ms); 0: it is not."""
        self.valid_until = until
        self.proven_until = until if self.held and self.letting_go is None else 0.0
        self.hand_out_until = 0.0 if self.stopped else self.proven_until
        self.hand_out_until_s = self.hand_out_until / 1000.0
