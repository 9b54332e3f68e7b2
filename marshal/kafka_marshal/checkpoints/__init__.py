"""Checkpoints: the policy of a group, what its callbacks are given, and stores for the states of its pieces.

>>> states = Folder("/mnt/shared/delays")                                   # doctest: +SKIP
>>> def save(checkpoint: Checkpoint) -> None:                               # doctest: +SKIP
...     for piece in checkpoint.pieces:
...         states.save(checkpoint.id, piece, json.dumps(counts[piece.partition]).encode())
...     states.collect(checkpoint)
>>> def restore(restore: Restore) -> None:                                  # doctest: +SKIP
...     for piece in restore.pieces:
...         counts[piece.partition] = json.loads(states.load(piece) or b"{}")
"""

from typing import TYPE_CHECKING

from kafka_marshal.checkpoints.types import (
    Checkpoint,
    CheckpointPiece,
    CheckpointPolicy,
    Restore,
    RestorePiece,
    WhyRestored,
)
from rationalizer.later import later

if TYPE_CHECKING:
    from kafka_marshal.checkpoints.store import Bucket, Folder, SavedPart, Store

__all__ = [
    "Bucket",
    "Checkpoint",
    "CheckpointPiece",
    "CheckpointPolicy",
    "Folder",
    "Restore",
    "RestorePiece",
    "SavedPart",
    "Store",
    "WhyRestored",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = later(__name__, {"store": "Bucket Folder SavedPart Store"})
