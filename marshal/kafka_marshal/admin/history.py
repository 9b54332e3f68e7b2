"""Was a client_id seen consuming in a group? Then it must not be used to pause: its beats would reposition (C11)."""

from __future__ import annotations

from kafka_marshal.adapters.interface import Cluster
from kafka_marshal.replica import Replica
from rationalizer import (
    BeatEntry,
    ClaimingMessages,
    ClaimingPartition,
    Heartbeat,
    HeartbeatBatch,
    Outcome,
    codes,
)

__all__ = ["find_consuming"]

START_TIMEOUT_S = 15.0


def find_consuming(cluster: Cluster, topic: str, group_id: str, client_id: str) -> str | None:
    """The first thing in the log that only a consumer of this client_id would do, for people; None: nothing is.

    Reads the whole log (*blocking*). What an earlier admin of this client_id did under its own pause is none.
    """
    replica = Replica(cluster, topic, START_TIMEOUT_S)
    found: list[str] = []

    def applied(cp: int, offset: int, outcome: Outcome) -> None:
        if found:
            return
        record = outcome.record
        if record is None or record.client_id != client_id or record.group_id != group_id:
            return
        pause = replica.worlds[cp].pause(group_id)
        if pause is not None and pause.client_id == client_id:
            return
        match record:
            case ClaimingPartition() if outcome.code != codes.PAUSED:
                found.append(f"claimed {record.topic} [{record.partition}] (offset {offset} of partition {cp})")
            case ClaimingMessages():
                found.append(f"claimed messages of {record.topic} [{record.partition}]")
            case Heartbeat() if outcome.accepted and _consumes(record):
                found.append(f"was at work on {record.topic} [{record.partition}]")
            case HeartbeatBatch() if any(map(_consumes, record.entries)):
                found.append(f"was at work on {record.entries[0].topic} [{record.entries[0].partition}]")
            case _:
                pass

    try:
        replica.catch_up(START_TIMEOUT_S, applied=applied)
    finally:
        replica.close()
    return found[0] if found else None


def _consumes(beat: Heartbeat | BeatEntry) -> bool:
    """An admin's beats carry an epoch and no offset, once its pause is over."""
    return beat.epoch is None or beat.last_offset is not None
