"""Which CPs a member of a coordinated group needs: its home, and, before anybody has joined the group, all (G2)."""

from __future__ import annotations

from collections.abc import Mapping

from kafka_marshal.engine.settings import EngineSettings
from rationalizer import World

__all__ = ["is_blind"]


def is_blind(generation: int, worlds: Mapping[int, World], settings: EngineSettings) -> bool:
    """Whether a member may not join yet: it has to look into all CPs, and some are not read. generation: at home."""
    return generation == 0 and len(worlds) < settings.coordination_partitions
