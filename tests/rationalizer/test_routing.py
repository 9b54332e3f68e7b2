"""Where records belong (L3), and key hashes (P7)."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from xxhash import xxh64

from rationalizer import (
    key_hash,
    route_group,
    route_lease,
)
from rationalizer.routing import are_routed_to, key_range


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
