"""Shapes of a coordination log on a real broker: a starting member is ready soon, or gets an error that says why not.

Others are in tests/contract/test_tail.py (positions outside the log, markers at the end, timestamps set by clients),
tests/contract/test_kafka_settings.py (an open transaction does not hold the log back),
tests/snapshots/test_start.py and test_kafka.py (logs cut at and beyond snapshots), tests/cli/test_init.py (settings
that are rejected). Here members work while it happens, and others start after it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from confluent_kafka import Producer

from kafka_marshal import Consumer, Marshal
from kafka_marshal.adapters.memory import MemoryCluster
from kafka_marshal.adapters.probe import Probe
from kafka_marshal.errors import (
    CoordinationTopicError,
    LogCutError,
    TopicChangedError,
    TopicUnsafeError,
    UpgradeRequiredError,
)
from kafka_marshal.node.coordination_topic import create_topic
from kafka_marshal.node.replica import Begin, Replica
from kafka_marshal.testing import LocalBroker
from kafka_marshal.topic_names import snapshots_topic
from rationalizer import ClaimingPartition, Heartbeat, Upgrade, encode, route_lease
from tests.client.conftest import HI, Scene, take, wait_until
from tests.contract.sides import KafkaSide
from tests.shapes.conftest import Times, in_time
from tests.stored_snapshot import encode_snapshot

CPS = 3
MESSAGES = 2_000


class Work:
    """Two members that share a topic, and the messages they have handled."""

    def __init__(self, scene: Scene, hi: int = HI) -> None:
        self.scene = scene
        self.topic = scene.topic(4, MESSAGES)
        self.members = [scene.member(name, heartbeat_interval=hi / 1000) for name in ("a", "b")]
        self.consumers = [member.consumer([self.topic]) for member in self.members]
        self.handled: list[tuple[int, int]] = []
        wait_until(lambda: all(len(consumer.assignment()) == 2 for consumer in self.consumers), what="both have two")
        wait_until(self._is_known_to_both, what="both replicas know it")
        self.go_on()

    def _is_known_to_both(self) -> bool:
        one, other = map(encoded, self.members)
        return one == other and all(client_id is not None for _, _, client_id, _ in one)

    def go_on(self) -> None:
        """Check that each can still handle messages."""
        for consumer in self.consumers:
            self.handled += take(consumer, 20)
        assert len(set(self.handled)) == len(self.handled), "something was handed out twice"

    def fails_with(self, error: type[CoordinationTopicError], words: str, timeout_s: float = 90.0) -> None:
        """Check that every member fails with this error and delivers nothing more."""

        def told(consumer: Consumer) -> bool:
            message = consumer.poll(0.1)
            if message is not None:
                self.handled.append((message.partition() or 0, message.offset() or 0))
                consumer.done(message)
            return False

        for member, consumer in zip(self.members, self.consumers, strict=True):
            with pytest.raises(error, match=words):
                wait_until(partial(told, consumer), timeout_s)
            with pytest.raises(error, match=words):
                member.claim("elsewhere", 0)
            assert consumer.assignment() == []


@pytest.fixture
def work(scene: Scene) -> Work:
    return Work(scene)


@pytest.fixture
def side(kafka_bootstrap: str) -> Iterator[KafkaSide]:
    made = KafkaSide(kafka_bootstrap, {})
    yield made
    made.close()


def starts(scene: Scene, times: Times, name: str = "c") -> Marshal:
    """A member that starts now in time and can claim."""
    member = in_time(f"ready: {name}", times, lambda: scene.member(name), Marshal.close)
    assert member.claim("elsewhere", len(scene.members), timeout=5).valid
    return member


def refused(scene: Scene, error: type[CoordinationTopicError], words: str, times: Times) -> None:
    """Check that a member that starts now fails in time with this error."""

    def late() -> None:
        with pytest.raises(error, match=words):
            scene.member("late")

    in_time(f"refused: {error.__name__}", times, late)


def transaction(scene: Scene) -> Producer:
    """An open transaction with a claim in each CP."""
    producer = Producer({"bootstrap.servers": scene.bootstrap, "transactional.id": f"shapes-{time.time_ns()}"})
    producer.init_transactions(20)
    producer.begin_transaction()
    for cp in range(CPS):
        value = encode(ClaimingPartition("1", "transacting", "other", "t", cp, HI))
        producer.produce(scene.coordination, value, b"", cp)
    producer.flush(20)
    return producer


def test_transactions_open_and_aborted_and_markers_at_the_end(scene: Scene, work: Work, times: Times) -> None:
    opened = transaction(scene)
    work.go_on()
    starts(scene, times, "while one is open")
    opened.abort_transaction(20)
    work.go_on()
    starts(scene, times, "after its abort")
    transaction(scene).commit_transaction(20)
    for member in scene.members:
        member.close()
    # Only markers at the end of the log: the record that a start waits for is never delivered.
    transaction(scene).abort_transaction(20)
    digests = []
    for begin in (Begin.HISTORY, Begin.SNAPSHOT):
        replica = in_time(f"caught up: {begin.value}", times, partial(caught_up, scene, begin), Replica.close)
        replica.close()
        assert any(end > world.next_offset for end, world in zip(ends(scene), replica.worlds.values(), strict=True))
        digests.append([world.digest() for world in replica.worlds.values()])
    assert digests[0] == digests[1]
    scene.members.clear()
    starts(scene, times, "with markers at the end")


def caught_up(scene: Scene, begin: Begin) -> Replica:
    replica = Replica(scene.cluster, scene.coordination, 10, begin)
    replica.catch_up(10)
    return replica


def ends(scene: Scene) -> list[int]:
    marks = scene.cluster.watermarks([(scene.coordination, cp) for cp in range(CPS)], 10)
    return [marks[scene.coordination, cp][1] for cp in range(CPS)]


def test_q37_altered_to_create_time_while_members_work(
    scene: Scene,
    work: Work,
    side: KafkaSide,
    times: Times,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, "kafka_marshal"):
        side.alter_topic(scene.coordination, {"message.timestamp.type": "CreateTime"})
        wait_until(lambda: caplog.text.count("altered to CreateTime") >= 2, what="both say so")
    # Their leases are proven by their own clocks, and the log accepts their heartbeats: they continue past any lease.
    until = time.monotonic() + 3 * HI / 1000
    work.go_on()
    before, log_time = encoded(work.members[0]), work.members[0].world.log_time
    wait_until(lambda: time.monotonic() > until, what="longer than any lease")
    work.go_on()
    assert (encoded(work.members[0]), work.members[0].world.log_time) == (before, log_time)
    assert caplog.text.count("altered to CreateTime") == 2, "once each"
    refused(scene, TopicUnsafeError, "message.timestamp.type is CreateTime", times)
    # A member that dies meanwhile is not replaced until the topic is repaired.
    work.members[0].terminate()
    side.alter_topic(scene.coordination, {"message.timestamp.type": "LogAppendTime"})
    wait_until(lambda: "the broker's time again" in caplog.text, what="it is told")
    other = work.consumers[1]
    wait_until(lambda: drained(other) and len(other.assignment()) == 4, 180, "the other has taken over")
    starts(scene, times)


def drained(consumer: Consumer) -> bool:
    message = consumer.poll(0.05)
    if message is not None:
        consumer.done(message)
    return True


def test_recreated_while_members_work(scene: Scene, work: Work, side: KafkaSide, times: Times) -> None:
    for topic in (scene.coordination, snapshots_topic(scene.coordination)):
        side.delete_topic(topic)
    create_topic(scene.cluster, scene.coordination, CPS, 10)
    work.fails_with(TopicChangedError, "deleted and recreated|not in the log any more|is gone")
    member = starts(scene, times)
    # A new log lacks the old one's positions, so members begin at the beginning. A member that has not noticed the
    # new log may have claimed in it before it failed, and reported its progress, which is correct.
    said = [lease for lease in member.world.leases() if lease.topic == work.topic and lease.stable is not None]
    assert {(x.partition, offset) for x in said for offset in range((x.stable or 0) + 1)} <= set(work.handled)


def test_deleted_while_members_work(scene: Scene, work: Work, side: KafkaSide, times: Times) -> None:
    side.delete_topic(scene.coordination)
    work.fails_with(TopicChangedError, "is gone")
    refused(scene, CoordinationTopicError, "kafka-marshal init", times)


def test_more_cps_while_members_work(scene: Scene, work: Work, side: KafkaSide, times: Times) -> None:
    side.grow_topic(scene.coordination, CPS + 2)
    work.fails_with(TopicChangedError, f"{CPS + 2} partitions now, it had {CPS}")
    refused(scene, TopicChangedError, f"made with {CPS}", times)


def test_cps_that_are_empty(scene: Scene, topic_factory: Callable[..., str], times: Times) -> None:
    """Created by hand, even without a marker."""
    settings = {"message.timestamp.type": "LogAppendTime", "retention.ms": "-1", "retention.bytes": "-1"}
    settings |= {"max.message.bytes": "2097152"}
    scene.coordination = topic_factory(5, settings=settings)
    starts(scene, times, "all empty")
    starts(scene, times, "nearly all empty")


def fill(scene: Scene, cp: int, records: int) -> None:
    """Write one claim and heartbeats, up to ``records`` records in the CP."""
    producer = Producer({"bootstrap.servers": scene.bootstrap, "linger.ms": 5})
    epoch = ends(scene)[cp]
    producer.produce(scene.coordination, encode(ClaimingPartition("1", "x", "other", "t", 3, 600_000)), b"", cp)
    for done in range(records - epoch - 1):
        producer.produce(scene.coordination, encode(Heartbeat("1", "x", "other", "t", 3, epoch, done)), b"", cp)
    assert producer.flush(30) == 0


def test_cut_while_members_work(scene: Scene, work: Work, side: KafkaSide, times: Times) -> None:
    """Cut behind two snapshots: members start there. Cut beyond them: they get an error. Running members continue."""
    cp = 0
    fill(scene, cp, 500)
    replica = Replica(scene.cluster, scene.coordination, 10)
    places = []
    for _ in range(2):
        while replica.worlds[cp].next_offset < ends(scene)[cp]:
            replica.apply(replica.read(0.1))
        places.append(replica.worlds[cp].next_offset)
        side.produce(snapshots_topic(scene.coordination), cp, encode_snapshot(replica.worlds[cp]))
        fill(scene, cp, places[-1] + 100)
    replica.close()
    side.delete_records(scene.coordination, cp, places[0])
    work.go_on()
    starts(scene, times, "cut at the second newest")
    side.delete_records(scene.coordination, cp, places[1] + 1)
    work.go_on()
    refused(scene, LogCutError, "no two snapshots that the log reaches back to", times)
    side.delete_records(scene.coordination, cp, ends(scene)[cp])
    work.go_on()
    refused(scene, LogCutError, "does not reach back", times)


@pytest.fixture
def tidy(request: pytest.FixtureRequest) -> Iterator[Scene]:
    """A scene on a broker whose log cleaner runs without pauses."""
    request.getfixturevalue("kafka_broker")  # sets the marker of tests with a broker
    with LocalBroker(properties={"log.cleaner.backoff.ms": "100"}) as broker:
        probe = Probe(broker.bootstrap_servers)

        def new_topic(partitions: int, settings: dict[str, str]) -> str:
            name = f"t-{time.time_ns()}"
            probe.create_topic(name, partitions, 1, settings)
            return name

        made = Scene(broker.bootstrap_servers, new_topic)
        yield made
        made.close()


@pytest.mark.slow
def test_compacted_while_members_work(tidy: Scene, times: Times) -> None:
    """A log with gaps: all keys are equal, so compaction leaves only the last record of a segment."""
    scene, side = tidy, KafkaSide(tidy.bootstrap, {})
    work = Work(scene, hi=5_000)  # the cleaner takes its time, in which no lease may end on a busy machine
    before = encoded(work.members[0])
    settings = {"cleanup.policy": "compact", "min.cleanable.dirty.ratio": "0.001", "max.compaction.lag.ms": "1"}
    side.alter_topic(scene.coordination, {**settings, "segment.ms": "500"})
    refused(scene, TopicUnsafeError, "cleanup.policy is compact", times)

    def first(cp: int) -> int:
        tail = scene.cluster.tail(scene.coordination, {cp: 0})
        try:
            return next((entries[0][0] for entries in tail.read(5.0).records.values()), 0)
        finally:
            tail.close()

    def holes() -> bool:
        for consumer in work.consumers:
            drained(consumer)
        # A segment ends when a record is written after its time.
        for cp in range(CPS):
            fill(scene, cp, 0)
        return all(first(cp) > 0 for cp in range(CPS))

    wait_until(holes, 180, "the broker's cleaner has been there")
    # Running members know more than the log does, and continue.
    work.go_on()
    assert encoded(work.members[0]) == before
    side.alter_topic(scene.coordination, {"cleanup.policy": "delete"})
    wait_until(lambda: policy_of(scene) == "delete", what="the broker says so, too")
    refused(scene, TopicUnsafeError, "compacted away", times)
    side.close()


def policy_of(scene: Scene) -> str:
    config = scene.cluster.topic_config(scene.coordination, 10)
    assert config is not None
    return config.settings["cleanup.policy"]


def encoded(member: Marshal) -> list[tuple[str, int, str | None, int]]:
    return [(lease.topic, lease.partition, lease.client_id, lease.epoch) for lease in member.world.leases()]


def test_q36_a_log_without_its_first_record_is_refused_wherever_it_is_read() -> None:
    """The same without waiting for a broker's log cleaner."""
    cluster = MemoryCluster()
    cluster.create_topic("__marshal", 1, 1, settings(), 5)
    cluster.broker.skip("__marshal", 0, 3)
    cluster.broker.produce("__marshal", 0, encode(ClaimingPartition("1", "a", "g", "t", 0, HI)))
    for begin in Begin:
        replica = Replica(cluster, "__marshal", 5, begin)
        with pytest.raises(TopicUnsafeError, match="its first record has offset 3"):
            replica.catch_up(5)
        replica.close()
    with pytest.raises(TopicUnsafeError, match="compacted away"):
        Marshal.on_cluster(cluster, group_id="g")


def settings() -> dict[str, Any]:
    from kafka_marshal.node.coordination_topic import required_settings

    return required_settings(1)


# -- A level unknown to this release (E4): the fleet stops there and reports it -----------------------------------


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
    for member in members:  # one of which had it
        with pytest.raises(UpgradeRequiredError, match="level 109"):
            member.claim(topic, 0, timeout=5)
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
