"""Section 9 over the oracle's world: outcomes (D2) and state (D3) of a dump, as plain JSON values."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable
from typing import Any

from tests.rationalizer.oracle.progress import LARGEST_HASH
from tests.rationalizer.oracle.world import OracleLease, OracleOutcome, OracleWorld

Outcome = dict[str, Any]


def replay(lines: Iterable[str]) -> tuple[list[Outcome], dict[str, Any]]:
    """What `replay` and `replay --state` show of a sound dump."""
    header, *records = [json.loads(line) for line in lines if line.strip()]
    worlds = [OracleWorld(cp, header["partitions"]) for cp in range(header["partitions"])]
    printed = []
    for record in records:
        value = None if record["value"] is None else base64.b64decode(record["value"])
        world = worlds[record["partition"]]
        outcome = world.apply(record["offset"], record["timestamp"], value)
        if not outcome.stopped:
            printed.append(outcome_line(record["partition"], record["offset"], outcome))
    return printed, state_of(worlds)


def outcome_line(partition: int, offset: int, outcome: OracleOutcome) -> Outcome:
    """One object of D2."""
    line: Outcome = {
        "partition": partition,
        "offset": offset,
        "log_time": outcome.log_time,
        "type": outcome.type,
        "accepted": outcome.accepted,
        "code": outcome.code,
        "epoch": outcome.epoch,
    }
    if outcome.entries is not None:
        line["entries"] = list(outcome.entries)
    return line


def _number(offset: int) -> int | None:
    return None if offset == -1 else offset


def _lease(world: OracleWorld, lease: OracleLease) -> dict[str, Any]:
    group, topic, partition = lease.key
    return {
        "partition": world.partition,
        "group": group,
        "topic": topic,
        "topic_partition": partition,
        "holder": {"client": lease.holder[0], "instance": lease.holder[1]} if lease.holder else None,
        "epoch": lease.epoch,
        "heartbeat_interval_ms": lease.heartbeat_interval_ms,
        "last_beat": lease.last_beat,
        "freshness": lease.freshness(world.log_time),
        "stable": _number(lease.progress.stable),
        "done_through": [[0, LARGEST_HASH, _number(lease.progress.stable)]],
        "ranges": [list(span) for span in lease.progress.ranges],
        "granted": _number(lease.progress.granted),
    }


def state_of(worlds: Iterable[OracleWorld]) -> dict[str, Any]:
    """The object of D3; `worlds` in the order of their partitions."""
    state: dict[str, Any] = {"partitions": [], "leases": [], "pauses": [], "groups": []}
    for world in worlds:
        state["partitions"].append(
            {
                "partition": world.partition,
                "next_offset": world.next_offset,
                "log_time": world.log_time,
                "level": world.level,
                "rejected": world.rejected,
                "digest": world.digest(),
            }
        )
        state["leases"] += [_lease(world, lease) for lease in world.leases()]
        state["pauses"] += [
            {"partition": world.partition, "group": its.group, "client": its.client, "expires": its.expires}
            for its in world.pauses()
        ]
    return state
