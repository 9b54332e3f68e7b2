"""Was a client_id seen consuming in a group? Then it must not be used to pause: its beats would reposition (C11)."""

from __future__ import annotations

from kafka_marshal.node.replica import Replica
from kafka_marshal.ports import Cluster
from rationalizer import (
    ClaimingMessages,
    ClaimingPartition,
    CommitOffsets,
    GroupHeartbeat,
    Heartbeat,
    HeartbeatBatch,
    JoinGroup,
    Outcome,
    ReleaseGroup,
)

__all__ = ["find_consuming"]


def find_consuming(cluster: Cluster, topic: str, group_id: str, client_id: str, timeout_s: float) -> str | None:
    """The first thing in the log that a consumer of this client_id did, for people; None: there is none.

    Reads the whole log (*blocking*). An admin is told from a consumer by what every one of its runs begins with: it
    pauses a CP before it claims anything there, which no consumer ever does.
    """
    replica = Replica(cluster, topic, timeout_s)
    admins: set[str] = set()
    found: list[str] = []

    def applied(cp: int, offset: int, outcome: Outcome) -> None:
        record = outcome.record
        if record is None or record.client_id != client_id or record.group_id != group_id or found:
            return
        if isinstance(record, ReleaseGroup):
            admins.add(record.instance_id)
        elif record.instance_id not in admins:
            where = f"(offset {offset} of partition {cp})"
            match record:
                case ClaimingPartition():
                    found.append(f"claimed {record.topic} [{record.partition}] {where}")
                case Heartbeat() | ClaimingMessages():
                    found.append(f"was at work on {record.topic} [{record.partition}] {where}")
                case JoinGroup():
                    found.append(f"joined it {where}")
                case GroupHeartbeat():
                    found.append(f"was a member of it {where}")
                case CommitOffsets() if record.member_id:
                    found.append(f"was at work on {record.entries[0].topic} [{record.entries[0].partition}] {where}")
                case HeartbeatBatch():
                    found.append(f"was at work on {record.entries[0].topic} [{record.entries[0].partition}] {where}")
                case _:
                    pass  # a release may have been sent in its name, by somebody else

    try:
        replica.catch_up(timeout_s, applied=applied)
    finally:
        replica.close()
    return found[0] if found else None
