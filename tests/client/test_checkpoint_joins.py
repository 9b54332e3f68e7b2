"""Which members a group that takes checkpoints lets in; on a cluster in memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import pytest

from kafka_marshal import CheckpointPolicy, ConfigurationError, Group, GroupConsumer, Marshal, StateError
from kafka_marshal.node import coordination_topic
from rationalizer import Record, SettleOffsets, encode
from tests.client.conftest import wait_until
from tests.client.test_checkpoints import PARTITIONS, POLICY, SESSION, Team
from tests.faults.stories import GROUP, TOPIC, memory_cluster
from tests.fleet import Fleet, started


@pytest.fixture
def team() -> Iterator[Team]:
    made = Team()
    yield made
    made.close()


def refusal(consumer: GroupConsumer) -> str:
    with pytest.raises(ConfigurationError) as caught, suppress(StateError):
        consumer.poll(10)
    return str(caught.value)


def test_all_members_take_part_or_none(team: Team) -> None:
    a = team.start("a")
    wait_until(lambda: a.owns() == set(range(PARTITIONS)))
    other = Marshal.on_cluster(team.cluster.connect("b"), group_id=GROUP, client_id="b", heartbeat_interval=0.3)
    with other, other.consumer([TOPIC], mode=Group(session_timeout=SESSION / 1000)) as consumer:
        assert "checkpoints=CheckpointPolicy" in refusal(consumer)
    other = Marshal.on_cluster(team.cluster.connect("c"), group_id=GROUP, client_id="c", heartbeat_interval=0.3)
    hold = CheckpointPolicy(hold=True)
    with other, other.consumer([TOPIC], mode=Group(session_timeout=SESSION / 1000), checkpoints=hold) as consumer:
        assert "hold" in refusal(consumer)
    adopting = team.start("d", policy=CheckpointPolicy(adopt=True, hold=True))
    wait_until(lambda: adopting.owns())


def test_a_group_that_works_without_checkpoints_is_not_joined_with_them(team: Team) -> None:
    other = Marshal.on_cluster(team.cluster.connect("b"), group_id=GROUP, client_id="b", heartbeat_interval=0.3)
    with other, other.consumer([TOPIC], mode=Group(session_timeout=SESSION / 1000)) as there:
        wait_until(lambda: there.pieces())
        a = team.start("a")
        wait_until(lambda: a.error is not None)
        assert f"kafka-marshal checkpoints {GROUP} --start" in str(a.error)
        adopting = team.start("c", policy=CheckpointPolicy(adopt=True))
        wait_until(lambda: adopting.owns())
        adopting.consumer.commit()
        with pytest.raises(ConfigurationError, match="--start"):
            adopting.consumer.checkpoint()


def test_a_group_with_open_messages_begins_no_checkpoints(team: Team) -> None:
    def append(record: Record, cp: int) -> int:
        return team.cluster.broker.produce("__marshal", cp, encode(record))

    fleet = Fleet(GROUP, 1, append)
    fleet.configure()
    generation = fleet.join("b", {TOPIC: PARTITIONS}, session=SESSION)
    fleet.commit("b", generation, *started(TOPIC, 0))
    append(SettleOffsets(*fleet.ids("b"), generation, 99, TOPIC, 0, parked=((5, 8, 5, "Bad"),)), 0)
    fleet.leave("b", generation)
    a = team.start("a")
    wait_until(lambda: a.error is not None)
    assert isinstance(a.error, ConfigurationError)
    assert f"kafka-marshal discard {GROUP} --all" in str(a.error)


def test_a_topic_below_level_3_is_refused_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordination_topic, "SUPPORTED_LEVEL", 2)
    cluster = memory_cluster()
    marshal = Marshal.on_cluster(cluster.connect("a"), group_id=GROUP, client_id="a", heartbeat_interval=0.3)
    with (
        marshal,
        marshal.consumer([TOPIC], mode=Group(), checkpoints=POLICY) as consumer,
        pytest.raises(Exception) as caught,
    ):
        consumer.poll(10)
    assert "kafka-marshal upgrade" in str(caught.value) and "level 3" in str(caught.value)
