"""`check` and `status` while a broker hangs and just after: no member is called dead, and nothing to be evicted."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable

import pytest

from kafka_marshal import Marshal
from kafka_marshal.testing import RunningKafka
from tests.cli.harness import Command

pytestmark = [pytest.mark.broker, pytest.mark.slow]

HI = 1_000

#: What must not be said of members that are at work.
WRONG = ("is gone", "evict", "start one", "Start its workers", "hung?", "held back")


class Workers:
    """Three members in threads of this process."""

    def __init__(self, bootstrap: str, log: str, group: str, topic: str) -> None:
        self._over = threading.Event()
        self.members = [
            Marshal(
                bootstrap,
                group_id=group,
                client_id=f"w{number}",
                heartbeat_interval_ms=HI,
                topic=log,
            )
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
