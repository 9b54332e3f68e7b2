"""Members of one group that do not fit together."""

from __future__ import annotations

from kafka_marshal.observe.problems import mixed_texts
from kafka_marshal.observe.rows import GroupRow, LeaseRow
from kafka_marshal.types import Sharer


def row(topic: str, partition: int, client: str, *, hi: int = 3_000, silence_ms: int = 0) -> LeaseRow:
    more = {"instance": f"{client}/1", "heartbeat_interval_ms": hi, "silence_ms": silence_ms}
    return LeaseRow("g", topic, partition, cp=0, client=client, log_start=0, log_end=0, **more)  # type: ignore[arg-type]


def test_another_heartbeat_interval_is_named() -> None:
    alike = GroupRow("g", [row("t", 0, "a"), row("t", 1, "b")])
    assert mixed_texts(alike) == []
    other = GroupRow("g", [*alike.leases, row("t", 2, "c", hi=15_000)])
    assert mixed_texts(other) == [
        "g: members have different heartbeat intervals (3.0 s: a, b; 15 s: c): a longer one delays take-overs"
    ]
    gone = GroupRow("g", [*alike.leases, row("t", 2, "c", hi=15_000, silence_ms=60_000)])
    assert mixed_texts(gone) == []


def test_two_groups_of_one_name_are_named() -> None:
    two = [row("t", 0, "a"), row("t", 1, "b"), row("u", 0, "c"), row("u", 1, "d")]
    assert mixed_texts(GroupRow("g", two)) == [
        "g: no member holds partitions of all topics (t: a, b; u: c, d): two groups of one name?"
    ]
    assert mixed_texts(GroupRow("g", [*two, row("u", 2, "a")])) == [], "one group, as a holds both"
    assert mixed_texts(GroupRow("g", two[:3])) == [], "chance deals so few so"


def test_a_member_of_another_mode_is_named() -> None:
    shares = (Sharer("a", "a/1", 5, "fresh", 3_000, 0, None),)
    shared = LeaseRow(
        "g", "t", 0, cp=0, client="a", instance="a/1", heartbeat_interval_ms=3_000, silence_ms=0, sharers=shares
    )
    assert mixed_texts(GroupRow("g", [shared])) == []
    assert mixed_texts(GroupRow("g", [shared, row("t", 1, "b")])) == [
        "g: t: some partitions are shared, and b holds others whole: another mode?"
    ]
