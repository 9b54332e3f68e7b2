"""Where records belong (L3): the lease, or the group, names the CP.

A record that arrives elsewhere is rejected by every replica, so a writer that hashes by another number of
CPs can't split the view of one lease.
"""

from __future__ import annotations

from collections.abc import Sequence

from xxhash import xxh64_intdigest

#: Of a HeartbeatBatch: topic, partition, epoch, last_offset.
_Entry = tuple[str, int, int, int | None]


def route_lease(topic: str, partition: int, partitions: int) -> int:
    """The CP, 0 … partitions − 1, of the leases of this data partition, whatever their group (L3)."""
    return xxh64_intdigest(f"{topic}\0{partition}".encode()) % partitions


def are_routed_to(cp: int, entries: Sequence[_Entry], partitions: int) -> bool:
    """Whether ``route_lease`` names this CP for all of these entries (L3).

    They may be a hundred thousand: each lease is hashed once, and of few topics, or of many with few partitions each,
    no more than that is done for it by the interpreter.
    """
    if partitions == 1 or not entries:
        return True
    topic, partition, _, _ = entries[0]
    if route_lease(topic, partition, partitions) != cp:
        return False  # most of what does not belong here ends here
    numbers = {partition}
    of_topic, before = {topic: numbers}, topic
    for topic, partition, _, _ in entries:
        if topic != before:
            numbers, before = of_topic.setdefault(topic, set()), topic
        numbers.add(partition)
    alone: list[tuple[str, int]] = []
    for topic, numbers in of_topic.items():
        if len(numbers) == 1:
            alone.append((topic, numbers.pop()))
            continue
        key = f"{topic}\0".encode().replace(b"%", b"%%") + b"%d"
        if {found % partitions for found in map(xxh64_intdigest, map(key.__mod__, numbers))} != {cp}:
            return False
    keys = map(str.encode, map("%s\0%d".__mod__, alone))
    return {found % partitions for found in map(xxh64_intdigest, keys)} <= {cp}


def route_group(group_id: str, partitions: int) -> int:
    """The CP, 0 … partitions − 1, of a group's records of the group plane (L3)."""
    return xxh64_intdigest(group_id.encode()) % partitions


def key_hash(key: bytes | None, offset: int) -> int:
    """Where a record lies in the key space, 0 … 2^63−1: by its key, without one by its offset (P7)."""
    return xxh64_intdigest(offset.to_bytes(8, "big") if key is None else key) >> 1


def key_range(part: int, parts: int) -> tuple[int, int]:
    """The inclusive range (lo, hi) of key hashes that is part `part` of `parts` (P7)."""
    return part * 2**63 // parts, (part + 1) * 2**63 // parts - 1
