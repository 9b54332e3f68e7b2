"""Brokers that are up but briefly fenced: a topic is created when they are registered again."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import closing, contextmanager
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException

from kafka_marshal.adapters.kafka import KafkaCluster
from kafka_marshal.errors import CoordinationTopicError
from tests.contract.sides import closed_port

FENCED = KafkaError(
    KafkaError.INVALID_REPLICATION_FACTOR,
    "Unable to replicate the partition 1 time(s): All brokers are currently fenced, or have all their log directories "
    "cordoned.",
)
TOO_MANY = KafkaError(
    KafkaError.INVALID_REPLICATION_FACTOR,
    "Unable to replicate the partition 3 time(s): The target replication factor of 3 cannot be reached because only 1 "
    "broker(s) are registered.",
)


@pytest.mark.parametrize(
    ("refusals", "within_s", "tries", "refused"),
    [([FENCED, FENCED], 10.0, 3, False), ([FENCED] * 9, 0.0, 1, True), ([TOO_MANY], 10.0, 1, True)],
)
def test_a_topic_is_created_as_soon_as_brokers_take_part_again(
    monkeypatch: pytest.MonkeyPatch, refusals: list[KafkaError], within_s: float, tries: int, refused: bool
) -> None:
    """A controller without heartbeats of any broker answers that the replication factor is invalid."""
    asked: list[float] = []

    class Controller:
        @contextmanager
        def use(self) -> Iterator[object]:
            yield self

        def create_topics(self, new: list[Any], request_timeout: float, **_: object) -> dict[str, Future[None]]:
            answer: Future[None] = Future()
            if len(asked) < len(refusals):
                answer.set_exception(KafkaException(refusals[len(asked)]))
            else:
                answer.set_result(None)
            asked.append(request_timeout)
            return {new[0].topic: answer}

    with closing(KafkaCluster(f"127.0.0.1:{closed_port()}")) as cluster, monkeypatch.context() as patch:
        patch.setattr(cluster, "_admin", Controller())
        patch.setattr(cluster, "_ready", lambda *_: True)
        if refused:
            with pytest.raises(CoordinationTopicError, match="did not create topic 't': Unable to replicate"):
                cluster.create_topic("t", 1, 1, {}, within_s)
        else:
            cluster.create_topic("t", 1, 1, {}, within_s)
    assert len(asked) == tries
