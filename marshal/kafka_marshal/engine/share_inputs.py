"""The inputs for one consumer that shares its partitions by batches; their first field is its number."""

from __future__ import annotations

from typing import NamedTuple

from kafka_marshal.engine.work.assignment import Run


class WantBatches(NamedTuple):
    """The program asks for batches of at most max_messages; each is read for fill_ms at most."""

    consumer: int
    max_messages: int
    fill_ms: float


class GiveBackRun(NamedTuple):
    """The program gives back what it has not done of a batch: others may have it."""

    consumer: int
    run: Run


class ParkMessage(NamedTuple):
    """The program sets a message of a batch aside."""

    consumer: int
    run: Run
    offset: int
    key_hash: int
    reason: str
