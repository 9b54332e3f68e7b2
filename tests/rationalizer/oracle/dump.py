"""Section 9 over the oracle's world: outcomes (D2) and state (D3) of a dump, as plain JSON values."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tests.rationalizer.oracle.groups import shown
from tests.rationalizer.oracle.layout import HIGHEST_LEVEL, OF_CHECKPOINTS, is_int
from tests.rationalizer.oracle.world import OracleLease, OracleOutcome, OracleWorld

Outcome = dict[str, Any]


def replay(
    lines: Iterable[str], until: Mapping[int, int] | None = None, highest_level: int = HIGHEST_LEVEL
) -> tuple[list[Outcome], dict[str, Any], dict[int, int]]:
    """The output of `replay` and `replay --state` for a valid dump, and the levels of CPs that stopped (D4)."""
    header, *records = [json.loads(line) for line in lines if line.strip()]
    worlds = [OracleWorld(cp, header["partitions"], highest_level) for cp in range(header["partitions"])]
    printed = []
    for record in records:
        partition, offset = record["partition"], record["offset"]
        if until and offset > until.get(partition, offset):
            continue
        value = None if record["value"] is None else base64.b64decode(record["value"])
        outcome = worlds[partition].apply(offset, record["timestamp"], value)
        if not outcome.stopped:
            printed.append(outcome_line(partition, offset, outcome))
    levels = {world.partition: world.required_level for world in worlds if world.required_level is not None}
    return printed, state_of(worlds), levels


def first_bad_line(lines: Sequence[str]) -> int | None:
    """D1: the number, counted from 1, of the first line that is not one of a dump; None for a sound one."""
    header: dict[str, Any] | None = None
    last: dict[int, int] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            item = json.loads(line)
        except ValueError:
            return number
        if header is None:
            if not _is_header(item):
                return number
            header = item
            continue
        if not _is_record(item, header["partitions"]) or item["offset"] <= last.get(item["partition"], -1):
            return number
        last[item["partition"]] = item["offset"]
    return None if header is not None else 1


def _is_header(item: Any) -> bool:
    if not isinstance(item, dict) or not {"topic", "partitions", "format"} <= item.keys():
        return False
    if not isinstance(item["topic"], str) or not is_int(item["partitions"]) or item["partitions"] < 1:
        return False
    return is_int(item["format"]) and item["format"] == 1


def _is_record(item: Any, partitions: int) -> bool:
    if not isinstance(item, dict) or not {"partition", "offset", "timestamp", "value"} <= item.keys():
        return False
    if not all(is_int(item[name]) for name in ("partition", "offset", "timestamp")):
        return False
    if not 0 <= item["partition"] < partitions or item["offset"] < 0:
        return False
    if item["value"] is None:
        return True
    try:
        base64.b64decode(item["value"], validate=True)
    except (TypeError, ValueError):
        return False
    return isinstance(item["value"], str)


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
    passed = outcome.code not in ("MALFORMED", "UNSUPPORTED_VERSION", "WRONG_PARTITION", "PAUSED", "WRONG_KIND")
    if outcome.type == "ClaimingShare" and passed:
        line["share"] = outcome.share
    if outcome.type == "SettlingMessages" and passed:
        line["taken"] = None if outcome.taken is None else list(outcome.taken)
    if outcome.of_a_group:
        line["generation"] = outcome.generation
    if outcome.of_a_group and outcome.type == "JoinGroup":
        line["member"] = outcome.member
    if outcome.of_a_group and outcome.type in OF_CHECKPOINTS:
        line |= {"checkpoint": outcome.checkpoint, "barrier": outcome.barrier}
    return line


def _number(offset: int) -> int | None:
    return None if offset == -1 else offset


def _lease(world: OracleWorld, lease: OracleLease) -> dict[str, Any]:
    group, topic, partition = lease.key
    was_held = lease.heartbeat_interval_ms > 0
    shares, holes = lease.added
    return {
        "partition": world.partition,
        "group": group,
        "topic": topic,
        "topic_partition": partition,
        "holder": {"client": lease.holder[0], "instance": lease.holder[1]} if lease.holder else None,
        "epoch": lease.epoch if was_held else None,
        "heartbeat_interval_ms": lease.heartbeat_interval_ms if was_held else None,
        "last_beat": lease.last_beat if was_held else None,
        "freshness": lease.freshness(world.log_time),
        "stable": _number(lease.progress.stable),
        "done_through": [[low, high, _number(offset)] for low, high, offset in lease.done_through],
        "ranges": [list(span) for span in lease.progress.ranges],
        "granted": _number(lease.progress.granted),
        **(
            {"shares": [each.shown(world.log_time) for each in shares], "holes": [each.shown() for each in holes]}
            if shares or holes
            else {}
        ),
        **({} if lease.again == -1 else {"again": lease.again}),
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
        state["groups"] += [shown(world.partition, group, world.log_time) for group in world.coordinated()]
    return state
