"""Bootstrap addresses of two clusters: each has its own log, so both would assign the same partitions."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kafka_marshal import Admin, ConfigurationError, Marshal
from kafka_marshal.adapters.kafka import KafkaCluster
from kafka_marshal.cli import main
from kafka_marshal.node.coordination_topic import create_topic
from kafka_marshal.testing import LocalBroker
from kafka_marshal.testing.layout import free_ports

DIFFERENT = "brokers of different clusters"


@pytest.fixture(scope="module")
def addresses(kafka_bootstrap: str) -> Iterator[list[str]]:
    with LocalBroker() as other:
        found = [kafka_bootstrap, other.bootstrap_servers]
        for address in found:
            cluster = KafkaCluster(address)
            create_topic(cluster, "__two", 2, 10)
            cluster.close()
        yield found


@pytest.mark.parametrize("order", [1, -1])
def test_q35_two_clusters_are_refused_by_name(addresses: list[str], order: int) -> None:
    with pytest.raises(ConfigurationError, match=DIFFERENT) as told:
        Marshal(",".join(addresses[::order]), group_id="g", topic="__two")
    assert all(address in str(told.value) for address in addresses)


def test_q35_two_clusters_are_refused_to_an_admin(addresses: list[str]) -> None:
    with pytest.raises(ConfigurationError, match=DIFFERENT), Admin(",".join(addresses), topic="__two").pause("g"):
        pytest.fail("paused the group on one cluster of two")


@pytest.mark.parametrize("command", ["init", "status"])
def test_q35_two_clusters_are_refused_by_the_command(
    addresses: list[str], command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main([command, "--bootstrap", ",".join(addresses), "--topic", "__two"])
    assert code == 2
    assert DIFFERENT in capsys.readouterr().err


def test_one_cluster_by_two_names_is_one(addresses: list[str]) -> None:
    port = addresses[0].rpartition(":")[2]
    cluster = KafkaCluster(f"{addresses[0]},localhost:{port}")
    found = cluster.cluster_ids(10)
    cluster.close()
    assert len(found) == 2
    assert len(set(found.values())) == 1


def test_an_address_that_is_down_is_left_out_and_not_waited_for(addresses: list[str]) -> None:
    dead = f"127.0.0.1:{free_ports(1)[0]}"
    cluster = KafkaCluster(f"{dead},{addresses[0]}")
    found = cluster.cluster_ids(60)
    cluster.close()
    assert list(found) == addresses[:1]
    with Marshal(f"{dead},{addresses[0]}", group_id="g", topic="__two") as marshal:
        assert marshal.world.leases() == []


def test_one_address_is_not_asked(addresses: list[str]) -> None:
    cluster = KafkaCluster(addresses[0])
    assert cluster.cluster_ids(60) == {}
    cluster.close()


def test_q35_a_member_that_learns_it_later_ends(addresses: list[str]) -> None:
    """The second cluster's broker starts while the member is working."""
    with pytest.raises(ConfigurationError, match=DIFFERENT):
        _meet_late(addresses)


def _meet_late(addresses: list[str]) -> None:
    cluster = KafkaCluster(",".join(addresses))
    known, asked = cluster.cluster_ids, 0

    def slow(wait_s: float) -> dict[str, str]:
        nonlocal asked
        asked += 1
        return {} if asked <= 2 else known(10)

    cluster.cluster_ids = slow  # type: ignore[method-assign]
    with (
        Marshal.on_cluster(cluster, group_id="g", topic="__two") as marshal,
        marshal.consumer(["nothing"]) as consumer,
    ):
        consumer.poll(20)
