"""The faults of the Go original, B1 to B23: for each, the tests that would catch it here, or why it cannot occur.

The tests stand where their subject is tested; this page finds them, and fails when one of them is gone.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parent

#: Fault: (what it was, tests that would catch it).
FAULTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "B1": (
        "Staleness by the reader's wall clock at replay time, so readers disagree",
        ("test_t2_a_stamp_behind_the_log_time_does_not_rejuvenate_a_lease", "test_however_the_log_is_cut"),
    ),
    "B2": (
        "Negative age falls to stale; exactly 2 HI is stale",
        (
            "test_c1_age_and_freshness",
            "test_t2_a_stamp_behind_the_log_time_does_not_rejuvenate_a_lease",
            "test_q8_both_ends_of_unknown_belong_to_it",
        ),
    ),
    "B3": (
        "Any heartbeat takes ownership and may rewind the offset",
        (
            "test_c5_a_heartbeat_never_takes_a_lease",
            "test_c5_fenced_where_instance_client_or_epoch_differ",
            "test_c5_a_regression_is_accepted_keeps_the_progress_and_counts_as_a_beat",
        ),
    ),
    "B4": (
        "Rewinding closes a channel twice; a jump discards older claims, offsets and pauses",
        ("test_a_log_made_anew_and_shorter_is_told", "test_close_ends_a_read_of_another_thread"),
    ),
    "B5": (
        "Catching up ends too early at an undecodable record, or never at a tail of markers",
        ("test_any_bytes_end_the_same_both_ways", "test_the_end_lies_behind_transaction_markers"),
    ),
    "B6": (
        "ClaimingMessages not done; unknown types and versions ignored without a trace",
        (
            "test_c12_a_grant_counts_as_done_and_is_never_given_twice",
            "test_e3_a_rejected_record_is_counted_and_leaves_the_state_as_it_was",
            "test_e4_a_higher_version_is_noise_until_an_upgrade",
        ),
    ),
    "B7": (
        "Separators unescaped in ids, version unchecked, partitions that panic or allocate",
        (
            "test_e2_what_no_reader_would_accept_cannot_be_built",
            "test_e2_the_ends_of_every_range_can_be_built_and_read",
            "test_e2_bombs_are_malformed_and_cost_no_memory",
        ),
    ),
    "B8": (
        "Routing by topic alone: one hot coordination partition",
        ("test_l3_a_lease_hashes_topic_nul_and_the_partition_in_ascii",),
    ),
    "B9": (
        "A claim without a record counts, waits without an end, or wins later as a ghost",
        (
            "test_c3_one_of_many_racing_claims_wins",
            "test_c17_a_grant_nobody_wants_any_more_is_released_at_once",
            "test_c17_a_claim_granted_after_the_release_is_given_back",
            "test_the_same_lease_twice_is_refused",
        ),
    ),
    "B10": (
        "Instances of one client both own",
        (
            "test_c7_takeover_fences_the_old_instance_and_counts_its_offset",
            "test_c7_a_newer_instance_takes_over_and_the_older_is_told",
        ),
    ),
    "B11": (
        "A failed start dereferences nil, a good one leaks the cluster",
        ("test_an_unknown_partition_or_topic_fails_in_time", "test_a_look_up_that_nobody_answers_ends_in_time"),
    ),
    "B12": (
        "Offsets are committed before the heartbeat, without a generation: a zombie overwrites",
        (
            "test_c5_a_holder_that_sees_another_epoch_stops_at_once",
            "test_on_lost_is_called_once_and_nothing_is_committed_afterwards",
        ),
    ),
    "B13": (
        "The offset is read before the claim is won; a real offset 0 is lost",
        (
            "test_c14_the_next_holder_goes_on_at_stable_plus_1",
            "test_c17_late_grants_are_used_if_the_lease_is_wanted",
            "test_p9_the_next_holder_starts_where_the_first_one_did_though_nothing_was_done",
        ),
    ),
    "B14": (
        "After a failed set-up, release and terminate hang",
        (
            "test_close_before_the_first_claim_was_answered",
            "test_e4_a_release_under_way_when_the_cp_stops_is_not_waited_for",
        ),
    ),
    "B15": (
        "A position beyond the log loops for ever",
        (
            "test_p11_a_position_beyond_the_log_end_is_lost_and_nothing_handed_out",
            "test_p11_a_position_beyond_the_log_is_reported_not_looped_on",
        ),
    ),
    "B16": (
        "A failed heartbeat counts as sent",
        (
            "test_t4_an_acknowledgement_proves_nothing",
            "test_t4_stops_in_time_whichever_way_the_log_is_cut_off",
            "test_t4_the_margin_allows_for_clocks_whose_rates_differ",
        ),
    ),
    "B17": (
        "A double commit counts twice; a rewind is logged and applied",
        (
            "test_done_twice_and_done_of_what_was_never_in_hand_is_ignored_and_counted",
            "test_p2_stable_never_moves_back",
        ),
    ),
    "B18": (
        "Velocity per sample instead of per second; equal speed counts as behind",
        (
            "test_speeds_are_per_second_whatever_the_interval",
            "test_equal_speeds_are_healthy",
            "test_cycles_hold_lag_speed_and_growth_per_second",
        ),
    ),
    "B19": (
        "Queued messages of a released claim are delivered",
        (
            "test_a_lost_lease_purges_the_buffer",
            "test_a_revocation_waits_for_what_is_in_hand_and_hands_out_nothing_more",
        ),
    ),
    "B20": (
        "Fast reclaim stops after the first topic, and takes claims that are not fresh",
        (
            "test_c7_a_restart_takes_over_at_once_what_is_fresh",
            "test_c7_not_fresh_falls_back_to_a_claim_when_the_lease_opens",
        ),
    ),
    "B21": (
        "A notification that must not block blocks for ever",
        (
            "test_beats_go_on_while_on_revoke_runs",
            "test_beats_go_on_while_a_handler_takes_long",
        ),
    ),
    "B22": (
        "A transient gap in the metadata ends the cluster",
        (
            "test_p9_a_transient_gap_in_the_metadata_costs_nothing_but_time",
            "test_a_look_up_that_began_before_the_consumer_does_not_declare_its_topics_deleted",
        ),
    ),
    "B23": (
        "A pause is advisory, without owner or end, and by wall clock; its wait can't fail",
        (
            "test_c10_while_paused_others_may_only_hand_in",
            "test_c10_a_pause_is_over_whatever_moved_log_time",
            "test_waiting_has_an_end_that_names_who_is_at_work",
            "test_of_two_admins_at_once_one_wins_and_one_is_refused",
            "test_positions_move_while_members_run_and_nobody_restarts",
        ),
    ),
}


@cache
def all_tests() -> frozenset[str]:
    """The names of all test functions and methods below tests/."""
    found: set[str] = set()
    for path in TESTS.rglob("test_*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        found.update(n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name.startswith("test_"))
    return frozenset(found)


def test_every_fault_is_dealt_with() -> None:
    assert list(FAULTS) == [f"B{number}" for number in range(1, 24)]


@pytest.mark.parametrize("fault", FAULTS)
def test_the_tests_that_would_catch_it_are_there(fault: str) -> None:
    named = FAULTS[fault][1]
    assert named
    assert not set(named) - all_tests()
