"""What a client with WRITE on the coordination topic can and can't do, as documented in docs/security.md.

Readers don't learn from the broker which client wrote a record: ids and epochs in it are the writer's claims.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from confluent_kafka import Producer

from kafka_marshal import ClientReplacedError, Consumer, Marshal
from kafka_marshal.adapters.kafka import KafkaCluster
from kafka_marshal.adapters.probe import Probe
from kafka_marshal.admin import Admin
from kafka_marshal.errors import StaleEpochError, UpgradeRequiredError
from kafka_marshal.node.coordination_topic import create_topic
from kafka_marshal.node.replica import Begin
from kafka_marshal.sinks import SqliteSink
from rationalizer import (
    ClaimingPartition,
    Heartbeat,
    Record,
    ReleaseGroup,
    ReleasingPartition,
    Upgrade,
    World,
    encode,
)
from rationalizer.snapshot_log import encode_snapshot
from tests.client.conftest import wait_until
from tests.snapshots.conftest import HI, Story

MESSAGES = 20
INTERVAL_MS = 600


class Victim:
    """A coordination topic of one partition, a data topic, and its workers."""

    def __init__(self, bootstrap: str, name: str) -> None:
        self.bootstrap = bootstrap
        self.topic, self.data = f"__{name}", name
        self._cluster = KafkaCluster(bootstrap)
        create_topic(self._cluster, self.topic, 1, 20)
        self._cluster.create_topic(self.data, 1, 1, {}, 20)
        self._producer = Producer({"bootstrap.servers": bootstrap})
        for number in range(MESSAGES):
            self._producer.produce(self.data, b"%d" % number)
        assert self._producer.flush(20) == 0

    def forge(self, record: Record) -> None:
        """Append a record as any client with WRITE can."""
        self._producer.produce(self.topic, encode(record), b"", 0)
        assert self._producer.flush(20) == 0

    def member(self, client_id: str = "a") -> Marshal:
        return Marshal(
            self.bootstrap, group_id="g", client_id=client_id, topic=self.topic, heartbeat_interval=INTERVAL_MS / 1000
        )

    def holder(self, marshal: Marshal) -> tuple[str, int]:
        """Instance and epoch of the partition's holder, which are public."""
        lease = marshal.world.lease(self.data, 0)
        assert lease is not None and lease.instance_id is not None
        return lease.instance_id, lease.epoch

    def close(self) -> None:
        self._cluster.close()
        Probe(self.bootstrap).delete_topics([self.topic, f"{self.topic}_snapshots", self.data])


@pytest.fixture
def victim(kafka_bootstrap: str) -> Iterator[Victim]:
    name = f"forged-{uuid.uuid4().hex[:8]}"
    with closing(Victim(kafka_bootstrap, name)) as made:
        yield made


def offsets(consumer: Consumer, most: int = MESSAGES, timeout: float = 5.0, done: bool = False) -> list[int]:
    messages = consumer.consume(most, timeout=timeout)
    for message in messages if done else ():
        consumer.done(message)
    return [message.offset() or 0 for message in messages]


