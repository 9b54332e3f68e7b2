"""Checkpoints: the policy of a group, what its callbacks are given, and stores for states."""

from kafka_marshal.checkpoints.types import Checkpoint, CheckpointPiece, CheckpointPolicy, Restore, RestorePiece

__all__ = ["Checkpoint", "CheckpointPiece", "CheckpointPolicy", "Restore", "RestorePiece"]
