"""One partition as it is now: the members that share it with their batches, and its open messages."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from kafka_marshal.admin.open_messages import OpenMessage, state_of
from kafka_marshal.instance import Instance
from kafka_marshal.observe.holes import Holding
from kafka_marshal.observe.open_problems import open_text
from kafka_marshal.observe.payload import short
from kafka_marshal.observe.rows import GroupRow, LeaseRow
from kafka_marshal.observe.text import span
from kafka_marshal.types import Sharer
from kafka_marshal.visible import visible
from rationalizer.holes import Hole
from rationalizer.limits import MAX_KEY_HASH

#: The most sharers and open messages, and the most batches of one sharer, in one answer; it says how many more.
LISTED: Final = 100
BATCHES: Final = 5


def sharing(group: GroupRow, holdings: Sequence[Holding], place: tuple[str, int], now_ms: int) -> dict[str, Any]:
    """Who shares a partition, and what is open of it. `mode`: whole, keys or batches; of `whole` no sharers are listed.

    holdings: of the group. now_ms: the broker's time.
    """
    rows = [row for row in group.leases if (row.topic, row.partition) == place]
    holes = [each.hole for each in holdings if each.key == place]
    by_batches = any(row.sharers for row in rows)
    is_whole = all(row.lo == 0 and row.hi == MAX_KEY_HASH for row in rows)
    mode = "batches" if by_batches else "whole" if is_whole else "keys"
    if by_batches:
        sharers = [_by_batches(each, row, holes, now_ms) for row in rows for each in row.sharers]
    else:
        sharers = [_by_keys(row) for row in rows] if mode == "keys" else []
    listed = sorted((hole for hole in holes if state_of(hole) != "acquired"), key=lambda hole: not hole.is_parked)
    names = list(dict.fromkeys(each["client"] for each in sharers if each["client"] is not None))
    return {
        "topic": place[0],
        "partition": place[1],
        "mode": mode,
        "text": "" if mode == "whole" else f"Shared by {mode}: {visible(', '.join(names[:LISTED])) or 'nobody'}.",
        "sharers": sharers[:LISTED],
        "more_sharers": max(0, len(sharers) - LISTED),
        "open": visible(open_text(replace(group, leases=rows))),
        "messages": [_hole_json(hole) for hole in listed[:LISTED]],
        "more_messages": max(0, len(listed) - LISTED),
        "command": visible(shlex.join(["kafka-marshal", "open-messages", group.group, f"{place[0]}:{place[1]}"])),
    }


def sharer_state(sharer: Sharer, row: LeaseRow, now_ms: int) -> str:
    """Its freshness by the broker's clock, in the words of `status`."""
    silence_ms = max(0, now_ms - sharer.last_beat)
    return replace(row, silence_ms=silence_ms, heartbeat_interval_ms=sharer.heartbeat_interval_ms).state


def _by_batches(sharer: Sharer, row: LeaseRow, holes: Sequence[Hole], now_ms: int) -> dict[str, Any]:
    batches = sorted((hole for hole in holes if hole.owner == sharer.epoch), key=lambda hole: hole.since)
    return {
        **_member(sharer.client_id, sharer.instance_id),
        "keys": None,
        "epoch": sharer.epoch,
        "state": sharer_state(sharer, row, now_ms),
        "heard": f"{span(max(0, now_ms - sharer.last_beat))} ago",
        "batches": [
            {"first": each.first, "last": each.last, "deliveries": each.attempts} for each in batches[:BATCHES]
        ],
        "more_batches": max(0, len(batches) - BATCHES),
    }


def _by_keys(row: LeaseRow) -> dict[str, Any]:
    return {
        **_member(row.client, row.instance),
        "keys": row.place.partition(" ")[2].strip("()") or "all",
        "epoch": row.epoch,
        "state": row.state,
        "heard": "" if row.silence_ms is None else f"{span(row.silence_ms)} ago",
        "batches": [],
        "more_batches": 0,
    }


def _member(client: str | None, instance: str | None) -> dict[str, Any]:
    runs_at = Instance.parse(instance)
    return {"client": client, "instance": instance or "", "where": None if runs_at is None else str(runs_at)}


def _hole_json(hole: Hole) -> dict[str, Any]:
    return {
        "first": hole.first,
        "last": hole.last,
        "state": state_of(hole),
        "deliveries": hole.attempts,
        "reason": None if hole.reason is None else visible(hole.reason),
        "since": hole.since,
    }


def open_message_json(message: OpenMessage, cp: int, *, with_key: bool) -> dict[str, Any]:
    """An open message as text, never markup. `at`: the record that says so, as a moment."""
    is_read = with_key and not (message.gone or message.unread)
    return {
        "topic": message.topic,
        "partition": message.partition,
        "offset": message.offset,
        "state": message.state,
        "deliveries": message.delivery_count,
        "reason": None if message.reason is None else visible(message.reason),
        "at": f"{cp}:{message.since}",
        "time": message.time,
        "client": None if message.client is None else visible(message.client),
        "key": visible(short(message.key)) if is_read else None,
        "gone": message.gone,
        "unread": visible(message.unread),
    }
