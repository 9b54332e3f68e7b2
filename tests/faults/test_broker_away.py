"""What members that hold nothing, and so append next to nothing, report of a broker that is gone or frozen."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

from kafka_marshal import Batches, Group, Keys, Marshal
from kafka_marshal.admin import Admin
from kafka_marshal.testing import RunningKafka
from kafka_marshal.testing.select_broker import TEST_BOOTSTRAP
from tests.client.conftest import Scene, wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(TEST_BOOTSTRAP in os.environ, reason="another user's broker is not harmed"),
]

SILENT = ("Kafka has not answered for ", "have failed for ")


def is_silent(marshal: Marshal) -> bool:
    return any(text in problem for text in SILENT for problem in marshal.health().problems)


@pytest.fixture
def idle(scene: Scene) -> Iterator[dict[str, Marshal]]:
    """Members that hold nothing, each for another reason; ``holds`` has what two of them wait for."""
    topic, keys = scene.topic(1), Keys({(scene.topic(1), 0): [(0, 10)]})
    there: dict[str, Marshal] = {}
    kept: list[object] = []

    def member(name: str, group: str, make: Callable[[Marshal], object] = lambda marshal: None) -> Marshal:
        there[name] = scene.member(name, group_id=f"{scene.group}-{group}", heartbeat_interval=0.5)
        kept.append(make(there[name]))
        return there[name]

    holds = [member("keys holder", "k", lambda it: it.consumer(mode=keys)), member("holder", "c", claims(topic))]
    wait_until(lambda: all(each.health().leases for each in holds))
    member("keys waiter", "k", lambda it: it.consumer(mode=keys))
    member("waiter", "c", claims(topic))
    member("absent", "a", claims("nix"))
    member("absent ranges", "r", lambda it: it.ranges(["nix"]))
    member("absent batches", "b", lambda it: it.consumer(["nix"], mode=Batches()))
    member("group of an absent topic", "g", lambda it: it.consumer(["nix"], mode=Group(session_timeout=6)))
    member("no consumer", "n")
    drained = member("drained", "d", claims(topic))
    wait_until(lambda: drained.health().leases)
    Admin(scene.bootstrap, topic=scene.coordination).drain(f"{scene.group}-d", "drained")
    wait_until(lambda: not drained.health().leases)
    yield there


def claims(topic: str) -> Callable[[Marshal], object]:
    return lambda marshal: marshal.consumer([topic])


@pytest.mark.parametrize("is_frozen", [False, True], ids=["killed", "frozen"])
def test_each_says_that_kafka_does_not_answer_until_it_does(
    idle: dict[str, Marshal], kafka_broker: RunningKafka, is_frozen: bool
) -> None:
    assert [name for name, each in idle.items() if is_silent(each) or not each.health().ready] == []
    (kafka_broker.pause if is_frozen else kafka_broker.kill)()
    try:
        # All at one moment: none says meanwhile that it is back.
        wait_until(lambda: not [name for name, each in idle.items() if not is_silent(each)], 20)
        found = {name: each.health() for name, each in idle.items()}
        assert [name for name, each in found.items() if each.ready or each.ok or each.needs_restart] == []
        assert [name for name, each in idle.items() if each.metrics().ready] == []
    finally:
        (kafka_broker.resume if is_frozen else kafka_broker.restart)()
    wait_until(lambda: all(each.health().ready and not is_silent(each) for each in idle.values()), 30)
