"""What stands still, for `status` and `lag`: as far as it shows from outside, and without a word from the members."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from kafka_marshal.adapters.interface import Cluster, FaultKind, TopicInfo, TopicPartition
from kafka_marshal.cli.text import count, span
from kafka_marshal.engine.topic_mark import mark_of

if TYPE_CHECKING:
    from kafka_marshal.cli.view import LeaseRow, SpeedMeter

__all__ = ["mark_stuck", "position_lost"]

#: Held, with messages to come and nothing done for so long of log time: looked into.
STILL_MS = 10_000

#: Partitions of which the next message is read, at most; and for how long in all (s).
PROBED_AT_MOST = 20
PROBE_S = 2.0

SLICE_S = 0.2

#: Little is fetched, and spoilt bytes are noticed in uncompressed batches, too.
CONFIG: dict[str, object] = {"check.crcs": True, "fetch.message.max.bytes": 65_536, "queued.max.messages.kbytes": 1_024}


def position_lost(topic: TopicInfo, topic_marks: frozenset[int], position: int, log_end: int | None) -> str:
    """Why a group's position means nothing in the log that is there (P11, P12); "" where it does."""
    mark = mark_of(topic.topic_id)
    if topic_marks and mark is not None and topic_marks != {mark}:
        return "position lost: the topic was made anew"
    if log_end is not None and position > log_end:
        return f"position lost: the log ends at {log_end}"
    return ""


def mark_stuck(cluster: Cluster, rows: list[LeaseRow], meter: SpeedMeter) -> list[LeaseRow]:
    """The rows, with what reading shows of those that are held, have messages to come, and get nothing done."""
    still: dict[TopicPartition, tuple[int, int]] = {}
    for row in rows:
        still_ms = meter.still_ms((row.group, row.topic, row.partition))
        if row.client is not None and not row.stuck and row.lag and still_ms >= STILL_MS:
            still.setdefault((row.topic, row.partition), (row.position, still_ms))
    if not still:
        return rows
    positions = {key: position for key, (position, _) in list(still.items())[:PROBED_AT_MOST]}
    unreadable = _probe(cluster, positions)
    return [_with_reason(row, still, unreadable) for row in rows]


def _with_reason(
    row: LeaseRow, still: Mapping[TopicPartition, tuple[int, int]], unreadable: Mapping[TopicPartition, str]
) -> LeaseRow:
    key = (row.topic, row.partition)
    if row.client is None or row.stuck or not row.lag or still.get(key, (-1, 0))[0] != row.position:
        return row
    if key in unreadable:
        return replace(row, stuck=f"offset {row.position} can't be read: {unreadable[key]}")
    waiting = count(row.lag, "message")
    return replace(row, stuck=f"nothing done for {span(still[key][1])}, {waiting} waiting: see {row.client}'s log")


def _probe(cluster: Cluster, positions: Mapping[TopicPartition, int]) -> dict[TopicPartition, str]:
    """Read the next message of each; what the client says of those that it can't read."""
    reader = cluster.data_reader("kafka-marshal-status", CONFIG)
    failed: dict[TopicPartition, str] = {}
    left = set(positions)
    try:
        reader.assign(positions)
        until = time.monotonic() + PROBE_S
        while left and time.monotonic() < until:
            messages, faults = reader.read(100, SLICE_S)
            done = {(message.topic() or "", message.partition() or 0) for message in messages}
            for fault in faults:
                if fault.topic is not None and fault.partition is not None and fault.kind is FaultKind.OTHER:
                    failed.setdefault((fault.topic, fault.partition), fault.message)
            left -= done | failed.keys()
            if done or failed:
                reader.unassign(done | failed.keys())
    finally:
        reader.close()
    return failed
