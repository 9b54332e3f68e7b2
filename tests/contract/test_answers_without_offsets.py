"""An answer of librdkafka with neither an offset nor an error (found by chaos) counts as no answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import TopicPartition

from kafka_marshal.adapters.kafka import KafkaCluster
from kafka_marshal.adapters.kafka import cluster as module
from kafka_marshal.errors import KafkaUnavailableError
from tests.contract.sides import TIMEOUT_S, KafkaSide, append

EMPTY = -1001

Answers = Mapping[TopicPartition, Future[Any]]


class Broken:
    """The first answers about a partition have no offset; later ones are the broker's."""

    def __init__(self, partition: int, empty: int) -> None:
        self.partition, self.empty = partition, empty
        self._ask: Callable[..., Answers] = module._offsets

    def __call__(self, *args: Any) -> Answers:
        answers = dict(self._ask(*args))
        for at in answers:
            if at.partition == self.partition and self.empty:
                self.empty -= 1
                answers[at] = Future()
                answers[at].set_result(SimpleNamespace(offset=EMPTY))
        return answers


@pytest.fixture
def topic(kafka_bootstrap: str) -> str:
    side = KafkaSide(kafka_bootstrap, {})
    topic = side.topic(2)
    append(side, topic, 0, [b"a", b"b"])
    append(side, topic, 1, [b"a", b"b", b"c"])
    side.cluster.close()
    return topic


@pytest.mark.parametrize("empty", [1, 2, 3])
def test_it_is_asked_again(monkeypatch: pytest.MonkeyPatch, kafka_bootstrap: str, topic: str, empty: int) -> None:
    keys = [(topic, 0), (topic, 1)]
    with closing(KafkaCluster(kafka_bootstrap)) as cluster:
        for ask in (cluster.watermarks, cluster.committed_watermarks):
            monkeypatch.setattr(module, "_offsets", broken := Broken(1, empty))
            assert ask(keys, TIMEOUT_S) == {keys[0]: (0, 2), keys[1]: (0, 3)}
            assert not broken.empty
            monkeypatch.undo()


@pytest.mark.parametrize("empty", [1, 2])
def test_a_time_is_not_taken_for_one_after_the_end(
    monkeypatch: pytest.MonkeyPatch, kafka_bootstrap: str, topic: str, empty: int
) -> None:
    """A position at the end would skip everything."""
    with closing(KafkaCluster(kafka_bootstrap)) as cluster:
        monkeypatch.setattr(module, "_offsets", broken := Broken(1, empty))
        assert cluster.offsets_for_time([(topic, 1)], 0, TIMEOUT_S) == {(topic, 1): 0}
        assert not broken.empty
        assert cluster.offsets_for_time([(topic, 1)], 2**45, TIMEOUT_S) == {(topic, 1): 3}, "after the end"


def test_where_no_other_answer_comes_that_is_an_error(
    monkeypatch: pytest.MonkeyPatch, kafka_bootstrap: str, topic: str
) -> None:
    with closing(KafkaCluster(kafka_bootstrap)) as cluster:
        monkeypatch.setattr(module, "_offsets", Broken(0, 10**9))
        with pytest.raises(KafkaUnavailableError, match="no offset"):
            cluster.watermarks([(topic, 0)], 0.5)
        with pytest.raises(KafkaUnavailableError, match="no offset"):
            cluster.offsets_for_time([(topic, 0)], 0, 0.5)
