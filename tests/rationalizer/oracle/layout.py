"""What a record says, and whether it is well formed: E1, E2, L3, section 5's fields, and E6 up to the routing check."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import xxhash

from tests.rationalizer.oracle.msgpack_by_hand import NotMsgpackError, parse

LARGEST_OFFSET = 2**63 - 1
LARGEST_PARTITION = 2**31 - 1

# Anything that the parser gives: the checks are here to find out what it is.
Check = Callable[[Any], bool]


def is_int(item: Any) -> bool:
    """Whether `item` is an int; booleans are not (E2)."""
    return isinstance(item, int) and not isinstance(item, bool)


def int_between(low: int, high: int) -> Check:
    """The check that an item is an int in low … high, both included."""

    return lambda item: is_int(item) and low <= item <= high


def text_up_to(most_bytes: int, least_bytes: int = 1) -> Check:
    """The check for ids and topics: 1 … most_bytes of UTF-8, and no control characters (E2)."""

    def check(item: Any) -> bool:
        if not isinstance(item, str) or not least_bytes <= len(item.encode("utf-8")) <= most_bytes:
            return False
        return not any(ord(char) <= 0x1F or 0x7F <= ord(char) <= 0x9F for char in item)

    return check


def or_nil(check: Check) -> Check:
    """`check`, or nil."""
    return lambda item: item is None or check(item)


an_id = text_up_to(255)
a_topic = text_up_to(249)
a_partition = int_between(0, LARGEST_PARTITION)
an_offset = int_between(0, LARGEST_OFFSET)
an_epoch = int_between(0, LARGEST_OFFSET)
a_time = int_between(0, LARGEST_OFFSET)
a_last_offset = int_between(-1, LARGEST_OFFSET)
an_interval = int_between(100, 600_000)
a_level = int_between(1, 2**31 - 1)


def some_entries(item: Any) -> bool:
    """One or more [topic, partition, epoch, last_offset or nil] (type 6)."""
    checks = [a_topic, a_partition, an_epoch, or_nil(a_last_offset)]
    return isinstance(item, list) and len(item) >= 1 and all(fits(entry, checks) for entry in item)


def some_ranges(item: Any) -> bool:
    """1 … 10,000 of [first, last] with first ≤ last (type 7)."""
    if not isinstance(item, list) or not 1 <= len(item) <= 10_000:
        return False
    return all(fits(pair, [an_offset, an_offset]) and pair[0] <= pair[1] for pair in item)


def fits(item: Any, checks: list[Check]) -> bool:
    """Whether `item` is an array of as many things as there are checks, and each passes its own."""
    if not isinstance(item, list) or len(item) != len(checks):
        return False
    return all(check(part) for check, part in zip(checks, item, strict=True))


# The fields of section 5.

a_member_id = text_up_to(292)
a_member_id_or_none = text_up_to(292, least_bytes=0)
a_strategy = text_up_to(255)
a_pattern = text_up_to(1000, least_bytes=0)
a_generation = int_between(0, LARGEST_OFFSET)
a_seen = int_between(0, LARGEST_OFFSET)
a_session = int_between(100, 2**31 - 1)
a_hash = int_between(0, LARGEST_OFFSET)
a_count = int_between(0, 100_000)


def a_bool(item: Any) -> bool:
    """true or false."""
    return isinstance(item, bool)


def some_metadata(item: Any) -> bool:
    """nil, or 0 … 255 bytes, control characters allowed."""
    return item is None or (isinstance(item, str) and len(item.encode("utf-8")) <= 255)


def some_topics(item: Any) -> bool:
    """At most 10,000 of [topic, partition_count]."""
    return isinstance(item, list) and len(item) <= 10_000 and all(fits(pair, [a_topic, a_count]) for pair in item)


def some_commits(item: Any) -> bool:
    """1 … 10,000 entries (type 19)."""
    return isinstance(item, list) and 1 <= len(item) <= 10_000 and all(a_commit(entry) for entry in item)


def a_commit(item: Any) -> bool:
    """[topic, partition, lo, hi, action, through, ranges, metadata], and what section 5 says of them together."""
    action, through = int_between(0, 2), or_nil(a_last_offset)
    if not fits(item, [a_topic, a_partition, a_hash, a_hash, action, through, no_or_some_ranges, some_metadata]):
        return False
    _, _, low, high, action, through, ranges, _ = item
    if low > high:
        return False
    if through is not None and ranges:  # "through beside ranges"
        return False
    # "action 2 without through, or with lo, hi other than 0, 2^63−1"
    return bool(action != 2 or (through is not None and low == 0 and high == LARGEST_OFFSET))


def no_or_some_ranges(item: Any) -> bool:
    """0 … 10,000 of [first, last] with first ≤ last."""
    return item == [] or some_ranges(item)


def some_settings(item: Any) -> bool:
    """G19: a map; keys may be missing, none may be unknown, and each value is checked."""
    return isinstance(item, dict) and all(key in SETTINGS and SETTINGS[key](value) for key, value in item.items())


def a_set_of_topics(item: Any) -> bool:
    """At most 100 topics; one that is named twice is counted twice here."""
    return isinstance(item, list) and len(item) <= 100 and all(a_topic(topic) for topic in item)


SETTINGS: dict[str, Check] = {
    "accept_individual_commit": a_bool,
    "accept_range_fetch": a_set_of_topics,
    "max_session_timeout_ms": a_session,
    "max_individual_commits": int_between(1, 60_000),
    "strategy": or_nil(a_strategy),  # R5; in a record of version 1 to 4 it is unknown
}

# The fields of section 7.

an_id_or_none = an_offset  # of a checkpoint or barrier
a_timeout = int_between(100, 3_600_000)
a_keep = int_between(0, 64)


def no_or_some_commits(item: Any) -> bool:
    """0 … 10,000 entries, in the form that type 19 has them (type 24)."""
    return item == [] or some_commits(item)


# The fields of section 7b.

an_open_offset = int_between(0, 2**62 - 1)  # "marks lie above"
attempts = int_between(0, 1_000_000)
a_reason = text_up_to(64)
MOST_ENTRIES = 10_000
MOST_OFFSETS_OF_ONE, MOST_OFFSETS = 1_000_000, 10_000_000


def some_done(item: Any) -> bool:
    """Any number of [first, last]."""
    checks = [an_open_offset, an_open_offset]
    return isinstance(item, list) and all(fits(entry, checks) and entry[0] <= entry[1] for entry in item)


def some_open(item: Any) -> bool:
    """Any number of [first, last, key_hash or nil, attempts]; "key_hash only where first = last"."""
    checks = [an_open_offset, an_open_offset, or_nil(a_hash), attempts]
    return isinstance(item, list) and all(
        fits(entry, checks) and entry[0] <= entry[1] and (entry[2] is None or entry[0] == entry[1]) for entry in item
    )


def some_parked(item: Any) -> bool:
    """Any number of [offset, key_hash, attempts, reason]."""
    checks = [an_open_offset, a_hash, attempts, a_reason]
    return isinstance(item, list) and all(fits(entry, checks) for entry in item)


def not_too_many(done: list[Any], open_: list[Any], parked: list[Any]) -> bool:
    """What the three have together; "an offset counts for each entry that names it"."""
    offsets = [entry[1] - entry[0] + 1 for entry in done + open_] + [1] * len(parked)
    if len(offsets) > MOST_ENTRIES or sum(offsets) > MOST_OFFSETS:
        return False
    return all(count <= MOST_OFFSETS_OF_ONE for count in offsets)


def a_take(item: Any) -> bool:
    """[count, up_to, at_most_once]."""
    return fits(item, [int_between(1, 1_000_000), an_open_offset, a_bool])


def share_is_sound(fields: list[Any]) -> bool:
    """Type 22: lo ≤ hi, "both nil or neither"."""
    low, high = fields[3:5]
    return (low is None) == (high is None) and (low is None or low <= high)


def settling_is_sound(fields: list[Any]) -> bool:
    """Type 28."""
    epoch, (done, open_, parked, take) = fields[2], fields[4:]
    says_something = bool(done or open_ or parked)
    return not_too_many(done, open_, parked) and (epoch is not None or (take is None and says_something))


def settled_is_sound(fields: list[Any]) -> bool:
    """Type 29."""
    member_id, (done, open_, parked) = fields[0], fields[5:]
    return not_too_many(done, open_, parked) and (member_id != "" or bool(done or open_ or parked))


TYPES: dict[int, tuple[str, list[Check]]] = {
    1: ("Heartbeat", [a_topic, a_partition, or_nil(an_epoch), or_nil(a_last_offset)]),
    2: ("ClaimingPartition", [a_topic, a_partition, an_interval]),
    3: ("ReleasingPartition", [a_topic, a_partition, an_epoch, or_nil(a_last_offset)]),
    4: ("ClaimingMessages", [a_topic, a_partition, an_epoch, an_offset]),
    5: ("ReleaseGroup", [a_time]),
    6: ("HeartbeatBatch", [some_entries]),
    7: ("CommitRanges", [a_topic, a_partition, an_epoch, some_ranges]),
    8: ("ForgetGroup", []),
    32: ("Tick", []),
    33: ("Upgrade", [a_level]),
}
GROUP_TYPES: dict[int, tuple[str, list[Check]]] = {
    16: (
        "JoinGroup",
        [a_member_id_or_none, a_seen, a_session, a_strategy, a_bool, a_pattern, some_topics],
    ),
    17: ("GroupHeartbeat", [a_member_id, a_generation]),
    18: ("LeaveGroup", [a_member_id, a_generation]),
    19: ("CommitOffsets", [a_member_id_or_none, a_generation, a_bool, some_commits]),
    20: ("TopicsChanged", [a_member_id, some_topics]),
    21: ("ConfigureGroup", [some_settings]),
}
CHECKPOINT_TYPES: dict[int, tuple[str, list[Check]]] = {
    23: ("BeginCheckpoint", [an_id_or_none, a_timeout, a_keep, a_bool]),
    24: ("AnswerBarrier", [a_member_id, a_generation, an_id_or_none, int_between(0, 2), no_or_some_commits]),
    25: ("Rollback", [a_generation, an_id_or_none]),
    27: ("KeepCheckpoint", [an_id_or_none, int_between(0, 2)]),
}
SHARING_TYPES: dict[int, tuple[str, list[Check]]] = {
    22: (
        "ClaimingShare",
        [a_topic, a_partition, an_interval, or_nil(a_hash), or_nil(a_hash), or_nil(an_open_offset)],
    ),
    28: (
        "SettlingMessages",
        [a_topic, a_partition, or_nil(an_epoch), a_seen, some_done, some_open, some_parked, or_nil(a_take)],
    ),
    29: (
        "SettleOffsets",
        [a_member_id_or_none, a_generation, a_seen, a_topic, a_partition, some_done, some_open, some_parked],
    ),
}
#: What these say of their fields together.
TOGETHER: dict[str, Check] = {
    "ClaimingShare": share_is_sound,
    "SettlingMessages": settling_is_sound,
    "SettleOffsets": settled_is_sound,
}
# What each level adds (E6).
TYPES_OF_LEVEL: dict[int, dict[int, tuple[str, list[Check]]]] = {
    1: TYPES,
    2: GROUP_TYPES,
    3: CHECKPOINT_TYPES,
    4: SHARING_TYPES,
    5: {},
}

HIGHEST_LEVEL = max(TYPES_OF_LEVEL)
# What each level above 2 adds to the state of a group, at the end of its row (S1, D3): default, and check. A row is
# without what has its default at its end.
GROUP_STATE_OF_LEVEL: dict[int, dict[str, tuple[Any, Check]]] = {}
OF_CHECKPOINTS = tuple(name for name, _ in CHECKPOINT_TYPES.values())
OF_COORDINATED_GROUPS = (*(name for name, _ in GROUP_TYPES.values()), *OF_CHECKPOINTS, "SettleOffsets")
OF_SHARED_LEASES = ("ClaimingShare", "SettlingMessages")
NAMES_ONE_LEASE = (
    *("Heartbeat", "ClaimingPartition", "ReleasingPartition", "ClaimingMessages", "CommitRanges"),
    *OF_SHARED_LEASES,
)


@dataclass(frozen=True)
class Judged:
    """How far a value passed E6, up to and including routing.

    code: None if it passed all of these, else the outcome. type: the record's name, once that is known.
    instance, client, group, fields: once the fields were found well formed.
    """

    code: str | None
    type: str | None = None
    instance: str = ""
    client: str = ""
    group: str = ""
    fields: tuple[Any, ...] = ()
    #: It counts for types 21, 28 and 29 alone.
    version: int = 0

    @property
    def well_formed(self) -> bool:
        """Whether the record passed the check of its fields."""
        return self.code in (None, "WRONG_PARTITION")

    @property
    def lease_key(self) -> tuple[str, str, int] | None:
        """The one lease that the record names, if it names exactly one and was not turned away before."""
        if self.code is not None or self.type not in NAMES_ONE_LEASE:
            return None
        return (self.group, self.fields[0], self.fields[1])


def home_of_lease(topic: str, partition: int, partitions: int) -> int:
    """L3: the CP of a partition-plane record."""
    return xxhash.xxh64_intdigest(topic.encode() + b"\0" + str(partition).encode(), 0) % partitions


def home_of_group(group: str, partitions: int) -> int:
    """L3: the CP of a group-plane record, which is the group's home (G2)."""
    return xxhash.xxh64_intdigest(group.encode(), 0) % partitions


