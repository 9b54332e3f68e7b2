"""Where the logs of many partitions begin is asked for together; what fails is asked for again, one by one.

And what is claimed from another member is read ahead, from where that one ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from kafka_marshal import Group, Marshal
from kafka_marshal.adapters.memory import MemoryCluster
from kafka_marshal.adapters.memory.readers import MemoryDataReader
from kafka_marshal.errors import KafkaUnavailableError
from kafka_marshal.node.coordination_topic import create_topic
from kafka_marshal.node.effects import MANY, TOGETHER
from kafka_marshal.ports import TopicInfo, TopicPartition
from rationalizer import Upgrade, encode
from tests.client.conftest import take, wait_until

PARTITIONS = TOGETHER + MANY
Marks = dict[TopicPartition, tuple[int, int]]


class Asked(MemoryCluster):
    """Counts what is asked of the data topic. `refuses`: questions about several partitions fail; `is_silent`: all."""

    refuses = is_silent = lists_nothing = False
    questions: list[int]

    def watermarks(self, partitions: Iterable[TopicPartition], timeout_s: float) -> Marks:
        keys = list(partitions)
        if keys[0][0] == "t":
            self.questions.append(len(keys))
            if self.is_silent or (self.refuses and len(keys) > 1):
                raise KafkaUnavailableError("one of their leaders does not answer")
        return super().watermarks(keys, timeout_s)

    def topics(self, timeout_s: float, max_age_s: float = 0.0) -> dict[str, TopicInfo]:
        if self.lists_nothing:
            raise KafkaUnavailableError("no broker lists its topics.")
        return super().topics(timeout_s, max_age_s)


@pytest.fixture
def cluster() -> Iterator[Asked]:
    made = Asked()
    made.questions = []
    create_topic(made, "__marshal", 1, 10)
    made.broker.produce("__marshal", 0, encode(Upgrade("x", "admin", "any", 2)))
    made.broker.create_topic("t", PARTITIONS)
    yield made
    made.close()


@pytest.mark.parametrize("refuses", [False, True])
def test_many_partitions_are_asked_for_together(cluster: Asked, refuses: bool) -> None:
    cluster.refuses = refuses
    with (
        Marshal.on_cluster(cluster, group_id="g", client_id="a") as marshal,
        marshal.consumer(["t"], mode=Group()) as member,
    ):
        wait_until(lambda: len(member.assignment()) == PARTITIONS)
    together = [number for number in cluster.questions if number > 1]
    assert together == [TOGETHER, MANY]
    assert cluster.questions.count(1) == (PARTITIONS if refuses else 0)


def waits(marshal: Marshal, text: str) -> str:
    return next((each for each in marshal.health().problems if text in each), "")


def test_health_says_that_a_consumer_waits_for_its_topics(cluster: Asked) -> None:
    with Marshal.on_cluster(cluster, group_id="g", client_id="a") as marshal, ThreadPoolExecutor(1) as pool:
        cluster.lists_nothing = True
        opening = pool.submit(marshal.consumer, ["^t$"])
        text = wait_until(lambda: waits(marshal, "the consumer waits for its topics"))
        assert text.endswith(" its topics. Nothing of it is delivered until then; it continues by itself")
        cluster.lists_nothing = False
        opening.result(10)
        assert marshal.health().ok


def test_health_says_which_partitions_wait_for_their_log_start(cluster: Asked) -> None:
    cluster.is_silent = True
    with Marshal.on_cluster(cluster, group_id="g", client_id="a") as marshal, marshal.consumer(["t"], mode=Group()):
        text = wait_until(lambda: waits(marshal, "(3 more wait so)"))
        assert "log start and end not found, asking again: one of their leaders does not answer (" in text
        cluster.is_silent = False
        wait_until(lambda: marshal.health().ok)


def test_what_another_member_releases_is_expected_where_it_ended(
    cluster: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected: list[dict[TopicPartition, int]] = []
    monkeypatch.setattr(MemoryDataReader, "expect", lambda _, positions: expected.append(dict(positions)))
    cluster.broker.create_topic("few", 2)
    for number in range(14):
        cluster.broker.produce("few", number % 2, b"x")
    with (
        Marshal.on_cluster(cluster, group_id="g", client_id="a") as a,
        a.consumer(["few"]) as consumer,
        Marshal.on_cluster(cluster, group_id="g", client_id="b") as b,
    ):
        assert len(take(consumer, 14)) == 14
        other = b.consumer(["few"])
        wait_until(lambda: len(other.assignment()) == 1)
        (come,) = other.assignment()
        assert expected == [{("few", come.partition): 7}]
        cluster.broker.produce("few", come.partition, b"x")
        assert take(other, 1) == [(come.partition, 7)]
