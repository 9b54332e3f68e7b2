"""How topics are polled: small ones thoroughly every time, large ones mostly by counting (P11, L2)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from kafka_marshal.adapters.memory import MemoryBroker, MemoryCluster
from kafka_marshal.engine.subscription import Subscription
from kafka_marshal.node.topics import (
    IDS_AT_LEAST_EVERY_MS,
    IDS_MS_PER_PARTITION,
    SHARED_MS,
    SHARED_PART,
    TopicWatch,
)
from kafka_marshal.ports import TopicInfo
from kafka_marshal.runtime import Threads

LARGE = 400
LOG = "__marshal"


class Clock(Threads):
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
