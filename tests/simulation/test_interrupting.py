"""Asynchronous exceptions in workers' calls and in reads; and log lines that must not occur."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from kafka_marshal import Delivery
from kafka_marshal.client.fetching import Fetcher
from kafka_marshal.engine.policies import Balanced, View, Wishes
from kafka_marshal.engine.work.run import Run
from kafka_marshal.testing.simulation import Client, Fault, Scenario, simulate_one
from kafka_marshal.testing.simulation.scenario import INTERRUPTED

# A violation counts even if a second try has none: CI's --reruns is not for these.
pytestmark = pytest.mark.flaky(reruns=0)

KINDS = ("interrupts", "torn reads")


def _scenario(worker: str, *kinds: str, delivery: Delivery = "at-least-once") -> Scenario:
    clients = (Client("c0", worker), Client("c1", worker, claims_ahead=True))
    faults = tuple(Fault(2.0, kind, client.name, 25.0, 0.9) for kind in kinds for client in clients)
    return Scenario(1, clients, faults, delivery, intervals=30, messages=30.0)


WORKERS = [
    *((worker, "at-least-once") for worker in sorted(INTERRUPTED)),
    *((worker, "at-most-once") for worker in sorted(INTERRUPTED - {"fenced", "lanes"})),
]


@pytest.mark.parametrize(("worker", "delivery"), WORKERS)
def test_nothing_is_lost_where_calls_and_reads_raise(worker: str, delivery: Delivery) -> None:
    result = simulate_one(_scenario(worker, *KINDS, delivery=delivery))
    assert result.violation is None, result.tell()
    least = 3 if worker == "lanes" else 10  # one call handles many messages
    assert result.counts["interrupted"] > least
    assert result.counts["torn"] > least


def test_the_same_story_is_the_same_history() -> None:
    first, again = (simulate_one(_scenario("poll", *KINDS)) for _ in range(2))
    assert first.events == again.events
    assert first.history_digest != simulate_one(replace(first.scenario, seed=2)).history_digest


def test_seeds_have_them() -> None:
    faults = [fault.kind for seed in range(50) for fault in Scenario.from_seed(seed).faults]
    assert min(map(faults.count, KINDS)) > 5
    assert not [x for seed in range(50) for x in Scenario.from_seed(seed, worker=True).faults if x.kind in KINDS]


def test_a_loop_that_is_left_after_an_error_gives_its_messages_back() -> None:
    """The error kept its frames, and with them the loop, which was never closed (seed 1993)."""
    scenario = Scenario(
        seed=1993,
        clients=(Client("c0", "batches", claims_ahead=True), Client("c2", claims_ahead=True), Client("c3", "poll")),
        faults=(Fault(61.45, "torn reads", "c2", 12.18, 0.18),),
        heartbeat_interval_ms=200,
        messages=13.7,
        handling_ms=1.0,
        intervals=75,
        snapshots=150,
    )
    result = simulate_one(scenario)
    assert result.violation is None, result.tell()


def what_was_taken_and_is_lost_is_not_found(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Run, "astray", lambda self, *, final=False: [])


def a_torn_read_is_not_read_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Fetcher, "_go_back", lambda self: None)


@pytest.mark.parametrize(
    ("broken", "kind", "promise"),
    [
        (what_was_taken_and_is_lost_is_not_found, "interrupts", "liveness"),
        (a_torn_read_is_not_read_again, "torn reads", "lost"),
    ],
)
def test_what_only_this_trouble_finds(
    broken: Callable[[pytest.MonkeyPatch], None], kind: str, promise: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken(monkeypatch)
    others = [x for x in KINDS if x != kind]
    assert simulate_one(_scenario("poll", *others)).violation is None
    violation = simulate_one(_scenario("poll", kind)).violation
    assert violation is not None
    assert violation.promise == promise


def test_a_policy_that_raises_breaks_the_story_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    wishes, asked = Balanced.wishes, list[int]()

    def moody(self: Balanced, view: View, own: tuple[tuple[str, int], ...], now: float) -> Wishes:
        asked.append(1)
        if len(asked) % 5 == 0:
            raise RuntimeError("a bad day")
        return wishes(self, view, own, now)

    monkeypatch.setattr(Balanced, "wishes", moody)
    for _ in range(2):
        violation = simulate_one(_scenario("poll")).violation
        assert violation is not None
        assert violation.promise == "raised"
        assert "the policy Balanced raised RuntimeError: a bad day" in violation.message
