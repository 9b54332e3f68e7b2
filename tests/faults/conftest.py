"""A broker as people really have it: with the settings of compose files, Kafka's own defaults, and TLS."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kafka_marshal.testing import LocalBroker
from tests.cli.conftest import command, environment
from tests.client.conftest import scene
from tests.secured import certified, key_store

__all__ = ["command", "environment", "real_life", "scene"]

REAL_LIFE = {
    "auto.create.topics.enable": "true",
    "num.partitions": "1",
    # On one broker this topic can't be created: no consumer group ever gets a coordinator.
    "offsets.topic.replication.factor": "3",
    "offsets.topic.num.partitions": "50",
    "message.max.bytes": "100000",
    "listener.security.protocol.map": "CLIENT:SSL,INTERNAL:PLAINTEXT,CONTROLLER:PLAINTEXT",
}


@pytest.fixture(scope="module")
def real_life(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalBroker]:
    store, ca = certified(tmp_path_factory.mktemp("tls"))
    login = {"security.protocol": "SSL", "ssl.ca.location": str(ca)}
    with LocalBroker(properties={**REAL_LIFE, **key_store(store)}, client_config=login) as broker:
        yield broker
