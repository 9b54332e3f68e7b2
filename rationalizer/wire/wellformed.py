"""When a field is well formed (E2): one predicate and one sentence for each kind of field.

Predicates take anything and never raise. They compare exact types: a bool is no int (E2), and a value equal
to a valid one (1.0 == 1) is not valid. Arrays are tuples, as the codec reads them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from rationalizer.limits import (
    MAX_COMMIT_RANGES,
    MAX_HEARTBEAT_INTERVAL_MS,
    MAX_ID_BYTES,
    MAX_LEVEL,
    MAX_OFFSET,
    MAX_PARTITION,
    MAX_TIME_MS,
    MAX_TOPIC_BYTES,
    MIN_HEARTBEAT_INTERVAL_MS,
    NOTHING_DONE,
)

_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f]")


def _is_text(value: object, max_bytes: int) -> bool:
    """A str of 1 … max_bytes UTF-8 bytes without control characters."""
    if type(value) is not str or not value or len(value) > max_bytes:
        return False
    if value.isascii():  # as many bytes as characters, and only controls are unprintable
        return value.isprintable()
    try:
        return len(value.encode()) <= max_bytes and _CONTROL.search(value) is None
    except UnicodeEncodeError:  # a lone surrogate: only a caller's str can hold one
        return False


def is_id(value: object) -> bool:
    """An instance, client or group id."""
    return _is_text(value, MAX_ID_BYTES)


def is_topic(value: object) -> bool:
    """A topic name."""
    return _is_text(value, MAX_TOPIC_BYTES)


def _between(low: int, high: int) -> Callable[[object], bool]:
    def holds(value: object) -> bool:
        return type(value) is int and low <= value <= high

    return holds


is_partition = _between(0, MAX_PARTITION)
is_offset = _between(0, MAX_OFFSET)
_is_position = _between(NOTHING_DONE, MAX_OFFSET)


def is_last_offset(value: object) -> bool:
    """A last_offset: nil, −1, or an offset."""
    return value is None or _is_position(value)


def _is_epoch_or_nil(value: object) -> bool:
    return value is None or is_offset(value)


def are_beat_entries(value: object) -> bool:
    """The entries of a HeartbeatBatch: [topic, partition, epoch, last_offset], at least one."""
    if type(value) is not tuple or set(map(type, value)) != {tuple}:
        return False
    # Entries may be a hundred thousand, and mostly of few topics.
    max_partition, max_offset = MAX_PARTITION, MAX_OFFSET
    good_topics, before = set(), object()
    try:
        for topic, partition, epoch, last_offset in value:
            if not (
                type(partition) is int
                and type(epoch) is int
                and 0 <= partition <= max_partition
                and 0 <= epoch <= max_offset
                and (last_offset is None or (type(last_offset) is int and NOTHING_DONE <= last_offset <= max_offset))
            ):
                return False
            if topic == before:
                continue
            if type(topic) is not str:
                return False
            if topic not in good_topics:
                # The common case of is_topic, without a call.
                plain = topic.isascii() and topic.isprintable() and 0 < len(topic) <= MAX_TOPIC_BYTES
                if not plain and not is_topic(topic):
                    return False
                good_topics.add(topic)
            before = topic
    except ValueError:  # not four
        return False
    return True


def _are_ranges(value: object) -> bool:
    if type(value) is not tuple or not 1 <= len(value) <= MAX_COMMIT_RANGES:
        return False
    if set(map(type, value)) != {tuple}:
        return False
    try:
        for first, last in value:
            if type(first) is not int or type(last) is not int or not 0 <= first <= last <= MAX_OFFSET:
                return False
    except ValueError:  # not two
        return False
    return True


@dataclass(frozen=True, slots=True)
class Rule:
    """What a field has to be: `holds` tests a value, `wants` says it in words."""

    holds: Callable[[Any], bool]
    wants: str


BEAT_ENTRY_WANTS: Final = "a topic, a partition, an epoch of 0 … 2^63−1, and a last_offset of −1 … 2^63−1 or nil"

TOPIC: Final = Rule(is_topic, f"1 … {MAX_TOPIC_BYTES} UTF-8 bytes without control characters")
PARTITION: Final = Rule(is_partition, "an int, 0 … 2^31−1")
EPOCH: Final = Rule(is_offset, "an int, 0 … 2^63−1")
EPOCH_OR_NIL: Final = Rule(_is_epoch_or_nil, "nil or an int, 0 … 2^63−1")
OFFSET: Final = Rule(is_offset, "an int, 0 … 2^63−1")
LAST_OFFSET: Final = Rule(is_last_offset, "nil or an int, −1 … 2^63−1")
HEARTBEAT_INTERVAL: Final = Rule(
    _between(MIN_HEARTBEAT_INTERVAL_MS, MAX_HEARTBEAT_INTERVAL_MS),
    f"an int, {MIN_HEARTBEAT_INTERVAL_MS} … {MAX_HEARTBEAT_INTERVAL_MS:,} (ms)",
)
TIME: Final = Rule(_between(0, MAX_TIME_MS), "an int, 0 … 2^63−1 (ms of log time)")
LEVEL: Final = Rule(_between(1, MAX_LEVEL), "an int, 1 … 2^31−1")
BEAT_ENTRIES: Final = Rule(are_beat_entries, f"an array of at least one entry, each {BEAT_ENTRY_WANTS}")
RANGES: Final = Rule(
    _are_ranges, f"an array of 1 … {MAX_COMMIT_RANGES:,} [first, last] with 0 <= first <= last <= 2^63−1"
)


def id_problem(instance_id: object, client_id: object, group_id: object) -> str | None:
    """What is wrong with the three ids in front of every record, or None."""
    if is_id(instance_id) and is_id(client_id) and is_id(group_id):
        return None
    for name, value in (("instance_id", instance_id), ("client_id", client_id), ("group_id", group_id)):
        if not is_id(value):
            return f"{name} must be 1 … {MAX_ID_BYTES} UTF-8 bytes without control characters"
    return None
