"""A broker with authentication: the watchdog uses the worker's name and password."""

from __future__ import annotations

import pytest

from kafka_marshal import Marshal
from kafka_marshal.adapters.kafka import KafkaCluster
from kafka_marshal.node.coordination_topic import create_topic
from tests.cli.test_secured import secured
from tests.client.conftest import wait_until
from tests.secured import login
from tests.watchdog.conftest import LONG_HI, Worker

__all__ = ["secured"]

pytestmark = [pytest.mark.broker, pytest.mark.slow]


def test_it_logs_in_as_its_worker(secured: str) -> None:
    create_topic(KafkaCluster(secured, login("root")), "__marshal", 2, 10)
    worker = Worker(
        bootstrap=secured,
        group="g",
        coordination="__marshal",
        topic="t",
        client_id="a",
        hi=LONG_HI,
        config=login("ann"),
    )
    try:
        worker.ready_watchdog()
        worker.do("claim", [0])
        with Marshal(secured, group_id="g", client_id="watcher", config=login("ann")) as watcher:
            assert [lease.client_id for lease in watcher.world.leases()] == ["a"]
            worker.kill()
            wait_until(lambda: [lease.client_id for lease in watcher.world.leases()] == [None])
    finally:
        worker.clean_up()
