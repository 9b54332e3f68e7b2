"""Our partition of a coordinated group."""

from __future__ import annotations

from dataclasses import dataclass

from kafka_marshal.engine.holding import Holding, Owner
from kafka_marshal.engine.key_share import KeyShare
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


class HeldPiece(Holding):
    """One partition, or some of its keys, that the log shows as ours. One heartbeat of the member proves all (T4)."""

    __slots__ = (
        "epoch",
        "followed",
        "cut_at",
        "held",
        "is_cut_whole",
        "is_held_up",
        "is_paused",
        "is_restored",
        "keys",
        "letting_go",
        "most_intervals",
        "proven_by",
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
        super().__init__(key, cp, session_timeout_ms // 2, owner)  # as for a lease: it is over after two of them
        self.keys: KeyShare | None = keys
        #: The generation since which its newest part is ours (G5).
        self.epoch: int = epoch
        self.most_intervals: int = MAX_INTERVALS if group is None else group.settings.max_individual_commits
        allows = group is None or group.settings.accept_individual_commit
        # A checkpoint can't name ranges of some keys, nor in a group without them.
        self.is_cut_whole: bool = (
            group is not None and group.checkpoints is not None and (not allows or (keys is not None and keys.is_part))
        )
        self.held: bool = True
        #: Our own clock (ms) until which the member is proven (T4); 0: not proven, or in doubt.
        self.valid_until: float = 0.0
        self.proven_by: int = 0
        self.letting_go: LettingGo | None = None
        self.is_restored: bool = True
        self.is_held_up: bool = False
        self.is_paused: bool = False
        #: When (own clock, ms) it was restored, or cut last for a checkpoint that has it.
        self.cut_at: float = 0.0
        #: What the log showed of its partition, all keys in one, when that was followed last.
        self.followed: Piece | None = None

    @property
    def span(self) -> tuple[int, int]:
        """The key hashes (lo, hi), both included."""
        return (0, MAX_KEY_HASH) if self.keys is None else (self.keys.lo, self.keys.hi)

    def may_hand_over(self, now: float) -> bool:
        return now < self.valid_until

    def hold_up(self, is_held_up: bool) -> None:
        """Deliver no more messages until it is called again."""
        self.is_held_up = is_held_up
        self.refresh()

    def end(self) -> None:
        """End the piece."""
        self.held = False
        self.prove(0.0)

    def prove(self, until: float) -> None:
        """Set until when (own clock, ms) the member is proven; 0: it is not."""
        self.valid_until = until
        self.refresh()

    def is_proven_until(self) -> float:
        return self.valid_until if self.held and self.letting_go is None else 0.0
