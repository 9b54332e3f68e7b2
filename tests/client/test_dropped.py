"""Unreferenced objects are closed with a warning; those used through any handle stay open (notebooks)."""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Iterator
from typing import Any
from weakref import ref

import pytest

from kafka_marshal import Claims, Group, Marshal
from kafka_marshal.adapters.memory import MemoryCluster
from kafka_marshal.client import closing
from kafka_marshal.client.marshal import _end_at_exit
from kafka_marshal.node.coordination_topic import create_topic
from tests.client.conftest import wait_until

HI = 3_000  # a busy machine may stop a thread for a second or two


class Ground:
    """A log in memory with two partitions to claim, and an observing member."""

    def __init__(self) -> None:
        self.cluster = MemoryCluster()
        create_topic(self.cluster, "__marshal", 1, 10)
        self.cluster.broker.create_topic("t", 2)
        for partition in (0, 1):
            for number in range(10):
                self.cluster.broker.produce("t", partition, str(number).encode())
        self.watcher = self.member("watcher")

    def member(self, client_id: str) -> Marshal:
        return Marshal.on_cluster(
            self.cluster.connect(client_id), group_id="g", client_id=client_id, heartbeat_interval=HI / 1000
        )

    def holders(self) -> set[str | None]:
        return {lease.client_id for lease in self.watcher.world.leases()}

    def stables(self) -> dict[int, int | None]:
        return {lease.partition: lease.stable for lease in self.watcher.world.leases()}

    def wait_holders(self, *names: str | None) -> None:
        wait_until(lambda: self.holders() == set(names), 60, f"held by {names}, not {self.holders()}")


@pytest.fixture
def ground(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ground]:
    monkeypatch.setattr(closing, "GRACE_S", 0.0)  # else each test would wait for it
    made = Ground()
    yield made
    made.watcher.close()


@pytest.mark.parametrize("kind", ["consumer", "ranges", "group"])
def test_what_a_notebook_forgets_is_released_with_a_warning(
    ground: Ground, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    """The cell runs again: both names are bound to new objects."""
    if kind == "group":
        ground.watcher.close()
        ground.watcher = ground.member("watcher")
    marshal: Any = ground.member("cell")
    make = marshal.ranges if kind == "ranges" else marshal.consumer
    consumer: Any = make(["t"], mode=Group() if kind == "group" else Claims())
    wait_until(lambda: len(consumer.assignment()) == 2)
    ground.wait_holders("cell")
    with caplog.at_level(logging.WARNING, "kafka_marshal"):
        marshal = consumer = make = None
        gc.collect()
        ground.wait_holders(None)
        wait_until(lambda: "Marshal(group_id='g', client_id='cell'" in caplog.text)
    assert "was dropped without close()" in caplog.text


def test_a_consumer_keeps_its_marshal_and_so_does_its_iteration(
    ground: Ground, caplog: pytest.LogCaptureFixture
) -> None:
    consumer: Any = ground.member("only").consumer(["t"])
    gc.collect()
    messages: Any = iter(consumer)
    consumer = None
    gc.collect()
    seen = [(message.partition(), message.offset()) for _, message in zip(range(20), messages, strict=False)]
    assert sorted(seen) == [(partition, offset) for partition in (0, 1) for offset in range(10)]
    assert "dropped" not in caplog.text
    messages = None
    gc.collect()
    ground.wait_holders(None)
    assert ground.stables() in ({0: 9, 1: 8}, {0: 8, 1: 9}), "what was done is kept; the last one comes again"


def test_a_lease_keeps_its_marshal(ground: Ground) -> None:
    lease: Any = ground.member("claims").claim("t", 0)
    gc.collect()
    lease.heartbeat(3)
    assert lease.valid
    lease = None
    gc.collect()
    ground.wait_holders(None)


def test_a_marshal_keeps_leases_without_another_reference(ground: Ground) -> None:
    marshal = ground.member("leader")
    marshal.claim("t", 1)
    gc.collect()
    ground.wait_holders("leader")
    marshal.close()


def test_a_consumer_that_is_dropped_leaves_its_marshal_at_work(
    ground: Ground, caplog: pytest.LogCaptureFixture
) -> None:
    marshal = ground.member("keeps")
    held: list[object] = [marshal.consumer(["t"])]
    ground.wait_holders("keeps")
    held.clear()
    gc.collect()
    ground.wait_holders(None)
    assert "Consumer([t], group_id='g', open) was dropped" in caplog.text
    with marshal.consumer(["t"]) as again:
        assert again.poll(20) is not None
    marshal.close()


def test_callbacks_get_the_consumer_that_the_user_has(ground: Ground) -> None:
    told: list[object] = []
    assigned = threading.Event()

    def on_assign(consumer: object, partitions: object) -> None:
        told.append(consumer)
        assigned.set()

    with ground.member("a") as marshal, marshal.consumer(["t"], on_assign=on_assign) as consumer:
        assert assigned.wait(20)
        assert told[0] is consumer
        told.clear()


def test_what_was_closed_is_dropped_without_a_word(ground: Ground, caplog: pytest.LogCaptureFixture) -> None:
    with ground.member("a") as marshal, marshal.consumer(["t"]) as consumer:
        assert consumer.poll(20) is not None
    del marshal, consumer
    gc.collect()
    assert "dropped" not in caplog.text


def test_the_collector_may_run_while_the_lock_is_held(ground: Ground) -> None:
    """It must take no lock: it would wait for its own thread."""
    held: list[Any] = [marshal := ground.member("a"), marshal.consumer(["t"])]
    ground.wait_holders("a")
    driver = marshal._driver
    del marshal
    with driver.condition:
        held.clear()
        gc.collect()
    ground.wait_holders(None)
    wait_until(lambda: driver.is_over)


def test_the_interpreters_end_closes_a_marshal_whose_start_was_interrupted(ground: Ground) -> None:
    """As by ``sys.exit()`` of a signal handler: its driver has begun, and the constructor has not got it."""
    opened, begun = ground.member("a"), Marshal.__new__(Marshal)
    _end_at_exit(ref(begun), opened._ending, opened._driver, None)
    assert opened._driver.is_over
