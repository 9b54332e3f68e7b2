"""Topic look-ups while consumers start: an old answer must not count for a newer question."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import replace
from typing import Never

import pytest
from confluent_kafka.admin import AdminClient

from kafka_marshal.adapters.kafka import KafkaCluster
from kafka_marshal.adapters.memory import MemoryBroker, MemoryCluster
from kafka_marshal.engine.subscription import Subscription
from kafka_marshal.errors import KafkaUnavailableError
from kafka_marshal.node.topics import (
    IDS_AT_LEAST_EVERY_MS,
    IDS_MS_PER_PARTITION,
    SHARED_MS,
    SHARED_PART,
    TopicWatch,
)
from kafka_marshal.ports import TopicInfo
from kafka_marshal.runtime import MachineRuntime
from tests.client.conftest import Scene, take, wait_until


def test_a_look_up_that_began_before_the_consumer_does_not_declare_its_topics_deleted(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    topic = scene.topic(messages=20)
    asked, may_answer, answered = threading.Event(), threading.Event(), threading.Event()
    look_up = KafkaCluster.topic_info

    def slow(
        self: KafkaCluster, names: Iterable[str], timeout_s: float, max_age_s: float = 0.0
    ) -> dict[str, TopicInfo]:
        wanted = list(names)
        found = look_up(self, wanted, timeout_s, max_age_s)
        periodic = threading.current_thread() is not threading.main_thread() and scene.coordination in wanted
        if periodic and topic not in wanted:
            asked.set()
            assert may_answer.wait(20)
            answered.set()
        return found

    monkeypatch.setattr(KafkaCluster, "topic_info", slow)
    member = scene.member()
    assert asked.wait(20), "the periodic look-up did not begin"
    with member.consumer([topic]) as consumer, caplog.at_level(logging.WARNING):
        # Nothing is delivered before the ids are known (P12).
        wait_until(lambda: any(each.client_id for each in member.world.leases()), what="a lease")
        may_answer.set()
        assert answered.wait(20)
        wait_until(lambda: not member._driver.upkeep.topics._is_running, what="taking in the late answer")
        assert take(consumer, 20) == [(0, offset) for offset in range(20)]
        assert "deleted" not in caplog.text
        assert [at.partition for at in consumer.assignment()] == [0]


def test_the_first_look_only_counts_and_the_ids_come_soon(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """P11 needs the ids; no consumer's start waits for the description of a thousand partitions."""
    topic = scene.topic(partitions=2, messages=3)
    #: What was described, and whether the thread that starts the consumer waited for it.
    described: list[tuple[str, bool]] = []
    look_up = KafkaCluster.topic_info

    def watched(
        self: KafkaCluster, names: Iterable[str], timeout_s: float, max_age_s: float = 0.0
    ) -> dict[str, TopicInfo]:
        wanted = list(names)
        is_waited_for = not threading.current_thread().name.startswith("kafka-marshal-lookup")
        described.extend((name, is_waited_for) for name in wanted)
        return look_up(self, wanted, timeout_s, max_age_s)

    monkeypatch.setattr(KafkaCluster, "topic_info", watched)
    with scene.member().consumer([topic]) as consumer:
        assert len(take(consumer, 6)) == 6
        wait_until(lambda: (topic, False) in described, what="looking the id up")
        wait_until(lambda: consumer._engine.subscription._ids[topic], what="the id")
        assert (topic, True) not in described


