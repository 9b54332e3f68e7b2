"""Leases: C1-C9, C12 and the table of transitions."""

from __future__ import annotations

import pytest

from rationalizer import ClaimingMessages, ClaimingPartition, CommitRanges, Heartbeat, Record, ReleasingPartition
from rationalizer.leases.transitions import TRANSITIONS, Sender, Transition
from tests.rationalizer.log import A1, A2, B1, HI, Log, Who, held, progress_of

STANDINGS = {"free": 0, "fresh": HI - 1, "unknown": HI, "stale": 2 * HI + 1}


def _record(row: Transition, epoch: int) -> Record:
    instance, client = {Sender.OTHER_INSTANCE: A2, Sender.OTHER_CLIENT: B1}.get(row.sender, A1)
    if row.sender is Sender.OLDER_EPOCH:
        epoch -= 1
    match row.record:
        case "ClaimingPartition":
            return ClaimingPartition(instance, client, "g", "t", 0, 2 * HI)
        case "Heartbeat":
            return Heartbeat(instance, client, "g", "t", 0, None if row.nil_epoch else epoch, 5)
        case "ReleasingPartition":
            return ReleasingPartition(instance, client, "g", "t", 0, epoch, 5)
        case "ClaimingMessages":
            return ClaimingMessages(instance, client, "g", "t", 0, epoch, 5)
        case "CommitRanges":
            return CommitRanges(instance, client, "g", "t", 0, epoch, ((0, 5),))
    raise AssertionError(row.record)


@pytest.mark.parametrize("standing", STANDINGS)
@pytest.mark.parametrize("row", TRANSITIONS, ids=lambda row: f"{row.record}-{row.sender.name}-{row.nil_epoch}")
def test_every_cell_of_the_table_of_transitions(row: Transition, standing: str) -> None:
    log = Log()
    log.tick()
    log.claim(A1, ok=True)  # epoch 1, so that there is an older one
    if standing == "free":
        log.release(A1)
    log.now += STANDINGS[standing]
    assert log.lease.freshness(log.now) == standing
    before = log.world.snapshot()

    outcome = log.append(_record(row, epoch=1))

    assert outcome.code == getattr(row, standing)
    assert outcome.accepted is (outcome.code in ("OK", "ALREADY_HELD"))
    lease, offset = log.lease, log.world.next_offset - 1
    if outcome.code != "OK":
        # C5: what is rejected changes nothing but log time and the next offset.
        log_before = held_state(before)
        assert held_state(log.world.snapshot()) == log_before
    elif row.record == "ClaimingPartition":
        assert (lease.epoch, lease.heartbeat_interval_ms, lease.last_beat) == (offset, 2 * HI, log.now)
        sender = _record(row, 1)
        assert (lease.instance_id, lease.client_id) == (sender.instance_id, sender.client_id)
    elif row.nil_epoch:
        assert (lease.epoch, lease.heartbeat_interval_ms, lease.last_beat) == (offset, HI, log.now)
        assert (lease.instance_id, lease.client_id) == A2
    elif row.record == "Heartbeat":
        assert (lease.epoch, lease.last_beat, lease.held) == (1, log.now, True)
    else:
        # C6, C8: nothing else moves the last beat, and freeing takes away the holder and nothing else.
        assert (lease.epoch, lease.heartbeat_interval_ms, lease.last_beat) == (1, HI, 1000)
        assert lease.held is (row.record != "ReleasingPartition")
    assert lease.progress.stable == (5 if outcome.code == "OK" and row.record != "ClaimingPartition" else -1)


def held_state(snapshot: bytes) -> object:
    from msgpack import unpackb

    return unpackb(snapshot)[5:]


@pytest.mark.parametrize(
    ("age", "freshness"),
    [(0, "fresh"), (HI - 1, "fresh"), (HI, "unknown"), (2 * HI, "unknown"), (2 * HI + 1, "stale")],
)
def test_c1_age_and_freshness(age: int, freshness: str) -> None:
    log = held()
    log.now += age
    log.tick()
    assert log.lease.age(log.now) == age
    assert log.lease.freshness(log.now) == freshness


def test_c2_the_lease_is_judged_by_the_holders_own_interval() -> None:
    log = held(hi=10_000)
    log.now += 5_000
    assert log.claim(B1, hi=100).code == "HELD"
    log.now += 15_001
    assert log.claim(B1, hi=100).code == "OK"
    log.now += 201
    assert log.claim(A1, hi=600_000).code == "OK"


