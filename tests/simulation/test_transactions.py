"""Stories of workers that commit outputs and progress in transactions."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kafka_marshal.adapters.memory.broker import TransactionalIds
from kafka_marshal.engine.work.lanes import Order
from kafka_marshal.errors import ConfigurationError
from kafka_marshal.testing.simulation import Scenario, simulate, simulate_one
from kafka_marshal.testing.simulation.campaign import Report
from tests.mutants.transaction_stories import struck_while_taking_over

# A violation counts even if a second try has none: CI's --reruns is not for these.
pytestmark = pytest.mark.flaky(reruns=0)


def test_outputs_are_seen_once_and_in_order() -> None:
    for seed, coordinated in ((3, False), (4, True)):
        story = Scenario.from_seed(seed, intervals=20, transactions=True, coordinated=coordinated)
        result = simulate_one(story)
        assert result.violation is None, result.tell()
        assert result.counts["outputs"] > 150


@pytest.mark.parametrize(("worker", "order"), [("transacts-at-once", "none"), ("transacts-in-lanes", "key")])
def test_nor_do_several_batches_at_once_or_many_handlers_repeat_any(worker: str, order: Order) -> None:
    """Other programs commit for the group, and Kafka's offsets are dropped (M7)."""
    for seed, coordinated in ((9, False), (0, True)):
        story = Scenario.from_seed(seed, intervals=20, transactions=True, coordinated=coordinated)
        assert {"foreign commit", "dropped offset"} <= {fault.kind for fault in story.faults}
        clients = tuple(replace(x, worker=worker) if x.worker == "transacts" else x for x in story.clients)
        result = simulate_one(replace(story, clients=clients, order=order))
        assert result.violation is None, result.tell()
        assert result.counts["outputs"] > 150


def test_a_lease_that_comes_back_while_its_last_commit_hangs_ends_no_run() -> None:
    result = simulate_one(struck_while_taking_over(1, "stop", "transacts-in-lanes"))
    assert result.violation is None, result.tell()
    assert result.counts["outputs"] > 500


@pytest.mark.slow
@pytest.mark.timeout(300)  # on a busy machine
@pytest.mark.parametrize("coordinated", [False, True])
def test_three_seeds(coordinated: bool) -> None:
    report = Report()
    for seed in range(10, 13):
        report.add(simulate_one(Scenario.from_seed(seed, intervals=40, transactions=True, coordinated=coordinated)))
    report.raise_for_violation()
    assert report.counts["outputs"] > 1_000


def test_a_broker_that_fences_no_producer_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TransactionalIds, "_check", lambda self, transactional_id, at: self.expire())
    results = (simulate_one(Scenario.from_seed(seed, intervals=40, transactions=True)) for seed in range(4, 20))
    found = next(result.violation for result in results if result.violation is not None)
    assert found.promise == "outputs"


def test_a_seed_is_one_history() -> None:
    story = Scenario.from_seed(5, intervals=10, transactions=True)
    assert simulate_one(story).history_digest == simulate_one(story).history_digest


def test_what_can_not_be_combined() -> None:
    for options in ({"lanes": True}, {"delivery": "at-most-once"}):
        with pytest.raises(ConfigurationError, match="stories of transactions"):
            simulate(seeds=1, transactions=True, **options)