def test_a_topic_that_can_not_be_counted_is_looked_up(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    there = scene.topic(messages=2)
    with caplog.at_level(logging.WARNING), scene.member().consumer([there, f"{there}-later"]) as consumer:
        assert take(consumer, 2) == [(0, 0), (0, 1)]
    assert f"topic {there}-later does not exist (yet)" in caplog.text


def test_a_broker_too_busy_for_the_first_look_ups_is_asked_again(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As a whole fleet starts at once: for as long as ``timeout`` says."""
    topic, member, left = scene.topic(messages=2), scene.member(), [3]
    late = f"{topic}-later"  # can't be counted, so it is looked up
    look_up = KafkaCluster.topic_info

    def busy(
        self: KafkaCluster, names: Iterable[str], timeout_s: float, max_age_s: float = 0.0
    ) -> dict[str, TopicInfo]:
        wanted = list(names)
        if late in wanted and left[0] > 0:
            left[0] -= 1
            raise KafkaUnavailableError("no answer")
        return look_up(self, wanted, timeout_s, max_age_s)

    monkeypatch.setattr(KafkaCluster, "topic_info", busy)
    with caplog.at_level(logging.WARNING), member.consumer([topic, late]) as consumer:
        assert take(consumer, 2) == [(0, 0), (0, 1)]
    assert left == [0]
    assert "waits for its topics, asking again for 15 s: no answer" in caplog.text
    left[0] = 1_000_000
    impatient = scene.member(timeout=2.0)
    began = time.monotonic()
    with pytest.raises(KafkaUnavailableError):
        impatient.consumer([late])
    assert 2 <= time.monotonic() - began < 12


def test_a_start_asks_again_for_an_answer_that_does_not_come(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """One answer must not take the time of all: a fleet's start died of a slow one."""
    monkeypatch.setattr("kafka_marshal.adapters.kafka.questions.FIRST_TRY_S", 0.2)
    monkeypatch.setattr("kafka_marshal.adapters.kafka.questions.GRACE_S", 0.1)
    topic, left = scene.topic(messages=2), {"describe_topics": 3, "describe_configs": 1, "list_offsets": 2}

    def lose_first_answers(name: str) -> None:
        ask = getattr(AdminClient, name)

        def asked(self: AdminClient, *of: object, **more: object) -> dict[object, Future[object]]:
            left[name] -= 1
            answers = ask(self, *of, **more)
            return answers if left[name] < 0 else {key: Future() for key in answers}

        monkeypatch.setattr(AdminClient, name, asked)

    for name in left:
        lose_first_answers(name)
    with scene.member(timeout=60.0).consumer([topic]) as consumer:
        assert take(consumer, 2) == [(0, 0), (0, 1)]
    assert all(each < 0 for each in left.values())


def test_the_topics_of_a_second_consumer_do_not_make_those_of_the_first_look_deleted(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    one, two = scene.topic(messages=2), scene.topic(messages=2)
    member = scene.member()
    with caplog.at_level(logging.WARNING), member.consumer([one]) as first, member.consumer([two]) as second:
        assert take(first, 2) == take(second, 2) == [(0, 0), (0, 1)]
        assert "deleted" not in caplog.text


def test_a_poll_that_fails_unexpectedly_is_logged_and_repeated(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("kafka_marshal.node.jobs.METADATA_INTERVAL_MS", 50.0)
    member = scene.member()

    def broken(self: KafkaCluster, names: Iterable[str], timeout_s: float, max_age_s: float = 0.0) -> Never:
        raise RuntimeError("nobody thought of this")

    with monkeypatch.context() as patch:
        patch.setattr(KafkaCluster, "topic_info", broken)
        wait_until(lambda: "nobody thought of this" in caplog.text, what="the look that fails")
    topic = scene.topic(messages=1)
    with member.consumer([topic]) as consumer:
        assert take(consumer, 1) == [(0, 0)]
        wait_until(lambda: consumer._engine.subscription._ids[topic], what="the look after it")


# -- How topics are polled: small ones thoroughly every time, large ones mostly by counting (P11, L2) -------------


LARGE = 400
LOG = "__marshal"


class Clock(MachineRuntime):
    """A clock that advances only on request."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1_000.0

    def now_ms(self) -> float:
        return self.now


class Asked(MemoryCluster):
    """Lists topics without ids, as brokers do, and records which it is asked to describe."""

    def __init__(self, broker: MemoryBroker) -> None:
        super().__init__(broker=broker)
        self.clock = Clock()
        self.runtime = self.clock
        self.described: list[list[str]] = []
        #: Allowed age (s) of the answer to each question.
        self.ages: list[float] = []

    def topics(self, timeout_s: float, max_age_s: float = 0.0) -> dict[str, TopicInfo]:
        self.ages.append(max_age_s)
        return {name: replace(info, topic_id="") for name, info in super().topics(timeout_s).items()}

    def topic_info(self, names: Iterable[str], timeout_s: float, max_age_s: float = 0.0) -> dict[str, TopicInfo]:
        wanted = sorted(names)
        self.described.append(wanted)
        self.ages.append(max_age_s)
        return super().topic_info(wanted, timeout_s)


@pytest.fixture
def broker() -> MemoryBroker:
    made = MemoryBroker()
    made.create_topic(LOG, 8)
    made.create_topic("large", LARGE)
    made.create_topic("small", 3)
    return made


@pytest.fixture
def cluster(broker: MemoryBroker) -> Asked:
    return Asked(broker)


def watch(cluster: Asked, *topics: str) -> TopicWatch:
    made = TopicWatch(cluster, LOG)
    made.add(1, Subscription(topics, LOG))
    return made


def look(watching: TopicWatch) -> dict[str, TopicInfo]:
    return watching.check(watching.interest)


def test_a_small_subscription_is_described_every_time(cluster: Asked) -> None:
    watching = watch(cluster, "small")
    for _ in range(3):
        assert look(watching)["small"].topic_id
        cluster.clock.now += 5_000.0
    assert cluster.described == [[LOG, "small"]] * 3


def test_a_large_one_is_counted_until_its_ids_are_due(cluster: Asked, broker: MemoryBroker) -> None:
    watching = watch(cluster, "large")
    assert look(watching)["large"].topic_id
    cluster.clock.now += 5_000.0
    broker.grow_topic("large", LARGE + 5)
    found = look(watching)
    assert found["large"].partitions == LARGE + 5, "growth is seen at once (P9)"
    assert found[LOG].topic_id, "the id of the coordination topic is looked at every time (L2)"
    assert cluster.described == [["__marshal", "large"], ["__marshal"]]
    cluster.clock.now += LARGE * IDS_MS_PER_PARTITION
    assert look(watching)["large"].topic_id
    assert cluster.described[2:] == [[LOG, "large"]]


def test_q39_however_large_it_is_its_id_is_checked_within_half_a_minute(cluster: Asked, broker: MemoryBroker) -> None:
    broker.create_topic("huge", 20_000)
    watching = watch(cluster, "huge")
    before = look(watching)["huge"].topic_id
    broker.delete_topic("huge")
    broker.create_topic("huge", 20_000)
    cluster.clock.now += IDS_AT_LEAST_EVERY_MS - 1
    assert look(watching)["huge"].topic_id == "", "nothing is said of the id, and nothing wrong"
    cluster.clock.now += 1
    assert look(watching)["huge"].topic_id not in ("", before)


def test_one_that_is_missing_in_the_list_is_looked_for_thoroughly(cluster: Asked, broker: MemoryBroker) -> None:
    """A listing omits topics that we may not see; only a query by name shows that one is deleted."""
    watching = watch(cluster, "large")
    look(watching)
    broker.delete_topic("large")
    assert "large" not in look(watching)
    assert cluster.described[-1] == [LOG, "large"]


def test_of_a_cluster_with_far_more_partitions_nothing_is_listed(cluster: Asked, broker: MemoryBroker) -> None:
    broker.create_topic("others", 9 * LARGE)
    watching = watch(cluster, "large")
    for _ in range(2):
        look(watching)
        cluster.clock.now += 1_000.0
    assert cluster.described[1] == [LOG], "the first listing tells how much there is"
    look(watching)
    assert cluster.described[2] == [LOG, "large"]


def test_only_what_a_pattern_matches_is_described(cluster: Asked) -> None:
    assert look(watch(cluster, "^sm")).keys() == {LOG, "small"}
    assert cluster.described == [[LOG, "small"]]


def test_a_new_consumer_learns_the_ids_of_its_topics(cluster: Asked) -> None:
    watching = watch(cluster, "large")
    look(watching)
    watching.add(2, Subscription(["small"], LOG))
    assert look(watching)["small"].topic_id
    watching.remove(2)
    assert look(watching).keys() == {LOG, "large"}


def test_a_topic_that_is_not_there_yet_does_not_make_every_look_a_thorough_one(cluster: Asked) -> None:
    watching = watch(cluster, "large", "later")
    look(watching)
    assert look(watching).keys() == {LOG, "large"}
    assert cluster.described[1] == [LOG]


def test_q39_shared_metadata_must_be_younger_than_the_consumer_and_the_last_poll(cluster: Asked) -> None:
    watching = watch(cluster, "small")
    look(watching)
    cluster.clock.now += 500.0
    look(watching)
    cluster.clock.now += 60_000.0
    look(watching)
    cluster.clock.now += 1_000.0
    look(watching)
    cluster.clock.now += 60_000.0
    watching.add(2, Subscription(["small"], LOG))
    cluster.clock.now += 300.0
    look(watching)
    assert cluster.ages == [0.0, 0.5, SHARED_MS / 1000, 1.0, 0.3], "(L2)"


def test_q39_a_recreated_log_is_not_gone_for_a_member_that_began_on_it(cluster: Asked) -> None:
    """It was, for another member of this process that polled earlier."""
    watching = TopicWatch(cluster, LOG)
    cluster.clock.now += 300.0
    assert look(watching).keys() == {LOG}
    assert cluster.ages == [0.3]


def test_q39_ids_of_many_partitions_may_be_older_but_not_that_of_the_log(cluster: Asked, broker: MemoryBroker) -> None:
    broker.create_topic("huge", 20_000)
    watching = watch(cluster, "huge")
    look(watching)
    cluster.clock.now += IDS_AT_LEAST_EVERY_MS
    cluster.ages.clear()
    cluster.described.clear()
    assert look(watching).keys() == {LOG, "huge"}
    aged = dict(zip(map(tuple, cluster.described), cluster.ages, strict=True))
    assert aged == {("huge",): IDS_AT_LEAST_EVERY_MS * SHARED_PART / 1000, (LOG,): SHARED_MS / 1000}
