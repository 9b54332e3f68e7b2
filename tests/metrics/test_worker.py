"""A worker process on a real broker, seen from outside: probes, metrics, lag."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import pytest
from confluent_kafka import Producer

from kafka_marshal import Group
from tests.client.conftest import Scene, wait_until
from tests.metrics.conftest import ServingWorker

PARTITIONS = 2
EACH = 20
AGE_S = 120


def publish_aged(scene: Scene, topic: str) -> None:
    """Publish messages with timestamps of two minutes ago."""
    producer = Producer({"bootstrap.servers": scene.bootstrap})
    stamp_ms = int((time.time() - AGE_S) * 1000)
    for partition in range(PARTITIONS):
        for number in range(EACH):
            producer.produce(topic, str(number).encode(), partition=partition, timestamp=stamp_ms)
    assert producer.flush(20) == 0


@pytest.mark.parametrize("run", [False, True], ids=["loop", "run"])
def test_a_worker_from_its_start_to_a_stall(scene: Scene, serving: Callable[..., ServingWorker], run: bool) -> None:
    topic = scene.topic(PARTITIONS)
    publish_aged(scene, topic)
    worker = serving(topic, run=run)

    # Ready before it owns anything: a rolling update waits for readiness, and nothing moves before.
    assert (worker.get("/readyz").status, worker.get("/livez").status) == (200, 200)
    values = worker.values()
    assert (values["kafka_marshal_leases"], values["kafka_marshal_ready"]) == (0, 1)
    assert json.loads(worker.get("/lag").text)["lag"] == 0

    # It works and its handlers wait: lag is constant in messages and grows in seconds.
    worker.order("consume")
    wait_until(lambda: worker.values().get("kafka_consumer_group_lag") == PARTITIONS * EACH)
    in_hand = PARTITIONS * EACH if run else 1  # a loop in its first handler has fetched no more
    wait_until(lambda: worker.values()["kafka_marshal_in_hand_messages"] == in_hand)
    values = worker.values()
    assert values["kafka_marshal_leases"] == PARTITIONS
    assert values["kafka_marshal_processed_messages_total"] == 0
    known = PARTITIONS if run else 1  # the age of unfetched messages counts from when they were first seen
    assert AGE_S * known <= values["kafka_marshal_time_lag_seconds"] < (AGE_S + 60) * PARTITIONS
    lag = json.loads(worker.get("/lag").text)
    assert (lag["group"], lag["lag"]) == (scene.group, PARTITIONS * EACH)
    assert AGE_S <= lag["lag_seconds"] < AGE_S + 60
    before = time.monotonic()
    assert [worker.get(path).status for path in ("/livez", "/readyz", "/metrics")] == [200, 200, 200]
    assert time.monotonic() - before < 2, "a handler that hangs holds up no probe"

    # More messages arrive: lag grows though no handler returns.
    scene.publish(topic, PARTITIONS, 5)
    wait_until(lambda: worker.values()["kafka_consumer_group_lag"] == PARTITIONS * (EACH + 5))

    # It catches up.
    worker.order("go")
    wait_until(lambda: worker.values()["kafka_consumer_group_lag"] == 0)
    values = worker.values()
    assert values["kafka_marshal_time_lag_seconds"] == 0
    assert values["kafka_marshal_processed_messages_total"] == PARTITIONS * (EACH + 5)
    assert values["kafka_marshal_log_behind_records"] <= 2
    if run:
        assert values["messaging_process_duration_seconds_count"] == PARTITIONS * (EACH + 5)
    wait_until(lambda: json.loads(worker.get("/lag").text)["lag"] == 0)

    # Its background thread is blocked: not live, not ready, but still measured.
    worker.order("stall")
    wait_until(lambda: worker.get("/livez").status == 503)
    assert "has not turned" in worker.get("/livez").text
    assert worker.get("/readyz").status == 503
    values = worker.values()
    assert (values["kafka_marshal_needs_restart"], values["kafka_marshal_ready"]) == (1, 0)
    assert values["kafka_marshal_turned_ago_seconds"] > 0.5

    worker.order("end")
    assert worker.process.wait(20) == 0


def test_members_of_a_coordinated_group_are_measured_the_same_way(scene: Scene) -> None:
    from kafka_marshal import Admin

    with Admin(scene.bootstrap, topic=scene.coordination) as admin:
        admin.upgrade()
    topic = scene.topic(PARTITIONS, EACH)
    marshal = scene.member("a")
    with marshal.consumer([topic], mode=Group()) as consumer:
        messages = consumer.consume(PARTITIONS * EACH, 20)
        assert len(messages) == PARTITIONS * EACH
        found = marshal.metrics()
        assert (found.leases, found.members, found.lag) == (PARTITIONS, 1, PARTITIONS * EACH)
        assert found.lease_remaining_seconds is not None
        assert found.lease_remaining_seconds > 0
        for message in messages:
            consumer.done(message)
        wait_until(lambda: marshal.metrics().lag == 0)
        assert sum(one.processed for one in marshal.metrics().messages) == PARTITIONS * EACH
        wait_until(lambda: {"GroupHeartbeat", "JoinGroup"} <= {one.type for one in marshal.metrics().records})
