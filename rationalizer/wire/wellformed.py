"""When a field is well formed (E2): one predicate and one sentence for each kind of field.

Predicates take anything and never raise. They compare exact types: a bool is no int (E2), and a value equal
to a valid one (1.0 == 1) is not valid. Arrays are tuples, as the codec reads them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from rationalizer.levels import REDO_LEVEL
from rationalizer.limits import (
    FIRST_MARK,
    MAX_ATTEMPTS,
    MAX_BARRIER_TIMEOUT_MS,
    MAX_COMMIT_ENTRIES,
    MAX_COMMIT_RANGES,
    MAX_HEARTBEAT_INTERVAL_MS,
    MAX_ID_BYTES,
    MAX_INTERVALS,
    MAX_KEPT,
    MAX_KEY_HASH,
    MAX_LEVEL,
    MAX_MEMBER_ID_BYTES,
    MAX_METADATA_BYTES,
    MAX_OFFSET,
    MAX_PARTITION,
    MAX_PARTITION_COUNT,
    MAX_PATTERN_BYTES,
    MAX_REASON_BYTES,
    MAX_SESSION_TIMEOUT_MS,
    MAX_SETTLED_ENTRIES,
    MAX_SETTLED_OFFSETS,
    MAX_SETTLED_TOGETHER,
    MAX_SHARED_TOPICS,
    MAX_TIME_MS,
    MAX_TOPIC_BYTES,
    MAX_TOPICS,
    MIN_BARRIER_TIMEOUT_MS,
    MIN_HEARTBEAT_INTERVAL_MS,
    MIN_SESSION_TIMEOUT_MS,
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
is_position = _between(NOTHING_DONE, MAX_OFFSET)


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


def _are_arrays(value: Any, most: int) -> bool:
    """An array of at most this number of arrays."""
    return type(value) is tuple and len(value) <= most and set(map(type, value)) <= {tuple}


def _are_ranges(value: object) -> bool:
    return value != () and are_ranges_or_none(value)


def are_ranges_or_none(value: Any, most: int = MAX_COMMIT_RANGES) -> bool:
    """0 … `most` [first, last]."""
    # As _are_arrays: a call less for each entry of a commit.
    if type(value) is not tuple or len(value) > most or not set(map(type, value)) <= {tuple}:
        return False
    try:
        for first, last in value:
            if type(first) is not int or type(last) is not int or not 0 <= first <= last <= MAX_OFFSET:
                return False
    except ValueError:  # not two
        return False
    return True


# -- the group plane (section 5) ---------------------------------------------------------------------------

#: What an entry of CommitOffsets asks for: commit; commit, and release what is revoked; set the start (G14).
COMMIT: Final = 0
LET_GO: Final = 1
START: Final = 2


def _is_member_id(value: object) -> bool:
    return _is_text(value, MAX_MEMBER_ID_BYTES)


def _is_member_id_or_none(value: object) -> bool:
    return _is_none(value) or _is_member_id(value)


def _is_none(value: object) -> bool:
    return type(value) is str and not value


def is_pattern(value: object) -> bool:
    """A regular expression, or "" for none. It is text here, and no more (G12)."""
    return _is_none(value) or _is_text(value, MAX_PATTERN_BYTES)


def is_metadata(value: object) -> bool:
    """Nil, or up to 255 bytes of text, which may have control characters."""
    if value is None:
        return True
    if type(value) is not str or len(value) > MAX_METADATA_BYTES:
        return False
    try:
        return len(value.encode()) <= MAX_METADATA_BYTES
    except UnicodeEncodeError:
        return False


def _is_bool(value: object) -> bool:
    return type(value) is bool


is_session_timeout = _between(MIN_SESSION_TIMEOUT_MS, MAX_SESSION_TIMEOUT_MS)
is_partition_count = _between(0, MAX_PARTITION_COUNT)
_is_interval_limit = _between(1, MAX_INTERVALS)


def _are_topics(value: Any) -> bool:
    if not _are_arrays(value, MAX_TOPICS):
        return False
    try:
        return all(is_topic(topic) and is_partition_count(count) for topic, count in value)
    except ValueError:  # not two
        return False


def _are_commit_entries(value: object) -> bool:
    return value != () and _are_entries_or_none(value)


def _are_entries_or_none(value: Any) -> bool:
    if not _are_arrays(value, MAX_COMMIT_ENTRIES):
        return False
    # No call for each number: a group's log is mostly such entries, with `through` and neither ranges nor metadata.
    max_partition, max_offset = MAX_PARTITION, MAX_OFFSET
    good_topics: set[object] = set()
    try:
        for topic, partition, lo, hi, action, through, ranges, metadata in value:
            if type(topic) is not str or (topic not in good_topics and not is_topic(topic)):
                return False
            good_topics.add(topic)
            if type(partition) is not int or not 0 <= partition <= max_partition:
                return False
            if type(lo) is not int or type(hi) is not int or not 0 <= lo <= hi <= max_offset:
                return False
            if type(action) is not int or not COMMIT <= action <= START:
                return False
            if action == START and (through is None or lo != 0 or hi != MAX_KEY_HASH):
                return False
            if through is not None and (type(through) is not int or not NOTHING_DONE <= through <= max_offset):
                return False
            if type(ranges) is not tuple or (ranges and (through is not None or not are_ranges_or_none(ranges))):
                return False
            if metadata is not None and not is_metadata(metadata):
                return False
    except ValueError:  # not eight
        return False
    return True


# -- checkpoints (section 7) -------------------------------------------------------------------------------

#: What an AnswerBarrier says (X5): no cut; a cut; a cut, and the sender leaves when the barrier is closed.
REFUSED: Final = 0
REACHED: Final = 1
REACHED_AND_LEAVES: Final = 2

#: What a KeepCheckpoint asks for (X9): drop it; keep it until it is retired; take no checkpoints any more.
RETIRE: Final = 0
PIN: Final = 1
END: Final = 2

#: Kinds of checkpoints (X1): made for a hand-over; one of the newest `keep`; kept until it is retired.
PASSING: Final = 0
PERIODIC: Final = 1
PINNED: Final = 2


# -- holes and shares (section 7b) -------------------------------------------------------------------------

is_message_offset = _between(0, FIRST_MARK - 1)
_are_attempts = _between(0, MAX_ATTEMPTS)
_is_count = _between(1, MAX_SETTLED_OFFSETS)


def is_reason(value: object) -> bool:
    """Why a message is parked."""
    return _is_text(value, MAX_REASON_BYTES)


def _is_span(first: object, last: object) -> bool:
    if type(first) is not int or type(last) is not int:
        return False
    return 0 <= first <= last < min(FIRST_MARK, first + MAX_SETTLED_OFFSETS)


def are_done(value: Any) -> bool:
    """0 … 10,000 [first, last]."""
    return _are_arrays(value, MAX_SETTLED_ENTRIES) and all(len(entry) == 2 and _is_span(*entry) for entry in value)


def are_opened(value: Any) -> bool:
    """0 … 10,000 [first, last, key_hash or nil, attempts]; a key hash is that of one offset."""
    return _are_arrays(value, MAX_SETTLED_ENTRIES) and all(
        len(entry) == 4
        and _is_span(entry[0], entry[1])
        and (entry[2] is None or (is_offset(entry[2]) and entry[0] == entry[1]))
        and _are_attempts(entry[3])
        for entry in value
    )


def are_parked(value: Any) -> bool:
    """0 … 10,000 [offset, key_hash, attempts, reason]."""
    return _are_arrays(value, MAX_SETTLED_ENTRIES) and all(
        len(entry) == 4
        and is_message_offset(entry[0])
        and is_offset(entry[1])
        and _are_attempts(entry[2])
        and is_reason(entry[3])
        for entry in value
    )


def _is_take_or_nil(value: Any) -> bool:
    if value is None:
        return True
    if type(value) is not tuple or len(value) != 3:
        return False
    count, up_to, at_most_once = value
    return bool(_is_count(count) and is_message_offset(up_to) and _is_bool(at_most_once))


def _is_within_limits(done: Any, opened: Any, parked: Any) -> bool:
    """Whether one record may have all of these entries, each of which is well formed."""
    if len(done) + len(opened) + len(parked) > MAX_SETTLED_ENTRIES:
        return False
    spans: int = sum([last - first + 1 for first, last in done]) + sum([last - first + 1 for first, last, *_ in opened])
    return spans + len(parked) <= MAX_SETTLED_TOGETHER


def _has_both_keys_or_neither(own: Any) -> bool:
    *_, lo, hi, _ = own
    return (lo is None and hi is None) or (lo is not None and hi is not None and lo <= hi)


def _settles_lease(own: Any) -> bool:
    *_, epoch, _, done, opened, parked, take = own
    if epoch is None and (take is not None or not (done or opened or parked)):
        return False
    return _is_within_limits(done, opened, parked)


def _settles_group(own: Any) -> bool:
    member_id, *_, done, opened, parked = own
    return bool(member_id or done or opened or parked) and _is_within_limits(done, opened, parked)


def are_shared_topics(value: object) -> bool:
    """What `accept_range_fetch` may be: at most 100 topics, as a set (G19)."""
    if type(value) is not tuple or not set(map(type, value)) <= {str}:
        return False
    topics = set(value)
    return len(topics) <= MAX_SHARED_TOPICS and all(map(is_topic, topics))


#: The settings of a group (G19), by name.
SETTING_RULES: Final[dict[str, Callable[[object], bool]]] = {
    "accept_individual_commit": _is_bool,
    "accept_range_fetch": are_shared_topics,
    "max_session_timeout_ms": is_session_timeout,
    "max_individual_commits": _is_interval_limit,
    "strategy": lambda value: value is None or is_id(value),
}

#: Settings that records of older versions do not know: since which they do (R5).
SETTING_VERSIONS: Final = {"strategy": REDO_LEVEL}


def are_settings(value: object) -> bool:
    """A map of settings; as read from the wire, the list of its pairs, of which the last of equal keys counts."""
    if type(value) is list:
        value = dict(value)
    return type(value) is dict and all(
        name in SETTING_RULES and SETTING_RULES[name](found) for name, found in value.items()
    )


@dataclass(frozen=True, slots=True)
class Rule:
    """What a field has to be: `holds` tests a value, `wants` says it in words."""

    holds: Callable[[Any], bool]
    wants: str


def or_nil(rule: Rule) -> Rule:
    """The rule of a field that may be nil."""
    holds = rule.holds
    return Rule(lambda value: value is None or holds(value), f"nil or {rule.wants}")


BEAT_ENTRY_WANTS: Final = "a topic, a partition, an epoch of 0 … 2^63−1, and a last_offset of −1 … 2^63−1 or nil"

ID: Final = Rule(is_id, f"1 … {MAX_ID_BYTES} UTF-8 bytes without control characters")
TOPIC: Final = Rule(is_topic, f"1 … {MAX_TOPIC_BYTES} UTF-8 bytes without control characters")
PARTITION: Final = Rule(is_partition, "an int, 0 … 2^31−1")
EPOCH: Final = Rule(is_offset, "an int, 0 … 2^63−1")
EPOCH_OR_NIL: Final = or_nil(EPOCH)
OFFSET: Final = EPOCH
POSITION: Final = Rule(is_position, "an int, −1 … 2^63−1")
LAST_OFFSET: Final = or_nil(POSITION)
HEARTBEAT_INTERVAL: Final = Rule(
    _between(MIN_HEARTBEAT_INTERVAL_MS, MAX_HEARTBEAT_INTERVAL_MS),
    f"an int, {MIN_HEARTBEAT_INTERVAL_MS} … {MAX_HEARTBEAT_INTERVAL_MS:,} (ms)",
)
HEARTBEAT_INTERVAL_OR_NONE: Final = Rule(
    lambda value: HEARTBEAT_INTERVAL.holds(value) or (type(value) is int and value == 0),
    f"{HEARTBEAT_INTERVAL.wants}, or 0",
)
TIME: Final = Rule(_between(0, MAX_TIME_MS), "an int, 0 … 2^63−1 (ms of log time)")
LEVEL: Final = Rule(_between(1, MAX_LEVEL), "an int, 1 … 2^31−1")
BEAT_ENTRIES: Final = Rule(are_beat_entries, f"an array of at least one entry, each {BEAT_ENTRY_WANTS}")
RANGES: Final = Rule(
    _are_ranges, f"an array of 1 … {MAX_COMMIT_RANGES:,} [first, last] with 0 <= first <= last <= 2^63−1"
)

_TOPICS_WANT: Final = f"an array of at most {MAX_TOPICS:,} [topic, count], count 0 … {MAX_PARTITION_COUNT:,}"

MEMBER_ID: Final = Rule(_is_member_id, f"1 … {MAX_MEMBER_ID_BYTES} UTF-8 bytes without control characters")
MEMBER_ID_OR_NONE: Final = Rule(_is_member_id_or_none, f'"" or {MEMBER_ID.wants}')
GENERATION: Final = OFFSET
SEEN: Final = OFFSET
SESSION_TIMEOUT: Final = Rule(
    is_session_timeout, f"an int, {MIN_SESSION_TIMEOUT_MS} … 2^31−1 (ms; a group's setting may be lower)"
)
STRATEGY: Final = ID
BOOLEAN: Final = Rule(_is_bool, "a boolean")
PATTERN: Final = Rule(is_pattern, f"0 … {MAX_PATTERN_BYTES:,} UTF-8 bytes without control characters")
TOPICS: Final = Rule(_are_topics, _TOPICS_WANT)
COMMIT_ENTRIES: Final = Rule(
    _are_commit_entries,
    f"an array of 1 … {MAX_COMMIT_ENTRIES:,} [topic, partition, lo, hi, action, through, ranges, metadata], either "
    "through or ranges, action 2 (start) with through and for all keys",
)
TIMEOUT: Final = Rule(
    _between(MIN_BARRIER_TIMEOUT_MS, MAX_BARRIER_TIMEOUT_MS),
    f"an int, {MIN_BARRIER_TIMEOUT_MS} … {MAX_BARRIER_TIMEOUT_MS:,} (ms of log time)",
)
KEEP: Final = Rule(_between(0, MAX_KEPT), f"an int, 0 … {MAX_KEPT}")
ANSWER: Final = Rule(
    _between(REFUSED, REACHED_AND_LEAVES),
    "0 (refused), 1 (reached) or 2 (reached, and leaves)",
)
ANSWER_ENTRIES: Final = Rule(
    _are_entries_or_none, f"an array of 0 … {MAX_COMMIT_ENTRIES:,} entries as in CommitOffsets"
)
KEEPING: Final = Rule(_between(RETIRE, END), f"{RETIRE} (retire), {PIN} (pin) or {END} (end)")
KIND: Final = Rule(_between(PASSING, PINNED), f"{PASSING} (passing), {PERIODIC} (periodic) or {PINNED} (pinned)")
MESSAGE_OFFSET: Final = Rule(is_message_offset, "an int, 0 … 2^62−1")
KEY_OR_NIL: Final = or_nil(OFFSET)
START_OR_NIL: Final = or_nil(MESSAGE_OFFSET)
_SPAN_WANTS: Final = f"0 <= first <= last <= 2^62−1, at most {MAX_SETTLED_OFFSETS:,} offsets"
DONE: Final = Rule(are_done, f"an array of [first, last], {_SPAN_WANTS}")
OPENED: Final = Rule(
    are_opened,
    f"an array of [first, last, key_hash, attempts], {_SPAN_WANTS}, key_hash nil or, of one offset, 0 … 2^63−1, "
    f"attempts 0 … {MAX_ATTEMPTS:,}",
)
PARKED: Final = Rule(
    are_parked,
    f"an array of [offset, key_hash, attempts, reason], offset 0 … 2^62−1, key_hash 0 … 2^63−1, attempts 0 … "
    f"{MAX_ATTEMPTS:,}, reason 1 … {MAX_REASON_BYTES} UTF-8 bytes without control characters",
)
TAKE_OR_NIL: Final = Rule(
    _is_take_or_nil,
    f"nil or [count, up_to, at_most_once], count 1 … {MAX_SETTLED_OFFSETS:,}, up_to 0 … 2^62−1, a boolean",
)
#: What must hold of all own fields of a ClaimingShare, a SettlingMessages, a SettleOffsets.
BOTH_KEYS: Final = Rule(_has_both_keys_or_neither, "lo and hi must both be nil, or lo <= hi")
_TOGETHER: Final = (
    f"done, open and parked may have {MAX_SETTLED_ENTRIES:,} entries and {MAX_SETTLED_TOGETHER:,} offsets together"
)
SETTLES_LEASE: Final = Rule(_settles_lease, f"with epoch nil entries are due, and no take; {_TOGETHER}")
SETTLES_GROUP: Final = Rule(_settles_group, f'with member_id "" entries are due; {_TOGETHER}')
REASON_OR_NIL: Final = Rule(
    lambda value: value is None or is_reason(value), f"nil or 1 … {MAX_REASON_BYTES} UTF-8 bytes"
)
SETTINGS: Final = Rule(
    are_settings,
    "a map of accept_individual_commit (a boolean), accept_range_fetch (an array of at most "
    f"{MAX_SHARED_TOPICS} topics), max_session_timeout_ms ({MIN_SESSION_TIMEOUT_MS} … 2^31−1), "
    f"max_individual_commits (1 … {MAX_INTERVALS:,}) and, of version {REDO_LEVEL}, strategy (nil or 1 … "
    f"{MAX_ID_BYTES} bytes), none of them due",
)


def id_problem(instance_id: object, client_id: object, group_id: object) -> str | None:
    """What is wrong with the three ids in front of every record, or None."""
    if is_id(instance_id) and is_id(client_id) and is_id(group_id):
        return None
    for name, value in (("instance_id", instance_id), ("client_id", client_id), ("group_id", group_id)):
        if not is_id(value):
            return f"{name} must be 1 … {MAX_ID_BYTES} UTF-8 bytes without control characters"
    return None