@pytest.mark.broker
def test_a_release_in_the_holders_name_takes_its_lease_and_an_old_epoch_writes_nothing_more(
    victim: Victim, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    sink = SqliteSink(tmp_path / "rows.db")
    with victim.member() as marshal, marshal.consumer([victim.data]) as consumer:
        assert offsets(consumer, 1) == [0]
        instance_id, epoch = victim.holder(marshal)
        with sink.transaction("g", [(victim.data, 0, epoch, 0)]):
            pass
        with caplog.at_level(logging.WARNING, "kafka_marshal"):
            victim.forge(ReleasingPartition(instance_id, "a", "g", victim.data, 0, epoch, None))
            wait_until(lambda: "an operator took it away" in caplog.text, what="the holder says so")
        with victim.member("b") as other, other.consumer([victim.data]) as theirs:
            assert offsets(theirs, 1) == [0], "what was in hand comes again"
            _, newer = victim.holder(other)
            assert newer > epoch
            with sink.transaction("g", [(victim.data, 0, newer, 0)]):
                pass
            with pytest.raises(StaleEpochError), sink.transaction("g", [(victim.data, 0, epoch, 0)]):
                pass


@pytest.mark.broker
def test_progress_in_the_holders_name_makes_its_successor_skip_and_an_operator_goes_back(victim: Victim) -> None:
    """By the log it is done. No data is lost: positions can be moved back."""
    first = victim.member()
    consumer = first.consumer([victim.data])
    assert offsets(consumer, 1) == [0]
    instance_id, epoch = victim.holder(first)
    victim.forge(Heartbeat(instance_id, "a", "g", victim.data, 0, epoch, 14))
    wait_until(lambda: (lease := first.world.lease(victim.data, 0)) is not None and lease.stable == 14)
    first.close()
    with victim.member("b") as other, other.consumer([victim.data]) as theirs:
        assert offsets(theirs, 1) == [15], "0 to 14 count as done"
    with Admin(victim.bootstrap, topic=victim.topic) as admin, admin.pause("g") as pause:
        pause.reposition({(victim.data, 0): 1})
    with victim.member("c") as third, third.consumer([victim.data]) as theirs:
        assert offsets(theirs, 1) == [1]


@pytest.mark.broker
def test_progress_is_never_taken_back_and_an_epoch_never_chosen(victim: Victim) -> None:
    with victim.member() as marshal, marshal.consumer([victim.data]) as consumer:
        assert len(offsets(consumer, 10, done=True)) == 10
        wait_until(lambda: (lease := marshal.world.lease(victim.data, 0)) is not None and lease.stable == 9)
        instance_id, epoch = victim.holder(marshal)
        victim.forge(Heartbeat(instance_id, "a", "g", victim.data, 0, epoch, 3))
        victim.forge(Heartbeat(instance_id, "a", "g", victim.data, 0, epoch + 1, 15))
        victim.forge(ClaimingPartition("f", "forger", "g", victim.data, 0, 600_000))
        assert offsets(consumer, MESSAGES - 10) == list(range(10, MESSAGES))
        lease = marshal.world.lease(victim.data, 0)
        assert lease is not None
        assert (lease.client_id, lease.epoch, lease.stable) == ("a", epoch, 9)


@pytest.mark.broker
def test_a_takeover_in_a_clients_name_ends_that_process(victim: Victim) -> None:
    with victim.member() as marshal, marshal.consumer([victim.data]) as consumer:
        assert offsets(consumer, 1) == [0]
        victim.forge(Heartbeat("forged", "a", "g", victim.data, 0, None, None))
        with pytest.raises(ClientReplacedError, match="forged"):
            while True:
                offsets(consumer, timeout=1.0)


@pytest.mark.broker
def test_a_pause_stops_a_group_until_it_is_ended_in_that_name(victim: Victim) -> None:
    with victim.member() as marshal, marshal.consumer([victim.data]) as consumer:
        assert len(offsets(consumer, done=True)) == MESSAGES
        victim.forge(ReleaseGroup("f", "forger", "g", 2**62))
        wait_until(lambda: (lease := marshal.world.lease(victim.data, 0)) is not None and lease.client_id is None)
        with Admin(victim.bootstrap, topic=victim.topic, client_id="forger") as admin:
            admin.resume("g")
        wait_until(lambda: (lease := marshal.world.lease(victim.data, 0)) is not None and lease.client_id == "a")


@pytest.mark.broker
def test_a_claim_keeps_a_partition_from_everybody_until_it_is_evicted(victim: Victim) -> None:
    victim.forge(ClaimingPartition("f", "forger", "g", victim.data, 0, 600_000))
    with victim.member() as marshal, marshal.consumer([victim.data]) as consumer:
        assert offsets(consumer, timeout=1.0) == []
        assert (lease := marshal.world.lease(victim.data, 0)) is not None and lease.client_id == "forger"
        with Admin(victim.bootstrap, topic=victim.topic) as admin:
            admin.evict("g", victim.data, 0, force=True)
        assert offsets(consumer, 1) == [0]


@pytest.mark.broker
def test_an_upgrade_to_an_unknown_level_ends_all_work_on_one_coordination_topic_and_on_no_other(
    victim: Victim, kafka_bootstrap: str
) -> None:
    with (
        closing(Victim(kafka_bootstrap, f"{victim.data}-other")) as neighbour,
        neighbour.member() as apart,
        apart.consumer([victim.data]) as theirs,
        victim.member() as marshal,
        marshal.consumer([victim.data]) as consumer,
    ):
        assert offsets(consumer, 1) == [0]
        victim.forge(Upgrade("f", "forger", "x", 2**31 - 1))
        with pytest.raises(UpgradeRequiredError, match="2147483647"):
            while True:
                offsets(consumer, timeout=1.0)
        assert not marshal.health().ok
        assert len(offsets(theirs)) == MESSAGES, "a group of that name, on a coordination topic of its own"


def test_two_consistent_forged_snapshots_deceive_a_start_but_not_a_replay(story: Story) -> None:
    """S3 detects a forged snapshot by the next one. Two consistent forgeries are detected only by a replay."""
    lying = World(0, 1)

    def follow(forged: Record | None = None) -> None:
        log = story.broker.log("__marshal", 0)
        assert log is not None
        for message in log.messages[lying.next_offset :]:
            is_last = message.offset() == story.end - 1
            value = encode(forged) if is_last and forged is not None else message.value()
            lying.apply(message.offset(), message.timestamp()[1], value)
        story.store(*encode_snapshot(lying))

    story.beat(30)
    follow(ClaimingPartition("9", "liar", "g", "t", 7, HI))
    story.beat(10)
    follow()
    assert story.replica().worlds[0].lease("g", "t", 7) is not None, "it holds what never was"
    checked = story.replica(Begin.CHECK)
    assert checked.worlds[0].snapshot() == story.truth.snapshot()
    assert len(checked.starts[0].differences) == 2, "prune and audit name both"
