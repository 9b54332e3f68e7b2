"""Stories of coordinated groups, which differ from those of claims."""

from __future__ import annotations

import pytest

from kafka_marshal.testing.simulation import Client, Fault, Scenario, simulate_one
from kafka_marshal.testing.simulation.campaign import Report, simulate
from tests.simulation.workers import member

# A violation counts even if a second try has none: CI's --reruns is not for these.
pytestmark = pytest.mark.flaky(reruns=0)


@pytest.mark.slow
@pytest.mark.timeout(300)  # on a busy machine
def test_half_a_dozen_seeds() -> None:
    report = Report()
    for seed in range(6):  # of a quarter of the usual length
        report.add(simulate_one(Scenario.from_seed(seed, intervals=20, coordinated=True)))
    report.raise_for_violation()
    seen = {code for _, code in report.outcomes}
    assert {"OK", "PARTIAL", "UNKNOWN_CONSUMER", "ILLEGAL_GENERATION", "PAUSED", "ALREADY_MEMBER"} <= seen
    assert {kind for kind, _ in report.outcomes} >= {"JoinGroup", "GroupHeartbeat", "LeaveGroup", "TopicsChanged"}


def test_each_strategy_and_each_delivery_is_drawn_and_claims_are_not() -> None:
    drawn = [Scenario.from_seed(seed, coordinated=True) for seed in range(60)]
    assert {story.strategy for story in drawn} == {"sticky", "range", "roundrobin"}
    assert {story.delivery for story in drawn} == {"at-least-once", "at-most-once"}
    assert {fault.kind for story in drawn for fault in story.faults} >= {"evict", "pause", "forget", "grow", "zombie"}
    assert not any(client.worker in ("by-hand", "ranges") for story in drawn for client in story.clients)
    assert any(client.paces for story in drawn for client in story.clients)  # sessions that differ
    assert {Scenario.from_seed(seed).strategy for seed in range(60)} == {None}


def test_an_own_worker_is_a_member() -> None:
    simulate(member, seeds=1, groups=True).raise_for_violation()


def test_evicted_while_a_call_gathers_messages_a_member_comes_back() -> None:
    # Messages that consume() had collected of a lost partition stayed in flight, and the member never joined again.
    result = simulate_one(Scenario.from_seed(20, coordinated=True))
    assert result.violation is None, result.tell()


def test_evicted_within_a_batch_a_worker_that_skips_its_rest_comes_back() -> None:
    """The variable of its loop kept the batch until the next one, which never came (seed 9054)."""
    scenario = Scenario(
        seed=9054,
        clients=(Client("c0", fetches_every=0.5), Client("c3", "batches", fetches_every=0.4, joins=55.28)),
        faults=(Fault(at=67.21, kind="evict", client="c3", intervals=2.72, size=0.667),),
        heartbeat_interval_ms=150,
        coordination_partitions=1,
        data_partitions=2,
        messages=13.6,
        intervals=79,
        records=0,
        strategy="sticky",
    )
    result = simulate_one(scenario)
    assert result.violation is None, result.tell()