def known_types(level: int) -> dict[int, tuple[str, list[Check]]]:
    """E6: the types of this level and of those below it."""
    found: dict[int, tuple[str, list[Check]]] = {}
    for number, types in TYPES_OF_LEVEL.items():
        if number <= level:
            found |= types
    return found


def added_to_groups(level: int) -> dict[str, tuple[Any, Check]]:
    """What the state of a group has at this level beside what it has at level 2."""
    found: dict[str, tuple[Any, Check]] = {}
    for number, fields in GROUP_STATE_OF_LEVEL.items():
        found |= fields if number <= level else {}
    return found


def judge(value: bytes | None, level: int, cp: int, partitions: int) -> Judged:
    """E6 as far as the routing check, for a record in CP `cp` of `partitions`, at `level`."""
    if value is None:
        return Judged("MALFORMED")
    try:
        tree: list[Any] = list(parse(value))
    except NotMsgpackError:
        return Judged("MALFORMED")
    if len(tree) < 5:
        return Judged("MALFORMED")
    version, kind, instance, client, group = tree[:5]
    if not is_int(version) or not is_int(kind) or version < 1:
        return Judged("MALFORMED")
    if not (an_id(instance) and an_id(client) and an_id(group)):
        return Judged("MALFORMED")
    if version > level:
        return Judged("UNSUPPORTED_VERSION")
    types = known_types(level)
    if kind not in types:
        return Judged("UNKNOWN_TYPE")
    name, checks = types[kind]
    fields = tree[5:]
    if not fits(fields, checks):
        return Judged("MALFORMED", name)
    if name == "JoinGroup" and fields[5] == "" and fields[6] == []:  # "empty only beside a pattern"
        return Judged("MALFORMED", name)
    if name == "AnswerBarrier" and fields[3] == 0 and fields[4] != []:  # "entries beside answer 0"
        return Judged("MALFORMED", name)
    if name == "ConfigureGroup" and version < 5 and "strategy" in fields[0]:  # R5
        return Judged("MALFORMED", name)
    if name in TOGETHER and not TOGETHER[name](fields):
        return Judged("MALFORMED", name)
    code = None if _at_home(name, group, fields, cp, partitions) else "WRONG_PARTITION"
    return Judged(code, name, instance, client, group, tuple(fields), version)


def _at_home(name: str, group: str, fields: list[Any], cp: int, partitions: int) -> bool:
    if name in OF_COORDINATED_GROUPS and name != "ConfigureGroup":  # which belongs to every CP (G2)
        return home_of_group(group, partitions) == cp
    if name in NAMES_ONE_LEASE:
        return home_of_lease(fields[0], fields[1], partitions) == cp
    if name == "HeartbeatBatch":
        return all(home_of_lease(entry[0], entry[1], partitions) == cp for entry in fields[0])
    return True
