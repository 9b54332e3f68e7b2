"""The inputs for one consumer of a group that takes checkpoints (X11 to X18); their first field is its number."""

from __future__ import annotations

from typing import NamedTuple

from kafka_marshal.engine.effects import SavedPiece


class StateReturned(NamedTuple):
    """on_checkpoint has returned for these pieces: they continue. error: it raised; they are left for later."""

    consumer: int
    barrier: int
    pieces: tuple[SavedPiece, ...]
    error: Exception | None = None


class StateSafe(NamedTuple):
    """The states of these pieces are safe: the answer may name them. error: they could not be saved."""

    consumer: int
    barrier: int
    pieces: tuple[SavedPiece, ...]
    error: Exception | None = None


class StateRestored(NamedTuple):
    """on_restore has returned, or raised. is_outdated: it raised since a saved state or a token is of before (X18)."""

    consumer: int
    attempt: int
    error: Exception | None = None
    is_outdated: bool = False


class TakeCheckpoint(NamedTuple):
    """Begin a checkpoint now; nothing more is delivered until the log has answered that (X14)."""

    consumer: int


class GoBack(NamedTuple):
    """All members go back to this checkpoint; None: to the newest (X8)."""

    consumer: int
    to: int | None = None
