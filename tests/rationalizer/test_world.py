"""The log as a whole: T1-T3, E4, C16, counting, and the caller's own mistakes."""

from __future__ import annotations

from typing import Any

import pytest

from rationalizer import ClaimingPartition, Heartbeat, Tick, Upgrade, World, encode
from tests.rationalizer.log import A1, A2, ADMIN, B1, CALLERS_MISTAKE, COMPILED, HI, Log, held

TICK = encode(Tick(*A1, "g"))
TOP = 2**63 - 1
BEAT = encode(Heartbeat(*A1, "g", "t", 0, 0, 5))


def test_t1_log_time_is_the_largest_stamp_seen() -> None:
    log = Log(now=0)
    assert log.world.log_time == 0
    seen = []
    for stamp in (-1, 5, 3, -(2**63), 9, 0):
        log.append(TICK, stamp=stamp)
        seen.append(log.world.log_time)
    assert seen == [0, 5, 5, 5, 9, 9]


@pytest.mark.parametrize("value", [None, b"\xc1", b"\x95\x02\x20\xa11\xa1a\xa1g"])
def test_t1_rejected_records_move_log_time_before_they_are_judged(value: bytes | None) -> None:
    log = held()
    log.append(value, stamp=1000 + 2 * HI + 1)
    assert log.claim(B1).code == "OK"


def test_t1_a_record_is_judged_at_its_own_stamp() -> None:
    log = held()
    log.now += 2 * HI + 1
    assert log.claim(B1).code == "OK"
    assert log.lease.last_beat == log.now


def test_t1_records_of_other_cps_move_log_time_too() -> None:
    world = World(0, 1000)
    stray = next(p for p in range(100) if _routes_elsewhere(p))
    outcome = world.apply(0, 500, encode(ClaimingPartition(*A1, "g", "t", stray, 1000)))
    assert (outcome.code, outcome.log_time) == ("WRONG_PARTITION", 500)


def _routes_elsewhere(partition: int) -> bool:
    from rationalizer import route_lease

    return route_lease("t", partition, 1000) != 0


def test_t2_a_stamp_behind_the_log_time_does_not_rejuvenate_a_lease() -> None:
    log = held()
    log.append(TICK, stamp=1000 + 2 * HI + 1)
    log.now = 1001
    assert log.claim(B1).code == "OK"
    assert log.lease.last_beat == 1000 + 2 * HI + 1


def test_t3_a_tick_changes_nothing_but_log_time() -> None:
    log = held()
    log.pause(ADMIN, 10**6)
    before = [repr(lease) for lease in log.world.leases()], log.world.pauses()
    log.now += 10
    outcome = log.tick(B1)
    assert (outcome.accepted, outcome.code, outcome.type, outcome.epoch) == (True, "OK", "Tick", None)
    assert ([repr(lease) for lease in log.world.leases()], log.world.pauses()) == before
    assert log.world.log_time == log.now


# -- levels (E4) ----------------------------------------------------------------------------------------------


def test_e4_a_level_not_above_the_current_one_is_accepted_and_changes_nothing() -> None:
    log = Log()
    assert log.upgrade(1).code == "OK"
    assert (log.world.level, log.world.required_level) == (1, None)


@pytest.mark.parametrize("many", [False, True])
def test_e4_the_world_stands_before_an_upgrade_that_it_can_not_follow(many: bool) -> None:
    log = held()
    before = log.world.snapshot()
    counts = dict(log.world.accepted), dict(log.world.rejected)
    records = [(1, 5000, encode(Upgrade(*A1, "g", 7))), (2, 6000, TICK), (3, 6000, encode(Upgrade(*A1, "g", 9)))]
    if many:
        log.world.apply_many(records)
        log.world.apply_many(records)
    else:
        outcomes = [log.world.apply(*record) for record in records]
        assert [(outcome.code, outcome.accepted, outcome.log_time) for outcome in outcomes] == [
            ("UPGRADE_REQUIRED", False, 1000)
        ] * 3
    assert log.world.required_level == 7
    assert (log.world.snapshot(), log.world.next_offset) == (before, 1)
    assert (log.world.accepted, log.world.rejected) == counts


def test_e4_a_higher_version_is_noise_until_an_upgrade() -> None:
    log = held()
    value = bytearray(encode(Upgrade(*A1, "g", 7)))
    value[1] = 2
    assert log.append(bytes(value)).code == "UNSUPPORTED_VERSION"
    assert log.append(encode(Upgrade(*A1, "g", 7)) + b"\x00").code == "MALFORMED"
    assert log.world.required_level is None


# -- forgetting (C16) ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("age", "code"), [(0, "GROUP_ACTIVE"), (2 * HI, "GROUP_ACTIVE"), (2 * HI + 1, "OK")])
def test_c16_a_group_is_forgotten_unless_a_lease_is_held_and_not_stale(age: int, code: str) -> None:
    log = held()
    log.claim(B1, partition=1)
    log.append(encode(Heartbeat(*B1, "g", "t", 1, 1, None)))
    log.release(A1)
    log.now += age
    assert log.forget(ADMIN).code == code
    assert len(log.world.leases()) == (0 if code == "OK" else 2)


def test_c16_it_takes_the_pause_along_and_leaves_other_groups_alone() -> None:
    log = held()
    log.claim(A1, group="g2")
    log.pause(ADMIN, 10**6)
    log.pause(ADMIN, 10**6, group="g2")
    log.release(A1)
    assert log.forget(ADMIN).code == "OK"
    assert [lease.group_id for lease in log.world.leases()] == ["g2"]
    assert [pause.group_id for pause in log.world.pauses()] == ["g2"]
    assert log.beat(A1).code == "NOT_HELD"


def test_c16_a_later_claim_starts_anew_with_a_larger_epoch() -> None:
    log = held()
    log.beat(A1, 40)
    log.release(A1)
    log.forget(ADMIN)
    assert log.claim(A1).epoch == 4
    assert log.lease.progress.stable == -1
    assert log.forget(ADMIN).code == "GROUP_ACTIVE"


def test_c16_an_active_group_keeps_its_pause() -> None:
    log = held()
    log.pause(ADMIN, 10**6)
    assert log.forget(ADMIN).code == "GROUP_ACTIVE"
    assert len(log.world.pauses()) == 1


# -- outcomes and counts ---------------------------------------------------------------------------------------


def test_d2_epoch_is_the_leases_also_after_a_rejection_and_while_free() -> None:
    log = Log()
    assert log.beat(A1).epoch is None
    log.claim(A1)
    assert log.claim(B1).epoch == 1
    assert log.beat(B1).epoch == 1
    log.release(A1)
    assert log.beat(A1).epoch == 1
    log.pause(ADMIN, 10**6)
    assert (log.claim(B1).code, log.claim(B1).epoch) == ("PAUSED", 1)
    assert log.append(encode(Heartbeat(*A1, "g", "t", 0, 1, 1)) + b"\x00").epoch is None


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