def test_c3_first_claim_of_a_lease_is_granted_with_its_offset_as_epoch() -> None:
    log = Log()
    log.tick()
    assert log.claim(A1).epoch == 1
    assert (log.lease.epoch, log.lease.last_beat, log.lease.heartbeat_interval_ms) == (1, 1000, HI)


def test_c3_already_held_changes_nothing_not_even_the_interval() -> None:
    log = held()
    log.now += HI
    assert log.claim(A1, hi=5000).code == "ALREADY_HELD"
    assert (log.lease.last_beat, log.lease.heartbeat_interval_ms, log.lease.epoch) == (1000, HI, 0)


def test_c3_groups_topics_and_partitions_are_leases_of_their_own() -> None:
    log = held()
    assert log.claim(B1, group="g2").code == "OK"
    assert log.claim(B1, topic="t2").code == "OK"
    assert log.claim(B1, partition=1).code == "OK"
    assert log.claim(B1).code == "HELD"


def test_c4_the_earliest_claim_after_a_release_wins() -> None:
    log = held()
    log.release(A1)
    assert [log.claim(B1).code, log.claim(A2).code, log.claim(B1).code] == ["OK", "HELD", "ALREADY_HELD"]


def test_c5_a_heartbeat_never_takes_a_lease() -> None:
    log = Log()
    assert log.beat(A1, 5).code == "NOT_HELD"
    assert log.world.leases() == []  # a rejected record creates none (D3)
    log.claim(A1)
    log.release(A1)
    assert log.beat(A1, 5).code == "NOT_HELD"


@pytest.mark.parametrize(("who", "epoch"), [(A2, 0), (B1, 0), (A1, 1)])
def test_c5_fenced_where_instance_client_or_epoch_differ(who: tuple[str, str], epoch: int) -> None:
    log = held()
    assert log.append(Heartbeat(*who, "g", "t", 0, epoch, 9)).code == "FENCED"
    assert progress_of(log) == (-1, [], -1)


def test_c5_a_regression_is_accepted_keeps_the_progress_and_counts_as_a_beat() -> None:
    log = held()
    log.beat(A1, 10)
    log.now += 500
    outcome = log.beat(A1, 9)
    assert (outcome.accepted, outcome.code) == (True, "OFFSET_REGRESSION")
    assert (log.lease.progress.stable, log.lease.last_beat) == (10, log.now)
    assert log.beat(A1, 10).code == "OK"  # equal is not below
    assert log.beat(A1, -1).code == "OFFSET_REGRESSION"


def test_c5_granted_counts_as_done() -> None:
    log = held()
    log.grant(A1, 20)
    assert log.beat(A1, 19).code == "OFFSET_REGRESSION"
    assert log.beat(A1, 20).code == "OK"


def test_c5_nothing_done_is_no_regression_where_nothing_is_done() -> None:
    assert held().beat(A1, -1).code == "OK"


def test_e5_nil_says_nothing_about_the_offset() -> None:
    log = held()
    log.beat(A1, 10)
    assert log.beat(A1, None).code == "OK"
    assert log.release(A1, None).code == "OK"
    assert log.lease.progress.stable == 10


def test_c6_a_late_beat_revives_a_stale_lease_that_nobody_took() -> None:
    log = held()
    log.now += 5 * HI
    assert log.beat(A1).code == "OK"
    assert log.lease.freshness(log.now) == "fresh"
    assert log.claim(B1).code == "HELD"


def test_c6_releases_commits_and_grants_do_not_move_the_last_beat() -> None:
    log = held()
    log.now += HI
    assert [log.grant(A1, 3).code, log.commit(A1, (7, 8)).code] == ["OK", "OK"]
    assert log.lease.last_beat == 1000
    log.release(A1, 5)
    assert log.lease.last_beat == 1000


def test_c6_an_accepted_batch_entry_moves_the_last_beat() -> None:
    log = held()
    log.now += HI
    assert log.batch(A1, ("t", 0, 0, 4)).entries == ("OK",)
    assert (log.lease.last_beat, log.lease.progress.stable) == (log.now, 4)


def test_c7_takeover_fences_the_old_instance_and_counts_its_offset() -> None:
    log = held()
    log.beat(A1, 10)
    log.now += HI - 1
    outcome = log.take_over(A2, 12)
    assert (outcome.code, outcome.epoch) == ("OK", 2)
    assert log.lease.progress.stable == 12
    assert log.beat(A1, 13, epoch=0).code == "FENCED"
    assert log.beat(A1, 13, epoch=2).code == "FENCED"
    assert log.beat(A2, 13).code == "OK"


