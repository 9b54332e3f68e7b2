"""librdkafka knows the leaders before offsets are looked up: its search for them may crash the process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest

from kafka_marshal.adapters.kafka import KafkaCluster
from kafka_marshal.ports import Cluster
from tests.contract.sides import TIMEOUT_S, KafkaSide, append

#: Calls that look up leaders on the caller's thread.
OF_LEADERS = ("list_offsets", "delete_records")

QUESTIONS: dict[str, Callable[[Cluster, str], object]] = {
    "watermarks": lambda cluster, topic: cluster.watermarks([(topic, 0), (topic, 1)], TIMEOUT_S),
    "offsets_for_time": lambda cluster, topic: cluster.offsets_for_time([(topic, 0)], 0, TIMEOUT_S),
    "committed_watermarks": lambda cluster, topic: cluster.committed_watermarks([(topic, 0)], TIMEOUT_S),
    "delete_records": lambda cluster, topic: cluster.delete_records({(topic, 0): 1}, TIMEOUT_S),
}


class Spied:
    """A shared AdminClient that records its calls."""

    def __init__(self, shared: Any) -> None:
        self._shared = shared
        self.metadata_age_s = shared.metadata_age_s
        self.asked: list[str] = []

    @contextmanager
    def use(self) -> Iterator[object]:
        with self._shared.use() as admin:
            yield _Admin(admin, self.asked)


class _Admin:
    def __init__(self, admin: Any, asked: list[str]) -> None:
        self._admin, self._asked = admin, asked

    def __getattr__(self, name: str) -> Any:
        if name != "poll":
            self._asked.append(name)
        return getattr(self._admin, name)


@contextmanager
def spied(bootstrap: str, config: dict[str, object] | None = None) -> Iterator[tuple[KafkaCluster, Spied]]:
    with closing(KafkaCluster(bootstrap, config or {})) as cluster:
        shared = cluster._questions._admin
        spy = Spied(shared)
        cluster._questions._admin = spy  # type: ignore[assignment]
        try:
            yield cluster, spy
        finally:
            cluster._questions._admin = shared


@pytest.fixture
def topic(kafka_bootstrap: str) -> str:
    side = KafkaSide(kafka_bootstrap, {})
    found = side.topic(2)
    append(side, found, 0, [b"a", b"b"])
    side.cluster.close()
    return found


@pytest.mark.parametrize("name", QUESTIONS)
def test_leaders_are_looked_up_before_anything_searches_for_them(name: str, kafka_bootstrap: str, topic: str) -> None:
    with spied(kafka_bootstrap) as (cluster, spy):
        QUESTIONS[name](cluster, topic)
        assert spy.asked[0] == "describe_topics"
        assert set(spy.asked[1:]) & set(OF_LEADERS)
        spy.asked.clear()
        QUESTIONS["watermarks"](cluster, topic)
        assert spy.asked == ["list_offsets"] * 2, "what is known is not asked again"


def test_they_are_looked_up_again_before_librdkafka_forgets_them(kafka_bootstrap: str, topic: str) -> None:
    with spied(kafka_bootstrap, {"metadata.max.age.ms": 3}) as (cluster, spy):
        for _ in range(3):
            QUESTIONS["watermarks"](cluster, topic)
        assert spy.asked.count("describe_topics") == 3


def test_a_topic_that_is_made_later_is_found(kafka_bootstrap: str, topic: str) -> None:
    with spied(kafka_bootstrap) as (cluster, _):
        later = f"{topic}-later"
        assert cluster.watermarks([(later, 0), (topic, 0)], TIMEOUT_S) == {(topic, 0): (0, 2)}
        cluster.create_topic(later, 1, 1, {}, TIMEOUT_S)
        assert cluster.watermarks([(later, 0)], TIMEOUT_S) == {(later, 0): (0, 0)}
