"""Topic look-ups while consumers start: an old answer must not count for a newer question."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable
from typing import Never

import pytest

from kafka_marshal.adapters.kafka import KafkaCluster
from kafka_marshal.errors import KafkaUnavailableError
from kafka_marshal.ports import TopicInfo
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
