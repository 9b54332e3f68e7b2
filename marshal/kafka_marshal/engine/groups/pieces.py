"""Our partition of a coordinated group: see :class:`~kafka_marshal.engine.plane.Ownership`."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from kafka_marshal.engine.key_share import KeyShare
from kafka_marshal.engine.plane import Owner
from kafka_marshal.types import Key
from rationalizer import Group, Piece
from rationalizer.limits import MAX_INTERVALS, MAX_KEY_HASH

#: Why a partition is released when it is assigned to another member.
REVOKED = "it is assigned to another member"

#: For people: why a partition is lost when the log no longer shows it as ours.
NOT_OURS = "the log shows it as another member's, or this process as no member"


@dataclass(slots=True)
class LettingGo:
    """A release in flight; ``why`` decides what to do next."""

    last_offset: int | None
    why: str
    sent_at: float


def part_of(piece: HeldPiece) -> tuple[int, int] | None:
    """The key hashes (lo, hi) of a piece; None: all."""
    return None if piece.keys is None or not piece.keys.is_part else piece.span


class HeldPiece:
    """One partition, or some of its keys, that the log shows as ours. One heartbeat of the member proves all (T4)."""

    #: The log grants pieces without a claim.
    claim_expires = inf

    __slots__ = (
        "cp",
        "epoch",
        "followed",
        "hand_out_until",
        "hand_out_until_s",
        "heartbeat_interval_ms",
        "cut_at",
        "held",
        "is_cut_whole",
        "is_held_up",
        "is_paused",
        "is_restored",
        "key",
        "keys",
        "letting_go",
        "most_intervals",
        "owner",
        "proven_by",
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
        #: Our keys; None: all of them, with the same progress.
        self.keys: KeyShare | None = keys
        #: The generation since which its newest part is ours (G5).
        self.epoch: int = epoch
        #: As for a lease: it is over after two of them.
        self.heartbeat_interval_ms: int = session_timeout_ms // 2
        self.owner: Owner = owner
        #: How many intervals the log keeps beyond a gap (P5), by the group's settings.
        self.most_intervals: int = MAX_INTERVALS if group is None else group.settings.max_individual_commits
        allows = group is None or group.settings.accept_individual_commit
        #: Whether its cut must have no gaps: a checkpoint can't name ranges of some keys, nor in a group without them.
        self.is_cut_whole: bool = (
            group is not None and group.checkpoints is not None and (not allows or (keys is not None and keys.is_part))
        )
        self.held: bool = True
        self.stopped: bool = False
        #: Our own clock (ms) until which the member is proven (T4); 0: not proven, or in doubt.
        self.valid_until: float = 0.0
        self.hand_out_until: float = 0.0
        self.hand_out_until_s: float = 0.0
        self.proven_until: float = 0.0
        #: The number of the newest of our records that proved the member.
        self.proven_by: int = 0
        self.letting_go: LettingGo | None = None
        #: Whether the program has its state (X17). In a group without checkpoints, there is none.
        self.is_restored: bool = True
        #: Whether a barrier holds it up: no more messages are delivered (X14).
        self.is_held_up: bool = False
        #: Whether the group is paused: then nothing begins, not even to close gaps (C10).
        self.is_paused: bool = False
        #: When (own clock, ms) it was restored, or cut last for a checkpoint that has it.
        self.cut_at: float = 0.0
        #: What the log showed of its partition, all keys in one, when that was followed last.
        self.followed: Piece | None = None

    @property
    def span(self) -> tuple[int, int]:
        """The key hashes (lo, hi), both included."""
        return (0, MAX_KEY_HASH) if self.keys is None else (self.keys.lo, self.keys.hi)

    def is_ending(self, now: float) -> bool:
        """Whether no more messages are delivered: the piece is over, being released, or in doubt."""
        return now >= self.hand_out_until

    def may_hand_over(self, now: float) -> bool:
        """Whether messages granted earlier (G22) may be delivered: not if the piece may be over (T4)."""
        return now < self.valid_until

    def stop(self) -> None:
        """Deliver no more messages: a release follows."""
        self.stopped = True
        self.prove(self.valid_until)

    def resume(self) -> None:
        """Deliver messages again: no release follows after all."""
        self.stopped = False
        self.prove(self.valid_until)

    def hold_up(self, is_held_up: bool) -> None:
        """Deliver no more messages until it is called again."""
        self.is_held_up = is_held_up
        self.prove(self.valid_until)

    def end(self) -> None:
        """End the piece."""
        self.held = False
        self.prove(0.0)

    def prove(self, until: float) -> None:
        """Set until when (own clock, ms) the member is proven; 0: it is not."""
        self.valid_until = until
        self.proven_until = until if self.held and self.letting_go is None else 0.0
        self.hand_out_until = 0.0 if self.stopped or self.is_held_up else self.proven_until
        self.hand_out_until_s = self.hand_out_until / 1000.0
