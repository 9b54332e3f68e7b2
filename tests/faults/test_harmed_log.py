"""A coordination topic damaged while members work, and a broker's clock that is set back: members report it."""

from __future__ import annotations

import logging
import time
from typing import Any

import pytest

from kafka_marshal import Group, Marshal
from kafka_marshal.adapters.memory import MemoryCluster
from kafka_marshal.errors import LogCutError
from kafka_marshal.node import jobs
from kafka_marshal.node.replica import Begin, Replica
from kafka_marshal.observe.view import View
from tests.client.conftest import wait_until
from tests.faults.stories import GROUP, TOPIC, answer, member, memory_cluster

LOG = "__marshal"


@pytest.fixture(params=["claimed", "coordinated"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def working(cluster: MemoryCluster, kind: str) -> tuple[Marshal, Any]:
    """A member that has handled everything."""
    marshal = member(cluster)
    consumer = (
        marshal.consumer([TOPIC]) if kind == "claimed" else marshal.consumer([TOPIC], mode=Group(session_timeout=1.5))
    )
    done = 0
    while done < 12:
        for message in consumer.consume(100, 0.1):
            consumer.done(message)
            done += 1
    return marshal, consumer


def told(caplog: pytest.LogCaptureFixture, event: str) -> list[int]:
    return [record.levelno for record in caplog.records if getattr(record, "event", "") == event]


def says(marshal: Marshal, text: str) -> bool:
    return any(text in problem for problem in marshal.health().problems)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "SHORTEST_MS", 100.0)
    monkeypatch.setattr(jobs, "SAVE_EVERY_MS", 100.0)


@pytest.mark.usefixtures("impatient")
def test_a_log_that_is_emptied_is_reported_and_the_positions_are_kept(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = memory_cluster()
    marshal, consumer = working(cluster, kind)
    assert not says(marshal, "harmed")
    cluster.broker.delete_records(LOG, 0, cluster.broker.existing[LOG].partitions[0].end)
    wait_until(lambda: says(marshal, "partition 0 was emptied up to offset"))
    wait_until(lambda: told(caplog, "topic_harmed") == [logging.ERROR])
    assert says(marshal, "import-group") and not marshal.health().needs_restart
    with pytest.raises(LogCutError, match="stop none of them"):
        Replica(cluster.connect("new"), LOG, 5, Begin.SNAPSHOT)
    wait_until(lambda: cluster.broker.committed.get(GROUP, {}).get((TOPIC, 1)) == (6, ""))
    cluster.broker.produce(TOPIC, 0, b"more")
    wait_until(lambda: [consumer.done(message) for message in consumer.consume(1, 0.1)])  # it works on
    wait_until(lambda: cluster.broker.committed[GROUP].get((TOPIC, 0)) == (7, ""), what="what is done is kept, too")
    answer("Marshal.close()", marshal.close)


@pytest.mark.usefixtures("impatient")
def test_a_retention_is_reported_and_so_is_its_end(caplog: pytest.LogCaptureFixture) -> None:
    cluster = memory_cluster()
    marshal, _ = working(cluster, "claimed")
    cluster.broker.alter_topic(LOG, {"retention.ms": "2000"})
    wait_until(lambda: says(marshal, "retention.ms is 2000"))
    cluster.broker.alter_topic(LOG, {"retention.ms": "-1"})
    wait_until(lambda: told(caplog, "topic_mended") == [logging.WARNING])
    assert told(caplog, "topic_harmed") == [logging.ERROR] and not says(marshal, "retention.ms")
    answer("Marshal.close()", marshal.close)


def test_a_clock_that_is_set_back_is_reported_with_its_step(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    cluster = memory_cluster()
    marshal, _ = working(cluster, kind)
    view = View(cluster.connect("check"), LOG, 5)
    view.catch_up(lambda read, there: None)
    cluster.broker.clock = lambda: int(1000 * (time.time() - 60))
    wait_until(lambda: says(marshal, "was set back by 6") or says(marshal, "was set back by 5"))
    assert not marshal.health().needs_restart
    view.follow(5.0, until=lambda: bool(view.notes_on_clocks()))  # as `check` does
    assert "was set back by" in "".join(view.notes_on_clocks())
    cluster.broker.clock = lambda: int(1000 * (time.time() + 1))
    wait_until(lambda: told(caplog, "clock_back") and not says(marshal, "was set back"))
    assert set(told(caplog, "clock_set_back")) == {logging.ERROR} and set(told(caplog, "clock_back")) == {
        logging.WARNING
    }
    view.follow(5.0, until=lambda: not view.notes_on_clocks())
    assert view.notes_on_clocks() == []
    view.replica.close()
    answer("Marshal.close()", marshal.close)
