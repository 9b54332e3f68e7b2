"""What the engine wants done. The shell carries effects out in order and reports back with events.

An effect is data: the engine itself calls nothing. Offsets, partitions and times are as in docs/protocol.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from kafka_marshal.engine.inputs import given
from kafka_marshal.types import Key, Start
from rationalizer import Record
from rationalizer.limits import MAX_KEY_HASH


@dataclass(frozen=True, slots=True)
class Append:
    """Append a record to a CP; answer with ``Engine.acked(token, …)``."""

    cp: int
    record: Record
    token: int


@dataclass(frozen=True, slots=True)
class StartFetch:
    """Fetch a data partition from offset on (again, if it is fetched already)."""

    consumer: int
    key: Key
    offset: int


@dataclass(frozen=True, slots=True)
class StopFetch:
    """Stop fetching a data partition, and drop what was fetched."""

    consumer: int
    key: Key


@dataclass(frozen=True, slots=True)
class LookUp:
    """Ask the partition leader for log start, log end and (unless ``start`` is "earliest") the start offset.

    Answer with ``Engine.located(…)``.
    """

    consumer: int
    key: Key
    #: The holding that it is for: an answer that comes after its end is ignored.
    token: int
    start: Start
    #: CP → offset of a record there. If such a record is older than members need to see that a topic has grown, the
    #: partition was added later, and it starts at the earliest offset (P9).
    claims_before: Mapping[int, int] = field(default_factory=dict)


class TakeOverStep(StrEnum):
    """A step of taking over a partition that is processed in transactions (M2)."""

    #: Make the partition's producer: it fences its predecessor, and ends that one's transaction.
    OPEN = "open"
    #: Read Kafka's committed offset.
    READ = "read"
    #: Set Kafka's committed offset, by a transaction that has nothing else (M3).
    SET = "set"


@dataclass(frozen=True, slots=True)
class TakeOver:
    """Carry out a step of taking over; answer with ``TakeOvers.answered``, or ``failed``. Each may block."""

    consumer: int
    key: Key
    #: The holding that it is for, and its producer: an answer for an earlier one is ignored.
    token: int
    attempt: int
    step: TakeOverStep
    #: SET: the offset to be read next.
    offset: int = 0


@dataclass(frozen=True, slots=True)
class CloseProducer:
    """A holding is over: close its transactional producer. A commit in progress ends first, or is fenced."""

    consumer: int
    key: Key
    token: int


class Callback(StrEnum):
    """The callbacks that a user may pass to a consumer."""

    ASSIGN = "on_assign"
    REVOKE = "on_revoke"
    LOST = "on_lost"


class Piece(NamedTuple):
    """A partition during one holding of it."""

    key: Key
    #: The lease's epoch (C9).
    token: int
    #: The offset of the next message to deliver, at the time of the call.
    position: int
    #: The key hashes lo … hi (P7): all of them, unless the partition is shared by key.
    lo: int = 0
    hi: int = MAX_KEY_HASH


@dataclass(frozen=True, slots=True)
class Call:
    """Run a callback of the user; answer with ``Engine.called(…)`` when it has returned or raised."""

    consumer: int
    callback: Callback
    pieces: tuple[Piece, ...]


class SavedPiece(NamedTuple):
    """A piece of a group with checkpoints, at its cut: nothing of it is in flight."""

    key: Key
    #: Since when it is owned (G5): an answer for an earlier holding is ignored.
    token: int
    lo: int
    hi: int


@dataclass(frozen=True, slots=True)
class SaveState:
    """Have the program save the state of these pieces under the barrier's id (X13, X18).

    Answer with ``Checkpointing.returned`` when on_checkpoint has returned (or its coroutine has ended), then with
    ``safe`` when what it returned is done. If it raised, only with ``returned``.
    """

    consumer: int
    barrier: int
    pieces: tuple[SavedPiece, ...]
    #: The member leaves at this barrier.
    leaving: bool
    #: Partition → ids under which states are still needed.
    needed: Mapping[Key, frozenset[int]] = field(default_factory=dict)
    #: If one piece can't be saved, the checkpoint ends for all.
    is_hold: bool = False


class RestoredPiece(NamedTuple):
    """A piece of a group with checkpoints, and where it continues (X17)."""

    key: Key
    lo: int
    hi: int
    #: The fencing token: a ``SharedEpoch`` if the piece has several, or is a part of its partition.
    epoch: int
    #: The offset of the next message.
    position: int
    #: What is done beyond it, ascending.
    ranges: tuple[tuple[int, int], ...]
    #: (lo, hi, id) of each part: under which id its state was saved; 0: none was.
    states: tuple[tuple[int, int, int], ...]
    #: (lo, hi, offset) of each part: done up to there, as the checkpoint sees it; −1: nothing is.
    done_through: tuple[tuple[int, int, int], ...]
    #: Where the group began on the partition: the offset before its first; −1: at offset 0.
    initial: int
    #: (lo, hi, group) of each part whose state another group saved, from which this one was forked.
    groups: tuple[tuple[int, int, str], ...] = ()


@dataclass(frozen=True, slots=True)
class RestoreState:
    """Have the program take the state of these pieces from a checkpoint (X17); answer with ``restored``."""

    consumer: int
    #: Its number: an answer for an earlier one is ignored.
    attempt: int
    checkpoint: int
    #: "joined", "handed_over", "lost", "rollback", "positions" or "forked".
    why: str
    pieces: tuple[RestoredPiece, ...]
    #: Partition → the next offset, of all partitions of the group.
    positions: Mapping[Key, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CheckpointCompleted:
    """Notify the program: a checkpoint that this member took part in is complete."""

    consumer: int
    checkpoint: int


@dataclass(frozen=True, slots=True)
class Warn:
    """Warn people in the program's log: something was lost or skipped."""

    message: str
    is_error: bool = False


@dataclass(frozen=True, slots=True)
class Note:
    """Report in the program's log that a lease was gained or lost; many at once become one line."""

    #: ``"claimed"``, ``"released"`` or ``"lost"``.
    event: str
    key: Key
    #: Why it was lost.
    reason: str = ""
    #: Text for people instead of the event's name.
    words: str = ""
    #: Lost, in a group that takes checkpoints: others continue from its last cut.
    has_cuts: bool = False
    #: The key hashes (lo, hi) that it is about; None: all keys.
    keys: tuple[int, int] | None = None


Effect = (
    Append
    | StartFetch
    | StopFetch
    | LookUp
    | TakeOver
    | CloseProducer
    | Call
    | SaveState
    | RestoreState
    | CheckpointCompleted
    | Note
    | Warn
)


class Outbox:
    """Collects effects, and numbers the records to append."""

    def __init__(self) -> None:
        self.effects: list[Effect] = []
        self._next_token = 0

    @given
    def append(self, cp: int, record: Record) -> int:
        """Have a record appended; returns the token under which its acknowledgement comes back."""
        self._next_token += 1
        self.effects.append(Append(cp, record, self._next_token))
        return self._next_token

    def add(self, effect: Effect) -> None:
        """Have something done."""
        self.effects.append(effect)

    def take(self) -> list[Effect]:
        """The effects collected since the last call."""
        taken, self.effects = self.effects, []
        return taken
