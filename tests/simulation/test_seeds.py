"""Sixty stories, and a story is the same in every process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from kafka_marshal.testing.simulation import Client, Fault, Scenario, simulate, simulate_one

# A violation counts even if a second try has none: CI's --reruns is not for these.
pytestmark = pytest.mark.flaky(reruns=0)

ENOUGH = {"clients": 4, "partitions": 8, "CPs": 2, "HI": 100, "faults": 5, "records": 1_000, "messages": 1_000}


@pytest.mark.slow
@pytest.mark.timeout(600)  # on a busy machine
def test_half_a_dozen_seeds() -> None:
    report = simulate(seeds=(30, 32, 36, 39, 40, 41), jobs=os.cpu_count() or 1)
    report.raise_for_violation()
    assert report.seeds == 6
    assert all(report.least[name] >= least for name, least in ENOUGH.items()), report.least
    assert report.counts["pruned"] > 500
    assert report.counts["forgotten"] > 2
    assert report.counts["interrupted"] > 3
    assert report.counts["torn"] > 0
    seen = {code for _, code in report.outcomes}
    assert {"OK", "ALREADY_HELD", "HELD", "FENCED", "NOT_HELD", "PAUSED", "REPOSITIONED", "PARTIAL"} <= seen


def test_a_log_gets_its_records_though_one_slow_member_holds_all() -> None:
    # A greedy client with rare heartbeats had all partitions: the story ended at 795 records.
    assert simulate_one(Scenario.from_seed(40_003_931)).counts["records"] >= ENOUGH["records"]


_PRINT = (
    "from kafka_marshal.testing.simulation import *\n"
    "for seed in (3, 4, 2):\n"
    "    print(*simulate_one(Scenario.from_seed(seed)).history(), sep='\\n')"
)


def test_a_seed_is_one_history_byte_for_byte_in_every_process() -> None:
    told = [
        subprocess.run(
            [sys.executable, "-c", _PRINT],
            env={**os.environ, "PYTHONHASHSEED": chance},
            capture_output=True,
            check=True,
        ).stdout
        for chance in ("0", "4711")
    ]
    assert told[0] == told[1]
    assert len(told[0].splitlines()) > 2_000


def test_seeds_differ_and_runs_in_one_process_do_not_touch_each_other() -> None:
    first, second, again = (simulate_one(Scenario.from_seed(seed, intervals=20)) for seed in (5, 6, 5))
    assert first.history_digest == again.history_digest != second.history_digest
    assert first.events == again.events


def test_a_process_stopped_twice_continues_when_the_later_stop_ends() -> None:
    # It counted as running from the end of the second stop, but got no turn until the end of the first (seed 100166).
    scenario = Scenario(
        seed=100166,
        clients=(
            Client("c0", worker="poll", rate=0.9704, claims_ahead=True, fetches_every=0.3),
            Client("c1", worker="consume", policy="release-if-behind", rate=0.9862, fetches_every=0.4, joins=49.41),
        ),
        faults=(
            Fault(at=56.65, kind="pause", intervals=4.6, size=1.0),
            Fault(at=57.12, kind="stop", client="c1", intervals=3.86, partition=1),
            Fault(at=58.19, kind="stop", client="c1", intervals=0.51, partition=1),
        ),
        heartbeat_interval_ms=200,
        data_partitions=2,
        messages=0.1,
        handling_ms=4.0,
        intervals=65,
        recovers=False,
    )
    assert simulate_one(scenario).violation is None


def test_what_an_admin_passed_over_and_went_back_behind_may_be_missing_in_a_sink_that_is_ahead() -> None:
    scenario = Scenario(  # of seed 102736: [3] goes forward to 73, then back to the start
        seed=102736,
        clients=(Client("c0", worker="fenced"),),
        faults=(
            Fault(at=50.23, kind="prune", intervals=0.25, size=0.876),
            Fault(at=56.6, kind="pause", intervals=2.69, size=0.89, partition=1),
            Fault(at=75.68, kind="pause", intervals=4.1, size=0.531),
        ),
        heartbeat_interval_ms=500,
        coordination_partitions=1,
        messages=13.6,
        handling_ms=2.0,
        intervals=88,
        snapshots=150,
    )
    assert simulate_one(scenario).violation is None


def test_who_gave_up_its_claim_before_it_read_the_grant_is_not_ended_by_its_takeover() -> None:
    scenario = (
        Scenario(  # of seed 1569: stopped with a claim in transit; its successor takes over what that was granted
            seed=1569,
            clients=(
                Client("c0", rate=1.03, fetches_every=0.3),
                Client("c1", policy="release-if-behind", rate=1.0297, fetches_every=0.3, joins=12.93),
                Client("c2", "defer", "max-claims", rate=1.0209, claims_ahead=True, fetches_every=0.2, joins=27.32),
                Client("c3", rate=1.0016, claims_ahead=True, fetches_every=0.4),
            ),
            faults=(
                Fault(at=36.12, kind="outage", intervals=0.23, size=0.933),
                Fault(at=39.31, kind="cut off", client="c0", intervals=1.17, size=0.135, partition=1),
                Fault(at=49.75, kind="unacknowledged", client="c1", intervals=3.14, size=0.796, partition=1),
                Fault(at=50.3, kind="slow network", client="c2", intervals=4.74, size=0.666),
                Fault(at=51.42, kind="stop", client="c1", intervals=2.01, size=0.431),
                Fault(at=55.11, kind="zombie", client="c2", intervals=4.32, size=0.763, partition=1),
            ),
            heartbeat_interval_ms=200,
            coordination_partitions=2,
            data_partitions=10,
            messages=13.0,
            handling_ms=1.0,
            intervals=63,
            recovers=False,
            snapshots=150,
        )
    )
    assert simulate_one(scenario).violation is None


def test_what_an_admin_puts_beyond_the_end_of_a_log_is_reached_in_the_end() -> None:
    # The partition's last message was below the position: readers reported it as lost for ever (P11).
    result = simulate_one(Scenario.from_seed(821914))
    assert result.violation is None, result.tell()


def test_a_batch_fills_no_longer_than_it_may_though_its_lease_is_in_doubt_again_and_again() -> None:
    # Each doubt (T5) restarted the wait for a full batch: fetched messages were not delivered until more came.
    result = simulate_one(Scenario.from_seed(3002105))
    assert result.violation is None, result.tell()


def test_a_limit_holds_where_the_log_is_paused_in_part() -> None:
    # Claims waited for answers in a paused CP; they did not count, and as many were sent to the other CP.
    result = simulate_one(Scenario.from_seed(5005970))
    assert result.violation is None, result.tell()


def test_what_is_granted_again_after_an_admin_moved_the_position_back_may_begin_again() -> None:
    scenario = Scenario(  # of seed 8001209: what consume() had collected waited in it while an admin moved back
        seed=8001209,
        clients=(Client("c0", "consume", rate=0.9757, fetches_every=0.2),),
        faults=(Fault(at=4.1, kind="pause", intervals=1.07, size=0.532, partition=1),),
        delivery="at-most-once",
        heartbeat_interval_ms=200,
        coordination_partitions=1,
        data_partitions=8,
        messages=13.9,
        handling_ms=4.0,
        intervals=7,
        recovers=False,
        records=0,
        snapshots=0,
    )
    assert simulate_one(scenario).violation is None


def test_what_consume_had_gathered_does_not_go_out_when_its_lease_was_over_meanwhile() -> None:
    """At most once: a process stopped within ``consume`` would begin it an hour later (T4; seed 12300008)."""
    stops = tuple(Fault(at=10 + 6.3 * i, kind="stop", client=f"c{i % 2}", intervals=3) for i in range(8))
    scenario = Scenario(
        seed=5,
        clients=(Client("c0", "consume"), Client("c1", "consume", claims_ahead=True)),
        faults=stops,
        delivery="at-most-once",
        messages=8.0,
        intervals=70,
        recovers=False,
    )
    result = simulate_one(scenario)
    assert result.violation is None, result.tell()


def test_a_worker_that_sets_messages_aside_forgets_all_of_a_lease_that_was_lost() -> None:
    scenario = Scenario(  # of seed 9007429: some were in the list being handled, behind a slow one
        seed=9007429,
        clients=(
            Client("c0", rate=1.005, claims_ahead=True, fetches_every=0.4),
            Client("c1", "poll", rate=0.9784, fetches_every=0.4, joins=30.86),
            Client("c2", "poll", rate=1.0043, fetches_every=0.5),
            Client("c3", "defer", rate=1.0192, fetches_every=0.4, joins=43.64),
        ),
        faults=(
            Fault(at=27.72, kind="crash", client="c2", intervals=60.57, size=0.212),
            Fault(at=34.65, kind="crash", client="c0", intervals=25.12, size=0.427, partition=1),
            Fault(at=34.77, kind="crash", client="c1", intervals=15.7, size=0.104),
            Fault(at=41.95, kind="forget", intervals=3.13, size=0.437),
            Fault(at=47.39, kind="outage", intervals=1.54, size=0.596, partition=1),
            Fault(at=47.54, kind="slow handler", client="c3", intervals=4.49, size=0.728),
        ),
        heartbeat_interval_ms=200,
        coordination_partitions=1,
        data_partitions=8,
        messages=13.1,
        handling_ms=1.0,
        intervals=54,
        recovers=False,
        records=0,
        snapshots=0,
    )
    assert simulate_one(scenario).violation is None


def test_idle_partitions_of_other_topics_readers_are_not_released_for_a_second_claimant() -> None:
    """The second claimant looked like a waiting one; a lease was released for it, was idle, and so on, for ever."""
    scenario = Scenario(  # of seed 382
        seed=382,
        clients=(
            Client("c0", claims_ahead=True, fetches_every=0.5),
            Client("c2", policy="release-if-behind", fetches_every=0.5, joins=29.14, reads="events"),
        ),
        faults=(
            Fault(at=39.85, kind="crash", client="c0", intervals=74.09, size=0.133),
            Fault(at=54.26, kind="grow", intervals=0.47, size=0.367, partition=1),
        ),
        delivery="at-most-once",
        heartbeat_interval_ms=300,
        coordination_partitions=1,
        data_partitions=4,
        messages=0.1,
        handling_ms=4.0,
        intervals=88,
        snapshots=50,
        other_partitions=1,
    )
    result = simulate_one(scenario)
    assert result.violation is None, result.tell()


@pytest.mark.parametrize(("seed", "delivery"), [(40, "at-least-once"), (44, "at-most-once")])
def test_a_group_that_is_forgotten_at_work_starts_over(seed: int, delivery: str) -> None:
    result = simulate_one(Scenario.from_seed(seed, intervals=40))
    assert result.scenario.delivery == delivery
    assert result.counts["forgotten"] > 5
    assert result.violation is None, result.tell()
