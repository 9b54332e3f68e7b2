"""`check` and `status` while a broker hangs and just after: no member is called dead, and nothing to be evicted."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable

import pytest

from kafka_marshal import Marshal
from kafka_marshal.adapters.kafka import KafkaCluster
from kafka_marshal.testing import RunningKafka
from rationalizer import ClaimingPartition, encode
from tests.cli.harness import Command

pytestmark = [pytest.mark.broker, pytest.mark.slow]

HI = 2_000  # a client that connects again may be silent for two seconds

#: What must not be said of members that are at work.
WRONG = ("is gone", "evict", "start one", "Start its workers", "hung?", "held back")


class Workers:
    """Three members in threads of this process."""

    def __init__(self, bootstrap: str, log: str, group: str, topic: str) -> None:
        self._over = threading.Event()
        self.members = [
            Marshal(bootstrap, group_id=group, client_id=f"w{number}", heartbeat_interval=HI / 1000, topic=log)
            for number in range(3)
        ]
        self._threads = [threading.Thread(target=self._work, args=(each, topic)) for each in self.members]
        for thread in self._threads:
            thread.start()

    def _work(self, marshal: Marshal, topic: str) -> None:
        with marshal.consumer([topic]) as consumer:
            while not self._over.is_set():
                if (message := consumer.poll(0.2)) is not None:
                    consumer.done(message)

    def end(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(30)
        for member in self.members:
            member.close()


def test_a_broker_that_hangs_is_no_members_fault(
    kafka: Command,
    kafka_broker: RunningKafka,
    kafka_bootstrap: str,
    log_topic: str,
    topic_factory: Callable[..., str],
) -> None:
    assert kafka("init").status == 0
    kafka.before += ("--timeout", "2")
    workers = Workers(kafka_bootstrap, log_topic, f"g-{uuid.uuid4().hex[:6]}", topic_factory(6))
    try:
        while not (groups := kafka("status", "--json").json["groups"]) or groups[0]["held"] < 6:
            pass
        kafka_broker.pause()
        frozen = time.monotonic()
        try:
            while time.monotonic() - frozen < 6 * HI / 1000:
                assert kafka("check").status == 3
        finally:
            kafka_broker.resume()
        seen = []
        for _ in range(6):  # the first seconds
            seen += [kafka("check"), kafka("status"), kafka("status", "--members")]
        said = "\n".join(each.out + each.err for each in seen)
        assert [each for each in WRONG if each in said] == [], said
        while kafka("check").status:
            pass
    finally:
        workers.end()


def test_members_that_a_hanging_broker_silenced_are_one_line(
    kafka: Command,
    kafka_broker: RunningKafka,
    kafka_bootstrap: str,
    log_topic: str,
    topic_factory: Callable[..., str],
) -> None:
    """Just after the thaw, before any of them has written."""
    data, cluster = topic_factory(3), KafkaCluster(kafka_bootstrap, {})
    assert kafka("init", "--partitions", 1).status == 0
    kafka.before += ("--timeout", "2")
    appender = cluster.appender(log_topic, delivery_timeout_ms=10_000)
    try:
        for number in range(3):
            appender.append(0, encode(ClaimingPartition(f"h/{number}/1.0/x", f"w{number}", "g", data, number, HI)))
        assert appender.flush(10) == 0
    finally:
        appender.close()
    kafka_broker.pause()
    frozen = time.monotonic()
    try:
        while time.monotonic() - frozen < 3 * HI / 1000:
            assert kafka("check").status == 3
    finally:
        kafka_broker.resume()
    while (ran := kafka("check", "--json")).status == 3:  # it is still busy
        pass
    ((kind, amount, text),) = [(each["kind"], each["amount"], each["text"]) for each in ran.json["problems"]]
    assert (ran.status, kind, amount) == (1, "all_silent", 3)
    assert "Kafka answered this command within" in text
    assert [each for each in WRONG if each in text] == []
    states = {each["state"] for each in kafka("status", "--json").json["members"]}
    assert states == {"silent"}
