"""Where records belong (L3), and key hashes (P7)."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from xxhash import xxh64

from rationalizer import (
    BeatEntry,
    ClaimingMessages,
    ClaimingPartition,
    CommitRanges,
    ForgetGroup,
    Heartbeat,
    HeartbeatBatch,
    Record,
    ReleaseGroup,
    ReleasingPartition,
    Tick,
    Upgrade,
    World,
    encode,
    key_hash,
    route_group,
    route_lease,
)
from rationalizer.routing import are_routed_to, key_range

IDS = ("1", "a", "g")
N = 8
HERE = route_lease("t", 0, N)
ELSEWHERE = next(p for p in range(100) if route_lease("t", p, N) != HERE)
ALSO_HERE = next(p for p in range(1, 100) if route_lease("t", p, N) == HERE)


def test_l3_a_lease_hashes_topic_nul_and_the_partition_in_ascii() -> None:
    assert route_lease("flights", 12, 8) == xxh64(b"flights\x0012").intdigest() % 8
    assert route_lease("é", 0, 5) == xxh64(b"\xc3\xa9\x000").intdigest() % 5
    assert {route_lease("t", p, 8) for p in range(100)} == set(range(8))


@given(st.dictionaries(st.text(min_size=1), st.sets(st.integers(0, 2**31 - 1), max_size=3)), st.integers(1, 4))
@example({"%d %s 100%": {0}, "%%": {1}}, 2)
def test_l3_entries_belong_where_each_of_their_leases_does(named: dict[str, set[int]], partitions: int) -> None:
    names = [(topic, number) for topic, numbers in named.items() for number in numbers]
    entries = [(*name, 0, None) for name in names] * 2
    routed = {route_lease(*name, partitions) for name in names}
    for cp in range(partitions):
        assert are_routed_to(cp, entries, partitions) == (routed <= {cp})


def test_l3_a_group_hashes_its_own_name() -> None:
    assert route_group("é", 7) == xxh64(b"\xc3\xa9").intdigest() % 7


@pytest.mark.parametrize(
    "record",
    [
        Heartbeat(*IDS, "t", ELSEWHERE, 0, 1),
        Heartbeat(*IDS, "t", ELSEWHERE, None, 1),
        ClaimingPartition(*IDS, "t", ELSEWHERE, 1000),
        ReleasingPartition(*IDS, "t", ELSEWHERE, 0, 1),
        ClaimingMessages(*IDS, "t", ELSEWHERE, 0, 1),
        CommitRanges(*IDS, "t", ELSEWHERE, 0, ((0, 1),)),
        HeartbeatBatch(*IDS, (BeatEntry("t", 0, 0, 1), BeatEntry("t", ELSEWHERE, 0, 1))),
    ],
    ids=lambda record: type(record).__name__,
)
def test_l3_a_record_of_another_cp_is_rejected(record: Record) -> None:
    world = World(HERE, N)
    world.apply(0, 5, encode(ClaimingPartition(*IDS, "t", 0, 1000)))
    outcome = world.apply(1, 6, encode(record))
    assert (outcome.accepted, outcome.code, outcome.epoch, outcome.entries) == (False, "WRONG_PARTITION", None, None)
    assert outcome.type == type(record).__name__
    lease = world.lease("g", "t", 0)
    assert lease is not None
    assert (lease.progress.stable, lease.last_beat, len(world.leases())) == (-1, 5, 1)


def test_l3_a_batch_belongs_where_all_of_its_entries_do() -> None:
    world = World(HERE, N)
    outcome = world.apply(
        0, 5, encode(HeartbeatBatch(*IDS, (BeatEntry("t", 0, 0, 1), BeatEntry("t", ALSO_HERE, 0, 1))))
    )
    assert (outcome.code, outcome.entries) == ("PARTIAL", ("NOT_HELD", "NOT_HELD"))


@pytest.mark.parametrize("record", [ReleaseGroup(*IDS, 9), ForgetGroup(*IDS), Tick(*IDS), Upgrade(*IDS, 1)])
def test_l3_some_records_belong_to_all(record: Record) -> None:
    for partition in range(N):
        assert World(partition, N).apply(0, 5, encode(record)).code == "OK"


def test_e6_routing_comes_before_the_pause() -> None:
    world = World(HERE, N)
    world.apply(0, 5, encode(ReleaseGroup("1", "admin", "g", 1000)))
    assert world.apply(1, 5, encode(Heartbeat(*IDS, "t", ELSEWHERE, 0, 1))).code == "WRONG_PARTITION"
    assert world.apply(2, 5, encode(Heartbeat(*IDS, "t", 0, 0, 1))).code == "PAUSED"


def test_p7_keys_and_offsets_hash_into_63_bits() -> None:
    assert key_hash(b"N14228", 5) == xxh64(b"N14228").intdigest() >> 1
    assert key_hash(None, 5) == xxh64(b"\0\0\0\0\0\0\0\5").intdigest() >> 1
    assert key_hash(b"", 5) == xxh64(b"").intdigest() >> 1
    assert all(0 <= key_hash(None, offset) < 2**63 for offset in range(1000))


@pytest.mark.parametrize("parts", [1, 2, 3, 7, 1000])
def test_p7_the_parts_cover_the_space_without_overlap(parts: int) -> None:
    ranges = [key_range(part, parts) for part in range(parts)]
    assert (ranges[0][0], ranges[-1][1]) == (0, 2**63 - 1)
    assert all(left[1] + 1 == right[0] for left, right in pairwise(ranges))
