"""``run(rate=…, priority=…)`` on a real broker: a backfill beside live messages."""

from __future__ import annotations

import time
from typing import Any

import pytest

from kafka_marshal import Group, Rate
from tests.client.conftest import wait_until
from tests.client.running import HOW, Crew, Handlers, Running, publish


@pytest.mark.parametrize("how", HOW)
def test_a_backfill_keeps_its_rate_and_live_messages_pass(crew: Crew, how: str) -> None:
    backfill, live = crew.topic(2), crew.topic(1)
    for partition in range(2):
        publish(crew, backfill, [f"k{number}" for number in range(5_000)], partition)
    begun: list[tuple[str, float]] = []
    handlers = Handlers(how, lambda message: begun.append((message.topic(), time.monotonic())))
    with crew.member("a") as marshal, marshal.consumer([backfill, live], mode=Group()) as consumer:
        began = time.monotonic()
        options: dict[str, Any] = {
            "rate": {backfill: Rate(50, burst=10, of_group=True)},
            "priority": lambda message: 9 * (message.topic() == live),
        }
        running = Running(consumer, handlers, **options)
        wait_until(lambda: marshal.health().rates)
        publish(crew, live, [f"k{number}" for number in range(200)])
        wait_until(lambda: sum(topic == live for topic, _ in begun) == 200)
        wait_until(lambda: len(begun) > 240)
        slow = [at for topic, at in begun if topic == backfill]
        assert len(slow) <= 10 + 50 * (slow[-1] - began)
        health = marshal.health()
        assert health.ok
        assert f"{backfill}: limited by rate= of run(…), 50 a second" in str(health)
        running.stop(marshal)
