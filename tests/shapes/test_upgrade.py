"""A level unknown to this release (E4): the fleet stops there and reports it."""

from __future__ import annotations

from functools import partial

import pytest

from kafka_marshal import Consumer, Marshal
from kafka_marshal.errors import UpgradeRequiredError
from rationalizer import Upgrade, encode, route_lease
from tests.client.conftest import Scene, take, wait_until
from tests.shapes.conftest import Times, in_time


def drop(consumer: Consumer) -> bool:
    """Poll until something is raised."""
    consumer.poll(0.1)
    return False


def test_e4_at_an_upgrade_the_fleet_stops_and_says_so(scene: Scene, times: Times) -> None:
    """Only in the CP that was raised."""
    topic = scene.topic(4, 50)
    members = [scene.member(name) for name in ("a", "b")]
    consumers = [member.consumer([topic]) for member in members]
    for consumer in consumers:
        take(consumer, 20)
    cps = [route_lease(topic, partition, 3) for partition in range(4)]
    raised = cps[0]
    appender = scene.cluster.appender(scene.coordination, delivery_timeout_ms=10_000)
    appender.append(raised, encode(Upgrade("1", "somebody", "g", 109)))
    assert appender.flush(10) == 0
    appender.close()

    for consumer in consumers:
        with pytest.raises(UpgradeRequiredError, match="level 109, which this release") as caught:
            wait_until(partial(drop, consumer), 60)
        assert caught.value.level == 109
    with pytest.raises(UpgradeRequiredError, match="level 109"):
        members[0].claim(topic, 0, timeout=5)
    # A later member reports it, too, and the other CPs continue.
    later = in_time("ready", times, lambda: scene.member("later"), Marshal.close)
    told = later.consumer([scene.topic()])

    def hears() -> None:
        with pytest.raises(UpgradeRequiredError, match="level 109"):
            wait_until(partial(drop, told), 60)

    in_time("refused", times, hears)
    assert told.poll(0.1) is None
    with pytest.raises(UpgradeRequiredError, match="level 109"):
        later.claim(topic, 0, timeout=5)
    free = next(number for number in range(100) if route_lease("elsewhere", number, 3) != raised)
    assert later.claim("elsewhere", free, timeout=5).valid
