"""A partition of a coordinated group that is ours: see :class:`~kafka_marshal.engine.plane.Ownership`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from kafka_marshal.engine.plane import Owner
from kafka_marshal.engine.readings import reading
from kafka_marshal.ports import Message
from kafka_marshal.types import Key
from rationalizer import Group, Progress, key_hash
from rationalizer.limits import MAX_INTERVALS, MAX_KEY_HASH, NOTHING_DONE

__all__ = ["NOT_OURS", "REVOKED", "HeldPiece", "KeyShare", "LettingGo"]

#: Why a partition is let go when it is meant for another member.
REVOKED = "it is assigned to another member"

#: Why a partition is lost when the log shows it as ours no longer, for people.
NOT_OURS = "the log shows it as another member's, or this process as no member"


@dataclass(slots=True)
class LettingGo:
    """A letting-go under way; why it is, for what to do next."""

    last_offset: int | None
    why: str
    sent_at: float


class KeyShare:
    """Keys of a partition that was shared: which messages are ours, and not done by an earlier owner (K4, K5)."""

    def __init__(self, lo: int, hi: int, progress: Callable[[], Progress | None]) -> None:
        self.lo = lo
        self.hi = hi
        self._progress = progress

    @property
    def is_part(self) -> bool:
        """Whether others have other keys."""
        return (self.lo, self.hi) != (0, MAX_KEY_HASH)

    def wants(self, message: Message) -> bool:
        """Whether a message is of these keys, and not done."""
        offset = message.offset()
        assert offset is not None
        key = self._hash_of(message, offset)
        if not self.lo <= key <= self.hi:
            return False
        progress = self._progress()
        return progress is None or not progress.is_done(offset, key)

    @reading
    def _hash_of(self, message: Message, offset: int) -> int:
        """Where a message lies in the key space: of its key a recording keeps this alone."""
        name = message.key()
        return key_hash(name.encode() if isinstance(name, str) else name, offset)

    def stable(self) -> int:
        """Everything up to this offset is done, for all of these keys."""
        progress = self._progress()
        if progress is None:
            return NOTHING_DONE
        return min(done for lo, hi, done in progress.done_through if lo <= self.hi and self.lo <= hi)


class HeldPiece:
    """One partition, or its keys, that the log shows as ours. Its proof is the member's: one beat keeps all (T4)."""

    #: The log grants pieces without a claim.
    claim_expires = inf

    __slots__ = (
        "cp",
        "epoch",
        "hand_out_until",
        "hand_out_until_s",
        "heartbeat_interval_ms",
        "held",
        "key",
        "keys",
        "letting_go",
        "most_intervals",
        "owner",
        "proven_until",
        "stopped",
        "valid_until",
    )

    def __init__(
        self,
        key: Key,
        cp: int,
        epoch: int,
        session_timeout_ms: int,
        owner: Owner,
        keys: KeyShare | None = None,
        group: Group | None = None,
    ) -> None:
        self.key: Key = key
        self.cp: int = cp
        #: Which keys; None: all of them, and none has more done than others.
        self.keys: KeyShare | None = keys
        #: The generation since which it is ours, of its newest part (G5).
        self.epoch: int = epoch
        #: As a lease's: two of them, and it is over.
        self.heartbeat_interval_ms: int = session_timeout_ms // 2
        self.owner: Owner = owner
        #: What the log keeps beyond a gap (P5), as the group's settings were when it was taken up.
        self.most_intervals: int = MAX_INTERVALS if group is None else group.settings.max_individual_commits
        self.held: bool = True
        self.stopped: bool = False
        #: Our own clock's time until which the member is proven (T4); 0: it is not, or in doubt.
        self.valid_until: float = 0.0
        self.hand_out_until: float = 0.0
        self.hand_out_until_s: float = 0.0
        self.proven_until: float = 0.0
        self.letting_go: LettingGo | None = None

    @property
    def span(self) -> tuple[int, int]:
        """The key hashes (lo, hi)."""
        return (0, MAX_KEY_HASH) if self.keys is None else (self.keys.lo, self.keys.hi)

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

    def resume(self) -> None:
        """It is not let go after all: messages are handed out again."""
        self.stopped = False
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
