"""A world as its callers see it: levels (E4), counting, and the caller's own mistakes. (The rules: tests/scripts.)"""

from __future__ import annotations

from typing import Any

import pytest

from rationalizer import Heartbeat, Tick, Upgrade, World, encode
from tests.rationalizer.log import A1, A2, B1, CALLERS_MISTAKE, COMPILED, Log, held

TICK = encode(Tick(*A1, "g"))
TOP = 2**63 - 1
BEAT = encode(Heartbeat(*A1, "g", "t", 0, 0, 5))


# -- levels (E4) ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("many", [False, True])
def test_e4_the_world_stands_before_an_upgrade_that_it_can_not_follow(many: bool) -> None:
    log = held()
    before = log.world.snapshot()
    counts = dict(log.world.accepted), dict(log.world.rejected)
    records = [(1, 5000, encode(Upgrade(*A1, "g", 107))), (2, 6000, TICK), (3, 6000, encode(Upgrade(*A1, "g", 109)))]
    if many:
        log.world.apply_many(records)
        log.world.apply_many(records)
    else:
        outcomes = [log.world.apply(*record) for record in records]
        assert [(outcome.code, outcome.accepted, outcome.log_time) for outcome in outcomes] == [
            ("UPGRADE_REQUIRED", False, 1000)
        ] * 3
    assert log.world.required_level == 107
    assert (log.world.snapshot(), log.world.next_offset) == (before, 1)
    assert (log.world.accepted, log.world.rejected) == counts


# -- outcomes and counts ---------------------------------------------------------------------------------------


def test_counts_are_by_code_and_no_state() -> None:
    log = held()
    log.claim(B1)
    log.beat(A1, 5)
    log.beat(A1, 4)
    log.append(None)
    assert log.world.accepted == {"OK": 2, "OFFSET_REGRESSION": 1}
    assert log.world.rejected == {"HELD": 1, "MALFORMED": 1}
    restored = World.restore(log.world.snapshot(), 1)
    assert (restored.accepted, restored.rejected) == ({}, {})
    assert restored.digest() == log.world.digest()


def test_leases_and_pauses_are_sorted_by_their_names() -> None:
    log = Log()
    for group in ("z", "é", "a", "\U0001f600", "\uffff"):
        log.claim(A1, group=group, partition=10)
        log.claim(A1, group=group, partition=9)
        log.pause(A2, 10**6, group=group)
    names = [(lease.group_id.encode(), lease.topic.encode(), lease.partition) for lease in log.world.leases()]
    assert names == sorted(names)
    groups = [pause.group_id.encode() for pause in log.world.pauses()]
    assert groups == sorted(groups)


# -- the caller's own mistakes ---------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [TICK, BEAT, b"\xc1", None], ids=["tick", "beat", "malformed", "none"])
@pytest.mark.parametrize(
    ("offset", "stamp"),
    [(0, 5), (-1, 5), (TOP + 1, 5), (5.0, 5), ("5", 5), (None, 5), (5, TOP + 1), (5, 5.0), (5, None)],
    ids=repr,
)
def test_a_callers_mistake_raises_whatever_the_value(offset: Any, stamp: Any, value: bytes | None) -> None:
    log = held()
    before = log.world.snapshot()
    for apply in (
        lambda: log.world.apply(offset, stamp, value),
        lambda: log.world.apply_many([(offset, stamp, value)]),
    ):
        with pytest.raises(CALLERS_MISTAKE, match=None if COMPILED else "was not applied"):
            apply()
    assert (log.world.snapshot(), log.world.accepted, log.world.rejected) == (before, {"OK": 1}, {})


@pytest.mark.parametrize(
    "record",
    [
        (5, 5, "text"),
        (5, 5, bytearray(TICK)),
        (5, 5, bytearray(BEAT)),
        (5, 5, 7),
    ],
    ids=repr,
)
def test_a_value_is_bytes_or_none(record: Any) -> None:
    log = held()
    before = log.world.snapshot()
    with pytest.raises(CALLERS_MISTAKE, match=None if COMPILED else "was not applied"):
        log.world.apply(*record)
    with pytest.raises(CALLERS_MISTAKE, match=None if COMPILED else "was not applied"):
        log.world.apply_many([record])
    assert log.world.snapshot() == before
    assert log.world.rejected == {}


def test_offsets_may_have_gaps_and_reach_the_largest() -> None:
    world = World(0, 1)
    world.apply(7, 1, TICK)
    world.apply(TOP, TOP, TICK)
    assert (world.next_offset, world.log_time) == (TOP + 1, TOP)
    assert World.restore(world.snapshot(), 1).digest() == world.digest()
    with pytest.raises(ValueError, match="was not applied"):
        world.apply(TOP + 1, 1, TICK)


@pytest.mark.skipif(COMPILED, reason="the compiler takes a bool for an int, and refuses other types by itself")
@pytest.mark.parametrize(
    ("partition", "partitions"), [(-1, 1), (1, 1), (0, 0), (True, 2), (0, True), (0.0, 1), (0, 2**31), ("0", 1)]
)
def test_a_world_is_of_one_of_its_cps(partition: Any, partitions: Any) -> None:
    with pytest.raises(ValueError, match="must be an int"):
        World(partition, partitions)


def test_apply_many_that_meets_a_mistake_has_applied_what_came_before() -> None:
    log = held()
    beat = encode(Heartbeat(*A1, "g", "t", 0, 0, 5))
    with pytest.raises(ValueError, match="was not applied"):
        log.world.apply_many([(1, 1500, beat), (1, 1600, beat)])
    assert (log.world.next_offset, log.world.log_time, log.world.accepted) == (2, 1500, {"OK": 2})


def test_apply_many_takes_any_iterable_and_the_world_is_up_to_date_between_records() -> None:
    log = held()
    seen = []

    def records() -> Any:
        for offset in range(1, 4):
            seen.append((log.world.next_offset, log.world.log_time, log.lease.progress.stable))
            yield offset, 1000 + offset, encode(Heartbeat(*A1, "g", "t", 0, 0, 10 * offset))

    log.world.apply_many(records())
    assert seen == [(1, 1000, -1), (2, 1001, 10), (3, 1002, 20)]
