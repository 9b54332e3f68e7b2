"""The broker in a container: run if an engine answers; what needs none is tested everywhere."""

from __future__ import annotations

import importlib.util

import pytest

from kafka_marshal.adapters.probe import Probe
from kafka_marshal.testing import BrokerDiedError, LocalBrokerError, layout, select_broker
from tests.broker.helpers import consume, produce

INSTALLED = importlib.util.find_spec("testcontainers") is not None


def test_settings_become_environment_variables_by_the_images_rule() -> None:
    assert select_broker.environment({"min.insync.replicas": "2", "a_b.c-d": "x"}) == {
        "KAFKA_MIN_INSYNC_REPLICAS": "2",
        "KAFKA_A__B_C___D": "x",
    }


def test_native_and_container_brokers_have_the_same_settings_but_for_addresses() -> None:
    for brokers, copies, in_sync in ((1, "1", "1"), (3, "3", "2")):
        settings = layout.common_settings(brokers)
        assert settings["min.insync.replicas"] == in_sync
        for topic in ("default", "offsets.topic", "transaction.state.log", "share.coordinator.state.topic"):
            assert settings[f"{topic}.replication.factor"] == copies
        assert settings.items() <= select_broker.ContainerCluster(brokers)._settings(1, 9092).items()


@pytest.mark.skipif(INSTALLED, reason="testcontainers is installed")
def test_without_the_extra_no_container_is_tried_and_asking_for_one_names_it() -> None:
    assert not select_broker.engine_answers()
    with pytest.raises(LocalBrokerError, match=r"pip install 'kafka-marshal\[containers\]'"):
        select_broker.ContainerCluster().start()


def test_what_is_not_running_says_so() -> None:
    cluster = select_broker.ContainerCluster(2, port=9092)
    assert cluster.bootstrap_servers == "localhost:9092,localhost:9093"
    for control in (cluster.kill, cluster.pause, cluster.resume, cluster.restart):
        with pytest.raises(LocalBrokerError, match="no running broker 1"):
            control()
    assert cluster.log_tail() == ""
    cluster.check()
    cluster.stop()


@pytest.mark.skipif(not select_broker.engine_answers(), reason="no engine answers, or [containers] is missing")
@pytest.mark.timeout(600)
@pytest.mark.slow
@pytest.mark.parametrize("brokers", [1, 3])
def test_a_broker_in_a_container_is_killed_restarted_and_paused(brokers: int) -> None:
    cluster = select_broker.ContainerCluster(brokers).start()
    try:
        probe = Probe(cluster.bootstrap_servers)
        probe.create_topic("contained", 1, brokers, {})
        produce(cluster, "contained", b"before")
        cluster.check()
        cluster.kill(brokers)
        with pytest.raises(BrokerDiedError):
            cluster.check()
        cluster.restart(brokers)
        cluster.check()
        assert consume(cluster, "contained", 1) == [b"before"]
        cluster.pause(1)
        assert Probe(cluster.bootstrap_servers.split(",")[0]).broker_ids(1.0) is None
        cluster.resume(1)
        assert Probe(cluster.bootstrap_servers.split(",")[0]).broker_ids(30.0) == set(cluster.broker_ids)
        assert cluster.log_tail()
    finally:
        cluster.stop()