def test_c7_takeover_with_a_lower_offset_is_a_regression_and_takes_over_all_the_same() -> None:
    log = held()
    log.beat(A1, 10)
    assert log.take_over(A2, 5).code == "OFFSET_REGRESSION"
    assert (log.lease.instance_id, log.lease.epoch, log.lease.progress.stable) == ("2", 2, 10)


@pytest.mark.parametrize("instance", ["1", "2"])
def test_c7_nobody_takes_over_another_clients_lease(instance: str) -> None:
    log = held()
    assert log.take_over(Who(instance, "b")).code == "FENCED"
    assert log.lease.client_id == "a"


def test_c7_the_lease_keeps_its_interval_and_another_groups_lease_is_not_touched() -> None:
    log = held(hi=700)
    assert log.append(Heartbeat(*A2, "other", "t", 0, None, None)).code == "NOT_HELD"
    log.take_over(A2)
    assert log.lease.heartbeat_interval_ms == 700


def test_c8_release_records_the_offset_with_a_heartbeats_codes() -> None:
    log = held()
    log.beat(A1, 10)
    assert log.release(A1, 3).code == "OFFSET_REGRESSION"
    assert (log.lease.held, log.lease.progress.stable) == (False, 10)


def test_c8_freeing_keeps_progress_for_the_next_holder_who_gets_a_larger_epoch() -> None:
    log = held()
    log.commit(A1, (0, 4), (8, 9))
    log.release(A1, 6)
    assert log.claim(B1).epoch == 3
    assert progress_of(log) == (6, [(8, 9)], -1)


def test_c9_the_epoch_only_grows() -> None:
    log = held()
    epochs = [log.lease.epoch]
    log.take_over(A2)
    epochs.append(log.lease.epoch)
    log.release(A2)
    log.claim(B1)
    epochs.append(log.lease.epoch)
    log.now += 2 * HI + 1
    log.claim(A1)
    epochs.append(log.lease.epoch)
    assert epochs == sorted(set(epochs))
    assert len(epochs) == 4


def test_c12_a_grant_counts_as_done_and_is_never_given_twice() -> None:
    log = held()
    log.beat(A1, 4)
    assert log.grant(A1, 9).code == "OK"
    assert progress_of(log) == (9, [], 9)
    assert log.grant(A1, 9).code == "PROPOSAL_TOO_LOW"
    log.release(A1)
    log.claim(B1)
    assert log.grant(B1, 8).code == "PROPOSAL_TOO_LOW"
    assert log.grant(B1, 10).code == "OK"


def test_c12_a_proposal_must_be_above_stable_too() -> None:
    log = held()
    log.beat(A1, 50)
    assert log.grant(A1, 50).code == "PROPOSAL_TOO_LOW"
    assert log.grant(A1, 51).code == "OK"


def test_c12_a_grant_reaches_on_through_ranges_that_it_touches() -> None:
    log = held()
    log.commit(A1, (10, 12))
    log.grant(A1, 9)
    assert progress_of(log) == (12, [], 9)


def test_c12_at_exactly_two_intervals_the_holder_is_not_stale() -> None:
    log = held()
    log.now += 2 * HI
    assert log.grant(A1, 1).code == "OK"
    log.now += 1
    assert log.grant(A1, 2).code == "STALE"
    log.beat(A1)
    assert log.grant(A1, 2).code == "OK"


def test_type_6_entries_are_judged_in_order_and_named_apart() -> None:
    log = held()
    log.claim(B1, partition=1)
    outcome = log.batch(A1, ("t", 0, 0, 7), ("t", 1, 1, 7), ("t", 2, 0, 7), ("t", 0, 0, 6))
    assert outcome.entries == ("OK", "FENCED", "NOT_HELD", "OFFSET_REGRESSION")
    assert (outcome.accepted, outcome.code, outcome.epoch) == (True, "PARTIAL", None)


def test_type_6_partial_where_one_is_accepted_is_accepted() -> None:
    log = held()
    outcome = log.batch(A1, ("t", 0, 0, 7), ("t", 2, 0, 7))
    assert (outcome.accepted, outcome.code, outcome.entries) == (True, "PARTIAL", ("OK", "NOT_HELD"))
    assert log.world.accepted == {"OK": 1, "PARTIAL": 1}


def test_type_6_partial_where_none_is_accepted_is_a_rejection() -> None:
    log = held()
    outcome = log.batch(B1, ("t", 0, 0, 7))
    assert (outcome.accepted, outcome.code, outcome.entries) == (False, "PARTIAL", ("FENCED",))
    assert log.world.rejected == {"PARTIAL": 1}
