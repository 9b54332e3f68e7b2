"""What a member waits for from the log: meanwhile its reader reads at once, otherwise in steps.

Nothing depends on it but speed: a reason that is missing here costs one step. What a call of a program or of an admin
waits for, and records that were appended and not read yet, the node knows by itself (``node/pacing``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum
from typing import TYPE_CHECKING

from kafka_marshal.engine.claims.leases import LeaseState

if TYPE_CHECKING:
    from kafka_marshal.engine.engine import Engine
    from kafka_marshal.engine.groups.client import GroupClient


class Awaited(StrEnum):
    """What a member waits for."""

    JOIN = "to become a member of its group again, or for the first time"
    CLAIM = "the answer to a claim"
    PIECE = "a piece that is assigned to it, and that another member still has"
    RELEASE = "a partition that it releases: the reason may end, and the log has to show the release"
    CHECKPOINT = "the end of a barrier, or of a restore"
    PAUSE = "the end of the group's pause"
    BATCH = "a batch that it has asked for"


def _working(engine: Engine) -> Iterator[GroupClient]:
    return (client for client in engine.groups.values() if client.failure is None)


def _join(engine: Engine, now: float) -> bool:
    return any(client.wants_in for client in _working(engine))


def _claim(engine: Engine, now: float) -> bool:
    if any(lease.state is LeaseState.WANTED for lease in engine.book.leases.values()):
        return True
    return bool(engine.book.unseen)


def _piece(engine: Engine, now: float) -> bool:
    return any(client.holdings.awaits_pieces for client in _working(engine))


def _release(engine: Engine, now: float) -> bool:
    if any(lease.state is LeaseState.RELEASING for lease in engine.book.leases.values()):
        return True
    consumers = engine.consumers.values()
    return any(part.releasing and not part.over for consumer in consumers for part in consumer.assignments.values())


def _checkpoint(engine: Engine, now: float) -> bool:
    shown = [client.checkpoints for client in _working(engine)]
    return any(each is not None and each.is_on and not each.is_idle for each in shown)


def _pause(engine: Engine, now: float) -> bool:
    return any(engine.peers.paused_until(cp, now) is not None for cp in engine.worlds)


def _batch(engine: Engine, now: float) -> bool:
    return any(consumer.schedule.awaits_batch for consumer in engine.consumers.values())


#: By what is awaited: whether it is.
AWAITED: Mapping[Awaited, Callable[[Engine, float], bool]] = {
    Awaited.JOIN: _join,
    Awaited.CLAIM: _claim,
    Awaited.PIECE: _piece,
    Awaited.RELEASE: _release,
    Awaited.CHECKPOINT: _checkpoint,
    Awaited.PAUSE: _pause,
    Awaited.BATCH: _batch,
}


def awaited(engine: Engine, now: float) -> Awaited | None:
    """What the member waits for; None: nothing. Read only, with the lock held."""
    if engine.failure is not None:
        return None
    return next((what for what, is_awaited in AWAITED.items() if is_awaited(engine, now)), None)
