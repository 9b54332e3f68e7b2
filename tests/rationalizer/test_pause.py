"""Pausing a group and setting its positions: C10, C11."""

from __future__ import annotations

import pytest

from tests.rationalizer.log import A1, A2, ADMIN, ADMIN2, B1, HI, Log, held, progress_of

FAR = 10**6


def _paused_and_claimed() -> Log:
    """The admin has the group paused and holds g/t/0; 5 done before, ranges [8,9]."""
    log = held()
    log.commit(A1, (0, 5), (8, 9))
    log.pause(ADMIN, FAR)
    log.release(A1)
    assert log.claim(ADMIN).code == "OK"
    return log


def test_c10_while_paused_others_may_only_hand_in() -> None:
    log = held()
    log.pause(ADMIN, FAR)
    assert log.beat(A1, 5).code == "PAUSED"
    assert log.take_over(A2).code == "PAUSED"
    assert log.claim(B1).code == "PAUSED"
    assert log.grant(A1, 5).code == "PAUSED"
    assert log.batch(A1, ("t", 0, 0, 5)).code == "PAUSED"
    assert log.pause(B1, FAR).code == "PAUSED"
    assert log.forget(B1).code == "PAUSED"
    assert progress_of(log) == (-1, [], -1)
    assert log.commit(A1, (0, 5)).code == "OK"
    assert log.tick(B1).code == "OK"
    assert log.upgrade(1, B1).code == "OK"
    assert log.release(A1, 7).code == "OK"
    assert progress_of(log) == (7, [], -1)


def test_c10_what_hands_in_is_judged_as_ever() -> None:
    log = held()
    log.pause(ADMIN, FAR)
    assert log.commit(B1, (0, 5)).code == "FENCED"
    assert log.release(A1, 7, epoch=3).code == "FENCED"
    log.release(A1)
    assert log.release(A1).code == "NOT_HELD"


def test_c10_a_pause_is_of_one_group() -> None:
    log = held()
    log.pause(ADMIN, FAR, group="g2")
    assert log.beat(A1, 5).code == "OK"
    assert log.claim(B1, group="g2").code == "PAUSED"


def test_c10_paused_means_log_time_below_expiry_and_leases_go_stale_meanwhile() -> None:
    log = held()
    log.pause(ADMIN, log.now + 3 * HI)
    log.now += 3 * HI - 1
    assert log.claim(B1).code == "PAUSED"
    assert log.lease.freshness(log.now) == "stale"
    assert log.world.pause("g") is not None
    log.now += 1
    assert log.claim(B1).code == "OK"
    assert log.world.pause("g") is None
    assert log.world.pauses() == []


def test_c10_a_pause_is_over_whatever_moved_log_time() -> None:
    log = Log()
    log.pause(ADMIN, 2000)
    log.append(b"\xc1", stamp=1999)
    assert log.world.pause("g") is not None
    log.append(b"\xc1", stamp=2000)
    assert log.world.pause("g") is None


def test_c10_the_pausing_client_replaces_the_expiry_also_after_a_restart() -> None:
    log = Log()
    log.pause(ADMIN, 5000)
    assert log.pause(ADMIN2, 3000).code == "OK"
    pause = log.world.pause("g")
    assert pause is not None
    assert (pause.client_id, pause.expires) == ("admin", 3000)


@pytest.mark.parametrize("expires", [0, 1000])
def test_c10_an_expiry_not_after_the_log_time_ends_the_pause(expires: int) -> None:
    log = held()
    log.pause(ADMIN, FAR)
    assert log.pause(ADMIN, expires).code == "OK"
    assert log.world.pauses() == []
    assert log.beat(A1).code == "OK"


def test_c10_ending_a_pause_that_is_not_there_is_accepted_and_changes_nothing() -> None:
    log = held()
    before = log.world.leases()
    assert log.pause(B1, 1000).code == "OK"
    assert (log.world.leases(), log.world.pauses()) == (before, [])


def test_c10_a_pause_that_is_over_can_be_replaced_by_anybody() -> None:
    log = Log()
    log.pause(ADMIN, 2000)
    log.now = 2000
    assert log.pause(B1, 3000).code == "OK"
    assert [pause.client_id for pause in log.world.pauses()] == ["b"]


def test_c10_the_pausing_client_claims_what_has_gone_stale_but_not_before() -> None:
    log = held()
    log.pause(ADMIN, FAR)
    log.now += 2 * HI
    assert log.claim(ADMIN).code == "HELD"
    log.now += 1
    assert log.claim(ADMIN).code == "OK"


@pytest.mark.parametrize(
    ("done", "code", "stable"),
    [(3, "REPOSITIONED", 3), (20, "REPOSITIONED", 20), (-1, "REPOSITIONED", -1), (5, "REPOSITIONED", 5)],
)
def test_c11_the_pausers_offset_replaces_the_progress_back_or_forward(done: int, code: str, stable: int) -> None:
    for send in (Log.beat, Log.release):
        log = _paused_and_claimed()
        assert send(log, ADMIN, done).code == code
        assert progress_of(log) == (stable, [], -1)


def test_c11_it_empties_ranges_and_granted_and_says_ok_where_nothing_changed() -> None:
    log = _paused_and_claimed()
    assert log.grant(ADMIN, 6).code == "OK"
    assert progress_of(log) == (6, [(8, 9)], 6)
    assert log.beat(ADMIN, 6).code == "REPOSITIONED"
    assert progress_of(log) == (6, [], -1)
    assert log.beat(ADMIN, 6).code == "OK"


def test_c11_granted_alone_is_a_change() -> None:
    log = held()
    log.grant(A1, 6)
    log.pause(ADMIN, FAR)
    log.release(A1)
    log.claim(ADMIN)
    assert log.beat(ADMIN, 6).code == "REPOSITIONED"
    assert progress_of(log) == (6, [], -1)


def test_c11_nil_replaces_nothing() -> None:
    log = _paused_and_claimed()
    assert log.beat(ADMIN, None).code == "OK"
    assert log.release(ADMIN, None).code == "OK"
    assert progress_of(log) == (5, [(8, 9)], -1)


def test_c11_a_restarted_admin_takes_over_and_repositions() -> None:
    log = _paused_and_claimed()
    assert log.take_over(ADMIN2, 2).code == "REPOSITIONED"
    assert progress_of(log) == (2, [], -1)
    assert log.batch(ADMIN2, ("t", 0, log.lease.epoch, 1)).entries == ("REPOSITIONED",)


def test_c11_only_while_the_pause_is_in_force() -> None:
    log = _paused_and_claimed()
    log.pause(ADMIN, 0)
    assert log.beat(ADMIN, 3).code == "OFFSET_REGRESSION"
    assert progress_of(log) == (5, [(8, 9)], -1)


def test_c11_only_in_the_group_that_it_has_paused() -> None:
    log = held()
    log.beat(A1, 5)
    log.pause(A1, FAR, group="g2")
    assert log.beat(A1, 3).code == "OFFSET_REGRESSION"


def test_c11_the_old_progress_can_be_written_back() -> None:
    log = _paused_and_claimed()
    before = progress_of(log)
    log.beat(ADMIN, 100)
    log.beat(ADMIN, 5)
    assert log.commit(ADMIN, (8, 9)).code == "OK"
    assert progress_of(log) == before


def test_c11_a_beat_of_a_client_that_does_not_hold_the_lease_moves_nothing() -> None:
    log = held()
    log.beat(A1, 5)
    log.pause(ADMIN, FAR)
    assert log.beat(ADMIN, 1).code == "FENCED"
    assert progress_of(log) == (5, [], -1)
