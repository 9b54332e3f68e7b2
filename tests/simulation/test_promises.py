"""Each promise is checked: a product that breaks it is found. And faults that the simulator has found."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from kafka_marshal.client.consumer import Consumer
from kafka_marshal.client.fetching import Fetcher
from kafka_marshal.engine.claims.leases import HeldLease, LeaseBook
from kafka_marshal.engine.claims.placement import Placement
from kafka_marshal.engine.policies import Balanced, View, Wishes
from kafka_marshal.engine.work.grants import Grants
from kafka_marshal.engine.work.tracker import Tracker
from kafka_marshal.testing.simulation import Client, Fault, Job, Scenario, simulate_one
from kafka_marshal.testing.simulation.network import SimulatedTail
from kafka_marshal.types import TopicPartition
from rationalizer import Outcome, ReleasingPartition, World, codes
from rationalizer.progress import Progress

# A violation counts even if a second try has none: CI's --reruns is not for these.
pytestmark = pytest.mark.flaky(reruns=0)

Patch = Callable[[pytest.MonkeyPatch], None]


def leases_never_end_by_themselves(patch: pytest.MonkeyPatch) -> None:
    prove = LeaseBook._prove

    def proven_for_long(self: LeaseBook, lease: HeldLease, sent_at: float, log_time: int) -> None:
        prove(self, lease, sent_at, log_time)
        lease.valid_until += 20 * lease.heartbeat_interval_ms
        lease.refresh()

    patch.setattr(LeaseBook, "_prove", proven_for_long)


def a_replica_misses_a_record(patch: pytest.MonkeyPatch) -> None:
    entries = SimulatedTail._entries

    def some(self: SimulatedTail, cp: int, position: int, end: int) -> Any:
        found = entries(self, cp, position, end)
        misses = self._process.client_id == "c1" and position % 7 == 0 and len(found) > 1
        return found[1:] if misses else found

    patch.setattr(SimulatedTail, "_entries", some)


def progress_goes_back(patch: pytest.MonkeyPatch) -> None:
    apply = World.apply

    def applied(self: World, offset: int, timestamp_ms: int, value: bytes | None) -> Outcome:
        outcome = apply(self, offset, timestamp_ms, value)
        if isinstance(outcome.record, ReleasingPartition) and outcome.accepted:
            for lease in self.leases():
                lease.progress.stable = max(-1, lease.progress.stable - 1)
        return outcome

    patch.setattr(World, "apply", applied)


def everything_is_granted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Progress, "grant", lambda self, proposal: codes.OK)


def what_is_handed_out_is_done(patch: pytest.MonkeyPatch) -> None:
    hand_out = Tracker.hand_out

    def done(self: Tracker[Any], run: Any) -> None:
        hand_out(self, run)
        self._commit_offsets(run.covers_from, run.last)

    patch.setattr(Tracker, "hand_out", done)


def nobody_claims(patch: pytest.MonkeyPatch) -> None:
    wishes = Placement.wishes
    patch.setattr(Placement, "wishes", lambda self, now: wishes(self, now) and None)


def grants_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Grants, "report", lambda self, key, first, last: None)


def the_latest_claim_wins(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("rationalizer.leases.lease.Lease.is_stale", lambda self, log_time: True)


def partitions_go_round(patch: pytest.MonkeyPatch) -> None:
    wishes = Balanced.wishes

    def restless(self: Balanced, view: View, own: tuple[Any, ...], now: float) -> Wishes:
        found = wishes(self, view, own, now)
        return found if found.claim or found.ask or len(own) < 2 else Wishes(release=(min(own),))

    patch.setattr(Balanced, "wishes", restless)


@pytest.mark.parametrize(
    ("broken", "promise", "delivery"),
    [
        (leases_never_end_by_themselves, "trust", "at-least-once"),
        (a_replica_misses_a_record, "replicas differ", "at-least-once"),
        (progress_goes_back, "progress", "at-least-once"),
        (everything_is_granted, "repeated", "at-most-once"),
        (what_is_handed_out_is_done, "lost", "at-least-once"),
        (nobody_claims, "liveness", "at-least-once"),
        (partitions_go_round, "liveness", "at-least-once"),
        (grants_are_forgotten, "lost", "at-most-once"),
        (the_latest_claim_wins, "two owners", "at-least-once"),
    ],
)
def test_a_product_that_breaks_a_promise_is_found(
    broken: Patch, promise: str, delivery: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken(monkeypatch)
    for seed in range(1, 60):
        scenario = Scenario.from_seed(seed, intervals=40)
        if scenario.delivery == delivery and scenario.clocks_are_trusted:
            violation = simulate_one(scenario).violation
            if violation is not None:
                assert violation.promise == promise
                return
    pytest.fail("nothing was found")


def _scenario(*faults: Fault, worker: str = "iterate", **options: Any) -> Scenario:
    return Scenario(1, (Client("c0", worker), Client("c1", worker)), faults, intervals=40, messages=8.0, **options)


def test_batches_waits_where_what_it_had_is_gone() -> None:
    """Ended leases took away the messages of a waiting batch: from then on the loop spun without waiting."""

    def fills_for_long(job: Job) -> None:
        with job.marshal() as marshal, marshal.consumer([job.topic]) as consumer:
            for batch in consumer.batches(max_messages=1_000, timeout=3 * job.heartbeat_interval_ms / 1000):
                for message in batch:
                    job.handle(message)
                batch.done()

    outages = (Fault(5, "outage", intervals=6.0), Fault(20, "cut off", "c0", intervals=6.0))
    result = simulate_one(_scenario(*outages, worker="yours"), fills_for_long)
    assert result.violation is None, result.violation


def test_consume_leaves_out_what_it_got_before_its_lease_ended() -> None:
    """It had messages and waited for more; meanwhile their lease was lost, and it returned them (seed 35)."""
    late, returned = list[tuple[str, int]](), list[int]()

    def consumes(job: Job) -> None:
        lost: set[tuple[str, int]] = set()

        def on_lost(consumer: Consumer, partitions: list[TopicPartition]) -> None:
            lost.update((x.topic, x.partition) for x in partitions)

        def on_assign(consumer: Consumer, partitions: list[TopicPartition]) -> None:
            lost.difference_update((x.topic, x.partition) for x in partitions)

        with (
            job.marshal() as marshal,
            marshal.consumer([job.topic], on_lost=on_lost, on_assign=on_assign) as consumer,
        ):
            while not marshal.stopping:
                messages = consumer.consume(1_000, 7 * job.heartbeat_interval_ms / 1000)
                returned.append(len(messages))
                gone = set(lost)
                for message in messages:
                    key = (message.topic() or "", message.partition() or 0)
                    if key in gone:
                        late.append(key)
                    else:
                        job.handle(message)
                        consumer.done(message)

    faults = tuple(Fault(at, "cut off", "c0", intervals=5.0) for at in (5, 15, 25))
    result = simulate_one(_scenario(*faults, worker="yours"), consumes)
    assert result.violation is None, result.violation
    assert max(returned) > 0
    assert late == []


def test_consume_keeps_its_timeout_at_most_once() -> None:
    """Each request of another message took time, and the clock was read only when there was no other."""
    waited: list[float] = []

    def consumes(job: Job) -> None:
        with (
            job.marshal() as marshal,
            marshal.consumer([job.topic], delivery="at-most-once", batch_size=1) as consumer,
        ):
            while not marshal.stopping:
                began = job.monotonic()
                messages = consumer.consume(100, 0.2)
                waited.append(job.monotonic() - began)
                for message in messages:
                    job.handle(message)

    clients = (Client("c0", "yours", fetches_every=0.3), Client("c1", "yours", fetches_every=0.3))
    result = simulate_one(
        Scenario(1, clients, delivery="at-most-once", intervals=40, recovers=False, handling_ms=0.1), consumes
    )
    assert result.violation is None, result.violation
    assert max(waited) < 0.2 + 2 * 0.5  # one request may be in transit: its record and the answer


def test_a_loop_that_never_waits_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    pump = Fetcher.pump
    monkeypatch.setattr(Fetcher, "pump", lambda self, timeout_s, then=None: pump(self, 0.0, then))
    violation = simulate_one(_scenario(worker="iterate")).violation
    assert violation is not None
    assert violation.promise == "busy waiting"


def test_other_threads_of_the_process_sleep_as_ever() -> None:
    inside, slept = threading.Event(), threading.Event()
    errors: list[BaseException] = []

    def sleeper() -> None:
        inside.wait(20)
        try:
            for _ in range(3):
                time.sleep(0.001)
        except BaseException as error:  # noqa: BLE001 - any exception is wrong
            errors.append(error)
        slept.set()

    def worker(job: Job) -> None:
        inside.set()
        slept.wait(20)  # the other thread sleeps during a turn of a simulated task

    thread = threading.Thread(target=sleeper)
    thread.start()
    simulate_one(Scenario(seed=1, clients=(Client("c0", worker="yours"),), intervals=2, recovers=False), worker)
    thread.join(20)
    assert not errors
