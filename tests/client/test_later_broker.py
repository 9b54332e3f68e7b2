"""A message that waits for its time survives kill -9 of its worker, on a real broker."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from kafka_marshal import Admin
from tests.client.conftest import Worker, wait_until
from tests.client.running import Crew, publish

pytestmark = pytest.mark.broker

WAIT_S = 10.0


def test_the_next_owner_tries_it_at_its_time_after_kill_9(crew: Crew, tmp_path: Path) -> None:
    topic = crew.topic(1)
    publish(crew, topic, ["late", "late", "other"])
    admin = Admin(crew.bootstrap, topic=crew.coordination)

    def start(client_id: str) -> Worker:
        return Worker(crew, client_id, topic, tmp_path, "later_worker.py", in_memory_s=1.0, wait_s=WAIT_S)

    def tried(worker: Worker, key: str) -> list[int]:
        return [line["number"] for line in worker.lines() if line["key"] == key]

    first = start("a")
    wait_until(lambda: tried(first, "late") and tried(first, "other"), 30)
    (found,) = wait_until(lambda: [x for x in admin.open_messages(crew.group) if x.state == "later"], 30)
    asked_at = next(line["at"] for line in first.lines() if line["key"] == "late")
    assert (found.offset, found.delivery_count, found.key) == (0, 1, b"late")
    assert found.until is not None
    assert found.until / 1000 >= asked_at + WAIT_S - 0.1  # clocks of one machine, in two processes
    first.kill()
    assert (tried(first, "late"), tried(first, "other")) == ([1], [1])
    second = start("a")
    publish(crew, topic, ["more"])
    try:
        wait_until(lambda: tried(second, "more"), 30)
        wait_until(lambda: tried(second, "late") == [2, 1], 30)
        again_at = next(line["at"] for line in second.lines() if line["key"] == "late")
        assert again_at >= asked_at + WAIT_S
        (following,) = wait_until(lambda: [x for x in admin.open_messages(crew.group) if x.offset == 1], 30)
        assert (following.until or 0) / 1000 > time.time()
    finally:
        second.terminate()
